# SPDX-License-Identifier: GPL-3.0-or-later
"""What ``gpu_node_info`` says of cards for virtual machines, beside what the kernel itself says."""

from __future__ import annotations

import typing as t
import uuid
from contextlib import ExitStack

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations
from fakes import (
    ALONE,
    AUDIO,
    DEVICES,
    ETHERNET,
    INTEL,
    MEDIATED,
    SWITCH,
    TOGETHER,
    USB,
    VGA,
    Function,
    bind,
    card,
    group_of,
    module,
    run,
    viable,
    with_audio,
    write,
)

from lab.guest.machine import KERNEL_ARGUMENTS

FIRST, SECOND, THIRD = (card(bus).address for bus in ALONE[:3])
# Of a card's fields those that a test of a group is about.
GROUP = ("address", "class", "driver", "bridge")


def cards() -> dict[str, dict[str, t.Any]]:
    """Observe the cards as the module does, without the rest of the facts, which takes ten seconds here."""
    return {each["address"]: each for each in gpus.pci(RealSystem())[0]}


def can_be_given(seen: dict[str, t.Any]) -> bool:
    """Judge by the facts alone whether a virtual machine can have a card that is on VFIO's driver."""
    return all(each["bridge"] or each["driver"] in (None, "vfio-pci") for each in seen["group"])


def test_the_whole_module_and_the_controllers_boundary(machine):
    machine.plug(*with_audio(ALONE[0]), card(ALONE[1], acs=True, vfs=2))
    machine.driver(vgpu="vendor")
    write(DEVICES / SECOND / "sriov_numvfs", "1")
    write(DEVICES / "0000:02:00.4" / "nvidia" / "current_vgpu_type", "593")
    result = module("gpu_node_info")
    assert observations.problem("gpu_node_info", result) == ""
    seen = result["gpu_node"]
    assert seen["gpus"] == list(cards().values()) and len(seen["gpus"]) == 2
    [vgpu] = seen["gpus"][1]["vgpu_host"]["vgpus"]
    group = group_of("0000:02:00.4")
    assert vgpu == {"address": "0000:02:00.4", "uuid": None, "type": "593", "iommu_group": group}
    assert seen["iommu"]["groups"] > 4 and seen["iommu"]["table"] == "DMAR"
    assert seen["iommu"]["arguments"] == [word for word in KERNEL_ARGUMENTS if "iommu" in word]


def test_groups_and_whether_they_can_be_given_away(machine):
    nic = Function(TOGETHER[1], 0, 0x10D3, ETHERNET, INTEL)
    machine.plug(*with_audio(ALONE[0]), *with_audio(ALONE[1], acs=True), card(TOGETHER[0]), nic)
    machine.driver()
    machine.vfio()
    run("modprobe", "snd_hda_intel")
    together = card(TOGETHER[0]).address
    for address in (FIRST, SECOND, together):
        bind(address, "vfio-pci")
    seen = cards()
    assert {address: each["iommu_group"] for address, each in seen.items()} == {
        address: group_of(address) for address in (FIRST, SECOND, together)
    }
    audio = ("0000:01:00.1", f"0x{AUDIO:06x}", "snd_hda_intel", False)
    assert [tuple(each[name] for name in GROUP) for each in seen[FIRST]["group"]] == [audio]
    assert seen[SECOND]["group"] == []
    others = {each["address"]: each for each in seen[together]["group"]}
    ports = [each for each in others.values() if each["bridge"]]
    assert [each["driver"] for each in ports] == ["pcieport", "pcieport"] and nic.address in others
    assert not others[nic.address]["bridge"]
    # The kernel's own word for each of them.
    for address in (FIRST, SECOND, together):
        assert viable(seen[address]["iommu_group"]) is can_be_given(seen[address]), address
    assert [can_be_given(seen[address]) for address in (FIRST, SECOND)] == [False, True]
    bind("0000:01:00.1", "vfio-pci")
    again = cards()[FIRST]
    assert can_be_given(again) and viable(again["iommu_group"])


def test_twins_differ_by_driver_and_override(machine):
    machine.plug(card(ALONE[0]), card(ALONE[1]), card(ALONE[2]))
    machine.driver()
    machine.vfio()
    bind(SECOND, "vfio-pci")
    bind(THIRD, None)
    assert {address: (each["driver"], each["driver_override"]) for address, each in cards().items()} == {
        FIRST: ("nvidia", ""),
        SECOND: ("vfio-pci", "vfio-pci"),
        THIRD: (None, ""),
    }


def test_a_card_with_four_functions_its_display_and_a_switch(machine):
    turing = [Function(ALONE[0], 2, 0x1AD6, USB), Function(ALONE[0], 3, 0x1AD7, 0x0C8000)]
    machine.plug(*with_audio(ALONE[0], device=0x1EB1), *turing, Function(ALONE[1], 0, 0x22A3, SWITCH))
    [one], switches = gpus.pci(RealSystem())
    assert (one["generation"], one["class"], len(one["group"])) == ("turing", f"0x{VGA:06x}", 3)
    # There is no other display in the guest.
    assert one["display"] == {"boot": True, "framebuffers": [], "connectors": []}
    assert one["reset_methods"][0] == "flr" and one["numa_node"] is None
    assert one["link"]["max_speed"] == "16.0 GT/s PCIe"
    assert [each["address"] for each in switches] == [SECOND]


def test_mediated_devices_on_a_card(machine):
    machine.plug(card(ALONE[0]), card(ALONE[1]))
    machine.driver(vgpu="mdev")
    made = str(uuid.uuid4())
    write(DEVICES / FIRST / "mdev_supported_types" / "nvidia-590" / "create", made)
    with ExitStack() as stack:
        stack.callback(lambda: write(DEVICES / FIRST / made / "remove", "1"))
        seen, group = cards(), group_of(made, MEDIATED)
    assert group != seen[FIRST]["iommu_group"]
    assert seen[FIRST]["vgpu_host"] == {
        "framework": "mdev",
        "types": [
            {"id": "nvidia-590", "name": "NVIDIA A10-4Q", "available": 5},
            {"id": "nvidia-592", "name": "NVIDIA A10-12Q", "available": 0},
            {"id": "nvidia-593", "name": "NVIDIA A10-24Q", "available": 0},
            {"id": "nvidia-700", "name": "NVIDIA A10-1-6C", "available": 0},
        ],
        "vgpus": [{"address": FIRST, "uuid": made, "type": "nvidia-590", "iommu_group": group}],
    }
    other = seen[SECOND]["vgpu_host"]
    assert [each["available"] for each in other["types"]] == [6, 2, 1, 0] and other["vgpus"] == []


@pytest.mark.parametrize("framework", ["mdev", "vendor"])
def test_virtual_functions_are_no_cards_and_have_the_types(machine, framework):
    machine.plug(card(ALONE[0], acs=True, vfs=4), card(ALONE[1], acs=True, vfs=4))
    machine.driver(vgpu=framework)
    assert cards()[FIRST]["vgpu_host"]["framework"] == "none"
    write(DEVICES / FIRST / "sriov_numvfs", "3")
    functions = ["0000:01:00.4", "0000:01:00.5", "0000:01:00.6"]
    made = None
    if framework == "vendor":
        write(DEVICES / functions[1] / "nvidia" / "current_vgpu_type", "592")
    else:
        made = str(uuid.uuid4())
        write(DEVICES / functions[1] / "mdev_supported_types" / "nvidia-592" / "create", made)
    seen = cards()
    assert list(seen) == [FIRST, SECOND]
    assert seen[FIRST]["virtual_functions"] == {
        "total": 4,
        "enabled": [{"address": each, "driver": "nvidia", "iommu_group": group_of(each)} for each in functions],
    }
    assert seen[SECOND]["virtual_functions"] == {"total": 4, "enabled": []}
    host = seen[FIRST]["vgpu_host"]
    kind = "592" if framework == "vendor" else "nvidia-592"
    group = group_of(made, MEDIATED) if made else group_of(functions[1])
    assert (host["framework"], host["vgpus"]) == (
        framework,
        [{"address": functions[1], "uuid": made, "type": kind, "iommu_group": group}],
    )
    # Of this size the card has room for one more, which either of the other functions may take.
    left = {each["name"]: each["available"] for each in host["types"]}
    assert left["NVIDIA A10-12Q"] == 2 and not left.get("NVIDIA A10-4Q")
    write(DEVICES / FIRST / "sriov_numvfs", "0")
    assert cards()[FIRST]["vgpu_host"] == {"framework": "none", "types": [], "vgpus": []}
