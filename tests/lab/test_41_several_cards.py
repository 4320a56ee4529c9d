# SPDX-License-Identifier: GPL-3.0-or-later
"""Four cards of three sizes and models in one node: each pod gets the right ones, and only those."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pytest
from _hardware import More, more_cards
from _lab import JsonObject, Lab, indices_of
from _pods import body, container, pods, refused_for, shares_of, wait_settled

NAMESPACE = "lab-cards"
COUNT, PLACEMENT = "kubegpu.share/card-count", "kubegpu.share/placement"
MODELS, EXCLUDED = "kubegpu.share/models", "kubegpu.share/exclude-models"
# Beside two of 16 GiB, without what the driver keeps. Their device nodes aren't numbered as they are.
MORE = (More(2, 5, 24576 + 256, "Simulated_A100_24GiB"), More(3, 4, 8192 + 256, "Simulated_T4_8GiB"))
SIZES = {0: 16, 1: 16, 2: 24, 3: 8}


@pytest.fixture(scope="module")
def node(lab: Lab) -> Iterator[str]:
    name = lab.gpu_nodes[-1]
    with more_cards(lab, name, MORE):
        assert {card["index"]: card["units"] for card in lab.cards(name)} == SIZES
        yield name


@pytest.fixture(scope="module")
def namespace(lab: Lab, node: str) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


def free(lab: Lab, namespace: str) -> dict[int, int]:
    """Return the free units of each card."""
    left = dict(SIZES)
    for pod in lab.api.pods(namespace):
        for index, units in shares_of(pod).items():
            left[index] -= units
    return left


def listed(lab: Lab, namespace: str, pod: str, name: str) -> list[str]:
    """Return the UUIDs that nvidia-smi lists in a container."""
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", lab.inside(namespace, pod, name, "nvidia-smi", "-L"))


def uuids(lab: Lab, node: str, indices: list[int]) -> list[str]:
    cards = {card["index"]: card["uuid"] for card in lab.cards(node)}
    return [cards[index] for index in indices]


def gpu_pod(lab: Lab, node: str, name: str, *units: int, **annotations: str) -> JsonObject:
    """Return a pod with a container for each number of units."""
    made = [container(lab, each, f"c{number}") for number, each in enumerate(units)]
    return body(name, *made, node=node, annotations=annotations)


def test_two_cards_for_each_of_two_containers(lab: Lab, node: str, namespace: str) -> None:
    with pods(lab, namespace, gpu_pod(lab, node, "two", 8, 4, **{COUNT: "2"})) as (pod,):
        indices = indices_of(pod)
        # The fullest that have 6 units left; equals by index.
        assert indices == [0, 3]
        for name in ("c0", "c1"):
            assert sorted(listed(lab, namespace, "two", name)) == sorted(uuids(lab, node, indices))
        annotations = pod["metadata"]["annotations"]
        assert annotations["ALIYUN_COM_GPU_MEM_IDX"] == "0" and annotations["ALIYUN_COM_GPU_MEM_POD"] == "12"
        allocation = json.loads(annotations["scheduler.framework.gpushare.allocation"])
        assert allocation == {"0": {"0": 4, "3": 4}, "1": {"0": 2, "3": 2}}
        # What is left is exactly what the shares leave.
        with pods(lab, namespace, gpu_pod(lab, node, "rest", 4, **{COUNT: "2", PLACEMENT: "binpack"})) as (rest,):
            assert indices_of(rest) == [0, 3]
            refused_for(
                lab,
                namespace,
                gpu_pod(lab, node, "late", 32, **{COUNT: "4"}),
                "InsufficientGPUMemory: 3 of 4 requested cards have 8",
            )


def test_all_four_cards_and_no_fifth(lab: Lab, node: str, namespace: str) -> None:
    with pods(lab, namespace, gpu_pod(lab, node, "four", 32, **{COUNT: "4"})) as (pod,):
        assert indices_of(pod) == [0, 1, 2, 3]
        assert sorted(listed(lab, namespace, "four", "c0")) == sorted(uuids(lab, node, [0, 1, 2, 3]))
        assert free(lab, namespace) == {0: 8, 1: 8, 2: 16, 3: 0}
    refused_for(
        lab, namespace, gpu_pod(lab, node, "five", 5, **{COUNT: "5"}), "CardTooSmall: 4 of 5 requested cards can hold 1"
    )


@pytest.mark.parametrize(
    ("annotation", "value"), [(COUNT, "3"), (PLACEMENT, "random")], ids=["no equal shares", "no placement"]
)
def test_an_unreadable_annotation_is_refused_by_name(
    lab: Lab, node: str, namespace: str, annotation: str, value: str
) -> None:
    refused_for(lab, namespace, gpu_pod(lab, node, "unreadable", 4, **{annotation: value}), annotation)


def placed(lab: Lab, node: str, namespace: str, name: str, units: int, **annotations: str) -> JsonObject:
    """Create a pod that stays until its namespace is deleted."""
    lab.api.call("POST", f"/api/v1/namespaces/{namespace}/pods", gpu_pod(lab, node, name, units, **annotations))
    return wait_settled(lab, namespace, [name])[0]


def test_each_pod_chooses_its_placement(lab: Lab, node: str, namespace: str) -> None:
    """The cluster's default is binpack; a pod's annotation overrides it."""
    cases: list[Mapping[str, str]] = [{PLACEMENT: "spread"}, {}, {PLACEMENT: "spread"}, {PLACEMENT: "binpack"}]
    with lab.api.namespace("lab-placement") as own:
        for number, annotations in enumerate(cases):
            left = free(lab, own)
            fitting = [index for index in left if left[index] >= 5]
            sign = -1 if annotations.get(PLACEMENT) == "spread" else 1
            expected = min(fitting, key=lambda index: (sign * left[index], index))
            pod = placed(lab, node, own, f"placed-{number}", 5, **annotations)
            assert indices_of(pod) == [expected], f"{annotations}, of {left}"
        # The emptiest, the fullest, the emptiest but one, the fullest that it still fits.
        found = {one["metadata"]["name"]: indices_of(one)[0] for one in lab.api.pods(own)}
        assert found == {"placed-0": 2, "placed-1": 3, "placed-2": 2, "placed-3": 2}


@pytest.mark.parametrize(
    ("annotations", "card"),
    [
        ({MODELS: "*a100*"}, 2),
        ({MODELS: "*H100*, *t4*"}, 3),
        ({EXCLUDED: "*T4*, *16gib*"}, 2),
        ({MODELS: "simulated*", EXCLUDED: "*A100*,*T4*"}, 0),
    ],
    ids=str,
)
def test_a_pod_names_models_or_excludes_some(
    lab: Lab, node: str, namespace: str, annotations: dict[str, str], card: int
) -> None:
    with pods(lab, namespace, gpu_pod(lab, node, "particular", 2, **annotations)) as (pod,):
        assert indices_of(pod) == [card]
        assert listed(lab, namespace, "particular", "c0") == uuids(lab, node, [card])


def test_a_missing_model_is_named(lab: Lab, node: str, namespace: str) -> None:
    refused_for(lab, namespace, gpu_pod(lab, node, "h100", 2, **{MODELS: "*H100*"}), "NoMatchingModel: ")
    two = gpu_pod(lab, node, "two-a100", 4, **{MODELS: "*A100*", COUNT: "2"})
    refused_for(lab, namespace, two, "CardTooSmall: 1 of 2 requested cards can hold 2")


def test_fault_04_each_card_has_its_own_size(lab: Lab, node: str, namespace: str) -> None:
    """Neither the node's average nor its first card decides."""
    with pods(lab, namespace, gpu_pod(lab, node, "large", 20), gpu_pod(lab, node, "small", 8)) as (large, small):
        assert indices_of(large) == [2] and indices_of(small) == [3]
        refused_for(
            lab,
            namespace,
            gpu_pod(lab, node, "larger", 17),
            "InsufficientGPUMemory: largest free share on one card is 16 of 17",
        )
    refused_for(lab, namespace, gpu_pod(lab, node, "largest", 25), "CardTooSmall: largest healthy card holds 24 of 25")


def test_fault_05_index_and_device_node_differ(lab: Lab, node: str, namespace: str) -> None:
    with pods(lab, namespace, gpu_pod(lab, node, "wide", 20)) as (pod,):
        assert pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] == "2"
        assert lab.devices(node, pod) == [["nvidia5"]]
        assert listed(lab, namespace, "wide", "c0") == uuids(lab, node, [2])
