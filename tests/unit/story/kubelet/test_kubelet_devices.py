# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet_devices_info: the real main() on folders, sockets and processes as they are, and on those that aren't."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import grpc
import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.module_utils import _kubelet_door as doors
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_devices import KUBELETS, look, running_root
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_door import (
    Missing,
    Process,
    RealKubelet,
    Unreadable,
)
from ansible_collections.kubegpu.share.plugins.modules import kubelet_devices_info
from hypothesis import given
from hypothesis import strategies as st
from real_kubelet import GPU, MEMORY, answer, checkpoint, entry, listed, pod_resources

GPUS = ["aliyun.com/gpu-", "nvidia.com/"]
CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"
PODS = listed({"default/one": {"main": {MEMORY: ["s-0", "s-1"]}}})


@pytest.fixture
def root():
    """kubelet's folder: with a short name, as the path of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as folder:
        yield filled(Path(folder))


def filled(tmp_path):
    (tmp_path / "device-plugins").mkdir()
    (tmp_path / "pod-resources").mkdir()
    (tmp_path / CHECKPOINT).write_bytes(
        checkpoint(
            entry({"0": ["s-0", "s-1"]}, response=answer({"NVIDIA_VISIBLE_DEVICES": GPU})),
            registered={MEMORY: ["s-0", "s-1", "s-2"]},
        )
    )
    return tmp_path


@pytest.fixture
def bound():
    """Make sockets that nobody answers on."""
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


# --------------------------------------------------------------------------- the whole


def test_module(root, bound, capsys):
    bound(root / "device-plugins" / "aliyungpushare.sock")
    (root / "device-plugins" / "DEPRECATION").write_text("")
    os.symlink("aliyungpushare.sock", root / "device-plugins" / "link.sock")
    with pod_resources(f"{root}/pod-resources/kubelet.sock", lambda request, context: PODS):
        found = call(capsys, root=str(root))
    assert found["rc"] == 0 and found["changed"] is False
    kubelet = found["kubelet"]
    assert kubelet["root"] == str(root) and kubelet["sockets"] == ["aliyungpushare.sock"]
    assert kubelet["checkpoint"]["state"] == "ok"
    assert kubelet["checkpoint"]["entries"][0]["envs"] == {"NVIDIA_VISIBLE_DEVICES": GPU}
    assert kubelet["checkpoint"]["registered"] == {MEMORY: ["s-0", "s-1", "s-2"]}
    assert kubelet["pod_resources"] == {
        "state": "ok",
        "problem": "",
        "pods": [
            {
                "namespace": "default",
                "name": "one",
                "containers": [{"name": "main", "devices": [{"resource": MEMORY, "ids": ["s-0", "s-1"]}]}],
            }
        ],
    }


def test_a_machine_without_kubelet(tmp_path, capsys):
    found = call(capsys, root=str(tmp_path / "none"), _ansible_check_mode=True)["kubelet"]
    assert found["checkpoint"]["state"] == found["pod_resources"]["state"] == "missing"
    assert "there is no" in found["checkpoint"]["problem"] and "there is no" in found["pod_resources"]["problem"]
    assert found["sockets"] == []


@pytest.mark.parametrize(
    "arguments", [{"resources": []}, {"resources": ["nvidia.com/", ""]}, {"root": "var/lib/kubelet"}], ids=str
)
def test_what_cant_be_served(arguments, capsys, root):
    found = call(capsys, **{"root": str(root), **arguments})
    assert found["failed"] and next(iter(arguments)) in found["msg"] and "Traceback" not in found["msg"]


def test_other_resources(root, capsys):
    found = call(capsys, root=str(root), resources=["nvidia.com/"])["kubelet"]["checkpoint"]
    assert found["state"] == "ok" and found["entries"] == [] and found["registered"] == {}


# --------------------------------------------------------------------------- the checkpoint's file


def fifo(path):
    os.mkfifo(path)


def large(path):
    path.write_bytes(b"")
    os.truncate(path, 200 * 1024 * 1024)


@pytest.mark.parametrize(
    ("make", "state", "says"),
    [
        (lambda path: None, "missing", "there is no"),
        (lambda path: path.mkdir(), "unreadable", "no regular file"),
        (fifo, "unreadable", "no regular file"),
        (lambda path: path.symlink_to("other"), "unreadable", "symbolic link"),
        (large, "unreadable", "more than 67108864 bytes"),
        (lambda path: path.write_bytes(b""), "unreadable", "JSON"),
        (lambda path: path.write_bytes(b'{"Data":{"PodDeviceEntries":[{"PodUID":"3f'), "unreadable", "JSON"),
        (lambda path: path.write_bytes(b"\x80\x02}q\x00."), "unreadable", "UTF-8"),
        (lambda path: path.write_bytes(b'{"Version":"v9","Data":{},"Checksum":1}'), "unknown", "form"),
    ],
    ids=["none", "folder", "fifo", "link", "200 MB", "empty", "cut short", "no text", "a version"],
)
def test_no_good_file(make, state, says, root, capsys):
    path = root / CHECKPOINT
    path.rename(path.with_name("other"))
    make(path)
    found = call(capsys, root=str(root))["kubelet"]["checkpoint"]
    assert found["state"] == state and says in found["problem"] and "\n" not in found["problem"]
    assert found["entries"] == [] and found["registered"] == {}


def test_a_socket_in_the_files_place(root, bound):
    (root / CHECKPOINT).unlink()
    bound(root / CHECKPOINT)
    with pytest.raises(Unreadable, match="can't be read"):
        RealKubelet().file(str(root / CHECKPOINT))


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "device-plugins").write_text("")
    found = look(RealKubelet(), str(tmp_path), GPUS)
    assert found["checkpoint"]["state"] == "missing" and found["sockets"] == []


def test_a_name_that_is_none():
    door = RealKubelet()
    with pytest.raises(Unreadable):
        door.file("/a\0b")
    with pytest.raises(Unreadable):
        door.pod_resources("/a\0b")
    assert door.sockets("/a\0b") == []


def test_the_limit_is_the_largest_that_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert RealKubelet(largest=100).file(str(path)) == b"x" * 100
    with pytest.raises(Unreadable, match="more than 99 bytes"):
        RealKubelet(largest=99).file(str(path))
    # Says 0 bytes of itself and has some.
    with pytest.raises(Unreadable, match="more than 5 bytes"):
        RealKubelet(largest=5).file("/proc/self/status")


def test_reading_fails_half_way(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_arguments, **_keys):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doors.os, "fdopen", fail)
    with pytest.raises(Unreadable, match="Input/output error"):
        RealKubelet().file(str(tmp_path / "file"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_is_left_open(tmp_path):
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unreadable):
        RealKubelet().file(str(tmp_path / "folder"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_may_not_read_is_told(root, monkeypatch):
    def deny(_path, _flags):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doors.os, "open", deny)
    found = look(RealKubelet(), str(root), GPUS)["checkpoint"]
    assert found["state"] == "unreadable" and found["problem"].endswith("can't be read: Permission denied")


# --------------------------------------------------------------------------- PodResources


def pods(root, **door):
    return look(RealKubelet(**door), str(root), GPUS)["pod_resources"]


def serve(root, reply):
    return pod_resources(f"{root}/pod-resources/kubelet.sock", reply)


def test_no_library(root, bound, monkeypatch):
    bound(root / "pod-resources" / "kubelet.sock")
    monkeypatch.setitem(sys.modules, "grpc", None)
    found = pods(root)
    assert found["state"] == "missing" and found["pods"] == []
    assert "python3-grpcio" in found["problem"] and "EPEL" in found["problem"]


def test_no_library_and_no_socket(root, monkeypatch):
    """What is missing first is said: the library would be of no help."""
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert "kubelet.sock" in pods(root)["problem"]


def test_half_a_library(root, bound, monkeypatch):
    bound(root / "pod-resources" / "kubelet.sock")

    class Half:
        def find_spec(self, name, path=None, target=None):
            if name == "grpc":
                raise RuntimeError("compiled for\nanother version")

    monkeypatch.delitem(sys.modules, "grpc")
    monkeypatch.setattr(sys, "meta_path", [Half(), *sys.meta_path])
    found = pods(root)
    assert found["state"] == "unreadable" and "compiled for another version" in found["problem"]


def test_a_file_in_the_sockets_place(root):
    (root / "pod-resources" / "kubelet.sock").write_text("")
    found = pods(root)
    assert found["state"] == "unreadable" and "no socket" in found["problem"]


def test_a_socket_that_nobody_listens_on(root, bound):
    bound(root / "pod-resources" / "kubelet.sock").close()
    found = pods(root, seconds=60)
    assert found["state"] == "unreadable" and "UNAVAILABLE" in found["problem"]


def test_a_socket_that_nobody_answers_on(root, bound):
    bound(root / "pod-resources" / "kubelet.sock")
    found = pods(root, seconds=0.5)
    assert found["state"] == "unreadable" and "DEADLINE_EXCEEDED" in found["problem"]


def test_a_kubelet_that_hangs(root):
    going = threading.Event()

    def hang(_request, _context):
        going.wait(60)
        return PODS

    with serve(root, hang):
        found = pods(root, seconds=0.5)
        going.set()
    assert found["state"] == "unreadable" and "DEADLINE_EXCEEDED" in found["problem"]


def test_a_kubelet_that_refuses(root):
    def refuse(_request, context):
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by\nrate limit " + "x" * 5000)

    with serve(root, refuse):
        found = pods(root)
    assert found["state"] == "unreadable" and "RESOURCE_EXHAUSTED: rejected by rate limit" in found["problem"]
    assert len(found["problem"]) < 600 and "\n" not in found["problem"]


def test_a_kubelet_of_another_version(root):
    with pod_resources(
        f"{root}/pod-resources/kubelet.sock", lambda request, context: PODS, "/v2.PodResourcesLister/List"
    ):
        found = pods(root)
    assert found["state"] == "unreadable" and "UNIMPLEMENTED" in found["problem"]


def test_an_answer_that_is_too_large(root):
    large = listed({"a/b": {"c": {MEMORY: [f"card-{number}" for number in range(5000)]}}})
    with serve(root, lambda request, context: large):
        few, whole = pods(root, largest=10_000), pods(root)
    assert few["state"] == "unreadable" and "RESOURCE_EXHAUSTED" in few["problem"]
    # Above gRPC's own limit of 4 MiB it is no error.
    assert len(whole["pods"][0]["containers"][0]["devices"][0]["ids"]) == 5000


def test_more_than_grpc_takes_by_itself(root):
    pad = b"\x7a\x80\x80\x80\x03" + b"\0" * (6 << 20)
    with serve(root, lambda request, context: PODS + pad):
        assert pods(root)["state"] == "ok"


def test_an_answer_that_is_none(root):
    with serve(root, lambda request, context: b"\x0a\x7fjunk"):
        found = pods(root)
    assert found["state"] == "unknown" and found["pods"] == []


def test_each_call_is_a_connection_of_its_own(root):
    """A kubelet that was started anew is asked at once, whatever happened before."""
    for _time in range(2):
        with serve(root, lambda request, context: PODS):
            assert pods(root)["state"] == "ok"
        assert pods(root)["state"] in ("missing", "unreadable")


# --------------------------------------------------------------------------- where the kubelet is


class Door:
    """A made-up machine: processes and files."""

    def __init__(self, *lines, files=None):
        self.lines = lines
        self.files = files or {}

    def processes(self, names):
        return [Process(number, line) for number, line in enumerate(self.lines)]

    def file(self, path):
        if path not in self.files:
            raise Missing(f"there is no {path}")
        return self.files[path]

    def sockets(self, path):
        return []

    def pod_resources(self, path):
        raise Missing(f"there is no {path}")


SNAP = "/var/snap/microk8s/6089/args/kubelet"


@pytest.mark.parametrize(
    ("door", "expected"),
    [
        (Door(), "/var/lib/kubelet"),
        (Door(("/usr/bin/kubelet", "--config=/var/lib/kubelet/config.yaml")), "/var/lib/kubelet"),
        (Door(("/usr/bin/kubelet", "--root-dir=/data/kubelet")), "/data/kubelet"),
        (Door(("kubelet", "--v=2", "--root-dir", "/data/kubelet")), "/data/kubelet"),
        (Door(("kubelet", "-root-dir=/data/kubelet")), "/data/kubelet"),
        (Door(("kubelet", "--root-dir=/a", "--root-dir=/b")), "/b"),
        (Door(("kubelet", "--root-dir")), "/var/lib/kubelet"),
        (Door(("kubelet", "--x-root-dir=/a")), "/var/lib/kubelet"),
        (Door(("/hyperkube", "kubelet", "--root-dir=/a")), "/a"),
        (Door(("k3s", "server", "--kubelet-arg=v=2", "--kubelet-arg=root-dir=/a", "--root-dir=/no")), "/a"),
        (Door(("k3s", "agent", "--kubelet-arg", "root-dir=/a")), "/a"),
        (Door(("k3s", "agent", "--kubelet-arg=root-dir=/a", "--kubelet-arg=root-dir=/b")), "/b"),
        (Door(("/usr/local/bin/k3s server",)), "/var/lib/kubelet"),
        (
            Door(
                ("/usr/local/bin/k3s server",),
                files={"/etc/rancher/k3s/config.yaml": b"kubelet-arg:\n# - root-dir=/no\n  - v=2\n  - 'root-dir=/a'\n"},
            ),
            "/a",
        ),
        (
            Door(("/usr/bin/k3s agent",), files={"/etc/rancher/k3s/config.yaml": b"kubelet-arg: [v=2,root-dir=/a]\n"}),
            "/a",
        ),
        (Door(("/usr/local/bin/k3s server",), files={"/etc/rancher/k3s/config.yaml": b"\xff"}), "/var/lib/kubelet"),
        (Door(("kubelite", f"--kubelet-args-file={SNAP}")), "/var/snap/microk8s/common/var/lib/kubelet"),
        (
            Door(
                ("kubelite", f"--kubelet-args-file={SNAP}"),
                files={SNAP: b"--v=2\n--root-dir=${SNAP_COMMON}/kubelet\n"},
            ),
            "/var/snap/microk8s/common/kubelet",
        ),
        (
            Door(("kubelite", f"--kubelet-args-file={SNAP}"), files={SNAP: b'--root-dir="/data"\n'}),
            "/data",
        ),
        (Door(("kubelite",)), "/var/lib/kubelet"),
        (Door(("kubelet", "--root-dir=/a"), ("kubelet", "--root-dir=/a")), "/a"),
    ],
    ids=[
        "nothing runs", "told nothing", "told", "in two words", "one dash", "twice", "no value", "another flag",
        "hyperkube", "k3s", "k3s in two words", "k3s twice", "k3s with a title", "k3s with a file",
        "k3s with a flow list",
        "k3s with junk", "microk8s", "microk8s with a file", "microk8s elsewhere", "kubelite alone", "two that agree",
    ],
)  # fmt: skip
def test_the_running_kubelets_folder(door, expected):
    assert running_root(door) == expected
    found = look(door, None, GPUS)
    assert found["root"] == expected and found["checkpoint"]["problem"] == f"there is no {expected}/{CHECKPOINT}"


def test_two_kubelets_that_disagree():
    door = Door(("kubelet", "--root-dir=/b"), ("kubelet", "--root-dir=/a"))
    with pytest.raises(BadInput, match="/a and /b"):
        look(door, None, GPUS)
    assert look(door, "/b", GPUS)["root"] == "/b"


def test_a_folder_that_isnt_absolute():
    with pytest.raises(BadInput, match="absolute"):
        look(Door(("kubelet", "--root-dir=kubelet")), None, GPUS)


@given(st.lists(st.text(max_size=20) | st.sampled_from(["kubelet", "k3s", "kubelite", "--root-dir"]), min_size=1))
def test_any_command_line(line):
    assert isinstance(running_root(Door(tuple(line))), str)


def processes(folder, *pids):
    return [(one.pid, one.arguments) for one in RealKubelet(str(folder)).processes(KUBELETS) if one.pid in pids]


def stand_in(folder, pid, line, root="/"):
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "cmdline").write_bytes(line)
    (folder / str(pid) / "root").symlink_to(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of root is needed")
def test_processes_of_root_outside_containers(tmp_path):
    stand_in(tmp_path, 7, b"/usr/bin/kubelet\0--root-dir=/a\0")
    stand_in(tmp_path, 8, b"/usr/local/bin/k3s agent\0\0\0")
    stand_in(tmp_path, 9, b"/usr/bin/other\0kubelet\0")
    # A node of kind, or a pod: another root.
    stand_in(tmp_path, 10, b"kubelet\0--root-dir=/b\0", root=tmp_path)
    # A user's.
    stand_in(tmp_path, 11, b"kubelet\0--root-dir=/c\0")
    os.chown(tmp_path / "11", 65534, 65534)
    # It ended while we looked.
    (tmp_path / "12").mkdir()
    stand_in(tmp_path, 13, b"")
    stand_in(tmp_path, 14, b"kubelet\xff\0")
    (tmp_path / "self").mkdir()
    assert processes(tmp_path, *range(20)) == [
        (7, ("/usr/bin/kubelet", "--root-dir=/a")),
        (8, ("/usr/local/bin/k3s agent",)),
    ]
    assert RealKubelet(str(tmp_path / "none")).processes(KUBELETS) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of root is needed")
def test_a_real_process(tmp_path):
    with subprocess.Popen(
        ["kubelet", "-c", "import sys; print(flush=True); sys.stdin.read()", "--root-dir=/a"],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as running:
        try:
            # Only now its command line is what it was started with.
            running.stdout.readline()
            found = processes("/proc", running.pid)
        finally:
            running.kill()
    assert [one[1][-1] for one in found] == ["--root-dir=/a"]
