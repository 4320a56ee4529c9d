# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The base class of the collection's action plugins: validated options, errors as results, files for the node."""

from __future__ import annotations

import json
import os
import typing as t
from abc import abstractmethod
from contextlib import contextmanager

from ansible.plugins.action import ActionBase

from ...module_utils._core.errors import ShareError
from ...module_utils._core.types import JsonObject
from . import node_results
from .results import clean_result


def untagged(value: t.Any) -> t.Any:
    """Return a copy without the tags of Ansible's values, which the libraries for configuration files don't support."""
    return json.loads(json.dumps(value))


class GuardedAction(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """Every action of the collection: none runs where a machine's facts may have been variables of its task."""

    def run(self, tmp: str | None = None, task_vars: JsonObject | None = None) -> JsonObject:
        node_results.require()
        result: JsonObject = super().run(tmp, task_vars)
        return result


class ShareAction(GuardedAction):
    """Runs ``ensure`` with the validated options and turns its ``ShareError`` into a failed result.

    :cvar arguments: the module's argument_spec.
    :cvar rules: ``required_if`` and the like, as keywords of AnsibleModule.
    """

    arguments: t.ClassVar[JsonObject]
    rules: t.ClassVar[JsonObject] = {}

    @abstractmethod
    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        """Return the task's result.

        :param params: the task's options, validated and with the defaults filled in.
        :raises ShareError: the task fails with this message.
        """

    def predict(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject | None:
        """Return the task's result in check mode without executing anything; None where that can't be known here.

        The roles' plan calls it. ``ensure`` takes its "nothing to do" from the same functions.

        :param params: the task's options, validated and with the defaults filled in.
        :raises ShareError: the node or the options are invalid or unsupported.
        """
        return None

    def run(self, tmp: str | None = None, task_vars: JsonObject | None = None) -> JsonObject:
        result: JsonObject = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=self.arguments, **self.rules)
        try:
            result.update(self.ensure(params, task_vars))
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        return clean_result(result)

    def execute_module(self, arguments: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        """Execute the module of the same name."""
        done: JsonObject = self._execute_module(module_args=arguments, task_vars=task_vars)
        return done

    @contextmanager
    def temporary_folder(self) -> t.Iterator[str]:
        """Make a temporary folder on the node, and remove it at the end.

        Without pipelining it is the one of the module's former execution: ansible-core removes only the folder that was
        made last.
        """
        folder = self._connection._shell.tmpdir or self._make_tmp_path()
        try:
            yield folder
        finally:
            self._remove_tmp_path(folder)

    def execute_with_files(
        self,
        paths: t.Sequence[str],
        arguments: t.Callable[[str, t.Sequence[str]], JsonObject],
        task_vars: JsonObject | None,
    ) -> JsonObject:
        """Copy files to a temporary folder of the node, execute the module and remove the folder.

        :param paths: the files on the controller; each keeps its name.
        :param arguments: returns the module's arguments from the folder and the paths of the copies.
        """
        with self.temporary_folder() as folder:
            copies = [self._connection._shell.join_path(folder, os.path.basename(path)) for path in paths]
            for path, copy in zip(paths, copies, strict=True):
                self._transfer_file(path, copy)
            self._fixup_perms2((folder, *copies))
            return self.execute_module(arguments(folder, copies), task_vars)
