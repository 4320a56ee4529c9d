# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of this machine that disappear while they are read."""

from __future__ import annotations

import builtins
import subprocess
from typing import Any

import pytest
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
