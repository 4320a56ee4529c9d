# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks of this collection's servers: each way in which servers, nodes and scheduler can be wrong."""

from __future__ import annotations

import copy
import dataclasses
import json

import check_worlds
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check import collect
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import FIELD_MANAGER
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.constants import ANNOTATION
from check_worlds import COUNT, MEM, OUR_CONFIGURATION, container, pod, scheduler, server
from dra_objects import slices_of
from fake_kube import FakeKube

A, B = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
SERVERS = {"control_plane": ["cp1"], "namespace": "gpushare-system", "scheduler": "static_pod"}
SERVERS |= {"admission": "deny", "problem": ""}
OBSERVED = {"gpu1": [A, B]}
CARDS = (contract.Card(0, A, 0, 16384, 16), contract.Card(1, B, 1, 16384, 16))


def node(name, cards=(), labels=None, capacity=None, allocatable=None):
    units = sum(card.units for card in cards) if capacity is None else capacity
    healthy = sum(card.units for card in cards if card.healthy) if allocatable is None else allocatable
    annotations = {contract.NODE_CARDS: contract.cards_to_annotation(cards)} if cards else {}
    made = check_worlds.node({MEM: units, **({COUNT: len(cards)} if cards else {})}, annotations, labels, name)
    made["status"]["allocatable"][MEM] = str(healthy)
    return made


def gpu1(cards=CARDS, **more):
    return node("gpu1", cards, check_worlds.LABELS["extender"], **more)


def user(units, index):
    annotations = {} if index is None else {contract.POD_INDEX: str(index)}
    return pod(units, [container("main", {MEM: units})], annotations)


SCHEDULER = scheduler("cp1", OUR_CONFIGURATION)
GOOD = [SCHEDULER, node("cp1"), gpu1(), server("extender", "cp1"), server("device-plugin", "gpu1")]


def checked(kube, nodes=None, scope="servers", before=None, **servers):
    """The module's result, as site.yml's last step gets it."""
    given = {key: argument.get("default") for key, argument in collect.ARGUMENTS.items()}
    given.update(nodes=OBSERVED if nodes is None else nodes, servers={**SERVERS, **servers}, scope=scope, before=before)
    return collect.check(kube, given, now=1795348800)


def findings(objects, **more):
    """Check, level, cause and node of each finding."""
    report = checked(FakeKube(*copy.deepcopy(objects)), **more)["report"]
    return [(finding["check"], finding["level"], finding["cause"], finding["node"]) for finding in report["findings"]]


def test_a_healthy_cluster_takes_two_requests():
    found = checked(FakeKube(*copy.deepcopy([*GOOD, user(2, 0)])))
    assert (found["report"]["findings"], found["requests"]) == ([], {"GET": 2})
    compared = {check["id"]: check["n"] for check in found["report"]["checks"]}
    assert compared == {
        **{"C6": 2, "D1": 0, "D2": 0, "D3": 0, "D10": 0, "G1": 2, "G2": 1, "G6": 2},
        **{"S1": 2, "S2": 1, "S3": 0, "S4": 1, "S5": 1},
    }


def replaced(*others):
    names = {(other["kind"], other["metadata"]["name"]) for other in others}
    return [one for one in GOOD if (one["kind"], one["metadata"]["name"]) not in names] + list(others)


def without(name):
    return [one for one in GOOD if one["metadata"]["name"] != name]


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        (replaced(gpu1([])), [("S4", "not_announced", "gpu1")]),
        (
            replaced(gpu1([CARDS[0], contract.Card(1, "GPU-cccccccc", 1, 16384, 16)])),
            [("G1", "not_in_annotation", "gpu1"), ("G1", "not_on_machine", "gpu1")],
        ),
        (replaced(server("extender", "cp1", "False")), [("S1", "not_ready", "cp1")]),
        (without("gpu1"), [("S4", "not_in_cluster", "gpu1")]),
        ([*GOOD, node("gpu2", CARDS, check_worlds.LABELS["extender"])], [("S1", "not_running", "gpu2")]),
    ],
)
def test_contradictions(objects, expected):
    """Beside those that the mutations of whole clusters show."""
    found = findings(objects)
    failed = [(check, cause, name) for check, level, cause, name in found if level == "FAIL"]
    assert sorted(failed) == sorted(expected), found


@pytest.mark.parametrize("mode", ["static_pod", "k3s", "rke2"])
def test_a_check_of_no_machine_and_of_no_node_is_unknown(mode):
    """Nothing of what is needed is known: no scheduler's machine, no node."""
    found = findings([node("cp1")], nodes={}, control_plane=[], scheduler=mode)
    assert [one[:3] for one in found] == [
        ("S1", "UNKNOWN", "no_control_plane"),
        ("S2", "UNKNOWN", "no_control_plane"),
        ("S4", "UNKNOWN", "no_gpu_node"),
    ]
    # Another back end has the nodes, or one of gpushare's is there.
    labels = {"kubegpu.share/backend": "hami", "gpu": "on", "node-restriction.kubernetes.io/kubegpu-share": "hami"}
    assert findings([node("cp1"), node("gpu1", labels=labels)], nodes={}, control_plane=[], scheduler=mode) == []
    assert "no_gpu_node" not in [finding[2] for finding in findings(GOOD, scheduler=mode)]


@pytest.mark.parametrize(
    ("objects", "nodes", "expected"),
    [
        (GOOD, {"gpu1": []}, ("G1", "UNKNOWN", "no_data", "gpu1")),
        ([*GOOD, user(2, None)], OBSERVED, ("G6", "UNKNOWN", "unplaced", "gpu1")),
    ],
)
def test_missing_evidence_is_unknown(objects, nodes, expected):
    assert findings(objects, nodes=nodes) == [expected]


def test_upstreams_plugin_announces_no_uuids():
    old = gpu1([], capacity=32, allocatable=32)
    for field in ("capacity", "allocatable"):
        old["status"][field][contract.RESOURCE_COUNT] = "2"
    found = findings(replaced(old))
    assert found == [("G1", "UNKNOWN", "no_data", "gpu1"), ("G2", "UNKNOWN", "no_data", "gpu1")]


def test_nodes_of_other_stacks_are_out_of_scope():
    other = node("gpu2")
    other["status"].update(capacity={"nvidia.com/gpu": "2"}, allocatable={"nvidia.com/gpu": "1"})
    assert findings([*GOOD, other]) == []


def test_kubelets_status_from_before_an_update_of_the_device_plugin_is_transient():
    """The status of the moment between the old device plugin and the new one."""
    stopped = FakeKube(*copy.deepcopy(replaced(gpu1(allocatable=0))))
    before = checked(stopped)["report"]
    assert before["result"] == "FAIL"
    assert checked(FakeKube(*copy.deepcopy(GOOD)), before=before)["report"]["result"] == "PASS"
    assert checked(stopped, before=before)["report"]["result"] == "FAIL"


def test_a_server_that_still_isnt_ready_for_another_reason_fails():
    waiting = {"name": "main", "ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
    crashed = {"name": "main", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    first, second = (
        FakeKube(*copy.deepcopy(replaced(server("extender", "cp1", "False", containerStatuses=[one]))))
        for one in (waiting, crashed)
    )
    report = checked(second, before=checked(first)["report"])["report"]
    assert report["counts"]["FAIL"] == 1 and "CrashLoopBackOff" in report["findings"][0]["what"]


def test_nodes_that_dont_enforce_limits_are_listed_once_per_reason():
    old = contract.LIMIT_UNENFORCED + "NVIDIA's driver is 580.95.05, and limits need 615 or newer"
    objects = [scheduler("cp1", OUR_CONFIGURATION), server("extender", "cp1")]
    for name, limit in (("gpu1", contract.LIMIT_ENFORCED), ("gpu2", old), ("gpu3", old), ("gpu4", "off"), ("gpu5", "")):
        one = node(name, CARDS, check_worlds.LABELS["extender"])
        if limit:
            one["metadata"]["annotations"][contract.NODE_LIMIT] = limit
        objects += [one, server("device-plugin", name)]
    report = checked(FakeKube(*objects))["report"]
    (mine,) = [finding for finding in report["findings"] if finding["level"] == "WARN"]
    assert mine["check"] == "S5" and mine["what"] == (
        "the memory shares of pods on nodes gpu2, gpu3 aren't enforced: "
        "NVIDIA's driver is 580.95.05, and limits need 615 or newer"
    )


OLD_DRIVER = "NVIDIA's driver is 580.95.05, and limits need 615 or newer"
LEAK = "more than 4608 MiB of card 1 are used"


@pytest.mark.parametrize(
    ("limit", "kinds"),
    [
        (f"unenforced: UnaccountedMemoryHeld: {LEAK}", ["unaccounted"]),
        ("unenforced: MemoryLimitExceeded: container x holds 9 MiB (and 1 more)", ["unaccounted"]),
        # Where memory isn't limited, what nobody was promised is compared with the shares.
        (f"unenforced: {OLD_DRIVER} (and 1 more)", ["not_enforced", "unaccounted"]),
        ("off", ["unaccounted"]),
    ],
)
def test_memory_of_no_share_is_reported_whatever_else_a_node_reports(limit, kinds):
    leaked = dataclasses.replace(CARDS[1], limit="UnaccountedMemoryHeld", limit_reason=LEAK)
    one = gpu1((dataclasses.replace(CARDS[0], limit="off"), leaked))
    one["metadata"]["annotations"][contract.NODE_LIMIT] = limit
    report = checked(FakeKube(*replaced(one)))["report"]
    mine = {finding["cause"]: finding["what"] for finding in report["findings"] if finding["level"] == "WARN"}
    assert sorted(mine) == kinds
    assert mine["unaccounted"] == f"memory of GPU 1 is used beyond its pods' shares (UnaccountedMemoryHeld): {LEAK}"


# --------------------------------------------------------------------------- the scheduler


def mirror(pod):
    """Return the API's copy of a kubelet's static pod, without labels."""
    annotations = {**pod["metadata"].get("annotations", {}), "kubernetes.io/config.mirror": "1"}
    return {**pod, "metadata": {**pod["metadata"], "labels": {}, "annotations": annotations}}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([SCHEDULER], []),
        ([scheduler("cp1", "--config", OUR_CONFIGURATION.partition("=")[2])], []),
        ([scheduler("cp1", "--policy-config-file=/etc/kubernetes/kubegpu-share/policy.json")], []),
        ([scheduler("cp1", "--config=/x", annotations={ANNOTATION: "1"})], []),
        ([scheduler("cp1", "--config=/x")], [("S2", "UNKNOWN", "own_configuration", "cp1")]),
        ([scheduler("cp1", "--leader-elect=true")], [("S2", "FAIL", "configuration_lost", "cp1")]),
        # A static pod of an installer that labels it otherwise.
        ([mirror(scheduler("cp1", OUR_CONFIGURATION))], []),
        ([], [("S2", "FAIL", "no_scheduler", "cp1")]),
        ([scheduler("cp2", OUR_CONFIGURATION)], [("S2", "FAIL", "no_scheduler", "cp1")]),
    ],
)
def test_schedulers_arguments(pods, expected):
    assert findings([*without("kube-scheduler-cp1"), *pods]) == expected


def test_k3s_doesnt_show_its_schedulers_arguments():
    assert findings(without("kube-scheduler-cp1"), scheduler="k3s") == [("S2", "UNKNOWN", "k3s_arguments", "cp1")]


RUNNING = {"config": "/c.yaml", "policy": "", "fresh": True, "extender": True}


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([RUNNING], []),
        ([{**RUNNING, "fresh": None}], []),
        # An old process may still be ending.
        ([{**RUNNING, "fresh": False}, RUNNING], []),
        ([{**RUNNING, "fresh": False}], [("FAIL", "older_than_configuration")]),
        ([{**RUNNING, "extender": False}], [("FAIL", "loaded_without_extender")]),
        ([{**RUNNING, "config": "", "extender": False}], [("FAIL", "configuration_lost")]),
        ([{**RUNNING, "fresh": None, "extender": None}], None),
        ([], None),
        ("?", None),
        (["?", {}], None),
    ],
)
@pytest.mark.parametrize("mode", ["static_pod", "rke2", "k3s"])
def test_what_a_scheduler_has_loaded_decides_before_its_arguments(mode, running, expected):
    """Where that is unknown, the API's pods are checked as before."""
    users = [*without("kube-scheduler-cp1"), scheduler("cp1", "--config=/c.yaml")]
    found = [
        (level, cause) for _check, level, cause, _node in findings(users, scheduler=mode, running={"cp1": running})
    ]
    unknown = "k3s_arguments" if mode == "k3s" else "own_configuration"
    assert found == ([("UNKNOWN", unknown)] if expected is None else expected)


def test_an_unknown_scheduler_makes_the_servers_unknown():
    objects = without("extender-cp1")
    found = findings(objects, problem="control_plane: this group is empty")
    assert found == [("S1", "UNKNOWN", "not_checked", "")]


@pytest.mark.parametrize(("mode", "component"), [("dedicated", "scheduler"), ("openshift", "extender")])
def test_server_that_is_bound_to_no_node(mode, component):
    others = (*GUARDS, OPENSHIFT_VERSION, named(""), SECONDARY, SECONDARY_CONFIG)
    rest = [node("cp1"), gpu1(), server("device-plugin", "gpu1"), *others]
    wanted = {"control_plane": [], "scheduler": mode}
    assert findings([*rest, server(component, "gpu1")], **wanted) == []
    assert findings(rest, **wanted) == [("S1", "FAIL", "not_running_anywhere", "")]
    unready = server(component, "gpu1", "False")
    assert findings([*rest, unready], **wanted) == [("S1", "FAIL", "not_ready_anywhere", "")]


def test_a_pod_of_a_tenant_stands_for_no_server():
    """Nor does a dedicated scheduler's in the servers' namespace, where tenants have none, either."""

    def of_tenant(component, namespace="team"):
        made = server(component, "gpu1")
        made["metadata"]["namespace"] = namespace
        return made

    rest = [*without("device-plugin-gpu1"), of_tenant("device-plugin")]
    assert findings(rest) == [("S1", "FAIL", "not_running", "gpu1")]
    others = (*GUARDS, named(""), node("cp1"), gpu1(), server("device-plugin", "gpu1"))
    for namespace in ("team", "gpushare-system"):
        seen = findings([*others, of_tenant("scheduler", namespace)], control_plane=[], scheduler="dedicated")
        assert seen == [("S1", "FAIL", "not_running_anywhere", "")]


def deployment(name, wanted, ready, **status):
    """A Deployment as its controller reports it."""
    counted = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), ready)
    spec = {"replicas": wanted}
    metadata = {"name": name, "namespace": "gpushare-system"}
    status = {**counted, "updatedReplicas": wanted, "observedGeneration": 1, **status}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec, "status": status}


QUOTA = "pods is forbidden: insufficient quota to match these scopes: [{PriorityClass In [system-cluster-critical]}]"


@pytest.mark.parametrize(
    ("live", "others", "expected"),
    [
        (deployment("gpushare-dra-templates", 2, 2), (), []),
        (deployment("gpushare-dra-templates", 2, 1), (), [("WARN", "fewer_ready")]),
        (deployment("gpushare-dra-templates", 2, 1), ("False",), [("WARN", "fewer_ready")]),
        (None, (), [("UNKNOWN", "wanted_unknown")]),
    ],
)
def test_a_server_with_fewer_pods_than_its_deployment_wants(live, others, expected):
    """One ready pod serves, and isn't all that was asked for."""
    pods = [server("dra-templates", "gpu1"), *(server("dra-templates", "gpu2", state) for state in others)]
    for one in pods:
        one["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "gpushare-dra-templates-1"}]
    objects = [*BY_CLAIMS[:2], *pods, *([live] if live else [])]
    report = checked(with_claims(objects, slices_of("gpu1", CARDS, limits="enforced")), control_plane=[])["report"]
    assert [
        (finding["level"], finding["cause"]) for finding in report["findings"] if finding["check"] == "S1"
    ] == expected
    said = " ".join(finding["what"] for finding in report["findings"])
    assert ("1 of 2 pods are ready" in said) == (expected == [("WARN", "fewer_ready")])


def test_a_server_that_a_quota_keeps_out_is_told_with_the_api_servers_reason():
    refused = {"type": "ReplicaFailure", "status": "True", "message": QUOTA}
    objects = [*BY_CLAIMS[:2], deployment("gpushare-dra-templates", 2, 0, conditions=[refused])]
    kube = with_claims(objects, slices_of("gpu1", CARDS, limits="enforced"))
    [one] = [each for each in checked(kube, control_plane=[])["report"]["findings"] if each["check"] == "S1"]
    assert (one["level"], one["cause"]) == ("FAIL", "not_ready_anywhere") and QUOTA in one["what"]


def test_a_taint_that_keeps_a_server_off_its_node_is_told():
    tainted = node("gpu2", CARDS, check_worlds.LABELS["extender"])
    sku = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
    tainted.setdefault("spec", {})["taints"] = [sku, {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]
    report = checked(FakeKube(*copy.deepcopy([*GOOD, tainted])))["report"]
    [one] = [each for each in report["findings"] if each["check"] == "S1"]
    assert (one["cause"], one["node"]) == ("kept_away", "gpu2")
    assert "has sku=gpu:NoSchedule, and its pods" in one["what"] and "gpushare_tolerations" in one["do"]
    # Pods elsewhere tolerate it, so that isn't why.
    tolerant = server("device-plugin", "gpu1")
    tolerant["spec"]["tolerations"] = [{"operator": "Exists"}]
    assert ("S1", "FAIL", "not_running", "gpu2") in findings([*replaced(tolerant), tainted])


# --------------------------------------------------------------------------- single objects of the API


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
    """Level and cause of each finding beside a scheduler of its own."""
    cluster = kube(*copy.deepcopy([*DEDICATED, *more]))
    cluster.version_answer = {"gitVersion": version}
    report = checked(cluster, control_plane=[], scheduler="dedicated", admission=admission)["report"]
    assert {finding["check"] for finding in report["findings"]} <= {"S3"}
    return [(finding["level"], finding["cause"]) for finding in report["findings"]]


@pytest.mark.parametrize(
    ("more", "version", "admission", "expected"),
    [
        (GUARDS, "v1.36.3", "deny", []),
        (guard(actions=["Warn"]), "v1.30.0", "warn", []),
        ((), "v1.36.3", "deny", [("FAIL", "missing")]),
        (GUARDS[:1], "v1.36.3", "deny", [("FAIL", "missing")]),
        (GUARDS[1:], "v1.36.3", "deny", [("FAIL", "missing")]),
        (guard(actions=["Audit"]), "v1.36.3", "deny", [("FAIL", "other_action")]),
        (GUARDS, "v1.36.3", "warn", [("FAIL", "other_action")]),
        (guard(policy="another"), "v1.36.3", "deny", [("FAIL", "other_action")]),
        ((), "v1.36.3", "none", []),
        ((), "v1.27.4", "deny", []),
        ((), "v1.29.4", "deny", []),
        ((BETA,), "v1.29.4", "deny", [("FAIL", "missing")]),
        ((BETA, *guard("v1beta1")), "v1.28.1", "deny", []),
        (GUARDS, "unknown", "deny", [("UNKNOWN", "no_data")]),
    ],
)
def test_admission_policy_of_a_dedicated_scheduler(more, version, admission, expected):
    assert dedicated(*more, version=version, admission=admission) == expected


def forbidding(kind):
    """An API server that refuses to return objects of one kind."""

    class Forbidding(FakeKube):
        def get(self, ref):
            if ref.kind == kind:
                raise ShareError(f"its user may not do this: get {ref}")
            return super().get(ref)

    return Forbidding


@pytest.mark.parametrize("kind", ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"])
def test_an_admission_policy_that_cant_be_read_is_unknown(kind):
    assert dedicated(*GUARDS, kube=forbidding(kind)) == [("UNKNOWN", "no_data")]


def openshift_version(version):
    desired = {"version": version, "image": "i"}
    return thing("config.openshift.io/v1", "ClusterVersion", "version", status={"desired": desired})


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
OUTDATED = {**SECONDARY, "status": {**SECONDARY["status"], "updatedReplicas": 0}}
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
    """Level and cause of each finding on OpenShift."""
    objects = [one for one in {**parts, **changes}.values() if one is not None]
    cluster = kube(*copy.deepcopy([node("cp1"), gpu1(), server("device-plugin", "gpu1"), *objects]))
    report = checked(cluster, control_plane=[], scheduler="openshift")["report"]
    return [(finding["level"], finding["cause"]) for finding in report["findings"]]


@pytest.mark.parametrize(
    "parts",
    [
        POLICY,
        {**POLICY, "map": policy_map(WITH)},
        BESIDE,
        # Kubernetes 1.23 has no such policies.
        {**BESIDE, "version": openshift_version("4.10.3"), "policy": None, "binding": None},
        {**BESIDE, "version": openshift_version("5.0.1")},
    ],
    ids=["policy", "users-policy", "secondary", "secondary-4.10", "secondary-5.0"],
)
def test_openshift_without_findings(parts):
    assert on_openshift(parts) == []


@pytest.mark.parametrize(
    ("parts", "changes", "level", "cause"),
    [
        (POLICY, {"named": named("")}, "FAIL", "no_policy"),
        (POLICY, {"map": None}, "FAIL", "policy_missing"),
        (POLICY, {"map": policy_map("{}", **NOTED)}, "FAIL", "no_extender"),
        (POLICY, {"map": policy_map("?", **NOTED)}, "FAIL", "no_extender"),
        (POLICY, {"map": policy_map('{"extenders": [1]}')}, "FAIL", "no_extender"),
        (POLICY, {"copy": None}, "FAIL", "policy_not_rolled_out"),
        (POLICY, {"scheduler": None}, "FAIL", "no_scheduler_in_namespace"),
        (POLICY, {"scheduler": openshift_scheduler("cp1")}, "FAIL", "started_without_policy"),
        (POLICY, {"second": openshift_scheduler("cp2", FLAG)}, "FAIL", "no_extender_on_node"),
        (POLICY, {"map": policy_map(WITH, user_policy="", in_effect="false")}, "UNKNOWN", "run_interrupted"),
        (POLICY, {"map": policy_map(WITH, **NOTED, leaving_after_revision="7")}, "UNKNOWN", "run_interrupted"),
        (POLICY, {"version": openshift_version("4.4.0")}, "UNKNOWN", "policy_not_shown"),
        (POLICY, {"version": openshift_version("?")}, "UNKNOWN", "openshift_unknown"),
        (BESIDE, {"version": None}, "UNKNOWN", "openshift_unknown"),
        (BESIDE, {"named": named("old")}, "FAIL", "policy_left"),
        (BESIDE, {"named": None}, "UNKNOWN", "policy_name_unknown"),
        (BESIDE, {"deployment": None}, "FAIL", "secondary_missing"),
        (BESIDE, {"deployment": OUTDATED}, "FAIL", "secondary_not_ready"),
        (BESIDE, {"config": None}, "FAIL", "secondary_without_extender"),
        (BESIDE, {"binding": None}, "FAIL", "missing"),
    ],
)
def test_openshift_with_one_fault(parts, changes, level, cause):
    assert on_openshift(parts, **changes) == [(level, cause)]


@pytest.mark.parametrize(
    ("parts", "kind", "cause"),
    [
        (POLICY, "ClusterVersion", "openshift_unknown"),
        (POLICY, "Scheduler", "policy_unknown"),
        (POLICY, "ConfigMap", "policy_unknown"),
        (BESIDE, "Scheduler", "policy_name_unknown"),
        (BESIDE, "Deployment", "secondary_unknown"),
        (BESIDE, "ValidatingAdmissionPolicy", "no_data"),
    ],
)
def test_an_object_that_cant_be_read_on_openshift_is_unknown_and_the_others_are_checked(parts, kind, cause):
    assert on_openshift(parts, kube=forbidding(kind)) == [("UNKNOWN", cause)]
    if parts is BESIDE:
        changes = {"binding": None} if kind in ("Scheduler", "Deployment") else {"named": named("old")}
        assert len(on_openshift(parts, kube=forbidding(kind), **changes)) == 2


# --------------------------------------------------------------------------- with claims

BY_CLAIMS = [
    check_worlds.node({}, labels=check_worlds.LABELS["dra"], name="gpu1"),
    server("dra-driver", "gpu1"),
    server("dra-templates", "gpu1"),
]
POLICIES = check_worlds.admission_objects()


def with_claims(objects, slices):
    """A cluster with these slices, and with all that turns pods into claims."""
    kube = FakeKube(*copy.deepcopy(objects))
    for policy in POLICIES:
        kube.add(copy.deepcopy(policy), FIELD_MANAGER)
    for one in slices:
        kube.add({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **one})
    return kube


def claims_findings(objects, slices=None, **more):
    """Check, cause and node of each finding, of a cluster whose shares kube-scheduler allocates."""
    kube = with_claims(objects, slices_of("gpu1", CARDS, **more) if slices is None else slices)
    report = checked(kube, control_plane=[])
    return [(finding["check"], finding["cause"], finding["node"]) for finding in report["report"]["findings"]], report


def test_a_healthy_cluster_of_claims_needs_neither_extender_nor_device_plugin():
    found, report = claims_findings(BY_CLAIMS, limits="enforced")
    assert found == []
    # Nodes, pods, slices, claims and templates; a DeviceClass, six policies and their bindings.
    assert report["requests"] == {"GET": 5 + 13}
    compared = {check["id"]: check["n"] for check in report["report"]["checks"]}
    assert {
        "D1": 2,
        "D2": 1,
        "D3": 2,
        "D10": 13,
        "S1": 2,
        "S2": 0,
        "S3": 0,
        "S4": 1,
        "S5": 1,
    }.items() <= compared.items()


@pytest.mark.parametrize(
    ("objects", "more", "expected"),
    [
        (BY_CLAIMS[:1] + BY_CLAIMS[2:], {}, ("S1", "not_running", "gpu1")),
        (BY_CLAIMS[:2], {}, ("S1", "not_running_anywhere", "")),
        (BY_CLAIMS, {"slices": []}, ("S4", "not_offered", "gpu1")),
        (BY_CLAIMS, {"limits": "DriverTooOld"}, ("S5", "not_enforced", "")),
        (BY_CLAIMS, {"limits": "MemoryLimitExceeded"}, ("S5", "violated", "gpu1")),
        (BY_CLAIMS, {"slices": slices_of("gpu1", CARDS[:1])}, ("D1", "not_in_slice", "gpu1")),
    ],
)
def test_servers_and_nodes_of_claims(objects, more, expected):
    found, _report = claims_findings(objects, **more)
    assert set(found) == {expected}


BOTH = [
    *GOOD,
    check_worlds.node({}, labels=check_worlds.LABELS["dra"], name="gpu2"),
    server("dra-driver", "gpu2"),
    server("dra-templates", "gpu2"),
]


def findings_of_both(objects, problem=""):
    """Level, check, cause and node of each finding, in a cluster with a node of each allocation."""
    kube = with_claims(objects, slices_of("gpu2", CARDS, limits="enforced"))
    nodes = {"gpu1": [A, B], "gpu2": [A, B]}
    found = checked(kube, nodes=nodes, problem=problem)["report"]
    compared = {check["id"]: check["n"] for check in found["checks"]}
    return [
        (finding["level"], finding["check"], finding["cause"], finding["node"]) for finding in found["findings"]
    ], compared


def test_nodes_of_both_allocations_are_each_checked_by_their_own_servers():
    found, compared = findings_of_both(BOTH)
    assert found == []
    # Extender, device plugin, driver and templates; a scheduler's configuration, and what turns pods into claims.
    assert {"S1": 4, "S2": 1, "S4": 2, "S5": 2, "D10": 13, "D1": 2, "G1": 2}.items() <= compared.items(), compared
    for pod_, expected in (
        ("dra-driver-gpu2", ("FAIL", "S1", "not_running", "gpu2")),
        ("dra-templates-gpu2", ("FAIL", "S1", "not_running_anywhere", "")),
        ("device-plugin-gpu1", ("FAIL", "S1", "not_running", "gpu1")),
        ("extender-cp1", ("FAIL", "S1", "not_running", "cp1")),
    ):
        left = [one for one in BOTH if one["metadata"]["name"] != pod_]
        assert len(left) < len(BOTH), pod_
        assert findings_of_both(left)[0] == [expected]


@pytest.mark.parametrize("backend", ["hami", "nvidia"])
def test_nodes_of_other_back_ends_need_no_server_of_gpushares(backend):
    """An observed node without the label gpushare is a new one of gpushare's, unless it was given to another."""
    other = check_worlds.node({"nvidia.com/gpu": 2}, labels=check_worlds.LABELS[backend], name="gpu2")
    nodes = {"gpu1": [A, B], "gpu2": [A, B]}
    report = checked(FakeKube(*copy.deepcopy([*GOOD, other])), nodes=nodes)["report"]
    assert not [finding for finding in report["findings"] if finding["check"].startswith("S")], report["findings"]
    # Where no node has gpushare, neither extender nor device plugin is missed.
    report = checked(FakeKube(*copy.deepcopy([SCHEDULER, node("cp1"), other])), nodes={"gpu2": [A, B]})["report"]
    assert not [finding for finding in report["findings"] if finding["check"].startswith("S")], report["findings"]
    assert {check["id"]: check["n"] for check in report["checks"]}["S1"] == 0
    # One that announces nothing is a fault of its own back end.
    silent = check_worlds.node({}, labels=check_worlds.LABELS[backend], name="gpu2")
    report = checked(FakeKube(*copy.deepcopy([node("cp1"), silent])), nodes={}, scope="all", control_plane=[])["report"]
    [found] = [finding for finding in report["findings"] if finding["check"] == "C1"]
    assert (found["cause"], found["node"]) == ("nothing_announced", "gpu2")
    assert f"kubegpu.share/backend={backend}" in found["what"]


def test_what_is_unknown_of_the_schedulers_leaves_the_servers_of_claims_checked():
    left = [one for one in BOTH if one["metadata"]["name"] != "dra-driver-gpu2"]
    found, _compared = findings_of_both(left, problem="no control plane is known")
    assert found == [("FAIL", "S1", "not_running", "gpu2"), ("UNKNOWN", "S1", "not_checked", "")]


def test_an_unlabelled_node_is_as_the_others():
    """A new host of the inventory, in a cluster of claims: no extender is missed."""
    objects = [*BY_CLAIMS, check_worlds.node({}, name="gpu9")]
    kube = with_claims(objects, slices_of("gpu1", CARDS, limits="enforced"))
    report = checked(kube, control_plane=["gpu1"], nodes={"gpu1": [A, B], "gpu9": []})["report"]
    found = {(finding["check"], finding["cause"], finding["node"]) for finding in report["findings"]}
    assert {("S1", "not_running", "gpu9"), ("S4", "no_label", "gpu9"), ("S4", "not_offered", "gpu9")} <= found
    assert not [finding for finding in report["findings"] if finding["node"] != "gpu9"], found
    assert any("gpushare=dra" in finding["what"] for finding in report["findings"])


def test_claims_are_read_only_where_there_may_be_any():
    assert checked(FakeKube(*copy.deepcopy(GOOD)), scope="all")["requests"] == {"GET": 2}
    waiting = {**pod(5, [container("c")], resourceClaims=[{"name": "g"}]), "kind": "Pod"}
    assert checked(FakeKube(*copy.deepcopy([*GOOD, waiting])), scope="all")["requests"] == {"GET": 5}
    # A device plugin that is down has its annotation.
    down = replaced(gpu1(allocatable=0))
    assert checked(FakeKube(*copy.deepcopy(down)), scope="all")["requests"] == {"GET": 2}


def test_rights_that_are_missing_are_unknown():
    kube = FakeKube(*copy.deepcopy(BY_CLAIMS))
    kube.failures = [None, None, KubeError("resourceslices is forbidden", 403, "Forbidden", "")]
    findings_ = checked(kube, scope="all", control_plane=[])["report"]["findings"]
    assert [(finding["level"], finding["cause"]) for finding in findings_ if finding["check"] == "D8"] == [
        ("UNKNOWN", "no_data")
    ]
