# SPDX-License-Identifier: GPL-3.0-or-later
"""The module nouveau over reboots: images of initramfs-tools and of dracut with nouveau inside, on a real kernel."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.long


def loaded(boot: dict) -> list[bool]:
    """Return whether nouveau was loaded by the initramfs, and at the end of the boot."""
    return ["nouveau" in boot["seen"][name] for name in ("early", "late")]


def test_nouveau_stays_away_after_a_reboot_and_comes_back_after_another(boots):
    first, second, third = boots
    assert loaded(first) == [True, True], "the image's udev loads it for the cards"
    done = first["present"]["nouveau"]
    assert done["changed"] and not done["reboot_required"]

    assert loaded(second) == [False, False]
    assert not second["present"]["nouveau"]["changed"] and second["absent"]["nouveau"]["changed"]

    assert loaded(third) == [True, True]
