# SPDX-License-Identifier: GPL-3.0-or-later
"""Count the modules that a run executes on each host.

Every action plugin executes modules by ``ActionBase._execute_module``; a task whose action executes none (assert,
set_fact, a skipped one) doesn't call it. It runs in worker processes, which are forked from the process that loads this
callback, so each execution is appended as one line to a file.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: count_executions
type: aggregate
short_description: Counts module executions per host
description:
  - Appends a JSON line per module execution, then one with the sums and the number of tasks, to the
    file that C(COUNT_EXECUTIONS_FILE) names.
"""

VARIABLE = "COUNT_EXECUTIONS_FILE"


def append(record: dict[str, Any]) -> None:
    """Append one line by one write, so that lines of several workers never mix."""
    handle = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, (json.dumps(record) + "\n").encode())
    finally:
        os.close(handle)


def counted(execute: Any) -> Any:
    """Wrap ``_execute_module`` so that it records each execution first."""

    @functools.wraps(execute)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = kwargs.get("module_name") or (args[0] if args else None) or self._task.action
        host = self._task.delegate_to or self._templar.available_variables.get("inventory_hostname", "")
        append({"host": host, "module": module, "task": self._task.get_name()})
        return execute(self, *args, **kwargs)

    return wrapper


class CallbackModule(CallbackBase):  # type: ignore[misc]
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "count_executions"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if VARIABLE not in os.environ:
            self.disabled = True
            return
        self._tasks = 0
        ActionBase._execute_module = counted(ActionBase._execute_module)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self._tasks += 1

    def v2_playbook_on_stats(self, stats: Any) -> None:
        append({"stats": {host: stats.summarize(host) for host in stats.processed}, "tasks": self._tasks})
