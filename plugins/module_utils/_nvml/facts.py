# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Assemble NVML's facts from the messages of a worker process that may hang or crash. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts.card_exclusion import NOTHING, Exclusion
from .._core.errors import BadInput
from .._core.types import JsonObject
from .device import unknown_card
from .protocol import Request
from .types import CardFacts, Message, NvmlFacts, SystemFacts

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
        for one in messages:
            if "begin" in one:
                begun = one["begin"]
                if "so_far" in one:
                    self.parts[one["so_far"]["index"]] = one["so_far"]
                continue
            begun = None
            if "system" in one:
                self.system = one["system"]
            elif "card" in one:
                self.cards[one["card"]["index"]] = one["card"]
            elif "libvgpu" in one:
                self.libvgpu[one["libvgpu"][0]] = one["libvgpu"][1]
            elif "failed" in one:
                self.failed = one["failed"]
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
    left_out = {one["index"]: exclude.of(one["pci"], one["uuid"], one["name"]) for one in every}
    cards = [one for one in every if not left_out[one["index"]]]
    limited = {
        one["pod_uid"]
        for card in cards
        for one in card["limits"] or ()
        if one["pod_uid"] and one["hard_mib"] is not None
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
            {"uuid": one["uuid"], "pci": one["pci"], "name": one["name"], "entry": left_out[one["index"]]}
            for one in every
            if left_out[one["index"]]
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
    found = []
    for index in range(count):
        card = collected.cards.get(index)
        if card is None:
            late = "NVML didn't respond for this card in time" if index == begun else "this card wasn't read in time"
            card = {**collected.parts.get(index, unknown_card(index)), "problem": collected.hung.get(index) or late}
        for row in card["processes"] or ():
            row["libvgpu"] = collected.libvgpu.get(row["pid"])
        found.append(card)
    _report_duplicates(found)
    return found


def _report_duplicates(cards: t.Sequence[CardFacts]) -> None:
    """Add a problem to cards with the same identity."""
    for name, values in (
        ("UUID", [card["uuid"] or None for card in cards]),
        ("minor number", [card["minor"] for card in cards]),
        ("PCI address", [card["pci"] or None for card in cards]),
    ):
        for card, value in zip(cards, values):
            others = [str(one["index"]) for one, other in zip(cards, values) if one is not card and other == value]
            if others and value is not None:
                text = f"it has the same {name} as card {' and '.join(others[:3])}"
                card["problem"] = f"{card['problem']}; {text}" if card["problem"] else text
