# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import functools

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import GuardedAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import StatusLines, show


class ActionModule(GuardedAction):
    """Executes the module, and prints every ten seconds what it waits for."""

    def run(self, tmp: str | None = None, task_vars: JsonObject | None = None) -> JsonObject:
        result: JsonObject = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if self._task.check_mode or not boolean(arguments.get("wait"), strict=False):
            return {**result, **self._execute_module(module_args=arguments, task_vars=task_vars)}
        with StatusLines(functools.partial(show, self._display)) as path:
            done = self._execute_module(module_args={**arguments, "status_file": path}, task_vars=task_vars)
        return {**result, **done}
