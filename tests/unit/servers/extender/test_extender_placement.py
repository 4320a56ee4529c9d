# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from gpushare.extender.placement import STRATEGIES, Slot, choose
from gpushare.shared._contracts.gpushare import Demand
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = [
    # strategy, free units by card, wanted, card
    ("binpack", {0: 16, 1: 16}, 1, 0),
    ("binpack", {0: 16, 1: 15}, 1, 1),
    ("binpack", {0: 2, 1: 5, 2: 4}, 3, 2),
    ("binpack", {0: 3, 1: 3}, 3, 0),
    ("binpack", {0: 3, 1: 3}, 4, None),
    ("binpack", {}, 1, None),
    ("binpack", {3: 5, 1: 5}, 5, 1),
    ("spread", {0: 15, 1: 16}, 1, 1),
    ("spread", {0: 16, 1: 16}, 1, 0),
    ("spread", {0: 2, 1: 1}, 3, None),
]


@pytest.mark.parametrize(("strategy", "free", "units", "card"), CASES)
def test_choice_of_a_card(strategy: str, free: dict[int, int], units: int, card: int | None) -> None:
    chosen = choose(strategy, [Slot(index, room) for index, room in free.items()], Demand(units))
    assert chosen == (() if card is None else (card,))


def test_the_pods_placement_precedes_the_clusters() -> None:
    slots = [Slot(0, 5), Slot(1, 9)]
    assert choose("binpack", slots, Demand(2, placement="spread")) == (1,)
    assert choose("spread", slots, Demand(2, placement="binpack")) == (0,)


@pytest.mark.parametrize(
    ("strategy", "free", "units", "count", "cards"),
    [
        ("binpack", {0: 9, 1: 4, 2: 5, 3: 3}, 8, 2, (1, 2)),
        ("spread", {0: 9, 1: 4, 2: 5, 3: 3}, 8, 2, (0, 2)),
        ("binpack", {2: 4, 1: 4, 0: 4}, 8, 2, (0, 1)),
        ("binpack", {0: 4, 1: 3}, 8, 2, ()),
        ("binpack", {0: 8}, 8, 2, ()),
        ("spread", {0: 2, 1: 2, 2: 2}, 6, 3, (0, 1, 2)),
    ],
)
def test_several_cards(strategy: str, free: dict[int, int], units: int, count: int, cards: tuple[int, ...]) -> None:
    slots = [Slot(index, room) for index, room in free.items()]
    assert choose(strategy, slots, Demand(units, count)) == cards


@settings(deadline=None)
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.dictionaries(st.integers(0, 15), st.integers(0, 80)),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_cards_are_chosen_exactly_if_enough_have_free_memory(
    strategy: str, free: dict[int, int], share: int, count: int
) -> None:
    cards = choose(strategy, [Slot(index, room) for index, room in free.items()], Demand(share * count, count))
    fitting = sorted(room for room in free.values() if room >= share)
    assert bool(cards) == (len(fitting) >= count)
    if cards:
        assert len(set(cards)) == count and list(cards) == sorted(cards)
        best = fitting[:count] if strategy == "binpack" else fitting[-count:]
        assert sorted(free[card] for card in cards) == best
