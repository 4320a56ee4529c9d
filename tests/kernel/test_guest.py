# SPDX-License-Identifier: GPL-3.0-or-later
"""The guest itself: what the other tests rely on, and what a real kernel does that a directory tree can't."""

from __future__ import annotations

import subprocess
import uuid

import pytest
from fakes import (
    ALONE,
    DEVICES,
    PCI,
    TOGETHER,
    bind,
    card,
    driver_of,
    group_of,
    held,
    run,
    viable,
    with_audio,
    write,
)

FIRST, SECOND = (card(bus).address for bus in ALONE[:2])


def test_cards_are_devices_with_groups_and_drivers(machine):
    machine.plug(*with_audio(ALONE[0]), *with_audio(ALONE[1], acs=True), card(TOGETHER[0]), card(TOGETHER[1]))
    assert driver_of(FIRST) is None
    machine.driver()
    assert [driver_of(card(bus).address) for bus in (*ALONE[:2], *TOGETHER)] == ["nvidia"] * 4
    assert group_of(FIRST) == group_of("0000:01:00.1")
    assert group_of(SECOND) != group_of("0000:02:00.1")
    assert group_of(card(TOGETHER[0]).address) == group_of(card(TOGETHER[1]).address)
    assert (DEVICES / FIRST / "reset_method").read_text().split()[0] == "flr"


def test_vfio_pci_takes_one_of_two_identical_cards_by_its_override_and_both_by_their_id(machine):
    machine.plug(card(ALONE[0]), card(ALONE[1]))
    machine.driver()
    machine.vfio()
    bind(FIRST, "vfio-pci")
    assert (driver_of(FIRST), driver_of(SECOND)) == ("vfio-pci", "nvidia")
    bind(FIRST, "nvidia")
    for address in (FIRST, SECOND):
        write(DEVICES / address / "driver" / "unbind", address)
    write(DEVICES / FIRST / "driver_override", "\n")
    write(PCI / "drivers" / "vfio-pci" / "new_id", "10de 2236")
    assert (driver_of(FIRST), driver_of(SECOND)) == ("vfio-pci", "vfio-pci")
    write(PCI / "drivers" / "vfio-pci" / "remove_id", "10de 2236")


def test_a_group_is_viable_when_no_other_driver_has_any_of_it(machine):
    machine.plug(*with_audio(ALONE[0]))
    machine.driver()
    machine.vfio()
    run("modprobe", "snd_hda_intel")
    bind(FIRST, "vfio-pci")
    assert driver_of("0000:01:00.1") == "snd_hda_intel"
    group = group_of(FIRST)
    assert not viable(group)
    bind("0000:01:00.1", None)
    assert viable(group)
    bind("0000:01:00.1", "vfio-pci")
    assert viable(group)


def test_unbinding_waits_while_a_card_is_held(machine):
    machine.plug(card(ALONE[0]))
    machine.vfio()
    bind(FIRST, "vfio-pci")
    with held(FIRST):
        unbind = subprocess.Popen(["sh", "-c", f"echo {FIRST} > /sys/bus/pci/drivers/vfio-pci/unbind"])
        with pytest.raises(subprocess.TimeoutExpired):
            unbind.wait(2)
    assert unbind.wait(20) == 0
    assert driver_of(FIRST) is None


def test_mediated_devices_of_one_type_per_card(machine):
    machine.plug(card(ALONE[0]))
    machine.driver(vgpu="mdev")
    types = DEVICES / FIRST / "mdev_supported_types"
    assert sorted(path.name for path in types.iterdir()) == ["nvidia-590", "nvidia-592", "nvidia-593", "nvidia-700"]
    assert (types / "nvidia-590" / "name").read_text() == "NVIDIA A10-4Q\n"
    made = str(uuid.uuid4())
    write(types / "nvidia-590" / "create", made)
    assert [(types / f"nvidia-{each}" / "available_instances").read_text() for each in (590, 592)] == ["5\n", "0\n"]
    group = (DEVICES / FIRST / made / "iommu_group").resolve().name
    assert viable(int(group))
    write(DEVICES / FIRST / made / "remove", "1")
    assert (types / "nvidia-592" / "available_instances").read_text() == "2\n"


def test_virtual_functions_take_a_type(machine):
    machine.plug(card(ALONE[0], acs=True, vfs=4))
    machine.driver(vgpu="vendor")
    write(DEVICES / FIRST / "sriov_numvfs", "2")
    functions = ["0000:01:00.4", "0000:01:00.5"]
    assert [driver_of(address) for address in functions] == ["nvidia", "nvidia"]
    assert len({group_of(address) for address in (FIRST, *functions)}) == 3
    assert (DEVICES / functions[0] / "physfn").resolve().name == FIRST
    vgpu = DEVICES / functions[0] / "nvidia"
    write(vgpu / "current_vgpu_type", "592")
    assert (vgpu / "current_vgpu_type").read_text() == "592\n"
    other = (DEVICES / functions[1] / "nvidia" / "creatable_vgpu_types").read_text()
    assert "A10-12Q" in other and "A10-4Q" not in other
    with pytest.raises(OSError):
        write(DEVICES / functions[1] / "nvidia" / "current_vgpu_type", "590")
