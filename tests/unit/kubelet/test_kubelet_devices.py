# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet_devices_info: the module's main() on real and damaged directories, sockets and processes."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet import source as sources
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.devices import collect
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.root import KUBELETS, running_root
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.source import (
    Missing,
    NodeKubelet,
    Process,
    Unreadable,
)
from ansible_collections.kubegpu.share.plugins.modules import kubelet_devices_info
from hypothesis import given
from hypothesis import strategies as st
from real_kubelet import GPU, MEMORY, allocate_response, checkpoint, entry, list_response, pod_resources

GPUS = ["aliyun.com/gpu-", "nvidia.com/"]
CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"
PODS = list_response({"default/one": {"main": {MEMORY: ["s-0", "s-1"]}}})


@pytest.fixture
def root():
    """kubelet's directory, with a short name: the path of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as folder:
        yield filled(Path(folder))


def filled(tmp_path):
    (tmp_path / "device-plugins").mkdir()
    (tmp_path / "pod-resources").mkdir()
    (tmp_path / CHECKPOINT).write_bytes(
        checkpoint(
            entry({"0": ["s-0", "s-1"]}, response=allocate_response({"NVIDIA_VISIBLE_DEVICES": GPU})),
            registered={MEMORY: ["s-0", "s-1", "s-2"]},
        )
    )
    return tmp_path


@pytest.fixture
def bound():
    """Create sockets without a server."""
    made = []

    def make(path):
        one = socket.socket(socket.AF_UNIX)
        made.append(one)
        one.bind(str(path))
        one.listen()
        return one

    yield make
    for one in made:
        one.close()


def call(capsys, **arguments):
    with patch_module_args(arguments), pytest.raises(SystemExit) as ended:
        kubelet_devices_info.main()
    return {**json.loads(capsys.readouterr().out), "rc": ended.value.code}


# --------------------------------------------------------------------------- the module


def test_module(root, bound, capsys):
    bound(root / "device-plugins" / "aliyungpushare.sock")
    (root / "device-plugins" / "DEPRECATION").write_text("")
    os.symlink("aliyungpushare.sock", root / "device-plugins" / "link.sock")
    with serve(root, lambda request, context: PODS):
        found = call(capsys, root=str(root))
    assert found["rc"] == 0 and found["changed"] is False
    other = call(capsys, root=str(root), resources=["nvidia.com/"])["kubelet"]["checkpoint"]
    assert (other["state"], other["entries"], other["registered"]) == ("ok", [], {})
    kubelet = found["kubelet"]
    assert kubelet["root"] == str(root) and kubelet["sockets"] == ["aliyungpushare.sock"]
    assert kubelet["checkpoint"]["state"] == "ok"
    assert kubelet["checkpoint"]["entries"][0]["envs"] == {"NVIDIA_VISIBLE_DEVICES": GPU}
    assert kubelet["checkpoint"]["registered"] == {MEMORY: ["s-0", "s-1", "s-2"]}
    containers = [{"name": "main", "devices": [{"resource": MEMORY, "ids": ["s-0", "s-1"]}], "claims": []}]
    pod = {"namespace": "default", "name": "one", "containers": containers}
    assert kubelet["pod_resources"] == {"state": "ok", "problem": "", "pods": [pod]}


def test_a_machine_without_kubelet(tmp_path, capsys):
    found = call(capsys, root=str(tmp_path / "none"), _ansible_check_mode=True)["kubelet"]
    assert found["checkpoint"]["state"] == found["pod_resources"]["state"] == "missing"
    assert "doesn't exist" in found["checkpoint"]["problem"] and "doesn't exist" in found["pod_resources"]["problem"]
    assert found["sockets"] == []


@pytest.mark.parametrize(
    "arguments", [{"resources": []}, {"resources": ["nvidia.com/", ""]}, {"root": "var/lib/kubelet"}], ids=str
)
def test_invalid_options(arguments, capsys, root):
    found = call(capsys, **{"root": str(root), **arguments})
    assert found["failed"] and next(iter(arguments)) in found["msg"] and "Traceback" not in found["msg"]


# --------------------------------------------------------------------------- the checkpoint's file


def large(path):
    path.write_bytes(b"")
    os.truncate(path, 200 * 1024 * 1024)


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (lambda path: None, "missing", "doesn't exist"),
        (lambda path: path.mkdir(), "unreadable", "isn't a regular file"),
        (os.mkfifo, "unreadable", "isn't a regular file"),
        (lambda path: path.symlink_to("other"), "unreadable", "symbolic link"),
        (large, "unreadable", "more than 67108864 bytes"),
        (lambda path: path.write_bytes(b""), "unreadable", "JSON"),
        (lambda path: path.write_bytes(b'{"Data":{"PodDeviceEntries":[{"PodUID":"3f'), "unreadable", "JSON"),
        (lambda path: path.write_bytes(b"\x80\x02}q\x00."), "unreadable", "UTF-8"),
        (lambda path: path.write_bytes(b'{"Version":"v9","Data":{},"Checksum":1}'), "unknown", "form"),
    ],
    ids=["none", "folder", "fifo", "link", "200 MB", "empty", "cut short", "no text", "a version"],
)
def test_a_damaged_file(make, state, message, root, capsys):
    path = root / CHECKPOINT
    path.rename(path.with_name("other"))
    make(path)
    found = call(capsys, root=str(root))["kubelet"]["checkpoint"]
    assert found["state"] == state and message in found["problem"] and "\n" not in found["problem"]
    assert found["entries"] == [] and found["registered"] == {}


POD, OTHER = "3f0e2a54-8f5b-4f5c-9d62-0d8a3f4b7a10", "4f0e2a54-8f5b-4f5c-9d62-0d8a3f4b7a11"


def running(proc, pid, uid, container, *devices):
    """Write a process of a container, with real device nodes in its /dev: ``(name, major, minor)``."""
    group = (
        f"/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{container}.scope" if uid else "/"
    )
    (proc / str(pid) / "root" / "dev").mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(f"0::{group}\n")
    for node, major, minor in devices:
        os.mknod(proc / str(pid) / "root" / "dev" / node, stat.S_IFCHR | 0o600, os.makedev(major, minor))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root creates device nodes")
def test_device_nodes_of_containers(tmp_path):
    ours, theirs = "a" * 64, "b" * 64
    control = (("nvidiactl", 195, 255), ("nvidia-modeset", 195, 254), ("nvidia-uvm", 511, 0))
    running(tmp_path, 10, POD, ours, ("nvidia0", 195, 0), ("nvidia3", 195, 3), *control)
    running(tmp_path, 11, POD, ours, ("nvidia5", 195, 5))
    running(tmp_path, 12, OTHER, theirs, ("nvidia7", 4, 7), *control)
    running(tmp_path, 13, "", "", ("nvidia6", 195, 6))
    (tmp_path / "12" / "root" / "dev" / "nvidia1").write_text("a file")
    (tmp_path / "14").mkdir()
    expected = [{"pod_uid": POD, "container_id": ours, "minors": [0, 3], "privileged": False}]
    assert NodeKubelet(proc=str(tmp_path)).device_nodes() == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root creates device nodes")
@pytest.mark.parametrize(
    ("machine", "own", "privileged"),
    [
        ("000001ffffffffff", "000001ffffffffff", True),
        # A machine that is itself a container may lack rights.
        ("000001fffeffffff", "000001fffeffffff", True),
        ("000001ffffffffff", "00000000a80425fb", False),
        ("000001ffffffffff", "", False),
        ("", "000001ffffffffff", False),
    ],
)
def test_a_privileged_container_is_told_by_its_rights(tmp_path, machine, own, privileged):
    running(tmp_path, 10, POD, "a" * 64, ("nvidia0", 195, 0))
    (tmp_path / "1").mkdir()
    for pid, rights in (("1", machine), ("10", own)):
        if rights:
            (tmp_path / pid / "status").write_text(f"Name:\tsleep\nCapPrm:\t0000000000000000\nCapBnd:\t{rights}\n")
    [row] = NodeKubelet(proc=str(tmp_path)).device_nodes()
    assert (row["minors"], row["privileged"]) == ([0], privileged)


def test_device_nodes_of_the_machine_are_no_containers(tmp_path):
    running(tmp_path, 10, POD, "a" * 64)
    (tmp_path / "10" / "root" / "dev").rmdir()
    os.symlink("/dev", tmp_path / "10" / "root" / "dev")
    assert NodeKubelet(proc=str(tmp_path)).device_nodes() == []


def test_a_socket_in_the_files_place(root, bound):
    (root / CHECKPOINT).unlink()
    bound(root / CHECKPOINT)
    with pytest.raises(Unreadable, match="can't be read"):
        NodeKubelet().file(str(root / CHECKPOINT))


def test_a_path_with_a_null_byte():
    source = NodeKubelet()
    with pytest.raises(Unreadable):
        source.file("/a\0b")
    with pytest.raises(Unreadable):
        source.pod_resources("/a\0b")
    assert source.sockets("/a\0b") == []


def test_the_size_limit_is_inclusive(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert NodeKubelet(largest=100).file(str(path)) == b"x" * 100
    with pytest.raises(Unreadable, match="more than 99 bytes"):
        NodeKubelet(largest=99).file(str(path))
    # Reports a size of 0 and has content.
    with pytest.raises(Unreadable, match="more than 5 bytes"):
        NodeKubelet(largest=5).file("/proc/self/status")


def test_an_error_closes_the_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sources.os, "fdopen", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(Unreadable, match="Input/output error"):
        NodeKubelet().file(str(tmp_path / "file"))
    monkeypatch.undo()
    with pytest.raises(Unreadable):
        NodeKubelet().file(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_permission_error_is_reported(root, monkeypatch):
    monkeypatch.setattr(sources.os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    found = collect(NodeKubelet(), str(root), GPUS)["checkpoint"]
    assert found["state"] == "unreadable" and found["problem"].endswith("can't be read: Permission denied")


# --------------------------------------------------------------------------- PodResources


def pods(root, **source):
    return collect(NodeKubelet(**source), str(root), GPUS)["pod_resources"]


def serve(root, reply, *path):
    return pod_resources(f"{root}/pod-resources/kubelet.sock", reply, *path)


def test_no_library(root, bound, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert "kubelet.sock" in pods(root)["problem"], "without a socket the library wouldn't help"
    bound(root / "pod-resources" / "kubelet.sock")
    found = pods(root)
    assert found["state"] == "missing" and found["pods"] == []
    assert "python3-grpcio" in found["problem"] and "EPEL" in found["problem"]


def test_a_broken_library(root, bound, monkeypatch):
    bound(root / "pod-resources" / "kubelet.sock")

    class BrokenFinder:
        def find_spec(self, name, path=None, target=None):
            if name == "grpc":
                raise RuntimeError("compiled for\nanother version")

    monkeypatch.delitem(sys.modules, "grpc")
    monkeypatch.setattr(sys, "meta_path", [BrokenFinder(), *sys.meta_path])
    found = pods(root)
    assert found["state"] == "unreadable" and "compiled for another version" in found["problem"]


def test_a_file_in_the_sockets_place(root):
    (root / "pod-resources" / "kubelet.sock").write_text("")
    found = pods(root)
    assert found["state"] == "unreadable" and "isn't a socket" in found["problem"]


def test_a_closed_socket(root, bound):
    bound(root / "pod-resources" / "kubelet.sock").close()
    found = pods(root, seconds=60)
    assert found["state"] == "unreadable" and "UNAVAILABLE" in found["problem"]


def test_a_hanging_kubelet_is_reported(root):
    going = threading.Event()

    def hang(_request, _context):
        going.wait(60)
        return PODS

    with serve(root, hang):
        found = pods(root, seconds=0.5)
        going.set()
    assert found["state"] == "unreadable" and "DEADLINE_EXCEEDED" in found["problem"]


def refuse(_request, context):
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by\nrate limit " + "x" * 5000)


MANY = list_response({"a/b": {"c": {MEMORY: [f"card-{number}" for number in range(5000)]}}})
# An unknown field, by which the response is larger than gRPC's default limit of 4 MiB.
PAD = b"\x7a\x80\x80\x80\x03" + b"\0" * (6 << 20)


@pytest.mark.parametrize(
    ("reply", "path", "largest", "state", "message"),
    [
        (refuse, (), 1 << 26, "unreadable", "RESOURCE_EXHAUSTED: rejected by rate limit"),
        (lambda *_: PODS, ("/v2.PodResourcesLister/List",), 1 << 26, "unreadable", "UNIMPLEMENTED"),
        (lambda *_: MANY, (), 10_000, "unreadable", "RESOURCE_EXHAUSTED"),
        (lambda *_: b"\x0a\x7fjunk", (), 1 << 26, "unknown", "version 1"),
        (lambda *_: PODS + PAD, (), 1 << 26, "ok", ""),
    ],
    ids=["refused", "another version", "too large", "malformed", "more than 4 MiB"],
)
def test_responses(root, reply, path, largest, state, message):
    with serve(root, reply, *path):
        found = pods(root, largest=largest)
    assert (found["state"], bool(found["pods"])) == (state, state == "ok") and message in found["problem"]
    assert len(found["problem"]) < 600 and "\n" not in found["problem"]


def test_each_call_opens_its_own_connection(root):
    """A restarted kubelet is called at once, without the back-off of an earlier failure."""
    for _time in range(2):
        with serve(root, lambda request, context: PODS):
            assert pods(root)["state"] == "ok"
        assert pods(root)["state"] in ("missing", "unreadable")


# --------------------------------------------------------------------------- kubelet's directory


class Machine:
    """A machine with processes and files."""

    def __init__(self, *lines, files=None):
        self.lines, self.files = lines, files or {}

    def processes(self, names):
        return [Process(number, line) for number, line in enumerate(self.lines)]

    def file(self, path):
        if path not in self.files:
            raise Missing(f"{path} doesn't exist")
        return self.files[path]

    def sockets(self, path):
        return []

    def names(self, path, optional=False):
        found = sorted(file[len(path) + 1 :] for file in self.files if file.startswith(f"{path}/"))
        if not (found or optional):
            raise Missing(f"{path} doesn't exist")
        return found

    def device_nodes(self):
        return []

    def pod_resources(self, path):
        raise Missing(f"{path} doesn't exist")


SNAP = "/var/snap/microk8s/6089/args/kubelet"


CONFIG = "/etc/rancher/k3s/config.yaml"
LIST = b"kubelet-arg:\n# - root-dir=/no\n  - v=2\n  - 'root-dir=/a'\n"
KUBELITE = ("kubelite", f"--kubelet-args-file={SNAP}")


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        (("/usr/bin/kubelet", "--config=/var/lib/kubelet/config.yaml"), {}, "/var/lib/kubelet"),
        (("/usr/bin/kubelet", "--root-dir=/a"), {}, "/a"),
        (("kubelet", "--v=2", "--root-dir", "/a"), {}, "/a"),
        (("kubelet", "-root-dir=/a"), {}, "/a"),
        (("kubelet", "--root-dir=/a", "--root-dir=/b"), {}, "/b"),
        (("kubelet", "--root-dir"), {}, "/var/lib/kubelet"),
        (("kubelet", "--x-root-dir=/a"), {}, "/var/lib/kubelet"),
        (("/hyperkube", "kubelet", "--root-dir=/a"), {}, "/a"),
        (("k3s", "server", "--kubelet-arg=v=2", "--kubelet-arg=root-dir=/a", "--root-dir=/no"), {}, "/a"),
        (("k3s", "agent", "--kubelet-arg", "root-dir=/a"), {}, "/a"),
        (("k3s", "agent", "--kubelet-arg=root-dir=/a", "--kubelet-arg=root-dir=/b"), {}, "/b"),
        (("/usr/local/bin/k3s server",), {}, "/var/lib/kubelet"),
        (("/usr/local/bin/k3s server",), {CONFIG: LIST}, "/a"),
        (("/usr/bin/k3s agent",), {CONFIG: b"kubelet-arg: [v=2,root-dir=/a]\n"}, "/a"),
        (("/usr/local/bin/k3s server",), {f"{CONFIG}.d/50-rancher.yaml": b'{"kubelet-arg": ["root-dir=/b"]}'}, "/b"),
        (("k3s", "server", "--config", "/srv/my.yaml"), {CONFIG: LIST, "/srv/my.yaml": b"a: b"}, "/var/lib/kubelet"),
        (KUBELITE, {}, "/var/snap/microk8s/common/var/lib/kubelet"),
        (KUBELITE, {SNAP: b"--v=2\n--root-dir=${SNAP_COMMON}/kubelet\n"}, "/var/snap/microk8s/common/kubelet"),
        (KUBELITE, {SNAP: b'--root-dir="/data"\n'}, "/data"),
        (("kubelite",), {}, "/var/lib/kubelet"),
    ],
    ids=str,
)
def test_the_running_kubelets_root(line, files, expected):
    source = Machine(line, line, files=files)
    assert running_root(source) == expected
    found = collect(source, running_root(source), GPUS)
    assert found["root"] == expected and found["checkpoint"]["problem"] == f"{expected}/{CHECKPOINT} doesn't exist"


def test_settings_of_k3s_that_cannot_be_read():
    source = Machine(("/usr/local/bin/k3s server",), files={CONFIG: b"kubelet-arg: [x\n"})
    with pytest.raises(BadInput, match=f"root: {CONFIG}, line 1: k3s's settings can't be read here: .*; set root to"):
        collect(source, running_root(source), GPUS)


def test_conflicting_relative_and_missing_roots():
    source = Machine(("kubelet", "--root-dir=/b"), ("kubelet", "--root-dir=/a"))
    with pytest.raises(BadInput, match="/a and /b"):
        collect(source, running_root(source), GPUS)
    assert collect(source, "/b", GPUS)["root"] == "/b"
    with pytest.raises(BadInput, match="absolute"):
        relative = Machine(("kubelet", "--root-dir=kubelet"))
        collect(relative, running_root(relative), GPUS)
    assert running_root(Machine()) == "/var/lib/kubelet"


@given(st.lists(st.text(max_size=20) | st.sampled_from(["kubelet", "k3s", "kubelite", "--root-dir"]), min_size=1))
def test_any_command_line(line):
    assert isinstance(running_root(Machine(tuple(line))), str)


def processes(folder, *pids):
    return [
        (process.pid, process.arguments)
        for process in NodeKubelet(str(folder)).processes(KUBELETS)
        if process.pid in pids
    ]


def add_process(folder, pid, line, root="/"):
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "cmdline").write_bytes(line)
    (folder / str(pid) / "root").symlink_to(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root")
def test_processes_of_root_outside_containers(tmp_path):
    add_process(tmp_path, 7, b"/usr/bin/kubelet\0--root-dir=/a\0")
    add_process(tmp_path, 8, b"/usr/local/bin/k3s agent\0\0\0")
    add_process(tmp_path, 9, b"/usr/bin/other\0kubelet\0")
    # A node of kind, or a pod: another root.
    add_process(tmp_path, 10, b"kubelet\0--root-dir=/b\0", root=tmp_path)
    # A user's.
    add_process(tmp_path, 11, b"kubelet\0--root-dir=/c\0")
    os.chown(tmp_path / "11", 65534, 65534)
    # It ended meanwhile.
    (tmp_path / "12").mkdir()
    add_process(tmp_path, 13, b"")
    add_process(tmp_path, 14, b"kubelet\xff\0")
    (tmp_path / "self").mkdir()
    assert processes(tmp_path, *range(20)) == [
        (7, ("/usr/bin/kubelet", "--root-dir=/a")),
        (8, ("/usr/local/bin/k3s agent",)),
    ]
    assert NodeKubelet(str(tmp_path / "none")).processes(KUBELETS) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root")
def test_a_real_process(tmp_path):
    with subprocess.Popen(
        ["kubelet", "-c", "import sys; print(flush=True); sys.stdin.read()", "--root-dir=/a"],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as running:
        try:
            # Its command line is final only now.
            running.stdout.readline()
            found = processes("/proc", running.pid)
        finally:
            running.kill()
    assert [one[1][-1] for one in found] == ["--root-dir=/a"]
