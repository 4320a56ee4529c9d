# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.handler import ARGUMENTS, handler_of
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.handler_plan import make_plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import ControllerPlan


class ActionModule(ControllerPlan):
    """Edit the files of a node's containerd on the controller."""

    arguments = ARGUMENTS

    def make_plan(self, params: JsonObject, task_vars: JsonObject | None) -> tuple[Plan, JsonObject]:
        observed = params["observed"]
        if not observed or "runtimes" not in observed:
            raise BadInput("observed: it isn't a result of gpu_node_info")
        present = params["state"] == "present"
        planned = make_plan(handler_of(params), present, observed["runtimes"].get("containerd"))
        return planned.plan, {"files": list(planned.files)}

    def restarts(self, plan: JsonObject) -> list[str]:
        return ["containerd"]
