# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods of several cards, and pods that request a model: the choice, the allocation and the annotations."""

from __future__ import annotations

import json
import time
import typing as t

import pytest
from gpushare.kubelet import wire
from gpushare.kubelet.errors import NoDevices
from gpushare.kubelet.pod_resources import Entry
from gpushare.plugin import admission, steering
from gpushare.shared._contracts import gpushare as contract
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_fakes import (
    Node,
    Rejected,
    card,
    container,
    environment,
    fixes,
    ids,
    make_pod,
    refused_allocation,
    seen,
    until,
)

TWO = {contract.POD_CARD_COUNT: "2"}
NOTHING = steering.ReservedUnits({}, {})


@pytest.fixture
def node(make: t.Callable[..., Node]) -> Node:
    return make(seen(0), seen(1), seen(2)).up()


def visible(*indices: int) -> str:
    return ",".join(seen(index).uuid for index in indices)


# --------------------------------------------------------------------------- on a node


def test_booked_on_two_cards(node: Node) -> None:
    pod = node.run(make_pod("pod", 4, 0, 2, booked=(0, 2), requests=TWO))
    assert node.kubelet.envs[pod["metadata"]["uid"]] == {
        "c0": environment(visible(0, 2), card=0, pod=6, container=4),
        "c2": environment(visible(0, 2), card=0, pod=6, container=2),
    }
    held = node.kubelet.devices[pod["metadata"]["uid"]]
    assert sorted(held["c0"]) == [*ids(0, 0, 1), *ids(2, 0, 1)] and sorted(held["c2"]) == [*ids(0, 2), *ids(2, 2)]
    until(lambda: node.agrees(pod))
    assert node.written() == [{contract.POD_ASSIGNED: "true"}]
    assert node.kube.events == []


def test_without_a_booking_all_cards_are_annotated(node: Node) -> None:
    node.run(make_pod("filler", 14, booked=0))
    pod = node.run(make_pod("pod", 8, requests=TWO))
    assert node.visible(pod) == {visible(1, 2)}
    until(lambda: node.agrees(pod))
    annotations = node.annotations(pod)
    assert annotations[contract.POD_INDEX] == "1" and annotations[contract.POD_INDICES] == "1,2"
    assert json.loads(annotations[contract.POD_ALLOCATION]) == {"0": {"1": 4, "2": 4}}
    until(lambda: node.kube.reasons("default/pod") == ["GpuCardAssigned"])
    assert node.kube.events[0]["message"] == (
        f"kubelet gave this pod 8 units of card 1 ({seen(1).uuid}), card 2 ({seen(2).uuid})"
    )
    assert contract.used_units(contract.node_cards(node.kube.node()), [node.kube.pod("default/pod")]) == (
        {0: 0, 1: 4, 2: 4},
        0,
    )


def test_the_booked_cards_are_full(node: Node) -> None:
    node.run(make_pod("thief", 12))
    pod = node.run(make_pod("pod", 16, booked=(0, 1), requests=TWO))
    assert node.visible(pod) == {visible(1, 2)}
    until(lambda: node.agrees(pod))
    until(lambda: node.kube.reasons("default/pod") == ["GpuCardCorrected"])
    assert [event["message"] for event in node.kube.events if event["reason"] == "GpuCardCorrected"] == [
        f"kubelet gave this pod units of card 1 ({seen(1).uuid}), card 2 ({seen(2).uuid}), not of card 0, card 1"
    ]


def test_moved_from_two_cards_to_one_it_loses_their_annotations(node: Node) -> None:
    """Its user removed the annotation between the extender's bind and kubelet's admission."""
    pod = node.run(make_pod("pod", 4, booked=(0, 2)))
    assert node.visible(pod) == {visible(0)}
    until(lambda: node.agrees(pod))
    assert contract.POD_INDICES not in node.annotations(pod) and contract.POD_ALLOCATION not in node.annotations(pod)


def test_an_invalid_annotation_is_refused_with_its_value(node: Node) -> None:
    message = r"^InvalidAnnotation: pod default/pod can't be served: kubegpu\.share/card-count: 'zwei' is no number"
    with pytest.raises(Rejected, match=message):
        node.run(make_pod("pod", 4, requests={contract.POD_CARD_COUNT: "zwei"}))
    assert node.kubelet.used() == set()


def test_init_containers_of_several_cards(node: Node) -> None:
    inits = [container("load", 2), container("side", 2, "Always"), container("warm", 4)]
    pod = node.run(make_pod("pod", 6, 2, inits=inits, booked=(1, 2), requests=TWO))
    assert node.visible(pod) == {visible(1, 2)}
    until(lambda: node.agrees(pod))
    # By Kubernetes' rule: the sidecar and both containers.
    assert contract.pod_units(pod) == 10 and len(node.kubelet.used()) == 10
    # Reused units, too, are known as this pod's.
    environments = node.kubelet.envs[pod["metadata"]["uid"]].values()
    assert {environment["ALIYUN_COM_GPU_MEM_POD"] for environment in environments} == {"10"}


def test_partly_reused_init_units_are_refused_at_the_first_container(node: Node) -> None:
    """Of an init container's units kubelet takes any: two of the same card, perhaps."""
    pod = make_pod("pod", 2, inits=[container("load", 4)], booked=(0, 1), requests=TWO)
    with pytest.raises(Rejected, match="its container c0 asks for 2 units and would be given a part of the 4 that an"):
        node.run(pod)
    assert node.kubelet.used() == set()


def test_plugin_restarted_between_the_two_calls_with_a_stale_mirror(node: Node) -> None:
    """Units of two cards are only right for a pod that asked for them, so the API is asked who it is."""
    node.running.pods.items = list  # type: ignore[method-assign, assignment]
    node.kubelet.before_allocate = node.running.admission._asked.clear
    pod = make_pod("pod", 4, booked=(0, 2), requests=TWO)
    node.kube.put(pod)
    node.kubelet.add(pod)
    assert node.visible(pod) == {visible(0, 2)}


def test_unsteered_kubelet_never_assigns_unequal_shares(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """IDs at random: a container gets equal shares of two cards or fails, and its annotations match its units."""
    # On a busy machine the API of the test answers late; then the plugin can't know which pod kubelet asks for.
    monkeypatch.setattr(admission, "LOOKUP_SECONDS", 30.0)
    node.kubelet.steered = False
    refused = given_ = 0
    for n in range(12):
        pod = make_pod(f"pod{n}", 2, requests=TWO)
        try:
            node.run(pod)
        except Rejected as error:
            refused += 1
            assert f"pod default/pod{n}: a container's 2 units must be equally many of each of 2 cards" in str(error)
            continue
        given_ += 1
        assert len(node.cards_of(pod)) == 2
        until(lambda pod=pod: node.agrees(pod))
    assert refused and given_


def test_one_of_two_cards_fails(node: Node) -> None:
    pod = node.run(make_pod("pod", 4, booked=(0, 2), requests=TWO))
    other = node.run(make_pod("other", 4, booked=1))
    until(lambda: node.agrees(pod) and node.agrees(other))
    node.nvml.fail(2, 79)
    until(lambda: node.kube.reasons("default/pod") == ["GpuCardUnhealthy"])
    assert node.kube.reasons("default/other") == []
    with pytest.raises(Rejected, match="requests 2 units"):
        node.run(make_pod("third", 6, requests={contract.POD_CARD_COUNT: "3"}))
    again = node.run(make_pod("again", 4, requests=TWO))
    assert node.visible(again) == {visible(0, 1)}


def test_models(make: t.Callable[..., Node]) -> None:
    node = make(seen(0, model="NVIDIA A100"), seen(1, model="Tesla T4"), seen(2, model="NVIDIA L4")).up()
    for name, requests, expected in (
        ("t4", {contract.POD_MODELS: "*t4"}, {visible(1)}),
        ("no-a100", {contract.POD_EXCLUDE_MODELS: "*A100*, *T4*"}, {visible(2)}),
        ("any", {}, {visible(1)}),
    ):
        assert node.visible(node.run(make_pod(name, 4, requests=requests))) == expected
    with pytest.raises(Rejected, match=r"4 units of .* on one card that it accepts; the largest free share is 0"):
        node.run(make_pod("h200", 4, requests={contract.POD_MODELS: "*H200*"}))
    with pytest.raises(Rejected, match=r"on each of 2 cards that it accepts; so many are free on 1"):
        node.run(make_pod("two", 4, requests={contract.POD_MODELS: "*T4*", **TWO}))


def test_spread(node: Node) -> None:
    node.run(make_pod("filler", 4, booked=0))
    spread = {contract.POD_PLACEMENT: "spread"}
    chosen = [node.visible(node.run(make_pod(f"pod{n}", 2, requests=spread))) for n in range(3)]
    assert chosen == [{visible(1)}, {visible(2)}, {visible(1)}]
    assert node.visible(node.run(make_pod("packed", 2))) == {visible(0)}


# --------------------------------------------------------------------------- corrections


def test_unequal_shares_are_reported_and_not_written() -> None:
    pod = make_pod("pod", 4, started=True, requests=TWO)
    (one,) = fixes(pod, Entry("default/pod", {"c0": (*ids(0, 1, 2, 3), *ids(1, 1))}))
    assert one.annotations == {} and one.notice.reason == "GpuCardAmbiguous"


def test_containers_on_different_cards_are_reported_and_not_written() -> None:
    pod = make_pod("pod", 2, 2, started=True, requests=TWO)
    (one,) = fixes(pod, Entry("default/pod", {"c0": (*ids(0, 1), *ids(1, 1)), "c1": (*ids(0, 2), *ids(2, 2))}))
    assert one.annotations == {} and one.notice.warning


def test_equal_shares_are_written_for_any_current_annotation() -> None:
    pod = make_pod("pod", 4, booked=1, started=True)
    (one,) = fixes(pod, Entry("default/pod", {"c0": (*ids(0, 1, 2), *ids(1, 1, 2))}))
    assert one.annotations == {
        contract.POD_INDEX: "0",
        contract.POD_INDICES: "0,1",
        contract.POD_ALLOCATION: '{"0":{"0":2,"1":2}}',
        contract.POD_ASSIGNED: "true",
    }


def test_an_empty_annotation_counts_as_absent() -> None:
    pod = make_pod("pod", 4, booked=1, assigned=True, started=True)
    pod["metadata"]["annotations"].update({contract.POD_INDICES: "", contract.POD_ALLOCATION: ""})
    assert fixes(pod, Entry("default/pod", {"c0": ids(1, 0, 1, 2, 3)})) == []


# --------------------------------------------------------------------------- which units


def test_must_include_of_several_cards() -> None:
    cards = [card(n) for n in range(3)]
    subject = steering.Subject(make_pod("pod", 6, inits=[container("i", 2)], requests=TWO))
    available = tuple(one for n in range(3) for one in ids(n, *range(8)))
    got = steering.choose(cards, wire.Ask(available, (*ids(2, 7), *ids(0, 7)), 6), subject, NOTHING)
    assert got.ids == (*ids(0, 7, 0, 1), *ids(2, 7, 0, 1)) and got.cards == (cards[0], cards[2])


@pytest.mark.parametrize(
    ("free", "must", "held", "sentence"),
    [
        ((8, 8, 8), ids(0, 1), (), "has units 00000000-1, which aren't all of 2 cards of this node"),
        ((8, 8, 8), (), ids(1, 8, 9), "has units 00000001-8, which aren't all of 2 cards of this node"),
        ((8, 8, 8), (*ids(0, 1), *ids(1, 1), *ids(2, 1)), (), "which aren't all of 2 cards of this node"),
        ((8, 1, 8), (), (*ids(0, 9), *ids(1, 9)), "is on card 1 .* requests 2 more units of it, of which 1 are free"),
        ((8, 8, 8), (*ids(0, 1, 2, 3), *ids(1, 0)), (), "kubelet requires 3 units of a card in a container that"),
        ((8, 2, 2), (), (), "requests 3 units of aliyun.com/gpu-mem on each of 2 cards; so many are free on 1$"),
    ],
)
def test_refused(free: tuple[int, ...], must: tuple[str, ...], held: tuple[str, ...], sentence: str) -> None:
    cards = [card(n) for n in range(3)]
    subject = steering.Subject(make_pod("pod", 4, 2, requests=TWO), "c0", held)
    available = tuple(one for n, count in enumerate(free) for one in ids(n, *range(count)))
    with pytest.raises(NoDevices, match=sentence):
        steering.choose(cards, wire.Ask(available, must, 4), subject, NOTHING)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[contract.Card], wire.Ask, steering.Subject, steering.ReservedUnits]:
    cards = [card(n, draw(st.integers(0, 10))) for n in range(draw(st.integers(0, 5)))]
    available = [one for each in cards for one in ids(each.index, *range(each.units)) if draw(st.booleans())]
    count = draw(st.integers(1, 4))
    sizes = [count * one for one in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))]
    sizes[0] = sizes[0] or count
    booked = draw(st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=count, max_size=count, unique=True)))
    pod = make_pod(
        "pod", *sizes, booked=None if booked is None else tuple(booked), requests={contract.POD_CARD_COUNT: str(count)}
    )
    reserved = steering.ReservedUnits(
        {one.uuid: draw(st.integers(0, 10)) for one in cards}, {one.uuid: draw(st.integers(0, 3)) for one in cards}
    )
    order = tuple(draw(st.permutations(available)))
    return cards, wire.Ask(order, (), sizes[0]), steering.Subject(pod, "c0"), reserved


@settings(deadline=None)
@given(situations())
def test_a_choice_is_equal_shares_of_the_requested_number_of_cards(
    situation: tuple[list[contract.Card], wire.Ask, steering.Subject, steering.ReservedUnits],
) -> None:
    cards, ask, subject, reserved = situation
    demand = contract.demand(subject.pod)
    free = {
        one.uuid: sum(each.startswith(one.uuid[4:12]) for each in ask.available) - reserved.foreign[one.uuid]
        for one in cards
    }
    able = [one for one in cards if free[one.uuid] >= demand.share]
    try:
        got = steering.choose(cards, ask, subject, reserved)
    except NoDevices as error:
        assert len(able) < demand.count and "\n" not in str(error)
        return
    assert len(got.ids) == len(set(got.ids)) == ask.size and set(got.ids) <= set(ask.available)
    by_card = steering.Slots(cards).by_card(got.ids)
    assert len(by_card) == demand.count and {len(each) for each in by_card.values()} == {ask.size // demand.count}
    assert all(free[uuid] >= demand.share for uuid in by_card)
    assert [one.index for one in got.cards] == sorted(one.index for one in cards if one.uuid in by_card)
    booked = contract.booking(subject.pod)
    if booked and all(any(one.index == index for one in able) for index in booked.indices):
        assert {one.index for one in got.cards} == set(booked.indices)
        return
    # Units that others have booked are spared where possible.
    spare = {uuid for uuid in free if free[uuid] - reserved.booked[uuid] >= demand.share}
    assert len(spare) < demand.count or by_card.keys() <= spare


# --------------------------------------------------------------------------- requests that kubelet never sends


def test_one_card_for_a_request_of_two_is_refused(node: Node) -> None:
    pod = make_pod("pod", 2, booked=(0, 1), requests=TWO)
    node.kube.put(pod)
    node.mirrored(1)
    node.kubelet.pods[pod["metadata"]["uid"]] = pod
    message = "pod default/pod: a container's 2 units must be equally many of each of 2 cards"
    assert message in refused_allocation(node, *ids(0, 1, 2))
    time.sleep(0.3)
    assert node.annotations(pod)[contract.POD_ASSIGNED] == "false"
