# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that restores vGPUs at boot, on a real kernel's mediated devices and virtual functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import restore
from fakes import ALONE, DEVICES, card, module, write

FIRST = card(ALONE[0]).address


def verified(row: restore.Row, vgpus: dict[str, int], made: tuple[restore.VGpu, ...]) -> None:
    """Compare what verify gets of the recorded card with what was made on it."""
    record = Path(restore.RECORD)
    record.parent.mkdir(parents=True, exist_ok=True)
    try:
        record.write_text(json.dumps({"format": restore.FORMAT, "cards": [row]}))
        evidence = module("virtual_machines_info")["virtual_machines"]
    finally:
        record.unlink()
    [card] = evidence["cards"]
    assert (card["present"], card["wanted"], card["vgpus"], card["unnamed"]) == (True, row["wanted"], vgpus, 0)
    assert {(device["address"], device["uuid"] or device["address"]) for device in evidence["devices"]} == {
        (vgpu.function, vgpu.key) for vgpu in made
    }
    groups = [device["group"] for device in evidence["devices"]]
    assert len(set(groups)) == len(made) and all(Path("/sys/kernel/iommu_groups", group).exists() for group in groups)


@pytest.mark.parametrize("framework", ["card", "mdev", "vendor"])
def test_vgpus_are_made_once_and_a_full_card_tells_no_names(machine, framework):
    machine.plug(card(ALONE[0], acs=True, vfs=0 if framework == "card" else 4), card(ALONE[1]))
    machine.driver(vgpu="vendor" if framework == "vendor" else "mdev")
    if framework != "card":
        write(DEVICES / FIRST / "sriov_numvfs", "3")
    local = restore.Local()
    row: restore.Row = {
        "address": FIRST,
        "device": "0x223610DE",
        "wanted": {"A10-12Q": 2},
        "before": {},
        "functions": framework != "card",
    }
    assert restore.restore(local, [row]) == []
    made = restore.card(local, FIRST).vgpus
    assert [vgpu.name for vgpu in made] == ["A10-12Q", "A10-12Q"]
    assert restore.restore(local, [row]) == [] and restore.card(local, FIRST).vgpus == made
    verified(row, {"A10-12Q": 2}, made)
    [seen] = [each for each in gpus.pci(RealSystem())[0] if each["address"] == FIRST]
    assert {(each["address"], each["uuid"] or each["address"]) for each in seen["vgpu_host"]["vgpus"]} == {
        (vgpu.function, vgpu.key) for vgpu in made
    }
    # The record of a run to which nobody has told the names.
    Path(restore.NAMES).unlink(missing_ok=True)
    full = restore.card(local, FIRST)
    for vgpu in full.vgpus:
        restore.remove(local, full, vgpu)
    assert restore.card(local, FIRST).vgpus == ()
    verified(row, {}, ())
    restore.create(local, FIRST, full.counts())
    assert [vgpu.id for vgpu in restore.card(local, FIRST).vgpus] == [vgpu.id for vgpu in made]
    for vgpu in restore.card(local, FIRST).vgpus:
        restore.remove(local, full, vgpu)
    assert len(restore.restore(local, [{**row, "wanted": {"A10-24Q": 2}}])) == 1
    for vgpu in restore.card(local, FIRST).vgpus:
        restore.remove(local, full, vgpu)
