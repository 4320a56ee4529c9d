# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from gpushare.placement import STRATEGIES, Slot, choose
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
def test_choice(strategy: str, free: dict[int, int], units: int, card: int | None) -> None:
    assert choose(strategy, [Slot(index, room) for index, room in free.items()], units) == card


@settings(deadline=None)
@given(st.sampled_from(sorted(STRATEGIES)), st.dictionaries(st.integers(0, 15), st.integers(0, 80)), st.integers(1, 90))
def test_a_card_is_found_exactly_if_one_has_room(strategy: str, free: dict[int, int], units: int) -> None:
    card = choose(strategy, [Slot(index, room) for index, room in free.items()], units)
    assert (card is not None) == any(room >= units for room in free.values())
    if card is not None:
        fitting = [room for room in free.values() if room >= units]
        assert free[card] == (min(fitting) if strategy == "binpack" else max(fitting))
        assert card == min(index for index, room in free.items() if room == free[card])


@settings(deadline=None)
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(1, 50)),
)
def test_no_card_is_ever_filled_beyond_its_size(strategy: str, sizes: list[int], wanted: list[int]) -> None:
    free = list(sizes)
    for units in wanted:
        card = choose(strategy, [Slot(index, room) for index, room in enumerate(free)], units)
        if card is not None:
            free[card] -= units
    assert all(room >= 0 for room in free)
