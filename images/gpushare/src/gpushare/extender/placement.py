# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose the cards of a node for a pod. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpushare.shared._contracts.gpushare import Demand


class Slot(NamedTuple):
    """A card (its index) that may be given a pod: healthy, of a model that the pod takes, with so many units free."""

    card: int
    free: int


def _binpack(slot: Slot) -> tuple[int, int]:
    return slot.free, slot.card


def _spread(slot: Slot) -> tuple[int, int]:
    return -slot.free, slot.card


# The cards with the lowest values are taken.
STRATEGIES: dict[str, Callable[[Slot], tuple[int, int]]] = {"binpack": _binpack, "spread": _spread}


def choose(strategy: str, slots: Iterable[Slot], demand: Demand) -> tuple[int, ...]:
    """The cards for a pod, ascending; none where fewer than it wants have room for its share.

    ``binpack`` takes the fullest cards that still fit, so that large shares stay possible elsewhere; ``spread`` the
    emptiest. Lower indices win ties. What the pod itself wishes for comes before the cluster's strategy.
    """
    share, order = demand.share, STRATEGIES[demand.placement or strategy]
    fitting = [slot for slot in slots if slot.free >= share]
    if len(fitting) < demand.count:
        return ()
    if demand.count == 1:
        return (min(fitting, key=order).card,)
    return tuple(sorted(slot.card for slot in sorted(fitting, key=order)[: demand.count]))
