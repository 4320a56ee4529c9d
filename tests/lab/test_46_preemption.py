# SPDX-License-Identifier: GPL-3.0-or-later
"""A pod of higher priority gets its memory through the real kube-scheduler: victims by card, and no more than needed.

One node with two cards. Container IDs show which pods were evicted and which ran on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from _lab import JsonObject, Lab, indices_of, until
from _pods import body, container, containers, create, delete_pods, unschedulable, wait_empty, wait_settled

NAMESPACE = "lab-preemption"
# Values of the priority classes; pods of the last one wait rather than evict.
CLASSES = {"lab-lowest": 500, "lab-low": 1000, "lab-middle": 2000, "lab-high": 100000, "lab-patient": 100000}


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[str]:
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    for name, value in CLASSES.items():
        lab.api.delete(f"{path}/{name}")
        policy = "Never" if name == "lab-patient" else "PreemptLowerPriority"
        wanted = {"metadata": {"name": name}, "value": value, "preemptionPolicy": policy}
        lab.api.call("POST", path, wanted)
    try:
        with lab.api.namespace(NAMESPACE) as space:
            yield space
    finally:
        for name in CLASSES:
            lab.api.delete(f"{path}/{name}")


@pytest.fixture
def node(lab: Lab) -> str:
    name = lab.gpu_nodes[-1]
    assert [card["units"] for card in lab.cards(name)] == [16, 16]
    return name


def tenants(lab: Lab, namespace: str, node: str, *pods: tuple[str, int, str, int]) -> dict[str, JsonObject]:
    """Create pods one after the other; assert the card that each gets."""
    wait_empty(lab, node)
    for name, units, priority, _card in pods:
        create(lab, namespace, body(name, container(lab, units), node=node, priorityClassName=priority))
        wait_settled(lab, namespace, [name])
    found = {name: lab.api.pod(namespace, name) for name, *_more in pods}
    assert {name: indices_of(pod) for name, pod in found.items()} == {name: [card] for name, *_size, card in pods}
    return found


def left(lab: Lab, namespace: str, before: dict[str, JsonObject], gone: set[str], high: str, card: int) -> None:
    """Assert that the preemptor runs on this card, these pods were evicted, and no other was disturbed."""
    (pod,) = wait_settled(lab, namespace, [high], 60)
    assert indices_of(pod) == [card]
    staying = [name for name in before if name not in gone]
    names = {one["metadata"]["name"] for one in lab.api.pods(namespace)}
    assert names == {high, *staying}
    now = wait_settled(lab, namespace, staying)
    assert containers(now) == containers([before[name] for name in staying])


def high(lab: Lab, name: str, units: int, node: str, priority: str = "lab-high") -> JsonObject:
    return body(name, container(lab, units), node=node, priorityClassName=priority)


@pytest.mark.long
def test_kube_scheduler_asks_the_extender_for_victims(lab: Lab, namespace: str, node: str) -> None:
    """The node is full. By the node's sum the cheapest victims would free 4 units on each card, and 8 on neither."""
    before = tenants(
        lab,
        namespace,
        node,
        ("large", 12, "lab-middle", 0),
        ("least", 4, "lab-lowest", 0),
        ("first", 8, "lab-middle", 1),
        ("other", 4, "lab-low", 1),
        ("another", 4, "lab-low", 1),
    )
    try:
        create(lab, namespace, high(lab, "high", 8, node))
        left(lab, namespace, before, gone={"other", "another"}, high="high", card=1)
        until(lambda: lab.events(namespace, "other", "Preempted"), "somebody says why the pod went", 20)
    finally:
        delete_pods(lab, namespace, [*before, "high"])


def test_preemption_on_a_fragmented_node(lab: Lab, namespace: str, node: str) -> None:
    """The node's sum suffices, but no single card does: kube-scheduler finds no victims, the extender does."""
    before = tenants(lab, namespace, node, ("stays", 10, "lab-middle", 0), ("goes", 9, "lab-low", 1))
    try:
        create(lab, namespace, high(lab, "high", 12, node))
        left(lab, namespace, before, gone={"goes"}, high="high", card=1)
        for gone, reason, words in (("goes", "Preempted", "high"), ("high", "GPUMemoryPreempting", "goes")):
            until(
                lambda gone=gone, reason=reason, words=words: words in "".join(lab.events(namespace, gone, reason)),
                f"an Event {reason}",
                20,
            )
    finally:
        delete_pods(lab, namespace, [*before, "high"])


@pytest.mark.long
@pytest.mark.parametrize(
    "priority", ["lab-patient", "lab-low"], ids=["a pod that shall not", "a pod that is no more important"]
)
def test_no_preemption_for(lab: Lab, namespace: str, node: str, priority: str) -> None:
    before = tenants(lab, namespace, node, ("stays", 10, "lab-low", 0), ("beside", 9, "lab-low", 1))
    try:
        create(lab, namespace, high(lab, "waits", 12, node, priority))
        until(lambda: "InsufficientGPUMemory: " in unschedulable(lab, namespace, "waits"), "it is refused", 20)
        # The extender leaves kube-scheduler a second, and then would have acted.
        time.sleep(5)
        assert containers(wait_settled(lab, namespace, list(before))) == containers(list(before.values()))
        assert unschedulable(lab, namespace, "waits")
    finally:
        delete_pods(lab, namespace, [*before, "waits"])


def test_freed_memory_is_reserved_for_the_preemptor(lab: Lab, namespace: str, node: str) -> None:
    """Small pods of lower priority arrive meanwhile; none of them gets the card before the preemptor."""
    before = tenants(lab, namespace, node, ("stays", 10, "lab-middle", 0), ("goes", 9, "lab-low", 1))
    eager = [f"eager-{number}" for number in range(8)]
    try:
        create(lab, namespace, high(lab, "high", 12, node))
        for name in eager:
            create(lab, namespace, body(name, container(lab, 3), node=node, priorityClassName="lab-low"))
        (pod,) = wait_settled(lab, namespace, ["high"], 60)
        assert indices_of(pod) == [1]
        # Two of 3 fit beside 10, one beside 12: whoever waits is there, and the important one went first.
        bound = [one for one in lab.api.pods(namespace) if one["metadata"]["name"] in eager and indices_of(one)]
        assert len(bound) <= 3
        staying = wait_settled(lab, namespace, ["stays"])
        assert containers(staying) == containers([before["stays"]])
    finally:
        delete_pods(lab, namespace, [*before, "high", *eager])
