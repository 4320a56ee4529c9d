# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's hardware files, capabilities, versions, images and changes of the machine."""

from __future__ import annotations

import io
import json
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from lab import archive, build, cluster, components, engine, hardware, host, images, nodes, paths
from lab.settings import Settings
from lab.shell import LabError


def test_the_file_of_cards_describes_each_card() -> None:
    lines = hardware.cards_file("gpu1", 2, 16384, "580.95.05").splitlines()
    assert lines[1:3] == ["driver 580.95.05", "cuda 13000"]
    uuid = "GPU-de614f79-82f2-5091-a43e-710dd89930d0"
    name = "name=Simulated_NVIDIA_GPU_16GiB"
    assert lines[3] == f"card 0 uuid={uuid} minor=0 memory=16384 bus=0000:01:00.0 {name}"


def test_hardware_folders(tmp_path: Path) -> None:
    hardware.write_node(tmp_path / "gpu1", "gpu1", 2, 16384, "580.95.05")
    hardware.write_node(tmp_path / "cp1", "cp1", 0, 16384, "580.95.05")
    assert (tmp_path / "gpu1/pci/0000:02:00.0/vendor").read_text() == "0x10de\n"
    assert (tmp_path / "gpu1/pci/0000:01:00.0/class").read_text() == "0x030200\n"
    assert list((tmp_path / "cp1/pci").iterdir()) == []
    assert not (tmp_path / "cp1/hardware").exists()


def test_flags_of_a_node_follow_the_machines_capabilities_and_cgroups() -> None:
    for bounding, privileged in ((0x1FFFFFFFFFF, True), (0x1FFFEFFFFFF, False), (0, False)):
        flags = engine.node_flags(bounding, unified=False)
        assert ("--privileged" in flags) is privileged
        assert ("--cap-drop=SYS_RESOURCE" in flags) is not privileged
    assert "--tmpfs=/sys/fs/cgroup:rw,exec,dev" in engine.node_flags(0, unified=False)
    assert not any("cgroup:" in flag for flag in engine.node_flags(0, unified=True))


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


def test_go_version() -> None:
    assert build.go_version("go version go1.26.8 linux/amd64") == (1, 26)
    assert build.go_version("go version go1.27rc1 linux/arm64") == (1, 27)
    assert build.go_version("go: cannot find GOROOT") is None


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


def test_component_images() -> None:
    listed = [f"{each}:v1.36.3" for each in (*components.CONTROL_PLANE, "kube-proxy")]
    listed += ["coredns/coredns:v1.14.2", "pause:3.10.2", "etcd:3.6.8-0"]
    names = components.references("".join(f"registry.k8s.io/{name}\n" for name in listed), "3.6.16")
    assert names["etcd"] == "registry.k8s.io/etcd:3.6.16-0"
    assert names["pause"] == "registry.k8s.io/pause:3.10.2"
    with pytest.raises(LabError):
        components.references("registry.k8s.io/pause:3.10.2\n", "3.6.16")


def test_an_archive_has_the_layout_that_runtimes_import(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("hello")
    layer = archive.layer_of({"usr/local/bin/program": program}, tmp_path / "layer")
    image = archive.Image("example/one:1", (layer,), entrypoint=("/usr/local/bin/program",))
    archive.write([image, archive.Image("example/two:1", (layer,))], tmp_path / "out.tar", "amd64")
    with tarfile.open(tmp_path / "out.tar") as tar:
        names = tar.getnames()

        def read(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        first, second = json.loads(read("manifest.json"))
        assert first["RepoTags"] == ["example/one:1"]
        assert json.loads(read(first["Config"]))["config"]["Entrypoint"] == ["/usr/local/bin/program"]
        assert first["Layers"] == second["Layers"]
        assert names.count(first["Layers"][0]) == 1
        with tarfile.open(fileobj=io.BytesIO(read(first["Layers"][0]))) as inner:
            assert inner.getmember("usr/local/bin/program").mode == 0o755
            assert inner.getmember("usr/local").isdir()


@pytest.mark.parametrize("restricted", [True, False])
def test_containerd_configuration(restricted: bool) -> None:
    found = tomllib.loads(
        cluster.render("containerd.toml.j2", pause_image="registry/pause:1", restrict_oom_score_adj=restricted)
    )
    runtime = found["plugins"]["io.containerd.cri.v1.runtime"]
    assert found["version"] == 3
    assert runtime.get("restrict_oom_score_adj", False) is restricted
    assert runtime["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is True
    assert found["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == "registry/pause:1"


@pytest.mark.parametrize("control_plane", [True, False])
def test_kubeadm_join(control_plane: bool) -> None:
    values = {"token": "t", "endpoint": "10.0.0.1", "ca_hash": "a", "certificate_key": "k", "node": "n"}
    text = cluster.render("kubeadm-join.yaml.j2", **values, address="10.0.0.2", control_plane=control_plane)
    found = yaml.safe_load(text)
    assert ("controlPlane" in found) is control_plane
    assert found["apiVersion"] == "kubeadm.k8s.io/v1beta4"


def test_node_names_in_known_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SSH", tmp_path)
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "gpu1.pub").write_text("ssh-ed25519 AAAA gpu1\n")
    assert nodes.known_hosts({"gpu1": "10.0.0.9"}) == "10.0.0.9,gpu1 ssh-ed25519 AAAA\n"


def test_wheels_are_requested_for_the_platforms_of_the_base() -> None:
    names = images.platforms("x86_64", newest=36)
    assert names[0] == "manylinux_2_36_x86_64"
    assert "manylinux2014_x86_64" in names
    assert "manylinux_2_37_x86_64" not in names


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
