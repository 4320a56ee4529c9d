# SPDX-License-Identifier: GPL-3.0-or-later
"""The dedicated scheduler: its plan by the cluster's version and nodes, and its objects."""

from __future__ import annotations

import hashlib

import pytest
import role_templates
import yaml
from allocation_snapshots import row
from ansible_collections.kubegpu.share.plugins.filter.scheduler import FilterModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import node_backends
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import CONTROL_PLANE_LABELS
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import config as scheduler_config
from dedicated_kit import LEDGER, NAME, OPTIONS, node, one, planned, pod_of, rendered
from gpushare.extender import command

LIBRARY = "registry.k8s.io/kube-scheduler"


# --------------------------------------------------------------------------- the plan


@pytest.mark.parametrize(
    ("version", "image", "api", "probe", "policy", "budget"),
    [
        ("v1.19.16", "v1.19.16", "v1beta1", "/healthz", "", "policy/v1beta1"),
        ("v1.20.15", "v1.20.15", "v1beta1", "/healthz", "", "policy/v1beta1"),
        ("v1.21.14", "v1.21.14", "v1beta1", "/healthz", "", "policy/v1"),
        ("v1.27.16", "v1.27.16", "v1", "/healthz", "", "policy/v1"),
        ("v1.28.15", "v1.28.15", "v1", "/healthz", "v1beta1", "policy/v1"),
        ("v1.29.14", "v1.29.14", "v1", "/healthz", "v1beta1", "policy/v1"),
        ("v1.30.9", "v1.30.9", "v1", "/healthz", "v1", "policy/v1"),
        ("v1.31.13-eks-113cf36", "v1.31.13", "v1", "/livez", "v1", "policy/v1"),
        ("v1.34.1+k3s1", "v1.34.1", "v1", "/livez", "v1", "policy/v1"),
        # AKS' own patches of releases that upstream has ended.
        ("v1.28.101", "v1.28.15", "v1", "/healthz", "v1beta1", "policy/v1"),
        ("v1.30.100", "v1.30.14", "v1", "/healthz", "v1", "policy/v1"),
        ("v1.36.0-rc.1.12+abcdef", "v1.36.0-rc.1", "v1", "/livez", "v1", "policy/v1"),
    ],
)
def test_plan_follows_cluster_version(version, image, api, probe, policy, budget):
    found = planned(version)
    assert found["image"] == f"{LIBRARY}:{image}"
    assert yaml.safe_load(found["config"])["apiVersion"] == f"kubescheduler.config.k8s.io/{api}"
    assert found["live"] == probe
    assert found["ready"] == {"/healthz": "/healthz", "/livez": "/readyz"}[probe]
    assert found["policy_api"] == (policy and f"admissionregistration.k8s.io/{policy}")
    assert found["budget_api"] == budget


@pytest.mark.parametrize(
    ("options", "image", "minor"),
    [
        ({"image": "mirror:5000/k8s/kube-scheduler"}, "mirror:5000/k8s/kube-scheduler:v1.36.3", 36),
        ({"image": "mirror:5000/scheduler:v1.35.2"}, "mirror:5000/scheduler:v1.35.2", 35),
        ({"version": "1.36.1"}, f"{LIBRARY}:v1.36.1", 36),
        ({"version": "v1.35.0"}, f"{LIBRARY}:v1.35.0", 35),
        ({"image": "s@sha256:ab", "version": "1.36.3"}, "s@sha256:ab", 36),
        ({"image": "s:v1.36.2@sha256:ab"}, "s:v1.36.2@sha256:ab", 36),
        ({"image": "s:mine", "version": "1.36"}, "s:mine", 36),
    ],
)
def test_image_and_version_options(options, image, minor):
    found = planned(**options)
    assert (found["image"], found["minor"]) == (image, minor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"version": "1.36"}, ["scheduler_version", "1.36", "complete version"]),
        ({"image": "s:v1.37.0"}, ["scheduler_dedicated_image", "1.37", "1.36"]),
        ({"image": "s:v1.34.9"}, ["scheduler_dedicated_image", "1.34", "1.36"]),
        ({"image": "s:latest"}, ["scheduler_version", "s:latest"]),
        ({"image": "s@sha256:ab"}, ["scheduler_version", "s@sha256:ab"]),
        ({"image": ""}, ["scheduler_dedicated_image"]),
        ({"image": "s "}, ["scheduler_dedicated_image", "'s '"]),
        ({"name": "default-scheduler"}, ["scheduler_name", "default-scheduler"]),
        ({"name": "it's"}, ["scheduler_name", "it's"]),
        ({"name": ""}, ["scheduler_name"]),
        ({"name": "a" * 64}, ["scheduler_name", "63"]),
        ({"namespace": "Kube"}, ["scheduler_dedicated_namespace", "Kube"]),
        ({"replicas": 0}, ["scheduler_replicas", "0"]),
        ({"replicas": 4}, ["scheduler_replicas", "4 pods", "only 3"]),
        ({"replicas": 2, "nodes": ["cp1"]}, ["scheduler_replicas", "2 pods", "only 1"]),
        ({"nodes": ["cp9", "cp8"]}, ["scheduler_dedicated_nodes", "cp9, cp8"]),
        ({"timeout": 0}, ["scheduler_extender_timeout", "0"]),
    ],
)
def test_invalid_options_refused_by_variable_name(options, words):
    with pytest.raises(BadInput) as refusal:
        planned(**options)
    for word in words:
        assert word in str(refusal.value)
    assert str(refusal.value).startswith(words[0])


def test_a_distributors_own_patch_of_an_unknown_release_needs_a_version():
    with pytest.raises(BadInput, match=r"^scheduler_dedicated_image: 1\.35\.100 is .* set scheduler_version"):
        planned("v1.35.100")
    assert planned("v1.35.100", version="1.35.9")["image"] == f"{LIBRARY}:v1.35.9"


@pytest.mark.parametrize("version", ["v1.18.20", "v1.17.0", "v2.0.0", "", "main"])
def test_unsupported_cluster_versions_refused(version):
    with pytest.raises(BadInput, match=r"^scheduler_mode: "):
        planned(version)


def test_only_linux_nodes_of_the_cluster_count():
    nodes = ("cp1", "gpu1", node("old", **{"kubernetes.io/os": "windows"}), row("bare"))
    assert planned(there=nodes, replicas=3)["nodes"] == []
    with pytest.raises(BadInput, match="there are only 3"):
        planned(there=nodes, replicas=4)


CONTROL = "node-role.kubernetes.io/control-plane"


def control(name, *taints):
    return {**node(name, **{CONTROL: ""}), "taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}


@pytest.mark.parametrize(
    ("there", "options", "nodes", "on_control_plane"),
    [
        ((control("cp1"), control("cp2", CONTROL), "w1"), {}, [], True),
        ((control("cp1"), control("cp2"), "w1"), {"nodes": ["w1", "cp1"]}, ["cp1", "w1"], False),
        # Too few, or closed to its pods.
        ((control("cp1"), "w1"), {}, [], False),
        ((control("cp1"), control("cp2", "mine"), "w1"), {}, [], False),
        # Servers of RKE2 and k3s, as their documentation taints them.
        ((control("cp1", "CriticalAddonsOnly"), control("cp2", "node-role.kubernetes.io/etcd"), "w1"), {}, [], True),
        ((control("cp1"), "w1"), {"replicas": 1}, [], True),
        # The playbooks import its image there.
        ((control("cp1"), control("cp2"), "w1"), {"imported": ["cp1", "cp2", "w1"]}, [], True),
        ((control("cp1"), control("cp2"), "w1"), {"imported": ["cp1", "w1"]}, ["cp1", "w1"], False),
        (("w1", "w2", "w3"), {"imported": ["w1", "w2"]}, ["w1", "w2"], False),
    ],
)
def test_it_runs_on_the_control_plane_if_that_has_enough_nodes(there, options, nodes, on_control_plane):
    """Its account binds all pods, and the kubelet of each node where it runs gets that account."""
    found = planned(there=there, **options)
    assert (found["nodes"], found["control_plane"]) == (nodes, on_control_plane)


def test_its_pods_select_the_control_planes_label():
    spec = pod_of(there=(control("cp1"), control("cp2"), "w1"))["spec"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"matchExpressions": [{"key": CONTROL, "operator": "Exists"}]} in terms
    assert {each["key"] for term in terms for each in term["matchExpressions"]} == set(CONTROL_PLANE_LABELS)
    assert {"key": CONTROL, "operator": "Exists"} in spec["tolerations"]


def test_nodes_whose_taints_its_pods_do_not_tolerate_are_no_place_for_them():
    sku = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
    there = (control("cp1", "mine"), {**node("gpu1"), "taints": [sku]})
    with pytest.raises(BadInput) as refused:
        planned(there=there, replicas=1)
    assert str(refused.value) == (
        "scheduler_dedicated_tolerations: 1 pods need as many nodes, and tolerate the taints of 0 only: cp1 has "
        "mine:NoSchedule; gpu1 has sku=gpu:NoSchedule"
    )
    mine = [{"key": "sku", "operator": "Exists"}]
    assert planned(there=there, replicas=1, tolerations=mine)["nodes"] == []
    # A condition ends by itself, and what was chosen by name may have the GPUs' taint.
    passing = {**node("w1"), "taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]}
    gpus = {**node("gpu2"), "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
    assert planned(there=(passing,), replicas=1)["nodes"] == []
    assert planned(there=(gpus,), replicas=1, nodes=["gpu2"])["nodes"] == ["gpu2"]


def test_its_pods_tolerate_what_the_plan_takes_for_tolerated():
    tolerations = pod_of(there=(control("cp1"), control("cp2"), "w1"))["spec"]["tolerations"]
    keys = [toleration["key"] for toleration in tolerations if toleration["key"].startswith(("node-role", "Critical"))]
    assert keys == list(node_backends.TOLERATED)


def test_nodes_outside_the_cluster_are_left_out():
    assert planned(there=("b", "a", "c"), nodes=["b", "late", "a", "b"])["nodes"] == ["a", "b"]
    with pytest.raises(BadInput, match="there is only 1"):
        planned(there=("b", "a", "c"), nodes=["b", "b"])


def test_invalid_options_do_not_block_removal():
    gone = planned("v1.40.1", (), state="absent", image="s:v1.20.0", replicas=9, name="")
    assert gone["policy_api"] == "admissionregistration.k8s.io/v1"
    assert gone["config"] == gone["config_name"] == ""


def test_filter_returns_the_problem():
    plan_filter = FilterModule().filters()["dedicated_scheduler"]
    cluster = {"version": "v1.36.3", "nodes": [node("cp1")]}
    assert plan_filter(cluster, {**OPTIONS, "replicas": 1})["problem"] == ""
    assert plan_filter(cluster, {**OPTIONS, "replicas": 2})["problem"].startswith("scheduler_replicas: ")


# --------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize("minor", range(19, 37))
def test_configuration_valid_for_each_minor_version(minor):
    config = planned(f"v1.{minor}.1", name="cards", namespace="elsewhere", timeout=12)["config"]
    scheduler_config.FORM.check("it", config, minor)
    read = yaml.safe_load(config)
    assert read["profiles"] == [{"schedulerName": "cards"}]
    assert read["leaderElection"] == {
        "leaderElect": True,
        "resourceLock": "leases",
        "resourceName": NAME,
        "resourceNamespace": "elsewhere",
    }
    # The port without TLS, which versions up to 1.22 have, stays in the pod.
    insecure = "127.0.0.1:10251" if minor < 23 else None
    assert read.get("healthzBindAddress") == read.get("metricsBindAddress") == insecure
    assert "clientConnection" not in read, "its pod's service account is what it has"
    (asked,) = read["extenders"]
    assert asked["urlPrefix"] == f"http://127.0.0.1:{contract.EXTENDER_PORT}{contract.EXTENDER_PREFIX}"
    assert (asked["bindVerb"], asked["httpTimeout"], asked["ignorable"]) == ("bind", "12s", False)
    assert asked["preemptVerb"] == "preempt"
    assert [each["name"] for each in asked["managedResources"]] == [contract.RESOURCE_MEMORY]


# --------------------------------------------------------------------------- the objects


def test_objects_complete_and_consistent():
    objects = rendered(scheduler_dedicated_namespace="elsewhere")
    kinds = ["Namespace"] * 2 + ["ServiceAccount", "ConfigMap", "ClusterRole"] + ["ClusterRoleBinding"] * 3
    kinds += ["Role"] * 2 + ["RoleBinding"] * 3 + ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    kinds += ["ResourceQuota", "PodDisruptionBudget", "NetworkPolicy", "Deployment"]
    assert [each["kind"] for each in objects] == kinds
    places = {each["metadata"].get("namespace") for each in objects} - {None}
    assert places == {"elsewhere", "kube-system", LEDGER}
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": "elsewhere"}
    for each in objects:
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "gpushare"
        assert each.get("subjects", [account]) == [account]
    roles = {each["roleRef"]["name"] for each in objects if each["kind"] == "ClusterRoleBinding"}
    assert roles == {"gpushare:scheduler", "system:kube-scheduler", "system:volume-scheduler"}
    pod, budget = one(objects, "Deployment")["spec"]["template"], one(objects, "PodDisruptionBudget")
    assert pod["spec"]["serviceAccountName"] == NAME
    assert one(objects, "Deployment")["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert budget["spec"]["selector"] == one(objects, "Deployment")["spec"]["selector"]
    (scope,) = one(objects, "ResourceQuota")["spec"]["scopeSelector"]["matchExpressions"]
    assert pod["spec"]["priorityClassName"] in scope["values"]


def test_extender_rights_equal_those_of_role_gpushare():
    for preemption in (True, False):
        given = {**role_templates.defaults("gpushare"), "gpushare_preemption": preemption}
        given |= {"gpushare_image_pull_policy": "Never", "__gpushare_image_sha256": "", "__gpushare_unlabelled": []}
        theirs = role_templates.objects("gpushare", "extender", **given)
        ours = rendered("rights", scheduler_extender_preemption=preemption)
        assert one(ours, "ClusterRole")["rules"] == one(theirs, "ClusterRole")["rules"]
        assert one(ours, "Role", "ledger")["rules"] == one(theirs, "Role")["rules"]


def test_changed_configuration_gets_its_own_config_map_and_pods():
    def named(**variables):
        objects = rendered("workload", **variables)
        config, template = one(objects, "ConfigMap"), one(objects, "Deployment")["spec"]["template"]
        (mounted,) = [each["configMap"]["name"] for each in template["spec"]["volumes"] if "configMap" in each]
        digest = hashlib.sha256(config["data"]["config.yaml"].encode()).hexdigest()
        assert template["metadata"]["annotations"]["kubegpu.share/scheduler-config-sha256"] == digest
        assert config["metadata"]["name"] == mounted
        assert mounted.endswith(config["metadata"]["labels"]["kubegpu.share/config"])
        assert config["immutable"] is True
        return mounted

    assert named() == named()
    assert named() != named(scheduler_name="other")


def test_pod_has_scheduler_and_extender():
    spec = pod_of()["spec"]
    scheduler, beside = spec["containers"]
    assert "hostNetwork" not in spec
    assert scheduler["command"] == ["kube-scheduler", "--config=/etc/kubernetes/gpushare-scheduler/config.yaml"]
    assert scheduler["image"] == f"{LIBRARY}:v1.36.3"
    for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert scheduler[probe]["httpGet"] == {"scheme": "HTTPS", "port": "https", "path": path}
    options = command.parse(beside["command"][1:])
    assert (options.address, options.port, options.placement) == ("127.0.0.1", contract.EXTENDER_PORT, "binpack")
    assert beside["command"][0] == "gpushare-extender"
    assert "ports" not in beside, "it is reachable in the pod only"
    policy = one(rendered("workload"), "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod_of()["metadata"]["labels"].items()
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": 10259, "protocol": "TCP"}]]
    assert spec["schedulerName"] == "default-scheduler"


def test_pod_has_minimal_privileges():
    """The rest is what a namespace with the labels of level restricted demands."""
    spec = pod_of()["spec"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (65532, 65532)
    assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in spec["containers"])
    namespace = one(rendered("namespace"), "Namespace")["metadata"]["labels"]
    assert {value for key, value in namespace.items() if key.startswith("pod-security")} == {"restricted"}


def test_two_replicas_on_different_nodes_and_rolled_one_by_one():
    deployment = one(rendered("workload"), "Deployment")["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    spec = deployment["template"]["spec"]
    (apart,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"] == deployment["selector"]
    assert one(rendered("workload"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    gone = {each["key"]: each.get("tolerationSeconds") for each in spec["tolerations"]}
    assert gone["node.kubernetes.io/unreachable"] == gone["node.kubernetes.io/not-ready"] == 30


def test_single_replica_is_replaced_after_its_successor_is_ready():
    deployment = one(rendered("workload", scheduler_replicas=1), "Deployment")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "podAntiAffinity" not in deployment["template"]["spec"]["affinity"]


def test_nodes_selected_by_name():
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in pod_of()["spec"]["affinity"]["nodeAffinity"]
    assert "nvidia.com/gpu" not in [each["key"] for each in pod_of()["spec"]["tolerations"]]
    mine = {"key": "mine", "operator": "Exists"}
    spec = pod_of(scheduler_dedicated_nodes=["gpu2", "gpu1"], scheduler_dedicated_tolerations=[mine])["spec"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [each["matchFields"] for each in terms] == [
        [{"key": "metadata.name", "operator": "In", "values": [name]}] for name in ("gpu1", "gpu2")
    ]
    assert mine in spec["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]


def test_secrets_and_pull_policy():
    assert "imagePullSecrets" not in pod_of()["spec"]
    spec = pod_of(scheduler_dedicated_pull_secrets=["one", "two"], scheduler_extender_pull_policy="Always")["spec"]
    assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert [each["imagePullPolicy"] for each in spec["containers"]] == ["IfNotPresent", "Always"]


def test_old_clusters_get_supported_fields():
    objects = rendered("rights", "workload", server="v1.20.15")
    scheduler, _beside = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    # It would be ignored beside a configuration.
    assert not [word for word in scheduler["command"] if word.startswith("--port")]
    assert scheduler["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert one(objects, "PodDisruptionBudget")["apiVersion"] == "policy/v1beta1"


@pytest.mark.parametrize("admission", ["deny", "warn"])
def test_policy_v1beta1_equals_v1(admission):
    new, old = (rendered("policy", server=v, scheduler_dedicated_admission=admission) for v in ("v1.30.0", "v1.29.0"))
    group = "admissionregistration.k8s.io"
    assert [{**each, "apiVersion": f"{group}/v1"} for each in old] == new
    assert {each["apiVersion"] for each in old} == {f"{group}/v1beta1"}
    assert one(new, "ValidatingAdmissionPolicyBinding")["spec"]["validationActions"] == [admission.capitalize()]


def test_removal_names_the_created_objects():
    def names(**variables):
        return {(each["kind"], each["metadata"]["name"]) for each in rendered(**variables)}

    came, gone = names(), names(scheduler_state="absent", scheduler_extender_archive="/not/there.tar")
    assert {kind for kind, _name in came - gone} == {"ConfigMap"}, "they are removed by their label"
    assert not gone - came


# --------------------------------------------------------------------------- the role's verification


@pytest.mark.parametrize(
    ("name", "refusing", "policy", "refused"),
    [
        (NAME, NAME, "gpushare-scheduler", True),
        ("team-a", "team-a", "gpushare-scheduler", True),
        # The API server still enforces the policy of an earlier scheduler_name.
        (NAME, "team-a", "gpushare-scheduler", False),
        ("team", "team-a", "gpushare-scheduler", False),
        ("team-a", "team", "gpushare-scheduler", False),
        (NAME, NAME, "another", False),
    ],
)
def test_the_policy_in_effect_is_that_of_this_scheduler(name, refusing, policy, refused):
    tasks = yaml.safe_load((role_templates.ROLES / "scheduler/tasks/dedicated.yml").read_text())
    [verification] = [task for task in tasks if "dedicated_verify.yml" in str(task)]
    message = one(rendered("policy", scheduler_name=refusing), "ValidatingAdmissionPolicy")["spec"]["validations"][1][
        "message"
    ]
    denied = f"ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: {message}"
    refusal = {"msg": f"Failed to create object: pods is forbidden: {denied}"}
    found = role_templates.evaluated(
        verification["vars"]["__scheduler_refused"], scheduler_name=name, __scheduler_refusal=refusal
    )
    assert found is refused
