# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose the pods of a node to evict so that a pod of a higher priority gets its cards. No I/O.

A node's total isn't enough: the pod needs its share free on one card, or on each of several. So victims are chosen by
card with the lowest cost, by (highest priority among them, number of violated disruption budgets, sum of their
priorities, their number), which are kube-scheduler's own criteria.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from gpushare.extender.state import LOWEST_PRIORITY, NodeView, PodRow, Shares
from gpushare.shared._contracts.gpushare import Demand

# Highest priority, violated budgets, sum of priorities (each above 0, so that more pods cost more), number of pods.
Cost = tuple[int, int, int, int]
NOTHING: Cost = (LOWEST_PRIORITY - 1, 0, 0, 0)

# The cheapest set is found exactly among so many pods of a card, and nearly so among more.
EXACT_PODS = 24
EXACT_STATES = 2000


class Plan(NamedTuple):
    """The evictions by which a pod gets its cards on a node.

    ``cards`` are these cards, with the pod's share; ``evict`` the victims, the highest priority first; ``leaving`` the
    UIDs of terminating pods that hold memory of these cards.
    """

    cards: Shares
    evict: tuple[PodRow, ...]
    leaving: tuple[str, ...]
    cost: Cost


def plan(
    node: NodeView,
    rows: Sequence[PodRow],
    demand: Demand,
    priority: int,
    *,
    gone: Collection[str] = (),
    violating: Collection[str] = (),
    kept: Collection[str] = (),
    exact: bool = True,
) -> Plan | None:
    """Find the cheapest evictions by which a pod gets its cards on a node.

    :param node: the node's view for this pod.
    :param rows: the pods that are bound to it.
    :param demand: the pod's demand.
    :param priority: the pod's own; only pods of lower ones can be victims.
    :param gone: UIDs of pods that are evicted in any case.
    :param violating: UIDs of pods whose eviction violates a budget.
    :param kept: UIDs of pods that can't be evicted.
    :param exact: False is faster, and may evict more than necessary.
    :returns: None if no evictions are sufficient.
    """
    at = {card.index: position for position, card in enumerate(node.cards)}
    usable = [card.index for card in node.cards if card.healthy and card.units >= demand.share and demand.accepts(card)]
    if len(usable) < demand.count:
        return None
    lacking = {
        index: demand.share - (node.cards[at[index]].units - node.used[at[index]] - node.unplaced) for index in usable
    }
    candidates: list[PodRow] = []
    for row in rows:
        if row.terminating or row.uid in gone:
            _remove(row, lacking, at)
        elif row.priority < priority and row.uid not in kept:
            candidates.append(row)
    taken: list[int] = []
    victims: list[PodRow] = []
    cover = _exact if exact else _greedy
    while len(taken) < demand.count:
        # A victim of one card may hold memory of the next one, too.
        left = [index for index in usable if index not in taken]
        best = _cheapest_card(left, lacking, candidates, at, violating, cover)
        if best is None:
            return None
        index, chosen = best
        taken.append(index)
        for row in chosen:
            _remove(row, lacking, at)
        victims += chosen
        candidates = [row for row in candidates if row not in chosen]
    if demand.count > 1:
        victims = _without_needless(victims, taken, lacking, at, violating)
    on = set(taken)
    leaving = tuple(row.uid for row in rows if row.terminating and _touches(row, on, at))
    victims.sort(key=lambda row: (-row.priority, row.namespace, row.name))
    shares = tuple((index, demand.share) for index in sorted(taken))
    return Plan(shares, tuple(victims), leaving, cost(victims, violating))


def needed(node: NodeView, chosen: Iterable[PodRow], demand: Demand) -> list[PodRow]:
    """Return those of kube-scheduler's victims that it can't have chosen for the node's total of GPU memory.

    It reprieves pods, the highest priority first, while the new one still fits. So a victim whose memory the total
    doesn't need was chosen for something else: CPU, memory, a port.
    """
    chosen = list(chosen)
    total = sum(card.units for card in node.cards if card.healthy)
    free = total - sum(node.used) - node.unplaced + sum(row.units for row in chosen)
    return [row for row in chosen if free - row.units >= demand.units]


def cost(rows: Collection[PodRow], violating: Collection[str] = ()) -> Cost:
    """Return the cost of evicting these pods, for comparison."""
    if not rows:
        return NOTHING
    return (
        max(row.priority for row in rows),
        sum(row.uid in violating for row in rows),
        sum(row.priority - LOWEST_PRIORITY + 1 for row in rows),
        len(rows),
    )


# --------------------------------------------------------------------------- one card

Cover = Callable[[list[tuple[PodRow, int]], int, Collection[str]], list[PodRow]]


def _cheapest_card(
    indices: list[int],
    lacking: dict[int, int],
    candidates: list[PodRow],
    at: Collection[int],
    violating: Collection[str],
    cover: Cover,
) -> tuple[int, list[PodRow]] | None:
    """Return the card whose victims cost least, and these; the lower index wins a tie."""
    able: list[tuple[int, int, list[tuple[PodRow, int]]]] = []
    for index in indices:
        if lacking[index] <= 0:
            return index, []
        holding = [(row, units) for row in candidates if (units := _on(row, index, at))]
        highest = _highest_needed(holding, lacking[index])
        if highest is not None:
            able.append((highest, index, [(row, units) for row, units in holding if row.priority <= highest]))
    if not able:
        return None
    # No card of a higher tier can be cheaper, so those are skipped.
    tier = min(highest for highest, _index, _holding in able)
    choices = [
        (index, cover(holding, lacking[index], violating)) for highest, index, holding in able if highest == tier
    ]
    return min(choices, key=lambda choice: (cost(choice[1], violating), choice[0]))


def _highest_needed(holding: list[tuple[PodRow, int]], units: int) -> int | None:
    """Return the lowest priority up to which all pods together free so many units."""
    freed = 0
    for row, here in sorted(holding, key=lambda held: held[0].priority):
        freed += here
        if freed >= units:
            return row.priority
    return None


def _exact(holding: list[tuple[PodRow, int]], units: int, violating: Collection[str]) -> list[PodRow]:
    """Find the cheapest pods of a card that free so many units, which all of them together do.

    Dynamic programming over the units that the pods so far can free, with the least cost of each amount.
    """
    if len(holding) > EXACT_PODS:
        return _greedy(holding, units, violating)
    best: dict[int, tuple[tuple[int, int, int], tuple[PodRow, ...]]] = {0: ((0, 0, 0), ())}
    for row, here in holding:
        against, weight = int(row.uid in violating), row.priority - LOWEST_PRIORITY + 1
        for freed, ((budgets, total, number), rows) in list(best.items()):
            if freed >= units:
                continue
            reached = min(units, freed + here)
            price = (budgets + against, total + weight, number + 1)
            known = best.get(reached)
            if known is None or price < known[0]:
                best[reached] = (price, (*rows, row))
        if len(best) > EXACT_STATES:
            return _greedy(holding, units, violating)
    return list(best[units][1])


def _greedy(holding: list[tuple[PodRow, int]], units: int, violating: Collection[str]) -> list[PodRow]:
    """Choose pods of a card that free so many units: the largest without a budget first, then drop needless ones."""
    taken: list[tuple[PodRow, int]] = []
    freed = 0
    for row, here in sorted(holding, key=lambda held: (held[0].uid in violating, -held[1], held[0].priority)):
        if freed >= units:
            break
        taken.append((row, here))
        freed += here
    for held in sorted(taken, key=lambda held: (held[0].uid in violating, held[0].priority), reverse=True):
        if freed - held[1] >= units:
            taken.remove(held)
            freed -= held[1]
    return [row for row, _here in taken]


# --------------------------------------------------------------------------- memory of pods


def _on(row: PodRow, index: int, at: Collection[int]) -> int:
    """Return the units that a pod frees on a card; memory on an unknown card counts on each."""
    return sum(units for card, units in row.shares if card == index or card not in at)


def _remove(row: PodRow, lacking: dict[int, int], at: Collection[int]) -> None:
    for card, units in row.shares:
        if card in lacking:
            lacking[card] -= units
        elif card not in at:
            for index in lacking:
                lacking[index] -= units


def _touches(row: PodRow, cards: Collection[int], at: Collection[int]) -> bool:
    return any(card in cards or card not in at for card, _units in row.shares)


def _without_needless(
    victims: list[PodRow], taken: list[int], lacking: dict[int, int], at: Collection[int], violating: Collection[str]
) -> list[PodRow]:
    """Drop the victims that a later card's victims make needless, the highest priority first."""
    left = list(victims)
    for row in sorted(victims, key=lambda row: (row.uid in violating, row.priority), reverse=True):
        trial = {index: lacking[index] for index in taken}
        for card, units in row.shares:
            for index in [card] if card in at else list(trial):
                if index in trial:
                    trial[index] += units
        if all(units <= 0 for units in trial.values()):
            left.remove(row)
            for index in taken:
                lacking[index] = trial[index]
    return left
