# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The base of action plugins that edit files on the controller and hand the finished texts to the node.

Unlike ``_planned_action`` the module can't plan for itself: a node lacks the libraries that understand the files. It is
told which text each file had when the plan was made, and refuses where that isn't so any more.
"""

from __future__ import annotations

import json
import typing as t
from abc import abstractmethod

from ansible.plugins.action import ActionBase
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan

Json = dict[str, t.Any]


class HandedPlan(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """Plans from ``observed`` and executes the module of the same name, with the option ``plan``, only on drift."""

    arguments: t.ClassVar[Json]
    # Options that stay on the controller: the module has no use for them, or they may hold credentials.
    only_here: t.ClassVar[t.Sequence[str]] = ("observed",)
    # What ``make`` wants the user to know though it stops nothing.
    notices: t.Sequence[str] = ()

    @abstractmethod
    def make(self, params: Json, task_vars: Json | None) -> tuple[Plan, Json]:
        """The plan and what the module needs to carry it out.

        :raises ShareError: the machine or the input can't be served; the task fails and nothing is touched.
        """

    def carry_out(self, params: Json, handed: Json, task_vars: Json | None) -> Json:
        """Execute the module; what it returned."""
        arguments = {name: value for name, value in self._task.args.items() if name not in self.only_here}
        done: Json = self._execute_module(module_args={**arguments, "plan": handed}, task_vars=task_vars)
        return done

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=self.arguments)
        # Ansible's values carry tags, with which YAML doesn't know what to do.
        params = json.loads(json.dumps(params))
        try:
            plan, handed = self.make(params, task_vars)
            result.update(changed=not plan.empty, diff=plan.diff())
            if not plan.empty and not self._task.check_mode:
                result.update(self.carry_out(params, handed, task_vars))
                result["diff"] = plan.diff()
            if self.notices:
                result["warnings"] = [*result.get("warnings", []), *self.notices]
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        return result
