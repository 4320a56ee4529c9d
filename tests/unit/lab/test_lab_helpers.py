# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsers and waits of the lab's tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import _lab
import pytest
from _lab import Commands, Done, Timeout

RECAP = """
PLAY RECAP *********************************************************************
gpu1                       : ok=12   changed=3    unreachable=0    failed=0    skipped=4    rescued=0    ignored=0
localhost                  : ok=2    changed=0    unreachable=0    failed=1    skipped=0    rescued=0    ignored=0
"""


def field(number: int, value: bytes) -> bytes:
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


def test_container_allocate_response() -> None:
    """Environment variables are field 1, a map; CDI names are field 5; the others are skipped."""
    entries = {"NVIDIA_VISIBLE_DEVICES": "GPU-1", "EMPTY": ""}
    message = b"".join(field(1, field(1, key.encode()) + field(2, value.encode())) for key, value in entries.items())
    message += field(2, field(1, b"/in") + field(2, b"/out") + b"\x18\x01")
    message += field(5, field(1, b"nvidia.com/gpu=0")) + field(5, field(1, b"nvidia.com/gpu=1"))
    assert _lab.environment_of(message) == entries
    assert _lab.cdi_of(message) == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    # Lengths above 127 have two bytes.
    inner = field(1, b"K") + b"\x12\xac\x02" + b"x" * 300
    assert _lab.environment_of(b"\x0a\xb2\x02" + inner) == {"K": "x" * 300}


def test_recap() -> None:
    done = Done(0, RECAP)
    assert done.recap["gpu1"]["changed"] == 3
    assert done.recap["localhost"]["failed"] == 1
    with pytest.raises(AssertionError):
        done.assert_unchanged()
    with pytest.raises(AssertionError):
        Done(0, "nothing at all").assert_unchanged()
    Done(0, RECAP.replace("changed=3", "changed=0")).assert_unchanged()


def test_until_fails_with_the_last_error() -> None:
    def never() -> bool:
        raise AssertionError("the reason")

    with pytest.raises(Timeout, match="the reason"):
        _lab.until(never, "it", 0.01, 0.001)
    assert _lab.until(lambda: 7, "it", 1) == 7


def test_kill_tree_reaches_other_sessions() -> None:
    child = (
        "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True);"
        " print(p.pid, flush=True); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    _lab.kill_tree(process.pid)
    assert process.wait() == -signal.SIGKILL
    _lab.until(lambda: ended(grandchild), "the grandchild is dead", 5, 0.01)


def ended(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_command_lines_of_this_machine_are_recorded() -> None:
    commands = Commands()
    commands.sample()
    assert any("pytest" in one for one in commands.seen)
