# SPDX-License-Identifier: GPL-3.0-or-later
"""The ledger of bookings: its text, its corners one by one, what it costs, and two extenders on one API."""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, eventually
from gpushare.api.client import KubeError
from gpushare.extender import bind as extender_bind
from gpushare.extender import ledger as extender_ledger
from gpushare.extender.binding_status import BindingStatus, Entry, fate
from gpushare.extender.ledger import NAME
from gpushare.extender.register import NODES, LedgerError, Register
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from hypothesis import given
from hypothesis import strategies as st

Start = Callable[..., Client]
NAMESPACE = "kube-system"
MESSAGES = st.text(min_size=1, max_size=20)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extender_bind, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(extender_bind, "SETTLE_SECONDS", 1000.0)
    monkeypatch.setattr(extender_ledger, "WRITE_SECONDS", 1.0)


class Time:
    """What two extenders' clocks show; starts at the real time."""

    def __init__(self, *clients: Client) -> None:
        self.passed = 0.0
        for client in clients:
            ledger = client.extender.ledger
            clock, now_ms = ledger._clock, ledger._now_ms
            ledger._clock = client.extender.binder._clock = lambda clock=clock: clock() + self.passed
            ledger._now_ms = lambda now_ms=now_ms: int(now_ms() + self.passed * 1000)


def lease(api: ApiDouble) -> JsonObject:
    return api.objects[("leases", NAMESPACE, NAME)]


def register(api: ApiDouble) -> Register:
    return Register.from_text(lease(api)["metadata"]["annotations"][contract.LEDGER])


def booked(api: ApiDouble) -> list[Entry]:
    return list(register(api).entries)


def leave(api: ApiDouble, client: Client, pod: JsonObject, node: str = "a") -> list[Any]:
    """Bind a pod with an extender that stops just before the Binding; it goes on when the answer's first is set."""
    waiting, on, outcome = threading.Event(), threading.Event(), list[str]()

    def stop(method: str, path: str) -> None:
        if method == "POST" and path.endswith(f"/{pod['metadata']['name']}/binding"):
            api.hooks.remove(stop)
            waiting.set()
            assert on.wait(20)

    api.hooks.append(stop)
    thread = threading.Thread(target=lambda: outcome.append(client.bind(pod, node)))
    thread.start()
    assert waiting.wait(10)
    return [on, thread, outcome]


def let_go(paused: list[Any]) -> str:
    on, thread, outcome = paused
    on.set()
    thread.join(20)
    return str(outcome[0])


# ----------------------------------------------------------------- its text

CARDS = st.dictionaries(st.integers(0, 99), st.integers(1, 10**6), min_size=1).map(
    lambda units: tuple(sorted(units.items()))
)
ENTRIES = st.lists(
    st.builds(Entry, MESSAGES, MESSAGES, MESSAGES, MESSAGES, CARDS, st.integers(0, 2**50), MESSAGES, MESSAGES),
    unique_by=lambda entry: entry.uid,
)
COUNTS = st.integers(0, 2**40)


@given(st.builds(Register, st.just(2**41), st.dictionaries(MESSAGES, COUNTS), COUNTS, ENTRIES.map(tuple)))
def test_a_register_round_trips(register: Register) -> None:
    assert Register.from_text(register.to_text()) == register


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        assert isinstance(Register.from_text(text), Register)
    except LedgerError as error:
        assert contract.LEDGER in str(error)


ROW = {"uid": "u", "namespace": "n", "name": "p", "node": "a", "cards": {"0": 4}, "at": 1, "version": "7", "by": "e"}
VALUE = {"count": 2, "before": 0, "nodes": {"a": 2}, "bookings": [ROW]}


@pytest.mark.parametrize(
    "value",
    [
        *(
            {**VALUE, "bookings": rows}
            for rows in (
                [ROW, ROW],
                [{**ROW, "cards": {}}],
                [{**ROW, "cards": {"0": 0}}],
                [{**ROW, "cards": {"0": "4"}}],
                [{**ROW, "cards": {"x": 4}}],
                [{**ROW, "cards": 4}],
                [{**ROW, "uid": ""}],
                [{**ROW, "node": ""}],
                [{**ROW, "version": 7}],
                [{key: value for key, value in ROW.items() if key != "by"}],
                {"a": 1},
            )
        ),
        {**VALUE, "nodes": {"a": 3}},
        {**VALUE, "before": 3},
        {**VALUE, "count": "2"},
        {key: value for key, value in VALUE.items() if key != "nodes"},
        [ROW],
        "x",
    ],
)
def test_an_invalid_register_is_refused(value: Any) -> None:
    assert Register.from_text(json.dumps(VALUE)).entries[0].node == "a"
    with pytest.raises(LedgerError):
        Register.from_text(json.dumps(value))


@given(st.lists(st.sets(st.integers(0, 3 * NODES), max_size=NODES // 2), max_size=60))
def test_a_register_reports_every_changed_node(writes: list[set[int]]) -> None:
    """Who trusts it asks for the pods of a node once too often, never once too seldom."""
    register, last = Register(), dict[str, int]()
    for count, write in enumerate(writes, 1):
        names = {f"n{number}" for number in write}
        register = register.next((), names)
        last.update(dict.fromkeys(names, count))
        assert register.count == count and len(register.nodes) <= NODES
        assert all(register.added(name) >= at for name, at in last.items())
        assert all(register.added(name) == at for name, at in register.nodes.items())
    assert Register.from_text(register.to_text()) == register


# ----------------------------------------------------------------- one extender


def test_nothing_is_bound_that_is_not_booked_before(api: ApiDouble, start: Start) -> None:
    pod = api.put("pods", make_pod("p", 5))
    client = start(16, 16)
    paused = leave(api, client, pod)
    (entry,) = booked(api)
    assert entry.uid == pod["metadata"]["uid"]
    assert (entry.namespace, entry.name, entry.node, entry.cards) == ("default", "p", "a", ((0, 5),))
    assert (entry.version, entry.by) == (pod["metadata"]["resourceVersion"], client.extender.ledger.identity)
    spec = lease(api)["spec"]
    assert spec["holderIdentity"] == client.extender.ledger.identity
    assert datetime.datetime.fromisoformat(spec["renewTime"]).tzinfo is not None
    assert let_go(paused) == ""


def test_foreign_content_of_the_lease_stays(api: ApiDouble, start: Start) -> None:
    metadata = {"name": NAME, "namespace": NAMESPACE, "labels": {"l": "1"}, "annotations": {"mine": "stays"}}
    api.put("leases", {"metadata": metadata, "spec": {}})
    client = start(16)
    for name in ("p", "q"):
        assert client.bind(api.put("pods", make_pod(name, 5))) == ""
    after = lease(api)["metadata"]
    assert (after["labels"], after["annotations"]["mine"]) == ({"l": "1"}, "stays")


def test_a_bound_pods_entry_is_removed_by_the_next_booking(api: ApiDouble, start: Start) -> None:
    client = start(16)
    for name in ("p", "q", "r"):
        assert client.bind(api.put("pods", make_pod(name, 5))) == ""
        assert [entry.name for entry in booked(api)] == [name]


@pytest.mark.parametrize("status", [200, 409, 0])
def test_entries_of_bound_pods_are_removed_when_no_bind_runs(api: ApiDouble, start: Start, status: int) -> None:
    """Another extender would ask about each of them."""
    client = start(16)
    ledger, time = client.extender.ledger, Time(client)
    assert client.bind(api.put("pods", make_pod("p", 5))) == ""
    paused = leave(api, client, api.put("pods", make_pod("q", 5)))
    ledger.collect_garbage()
    assert [entry.name for entry in booked(api)] == ["q"]
    time.passed += extender_ledger.REST_SECONDS + 1
    if status != 200:
        api.fail("PUT", f"/leases/{NAME}$", status)
    writes = len(api.asked("PUT", f"/leases/{NAME}$"))
    assert let_go(paused) == ""
    for _time in range(3):
        ledger.collect_garbage()
    assert len(api.asked("PUT", f"/leases/{NAME}$")) == writes + 1, "and not again and again"
    assert status != 200 or booked(api) == []
    assert client.bind(api.put("pods", make_pod("r", 6))) == ""
    assert [entry.name for entry in booked(api)] == ["r"]
    eventually(lambda: client.used() == [16])


def test_stop_removes_finished_entries(api: ApiDouble, start: Start) -> None:
    """Else whoever comes next holds its memory until it has asked about it, some seconds later."""
    client = start(16)
    assert client.bind(api.put("pods", make_pod("one", 4))) == ""
    assert [entry.name for entry in booked(api)] == ["one"]
    client.extender.stop()
    assert booked(api) == []


def asked_and_bound(client: Client, pod: JsonObject, node: str) -> str:
    """As a scheduler does it."""
    assert node in client.filter(pod, node)["NodeNames"]
    return client.bind(pod, node)


def test_a_bind_costs_one_additional_write(api: ApiDouble, start: Start) -> None:
    client = start(99)
    assert client.bind(api.put("pods", make_pod("first", 1))) == ""
    pods = [api.put("pods", make_pod(f"p{number}", 1)) for number in range(10)]
    before = len(api.requests)
    for pod in pods:
        assert asked_and_bound(client, pod, "a") == ""
    made = [(method, path.rpartition("/")[2]) for method, path, _body in api.requests[before:] if method != "WATCH"]
    assert sorted(made) == [("POST", "binding")] * 10 + [("PUT", NAME)] * 10, "nothing is read"


def test_five_hundred_pods_at_once_on_fifty_nodes(api: ApiDouble, start: Start) -> None:
    nodes = [f"n{number}" for number in range(50)]
    for name in nodes:
        api.put("nodes", make_node(name, 16))
    assert start().bind(api.put("pods", make_pod("first", 1)), nodes[0]) == ""
    client = start(threads=32)
    pods = [api.put("pods", make_pod(f"p{number}", 1)) for number in range(500)]
    before = len(api.requests)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda job: asked_and_bound(client, pods[job], nodes[job % 50]), range(500)))
    assert answers == [""] * 500
    made = [(method, path.rpartition("/")[2]) for method, path, _body in api.requests[before:] if method != "WATCH"]
    writes = made.count(("PUT", NAME))
    assert made.count(("POST", "binding")) == 500
    assert len(made) == 500 + writes, "the ledger is known from the start, and each pod by its filter"
    assert writes <= 100, "binds that wait share a write, whatever their nodes"
    for name in nodes[1:]:
        eventually(lambda name=name: client.used(name) == [10])


def test_where_there_was_no_ledger_a_nodes_pods_are_read_once(api: ApiDouble, start: Start) -> None:
    for name in ("a", "b"):
        api.put("nodes", make_node(name, 16))
    client = start()
    for number, name in enumerate("aabba"):
        assert client.bind(api.put("pods", make_pod(f"p{number}", 1)), name) == ""
    listed = [
        path
        for method, path, _body in api.requests
        if method == "GET" and "nodeName%3D" in path and "claim" not in path
    ]
    assert len(listed) == 2
    assert len(api.asked("GET", f"/leases/{NAME}$")) == 2, "before the watch, and before the first write"


def test_only_nodes_that_others_have_booked_on_are_read_again(api: ApiDouble, start: Start) -> None:
    for name in ("a", "b", "c"):
        api.put("nodes", make_node(name, 16))
    one, two = start(), start()

    def bind(client: Client, name: str, node: str) -> list[str]:
        """The lists of a node's pods that it takes; afterwards both have seen it."""
        before, pod = len(api.requests), api.put("pods", make_pod(name, 1))
        assert client.bind(pod, node) == ""
        states = [each.extender.state for each in (one, two)]
        eventually(lambda: all(state.bound(pod["metadata"]["uid"]) for state in states))
        listed = [re.search("nodeName%3D([a-z])", path) for _method, path, _body in api.requests[before:]]
        return [found[1] for found in listed if found]

    for number, (client, node) in enumerate(zip((one, one, two, two, one), "abbcc", strict=True)):
        assert set(bind(client, f"p{number}", node)) == {node}
    assert bind(one, "q", "a") == [] and bind(two, "r", "b") == []
    assert set(bind(one, "s", "b")) == {"b"}


def leases() -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"


def test_binds_that_wait_share_a_write(api: ApiDouble, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extender_ledger, "APART_SECONDS", 0.0)
    client = start(99, threads=16)
    assert client.bind(api.put("pods", make_pod("first", 1))) == ""
    pods = [api.put("pods", make_pod(f"p{number}", 1)) for number in range(10)]
    inside, on = threading.Event(), threading.Event()

    def slow(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(f"/{NAME}"):
            api.hooks.clear()
            inside.set()
            assert on.wait(10)

    writes = len(api.asked("PUT", f"/leases/{NAME}$"))
    api.hooks.append(slow)
    ledger = client.extender.ledger
    with ThreadPoolExecutor(10) as pool:
        jobs = [pool.submit(client.bind, pod, "a") for pod in pods]
        assert inside.wait(10)
        eventually(lambda: len(ledger._waiting) + client.extender.state.holds == 10)
        on.set()
        assert [job.result() for job in jobs] == [""] * 10
    assert len(api.asked("PUT", f"/leases/{NAME}$")) == writes + 2
    eventually(lambda: client.used() == [11])


def test_binds_that_share_a_write_share_no_memory(api: ApiDouble, start: Start) -> None:
    client = start(8, 8, threads=16)
    pods = [api.put("pods", make_pod(f"p{number}", 5)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda pod: client.bind(pod), pods))
    assert answers.count("") == 2
    assert all("largest free share" in answer for answer in answers if answer)
    eventually(lambda: client.used() == [5, 5])


# ----------------------------------------------------------------- writes that go wrong


@pytest.mark.parametrize("status", [0, 409, 429, 500, 503])
@pytest.mark.parametrize("done", [False, True])
def test_a_failed_write_is_retried(api: ApiDouble, start: Start, status: int, done: bool) -> None:
    client = start(16)
    for number, (method, path) in enumerate(
        (("POST", leases() + "$"), ("PUT", f"/leases/{NAME}$"), ("GET", f"/leases/{NAME}$"))
    ):
        if method == "GET":
            client.extender.ledger._lease = None
        api.fail(method, path, status, times=2, done=done)
        assert client.bind(api.put("pods", make_pod(f"p{number}", 2))) == ""
    eventually(lambda: client.used() == [6])


@pytest.mark.parametrize(("status", "words"), [(503, "just now"), (422, "injected failure 422")])
def test_a_persistent_write_failure_fails_the_bind_and_books_nothing(
    api: ApiDouble, start: Start, status: int, words: str
) -> None:
    client = start(16)
    api.fail("POST", leases() + "$", status, times=10**6)
    error = client.bind(api.put("pods", make_pod("p", 2)))
    assert words in error and f"{NAMESPACE}/{NAME}" in error
    assert client.used() == [0]
    assert not api.asked("POST", "/binding$")
    api.failures.clear()
    assert client.bind(api.pod("p")) == ""


def test_without_the_right_to_leases_nothing_is_bound_and_it_is_not_ready(api: ApiDouble, start: Start) -> None:
    pod = api.put("pods", make_pod("p", 2))

    def forbid(method: str, path: str) -> None:
        if "/leases" in path:
            raise KubeError(403, "Forbidden", 'leases.coordination.k8s.io is forbidden: User "x" cannot create it')

    api.hooks.append(forbid)
    client = start(16)
    eventually(lambda: b"right to get, create and update Leases" in client.raw("GET", "/readyz")[1])
    error = client.bind(pod)
    assert "right to get, create and update Leases" in error and "forbidden" in error and NAMESPACE in error
    assert not api.asked("POST", "/binding$")
    assert client.used() == [0]
    api.hooks.clear()
    client.extender.ledger.check()
    assert client.raw("GET", "/readyz")[0] == 200
    assert client.bind(pod) == ""


def test_the_permission_check_leaves_no_lease(api: ApiDouble, start: Start) -> None:
    client = start()
    eventually(lambda: client.raw("GET", "/readyz")[0] == 200)
    assert not [key for key in api.objects if key[0] == "leases"]


def test_an_annotation_that_cannot_be_read_is_named(api: ApiDouble, start: Start) -> None:
    metadata = {"name": NAME, "namespace": NAMESPACE, "annotations": {contract.LEDGER: "nonsense"}}
    api.put("leases", {"metadata": metadata, "spec": {}})
    client = start(16)
    pod = api.put("pods", make_pod("p", 2))
    error = client.bind(pod)
    assert f"{NAMESPACE}/{NAME}" in error and contract.LEDGER in error
    assert lease(api)["metadata"]["annotations"][contract.LEDGER] == "nonsense"
    api.change("leases", NAME, NAMESPACE, lambda obj: obj["metadata"].pop("annotations"))
    assert client.bind(pod) == ""


def test_after_a_deleted_lease_other_pods_wait_and_own_bookings_stay(api: ApiDouble, start: Start) -> None:
    client = start(8)
    time = Time(client)
    first, second = api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 3))
    paused = leave(api, client, first)
    api.remove("leases", NAME, NAMESPACE)
    assert "is gone" in client.bind(second)
    time.passed += extender_ledger.STALE_SECONDS + 1
    assert client.bind(second) == ""
    assert {entry.name for entry in booked(api)} == {"p", "q"}, "who made a booking still knows it"
    assert let_go(paused) == ""


def test_without_a_lease_a_node_with_a_recent_booking_is_waited_for(api: ApiDouble, start: Start) -> None:
    there = make_pod("there", 2, "a", 0)
    client = start(8)
    time = Time(client)
    there["metadata"]["annotations"][contract.POD_ASSUME_TIME] = str(client.extender.ledger._now_ms() * 10**6)
    api.put("pods", there)
    pod = api.put("pods", make_pod("p", 2))
    assert "is gone" in client.bind(pod)
    time.passed += extender_ledger.STALE_SECONDS + 1
    assert client.bind(pod) == ""


def test_a_recreated_lease_is_not_mistaken_for_the_old_one(api: ApiDouble, start: Start) -> None:
    """The Lease is deleted, another extender recreates it and books: its writes are counted from the beginning."""
    one, two = start(8), start()
    for number in range(3):
        assert one.bind(api.put("pods", make_pod(f"p{number}", 1))) == ""
    one.extender.pods.stop()
    api.remove("leases", NAME, NAMESPACE)
    time = Time(one, two)
    time.passed += 2 * extender_ledger.FRESH_SECONDS
    assert two.bind(api.put("pods", make_pod("q", 3))) == ""
    assert register(api).count == 1
    assert "InsufficientGPUMemory: node a: largest free share on one card is 2 of 4" in one.bind(
        api.put("pods", make_pod("r", 4)), "a"
    )


def test_a_retry_of_a_bind_that_was_done_reads_the_pod(api: ApiDouble, start: Start) -> None:
    for name in ("a", "b"):
        api.put("nodes", make_node(name, 8))
    client = start()
    client.extender.pods.stop()
    pod = api.put("pods", make_pod("p", 5))
    assert asked_and_bound(client, pod, "a") == ""
    assert "already bound to node a" in asked_and_bound(client, pod, "b"), "the scheduler missed the response"
    assert client.used() == [5], "and no other pod gets its memory"


def test_a_pod_that_changed_since_its_filter_is_read(api: ApiDouble, start: Start) -> None:
    client = start(8)
    old = api.put("pods", make_pod("p", 5))
    assert client.filter(old, "a")["NodeNames"] == ["a"]
    api.change("pods", "p", "default", lambda pod: pod["metadata"].update(annotations={contract.POD_CARD_COUNT: "0"}))
    assert contract.POD_CARD_COUNT in client.bind(old)
    assert client.used() == [0] and "nodeName" not in api.pod("p")["spec"]


@pytest.mark.parametrize("wrong", [{"uid": ""}, {"resourceVersion": None}, {"name": "q"}, {"annotations": ["x"]}])
def test_an_incomplete_pod_is_read_from_the_api(api: ApiDouble, start: Start, wrong: JsonObject) -> None:
    client = start(8)
    pod = api.put("pods", make_pod("p", 5))
    client.extender.binder.asked({**pod, "metadata": {**pod["metadata"], **wrong}})
    assert client.bind(pod) == ""
    assert len(api.asked("GET", "/pods/p$")) == 1


# ----------------------------------------------------------------- two extenders


def test_fault_12_a_booking_of_one_extender_is_respected_by_the_other(api: ApiDouble, start: Start) -> None:
    one, two = start(8), start()
    first, second = api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 5))
    paused = leave(api, one, first)
    assert "InsufficientGPUMemory: node a: largest free share on one card is 3 of 5" in two.bind(second)
    assert two.filter(second, "a")["NodeNames"] == [], "the booking is known now"
    assert let_go(paused) == ""
    eventually(lambda: two.used() == [5] and one.used() == [5])


def test_fault_12_a_bind_of_one_extender_is_known_to_the_other_before_its_watch(api: ApiDouble, start: Start) -> None:
    one, two = start(8), start()
    two.extender.pods.stop()
    first, second = api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 5))
    assert one.bind(first) == ""
    assert two.filter(second, "a")["NodeNames"] == ["a"], "its watch is behind"
    assert "InsufficientGPUMemory: node a: largest free share on one card is 3 of 5" in two.bind(second)
    assert two.bind(api.put("pods", make_pod("r", 3))) == ""


def test_fault_12_a_dead_extenders_booking_is_fenced_and_its_late_bind_refused(api: ApiDouble, start: Start) -> None:
    one, two = start(8), start()
    time = Time(two)
    first, second = api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 5))
    paused = leave(api, one, first)
    assert two.bind(second) != ""
    two.extender.ledger.collect_garbage()
    assert two.bind(second) != "", "the other extender may still be binding it"
    time.passed += extender_ledger.STALE_SECONDS + 1
    two.extender.ledger.collect_garbage()
    assert contract.POD_FENCED in api.pod("p")["metadata"]["annotations"]
    assert two.bind(second) == ""
    assert [entry.name for entry in booked(api)] == ["q"]
    assert "InsufficientGPUMemory: node a: largest free share on one card is 3 of 5" in let_go(paused)
    assert "nodeName" not in api.pod("p")["spec"]
    assert api.pod("q")["spec"]["nodeName"] == "a"


def test_fault_12_a_pod_that_a_dead_extender_was_binding_is_bound_at_once(api: ApiDouble, start: Start) -> None:
    one, two = start(8), start()
    pod = api.put("pods", make_pod("p", 5))
    paused = leave(api, one, pod)
    assert two.bind(pod) == "", "whichever extender was binding it before"
    assert let_go(paused) == "", "it is bound, and to that node"
    eventually(lambda: one.used() == [5] and two.used() == [5])
    assert len([change for change in api.log if change.kind == "pods" and change.after]) == 3, "made, fenced, bound"


def test_fault_12_two_extenders_that_bind_one_pod_come_to_an_end(api: ApiDouble, start: Start) -> None:
    one, two = start(8), start()
    pod = api.put("pods", make_pod("p", 5))
    first = leave(api, one, pod)
    second = leave(api, two, pod)
    # Fenced, it leaves the pod to the other one, which is still binding it.
    assert "another extender is binding the pod" in let_go(first)
    assert let_go(second) == ""
    assert len(api.asked("PATCH", "/pods/p$")) == 1
    eventually(lambda: one.used() == [5] and two.used() == [5])


def test_fault_12_the_same_pod_on_two_nodes(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("b", 8))
    one, two = start(8), start()
    pod = api.put("pods", make_pod("p", 5))
    paused = leave(api, one, pod, "a")
    assert two.bind(pod, "b") == ""
    assert "already bound to node b" in let_go(paused)
    eventually(lambda: one.used() == [0] and one.used("b") == [5])


def test_fault_12_a_restarted_extender_resumes_its_bookings(api: ApiDouble, start: Start) -> None:
    one = start(8)
    pod, other = api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 5))
    paused = leave(api, one, pod)
    again = start()
    assert again.extender.ledger.identity != one.extender.ledger.identity
    assert "3 of 5" in again.bind(other)
    assert again.bind(pod) == ""
    let_go(paused)
    eventually(lambda: again.used() == [5])


def test_a_listed_pod_that_was_deleted_unseen_is_dropped(api: ApiDouble, start: Start) -> None:
    one, two = start(8), start()
    time = Time(two)
    two.extender.pods.stop()
    assert one.bind(api.put("pods", make_pod("p", 5))) == ""
    assert two.bind(api.put("pods", make_pod("q", 2))) == ""
    assert two.used() == [7]
    api.remove("pods", "p", "default")
    two.extender.ledger.collect_garbage()
    assert two.used() == [7], "the watch may still show it"
    time.passed += extender_ledger.UNSEEN_SECONDS + 1
    two.extender.ledger.collect_garbage()
    assert two.used() == [2]


def test_a_completed_booking_is_counted_once(api: ApiDouble, start: Start) -> None:
    one, two = start(8), start()
    time = Time(two)
    paused = leave(api, one, api.put("pods", make_pod("p", 5)))
    assert two.bind(api.put("pods", make_pod("q", 1))) == ""
    assert let_go(paused) == ""
    eventually(lambda: two.used() == [6])
    time.passed += extender_ledger.STALE_SECONDS + 1
    two.extender.ledger.collect_garbage()
    two.extender.ledger.collect_garbage()
    assert two.used() == [6]
    api.remove("pods", "p", "default")
    eventually(lambda: two.used() == [1])
    two.extender.ledger.collect_garbage()
    assert two.used() == [1]
    assert contract.POD_FENCED not in api.pod("q")["metadata"]["annotations"]


# ----------------------------------------------------------------- the fence


def entry_of(pod: JsonObject) -> Entry:
    metadata = pod["metadata"]
    return Entry(metadata["uid"], "default", metadata["name"], "a", ((0, 1),), 0, metadata["resourceVersion"], "e")


def test_binding_status_of_each_state_of_a_pod(api: ApiDouble) -> None:
    pod = api.put("pods", make_pod("p", 5))
    entry = entry_of(pod)
    assert fate(api, entry, fence=False)[0] is BindingStatus.OPEN
    assert not api.asked("PATCH", "")
    found, after = fate(api, entry)
    assert found is BindingStatus.VOID and after["metadata"]["resourceVersion"] != entry.version
    assert fate(api, entry)[0] is BindingStatus.VOID and len(api.asked("PATCH", "")) == 1, "one fence is enough"
    newer = entry_of(api.pod("p"))
    api.change("pods", "p", "default", lambda obj: obj["metadata"].update(deletionTimestamp="now"))
    assert fate(api, newer, fence=False)[0] is BindingStatus.VOID, "who is being deleted can't be bound"
    api.change("pods", "p", "default", lambda obj: obj["spec"].update(nodeName="a"))
    assert fate(api, entry)[0] is BindingStatus.BOUND
    api.change("pods", "p", "default", lambda obj: obj["status"].update(phase="Failed"))
    assert fate(api, entry)[0] is BindingStatus.GONE
    api.remove("pods", "p", "default")
    assert fate(api, entry) == (BindingStatus.GONE, {})
    api.put("pods", make_pod("p", 5))
    assert fate(api, entry)[0] is BindingStatus.GONE, "it is another one of that name"


def test_a_late_fence_finds_the_pod_bound(api: ApiDouble) -> None:
    entry = entry_of(api.put("pods", make_pod("p", 5)))

    def bind(method: str, path: str) -> None:
        if method == "PATCH":
            api.hooks.clear()
            api.change("pods", "p", "default", lambda obj: obj["spec"].update(nodeName="a"))

    api.hooks.append(bind)
    assert fate(api, entry)[0] is BindingStatus.BOUND


def test_an_unknown_binding_status_is_an_error(api: ApiDouble) -> None:
    entry = entry_of(api.put("pods", make_pod("p", 5)))
    api.fail("PATCH", "/pods/p", 503)
    with pytest.raises(KubeError):
        fate(api, entry)
    api.fail("PATCH", "/pods/p", 409, times=10)
    with pytest.raises(KubeError):
        fate(api, entry)
