# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods of upstream's extender and plugin on a node that has ours now, and what ours leave for upstream's to read."""

from __future__ import annotations

import json
import re
import typing as t

import pytest
from gpushare.kubelet import wire
from gpushare.kubelet.pod_resources import Entry
from gpushare.plugin import steering
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from plugin_fakes import Node, Rejected, card, ids, make_pod, seen, until


def booked(index: int, units: int, assigned: str) -> dict[str, str]:
    """All annotations that upstream's extender writes."""
    return {
        "ALIYUN_COM_GPU_MEM_IDX": str(index),
        "ALIYUN_COM_GPU_MEM_DEV": "16",
        "ALIYUN_COM_GPU_MEM_POD": str(units),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": assigned,
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
    }


def upstream(node: Node, name: str, units: int, index: int | None) -> JsonObject:
    """A pod that upstream's plugin gave its own IDs to; kubelet's checkpoint still has them."""
    annotations = {} if index is None else booked(index, units, "true")
    pod = make_pod(name, units, started=True, requests=annotations)
    node.kube.put(pod)
    uid = pod["metadata"]["uid"]
    node.kubelet.pods[uid] = pod
    node.kubelet.devices[uid] = {"c0": tuple(f"{seen(0).uuid}-_-{slot}" for slot in range(units))}
    return pod


def test_units_of_upstreams_pods_are_never_assigned_again(make: t.Callable[..., Node]) -> None:
    """kubelet counts only our IDs, and would give away the whole of a card that is half in use."""
    node = make()
    node.kubelet.start()
    old = upstream(node, "old", 10, 1)
    upstream(node, "other", 12, 0)
    node.start_plugin()
    until(lambda: node.kubelet.registered)
    node.mirrored(2)
    new = node.run(make_pod("new", 6, booked=1))
    assert node.visible(new) == {seen(1).uuid}
    with pytest.raises(Rejected, match=r"requests 5 units of .*; the largest free share is 4$"):
        node.run(make_pod("toomuch", 5))
    until(lambda: node.agrees(new))
    # Their annotations are upstream's own, and stay.
    assert node.annotations(old)["ALIYUN_COM_GPU_MEM_IDX"] == "1" and node.kube.reasons("default/old") == []
    # When it has ended, its memory is free.
    node.kubelet.remove(old)
    node.kube.remove(old)
    until(lambda: node.running.pods.get("default/old") is None)
    after = node.run(make_pod("after", 10))
    assert node.visible(after) == {seen(1).uuid}


def test_a_node_of_one_card_where_upstream_writes_nothing(make: t.Callable[..., Node]) -> None:
    node = make(seen(0))
    node.kubelet.start()
    upstream(node, "old", 10, None)
    node.start_plugin()
    until(lambda: node.kubelet.registered)
    node.mirrored(1)
    with pytest.raises(Rejected, match=r"requests 7 units of .*; the largest free share is 6$"):
        node.run(make_pod("toomuch", 7))
    assert node.visible(node.run(make_pod("fits", 6))) == {seen(0).uuid}


def test_booked_by_upstreams_extender_and_admitted_with_our_plugin(make: t.Callable[..., Node]) -> None:
    node = make().up()
    pod = node.run(make_pod("pod", 4, requests=booked(1, 4, "false")))
    assert node.visible(pod) == {seen(1).uuid}
    until(lambda: node.agrees(pod))
    assert node.annotations(pod)["ALIYUN_COM_GPU_MEM_ASSUME_TIME"] == "1700000000000000000"


def test_annotations_of_our_pods_are_valid_for_upstream(make: t.Callable[..., Node]) -> None:
    """Upstream's extender: an index and a flag as it parses them; its kubectl plugin: container, card, units."""
    node = make().up()
    one = node.run(make_pod("one", 4, booked=1))
    two = node.run(make_pod("two", 4, 2, requests={contract.POD_CARD_COUNT: "2"}))
    until(lambda: node.agrees(one) and node.agrees(two))
    for pod, first in ((one, "1"), (two, "0")):
        annotations = node.annotations(pod)
        assert annotations["ALIYUN_COM_GPU_MEM_IDX"] == first
        assert annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"
        assert re.fullmatch("[0-9]+", annotations["ALIYUN_COM_GPU_MEM_ASSUME_TIME"])
        assert re.fullmatch("[0-9]+", annotations["ALIYUN_COM_GPU_MEM_DEV"])
    assert "scheduler.framework.gpushare.allocation" not in node.annotations(one)
    assert json.loads(node.annotations(two)["scheduler.framework.gpushare.allocation"]) == {
        "0": {"0": 2, "1": 2},
        "1": {"0": 1, "1": 1},
    }


def test_foreign_units_are_taken_from_the_booked_card_too() -> None:
    cards = [card(n) for n in range(2)]
    old, new = make_pod("old", 14, booked=0, assigned=True, started=True), make_pod("new", 4, booked=0)
    pods = {contract.pod_key(pod): pod for pod in (old, new)}
    listing = [Entry("default/old", {"c0": tuple(f"GPU-x-_-{n}" for n in range(14))}), Entry("default/new", {"c0": ()})]
    reserved = steering.reserved_units(cards, pods, listing, contract.pod_uid(new))
    assert reserved.foreign == {cards[0].uuid: 14, cards[1].uuid: 0}
    free = (*ids(0, *range(16)), *ids(1, *range(16)))
    got = steering.choose(cards, wire.Ask(free, (), 4), steering.Subject(new), reserved)
    assert got.cards == (cards[1],) and got.reason == "the booked card is full; best fit"
