# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove what NVIDIA's sandbox device plugin left on a machine: module ``backend_files``.

It takes neither its CDI specification nor its sockets away when it ends.
"""

from __future__ import annotations

import posixpath
import re

from .._core.errors import ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._host.system import System
from . import cdi

SOCKETS = "device-plugins"
SOCKET = re.compile(r"sandbox-.*\.sock")
# What the kernel keeps of its name.
PROGRAM = "nvidia-sandbox-"


class Leftovers:
    """Reconciler: nothing of the plugin is on the machine."""

    def __init__(self, system: System, kubelet_root: str) -> None:
        self._system = system
        self._sockets = posixpath.join(kubelet_root, SOCKETS)

    def observe(self) -> list[str]:
        """Return the files that are left."""
        sockets = [name for name in self._system.names(self._sockets) if SOCKET.fullmatch(name)]
        # A specification in /etc/cdi is the administrator's.
        specs = [spec.path for spec in cdi.read(self._system) if spec.path.startswith(cdi.FOLDERS[1])]
        return [posixpath.join(self._sockets, name) for name in sockets] + specs

    def plan(self, state: list[str]) -> Plan:
        if state:
            self._refuse_running()
        return Plan(tuple(Change(path, "there\n", "", path) for path in state))

    def _refuse_running(self) -> None:
        for pid in self._system.names("/proc"):
            if pid.isdigit() and (self._system.read(f"/proc/{pid}/comm") or "").strip() == PROGRAM:
                raise ShareError(
                    f"NVIDIA's sandbox device plugin (process {pid}) still runs on this machine: take it off the node "
                    "first, by its label",
                    running=[{"pid": int(pid), "program": PROGRAM}],
                )

    def apply(self, state: list[str], plan: Plan) -> None:
        for change in plan.changes:
            self._system.remove(change.step)


def work(system: System, params: JsonObject, check: bool) -> JsonObject:
    """Run the module.

    :raises ShareError: the plugin still runs.
    """
    return run(Leftovers(system, params["kubelet_root"]), check)
