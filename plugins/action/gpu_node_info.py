# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
import typing as t

from ansible.module_utils import basic
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as core
from ansible_collections.kubegpu.share.plugins.plugin_utils import _old_python

Json = dict[str, t.Any]

# ansible-core's own words where Python runs its module and is too old; anything older stumbles over its syntax.
TOO_OLD = re.compile(r"requires (?:a minimum of )?Python (?:version )?([\d.]*\d)")
SYNTAX = "SyntaxError"
NOT_FOUND = re.compile(r"interpreter .* was not found|python\S*: (?:No such file or directory|(?:command )?not found)")


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """Executes the module, and says in one sentence what to do where the node's Python can't run it."""

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        done: Json = self._execute_module(module_args=dict(self._task.args), task_vars=task_vars)
        words = " ".join(str(done.get(name, "")) for name in ("msg", "module_stdout", "module_stderr"))
        if done.get("failed") and (TOO_OLD.search(words) or NOT_FOUND.search(words) or SYNTAX in words):
            advice = self._advice(words, str((task_vars or {}).get("inventory_hostname", "localhost")))
            if advice:
                return {**result, "failed": True, "msg": advice}
        return {**result, **done}

    def _advice(self, words: str, host: str) -> str:
        """The sentence; empty where the interpreter is new enough and the fault another."""
        interpreter = (self._used_interpreter or "").lstrip("#!").strip() or "/usr/bin/python3"
        answer = self._low_level_execute_command(_old_python.question(interpreter), sudoable=False)
        seen = _old_python.node(str(answer.get("stdout", "")))
        told = TOO_OLD.search(words)
        least: tuple[int, ...] = _old_python.numbers(told.group(1)) if told else basic._PY_MIN
        if seen.version and _old_python.numbers(seen.version) >= least:
            return ""
        return _old_python.sentence(host, interpreter, seen, least, core=".".join(core.split(".")[:2]))
