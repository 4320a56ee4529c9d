# SPDX-License-Identifier: GPL-3.0-or-later
"""Sizes of the suites' pods against an arbitrary extender, assertions on pods, and malformed objects."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.gpushare import PLACEMENTS, Card
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import PodParser, node_of
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._e2e import nodes, result, sizing
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.assertions import (
    PodState,
    assert_not_overbooked,
    assert_placement,
    assert_refused,
    extender_refusal,
    pod_state,
)
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import NodeState
from gpushare.extender.filter import refusal
from gpushare.extender.state import node_row, view_of
from gpushare.shared._contracts.gpushare import Demand
from hypothesis import given
from hypothesis import strategies as st
from suite_cluster import SPACE, Cluster, attempt, node

FREE = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(FREE, st.randoms(use_true_random=False))
def test_the_planned_pods_fit_in_any_order(lefts: list[int], chance: object) -> None:
    free = dict(enumerate(lefts))
    found = sizing.filling_sizes(free, sum(lefts))
    if not any(lefts):
        assert found is None
        return
    assert found is not None and found.units <= max(lefts)
    for _pod in range(found.pods):
        fitting = [card for card, left in free.items() if left >= found.units]
        assert fitting
        free[chance.choice(fitting)] -= found.units  # type: ignore[attr-defined]
    assert max(free.values()) < found.units
    assert found.extender_decides == (sum(free.values()) >= found.units)


@given(FREE, st.integers(0, 100))
def test_no_plan_exceeds_kube_schedulers_count(lefts: list[int], total: int) -> None:
    found = sizing.filling_sizes(dict(enumerate(lefts)), total)
    assert found is None or (found.taken <= total and found.pods <= sizing.MOST_PODS)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ([16, 10], (11, 1, True)),
        ([16, 16], (6, 4, True)),
        ([16], (6, 2, False)),
        ([1], (1, 1, False)),
        ([16384, 16384], (5462, 4, True)),
        ([80] * 8, (27, 16, True)),
        ([80] * 16, (27, 32, True)),
        ([80] * 20, (41, 20, True)),
    ],
    ids=str,
)
def test_sizes(free: list[int], expected: tuple[int, int, bool]) -> None:
    found = sizing.filling_sizes(dict(enumerate(free)), sum(free))
    assert found is not None and (found.units, found.pods, found.extender_decides) == expected


@given(FREE, st.integers(0, 40))
def test_a_fragment_fits_the_node_and_no_card(lefts: list[int], extra: int) -> None:
    one = node("gpu1", [left + extra for left in lefts])
    cluster = Cluster([one])
    for card, left in enumerate(lefts):
        if extra:
            cluster.add_other(f"held-{card}", "gpu1", extra, card)
        assert left == cluster._free("gpu1")[card]
    seen = nodes.node_state(node_of(one), map(PodParser(), cluster.pods.values()))
    assert not isinstance(seen, str)
    found = sizing.fragment_size(seen)
    if found is None:
        assert sum(1 for left in lefts if left) < 2
    else:
        assert max(lefts) < found <= sum(lefts)


# --------------------------------------------------------------------------- sizes of the workloads suite


def node_with(sizes: list[int], free: list[int] | None = None, name: str = "n", stray: int = 0) -> NodeState:
    left = dict(enumerate(sizes if free is None else free))
    cards = tuple(Card(index, f"GPU-{index}", index, units * 1024, units) for index, units in enumerate(sizes))
    return NodeState(name, cards, (), sum(sizes), left, sum(left.values()), stray)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (node_with([16, 16]), ([8, 9], 9)),
        (node_with([16, 16], [13, 16]), ([14], 14)),
        (node_with([16, 16], [10, 9]), ([], 11)),
        (node_with([8, 16]), ([9], 9)),
        (node_with([1, 1]), ([], 2)),
        (node_with([2, 2]), ([], 3)),
    ],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fragment_of_a_node(state: NodeState, expected: tuple[list[int], int], placement: str) -> None:
    assert sizing.fragment_node(state, placement) == expected


@st.composite
def arbitrary_nodes(draw: st.DrawFn) -> NodeState:
    sizes = draw(st.lists(st.integers(1, 200), min_size=1, max_size=8))
    return node_with(sizes, [draw(st.integers(0, size)) for size in sizes])


@given(arbitrary_nodes(), st.sampled_from(PLACEMENTS))
def test_the_workloads_fragment_fits_the_node_and_no_card(state: NodeState, placement: str) -> None:
    planned = sizing.fragment_node(state, placement)
    if isinstance(planned, str):
        # Only the impossible is reported as such.
        assert len(state.cards) < 2 or state.largest_free == sum(state.free.values())
        return
    fillers, units = planned
    left = dict(state.free)
    for size in fillers:
        card = sizing.place(left, size, placement)
        assert card is not None
        left[card] -= size
    assert max(left.values()) < units <= sum(left.values())
    assert not fillers or units <= state.largest_card


@given(arbitrary_nodes(), st.sampled_from(PLACEMENTS))
def test_two_containers_fit_one_card_and_would_split(state: NodeState, placement: str) -> None:
    sizes = sizing.container_sizes(state.free, placement)
    if sizes is None:
        assert state.largest_free < 2
        return
    assert sizing.place(state.free, sum(sizes), placement) is not None
    lefts = sorted(left for left in state.free.values() if left > 0)
    splits = len(set(lefts)) > 1 if placement == "binpack" else lefts[-2:-1] > [1]
    if splits:
        assert len(set(sizing.places(state.free, sizes, placement))) == 2


@pytest.mark.parametrize(
    ("free", "placement", "pods"),
    [
        ({0: 16, 1: 16}, "binpack", [(1, 0), (1, 0), (1, 0)]),
        ({0: 16, 1: 3}, "binpack", [(1, 1), (1, 1), (1, 1)]),
        # The third pod doesn't fit on the second card any more.
        ({0: 16, 1: 2}, "binpack", []),
        ({0: 16, 1: 16}, "spread", [(1, 0), (1, 1), (1, 0)]),
        ({0: 5, 1: 7, 2: 6}, "spread", [(2, 1), (1, 2), (1, 0)]),
        ({0: 16, 1: 3}, "spread", [(14, 0), (1, 1), (1, 0)]),
        # No third one fits; and nothing is spread over one card.
        ({0: 1, 1: 1}, "spread", []),
        ({0: 16}, "spread", []),
    ],
)
def test_three_pods_show_the_placement(free: dict[int, int], placement: str, pods: list[tuple[int, int]]) -> None:
    assert sizing.three_pods(free, placement) == pods


def test_the_freest_node_with_two_cards_is_selected() -> None:
    one, two = node_with([80], name="single"), node_with([16, 16], [4, 4], "double")
    tight, stray = node_with([16, 16], [2, 2], "tight"), node_with([16, 16], [4, 4], "stray", 3)
    assert sizing.select_node([stray, tight, one, two], "binpack") == two
    assert sizing.select_node([], "binpack") is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"unschedulable": True}, False),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, True),
        ({"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]}, True),
        ({"taints": [{"key": "team", "effect": "NoSchedule"}]}, False),
    ],
)
def test_usable_nodes(change: dict[str, object], expected: bool) -> None:
    one = {**node("gpu1", [16]), "spec": change}
    assert (nodes.unusable_reason(node_of(one), {}) == "") is expected
    team = [{"key": "team", "operator": "Exists", "effect": "NoSchedule"}]
    if change.get("taints", [{}])[0].get("key") == "team":
        assert (
            nodes.unusable_reason(node_of(one), {}) == "it has team:NoSchedule, which the suite's pods don't tolerate"
        )
        assert nodes.unusable_reason(node_of(one), {}, team) == ""
    one["status"]["conditions"][0]["status"] = "Unknown"
    assert nodes.unusable_reason(node_of(one), {}) != ""


# --------------------------------------------------------------------------- assertions


def test_refusals_come_from_the_pods_own_events_only() -> None:
    pod = {"metadata": {"name": "p", "uid": "u1"}, "spec": {}, "status": {"conditions": []}}
    events = [
        {"reason": "FailedScheduling", "message": "mine", "involvedObject": {"uid": "u1"}},
        {"reason": "FailedScheduling", "message": "not mine", "involvedObject": {"uid": "u2"}},
        {"reason": "Scheduled", "message": "other", "involvedObject": {"uid": "u1"}},
    ]
    assert pod_state(pod, events).refusals == ("mine",)


@pytest.mark.parametrize("wanted", [Demand(9), Demand(17), Demand(16, count=2), Demand(8, models=("a*",))], ids=str)
def test_the_extenders_refusals_are_recognised(wanted: Demand) -> None:
    """Every refusal of the servers' extender for a node without enough memory."""
    one = node("gpu1", [16, 16])
    why = refusal(view_of(node_row(one), {0: 9, 1: 9}, 0), wanted)
    known = extender_refusal([f"0/1 nodes are available: 1 {why}."])
    assert known or why.code == contract.Reason.NO_MATCHING_MODEL
    assert extender_refusal(["0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem."]) == ""
    assert extender_refusal(["0/1 nodes are available: 1 Insufficient cpu."]) == ""
    assert extender_refusal(["Insufficient GPU Memory in one device"]) != ""


def state_of(cluster: Cluster) -> NodeState:
    seen = nodes.node_state(node_of(cluster.nodes["gpu1"]), map(PodParser(), cluster.pods.values()))
    assert not isinstance(seen, str)
    return seen


@pytest.mark.parametrize("others", [False, True])
def test_an_overbooked_card(others: bool) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.add_other("before", "gpu1", 10, 0)
    before = state_of(cluster)
    ours = cluster.add_other("ours", "gpu1", 6, 0)
    ours["metadata"]["namespace"] = SPACE
    assert_not_overbooked(pod_state(ours), before, state_of(cluster), SPACE)
    if others:
        cluster.add_other("late", "gpu1", 1, 0)
    else:
        cluster.pods["theirs/before"]["spec"]["containers"][0]["resources"]["limits"][contract.RESOURCE_MEMORY] = "11"
    with pytest.raises(result.Inconclusive if others else result.Failed, match="is booked with 17 of 16 units"):
        assert_not_overbooked(pod_state(ours), before, state_of(cluster), SPACE)
    # An extender may allocate the memory of a terminating pod.
    cluster.pods["theirs/late" if others else "theirs/before"]["metadata"]["deletionTimestamp"] = "now"
    assert_not_overbooked(pod_state(ours), before, state_of(cluster), SPACE)


def pending(message: str, reason: str = "Unschedulable") -> PodState:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod_state({"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Pending", "conditions": [condition]}})


@pytest.mark.parametrize(
    ("message", "reason", "others", "outcome", "certain"),
    [
        ("1 Insufficient aliyun.com/gpu-mem", "Unschedulable", False, result.Inconclusive, True),
        ("1 Insufficient aliyun.com/gpu-mem", "Unschedulable", True, result.Inconclusive, False),
        ("connection refused", "SchedulerError", False, result.Failed, True),
        ("1 Insufficient cpu", "Unschedulable", False, result.StepOutcome, False),
    ],
    ids=["stale", "others", "error", "cpu"],
)
def test_a_refusal_that_isnt_the_extenders(
    message: str, reason: str, others: bool, outcome: type[result.StepOutcome], certain: bool
) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    before = state_of(cluster)
    if others:
        cluster.add_other("late", "gpu1", 1, 0)
    with pytest.raises(result.StepOutcome) as raised:
        assert_refused(pending(message, reason), 20, before, state_of(cluster), SPACE, 20)
    assert raised.type is outcome
    assert bool(getattr(raised.value, "failure", None) or raised.value.result == result.FAIL) is certain


def test_a_card_that_became_unhealthy_is_unknown() -> None:
    cards = [contract.Card(0, "GPU-a", 0, 16384, 16, healthy=False), contract.Card(1, "GPU-b", 1, 16384, 16)]
    one = node("gpu1", [16, 16])
    one["metadata"]["annotations"][contract.NODE_CARDS] = contract.cards_to_annotation(cards)
    cluster = Cluster([one])
    pod = cluster.add_other("p", "gpu1", 4, 0)
    seen = nodes.node_state(node_of(one), map(PodParser(), [pod]))
    assert not isinstance(seen, str) and set(seen.free) == {1}
    with pytest.raises(result.StepOutcome, match="which isn't healthy now") as raised:
        assert_placement(pod_state(pod), 4, seen)
    assert raised.value.result == result.UNKNOWN


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (None, 65534),
        ({}, 65534),
        ({nodes.UID_RANGE: "1000680000/10000"}, 1000680000),
        ({nodes.UID_RANGE: "0/10000"}, 65534),
        ({nodes.UID_RANGE: "x"}, 65534),
        ({nodes.UID_RANGE: "99999999999/1"}, 65534),
        ({nodes.UID_RANGE: None}, 65534),
        ([], 65534),
    ],
    ids=str,
)
def test_pods_are_never_root(annotations: object, expected: int) -> None:
    assert nodes.user_of({"metadata": {"annotations": annotations}}) == expected
    assert nodes.user_of(None) == 65534


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({"Y1": "PASS", "Y2": "PASS", "Y3": "skipped", "Y7": "PASS"}, "PASS"),
        ({"Y1": "PASS", "Y2": "FAIL", "Y3": "UNKNOWN", "Y7": "PASS"}, "FAIL"),
        ({"Y1": "PASS", "Y2": "PASS", "Y7": "UNKNOWN"}, "UNKNOWN"),
        ({"Y1": "PASS", "Y2": "skipped", "Y7": "PASS"}, "skipped"),
        ({"Y1": "skipped"}, "skipped"),
        ({}, "skipped"),
    ],
    ids=str,
)
def test_the_result_is_the_worst(results: dict[str, str], expected: str) -> None:
    steps = [result.StepResult(one, value, "w") for one, value in results.items()]
    assert result.overall_result(steps) == expected
    for row, step in zip(result.checks(steps), steps, strict=True):
        counted = {"n": step.result != "skipped", "fail": step.result == "FAIL", "unknown": step.result == "UNKNOWN"}
        assert {key: row[key] for key in counted} == counted


# --------------------------------------------------------------------------- malformed objects

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
FIELDS = {
    "metadata": ("name", "annotations", "labels", "uid"),
    "spec": ("taints", "containers", "initContainers", "priority"),
    "status": ("capacity", "allocatable", "conditions", "phase", "containerStatuses"),
}
ANNOTATIONS = (contract.NODE_CARDS, contract.POD_INDEX, contract.POD_CARD_UNITS, contract.POD_ASSUME_TIME)
PATHS: list[tuple[str, ...]] = [(part,) for part in FIELDS]
PATHS += [(part, field) for part, fields in FIELDS.items() for field in fields]
PATHS += [("metadata", "annotations", name) for name in ANNOTATIONS]
PATHS += [("status", "capacity", contract.RESOURCE_MEMORY)]


def damage(one: object, path: tuple[str, ...], junk: object) -> None:
    for step in path[:-1]:
        one = one.get(step) if isinstance(one, dict) else None
    if isinstance(one, dict):
        one[path[-1]] = junk


@given(st.sampled_from(PATHS), JUNK, st.sampled_from(["node", "other", "ours"]))
def test_a_malformed_object_is_reported(path: tuple[str, ...], junk: object, whose: str) -> None:
    """The node, another pod or the suite's own pods, with an arbitrary value in one field."""
    cluster = Cluster([node("gpu1", [16, 10])])
    cluster.add_other("theirs", "gpu1", 2, 1)
    get, listed = cluster.get, cluster.list_all

    def damaging(*which: str, **more: str) -> list[object]:
        found = listed(*which, **more)
        for item in found:
            ours = isinstance(item, dict) and item.get("metadata", {}).get("namespace") == SPACE
            if (which[1], whose) == ("Node", "node") or (which[1] == "Pod" and whose == ("ours" if ours else "other")):
                damage(item, path, junk)
        return found

    def damaged(ref: object) -> object:
        found = get(ref)
        if whose == "node" and ref.kind == "Node":  # type: ignore[attr-defined]
            damage(found, path, junk)
        return found

    cluster.get, cluster.list_all = damaged, damaging  # type: ignore[method-assign]
    try:
        found = attempt(cluster, timeout=3)
    except ShareError as error:
        assert "\n" not in str(error)
    else:
        assert found["acceptance"]["result"] in ("PASS", "FAIL", "UNKNOWN", "skipped")
    assert cluster.namespaces == {}
    assert cluster.ours() == []


@pytest.mark.parametrize("amount", ["1e30", "9" * 4299 + "Ei", str(2**70)], ids=["1e30", "digits", "2**70"])
def test_numbers_beyond_any_cluster(amount: str) -> None:
    one = node("gpu1", [16, 10])
    del one["metadata"]["annotations"][contract.NODE_CARDS]
    for field in ("capacity", "allocatable"):
        one["status"][field][contract.RESOURCE_MEMORY] = amount
    found = attempt(Cluster([one]))
    assert found["acceptance"]["result"] == "skipped"
    assert "larger than any cluster's" in found["acceptance"]["steps"][0]["what"]


@given(JUNK)
def test_a_malformed_pod_is_an_error(junk: object) -> None:
    try:
        pod_state(junk)  # type: ignore[arg-type]
    except ShareError as error:
        assert "malformed" in str(error)
    known = node_of({"metadata": {"name": "n"}, "status": junk})
    assert known is not None and nodes.shares_memory(known) is False and nodes.other_backend(known) == ""
