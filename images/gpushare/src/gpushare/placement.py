# SPDX-License-Identifier: GPL-3.0-or-later
"""Which card of a node a pod gets. Pure: numbers in, a card out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Slot(NamedTuple):
    """A card (its index) that may be given a pod: healthy, with so many units free."""

    card: int
    free: int


def _binpack(slot: Slot) -> tuple[int, int]:
    return slot.free, slot.card


def _spread(slot: Slot) -> tuple[int, int]:
    return -slot.free, slot.card


# The card with the lowest value is taken.
STRATEGIES: dict[str, Callable[[Slot], tuple[int, int]]] = {"binpack": _binpack, "spread": _spread}


def choose(strategy: str, slots: Iterable[Slot], units: int) -> int | None:
    """The index of the card for a pod of so many units; None where no single card has room for it.

    ``binpack`` takes the fullest card that still fits, so that large shares stay possible elsewhere; ``spread`` the
    emptiest. The lower index wins a tie.
    """
    fitting = [slot for slot in slots if slot.free >= units]
    return min(fitting, key=STRATEGIES[strategy]).card if fitting else None
