# SPDX-License-Identifier: GPL-3.0-or-later
"""Any order of any number of extenders' requests, with faults and kills at each: no card is ever over its size.

KUBEGPU_EXPLORE=1 explores other orders than the fixed ones, and many more.
"""

from __future__ import annotations

import os
import random

import pytest
from api_double import make_pod
from ledger_world import World

EXPLORE = bool(os.environ.get("KUBEGPU_EXPLORE"))
RUNS, STEPS = (4000 if EXPLORE else 30), 250
FIRST = random.SystemRandom().randrange(10**9) if EXPLORE else 0


@pytest.mark.parametrize("extenders", [2, 3])
def test_fault_12_no_order_books_memory_twice(extenders: int) -> None:
    bound = 0
    for seed in range(FIRST, FIRST + RUNS):
        world = World(seed, extenders=extenders)
        try:
            world.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        bound += sum("result='bound'" in text for text in world.history)
    assert bound > RUNS * 5, "too few pods were bound to prove anything"


def test_fault_12_the_fence_stops_a_paused_extender() -> None:
    """A pause just before the Binding, so long that its memory is reassigned; random orders rarely contain it."""
    world = World(0)
    for name in ("p0", "p1"):
        world.api.remove("pods", name, "default")
        world.api.put("pods", make_pod(name, 5))
    paused, other = world.extenders
    world.bind(paused, "p0", "a")
    while paused.call is not None and not paused.call.what.endswith("/binding"):
        paused.resume("do")
    assert paused.call is not None
    world.bind(other, "p1", "a")
    world.finish(other)
    assert other.outcome is not None and "3 of 5" in other.outcome.error
    world.time += 60
    for action in (lambda: other.begin(other.ledger.collect_garbage), lambda: world.bind(other, "p1", "a")):
        action()
        world.finish(other)
    assert other.outcome.result == "bound"
    while paused.call is not None:
        paused.resume("do")
    assert world.used("a") == {0: 5}
