# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._openshift_scheduler import (
    ARGUMENTS,
    NAMESPACE,
    Wish,
    make_plan,
    require_serving,
    users_policy,
)
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._handed_plan import HandedPlan, Json
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_config import Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_policy import merged, new_policy


class ActionModule(HandedPlan):
    """Merges the extender into the cluster's Policy on the controller, with the libraries that modules lack."""

    arguments = ARGUMENTS

    def make(self, params: Json, task_vars: Json | None) -> tuple[Plan, Json]:
        look = self._execute_module(module_args=dict(self._task.args), task_vars=task_vars)
        if look.get("failed"):
            raise BadInput(str(look.get("msg")))
        seen = look["observed"]
        present = params["state"] == "present"
        require_serving(seen, present)
        policy, text = "", None
        if present:
            name, text = users_policy(seen)
            extender = Extender(params["extender_url"], params["extender_timeout"], params["extender_preemption"])
            there = f"ConfigMap {NAMESPACE}/{name}"
            policy = new_policy(extender) if text is None else merged(there, text, extender)
        plan = make_plan(Wish(policy, params["config_map"]), seen)
        return plan, {"policy": policy, "base": text}
