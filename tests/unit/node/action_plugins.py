# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugins on a mocked connection, and the modules that they execute."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.play_context import PlayContext
from ansible.playbook.task import Task
from ansible.plugins.action import ActionBase
from ansible.template import Templar


def load(
    plugin: ModuleType,
    args: dict[str, Any],
    check: bool = False,
    connection: Mock | None = None,
    tmpdir: str | None = "/tmp",
    plugins: Any = None,
) -> ActionBase:
    """Return the plugin's action for a task with these arguments.

    :param tmpdir: the directory that the connection's shell has already on the node.
    :param plugins: Ansible's loaders of plugins, where the action uses them.
    """
    if connection is None:
        connection = Mock()
        connection._shell.tmpdir = tmpdir
        connection._shell.join_path = lambda *parts: "/".join(parts)
    loader = DataLoader()
    task = Task.load({"name": "x", "ansible.builtin.ping": {}}, loader=loader)
    task.args, task.check_mode = dict(args), check
    return plugin.ActionModule(
        task=task,
        connection=connection,
        play_context=PlayContext(),
        loader=loader,
        templar=Templar(loader=loader),
        shared_loader_obj=plugins or Mock(),
    )


def act(
    plugin: ModuleType, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the plugin; return its result and the arguments of the modules that it executed, which report a change."""
    action, executed = load(plugin, args), []
    monkeypatch.setattr(
        action, "_execute_module", lambda module_args, task_vars: executed.append(module_args) or {"changed": True}
    )
    monkeypatch.setattr(action, "_remove_tmp_path", lambda *_arguments: None)
    return action.run(task_vars={}), executed
