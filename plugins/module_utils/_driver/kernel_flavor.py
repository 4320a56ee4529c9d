# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose the flavour of the kernel module, open or proprietary, and validate the branch, by the cards' architectures.

By NVIDIA's matrix of drivers and architectures, and the chapter on kernel modules of its driver installation guide.
"""

from __future__ import annotations

import dataclasses
import typing as t

OPEN, PROPRIETARY = "open", "proprietary"
FLAVOURS = ("auto", OPEN, PROPRIETARY)
UNKNOWN = "unknown"

# The first and the last branch that supports an architecture.
BRANCHES: dict[str, tuple[int, int | None]] = {
    "kepler": (0, 470),
    "maxwell": (0, 580),
    "pascal": (0, 580),
    "volta": (0, 580),
    "turing": (410, None),
    "ampere": (450, None),
    "ada": (520, None),
    "hopper": (520, None),
    "blackwell": (570, None),
}
# The open module needs the GSP, which came with Turing.
PROPRIETARY_ONLY = ("kepler", "maxwell", "pascal", "volta")
OPEN_ONLY = ("blackwell",)
OPEN_SINCE = 515
# Since this branch there is no proprietary module.
OPEN_FOREVER = 620


@dataclasses.dataclass(frozen=True)
class Cards:
    """The cards' architectures, the machine's (amd64, arm64) and the driver's version.

    :param host: its name in messages.
    """

    host: str
    generations: tuple[str, ...]
    arch: str
    version: str

    @property
    def branch(self) -> int:
        return int(self.version.split(".")[0])

    @property
    def before_turing(self) -> tuple[str, ...]:
        return tuple(one for one in self.generations if one in PROPRIETARY_ONLY)

    @property
    def open_only(self) -> tuple[str, ...]:
        """Blackwell; and Hopper where the processor is Grace."""
        grace = "hopper" if self.arch == "arm64" else ""
        return tuple(one for one in self.generations if one in (*OPEN_ONLY, grace))


def refused_branches(cards: Cards) -> list[str]:
    """Return why the version's branch doesn't support these cards."""
    found = []
    for generation in cards.generations:
        first, last = BRANCHES.get(generation, (0, None))
        start = f"driver_version is {cards.version}, and cards of {listed([generation])} (host {cards.host}) "
        if cards.branch < first:
            found.append(f"{start}need branch {first} or later.")
        elif last and cards.branch > last:
            found.append(f"{start}are supported up to branch {last}: set driver_version to one of {last}.")
    return found


def branches(generations: t.Iterable[str]) -> tuple[int, int | None]:
    """Return the first and the last branch that support all of these cards; None where no last one is known."""
    bounds = [BRANCHES.get(generation, (0, None)) for generation in generations]
    lasts = [last for _first, last in bounds if last]
    return max((first for first, _last in bounds), default=0), min(lasts) if lasts else None


def choose(asked: str, cards: Cards, has: t.Callable[[str], bool]) -> tuple[str, str, str]:
    """Choose the module's flavour.

    :param asked: one of ``FLAVOURS``.
    :param has: whether the source of packages has a flavour at this branch.
    :returns: the flavour; the message of a refusal, or ""; the message of a warning, or "".
    """
    old, new = cards.before_turing, cards.open_only
    if old and new:
        why = (
            f"Host {cards.host} has cards of {listed(old)}, which need the proprietary module, and of "
            f"{listed(new)}, which need the open one: no driver supports both."
        )
        return PROPRIETARY, why, ""
    if asked == "auto":
        return _automatic(cards, has)
    return asked, _misfit(asked, cards, has), ""


def _automatic(cards: Cards, has: t.Callable[[str], bool]) -> tuple[str, str, str]:
    if cards.before_turing:
        return PROPRIETARY, _lacking(PROPRIETARY, cards, has), ""
    if cards.open_only:
        return OPEN, _lacking(OPEN, cards, has), ""
    if cards.branch < OPEN_SINCE:
        return PROPRIETARY, "", ""
    if not has(OPEN):
        note = f"Host {cards.host} gets the proprietary module, because there are no packages of the open one."
        return PROPRIETARY, _lacking(PROPRIETARY, cards, has), note
    note = ""
    if UNKNOWN in cards.generations:
        note = (
            f"Host {cards.host} has cards of an unknown architecture: it gets the open module, which doesn't support "
            "cards before Turing; driver_flavour chooses another one."
        )
    return OPEN, "", note


def _lacking(flavour: str, cards: Cards, has: t.Callable[[str], bool]) -> str:
    if has(flavour):
        return ""
    return f"Host {cards.host} has cards that need the {flavour} module, and driver_source has no packages of it."


def _misfit(asked: str, cards: Cards, has: t.Callable[[str], bool]) -> str:
    why = ""
    if asked == OPEN and cards.before_turing:
        why = f"cards of {listed(cards.before_turing)} need the proprietary module"
    elif asked == OPEN and cards.branch < OPEN_SINCE:
        why = f"the open module exists from branch {OPEN_SINCE} on, and driver_version is {cards.version}"
    elif asked == PROPRIETARY and cards.open_only:
        why = f"cards of {listed(cards.open_only)} need the open module"
    elif asked == PROPRIETARY and cards.branch >= OPEN_FOREVER:
        why = f"branch {OPEN_FOREVER} and later have no proprietary module, and driver_version is {cards.version}"
    elif not has(asked):
        why = "driver_source has no packages of it"
    return f"driver_flavour is {asked} and doesn't fit host {cards.host}: {why}." if why else ""


def listed(generations: t.Sequence[str]) -> str:
    """Return architectures for a message."""
    return " and ".join(one.capitalize() for one in generations)
