# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The base class of action plugins that edit files on the controller and send the new texts to the node.

Unlike with ``observed_plan`` the module can't plan itself, because nodes lack the libraries that parse the files. The
plan contains a digest of each file's old text; the module refuses to replace a file that has changed since.
"""

from __future__ import annotations

import typing as t
from abc import abstractmethod

from ...module_utils._core.errors import ShareError
from ...module_utils._core.plan import Plan
from ...module_utils._core.types import JsonObject
from .base import ShareAction, untagged


class ControllerPlan(ShareAction):
    """Plans on the controller and executes the module of the same name, with the option ``plan``, only for a change.

    :cvar controller_options: options that the module doesn't get: it needs none of them, and some hold credentials.
    :ivar notices: warnings for the user.
    """

    controller_options: t.ClassVar[t.Sequence[str]] = ("observed",)
    notices: t.Sequence[str] = ()

    @abstractmethod
    def make_plan(self, params: JsonObject, task_vars: JsonObject | None) -> tuple[Plan, JsonObject]:
        """Return the plan and the value of the module's option ``plan``.

        :raises ShareError: the node or the options are invalid or unsupported; nothing is changed.
        """

    def apply(self, params: JsonObject, plan: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        """Execute the module and return its result.

        :param plan: the value of the module's option ``plan``.
        """
        arguments = {name: value for name, value in self._task.args.items() if name not in self.controller_options}
        return self.execute_module({**arguments, "plan": plan}, task_vars)

    def predict(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject | None:
        plan, module_plan = self.make_plan(untagged(params), task_vars)
        result: JsonObject = {"changed": not plan.empty, "diff": plan.diff(), "warnings": list(self.notices)}
        return {**result, "restarts": self.restarts(module_plan) if not plan.empty else []}

    def restarts(self, plan: JsonObject) -> list[str]:
        """Return what the module restarts for this plan.

        :param plan: the value of the module's option ``plan``.
        """
        return []

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        params = untagged(params)
        plan, module_plan = self.make_plan(params, task_vars)
        result: JsonObject = {"changed": not plan.empty, "diff": plan.diff()}
        if not plan.empty and not self._task.check_mode:
            try:
                result = {**result, **self.apply(params, module_plan, task_vars), "diff": result["diff"]}
            except ShareError as error:
                error.details = {**result, **error.details}
                raise
        if self.notices:
            result["warnings"] = [*result.get("warnings", []), *self.notices]
        return result
