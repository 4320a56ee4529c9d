# SPDX-License-Identifier: GPL-3.0-or-later
"""Machines without a cluster: their choice, their scenarios, and the system that they are created from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from lab import commands, machines, rootfs
from lab.machines import KINDS
from lab.settings import Settings
from lab.shell import LabError

ROOT = Path(__file__).resolve().parents[3]


def test_kinds_are_chosen_by_name_or_group() -> None:
    assert [kind.name for kind in machines.chosen(["docker"])] == ["debian12-docker"]
    assert [kind.name for kind in machines.chosen(["suse", "debian13-containerd"])] == [
        "debian13-containerd",
        "suse15-containerd",
    ]
    assert machines.chosen([]) == list(KINDS.values())
    with pytest.raises(
        LabError, match=r"no kind or group of machines is named debian9; there are debian11-containerd, .* suse\.$"
    ):
        machines.chosen(["debian9"])


def test_every_group_has_a_scenario_and_its_inventory() -> None:
    scenarios = {path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")}
    assert scenarios == {"default", *(kind.group for kind in KINDS.values())}
    for name in scenarios - {"default"}:
        found = json.loads(subprocess.check_output([ROOT / "molecule" / name / "inventory" / "nodes", "--list"]))
        assert "gpu_nodes" in found
        assert (ROOT / "molecule" / name / "inventory" / "group_vars" / "all.yml").is_file()
        sequence = yaml.safe_load((ROOT / "molecule" / name / "molecule.yml").read_text())["scenario"]["test_sequence"]
        assert sequence.index("idempotence") < sequence.index("side_effect") < sequence.index("verify tests_after")


def test_a_cluster_beside_machines_shares_their_network_and_driver() -> None:
    known = {"settings": Settings(subnet="172.30.80.0/24", driver_version="580.82.07").as_dict()}
    found = commands._beside_machines(known, Settings(cards=4), {"cards"})
    assert (found.subnet, found.driver_version, found.cards) == ("172.30.80.0/24", "580.82.07", 4)
    with pytest.raises(LabError, match=r"LAB_DRIVER_VERSION is 570\.86\.15 but .*580\.82\.07"):
        commands._beside_machines(known, Settings(driver_version="570.86.15"), {"driver_version"})


def test_a_grown_system_is_keyed_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEGPU_CACHE", str(tmp_path / "cache"))
    made: list[str] = []

    def grow(folder: Path, *_rest: object) -> None:
        made.append(folder.name)
        (folder / "rootfs.tar").touch()

    monkeypatch.setattr(rootfs, "_grow", grow)
    part = tmp_path / "part"
    (part / "etc").mkdir(parents=True)
    (part / "etc" / "file").write_text("one")
    base = tmp_path / "node-bookworm-0" / "rootfs.tar"

    def grown(*packages: str) -> Path:
        return rootfs.grown("el9", base, packages, (part,), ("el", "6.1"))

    first = grown("dnf", "rpm")
    assert grown("rpm", "dnf") == first and len(made) == 1
    (part / "etc" / "file").write_text("two")
    second = grown("dnf", "rpm")
    (part / "etc" / "file").chmod(0o755)
    third = grown("dnf", "rpm")
    assert len({first, second, third}) == 3
    # Only the newest is worth its space; a system of another name stays.
    assert [path.exists() for path in (first, second, third)] == [False, False, True]
    rootfs.grown("el9-other", base, ("dnf",), (part,), ("el", "6.1"))
    assert third.exists()
