# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove the files that HAMi leaves on a node, unless a container has them mounted; module backend_files."""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._host.open_devices import POD
from .._host.system import System

ARGUMENTS: JsonObject = {"library_folder": {"type": "path", "default": "/usr/local"}}
LOCKS = "/tmp/vgpulock"
MIG_FOLDER, MIG_LOCK = "/tmp/hami", "hami-mig-apply.lock"
# NVIDIA's plugin has them, too.
SHARED = (
    "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json",
    "/var/lib/kubelet/device-plugins/nvidia-gpu.sock",
)
# The kernel keeps 15 characters of a program's name.
PLUGIN = "nvidia-device-plugin"[:15]


@dataclasses.dataclass(frozen=True)
class Container:
    """A container that has HAMi's files mounted.

    :param pod: the UID of its pod; empty where it is unknown.
    """

    pid: int
    command: str
    pod: str


@dataclasses.dataclass(frozen=True)
class Observed:
    """What is there.

    :param paths: HAMi's own files and folders.
    :param shared: those that NVIDIA's device plugin writes, too.
    :param plugin: a device plugin of either runs.
    """

    paths: tuple[str, ...]
    shared: tuple[str, ...]
    containers: tuple[Container, ...]
    plugin: bool


class Files:
    """Reconciler: nothing of HAMi is on this machine.

    :param folder: where HAMi's library is installed, ``/usr/local`` by default.
    """

    def __init__(self, system: System, folder: str) -> None:
        if not folder.startswith("/"):
            raise BadInput(f"library_folder: {folder} isn't absolute")
        self._system = system
        self._library = f"{folder.rstrip('/')}/vgpu"

    def observe(self) -> Observed:
        own = [path for path in (self._library, LOCKS) if self._system.exists(path)]
        if self._system.exists(MIG_FOLDER):
            # The plugin creates the folder in any case; who has another file in it keeps it.
            names = self._system.names(MIG_FOLDER)
            if set(names) <= {MIG_LOCK}:
                own.append(MIG_FOLDER)
            elif MIG_LOCK in names:
                own.append(f"{MIG_FOLDER}/{MIG_LOCK}")
        pids = [name for name in self._system.names("/proc") if name.isdigit()]
        plugin = any(self._text(pid, "comm").strip() == PLUGIN for pid in pids)
        shared = tuple(path for path in SHARED if self._system.exists(path))
        return Observed(tuple(own), shared, tuple(self._containers(pids)) if own else (), plugin)

    def _containers(self, pids: t.Iterable[str]) -> t.Iterator[Container]:
        """Yield one process of each mount namespace in which a part of HAMi's folder is mounted."""
        seen = {self._system.link("/proc/1/ns/mnt")}
        # The folder may be a file system of its own, which every namespace has.
        hosts = set(self._mounts("1"))
        for pid in pids:
            namespace = self._system.link(f"/proc/{pid}/ns/mnt")
            if namespace in seen:
                continue
            seen.add(namespace)
            points = set(self._mounts(pid)) - hosts
            if any(point == self._library or point.startswith(f"{self._library}/") for point in points):
                pod = POD.search(self._text(pid, "cgroup"))
                command = self._text(pid, "comm").strip() or "?"
                yield Container(int(pid), command, pod.group(1).replace("_", "-") if pod else "")

    def _mounts(self, pid: str) -> t.Iterator[str]:
        """Yield the mount points of a process."""
        for line in self._text(pid, "mountinfo").splitlines():
            if line.count(" ") > 4:
                yield line.split(" ")[4]

    def _text(self, pid: str, name: str) -> str:
        try:
            return self._system.read(f"/proc/{pid}/{name}") or ""
        except ShareError:
            # The process ends, or another user namespace hides it.
            return ""

    def plan(self, observed: Observed) -> Plan:
        if observed.containers:
            shown = [
                f"pid {container.pid} ({container.command}{f', pod {container.pod}' if container.pod else ''})"
                for container in observed.containers
            ]
            listed = f"{', '.join(shown[:5])}{f' and {len(shown) - 5} more' if len(shown) > 5 else ''}"
            raise BadInput(
                f"containers on this node have HAMi's library mounted, and couldn't be restarted without it: {listed}; "
                "delete their pods first",
                code="preloaded",
                containers=[dataclasses.asdict(container) for container in observed.containers],
            )
        paths = observed.paths + (() if observed.plugin else observed.shared)
        return Plan(tuple(Change(path, f"{path}\n", "", path) for path in paths))

    def apply(self, observed: Observed, plan: Plan) -> None:
        for change in plan.changes:
            done = self._system.run(["rm", "--recursive", "--force", "--one-file-system", "--", change.step])
            if done.rc:
                raise ShareError(f"{change.step} can't be removed: {done.err.strip() or f'rm ended with {done.rc}'}")


def ensure(system: System, params: JsonObject, check: bool) -> JsonObject:
    """Remove HAMi's files; a container with a part of the library's folder mounted couldn't be restarted without it.

    :param params: the module's options.
    :param check: predict the changes without applying them.
    :raises BadInput: containers use them.
    """
    return run(Files(system, params["library_folder"]), check)
