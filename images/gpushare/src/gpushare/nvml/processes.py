# SPDX-License-Identifier: GPL-3.0-or-later
"""Read which container's processes hold how much memory of a card, and how much they use it.

The driver lists to a process those alone that it can see: without the node's own process IDs (``hostPID``) the lists
are empty. Memory and owners are read by the same code as module nvml_info's.

Facts of ``nvmlDeviceGetProcessUtilization`` that public reports agree on (go-nvml#51, nvtop#91 and #110): it returns
an average since the time that it is given; "not found" means that nothing has run since; for processes that have ended
some drivers return values above 100, which are left out.
"""

from __future__ import annotations

import logging
import typing as t

from gpushare.shared._nvml.binding import NOT_FOUND, Library, Nvml, NvmlRefused, Query, load
from gpushare.shared._nvml.host import NodeHost
from gpushare.shared._nvml.processes import processes
from gpushare.shared._nvml.types import HostProcess

log = logging.getLogger("gpushare.nvml")

PERCENT = 100
UTILIZATION = "nvmlDeviceGetProcessUtilization"


class Owners(t.Protocol):
    """Finds whose a process is; no method raises."""

    def now(self) -> int: ...

    def process(self, pid: int, listed: int) -> HostProcess: ...


class Held(t.NamedTuple):
    """What the processes of one container hold of a card.

    :param used_mib: their memory; None if the driver doesn't report it of each.
    :param duty: percent of the time in which the card computed for them; None if the driver doesn't report it.
    """

    pod_uid: str
    container_id: str
    used_mib: int | None
    duty: int | None


class ProcessReader(t.Protocol):
    """Reads the containers that hold memory of a card."""

    def read(self, uuid: str) -> list[Held] | None:
        """Return the containers by the driver's list; None if it is unknown. Never raises."""


class NvidiaProcesses:
    """The library itself; it counts its users, so that this one and the inventory's are independent.

    :param start: loads and initialises it.
    """

    def __init__(self, start: t.Callable[[], Nvml] = lambda: Library(load(None)), owners: Owners | None = None) -> None:
        self._start, self._owners = start, owners or NodeHost()
        self._nvml: Nvml | None = None
        self._driver = ""
        # The latest samples that were read, in the driver's microseconds.
        self._seen: dict[str, int] = {}

    def read(self, uuid: str) -> list[Held] | None:
        try:
            if self._nvml is None:
                self._nvml = self._start()
                self._driver = str(self._nvml.call("nvmlSystemGetDriverVersion"))
            return self._read(self._nvml, uuid)
        except NvmlRefused as refused:
            # The driver may have been reloaded.
            log.debug("the processes of %s: %s", uuid, refused)
            self._nvml = None
            return None

    def _read(self, nvml: Nvml, uuid: str) -> list[Held] | None:
        handle = nvml.call("nvmlDeviceGetHandleByUUID", uuid.encode())
        rows = processes(Query(nvml), handle, self._driver, None, ())
        if rows is None:
            return None
        listed, duties = self._owners.now(), self._duties(nvml, handle, uuid)
        by_container: dict[tuple[str, str], list[tuple[int | None, int | None]]] = {}
        for row in rows:
            owner = self._owners.process(row["pid"], listed)
            if owner["where"] == "pod":
                duty = None if duties is None else duties.get(row["pid"], 0)
                key = owner["pod_uid"], owner["container_id"]
                by_container.setdefault(key, []).append((row["used_mib"], duty))
        return [
            Held(*key, total(used for used, _duty in mine), total((duty for _used, duty in mine), PERCENT))
            for key, mine in by_container.items()
        ]

    def _duties(self, nvml: Nvml, handle: t.Any, uuid: str) -> dict[int, int] | None:
        """Return the percent of each process that has computed since the last call; None if it is unknown."""
        since = self._seen.get(uuid, 0)
        try:
            samples = nvml.call(UTILIZATION, handle, since)
        except NvmlRefused as refused:
            return {} if refused.code == NOT_FOUND else None
        if not isinstance(samples, (list, tuple)):
            return None
        percents: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > since and 0 <= sample.smUtil <= PERCENT:
                percents.setdefault(int(sample.pid), []).append(int(sample.smUtil))
                self._seen[uuid] = max(self._seen.get(uuid, 0), int(sample.timeStamp))
        return {pid: sum(each) // len(each) for pid, each in percents.items()}


def total(numbers: t.Iterable[int | None], most: int | None = None) -> int | None:
    """Return a sum; None if one of the numbers is unknown.

    :param most: what it can't exceed.
    """
    known = list(numbers)
    if any(number is None for number in known):
        return None
    every = sum(number for number in known if number is not None)
    return every if most is None else min(every, most)
