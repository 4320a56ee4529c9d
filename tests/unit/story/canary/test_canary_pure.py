# SPDX-License-Identifier: GPL-3.0-or-later
"""The canary's arithmetic against a made-up extender that lays pods as it likes, and its readers against nonsense."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _canary as plan
from ansible_collections.kubegpu.share.plugins.module_utils import _canary_objects as objects
from ansible_collections.kubegpu.share.plugins.module_utils import _canary_result as result
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._canary_judge import (
    by_extender,
    check_placement,
    check_refused,
    check_room,
)
from ansible_collections.kubegpu.share.plugins.module_utils._canary_seen import Seen, read
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from gpushare.contract import Wish as PodWish
from gpushare.extender_filter import refusal
from gpushare.extender_state import node_row, view_of
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from canary_cluster import SPACE, Cluster, attempt, node

FREE = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(FREE, st.randoms(use_true_random=False))
def test_so_many_fit_wherever_they_are_laid(lefts: list[int], chance: object) -> None:
    free = dict(enumerate(lefts))
    found = plan.sizes(free, sum(lefts))
    if not any(lefts):
        assert found is None
        return
    assert found is not None and found.units <= max(lefts)
    for _pod in range(found.pods):
        fitting = [card for card, left in free.items() if left >= found.units]
        assert fitting
        free[chance.choice(fitting)] -= found.units  # type: ignore[attr-defined]
    assert max(free.values()) < found.units
    assert found.decides == (sum(free.values()) >= found.units)


@given(FREE, st.integers(0, 100))
def test_nothing_is_planned_that_kube_scheduler_refuses(lefts: list[int], total: int) -> None:
    found = plan.sizes(dict(enumerate(lefts)), total)
    assert found is None or (found.taken <= total and found.pods <= plan.MOST_PODS)


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
    found = plan.sizes(dict(enumerate(free)), sum(free))
    assert found is not None and (found.units, found.pods, found.decides) == expected


@given(FREE, st.integers(0, 40))
def test_a_fragment_fits_the_node_and_no_card(lefts: list[int], extra: int) -> None:
    one = node("gpu1", [left + extra for left in lefts])
    cluster = Cluster([one])
    for card, left in enumerate(lefts):
        if extra:
            cluster.stranger(f"held-{card}", "gpu1", extra, card)
        assert left == cluster._free("gpu1")[card]
    seen = plan.survey(one, list(cluster.pods.values()))
    assert not isinstance(seen, str)
    found = plan.fragment(seen)
    if found is None:
        assert sum(1 for left in lefts if left) < 2
    else:
        assert max(lefts) < found <= sum(lefts)


@pytest.mark.parametrize("wished", [PodWish(9), PodWish(17), PodWish(16, count=2), PodWish(8, models=("a*",))], ids=str)
def test_the_extender_s_own_words_are_known(wished: PodWish) -> None:
    """Whatever the servers' extender says of a node without room."""
    one = node("gpu1", [16, 16])
    words = refusal(view_of(node_row(one), {0: 9, 1: 9}, 0), wished)
    known = by_extender([f"0/1 nodes are available: 1 {words}."])
    assert known or "model" in words
    assert by_extender(["0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem."]) == ""
    assert by_extender(["0/1 nodes are available: 1 Insufficient cpu."]) == ""
    assert by_extender(["Insufficient GPU Memory in one device"]) != ""


def surveyed(cluster: Cluster) -> plan.Survey:
    seen = plan.survey(cluster.nodes["gpu1"], list(cluster.pods.values()))
    assert not isinstance(seen, str)
    return seen


@pytest.mark.parametrize("stranger", [False, True])
def test_who_overbooked_a_card(stranger: bool) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.stranger("before", "gpu1", 10, 0)
    before = surveyed(cluster)
    ours = cluster.stranger("ours", "gpu1", 6, 0)
    ours["metadata"]["namespace"] = SPACE
    check_room(read(ours), before, surveyed(cluster), SPACE)
    if stranger:
        cluster.stranger("late", "gpu1", 1, 0)
    else:
        cluster.pods["theirs/before"]["spec"]["containers"][0]["resources"]["limits"][contract.RESOURCE_MEMORY] = "11"
    with pytest.raises(result.Churned if stranger else result.Failed, match="is booked with 17 of 16 units"):
        check_room(read(ours), before, surveyed(cluster), SPACE)
    # An extender may give away what a pod holds that is told to end.
    cluster.pods["theirs/late" if stranger else "theirs/before"]["metadata"]["deletionTimestamp"] = "now"
    check_room(read(ours), before, surveyed(cluster), SPACE)


def pending(message: str, reason: str = "Unschedulable") -> Seen:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return read({"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Pending", "conditions": [condition]}})


@pytest.mark.parametrize(
    ("message", "reason", "others", "told", "certain"),
    [
        ("1 Insufficient aliyun.com/gpu-mem", "Unschedulable", False, result.Churned, True),
        ("1 Insufficient aliyun.com/gpu-mem", "Unschedulable", True, result.Churned, False),
        ("connection refused", "SchedulerError", False, result.Failed, True),
        ("1 Insufficient cpu", "Unschedulable", False, result.Told, False),
    ],
    ids=["stale", "others", "error", "cpu"],
)
def test_a_refusal_that_is_not_the_extender_s(
    message: str, reason: str, others: bool, told: type[result.Told], certain: bool
) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    before = surveyed(cluster)
    if others:
        cluster.stranger("late", "gpu1", 1, 0)
    with pytest.raises(result.Told) as raised:
        check_refused(pending(message, reason), 20, before, surveyed(cluster), SPACE, 20)
    assert raised.type is told
    assert bool(getattr(raised.value, "failure", None) or raised.value.result == result.FAIL) is certain


def test_an_unhealthy_card_is_no_place() -> None:
    cards = [contract.Card(0, "GPU-a", 0, 16384, 16, healthy=False), contract.Card(1, "GPU-b", 1, 16384, 16)]
    one = node("gpu1", [16, 16])
    one["metadata"]["annotations"][contract.NODE_CARDS] = contract.cards_to_annotation(cards)
    cluster = Cluster([one])
    pod = cluster.stranger("p", "gpu1", 4, 0)
    seen = plan.survey(one, [pod])
    assert not isinstance(seen, str) and set(seen.view.free) == {1}
    with pytest.raises(result.Told, match="which isn't healthy now") as told:
        check_placement(read(pod), 4, seen)
    assert told.value.result == result.UNKNOWN


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (None, 65534),
        ({}, 65534),
        ({objects.UID_RANGE: "1000680000/10000"}, 1000680000),
        ({objects.UID_RANGE: "0/10000"}, 65534),
        ({objects.UID_RANGE: "x"}, 65534),
        ({objects.UID_RANGE: "99999999999/1"}, 65534),
        ({objects.UID_RANGE: None}, 65534),
        ([], 65534),
    ],
    ids=str,
)
def test_pods_are_never_root(annotations: object, expected: int) -> None:
    assert objects.user_of({"metadata": {"annotations": annotations}}) == expected
    assert objects.user_of(None) == 65534


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
    steps = [result.Step(one, told, "w") for one, told in results.items()]
    assert result.result_of(steps) == expected
    for row, step in zip(result.checks(steps), steps, strict=True):
        assert (row["n"], row["fail"], row["unknown"]) == (
            int(step.result != "skipped"),
            int(step.result == "FAIL"),
            int(step.result == "UNKNOWN"),
        )


# --------------------------------------------------------------------------- nonsense

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
PATHS = [
    ("metadata",),
    ("metadata", "name"),
    ("metadata", "annotations"),
    ("metadata", "annotations", contract.NODE_CARDS),
    ("metadata", "annotations", contract.POD_INDEX),
    ("metadata", "annotations", contract.POD_CARD_UNITS),
    ("metadata", "annotations", contract.POD_ASSUME_TIME),
    ("metadata", "labels"),
    ("metadata", "uid"),
    ("spec",),
    ("spec", "taints"),
    ("spec", "containers"),
    ("spec", "initContainers"),
    ("spec", "priority"),
    ("status",),
    ("status", "capacity"),
    ("status", "capacity", contract.RESOURCE_MEMORY),
    ("status", "allocatable"),
    ("status", "conditions"),
    ("status", "phase"),
    ("status", "containerStatuses"),
]


def spoil(one: object, path: tuple[str, ...], junk: object) -> None:
    for step in path[:-1]:
        one = one.get(step) if isinstance(one, dict) else None
    if isinstance(one, dict):
        one[path[-1]] = junk


@given(st.sampled_from(PATHS), JUNK, st.sampled_from(["node", "stranger", "ours"]))
def test_nonsense_is_told_and_never_passes_for_a_failure(path: tuple[str, ...], junk: object, whom: str) -> None:
    """The node, a pod of somebody or the canary's own pods, with anything at all in one field."""
    one = node("gpu1", [16, 10])
    cluster = Cluster([one])
    pod = cluster.stranger("theirs", "gpu1", 2, 1)
    if whom == "node":
        real = cluster.nodes["gpu1"]
        spoilt = {"gpu1": node("gpu1", [16, 10])}
        spoil(spoilt["gpu1"], path, junk)
        cluster.nodes = {"gpu1": real}
        get, listed = cluster.get, cluster.list_all
        cluster.get = lambda ref: spoilt["gpu1"] if ref.kind == "Node" else get(ref)  # type: ignore[method-assign]
        cluster.list_all = lambda *which, **more: (  # type: ignore[method-assign]
            [spoilt["gpu1"]] if which[1] == "Node" else listed(*which, **more)
        )
    else:
        listed = cluster.list_all

        def spoiling(*which: str, **more: str) -> list[object]:
            found = listed(*which, **more)
            for pod in found:
                ours = isinstance(pod, dict) and pod.get("metadata", {}).get("namespace") == SPACE
                if which[1] == "Pod" and ours == (whom == "ours"):
                    spoil(pod, path, junk)
            return found

        cluster.list_all = spoiling  # type: ignore[method-assign]
    assert pod
    try:
        found = attempt(cluster, timeout=3)
    except ShareError as error:
        assert "\n" not in str(error)
    else:
        assert found["canary"]["result"] in ("PASS", "FAIL", "UNKNOWN", "skipped")
    assert cluster.spaces == {}
    assert cluster.ours() == []


@pytest.mark.parametrize("amount", ["1e30", "9" * 4299 + "Ei", str(2**70)], ids=["1e30", "digits", "2**70"])
def test_numbers_beyond_any_cluster(amount: str) -> None:
    one = node("gpu1", [16, 10])
    del one["metadata"]["annotations"][contract.NODE_CARDS]
    for field in ("capacity", "allocatable"):
        one["status"][field][contract.RESOURCE_MEMORY] = amount
    found = attempt(Cluster([one]))
    assert found["canary"]["result"] == "skipped"
    assert "larger than any cluster's" in found["canary"]["steps"][0]["what"]


@given(JUNK)
def test_a_pod_of_nonsense_is_an_error_in_one_sentence(junk: object) -> None:
    try:
        read(junk)  # type: ignore[arg-type]
    except ShareError as error:
        assert "can't be read" in str(error)
    assert isinstance(plan.survey(junk, []), str)  # type: ignore[arg-type]
    assert plan.name_of(junk) == ""
    assert plan.shares_memory(junk) is False
    assert plan.other_backend(junk) == ""
