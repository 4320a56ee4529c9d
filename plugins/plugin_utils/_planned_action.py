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

A module that needs files of the controller on the node says which (``files``) and by which of its options it is told
the folder that holds them there (``folder_option``). They travel on drift alone, never in check mode, and go after it.
"""

from __future__ import annotations

import typing as t
from abc import abstractmethod

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._transfer import Transferring

Json = dict[str, t.Any]


class PlannedAction(Transferring):
    """Plans from ``observed`` on the controller and executes the module of the same name only on drift."""

    arguments: t.ClassVar[Json]
    sections: t.ClassVar[tuple[str, ...]]
    rules: t.ClassVar[Json] = {}
    # The module's option that names the temporary folder with ``files``; never a user's to set with them.
    folder_option: t.ClassVar[str] = ""

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

    def files(self, params: Json) -> list[str]:
        """Files of the controller that the module needs on the node when there is something to do.

        :raises ShareError: they can't be had; the task fails and nothing is touched.
        """
        return []

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=self.arguments, **self.rules)
        observed = params.get("observed")
        planned = bool(observed) and all(section in observed for section in self.sections)
        if planned:
            try:
                plan = self.plan(params, observed)
                if plan.empty:
                    result.update(self.unchanged(params, observed), changed=False, diff=[])
                    return result
            except ShareError as error:
                result.update(error.details, failed=True, msg=str(error))
                return result
        try:
            paths = self.files(params)
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
            return result
        result.update(self._execute(paths, planned, task_vars))
        return result

    def _execute(self, paths: list[str], planned: bool, task_vars: Json | None) -> Json:
        """Execute the module, with the files where there are any."""
        # The node needn't be sent what it will see for itself.
        arguments = {name: value for name, value in self._task.args.items() if name != "observed"}
        if paths and not planned and not self._task.check_mode:
            # Nobody has looked yet, and the files may be large: look first.
            look = self._look(arguments, task_vars)
            if look.get("failed") or not look.get("changed"):
                return look
        if paths and not self._task.check_mode:
            return self.execute_with_files(
                paths, lambda folder, _there: {**arguments, self.folder_option: folder}, task_vars
            )
        done: Json = self._execute_module(module_args=arguments, task_vars=task_vars)
        return done

    def _look(self, arguments: Json, task_vars: Json | None) -> Json:
        """What the module would change."""
        self._task.check_mode = True
        try:
            look: Json = self._execute_module(module_args=arguments, task_vars=task_vars)
        finally:
            self._task.check_mode = False
        return look
