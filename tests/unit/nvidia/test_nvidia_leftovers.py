# SPDX-License-Identifier: GPL-3.0-or-later
"""What NVIDIA's device plugin leaves on a machine and in a node's status, and its removal."""

from __future__ import annotations

import socket
import subprocess

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._backends import node_status
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done, RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._nvidia.files import work
from fake_clock import FakeClock
from fake_kube import FakeKube
from node_fakes import FakeSystem, killed_at_every_step

MPS = "/run/nvidia/mps"
PLUGINS = "/var/lib/kubelet/device-plugins"
CDI = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
OTHER_MOUNT = "shm /run/other tmpfs rw 0 0"
PARAMS = {"mps_root": MPS, "kubelet_root": "/var/lib/kubelet"}


class Machine(FakeSystem):
    """A node on which plugin and MPS daemon were killed."""

    def __init__(self):
        super().__init__(
            {
                "/proc/self/mounts": f"proc /proc proc rw 0 0\nshm {MPS}/shm tmpfs rw 0 0\n{OTHER_MOUNT}\n",
                f"{MPS}/nvidia.com/gpu/.started": "",
                f"{PLUGINS}/nvidia-gpu.sock": "",
                f"{PLUGINS}/nvidia-mig-1g.5gb.sock": "",
                f"{PLUGINS}/kubelet.sock": "",
                f"{PLUGINS}/kubelet_internal_checkpoint": "{}",
                CDI: "{}",
                "/var/run/cdi/mine.json": "{}",
                "/proc/1/comm": "systemd\n",
            }
        )
        self.mode = {"GPU-a": "Exclusive_Process", "GPU-b": "Default"}
        self.commands.update(
            {
                "nvidia-smi --query-gpu": lambda _argv: Done(
                    0, "".join(f"{k}, {v}\n" for k, v in self.mode.items()), ""
                ),
                "nvidia-smi -i": self._set_mode,
                "umount": self._umount,
                "rm": self._rm,
            }
        )

    def _set_mode(self, argv):
        self.step()
        self.mode[argv[2]] = {"DEFAULT": "Default"}[argv[4]]
        self.step()
        return Done(0, "", "")

    def _umount(self, argv):
        self.step()
        mounts = self.files["/proc/self/mounts"].splitlines(keepends=True)
        self.files["/proc/self/mounts"] = "".join(line for line in mounts if line.split()[1] != argv[1])
        self.step()
        return Done(0, "", "")

    def _rm(self, argv):
        assert f" {MPS}/shm " not in self.files["/proc/self/mounts"]
        for path in [path for path in self.files if f"{path}/".startswith(f"{argv[-1]}/")]:
            self.step()
            del self.files[path]
            self.step()
        return Done(0, "", "")


def clean(machine):
    assert set(machine.mode.values()) == {"Default"}
    assert not [path for path in machine.files if path.startswith(MPS) or path == CDI]
    assert machine.names(PLUGINS) == ["kubelet.sock", "kubelet_internal_checkpoint"]
    assert machine.files["/proc/self/mounts"].splitlines()[1:] == [OTHER_MOUNT]
    assert "/var/run/cdi/mine.json" in machine.files
    return True


def test_everything_of_the_plugin_goes_and_nothing_else():
    machine = Machine()
    before = dict(machine.files)
    predicted = work(machine, PARAMS, check=True)
    assert predicted["changed"] and machine.files == before
    assert work(machine, PARAMS, check=False)["diff"] == predicted["diff"]
    assert clean(machine)
    assert not work(machine, PARAMS, check=False)["changed"]


def test_the_socket_of_a_plugin_that_was_killed_is_removed(tmp_path, monkeypatch):
    class Quiet(RealSystem):
        """This machine without its processes, of which one may be a plugin."""

        def names(self, path):
            return [] if path == "/proc" else super().names(path)

    def command(argv, data=None, environ_update=None):
        done = subprocess.run(argv, input=data, text=True, capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr

    folder = tmp_path / "device-plugins"
    folder.mkdir()
    # The path of a socket may have 107 bytes.
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as kubelet:
        left.bind("nvidia-gpu.sock")
        kubelet.bind("kubelet.sock")
    given = {"mps_root": str(tmp_path / "mps"), "kubelet_root": str(tmp_path)}
    assert work(Quiet("/", command), given, check=False)["changed"]
    assert [path.name for path in folder.iterdir()] == ["kubelet.sock"]


def test_a_killed_removal_is_completed_by_the_next_one():
    for machine in killed_at_every_step(Machine, lambda machine: work(machine, PARAMS, check=False), 10):
        work(machine, PARAMS, check=False)
        assert clean(machine)


@pytest.mark.parametrize("program", ["nvidia-device-p", "mps-control-dae", "nvidia-cuda-mps"])
def test_nothing_is_taken_from_a_plugin_that_runs(program):
    machine = Machine()
    machine.files["/proc/77/comm"] = f"{program}\n"
    before = dict(machine.files)
    with pytest.raises(ShareError) as error:
        work(machine, PARAMS, check=False)
    assert error.value.details["running"] == [{"pid": 77, "program": program}]
    assert machine.files == before and machine.mode["GPU-a"] == "Exclusive_Process"


def test_a_users_own_compute_mode_stays_where_no_mps_daemon_ran():
    machine = Machine()
    for path in [path for path in machine.files if path.startswith(MPS)]:
        del machine.files[path]
    machine.files["/proc/self/mounts"] = ""
    work(machine, PARAMS, check=False)
    assert machine.mode["GPU-a"] == "Exclusive_Process"


def test_a_machine_whose_driver_is_gone():
    machine = Machine()
    machine.commands["nvidia-smi --query-gpu"] = Done(9, "NVIDIA-SMI has failed", "")
    assert work(machine, PARAMS, check=False)["changed"]
    broken = Machine()
    broken.commands["nvidia-smi --query-gpu"] = Done(15, "Unable to determine the device handle", "")
    with pytest.raises(ShareError, match="Unable to determine"):
        work(broken, PARAMS, check=False)


@pytest.mark.parametrize("root", ["/", "/run", "run/nvidia/mps"])
def test_a_folder_that_can_not_be_the_plugins_own_is_refused(root):
    with pytest.raises(BadInput, match="mps_root"):
        work(Machine(), {**PARAMS, "mps_root": root}, check=False)


# --------------------------------------------------------------------------- a node's status


class Nodes(FakeKube):
    """An API server with kubelets: five minutes after the plugin went they give its resource up."""

    def __init__(self, clock, *nodes):
        super().__init__(*nodes)
        self.clock = clock
        self.gone = 60.0
        clock.listeners.append(self.kubelets)

    def kubelets(self):
        for one in self.objects.values():
            for name in list(one["status"]["capacity"]):
                if not name.startswith("nvidia.com/"):
                    continue
                if self.clock.now() >= self.gone:
                    one["status"]["allocatable"][name] = "0"
                if self.clock.now() >= self.gone + 300:
                    one["status"]["capacity"][name] = "0"


def node(name):
    numbers = {"cpu": "2", "nvidia.com/gpu": "8", "nvidia.com/mig-1g.5gb": "7", "nvidia.com/other": "1"}
    status = {field: dict(numbers) for field in ("capacity", "allocatable")}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


def remove(kube, clock, check=False, **more):
    params = {
        "nodes": ["gpu1", "gone"],
        "resources": ["nvidia.com/gpu", "nvidia.com/mig-*"],
        "plugin_timeout": 120,
        "kubelet_timeout": 420,
    }
    waiting = Waiting(0, 5.0, sleep=clock.sleep, now=clock.now)
    return node_status.remove(kube, {**params, **more}, check, waiting)


def live(kube, name="gpu1"):
    return kube.objects[Ref("v1", "Node", "", name)]["status"]


def test_a_resource_is_removed_as_soon_as_kubelet_has_given_it_up():
    clock = FakeClock()
    kube = Nodes(clock, node("gpu1"), node("gpu2"))
    result = remove(kube, clock)
    assert result["changed"] and result["left"] == {} and 360 <= clock.now() < 370
    assert set(live(kube)["capacity"]) == set(live(kube)["allocatable"]) == {"cpu", "nvidia.com/other"}
    assert "nvidia.com/gpu" in live(kube, "gpu2")["capacity"]
    assert not remove(kube, clock)["changed"]


def test_what_kubelet_would_restore_is_left_and_named():
    clock = FakeClock()
    kube = Nodes(clock, node("gpu1"))
    result = remove(kube, clock, kubelet_timeout=0)
    assert not result["changed"] and clock.now() == 60
    assert result["left"] == {"gpu1": {"nvidia.com/gpu": 8, "nvidia.com/mig-1g.5gb": 7}}


def test_a_plugin_that_still_announces_is_an_error():
    clock = FakeClock()
    kube = Nodes(clock, node("gpu1"))
    kube.gone = 1e9
    with pytest.raises(NotInEffect) as error:
        remove(kube, clock)
    assert error.value.details["announced"] == {"gpu1": {"nvidia.com/gpu": 8, "nvidia.com/mig-1g.5gb": 7}}
    assert not kube.requests["PATCH"]
    # In check mode nothing has been taken off the node, so that there is nothing to wait for.
    assert not remove(kube, clock, check=True)["changed"]
