# SPDX-License-Identifier: GPL-3.0-or-later
"""A card that fails while pods use it: kubelet, the node, its pods and the metrics report it, also when it recovers."""

from __future__ import annotations

import dataclasses
import typing as t

import pytest
from gpushare.kubelet.pod_resources import Entry
from gpushare.nvml import inventory
from gpushare.plugin import reconcile
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import NODE, Node, card, ids, make_pod, seen, until


@pytest.fixture
def node(make: t.Callable[..., Node]) -> Node:
    one = make()
    one.kubelet.start()
    return one


def health(node: Node) -> list[tuple[bool, str]]:
    return [(card.healthy, card.reason) for card in contract.node_cards(node.kube.node())]


def events_of(node: Node, name: str, kind: str = "Pod") -> list[tuple[str, str]]:
    return [
        (event["reason"], event["message"])
        for event in node.kube.events
        if event["involvedObject"]["name"] == name and event["involvedObject"]["kind"] == kind
    ]


def test_fault_07_an_xid_removes_a_card_notifies_its_pods_and_expires(node: Node) -> None:
    node.start_plugin(query_seconds=0.2, xid_quiet=3.0)
    until(lambda: len(node.kubelet.healthy) == 32)
    broken, other = node.run(make_pod("broken", 4, booked=1)), node.run(make_pod("other", 4, booked=0))
    until(lambda: node.agrees(broken) and node.agrees(other))
    node.nvml.fail(1, 79)
    until(lambda: len(node.kubelet.unhealthy) == 16, 2.5, "kubelet gets it at once")
    assert all(one.startswith("00000001-") for one in node.kubelet.unhealthy)
    reason = "XID 79 (the card has fallen off the bus)"
    until(lambda: health(node) == [(True, ""), (False, reason)], 2.5)
    until(lambda: node.kube.node()["status"]["allocatable"][contract.RESOURCE_COUNT] == "1", 2.5)
    where = f"card 1 ({seen(1).uuid})"
    expected = ("GpuCardUnhealthy", f"this pod has units of {where}, which isn't given to pods any more: {reason}")
    until(lambda: events_of(node, "broken") == [expected], 2.5)
    assert events_of(node, NODE, "Node") == [("GpuCardUnhealthy", f"{where} isn't given to pods: {reason}")]
    assert node.metric(f'gpushare_plugin_xids_total{{uuid="{seen(1).uuid}",xid="79"}}') == 1
    labels = f'{{card="1",model="Simulated NVIDIA GPU",node="{NODE}",uuid="{seen(1).uuid}"}}'
    assert node.metric(f"gpushare_plugin_card_healthy{labels}") == 0
    # The booking is obsolete: kubelet has no healthy units of that card.
    moved = node.run(make_pod("moved", 4, booked=1))
    assert node.visible(moved) == {seen(0).uuid}
    until(lambda: health(node) == [(True, ""), (True, "")])
    until(lambda: len(node.kubelet.healthy) == 32)
    until(lambda: len(events_of(node, NODE, "Node")) == 2)
    assert events_of(node, NODE, "Node")[1] == ("GpuCardHealthy", f"{where} is given to pods again")
    # The running pod has kept its units, and no other pod got an event.
    assert node.agrees(broken) and events_of(node, "other") == []


def test_fault_07_the_plugin_is_restarted_while_a_card_is_lost(node: Node) -> None:
    """NVML calls the second card 0 now. Its pod stays on card 1, and the lost card's pod on card 0."""
    node.start_plugin()
    until(lambda: len(node.kubelet.healthy) == 32)
    lost, kept = node.run(make_pod("lost", 4, booked=0)), node.run(make_pod("kept", 4, booked=1))
    until(lambda: node.agrees(lost) and node.agrees(kept))
    until(lambda: health(node) == [(True, ""), (True, "")])
    patches = len(node.kube.patches)
    node.kill_plugin()
    node.nvml.found = [dataclasses.replace(seen(1), index=0)]
    node.start_plugin()
    until(lambda: health(node) == [(False, inventory.LOST.text), (True, "")])
    until(lambda: node.kubelet.registered and len(node.kubelet.healthy) == 16)
    until(lambda: events_of(node, "lost") != [])
    assert [path for path, _body in node.kube.patches[patches:] if "/pods/" in path] == []
    assert [card.uuid for card in contract.node_cards(node.kube.node())] == [seen(0).uuid, seen(1).uuid]
    # Repaired, it has its old number.
    node.nvml.found = [seen(0), seen(1)]
    until(lambda: health(node) == [(True, ""), (True, "")])
    assert node.annotations(lost)[contract.POD_INDEX] == "0" and node.annotations(kept)[contract.POD_INDEX] == "1"


def test_fault_07_an_xid_survives_a_restart(node: Node) -> None:
    node.start_plugin()
    until(lambda: len(node.kubelet.healthy) == 32)
    node.nvml.fail(0, 62)
    until(lambda: [one for one, _reason in health(node)] == [False, True])
    node.kill_plugin()
    node.start_plugin()
    until(lambda: node.kubelet.registered)
    assert len(node.kubelet.healthy) == 16 and [one for one, _reason in health(node)] == [False, True]


def test_an_unhealthy_card_is_reported_once(node: Node) -> None:
    node.start_plugin(resync=1.0)
    until(lambda: len(node.kubelet.healthy) == 32)
    pod = node.run(make_pod("pod", 4, booked=1))
    until(lambda: node.agrees(pod))
    node.nvml.fail(1, 95)
    until(lambda: events_of(node, "pod"))
    node.nvml.fail(1, 95)
    node.run(make_pod("other", 2, booked=0))
    until(lambda: node.metric(f'gpushare_plugin_xids_total{{uuid="{seen(1).uuid}",xid="95"}}') == 2)
    assert len(events_of(node, "pod")) == 1 and len(events_of(node, NODE, "Node")) == 1


def test_every_pod_of_an_unhealthy_card_gets_an_event(node: Node) -> None:
    """More pods than the rate limit of Events allows at once."""
    node.nvml.found = [seen(0, 64)]
    plugin = node.start_plugin(resync=1.0)
    plugin.events._burst, plugin.events._tokens, plugin.events._rate = 5, 5.0, 4.0
    until(lambda: len(node.kubelet.healthy) == 64)
    pods = [node.run(make_pod(f"pod{n}", 1, booked=0, card_units=64)) for n in range(12)]
    until(lambda: all(node.agrees(pod) for pod in pods))
    node.nvml.fail(0, 79)
    until(lambda: all(events_of(node, f"pod{n}") for n in range(12)))
    assert [len(events_of(node, f"pod{n}")) for n in range(12)] == [1] * 12


def test_holders_of_a_card() -> None:
    cards = [card(n) for n in range(2)]
    bookings = {"swapped": 0, "booked": 1, "upstream": 1, "several": (0, 1), "finished": 1, "unbooked": None}
    pods = {f"default/{name}": make_pod(name, 2, booked=booked) for name, booked in bookings.items()}
    pods["default/finished"]["status"]["phase"] = "Succeeded"
    pods["default/nothing"] = make_pod("nothing", 0)
    listing = [
        Entry("default/swapped", {"c0": ids(1, 0, 1)}),
        Entry("default/upstream", {"c0": ("GPU-x-_-0", "GPU-x-_-1")}),
        Entry("default/finished", {"c0": ids(1, 5, 6)}),
    ]
    found = [[holder["metadata"]["name"] for holder in reconcile.holders(each, cards, pods, listing)] for each in cards]
    assert found == [["several"], ["swapped", "booked", "upstream", "several"]]
