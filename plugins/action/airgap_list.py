# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""List what a run of site.yml fetches for this inventory, from variables, the machines' facts and the cluster."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line
from ansible_collections.kubegpu.share.plugins.module_utils._report import outcome
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import formats, inventory, table
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import needed
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.engine import Planner

ARGUMENTS: JsonObject = {
    "gpu_nodes": {"type": "list", "elements": "str", "required": True},
    "cluster": {"type": "dict"},
    "kubernetes": {"type": "str", "default": ""},
    "format": {"type": "str", "choices": list(formats.TAKES), "default": formats.YAML},
    "output": {"type": "path"},
}


class ActionModule(ShareAction):
    """Prints the list, or writes it to a file of the controller."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        hostvars = (task_vars or {})["hostvars"]
        planner = Planner(self, task_vars or {})
        choices = untagged({name: planner.validate(name)["driver_choice"] for name in params["gpu_nodes"]})
        known = inventory.inventory(hostvars, choices, untagged(params["cluster"] or {}), params["kubernetes"])
        items = needed(table.listed(), known)
        text = formats.text(params["format"], items, known)
        result: JsonObject = {"changed": False, "totals": formats.totals(items), "count": len(items)}
        for host, choice in choices.items():
            if choice["refusals"]:
                refused = line(" ".join(choice["refusals"]))
                show(self._display, f"What role driver refuses may be missing from the list: {refused}", stderr=True)
                result.setdefault("refused", []).append(host)
        if not params["output"]:
            show(self._display, text.rstrip("\n"))
            return result
        planned = outcome.plan([outcome.Target("output", params["output"], text, 0o644)])
        result["changed"] = any(file.changed for file in planned)
        result["diff"] = [file.diff() for file in planned if file.changed]
        if not self._task.check_mode:
            outcome.write(planned)
            show(self._display, f"{len(items)} things are listed in {params['output']}.")
        return result
