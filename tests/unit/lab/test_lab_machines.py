# SPDX-License-Identifier: GPL-3.0-or-later
"""Machines without a cluster: their kinds, their own files, and the lab's inventories."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from lab import commands, hardware, host, inventory, machines, network, publish, rootfs
from lab.aptsources import Source, of_suite
from lab.machines import KINDS
from lab.settings import Settings
from lab.shell import LabError

ROOT = Path(__file__).resolve().parents[3]


def test_kinds_cover_the_distributions_of_the_roles() -> None:
    assert {(kind.family, kind.distribution) for kind in KINDS.values()} == {
        ("debian", "debian11"),
        ("debian", "debian12"),
        ("debian", "debian13"),
        ("el", "rhel9"),
        ("suse", "opensuse15"),
    }
    for kind in KINDS.values():
        publish.tree(kind.distribution)
        assert kind.suite in publish.DEBIAN
        assert {"containerd"} <= set(kind.services)


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


def test_addresses_differ_from_each_other_and_from_the_nodes() -> None:
    subnet = "172.30.77.0/24"
    taken = network.addresses(subnet, ["cp1", "cp2", "cp3"], [f"gpu{number}" for number in range(1, 10)])
    own = [network.machine_address(subnet, machines.number(kind)) for kind in KINDS.values()]
    assert own[0] == "172.30.77.41"
    assert len({*own, *taken.values()}) == len(own) + len(taken)


def test_older_releases_are_detected() -> None:
    assert machines.is_older("bullseye", "bookworm") and not machines.is_older("trixie", "bookworm")
    assert not machines.is_older("bookworm", "bookworm")
    with pytest.raises(LabError, match="sid"):
        machines.is_older("bookworm", "sid")


def test_another_release_comes_from_the_same_archive() -> None:
    own = Source("http://mirror.example/debian", "bookworm", ("main",), "/k.gpg")
    assert of_suite(own, "trixie") == Source("http://mirror.example/debian", "trixie", ("main",), "/k.gpg")


def test_an_el_machine_has_its_distributions_repositories() -> None:
    (_routes, (path, mode, text)) = machines.files(KINDS["el9-containerd"], "http://r:8080/")
    assert (path, mode) == ("etc/yum.repos.d/rocky.repo", 0o644)
    found = configparser.ConfigParser(interpolation=None)
    found.read_string(text)
    # The driver's role checks by these names whether dkms is available.
    assert found.sections() == ["baseos", "crb", "epel"]
    for name in found.sections():
        assert found[name]["baseurl"] == f"http://r:8080/distribution/rhel9/{os.uname().machine}/"
        assert found[name]["gpgcheck"] == "1" and found[name]["gpgkey"].endswith("/RPM-GPG-KEY")
    assert machines.files(KINDS["debian12-docker"], "http://r/") == (("etc/kubegpu-lab/routes", 0o644, ""),)


@pytest.mark.parametrize(("family", "identity"), [("el", "rocky"), ("suse", "opensuse-leap")])
def test_identity_of_a_machine(family: str, identity: str) -> None:
    text = (ROOT / "lab" / "machine" / family / "usr" / "lib" / "os-release").read_text()
    found = dict(line.split("=", 1) for line in text.splitlines())
    assert found["ID"].strip('"') == identity
    assert "debian" not in text.lower()


def test_programs_of_rpm_are_required_only_for_rpm_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if "rpm" in name or "createrepo" in name else name)
    monkeypatch.setattr(host, "FILES", {})
    assert host.missing_packages() == []
    assert host.missing_packages(rpm=True) == ["createrepo-c", "rpm"]


def machine(group: str, address: str) -> dict[str, object]:
    return {"group": group, "address": address, "packages": {"driver": "cuda/x/"}}


STATE = {
    "phase": "machines",
    "ssh": {"user": "root", "key": ".lab/ssh/id", "known_hosts": ".lab/ssh/known_hosts"},
    "repository": {"url": "http://10.0.0.2:8080/"},
    "settings": {"driver_version": "580.95.05"},
    "nodes": {
        "cp1": {"role": "control_plane", "address": "10.0.0.1"},
        "gpu1": {"role": "gpu_node", "address": "10.0.0.3"},
    },
    "machines": {"one": machine("docker", "10.0.0.44"), "two": machine("suse", "10.0.0.46")},
}


def test_inventory_of_a_cluster() -> None:
    found = inventory.inventory({**STATE, "gpushare_image": "localhost/i:1"})
    assert (found["gpu_nodes"]["hosts"], found["control_plane"]["hosts"]) == (["gpu1"], ["cp1"])
    assert found["_meta"]["hostvars"]["gpu1"]["ansible_host"] == "10.0.0.3"
    assert found["all"]["vars"]["lab_repository"] == "http://10.0.0.2:8080"


def test_inventory_of_machines() -> None:
    found = inventory.machines(STATE)
    assert found["gpu_nodes"]["hosts"] == ["one", "two"]
    assert found["docker"]["hosts"] == ["one"]
    assert found["_meta"]["hostvars"]["two"]["ansible_host"] == "10.0.0.46"
    assert found["_meta"]["hostvars"]["two"]["lab_packages"] == {"driver": "cuda/x/"}
    assert found["all"]["vars"]["lab_repository"] == "http://10.0.0.2:8080"
    # A scenario has its own machines only.
    found = inventory.machines(STATE, "suse")
    assert found["gpu_nodes"]["hosts"] == ["two"] and "docker" not in found
    assert inventory.machines({}, "suse")["gpu_nodes"]["hosts"] == []


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


def test_uuids_of_machines_and_nodes_differ() -> None:
    nodes = [*(f"gpu{number}" for number in range(1, 10)), *KINDS]
    uuids = {hardware.card_uuid(node, index) for node in nodes for index in range(machines.CARDS)}
    assert len(uuids) == len(nodes) * machines.CARDS
