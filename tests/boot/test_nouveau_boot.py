# SPDX-License-Identifier: GPL-3.0-or-later
"""The module nouveau over reboots: images of initramfs-tools and of dracut with nouveau inside, on a real kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

# Two cards of one model, each with its audio function.
CARDS = [f"{bus}.{number}:10de:{kind}:0:0" for bus in (1, 2) for number, kind in ((0, "2236:30200"), (1, "1aef:40300"))]
STATE = "cp /run/modules-of-initramfs /run/guest/early; cp /proc/modules /run/guest/late"


def call(state: str) -> str:
    """Return the shell line that runs the module and writes its result."""
    code = f"import fakes, json; print(json.dumps(fakes.module('nouveau', state='{state}')))"
    return f'python3 -c "{code}" >/run/guest/result.json'


def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())


def loaded(folder: Path) -> list[bool]:
    """Return whether nouveau was loaded by the initramfs, and at the end of the boot."""
    return [
        any(line.startswith("nouveau ") for line in (folder / name).read_text().splitlines())
        for name in ("early", "late")
    ]


@pytest.mark.parametrize("tool", ["initramfs-tools", "dracut"])
def test_nouveau_stays_away_after_a_reboot_and_comes_back_after_another(tool, made):
    system = made(tool, CARDS, in_image=["nouveau"])
    first = system.boot(f"{STATE}\n{call('present')}")
    assert loaded(first) == [True, True], "the image's udev loads it for the cards"
    assert result(first)["changed"] and not result(first)["reboot_required"]

    second = system.boot(
        f"{STATE}\n{call('present')}\nmv /run/guest/result.json /run/guest/again.json\n{call('absent')}"
    )
    assert loaded(second) == [False, False]
    assert not json.loads((second / "again.json").read_text())["changed"]
    assert result(second)["changed"]

    assert loaded(system.boot(STATE)) == [True, True]
