# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a machine's module returns is data: no variable, of the types that the module promises, with printable texts.

By default (``INJECT_FACTS_AS_VARS``) ansible-core makes a variable of each key of ``ansible_facts`` in any module's
result. It outranks the inventory's variables, and comes back from the fact cache in later runs. So a machine that was
taken could set ``gpu_kubeconfig`` for the tasks on the controller.

``enforce`` switches that off for the whole process. ``plugins/action/__init__.py`` and ``roles/__init__.py`` call it:
ansible-core imports these packages when it reads a task with a name of the collection and when it loads a role, before
the first of these tasks has its variables. The processes of tasks inherit it. ``require`` fails a task without it.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import typing as t

from ansible import constants
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as core
from ansible.utils.display import Display

from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import lines
from .results import clean_answer, clean_result, clean_sentences

COLLECTION = "kubegpu.share"
SETTING = "INJECT_FACTS_AS_VARS"
# By release of ansible-core, the modules that have read the setting into a name of their own.
RELEASES: t.Mapping[str, tuple[str, ...]] = {
    "2.19": (),
    "2.20": ("ansible.executor.task_executor",),
    "2.21": ("ansible.vars.manager", "ansible.executor.task_executor"),
}
COPY = "_INJECT_FACTS"
# Keys of a result from which ansible-core makes variables: of this run, of the fact cache, and of AWX's next job.
VARIABLES = ("ansible_facts", "ansible_stats")
# ansible-core removes these from modules' results itself, and then adds its own.
INTERPRETERS = ("discovered_interpreter_", "ansible_discovered_interpreter_")

Execute = t.Callable[..., JsonObject]


class _State:
    """:cvar given: the user has switched it off. :cvar process: the process in which ``enforce`` was called."""

    given: t.ClassVar[bool] = False
    process: t.ClassVar[int | None] = None


def enforce() -> None:
    """Switch off for this process, and those that it starts for tasks, that facts become variables."""
    if _State.process is not None:
        return
    _State.process = os.getpid()
    _State.given = not constants.config.get_config_value(SETTING)
    # Installed whatever the setting: stats become variables with it off, too.
    ActionBase._execute_module = _bounded(ActionBase._execute_module)
    ActionBase._parse_returned_data = _printable(ActionBase._parse_returned_data)
    if _State.given or _release() not in RELEASES:
        return
    # Without its sources in files and the environment; ansible-core 2.20 asks for it again for each host and task.
    constants.config.get_configuration_definitions()[SETTING] = {"default": False, "type": "boolean"}
    setattr(constants, SETTING, False)
    for name in RELEASES[_release()]:
        # One that is imported later reads the changed setting.
        if name in sys.modules:
            setattr(sys.modules[name], COPY, False)


def require() -> None:
    """Fail the task unless facts were no variables when its own were made.

    :raises AnsibleError: they may have been.
    """
    if _State.given:
        return
    # In the process of a task it would be too late.
    late = _State.process is None or (_State.process == os.getpid() and multiprocessing.parent_process() is not None)
    if late or not _is_off():
        raise AnsibleError(
            f"What machines return could become variables on the controller, and {COLLECTION} can't prevent it with "
            f"ansible-core {core} as it runs here: set inject_facts_as_vars = False in section [defaults] of "
            "ansible.cfg, or ANSIBLE_INJECT_FACT_VARS=False in the environment."
        )


def _release() -> str:
    return ".".join(core.split(".")[:2])


def _is_off() -> bool:
    """Return whether each place that the release is known to read says so."""
    if _release() not in RELEASES or constants.config.get_config_value(SETTING) or getattr(constants, SETTING, True):
        return False
    return not any(getattr(importlib.import_module(name), COPY, True) for name in RELEASES[_release()])


def _bounded(execute: Execute) -> Execute:
    """Return ``ActionBase._execute_module``, by which each module's result comes, with this file's promises.

    It changes the results of this collection's modules and of the tasks of its roles only.
    """

    @functools.wraps(execute)
    def bounded(self: ActionBase, *words: t.Any, **options: t.Any) -> JsonObject:
        done = execute(self, *words, **options)
        name = str(options.get("module_name") or (words[0] if words else None) or self._task.action)
        if not (name.startswith(f"{COLLECTION}.") or _is_ours(self._task)):
            return done
        _drop_variables(done, name)
        if name.startswith(f"{COLLECTION}."):
            from . import observations

            problem = observations.problem(name.rpartition(".")[2], done)
            if problem:
                return {"failed": True, "changed": bool(done.get("changed")), "msg": problem}
        return done

    return bounded


def _printable(parse: Execute) -> Execute:
    """Return ``ActionBase._parse_returned_data``, which also takes a result's warnings, with printable texts.

    Of other collections' modules in the roles only the messages: the rest may be a user's bytes.
    """

    @functools.wraps(parse)
    def printable(self: ActionBase, answer: JsonObject, *more: t.Any) -> JsonObject:
        own = str(self._task.action).startswith(f"{COLLECTION}.")
        if own or _is_ours(self._task):
            said = clean_answer(str(answer.get("stdout", "")), clean_result if own else clean_sentences)
            # Without a result on stdout, ansible-core's error has both.
            answer = {**answer, "stdout": said, "stderr": lines(answer.get("stderr", ""))}
        return parse(self, answer, *more)

    return printable


def _is_ours(task: t.Any) -> bool:
    role = getattr(task, "_role", None)
    return getattr(role, "_role_collection", None) == COLLECTION


def _drop_variables(done: JsonObject, name: str) -> None:
    """Drop what would become variables from a result; no module of the roles' tasks returns any."""
    facts = done.get("ansible_facts")
    kept = {key: facts[key] for key in facts if key.startswith(INTERPRETERS)} if isinstance(facts, dict) else {}
    if any(key in done and done[key] != (kept if key == "ansible_facts" else None) for key in VARIABLES):
        Display().warning(f"{name} returned variables, which it doesn't: they are ignored, and the machine is suspect.")
    for key in VARIABLES:
        done.pop(key, None)
    if kept:
        done["ansible_facts"] = kept
