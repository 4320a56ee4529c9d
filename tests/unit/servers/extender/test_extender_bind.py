# SPDX-License-Identifier: GPL-3.0-or-later
"""Binding a pod: the requests, the state after a failure, and lost answers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Clock, Start, bind_request, eventually
from gpushare.extender import bind
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

IDX = contract.POD_INDEX


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "FIRST_PAUSE", 0.001)


@pytest.fixture
def pod(api: ApiDouble) -> JsonObject:
    return api.put("pods", make_pod("p", 5))


def annotated(units: int, **annotations: str) -> JsonObject:
    pod = make_pod("p", units)
    pod["metadata"]["annotations"] = annotations
    return pod


def test_node_and_card_are_written_in_one_request(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    assert start(16).bind(pod) == ""
    (change,) = [change for change in api.log if change.kind == "pods" and change.before is not None]
    assert change.after is not None and change.after["metadata"]["annotations"][IDX] == "0"
    assert not api.asked("PATCH", "/pods/")
    (binding,) = api.asked("POST", "/binding$")
    assert binding["metadata"]["uid"] == pod["metadata"]["uid"]
    assert binding["metadata"]["resourceVersion"] == pod["metadata"]["resourceVersion"]
    assert binding["target"]["name"] == "a"


def test_a_pod_of_several_cards_is_bound_to_all_of_them(api: ApiDouble, start: Start) -> None:
    pod = api.put("pods", annotated(12, **{contract.POD_CARD_COUNT: "2"}))
    client = start(16, 4, 16)
    assert client.bind(pod) == ""
    assert api.pod("p")["metadata"]["annotations"][contract.POD_INDICES] == "0,2"
    assert contract.shares(api.pod("p")) == {0: 6, 2: 6}
    assert client.used() == [6, 0, 6]
    (lease,) = api.asked("POST", "/leases$")
    assert '"cards":{"0":6,"2":6}' in lease["metadata"]["annotations"][contract.LEDGER]


def test_a_pod_moved_to_one_card_loses_the_annotations_of_several(api: ApiDouble, start: Start) -> None:
    pod = annotated(6, **{contract.POD_INDICES: "0,1", IDX: "0"})
    assert start(16).bind(api.put("pods", pod)) == ""
    assert contract.shares(api.pod("p")) == {0: 6}


@pytest.mark.parametrize(
    ("name", "value"),
    [(contract.POD_CARD_COUNT, "0"), (contract.POD_PLACEMENT, "anywhere"), (contract.POD_MODELS, "A100,")],
)
def test_an_invalid_annotation_is_refused_with_its_name(api: ApiDouble, start: Start, name: str, value: str) -> None:
    assert name in start(16).bind(api.put("pods", annotated(6, **{name: value})))
    assert "nodeName" not in api.pod("p")["spec"]
    assert not api.asked("PUT|POST", r"/leases(/gpushare-ledger)?$"), "nothing was booked"


# ----------------------------------------------------------------- failed binds


def test_fault_13_a_failed_bind_leaves_nothing(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client = start(8)
    api.fail("POST", "/binding$", 403)
    assert "injected failure 403" in client.bind(pod)
    assert not api.pod("p")["metadata"].get("annotations")
    assert client.used() == [0]
    assert client.bind(pod) == ""
    assert client.used() == [5]


def test_fault_13_stale_annotations_of_an_unbound_pod_are_removed(api: ApiDouble, start: Start) -> None:
    pod = make_pod("p", 5, card=0)
    pod["metadata"]["annotations"]["mine"] = "stays"
    pod = api.put("pods", pod)
    client = start(8)
    assert client.used() == [0]
    api.fail("POST", "/binding$", 403)
    assert client.bind(pod) != ""
    assert api.pod("p")["metadata"]["annotations"] == {"mine": "stays"}
    assert client.used() == [0]


def test_fault_13_a_pod_that_was_bound_meanwhile_keeps_its_annotations(api: ApiDouble, start: Start) -> None:
    pod = api.put("pods", make_pod("p", 5, card=0))
    client = start(8)
    api.before("PATCH", "", lambda: api.change("pods", "p", "default", lambda obj: obj["spec"].update(nodeName="b")))
    api.fail("POST", "/binding$", 403)
    assert client.bind(pod) != ""
    assert api.asked("PATCH", "/pods/p/status$")
    assert api.pod("p")["metadata"]["annotations"][IDX] == "0"


@pytest.mark.parametrize("status", [409, 429])
def test_a_temporary_failure_is_retried(api: ApiDouble, start: Start, pod: JsonObject, status: int) -> None:
    client = start(8)
    api.fail("POST", "/binding$", status, times=3)
    assert client.bind(pod) == ""
    assert client.used() == [5]


def test_retries_are_limited(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client = start(8)
    api.fail("POST", "/binding$", 409, times=10**6)
    assert "injected failure 409" in client.bind(pod)
    assert client.used() == [0]
    assert len(api.asked("POST", "/binding$")) == bind.TRIES


def test_a_pod_that_changes_during_its_bind_is_read_again(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client = start(8)

    def change() -> None:
        # As a scheduler's condition would; the Binding must not carry the version from before.
        api.change("pods", "p", "default", lambda obj: obj["status"].update(reason="changed"))

    api.before("POST", "/binding$", change, times=2)
    assert client.bind(pod) == ""
    assert len(api.asked("POST", "/binding$")) == 3
    assert client.used() == [5]


def test_a_pod_that_is_deleted_during_its_bind(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client = start(8)
    api.before("POST", "/binding$", lambda: api.remove("pods", "p", "default"))
    assert "doesn't exist" in client.bind(pod)
    assert client.used() == [0]


def test_an_internal_error_keeps_the_hold(start: Start, pod: JsonObject, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start(8)

    def break_down(*_: Any) -> None:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as broken:
        broken.setattr(client.extender.binder, "_post", break_down)
        assert client.json("POST", "/gpushare-scheduler/bind", bind_request(pod))[0] == 500
    assert client.used() == [5]
    client.extender.ledger.collect_garbage()
    assert client.used() == [0], "nothing was sent, as the pod shows"
    assert client.bind(pod) == ""


# ----------------------------------------------------------------- lost answers


def test_a_binding_whose_answer_was_lost_is_success(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client = start(8)
    api.fail("POST", "/binding$", 0, done=True)
    assert client.bind(pod) == ""
    assert client.used() == [5]
    assert len(api.asked("POST", "/binding$")) == 1


@pytest.mark.parametrize("status", [0, 500, 504])
def test_a_binding_of_unknown_result_is_fenced(api: ApiDouble, start: Start, pod: JsonObject, status: int) -> None:
    client = start(8)
    api.fail("POST", "/binding$", status)
    assert client.bind(pod) == ""
    late, done = api.asked("POST", "/binding$")
    assert late["metadata"]["resourceVersion"] != done["metadata"]["resourceVersion"]
    assert contract.POD_FENCED in api.pod("p")["metadata"]["annotations"]
    assert client.used() == [5]


def test_a_binding_of_unknown_status_keeps_its_memory(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client = start(8)
    state, ledger = client.extender.state, client.extender.ledger
    other = api.put("pods", make_pod("q", 5))
    api.fail("POST", "/binding$", 504)
    api.fail("PATCH", "/pods/p/status$", 503, times=2)
    assert "OutcomeUnknown: " in client.bind(pod)
    assert "3 of 5 GiB" in client.bind(other), "another pod must not get memory that may still be taken"
    assert client.filter(pod, "a")["NodeNames"] == ["a"], "the pod itself may"
    assert client.filter(other, "a")["NodeNames"] == []
    ledger.collect_garbage()
    assert state.holds == 1, "memory of an unknown binding stays reserved"
    ledger.collect_garbage()
    assert state.holds == 0
    assert client.bind(other) == ""


def test_a_retry_first_resolves_the_previous_binding(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    api.put("nodes", make_node("b", 8))
    client = start(8)
    api.fail("POST", "/binding$", 504)
    api.fail("PATCH", "/pods/p/status$", 503, times=2)
    assert client.bind(pod) != ""
    assert "can't be read" in client.bind(pod, "b"), "while its first Binding may take effect, there is no second one"
    assert client.used("b") == [0]
    assert client.bind(pod, "b") == ""
    versions = {body["metadata"]["resourceVersion"] for body in api.asked("POST", "/pods/p/binding$")}
    assert len(versions) == 2
    assert (client.used(), client.used("b")) == ([0], [5])
    assert client.bind(api.put("pods", make_pod("q", 5))) == ""


def test_a_pod_deleted_after_its_bind_is_dropped(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client, clock = start(8), Clock()
    binder = client.extender.binder
    binder._clock = client.extender.ledger._clock = clock
    assert client.bind(api.put("pods", make_pod("first", 1))) == ""
    eventually(lambda: client.extender.state.holds == 0)
    client.extender.pods.stop()
    assert client.bind(pod) == ""
    assert client.used() == [6]
    clock.now += 10
    binder.settle()
    assert client.used() == [6], "bound, the watch is only late"
    with api.outage():
        binder.settle()
    assert client.used() == [6], "a pod of unknown state keeps its memory"
    api.remove("pods", "p", "default")
    binder.settle()
    assert client.used() == [1]


def test_concurrent_binds_of_a_pod_run_one_after_the_other(api: ApiDouble, start: Start, pod: JsonObject) -> None:
    client = start(8, 8)
    reached, resume = api.pause("POST", "/binding$")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.bind, pod)
        assert reached.wait(10)
        assert "BindInProgress: " in client.bind(pod)
        resume.set()
        assert first.result() == ""
    assert client.bind(pod) == "", "it is bound"


def test_concurrent_bindings_are_limited(api: ApiDouble, start: Start) -> None:
    client = start(99)
    pods = [api.put("pods", make_pod(f"p{number}", 1)) for number in range(3 * bind.CONCURRENT_BINDINGS)]
    lock, resume, sent = threading.Lock(), threading.Event(), list[str]()

    def count(_method: str, path: str) -> None:
        if path.endswith("/binding"):
            with lock:
                sent.append(path)
            assert resume.wait(10)

    api.hooks.append(count)
    with ThreadPoolExecutor(len(pods)) as pool:
        jobs = [pool.submit(client.bind, pod) for pod in pods]
        eventually(lambda: len(sent) == bind.CONCURRENT_BINDINGS)
        eventually(lambda: client.extender.state.holds == len(pods))
        assert len(sent) == bind.CONCURRENT_BINDINGS
        resume.set()
        assert [job.result() for job in jobs] == [""] * len(pods)
