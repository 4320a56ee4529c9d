# SPDX-License-Identifier: GPL-3.0-or-later
"""HAMi's files on a node: removed, unless a container has them mounted; and those of NVIDIA's plugin."""

from __future__ import annotations

import subprocess

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._hami.files import ensure
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done, RealSystem

CDI = "var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
SOCKET = "var/lib/kubelet/device-plugins/nvidia-gpu.sock"
POD = "0f2a9c1e-1111-2222-3333-444455556666"


class Node(RealSystem):
    """A folder as a machine; rm is the real one, kept below the folder."""

    def __init__(self, root):
        super().__init__(str(root))
        self.root = root

    def run(self, argv, timeout=60, stdin=None):
        done = subprocess.run([*argv[:-1], f"{self.root}{argv[-1]}"], capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    def process(self, pid, comm, namespace="host", mounts=(), cgroup="/"):
        folder = self.root / "proc" / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "ns" / "mnt").symlink_to(f"mnt:[{namespace}]")
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        (folder / "mountinfo").write_text("".join(f"1 2 0:3 /x {point} ro - ext4 /dev/sda ro\n" for point in mounts))


@pytest.fixture
def node(tmp_path):
    for name in (
        "usr/local/vgpu/libvgpu.so.v2.10.0",
        "usr/local/vgpu/containers/a_c/x.cache",
        "tmp/vgpulock/lock",
        CDI,
        SOCKET,
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "usr/local/bin").mkdir()
    found = Node(tmp_path)
    found.process(1, "systemd", mounts=("/", "/usr/local/vgpu-of-somebody", "/usr/local/vgpu/of-the-host"))
    found.process(2, "udevd", "2", mounts=("/", "/usr/local/vgpu/of-the-host"))
    return found


def remove(node, check=False):
    return ensure(node, {"library_folder": "/usr/local"}, check)


def left(node):
    return sorted(
        str(path.relative_to(node.root)) for path in node.root.rglob("*") if path.is_file() and "proc" not in path.parts
    )


@pytest.mark.parametrize("names", [["hami-mig-apply.lock"], []])
def test_everything_of_hami_goes(node, names):
    (node.root / "tmp/hami").mkdir()
    for name in names:
        (node.root / "tmp/hami" / name).touch()
    before = left(node)
    predicted = remove(node, check=True)
    assert predicted["changed"] and left(node) == before
    done = remove(node)
    assert done["diff"] == predicted["diff"] and left(node) == []
    assert not (node.root / "usr/local/vgpu").exists() and (node.root / "usr/local/bin").exists()
    assert not (node.root / "tmp/hami").exists()
    assert remove(node) == {"changed": False, "diff": []}


def test_a_container_with_the_library_mounted_prevents_it(node):
    before = left(node)
    mounts = ("/", "/usr/local/vgpu/libvgpu.so", "/etc/ld.so.preload")
    cgroup = f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-1"
    node.process(70, "python", "70", mounts, cgroup)
    node.process(71, "python", "70", mounts, cgroup)
    for check in (True, False):
        with pytest.raises(BadInput) as refused:
            remove(node, check)
        assert refused.value.details["code"] == "preloaded"
        assert refused.value.details["containers"] == [{"pid": 70, "command": "python", "pod": POD}]
        assert left(node) == before


def test_files_of_a_running_plugin_of_nvidia_stay(node):
    node.process(80, "nvidia-device-p", "80", ("/", "/var/lib/kubelet/device-plugins"))
    assert remove(node)["changed"]
    assert left(node) == [SOCKET, CDI]
    assert not remove(node)["changed"]


def test_others_files_in_tmp_stay(node):
    (node.root / "tmp/hami").mkdir()
    for name in ("hami-mig-apply.lock", "of-a-user"):
        (node.root / "tmp/hami" / name).touch()
    remove(node)
    assert left(node) == ["tmp/hami/of-a-user"]
