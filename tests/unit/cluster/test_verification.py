# SPDX-License-Identifier: GPL-3.0-or-later
"""One story, and every way in which two can differ."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._control_plane import ANNOTATION
from ansible_collections.kubegpu.share.plugins.module_utils._verification import look
from fake_kube import FakeKube

A, B = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
EXPECTED = {
    "cards": {"gpu1": [A, B]},
    "control_plane": ["cp1"],
    "namespace": "gpushare-system",
    "scheduler": "static_pod",
}
CARDS = (contract.Card(0, A, 0, 16384, 16), contract.Card(1, B, 1, 16384, 16))


def node(name, cards=(), labels=None, capacity=None, allocatable=None):
    units = sum(card.units for card in cards)
    healthy = sum(card.units for card in cards if card.healthy)
    annotations = {contract.NODE_CARDS: contract.cards_to_annotation(cards)} if cards else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels or {}, "annotations": annotations},
        "status": {
            "capacity": {contract.RESOURCE_MEMORY: str(units if capacity is None else capacity)},
            "allocatable": {contract.RESOURCE_MEMORY: str(healthy if allocatable is None else allocatable)},
        },
    }


def gpu1(cards=CARDS, **more):
    return node("gpu1", cards, {"gpushare": "true"}, **more)


def server(component, on, ready="True", **status):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{component}-{on}",
            "namespace": "gpushare-system",
            "labels": {"app.kubernetes.io/component": component, "app.kubernetes.io/part-of": "gpushare"},
        },
        "spec": {"nodeName": on},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}], **status},
    }


OURS = "--config=/etc/kubernetes/kubegpu-share/scheduler.yaml"


def scheduler(on, *words, annotations=None):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"kube-scheduler-{on}",
            "namespace": "kube-system",
            "labels": {"component": "kube-scheduler", "tier": "control-plane"},
            "annotations": annotations or {},
        },
        "spec": {"nodeName": on, "containers": [{"name": "kube-scheduler", "command": ["kube-scheduler", *words]}]},
        "status": {"phase": "Running"},
    }


def user(units, index):
    annotations = {} if index is None else {contract.POD_INDEX: str(index)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"u{units}-{index}", "namespace": "default", "annotations": annotations},
        "spec": {"nodeName": "gpu1", "containers": [{"resources": {"limits": {contract.RESOURCE_MEMORY: units}}}]},
        "status": {"phase": "Running"},
    }


GOOD = [scheduler("cp1", OURS), node("cp1"), gpu1(), server("extender", "cp1"), server("device-plugin", "gpu1")]


def story(objects, expected=None):
    return look(FakeKube(*copy.deepcopy(objects)), {**EXPECTED, **(expected or {})})


def test_one_story_in_two_requests():
    found = story([*GOOD, user(2, 0)])
    assert (found["problems"], found["unknown"], found["requests"]) == ([], [], {"GET": 2})
    assert len(found["passed"]) == 6


def replaced(*others):
    names = {(one["kind"], one["metadata"]["name"]) for one in others}
    return [one for one in GOOD if (one["kind"], one["metadata"]["name"]) not in names] + list(others)


SICK = [CARDS[0], contract.Card(1, B, 1, 16384, 16, healthy=False)]


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        (replaced(gpu1(capacity=30)), ["kubelet has 32 of 30 units to give, its cards hold 32 of 32"]),
        (replaced(gpu1(allocatable=0)), ["kubelet has 0 of 32 units"]),
        (replaced(gpu1(SICK)), [f"card 1 ({B}) is unhealthy"]),
        (replaced(gpu1([])), ["gpu1 announces no aliyun.com/gpu-mem"]),
        (
            replaced(gpu1([CARDS[0], contract.Card(1, "GPU-cccccccc", 1, 16384, 16)])),
            [f"the device plugin tells of {A}, GPU-cccccccc, the machine has {A}, {B}"],
        ),
        (replaced(node("gpu1", CARDS)), ["gpu1 lacks the label gpushare=true"]),
        (replaced(server("extender", "cp1", "False")), ["extender isn't ready on cp1: pod extender-cp1 on cp1"]),
        (replaced(server("device-plugin", "gpu1", "False")), ["device-plugin isn't ready on gpu1"]),
        ([one for one in GOOD if one["metadata"]["name"] != "extender-cp1"], ["extender doesn't run on cp1"]),
        ([*GOOD, user(10, 1), user(9, 1)], [f"pods hold 19 units of card 1 ({B}), which has 16"]),
        ([one for one in GOOD if one["metadata"]["name"] != "gpu1"], ["node gpu1 isn't in the cluster"]),
        (
            [*GOOD, node("gpu2", CARDS, {"gpushare": "true"})],
            ["device-plugin doesn't run on gpu2"],
        ),
    ],
)
def test_contradictions(objects, words):
    problems = story(objects)["problems"]
    assert len(problems) == len(words), problems
    for text, problem in zip(words, problems, strict=True):
        assert text in problem


@pytest.mark.parametrize(
    ("objects", "expected", "words"),
    [
        (GOOD, {"cards": {"gpu1": []}}, "wasn't looked at in this run"),
        ([*GOOD, user(2, None)], {}, "hold 2 units of which the API doesn't say on which card"),
    ],
)
def test_missing_evidence_is_unknown_and_neither_passed_nor_wrong(objects, expected, words):
    found = story(objects, expected)
    assert found["problems"] == []
    assert [one for one in found["unknown"] if words in one]
    assert len(found["unknown"]) == 1


def test_upstreams_plugin_tells_no_uuid():
    old = gpu1([], capacity=32, allocatable=32)
    old["status"]["capacity"][contract.RESOURCE_COUNT] = "2"
    found = story(replaced(old))
    assert found["problems"] == []
    assert "doesn't tell the cards' UUIDs" in found["unknown"][0]


# --------------------------------------------------------------------------- the scheduler


HAS = "kube-scheduler on cp1 has the configuration with the extender"


@pytest.mark.parametrize(
    ("pods", "field", "words"),
    [
        ([scheduler("cp1", OURS)], "passed", HAS),
        ([scheduler("cp1", "--config", OURS.partition("=")[2])], "passed", HAS),
        ([scheduler("cp1", "--policy-config-file=/etc/kubernetes/kubegpu-share/policy.json")], "passed", HAS),
        ([scheduler("cp1", "--config=/x", annotations={ANNOTATION: "1"})], "passed", HAS),
        ([scheduler("cp1", "--config=/x")], "unknown", "node cp1: kube-scheduler has a configuration of its own"),
        ([scheduler("cp1", "--leader-elect=true")], "problems", "node cp1: kube-scheduler has lost the configuration"),
        ([], "problems", "node cp1: no kube-scheduler runs there"),
        ([scheduler("cp2", OURS)], "problems", "node cp1: no kube-scheduler runs there"),
    ],
)
def test_scheduler_that_an_upgrade_took_the_extender_from_is_found(pods, field, words):
    cluster = FakeKube(node("cp1"), gpu1(), server("extender", "cp1"), server("device-plugin", "gpu1"), *pods)
    story = look(cluster, {**EXPECTED, "scheduler": "static_pod"})
    assert [one for one in story[field] if one.startswith(words)]
    others = [one for name in ("passed", "unknown", "problems") if name != field for one in story[name]]
    assert not [one for one in others if "kube-scheduler" in one]


def test_k3s_shows_nothing_of_its_scheduler():
    cluster = FakeKube(node("cp1"), gpu1(), server("extender", "cp1"), server("device-plugin", "gpu1"))
    story = look(cluster, {**EXPECTED, "scheduler": "k3s"})
    assert story["problems"] == [] and "k3s doesn't show" in story["unknown"][0]


@pytest.mark.parametrize(("mode", "component"), [("dedicated", "scheduler"), ("openshift", "extender")])
def test_server_that_is_bound_to_no_node(mode, component):
    rest = (node("cp1"), gpu1(), server("device-plugin", "gpu1"))
    wanted = {**EXPECTED, "control_plane": [], "scheduler": mode}
    assert look(FakeKube(*rest, server(component, "gpu1")), wanted)["problems"] == []
    assert look(FakeKube(*rest), wanted)["problems"] == [f"{component} isn't ready: it has no pod"]
    unready = look(FakeKube(*rest, server(component, "gpu1", "False")), wanted)["problems"]
    assert unready[0].startswith(f"{component} isn't ready: ")
