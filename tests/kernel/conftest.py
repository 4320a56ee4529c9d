# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests on a real kernel: they run in the lab's guest (``python -m lab.guest``), and are skipped anywhere else.

``fakes.py`` puts simulated cards on the guest's PCI buses and runs the collection's modules there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Without ansible-core's loader, which would take longer to import than a test takes.
sys.path[:0] = [str(ROOT / ".collections"), str(Path(__file__).resolve().parent), str(ROOT)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("KUBEGPU_GUEST"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason="runs in the lab's guest: python -m lab.guest"))


@pytest.fixture
def machine() -> Iterator[object]:
    """The guest without cards and without the driver, as it is after the test again."""
    from fakes import Machine

    machine = Machine()
    yield machine
    machine.clear()


@pytest.fixture
def installed() -> Iterator[str]:
    """The running kernel's release, installed in /boot: without one the modules take the guest for a container."""
    release = os.uname().release
    image = Path("/boot", f"vmlinuz-{release}")
    image.parent.mkdir(exist_ok=True)
    image.touch()
    yield release
    image.unlink()
