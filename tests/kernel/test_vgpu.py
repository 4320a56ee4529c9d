# SPDX-License-Identifier: GPL-3.0-or-later
"""vGPUs on a real kernel's mediated devices and virtual functions: what the program at boot does, MIG, a held vGPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import restore, sysfs, vgpu
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu.machine import RealMachine
from fakes import ALONE, DEVICES, card, held, module, write

from lab.guest.system import NVIDIA, TOOLS

FIRST = card(ALONE[0]).address


@pytest.fixture
def tools():
    """The simulated sriov-manage and nvidia-smi."""
    for name, place in NVIDIA.items():
        target = Path("/", place, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOOLS / name, target)
    yield
    for name, place in NVIDIA.items():
        Path("/", place, name).unlink()


def clear(local: restore.Local) -> None:
    full = sysfs.card(local, FIRST)
    for made in full.vgpus:
        restore.remove(local, full, made)


def verified(row: restore.Row, vgpus: dict[str, int], made: tuple[sysfs.VGpu, ...]) -> None:
    """Compare what verify gets of the recorded card with what was made on it."""
    record = Path(sysfs.RECORD)
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
        "instances": {},
        "places": [],
        "before": [],
        "mig_before": None,
        "functions": framework != "card",
    }
    assert restore.restore(local, [row]) == []
    made = sysfs.card(local, FIRST).vgpus
    assert [vgpu.name for vgpu in made] == ["A10-12Q", "A10-12Q"]
    assert restore.restore(local, [row]) == [] and sysfs.card(local, FIRST).vgpus == made
    verified(row, {"A10-12Q": 2}, made)
    [seen] = [each for each in gpus.pci(RealSystem())[0] if each["address"] == FIRST]
    assert {(each["address"], each["uuid"] or each["address"]) for each in seen["vgpu_host"]["vgpus"]} == {
        (vgpu.function, vgpu.key) for vgpu in made
    }
    # The record of a run to which nobody has told the names.
    Path(sysfs.NAMES).unlink(missing_ok=True)
    full = sysfs.card(local, FIRST)
    clear(local)
    assert sysfs.card(local, FIRST).vgpus == ()
    verified(row, {}, ())
    restore.create(local, FIRST, full.counts(), {})
    assert [vgpu.id for vgpu in sysfs.card(local, FIRST).vgpus] == [vgpu.id for vgpu in made]
    clear(local)
    assert len(restore.restore(local, [{**row, "wanted": {"A10-24Q": 2}}])) == 1
    clear(local)


@pytest.mark.parametrize("framework", ["mdev", "vendor"])
@pytest.mark.parametrize(
    ("wanted", "instances"),
    [pytest.param({"A10-1-6C": 2}, {"1g.6gb": 2}, marks=pytest.mark.long), ({"A10-4Q": 2, "A10-12Q": 1}, {})],
)
def test_what_enabling_the_functions_forgets_comes_after_them(machine, tools, framework, wanted, instances):
    machine.plug(card(ALONE[0], acs=True, vfs=4))
    machine.driver(vgpu=framework)
    local = restore.Local()
    restore.create(local, FIRST, wanted, instances)
    assert sysfs.card(local, FIRST).counts() == wanted
    clear(local)
    if instances:
        assert restore.mig(local, FIRST).counts() == instances
        restore.remove_instances(local, FIRST, {"1g.6gb": 1})
        assert restore.mig(local, FIRST).counts() == {"1g.6gb": 1}
        restore.remove_instances(local, FIRST, None)
        assert not restore.mig(local, FIRST).on


def test_a_vgpu_that_was_opened_a_moment_ago_doesnt_keep_the_run_waiting(machine, tools, monkeypatch):
    """The kernel removes a mediated device only when nobody has it open; the writer can't even be killed until then."""
    machine.plug(card(ALONE[0]))
    machine.driver(vgpu="mdev")
    monkeypatch.setattr(restore, "WRITE_SECONDS", 2.0)
    node = RealMachine()
    restore.create(node, FIRST, {"A10-4Q": 1}, {})
    [made] = sysfs.card(node, FIRST).vgpus
    reconciler = vgpu.Reconciler((), node, "/usr/bin/python3")
    facts = reconciler.observe()
    with held(f"{FIRST}/{made.key}"):
        with pytest.raises(vgpu.ShareError) as error:
            reconciler.apply(facts, vgpu.Plan((vgpu.Change("", "", "", vgpu.Fill(FIRST, {})),)))
        details = error.value.details
        assert (details["code"], details["address"], details["seconds"]) == ("vgpu_timeout", FIRST, 2.0)
        assert Path(f"/proc/{details['pid']}").exists()
        assert [row["command"] for row in details["held"]] == [Path("/proc/self/comm").read_text().strip()]
    for _second in range(300):
        if not sysfs.card(node, FIRST).vgpus:
            break
        restore.time.sleep(0.1)
    assert sysfs.card(node, FIRST).vgpus == ()
