# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the processes that hold memory of a card, and the limits of cgroups on it. No I/O.

The lists of compute, graphics and MPS are merged, and those of MIG devices with their card's. A process in several
lists is one entry with the highest value: each list has all memory of the process.
"""

from __future__ import annotations

import re
import typing as t

from .binding import FUNCTION_NOT_FOUND, MIB, NOT_AVAILABLE, NOT_FOUND, NOT_SUPPORTED, NvmlRefused, Query
from .device import MigDevice
from .types import CgroupLimit, GpuProcess

LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
# 535.98 and drivers before 510 lack the third version; the second has all fields that are used here.
VERSIONS = ("_v3", "_v2")
NO_INSTANCE = 0xFFFFFFFF
# The kernel's limit of PID_MAX.
MAX_PID = 1 << 22
MAX_PROCESSES = 1 << 16
LIMITS = "nvmlDeviceGetMemoryLimits_v1"
# The third version of these drivers writes longer entries than NVML declares, so that every second one is garbage.
LONGER_ENTRIES = re.compile(r"535\.(\d+)(?:\.|$)")
FIRST_LONGER, LAST_LONGER = 43, 86


class ContainerCgroup(t.NamedTuple):
    """A container's cgroup.

    :param folder: its path in sysfs.
    :param path: its path as in ``/proc/<pid>/cgroup``.
    """

    folder: str
    path: str
    pod_uid: str
    container_id: str


def misreports_processes(driver: str) -> bool:
    """Return whether nvidia-ml-py can't parse this driver's lists of processes."""
    match = LONGER_ENTRIES.match(driver)
    return match is not None and FIRST_LONGER <= int(match.group(1)[:6]) <= LAST_LONGER


def processes(
    query: Query, handle: t.Any, driver: str, total_mib: int | None, migs: t.Sequence[MigDevice]
) -> list[GpuProcess] | None:
    """Read the processes of a card and its MIG devices; None if a list is missing.

    :param driver: its version.
    :param total_mib: the card's memory, which no process can exceed.
    :raises NvmlRefused: the card is lost.
    """
    if misreports_processes(driver):
        query.add_implausible(f"driver {driver} reports its processes wrongly; install 535.104.05 or newer")
        return None
    by_process: dict[tuple[int, str], GpuProcess] = {}
    complete = True
    # MIG devices first, so that entries of the card are matched with them.
    for device in [*migs, None]:
        for kind, function in LISTS:
            rows = _rows(query, device.handle if device else handle, kind, function)
            complete = complete and rows is not None
            for row in rows or ():
                _add(query, by_process, row, kind, total_mib, device, migs)
    if not complete:
        return None
    return [by_process[key] for key in sorted(by_process)]


def _rows(query: Query, handle: t.Any, kind: str, function: str) -> t.Sequence[t.Any] | None:
    subject = f"its {kind} processes"
    for version in VERSIONS:
        try:
            rows = query.nvml.call(function + version, handle)
        except NvmlRefused as refused:
            if refused.code == FUNCTION_NOT_FOUND:
                continue
            if refused.code == NOT_SUPPORTED and kind != "compute":
                return ()
            query.add_refusal(refused, subject)
            return None
        if not isinstance(rows, (list, tuple)) or len(rows) > MAX_PROCESSES:
            query.add_implausible(f"{subject} aren't a plausible list")
            return None
        return rows
    # Older drivers have no MPS list.
    if kind == "mps":
        return ()
    query.add_refusal(NvmlRefused(FUNCTION_NOT_FOUND), subject)
    return None


def _add(
    query: Query,
    by_process: dict[tuple[int, str], GpuProcess],
    row: t.Any,
    kind: str,
    total_mib: int | None,
    device: MigDevice | None,
    migs: t.Sequence[MigDevice],
) -> None:
    pid = getattr(row, "pid", None)
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid <= MAX_PID:
        query.add_implausible(f"it lists a process with the impossible PID {str(pid)[:24]}")
        return
    gi, ci = (_instance(getattr(row, name, None)) for name in ("gpuInstanceId", "computeInstanceId"))
    if device is None and gi is not None:
        device = next((mig for mig in migs if (mig.row["gi"], mig.row["ci"]) == (gi, ci)), None)
    if device is not None:
        gi, ci = device.row["gi"], device.row["ci"]
    uuid = device.row["uuid"] if device else ""
    if device is None and gi is None:
        # The card's own list may lack the instance of a process that another list has.
        uuid = next((known for other_pid, known in sorted(by_process) if other_pid == pid and known), "")
    entry = by_process.setdefault(
        (pid, uuid), {"pid": pid, "types": [], "used_mib": None, "gi": gi, "ci": ci, "mig_uuid": uuid}
    )
    if kind not in entry["types"]:
        entry["types"].append(kind)
    used = _used(query, pid, getattr(row, "usedGpuMemory", None), total_mib)
    if used is not None:
        entry["used_mib"] = max(used, entry["used_mib"] or 0)


def _instance(value: t.Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < NO_INSTANCE else None


def _used(query: Query, pid: int, value: t.Any, total_mib: int | None) -> int | None:
    if value is None or value == NOT_AVAILABLE:
        return None
    number = query.whole(f"the memory of process {pid}", value)
    if number is not None and total_mib is not None and number // MIB > total_mib:
        query.add_implausible(f"process {pid} can't hold {number // MIB} MiB of {total_mib} MiB")
        return None
    return None if number is None else number // MIB


def limits(query: Query, handle: t.Any, groups: t.Sequence[ContainerCgroup]) -> list[CgroupLimit] | None:
    """Read the limits of containers' cgroups; None if the driver has no such limits.

    A driver with limits reports "not supported" for a card without any, which means an empty list.

    :raises NvmlRefused: the card is lost.
    """
    if not query.nvml.has(LIMITS):
        return None
    limits: list[CgroupLimit] = []
    for group in groups:
        try:
            soft, hard, used = query.nvml.limit(handle, group.folder)
        except NvmlRefused as refused:
            if refused.code in (NOT_SUPPORTED, NOT_FOUND):
                continue
            query.add_refusal(refused, "limits of cgroups")
            return None
        limits.append(
            {
                "cgroup": group.path,
                "pod_uid": group.pod_uid or None,
                "container_id": group.container_id or None,
                "hard_mib": _mib(query.whole("a limit", hard)),
                "soft_mib": _mib(query.whole("a limit", soft)),
                "used_mib": _mib(query.whole("a cgroup's used memory", used)),
            }
        )
    return limits


def _mib(number: int | None) -> int | None:
    return None if number is None else number // MIB
