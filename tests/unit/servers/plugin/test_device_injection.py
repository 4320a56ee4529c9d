# SPDX-License-Identifier: GPL-3.0-or-later
"""The injection of cards into containers: nodes with CDI names, the parsed specifications, the responses to kubelet."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import typing as t
from pathlib import Path

import pytest
from gpushare.kubelet.errors import InvalidIds
from gpushare.node import injection
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason
from gpushare.shared._core.types import JsonObject
from hypothesis import given
from hypothesis import strategies as st
from plugin_fakes import NODE, Node, Rejected, environment, make_pod, seen, until

from lab import build, packages
from lab.shell import LabError


def node_object(
    kubelet: str = "v1.36.3", runtime: str = "containerd://2.4.0", announced: str | None = None
) -> JsonObject:
    return {
        "metadata": {"name": NODE, "annotations": {} if announced is None else {contract.NODE_RUNTIME_CDI: announced}},
        "status": {"nodeInfo": {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}},
    }


def specification(path: Path, *names: str, kind: str = "nvidia.com/gpu") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    edits = {"deviceNodes": [{"path": "/dev/nvidia0"}]}
    devices = [{"name": name, "containerEdits": edits} for name in names]
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": devices}))


# --------------------------------------------------------------------------- pure


OLD_KUBELET = "may not pass CDI names on, as 1.31 and later do"
NO_CDI = "isn't known to have CDI turned on"


@pytest.mark.parametrize(
    ("node", "obstacle"),
    [
        (node_object("v1.31.0"), ""),
        (node_object("v1.32.4+rke2r1", "containerd://2.0.4-k3s2"), ""),
        (node_object("v1.33.1", "cri-o://1.33.0"), ""),
        (node_object(runtime="docker://28.1.0", announced="true"), ""),
        (node_object(announced="perhaps"), ""),
        (node_object("v1.30.9"), f"kubelet v1.30.9 {OLD_KUBELET}"),
        (node_object(""), f"kubelet of an unknown version {OLD_KUBELET}"),
        ({}, f"kubelet of an unknown version {OLD_KUBELET}"),
        (node_object(runtime="containerd://1.7.27"), f"the container runtime containerd://1.7.27 {NO_CDI}"),
        (node_object(runtime="docker://28.1.0"), f"the container runtime docker://28.1.0 {NO_CDI}"),
        (node_object(runtime=""), f"the container runtime of an unknown kind {NO_CDI}"),
        (node_object(announced="false"), "the container runtime has CDI turned off"),
    ],
)
def test_obstacle(node: JsonObject, obstacle: str) -> None:
    assert injection.obstacle(node) == obstacle


def test_the_later_folder_wins_and_two_files_of_one_folder_make_a_device_unusable() -> None:
    assert injection.resolve_devices([[{"a", "b"}, {"b", "c"}], [{"c"}]]) == {"a", "c"}
    assert injection.resolve_devices([[{"a"}], [{"a"}, {"a", "b"}]]) == {"b"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "devices", "name"]), inner),
    max_leaves=10,
)


@given(json_values)
def test_any_specification_is_parsed(document: t.Any) -> None:
    assert isinstance(injection.device_names(document), set)
    assert injection.device_names({"kind": "nvidia.com/gpu", "devices": document}) is not None


# --------------------------------------------------------------------------- the specifications


def test_specifications_are_read_when_they_change(tmp_path: Path) -> None:
    early, late = tmp_path / "etc", tmp_path / "run"
    one = injection.Injection(injection.AUTO, (early, late))
    one.node(node_object())
    assert one.devices(["GPU-a"]) == ()
    specification(late / "nvidia.yaml", "0", "GPU-a", "all")
    assert one.devices(["GPU-a"]) == ("nvidia.com/gpu=GPU-a",)
    assert one.devices(["GPU-a", "GPU-b"]) == ()
    specification(early / "more.json", "GPU-b")
    assert one.devices(["GPU-a", "GPU-b"]) == ("nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b")
    # Replaced by a rename, as generators do, with a file of the same length.
    specification(tmp_path / "new", "0", "GPU-x", "all")
    os.replace(tmp_path / "new", late / "nvidia.yaml")
    assert one.devices(["GPU-a"]) == ()
    (late / "nvidia.yaml").unlink()
    assert one.devices(["GPU-b"]) == ("nvidia.com/gpu=GPU-b",)


def test_real_yaml_other_kinds_and_broken_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "nvidia.yaml").write_text(
        '---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n  containerEdits: {}\n'
        "- name: GPU-a\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n"
    )
    (tmp_path / "broken.yaml").write_text("kind: [nvidia.com/gpu\n")
    (tmp_path / "broken.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "notes.txt").write_text("kind: nvidia.com/gpu")
    specification(tmp_path / "other.json", "GPU-b", kind="k8s.device-plugin.nvidia.com/gpu")
    one = injection.Injection(injection.AUTO, (tmp_path,))
    one.node(node_object())
    with caplog.at_level(logging.WARNING):
        assert one.devices(["GPU-a"]) == ("nvidia.com/gpu=GPU-a",)
    assert one.devices(["GPU-b"]) == ()
    assert len([row for row in caplog.messages if "can't be read as a CDI specification" in row]) == 2
    assert injection.Injection(injection.ENVVAR, (tmp_path,)).devices(["GPU-a"]) == ()


def test_cdi_mode_never_falls_back(tmp_path: Path) -> None:
    one = injection.Injection(injection.CDI, (tmp_path,))
    reason = f"no CDI specification in {tmp_path} names nvidia.com/gpu=GPU-a"
    assert one.refusal("GPU-a") == (Reason.CDI_UNAVAILABLE, reason)
    with pytest.raises(InvalidIds) as caught:
        one.devices(["GPU-a"])
    assert caught.value.refusal == (Reason.CDI_UNAVAILABLE, reason)
    # An explicit setting overrides the runtime's version in the API, known or not.
    specification(tmp_path / "nvidia.json", "GPU-a")
    one.node(node_object("v1.28.0"))
    assert one.refusal("GPU-a") is None and one.devices(["GPU-a"]) == ("nvidia.com/gpu=GPU-a",)


def test_the_injection_mode_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = injection.Injection(injection.AUTO, (tmp_path,))
    used: list[str] = []
    one.on_used = used.append
    with caplog.at_level(logging.INFO):
        one.report([])
        one.report(["GPU-a"])
        one.report(["GPU-a"])
        one.node(node_object())
        one.report(["GPU-a"])
        specification(tmp_path / "nvidia.json", "GPU-a")
        one.report(["GPU-a"])
        one.report(["GPU-a"])
    assert caplog.messages == [
        "containers get their cards by envvar: the node hasn't been read from the API yet",
        f"containers get their cards by envvar: no CDI specification in {tmp_path} names nvidia.com/gpu=GPU-a",
        "containers get their cards by cdi",
    ]
    assert used == ["envvar", "envvar", "cdi"]


@pytest.fixture
def driver_root(tmp_path: Path) -> Path:
    """A driver of two simulated cards, with their device nodes."""
    if os.geteuid() or not shutil.which("gcc"):
        pytest.skip("only root can make device nodes, and gcc the simulated driver")
    packages.compile_driver(tmp_path, "580.95.05")
    libraries = tmp_path / "usr" / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    for one in ("libnvidia-ml.so", "libcuda.so"):
        found = next(tmp_path.rglob(f"{one}.580.95.05"))
        if found.parent != libraries:
            shutil.copy(found, libraries)
        (libraries / f"{one}.1").unlink(missing_ok=True)
        (libraries / f"{one}.1").symlink_to(f"{one}.580.95.05")
    (tmp_path / "dev").mkdir()
    try:
        for name, minor in (("nvidia0", 0), ("nvidia1", 1), ("nvidiactl", 255)):
            os.mknod(tmp_path / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(195, minor))
    except PermissionError as error:
        pytest.skip(f"no device nodes on this machine: {error}")
    rows = [
        f"card {n} uuid={seen(n).uuid} minor={n} memory=16640 bus=0000:0{n + 1}:00.0 name=Simulated_GPU" for n in (0, 1)
    ]
    (tmp_path / "cards").write_text("\n".join(["driver 580.95.05", "cuda 13000", *rows, ""]))
    return tmp_path


def test_specifications_of_nvidias_generator_are_parsed(driver_root: Path) -> None:
    """The names by which a runtime finds the cards are those that kubelet is given."""
    try:
        generator = build.binaries("toolkit") / "nvidia-ctk"
    except (LabError, OSError) as error:
        pytest.skip(f"no container toolkit: {error}")
    folder = driver_root / "cdi"
    places = (f"--driver-root={driver_root}", f"--dev-root={driver_root}", f"--output={folder / 'nvidia.yaml'}")
    subprocess.run(
        [generator, "cdi", "generate", "--mode=nvml", *places],
        env={
            "PATH": os.environ["PATH"],
            "KUBEGPU_SIM_CARDS": str(driver_root / "cards"),
            "LD_LIBRARY_PATH": str(driver_root / "usr" / "lib64"),
        },
        check=True,
        capture_output=True,
        timeout=60,
    )
    one = injection.Injection(injection.CDI, (folder,))
    uuids = [seen(n).uuid for n in (0, 1)]
    assert one.devices(uuids) == tuple(f"nvidia.com/gpu={uuid}" for uuid in uuids)
    assert one.refusal("GPU-other") is not None


# --------------------------------------------------------------------------- on a node


@pytest.fixture
def node(make: t.Callable[..., Node]) -> Node:
    return make()


def test_a_container_gets_cdi_names_and_a_void_variable(node: Node) -> None:
    specification(node.specifications / "nvidia.json", seen(0).uuid, seen(1).uuid)
    node.up()
    until(lambda: node.running.injection.devices([seen(0).uuid]))
    pod = node.run(make_pod("pod", 3, booked=1))
    uid = pod["metadata"]["uid"]
    assert node.kubelet.cdi[uid] == {"c0": [f"nvidia.com/gpu={seen(1).uuid}"]}
    assert node.kubelet.envs[uid]["c0"] == environment("void", card=1, pod=3, container=3)
    until(lambda: node.annotations(pod)[contract.POD_ASSIGNED] == "true")
    two = node.run(make_pod("two", 4, booked=(0, 1), requests={contract.POD_CARD_COUNT: "2"}))
    assert node.kubelet.cdi[two["metadata"]["uid"]] == {
        "c0": [f"nvidia.com/gpu={seen(0).uuid}", f"nvidia.com/gpu={seen(1).uuid}"]
    }
    # Without the specification the variable is used again.
    (node.specifications / "nvidia.json").unlink()
    after = node.run(make_pod("after", 3, booked=1))
    assert node.kubelet.cdi[after["metadata"]["uid"]] == {"c0": []} and node.visible(after) == {seen(1).uuid}


def test_cdi_alone_shares_no_card_that_has_no_cdi_name(node: Node) -> None:
    specification(node.specifications / "nvidia.json", seen(1).uuid)
    node.kubelet.start()
    node.start_plugin(injection="cdi")
    until(lambda: len(node.kubelet.healthy) == 16)
    reason = f"no CDI specification in {node.specifications} names nvidia.com/gpu={seen(0).uuid}"
    until(lambda: [card.reason for card in contract.node_cards(node.kube.node())] == [reason, ""])
    node.run(make_pod("filler", 15))
    with pytest.raises(Rejected, match="available: 1"):
        node.run(make_pod("pod", 4))
    specification(node.specifications / "nvidia.json", seen(0).uuid, seen(1).uuid)
    until(lambda: len(node.kubelet.healthy) == 32)
    pod = node.run(make_pod("pod2", 4, booked=0))
    assert node.kubelet.cdi[pod["metadata"]["uid"]] == {"c0": [f"nvidia.com/gpu={seen(0).uuid}"]}
