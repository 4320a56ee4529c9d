# SPDX-License-Identifier: GPL-3.0-or-later
"""Role sandbox_device_plugin by real ansible-playbook, on a real API server with real controllers.

kubelets and NVIDIA's plugins are simulated: the images aren't pulled, and no card is announced by a real program.
"""

from __future__ import annotations

import pytest
import yaml
from kata_facts import facts, function
from own_cluster import RoleSteps, controllers, run_playbook, until
from played_plugin import PlayedPlugin
from real_apiserver import MERGE, own_api_server

NAMESPACE, NAME = "kubegpu-sandbox", "nvidia-sandbox-device-plugin"
CARDS = (function(), function("0000:5e:00.0", "31"))
KINDS = "namespaces,nodes,roles,rolebindings,serviceaccounts,resourcequotas,daemonsets,pods"


class PlayedSandbox(PlayedPlugin):
    """Announces the cards that each pod has found when it was started.

    :param cards: of each node, now.
    :ivar started: by pod, the cards at its start.
    """

    def __init__(self, server, cards, namespace=NAMESPACE, resource="nvidia.com/pgpu", plugin=NAME):
        super().__init__(server, namespace)
        self.cards, self.resource, self.plugin, self.started = cards, resource, plugin, {}

    def _before(self):
        for pod in self._get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]:
            node = pod["spec"].get("nodeName")
            if node and not pod["metadata"].get("deletionTimestamp"):
                self.started.setdefault(pod["metadata"]["uid"], (node, self.cards[node]))
        for uid in list(self.started):
            if uid not in {pod["metadata"]["uid"] for pod in self._get("/api/v1/pods")["items"]}:
                del self.started[uid]

    def _announced(self, node):
        [count] = [count for name, count in self.started.values() if name == node["metadata"]["name"]] or [0]
        return {self.resource: str(count)}

    def _node(self, node, serving):
        running = node["metadata"]["name"] in {name for name, _count in self.started.values()}
        super()._node(node, running)


@pytest.fixture
def server():
    with own_api_server() as started, controllers(started, "daemonset", "namespace", "garbage-collector"):
        for name in ("gpu1", "gpu2", "cpu1"):
            started.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
            numbers = {field: {"cpu": "4", "pods": "20", "memory": "8Gi"} for field in ("capacity", "allocatable")}
            status = {"conditions": [{"type": "Ready", "status": "True"}], **numbers}
            started.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
            started.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, MERGE)
        yield started


class Role(RoleSteps):
    """The role's steps; the machines' facts are variables of the inventory's hosts."""

    def __init__(self, server, folder, kind="kata", **variables):
        given = {"gpu_kubeconfig": str(server.kubeconfig), "sandbox_device_plugin_kind": kind}
        given |= {"sandbox_device_plugin_wait_timeout": 30, "sandbox_device_plugin_capacity_timeout": 5}
        super().__init__("sandbox_device_plugin", folder, **{**given, **variables})

    def nodes(self, machines, *words, step="step", **variables):
        """Run step ``nodes`` for machines with their facts."""
        hosts = {name: {"gpu_node": seen} for name, seen in machines.items()}
        given = {"sandbox_device_plugin_nodes": list(machines), "groups": {"gpu_nodes": hosts}, **variables}
        return getattr(self, step)("nodes", *words, **given)


def everything(server):
    found = {}
    for item in yaml.safe_load(server.kubectl("get", KINDS, "--all-namespaces", "-o", "yaml").stdout)["items"]:
        metadata = item["metadata"]
        kept = item["kind"] in ("Node", "Namespace")
        details = [metadata.get("labels"), metadata.get("annotations")] if kept else []
        found[item["kind"], metadata.get("namespace", ""), metadata["name"]] = details
    return found


def allocatable(server, name, resource="nvidia.com/pgpu"):
    return server.request("GET", f"/api/v1/nodes/{name}")["status"]["allocatable"].get(resource)


def pods(server):
    items = server.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    return {pod["spec"].get("nodeName"): pod["metadata"]["name"] for pod in items}


def test_from_nothing_to_nothing(server, tmp_path):
    before = everything(server)
    cards = {"gpu1": 2, "gpu2": 1, "cpu1": 0}
    with PlayedSandbox(server, cards):
        role = Role(server, tmp_path)
        assert role.step("cluster", "--check") == 1 and everything(server) == before
        assert role.step("cluster") == 1 and role.step("cluster") == 0
        assert not pods(server), "no node has its label"
        machines = {"gpu1": facts(*CARDS), "gpu2": facts(CARDS[0])}
        assert role.nodes(machines, "--check") == 1
        assert role.nodes(machines) == 1
        assert (allocatable(server, "gpu1"), allocatable(server, "gpu2")) == ("2", "1")
        assert role.nodes(machines) == 0
        first = pods(server)
        assert set(first) == {"gpu1", "gpu2"}
        # A card of one node is bound later: that node's plugin starts again, and the other's doesn't.
        cards["gpu2"] = 2
        assert role.nodes({**machines, "gpu2": facts(*CARDS)}) == 2
        assert allocatable(server, "gpu2") == "2"
        after = pods(server)
        assert after["gpu1"] == first["gpu1"] and after["gpu2"] != first["gpu2"]
        assert role.step("remove_nodes", sandbox_device_plugin_nodes=["gpu1"]) >= 1
        assert set(pods(server)) == {"gpu2"}
        # As a switch of the other node does it.
        leaving = {"name": "kubegpu.share.sandbox_device_plugin", "tasks_from": "backend_remove"}
        play = [{"hosts": "localhost", "gather_facts": False, "tasks": [{"ansible.builtin.include_role": leaving}]}]
        done = run_playbook(tmp_path, play, **{**role.variables, "switch_node_name": "gpu2"})
        assert (done.rc, done.changed >= 1, pods(server)) == (0, True, {}), done.text
        assert role.step("remove") >= 1
        until(lambda: everything(server) == before)
        assert role.step("remove") == 0


def test_nodes_that_are_refused_get_nothing(server, tmp_path):
    before = everything(server)
    role = Role(server, tmp_path)
    done = role.nodes({"gpu1": facts(function(driver="nvgrace_gpu_vfio_pci"))}, step="run")
    assert done.rc and "passthrough_driver: vfio-pci" in done.text
    done = role.run("nodes", sandbox_device_plugin_nodes=[])
    assert done.rc and "no node is named" in done.text
    assert everything(server) == before


def test_both_kinds_in_one_namespace(server, tmp_path):
    cards = {"gpu1": 1, "gpu2": 1, "cpu1": 0}
    kata, kubevirt = Role(server, tmp_path), Role(server, tmp_path, "kubevirt")
    resource = "nvidia.com/GA102GL_A10"
    named = {"sandbox_device_plugin_resources": [resource]}
    assert kata.step("cluster") == 1 and kubevirt.step("cluster") == 1
    with PlayedSandbox(server, cards):
        assert kata.nodes({"gpu1": facts(CARDS[0])}) == 1
        with PlayedSandbox(server, cards, resource=resource):
            until(lambda: pods(server))
            permitted = [{"selector": "10DE:2236", "resource": resource}]
            permitted.append({"selector": "10DE:2330", "resource": "nvidia.com/other", "external_provider": False})
            assert kubevirt.nodes({"gpu2": facts(CARDS[0])}, kubevirt_devices_pci=permitted) == 1
            kubevirt.step("remove", **named)
        assert NAMESPACE in {name for kind, _namespace, name in everything(server) if kind == "Namespace"}
        assert pods(server).keys() == {"gpu1"}
        kata.step("remove")
    assert NAMESPACE not in {name for kind, _namespace, name in everything(server) if kind == "Namespace"}


def test_the_objects_are_accepted_and_privileged_pods_have_no_token(server, tmp_path):
    role = Role(server, tmp_path)
    assert (
        role.step("cluster", sandbox_device_plugin_openshift=True, sandbox_device_plugin_image_pull_secrets=["mine"])
        == 1
    )
    daemon = server.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{NAME}")["spec"]["template"][
        "spec"
    ]
    assert daemon["nodeSelector"] == {"node-restriction.kubernetes.io/kubegpu-sandbox": "kata"}
    assert daemon["automountServiceAccountToken"] is False and daemon["imagePullSecrets"] == [{"name": "mine"}]
    [container] = daemon["containers"]
    assert container["image"].startswith("nvcr.io/nvidia/cloud-native/nvidia-sandbox-device-plugin:v0.0.5@sha256:")
    assert {"name": "P_GPU_ALIAS", "value": "pgpu"} in container["env"]
    binding = server.request(
        "GET", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings/{NAME}-scc"
    )
    assert binding["roleRef"]["name"] == "system:openshift:scc:privileged"
