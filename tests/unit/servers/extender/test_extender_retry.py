# SPDX-License-Identifier: GPL-3.0-or-later
"""A pod that was refused just before memory was released for it is retried, and no other."""

from __future__ import annotations

import pytest
from api_double import ApiDouble, make_pod
from extender_kit import Client, Clock, Start, eventually
from gpushare.extender.retry import RetryQueue
from gpushare.extender.state import Claim
from gpushare.shared._contracts import gpushare as contract


class Retries:
    """An extender whose refused pods are evaluated only by ``check``; its card has 6 of 16 free."""

    def __init__(self, api: ApiDouble, client: Client) -> None:
        self.api, self.client, self.clock = api, client, Clock()
        client.extender.retries.stop()
        self.queue = RetryQueue(api, client.extender.state, self.clock)
        client.extender.api._refused = (self.queue.refused,)

    def refuse(self, name: str, units: int = 10) -> None:
        pod = self.api.put("pods", make_pod(name, units))
        assert self.client.filter(pod, "a")["NodeNames"] == []

    def release(self) -> None:
        self.api.remove("pods", "there", "default")
        eventually(lambda: self.client.used() == [0])

    def check(self, seconds: float = 1.0) -> list[str]:
        """Let some time pass, and evaluate the pods; those that were retried so far."""
        self.clock.now += seconds
        self.queue.check()
        return retried(self.api)


def retried(api: ApiDouble) -> list[str]:
    pods = [pod["metadata"] for pod in api.pods()]
    return [metadata["name"] for metadata in pods if contract.POD_RETRY in metadata.get("annotations", {})]


@pytest.fixture
def retries(api: ApiDouble, start: Start) -> Retries:
    api.put("pods", make_pod("there", 10, "a", 0))
    return Retries(api, start(16))


def test_memory_released_just_after_the_refusal_is_a_retry(api: ApiDouble, retries: Retries) -> None:
    # The scheduler has received the deletion; this watch hasn't yet.
    for number in range(3):
        retries.refuse(f"p{number}")
    retries.release()
    assert retries.check(0) == [], "not before a moment has passed"
    assert retries.check() == ["p0"], "there is memory for one of them"
    assert retries.client.bind(api.pod("p0")) == ""
    assert retries.check() == ["p0"]


def test_without_released_memory_there_is_no_retry(retries: Retries) -> None:
    retries.refuse("p")
    for _check in range(5):
        retries.check()
    retries.release()
    assert retries.check() == [], "the scheduler retries on later changes by itself"


def test_an_ended_claim_is_released_memory(retries: Retries) -> None:
    state = retries.client.extender.state
    state.claim(Claim("high", "default", "high", "a", ((0, 6),), 10, frozenset()))
    retries.refuse("p", 5)
    assert retries.check(60) == []
    state.unclaim("high")
    assert retries.check(0) == ["p"]


def test_a_deleted_or_replaced_pod_is_not_retried(api: ApiDouble, retries: Retries) -> None:
    retries.refuse("p")
    api.remove("pods", "p", "default")
    api.put("pods", make_pod("p", 1))
    retries.release()
    assert retries.check() == []


def test_the_retry_thread_runs_without_a_call(api: ApiDouble, start: Start) -> None:
    api.put("pods", make_pod("there", 10, "a", 0))
    start(16).filter(api.put("pods", make_pod("p", 10)), "a")
    api.remove("pods", "there", "default")
    eventually(lambda: retried(api) == ["p"])
