# SPDX-License-Identifier: GPL-3.0-or-later
"""The module kernel_driver on a real kernel: modules that processes hold, unloading and loading them.

The driver ``nvidia`` is SIMULATED (``lab/guest/modules/nvidia.c``); its loading, use counts and device files are real.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fakes import ALONE, card, driver_of, is_loaded, module

FIRST = card(ALONE[0]).address
NODE = Path("/dev/nvidia0")


@pytest.fixture
def loaded(machine, installed):
    """One card on the driver, with its device file."""
    machine.plug(card(ALONE[0]))
    machine.driver()
    os.mknod(NODE, 0o020666, os.makedev(195, 0))
    yield machine
    NODE.unlink()


@pytest.mark.long
def test_the_driver_is_unloaded_when_nothing_uses_it_and_loaded_again(loaded):
    holder = subprocess.Popen(["sleep", "600"], stdin=NODE.open())
    try:
        seen = module("kernel_driver", state="unloaded")
        assert not seen["changed"] and f"sleep (process {holder.pid})" in seen["reason"]
        assert driver_of(FIRST) == "nvidia"
    finally:
        holder.kill()
        holder.wait()
    assert module("kernel_driver", state="unloaded")["changed"]
    assert not is_loaded("nvidia") and driver_of(FIRST) is None
    assert not module("kernel_driver", state="unloaded")["changed"]
    assert module("kernel_driver")["changed"]
    assert driver_of(FIRST) == "nvidia"
    assert not module("kernel_driver")["changed"]
