# SPDX-License-Identifier: GPL-3.0-or-later
"""A pod that was refused just before memory was released for it is retried, and no other."""

from __future__ import annotations

import time

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, Clock, Start, eventually
from gpushare.extender import retry
from gpushare.extender.filter import RefusedPod
from gpushare.extender.retry import RetryQueue
from gpushare.extender.state import Claim, State, node_row
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


def test_a_tenants_many_refused_pods_keep_no_other_from_its_retry(
    retries: Retries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a claim exists refused pods stay for any time; the latest are kept."""
    monkeypatch.setattr(retry, "MAX_REFUSED", 2)
    state = retries.client.extender.state
    state.claim(Claim("high", "default", "high", "a", ((0, 6),), 10, frozenset()))
    for name in ("p0", "p1", "p2"):
        retries.refuse(name)
        retries.check(60)
    state.unclaim("high")
    retries.release()
    assert retries.check() == ["p1"], "the older one of the latest two, and there is memory for one"


def test_thousands_of_nodes_cost_little_when_memory_becomes_free(api: ApiDouble) -> None:
    """40 pods, each refused by 5,000 nodes, and memory became free on all of these."""
    state, names = State(), [f"gpu-node-{number}" for number in range(5000)]
    queue, demand = RetryQueue(api, state, lambda: 1000.0), contract.Demand(9)
    for number in range(40):
        queue.refused(RefusedPod("default", f"p{number}", f"uid-{number}", demand, 0, names, names, state.freed))
    for name in names:
        state.node_changed(name, None, node_row(make_node(name, 8)))
    queue._clock = lambda: 1001.0
    began = time.thread_time()
    queue.check()
    assert time.thread_time() - began < 2


def test_the_retry_thread_runs_without_a_call(api: ApiDouble, start: Start) -> None:
    api.put("pods", make_pod("there", 10, "a", 0))
    start(16).filter(api.put("pods", make_pod("p", 10)), "a")
    api.remove("pods", "there", "default")
    eventually(lambda: retried(api) == ["p"])
