# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests on a machine with a real card, its driver and root; everywhere else they are skipped, with the reason."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder

if TYPE_CHECKING:
    from _card import Holders

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent

finder = _AnsibleCollectionFinder(paths=[str(ROOT / ".collections")])
finder._install()
sys.path[:0] = [str(ROOT), str(ROOT / "images" / "gpushare" / "src"), str(HERE)]
# Doubles of kubelet and of the API server, and recorded clusters, are those of the unit tests.
sys.path += sorted({str(path.parent) for path in (ROOT / "tests" / "unit").rglob("*.py")})
sys.path.append(str(ROOT / "tests" / "lab"))


def missing() -> str:
    """Return why this machine can't run these tests; empty if it can."""
    if os.geteuid():
        return "needs root"
    version = Path("/proc/driver/nvidia/version")
    if not version.exists() or "SIMULATED" in version.read_text():
        return "no driver of NVIDIA is loaded here"
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return f"NVIDIA's library can't be loaded: {error}"
    return "" if shutil.which("gcc") else "needs gcc, for the program that holds memory of a card"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    reason = missing() if here else ""
    for item in here if reason else ():
        item.add_marker(pytest.mark.skip(reason=f"a real card is needed: {reason}"))


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that holds memory of a card, see hold.c."""
    made = tmp_path_factory.mktemp("hold") / "hold"
    subprocess.run(["gcc", "-O2", "-o", made, HERE / "hold.c", "-ldl"], check=True, timeout=120)
    return made


@pytest.fixture
def holders(program: Path) -> Iterator[Holders]:
    # Needs the path above.
    from _card import Holders

    made = Holders(program)
    yield made
    made.end()
