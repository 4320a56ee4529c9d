# SPDX-License-Identifier: GPL-3.0-or-later
"""Package files of the controller travel on drift alone, and are gone after the module's execution however it ends."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.task import Task
from ansible.template import Templar
from ansible_collections.kubegpu.share.plugins.action import apt_packages, rpm_packages
from ansible_collections.kubegpu.share.plugins.module_utils import _rpm

SET = {"name": "toolkit", "packages": ["a1=1"]}


class Node:
    """The node's end of an action plugin: what was executed, which files were there, what is left."""

    def __init__(self, plugin, args, monkeypatch, answers=(), check=False):
        loader = DataLoader()
        task = Task.load({"name": "x", "ansible.builtin.ping": {}}, loader=loader)
        task.args, task.check_mode = dict(args), check
        connection = Mock()
        connection._shell.tmpdir = None
        connection._shell.join_path = lambda *parts: "/".join(parts)
        self.action = plugin.ActionModule(
            task=task,
            connection=connection,
            play_context=Mock(),
            loader=loader,
            templar=Templar(loader=loader),
            shared_loader_obj=Mock(),
        )
        self.files, self.executed, self.answers = {}, [], list(answers)
        monkeypatch.setattr(self.action, "_make_tmp_path", self._make)
        monkeypatch.setattr(self.action, "_transfer_file", lambda here, there: self.files.update({there: here}))
        monkeypatch.setattr(self.action, "_fixup_perms2", lambda paths: None)
        monkeypatch.setattr(self.action, "_execute_module", self._execute)
        monkeypatch.setattr(self.action, "_remove_tmp_path", lambda _path: self.files.clear())

    def _make(self):
        self.action._connection._shell.tmpdir = "/tmp/t"
        return "/tmp/t"

    def _execute(self, module_args, task_vars):
        self.executed.append((self.action._task.check_mode, dict(module_args), sorted(self.files)))
        answer = self.answers.pop(0) if self.answers else {"changed": True}
        if isinstance(answer, BaseException):
            raise answer  # pylint: disable=raising-bad-type
        return answer

    def run(self):
        return self.action.run(task_vars={})


def rpm_seen(packages):
    rows = {name: {"version": version, "held": True, "origin": ""} for name, version in packages.items()}
    rpm = {"manager": "dnf5", "files": {}, "keys": {}, "imported": [], "locks": [], "lock_plugin": "enabled"}
    rpm.update({"streams": {}, "duplicates": [], "interrupted": False, "lock_path": _rpm.MANAGERS["dnf5"].lock_path})
    rpm["locks"] = [
        {"name": name, "version": version, "ours": True, "exclude": False} for name, version in packages.items()
    ]
    return {"rpm": rpm, "packages": rows}


def apt_seen(packages):
    rows = {name: {"version": version, "held": True} for name, version in packages.items()}
    apt = {"files": {}, "keys": {}, "sources": [], "interrupted": False, "unfinished": []}
    return {"apt": apt, "packages": rows}


KINDS = {"rpm": (rpm_packages, rpm_seen, ".rpm"), "apt": (apt_packages, apt_seen, ".deb")}


@pytest.fixture(params=KINDS)
def kind(request, tmp_path):
    plugin, seen, ending = KINDS[request.param]
    for name in (f"a1{ending}", f"b2{ending}", "README"):
        (tmp_path / name).write_text("x")
    return plugin, seen, {**SET, "source_dir": str(tmp_path)}, [f"/tmp/t/a1{ending}", f"/tmp/t/b2{ending}"]


def test_without_drift_nothing_travels(kind, monkeypatch):
    plugin, seen, args, _there = kind
    node = Node(plugin, {**args, "observed": seen({"a1": "1"})}, monkeypatch)
    assert node.run()["changed"] is False and node.executed == []


def test_on_drift_all_files_are_there_for_one_execution(kind, monkeypatch):
    plugin, seen, args, there = kind
    node = Node(plugin, {**args, "observed": seen({})}, monkeypatch)
    assert node.run()["changed"] is True
    assert node.executed == [(False, {**args, "node_dir": "/tmp/t"}, there)] and node.files == {}


def test_they_go_also_when_the_execution_ends_badly(kind, monkeypatch):
    plugin, seen, args, _there = kind
    node = Node(plugin, {**args, "observed": seen({})}, monkeypatch, [OSError("connection lost")])
    with pytest.raises(OSError, match="connection lost"):
        node.run()
    assert node.files == {}


def test_check_mode_moves_nothing(kind, monkeypatch):
    plugin, seen, args, _there = kind
    node = Node(plugin, {**args, "observed": seen({})}, monkeypatch, check=True)
    assert node.run()["changed"] is True and node.executed == [(True, args, [])]


def test_without_an_observation_the_module_looks_before_anything_travels(kind, monkeypatch):
    plugin, _seen, args, there = kind
    node = Node(plugin, args, monkeypatch, [{"changed": False}])
    assert node.run()["changed"] is False and node.executed == [(True, args, [])]
    node = Node(plugin, args, monkeypatch, [{"changed": True}, {"changed": True}])
    node.run()
    assert [(one[0], one[2]) for one in node.executed] == [(True, []), (False, there)]
    assert node.action._task.check_mode is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_dir": "/nowhere"}, "source_dir: /nowhere can't be read on the controller"),
        ({"source_dir": "/proc/self/fd"}, "holds no ."),
        ({"node_dir": "/x"}, "source_dir: node_dir is set too"),
    ],
)
def test_folder_that_can_not_serve_fails_before_the_node_is_touched(kind, changes, words, monkeypatch):
    plugin, seen, args, _there = kind
    node = Node(plugin, {**args, **changes, "observed": seen({})}, monkeypatch)
    result = node.run()
    assert result["failed"] and words in result["msg"] and node.executed == []


def test_nothing_travels_for_a_removal(kind, monkeypatch):
    plugin, seen, args, _there = kind
    node = Node(plugin, {**args, "state": "absent", "observed": seen({"a1": "1"})}, monkeypatch)
    node.run()
    assert len(node.executed) == 1 and node.executed[0][2] == []
