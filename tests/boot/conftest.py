# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests of what has to survive a boot: each boots a small Debian from a disk of its own, in QEMU, several times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernel")]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Make a system, as ``lab.guest.system.System`` is made, without its folder and kernel; its disk is removed."""
    from lab import host
    from lab.guest.kernel import kernel
    from lab.guest.system import System

    host.prepare(need_engine=False, guest=True)
    yield lambda *words, **more: System(tmp_path, kernel(), *words, **more)
    (tmp_path / "disk").unlink(missing_ok=True)
