# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes in a simulated /proc and in this machine's; cgroups; and Xids in the kernel's log."""

from __future__ import annotations

import os
import subprocess
import time
import typing as t
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import host as host_module
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.host import by_address
from hypothesis import given
from hypothesis import strategies as st

POD = "c51e6a8f-4b2c-4b1e-9d57-0123456789ab"
ID = "ab" * 32
SCOPE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD.replace('-', '_')}.slice"
NOBODY = {
    **dict.fromkeys(("name", "cgroup", "pod_uid", "container_id", "runtime"), ""),
    "start_time": None,
    "static": False,
}


def stat(name: str = "python3", start: int = 500, pid: int = 42) -> str:
    return f"{pid} ({name}) S 1 {' '.join(['0'] * 17)} {start} {' '.join(['0'] * 30)}\n"


class Node:
    """A simulated node with one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = host_module.NodeHost(str(root / "proc"), str(root / "cgroup"), str(root / "kmsg"))

    def has(self, pid: int = 42, **files: str) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"stat": stat(), "cgroup": f"0::{SCOPE}/cri-containerd-{ID}.scope\n", **files}.items():
            (folder / name).write_text(text)

    def group(self, path: str, *pids: int) -> None:
        folder = self.root / "cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def version_2(self) -> None:
        self.group("")
        (self.root / "cgroup" / "cgroup.controllers").touch()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_process_of_a_pod(node: Node) -> None:
    node.has()
    assert node.host.process(42, 1000) == {
        "name": "python3",
        "start_time": "500",
        "cgroup": f"{SCOPE}/cri-containerd-{ID}.scope",
        "where": "pod",
        "pod_uid": POD,
        "container_id": ID,
        "runtime": "containerd",
        "static": False,
    }


@pytest.mark.parametrize("name", ["a b", "((", "x) S 1 2", "))", "", "a\tb", "(sd-pam)"])
def test_a_name_may_contain_any_character(node: Node, name: str) -> None:
    node.has(stat=stat(name))
    found = node.host.process(42, 1000)
    assert (found["name"], found["start_time"]) == (name.replace("\t", "?"), "500")


def test_an_unprintable_name(node: Node) -> None:
    node.has()
    (node.root / "proc" / "42" / "stat").write_bytes(stat("x").encode().replace(b"(x)", b"(\xff\x1b)"))
    assert node.host.process(42, 1000)["name"] in ("??", "\ufffd?")


def test_a_missing_process(node: Node) -> None:
    # No process has this one: the kernel's limit is far lower.
    assert node.host.process(1 << 30, 1000) == {**NOBODY, "where": "gone"}
    assert node.host.process(1 << 40, 1000) == {**NOBODY, "where": "gone"}
    # It ended between the two reads.
    node.has(pid=1 << 30)
    (node.root / "proc" / str(1 << 30) / "cgroup").unlink()
    assert node.host.process(1 << 30, 1000)["where"] == "gone"


def test_a_pid_reused_while_it_is_read_is_gone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.has()
    read = host_module.process_owner

    def change(text: str) -> t.Any:
        node.has(stat=stat(start=501))
        return read(text)

    monkeypatch.setattr(host_module, "process_owner", change)
    assert node.host.process(42, 1000) == {**NOBODY, "where": "gone"}


def test_a_process_younger_than_the_list_is_gone(node: Node) -> None:
    node.has()
    assert [node.host.process(42, listed)["where"] for listed in (498, 499, 500)] == ["gone", "pod", "pod"]


@pytest.mark.parametrize("text", ["", "42", "42 (x) S", "42 (x) " + "0 " * 18 + "x", "42 x S 1 " + "0 " * 40])
def test_a_malformed_stat_is_unknown(node: Node, text: str) -> None:
    node.has(stat=text)
    assert node.host.process(42, 1000) == {**NOBODY, "where": "unknown"}


def test_an_unreadable_or_hidden_process_is_unknown(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    assert node.host.process(42, 1000)["where"] == "unknown"
    monkeypatch.setattr(host_module.NodeHost, "_text", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert node.host.process(42, 1000) == {**NOBODY, "where": "unknown"}
    assert node.host.has_libvgpu(42, "500") is None


def test_a_real_process() -> None:
    host = host_module.NodeHost()
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL) as program:
        try:
            while host.process(program.pid, 1 << 60)["name"] != "sleep":
                time.sleep(0.01)
            listed = host.now()
            found = host.process(program.pid, listed)
            assert found["where"] in ("host", "container", "pod", "unknown")
            assert 0 <= listed - int(found["start_time"]) < 60 * os.sysconf("SC_CLK_TCK")
            assert host.has_libvgpu(program.pid, found["start_time"]) is False
            assert host.has_libvgpu(program.pid, "1") is None
        finally:
            program.kill()
    assert host.process(program.pid, host.now())["where"] == "gone"
    assert host.has_libvgpu(program.pid, found["start_time"]) is None


def test_hamis_library_is_found_anywhere_in_maps(node: Node) -> None:
    line = "7f00-7f01 r--p 00000000 00:1 2 /usr/lib/some.so\n"
    for before in (0, 1, 1500, (1 << 16) // len(line) - 1):
        for shift in range(0, 60, 5):
            node.has(maps=line * before + "x" * shift + "/usr/local/vgpu/libvgpu.so\n" + line * 50)
            assert node.host.has_libvgpu(42, "500") is True
    node.has(maps=line * 5000)
    assert node.host.has_libvgpu(42, "500") is False
    # A kernel thread or an ended process has no maps.
    node.has(maps="")
    assert node.host.has_libvgpu(42, "500") is None
    node.has(maps=line)
    assert node.host.has_libvgpu(42, "501") is None


def test_cgroups_of_pods_containers(node: Node) -> None:
    node.group(f"memory/kubepods/pod{POD}/{ID}", 1)
    assert node.host.container_cgroups() == (), "version 1"
    node.version_2()
    (node.root / "cgroup" / "memory").rename(node.root / "memory")
    other = "cd" * 32
    node.group("system.slice/ssh.service", 1)
    node.group(f"system.slice/docker-{ID}.scope", 2)
    node.group(SCOPE[1:])
    node.group(f"{SCOPE[1:]}/cri-containerd-{ID}.scope", 3)
    node.group(f"{SCOPE[1:]}/cri-containerd-{ID}.scope/inner", 4)
    node.group(f"{SCOPE[1:]}/crio-{other}.scope")
    node.group(f"{SCOPE[1:]}/crio-{other}.scope/container", 5)
    groups = node.host.container_cgroups()
    assert [(group.path, group.pod_uid, group.container_id) for group in groups] == [
        (f"{SCOPE}/cri-containerd-{ID}.scope", POD, ID),
        # Where crun puts the processes.
        (f"{SCOPE}/crio-{other}.scope/container", POD, other),
    ]
    assert [group.folder for group in groups] == [str(node.root / "cgroup") + group.path for group in groups]


def test_the_number_of_cgroups_is_limited(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.version_2()
    for number in range(30):
        node.group(f"a{number}")
    node.group(f"{SCOPE[1:]}/cri-containerd-{ID}.scope")
    assert len(node.host.container_cgroups()) == 1
    monkeypatch.setattr(host_module, "MAX_FOLDERS", 10)
    assert node.host.container_cgroups() == []
    node.group("/".join(["z"] * 40))


RECORDS = [
    "4,1,10,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "6,2,11,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, Ch 00000008",
    "6,3,12,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
    "6,4,13,-;NVRM: Xid (PCI:0001:C1:00.0): 48, pid=1\n SUBSYSTEM=pci\n DEVICE=+pci:0001:c1:00.0",
    # Records of programs have another facility than the kernel's.
    "14,5,14,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1",
    "6,6,15,-;usb 1-1: NVRM: Xid (PCI:0000:3b:00): 14, pid=1",
    "6,7,16,-;NVRM: Xid (PCI:0000:3b:00): x",
    "6,8,17,-;NVRM: GPU at PCI:0000:3b:00: GPU-…",
    "",
    "junk",
]


def test_xids_are_read_by_address() -> None:
    assert by_address(RECORDS) == {"00000000:3B:00": [79, 31], "00000001:C1:00": [48]}


@given(st.lists(st.text(max_size=80)))
def test_no_record_raises(records: list[str]) -> None:
    by_address([*records, *(f"6,1,1,-;NVRM: Xid {record}" for record in records)])


def test_the_kernels_log_record_by_record(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.root / "kmsg").touch()
    first, other = RECORDS[0].encode(), RECORDS[3].encode()
    reads = [first, BrokenPipeError(), OSError(22, "x"), b"\xff", other, BlockingIOError()]
    monkeypatch.setattr(os, "read", Mock(side_effect=reads))
    assert node.host.xids() == {"00000000:3B:00": [79], "00000001:C1:00": [48]}


def test_an_unreadable_log_is_unknown(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.host.xids() is None
    (node.root / "kmsg").touch()
    assert node.host.xids() == {}
    monkeypatch.setattr(os, "read", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    assert node.host.xids() is None


def test_this_machines_log_ends() -> None:
    found = host_module.NodeHost().xids()
    assert found is None or isinstance(found, dict)
