# SPDX-License-Identifier: GPL-3.0-or-later
"""When looks are due, and what they come to."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting
from fake_clock import FakeClock


def waiting(timeout, pause=2.0):
    clock = FakeClock()
    return clock, Waiting(timeout, pause, clock.sleep, clock.now)


@pytest.mark.parametrize(("timeout", "looks"), [(0, [0.0]), (3, [0, 2, 4]), (4, [0, 2, 4]), (5, [0, 2, 4, 6])])
def test_looks_are_a_pause_apart_and_the_last_one_is_not_before_the_deadline(timeout, looks):
    clock, subject = waiting(timeout)
    assert [clock.now() for _look in subject.looks()] == looks


def test_a_look_that_takes_longer_than_the_time_is_the_last_one():
    clock, subject = waiting(5)
    seen = []
    for _look in subject.looks():
        seen.append(clock.now())
        clock.sleep(7)
    assert seen == [0]


AWAY = ShareError("the API server is away")


@pytest.mark.parametrize(
    ("told", "outcome", "end"),
    [
        ([""], "", 4),
        (["a", "", "", "b", ""], "", 12),
        ([AWAY, "", AWAY, ""], "", 10),
        (["a"], "not within 20 s: a", 20),
        ([AWAY], "not within 20 s: the API server is away", 20),
        (["", "", "a"] * 3 + ["", ""], "not within 20 s: it comes and goes", 20),
        (["a", ("never", True)], "never", 2),
    ],
)
def test_quiet_is_what_has_nothing_to_say_for_a_while(told, outcome, end):
    clock, subject = waiting(20)
    left = list(told)

    def look():
        one = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(one, ShareError):
            raise one
        return one if isinstance(one, tuple) else (one, False)

    assert (subject.until_quiet(look), clock.now()) == (outcome, end)
