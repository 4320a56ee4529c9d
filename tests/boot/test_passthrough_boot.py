# SPDX-License-Identifier: GPL-3.0-or-later
"""Module pci_binding over reboots: images of initramfs-tools and of dracut with the cards' own driver inside."""

from __future__ import annotations

import pytest
from fakes import ALONE

pytestmark = pytest.mark.long

CARD, AUDIO, TWIN = "0000:01:00.0", "0000:01:00.1", f"0000:{ALONE[1]:02x}:00.0"
OWN = {CARD: "nvidia", AUDIO: "snd_hda_intel", TWIN: "nvidia"}


def drivers(seen: dict) -> dict:
    return {address: seen["drivers"][address] for address in OWN}


def test_a_card_is_vfios_after_a_reboot_its_twin_isnt_and_it_comes_back_after_another(boots):
    first, second, third = boots
    assert "nvidia" in first["seen"]["early"], "the image's udev loads the cards' driver"
    # Two runs were killed: when the rule was written, and before the image. What they wrote is in nouveau's image.
    assert drivers(first["seen"]) == drivers(first["stopped"]) == drivers(first["now"]) == OWN
    assert first["present"]["pci_binding"]["reboot_required"]

    assert {"nvidia", "vfio_pci"} <= set(second["seen"]["early"])
    assert drivers(second["seen"]) == {CARD: "vfio-pci", AUDIO: "vfio-pci", TWIN: "nvidia"}
    again = second["present"]["pci_binding"]
    assert not again["changed"] and not again["reboot_required"]
    assert [card["viable"] for card in again["cards"]] == [True]
    # The undo, too, had been killed before the image was made.
    assert second["absent"]["pci_binding"]["changed"]

    assert "vfio_pci" not in third["seen"]["late"]
    assert drivers(third["seen"]) == OWN
    assert set(third["seen"]["overrides"].values()) == {"(null)"}
