# SPDX-License-Identifier: GPL-3.0-or-later
"""How the GPU Operator is to be installed: whose the present one is, its values, the labels of nodes."""

from __future__ import annotations

import re

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kube.objects import CREATED
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import operator_plan as subject

PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
OWN = {"kubegpu.share/node-software": "gpu_operator"}


def named(kind, name, namespace="", annotations=None, **more):
    return {"kind": kind, "metadata": {"name": name, "namespace": namespace, "annotations": annotations}, **more}


def options(**given):
    return {
        **{"chart": True, "release": "gpu-operator", "namespace": "gpu-operator", "nodes": ["a", "b"], "shared": ["a"]},
        **{"by_cdi": []},
        **{"plugin": [], "others": [], "leaving": [], "driver": "container", "driver_version": ""},
        **{"toolkit": True, "cdi": "auto", "nfd": "auto", "tolerations": [], "registry": "", "pull_secrets": []},
        **{"repo_config": "", "certificates": "", "values": {}, "former": {}, **given},
    }


def found(**given):
    kinds = ("policies", "gpu_clusters", "subscriptions", "deployments", "definitions")
    return {"namespace": {}, "elsewhere": [], **{kind: [] for kind in kinds}, **given}


OURS = {"namespace": {"metadata": {"name": "gpu-operator", "labels": {"kubegpu.share/backend": "gpu_operator"}}}}
RELEASE = {"meta.helm.sh/release-name": "gpu-operator", "meta.helm.sh/release-namespace": "gpu-operator"}
SUBSCRIBED = named("Subscription", "s", "n", spec={"name": "gpu-operator-certified"})
SERVED = {"definitions": [named("CustomResourceDefinition", "clusterpolicies.nvidia.com")]}
DEPLOYED = named("Deployment", "gpu-operator", "n")


@pytest.mark.parametrize(
    ("there", "whose", "what"),
    [
        ({}, "", ""),
        ({"policies": [named("ClusterPolicy", "p")]}, "theirs", "ClusterPolicy p"),
        ({"gpu_clusters": [named("GPUCluster", "g")]}, "theirs", "GPUCluster g"),
        ({**SERVED, "deployments": [DEPLOYED]}, "theirs", "Deployment n/gpu-operator"),
        ({**SERVED, "subscriptions": [SUBSCRIBED]}, "theirs", "Subscription n/s"),
        ({"subscriptions": [{**SUBSCRIBED, "status": {"installedCSV": "v1"}}]}, "theirs", "Subscription n/s"),
        # What a tenant may create by itself.
        ({"deployments": [DEPLOYED], "subscriptions": [SUBSCRIBED]}, "", ""),
        ({"subscriptions": [named("Subscription", "s", "n", spec={"name": "nfd"})]}, "", ""),
        ({**OURS, "subscriptions": [SUBSCRIBED]}, "ours", ""),
        ({**OURS, "policies": [named("ClusterPolicy", "p", annotations=RELEASE)]}, "ours", ""),
        ({**OURS, "policies": [named("ClusterPolicy", "p", annotations={CREATED: "true"})]}, "ours", ""),
    ],
)
def test_an_operator_is_ours_by_its_namespace_and_of_others_nothing_is_planned(there, whose, what):
    planned = subject.plan(options(), found(**there))
    assert (planned["whose"], planned["what"], planned["problems"]) == (whose, what, [])
    assert bool(planned["values"]) == (whose != "theirs") and bool(planned["labels"]) == (whose != "theirs")


def test_an_operator_of_ours_in_another_namespace_is_refused_and_not_taken_for_somebody_elses():
    there = {
        "elsewhere": [named("Namespace", "before")],
        "policies": [named("ClusterPolicy", "p", annotations=RELEASE)],
    }
    planned = subject.plan(options(), found(**there))
    assert (planned["whose"], planned["values"], planned["labels"]) == ("elsewhere", {}, {})
    [problem] = planned["problems"]
    assert "in namespace before, and not in gpu-operator; set it to before, or run uninstall.yml" in problem


def test_a_second_policy_beside_ours_is_refused():
    planned = subject.plan(options(), found(**OURS, policies=[named("ClusterPolicy", "p")]))
    assert "ClusterPolicy p isn't of release gpu-operator" in planned["problems"][0]


@pytest.mark.parametrize(
    ("given", "plugin", "cdi", "checked", "labels"),
    [
        ({}, False, False, True, {"a": OWN, "b": OWN}),
        ({"plugin": ["b"]}, True, False, False, {"a": {**OWN, PLUGIN: "false"}, "b": {**OWN, PLUGIN: "true"}}),
        # NVIDIA's own plugin goes with CDI.
        (
            {"plugin": ["a", "b"], "shared": []},
            *(True, True, True),
            {name: {**OWN, PLUGIN: "true"} for name in ("a", "b")},
        ),
        # HAMi may be told to use CDI of its own, for which the runtime's has to be on.
        ({"by_cdi": ["a"]}, False, True, True, {"a": OWN, "b": OWN}),
        # Once it runs, module gpu_operator changes both, and the release keeps them.
        ({"former": {"cdi": {"enabled": True}, "devicePlugin": {"enabled": True}}}, True, True, False, None),
        ({"values": {"devicePlugin": {"enabled": True}}}, True, False, True, {"a": {**OWN, PLUGIN: "false"}, "b": OWN}),
    ],
)
def test_the_device_plugin_is_kept_from_nodes_whose_cards_somebody_else_gives_away(given, plugin, cdi, checked, labels):
    planned = subject.plan(options(**given), found())
    values = planned["values"]
    assert (values["devicePlugin"]["enabled"], values["cdi"]["enabled"]) == (plugin, cdi)
    assert ("validator" not in values) == checked and planned["problems"] == []
    assert labels is None or planned["labels"] == labels


def test_node_feature_discovery_comes_along_where_there_is_none_and_keeps_the_operator_on_its_nodes():
    planned = subject.plan(options(others=["c"]), found())
    assert planned["values"]["node-feature-discovery"]["worker"]["nodeSelector"] == OWN
    assert planned["values"]["nfd"] == {"enabled": True} and set(planned["brought"]) == set(subject.DEFINITIONS)
    there = [named("CustomResourceDefinition", subject.NFD_DEFINITION)]
    planned = subject.plan(options(others=["c"]), found(definitions=there))
    assert planned["values"]["nfd"] == {"enabled": False} and planned["labels"]["c"] == {subject.OPERANDS: "false"}
    assert not [name for name in planned["brought"] if name.endswith(".nfd.k8s-sigs.io")]
    # What it has found of a node that leaves stays there, and with that the operator.
    planned = subject.plan(options(nodes=["a"], others=["b", "c"], leaving=["b"]), found())
    assert planned["labels"] == {"a": OWN, "b": {subject.OPERANDS: "false"}}
    # A later run sees the definitions that an earlier one brought.
    noted = {
        "metadata": {**OURS["namespace"]["metadata"], "annotations": {subject.BROUGHT: f"{subject.NFD_DEFINITION},x.y"}}
    }
    planned = subject.plan(options(), found(namespace=noted, definitions=there))
    assert planned["nfd"] and planned["brought"] == [subject.NFD_DEFINITION]


def test_values_of_the_user_are_merged_and_stronger():
    given = {
        "driver": {"kernelModuleType": "open", "enabled": False},
        "toolkit": {"env": [{"name": "A", "value": "b"}]},
    }
    values = subject.plan(options(driver="precompiled", driver_version="580", values=given), found())["values"]
    expected = {"enabled": False, "usePrecompiled": True, "version": "580", "kernelModuleType": "open"}
    assert values["driver"] == expected
    assert values["toolkit"] == {"enabled": True, "env": [{"name": "A", "value": "b"}]}


def test_an_air_gap_has_every_image_and_the_drivers_packages():
    given = {"registry": "r.example/m/", "pull_secrets": ["s"], "repo_config": "c", "certificates": "k"}
    values = subject.plan(options(**given), found())["values"]
    for path in subject.COMPONENTS:
        part = values
        for name in path:
            part = part[name]
        assert part["repository"].startswith("r.example/m/nvidia")
        assert ("imagePullSecrets" in part) == (path not in subject.PARTS)
    assert values["driver"]["manager"]["repository"] == "r.example/m/nvidia/cloud-native"
    assert values["driver"]["repoConfig"] == {"configMapName": "c"} and values["driver"]["certConfig"] == {"name": "k"}
    discovery = values["node-feature-discovery"]
    assert discovery["image"] == {"repository": "r.example/m/nfd/node-feature-discovery"}
    assert discovery["imagePullSecrets"] == [{"name": "s"}]


def test_olm_gets_a_policy_and_no_images():
    planned = subject.plan(options(chart=False, registry="r.example", others=["c"]), found())
    assert planned["values"] == {} and planned["labels"]["c"] == {subject.OPERANDS: "false"}
    policy = planned["policy"]
    assert policy["operator"] == {"use_ocp_driver_toolkit": True} and policy["cdi"] == {"enabled": False}
    assert "repository" not in policy["driver"] and "nfd" not in policy


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"cdi": "true"}, "gpu_operator_cdi: .*node a gives its cards away"),
        ({"values": {"cdi": {"enabled": True}}}, "gpu_operator_cdi"),
        ({"values": {"gpuCluster": {"deployCR": True}}}, "gpu_operator_values: without a ClusterPolicy"),
        ({"values": {"clusterPolicy": {"deployCR": False}}}, "gpu_operator_values: without a ClusterPolicy"),
    ],
)
def test_values_with_which_no_card_would_be_given_away_are_refused(given, problem):
    [found_problem] = subject.plan(options(**given), found())["problems"]
    assert re.match(problem, found_problem)
