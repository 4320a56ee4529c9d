# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Assemble NVML's facts from the messages of a worker process that may hang or crash. No I/O.

Messages, in this order: ``failed`` (text; nothing follows), or ``system``, then for each card ``begin`` (its index;
again with ``so_far`` once its identity is known) and ``card``, then for each process ``begin`` (its PID as text) and
``libvgpu``, then ``end``.
"""

from __future__ import annotations

import typing as t

from .._contracts.card_exclusion import NOTHING, Exclusion
from .._core.errors import BadInput
from .._core.types import JsonObject
from . import device as cards
from . import processes as holders
from .binding import Nvml, NvmlRefused, Query, describe
from .device import unknown_card
from .types import CardFacts, HostProcess, Message, NvmlFacts, SystemFacts

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
    version = query.text("NVML's version", "nvmlSystemGetNVMLVersion")
    cuda = query.number("the CUDA version", "nvmlSystemGetCudaDriverVersion_v2")
    system: SystemFacts = {
        "driver": driver,
        "nvml": version,
        "cuda": "" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
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
            processes.update(
                (process["pid"], process["start_time"]) for process in card["processes"] or () if process["start_time"]
            )
            send({"card": card})
    for pid, started in processes.items():
        if pid not in request.skip_processes:
            send({"begin": str(pid)})
            send({"libvgpu": (pid, host.has_libvgpu(pid, started))})
    send({"end": True})


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


ARGUMENTS: JsonObject = {
    "timeout": {"type": "int", "default": 30},
    "binding": {"type": "path"},
    "exclude": {"type": "list", "elements": "str", "default": []},
}
# Seconds.
SHORTEST, LONGEST = 1, 600
# One card may take this part of the time before it is skipped in favour of the others.
SHARE = 3

# How a worker ended: completely; without a message for too long; at the time limit; by itself.
END, STALLED, TIMED_OUT, CRASHED = "end", "stalled", "late", "crashed"


class WorkerResult(t.NamedTuple):
    """The messages of a worker, and how it ended.

    :param detail: further information, as the end of a sentence.
    """

    messages: t.Sequence[Message]
    ending: str
    detail: str = ""


class Worker(t.Protocol):
    """A child process that runs ``protocol.read``."""

    def run(self, request: Request, stall: float, seconds: float) -> WorkerResult:
        """Run it to its end, or kill it after ``seconds``.

        :param stall: seconds without a message after which a card is skipped.
        """


def valid_timeout(seconds: int) -> int:
    """Validate option ``timeout``.

    :raises BadInput: it is out of range.
    """
    if not SHORTEST <= seconds <= LONGEST:
        raise BadInput(f"timeout: {seconds} isn't between {SHORTEST} and {LONGEST} seconds")
    return seconds


class _Collected:
    """What the messages contained so far.

    :param exclude: as in ``Request``.
    """

    def __init__(self, exclude: Exclusion) -> None:
        self.exclude = exclude
        self.system: SystemFacts | None = None
        self.failed = ""
        self.cards: dict[int, CardFacts] = {}
        self.parts: dict[int, CardFacts] = {}
        self.hung: dict[int, str] = {}
        self.libvgpu: dict[int, bool | None] = {}

    def take(self, messages: t.Sequence[Message]) -> int | str | None:
        """Add messages, and return the card or process that was begun and not completed."""
        begun: int | str | None = None
        for message in messages:
            if "begin" in message:
                begun = message["begin"]
                if "so_far" in message:
                    self.parts[message["so_far"]["index"]] = message["so_far"]
                continue
            begun = None
            if "system" in message:
                self.system = message["system"]
            elif "card" in message:
                self.cards[message["card"]["index"]] = message["card"]
            elif "libvgpu" in message:
                self.libvgpu[message["libvgpu"][0]] = message["libvgpu"][1]
            elif "failed" in message:
                self.failed = message["failed"]
        return begun

    def all_cards(self) -> bool:
        """Return whether every card was read or skipped."""
        return self.system is not None and len(self.cards) + len(self.hung) >= self.system["count"]

    def request(self) -> Request:
        rows = [row for card in self.cards.values() for row in card["processes"] or ()]
        known = {row["pid"]: row["start_time"] for row in rows if row["start_time"]}
        done = frozenset(self.cards) | frozenset(self.hung)
        return Request(done, tuple(known.items()), frozenset(self.libvgpu), self.exclude)


def facts(worker: Worker, clock: t.Callable[[], float], timeout: int, exclude: Exclusion = NOTHING) -> NvmlFacts:
    """Run workers until all facts are collected or the time is over.

    A card that hangs or crashes the library is skipped by the next worker, which reads the remaining ones.

    :param timeout: seconds in total.
    :param exclude: cards that are left out, also one that hangs.
    """
    began, collected = clock(), _Collected(exclude)
    stall = max(float(SHORTEST), timeout / SHARE)
    while True:
        ended = worker.run(collected.request(), stall, max(0.0, timeout - (clock() - began)))
        begun = collected.take(ended.messages)
        if ended.ending not in (STALLED, CRASHED) or begun is None:
            break
        if isinstance(begun, int):
            collected.hung[begun] = _stalled_text(ended, stall)
        else:
            collected.libvgpu[int(begun)] = None
    complete = ended.ending == END or collected.all_cards()
    problem = collected.failed or ("" if complete else _problem(ended, begun, timeout))
    notes = [collected.system["problem"]] if collected.system else []
    if complete and ended.ending != END:
        notes.append("HAMi's library couldn't be detected in all processes in time")
    every = _cards(collected, begun)
    left_out = {card["index"]: exclude.of(card["pci"], card["uuid"], card["name"]) for card in every}
    cards = [card for card in every if not left_out[card["index"]]]
    limited = {
        limit["pod_uid"]
        for card in cards
        for limit in card["limits"] or ()
        if limit["pod_uid"] and limit["hard_mib"] is not None
    }
    system = collected.system
    return {
        "available": not problem,
        "problem": problem or "; ".join(filter(None, notes)),
        "driver": system["driver"] if system else "",
        "nvml": system["nvml"] if system else "",
        "cuda": system["cuda"] if system else "",
        "cards": cards,
        "excluded": [
            {"uuid": card["uuid"], "pci": card["pci"], "name": card["name"], "entry": left_out[card["index"]]}
            for card in every
            if left_out[card["index"]]
        ],
        "pods_limited": len(limited) if any(card["limits"] is not None for card in cards) else None,
        "seconds": round(clock() - began, 1),
    }


def _stalled_text(ended: WorkerResult, stall: float) -> str:
    if ended.ending == CRASHED:
        return f"NVML's library crashed on this card ({ended.detail})"
    detail = f"; {ended.detail}" if ended.detail else ""
    return (
        f"NVML didn't respond for this card within {stall:.0f} s: the card or its driver hangs; look for Xid in the "
        f"kernel's log{detail}"
    )


def _problem(ended: WorkerResult, begun: int | str | None, timeout: int) -> str:
    """Return why the facts are incomplete."""
    detail = f"; {ended.detail}" if ended.detail else ""
    if ended.ending == TIMED_OUT:
        where = f" (at card {begun})" if isinstance(begun, int) else ""
        return f"NVML didn't respond within {timeout} s{where}: a card or the driver hangs{detail}"
    return f"the process that calls NVML ended too early{detail}"


def _cards(collected: _Collected, begun: int | str | None) -> list[CardFacts]:
    """Return every card that NVML counts, by index."""
    count = collected.system["count"] if collected.system else 0
    cards_read = []
    for index in range(count):
        card = collected.cards.get(index)
        if card is None:
            late = "NVML didn't respond for this card in time" if index == begun else "this card wasn't read in time"
            card = {**collected.parts.get(index, unknown_card(index)), "problem": collected.hung.get(index) or late}
        for row in card["processes"] or ():
            row["libvgpu"] = collected.libvgpu.get(row["pid"])
        cards_read.append(card)
    _report_duplicates(cards_read)
    return cards_read


def _report_duplicates(cards: t.Sequence[CardFacts]) -> None:
    """Add a problem to cards with the same identity."""
    for name, values in (
        ("UUID", [card["uuid"] or None for card in cards]),
        ("minor number", [card["minor"] for card in cards]),
        ("PCI address", [card["pci"] or None for card in cards]),
    ):
        for card, value in zip(cards, values):
            others = [str(twin["index"]) for twin, other in zip(cards, values) if twin is not card and other == value]
            if others and value is not None:
                text = f"it has the same {name} as card {' and '.join(others[:3])}"
                card["problem"] = f"{card['problem']}; {text}" if card["problem"] else text
