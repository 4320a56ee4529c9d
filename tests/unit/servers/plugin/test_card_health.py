# SPDX-License-Identifier: GPL-3.0-or-later
"""A card that fails while pods use it: kubelet, the node, its pods and the metrics report it, also when it recovers."""

from __future__ import annotations

import dataclasses
import typing as t

import pytest
from gpushare.kubelet.pod_resources import Entry
from gpushare.nvml import inventory, library
from gpushare.plugin import reconcile
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import NODE, Node, Rejected, make_pod, seen, until

JsonObject = dict[str, t.Any]


@pytest.fixture
def node(make: t.Callable[..., Node]) -> Node:
    one = make()
    one.kubelet.start()
    return one


def health(node: Node) -> list[tuple[bool, str]]:
    return [(card.healthy, card.reason) for card in contract.node_cards(node.kube.node())]


def events_of(node: Node, name: str, kind: str = "Pod") -> list[tuple[str, str]]:
    return [
        (one["reason"], one["message"])
        for one in list(node.kube.events)
        if one["involvedObject"]["name"] == name and one["involvedObject"]["kind"] == kind
    ]


def test_fault_07_an_xid_removes_a_card_notifies_its_pods_and_expires(node: Node) -> None:
    node.start_plugin(look=0.2, xid_quiet=3.0)
    until(lambda: len(node.kubelet.healthy) == 32)
    broken, other = node.run(make_pod("broken", 4, booked=1)), node.run(make_pod("other", 4, booked=0))
    until(lambda: node.agrees(broken) and node.agrees(other))
    node.nvml.fail(1, 79)
    until(lambda: len(node.kubelet.unhealthy) == 16, 2.5, "kubelet gets it at once")
    assert all(one.startswith("00000001-") for one in node.kubelet.unhealthy)
    words = "XID 79 (the card has fallen off the bus)"
    until(lambda: health(node) == [(True, ""), (False, words)], 2.5)
    until(lambda: node.kube.node()["status"]["allocatable"][contract.RESOURCE_COUNT] == "1", 2.5)
    where = f"card 1 ({seen(1).uuid})"
    expected = ("GpuCardUnhealthy", f"this pod has units of {where}, which isn't given to pods any more: {words}")
    until(lambda: events_of(node, "broken") == [expected], 2.5)
    assert events_of(node, NODE, "Node") == [("GpuCardUnhealthy", f"{where} isn't given to pods: {words}")]
    assert node.metric(f'gpushare_plugin_xids_total{{uuid="{seen(1).uuid}",xid="79"}}') == 1
    labels = f'{{card="1",model="Simulated NVIDIA GPU",node="{NODE}",uuid="{seen(1).uuid}"}}'
    assert node.metric(f"gpushare_plugin_card_healthy{labels}") == 0
    # The extender's choice comes too late: kubelet has none of that card's units left.
    moved = node.run(make_pod("moved", 4, booked=1))
    assert node.visible(moved) == {seen(0).uuid}
    until(lambda: health(node) == [(True, ""), (True, "")])
    until(lambda: len(node.kubelet.healthy) == 32)
    until(lambda: len(events_of(node, NODE, "Node")) == 2)
    assert events_of(node, NODE, "Node")[1] == ("GpuCardHealthy", f"{where} is given to pods again")
    # The running pod has kept its units, and no other pod got an event.
    assert node.agrees(broken) and events_of(node, "other") == []


def test_fault_07_application_errors_leave_the_card_alone(node: Node) -> None:
    node.start_plugin(look=0.2)
    until(lambda: len(node.kubelet.healthy) == 32)
    for xid in (13, 31, 43, 45, 68, 109):
        node.nvml.fail(0, xid)
    until(lambda: node.metric(f'gpushare_plugin_xids_total{{uuid="{seen(0).uuid}",xid="109"}}') == 1)
    node.nvml.fail(1, 119)
    until(lambda: len(node.kubelet.unhealthy) == 16)
    assert all(one.startswith("00000001-") for one in node.kubelet.unhealthy)


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
    healthy: list[int] = []
    node.start_plugin()
    until(lambda: node.kubelet.registered)
    for _turn in range(10):
        healthy.append(len(node.kubelet.healthy))
        assert [one for one, _reason in health(node)] == [False, True]
        until(lambda: True)
    assert set(healthy) == {16}


def test_a_card_with_mig_is_not_shared_and_reports_the_reason(node: Node) -> None:
    node.nvml.found = [seen(0), dataclasses.replace(seen(1), problem=library.MIG)]
    node.start_plugin()
    until(lambda: health(node) == [(True, ""), (False, library.MIG.text)])
    until(
        lambda: (
            events_of(node, NODE, "Node")
            == [("GpuCardUnhealthy", f"card 1 ({seen(1).uuid}) isn't given to pods: {library.MIG.text}")]
        )
    )
    until(lambda: len(node.kubelet.healthy) == 16)
    node.run(make_pod("filler", 14))
    with pytest.raises(Rejected, match="available: 2"):
        node.run(make_pod("pod", 4))


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
    """More than the trickle of Events lets through at once."""
    node.nvml.found = [seen(0, 64)]
    plugin = node.start_plugin(resync=1.0)
    plugin.events._burst, plugin.events._tokens, plugin.events._rate = 5, 5.0, 4.0
    until(lambda: len(node.kubelet.healthy) == 64)
    pods = [node.run(make_pod(f"pod{n}", 1, booked=0, card_units=64)) for n in range(12)]
    until(lambda: all(node.agrees(pod) for pod in pods))
    node.nvml.fail(0, 79)
    until(lambda: all(events_of(node, f"pod{n}") for n in range(12)))
    assert [len(events_of(node, f"pod{n}")) for n in range(12)] == [1] * 12


# --------------------------------------------------------------------------- whose card it is


def holders(card: contract.Card, cards: list[contract.Card], pods: list[JsonObject], *listing: Entry) -> list[str]:
    by_key = {contract.pod_key(pod): pod for pod in pods}
    return [contract.pod_key(pod) for pod in reconcile.holders(card, cards, by_key, listing)]


def test_holders_of_a_card() -> None:
    cards = [contract.Card(n, f"GPU-{n:08x}-aaaa", n, 16384, 16) for n in range(2)]
    swapped, booked, upstream = (
        make_pod("swapped", 2, booked=0),
        make_pod("booked", 2, booked=1),
        make_pod("upstream", 2, booked=1),
    )
    several = make_pod("several", 2, booked=(0, 1))
    finished = make_pod("finished", 2, booked=1)
    finished["status"]["phase"] = "Succeeded"
    pods = [swapped, booked, upstream, several, finished, make_pod("nothing", 0), make_pod("unbooked", 2)]
    listing = [
        Entry("default/swapped", {"c0": ("00000001-0", "00000001-1")}),
        Entry("default/upstream", {"c0": ("GPU-x-_-0", "GPU-x-_-1")}),
        Entry("default/finished", {"c0": ("00000001-5", "00000001-6")}),
    ]
    assert holders(cards[1], cards, pods, *listing) == [
        "default/swapped",
        "default/booked",
        "default/upstream",
        "default/several",
    ]
    assert holders(cards[0], cards, pods, *listing) == ["default/several"]
