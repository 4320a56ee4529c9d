# SPDX-License-Identifier: GPL-3.0-or-later
"""A control-plane machine in memory with a kubelet that runs its static pods, and a run that is killed there."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import posixpath
import typing as t
from collections.abc import Callable, Sequence
from functools import cache

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.embedded import PLACES
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.embedded_plan import make_plan as on_server
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.extenders import Extender
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.plan import ObserveAgain, Options, SchedulerPlan
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.plan import make_plan as of_static_pod
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.static_pod_apply import FAILED_STARTS
from memory_system import MemorySystem

parsed = cache(yaml.safe_load)
RESTART_SECONDS = 3.0


class FakeMachine(MemorySystem):
    """Time passes by ``sleep``, and kubelet reads its folder then.

    :param refuses: returns the error with which kube-scheduler ends with these files, or nothing.
    :param folder: kubelet's folder of static pods.
    """

    def __init__(
        self,
        manifest: str,
        refuses: Callable[[FakeMachine], str] = lambda m: "",
        folder: str = posixpath.dirname(cp.MANIFEST),
    ) -> None:
        super().__init__("cp1")
        self.folder = folder
        self.manifest = f"{folder}/kube-scheduler.yaml"
        kubelet = f"apiVersion: kubelet.config.k8s.io/v1beta1\nstaticPodPath: {folder}\n"
        self.files[cp.KUBELET_CONFIG] = kubelet
        self.kubelet_arguments = ""
        self.devices: dict[str, str] = {}
        self.refuses = refuses
        self.kubelet_works = True
        self.pid = 100
        self._hash = ""
        self._due: float | None = None
        self._starts = 0
        self._pod: dict[str, t.Any] = {}
        # What kube-scheduler has loaded, by its own paths.
        self.loaded: dict[str, str] = {}
        self.healthy = False
        self.put(self.manifest, manifest, 0o600)
        for _second in range(8):
            self.sleep(1)
        self.log.clear()

    # ----------------------------------------------------------------- System

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        assert posixpath.dirname(path) != self.folder, "nothing is written into kubelet's folder"
        super().write(path, text, mode)

    def done(self, argv: Sequence[str]) -> Done:
        if argv[0] == "mv":
            for table in (self.files, self.modes, self.changed_at):
                table[argv[3]] = table.pop(argv[2])  # type: ignore[index]
        if argv[:4] == ["stat", "-L", "-c", "%d"]:
            return Done(0, f"{self.devices.get(argv[4], '1')}\n", "")
        if argv[:3] == ["systemctl", "show", cp.KUBELET] and self.kubelet_arguments:
            argv_ = f"/usr/bin/kubelet {self.kubelet_arguments}"
            return Done(0, f"LoadState=loaded\nExecStart={{ path=/usr/bin/kubelet ; argv[]={argv_} ; }}\n", "")
        if argv[0] == "grep":
            found = [line for line in self.files.get(argv[5], "").splitlines() if argv[4] in line]
            return Done(0 if found else 1, "".join(f"{line}\n" for line in found[:1]), "")
        return super().done(argv)

    # ----------------------------------------------------------------- kubelet

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        if not self.kubelet_works:
            return
        watched = {name for name in self.names(self.folder) if not name.startswith(".")}
        assert watched <= {posixpath.basename(self.manifest)}, f"kubelet runs {watched}"
        manifest = self.files.get(self.manifest, "")
        pod = parsed(manifest)
        digest = hashlib.md5(repr(pod).encode()).hexdigest() if pod else ""
        if digest != self._hash:
            self._hash, self._starts = digest, 0
            self._stop()
            self._due = self.time + RESTART_SECONDS if pod else None
        elif self._due is not None and self.time >= self._due:
            self._start(pod)

    def _stop(self) -> None:
        self.healthy = False
        self.forget_process(self.pid)

    def _start(self, pod: dict) -> None:  # type: ignore[type-arg]
        log = f"{cp.LOGS}/{cp.POD_PREFIX}cp1_{self._hash}/kube-scheduler/{self._starts}.log"
        reason = self.refuses(self)
        self._starts += 1
        version = _container(pod)["image"].rpartition(":")[2] if pod else ""
        line = f't stderr F I1121 "Starting Kubernetes Scheduler" version="{version}"'
        # The newest container has just started and has written nothing yet.
        self.files[log] = "" if reason and self._starts > FAILED_STARTS else f"{line}\nt stderr F {reason}\n"
        if reason:
            self._due = self.time + 10
            return
        self._due = None
        self.pid += 1
        self._pod = pod
        container = _container(pod)
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        self._mount_files()
        cgroup = f"0::/kubepods.slice/kubepods-burstable-pod{self._hash}.slice/cri-containerd-abc.scope\n"
        self.put_process(self.pid, *words, cgroup=cgroup)
        named = [word.partition("=")[2] for word in words if word.startswith(("--config=", "--policy-config-file="))]
        self.loaded = {path: self.read(f"/proc/{self.pid}/root{path}") or "" for path in named}
        self.healthy = True

    def container_restarts(self) -> None:
        """kube-scheduler ends, and kubelet starts its container again in the same pod."""
        self._stop()
        self._start(self._pod)

    # ----------------------------------------------------------------- the container's files

    def _mounts(self) -> list[tuple[str, str]]:
        """Paths in the container and on the machine, the longest first."""
        spec = self._pod["spec"]
        hosts = {
            volume["name"]: volume["hostPath"]["path"] for volume in spec.get("volumes") or [] if "hostPath" in volume
        }
        mounts = _container(self._pod).get("volumeMounts") or []
        found = [(mount["mountPath"], hosts[mount["name"]]) for mount in mounts if mount["name"] in hosts]
        return sorted(found, key=lambda one: len(one[0]), reverse=True)

    def _mount_files(self) -> None:
        """A file that is mounted itself stays the one that was there, whatever is renamed to its path later."""
        self.inodes = {host: f"/inodes/{self.pid}{host}" for _path, host in self._mounts() if host in self.files}
        for host, inode in self.inodes.items():
            self.files[inode], self.changed_at[inode] = self.files[host], self.changed_at[host]

    def seen(self, path: str) -> str:
        root, below, inside = path.partition(f"/proc/{self.pid}/root/")
        if root or not below:
            return super().seen(path)
        for mounted, host in self._mounts():
            if f"/{inside}" == mounted:
                return self.inodes.get(host, host)
            if f"/{inside}".startswith(f"{mounted}/"):
                return host + f"/{inside}"[len(mounted) :]
        return "/nowhere"

    def ask(self, url: str) -> int:
        return 200 if self.healthy else 0

    def state(self) -> tuple[object, ...]:
        """Return everything that the next run can observe."""
        return tuple(sorted(self.files.items())), tuple(sorted(self.modes.items())), round(self.time, 1)


def _container(pod: dict[str, t.Any]) -> dict[str, t.Any]:
    """Return kube-scheduler's container."""
    containers: list[dict[str, t.Any]] = pod["spec"]["containers"]
    return next((container for container in containers if container["name"] == "kube-scheduler"), containers[0])


class Watched:
    """Keeps a copy of a machine before each call: the state that a run killed there leaves.

    :param left: these machines; equal ones once.
    """

    CALLS = ("read", "names", "exists", "link", "write", "remove", "run", "sleep", "now", "ask", "post")

    def __init__(self, machine: t.Any) -> None:
        self._machine = machine
        self._states: set[t.Any] = set()
        self.left: list[t.Any] = []

    def __getattr__(self, name: str) -> t.Any:
        found = getattr(self._machine, name)
        if name not in self.CALLS:
            return found

        def call(*args: t.Any, **kwargs: t.Any) -> t.Any:
            self.remember()
            return found(*args, **kwargs)

        return call

    def remember(self) -> None:
        state = self._machine.state()
        if state not in self._states:
            self._states.add(state)
            self.left.append(copy.deepcopy(self._machine))


# --------------------------------------------------------------------------- runs


EXTENDER = Extender("http://127.0.0.1:12345/gpushare-scheduler", 30)
PRESENT = Options(True, EXTENDER)
OTHER = Options(True, Extender(EXTENDER.url, 10))
ABSENT = Options(False, EXTENDER)
_PLANS: dict[str, SchedulerPlan] = {}


def plan(system: t.Any, options: Options) -> SchedulerPlan:
    """Plan as the action plugin does, with an observation that went through JSON; equal ones share a plan."""
    arguments: dict[str, str] = {}
    while True:
        observed = json.loads(json.dumps(cp.observe(system, ask=system.ask, **arguments)))
        for one in observed["running"]:
            del one["pid"]
        key = repr(options) + json.dumps(observed, sort_keys=True)
        make_plan = on_server if observed["kind"] in PLACES else of_static_pod
        try:
            return _PLANS[key] if key in _PLANS else _PLANS.setdefault(key, make_plan(options, observed))
        except ObserveAgain as more:
            assert {**arguments, **more.arguments} != arguments
            arguments.update(more.arguments)


def carry_out(system: t.Any, planned: SchedulerPlan, timeout: int = 60) -> None:
    work({"plan": planned.to_module(), "timeout": timeout}, system, system.ask, system.sleep, system.now, system.post)


def run(system: t.Any, options: Options) -> SchedulerPlan:
    """Plan, and carry out a plan that isn't empty."""
    planned = plan(system, options)
    if not planned.plan.empty:
        carry_out(system, planned)
    return planned


def left_by_kills(system: t.Any, options: Options, timeout: int = 60) -> list[t.Any]:
    """Return the machines that a run leaves that is killed before any of its calls, or at its end."""
    watched = Watched(system)
    with contextlib.suppress(NotInEffect):
        carry_out(watched, plan(system, options), timeout)
    watched.remember()
    return watched.left
