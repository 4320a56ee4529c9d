# SPDX-License-Identifier: GPL-3.0-or-later
"""A pod that was refused just before memory was released for it is retried, and no other."""

from __future__ import annotations

import pytest
from api_double import ApiDouble, make_pod
from extender_kit import Client, Clock, Start, eventually
from gpushare.extender.retry import RetryQueue
from gpushare.extender.state import Claim
from gpushare.shared._contracts import gpushare as contract


@pytest.fixture
def retries(api: ApiDouble, start: Start) -> tuple[Client, RetryQueue, Clock]:
    api.put("pods", make_pod("there", 10, "a", 0))
    client, clock = start(16), Clock()
    client.extender.retries.stop()
    new = RetryQueue(api, client.extender.state, clock)
    client.extender.api._refused = (new.refused,)
    return client, new, clock


Parts = tuple[Client, RetryQueue, Clock]


def asked_again(api: ApiDouble) -> list[str]:
    return [
        pod["metadata"]["name"] for pod in api.pods() if contract.POD_RETRY in pod["metadata"].get("annotations", {})
    ]


def test_memory_released_just_after_the_refusal_is_a_retry(api: ApiDouble, retries: Parts) -> None:
    client, again, clock = retries
    pods = [api.put("pods", make_pod(f"p{number}", 10)) for number in range(3)]
    # The scheduler has received the deletion; this watch hasn't yet.
    for pod in pods:
        assert client.filter(pod, "a")["NodeNames"] == []
    api.remove("pods", "there", "default")
    eventually(lambda: client.used() == [0])
    again.check()
    assert asked_again(api) == [], "not before a moment has passed"
    clock.now += 1
    again.check()
    assert asked_again(api) == ["p0"], "there is memory for one of them"
    assert client.bind(api.pod("p0")) == ""
    clock.now += 1
    again.check()
    assert asked_again(api) == ["p0"]


def test_without_released_memory_there_is_no_retry(api: ApiDouble, retries: Parts) -> None:
    client, again, clock = retries
    client.filter(api.put("pods", make_pod("p", 10)), "a")
    for _check in range(5):
        clock.now += 1
        again.check()
    api.remove("pods", "there", "default")
    eventually(lambda: client.used() == [0])
    clock.now += 1
    again.check()
    assert asked_again(api) == [], "the scheduler retries on later changes by itself"


def test_an_ended_claim_is_released_memory(api: ApiDouble, retries: Parts) -> None:
    client, again, clock = retries
    client.extender.state.claim(Claim("high", "default", "high", "a", ((0, 6),), 10, frozenset()))
    client.filter(api.put("pods", make_pod("p", 5)), "a")
    clock.now += 60
    again.check()
    assert asked_again(api) == []
    client.extender.state.unclaim("high")
    again.check()
    assert asked_again(api) == ["p"]


def test_the_retry_thread_runs_without_a_call(api: ApiDouble, start: Start) -> None:
    api.put("pods", make_pod("there", 10, "a", 0))
    client = start(16)
    client.filter(api.put("pods", make_pod("p", 10)), "a")
    api.remove("pods", "there", "default")
    eventually(lambda: asked_again(api) == ["p"])


def test_a_deleted_or_replaced_pod_is_not_retried(api: ApiDouble, retries: Parts) -> None:
    client, again, clock = retries
    client.filter(api.put("pods", make_pod("p", 10)), "a")
    api.remove("pods", "p", "default")
    api.put("pods", make_pod("p", 1))
    api.remove("pods", "there", "default")
    eventually(lambda: client.used() == [0])
    clock.now += 1
    again.check()
    assert asked_again(api) == []
