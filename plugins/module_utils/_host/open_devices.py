# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the processes that have a device open."""

from __future__ import annotations

import re
import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject
from .system import System

# A pod's UID in the cgroup path of any cgroup driver and runtime.
POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
UNIT = re.compile(r"/([^/\n]+)\.service$", re.MULTILINE)


def users(system: System, wanted: t.Callable[[str], bool], mapped: str = "") -> list[JsonObject]:
    """Return the processes that have certain files open.

    :param wanted: selects the paths of open files.
    :param mapped: a regular expression; processes with such a file mapped into memory are included.
    :returns: {pid, command, pod (its UID, or empty), unit (its service, or empty), devices: [path]}.
    """
    processes = []
    for name in _names(system, "/proc"):
        if not name.isdigit():
            continue
        links = (system.link(f"/proc/{name}/fd/{number}") for number in _names(system, f"/proc/{name}/fd"))
        devices = sorted({link for link in links if link and wanted(link)})
        if devices or (mapped and re.search(mapped, _read(system, f"/proc/{name}/maps"))):
            group = _read(system, f"/proc/{name}/cgroup")
            pod, unit = POD.search(group), UNIT.search(group)
            processes.append(
                {
                    "pid": int(name),
                    "command": _read(system, f"/proc/{name}/comm").strip() or "?",
                    "pod": pod.group(1).replace("_", "-") if pod else "",
                    "unit": unit.group(1) if unit and not pod else "",
                    "devices": devices,
                }
            )
    return sorted(processes, key=lambda process: t.cast(int, process["pid"]))


def _names(system: System, path: str) -> list[str]:
    # A process may end while it is read.
    try:
        return system.names(path)
    except ShareError:
        return []


def _read(system: System, path: str) -> str:
    try:
        return system.read(path) or ""
    except ShareError:
        return ""
