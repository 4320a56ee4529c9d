# SPDX-License-Identifier: GPL-3.0-or-later
"""The choice of victims by card, compared with all possible sets of victims."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from api_double import make_node
from gpushare.extender.state import NodeView, PodRow, State, node_row
from gpushare.extender.victims import cost, needed, plan
from gpushare.shared._contracts.gpushare import Demand
from hypothesis import given, settings
from hypothesis import strategies as st


def row(uid: str, priority: int = 0, terminating: bool = False, **cards: int) -> PodRow:
    """A pod and its units by card, c0=3; u=3 where the card isn't known."""
    shares = tuple((int(name[1:]), units) for name, units in cards.items() if name != "u")
    return PodRow(uid, "d", uid, "n", sum(cards.values()), shares, priority, terminating)


def view(sizes: tuple[int, ...], rows: list[PodRow], **more: Any) -> NodeView:
    state = State()
    state.node_changed("", None, node_row(make_node("n", *sizes, **more)))
    for row in rows:
        state.pod_changed("", None, row)
    found = state.viewer("")("n")
    assert found is not None
    return found


def victims(
    sizes: tuple[int, ...], rows: list[PodRow], demand: Demand, priority: int = 10, **more: Any
) -> set[str] | None:
    found = plan(view(sizes, rows), rows, demand, priority, **more)
    return None if found is None else {one.uid for one in found.evict}


# kube-scheduler compares a node's total only, and never a card.
CASES: dict[str, tuple[tuple[int, ...], list[PodRow], Demand, set[str] | None]] = {
    "the total fits, but no card does": ((16, 16), [row("a", c0=8), row("b", c1=9)], Demand(9), {"a"}),
    "same or higher priority stays": ((16, 16), [row("a", 10, c0=8), row("b", 11, c1=8)], Demand(9), None),
    "terminating": ((16,), [row("a", terminating=True, c0=8), row("b", c0=8)], Demand(16), {"b"}),
    "an unknown card": ((16, 16), [row("a", u=8), row("b", c0=8), row("c", c1=8)], Demand(8), {"a"}),
    "two cards": (
        (16, 16, 16),
        [row("a", c0=16), row("b", 5, c1=16), row("c", 1, c2=16)],
        Demand(16, 2),
        {"a", "c"},
    ),
    "a pod of both cards": ((16, 16), [row("a", c0=8, c1=8), row("b", c0=8), row("c", c1=8)], Demand(16, 2), {"a"}),
    "no such model": ((16,), [row("a", c0=16)], Demand(1, models=("x",)), None),
}


@pytest.mark.parametrize(("sizes", "rows", "demand", "expected"), CASES.values(), ids=CASES)
def test_choice_of_victims(
    sizes: tuple[int, ...], rows: list[PodRow], demand: Demand, expected: set[str] | None
) -> None:
    assert victims(sizes, rows, demand) == expected
    rough = victims(sizes, rows, demand, exact=False)
    assert (rough is None) == (expected is None)


def test_an_unhealthy_card_is_not_freed() -> None:
    rows = [row("a", c0=16), row("b", 5, c1=16)]
    found = plan(view((16, 16), rows, unhealthy=(0,)), rows, Demand(16), 10)
    assert found is not None and [one.uid for one in found.evict] == ["b"]


def test_budgets_decide_within_a_priority_only() -> None:
    rows = [row("a", c0=16), row("b", c1=16)]
    assert victims((16, 16), rows, Demand(16), violating={"a"}) == {"b"}
    rows = [row("a", c0=16), row("b", 5, c1=16)]
    assert victims((16, 16), rows, Demand(16), violating={"a"}) == {"a"}
    assert victims((16, 16), rows, Demand(16), kept={"a"}) == {"b"}


def test_the_plan_names_cards_and_terminating_pods() -> None:
    rows = [row("a", terminating=True, c0=8), row("x", terminating=True, c1=1), row("b", 2, c0=4), row("c", 3, c0=4)]
    found = plan(view((16, 4), rows), rows, Demand(16), 10)
    assert found is not None
    assert (found.cards, [one.uid for one in found.evict], found.leaving) == (((0, 16),), ["c", "b"], ("a",))


@pytest.mark.parametrize(
    ("chosen", "stay"),
    [
        # The total lacks 8, and each of them alone would make it: both can't have been chosen for it.
        (["a"], []),
        (["a", "b"], ["a", "b"]),
        (["c"], []),
    ],
)
def test_victims_that_the_scheduler_chose_for_other_resources(chosen: list[str], stay: list[str]) -> None:
    rows = [row("a", c0=8), row("b", c1=8), row("c", c0=8), row("d", 9, c1=8)]
    node = view((16, 16), rows)
    kept = needed(node, [row for row in rows if row.uid in chosen], Demand(8))
    assert [one.uid for one in kept] == stay


# ----------------------------------------------------------------- compared with all possible sets

# Priority, whether it is terminating, its cards, and its units on each (or without a card).
PODS = st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([(0,), (1,), (2,), (0, 1), ()]), st.integers(1, 6))
ROWS = st.lists(PODS, max_size=7).map(
    lambda pods: [
        row(str(at), priority, ending, **({f"c{card}": units for card in cards} or {"u": units}))
        for at, (priority, ending, cards, units) in enumerate(pods)
    ]
)


def free_after(sizes: list[int], rows: list[PodRow], evicted: set[str]) -> list[int]:
    """Free units by card when these and the terminating pods are gone."""
    after = view(tuple(sizes), [row for row in rows if row.uid not in evicted and not row.terminating])
    return [card.units - after.used[at] - after.unplaced for at, card in enumerate(after.cards)]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), ROWS, st.integers(1, 12), st.sets(st.integers(0, 6)))
def test_the_cheapest_victims_for_one_card(sizes: list[int], rows: list[PodRow], units: int, budgets: set[int]) -> None:
    violating = {str(number) for number in budgets}
    found = plan(view(tuple(sizes), rows), rows, Demand(units), 3, violating=violating)

    def fits(combination: Iterable[PodRow]) -> bool:
        return max(free_after(sizes, rows, {one.uid for one in combination})) >= units

    able = [row for row in rows if row.priority < 3 and not row.terminating]
    sets = [chosen for size in range(len(able) + 1) for chosen in itertools.combinations(able, size)]
    possible = [chosen for chosen in sets if fits(chosen)]
    assert (found is None) == (not possible)
    if found is not None:
        assert fits(found.evict)
        assert all(one in able for one in found.evict)
        assert cost(found.evict, violating) == min(cost(chosen, violating) for chosen in possible)
        assert found.cards == ((found.cards[0][0], units),)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=4), ROWS, st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_victims_for_several_cards_are_sufficient_and_minimal(
    sizes: list[int], rows: list[PodRow], share: int, count: int, exact: bool
) -> None:
    found = plan(view(tuple(sizes), rows), rows, Demand(share * count, count), 3, exact=exact)
    most = free_after(sizes, rows, {row.uid for row in rows if row.priority < 3})
    assert (found is None) == (sum(units >= share for units in most) < count)
    if found is not None:
        evicted, cards = {one.uid for one in found.evict}, [index for index, _units in found.cards]
        assert len(cards) == count
        assert all(free_after(sizes, rows, evicted)[index] >= share for index in cards)
        for one in evicted:
            assert not all(free_after(sizes, rows, evicted - {one})[index] >= share for index in cards)


def test_many_small_pods_are_planned_quickly() -> None:
    rows = [row(str(at), at % 5, c0=1) for at in range(140)]
    node = view((140,), rows)
    found = plan(node, rows, Demand(30), 10)
    assert found is not None
    assert len(found.evict) == 30
    assert max(one.priority for one in found.evict) == 1
