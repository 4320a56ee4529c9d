# SPDX-License-Identifier: GPL-3.0-or-later
"""Read which container's processes hold how much memory of a card, and how much they use it.

The driver lists to a process those alone that it can see: without the node's own process IDs (``hostPID``) the lists
are empty. Memory and owners are read by the same code as module nvml_info's.

Facts of ``nvmlDeviceGetProcessUtilization`` that public reports agree on (go-nvml#51, nvtop#91 and #110): it returns
an average since the time that it is given; "not found" means that nothing has run since; for processes that have ended
some drivers return values above 100, which are left out.
"""

from __future__ import annotations

import contextlib
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
    """Reads the containers that hold memory of cards."""

    def read(self, uuids: t.Sequence[str]) -> dict[str, list[Held] | None]:
        """Return the containers by the driver's list, by card (UUID); None where it is unknown. Never raises."""


class NvidiaProcesses:
    """The library itself. It counts its users: this one leaves it after each read, lest it outlive a driver's reload,
    and the inventory keeps it initialised, so that nothing is initialised anew meanwhile.

    :param start: loads and initialises it.
    """

    def __init__(self, start: t.Callable[[], Nvml] = lambda: Library(load(None)), owners: Owners | None = None) -> None:
        self._start, self._owners = start, owners or NodeHost()
        # The latest samples that were read, in the driver's microseconds.
        self._seen: dict[str, int] = {}

    def read(self, uuids: t.Sequence[str]) -> dict[str, list[Held] | None]:
        try:
            nvml = self._start()
        except NvmlRefused as refused:
            log.debug("processes: %s", refused)
            return dict.fromkeys(uuids)
        try:
            return {uuid: self._of_card(nvml, uuid) for uuid in uuids}
        finally:
            with contextlib.suppress(NvmlRefused):
                nvml.call("nvmlShutdown")

    def _of_card(self, nvml: Nvml, uuid: str) -> list[Held] | None:
        try:
            driver = str(nvml.call("nvmlSystemGetDriverVersion"))
            return self._held(nvml, nvml.call("nvmlDeviceGetHandleByUUID", uuid.encode()), uuid, driver)
        except NvmlRefused as refused:
            log.debug("the processes of %s: %s", uuid, refused)
            return None

    def _held(self, nvml: Nvml, handle: t.Any, uuid: str, driver: str) -> list[Held] | None:
        rows = processes(Query(nvml), handle, driver, None, ())
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
