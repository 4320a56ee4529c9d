# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove what NVIDIA's device plugin left on a machine: module ``backend_files``.

A plugin that ends by itself takes its socket away, and its MPS daemon gives the cards their compute mode back. One that
was killed doesn't, and nobody removes the MPS folder with its tmpfs, nor the CDI specification.
"""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._host.system import System

SOCKETS = "device-plugins"
# The plugin's: nvidia-gpu.sock, nvidia-gpu.shared.sock, nvidia-mig-1g.5gb.sock.
SOCKET = re.compile(r"nvidia-(?:gpu|mig-).*\.sock")
CDI = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
# The beginnings that the kernel keeps of the names of programs, by what they are. HAMi's plugin has the name, too.
PROGRAMS: t.Mapping[str, str] = {
    "nvidia-device-p": "a device plugin",
    "mps-control-dae": "its MPS daemon",
    "nvidia-cuda-mps": "an MPS server",
}
EXCLUSIVE = "Exclusive_Process"
QUERY = ("nvidia-smi", "--query-gpu=uuid,compute_mode", "--format=csv,noheader")
NO_PROGRAM, NOT_LOADED = 127, 9
ARGUMENTS: JsonObject = {
    "mps_root": {"type": "path", "default": "/run/nvidia/mps"},
    "kubelet_root": {"type": "path", "default": "/var/lib/kubelet"},
}


class Left(t.TypedDict):
    """What is left; ``modes`` are the cards that only one process can use.

    ``mounts`` are the last one first, as they have to be unmounted.
    """

    modes: list[str]
    mounts: list[str]
    folder: bool
    files: list[str]


class Leftovers:
    """Reconciler: nothing of the plugin is on the machine."""

    def __init__(self, system: System, mps_root: str, kubelet_root: str) -> None:
        self._system = system
        self._root = posixpath.normpath(mps_root)
        self._sockets = posixpath.join(kubelet_root, SOCKETS)
        if not self._root.startswith("/") or self._root.count("/") < 2:
            raise BadInput(f"mps_root: {mps_root} isn't a folder of its own; name the chart's mps.root")

    def observe(self) -> Left:
        folder = self._system.exists(self._root)
        sockets = [name for name in self._system.names(self._sockets) if SOCKET.fullmatch(name)]
        files = [posixpath.join(self._sockets, name) for name in sockets]
        return {
            # Without the folder no MPS daemon ran since the boot, which resets the modes: then a mode is the user's.
            "modes": self._exclusive() if folder else [],
            "mounts": self._mounts(),
            "folder": folder,
            "files": files + ([CDI] if self._system.exists(CDI) else []),
        }

    def _exclusive(self) -> list[str]:
        done = self._system.run(QUERY)
        if done.rc in (NO_PROGRAM, NOT_LOADED):
            # With the driver the modes went.
            return []
        if done.rc:
            raise ShareError(f"nvidia-smi can't tell the cards' compute modes: {(done.out or done.err).strip()}")
        rows = [line.split(", ") for line in done.out.splitlines()]
        return [row[0] for row in rows if row[1:] == [EXCLUSIVE]]

    def _mounts(self) -> list[str]:
        points = [line.split()[1] for line in (self._system.read("/proc/self/mounts") or "").splitlines()]
        return [point for point in reversed(points) if f"{point}/".startswith(f"{self._root}/")]

    def plan(self, state: Left) -> Plan:
        changes = [
            Change(f"compute mode of {mode}", f"{EXCLUSIVE}\n", "Default\n", ("mode", mode)) for mode in state["modes"]
        ]
        changes += [Change(f"mount {mount}", "mounted\n", "", ("mount", mount)) for mount in state["mounts"]]
        # The folder is last: as long as it is there, the next run looks at the modes, too.
        changes += [Change(file, "there\n", "", ("file", file)) for file in state["files"]]
        if state["folder"]:
            changes.append(Change(self._root, "there\n", "", ("folder", self._root)))
        if changes:
            self._refuse_running()
        return Plan(tuple(changes))

    def _refuse_running(self) -> None:
        running = []
        for pid in self._system.names("/proc"):
            name = (self._system.read(f"/proc/{pid}/comm") or "").strip() if pid.isdigit() else ""
            if name in PROGRAMS:
                running.append({"pid": int(pid), "program": name})
        if running:
            shown = ", ".join(f"{PROGRAMS[str(process['program'])]} (process {process['pid']})" for process in running)
            raise ShareError(
                f"{shown} still runs on this machine: take the plugin off the node first, by its labels",
                running=running,
            )

    def apply(self, state: Left, plan: Plan) -> None:
        for change in plan.changes:
            kind, what = change.step
            if kind == "mode":
                self._must("nvidia-smi", "-i", what, "-c", "DEFAULT")
            elif kind == "mount":
                self._must("umount", what)
            elif kind == "file":
                # A socket, which `remove` leaves as it is.
                self._must("rm", "--force", "--", what)
            else:
                self._must("rm", "-r", "--one-file-system", what)

    def _must(self, *argv: str) -> None:
        done = self._system.run(argv)
        if done.rc:
            raise ShareError(f"{' '.join(argv)} failed: {(done.err or done.out).strip()}")


def work(system: System, params: JsonObject, check: bool) -> JsonObject:
    """Run the module.

    :raises ShareError: the plugin still runs, or something can't be removed.
    """
    return run(Leftovers(system, params["mps_root"], params["kubelet_root"]), check)
