# SPDX-License-Identifier: GPL-3.0-or-later
"""Package files of the controller are copied only on drift, and removed after the module's execution in any case."""

from __future__ import annotations

import action_plugins
import pytest
from ansible_collections.kubegpu.share.plugins.action import pinned_packages
from package_sets import lock, rpm_facts

SET = {"name": "toolkit", "packages": ["a1=1"]}


class Node:
    """The node as an action plugin uses it: executions, the files during them, and what remains."""

    def __init__(self, args, monkeypatch, answers=(), check=False):
        self.action = action_plugins.load(pinned_packages, args, check, tmpdir=None)
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


def apt_facts(packages):
    rows = {name: {"version": version, "held": True} for name, version in packages.items()}
    apt = {"files": {}, "keys": {}, "sources": [], "interrupted": False, "unfinished": []}
    return {"apt": apt, "rpm": None, "packages": rows}


def held_rpms(packages):
    return rpm_facts("dnf5", packages, locks=[lock(*package) for package in packages.items()])


KINDS = {"rpm": (held_rpms, ".rpm"), "apt": (apt_facts, ".deb")}


@pytest.fixture(params=KINDS)
def kind(request, tmp_path):
    facts, ending = KINDS[request.param]
    for name in (f"a1{ending}", f"b2{ending}", "README"):
        (tmp_path / name).write_text("x")
    return facts, {**SET, "source_dir": str(tmp_path)}, [f"/tmp/t/a1{ending}", f"/tmp/t/b2{ending}"]


def test_without_drift_nothing_is_copied(kind, monkeypatch):
    facts, args, _there = kind
    node = Node({**args, "observed": facts({"a1": "1"})}, monkeypatch)
    assert node.run()["changed"] is False and node.executed == []


def test_on_drift_all_files_are_copied_for_one_execution(kind, monkeypatch):
    facts, args, there = kind
    node = Node({**args, "observed": facts({})}, monkeypatch)
    assert node.run()["changed"] is True
    assert node.executed == [(False, {**args, "node_dir": "/tmp/t"}, there)] and node.files == {}


def test_the_files_are_removed_after_a_failed_execution_too(kind, monkeypatch):
    facts, args, _there = kind
    node = Node({**args, "observed": facts({})}, monkeypatch, [OSError("connection lost")])
    with pytest.raises(OSError, match="connection lost"):
        node.run()
    assert node.files == {}


def test_check_mode_copies_nothing(kind, monkeypatch):
    facts, args, _there = kind
    node = Node({**args, "observed": facts({})}, monkeypatch, check=True)
    assert node.run()["changed"] is True and node.executed == [(True, args, [])]


def test_without_facts_the_module_runs_in_check_mode_first(kind, monkeypatch):
    _seen, args, there = kind
    node = Node(args, monkeypatch, [{"changed": False}])
    assert node.run()["changed"] is False and node.executed == [(True, args, [])]
    node = Node(args, monkeypatch, [{"changed": True}, {"changed": True}])
    node.run()
    assert [(one[0], one[2]) for one in node.executed] == [(True, []), (False, there)]
    assert node.action._task.check_mode is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_dir": "/nowhere"}, "source_dir: /nowhere can't be read on the controller"),
        ({"source_dir": "/proc/self/fd"}, "contains no ."),
        ({"node_dir": "/x"}, "source_dir: node_dir is set too"),
    ],
)
def test_invalid_directory_fails_before_the_node_is_changed(kind, changes, message, monkeypatch):
    facts, args, _there = kind
    node = Node({**args, **changes, "observed": facts({})}, monkeypatch)
    result = node.run()
    assert result["failed"] and message in result["msg"] and node.executed == []


def test_a_removal_copies_nothing(kind, monkeypatch):
    facts, args, _there = kind
    node = Node({**args, "state": "absent", "observed": facts({"a1": "1"})}, monkeypatch)
    node.run()
    assert len(node.executed) == 1 and node.executed[0][2] == []
