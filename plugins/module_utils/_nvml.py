# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""NVML's facts of a node, put together from the messages of a process that may hang, crash or be told lies. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_card import blank
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_read import Request

Json = t.Dict[str, t.Any]

ARGUMENTS: Json = {
    "timeout": {"type": "int", "default": 30},
    "binding": {"type": "path"},
}
SHORTEST, LONGEST = 1, 600
# How much of the time one card may take before it is given up for the others' sake.
SHARE = 3

# How a process ended: it said all; it said nothing for too long, at one card; the time is over; it died.
END, STALLED, LATE, DIED = "end", "stalled", "late", "died"


class Ended(t.NamedTuple):
    """What a process said until it ended.

    :param words: what is to be known beside it, as it completes a sentence.
    """

    messages: t.Sequence[Json]
    how: str
    words: str = ""


class Asker(t.Protocol):
    """The door to a process of its own that does ``_nvml_read.read``."""

    def run(self, request: Request, stall: float, seconds: float) -> Ended:
        """Run it to its end, or end it; never longer than a moment beyond ``seconds``.

        :param stall: seconds after which a card that was begun is given up.
        """


def seconds_of(params: Json) -> int:
    """The time limit.

    :raises BadInput: it is none.
    """
    seconds = int(params["timeout"])
    if not SHORTEST <= seconds <= LONGEST:
        raise BadInput(f"timeout: {seconds} isn't between {SHORTEST} and {LONGEST} seconds")
    return seconds


class _Gathered:
    """What is known so far."""

    def __init__(self) -> None:
        self.system: Json | None = None
        self.failed = ""
        self.cards: dict[int, Json] = {}
        self.parts: dict[int, Json] = {}
        self.hung: dict[int, str] = {}
        self.libvgpu: dict[int, bool | None] = {}

    def take(self, messages: t.Sequence[Json]) -> int | str | None:
        """Take messages in; what was begun and not ended, if anything."""
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
        """Every card was read or given up."""
        return self.system is not None and len(self.cards) + len(self.hung) >= self.system["count"]

    def request(self) -> Request:
        rows = [row for card in self.cards.values() for row in card["processes"] or ()]
        known = {row["pid"]: row["start_time"] for row in rows if row["start_time"]}
        return Request(frozenset(self.cards) | frozenset(self.hung), tuple(known.items()), frozenset(self.libvgpu))


def facts(asker: Asker, clock: t.Callable[[], float], timeout: int) -> Json:
    """Ask until all is known or the time is over.

    A card that hangs, or makes the library crash, is left out in a second attempt, with the others still to come.

    :param timeout: seconds for all of it.
    :returns: ``nvml`` as the module returns it.
    """
    began, gathered = clock(), _Gathered()
    stall = max(float(SHORTEST), timeout / SHARE)
    while True:
        ended = asker.run(gathered.request(), stall, max(0.0, timeout - (clock() - began)))
        begun = gathered.take(ended.messages)
        if ended.how not in (STALLED, DIED) or begun is None:
            break
        if isinstance(begun, int):
            gathered.hung[begun] = _given_up(ended, stall)
        else:
            gathered.libvgpu[int(begun)] = None
    whole = ended.how == END or gathered.all_cards()
    problem = gathered.failed or ("" if whole else _problem(ended, begun, timeout))
    notes = [gathered.system["problem"]] if gathered.system else []
    if whole and ended.how != END:
        notes.append("whether processes have HAMi's library wasn't learnt of all of them in time")
    cards = _cards(gathered, begun)
    limited = {
        one["pod_uid"]
        for card in cards
        for one in card["limits"] or ()
        if one["pod_uid"] and one["hard_mib"] is not None
    }
    system = gathered.system or {}
    return {
        "available": not problem,
        "problem": problem or "; ".join(filter(None, notes)),
        "driver": system.get("driver", ""),
        "nvml": system.get("nvml", ""),
        "cuda": system.get("cuda", ""),
        "cards": cards,
        "pods_limited": len(limited) if any(card["limits"] is not None for card in cards) else None,
        "seconds": round(clock() - began, 1),
    }


def _given_up(ended: Ended, stall: float) -> str:
    if ended.how == DIED:
        return f"NVML's library ended the process that asked about this card ({ended.words})"
    words = f"; {ended.words}" if ended.words else ""
    return (
        f"NVML gave no answer about this card within {stall:.0f} s: the card or its driver hangs, look for Xid "
        f"in the kernel's log{words}"
    )


def _problem(ended: Ended, begun: int | str | None, timeout: int) -> str:
    """Why the answer isn't whole."""
    words = f"; {ended.words}" if ended.words else ""
    if ended.how == LATE:
        where = f" (it was at card {begun})" if isinstance(begun, int) else ""
        return f"NVML gave no answer within {timeout} s{where}: a card or the driver hangs{words}"
    return f"the process that asks NVML ended before it had an answer{words}"


def _cards(gathered: _Gathered, begun: int | str | None) -> list[Json]:
    """Every card that NVML counts, each at its place."""
    count = (gathered.system or {}).get("count", 0)
    found = []
    for index in range(count):
        card = gathered.cards.get(index)
        if card is None:
            late = (
                "NVML gave no answer about this card in time" if index == begun else "this card wasn't reached in time"
            )
            card = {**gathered.parts.get(index, blank(index, "")), "problem": gathered.hung.get(index) or late}
        for row in card["processes"] or ():
            row["libvgpu"] = gathered.libvgpu.get(row["pid"])
        found.append(card)
    _tell_twins(found)
    return found


def _tell_twins(cards: t.Sequence[Json]) -> None:
    """Say of cards that NVML gives the same identity."""
    for key, name in (("uuid", "UUID"), ("minor", "minor number"), ("pci", "PCI address")):
        for card in cards:
            others = [str(one["index"]) for one in cards if one is not card and one[key] == card[key]]
            if others and card[key] not in ("", None):
                words = f"it has the same {name} as card {' and '.join(others[:3])}"
                card["problem"] = f"{card['problem']}; {words}" if card["problem"] else words
