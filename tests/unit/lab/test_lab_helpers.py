# SPDX-License-Identifier: GPL-3.0-or-later
"""What the lab's tests rely on: a recap that names a change, and an end of all processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import _lab
import pytest
from _lab import Done

RECAP = """
PLAY RECAP *********************************************************************
gpu1                       : ok=12   changed=3    unreachable=0    failed=0    skipped=4    rescued=0    ignored=0
localhost                  : ok=2    changed=0    unreachable=0    failed=1    skipped=0    rescued=0    ignored=0
"""


def test_recap() -> None:
    done = Done(0, RECAP)
    assert done.recap["gpu1"]["changed"] == 3
    assert done.recap["localhost"]["failed"] == 1
    with pytest.raises(AssertionError):
        done.assert_unchanged()
    with pytest.raises(AssertionError):
        Done(0, "nothing at all").assert_unchanged()
    Done(0, RECAP.replace("changed=3", "changed=0")).assert_unchanged()


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
