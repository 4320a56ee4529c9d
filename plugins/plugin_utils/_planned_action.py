# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The one base of action plugins that spare a node a module execution.

A role has already looked at the node once (``gpu_node_info``) and hands that observation to the task as ``observed``.
The action plugin makes the module's own plan from it, here on the controller. Nothing to do: the task ends without
touching the node. Something to do (or no observation given): the module runs on the node, where it looks for itself
again, so that an observation is only ever trusted for "nothing to do" and never for what to change.

A subclass is a few lines in ``plugins/action/<module>.py``, beside a module of the same name, which documents the
option ``observed`` (a dict, ignored on the node)::

    class ActionModule(PlannedAction):
        arguments = ARGUMENTS                  # the module's argument_spec, from its module_utils file
        sections = ("nouveau", "kernel")       # what of gpu_node the plan reads

        def plan(self, params, observed):
            return make_plan(params, observed)  # the very function that the module plans with; pure

``required_if`` and its like, where the module has them, go into ``rules`` (the keywords of AnsibleModule).
"""

from __future__ import annotations

import typing as t
from abc import abstractmethod

from ansible.plugins.action import ActionBase
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan

Json = dict[str, t.Any]


class PlannedAction(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """Plans from ``observed`` on the controller and executes the module of the same name only on drift."""

    arguments: t.ClassVar[Json]
    sections: t.ClassVar[tuple[str, ...]]
    rules: t.ClassVar[Json] = {}

    @abstractmethod
    def plan(self, params: Json, observed: Json) -> Plan:
        """The module's plan.

        :param params: the task's arguments, validated and with the defaults filled in.
        :param observed: the observation; it has every section that ``sections`` names.
        :raises ShareError: the node or the input can't be served; the task fails and nothing is touched.
        """

    def unchanged(self, params: Json, observed: Json) -> Json:
        """What the module would return beside ``changed`` and ``diff`` when there is nothing to do."""
        return {}

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=self.arguments, **self.rules)
        observed = params.get("observed")
        if observed and all(section in observed for section in self.sections):
            try:
                plan = self.plan(params, observed)
                if plan.empty:
                    result.update(self.unchanged(params, observed), changed=False, diff=[])
                    return result
            except ShareError as error:
                result.update(error.details, failed=True, msg=str(error))
                return result
        # The node needn't be sent what it will see for itself.
        arguments = {name: value for name, value in self._task.args.items() if name != "observed"}
        result.update(self._execute_module(module_args=arguments, task_vars=task_vars))
        return result
