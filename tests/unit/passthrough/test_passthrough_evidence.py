# SPDX-License-Identifier: GPL-3.0-or-later
"""What verify gets of a machine's cards for virtual machines, from what the roles' modules have written."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import files
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.evidence import evidence
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import RECORD
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import restore, vgpu
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations
from pci_machine import AUDIO, CARD, DRIVERS, PCI, TWIN, UUIDS, Machine


def written(machine: Machine, root: Path) -> str:
    """Write the stand-in's files and links to a folder."""
    for path, text in machine.files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, str):
            target.write_text(text)
    for path, to in machine.links.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(to)
    return str(root)


def test_a_machine_without_records_says_nothing(tmp_path):
    assert evidence(written(Machine(), tmp_path)) is None


def test_what_is_bound_is_seen_with_its_files_and_its_twin(tmp_path):
    machine = Machine()
    machine.present(CARD)
    assert observations.problem("nvml_info", {"virtual_machines": evidence(written(machine, tmp_path / "typed"))}) == ""
    good = {"present": True, "driver": "vfio-pci", "group": "14", "foreign": [], "ruled": True}
    assert evidence(written(machine, tmp_path / "bound")) == {
        "problem": "",
        "functions": [
            {**good, "address": CARD, "uuid": UUIDS[CARD].lower()},
            {**good, "address": AUDIO, "uuid": ""},
        ],
        "missing": [],
        "others": 1,
        "vgpus": [],
    }
    # Its audio function got the host's driver, the rule is gone, and so is the twin's driver.
    machine.links[f"{PCI}/{AUDIO}/driver"] = f"{DRIVERS}/snd_hda_intel"
    machine.files[f"{PCI}/{CARD}/device"] = "0x1eb8\n"
    for path in (files.RULE, files.HOOK):
        del machine.files[path]
    found = evidence(written(machine, tmp_path / "damaged"))
    assert found is not None
    assert found["missing"] == [files.RULE, f"{files.HOOK} or {files.DRACUT}"]
    card, audio = found["functions"]
    assert (card["present"], card["foreign"], card["ruled"]) == (False, [f"{AUDIO} (snd_hda_intel)"], False)
    assert (audio["driver"], audio["present"]) == ("snd_hda_intel", True)


def test_vgpus_are_counted_by_either_framework(tmp_path):
    machine = Machine()
    first, second = "0000:01:00.4", "0000:01:00.5"
    for number, function in enumerate((first, second)):
        machine.links[f"{PCI}/{CARD}/virtfn{number}"] = f"../{function}"
    machine.files[f"{PCI}/{first}/nvidia/current_vgpu_type"] = "558\n"
    machine.files[f"{PCI}/{second}/nvidia/current_vgpu_type"] = "0\n"
    mdev = "c73f1fa6-489e-4834-9476-d70dabd98c40"
    machine.links[f"/sys/bus/mdev/devices/{mdev}"] = f"../../../devices/pci0000:00/{TWIN}/{mdev}"
    rows = [
        {"address": address, "device": "0x223610DE", "wanted": wanted, "before": {}, "functions": False}
        for address, wanted in ((CARD, {"A10-4Q": 1, "A10-8Q": 1}), (TWIN, {"A10-4Q": 1}))
    ]
    machine.files[restore.RECORD] = vgpu._recorded(rows)
    found = evidence(written(machine, tmp_path))
    assert found is not None and found["functions"] == [] == found["missing"]
    assert found["vgpus"] == [
        {"address": CARD, "wanted": 2, "found": 1},
        {"address": TWIN, "wanted": 1, "found": 1},
    ]


def test_records_that_are_none_are_reported(tmp_path):
    machine = Machine()
    machine.files.update({RECORD: "[]", restore.RECORD: json.dumps({"cards": [{}]})})
    found = evidence(written(machine, tmp_path))
    none = "is no record of this collection"
    assert found is not None and found["problem"] == f"{RECORD} {none}; {restore.RECORD} {none}"
