# SPDX-License-Identifier: GPL-3.0-or-later
"""A pod that was refused just before room came for it is asked for again, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, eventually
from gpushare import contract
from gpushare.extender_late import Late
from gpushare.extender_state import Claim

Start = Callable[..., Client]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def late(api: ApiDouble, start: Start) -> tuple[Client, Late, Clock]:
    api.put("nodes", make_node("a", 16))
    api.put("pods", make_pod("there", 10, "a", 0))
    client, clock = start(), Clock()
    client.extender.late.stop()
    new = Late(api, client.extender.state, clock)
    client.extender.api._refused = (new.refused,)
    return client, new, clock


Parts = tuple[Client, Late, Clock]


def asked_again(api: ApiDouble) -> list[str]:
    return [
        pod["metadata"]["name"] for pod in api.pods() if contract.POD_RETRY in pod["metadata"].get("annotations", {})
    ]


def test_room_that_came_just_after_the_refusal(api: ApiDouble, late: Parts) -> None:
    client, again, clock = late
    pods = [api.put("pods", make_pod(f"p{number}", 10)) for number in range(3)]
    # The scheduler has seen the deletion; this watch hasn't yet.
    for pod in pods:
        assert client.filter(pod, "a")["NodeNames"] == []
    api.remove("pods", "there", "default")
    eventually(lambda: client.used("a") == [0])
    again.tick()
    assert asked_again(api) == [], "not before a moment has passed"
    clock.now += 1
    again.tick()
    assert asked_again(api) == ["p0"], "one of them has room"
    assert client.bind(api.pod("p0"), "a") == ""
    clock.now += 1
    again.tick()
    assert asked_again(api) == ["p0"]


def test_where_nothing_came_free_nobody_is_asked_again(api: ApiDouble, late: Parts) -> None:
    client, again, clock = late
    client.filter(api.put("pods", make_pod("p", 10)), "a")
    for _look in range(5):
        clock.now += 1
        again.tick()
    api.remove("pods", "there", "default")
    eventually(lambda: client.used("a") == [0])
    clock.now += 1
    again.tick()
    assert asked_again(api) == [], "the scheduler asks by itself for what it heard of later"


def test_a_claim_that_ended_is_room(api: ApiDouble, late: Parts) -> None:
    client, again, clock = late
    client.extender.state.claim(Claim("high", "default", "high", "a", ((0, 6),), 10, frozenset()))
    client.filter(api.put("pods", make_pod("p", 5)), "a")
    clock.now += 60
    again.tick()
    assert asked_again(api) == []
    client.extender.state.unclaim("high")
    again.tick()
    assert asked_again(api) == ["p"]


def test_it_does_so_by_itself(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 16))
    api.put("pods", make_pod("there", 10, "a", 0))
    client = start()
    client.filter(api.put("pods", make_pod("p", 10)), "a")
    api.remove("pods", "there", "default")
    eventually(lambda: asked_again(api) == ["p"])


def test_a_pod_that_is_gone_or_another_one_is_left_alone(api: ApiDouble, late: Parts) -> None:
    client, again, clock = late
    client.filter(api.put("pods", make_pod("p", 10)), "a")
    api.remove("pods", "p", "default")
    api.put("pods", make_pod("p", 1))
    api.remove("pods", "there", "default")
    eventually(lambda: client.used("a") == [0])
    clock.now += 1
    again.tick()
    assert asked_again(api) == []
