# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re

from ansible.module_utils import basic
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as core
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import python_probe

# ansible-core's message where Python is too old for it; even older ones fail on its syntax, or on this collection's.
TOO_OLD = re.compile(r"requires (?:a minimum of )?Python (?:version )?([\d.]*\d)")
SYNTAX = re.compile(r"SyntaxError|'type' object is not subscriptable")
NOT_FOUND = re.compile(r"interpreter .* was not found|python\S*: (?:No such file or directory|(?:command )?not found)")


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """Executes the module; where the node's Python can't run it, the error names the Python to install."""

    def run(self, tmp: str | None = None, task_vars: JsonObject | None = None) -> JsonObject:
        result: JsonObject = super().run(tmp, task_vars)
        done: JsonObject = self._execute_module(module_args=dict(self._task.args), task_vars=task_vars)
        output = " ".join(str(done.get(name, "")) for name in ("msg", "module_stdout", "module_stderr"))
        if done.get("failed") and (TOO_OLD.search(output) or NOT_FOUND.search(output) or SYNTAX.search(output)):
            message = self._message(output, str((task_vars or {}).get("inventory_hostname", "localhost")))
            if message:
                return {**result, "failed": True, "msg": message}
        return {**result, **done}

    def _message(self, output: str, host: str) -> str:
        """Return the error message; empty where the interpreter is new enough and the error has another cause."""
        interpreter = (self._used_interpreter or "").lstrip("#!").strip() or "/usr/bin/python3"
        answer = self._low_level_execute_command(python_probe.question(interpreter), sudoable=False)
        node = python_probe.node(str(answer.get("stdout", "")))
        needed = TOO_OLD.search(output)
        least = max(python_probe.numbers(needed.group(1)) if needed else basic._PY_MIN, python_probe.FLOOR)
        if node.version and python_probe.numbers(node.version) >= least:
            return ""
        return python_probe.message(host, interpreter, node, least, core=".".join(core.split(".")[:2]))
