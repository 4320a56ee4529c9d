# SPDX-License-Identifier: GPL-3.0-or-later
"""Module vgpu over reboots, under a real systemd: virtual functions, then GPU instances or the mode, then the types.

The driver, sriov-manage and nvidia-smi are simulated. The driver forgets GPU instances and the mode when virtual
functions are enabled, and takes a type only after what it needs, so another order would leave the cards without vGPUs.
"""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import ALONE

pytestmark = pytest.mark.long

MIXED, INSTANCES = (f"0000:{bus:02x}:00.0" for bus in ALONE[2:4])
NAMES = {MIXED: {"A10-4Q": 2, "A10-12Q": 1}, INSTANCES: {"A10-1-6C": 2}}


def names(seen: dict) -> dict:
    return {address: Counter(name for _function, name in seen["vgpus"][address]) for address in NAMES}


def test_vgpus_are_restored_by_the_unit_after_a_reboot_and_by_nobody_after_the_undo(boots):
    first, second, third = boots
    assert first["seen"]["vgpus"] == {address: [] for address in first["seen"]["vgpus"]}
    # A run was killed after its first vGPU.
    assert names(first["stopped"]) == {MIXED: {"A10-4Q": 2, "A10-12Q": 1}, INSTANCES: {}}
    assert first["present"]["vgpu"]["changed"] and names(first["now"]) == NAMES
    # By their types alone the larger one would be first.
    assert [name for _function, name in first["now"]["vgpus"][MIXED]] == ["A10-4Q", "A10-4Q", "A10-12Q"]

    assert second["seen"]["unit"] == {
        "ActiveState": "active",
        "Result": "success",
        "UnitFileState": "enabled",
        "ExecMainStatus": "0",
    }, second["seen"]["log"]
    assert second["seen"]["vgpus"] == first["now"]["vgpus"], "the same functions have the same types"
    assert second["seen"]["set"] == {MIXED: ["1", "-1"], INSTANCES: ["0", "2"]}
    assert not second["present"]["vgpu"]["changed"] and second["absent"]["vgpu"]["changed"]

    assert third["seen"]["unit"]["ActiveState"] == "inactive" and third["seen"]["unit"]["UnitFileState"] == ""
    assert third["seen"]["vgpus"] == first["seen"]["vgpus"] and third["seen"]["virtual"] == first["seen"]["virtual"]
