# SPDX-License-Identifier: GPL-3.0-or-later
"""Times and results of polls."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from fake_clock import FakeClock


def waiting(timeout, pause=2.0):
    clock = FakeClock()
    return clock, Waiting(timeout, pause, clock.sleep, clock.now)


@pytest.mark.parametrize(("timeout", "times"), [(0, [0.0]), (3, [0, 2, 4]), (4, [0, 2, 4]), (5, [0, 2, 4, 6])])
def test_attempts_are_a_pause_apart_until_the_deadline(timeout, times):
    clock, subject = waiting(timeout)
    assert [clock.now() for _attempt in subject.attempts()] == times


def test_an_attempt_beyond_the_deadline_is_the_last():
    clock, subject = waiting(5)
    seen = []
    for _attempt in subject.attempts():
        seen.append(clock.now())
        clock.sleep(7)
    assert seen == [0]


AWAY = ShareError("the API server is away")


@pytest.mark.parametrize(
    ("results", "outcome", "end"),
    [
        ([""], "", 4),
        (["a", "", "", "b", ""], "", 12),
        ([AWAY, "", AWAY, ""], "", 10),
        (["a"], "not within 20 s: a", 20),
        ([AWAY], "not within 20 s: the API server is away", 20),
        (["", "", "a"] * 3 + ["", ""], "not within 20 s: the condition did not stay true", 20),
        (["a", ("never", True)], "never", 2),
    ],
)
def test_stable_is_several_polls_without_a_problem(results, outcome, end):
    clock, subject = waiting(20)
    left = list(results)

    def check():
        one = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(one, ShareError):
            raise one
        return one if isinstance(one, tuple) else (one, False)

    assert (subject.until_stable(check), clock.now()) == (outcome, end)


@pytest.mark.parametrize(
    ("results", "passing", "outcome", "end"),
    [
        (["a", ""], (), "", 2),
        (["a"], (), "it isn't served within 20 s: a; because", 20),
        ([AWAY, ""], (ShareError,), "", 2),
        ([AWAY], (ShareError,), "it isn't served within 20 s: the API server is away; because", 20),
        # An error that doesn't pass isn't waited for.
        ([AWAY, ""], (), "the API server is away", 0),
    ],
)
def test_until_nothing_is_left_and_only_errors_that_may_pass_are_waited_for(results, passing, outcome, end):
    clock, subject = waiting(20)
    rest = list(results)

    def left():
        result = rest.pop(0) if len(rest) > 1 else rest[0]
        if isinstance(result, ShareError):
            raise result
        return result

    message = ""
    try:
        subject.until_done(left, "it isn't served", lambda: ["because"], passing)
    except ShareError as error:
        message = str(error)
    assert (message, clock.now()) == (outcome, end)


def test_an_error_of_the_reasons_replaces_them():
    _clock, subject = waiting(0)

    def why():
        raise AWAY

    with pytest.raises(NotInEffect, match=r"^not within 0 s: a; the API server is away$"):
        subject.until_done(lambda: "a", why=why)
