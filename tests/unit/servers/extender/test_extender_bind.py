# SPDX-License-Identifier: GPL-3.0-or-later
"""Binding a pod: what is written, what a failure leaves, and answers that get lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, eventually
from gpushare.extender import bind
from gpushare.shared._contracts import gpushare as contract

Start = Callable[..., Client]
IDX = "ALIYUN_COM_GPU_MEM_IDX"
LEASE = "/leases"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "FIRST_PAUSE", 0.001)


class Clock:
    """One for the binder and its ledger."""

    def __init__(self, client: Client) -> None:
        self.now = 1000.0
        client.extender.binder._clock = client.extender.ledger._clock = lambda: self.now


def test_node_and_card_are_written_in_one_request(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 16))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    assert client.bind(pod, "a") == ""
    changes = [change for change in api.log if change.kind == "pods" and change.before is not None]
    assert len(changes) == 1
    assert changes[0].after is not None and changes[0].after["metadata"]["annotations"][IDX] == "0"
    assert not api.asked("PATCH", "/pods/")
    (binding,) = api.asked("POST", "/binding$")
    assert binding["metadata"]["uid"] == pod["metadata"]["uid"]
    assert binding["metadata"]["resourceVersion"] == pod["metadata"]["resourceVersion"]
    assert binding["target"]["name"] == "a"


def test_a_pod_of_several_cards_is_bound_to_all_of_them(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 16, 4, 16))
    pod = make_pod("p", 12)
    pod["metadata"]["annotations"] = {contract.POD_CARD_COUNT: "2"}
    pod = api.put("pods", pod)
    client = start()
    assert client.bind(pod, "a") == ""
    annotations = api.pod("p")["metadata"]["annotations"]
    assert annotations[contract.POD_INDICES] == "0,2"
    assert contract.shares(api.pod("p")) == {0: 6, 2: 6}
    assert client.used("a") == [6, 0, 6]
    (lease,) = api.asked("POST", LEASE + "$")
    assert '"cards":{"0":6,"2":6}' in lease["metadata"]["annotations"][contract.LEDGER]


def test_a_pod_moved_to_one_card_loses_the_annotations_of_several(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 16))
    pod = make_pod("p", 6)
    pod["metadata"]["annotations"] = {contract.POD_INDICES: "0,1", contract.POD_INDEX: "0"}
    client = start()
    assert client.bind(api.put("pods", pod), "a") == ""
    assert contract.shares(api.pod("p")) == {0: 6}


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({contract.POD_CARD_COUNT: "0"}, contract.POD_CARD_COUNT),
        ({contract.POD_PLACEMENT: "anywhere"}, contract.POD_PLACEMENT),
        ({contract.POD_MODELS: "A100,"}, contract.POD_MODELS),
    ],
)
def test_an_invalid_annotation_is_refused_with_its_name(
    api: ApiDouble, start: Start, annotations: dict[str, str], words: str
) -> None:
    api.put("nodes", make_node("a", 16))
    pod = make_pod("p", 6)
    pod["metadata"]["annotations"] = annotations
    client = start()
    assert words in client.bind(api.put("pods", pod), "a")
    assert "nodeName" not in api.pod("p")["spec"]
    assert not api.asked("PUT|POST", r"/leases(/gpushare-ledger)?$"), "nothing was booked"


def test_a_pod_keeps_to_its_own_placement(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 16, 16))
    api.put("pods", make_pod("there", 4, "a", 0))
    pod = make_pod("p", 6)
    pod["metadata"]["annotations"] = {contract.POD_PLACEMENT: "spread"}
    client = start(placement="binpack")
    assert client.bind(api.put("pods", pod), "a") == ""
    assert client.used("a") == [4, 6]


# ----------------------------------------------------------------- binds that come to nothing


def test_fault_13_a_failed_bind_leaves_nothing(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    api.fail("POST", "/binding$", 403)
    assert "injected failure 403" in client.bind(pod, "a")
    assert not api.pod("p")["metadata"].get("annotations")
    assert client.used("a") == [0]
    assert client.bind(pod, "a") == ""
    assert client.used("a") == [5]


def test_fault_13_stale_annotations_of_an_unbound_pod_are_not_counted_and_are_removed(
    api: ApiDouble, start: Start
) -> None:
    api.put("nodes", make_node("a", 8))
    pod = make_pod("p", 5, card=0)
    pod["metadata"]["annotations"]["mine"] = "stays"
    pod = api.put("pods", pod)
    client = start()
    assert client.used("a") == [0]
    api.fail("POST", "/binding$", 403)
    assert client.bind(pod, "a") != ""
    assert api.pod("p")["metadata"]["annotations"] == {"mine": "stays"}
    assert client.used("a") == [0]


def test_fault_13_a_pod_that_was_bound_meanwhile_keeps_its_annotations(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    pod = api.put("pods", make_pod("p", 5, card=0))
    client = start()

    def another(method: str, path: str) -> None:
        if method == "PATCH":
            api.hooks.remove(another)
            api.change("pods", "p", "default", lambda obj: obj["spec"].update(nodeName="b"))

    api.hooks.append(another)
    api.fail("POST", "/binding$", 403)
    assert client.bind(pod, "a") != ""
    assert api.asked("PATCH", "/pods/p$")
    assert api.pod("p")["metadata"]["annotations"][IDX] == "0"


@pytest.mark.parametrize("status", [409, 429])
def test_a_temporary_failure_is_retried(api: ApiDouble, start: Start, status: int) -> None:
    api.put("nodes", make_node("a", 8))
    client = start()
    api.fail("POST", "/binding$", status, times=3)
    assert client.bind(api.put("pods", make_pod("p", 5)), "a") == ""
    assert client.used("a") == [5]


def test_retries_are_limited(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    api.fail("POST", "/binding$", 409, times=10**6)
    assert "injected failure 409" in client.bind(pod, "a")
    assert client.used("a") == [0]
    assert len(api.asked("POST", "/binding$")) == bind.TRIES


def test_a_pod_that_changes_while_it_is_being_bound_is_read_again(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    pod = api.put("pods", make_pod("p", 5))
    client = start()

    def status(method: str, path: str) -> None:
        if path.endswith("/binding") and len(api.asked("POST", "/binding$")) < 2:
            # As a scheduler's condition would; without it, the Binding would be of a pod that isn't there any more.
            api.change("pods", "p", "default", lambda obj: obj["status"].update(reason="changed"))

    api.hooks.append(status)
    assert client.bind(pod, "a") == ""
    assert len(api.asked("POST", "/binding$")) == 3
    assert client.used("a") == [5]


def test_a_pod_that_is_deleted_during_its_bind(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    pod = api.put("pods", make_pod("p", 5))
    client = start()

    def gone(method: str, path: str) -> None:
        if path.endswith("/binding"):
            api.hooks.clear()
            api.remove("pods", "p", "default")

    api.hooks.append(gone)
    assert "doesn't exist" in client.bind(pod, "a")
    assert client.used("a") == [0]


def test_an_internal_error_keeps_the_reservation(
    api: ApiDouble, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api.put("nodes", make_node("a", 8))
    pod = api.put("pods", make_pod("p", 5))
    client = start()

    def break_down(*_: Any) -> None:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as broken:
        broken.setattr(client.extender.binder, "_post", break_down)
        assert client.json("POST", "/gpushare-scheduler/bind", wanted(pod, "a"))[0] == 500
    assert client.used("a") == [5]
    client.extender.ledger.collect_garbage()
    assert client.used("a") == [0], "nothing was sent, as the pod shows"
    assert client.bind(pod, "a") == ""


def wanted(pod: Any, node: str) -> dict[str, str]:
    metadata = pod["metadata"]
    return {
        "PodName": metadata["name"],
        "PodNamespace": metadata["namespace"],
        "PodUID": metadata["uid"],
        "Node": node,
    }


# ----------------------------------------------------------------- lost answers


def test_a_binding_whose_answer_was_lost_is_success(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    api.fail("POST", "/binding$", 0, done=True)
    assert client.bind(pod, "a") == ""
    assert client.used("a") == [5]
    assert len(api.asked("POST", "/binding$")) == 1


@pytest.mark.parametrize("status", [0, 500, 504])
def test_a_binding_of_unknown_result_is_fenced_and_repeated(api: ApiDouble, start: Start, status: int) -> None:
    api.put("nodes", make_node("a", 8))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    api.fail("POST", "/binding$", status)
    assert client.bind(pod, "a") == ""
    late, done = api.asked("POST", "/binding$")
    assert late["metadata"]["resourceVersion"] != done["metadata"]["resourceVersion"]
    assert contract.POD_FENCED in api.pod("p")["metadata"]["annotations"]
    assert client.used("a") == [5]


def test_a_binding_of_unknown_status_keeps_its_memory_until_it_is_known(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    client = start()
    state, ledger = client.extender.state, client.extender.ledger
    pod, other = api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 5))
    api.fail("POST", "/binding$", 504)
    api.fail("PATCH", "/pods/p$", 503, times=2)
    assert "OutcomeUnknown: " in client.bind(pod, "a")
    assert "3 of 5 GiB" in client.bind(other, "a"), "another pod must not get what may still be taken"
    assert client.filter(pod, "a")["NodeNames"] == ["a"], "the pod itself may"
    assert client.filter(other, "a")["NodeNames"] == []
    ledger.collect_garbage()
    assert state.holds == 1, "memory of an unknown binding stays reserved"
    ledger.collect_garbage()
    assert state.holds == 0
    assert client.bind(other, "a") == ""


def test_a_retry_first_resolves_the_previous_binding(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    api.put("nodes", make_node("b", 8))
    client = start()
    pod, other = api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 5))
    api.fail("POST", "/binding$", 504)
    api.fail("PATCH", "/pods/p$", 503, times=2)
    assert client.bind(pod, "a") != ""
    assert "can't be read" in client.bind(pod, "b"), "while its first Binding may come true, there is no second one"
    assert client.used("b") == [0]
    assert client.bind(pod, "b") == ""
    late = api.asked("POST", "/pods/p/binding$")[0]
    assert (
        late["metadata"]["resourceVersion"] != api.asked("POST", "/pods/p/binding$")[1]["metadata"]["resourceVersion"]
    )
    assert (client.used("a"), client.used("b")) == ([0], [5])
    assert client.bind(other, "a") == ""


def test_a_pod_deleted_after_its_bind_is_dropped(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8))
    client = start()
    binder = client.extender.binder
    clock = Clock(client)
    pod = api.put("pods", make_pod("p", 5))
    client.extender.pods.stop()
    assert client.bind(pod, "a") == ""
    assert client.used("a") == [5]
    clock.now += 10
    binder.settle()
    assert client.used("a") == [5], "bound, the watch is only behind"
    with api.outage():
        binder.settle()
    assert client.used("a") == [5], "what can't be asked isn't given away"
    api.remove("pods", "p", "default")
    binder.settle()
    assert client.used("a") == [0]


def test_two_binds_of_one_pod_at_once_book_once(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8, 8))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.bind(pod, "a"), range(8)))
    assert "" in answers
    assert all(error == "" or "BindInProgress: " in error for error in answers)
    eventually(lambda: client.extender.state.holds == 0)
    assert sum(client.used("a")) == 5


def test_concurrent_binds_of_a_pod_run_one_after_the_other(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 8, 8))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    inside, on = threading.Event(), threading.Event()

    def wait(method: str, path: str) -> None:
        if path.endswith("/binding"):
            api.hooks.clear()
            inside.set()
            assert on.wait(10)

    api.hooks.append(wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.bind, pod, "a")
        assert inside.wait(10)
        assert "BindInProgress: " in client.bind(pod, "a")
        on.set()
        assert first.result() == ""
    assert client.bind(pod, "a") == "", "it is bound"


def test_concurrent_bindings_are_limited(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 99))
    client = start()
    pods = [api.put("pods", make_pod(f"p{number}", 1)) for number in range(3 * bind.CONCURRENT_BINDINGS)]
    lock, on, sent = threading.Lock(), threading.Event(), list[str]()

    def count(_method: str, path: str) -> None:
        if path.endswith("/binding"):
            with lock:
                sent.append(path)
            assert on.wait(10)

    api.hooks.append(count)
    with ThreadPoolExecutor(len(pods)) as pool:
        jobs = [pool.submit(client.bind, pod, "a") for pod in pods]
        eventually(lambda: len(sent) == bind.CONCURRENT_BINDINGS)
        eventually(lambda: client.extender.state.holds == len(pods))
        assert len(sent) == bind.CONCURRENT_BINDINGS
        on.set()
        assert [job.result() for job in jobs] == [""] * len(pods)
