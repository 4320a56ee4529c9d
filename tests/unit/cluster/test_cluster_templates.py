# SPDX-License-Identifier: GPL-3.0-or-later
"""What role gpushare puts on a cluster, rendered by Ansible and held against what a current Kubernetes wants."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._objects import read
from gpushare import device_plugin, extender

ROLE = Path(__file__).resolve().parents[3] / "roles" / "gpushare"
DEFAULTS = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())


def rendered(*names, **variables):
    """The objects by kind; rendering with the role's defaults."""
    given = {
        **DEFAULTS,
        "gpushare_image_pull_policy": "Never",
        "gpushare_nodes": ["gpu1", "gpu2"],
        "__gpushare_archive_sha256": "",
        **variables,
    }
    templar = Templar(loader=DataLoader(), variables=given)
    texts = []
    for name in names:
        text = templar.template(
            trust_as_template((ROLE / "templates" / f"{name}.yml.j2").read_text()),
        )
        texts.append(text if isinstance(text, str) else yaml.safe_dump(text))
    return read(texts)


def one(objects, kind):
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


OURS = ("extender", "device_plugin")
ALL = (*OURS, "extender_upstream", "device_plugin_upstream")
UPSTREAM = {"gpushare_extender_image": "example.org/e:1", "gpushare_device_plugin_image": "example.org/p:1"}


def pod_of(name, **variables):
    return one(rendered(name, **UPSTREAM, **variables), "DaemonSet")["spec"]["template"]


def container_of(name, **variables):
    (container,) = pod_of(name, **variables)["spec"]["containers"]
    return container


@pytest.mark.parametrize("name", ALL)
def test_each_component_is_whole_and_held_together(name):
    objects = rendered("namespace", name, **UPSTREAM, gpushare_namespace="elsewhere")
    assert [each["kind"] for each in objects] == [
        "Namespace",
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "DaemonSet",
    ]
    account, binding, workload = (
        one(objects, "ServiceAccount"),
        one(objects, "ClusterRoleBinding"),
        one(objects, "DaemonSet"),
    )
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "elsewhere"}
    ]
    assert binding["roleRef"]["name"] == one(objects, "ClusterRole")["metadata"]["name"]
    assert account["metadata"]["namespace"] == workload["metadata"]["namespace"] == "elsewhere"
    template = workload["spec"]["template"]
    assert template["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    text = yaml.safe_dump(objects)
    for broken in ("critical-pod", "serviceAccount:", "nodePort", "KUBECONFIG", "node-role.kubernetes.io/master: ''"):
        assert broken not in text
    assert one(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


@pytest.mark.parametrize("name", ALL)
def test_the_cluster_roles_binding_file_names_no_namespace(name):
    documents = yaml.safe_load_all(
        (ROLE / "templates" / f"{name}.yml.j2")
        .read_text()
        .split("---\napiVersion: apps/v1")[0]
        .replace("{{ gpushare_namespace }}", "n")
    )
    for each in documents:
        if each and each["kind"].startswith("Cluster"):
            assert "namespace" not in each["metadata"]


@pytest.mark.parametrize(("name", "command"), [("extender", extender), ("device_plugin", device_plugin)])
@pytest.mark.parametrize("unit", ["GiB", "MiB"])
@pytest.mark.parametrize("placement", ["binpack", "spread"])
def test_the_servers_understand_their_command_lines(name, command, unit, placement, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "gpu1")
    words = container_of(name, gpushare_memory_unit=unit, gpushare_placement=placement, gpushare_log_format="json")[
        "command"
    ]
    assert words[0] == {"extender": "gpushare-extender", "device_plugin": "gpushare-device-plugin"}[name]
    options = command.parse(words[1:])
    assert options.log_format == "json"
    if name == "extender":
        assert (options.address, options.port, options.placement) == ("127.0.0.1", contract.EXTENDER_PORT, placement)
    else:
        assert (options.memory_unit, options.port) == (unit, 9445)


@pytest.mark.parametrize("name", ["extender", "extender_upstream"])
def test_the_extender_runs_beside_each_scheduler(name):
    spec = pod_of(name)["spec"]
    assert spec["hostNetwork"] is True
    assert spec["priorityClassName"] == "system-cluster-critical"
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    roles = [term["matchExpressions"] for term in terms]
    assert roles == [
        [{"key": f"node-role.kubernetes.io/{role}", "operator": "Exists"}] for role in ("control-plane", "master")
    ]
    assert {each["key"] for each in spec["tolerations"]} == {
        f"node-role.kubernetes.io/{role}" for role in ("control-plane", "master")
    }
    (container,) = spec["containers"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["host"] == "127.0.0.1", (
            "the pod's address is the node's, where nobody listens"
        )


@pytest.mark.parametrize("name", OURS)
def test_as_little_privilege_as_possible(name):
    spec = pod_of(name)["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "requests" in container["resources"] and "memory" in container["resources"]["limits"]
    if name == "extender":
        assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 65532)
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
    else:
        assert "hostNetwork" not in spec
        paths = {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
        assert paths == {"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"}
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert paths < mounted


@pytest.mark.parametrize("name", ["device_plugin", "device_plugin_upstream"])
def test_the_device_plugin_runs_on_tainted_gpu_nodes_and_sees_all_cards(name):
    spec = pod_of(name)["spec"]
    assert spec["nodeSelector"] == {contract.NODE_LABEL: contract.NODE_LABEL_VALUE}
    assert spec["priorityClassName"] == "system-node-critical"
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
    assert "runtimeClassName" not in spec
    assert pod_of(name, gpushare_runtime_class="nvidia")["spec"]["runtimeClassName"] == "nvidia"
    (container,) = spec["containers"]
    environment = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert environment == {
        "NODE_NAME": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "utility",
    }


def rights(name):
    found = set()
    for rule in one(rendered(name, **UPSTREAM), "ClusterRole")["rules"]:
        assert rule["apiGroups"] == [""]
        found |= {f"{resource} {verb}" for resource in rule["resources"] for verb in rule["verbs"]}
    return found


LOOK = {f"{resource} {verb}" for resource in ("nodes", "pods") for verb in ("get", "list", "watch")}


def test_rights_are_what_the_servers_use_and_no_more():
    assert rights("extender") == LOOK | {"pods patch", "pods/binding create", "events create", "events patch"}
    assert rights("device_plugin") == LOOK | {
        "pods patch",
        "nodes patch",
        "nodes/status patch",
        "events create",
        "events patch",
    }


def test_upstreams_images_get_upstreams_ways():
    container = container_of("extender_upstream")
    assert container["image"] == "example.org/e:1"
    assert {"name": "PORT", "value": "12345"} in container["env"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/version"
    assert "configmaps list" in rights("extender_upstream")
    container = container_of("device_plugin_upstream", gpushare_memory_unit="MiB")
    assert container["image"] == "example.org/p:1"
    assert container["command"] == ["gpushare-device-plugin-v2", "-logtostderr", "--v=5", "--memory-unit=MiB"]


def test_a_new_archive_brings_new_pods():
    for name in OURS:
        assert "annotations" not in pod_of(name)["metadata"]
        annotated = pod_of(name, __gpushare_archive_sha256="ab12")["metadata"]["annotations"]
        assert annotated == {"kubegpu.share/image-archive-sha256": "ab12"}


def test_registry_secrets_reach_the_pods():
    for name in ALL:
        spec = pod_of(name, gpushare_image_pull_secrets=["one", "two"])["spec"]
        assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


def test_nodes_are_labelled_and_nothing_else():
    assert rendered("nodes") == [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"gpushare": "true"}}}
        for name in ("gpu1", "gpu2")
    ]
    assert rendered("nodes", gpushare_nodes=[]) == []
