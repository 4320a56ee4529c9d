# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests of what has to survive a boot: a small Debian with systemd boots from a disk, three times per image tool.

All tests share these boots: the first one ends with what the roles' modules apply, the second one looks, applies it
again and undoes it, and the third one looks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernel")]
# The file name of the program of each boot, and what it is asked for.
STEPS = ("apply", "again_and_undo", "look")
# Of processor time. Two or three images are built in a boot, by an emulated processor.
SECONDS = 1200


def functions() -> list[str]:
    """Two cards of one model with audio functions, and two of the same model that can have virtual functions."""
    from fakes import ALONE, THREE_D, card, with_audio

    twins = [each for bus in ALONE[:2] for each in with_audio(bus, kind=THREE_D)]
    return [str(each) for each in (*twins, *(card(bus, acs=True, vfs=4) for bus in ALONE[2:4]))]


@pytest.fixture(scope="session", params=["initramfs-tools", "dracut"])
def boots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What each of the three boots has seen and done, as ``inside.py`` writes it."""
    from lab import host
    from lab.guest.kernel import kernel
    from lab.guest.system import System
    from lab.paths import CHECKOUT

    host.prepare(need_engine=False, guest=True)
    folder = tmp_path_factory.mktemp(request.param)
    system = System(folder, kernel(), request.param, functions(), in_image=["nouveau", "nvidia"], vgpu="vendor")
    program = f"/machine{CHECKOUT / 'tests/boot/inside.py'}"
    reports = []
    try:
        for step in STEPS:
            seen = system.boot(f"python3 {program} {step} >/run/guest/seen.json", SECONDS) / "seen.json"
            reports.append(json.loads(seen.read_text()))
            # For whoever reads why a test failed.
            seen.rename(folder / f"{step}.json")
        yield reports
    finally:
        (folder / "disk").unlink(missing_ok=True)
