# SPDX-License-Identifier: GPL-3.0-or-later
"""The module nouveau on a kernel with a real nouveau: kept from a card, unloaded, and let in again."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import ALONE, DEVICES, THREE_D, card, is_loaded, module, run, wait_for, with_audio

BLACKLIST = Path("/etc/modprobe.d/blacklist-nouveau.conf")
FIRST = card(ALONE[0]).address


def loaded_for(address: str) -> list[str]:
    """Return the modules that the kernel would load for a device: udev asks by alias and obeys blacklists."""
    alias = (DEVICES / address / "modalias").read_text().strip()
    lines = run("modprobe", "-n", "-v", "-b", "-a", alias).splitlines()
    return [line.split()[1].rpartition("/")[2].partition(".ko")[0] for line in lines if line.startswith("insmod")]


@pytest.fixture
def without_blacklist():
    """Another test's, or this machine's own file, doesn't count."""
    BLACKLIST.unlink(missing_ok=True)
    yield
    BLACKLIST.unlink(missing_ok=True)


def test_the_blacklist_keeps_nouveau_from_a_card_and_its_removal_lets_it_in(machine, installed, without_blacklist):
    machine.plug(card(ALONE[0]))
    assert "nouveau" in loaded_for(FIRST)
    result = module("nouveau")
    assert result["changed"] and not result["reboot_required"]
    assert "nouveau" not in loaded_for(FIRST) and "nvidia" in loaded_for(FIRST)
    # A blacklist is of aliases: nobody can be kept from loading a module by its name.
    assert "nouveau.ko" in run("modprobe", "-n", "-v", "nouveau")
    assert not module("nouveau")["changed"]
    assert module("nouveau", state="absent")["changed"] and not BLACKLIST.exists()
    assert "nouveau" in loaded_for(FIRST)


def test_udev_loads_no_nouveau_behind_the_blacklist(machine, installed, without_blacklist):
    module("nouveau")
    with machine.udev() as settled:
        machine.plug(*with_audio(ALONE[0], kind=THREE_D))
        settled()
        assert (is_loaded("nvidia"), is_loaded("nouveau")) == (True, False)
        machine.unload("fakecards")
        module("nouveau", state="absent")
        # udevd looks for changed blacklists at an event, but at most once in three seconds.
        run("udevadm", "control", "--reload")
        machine.plug(card(ALONE[0]))
        # udevd may not have seen the event yet when it is asked whether it has settled.
        wait_for(lambda: is_loaded("nouveau"))


def test_a_loaded_nouveau_is_unloaded(machine, installed, without_blacklist):
    machine.load("nouveau")
    assert is_loaded("nouveau")
    predicted = module("nouveau", check=True)
    assert [each["before_header"] for each in predicted["diff"]] == [str(BLACKLIST), "module nouveau"]
    assert is_loaded("nouveau") and not BLACKLIST.exists()
    result = module("nouveau")
    assert result["diff"] == predicted["diff"] and not result["reboot_required"]
    assert not is_loaded("nouveau")


def test_nouveau_in_a_container_is_its_hosts(machine, without_blacklist):
    machine.load("nouveau")
    assert not module("nouveau")["reboot_required"]
    assert is_loaded("nouveau") and BLACKLIST.exists()
