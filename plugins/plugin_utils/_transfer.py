# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Files of the controller that a module needs on the node: there for its one execution, gone whatever happens."""

from __future__ import annotations

import os
import typing as t

from ansible.plugins.action import ActionBase

Json = dict[str, t.Any]


class Transferring(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """An action plugin that can execute its module with files that lie in a temporary folder of the node."""

    def execute_with_files(
        self,
        paths: t.Sequence[str],
        arguments: t.Callable[[str, t.Sequence[str]], Json],
        task_vars: Json | None,
    ) -> Json:
        """Transfer the files, execute the module, remove the folder.

        :param paths: the files on the controller; each keeps its name.
        :param arguments: the module's arguments, given the folder and the files' paths there.
        """
        try:
            folder = self._make_tmp_path()
            there = [self._connection._shell.join_path(folder, os.path.basename(path)) for path in paths]
            for path, remote in zip(paths, there, strict=True):
                self._transfer_file(path, remote)
            self._fixup_perms2((folder, *there))
            done: Json = self._execute_module(module_args=arguments(folder, there), task_vars=task_vars)
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)
        return done
