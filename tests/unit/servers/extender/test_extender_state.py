# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's state after any events, and the filter's decision from it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from api_double import make_node, make_pod
from gpushare.extender.filter import evaluate, refusal
from gpushare.extender.placement import choose
from gpushare.extender.state import (
    BIND_IN_PROGRESS,
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    Claim,
    NodeView,
    PodRow,
    Reservation,
    State,
    node_row,
    pod_row,
    unit_of,
)
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Demand
from gpushare.shared._core.types import JsonObject
from hypothesis import given, settings
from hypothesis import strategies as st

NODES = ("a", "b")


def with_uid(pod: JsonObject, uid: str) -> JsonObject:
    pod["metadata"]["uid"] = uid
    return pod


def shown(state: State, node: str) -> NodeView:
    return {view.name: view for view in state.views()}[node]


def state_of(*nodes: JsonObject, pods: tuple[JsonObject, ...] = ()) -> State:
    state = State()
    for node in nodes:
        state.node_changed("", None, node_row(node))
    for number, pod in enumerate(pods):
        pod["metadata"].setdefault("uid", f"u{number}")
        state.pod_changed("", None, pod_row(pod))
    return state


def reserve(
    state: State, uid: str, node: str, units: int, count: int = 1, priority: int = LOWEST_PRIORITY
) -> Reservation:
    demand = Demand(units, count)

    def place(view: NodeView) -> PodRow | None:
        cards = choose("binpack", view.slots(demand), demand)
        return booked(uid, node, demand.share, *cards) if cards else None

    return state.reserve(uid, node, place, priority)


def booked(uid: str, node: str, share: int, *cards: int) -> PodRow:
    return PodRow(uid, "default", uid, node, share * len(cards), tuple((card, share) for card in cards))


# ----------------------------------------------------------------- rows


@pytest.mark.parametrize("change", [{"status": {"phase": "Failed"}}, {"spec": {"containers": []}}, make_pod("p", 3)])
def test_only_pods_that_hold_memory_are_kept(change: JsonObject) -> None:
    """Not those that have finished, request nothing, or aren't bound."""
    assert pod_row(make_pod("p", 3, "a", 0)) is not None
    assert pod_row(make_pod("p", 3, "a", 0) | change) is None


def test_fault_08_a_terminating_pod_counts_until_it_is_gone() -> None:
    pod = make_pod("p", 3, "a", 0)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    state = state_of(make_node("a", 16), pods=(pod,))
    assert shown(state, "a").used == (3,)
    state.pod_changed("", pod_row(pod), None)
    assert shown(state, "a").used == (0,)


NO_ANNOTATION = {
    "metadata": {"name": "a"},
    "status": {"capacity": {contract.RESOURCE_MEMORY: "30", contract.RESOURCE_COUNT: "2"}},
}


@pytest.mark.parametrize(
    ("node", "unit"),
    [
        (make_node("a", 16, 8), "GiB"),
        (make_node("a", 16384, unit=1), "MiB"),
        (NO_ANNOTATION, ""),
        (make_node("a", 16, unit=1000), ""),
    ],
)
def test_the_unit_follows_from_the_cards(node: JsonObject, unit: str) -> None:
    assert unit_of(contract.node_cards(node)) == unit


def test_an_annotation_without_announced_memory_is_no_card() -> None:
    node = make_node("a", 16)
    node["status"]["capacity"]["aliyun.com/gpu-mem"] = "0"
    assert node_row(node).cards == ()


# ----------------------------------------------------------------- holds


def test_a_pod_is_bound_by_one_request_at_a_time() -> None:
    state = state_of(make_node("a", 16), make_node("b", 16))
    reserve(state, "p", "a", 10)
    assert reserve(state, "p", "b", 10).refusal == BIND_IN_PROGRESS
    state.settle("p", 0.0)
    assert reserve(state, "p", "b", 10).row is not None
    assert (shown(state, "a").used, shown(state, "b").used) == ((0,), (10,))


def test_a_pods_own_reservation_is_excluded_from_its_view() -> None:
    state = state_of(make_node("a", 16))
    reserve(state, "p", "a", 10)
    assert shown(state, "a").largest == 6
    mine, other = state.viewer("p")("a"), state.viewer("q")("a")
    assert mine is not None and mine.largest == 16
    assert other is not None and other.largest == 6


# ----------------------------------------------------------------- claims


def claim(uid: str, node: str, *cards: tuple[int, int], priority: int = 10, victims: tuple[str, ...] = ()) -> Claim:
    return Claim(uid, "default", uid, node, cards, priority, frozenset(victims))


def test_a_claim_binds_pods_of_no_higher_priority() -> None:
    state = state_of(make_node("a", 16), make_node("b", 16))
    state.claim(claim("high", "a", (0, 12)))

    def seen(uid: str, priority: int) -> int:
        view = state.viewer(uid, priority)("a")
        assert view is not None
        return view.largest

    assert (seen("low", 0), seen("same", 10), seen("higher", 11), seen("high", 10)) == (4, 4, 16, 16)
    assert reserve(state, "low", "a", 5, priority=0).row is None
    assert reserve(state, "high", "a", 12, priority=10).row is not None
    assert shown(state, "a").used == (12,), "a claim is no booking"


def test_a_claim_ends_when_its_pod_is_bound() -> None:
    state = state_of(make_node("a", 16), make_node("b", 16))
    state.claim(claim("high", "a", (0, 12)))
    state.pod_changed("", None, pod_row(with_uid(make_pod("high", 12, "b", 0), "high")))
    assert state.claims() == []
    state.claim(claim("high", "a", (0, 12)))
    assert state.claims() == [], "a bound pod needs none"


@pytest.mark.parametrize("gone", [True, False])
def test_an_offer_is_a_claim_as_soon_as_a_victim_ends(gone: bool) -> None:
    victim = with_uid(make_pod("v", 16, "b", 0), "v")
    state = state_of(make_node("a", 16), make_node("b", 16), pods=(victim,))
    state.offer("high", [claim("high", "a", (0, 12), victims=("u",)), claim("high", "b", (0, 12), victims=("v",))])
    assert state.claims() == []
    ending = with_uid(make_pod("v", 16, "b", 0), "v")
    ending["metadata"]["deletionTimestamp"] = "x"
    state.pod_changed("", pod_row(victim), None if gone else pod_row(ending))
    assert [claim.node for claim in state.claims()] == ["b"]
    assert state._offers == {}


def test_outranks_compares_with_the_lowest_priority() -> None:
    pod = with_uid(make_pod("p", 1, "a", 0, priority=5), "p")
    state = state_of(make_node("a", 16), pods=(pod,))
    assert (state.outranks(5), state.outranks(6)) == (False, True)
    state.pod_changed("", pod_row(pod), None)
    assert not state.outranks(6)


def test_a_static_pod_has_the_highest_priority() -> None:
    pod = make_pod("p", 1, "a", 0)
    pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "x"
    row = pod_row(pod)
    assert row is not None and row.priority == HIGHEST_PRIORITY


# ----------------------------------------------------------------- any order of events

NUMBERS, NAMES = st.integers(0, 5), st.sampled_from(NODES)
CARDS = st.sampled_from([None, -1, 0, 1, 5, "0,1", "0,5"])
BOOKINGS = st.dictionaries(NUMBERS, st.sampled_from([(0,), (1,), (0, 1), (7,)]), max_size=3)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("pod"), NUMBERS, NAMES, st.integers(1, 9), CARDS),
        st.tuples(st.just("node"), NAMES, st.lists(st.integers(1, 12), max_size=3)),
        st.tuples(st.just("hold"), NUMBERS, NAMES, st.integers(1, 4), st.sampled_from([1, 2])),
        st.tuples(st.just("others"), NAMES, BOOKINGS),
        st.tuples(st.sampled_from(["gone", "settle", "release"]), NUMBERS),
        st.tuples(st.just("node gone"), NAMES),
        st.tuples(st.just("replay")),
    ),
    max_size=40,
)


def bound_pod(number: int, node: str, units: int, card: int | str | None) -> JsonObject:
    if not isinstance(card, str):
        return make_pod(f"p{number}", units, node, card)
    pod = make_pod(f"p{number}", units, node, 0)
    pod["metadata"]["annotations"][contract.POD_INDICES] = card
    return pod


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_sums_are_those_of_the_contract_after_any_events(events: list[tuple[Any, ...]]) -> None:
    state = State()
    pods: dict[int, JsonObject] = {}
    nodes: dict[str, JsonObject] = {}
    held: dict[int, PodRow] = {}
    others: dict[tuple[int, str], PodRow] = {}

    def change_pod(number: int, pod: JsonObject | None) -> None:
        before = pods.pop(number, None)
        if pod is not None:
            pods[number] = with_uid(pod, str(number))
            held.pop(number, None)
            for name in NODES:
                others.pop((number, name), None)
        state.pod_changed("", pod_row(before) if before else None, pod_row(pod) if pod else None)

    for what, *rest in events:
        if what == "pod":
            number, node, units, card = rest
            change_pod(number, bound_pod(number, node, units, card))
        elif what == "gone" and rest[0] in pods:
            change_pod(rest[0], None)
        elif what == "replay":
            for number, pod in list(pods.items()):
                change_pod(number, pod)
        elif what == "node":
            nodes[rest[0]] = make_node(rest[0], *rest[1])
            state.node_changed("", None, node_row(nodes[rest[0]]))
        elif what == "node gone" and rest[0] in nodes:
            state.node_changed("", node_row(nodes.pop(rest[0])), None)
        elif what == "hold":
            number, node, share, count = rest
            reservation = reserve(state, str(number), node, share * count, count)
            if number in pods:
                assert reservation.bound_to == contract.pod_node(pods[number])
            elif reservation.row is not None:
                held[number] = reservation.row
            elif not reservation.refusal:
                # No free card: an earlier reservation, which this bind would have replaced, is released.
                held.pop(number, None)
        elif what == "others":
            node, bookings = rest
            rows = {number: booked(str(number), node, 2, *cards) for number, cards in bookings.items()}
            state.set_foreign(node, list(rows.values()))
            others = {key: row for key, row in others.items() if key[1] != node}
            others |= {(number, node): row for number, row in rows.items() if number not in pods}
        elif what == "settle":
            state.settle(str(rest[0]), 0.0)
        elif what == "release":
            state.release(str(rest[0]))
            held.pop(rest[0], None)

    assert state.holds == len(held)
    views = {view.name: view for view in state.views()}
    for name in NODES:
        view = views.get(name)
        assert (view is None) == (name not in nodes)
        if view is None:
            continue
        here = [pod for pod in pods.values() if contract.pod_node(pod) == name]
        mine = [row for row in held.values() if row.node == name]
        theirs = [
            row for (number, node), row in others.items() if node == name and row.uid not in {one.uid for one in mine}
        ]
        cards = contract.node_cards(nodes[name])
        used, unknown = contract.used_units(cards, here)
        for index, units in (share for row in (*mine, *theirs) for share in row.cards):
            if index in used:
                used[index] += units
            else:
                unknown += units
        assert dict(zip((card.index for card in view.cards), view.used, strict=True)) == used
        assert view.unplaced == unknown
        room = max((card.units - used[card.index] - unknown for card in cards), default=0)
        assert view.largest == max(0, room)


# ----------------------------------------------------------------- the filter


def test_refusal_messages() -> None:
    stray = make_pod("stray", 2, "stray")
    over = make_pod("over", 99, "over", 0)
    half = make_pod("half", 13, "half", 0)
    state = state_of(
        make_node("good", 16, 8),
        make_node("half", 16, 4),
        make_node("small", 4, 4),
        make_node("mib", 4, unit=1),
        make_node("none"),
        make_node("ill", 16, unhealthy=(0,)),
        make_node("stray", 6),
        make_node("over", 16),
        pods=(stray, over, half),
    )
    names = ["good", "half", "small", "mib", "none", "ill", "stray", "over", "who"]
    passed, failed, unresolvable = evaluate(names, state.viewer(""), Demand(5))
    assert passed == ["good"]
    assert failed == {
        "half": "InsufficientGPUMemory: largest free share on one card is 4 of 5 GiB",
        "stray": "InsufficientGPUMemory: largest free share on one card is 4 of 5 GiB, with 2 GiB held by pods whose "
        "card isn't known yet",
        "over": "InsufficientGPUMemory: largest free share on one card is 0 of 5 GiB",
        "who": "NodeUnknown: the gpushare extender doesn't know this node yet",
    }
    assert unresolvable == {
        "small": "CardTooSmall: largest healthy card holds 4 of 5 GiB",
        "mib": "CardTooSmall: largest healthy card holds 4 of 5 MiB",
        "none": "NoGPUMemory: the node announces no GPU memory",
        "ill": "NoHealthyCard: no card is healthy",
    }


def test_refusal_messages_without_a_known_unit() -> None:
    """Without an annotation, capacity is divided by the number of cards, as upstream does."""
    state = state_of(NO_ANNOTATION, pods=(make_pod("p", 12, "a", 0), make_pod("q", 12, "a", 1)))
    assert evaluate(["a"], state.viewer(""), Demand(5)).failed == {
        "a": "InsufficientGPUMemory: largest free share on one card is 3 of 5"
    }


def test_refusal_messages_for_several_cards_and_models() -> None:
    state = state_of(
        make_node("both", 16, 16, models=("NVIDIA A100", "NVIDIA A100")),
        make_node("one", 16, 16, models=("NVIDIA A100", "NVIDIA A100")),
        make_node("small", 16, 2, models=("NVIDIA A100", "NVIDIA A100")),
        make_node("mixed", 16, 16, models=("NVIDIA A100", "Tesla T4")),
        make_node("other", 16, 16, models=("Tesla T4", "Tesla T4")),
        make_node("untold", 16, 16, models=("", "")),
        pods=(make_pod("p", 14, "one", 1),),
    )
    names = ["both", "one", "small", "mixed", "other", "untold", "who"]
    demand = Demand(6, 2, models=("*a100*",))
    assert evaluate(names, state.viewer(""), demand) == (
        ["both"],
        {
            "one": "InsufficientGPUMemory: 1 of 2 requested cards have 3 GiB free",
            "who": "NodeUnknown: the gpushare extender doesn't know this node yet",
        },
        {
            "small": "CardTooSmall: 1 of 2 requested cards can hold 3 GiB",
            "mixed": "CardTooSmall: 1 of 2 requested cards can hold 3 GiB",
            "other": "NoMatchingModel: no healthy card is of a model that the pod accepts",
            "untold": "NoMatchingModel: no healthy card is of a model that the pod accepts",
        },
    )
    assert evaluate(names, state.viewer(""), Demand(17, models=("*a100*",))).unresolvable["mixed"] == (
        "CardTooSmall: largest healthy card of a model that the pod accepts holds 16 of 17 GiB"
    )
    assert evaluate(["other", "mixed"], state.viewer(""), Demand(6, excluded=("tesla*",))).passed == ["mixed"]


def test_refusals_name_the_reason_of_unhealthy_cards() -> None:
    node = make_node("a", 16, unhealthy=(0,))
    cards = json.loads(node["metadata"]["annotations"][contract.NODE_CARDS])
    cards[0]["reason"] = "MIG is on"
    node["metadata"]["annotations"][contract.NODE_CARDS] = json.dumps(cards)
    assert evaluate(["a"], state_of(node).viewer(""), Demand(1)).unresolvable == {
        "a": "NoHealthyCard: no card is healthy: MIG is on"
    }


SIZES = st.sampled_from([0, 2, 5, 8])
NODE = st.tuples(
    st.lists(st.tuples(SIZES, st.booleans(), st.sampled_from(["A", "B", "", "A\nB"])), max_size=4),
    st.lists(st.tuples(st.sampled_from([1, 4, 8]), st.integers(-1, 3)), max_size=3),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(NODE, min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 3),
    st.sampled_from([(), ("a",), ("*",), ("a?b",), ("c",)]),
    st.sampled_from([(), ("b",)]),
)
def test_the_filter_passes_a_node_exactly_if_a_bind_finds_the_cards(
    nodes: list[tuple[list[tuple[int, bool, str]], list[tuple[int, int]]]],
    share: int,
    count: int,
    models: tuple[str, ...],
    excluded: tuple[str, ...],
) -> None:
    """Messages and the choice of models are computed once for many nodes, and must be right for each of them."""
    made, pods = [], []
    for number, (cards, held) in enumerate(nodes):
        unhealthy = tuple(at for at, (_size, ill, _model) in enumerate(cards) if ill)
        kinds = tuple(model for _size, _ill, model in cards)
        made.append(make_node(f"n{number}", *(card[0] for card in cards), unhealthy=unhealthy, models=kinds))
        pods += [make_pod(f"p{number}-{at}", units, f"n{number}", card) for at, (units, card) in enumerate(held)]
    state, empty = state_of(*made, pods=tuple(pods)), state_of(*made)
    names = [node["metadata"]["name"] for node in made]
    demand = Demand(share * count, count, models=models, excluded=excluded)
    result = evaluate(names, state.viewer(""), demand)
    for name in names:
        alone = evaluate([name], state.viewer(""), demand)
        assert (name in result.passed) == (alone.passed == [name])
        assert result.failed.get(name) == alone.failed.get(name)
        assert result.unresolvable.get(name) == alone.unresolvable.get(name)
        assert (name in result.passed) == bool(choose("binpack", shown(state, name).slots(demand), demand))
        assert (name in result.unresolvable) == (not choose("binpack", shown(empty, name).slots(demand), demand))
        if name not in result.passed:
            text = str(refusal(shown(state, name), demand))
            assert text in (result.failed.get(name), result.unresolvable.get(name))


def test_a_filter_iterates_over_no_single_card() -> None:
    """The cost grows with the number of nodes and not with their cards."""

    class Untouched(tuple):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("cards were read")

    state = state_of(*(make_node(f"n{number}", *[16] * 8, models=("A",) * 8) for number in range(3)))
    views = {view.name: dataclasses.replace(view, cards=Untouched(view.cards)) for view in state.views()}
    for demand in (Demand(16, 2), Demand(4, models=("a",)), Demand(17, models=("a",)), Demand(8, 8, excluded=("a",))):
        result = evaluate(views, views.get, demand)
        assert len(result.passed) + len(result.failed) + len(result.unresolvable) == 3


def test_nodes_with_memory_released_since_a_version() -> None:
    pods = [with_uid(make_pod(name, 4, node, 0), name) for name, node in (("p", "a"), ("q", "b"), ("r", "c"))]
    state = state_of(*(make_node(name, 16) for name in "abc"), pods=tuple(pods))
    began = state.freed
    assert state.freed_since(began) == []
    state.pod_changed("", pod_row(pods[1]), None)
    state.pod_changed("", pod_row(pods[0]), None)
    assert set(state.freed_since(began)) == {"a", "b"}
    between = state.freed
    state.claim(Claim("high", "default", "high", "c", ((0, 4),), 5, frozenset()))
    state.unclaim("high")
    state.node_changed("", None, node_row(make_node("b", 24)))
    assert set(state.freed_since(between)) == {"b", "c"}
    assert set(state.freed_since(began)) == {"a", "b", "c"}
    state.node_changed("", node_row(make_node("b", 24)), None)
    assert set(state.freed_since(began)) == {"a", "c"}
    reserve(state, "s", "a", 4)
    state.release("s")
    assert state.freed_since(state.freed - 1) == ["a"]
