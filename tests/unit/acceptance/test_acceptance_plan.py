# SPDX-License-Identifier: GPL-3.0-or-later
"""The pure part of acceptance: sizes, refusals, the table."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as plan
from ansible_collections.kubegpu.share.plugins.module_utils._acceptance_plan import NodeView, Row
from hypothesis import given
from hypothesis import strategies as st


def seen(sizes: list[int], free: list[int] | None = None) -> NodeView:
    left = dict(enumerate(sizes if free is None else free))
    return NodeView("n", left, dict(enumerate(sizes)), {index: index for index in left}, sum(left.values()))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (seen([16, 16]), ([8, 9], 9)),
        (seen([16, 16], [13, 16]), ([14], 14)),
        (seen([16, 16], [10, 9]), ([], 11)),
        (seen([8, 16]), ([9], 9)),
        (seen([1, 1]), ([], 2)),
        (seen([2, 2]), ([], 3)),
    ],
)
def test_fragment(node: NodeView, expected: tuple[list[int], int]) -> None:
    assert plan.fragment(node) == expected


@pytest.mark.parametrize("node", [seen([16]), seen([16, 16], [16, 0]), seen([16, 16], [0, 0])])
def test_fragment_says_why_not(node: NodeView) -> None:
    assert isinstance(plan.fragment(node), str)


@st.composite
def nodes(draw: st.DrawFn) -> NodeView:
    sizes = draw(st.lists(st.integers(1, 200), min_size=1, max_size=8))
    return seen(sizes, [draw(st.integers(0, size)) for size in sizes])


@given(nodes())
def test_a_fragment_fits_the_node_and_no_card(node: NodeView) -> None:
    planned = plan.fragment(node)
    if isinstance(planned, str):
        # Nothing is claimed to be impossible that isn't.
        assert len(node.sizes) < 2 or max(node.free.values()) == sum(node.free.values())
        return
    fillers, units = planned
    left = dict(node.free)
    for size in fillers:
        card = plan.binpack(left, size)
        assert card is not None
        left[card] -= size
    assert max(left.values()) < units <= sum(left.values())
    assert not fillers or units <= max(node.sizes.values())


@given(nodes())
def test_two_containers_fit_one_card_and_would_split(node: NodeView) -> None:
    sizes = plan.two_containers(node.free)
    if sizes is None:
        assert max(node.free.values()) < 2
        return
    together = plan.binpack(node.free, sum(sizes))
    assert together is not None
    if len({left for left in node.free.values() if left > 0}) > 1:
        assert plan.binpack(node.free, sizes[0]) != together


def test_the_freest_node_with_two_cards_is_chosen() -> None:
    one = NodeView("single", {0: 80}, {0: 80}, {0: 0}, 80)
    two = NodeView("double", {0: 4, 1: 4}, {0: 16, 1: 16}, {0: 0, 1: 1}, 8)
    tight = NodeView("tight", {0: 2, 1: 2}, {0: 16, 1: 16}, {0: 0, 1: 1}, 4)
    stray = NodeView("stray", {0: 4, 1: 4}, {0: 16, 1: 16}, {0: 0, 1: 1}, 5, stray=3)
    assert plan.choose_node([stray, tight, one, two]) == two
    assert plan.choose_node([]) is None


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("0/3 nodes are available: 1 largest free share on one card is 3 of 5 GiB.", True),
        ("0/2 nodes are available: 2 Insufficient GPU Memory in one device.", True),
        ("0/3 nodes are available: 1 Insufficient aliyun.com/gpu-mem, 2 node(s) didn't match affinity.", False),
        ("0/3 nodes are available: 3 Insufficient cpu.", False),
    ],
)
def test_whose_refusal(text: str, own: bool) -> None:
    assert (plan.by_extender([text]) == text) is own


def test_refusals_come_from_the_pods_own_events_only() -> None:
    pod = {"metadata": {"uid": "u1"}, "status": {"conditions": []}}
    events = [
        {"reason": "FailedScheduling", "message": "mine", "involvedObject": {"uid": "u1"}},
        {"reason": "FailedScheduling", "message": "not mine", "involvedObject": {"uid": "u2"}},
        {"reason": "Scheduled", "message": "other", "involvedObject": {"uid": "u1"}},
    ]
    assert plan.refusals(pod, events) == ["mine"]


def test_only_card_nodes_are_devices() -> None:
    assert plan.device_files("null\nnvidia-uvm\nnvidia10\nnvidia0\nnvidiactl\nnvidia-caps\n") == ["nvidia0", "nvidia10"]


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
def test_usable(change: dict[str, object], expected: bool) -> None:
    node = {
        "metadata": {"name": "n"},
        "spec": change,
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"aliyun.com/gpu-mem": "32"}},
    }
    assert plan.usable(node, {}) is expected
    node["status"]["conditions"][0]["status"] = "Unknown"  # type: ignore[index]
    assert plan.usable(node, {}) is False


def test_table() -> None:
    text = plan.table([Row("a", "pass", "card 0"), Row("b", "skip", "one card")], "node n, image i")
    width = len(plan.CHECKS["b"])
    assert text.splitlines() == [
        "node n, image i",
        f"ID  {'CHECK':{width}}  RESULT  DETAIL",
        f"a   {plan.CHECKS['a']:{width}}  pass    card 0",
        f"b   {plan.CHECKS['b']:{width}}  skip    one card",
        "1 passed, 0 failed, 1 skipped",
    ]
