# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose cards KubeVirt doesn't announce: virt-handler's pod is replaced, and the number is proven.

virt-handler is simulated as its source has it: it sees cards when it starts, and when KubeVirt's object is changed.
"""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kubevirt import announced

CARD, RESOURCE = "10DE:2236", "nvidia.com/10DE_2236"
OWN = {CARD: RESOURCE}


class Cluster:
    """Nodes with a virt-handler each.

    :param cards: what VFIO has; ``seen`` what virt-handler has seen of it.
    :param works: nodes whose virt-handler announces anything at all.
    :param ready: whether virt-handler's pods are.
    """

    def __init__(self, cards, seen, works=None, ready=True):
        self.cards, self.seen = cards, dict(seen)
        self.works = set(cards) if works is None else works
        self.ready = ready
        self.deleted = []
        self.requests = 0
        self.seconds = 0.0

    def list_all(self, api_version, kind, namespace="", field_selector="", label_selector=""):
        self.requests += 1
        if kind == "Node":
            return [
                {"metadata": {"name": node}, "status": {"allocatable": {RESOURCE: str(number)}}}
                for node, number in self.seen.items()
            ]
        assert (kind, namespace, label_selector) == ("Pod", "kubevirt", "kubevirt.io=virt-handler")
        own = {"kind": "DaemonSet", "name": "virt-handler", "controller": True}
        return [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{name}-{node}-{started}", "namespace": "kubevirt", "ownerReferences": owners},
                "spec": {"nodeName": node},
                "status": {"conditions": [{"type": "Ready", "status": str(self.ready)}]},
            }
            for node in self.cards
            for started in (self.deleted.count(node),)
            # Another one only has its label.
            for name, owners in (("virt-handler", [own]), ("other", [{**own, "name": "other"}]))
        ]

    def delete(self, ref, version=""):
        node = ref.name.removeprefix("virt-handler-").rpartition("-")[0]
        self.deleted.append(node)
        if node in self.works:
            self.seen[node] = self.cards[node]

    def waiting(self, timeout=60):
        def sleep(seconds):
            self.seconds += seconds

        return Waiting(timeout, 1.0, sleep, lambda: self.seconds)

    def ensure(self, changed=False, timeout=60):
        wanted = announced.numbers_of({node: {CARD: number} for node, number in self.cards.items()}, OWN)
        return announced.ensure(self, wanted, changed, self.waiting(timeout), "kubevirt")


def test_a_node_that_announces_its_cards_is_left_alone():
    cluster = Cluster({"gpu1": 2, "gpu2": 1}, {"gpu1": 2, "gpu2": 1})
    assert cluster.ensure() == [] and cluster.deleted == []
    assert cluster.requests == 1 and cluster.seconds == 0


def test_no_card_is_no_request():
    cluster = Cluster({}, {})
    assert cluster.ensure() == [] and cluster.requests == 0


def test_only_the_node_with_new_cards_gets_its_pod_replaced():
    cluster = Cluster({"gpu1": 2, "gpu2": 2, "gpu3": 1}, {"gpu1": 2, "gpu2": 1, "gpu3": 0})
    assert cluster.ensure() == ["gpu2", "gpu3"]
    assert cluster.deleted == ["gpu2", "gpu3"] and cluster.seen == cluster.cards
    assert cluster.ensure() == []


def test_after_a_change_of_kubevirts_object_it_gets_time_to_see_it():
    class Later(Cluster):
        def list_all(self, *arguments, **more):
            if self.seconds >= 5:
                self.seen = dict(self.cards)
            return super().list_all(*arguments, **more)

    cluster = Later({"gpu1": 1}, {"gpu1": 0})
    assert cluster.ensure(changed=True) == [] and cluster.deleted == []
    assert 5 <= cluster.seconds < announced.PATIENCE


def test_a_change_that_is_not_seen_in_time_ends_in_a_replaced_pod():
    cluster = Cluster({"gpu1": 1}, {"gpu1": 0})
    assert cluster.ensure(changed=True) == ["gpu1"]
    assert cluster.seconds >= announced.PATIENCE


def test_a_node_that_never_announces_is_named_with_its_numbers():
    cluster = Cluster({"gpu1": 2, "gpu2": 1}, {"gpu1": 1, "gpu2": 1}, works=set(), ready=False)
    with pytest.raises(NotInEffect, match=r"all cards: node gpu1 has 1 of 2 nvidia\.com/10DE_2236") as error:
        cluster.ensure()
    assert error.value.details["missing"] == [{"node": "gpu1", "resource": RESOURCE, "announced": 1, "wanted": 2}]
    assert cluster.deleted == ["gpu1"] and cluster.seconds == 60


@pytest.mark.parametrize("seen", [0, 2])
def test_a_number_that_a_node_invented_ends_the_wait_once_virt_handler_has_looked(seen):
    cluster = Cluster({"gpu1": 40}, {"gpu1": seen}, works=set())
    with pytest.raises(NotInEffect, match=f"has {seen} of 40 .*what the node says of itself"):
        cluster.ensure(timeout=3600)
    assert announced.SETTLED <= cluster.seconds <= announced.SETTLED + 3


def test_more_than_wanted_is_not_missing_and_a_node_outside_the_cluster_is_not_asked():
    cluster = Cluster({"gpu1": 1}, {"gpu1": 2})
    assert cluster.ensure() == []
    assert announced.missing(cluster, {"elsewhere": {RESOURCE: 1}}) == []


def test_numbers_are_those_of_resources_that_kubevirt_announces_itself():
    cards = {"gpu1": {"10de:2236": 2, "10DE:20B5": 1, "10DE:1EB8": 0}}
    assert announced.numbers_of(cards, {**OWN, "10DE:1EB8": "nvidia.com/T4"}) == {"gpu1": {RESOURCE: 2}}
    both = {CARD: "nvidia.com/gpu", "10DE:20B5": "nvidia.com/gpu"}
    assert announced.numbers_of(cards, both) == {"gpu1": {"nvidia.com/gpu": 3}}
    for bad in (True, "2", -1):
        with pytest.raises(BadInput, match="number of cards"):
            announced.numbers_of({"gpu1": {CARD: bad}}, OWN)
