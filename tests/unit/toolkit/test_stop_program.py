# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers that NVIDIA's runtime started can be stopped after the toolkit's packages are gone."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit import stop_program
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.module import ARGUMENTS, reconcile
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.stop_program import PROGRAM, TASKS, TEXT
from node_fakes import FakeSystem

LEGACY = f"{PROGRAM}.legacy"
OPERATOR = "/usr/local/nvidia/toolkit/nvidia-container-runtime"


def bundle(container, program=PROGRAM, folder=TASKS[0], namespace="k8s.io"):
    return {f"{folder}/{namespace}/{container}/runtime": program}


def remove(machine, check=False):
    usual = {name: spec.get("default") for name, spec in ARGUMENTS.items()}
    return reconcile({**usual, "state": "absent"}, check, machine)["changed"]


@pytest.mark.parametrize(
    ("files", "written"),
    [
        (bundle("a"), {PROGRAM}),
        (bundle("a", folder=TASKS[1]), {PROGRAM}),
        (bundle("a", folder=TASKS[2], namespace="moby"), {PROGRAM}),
        ({**bundle("a", LEGACY), **bundle("b", "")}, {LEGACY}),
        ({**bundle("a", "/usr/bin/crun"), **bundle("b", "")}, set()),
        # The packages stay, or are there again.
        ({**bundle("a"), PROGRAM: "\x7fELF"}, set()),
        # The GPU Operator's toolkit.
        ({**bundle("a", OPERATOR), OPERATOR: "\x7fELF"}, set()),
    ],
)
def test_the_program_is_written_where_a_running_container_needs_it(files, written):
    machine = FakeSystem(files)
    assert remove(machine, check=True) == bool(written) and machine.files == files
    assert remove(machine) == bool(written)
    assert machine.files == {**files, **dict.fromkeys(written, TEXT)}
    assert not remove(machine)


def test_it_goes_with_the_containers_and_an_older_one_is_replaced():
    machine = FakeSystem({PROGRAM: TEXT})
    assert remove(machine) and machine.files == {}
    machine = FakeSystem({**bundle("a"), PROGRAM: TEXT + "# of another release\n"})
    assert remove(machine) and machine.files[PROGRAM] == TEXT


@pytest.fixture
def placed(tmp_path, monkeypatch):
    """The program on this machine, with bundles in a folder of the test, and a runc that writes down its arguments."""
    tasks = tmp_path / "tasks"
    program = tmp_path / "nvidia-container-runtime"
    program.write_text(TEXT.replace(TASKS[0], str(tasks)))
    program.chmod(0o755)
    called = tmp_path / "called"
    runc = tmp_path / "bin" / "runc"
    runc.parent.mkdir()
    runc.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{called}\n[ "$2" != /failing ]\n')
    runc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{runc.parent}:{os.environ['PATH']}")
    for container in ("first", "second"):
        folder = tasks / "k8s.io" / container
        folder.mkdir(parents=True)
        (folder / "runtime").write_text(str(program))
    (tasks / "k8s.io" / "of-runc").mkdir()
    (tasks / "k8s.io" / "of-runc" / "runtime").write_text("")
    return program, tasks, called


def call(program: Path, *arguments: str) -> int:
    return subprocess.run([program, *arguments], check=False).returncode


def test_commands_reach_runc_and_the_program_goes_with_the_last_container(placed):
    program, tasks, called = placed
    commands = [("--root", "/r", "kill", "--all", "first", "9"), ("--root", "/r", "exec", "first", "sh", "-c", "a  b")]
    commands += [("--root", "/r", "delete", "--force", "first")]
    for command in commands:
        assert call(program, *command) == 0
    (tasks / "k8s.io" / "first" / "runtime").unlink()
    assert call(program, "--root", "/failing", "delete", "second") == 1
    time.sleep(1.5)
    assert program.exists(), "containerd has the second container's bundle"
    (tasks / "k8s.io" / "second" / "runtime").unlink()
    assert call(program, "--root", "/r", "delete", "second") == 0
    end = time.monotonic() + 30
    while program.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not program.exists()
    assert called.read_text().splitlines() == [
        *(" ".join(command) for command in commands),
        "--root /failing delete second",
        "--root /r delete second",
    ]


def test_a_real_machine_is_read(tmp_path):
    for path, text in bundle("a").items():
        (tmp_path / path.lstrip("/")).parent.mkdir(parents=True)
        (tmp_path / path.lstrip("/")).write_text(text)
    system = RealSystem(str(tmp_path))
    assert stop_program.observe(system) == [{"path": PROGRAM, "text": None, "containers": 1}]
    stop_program.apply(system, stop_program.plan(stop_program.observe(system)))
    assert os.access(tmp_path / PROGRAM.lstrip("/"), os.X_OK)
