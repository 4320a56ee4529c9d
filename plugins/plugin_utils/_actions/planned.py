# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The base classes of action plugins that plan on the controller, from what the node's facts say.

With ``ControllerPlan`` the module can't plan itself, because nodes lack the libraries that parse the files. The plan
contains a digest of each file's old text; the module refuses to replace a file that has changed since.

With ``PlannedAction`` it can. ``gpu_node_info`` has already observed the node; the role passes the result to the task
as ``observed``. The action plugin makes the module's own plan from it on the controller. If the plan is empty, the task
ends without connecting to the node. Otherwise, or without an observation, the module runs on the node and observes it
again: an observation is trusted for "nothing to do" only, never for what to change.

A subclass stands in ``plugins/action/<module>.py``, beside a module of the same name that documents the option
``observed`` (a dict, ignored on the node)::

    class ActionModule(PlannedAction):
        arguments = ARGUMENTS                  # the module's argument_spec, from its module_utils file
        sections = ("nouveau", "kernel")       # the sections of gpu_node that the plan reads

        def plan(self, params, observed):
            return make_plan(params, observed)  # the pure function with which the module plans, too

A module that needs files of the controller on the node returns their paths from ``files``; ``folder_option`` names its
option for the folder that holds the copies. The files are copied only for a change, never in check mode.
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


class PlannedAction(ShareAction):
    """Plans from ``observed`` on the controller and executes the module of the same name only for a change.

    :cvar sections: the sections of ``observed`` that ``plan`` reads; the module runs if one is missing.
    :cvar folder_option: the module's option for the temporary folder with ``files``; not for users.
    """

    sections: t.ClassVar[tuple[str, ...]]
    folder_option: t.ClassVar[str] = ""

    @abstractmethod
    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        """Return the module's plan.

        :param observed: the observation, with all of ``sections``.
        :raises ShareError: the node or the options are invalid or unsupported; nothing is changed.
        """

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        """Return what the module returns beside ``changed`` and ``diff`` in check mode or if nothing is to do."""
        return {}

    def files(self, params: JsonObject) -> list[str]:
        """Return the files of the controller that the module needs on the node for a change.

        :raises ShareError: a file is missing or unreadable; nothing is changed.
        """
        return []

    def predict(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject | None:
        observed: JsonObject = params.get("observed") or {}
        if not observed or not all(section in observed for section in self.sections):
            return None
        plan = self.plan(params, observed)
        return {**self.unchanged(params, observed), "changed": not plan.empty, "diff": plan.diff()}

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        predicted = self.predict(params, task_vars)
        if predicted is not None and not predicted["changed"]:
            return predicted
        paths = self.files(params)
        # The module observes the node itself.
        arguments = {name: value for name, value in self._task.args.items() if name != "observed"}
        if not paths or self._task.check_mode:
            return self.execute_module(arguments, task_vars)
        if predicted is None:
            # The files may be large: find out first whether they are needed.
            predicted = self._predict(arguments, task_vars)
            if predicted.get("failed") or not predicted.get("changed"):
                return predicted
        return self.execute_with_files(
            paths, lambda folder, _copies: {**arguments, self.folder_option: folder}, task_vars
        )

    def _predict(self, arguments: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        """Execute the module in check mode."""
        self._task.check_mode = True
        try:
            return self.execute_module(arguments, task_vars)
        finally:
            self._task.check_mode = False
