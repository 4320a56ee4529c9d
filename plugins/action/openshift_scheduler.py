# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import policy
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.scheduler import ARGUMENTS, SECONDARY
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.config import POLICY_FORM
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.extenders import Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import ControllerPlan


class ActionModule(ControllerPlan):
    """Merges the extender into the cluster's Policy on the controller, with libraries that the module lacks."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        if params["method"] == SECONDARY:
            # Nothing is merged, so the module plans by itself.
            return self.execute_module(dict(self._task.args), task_vars)
        return super().ensure(params, task_vars)

    def make_plan(self, params: JsonObject, task_vars: JsonObject | None) -> tuple[Plan, JsonObject]:
        answer = self.execute_module(dict(self._task.args), task_vars)
        if answer.get("failed"):
            raise BadInput(str(answer.get("msg")))
        state = answer["observed"]
        present = params["state"] == "present"
        policy.require_policy_support(state, present)
        merged, text = "", None
        if present:
            name, text = policy.require_users_policy(state)
            extender = Extender(params["extender_url"], params["extender_timeout"], params["extender_preemption"])
            path = f"ConfigMap {policy.NAMESPACE}/{name}"
            merged = (
                POLICY_FORM.new(None, {}, extender) if text is None else POLICY_FORM.merged(path, text, None, extender)
            )
        options = policy.Options(merged, params["config_map"] or policy.CONFIG_MAP)
        return policy.make_plan(options, state), {"policy": merged, "base": text}
