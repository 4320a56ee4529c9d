# SPDX-License-Identifier: GPL-3.0-or-later
"""One story, and every way in which two can differ."""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._control_plane import ANNOTATION
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._verification import look
from fake_kube import FakeKube

A, B = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
EXPECTED = {
    "cards": {"gpu1": [A, B]},
    "control_plane": ["cp1"],
    "namespace": "gpushare-system",
    "scheduler": "static_pod",
    "admission": "deny",
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
    others = (*GUARDS, OPENSHIFT_VERSION, named(""), SECONDARY, SECONDARY_CONFIG)
    rest = (node("cp1"), gpu1(), server("device-plugin", "gpu1"), *others)
    wanted = {**EXPECTED, "control_plane": [], "scheduler": mode}
    assert look(FakeKube(*rest, server(component, "gpu1")), wanted)["problems"] == []
    assert look(FakeKube(*rest), wanted)["problems"] == [f"{component} isn't ready: it has no pod"]
    unready = look(FakeKube(*rest, server(component, "gpu1", "False")), wanted)["problems"]
    assert unready[0].startswith(f"{component} isn't ready: ")


# --------------------------------------------------------------------------- what only the API tells of it


def thing(api_version, kind, name, namespace="", **fields):
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    given = fields.pop("metadata", {})
    return {"apiVersion": api_version, "kind": kind, "metadata": {**metadata, **given}, **fields}


def guard(api="v1", actions=("Deny",), policy="gpushare-scheduler"):
    version, kind = f"admissionregistration.k8s.io/{api}", "ValidatingAdmissionPolicy"
    spec = {"policyName": policy, "validationActions": list(actions)}
    return (
        thing(version, kind, "gpushare-scheduler", spec={}),
        thing(version, f"{kind}Binding", "gpushare-scheduler", spec=spec),
    )


GUARDS = guard()
BETA = thing("apiregistration.k8s.io/v1", "APIService", "v1beta1.admissionregistration.k8s.io")
DEDICATED = [node("cp1"), gpu1(), server("device-plugin", "gpu1"), server("scheduler", "gpu1")]


def dedicated(*more, version="v1.36.3", kube=FakeKube, admission="deny"):
    cluster = kube(*copy.deepcopy([*DEDICATED, *more]))
    cluster.version_answer = {"gitVersion": version}
    return look(cluster, {**EXPECTED, "control_plane": [], "scheduler": "dedicated", "admission": admission})


def without_the_common(story):
    common = ("device-plugin", "scheduler is ready", "extender is ready", "node gpu1")
    return {
        field: [one for one in story[field] if not one.startswith(common)]
        for field in ("problems", "unknown", "passed")
        if [one for one in story[field] if not one.startswith(common)]
    }


@pytest.mark.parametrize(
    ("more", "version", "admission", "field", "words"),
    [
        (GUARDS, "v1.36.3", "deny", "passed", "GPU pods for another scheduler are refused"),
        (guard(actions=["Warn"]), "v1.30.0", "warn", "passed", "GPU pods for another scheduler are warned of"),
        ((), "v1.36.3", "deny", "problems", "ValidatingAdmissionPolicy gpushare-scheduler isn't there"),
        (GUARDS[:1], "v1.36.3", "deny", "problems", "ValidatingAdmissionPolicyBinding gpushare-scheduler isn't there"),
        (GUARDS[1:], "v1.36.3", "deny", "problems", "ValidatingAdmissionPolicy gpushare-scheduler isn't there"),
        (guard(actions=["Audit"]), "v1.36.3", "deny", "problems", "gpushare-scheduler doesn't deny what"),
        (GUARDS, "v1.36.3", "warn", "problems", "gpushare-scheduler doesn't warn what"),
        (guard(policy="another"), "v1.36.3", "deny", "problems", "gpushare-scheduler doesn't deny what"),
        ((), "v1.36.3", "none", "", ""),
        ((), "v1.27.4", "deny", "", ""),
        ((), "v1.29.4", "deny", "", ""),
        ((BETA,), "v1.29.4", "deny", "problems", "ValidatingAdmissionPolicy gpushare-scheduler isn't there"),
        ((BETA, *guard("v1beta1")), "v1.28.1", "deny", "passed", "GPU pods for another scheduler are refused"),
        (GUARDS, "of somebody", "deny", "unknown", "whether a policy guards GPU pods can't be told: the API server"),
    ],
)
def test_what_guards_the_pods_of_a_scheduler_of_its_own(more, version, admission, field, words):
    found = without_the_common(dedicated(*more, version=version, admission=admission))
    assert list(found) == ([field] if field else []), found
    assert not field or words in found[field][0]


class Forbidding(FakeKube):
    """Of one kind nothing may be read."""

    kind = ""

    def get(self, ref):
        if ref.kind == self.kind:
            raise ShareError(f"its user may not do this: get {ref}")
        return super().get(ref)


def forbidding(kind):
    return type("Forbidding", (Forbidding,), {"kind": kind})


@pytest.mark.parametrize("kind", ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"])
def test_a_guard_that_cant_be_read_is_unknown(kind):
    found = without_the_common(dedicated(*GUARDS, kube=forbidding(kind)))
    assert list(found) == ["unknown"]
    assert found["unknown"][0].startswith("whether a policy guards GPU pods can't be told: its user may not")


def openshift_version(version):
    return thing(
        "config.openshift.io/v1", "ClusterVersion", "version", status={"desired": {"version": version, "image": "i"}}
    )


def named(policy):
    return thing("config.openshift.io/v1", "Scheduler", "cluster", spec={"policy": {"name": policy}} if policy else {})


def policy_map(text, name="ours", namespace="openshift-config", **notes):
    annotations = {f"kubegpu.share/{key.replace('_', '-')}": value for key, value in notes.items()}
    data = {"policy.cfg": text}
    return thing("v1", "ConfigMap", name, namespace, data=data, metadata={"annotations": annotations})


def openshift_scheduler(on, *words):
    pod = scheduler(on, *words)
    name, labels = f"openshift-kube-scheduler-{on}", {"app": "openshift-kube-scheduler"}
    return {**pod, "metadata": {"name": name, "namespace": "openshift-kube-scheduler", "labels": labels}}


OPENSHIFT_VERSION = openshift_version("4.18.2")
WITH = json.dumps({"kind": "Policy", "extenders": [{"managedResources": [{"name": contract.RESOURCE_MEMORY}]}]})
FLAG = "--policy-configmap=policy-configmap"
NOTED = {"user_policy": "", "in_effect": "true"}
COPY = policy_map(WITH, "policy-configmap", "openshift-kube-scheduler")
# Up to 4.9, all as it should be.
POLICY = {
    "version": openshift_version("4.9.23"),
    "named": named("ours"),
    "map": policy_map(WITH, **NOTED),
    "copy": COPY,
    "scheduler": openshift_scheduler("cp1", FLAG),
    "extender": server("extender", "cp1"),
}
SECONDARY_PLACE = "openshift-secondary-scheduler-operator"
SECONDARY = thing(
    "apps/v1",
    "Deployment",
    "secondary-scheduler",
    SECONDARY_PLACE,
    spec={"replicas": 1, "template": {"spec": {"containers": [], "volumes": [{"configMap": {"name": "its"}}]}}},
    status={"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1},
)
SECONDARY_CONFIG = thing(
    "v1", "ConfigMap", "its", SECONDARY_PLACE, data={"config.yaml": f"- {contract.RESOURCE_MEMORY}"}
)
# From 4.10 on.
BESIDE = {
    "version": OPENSHIFT_VERSION,
    "named": named(""),
    "deployment": SECONDARY,
    "config": SECONDARY_CONFIG,
    "policy": GUARDS[0],
    "binding": GUARDS[1],
    "extender": server("extender", "gpu1"),
}


def on_openshift(parts, kube=FakeKube, **changes):
    objects = [one for one in {**parts, **changes}.values() if one is not None]
    cluster = kube(*copy.deepcopy([node("cp1"), gpu1(), server("device-plugin", "gpu1"), *objects]))
    return look(cluster, {**EXPECTED, "control_plane": [], "scheduler": "openshift"})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (POLICY, ["names policy ours, which is ours", "kube-scheduler on cp1 was started with the policy"]),
        (
            {**POLICY, "map": policy_map(WITH)},
            ["which is the user's, with the extender in it", "kube-scheduler on cp1 was started with the policy"],
        ),
        (
            BESIDE,
            [
                "names no policy",
                "the secondary scheduler is ready, with the extender",
                "GPU pods for another scheduler",
            ],
        ),
        # Kubernetes 1.23 has no such policies.
        (
            {**BESIDE, "version": openshift_version("4.10.3"), "policy": None, "binding": None},
            ["names no policy", "the secondary scheduler is ready"],
        ),
        ({**BESIDE, "version": openshift_version("5.0.1")}, ["names no policy", "the secondary", "GPU pods for"]),
    ],
)
def test_openshifts_scheduler_as_it_should_be(parts, words):
    found = without_the_common(on_openshift(parts))
    assert list(found) == ["passed"], found
    for text, said in zip(words, found["passed"], strict=True):
        assert text in said


@pytest.mark.parametrize(
    ("parts", "changes", "field", "words"),
    [
        (POLICY, {"named": named("")}, "problems", "Scheduler/cluster names no policy, so that kube-scheduler asks no"),
        (POLICY, {"map": None}, "problems", "names policy ours, and ConfigMap openshift-config/ours isn't there"),
        (POLICY, {"map": policy_map("{}", **NOTED)}, "problems", "has no extender for aliyun.com/gpu-mem"),
        (POLICY, {"map": policy_map("?", **NOTED)}, "problems", "has no extender for aliyun.com/gpu-mem"),
        (POLICY, {"map": policy_map('{"extenders": [1]}')}, "problems", "has no extender for aliyun.com/gpu-mem"),
        (POLICY, {"copy": None}, "problems", "OpenShift's operator hasn't taken policy ours over"),
        (POLICY, {"scheduler": None}, "problems", "no kube-scheduler runs in openshift-kube-scheduler"),
        (
            POLICY,
            {"scheduler": openshift_scheduler("cp1")},
            "problems",
            "on cp1 was started without --policy-configmap",
        ),
        (POLICY, {"second": openshift_scheduler("cp2", FLAG)}, "problems", "no extender is ready on cp2"),
        (
            POLICY,
            {"map": policy_map(WITH, user_policy="", in_effect="false")},
            "unknown",
            "whether policy ours came into effect can't be told",
        ),
        (
            POLICY,
            {"map": policy_map(WITH, **NOTED, leaving_after_revision="7")},
            "unknown",
            "whether policy ours came into effect can't be told",
        ),
        (POLICY, {"version": openshift_version("4.4.0")}, "unknown", "OpenShift 4.4 doesn't show which policy"),
        (POLICY, {"version": openshift_version("?")}, "unknown", "how this OpenShift's scheduler is set up"),
        (BESIDE, {"version": None}, "unknown", "how this OpenShift's scheduler is set up"),
        (BESIDE, {"named": named("old")}, "problems", "still names policy old, which degrades OpenShift 4.18.2"),
        (BESIDE, {"named": None}, "unknown", "which policy Scheduler/cluster names can't be told"),
        (BESIDE, {"deployment": None}, "problems", "secondary-scheduler isn't there"),
        (
            BESIDE,
            {"deployment": {**SECONDARY, "status": {**SECONDARY["status"], "updatedReplicas": 0}}},
            "problems",
            "the secondary scheduler isn't ready: Deployment",
        ),
        (BESIDE, {"config": None}, "problems", "the secondary scheduler's configuration has no extender of ours"),
        (BESIDE, {"binding": None}, "problems", "ValidatingAdmissionPolicyBinding gpushare-scheduler isn't there"),
    ],
)
def test_what_isnt_as_it_should_be_on_openshift(parts, changes, field, words):
    found = without_the_common(on_openshift(parts, **changes))
    assert [one for one in found.get(field, []) if words in one], found
    assert len(found.get("problems", []) + found.get("unknown", [])) == 1


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        (POLICY, "ClusterVersion", "how this OpenShift's scheduler is set up"),
        (POLICY, "Scheduler", "whether kube-scheduler asks the extender"),
        (POLICY, "ConfigMap", "whether kube-scheduler asks the extender"),
        (BESIDE, "Scheduler", "which policy Scheduler/cluster names"),
        (BESIDE, "Deployment", "whether the secondary scheduler is at work"),
        (BESIDE, "ValidatingAdmissionPolicy", "whether a policy guards GPU pods"),
    ],
)
def test_what_cant_be_read_on_openshift_is_unknown_and_hides_nothing_else(parts, kind, words):
    found = without_the_common(on_openshift(parts, kube=forbidding(kind)))
    assert found["unknown"][0].startswith(f"{words} can't be told: ") and "its user may not" in found["unknown"][0]
    assert "problems" not in found and len(found["unknown"]) == 1
    # Each of the three that 4.18 has is looked at for itself.
    assert len(found.get("passed", [])) == (2 if parts is BESIDE else 0)
