# SPDX-License-Identifier: GPL-3.0-or-later
"""A claim on freed memory reaches every extender, whichever of them evicted the victims.

``test_preemption_real`` has a change of leadership between eviction and bind.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_double import POLICIES, ApiDouble, make_node, make_pod
from extender_kit import Scheduler, Start, eventually
from gpushare.extender.claims import claim_of, claim_to_text
from gpushare.extender.preemption import CLAIM_SECONDS
from gpushare.extender.state import Claim
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from hypothesis import given
from hypothesis import strategies as st

Two = tuple[Scheduler, Scheduler]


@pytest.fixture
def two(api: ApiDouble, start: Start) -> Two:
    """Two cards of 16 with 7 free each: 14 units are free, and no card has 10."""
    for name, card, priority in (("x", 0, 1), ("y", 1, 2)):
        api.put("pods", make_pod(name, 9, "a", card, priority=priority))
    first, second = start(16, 16), start()
    return Scheduler(first, claims=first.extender.claims), Scheduler(second, claims=second.extender.claims)


def written(api: ApiDouble, name: str) -> tuple[Any, Any]:
    """The annotation and the label of a pod."""
    metadata = api.pod(name)["metadata"]
    return metadata.get("annotations", {}).get(contract.POD_CLAIM), metadata.get("labels", {}).get(contract.POD_CLAIM)


def evicted_for_high(api: ApiDouble, leader: Scheduler) -> JsonObject:
    high = api.put("pods", make_pod("high", 10, priority=10))
    leader.refuse(high)
    assert contract.terminating(api.pod("x"))
    return high


def test_a_later_extender_has_the_claim_before_it_is_ready(api: ApiDouble, two: Two, start: Start) -> None:
    evicted_for_high(api, two[0])
    api.remove("pods", "x", "default")
    late = start()
    assert [claim.cards for claim in late.extender.state.claims()] == [((0, 10),)]
    api.fail("GET", "labelSelector", 500, times=10**6)
    blind = start(ready=False)
    eventually(lambda: blind.extender.nodes.synced and blind.extender.pods.synced)
    assert str(blind.extender.unsynced()).startswith("the claims haven't been read")
    api.failures.clear()
    eventually(lambda: blind.extender.unsynced() is None)


def test_the_claim_is_written_on_the_pod_before_an_eviction(api: ApiDouble, two: Two) -> None:
    seen: list[Any] = []
    # The first eviction is a dry run.
    api.before("POST", "/eviction$", lambda: seen.append(written(api, "high")), times=2)
    evicted_for_high(api, two[0])
    text, label = seen[-1]
    assert label == "true"
    assert json.loads(text) == {"node": "a", "cards": [0], "victims": [api.pod("x")["metadata"]["uid"]]}


def test_evictions_of_the_scheduler_are_claimed_by_every_extender(api: ApiDouble, two: Two) -> None:
    leader, other = two
    high = api.put("pods", make_pod("high", 16, priority=10))
    victim = api.pod("x")["metadata"]["uid"]
    body = {"Pod": high, "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": victim}]}}}
    assert leader.client.json("POST", "/gpushare-scheduler/preempt", body)[1]["NodeNameToMetaVictims"]
    leader.tick()
    assert other.claims() == [], "an offer is no claim yet"
    api.change("pods", "x", "default", lambda pod: pod["metadata"].update(deletionTimestamp="now"))
    eventually(leader.claims)
    leader.tick(0.1)
    eventually(lambda: other.claims() == leader.claims())


@pytest.mark.parametrize("stopped", [False, True], ids=["writer runs", "writer stopped"])
def test_a_claim_is_removed_when_the_pod_is_bound(
    api: ApiDouble, two: Two, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    leader, other = two
    high = evicted_for_high(api, leader)
    eventually(other.claims)
    if stopped:
        leader.client.extender.stop()
    api.remove("pods", "x", "default")
    eventually(lambda: other.client.used()[0] == 0)
    assert other.client.bind(high) == ""
    # The mirror's callback has run, which is after its item is gone.
    eventually(lambda: other.claims() == [] and other.client.extender.claims._ended)
    if stopped:
        # The watch of all pods may be later than that of the claims.
        monkeypatch.setattr(other.client.extender.state, "bound", lambda uid: None)
        other.tick(6)
    else:
        eventually(lambda: leader.claims() == [])
        leader.tick()
    assert written(api, "high") == (None, None)
    assert contract.booking(api.pod("high")) is not None


def test_an_unused_claim_ends_in_every_extender(api: ApiDouble, two: Two) -> None:
    leader, other = two
    evicted_for_high(api, leader)
    eventually(other.claims)
    api.remove("pods", "x", "default")
    eventually(lambda: leader.client.used()[0] == other.client.used()[0] == 0)
    # Its writer needn't be running.
    leader.client.extender.stop()
    other.tick(10)
    other.tick(CLAIM_SECONDS - 5)
    assert other.claims()
    other.tick(10)
    assert other.claims() == [] and written(api, "high") == (None, None)


def test_two_extenders_evict_once_for_one_pod(api: ApiDouble, two: Two) -> None:
    leader, other = two
    high = api.put("pods", make_pod("high", 10, priority=10))
    for one in two:
        one.client.filter(high, "a")
    leader.tick()
    eventually(other.claims)
    other.tick()
    assert not contract.terminating(api.pod("y"))


def test_a_claim_that_cannot_be_written_is_kept_and_written_later(api: ApiDouble, two: Two) -> None:
    leader, other = two
    api.fail("PATCH", "/pods/high/status$", 500, times=2)
    evicted_for_high(api, leader)
    assert leader.claims() and written(api, "high") == (None, None)
    leader.tick(1)
    assert len(api.asked("PATCH", "/pods/high/status$")) == 1, "not at every tick"
    leader.tick(6)
    leader.tick(6)
    assert written(api, "high")[1] == "true"
    eventually(other.claims)


def test_without_preemption_no_request_is_made(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a", 16))
    start(preemption=False)
    assert not [path for _method, path, _body in api.requests if "labelSelector" in path]


# ----------------------------------------------------------------- without the policy

FORGED = '{"node":"a","cards":[0],"victims":[]}'


def forge(api: ApiDouble, *names: str) -> None:
    """Have tenants write claims on the first card, on pods that no scheduler finds a node for."""
    for name in names:
        pod = make_pod(name, 16, priority=10)
        pod["metadata"] |= {"annotations": {contract.POD_CLAIM: FORGED}, "labels": {contract.POD_CLAIM: "true"}}
        api.put("pods", pod)


def policy(api: ApiDouble, *actions: str) -> None:
    """Set the policy's actions; there is no policy without any."""
    if actions:
        metadata = {"name": contract.ANNOTATIONS_POLICY}
        api.put(POLICIES, {"metadata": metadata, "spec": {"validationActions": list(actions)}})
    else:
        api.remove(POLICIES, contract.ANNOTATIONS_POLICY, "")


@pytest.mark.parametrize("actions", [(), ("Warn", "Audit")], ids=["no policy", "a policy that only warns"])
def test_forged_claims_hide_no_memory_where_anybody_may_write_them(
    api: ApiDouble, start: Start, actions: tuple[str, ...]
) -> None:
    policy(api, *actions)
    forge(api, "before")
    client = start(16)
    forge(api, "after")
    claims = client.extender.claims.mirror
    eventually(lambda: claims.version == api.version)
    # Nor are they kept: there may be any number of them.
    assert client.extender.state.claims() == claims.items() == []
    assert client.filter_and_bind(api.put("pods", make_pod("honest", 16))) == ""


def test_without_the_policy_an_extender_keeps_its_claims_to_itself(api: ApiDouble, two: Two) -> None:
    policy(api)
    leader, other = two
    for one in two:
        one.client.extender.claims.check_policy()
    evicted_for_high(api, leader)
    assert [claim.cards for claim in leader.claims()] == [((0, 10),)]
    assert written(api, "high") == (None, None) and other.claims() == []


def test_claims_are_exchanged_as_soon_as_there_is_the_policy(api: ApiDouble, two: Two) -> None:
    policy(api)
    leader, other = two
    for one in two:
        one.client.extender.claims.check_policy()
    evicted_for_high(api, leader)
    policy(api, "Deny")
    # Both look again, as they do while there are claims; the other one has none of its own.
    leader.tick(6)
    other.client.extender.claims.check_policy()
    eventually(lambda: other.claims() == leader.claims() != [])


@pytest.mark.parametrize(("status", "exchanged"), [(403, False), (404, False), (500, True)])
def test_a_policy_that_cannot_be_read(api: ApiDouble, two: Two, status: int, exchanged: bool) -> None:
    """Without the right to read it, it isn't relied on; an API server that is busy doesn't take it away."""
    claims = two[0].client.extender.claims
    api.fail("GET", POLICIES, status, times=10**6)
    claims.publish_all(again=True)
    api.failures.clear()
    evicted_for_high(api, two[0])
    assert (written(api, "high")[1] == "true") == exchanged


# ----------------------------------------------------------------- annotations

RIGHT = Claim("u", "default", "p", "a", ((0, 4), (2, 4)), 7, frozenset({"v", "w"}))


def claiming(text: str, **annotations: str) -> JsonObject:
    pod = make_pod("p", 8, priority=7)
    requests = {contract.POD_CARD_COUNT: "2", **annotations}
    pod["metadata"] |= {"uid": "u", "annotations": {contract.POD_CLAIM: text, **requests}}
    return pod


def test_a_claim_round_trips() -> None:
    assert claim_of(claiming(claim_to_text(RIGHT))) == RIGHT


BAD_CARDS = ([0], [0, 1, 2], [0, 0], [0, True], [0, "1"], 7)
BAD_CLAIMS = [*({"cards": cards} for cards in BAD_CARDS), {"node": 7}, {"node": None}, {"victims": [7]}]


@pytest.mark.parametrize("change", [*BAD_CLAIMS, {"victims": None}])
def test_a_claim_above_the_pods_request_is_ignored(change: JsonObject) -> None:
    value = json.loads(claim_to_text(RIGHT)) | change
    assert claim_of(claiming(json.dumps(value))) is None


@pytest.mark.parametrize("state", ["bound", "ending", "finished", "invalid request"])
def test_only_a_pending_pod_has_a_claim(state: str) -> None:
    pod = claiming(claim_to_text(RIGHT))
    if state == "bound":
        pod["spec"]["nodeName"] = "a"
    elif state == "ending":
        pod["metadata"]["deletionTimestamp"] = "now"
    elif state == "finished":
        pod["status"]["phase"] = "Failed"
    else:
        pod["metadata"]["annotations"][contract.POD_CARD_COUNT] = "many"
    assert claim_of(pod) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["node", "cards", "victims", "x"]), inner)
    ),
)


@given(VALUES.map(json.dumps) | st.text(max_size=20) | st.just("[" * 100_000))
def test_any_claim_annotation_is_parsed_or_ignored(text: str) -> None:
    claim = claim_of(claiming(text))
    if claim is not None:
        assert sum(units for _card, units in claim.cards) == 8 and claim.priority == 7


def test_a_claim_binds_no_pod_above_its_pods_priority(api: ApiDouble, start: Start) -> None:
    """A user who writes a claim hides memory from pods of the same or a lower priority, and from no other."""
    api.put("pods", claiming(claim_to_text(RIGHT)))
    client = start(8, 8, 8)
    same, higher = make_pod("same", 8, priority=7), make_pod("higher", 8, priority=8)
    assert client.filter_and_bind(api.put("pods", same)) == "", "one card is unclaimed"
    assert contract.booking(api.pod("same")).index == 1  # type: ignore[union-attr]
    assert client.filter(api.put("pods", higher), "a")["NodeNames"] == ["a"]
