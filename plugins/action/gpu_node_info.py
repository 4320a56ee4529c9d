# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
import typing as t

from ansible.errors import AnsibleError
from ansible.module_utils import basic
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.release import __version__ as core
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import python_probe
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import GuardedAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.results import clean_result

# ansible-core's message where Python is too old for it; even older ones fail on its syntax, or on this collection's.
TOO_OLD = re.compile(r"requires (?:a minimum of )?Python (?:version )?([\d.]*\d)")
SYNTAX = re.compile(r"SyntaxError|'type' object is not subscriptable")
NOT_FOUND = re.compile(r"interpreter .* was not found|python\S*: (?:No such file or directory|(?:command )?not found)")

# Options that the module doesn't get.
OWN = ("report_trouble", "control_plane", "patches_dir")

# In a reason in the words of others.
MOST_CHARACTERS = 300


class ActionModule(GuardedAction):
    """Executes the module; where the node's Python can't run it, the error names the Python to install."""

    def run(self, tmp: str | None = None, task_vars: JsonObject | None = None) -> JsonObject:
        result: JsonObject = super().run(tmp, task_vars)
        host = str((task_vars or {}).get("inventory_hostname", "localhost"))
        if not boolean(self._task.args.get("report_trouble", False)):
            return clean_result({**result, **self._collect(host, task_vars)})
        try:
            done = self._collect(host, task_vars)
        except AnsibleError as error:
            done = {"failed": True, "msg": str(error)}
        trouble = self._trouble(done)
        return clean_result({**result, "changed": False, "trouble": trouble} if trouble else {**result, **done})

    def _collect(self, host: str, task_vars: JsonObject | None) -> JsonObject:
        name, arguments = module_of(self._task.args)
        done: JsonObject = self._execute_module(module_name=name, module_args=arguments, task_vars=task_vars)
        # This action's own; preflight takes it from the result.
        done.pop("trouble", None)
        output = " ".join(str(done.get(name, "")) for name in ("msg", "module_stdout", "module_stderr"))
        if done.get("failed") and (TOO_OLD.search(output) or NOT_FOUND.search(output) or SYNTAX.search(output)):
            message = self._message(output, host)
            if message:
                return {"failed": True, "msg": message}
        # Without facts a machine would count as one that nobody asked.
        if done.get("gpu_node") is None and not done.get("failed"):
            return {**done, "failed": True, "msg": f"the machine's answer to {name} has no facts"}
        return done

    def _trouble(self, done: JsonObject) -> JsonObject | None:
        """Ask the machine, step by step, why there are no facts, or not all; return None where there are."""
        as_user = done.get("user")
        if as_user and as_user["uid"]:
            return {"id": "not-root", "user": as_user["name"], "reason": ""}
        if not done.get("failed"):
            return None
        reason = str(done.get("msg", ""))
        try:
            asked = self._low_level_execute_command("id -un", sudoable=False)
        except AnsibleError as error:
            user = str(self._get_remote_user() or "")
            return {"id": "unreachable", "user": user, "reason": line(error, MOST_CHARACTERS)}
        name = str(asked.get("stdout", "")).strip()
        refused = self._refused_root() if self._connection.become is not None else ""
        if refused:
            return {"id": "no-escalation", "user": name, "reason": line(refused, MOST_CHARACTERS)}
        return {"id": "no-facts", "user": name, "reason": line(reason, MOST_CHARACTERS)}

    def _refused_root(self) -> str:
        """Return why the user can't become root; empty where it can."""
        try:
            answer = self._low_level_execute_command("id -u")
        except AnsibleError as error:
            return str(error)
        if str(answer.get("stdout", "")).strip() == "0":
            return ""
        return str(answer.get("stderr", "")) or "not root"

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


def module_of(args: t.Mapping[str, t.Any]) -> tuple[str, JsonObject]:
    """Return the module to execute and its options: on a control plane one module collects both kinds of facts.

    :param args: the task's options.
    """
    node = {name: value for name, value in args.items() if name not in OWN}
    if not boolean(args.get("control_plane", False)):
        return "kubegpu.share.gpu_node_info", node
    return "kubegpu.share.control_plane_info", {"patches_dir": args.get("patches_dir"), "node": node}
