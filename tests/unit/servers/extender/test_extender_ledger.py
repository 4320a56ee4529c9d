# SPDX-License-Identifier: GPL-3.0-or-later
"""The ledger of bookings: its text, each special case, its cost in requests, and two extenders on one API."""

from __future__ import annotations

import dataclasses
import datetime
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, Start, eventually
from gpushare.api.client import KubeError
from gpushare.extender import bind as extender_bind
from gpushare.extender import ledger as extender_ledger
from gpushare.extender.binding_status import BindingStatus, Entry, binding_status
from gpushare.extender.ledger import NAME
from gpushare.extender.register import LedgerError, Register
from gpushare.http.limits import Limits
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from hypothesis import given
from hypothesis import strategies as st

NAMESPACE = "kube-system"
TEXT = st.text(min_size=1, max_size=20)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extender_bind, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(extender_bind, "SETTLE_SECONDS", 1000.0)
    monkeypatch.setattr(extender_ledger, "WRITE_SECONDS", 1.0)


class Time:
    """Moves the clocks of extenders on, in seconds."""

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


def booked(api: ApiDouble) -> list[str]:
    """The names of the pods in the ledger."""
    return sorted(entry.name for entry in register(api).entries)


def bind_new(api: ApiDouble, client: Client, name: str, units: int = 1, node: str = "a") -> str:
    return client.bind(api.put("pods", make_pod(name, units)), node)


@pytest.fixture
def two(start: Start) -> tuple[Client, Client]:
    """Two extenders, and a node of one card."""
    return start(8), start()


@dataclasses.dataclass
class PausedBind:
    """A bind by an extender that is stopped just before the Binding."""

    _resume: threading.Event
    _answer: Future[str]

    def resume(self) -> str:
        self._resume.set()
        return self._answer.result(20)


@pytest.fixture
def pause(api: ApiDouble) -> Iterator[Callable[..., PausedBind]]:
    pool = ThreadPoolExecutor(4)

    def begin(client: Client, pod: JsonObject, node: str = "a") -> PausedBind:
        reached, resume = api.pause("POST", f"/{pod['metadata']['name']}/binding$")
        answer = pool.submit(client.bind, pod, node)
        assert reached.wait(10)
        return PausedBind(resume, answer)

    yield begin
    pool.shutdown()


Pause = Callable[..., PausedBind]
Two = tuple[Client, Client]
TOO_LITTLE = "InsufficientGPUMemory: node a: largest free share on one card is 3 of 5"


# ----------------------------------------------------------------- its text

CARDS = st.dictionaries(st.integers(0, 99), st.integers(1, 10**6), min_size=1).map(
    lambda units: tuple(sorted(units.items()))
)
ENTRIES = st.lists(
    st.builds(Entry, TEXT, TEXT, TEXT, TEXT, CARDS, st.integers(0, 2**50), TEXT, TEXT),
    unique_by=lambda entry: entry.uid,
)
COUNTS = st.integers(0, 2**40)


@given(st.builds(Register, COUNTS, st.none() | COUNTS, ENTRIES.map(tuple)))
def test_a_register_round_trips(register: Register) -> None:
    assert Register.from_text(register.to_text()) == register


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        assert isinstance(Register.from_text(text), Register)
    except LedgerError as error:
        assert contract.LEDGER in str(error)


ROW = {"uid": "u", "namespace": "n", "name": "p", "node": "a", "cards": {"0": 4}, "at": 1, "version": "7", "by": "e"}
VALUE = {"count": 2, "pods": 7, "bookings": [ROW]}


def without(value: JsonObject, key: str) -> JsonObject:
    return {name: one for name, one in value.items() if name != key}


BAD_ROWS: list[Any] = [
    [ROW, ROW],
    *([ROW | {"cards": cards}] for cards in ({}, {"0": 0}, {"0": "4"}, {"x": 4}, 4)),
    *([ROW | change] for change in ({"uid": ""}, {"node": ""}, {"version": 7})),
    [without(ROW, "by")],
    {"a": 1},
]
BAD_VALUES = [{"pods": "7"}, {"pods": -1}, {"count": "2"}, *({"bookings": rows} for rows in BAD_ROWS)]


@pytest.mark.parametrize("value", [*(VALUE | bad for bad in BAD_VALUES), without(VALUE, "bookings"), [ROW], "x"])
def test_an_invalid_register_is_refused(value: Any) -> None:
    assert Register.from_text(json.dumps(VALUE)).entries[0].node == "a"
    with pytest.raises(LedgerError):
        Register.from_text(json.dumps(value))


# ----------------------------------------------------------------- one extender


def test_nothing_is_bound_that_is_not_booked_before(api: ApiDouble, start: Start, pause: Pause) -> None:
    pod = api.put("pods", make_pod("p", 5))
    client = start(16, 16)
    paused, identity = pause(client, pod), client.extender.ledger.identity
    (entry,) = register(api).entries
    assert (entry.uid, entry.version) == (pod["metadata"]["uid"], pod["metadata"]["resourceVersion"])
    assert (entry.namespace, entry.name, entry.node, entry.cards) == ("default", "p", "a", ((0, 5),))
    assert entry.by == lease(api)["spec"]["holderIdentity"] == identity
    assert datetime.datetime.fromisoformat(lease(api)["spec"]["renewTime"]).tzinfo is not None
    assert paused.resume() == ""


def test_foreign_content_of_the_lease_stays(api: ApiDouble, start: Start) -> None:
    metadata = {"name": NAME, "namespace": NAMESPACE, "labels": {"l": "1"}, "annotations": {"mine": "stays"}}
    api.put("leases", {"metadata": metadata, "spec": {}})
    client = start(16)
    for name in ("p", "q"):
        assert bind_new(api, client, name) == ""
    after = lease(api)["metadata"]
    assert (after["labels"], after["annotations"]["mine"]) == ({"l": "1"}, "stays")


@pytest.mark.parametrize("status", [200, 409, 0])
def test_finished_entries_are_removed(api: ApiDouble, start: Start, pause: Pause, status: int) -> None:
    """Otherwise another extender would check each of them."""
    client = start(16)
    ledger, time = client.extender.ledger, Time(client)
    assert bind_new(api, client, "p", 5) == ""
    paused = pause(client, api.put("pods", make_pod("q", 5)))
    ledger.collect_garbage()
    assert booked(api) == ["q"], "the next booking removes finished ones"
    time.passed += extender_ledger.REST_SECONDS + 1
    if status != 200:
        api.fail("PUT", f"/leases/{NAME}$", status)
    writes = len(api.asked("PUT", f"/leases/{NAME}$"))
    assert paused.resume() == ""
    eventually(lambda: not client.extender.state.holds)
    for _time in range(3):
        ledger.collect_garbage()
    assert len(api.asked("PUT", f"/leases/{NAME}$")) == writes + 1, "only one write"
    assert status != 200 or booked(api) == []
    eventually(lambda: not client.extender.state.holds)
    assert bind_new(api, client, "r", 6) == ""
    assert booked(api) == ["r"]
    eventually(lambda: client.used() == [16])


def test_stop_removes_finished_entries(api: ApiDouble, start: Start) -> None:
    """Otherwise the next extender holds their memory until it has checked them, some seconds later."""
    client = start(16)
    assert bind_new(api, client, "one", 4) == ""
    assert booked(api) == ["one"]
    client.extender.stop()
    assert booked(api) == []


def requests(api: ApiDouble, since: int) -> list[tuple[str, str]]:
    """Methods and last parts of the paths, without watches."""
    return [(method, path.rpartition("/")[2]) for method, path, _body in api.requests[since:] if method != "WATCH"]


def test_a_bind_costs_one_additional_write(api: ApiDouble, start: Start) -> None:
    client = start(99)
    assert bind_new(api, client, "first") == ""
    pods = [api.put("pods", make_pod(f"p{number}", 1)) for number in range(10)]
    before = len(api.requests)
    for pod in pods:
        assert client.filter_and_bind(pod) == ""
    assert sorted(requests(api, before)) == [("POST", "binding")] * 10 + [("PUT", NAME)] * 10, "nothing is read"


def test_five_hundred_pods_at_once_on_fifty_nodes(api: ApiDouble, start: Start) -> None:
    nodes = [f"n{number}" for number in range(50)]
    for name in nodes:
        api.put("nodes", make_node(name, 16))
    assert bind_new(api, start(), "first", node=nodes[0]) == ""
    client = start(limits=Limits(connections=32))
    pods = [api.put("pods", make_pod(f"p{number}", 1)) for number in range(500)]
    before = len(api.requests)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda job: client.filter_and_bind(pods[job], nodes[job % 50]), range(500)))
    assert answers == [""] * 500
    made = requests(api, before)
    writes = made.count(("PUT", NAME))
    assert made.count(("POST", "binding")) == 500
    assert len(made) == 500 + writes + 1, "the ledger is read once, and each pod is known by its filter"
    assert writes <= 100, "binds that wait share a write, whatever their nodes"
    for name in nodes[1:]:
        eventually(lambda name=name: client.used(name) == [10])


def lists(api: ApiDouble, since: int = 0) -> int:
    """How often bound pods were listed, in any way."""
    return sum("/pods?fieldSelector=" in path for method, path, _body in api.requests[since:] if method == "GET")


def test_no_bind_lists_pods_whoever_booked_before(
    api: ApiDouble, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of nodes, and also by an extender that takes over."""
    monkeypatch.setattr(extender_ledger, "APART_SECONDS", 0.0)
    nodes = [f"n{number}" for number in range(60)]
    for name in nodes:
        api.put("nodes", make_node(name, 16))
    one = start(16)
    assert bind_new(api, one, "first") == ""
    other, before = start(), len(api.requests)
    for number, name in enumerate(nodes):
        client = one if number % 7 else other
        assert bind_new(api, client, f"p{number}", 9, name) == ""
    assert lists(api, before) == 0
    assert "largest free share" in bind_new(api, other, "q", 9, "n1")


def test_binds_that_share_a_write_share_no_memory(api: ApiDouble, start: Start) -> None:
    client = start(8, 8, limits=Limits(connections=16))
    pods = [api.put("pods", make_pod(f"p{number}", 5)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client.bind, pods))
    assert answers.count("") == 2
    assert all("largest free share" in answer for answer in answers if answer)
    eventually(lambda: client.used() == [5, 5])


# ----------------------------------------------------------------- failed writes

CREATE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases$"


@pytest.mark.parametrize("status", [0, 409, 429, 500, 503])
@pytest.mark.parametrize("done", [False, True])
def test_a_failed_write_is_retried(api: ApiDouble, start: Start, status: int, done: bool) -> None:
    client = start(16)
    for number, (method, path) in enumerate((("POST", CREATE), *((verb, f"/{NAME}$") for verb in ("PUT", "GET")))):
        if method == "GET":
            client.extender.ledger._lease = None
        api.fail(method, path, status, times=2, done=done)
        assert bind_new(api, client, f"p{number}", 2) == ""
    eventually(lambda: client.used() == [6])


@pytest.mark.parametrize(("status", "text"), [(503, "just now"), (422, "injected failure 422")])
def test_a_persistent_write_failure_fails_the_bind(api: ApiDouble, start: Start, status: int, text: str) -> None:
    client = start(16)
    api.fail("POST", CREATE, status, times=10**6)
    error = bind_new(api, client, "p", 2)
    assert text in error and f"{NAMESPACE}/{NAME}" in error
    assert client.used() == [0]
    assert not api.asked("POST", "/binding$")
    api.failures.clear()
    assert client.bind(api.pod("p")) == ""


def test_without_the_right_to_leases_nothing_is_bound_and_it_is_not_ready(api: ApiDouble, start: Start) -> None:
    def forbid(method: str, path: str) -> None:
        if "/leases" in path:
            raise KubeError(403, "Forbidden", 'leases.coordination.k8s.io is forbidden: User "x" cannot create it')

    api.hooks.append(forbid)
    client = start(16)
    eventually(lambda: b"right to get, create and update Leases" in client.raw("GET", "/readyz")[1])
    error = bind_new(api, client, "p", 2)
    assert "right to get, create and update Leases" in error and "forbidden" in error and NAMESPACE in error
    assert not api.asked("POST", "/binding$")
    assert client.used() == [0]
    api.hooks.clear()
    client.extender.ledger.check()
    assert client.raw("GET", "/readyz")[0] == 200
    assert not [key for key in api.objects if key[0] == "leases"], "the check itself creates none"
    assert client.bind(api.pod("p")) == ""


def test_an_annotation_that_cannot_be_read_is_named(api: ApiDouble, start: Start) -> None:
    metadata = {"name": NAME, "namespace": NAMESPACE, "annotations": {contract.LEDGER: "nonsense"}}
    api.put("leases", {"metadata": metadata, "spec": {}})
    client = start(16)
    error = bind_new(api, client, "p", 2)
    assert f"{NAMESPACE}/{NAME}" in error and contract.LEDGER in error
    assert lease(api)["metadata"]["annotations"][contract.LEDGER] == "nonsense"
    api.change("leases", NAME, NAMESPACE, lambda obj: obj["metadata"].pop("annotations"))
    assert client.bind(api.pod("p")) == ""


def test_after_a_deleted_lease_own_bookings_stay(api: ApiDouble, start: Start, pause: Pause) -> None:
    client = start(8)
    time = Time(client)
    paused = pause(client, api.put("pods", make_pod("p", 5)))
    api.remove("leases", NAME, NAMESPACE)
    assert "is gone" in bind_new(api, client, "q", 3)
    time.passed += extender_ledger.STALE_SECONDS + 1
    assert client.bind(api.pod("q")) == ""
    assert booked(api) == ["p", "q"], "the extender that made a booking still has it"
    assert paused.resume() == ""


def test_the_first_booking_without_a_lease_follows_a_list(api: ApiDouble, two: Two) -> None:
    """Nothing says how far the watch must be."""
    one, other = two
    assert [bind_new(api, one, "p", 2), bind_new(api, other, "q", 2)] == ["", ""]
    assert lists(api) == 3, "one for each start, and the one of the first bind"
    assert register(api).pods == int(api.pod("p")["metadata"]["resourceVersion"])


def test_a_version_that_the_pods_never_reach_is_replaced_after_a_list(
    api: ApiDouble, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods' etcd was restored to an older state, or the Lease is that of another cluster."""
    monkeypatch.setattr(extender_ledger, "BEHIND_SECONDS", 0.1)
    value = {"count": 7, "pods": 10**9, "bookings": []}
    metadata = {"name": NAME, "namespace": NAMESPACE, "annotations": {contract.LEDGER: json.dumps(value)}}
    api.put("leases", {"metadata": metadata, "spec": {}})
    for number, client in enumerate(two):
        before = len(api.requests)
        assert bind_new(api, client, f"p{number}", 5).startswith(TOO_LITTLE if number else "")
        assert lists(api, before) == 1 - number
    assert (register(api).count, register(api).pods) == (8, 0)


def test_without_a_lease_a_recent_booking_is_waited_for(api: ApiDouble, start: Start) -> None:
    there = make_pod("there", 2, "a", 0)
    client = start(8)
    time = Time(client)
    there["metadata"]["annotations"][contract.POD_ASSUME_TIME] = str(client.extender.ledger._now_ms() * 10**6)
    api.put("pods", there)
    assert "is gone" in bind_new(api, client, "p", 2)
    time.passed += extender_ledger.STALE_SECONDS + 1
    assert client.bind(api.pod("p")) == ""


def test_a_recreated_lease_is_not_mistaken_for_the_old_one(api: ApiDouble, two: Two) -> None:
    """The Lease is deleted, another extender recreates it and books: its writes are counted from the beginning."""
    one, other = two
    for number in range(3):
        assert bind_new(api, one, f"p{number}") == ""
    eventually(lambda: one.extender.pods.delivered == other.extender.pods.delivered == api.version)
    one.extender.pods.stop()
    api.remove("leases", NAME, NAMESPACE)
    Time(*two).passed += 2 * extender_ledger.FRESH_SECONDS
    assert bind_new(api, other, "q", 3) == ""
    assert register(api).count == 1
    assert "largest free share on one card is 2 of 4" in bind_new(api, one, "r", 4)


@pytest.mark.parametrize("others", [0, 60 << 10])
def test_a_full_lease_refuses_what_it_cannot_hold(
    api: ApiDouble, start: Start, pause: Pause, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """The API server would refuse every write of a larger one."""
    monkeypatch.setattr(extender_ledger, "MAX_BYTES", others + 480)
    annotations = {"mine": "x" * (others - len("mine"))} if others else {}
    api.put("leases", {"metadata": {"name": NAME, "namespace": NAMESPACE, "annotations": annotations}, "spec": {}})
    client = start(99)
    paused = [pause(client, api.put("pods", make_pod(name, 1))) for name in ("p", "q")]
    error = bind_new(api, client, "r")
    assert error.startswith("LedgerFull: ") and "2 binds are in progress" in error
    assert [one.resume() for one in paused] == ["", ""]
    eventually(lambda: client.used() == [2])
    assert client.bind(api.pod("r")) == "", "the others' bookings are removed by this write"
    written = [body["metadata"]["annotations"] for body in api.asked("PUT", f"/leases/{NAME}$")]
    assert max(sum(len(key + value) for key, value in one.items()) for one in written) <= others + 480


def test_a_retry_of_a_bind_that_was_done_reads_the_pod(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("b", 8))
    client = start(8)
    assert bind_new(api, client, "first") == ""
    eventually(lambda: not client.extender.state.holds)
    client.extender.pods.stop()
    pod = api.put("pods", make_pod("p", 5))
    assert client.filter_and_bind(pod) == ""
    assert "already bound to node a" in client.filter_and_bind(pod, "b"), "the scheduler missed the response"
    assert client.used() == [6], "and no other pod gets its memory"


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
    client.extender.binder.keep_filtered({**pod, "metadata": {**pod["metadata"], **wrong}})
    assert client.bind(pod) == ""
    assert len(api.asked("GET", "/pods/p$")) == 1


# ----------------------------------------------------------------- two extenders


@pytest.fixture
def pods(api: ApiDouble) -> tuple[JsonObject, JsonObject]:
    """Two pods, of which the card can hold one."""
    return api.put("pods", make_pod("p", 5)), api.put("pods", make_pod("q", 5))


Pods = tuple[JsonObject, JsonObject]


def test_fault_12_a_booking_of_one_extender_is_respected_by_the_other(two: Two, pods: Pods, pause: Pause) -> None:
    one, other = two
    assert one.extender.ledger.identity != other.extender.ledger.identity
    paused = pause(one, pods[0])
    assert TOO_LITTLE in other.bind(pods[1])
    other.extender.ledger.collect_garbage()
    assert other.filter(pods[1], "a")["NodeNames"] == [], "the booking is known, and may still take effect"
    assert paused.resume() == ""
    eventually(lambda: other.used() == one.used() == [5])


def test_fault_12_a_bind_of_another_extender_is_waited_for(
    api: ApiDouble, two: Two, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BEHIND_SECONDS", "LIST_SECONDS"):
        monkeypatch.setattr(extender_ledger, name, 0.1)
    one, other = two
    assert bind_new(api, other, "r") == ""
    other.extender.pods.stop()
    assert one.bind(pods[0]) == ""
    eventually(lambda: one.used() == [6])
    assert bind_new(api, one, "s") == "", "this write removes the booking before"
    assert other.filter(pods[1], "a")["NodeNames"] == ["a"], "its watch is late"
    assert "all pods must be listed" in other.bind(pods[1])
    other.extender.pods._stopped.clear()
    other.extender.pods.start()
    eventually(lambda: "InsufficientGPUMemory: " in other.bind(pods[1]))


def test_fault_12_a_pod_of_a_dead_extender_is_bound_at_once(api: ApiDouble, two: Two, pods: Pods, pause: Pause) -> None:
    one, other = two
    paused = pause(one, pods[0])
    assert other.bind(pods[0]) == "", "whichever extender was binding it before"
    assert paused.resume() == "", "it is bound, and to that node"
    eventually(lambda: one.used() == other.used() == [5])
    changes = [one.after for one in api.log if one.kind == "pods" and one.after]
    assert [pod["metadata"]["name"] for pod in changes].count("p") == 3, "created, fenced, bound"


def test_fault_12_two_extenders_bind_one_pod(api: ApiDouble, two: Two, pods: Pods, pause: Pause) -> None:
    one, other = two
    first, second = pause(one, pods[0]), pause(other, pods[0])
    # Fenced, it leaves the pod to the other one, which is still binding it.
    assert "another extender is binding the pod" in first.resume()
    assert second.resume() == ""
    assert len(api.asked("PATCH", "/pods/p/status$")) == 1
    eventually(lambda: one.used() == other.used() == [5])


def test_fault_12_the_same_pod_on_two_nodes(api: ApiDouble, start: Start, pods: Pods, pause: Pause) -> None:
    api.put("nodes", make_node("b", 8))
    one, other = start(8), start()
    paused = pause(one, pods[0])
    assert other.bind(pods[0], "b") == ""
    assert "already bound to node b" in paused.resume()
    eventually(lambda: one.used() == [0] and one.used("b") == [5])


# ----------------------------------------------------------------- the fence


def entry_of(pod: JsonObject) -> Entry:
    metadata = pod["metadata"]
    return Entry(metadata["uid"], "default", metadata["name"], "a", ((0, 1),), 0, metadata["resourceVersion"], "e")


def test_binding_status_of_each_state_of_a_pod(api: ApiDouble) -> None:
    pod = api.put("pods", make_pod("p", 5))
    entry = entry_of(pod)
    assert binding_status(api, entry, fence=False)[0] is BindingStatus.OPEN
    assert not api.asked("PATCH", "")
    found, after = binding_status(api, entry)
    assert found is BindingStatus.VOID and after["metadata"]["resourceVersion"] != entry.version
    assert binding_status(api, entry)[0] is BindingStatus.VOID and len(api.asked("PATCH", "")) == 1, (
        "one fence is enough"
    )
    newer = entry_of(api.pod("p"))
    api.change("pods", "p", "default", lambda obj: obj["metadata"].update(deletionTimestamp="now"))
    assert binding_status(api, newer, fence=False)[0] is BindingStatus.VOID, "a terminating pod can't be bound"
    api.change("pods", "p", "default", lambda obj: obj["spec"].update(nodeName="a"))
    assert binding_status(api, entry)[0] is BindingStatus.BOUND
    api.change("pods", "p", "default", lambda obj: obj["status"].update(phase="Failed"))
    assert binding_status(api, entry)[0] is BindingStatus.GONE
    api.remove("pods", "p", "default")
    assert binding_status(api, entry) == (BindingStatus.GONE, {})
    api.put("pods", make_pod("p", 5))
    assert binding_status(api, entry)[0] is BindingStatus.GONE, "it is another pod of that name"


def test_a_late_fence_finds_the_pod_bound(api: ApiDouble) -> None:
    entry = entry_of(api.put("pods", make_pod("p", 5)))
    api.before("PATCH", "", lambda: api.change("pods", "p", "default", lambda pod: pod["spec"].update(nodeName="a")))
    assert binding_status(api, entry)[0] is BindingStatus.BOUND


def test_an_unknown_binding_status_is_an_error(api: ApiDouble) -> None:
    entry = entry_of(api.put("pods", make_pod("p", 5)))
    api.fail("PATCH", "/pods/p", 503)
    with pytest.raises(KubeError):
        binding_status(api, entry)
    api.fail("PATCH", "/pods/p", 409, times=10)
    with pytest.raises(KubeError):
        binding_status(api, entry)


@pytest.mark.parametrize("decided_at", [0, 10**15], ids=["in the past", "in the future"])
def test_another_machines_clock_makes_no_booking_stale(start: Start, decided_at: int) -> None:
    client = start(8)
    time, ledger = Time(client), client.extender.ledger
    entry = Entry("u", "default", "p", "a", ((0, 1),), decided_at, "1", "another")
    ledger._seen[entry] = ledger._clock()
    assert not ledger._stale(entry)
    time.passed += extender_ledger.STALE_SECONDS + 1
    assert ledger._stale(entry)
