# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which node a suite uses, and pods of which size: computed from what is free, so that suites run on any cluster.

No I/O. The canary's sizes are chosen so that the expected outcome follows from whole numbers alone, whether the
extender packs cards or spreads over them; the workloads suite expects the placement that its option names.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts.gpushare import PLACEMENTS
from .nodes import NodeState, evictable_pods

# Of a node that holds more pods than this, larger pods are used.
MOST_PODS = 32
BINPACK, SPREAD = PLACEMENTS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """
    :param units: of each pod.
    :param pods: how many of them the node's cards hold, in whatever order they are placed.
    :param extender_decides: the next pod is the extender's to refuse: it fits by kube-scheduler's own count.
    """

    units: int
    pods: int
    extender_decides: bool

    @property
    def taken(self) -> int:
        return self.units * self.pods


@dataclasses.dataclass(frozen=True)
class CanaryPlan:
    """A node and the sizes of the canary's pods on it."""

    state: NodeState
    sizes: Sizes

    @property
    def within_one_card(self) -> bool:
        return self.sizes.taken <= self.state.largest_free

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """How much it can show, and at which cost; the highest is the best."""
        return self.sizes.extender_decides, self.within_one_card, -self.sizes.taken

    @property
    def best(self) -> bool:
        return self.sizes.extender_decides and self.within_one_card

    @property
    def leaves_fragments(self) -> bool:
        """Whether two cards have something left once the pods are placed."""
        left = [units % self.sizes.units for units in self.state.free.values()]
        return sum(1 for rest in left if rest > 0) > 1 and sum(left) <= self.state.total_free - self.sizes.taken


# --------------------------------------------------------------------------- canary


def plan_canary(state: NodeState, namespace: str) -> CanaryPlan | str:
    """Plan the canary on a node, or return why the node can't be used.

    A pod without a priority class has priority 0; a default class is known once a pod exists.
    """
    if state.stray:
        return f"{state.stray} units of it are held by pods whose card isn't in the API"
    weaker = evictable_pods(state, 0, namespace)
    if weaker:
        return f"it has pods with a priority below 0, which could be preempted ({weaker[0]})"
    sizes = filling_sizes(state.free, state.total_free)
    return CanaryPlan(state, sizes) if sizes else "no card of it has free memory"


def filling_sizes(free: t.Mapping[int, int], total: int) -> Sizes | None:
    """Find the size with which a number of pods fills a node so that no card holds one more.

    How many fit on a card depends on the card alone, so the order of placement doesn't matter. Preferred is a size
    whose next pod the extender must refuse, not kube-scheduler; then one that takes no more than one card has; then
    one of which two fit on one card; then the one that takes least.

    :param free: units left on each card.
    :param total: units left by kube-scheduler's count.
    """
    lefts = sorted((left for left in free.values() if left > 0), reverse=True)
    candidates = {part + more for left in lefts for parts in range(1, 5) for part in [left // parts] for more in (0, 1)}
    ranked = []
    for units in sorted(size for size in candidates if lefts and 1 <= size <= lefts[0]):
        pods = sum(left // units for left in lefts)
        taken = units * pods
        if pods > MOST_PODS or taken > total:
            continue
        decides = total - taken >= units
        shared = lefts[0] // units > 1
        ranked.append(((not decides, taken > lefts[0], not shared, taken), Sizes(units, pods, decides)))
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def fragment_size(state: NodeState) -> int | None:
    """Return the size of a pod that fits the node's free memory and no single card; None if there is none."""
    positive = [units for units in state.free.values() if units > 0]
    low, high = max(positive, default=0) + 1, min(state.total_free, sum(positive))
    if len(positive) < 2 or low > high:
        return None
    # In the middle, so that a little that others take or free doesn't matter.
    return low if state.largest_card < low else (low + min(high, state.largest_card) + 1) // 2


# --------------------------------------------------------------------------- workloads


def select_node(states: t.Iterable[NodeState], placement: str) -> NodeState | None:
    """Return the node that can show most: two free cards, then the placement of three pods, then most free memory."""

    def rank(state: NodeState) -> tuple[bool, bool, bool, int]:
        free_cards = sum(1 for units in state.free.values() if units > 0)
        return free_cards > 1, bool(three_pods(state.free, placement)), state.stray == 0, sum(state.free.values())

    candidates = sorted((state for state in states if any(state.free.values())), key=lambda state: state.name)
    # Of equal nodes max() takes the first by name.
    return max(candidates, key=rank) if candidates else None


def place(free: t.Mapping[int, int], units: int, placement: str) -> int | None:
    """Return the card that a pod gets: the fullest that fits, or with ``spread`` the emptiest; of equals the first."""
    fitting = [(-left if placement == SPREAD else left, index) for index, left in free.items() if left >= units]
    return min(fitting)[1] if fitting else None


def places(free: t.Mapping[int, int], sizes: t.Iterable[int], placement: str) -> list[int]:
    """Return the cards of pods of these sizes, placed one after another; empty where one doesn't fit."""
    left, cards = dict(free), list[int]()
    for units in sizes:
        card = place(left, units, placement)
        if card is None:
            return []
        left[card] -= units
        cards.append(card)
    return cards


def three_pods(free: t.Mapping[int, int], placement: str) -> list[tuple[int, int]]:
    """Return units and card of each of three pods that show the placement; empty where there are none.

    They are on one card with ``binpack``, and on several with ``spread``.
    """
    sizes = [1, 1, 1]
    lower, top = sorted([0, 0, *free.values()])[-2:]
    if placement == SPREAD:
        # The first one leaves less on the emptiest card than the next one has.
        sizes[0] = top - lower + 1
    cards = places(free, sizes, placement)
    return list(zip(sizes, cards)) if (len(set(cards)) > 1) == (placement == SPREAD) else []


def fragment_node(state: NodeState, placement: str) -> tuple[list[int], int] | str:
    """Plan pods that fill cards, and then the size of a pod that fits the node and a whole card, but no free share.

    If cards can't be filled like that (they are too small), the pod is larger than any card; if not even that is
    possible, the reason is returned.
    """
    if sum(1 for card in state.cards if card.healthy) < 2:
        return f"node {state.name} has only one healthy card, and so has every better candidate"
    largest = state.largest_card
    free, fillers = dict(state.free), t.cast("list[int]", [])
    while max(free.values()) >= largest:
        top = max(free.values())
        lower = [left for left in free.values() if left < top]
        # One unit more than any other card has left; if all have the same, half of it.
        units = max(lower) + 1 if lower else -(-top // 2)
        card = place(free, units, placement)
        if card is None or units < 1:
            break
        free[card] -= units
        fillers.append(units)
    wanted = max(free.values()) + 1
    if wanted <= min(largest, state.total_free - sum(fillers), sum(free.values())):
        return fillers, wanted
    wanted = state.largest_free + 1
    if wanted <= min(state.total_free, sum(state.free.values())):
        return [], wanted
    return f"the free memory of node {state.name} is all on one card"


def container_sizes(free: t.Mapping[int, int], placement: str) -> tuple[int, int] | None:
    """Return sizes of two containers that would get two cards if each were placed by itself; None if impossible."""
    positive = sorted(left for left in free.values() if left > 0)
    # What fills a card, or leaves the emptiest one less than the next has.
    firsts = [*positive, *(top - lower + 1 for lower, top in zip(positive[-2:-1], positive[-1:]))]
    for first in firsts:
        if first < positive[-1] and len(set(places(free, [first, 1], placement))) > 1:
            return first, 1
    return (1, 1) if positive and positive[-1] >= 2 else None
