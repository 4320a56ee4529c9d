# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""List what a run of site.yml fetches for this inventory, from variables, the machines' facts and the cluster."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._report import outcome
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import formats
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import needed

ARGUMENTS: JsonObject = {
    **needed.ARGUMENTS,
    "format": {"type": "str", "choices": list(formats.TAKES), "default": formats.YAML},
    "output": {"type": "path"},
}


class ActionModule(ShareAction):
    """Prints the list, or writes it to a file of the controller."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        found = needed.need(self, params, task_vars or {})
        text = formats.text(params["format"], found.items, found.inventory)
        result: JsonObject = {"changed": False, "totals": formats.totals(found.items), "count": len(found.items)}
        if found.refused:
            result["refused"] = found.refused
        if not params["output"]:
            show(self._display, text.rstrip("\n"))
            return result
        planned = outcome.plan([outcome.Target("output", params["output"], text, 0o644)])
        result["changed"] = any(file.changed for file in planned)
        result["diff"] = [file.diff() for file in planned if file.changed]
        if not self._task.check_mode:
            outcome.write(planned)
            show(self._display, f"{len(found.items)} items are listed in {params['output']}.")
        return result
