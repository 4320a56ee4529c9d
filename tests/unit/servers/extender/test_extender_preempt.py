# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods of a higher priority get their memory, and no pod is evicted without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, eventually
from gpushare.extender.preemption import POSTPONEMENTS, Preemption
from gpushare.extender.state import PodRow
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

Start = Callable[..., Client]


def uid(pod: JsonObject) -> str:
    return str(pod["metadata"]["uid"])


def preempt(
    client: Client, pod: JsonObject, offered: dict[str, list[JsonObject]], violations: int = 0, key: str = "Meta"
) -> Any:
    """Ask as kube-scheduler does; the names of the victims by node."""
    if key == "Meta":
        victims = {node: [{"UID": uid(one)} for one in pods] for node, pods in offered.items()}
    else:
        victims = dict(offered)
    body = {
        "Pod": pod,
        f"NodeNameTo{key}Victims": {
            node: {"Pods": pods, "NumPDBViolations": violations} for node, pods in victims.items()
        },
    }
    status, value = client.json("POST", "/gpushare-scheduler/preempt", body)
    assert status == 200
    return value["NodeNameToMetaVictims"]


def names(api: ApiDouble, answer: Any) -> dict[str, list[str]]:
    by_uid = {uid(pod): pod["metadata"]["name"] for pod in api.pods()}
    return {node: [by_uid[one["UID"]] for one in victims["Pods"]] for node, victims in answer.items()}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def quiet(start: Start) -> Callable[..., tuple[Client, Preemption, Clock]]:
    """An extender whose preemption runs only on the test's tick."""

    def begin(**options: Any) -> tuple[Client, Preemption, Clock]:
        client = start(**options)
        clock = Clock()
        old = client.extender.preemption
        old.stop()
        new = Preemption(
            client.extender.binder._kube,
            client.extender.state,
            client.extender.events,
            enabled=options.get("preemption", True),
            clock=clock,
        )
        client.extender.preemption = new
        client.extender.api._preemption, client.extender.api._refused = new, (new.refused,)
        return client, new, clock

    return begin


Quiet = Callable[..., tuple[Client, Preemption, Clock]]


def gone(api: ApiDouble) -> set[str]:
    """The names of the terminating pods."""
    return {pod["metadata"]["name"] for pod in api.pods() if contract.terminating(pod)}


def end(api: ApiDouble, *which: str) -> None:
    for name in which:
        api.remove("pods", name, "default")


# ----------------------------------------------------------------- kube-scheduler asks


def test_victims_are_chosen_by_card(api: ApiDouble, start: Start) -> None:
    """The scheduler would take one pod of each card, by the total; all of one card's must go."""
    pods = {
        name: api.put("pods", make_pod(name, 8, "a", card, priority=priority))
        for name, card, priority in (("x", 0, 1), ("y", 0, 2), ("z", 1, 3), ("w", 1, 4))
    }
    client = start(16, 16)
    high = api.put("pods", make_pod("high", 16, priority=10))
    answer = preempt(client, high, {"a": [pods["w"], pods["x"]]})
    assert names(api, answer) == {"a": ["y", "x"]}
    assert answer["a"]["NumPDBViolations"] == 0
    assert gone(api) == set(), "kube-scheduler evicts them"


def test_victims_chosen_for_other_resources_stay(api: ApiDouble, start: Start) -> None:
    card = api.put("pods", make_pod("card", 8, "a", 0, priority=1))
    other = api.put("pods", make_pod("other", 8, "a", 1, priority=4))
    plain = api.put("pods", make_pod("plain", 0, "a"))
    client = start(16, 16)
    high = api.put("pods", make_pod("high", 16, priority=10))
    # 16 of 32 are free: that one of the two goes is enough for the total, so the other one is for something else.
    answer = preempt(client, high, {"a": [other, card, plain]})
    assert names(api, answer)["a"][0] == "other"
    assert set(names(api, answer)["a"]) == {"other", "card", "plain"}
    # A pod without GPU memory is unknown here, and isn't ours to spare.
    api.put("pods", make_pod("third", 16, "a", 1, priority=3))
    eventually(lambda: client.used() == [8, 24])
    assert names(api, preempt(client, high, {"a": [plain]})) == {"a": ["card", "plain"]}


def test_nodes_where_no_eviction_helps_are_dropped(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("small", 8, 8))
    api.put("nodes", make_node("firm", 16))
    api.put("nodes", make_node("good", 16))
    small = api.put("pods", make_pod("s", 8, "small", 0))
    firm = [api.put("pods", make_pod(f"f{number}", 8, "firm", 0, priority=10 * number)) for number in range(2)]
    good = api.put("pods", make_pod("g", 16, "good", 0))
    client = start()
    high = api.put("pods", make_pod("high", 16, priority=10))
    answer = preempt(client, high, {"small": [small], "firm": firm[:1], "good": [good], "who": [good]})
    assert names(api, answer) == {"good": ["g"]}


def test_disruption_budgets_are_queried_and_counted(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("b", 16))
    guarded = make_pod("guarded", 16, "a", 0)
    guarded["metadata"]["labels"] = {"app": "web"}
    pods = [api.put("pods", guarded), api.put("pods", make_pod("free", 16, "a", 1))]
    only = make_pod("only", 16, "b", 0)
    only["metadata"]["labels"] = {"app": "web"}
    pods.append(api.put("pods", only))
    api.budgets["web"] = 0
    client = start(16, 16)
    high = api.put("pods", make_pod("high", 16, priority=10))
    answer = preempt(client, high, {"a": pods[:1], "b": pods[2:]}, violations=1)
    assert names(api, answer) == {"a": ["free"], "b": ["only"]}
    assert {node: victims["NumPDBViolations"] for node, victims in answer.items()} == {"a": 0, "b": 1}
    assert gone(api) == set()


def test_whole_pods_are_accepted_as_victims(api: ApiDouble, start: Start) -> None:
    victim = api.put("pods", make_pod("v", 16, "a", 0))
    client = start(16)
    high = api.put("pods", make_pod("high", 16, priority=10))
    assert names(api, preempt(client, high, {"a": [victim]}, key="")) == {"a": ["v"]}


def test_terminating_pods_are_waited_for(api: ApiDouble, start: Start) -> None:
    ending = make_pod("ending", 16, "a", 0)
    ending["metadata"]["deletionTimestamp"] = "x"
    api.put("pods", ending)
    other = api.put("pods", make_pod("other", 16, "a", 1))
    client = start(16, 16)
    high = api.put("pods", make_pod("high", 16, priority=10))
    assert preempt(client, high, {"a": [other]}) == {}
    assert [one.cards for one in client.extender.state.claims()] == [((0, 16),)]


def test_memory_freed_by_kube_scheduler_is_claimed_for_its_pod(api: ApiDouble, start: Start) -> None:
    victim = api.put("pods", make_pod("v", 16, "a", 0))
    client = start(16)
    high, low = api.put("pods", make_pod("high", 12, priority=10)), api.put("pods", make_pod("low", 8, priority=5))
    preempt(client, high, {"a": [victim]})
    end(api, "v")
    eventually(client.extender.state.claims)
    assert client.filter(low, "a")["FailedNodes"] == {
        "a": "InsufficientGPUMemory: largest free share on one card is 4 of 8 GiB"
    }
    assert "4 of 8 GiB" in client.bind(low), "a filter of another extender may have let it through"
    assert client.filter(high, "a")["NodeNames"] == ["a"]
    assert client.bind(high) == ""
    # The booking counts at once, the claim ends with the watch's event.
    eventually(lambda: client.extender.state.claims() == [])
    assert client.used() == [12]


def test_preemption_can_be_disabled(api: ApiDouble, quiet: Quiet) -> None:
    victim = api.put("pods", make_pod("v", 9, "a", 0))
    api.put("pods", make_pod("w", 9, "a", 1))
    client, preemption, clock = quiet(16, 16, preemption=False)
    high = api.put("pods", make_pod("high", 14, priority=10))
    assert names(api, preempt(client, high, {"a": [victim]}, violations=3)) == {"a": ["v"]}
    client.filter(high, "a")
    clock.now += 10
    preemption.tick()
    assert gone(api) == set()


def test_an_invalid_annotation_evicts_no_pod(api: ApiDouble, start: Start) -> None:
    victim = api.put("pods", make_pod("v", 16, "a", 0))
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


def fragmented(api: ApiDouble) -> None:
    """Two cards of 16 with 7 free each: 14 units are free, and no card has 10."""
    api.put("nodes", make_node("a", 16, 16))
    for name, card, priority in (("x", 0, 1), ("y", 1, 2)):
        api.put("pods", make_pod(name, 9, "a", card, priority=priority))


def test_the_extender_evicts_where_the_total_fits_and_no_card_does(api: ApiDouble, quiet: Quiet) -> None:
    fragmented(api)
    client, preemption, clock = quiet()
    high = api.put("pods", make_pod("high", 10, priority=10))
    assert client.filter(high, "a")["NodeNames"] == []
    preemption.tick()
    assert gone(api) == set(), "kube-scheduler comes first"
    clock.now += 2
    preemption.tick()
    assert gone(api) == {"x"}
    evictions = [body for body in api.asked("POST", "/eviction$") if not body["deleteOptions"].get("dryRun")]
    assert [body["deleteOptions"]["preconditions"]["uid"] for body in evictions] == [uid(api.pod("x"))]
    events = eventually(lambda: {one["reason"]: one for one in api.asked("POST", "/events$")})
    eventually(lambda: len(api.asked("POST", "/events$")) == 2)
    events = {one["reason"]: one for one in api.asked("POST", "/events$")}
    assert events["Preempted"]["involvedObject"]["name"] == "x"
    assert "default/high" in events["Preempted"]["message"]
    assert events["GPUMemoryPreempting"]["involvedObject"]["name"] == "high"
    assert events["GPUMemoryPreempting"]["message"] == "evicted for GPU memory of card 0 of node a: default/x"
    # While it ends, and after it has, the card is for no other pod of the same or a lower priority.
    low, same = api.put("pods", make_pod("low", 7)), api.put("pods", make_pod("same", 14, priority=10))
    eventually(lambda: client.filter(low, "a")["NodeNames"] == ["a"])
    for _again in range(3):
        client.filter(high, "a")
        clock.now += 2
        preemption.tick()
    assert gone(api) == {"x"}, "never twice while the victims end"
    end(api, "x")
    eventually(lambda: client.used()[0] == 0)
    assert client.bind(low) == ""
    assert api.pod("low")["metadata"]["annotations"][contract.POD_INDEX] == "1"
    assert client.filter(same, "a")["NodeNames"] == []
    assert client.bind(high) == ""
    assert api.pod("high")["metadata"]["annotations"][contract.POD_INDEX] == "0"
    eventually(lambda: client.extender.state.claims() == [])


EAGER = ("eager-0", "eager-1")


def crowded(api: ApiDouble, quiet: Quiet) -> tuple[Client, Preemption, Clock, JsonObject]:
    """Card 1 is the cheaper one to free, once two small pods that are being bound there can be evicted."""
    api.put("pods", make_pod("stays", 10, "a", 0, priority=5))
    api.put("pods", make_pod("goes", 9, "a", 1, priority=1))
    client, preemption, clock = quiet(16, 16)
    for name in EAGER:
        row = PodRow(f"uid-{name}", "default", name, "a", 3, ((1, 3),), 1)
        assert client.extender.state.reserve(row.uid, "a", lambda _view, row=row: row, 1).row == row
    return client, preemption, clock, api.put("pods", make_pod("high", 12, priority=10))


def test_pending_bookings_are_waited_for_before_a_higher_priority_pod_is_evicted(api: ApiDouble, quiet: Quiet) -> None:
    client, preemption, clock, high = crowded(api, quiet)
    client.filter(high, "a")
    for _look in range(5):
        clock.now += 2
        preemption.tick()
        assert gone(api) == set()
    for name in EAGER:
        api.put("pods", make_pod(name, 3, "a", 1, priority=1))
        client.extender.state.release(f"uid-{name}")
    eventually(lambda: client.used() == [10, 15])
    clock.now += 2
    preemption.tick()
    assert "stays" not in gone(api) and "goes" in gone(api)


def test_the_wait_for_pending_bookings_is_limited(api: ApiDouble, quiet: Quiet) -> None:
    client, preemption, clock, high = crowded(api, quiet)
    client.filter(high, "a")
    for _look in range(POSTPONEMENTS + 2):
        clock.now += 2
        preemption.tick()
    assert gone(api) == {"stays"}


def test_pending_bookings_that_change_no_victim_are_not_waited_for(api: ApiDouble, quiet: Quiet) -> None:
    client, preemption, clock, high = crowded(api, quiet)
    client.extender.state.release(f"uid-{EAGER[1]}")
    client.filter(high, "a")
    clock.now += 2
    preemption.tick()
    # Even without the pending booking the card has enough free memory.
    assert gone(api) == {"goes"}


def test_kube_schedulers_preemption_waits_for_pending_bookings_too(api: ApiDouble, quiet: Quiet) -> None:
    client, preemption, clock, high = crowded(api, quiet)
    offered = {"a": [api.pod("goes")]}
    assert preempt(client, high, offered) == {}
    # The extender retries without a further request.
    for name in EAGER:
        client.extender.state.release(f"uid-{name}")
    clock.now += 2
    preemption.tick()
    assert gone(api) == {"goes"}


def test_the_wait_of_kube_schedulers_preemption_is_limited(api: ApiDouble, quiet: Quiet) -> None:
    client, _preemption, _clock, high = crowded(api, quiet)
    offered = {"a": [api.pod("goes")]}
    for _look in range(POSTPONEMENTS):
        assert preempt(client, high, offered) == {}
    assert names(api, preempt(client, high, offered)) == {"a": ["stays"]}


def test_it_does_so_by_itself(api: ApiDouble, start: Start) -> None:
    fragmented(api)
    client = start()
    high = api.put("pods", make_pod("high", 10, priority=10))
    client.filter(high, "a")
    eventually(lambda: gone(api) == {"x"})
    assert client.metric('gpushare_extender_evictions_total{result="evicted"}') == 1


@pytest.mark.parametrize(
    ("priority", "policy", "evicts"), [(10, None, True), (10, "Never", False), (1, None, False), (0, None, False)]
)
def test_priority_and_policy_decide_whether_a_pod_preempts(
    api: ApiDouble, quiet: Quiet, priority: int, policy: str | None, evicts: bool
) -> None:
    fragmented(api)
    client, preemption, clock = quiet()
    high = make_pod("high", 10, priority=priority)
    if policy:
        high["spec"]["preemptionPolicy"] = policy
    client.filter(api.put("pods", high), "a")
    clock.now += 2
    preemption.tick()
    assert gone(api) == ({"x"} if evicts else set())


def test_a_pod_bound_or_deleted_meanwhile_evicts_no_pod(api: ApiDouble, quiet: Quiet) -> None:
    fragmented(api)
    client, preemption, clock = quiet()
    high = api.put("pods", make_pod("high", 10, priority=10))
    for prepare in (
        lambda: api.change("pods", "high", "default", lambda pod: pod["spec"].update(nodeName="b")),
        lambda: api.change("pods", "high", "default", lambda pod: pod["metadata"].update(uid="another")),
        lambda: end(api, "high"),
    ):
        client.filter(high, "a")
        prepare()
        clock.now += 60
        preemption.tick()
        api.put("pods", high) if "high" in {one["metadata"]["name"] for one in api.pods()} else None
    assert gone(api) == set()


def test_the_extender_evicts_nothing_while_kube_scheduler_preempts(api: ApiDouble, quiet: Quiet) -> None:
    fragmented(api)
    api.put("nodes", make_node("b", 16))
    victim = api.put("pods", make_pod("v", 16, "b", 0, priority=3))
    client, preemption, clock = quiet()
    high = api.put("pods", make_pod("high", 10, priority=10))
    # It asks about node b, which its own total refused, while node a was refused here.
    client.filter(high, "a")
    assert names(api, preempt(client, high, {"b": [victim]})) == {"b": ["v"]}
    clock.now += 2
    preemption.tick()
    assert gone(api) == set()
    # An extender that wasn't asked sees it by the pod it is nominated for.
    api.change("pods", "v", "default", lambda pod: pod["metadata"].update(deletionTimestamp="x"))
    api.change("pods", "high", "default", lambda pod: pod["status"].update(nominatedNodeName="b"))
    eventually(client.extender.state.claims)
    client.extender.state.unclaim(uid(high))
    client.filter(high, "a")
    clock.now += 2
    preemption.tick()
    assert gone(api) == {"v"}


def test_victims_of_another_extender_are_waited_for(api: ApiDouble, quiet: Quiet) -> None:
    """A new leader's extender knows no claims, but it sees whose memory is coming."""
    fragmented(api)
    client, preemption, clock = quiet()
    api.change("pods", "y", "default", lambda pod: pod["metadata"].update(deletionTimestamp="x"))
    eventually(lambda: client.extender.state.bound(uid(api.pod("y"))).terminating)
    high = api.put("pods", make_pod("high", 10, priority=10))
    client.filter(high, "a")
    clock.now += 2
    preemption.tick()
    assert gone(api) == {"y"}
    assert [one.cards for one in client.extender.state.claims()] == [((1, 10),)]


def test_unfiltered_nodes_of_a_large_cluster_postpone_preemption(api: ApiDouble, quiet: Quiet) -> None:
    """kube-scheduler stops looking for nodes when it has a hundred; the next time it starts behind them."""
    fragmented(api)
    api.put("nodes", make_node("far", 16))
    client, preemption, clock = quiet()
    high = api.put("pods", make_pod("high", 10, priority=10))
    asked = ["a", *(f"n{number}" for number in range(99))]
    for _filter in range(4):
        client.filter(high, *asked)
        clock.now += 2
        preemption.tick()
        assert gone(api) == set()
    client.filter(high, *asked)
    clock.now += 2
    preemption.tick()
    assert gone(api) == {"x"}, "kube-scheduler never filtered that node: another reason keeps the pod from it"


def test_disruption_budgets_are_respected(api: ApiDouble, quiet: Quiet) -> None:
    fragmented(api)
    for name in "xy":
        api.change("pods", name, "default", lambda pod: pod["metadata"].update(labels={"app": "web"}))
    api.budgets["web"] = 0
    client, preemption, clock = quiet()
    high = api.put("pods", make_pod("high", 10, priority=10))
    for _again in range(3):
        client.filter(high, "a")
        clock.now += 2
        preemption.tick()
    assert gone(api) == set() and client.extender.state.claims() == []
    asked = len(api.asked("POST", "/eviction$"))
    assert asked == 2, "a pod whose victims are all protected is not tried again for a while"
    # The budget lets one go, and the more important one isn't guarded any more.
    api.budgets["web"] = 1
    clock.now += 60
    client.filter(high, "a")
    clock.now += 2
    preemption.tick()
    assert gone(api) == {"x"}


def test_blocked_preemption_is_retried_with_growing_intervals(api: ApiDouble, quiet: Quiet) -> None:
    """kube-scheduler knows of no budget and stays silent: the extender retries by itself, at growing intervals."""
    fragmented(api)
    for name in "xy":
        api.change("pods", name, "default", lambda pod: pod["metadata"].update(labels={"app": "web"}))
    api.budgets["web"] = 0
    client, preemption, clock = quiet()
    client.filter(api.put("pods", make_pod("high", 10, priority=10)), "a")
    looks, began = [], clock.now
    for _second in range(600):
        clock.now += 1
        before = len(api.asked("GET", "/pods/high$"))
        preemption.tick()
        if len(api.asked("GET", "/pods/high$")) > before:
            looks.append(round(clock.now - began))
    assert looks == [1, 16, 46, 106, 226], "the last one before kube-scheduler's own five minutes"
    client.filter(api.pod("high"), "a")
    clock.now += 2
    preemption.tick()
    api.budgets["web"] = 1
    clock.now += 15
    preemption.tick()
    assert gone(api) == {"x"}


def test_a_budget_for_one_eviction_does_not_allow_two(api: ApiDouble, quiet: Quiet) -> None:
    """Each alone may go; when the first has gone, the second may not, and another one has to."""
    for name, units, priority in (("x", 6, 0), ("y", 6, 0), ("z", 4, 2)):
        pod = make_pod(name, units, "a", 0, priority=priority)
        pod["metadata"]["labels"] = {"app": name if name == "z" else "web"}
        api.put("pods", pod)
    api.budgets["web"] = 1
    client, preemption, clock = quiet(16)
    high = api.put("pods", make_pod("high", 10, priority=10))
    client.filter(high, "a")
    clock.now += 2
    preemption.tick()
    assert len(gone(api) & {"x", "y"}) == 1 and "z" in gone(api)
    assert set(client.extender.state.claims()[0].victims) == {uid(api.pod(name)) for name in gone(api)}


def test_a_failed_read_of_the_pod_is_retried(api: ApiDouble, quiet: Quiet) -> None:
    fragmented(api)
    client, preemption, clock = quiet()
    high = api.put("pods", make_pod("high", 10, priority=10))
    client.filter(high, "a")
    clock.now += 2
    api.fail("GET", "/pods/high$", 500)
    preemption.tick()
    assert gone(api) == set()
    clock.now += 6
    preemption.tick()
    assert gone(api) == {"x"}


def test_a_failed_eviction_leaves_no_claim(api: ApiDouble, quiet: Quiet) -> None:
    fragmented(api)
    client, preemption, clock = quiet()
    high = api.put("pods", make_pod("high", 10, priority=10))

    def refuse(method: str, path: str) -> None:
        api.failures.clear()
        if path.endswith("/eviction") and len(api.asked("POST", "/eviction$")) >= 1:
            api.fail("POST", "/eviction$", 403)

    api.hooks.append(refuse)
    client.filter(high, "a")
    clock.now += 2
    preemption.tick()
    assert gone(api) == set()
    assert client.extender.state.claims() == []


@pytest.mark.parametrize("status", [0, 429, 500, 504])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_an_eviction_of_unknown_result_evicts_no_other_pod(
    api: ApiDouble, quiet: Quiet, status: int, done: bool
) -> None:
    """A busy API server or a lost response is no verdict of a disruption budget: no other pod is evicted."""
    fragmented(api)
    client, preemption, clock = quiet()
    client.filter(api.put("pods", make_pod("high", 10, priority=10)), "a")
    clock.now += 2

    def lose(method: str, path: str) -> None:
        # The first one is only a question about budgets.
        if path.endswith("/eviction") and len(api.asked("POST", "/eviction$")) == 1 and not api.failures:
            api.fail("POST", "/eviction$", status, done=done)

    api.hooks.append(lose)
    preemption.tick()
    assert gone(api) == ({"x"} if done else set())
    if done:
        eventually(lambda: any(row.terminating for row in client.extender.state.evictable("a")))
    api.hooks.clear()
    api.failures.clear()
    for _look in range(5):
        clock.now += 6
        preemption.tick()
    assert gone(api) == {"x"}
    (claim,) = client.extender.state.claims()
    assert (claim.name, claim.cards, set(claim.victims)) == ("high", ((0, 10),), {uid(api.pod("x"))})


@pytest.mark.parametrize("status", [0, 429, 500])
def test_a_failed_budget_query_evicts_no_other_pod(api: ApiDouble, quiet: Quiet, status: int) -> None:
    fragmented(api)
    client, preemption, clock = quiet()
    client.filter(api.put("pods", make_pod("high", 10, priority=10)), "a")
    clock.now += 2
    api.fail("POST", "/eviction$", status)
    preemption.tick()
    clock.now += 20
    preemption.tick()
    assert gone(api) == {"x"}


# ----------------------------------------------------------------- claims end


def claimed(api: ApiDouble, quiet: Quiet) -> tuple[Client, Preemption, Clock]:
    fragmented(api)
    client, preemption, clock = quiet()
    client.filter(api.put("pods", make_pod("high", 10, priority=10)), "a")
    clock.now += 2
    preemption.tick()
    assert client.extender.state.claims()
    return client, preemption, clock


def test_a_claim_outlasts_its_victims_by_a_limited_time(api: ApiDouble, quiet: Quiet) -> None:
    client, preemption, clock = claimed(api, quiet)
    clock.now += 600
    preemption.tick()
    assert client.extender.state.claims(), "a victim that takes long"
    end(api, "x")
    eventually(lambda: client.used()[0] == 0)
    for _sweep in range(2):
        clock.now += 50
        preemption.tick()
    assert client.extender.state.claims()
    clock.now += 50
    preemption.tick()
    assert client.extender.state.claims() == [], "it didn't come for it"


def test_a_claim_ends_with_its_pod(api: ApiDouble, quiet: Quiet) -> None:
    client, preemption, clock = claimed(api, quiet)
    with api.outage():
        clock.now += 10
        preemption.tick()
        assert client.extender.state.claims(), "what can't be asked stays"
    end(api, "high")
    clock.now += 10
    preemption.tick()
    assert client.extender.state.claims() == []


def test_unused_offers_expire(api: ApiDouble, quiet: Quiet) -> None:
    victim = api.put("pods", make_pod("v", 16, "a", 0))
    client, preemption, clock = quiet(16)
    high = api.put("pods", make_pod("high", 16, priority=10))
    preempt(client, high, {"a": [victim]})
    assert client.extender.state.offered()
    clock.now += 40
    preemption.tick()
    assert client.extender.state.offered() == []
