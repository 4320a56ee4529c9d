# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's versions and programs, its folders, and its changes of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import build, engine, host, nodeimage, paths
from lab.settings import Settings
from lab.shell import LabError


def test_chain_removal_removes_the_engines_rules_and_no_others() -> None:
    rules = """\
-P INPUT ACCEPT
-P FORWARD DROP
-N DOCKER
-N DOCKER-USER
-N MINE
-A INPUT -s 10.0.0.0/8 -j MINE
-A FORWARD -j DOCKER-USER
-A FORWARD -o kubegpu-lab -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -i eth9 -m comment --comment "a b" -j ACCEPT
-A DOCKER-USER -j RETURN
"""
    assert engine.chain_removal(rules) == [
        ["-D", "FORWARD", "-j", "DOCKER-USER"],
        ["-D", "FORWARD", "-o", "kubegpu-lab", "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"],
        ["-F", "DOCKER"],
        ["-F", "DOCKER-USER"],
        ["-X", "DOCKER"],
        ["-X", "DOCKER-USER"],
    ]


@pytest.mark.parametrize(
    ("files", "weight"),
    [
        (["cpu/cpu.shares"], ("cpu/kubegpu-lab/cpu.shares", "16384")),
        (["cgroup.controllers", "cgroup.subtree_control"], ("kubegpu-lab/cpu.weight", "1600")),
    ],
)
def test_the_labs_cgroup_has_sixteen_times_the_weight_of_a_process(
    tmp_path: Path, files: list[str], weight: tuple[str, str]
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    # A second start finds the folder of the first.
    for _ in range(2):
        assert engine.give_weight(tmp_path) == tmp_path / weight[0]
    assert (tmp_path / weight[0]).read_text() == weight[1]
    if "cgroup.subtree_control" in files:
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_machine_without_a_hierarchy_for_processor_time_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        engine.give_weight(tmp_path)


def test_versions_of_kubernetes() -> None:
    assert build.kubernetes(Settings().kubernetes_version) == build.SETS["kubernetes"]
    assert "gitMinor=37 " in build.SETS["kubernetes"].flags()[-1]
    older = build.kubernetes("1.36.3")
    assert "gitVersion=v1.36.3" in older.flags()[-1]
    assert "1.37.2" not in (older.folder / "go.mod").read_text()
    with pytest.raises(LabError, match=r"LAB_KUBERNETES_VERSION is '1.35.0', but must be one of 1.37.2, 1.36.3"):
        build.kubernetes("1.35.0")


def test_given_binaries_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_BIN", str(tmp_path))
    with pytest.raises(LabError, match=r"LAB_BIN: .* has no etcd of etcd"):
        build.binaries("etcd")
    (tmp_path / "etcd").touch(mode=0o755)
    assert build.binaries("etcd") == tmp_path


def test_made_once_never_leaves_an_incomplete_folder(tmp_path: Path) -> None:
    target = tmp_path / "made"
    (tmp_path / ".tmp-made-killed").mkdir()
    with pytest.raises(RuntimeError), paths.made_once(target) as fresh:
        assert fresh is not None
        (fresh / "half").touch()
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with paths.made_once(target) as fresh:
        assert fresh is not None
        (fresh / "whole").touch()
    assert (target / "whole").exists()
    with paths.made_once(target) as fresh:
        assert fresh is None


def test_missing_rights_and_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="as root"):
        host.prepare()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name in ("apt-get", "debootstrap") else name)
    with pytest.raises(LabError, match=r"no apt, and .* missing: debootstrap\.$"):
        host.prepare()


def test_limits_are_raised_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instances, watches = (tmp_path / "sys" / name for name in host.LIMITS)
    instances.parent.mkdir(parents=True)
    instances.write_text("128\n")
    watches.write_text("9999999\n")
    monkeypatch.setattr(host, "RUN", tmp_path / "run")
    monkeypatch.setattr(host, "_LIMITS_BEFORE", tmp_path / "run" / "limits.json")
    monkeypatch.setattr(host, "_SYSCTL", tmp_path / "sys")
    host.raise_limits()
    host.raise_limits()
    assert (int(instances.read_text()), int(watches.read_text())) == (2048, 9999999)
    host.restore_limits()
    assert (int(instances.read_text()), int(watches.read_text())) == (128, 9999999)
    assert not (tmp_path / "run").exists()
    host.restore_limits()


def test_the_nodes_image_is_the_same_after_tests_of_the_nodes_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodeimage, "HERE", tmp_path)
    monkeypatch.setattr(nodeimage, "BINARIES", {})
    program = tmp_path / "rootfs" / "pci_bus.py"
    program.parent.mkdir()
    program.write_text("1")
    before = nodeimage._key(Path("/rootfs"), {})
    (program.parent / "__pycache__").mkdir()
    (program.parent / "__pycache__" / "pci_bus.cpython-313.pyc").touch()
    assert nodeimage._key(Path("/rootfs"), {}) == before
    program.write_text("2")
    assert nodeimage._key(Path("/rootfs"), {}) != before
