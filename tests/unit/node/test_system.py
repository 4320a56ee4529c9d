# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of this machine that disappear while they are read, and the time at which they were changed."""

from __future__ import annotations

import builtins
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host import systemd
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


@pytest.mark.parametrize("name", ["cgroup", "cmdline", "stat"])
def test_process_that_ends_while_its_file_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux answers ESRCH then, not ENOENT."""
    process = subprocess.Popen(["sleep", "60"])
    opened, real = [], builtins.open

    def slow_open(path: Any, *arguments: Any, **options: Any) -> Any:
        file = real(path, *arguments, **options)
        if path == f"/proc/{process.pid}/{name}":
            opened.append(path)
            process.kill()
            process.wait()
        return file

    monkeypatch.setattr(builtins, "open", slow_open)
    assert RealSystem().read(f"/proc/{process.pid}/{name}") is None
    assert opened


def run_command(argv: list[str], **_: Any) -> tuple[int, str, str]:
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_new_file_with_an_old_time_of_modification_is_newer_than_the_process(tmp_path: Path) -> None:
    """As dpkg and ``cp -p`` write it."""
    system, before = RealSystem(run_command=run_command), tmp_path / "before"
    before.write_text("")
    with subprocess.Popen(["sleep", "60"]) as process:
        time.sleep(systemd.STALE_AFTER_SECONDS + 0.1)
        packaged = tmp_path / "packaged"
        packaged.write_text("")
        os.utime(packaged, (0, 0))
        found = [systemd.stale(system, process.pid, [str(path)]) for path in (before, packaged)]
        process.kill()
    assert found == [False, True]
