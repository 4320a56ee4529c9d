# SPDX-License-Identifier: GPL-3.0-or-later
"""kernel_driver: unused modules are replaced, their users reported, and killed runs completed by the next one."""

from __future__ import annotations

import json
import re

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._driver import library
from ansible_collections.kubegpu.share.plugins.module_utils._driver.kernel_modules import RECORD, work
from ansible_collections.kubegpu.share.plugins.module_utils._host import open_devices
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from node_fakes import FakeSystem, killed_at_every_step

OLD, NEW = "580.82.07", "580.95.05"
POD = "0b5d8a3e-1111-2222-3333-444455556666"
# Modules and their holders: all that a GPU server may have loaded with the open driver.
HOLDERS = {
    "nvidia": ("nvidia_uvm", "nvidia_modeset", "nvidia_peermem"),
    "nvidia_modeset": ("nvidia_drm",),
    "nvidia_uvm": (),
    "nvidia_drm": (),
    "nvidia_peermem": (),
}


class Node(FakeSystem):
    """A machine with the old module loaded and the new one on its disk."""

    def __init__(self, active=("nvidia-persistenced", "kubelet"), loaded=OLD, on_disk=NEW, kernels=("6.1",)):
        super().__init__({"/proc/sys/kernel/osrelease": "6.1\n"})
        self.folders.add("/run/systemd/system")
        self.files.update({f"/boot/vmlinuz-{release}": "" for release in kernels})
        self.active = dict.fromkeys(["kubelet", "nvidia-persistenced", "nvidia-fabricmanager", "mine"], False)
        self.active.update(dict.fromkeys(active, True))
        self.on_disk = on_disk
        self.modules = []
        self.stubborn = ""
        self.stuck = ""
        self.fails = ""
        self.commands.update(
            {
                "modinfo nvidia": self._modinfo,
                "systemctl show": self._show,
                "systemctl st": self._systemctl,
                "modprobe": self._modprobe,
                "kill": self._kill,
                "sleep": Done(0, "", ""),
                "mkdir": Done(0, "", ""),
                "rmdir": Done(0, "", ""),
            }
        )
        if loaded:
            self.load(HOLDERS, loaded)

    def load(self, names, version):
        for name in names:
            self.modules.append(name)
            self.folders.add(f"/sys/module/{name}")
            for holder in HOLDERS[name]:
                if holder in names:
                    self.files[f"/sys/module/{name}/holders/{holder}"] = ""
        self.files["/sys/module/nvidia/version"] = f"{version}\n"
        self.files["/sys/module/nvidia/srcversion"] = f"of{version}\n"

    def process(self, pid, command, *devices, pod="", unit="", maps=""):
        self.files[f"/proc/{pid}/comm"] = f"{command}\n"
        self.files[f"/proc/{pid}/maps"] = maps
        path = f"/system.slice/{unit}.service" if unit else "/user.slice"
        if pod:
            path = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-pod{pod.replace('-', '_')}.slice/cri-0.scope"
        self.files[f"/proc/{pid}/cgroup"] = f"0::{path}\n"
        for number, device in enumerate(devices):
            self.links[f"/proc/{pid}/fd/{number}"] = device

    def remove_paths(self, pattern):
        for known in (self.files, self.links):
            for path in [path for path in known if re.search(pattern, path)]:
                del known[path]

    def remove_process(self, pid):
        self.remove_paths(f"^/proc/{pid}/")

    def _modinfo(self, argv):
        if not self.on_disk:
            return Done(1, "", "modinfo: ERROR: Module nvidia not found.")
        return Done(0, f"filename: x\nversion:        {self.on_disk}\nsrcversion:     of{self.on_disk}\n", "")

    def _show(self, argv):
        blocks = []
        for unit in argv[4:]:
            name = unit[: -len(".service")]
            known = name in self.active
            state = "active" if self.active.get(name) else "inactive"
            blocks.append(f"Id={unit}\nLoadState={'loaded' if known else 'not-found'}\nActiveState={state}")
        return Done(0, "\n\n".join(blocks) + "\n", "")

    def _systemctl(self, argv):
        self.step()
        name = argv[2][: -len(".service")]
        if list(argv[1:]) == ["stop", f"{self.stuck}.service"]:
            return Done(1, "", "Job for it timed out.")
        self.active[name] = argv[1] == "start"
        if argv[1] == "stop":
            for pid in [p.split("/")[2] for p, text in list(self.files.items()) if f"/{name}.service" in text]:
                self.remove_process(pid)
        return Done(0, "", "")

    def _kill(self, argv):
        self.step()
        assert not self.active["kubelet"], "kubelet would start the container again"
        for pid in argv[2:]:
            if argv[1] == "-KILL" or pid != self.stubborn:
                self.remove_process(pid)
        return Done(0, "", "")

    def _modprobe(self, argv):
        self.step()
        if argv[1] == "-r":
            if self.fails == "remove":
                return Done(1, "", "modprobe: FATAL: Module nvidia_drm is in use.")
            for name in argv[2:]:
                # The kernel refuses to remove a module that has holders.
                assert not self.names(f"/sys/module/{name}/holders"), name
                self.modules.remove(name)
                self.folders.discard(f"/sys/module/{name}")
                self.remove_paths(f"^/sys/module/{name}/|/holders/{name}$")
            self.step()
            return Done(0, "", "")
        if self.fails == "load":
            return Done(1, "", "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service")
        if "nvidia" not in self.modules:
            self.load(argv[2:], self.on_disk)
        self.step()
        return Done(0, "", "")

    def end(self):
        return dict(self.files), sorted(self.modules), dict(self.active)


def go(node, check=False, **params):
    return work({"state": "reloaded", "services": [], "end_pods": False, **params}, check, node)


def changing(node):
    return [line for line in node.ran if line.split()[0] in ("modprobe", "kill") or line.startswith("systemctl st")]


def test_modules_are_replaced_while_the_services_are_stopped():
    node = Node()
    node.process(10, "nvidia-persiste", "/dev/nvidia0", unit="nvidia-persistenced")
    assert go(node, check=True)["changed"] and not changing(node) and not node.events
    result = go(node)
    assert result["diff"][-1]["before"] == f"{OLD}\n" and result["diff"][-1]["after"] == f"{NEW}\n"
    assert not result["reboot_required"] and result["users"] == []
    assert changing(node) == [
        "systemctl stop nvidia-persistenced.service",
        "modprobe -r nvidia_drm nvidia_modeset nvidia_peermem nvidia_uvm nvidia",
        "modprobe -a nvidia nvidia_uvm nvidia_peermem nvidia_modeset nvidia_drm",
        "systemctl start nvidia-persistenced.service",
    ]
    assert RECORD not in node.files
    node.ran.clear()
    assert not go(node)["changed"] and not changing(node)


def test_other_flavour_of_one_version_is_another_module():
    node = Node(loaded=NEW)
    node.files["/sys/module/nvidia/srcversion"] = "ofTheOpenOne\n"
    assert go(node)["changed"]
    # Some kernels report no srcversion.
    node.files["/sys/module/nvidia/srcversion"] = "\n"
    assert not go(node)["changed"]


def test_only_an_installed_driver_is_loaded():
    node = Node(loaded="")
    assert go(node)["changed"] and node.modules == ["nvidia"]
    node = Node(loaded="", on_disk="")
    assert not go(node)["changed"]


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        ({"command": "python3"}, "the GPUs are in use by python3 (process 77)"),
        ({"command": "python3", "pod": POD}, f"the GPUs are in use by python3 (process 77 of pod {POD})"),
        ({"command": "miner", "unit": "mine"}, "the GPUs are in use by miner (process 77 of mine.service)"),
    ],
)
def test_process_that_uses_a_gpu_is_named_and_nothing_is_changed(process, reason):
    node = Node()
    node.process(77, process["command"], "/dev/nvidia0", pod=process.get("pod", ""), unit=process.get("unit", ""))
    result = go(node, end_pods=not process.get("pod"))
    assert (result["changed"], result["reboot_required"], result["reason"]) == (False, True, reason)
    assert [user["pid"] for user in result["users"]] == [77]
    assert not changing(node) and not node.events


def test_services_that_the_user_names_are_stopped_too():
    node = Node(active=("kubelet", "mine"))
    node.process(77, "miner", "/dev/nvidia0", unit="mine")
    result = go(node, services=["mine.service"])
    assert result["changed"] and not result["reboot_required"]
    lines = [line for line in changing(node) if "mine" in line]
    assert lines == ["systemctl stop mine.service", "systemctl start mine.service"]


def test_processes_of_drained_pods_are_ended_while_kubelet_is_stopped():
    node = Node()
    node.process(77, "device-plugin", "/dev/nvidiactl", pod=POD)
    # It uses no card, but its library doesn't match the new module.
    node.process(78, "exporter", pod=POD, maps="7f00-7f01 r-xp 0 0 1 /usr/lib/libnvidia-ml.so.580.82.07 (deleted)\n")
    node.process(79, "shell", pod=POD)
    node.stubborn = "78"
    result = go(node, end_pods=True)
    assert result["diff"][0]["before"].splitlines() == [
        f"device-plugin (process 77 of pod {POD})",
        f"exporter (process 78 of pod {POD})",
    ]
    assert changing(node)[:4] == [
        "systemctl stop kubelet.service",
        "systemctl stop nvidia-persistenced.service",
        "kill -TERM 77 78",
        "kill -KILL 78",
    ]
    assert changing(node)[-2:] == ["systemctl start nvidia-persistenced.service", "systemctl start kubelet.service"]
    assert node.files["/proc/79/comm"] and node.active["kubelet"]


def test_refused_unload_restores_the_node():
    node = Node()
    node.fails = "remove"
    result = go(node)
    assert result["reboot_required"]
    assert result["reason"] == "the kernel refused to unload them: modprobe: FATAL: Module nvidia_drm is in use."
    assert node.active["nvidia-persistenced"] and set(node.modules) == set(HOLDERS) and RECORD not in node.files


@pytest.mark.parametrize("state", ["reloaded", "unloaded"])
def test_services_of_a_killed_run_start_although_the_module_is_in_use(state):
    """By a process, which is observed, or by what only the kernel detects."""
    node, refusing = Node(active=("nvidia-persistenced",)), Node(active=("nvidia-persistenced",))
    for one in (node, refusing):
        one.files[RECORD] = json.dumps({"services": ["kubelet"], "modules": list(HOLDERS)})
    node.process(77, "python3", "/dev/nvidia0")
    assert go(node, check=True, state=state)["diff"][0]["after"] == "kubelet\n" and not node.active["kubelet"]
    result = go(node, state=state)
    assert (result["changed"], result["reboot_required"]) == (True, True)
    assert changing(node) == ["systemctl start kubelet.service"] and set(node.modules) == set(HOLDERS)
    assert not go(node, state=state)["changed"]
    refusing.fails = "remove"
    assert go(refusing, state=state)["reboot_required"] and refusing.active["nvidia-persistenced"]
    for one in (node, refusing):
        assert one.active["kubelet"] and RECORD not in one.files


@pytest.mark.parametrize("state", ["reloaded", "unloaded"])
def test_service_that_does_not_stop_restores_the_node(state):
    node = Node(active=("kubelet", "nvidia-persistenced", "nvidia-fabricmanager"))
    node.process(77, "device-plugin", "/dev/nvidiactl", pod=POD)
    node.stuck = "nvidia-persistenced"
    node.files[RECORD] = json.dumps({"services": ["mine"], "modules": []})
    with pytest.raises(ShareError, match=r"^systemctl stop nvidia-persistenced failed: Job for it timed out"):
        go(node, state=state, end_pods=True)
    assert all(node.active.values()) and RECORD not in node.files and set(node.modules) == set(HOLDERS)
    node.commands["systemctl start mine"] = Done(1, "", "no")
    node.active["mine"] = False
    node.files[RECORD] = json.dumps({"services": ["mine"], "modules": []})
    with pytest.raises(ShareError, match=r"^systemctl stop nvidia-persistenced"):
        go(node, state=state, end_pods=True)
    assert node.active["kubelet"] and "mine" in json.loads(node.files[RECORD])["services"]


def test_module_that_cannot_be_loaded_is_reported_and_the_services_are_restored():
    node = Node()
    node.fails = "load"
    with pytest.raises(ShareError, match=r"^modprobe -a nvidia .* failed: .*Key was rejected by service$"):
        go(node)
    assert node.active["kubelet"] and node.active["nvidia-persistenced"] and RECORD not in node.files


def test_unloaded_then_another_installed_then_reloaded():
    node = Node()
    assert go(node, state="unloaded")["changed"] and node.modules == []
    assert not node.active["nvidia-persistenced"] and json.loads(node.files[RECORD])["services"]
    assert library.unfinished(node)
    assert not go(node, state="unloaded")["changed"]
    node.on_disk = "590.48.01"
    assert go(node)["changed"]
    assert set(node.modules) == set(HOLDERS) and node.active["nvidia-persistenced"] and RECORD not in node.files


def test_container_changes_no_module_and_restarts_only_the_named_services():
    node = Node(kernels=())
    result = go(node)
    assert not result["changed"] and not result["reboot_required"] and result["container"]
    assert not go(node, state="unloaded")["changed"] and not changing(node)
    node = Node(active=("kubelet", "mine", "nvidia-persistenced"), loaded="", on_disk="", kernels=())
    node.files["/proc/driver/nvidia/version"] = (
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {OLD}  Release\n"
    )
    node.links["/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"] = f"libnvidia-ml.so.{NEW}"
    node.files[f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{NEW}"] = ""
    node.process(78, "plugin", pod=POD, maps="7f00 r-xp 0 0 1 /usr/lib/libnvidia-ml.so.1\n")
    start = node._systemctl

    def restart(argv):
        if list(argv[1:]) == ["start", "mine.service"]:
            node.files["/proc/driver/nvidia/version"] = f"NVRM version: NVIDIA UNIX Kernel Module  {NEW}  Release\n"
        return start(argv)

    node.commands["systemctl st"] = restart
    assert go(node, services=["mine"], end_pods=True)["changed"]
    names = ["kubelet", "nvidia-persistenced", "mine"]
    stops = [f"systemctl stop {name}.service" for name in names]
    assert changing(node) == [*stops, "kill -TERM 78", *(f"systemctl start {name}.service" for name in names[::-1])]
    assert not go(node, services=["mine"], end_pods=True)["changed"]
    node.process(78, "plugin", pod=POD, maps="7f00 r-xp 0 0 1 /usr/lib/libnvidia-ml.so.1\n")
    node.ran.clear()
    assert go(node, state="unloaded", services=["mine"], end_pods=True)["changed"]
    assert not node.active["mine"] and not node.active["kubelet"]
    assert not go(node, state="unloaded", services=["mine"], end_pods=True)["changed"]
    # The package of another driver starts the service.
    node.active["mine"] = True
    assert go(node, services=["mine"], end_pods=True)["changed"]
    assert node.active["kubelet"] and node.active["nvidia-persistenced"] and RECORD not in node.files
    assert not [line for line in node.ran if "modprobe" in line]


@pytest.mark.parametrize("state", ["reloaded", "unloaded"])
def test_after_a_kill_at_any_step_the_next_run_reaches_the_same_state(state):
    def fresh():
        node = Node()
        node.process(77, "device-plugin", "/dev/nvidiactl", pod=POD)
        node.process(10, "nvidia-persiste", "/dev/nvidia0", unit="nvidia-persistenced")
        return node

    def whole(node):
        go(node, state=state, end_pods=True)
        return go(node, end_pods=True)

    ended = fresh()
    whole(ended)
    for moment, node in enumerate(killed_at_every_step(fresh, whole, 9), 1):
        go(node, end_pods=True)
        assert node.end() == ended.end(), moment
        assert not go(node, end_pods=True)["changed"], moment


@pytest.mark.parametrize(
    "group",
    [
        f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-1.scope",
        f"12:cpu:/x\n11:memory:/kubepods/burstable/pod{POD}/0123",
        f"0::/system.slice/docker-1.scope/kubelet/kubepods/pod{POD}/5",
    ],
)
def test_pod_of_a_process(group):
    node = FakeSystem({"/proc/7/cgroup": group, "/proc/7/comm": "x\n"})
    node.links["/proc/7/fd/1"] = "/dev/nvidia0"
    assert [(user["pod"], user["unit"]) for user in open_devices.users(node, lambda path: True)] == [(POD, "")]


def test_process_that_ends_during_the_observation():
    class Vanishing(FakeSystem):
        def names(self, path):
            if path == "/proc/7/fd":
                raise ShareError(f"{path} can't be listed: No such process")
            return super().names(path)

        def read(self, path):
            raise ShareError(f"{path} can't be read: No such process")

    assert open_devices.users(Vanishing({"/proc/7/comm": "x"}), lambda path: True, "x") == []
