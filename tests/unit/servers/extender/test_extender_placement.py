# SPDX-License-Identifier: GPL-3.0-or-later
"""The choice of cards by strategy."""

from __future__ import annotations

import pytest
from gpushare.extender.placement import STRATEGIES, Slot, choose
from gpushare.shared._contracts.gpushare import Demand
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("strategy", "free", "demand", "cards"),
    [
        ("binpack", {0: 2, 1: 5, 2: 4}, Demand(3), (2,)),
        ("spread", {0: 15, 1: 16}, Demand(1), (1,)),
        # The lower index wins a tie.
        ("binpack", {3: 5, 1: 5}, Demand(5), (1,)),
        ("spread", {1: 16, 0: 16}, Demand(1), (0,)),
        ("binpack", {2: 4, 1: 4, 0: 4}, Demand(8, 2), (0, 1)),
        ("binpack", {0: 8}, Demand(8, 2), ()),
        # The pod's placement overrides the cluster's.
        ("binpack", {0: 5, 1: 9}, Demand(2, placement="spread"), (1,)),
        ("spread", {0: 5, 1: 9}, Demand(2, placement="binpack"), (0,)),
    ],
)
def test_choice_of_cards(strategy: str, free: dict[int, int], demand: Demand, cards: tuple[int, ...]) -> None:
    assert choose(strategy, [Slot(index, units) for index, units in free.items()], demand) == cards


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
    cards = choose(strategy, [Slot(index, units) for index, units in free.items()], Demand(share * count, count))
    fitting = sorted(units for units in free.values() if units >= share)
    assert bool(cards) == (len(fitting) >= count)
    if cards:
        assert len(set(cards)) == count and list(cards) == sorted(cards)
        best = fitting[:count] if strategy == "binpack" else fitting[-count:]
        assert sorted(free[card] for card in cards) == best
