# SPDX-License-Identifier: GPL-3.0-or-later
"""What verify gets of a machine's cards for virtual machines, from what the roles' modules have written."""

from __future__ import annotations

import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check import virtual_node
from ansible_collections.kubegpu.share.plugins.module_utils._host import records
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import files
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import RECORD
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import sysfs, vgpu
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations
from pci_machine import AUDIO, CARD, DRIVERS, IMAGE, PCI, RELEASE, TWIN, UUIDS, Machine


def evidence(machine: Machine) -> virtual_node.Evidence:
    found = virtual_node.evidence(machine, machine)
    assert observations.problem("virtual_machines_info", {"virtual_machines": found}) == ""
    assert found is not None
    return found


def test_the_program_that_runs_at_boot_has_the_same_record():
    assert (records.PASSTHROUGH, records.VGPU) == (RECORD, sysfs.RECORD)


def test_a_machine_without_records_says_nothing():
    assert virtual_node.evidence(Machine(), Machine()) is None


def test_what_is_bound_is_seen_with_its_files_its_image_and_its_twin():
    machine = Machine()
    machine.present(CARD)
    good = {"present": True, "driver": "vfio-pci", "group": "14", "state": "viable", "others": [], "ruled": True}
    assert evidence(machine) == {
        "problem": "",
        "functions": [
            {**good, "address": CARD, "uuid": UUIDS[CARD].lower()},
            {**good, "address": AUDIO, "uuid": ""},
        ],
        "missing": [],
        "images": [{"path": IMAGE, "release": RELEASE, "rule": True, "lacking": [], "newer": True}],
        "others": 1,
        "cards": [],
        "devices": [
            {"address": address, "uuid": "", "type": "", "group": "14", "number": ""} for address in (CARD, AUDIO)
        ],
    }
    before = machine.own(), machine.bound()
    evidence(machine)
    assert (machine.own(), machine.bound()) == before


def test_what_came_apart_is_seen():
    """The audio function got the host's driver, another card is in the slot, and the rule and its hook are gone."""
    machine = Machine()
    machine.present(CARD)
    machine.links[f"{PCI}/{AUDIO}/driver"] = f"{DRIVERS}/snd_hda_intel"
    machine.files[f"{PCI}/{CARD}/device"] = "0x1eb8\n"
    for path in (files.RULE, files.HOOK):
        del machine.files[path]
    found = evidence(machine)
    assert found["missing"] == [files.RULE, f"{files.HOOK} or {files.DRACUT}"]
    card, audio = found["functions"]
    assert (card["present"], card["state"], card["others"]) == (False, "not_viable", [f"{AUDIO} (snd_hda_intel)"])
    assert (card["ruled"], audio["driver"], audio["state"], audio["present"]) == (False, "snd_hda_intel", "", True)


@pytest.mark.parametrize("answer", ["held", "absent", "unknown", "not_viable"])
def test_the_kernels_word_counts_whatever_the_drivers_are(answer):
    machine = Machine()
    machine.present(CARD)
    if answer == "held":
        machine.open(90, "qemu-system-x86", "/dev/vfio/14")
    elif answer == "absent":
        del machine.files["/dev/vfio/14"]
    else:
        machine.says = answer
    assert {row["state"] for row in evidence(machine)["functions"]} == {answer}


def without_the_rule(machine):
    """As after an update that rebuilt the image while the hook was gone."""
    hook = machine.files.pop(files.HOOK)
    machine._image()
    machine.files[files.HOOK] = hook
    return {"rule": False, "lacking": ["vfio_pci"], "newer": True}


def without_the_module(machine):
    inside = machine.contents[machine.files[IMAGE]]
    for name in [name for name in inside if name.endswith("vfio-pci.ko")]:
        del inside[name]
    return {"rule": True, "lacking": ["vfio_pci"], "newer": True}


def older_than_the_rule(machine):
    machine.write(files.RULE, machine.files[files.RULE])
    return {"rule": True, "lacking": [], "newer": False}


def damaged(machine):
    machine.commands["lsinitr"] = Done(1, "", "cpio: premature end of archive")
    return {"rule": None, "lacking": [], "newer": True}


@pytest.mark.parametrize(
    "damage",
    [without_the_rule, without_the_module, older_than_the_rule, damaged],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("tool", ["initramfs-tools", "dracut"])
def test_the_image_that_boots_next_is_opened(damage, tool):
    machine = Machine(tool)
    machine.present(CARD)
    if tool == "dracut" and damage is without_the_rule:
        machine.files[files.HOOK] = machine.files.pop(files.DRACUT)
    expected = damage(machine)
    assert evidence(machine)["images"] == [{"path": IMAGE, "release": RELEASE, **expected}]


def test_only_images_of_kernels_that_boot_next_are_opened():
    """Of three kernels the running and the newest one."""
    machine = Machine()
    machine.present(CARD)
    for release in ("6.1.0-49-amd64", "6.1.0-51-amd64"):
        machine.files[f"/boot/vmlinuz-{release}"] = ""
        machine.files[f"/lib/modules/{release}/modules.alias"] = ""
        machine.files[f"/boot/initrd.img-{release}"] = machine.files[IMAGE]
    assert [image["release"] for image in evidence(machine)["images"]] == [RELEASE, "6.1.0-51-amd64"]


FIRST, SECOND = "0000:01:00.4", "0000:01:00.5"
MDEV = "c73f1fa6-489e-4834-9476-d70dabd98c40"


def divided() -> Machine:
    """A card with a virtual function of a type whose name it doesn't tell, and one with a mediated device."""
    machine = Machine()
    for number, function in enumerate((FIRST, SECOND)):
        machine.links[f"{PCI}/{CARD}/virtfn{number}"] = f"../{function}"
        machine.links[f"{PCI}/{function}/iommu_group"] = f"../../../kernel/iommu_groups/{number + 30}"
    machine.files[f"{PCI}/{FIRST}/nvidia/current_vgpu_type"] = "558\n"
    machine.files[f"{PCI}/{SECOND}/nvidia/current_vgpu_type"] = "0\n"
    machine.files[f"{PCI}/{SECOND}/nvidia/creatable_vgpu_types"] = "ID    : vGPU Name\n"
    machine.links[f"{PCI}/{TWIN}/{MDEV}/mdev_type"] = "../mdev_supported_types/nvidia-590"
    machine.links[f"{PCI}/{TWIN}/{MDEV}/iommu_group"] = "../../../kernel/iommu_groups/40"
    types = f"{PCI}/{TWIN}/mdev_supported_types/nvidia-590"
    machine.files |= {f"{types}/name": "NVIDIA A10-4Q\n", f"{types}/available_instances": "0\n"}
    rows = [
        {
            "address": address,
            "device": device,
            "wanted": wanted,
            "places": [],
            "instances": {},
            "before": [],
            "mig_before": None,
            "functions": False,
        }
        for address, device, wanted in (
            (CARD, "0x223610DE", {"A10-4Q": 1, "A10-8Q": 1}),
            (TWIN, "0x223610DE", {"A10-4Q": 1}),
            ("0000:09:00.0", "0x223610DE", {"A10-4Q": 1}),
        )
    ]
    machine.files[sysfs.RECORD] = vgpu._recorded(rows)
    return machine


def test_vgpus_have_their_types_in_either_framework():
    machine = divided()
    found = evidence(machine)
    assert found["functions"] == [] == found["missing"] == found["images"]
    assert found["cards"] == [
        {"address": CARD, "present": True, "wanted": {"A10-4Q": 1, "A10-8Q": 1}, "vgpus": {}, "unnamed": 1},
        {"address": TWIN, "present": True, "wanted": {"A10-4Q": 1}, "vgpus": {"A10-4Q": 1}, "unnamed": 0},
        {"address": "0000:09:00.0", "present": False, "wanted": {"A10-4Q": 1}, "vgpus": {}, "unnamed": 0},
    ]
    assert found["devices"] == [
        {"address": FIRST, "uuid": "", "type": "", "group": "30", "number": ""},
        {"address": TWIN, "uuid": MDEV, "type": "A10-4Q", "group": "40", "number": ""},
    ]
    # This boot's own list has the name.
    machine.files[sysfs.NAMES] = json.dumps({"558": "A10-8Q"})
    again = evidence(machine)
    assert again["cards"][0]["vgpus"] == {"A10-8Q": 1} and again["devices"][0]["type"] == "A10-8Q"


def test_a_card_that_was_changed_for_another_model_has_none_of_the_recorded_vgpus():
    machine = divided()
    machine.files[f"{PCI}/{TWIN}/device"] = "0x1eb8\n"
    card = evidence(machine)["cards"][1]
    assert (card["present"], card["vgpus"]) == (False, {})


def test_records_that_are_none_are_reported():
    machine = Machine()
    machine.files.update({RECORD: "[]", sysfs.RECORD: json.dumps({"cards": [{}]})})
    problem = evidence(machine)["problem"]
    assert f"{RECORD} can't be read: it is no record" in problem
    assert f"{sysfs.RECORD} can't be read: it has another form" in problem
