# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose the cards of a node for a pod. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpushare.shared._contracts.gpushare import Demand


class Slot(NamedTuple):
    """A healthy card of a model that the pod accepts, by its index, and its free units."""

    card: int
    free: int


# The cards with the lowest values are chosen.
STRATEGIES: dict[str, Callable[[Slot], tuple[int, int]]] = {
    "binpack": lambda slot: (slot.free, slot.card),
    "spread": lambda slot: (-slot.free, slot.card),
}


def choose(strategy: str, slots: Iterable[Slot], demand: Demand) -> tuple[int, ...]:
    """Choose the cards for a pod; none where fewer than it requests have enough free memory for its share.

    ``binpack`` takes the fullest cards that still fit, so that large shares stay possible elsewhere; ``spread`` takes
    the emptiest. Lower indices win ties. The pod's own strategy overrides the cluster's.

    :returns: the cards' indices, ascending.
    """
    share, order = demand.share, STRATEGIES[demand.placement or strategy]
    fitting = [slot for slot in slots if slot.free >= share]
    if len(fitting) < demand.count:
        return ()
    if demand.count == 1:
        return (min(fitting, key=order).card,)
    return tuple(sorted(slot.card for slot in sorted(fitting, key=order)[: demand.count]))
