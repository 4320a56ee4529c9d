# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods of a higher priority get their memory, and no pod is evicted without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, Scheduler, Start, eventually
from gpushare.extender.preemption import POSTPONEMENTS
from gpushare.extender.state import PodRow
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject


def uid(pod: JsonObject) -> str:
    return str(pod["metadata"]["uid"])


def preempt(client: Client, pod: JsonObject, offered: dict[str, list[JsonObject]], violations: int = 0) -> Any:
    """Send kube-scheduler's request: its victims by node."""
    victims = {
        node: {"Pods": [{"UID": uid(one)} for one in pods], "NumPDBViolations": violations}
        for node, pods in offered.items()
    }
    return answer_to(client, {"Pod": pod, "NodeNameToMetaVictims": victims})


def answer_to(client: Client, body: JsonObject) -> Any:
    status, value = client.json("POST", "/gpushare-scheduler/preempt", body)
    assert status == 200
    return value["NodeNameToMetaVictims"]


def names(api: ApiDouble, answer: Any) -> dict[str, list[str]]:
    """The names of the victims by node."""
    by_uid = {uid(pod): pod["metadata"]["name"] for pod in api.pods()}
    return {node: [by_uid[pod["UID"]] for pod in victims["Pods"]] for node, victims in answer.items()}


@pytest.fixture
def quiet(start: Start) -> Callable[..., Scheduler]:
    """Start an extender whose preemption runs only on the test's tick."""
    return lambda *sizes, **options: Scheduler(start(*sizes, **options), enabled=options.get("preemption", True))


Quiet = Callable[..., Scheduler]


def add(api: ApiDouble, name: str, units: int, *where: Any, priority: int = 0, app: str = "") -> JsonObject:
    """Create a pod: its node and card follow its units where it is bound."""
    pod = make_pod(name, units, *where, priority=priority)
    if app:
        pod["metadata"]["labels"] = {"app": app}
    return api.put("pods", pod)


def add_high(api: ApiDouble, units: int) -> JsonObject:
    return add(api, "high", units, priority=10)


def terminating(api: ApiDouble) -> set[str]:
    return {pod["metadata"]["name"] for pod in api.pods() if contract.terminating(pod)}


def terminate(api: ApiDouble, name: str) -> None:
    api.change("pods", name, "default", lambda pod: pod["metadata"].update(deletionTimestamp="x"))


def end(api: ApiDouble, name: str) -> None:
    api.remove("pods", name, "default")


# ----------------------------------------------------------------- requests of kube-scheduler


def test_victims_are_chosen_by_card(api: ApiDouble, start: Start) -> None:
    """The scheduler would evict one pod of each card, by the total; both of one card must go."""
    pods = {
        name: add(api, name, 8, "a", card, priority=priority)
        for name, card, priority in (("x", 0, 1), ("y", 0, 2), ("z", 1, 3), ("w", 1, 4))
    }
    answer = preempt(start(16, 16), add_high(api, 16), {"a": [pods["w"], pods["x"]]})
    assert names(api, answer) == {"a": ["y", "x"]}
    assert answer["a"]["NumPDBViolations"] == 0
    assert terminating(api) == set(), "kube-scheduler evicts them"


def test_victims_chosen_for_other_resources_stay(api: ApiDouble, start: Start) -> None:
    card, other = add(api, "card", 8, "a", 0, priority=1), add(api, "other", 8, "a", 1, priority=4)
    plain = add(api, "plain", 0, "a")
    client, high = start(16, 16), add_high(api, 16)
    # 16 of 32 are free: evicting one of the two is enough for the total, so the other one has another reason.
    victims = names(api, preempt(client, high, {"a": [other, card, plain]}))["a"]
    assert victims[0] == "other" and set(victims) == {"other", "card", "plain"}
    # A pod without GPU memory is unknown here, so it stays a victim.
    add(api, "third", 16, "a", 1, priority=3)
    eventually(lambda: client.used() == [8, 24])
    assert names(api, preempt(client, high, {"a": [plain]})) == {"a": ["card", "plain"]}


def test_nodes_where_no_eviction_helps_are_dropped(api: ApiDouble, start: Start) -> None:
    for node, sizes in (("small", (8, 8)), ("firm", (16,)), ("good", (16,))):
        api.put("nodes", make_node(node, *sizes))
    small, good = add(api, "s", 8, "small", 0), add(api, "g", 16, "good", 0)
    firm = [add(api, f"f{number}", 8, "firm", 0, priority=10 * number) for number in range(2)]
    offered = {"small": [small], "firm": firm[:1], "good": [good], "who": [good]}
    assert names(api, preempt(start(), add_high(api, 16), offered)) == {"good": ["g"]}


def test_disruption_budgets_are_queried_and_counted(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("b", 16))
    guarded, only = add(api, "guarded", 16, "a", 0, app="web"), add(api, "only", 16, "b", 0, app="web")
    add(api, "free", 16, "a", 1)
    api.budgets["web"] = 0
    answer = preempt(start(16, 16), add_high(api, 16), {"a": [guarded], "b": [only]}, violations=1)
    assert names(api, answer) == {"a": ["free"], "b": ["only"]}
    assert {node: victims["NumPDBViolations"] for node, victims in answer.items()} == {"a": 0, "b": 1}
    assert terminating(api) == set()


def test_whole_pods_are_accepted_as_victims(api: ApiDouble, start: Start) -> None:
    victims = {"a": {"Pods": [add(api, "v", 16, "a", 0)], "NumPDBViolations": 0}}
    body = {"Pod": add_high(api, 16), "NodeNameToVictims": victims}
    assert names(api, answer_to(start(16), body)) == {"a": ["v"]}


def test_terminating_pods_are_waited_for(api: ApiDouble, start: Start) -> None:
    add(api, "ending", 16, "a", 0)
    terminate(api, "ending")
    other = add(api, "other", 16, "a", 1)
    client = start(16, 16)
    assert preempt(client, add_high(api, 16), {"a": [other]}) == {}
    assert [claim.cards for claim in client.extender.state.claims()] == [((0, 16),)]


def test_memory_freed_by_kube_scheduler_is_claimed_for_its_pod(api: ApiDouble, start: Start) -> None:
    victim = add(api, "v", 16, "a", 0)
    client = start(16)
    high, low = add_high(api, 12), add(api, "low", 8, priority=5)
    preempt(client, high, {"a": [victim]})
    end(api, "v")
    eventually(client.extender.state.claims)
    assert client.filter(low, "a")["FailedNodes"] == {
        "a": "InsufficientGPUMemory: largest free share on one card is 4 of 8 GiB"
    }
    assert "4 of 8 GiB" in client.bind(low), "a filter of another extender may have passed it"
    assert client.filter_and_bind(high) == ""
    # The booking counts at once, the claim ends with the watch's event.
    eventually(lambda: client.extender.state.claims() == [])
    assert client.used() == [12]


def test_preemption_can_be_disabled(api: ApiDouble, quiet: Quiet) -> None:
    victim = add(api, "v", 9, "a", 0)
    add(api, "w", 9, "a", 1)
    scheduler, high = quiet(16, 16, preemption=False), add_high(api, 14)
    assert names(api, preempt(scheduler.client, high, {"a": [victim]}, violations=3)) == {"a": ["v"]}
    scheduler.refuse(high)
    assert terminating(api) == set()


def test_an_invalid_annotation_evicts_no_pod(api: ApiDouble, start: Start) -> None:
    victim = add(api, "v", 16, "a", 0)
    high = make_pod("high", 16, priority=10)
    high["metadata"]["annotations"] = {contract.POD_CARD_COUNT: "3"}
    assert preempt(start(16), api.put("pods", high), {"a": [victim]}) == {}


def test_preemption_before_the_first_list_is_an_error(api: ApiDouble, start: Start) -> None:
    api.fail("GET", r"/pods\?", 500, times=10**6)
    client = start(ready=False)
    body = {"Pod": make_pod("p", 1), "NodeNameToMetaVictims": {}}
    assert client.json("POST", "/gpushare-scheduler/preempt", body)[0] == 503
    api.failures.clear()


# ----------------------------------------------------------------- the extender's own preemption


@pytest.fixture
def fragmented(api: ApiDouble, quiet: Quiet) -> Scheduler:
    """Two cards of 16 with 7 free each: 14 units are free, and no card has 10. Pod x has the lowest priority."""
    for name, card, priority in (("x", 0, 1), ("y", 1, 2)):
        add(api, name, 9, "a", card, priority=priority, app="web")
    return quiet(16, 16)


def test_the_extender_evicts_where_the_total_fits_and_no_card_does(api: ApiDouble, fragmented: Scheduler) -> None:
    client, high = fragmented.client, add_high(api, 10)
    assert fragmented.filter(high) == []
    fragmented.tick(0)
    assert terminating(api) == set(), "kube-scheduler comes first"
    fragmented.tick()
    assert terminating(api) == {"x"}
    evictions = [body for body in api.asked("POST", "/eviction$") if not body["deleteOptions"].get("dryRun")]
    assert [body["deleteOptions"]["preconditions"]["uid"] for body in evictions] == [uid(api.pod("x"))]
    eventually(lambda: len(api.asked("POST", "/events$")) == 2)
    events = {one["reason"]: one for one in api.asked("POST", "/events$")}
    assert events["Preempted"]["involvedObject"]["name"] == "x"
    assert "default/high" in events["Preempted"]["message"]
    assert events["GPUMemoryPreempting"]["involvedObject"]["name"] == "high"
    assert events["GPUMemoryPreempting"]["message"] == "evicted for GPU memory of card 0 of node a: default/x"
    # While x terminates, and afterwards, no other pod of the same or a lower priority gets the card.
    low, same = add(api, "low", 7), add(api, "same", 14, priority=10)
    eventually(lambda: fragmented.filter(low) == ["a"])
    for _again in range(3):
        fragmented.refuse(high)
    assert terminating(api) == {"x"}, "never twice while the victims terminate"
    end(api, "x")
    eventually(lambda: client.used()[0] == 0)
    assert client.bind(low) == ""
    assert api.pod("low")["metadata"]["annotations"][contract.POD_INDEX] == "1"
    assert fragmented.filter(same) == []
    assert client.bind(high) == ""
    assert api.pod("high")["metadata"]["annotations"][contract.POD_INDEX] == "0"
    eventually(lambda: fragmented.claims() == [])


@pytest.mark.parametrize("pods", [None, []])
def test_a_candidate_without_victims_gets_those_of_its_card(
    api: ApiDouble, fragmented: Scheduler, pods: list[JsonObject] | None
) -> None:
    """As kube-scheduler 1.38 asks where the total is enough; a node that the extender doesn't know is left out."""
    high = add_high(api, 10)
    assert fragmented.filter(high) == []
    offered = {node: {"pods": pods, "numPDBViolations": 0} for node in ("a", "unknown")}
    answer = answer_to(fragmented.client, {"pod": high, "nodeNameToMetaVictims": offered})
    assert names(api, answer) == {"a": ["x"]}
    fragmented.tick()
    assert terminating(api) == set(), "kube-scheduler evicts it"


EAGER = ("eager-0", "eager-1")


@pytest.fixture
def crowded(api: ApiDouble, quiet: Quiet) -> Scheduler:
    """Card 1 is the cheaper one to free, once two small pods that are being bound there can be evicted."""
    add(api, "stays", 10, "a", 0, priority=5)
    add(api, "goes", 9, "a", 1, priority=1)
    scheduler = quiet(16, 16)
    for name in EAGER:
        row = PodRow(f"uid-{name}", "default", name, "a", 3, ((1, 3),), 1)
        assert scheduler.state.reserve(row.uid, "a", lambda _view, row=row: row, 1).row == row
    return scheduler


def test_pending_bookings_are_waited_for_if_that_is_cheaper(api: ApiDouble, crowded: Scheduler) -> None:
    assert crowded.filter(add_high(api, 12)) == []
    for _tick in range(5):
        crowded.tick()
        assert terminating(api) == set()
    for name in EAGER:
        add(api, name, 3, "a", 1, priority=1)
        crowded.state.release(f"uid-{name}")
    eventually(lambda: crowded.client.used() == [10, 15])
    crowded.tick()
    assert "stays" not in terminating(api) and "goes" in terminating(api)


def test_the_wait_for_pending_bookings_is_limited(api: ApiDouble, crowded: Scheduler) -> None:
    assert crowded.filter(add_high(api, 12)) == []
    for _tick in range(POSTPONEMENTS + 2):
        crowded.tick()
    assert terminating(api) == {"stays"}


def test_pending_bookings_that_change_no_victim_are_not_waited_for(api: ApiDouble, crowded: Scheduler) -> None:
    crowded.state.release(f"uid-{EAGER[1]}")
    crowded.refuse(add_high(api, 12))
    # Even without the pending booking the card has enough free memory.
    assert terminating(api) == {"goes"}


def test_kube_schedulers_preemption_waits_for_pending_bookings_too(api: ApiDouble, crowded: Scheduler) -> None:
    assert preempt(crowded.client, add_high(api, 12), {"a": [api.pod("goes")]}) == {}
    # The extender retries without a further request.
    for name in EAGER:
        crowded.state.release(f"uid-{name}")
    crowded.tick()
    assert terminating(api) == {"goes"}


def test_the_wait_of_kube_schedulers_preemption_is_limited(api: ApiDouble, crowded: Scheduler) -> None:
    high, offered = add_high(api, 12), {"a": [api.pod("goes")]}
    for _request in range(POSTPONEMENTS):
        assert preempt(crowded.client, high, offered) == {}
    assert names(api, preempt(crowded.client, high, offered)) == {"a": ["stays"]}


def test_the_preemption_thread_evicts_without_a_tick(api: ApiDouble, start: Start) -> None:
    for card in (0, 1):
        add(api, "xy"[card], 9, "a", card, priority=card)
    client = start(16, 16)
    client.filter(add_high(api, 10), "a")
    eventually(lambda: terminating(api) == {"x"})
    assert client.metric('gpushare_extender_evictions_total{result="evicted"}') == 1


@pytest.mark.parametrize(
    ("priority", "policy", "evicts"), [(10, None, True), (10, "Never", False), (1, None, False), (0, None, False)]
)
def test_priority_and_policy_allow_preemption(
    api: ApiDouble, fragmented: Scheduler, priority: int, policy: str | None, evicts: bool
) -> None:
    high = make_pod("high", 10, priority=priority)
    if policy:
        high["spec"]["preemptionPolicy"] = policy
    fragmented.refuse(api.put("pods", high))
    assert terminating(api) == ({"x"} if evicts else set())


@pytest.mark.parametrize("change", ["bound", "replaced", "deleted"])
def test_a_pod_bound_or_deleted_meanwhile_evicts_no_pod(api: ApiDouble, fragmented: Scheduler, change: str) -> None:
    assert fragmented.filter(add_high(api, 10)) == []
    if change == "bound":
        api.change("pods", "high", "default", lambda pod: pod["spec"].update(nodeName="b"))
    else:
        end(api, "high")
        if change == "replaced":
            add_high(api, 10)
    fragmented.tick(60)
    assert terminating(api) == set()


def after_read(api: ApiDouble, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run an action once, just after the preemption has read its pod."""
    read = api.get

    def get(path: str) -> JsonObject:
        pod = read(path)
        if path.endswith("/pods/high"):
            monkeypatch.setattr(api, "get", read)
            action()
        return pod

    monkeypatch.setattr(api, "get", get)


@pytest.mark.parametrize("moment", ["pod read", "budgets queried"])
def test_a_pod_that_is_bound_while_its_victims_are_chosen_evicts_no_pod(
    api: ApiDouble, fragmented: Scheduler, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its own memory then counts on its card, and the other card's pod would be evicted for it once more."""
    high = add_high(api, 10)
    assert fragmented.filter(high) == []

    def bind() -> None:
        end(api, "y")
        eventually(lambda: fragmented.client.used() == [9, 0])
        assert fragmented.client.filter_and_bind(high) == ""
        eventually(lambda: fragmented.state.bound(uid(high)))

    if moment == "pod read":
        after_read(api, monkeypatch, bind)
    else:
        api.before("POST", "/eviction$", bind)
    fragmented.tick()
    assert fragmented.state.bound(uid(high)), "it was bound meanwhile"
    assert terminating(api) == set()
    assert fragmented.claims() == []
    fragmented.tick(60)
    assert terminating(api) == set()
    assert preempt(fragmented.client, high, {"a": [api.pod("x")]}) == {}, "a new leader may not know it yet"


@pytest.mark.parametrize("binds", [True, False], ids=["it is bound", "its bind fails"])
def test_a_bind_in_progress_is_waited_for(api: ApiDouble, fragmented: Scheduler, binds: bool) -> None:
    high = add_high(api, 10)
    assert fragmented.filter(high) == []
    row = PodRow(uid(high), "default", "high", "a", 10, ((1, 10),), 10)
    api.before("POST", "/eviction$", lambda: fragmented.state.reserve(row.uid, "a", lambda _view: row, 10))
    fragmented.tick()
    assert fragmented.state.held(row.uid)
    assert terminating(api) == set()
    if binds:
        api.change("pods", "high", "default", lambda pod: pod["spec"].update(nodeName="a"))
        eventually(lambda: fragmented.state.bound(row.uid))
    else:
        fragmented.state.release(row.uid)
    fragmented.tick(6)
    assert terminating(api) == (set() if binds else {"x"})


def test_the_extender_evicts_nothing_while_kube_scheduler_preempts(api: ApiDouble, fragmented: Scheduler) -> None:
    api.put("nodes", make_node("b", 16))
    victim, high = add(api, "v", 16, "b", 0, priority=3), add_high(api, 10)
    eventually(lambda: fragmented.state.bound(uid(victim)) and fragmented.state.viewer("")("b"))
    # It asks about node b, which its own total refused, while node a was refused here.
    assert fragmented.filter(high) == []
    assert names(api, preempt(fragmented.client, high, {"b": [victim]})) == {"b": ["v"]}
    fragmented.tick()
    assert terminating(api) == set()
    # An extender without that request finds the pod's nominated node.
    terminate(api, "v")
    api.change("pods", "high", "default", lambda pod: pod["status"].update(nominatedNodeName="b"))
    eventually(fragmented.claims)
    fragmented.state.unclaim(uid(high))
    fragmented.refuse(high)
    assert terminating(api) == {"v"}


def test_victims_of_another_extender_are_waited_for(api: ApiDouble, fragmented: Scheduler) -> None:
    """A new leader's extender has no claims, but the terminating pods."""
    terminate(api, "y")
    eventually(lambda: fragmented.state.bound(uid(api.pod("y"))).terminating)
    fragmented.refuse(add_high(api, 10))
    assert terminating(api) == {"y"}
    assert [claim.cards for claim in fragmented.claims()] == [((1, 10),)]


def test_unfiltered_nodes_of_a_large_cluster_postpone_preemption(api: ApiDouble, fragmented: Scheduler) -> None:
    """kube-scheduler stops at a hundred suitable nodes; the next time it starts behind them."""
    api.put("nodes", make_node("far", 16))
    eventually(lambda: fragmented.state.viewer("")("far"))
    high, asked = add_high(api, 10), ["a", *(f"n{number}" for number in range(99))]
    for _filter in range(4):
        fragmented.refuse(high, *asked)
        assert terminating(api) == set()
    fragmented.refuse(high, *asked)
    assert terminating(api) == {"x"}, "kube-scheduler never filtered that node: it has another reason"


def test_disruption_budgets_are_respected(api: ApiDouble, fragmented: Scheduler) -> None:
    api.budgets["web"] = 0
    high = add_high(api, 10)
    for _again in range(3):
        fragmented.refuse(high)
    assert terminating(api) == set() and fragmented.claims() == []
    assert len(api.asked("POST", "/eviction$")) == 2, "retried only after a pause where all victims are protected"
    # The budget allows one eviction, and the pod of higher priority isn't protected any more.
    api.budgets["web"] = 1
    fragmented.clock.now += 60
    fragmented.refuse(high)
    assert terminating(api) == {"x"}


def test_blocked_preemption_is_retried_with_growing_intervals(api: ApiDouble, fragmented: Scheduler) -> None:
    """kube-scheduler doesn't watch budgets: the extender retries by itself, at growing intervals."""
    api.budgets["web"] = 0
    assert fragmented.filter(add_high(api, 10)) == []
    tries, began = [], fragmented.clock.now
    for _second in range(600):
        before = len(api.asked("GET", "/pods/high$"))
        fragmented.tick(1)
        if len(api.asked("GET", "/pods/high$")) > before:
            tries.append(round(fragmented.clock.now - began))
    assert tries == [1, 16, 46, 106, 226], "the last one before kube-scheduler's own five minutes"
    fragmented.refuse(api.pod("high"))
    api.budgets["web"] = 1
    fragmented.tick(15)
    assert terminating(api) == {"x"}


def test_a_budget_for_one_eviction_does_not_allow_two(api: ApiDouble, quiet: Quiet) -> None:
    """Each of two alone may be evicted; after the first, the second is protected, and another one has to go."""
    for name, units, priority, app in (("x", 6, 0, "web"), ("y", 6, 0, "web"), ("z", 4, 2, "z")):
        add(api, name, units, "a", 0, priority=priority, app=app)
    api.budgets["web"] = 1
    scheduler = quiet(16)
    scheduler.refuse(add_high(api, 10))
    assert len(terminating(api) & {"x", "y"}) == 1 and "z" in terminating(api)
    assert set(scheduler.claims()[0].victims) == {uid(api.pod(name)) for name in terminating(api)}


def fail_eviction(api: ApiDouble, status: int, done: bool = False) -> None:
    """Fail the eviction that follows the dry run for budgets."""

    def hook(_method: str, path: str) -> None:
        if path.endswith("/eviction") and len(api.asked("POST", "/eviction$")) == 1 and not api.failures:
            api.fail("POST", "/eviction$", status, done=done)

    api.hooks.append(hook)


def test_a_failed_eviction_leaves_no_claim(api: ApiDouble, fragmented: Scheduler) -> None:
    fail_eviction(api, 403)
    fragmented.refuse(add_high(api, 10))
    assert terminating(api) == set()
    assert fragmented.claims() == []


@pytest.mark.parametrize("status", [0, 429, 500, 504])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_an_eviction_of_unknown_result_is_retried(
    api: ApiDouble, fragmented: Scheduler, status: int, done: bool
) -> None:
    """A busy API server or a lost response isn't the refusal of a disruption budget: no other pod is evicted."""
    fail_eviction(api, status, done)
    fragmented.refuse(add_high(api, 10))
    assert terminating(api) == ({"x"} if done else set())
    if done:
        eventually(lambda: any(row.terminating for row in fragmented.state.evictable("a")))
    for _tick in range(5):
        fragmented.tick(6)
    assert terminating(api) == {"x"}
    (claim,) = fragmented.claims()
    assert (claim.name, claim.cards, set(claim.victims)) == ("high", ((0, 10),), {uid(api.pod("x"))})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/pods/high$", 500), *(("POST", "/eviction$", status) for status in (0, 429, 500))],
)
def test_a_failed_read_or_budget_query_evicts_no_other_pod(
    api: ApiDouble, fragmented: Scheduler, method: str, path: str, status: int
) -> None:
    api.fail(method, path, status)
    fragmented.refuse(add_high(api, 10))
    fragmented.tick(20)
    assert terminating(api) == {"x"}


# ----------------------------------------------------------------- claims end


@pytest.fixture
def claimed(api: ApiDouble, fragmented: Scheduler) -> Scheduler:
    fragmented.refuse(add_high(api, 10))
    assert fragmented.claims()
    return fragmented


def test_a_claim_outlasts_its_victims_by_a_limited_time(api: ApiDouble, claimed: Scheduler) -> None:
    claimed.tick(600)
    assert claimed.claims(), "the victim is still terminating"
    end(api, "x")
    eventually(lambda: claimed.client.used()[0] == 0)
    for _sweep in range(2):
        claimed.tick(50)
    assert claimed.claims()
    claimed.tick(50)
    assert claimed.claims() == [], "the pod wasn't bound in time"


def test_a_claim_ends_with_its_pod(api: ApiDouble, claimed: Scheduler) -> None:
    with api.outage():
        claimed.tick(10)
        assert claimed.claims(), "a claim of a pod in an unknown state stays"
    end(api, "high")
    claimed.tick(10)
    assert claimed.claims() == []


def test_unused_offers_expire(api: ApiDouble, quiet: Quiet) -> None:
    victim = add(api, "v", 16, "a", 0)
    scheduler = quiet(16)
    preempt(scheduler.client, add_high(api, 16), {"a": [victim]})
    assert scheduler.state._offers
    scheduler.tick(40)
    assert scheduler.state._offers == {}
