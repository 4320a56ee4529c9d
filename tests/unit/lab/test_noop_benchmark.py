# SPDX-License-Identifier: GPL-3.0-or-later
"""The benchmark counts executed modules, and reports no result for a run that changed something."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from ansible_runs import ansible

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import noop

ROOT = Path(__file__).resolve().parents[3]

QUIET = {"ok": 3, "changed": 0, "failures": 0, "unreachable": 0, "skipped": 1, "rescued": 0, "ignored": 0}

PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.ping:
    - ansible.builtin.assert: {that: true}
    - ansible.builtin.set_fact: {seen: true}
    - ansible.builtin.debug: {msg: hello}
    - ansible.builtin.ping:
      when: not seen
    - ansible.builtin.ping:
      loop: [1, 2]
    - ansible.builtin.ping:
      delegate_to: other
      run_once: true
"""
INVENTORY = "one ansible_connection=local\nother ansible_connection=local\n"


def play(folder: Path) -> str:
    (folder / "play.yml").write_text(PLAY)
    (folder / "inventory").write_text(INVENTORY)
    record = folder / "record"
    done = ansible(
        folder,
        *("ansible-playbook", "-i", "inventory", "play.yml"),
        ANSIBLE_CALLBACK_PLUGINS=str(ROOT / "bench" / "callback_plugins"),
        ANSIBLE_CALLBACKS_ENABLED="count_executions",
        ANSIBLE_PYTHON_INTERPRETER=sys.executable,
        COUNT_EXECUTIONS_FILE=str(record),
    )
    assert done.rc == 0, done.text
    return record.read_text()


def test_only_executed_modules_count(tmp_path: Path) -> None:
    hosts, modules, stats, tasks = noop.parse(play(tmp_path))
    # A ping and one looped twice; assert, set_fact, debug and the skipped task nothing; one delegated to the other.
    assert hosts == {"one": 3, "other": 4}
    assert set(modules) == {("one", "ansible.builtin.ping"), ("other", "ansible.builtin.ping")}
    noop.refuse(stats)
    assert tasks == 7


def test_runs_with_changes_or_without_a_recap_are_refused() -> None:
    noop.refuse({"a": QUIET})
    for bad in ("changed", "failures", "unreachable", "ignored", "rescued"):
        with pytest.raises(noop.NoResult, match=f"b reports {bad}=1"):
            noop.refuse({"a": QUIET, "b": {**QUIET, bad: 1}})
    with pytest.raises(noop.NoResult):
        noop.refuse({})


def scripted(folder: Path, counts: list[int]) -> list[str]:
    """A command that records a given number of executions in each of its runs."""
    script = folder / "command.py"
    script.write_text(
        "import json, os, pathlib\n"
        f"state = pathlib.Path({str(folder / 'state')!r})\n"
        "number = int(state.read_text()) if state.exists() else 0\n"
        "state.write_text(str(number + 1))\n"
        f"counts = {counts}\n"
        "record = open(os.environ['COUNT_EXECUTIONS_FILE'], 'a')\n"
        "for _ in range(counts[number]):\n"
        "    print(json.dumps({'host': 'h', 'module': 'm', 'task': ''}), file=record)\n"
        f"print(json.dumps({{'stats': {{'h': {json.dumps(QUIET)}}}, 'tasks': 7}}), file=record)\n"
    )
    return [sys.executable, str(script)]


def test_runs_that_differ_or_fail_have_no_result(tmp_path: Path) -> None:
    with pytest.raises(noop.NoResult, match="different modules"):
        noop.measure(scripted(tmp_path, [2, 2, 3]), [sys.executable, "-c", ""], dict(os.environ), rounds=2)
    with pytest.raises(noop.NoResult, match="ended with 3"):
        noop.timed([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
