# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which processes hold memory of a card, and which cgroups are limited on it. No I/O.

Lists of compute, graphics and MPS are merged, and those of MIG devices with those of their card. A process that is in
several is one entry with the highest of its numbers: each list tells all that the process holds.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._nvml_asking import MIB, NOT_AVAILABLE, Asking
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_card import MigDevice
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_words import (
    FUNCTION_NOT_FOUND,
    NOT_FOUND,
    NOT_SUPPORTED,
    Refused,
)

Json = t.Dict[str, t.Any]

LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
# 535.98 lacks the third version, as do those before 510; the second has all that is used here.
VERSIONS = ("_v3", "_v2")
NO_INSTANCE = 0xFFFFFFFF
# The kernel's own limit of PID_MAX.
MOST_PID = 1 << 22
MOST_PROCESSES = 1 << 16
LIMITS = "nvmlDeviceGetMemoryLimits_v1"
# These drivers' third version writes longer entries than NVML says, so that every second one is garbage.
LONGER_ENTRIES = re.compile(r"535\.(\d+)(?:\.|$)")
FIRST_LONGER, LAST_LONGER = 43, 86


class Group(t.NamedTuple):
    """A container's cgroup.

    :param folder: where it is in sysfs.
    :param path: as ``/proc/<pid>/cgroup`` has it.
    """

    folder: str
    path: str
    pod_uid: str
    container_id: str


def lies(driver: str) -> bool:
    """Whether this driver's lists of processes can't be read by this version of nvidia-ml-py."""
    found = LONGER_ENTRIES.match(driver)
    return found is not None and FIRST_LONGER <= int(found.group(1)[:6]) <= LAST_LONGER


def processes(asking: Asking, handle: t.Any, driver: str, total_mib: int | None, migs: t.Sequence[MigDevice]) -> t.Any:
    """Entries with ``pid``, ``types``, ``used_mib``, ``gi``, ``ci``, ``mig_uuid``; None where a list is missing.

    :param driver: its version.
    :param total_mib: what none can be above.
    :raises Refused: the card is lost.
    """
    if lies(driver):
        asking.doubt(f"driver {driver} doesn't tell its processes right; install 535.104.05 or newer")
        return None
    found: dict[tuple[int, str], Json] = {}
    complete = True
    # MIG devices first, so that what the whole card tells finds where it belongs.
    for device in [*migs, None]:
        for kind, function in LISTS:
            rows = _rows(asking, device.handle if device else handle, kind, function)
            complete = complete and rows is not None
            for row in rows or ():
                _add(asking, found, row, kind, total_mib, device, migs)
    if not complete:
        return None
    return [found[key] for key in sorted(found)]


def _rows(asking: Asking, handle: t.Any, kind: str, function: str) -> t.Sequence[t.Any] | None:
    what = f"its {kind} processes"
    for version in VERSIONS:
        try:
            rows = asking.nvml.ask(function + version, handle)
        except Refused as refused:
            if refused.code == FUNCTION_NOT_FOUND:
                continue
            if refused.code == NOT_SUPPORTED and kind != "compute":
                return ()
            asking.refused(refused, what)
            return None
        if not isinstance(rows, (list, tuple)) or len(rows) > MOST_PROCESSES:
            asking.doubt(f"{what} aren't a list that can be true")
            return None
        return rows
    # Older drivers have no MPS list.
    if kind == "mps":
        return ()
    asking.refused(Refused(FUNCTION_NOT_FOUND), what)
    return None


def _add(
    asking: Asking,
    found: dict[tuple[int, str], Json],
    row: t.Any,
    kind: str,
    total_mib: int | None,
    device: MigDevice | None,
    migs: t.Sequence[MigDevice],
) -> None:
    pid = getattr(row, "pid", None)
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid <= MOST_PID:
        asking.doubt(f"it lists a process with the PID {str(pid)[:24]}, which none can have")
        return
    gi, ci = (_instance(getattr(row, name, None)) for name in ("gpuInstanceId", "computeInstanceId"))
    if device is None and gi is not None:
        device = next((one for one in migs if (one.gi, one.ci) == (gi, ci)), None)
    if device is not None:
        gi, ci = device.gi, device.ci
    uuid = device.uuid if device else ""
    if device is None and gi is None:
        # The card's own list, which may not tell the instance of a process that is known by one.
        uuid = next((known for one, known in sorted(found) if one == pid and known), "")
    entry = found.setdefault(
        (pid, uuid), {"pid": pid, "types": [], "used_mib": None, "gi": gi, "ci": ci, "mig_uuid": uuid}
    )
    if kind not in entry["types"]:
        entry["types"].append(kind)
    used = _used(asking, pid, getattr(row, "usedGpuMemory", None), total_mib)
    if used is not None:
        entry["used_mib"] = max(used, entry["used_mib"] or 0)


def _instance(value: t.Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < NO_INSTANCE else None


def _used(asking: Asking, pid: int, value: t.Any, total_mib: int | None) -> int | None:
    if value is None or value == NOT_AVAILABLE:
        return None
    number = asking.whole(f"the memory of process {pid}", value)
    if number is not None and total_mib is not None and number // MIB > total_mib:
        asking.doubt(f"process {pid} can't hold {number // MIB} MiB of {total_mib} MiB")
        return None
    return None if number is None else number // MIB


def limits(asking: Asking, handle: t.Any, groups: t.Sequence[Group]) -> list[Json] | None:
    """The limits that the driver keeps of containers' cgroups; None where it has none to ask for.

    Such a driver says "not supported" of a card that was never given any limit, so that this means none.

    :raises Refused: the card is lost.
    """
    if not asking.nvml.has(LIMITS):
        return None
    found: list[Json] = []
    for group in groups:
        try:
            soft, hard, used = asking.nvml.limit(handle, group.folder)
        except Refused as refused:
            if refused.code in (NOT_SUPPORTED, NOT_FOUND):
                continue
            asking.refused(refused, "limits of cgroups")
            return None
        found.append(
            {
                "cgroup": group.path,
                "pod_uid": group.pod_uid or None,
                "container_id": group.container_id or None,
                **{
                    key: None if number is None else number // MIB
                    for key, number in (
                        ("hard_mib", asking.whole("a limit", hard)),
                        ("soft_mib", asking.whole("a limit", soft)),
                        ("used_mib", asking.whole("a cgroup's use", used)),
                    )
                },
            }
        )
    return found
