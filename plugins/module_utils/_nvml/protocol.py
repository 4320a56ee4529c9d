# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect NVML's facts as a stream of messages, so that nothing is lost if a call hangs. No I/O.

Messages, in this order: ``failed`` (text; nothing follows), or ``system``, then for each card ``begin`` (its index;
again with ``so_far`` once its identity is known) and ``card``, then for each process ``begin`` (its PID as text) and
``libvgpu``, then ``end``.
"""

from __future__ import annotations

import typing as t

from .._contracts.card_exclusion import Exclusion
from . import device as cards
from . import processes as holders
from .query import Nvml, Query
from .return_codes import NvmlRefused, describe
from .types import CardFacts, HostProcess, Message, SystemFacts

Send = t.Callable[[Message], None]

# More than any node has.
MAX_CARDS = 256


class Host(t.Protocol):
    """The node's own data about processes; no method raises."""

    def now(self) -> int:
        """Return the clock ticks since boot."""

    def process(self, pid: int, listed: int) -> HostProcess:
        """Read a process and its owner.

        :param listed: clock ticks at which NVML listed it; a process that began later is another one.
        """

    def has_libvgpu(self, pid: int, start_time: str) -> bool | None:
        """Return whether HAMi's library is loaded; this hangs if the process hangs."""

    def container_cgroups(self) -> t.Sequence[holders.ContainerCgroup]:
        """List the cgroups (version 2) of pods' containers."""

    def xids(self) -> t.Mapping[str, list[int]] | None:
        """Return Xid codes by PCI address (``00000000:3B:00``); None if the kernel's log can't be read."""


class Request(t.NamedTuple):
    """What to collect.

    :param skip: cards that were read, or hang.
    :param processes: PIDs and start times of the processes on cards that were read.
    :param skip_processes: those of them that were read.
    :param exclude: cards of which only the identity is read.
    """

    skip: frozenset[int] = frozenset()
    processes: tuple[tuple[int, str], ...] = ()
    skip_processes: frozenset[int] = frozenset()
    exclude: Exclusion = Exclusion()


def read(start: t.Callable[[], Nvml], host: Host, request: Request, send: Send) -> None:
    """Collect what the request names, and send it.

    :param start: loads and initialises the library; raises NvmlRefused.
    """
    try:
        nvml = start()
        count = nvml.call("nvmlDeviceGetCount")
    except NvmlRefused as refused:
        send({"failed": describe(refused)})
        return
    query = Query(nvml, of_card=False)
    number = query.whole("the number of cards", count) or 0
    driver = query.text("the driver's version", "nvmlSystemGetDriverVersion")
    if number > MAX_CARDS:
        query.add_implausible(f"NVML reports {number} cards; only the first {MAX_CARDS} were read")
        number = MAX_CARDS
    system: SystemFacts = {
        "driver": driver,
        "nvml": query.text("NVML's version", "nvmlSystemGetNVMLVersion"),
        "cuda": _cuda(query.number("the CUDA version", "nvmlSystemGetCudaDriverVersion_v2")),
        "count": number,
        "problem": query.problem(),
    }
    send({"system": system})
    xids, groups = host.xids(), host.container_cgroups()
    processes = dict(request.processes)
    for index in range(number):
        if index not in request.skip:
            send({"begin": index})
            card = _card(nvml, host, index, driver, xids, groups, request.exclude, send)
            processes.update((one["pid"], one["start_time"]) for one in card["processes"] or () if one["start_time"])
            send({"card": card})
    for pid, started in processes.items():
        if pid not in request.skip_processes:
            send({"begin": str(pid)})
            send({"libvgpu": (pid, host.has_libvgpu(pid, started))})
    send({"end": True})


def _cuda(number: int | None) -> str:
    return "" if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _card(
    nvml: Nvml,
    host: Host,
    index: int,
    driver: str,
    xids: t.Mapping[str, list[int]] | None,
    groups: t.Sequence[holders.ContainerCgroup],
    exclude: Exclusion,
    send: Send,
) -> CardFacts:
    query, card, ended = Query(nvml), cards.unknown_card(index), None
    try:
        handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
        cards.identify(query, handle, card)
        if exclude.of(card["pci"], card["uuid"], card["name"]):
            return card
        if xids is not None and card["pci"]:
            card["health"]["xids"] = list(xids.get(card["pci"].rpartition(".")[0], ()))
        send({"begin": index, "so_far": card})
        card["memory"] = cards.memory(query, handle)
        card["mig"], migs = cards.mig(query, handle)
        card["compute_mode"] = cards.compute_mode(query, handle)
        known = card["health"]["xids"]
        card["health"] = cards.health(query, handle)
        card["health"]["xids"] = known
        total = card["memory"]["total_mib"] if card["memory"] else None
        rows = holders.processes(query, handle, driver, total, migs)
        listed = host.now()
        if rows is not None:
            card["processes"] = [{**row, **host.process(row["pid"], listed), "libvgpu": None} for row in rows]
        card["limits"] = holders.limits(query, handle, groups)
    except NvmlRefused as refused:
        # The card is lost or inaccessible: what was read before is kept.
        ended = refused
    card["problem"] = query.problem(ended)
    return card
