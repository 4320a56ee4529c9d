# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from typing import Any

import pytest
from api_double import make_node, make_pod
from gpushare import contract
from gpushare.extender_filter import judge
from gpushare.extender_state import NodeView, PodRow, Reservation, State, node_row, pod_row, unit_of
from gpushare.kube import Json
from gpushare.placement import choose
from hypothesis import given, settings
from hypothesis import strategies as st

NODES = ("a", "b")


def with_uid(pod: Json, uid: str) -> Json:
    pod["metadata"]["uid"] = uid
    return pod


def shown(state: State, node: str) -> NodeView:
    view = state.view(node)
    assert view is not None
    return view


def told(*nodes: Json, pods: tuple[Json, ...] = ()) -> State:
    state = State()
    for node in nodes:
        state.node_changed("", None, node_row(node))
    for number, pod in enumerate(pods):
        pod["metadata"].setdefault("uid", f"u{number}")
        state.pod_changed("", None, pod_row(pod))
    return state


def reserve(state: State, uid: str, node: str, units: int) -> Reservation:
    def place(view: NodeView) -> PodRow | None:
        card = choose("binpack", view.slots(), units)
        return None if card is None else PodRow(uid, "default", uid, node, units, card)

    return state.reserve(uid, node, place)


# ----------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        ({}, True),
        ({"status": {"phase": "Succeeded"}}, False),
        ({"status": {"phase": "Failed"}}, False),
        ({"spec": {"containers": []}}, False),
    ],
)
def test_only_pods_that_hold_memory_are_kept(edit: Json, kept: bool) -> None:
    assert (pod_row({**make_pod("p", 3, "a", 0), **edit}) is not None) is kept
    assert pod_row(make_pod("p", 3)) is None, "not bound"


def test_a_terminating_pod_counts_until_it_is_gone() -> None:
    pod = make_pod("p", 3, "a", 0)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    state = told(make_node("a", 16), pods=(pod,))
    assert shown(state, "a").used == (3,)
    state.pod_changed("", pod_row(pod), None)
    assert shown(state, "a").used == (0,)


@pytest.mark.parametrize(
    ("node", "unit"),
    [
        (make_node("a", 16, 8), "GiB"),
        (make_node("a", 16384, unit=1), "MiB"),
        (
            {
                "metadata": {"name": "a"},
                "status": {"capacity": {"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"}},
            },
            "",
        ),
        (make_node("a", 16, unit=1000), ""),
    ],
)
def test_the_unit_is_told_by_the_cards(node: Json, unit: str) -> None:
    assert unit_of(contract.node_cards(node)) == unit


def test_an_annotation_without_announced_memory_is_no_card() -> None:
    node = make_node("a", 16)
    node["status"]["capacity"]["aliyun.com/gpu-mem"] = "0"
    assert node_row(node).cards == ()


# ----------------------------------------------------------------- sums


def test_fault_03_more_used_than_there_is_never_wraps() -> None:
    state = told(make_node("a", 15, 15), pods=(make_pod("p", 4096, "a", 0),))
    view = shown(state, "a")
    assert view.used == (4096, 0)
    assert view.free(0) == 0
    assert [(slot.card, slot.free) for slot in view.slots()] == [(0, 0), (1, 15)]
    assert view.largest == 15


def test_fault_04_each_card_has_its_own_size() -> None:
    state = told(make_node("a", 1, 10))
    assert shown(state, "a").largest == 10
    assert reserve(state, "p", "a", 10).row == PodRow("p", "default", "p", "a", 10, 1)
    assert reserve(state, "q", "a", 2).row is None
    assert reserve(state, "r", "a", 1).row == PodRow("r", "default", "r", "a", 1, 0)


def test_without_an_annotation_capacity_is_divided_as_upstream_does() -> None:
    node = {
        "metadata": {"name": "a"},
        "status": {"capacity": {"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"}},
    }
    assert [card.units for card in shown(told(node), "a").cards] == [15, 15]


def test_a_pod_whose_card_is_unknown_counts_against_every_card() -> None:
    stray = make_pod("stray", 5, "a")
    state = told(make_node("a", 16, 8), pods=(stray,))
    view = shown(state, "a")
    assert (view.used, view.unplaced, view.largest) == ((0, 0), 5, 11)
    assert [slot.free for slot in view.slots()] == [11, 3]
    # The device plugin names its card.
    named = with_uid(make_pod("stray", 5, "a", 1), "u0")
    state.pod_changed("", pod_row(stray), pod_row(named))
    view = shown(state, "a")
    assert (view.used, view.unplaced, view.largest) == ((0, 5), 0, 16)


@pytest.mark.parametrize("index", ["-1", "7", "x", "1.5", ""])
def test_an_annotation_that_names_no_card_of_the_node_is_an_unknown_card(index: str) -> None:
    pod = make_pod("p", 4, "a", 0)
    pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] = index
    assert shown(told(make_node("a", 16, 16), pods=(pod,)), "a").unplaced == 4


def test_an_unhealthy_card_takes_nobody_and_recovers() -> None:
    state = told(make_node("a", 16, 8, unhealthy=(0,)))
    assert (shown(state, "a").largest, shown(state, "a").biggest) == (8, 8)
    assert reserve(state, "p", "a", 9).row is None
    state.node_changed("", None, node_row(make_node("a", 16, 8)))
    assert shown(state, "a").largest == 16


def test_cards_that_change_are_counted_anew() -> None:
    state = told(make_node("a", 16, 16), pods=(make_pod("p", 4, "a", 1),))
    state.node_changed("", None, node_row(make_node("a", 16)))
    assert (shown(state, "a").used, shown(state, "a").unplaced) == ((0,), 4)
    state.node_changed("", None, node_row(make_node("a", 16, 16)))
    assert (shown(state, "a").used, shown(state, "a").unplaced) == ((0, 4), 0)


def test_pods_may_come_before_their_node_and_outlive_it() -> None:
    pod = make_pod("p", 4, "a", 0)
    state = State()
    state.pod_changed("", None, pod_row(with_uid(pod, "u")))
    assert state.view("a") is None
    node = node_row(make_node("a", 16))
    state.node_changed("", None, node)
    assert shown(state, "a").used == (4,)
    state.node_changed("", node, None)
    assert state.view("a") is None
    state.node_changed("", None, node)
    assert shown(state, "a").used == (4,)


# ----------------------------------------------------------------- holds


def test_a_hold_counts_until_the_watch_shows_the_pod() -> None:
    state = told(make_node("a", 16))
    assert reserve(state, "p", "a", 10).row is not None
    assert reserve(state, "q", "a", 10).row is None
    state.settle("p", 1.0)
    assert shown(state, "a").used == (10,)
    state.pod_changed("", None, pod_row(with_uid(make_pod("p", 10, "a", 0), "p")))
    assert (shown(state, "a").used, state.holds) == ((10,), 0)
    state.release("p")
    assert shown(state, "a").used == (10,), "a late release takes nothing from a bound pod"


def test_a_released_hold_is_free_again() -> None:
    state = told(make_node("a", 16))
    reserve(state, "p", "a", 10)
    state.release("p")
    assert shown(state, "a").used == (0,)


def test_a_pod_is_bound_by_one_at_a_time() -> None:
    state = told(make_node("a", 16), make_node("b", 16))
    reserve(state, "p", "a", 10)
    assert "under way" in reserve(state, "p", "b", 10).error
    state.settle("p", 0.0)
    assert reserve(state, "p", "b", 10).row is not None
    assert (shown(state, "a").used, shown(state, "b").used) == ((0,), (10,))


def test_a_hold_and_the_pod_on_another_node() -> None:
    state = told(make_node("a", 16), make_node("b", 16))
    reserve(state, "p", "a", 10)
    state.pod_changed("", None, pod_row(with_uid(make_pod("p", 10, "b", 0), "p")))
    assert (shown(state, "a").used, shown(state, "b").used) == ((0,), (10,))


def test_the_view_without_ones_own_hold() -> None:
    state = told(make_node("a", 16))
    reserve(state, "p", "a", 10)
    assert shown(state, "a").largest == 6
    mine, other = state.viewer("p")("a"), state.viewer("q")("a")
    assert mine is not None and mine.largest == 16
    assert other is not None and other.largest == 6


# ----------------------------------------------------------------- any order of events

EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("pod"),
            st.integers(0, 5),
            st.sampled_from(NODES),
            st.integers(1, 9),
            st.sampled_from([None, 0, 1, 5]),
        ),
        st.tuples(st.just("gone"), st.integers(0, 5)),
        st.tuples(st.just("replay")),
        st.tuples(st.just("node"), st.sampled_from(NODES), st.lists(st.integers(1, 12), max_size=3)),
        st.tuples(st.just("node gone"), st.sampled_from(NODES)),
        st.tuples(st.just("hold"), st.integers(0, 5), st.sampled_from(NODES), st.integers(1, 9)),
        st.tuples(st.just("settle"), st.integers(0, 5)),
        st.tuples(st.just("release"), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_sums_are_those_of_the_contract_after_any_events(events: list[tuple[Any, ...]]) -> None:
    state = State()
    pods: dict[int, Json] = {}
    nodes: dict[str, Json] = {}
    held: dict[int, PodRow] = {}

    def tell_pod(number: int, pod: Json | None) -> None:
        before = pods.pop(number, None)
        if pod is not None:
            pods[number] = with_uid(pod, str(number))
            held.pop(number, None)
        state.pod_changed("", pod_row(before) if before else None, pod_row(pod) if pod else None)

    for what, *rest in events:
        if what == "pod":
            number, node, units, card = rest
            tell_pod(number, make_pod(f"p{number}", units, node, card))
        elif what == "gone" and rest[0] in pods:
            tell_pod(rest[0], None)
        elif what == "replay":
            for number, pod in list(pods.items()):
                tell_pod(number, pod)
        elif what == "node":
            nodes[rest[0]] = make_node(rest[0], *rest[1])
            state.node_changed("", None, node_row(nodes[rest[0]]))
        elif what == "node gone" and rest[0] in nodes:
            state.node_changed("", node_row(nodes.pop(rest[0])), None)
        elif what == "hold":
            number, node, units = rest
            reservation = reserve(state, str(number), node, units)
            if number in pods:
                assert reservation.bound_to == contract.pod_node(pods[number])
            elif reservation.row is not None:
                held[number] = reservation.row
            elif not reservation.error:
                # No room: an earlier hold, which this bind would have replaced, is given up.
                held.pop(number, None)
        elif what == "settle":
            state.settle(str(rest[0]), 0.0)
        elif what == "release":
            state.release(str(rest[0]))
            held.pop(rest[0], None)

    for name in NODES:
        view = state.view(name)
        assert (view is None) == (name not in nodes)
        if view is None:
            continue
        here = [pod for pod in pods.values() if contract.pod_node(pod) == name]
        booked = [make_pod(row.name, row.units, name, row.card) for row in held.values() if row.node == name]
        cards = contract.node_cards(nodes[name])
        used, unknown = contract.used_units(cards, here + booked)
        assert dict(zip((card.index for card in view.cards), view.used, strict=True)) == used
        assert view.unplaced == unknown
        room = max((card.units - used[card.index] - unknown for card in cards), default=0)
        assert view.largest == max(0, room)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 16), st.sampled_from(["bind", "seen", "free", "fail"]))),
)
def test_binds_alone_never_overbook_a_card(sizes: list[int], steps: list[tuple[int, int, str]]) -> None:
    state = told(make_node("a", *sizes))
    bound: dict[int, PodRow] = {}
    waiting: dict[int, PodRow] = {}
    for number, units, step in steps:
        uid = str(number)
        if step == "bind" and number not in bound and number not in waiting:
            row = reserve(state, uid, "a", units).row
            if row is not None:
                waiting[number] = row
        elif step == "seen" and number in waiting:
            bound[number] = waiting.pop(number)
            state.pod_changed("", None, bound[number])
        elif step == "free" and number in bound:
            state.pod_changed("", bound.pop(number), None)
        elif step == "fail" and number in waiting:
            state.release(uid)
            del waiting[number]
        view = shown(state, "a")
        assert all(used <= size for used, size in zip(view.used, sizes, strict=True))
        assert sum(view.used) == sum(row.units for row in (*bound.values(), *waiting.values()))


# ----------------------------------------------------------------- the filter's words


def test_words() -> None:
    stray = make_pod("stray", 2, "stray")
    over = make_pod("over", 99, "over", 0)
    half = make_pod("half", 13, "half", 0)
    state = told(
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
    passed, failed, hopeless = judge(names, state.view, 5)
    assert passed == ["good"]
    assert failed == {
        "half": "largest free share on one card is 4 of 5 GiB",
        "stray": "largest free share on one card is 4 of 5 GiB, with 2 GiB held by pods whose card isn't known yet",
        "over": "largest free share on one card is 0 of 5 GiB",
        "who": "the gpushare extender doesn't know this node yet",
    }
    assert hopeless == {
        "small": "largest healthy card holds 4 of 5 GiB",
        "mib": "largest healthy card holds 4 of 5 MiB",
        "none": "no GPU memory is announced",
        "ill": "no card is healthy",
    }


def test_words_without_a_known_unit() -> None:
    node = {
        "metadata": {"name": "a"},
        "status": {"capacity": {"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"}},
    }
    state = told(node, pods=(make_pod("p", 12, "a", 0), make_pod("q", 12, "a", 1)))
    assert judge(["a"], state.view, 5).failed == {"a": "largest free share on one card is 3 of 5"}
