# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Resolve and mirror the packages that GPU nodes need, on a machine of their distribution."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import download, table
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.package_sets import facts_of, package_sets
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import needed

ARGUMENTS: JsonObject = {
    **needed.ARGUMENTS,
    "needed": {"type": "path"},
    "folder": {"type": "path", "required": True},
    "also": {"type": "list", "elements": "str", "default": []},
}


class ActionModule(ShareAction):
    """Gives the module the sets of all nodes; it takes those of its own distribution."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        if params["needed"]:
            listed = download.listed(params["needed"])
            sets = package_sets(table.listed(), listed.items, listed.machines)
        else:
            found = needed.need(self, params, task_vars or {})
            sets = package_sets(table.listed(), found.items, map(facts_of, found.inventory.machines))
        if not sets:
            return {"changed": False, "repositories": [], "count": 0, "left_out": []}
        for row in sets:
            row["packages"] += [name for name in params["also"] if name not in row["packages"]]
            # They are in a message only.
            row["hosts"] = row["hosts"][:5]
        return self.execute_module({"folder": params["folder"], "sets": sets}, task_vars)
