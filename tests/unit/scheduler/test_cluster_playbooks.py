# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks on a real API server: uninstall's refusal, and namespaces of ours and of others.

Its controllers are real, too; kubelets are played.
"""

from __future__ import annotations

import re

import pytest
from own_cluster import ROOT, controllers, run_playbook, until
from played_plugin import PlayedPlugin
from real_apiserver import MERGE, own_api_server

SPACES = "/api/v1/namespaces"
DAEMONS = "/apis/apps/v1/namespaces/{}/daemonsets/gpushare-extender"
ENFORCE = "pod-security.kubernetes.io/enforce"


class Cluster:
    def __init__(self, api):
        self.api = api
        self.api.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu1"}})
        role = {"node-role.kubernetes.io/control-plane": ""}
        self.api.request("POST", "/api/v1/nodes", {"metadata": {"name": "cp1", "labels": role}})
        # Every new node has the taint of one that isn't ready, which a device plugin doesn't tolerate.
        self.api.request("PATCH", "/api/v1/nodes/gpu1", {"spec": {"taints": None}}, MERGE)
        amounts = {"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1"}
        status = {"status": {"capacity": amounts, "allocatable": amounts}}
        self.api.request("PATCH", "/api/v1/nodes/gpu1/status", status, MERGE)

    def there(self, path):
        return self.api.ask("GET", path)[0] == 200

    def play(self, folder, playbook, *words, hosts=(), **variables):
        """Run a playbook with these hosts in gpu_nodes."""
        given = {"gpu_kubeconfig": str(self.api.kubeconfig), **variables}
        return run_playbook(folder, playbook, *words, groups={"gpu_nodes": hosts}, **given)

    def role(self, folder, state, *components, **variables):
        """Run the role gpushare alone, for these components."""
        common = {"role": "kubegpu.share.gpushare", "gpushare_state": state}
        roles = [{**common, "gpushare_component": component} for component in components]
        given = {"gpushare_image_delivery": "registry", "gpushare_wait_timeout": 30, **variables}
        done = self.play(folder, [{"hosts": "localhost", "gather_facts": False, "roles": roles}], **given)
        assert done.rc == 0, done.text
        return done


@pytest.fixture(scope="module")
def cluster():
    with own_api_server() as api, controllers(api, "daemonset", "garbage-collector", "namespace"):
        yield Cluster(api)


@pytest.fixture
def holder(cluster):
    """A pod that holds a share of the card of gpu1."""
    container = {"name": "c", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}}
    space = cluster.api.namespace("holders")
    path = f"{SPACES}/{space}/pods"
    spec = {"nodeName": "gpu1", "containers": [container]}
    cluster.api.request("POST", path, {"metadata": {"name": "holder"}, "spec": spec})
    yield
    cluster.api.request("DELETE", f"{path}/holder?gracePeriodSeconds=0")


def test_uninstall_refuses_while_pods_hold_a_share(cluster, holder, tmp_path):
    playbook = ROOT / "playbooks" / "uninstall.yml"
    for words, hosts, variables in (
        # As on OpenShift and with managed nodes: no node is a machine of the inventory.
        ((), (), {"gpushare_nodes": ["gpu1"]}),
        # A machine alone.
        (("--limit", "gpu1"), ("gpu1", "gpu2"), {}),
        # The cluster's side alone; it takes from all nodes that are named.
        (("--limit", "localhost,gpu2"), ("gpu1", "gpu2"), {}),
    ):
        rc, text = cluster.play(tmp_path, playbook, *words, hosts=hosts, **variables)
        assert rc != 0, text
        assert "Pods use a share of a card on gpu1: delete them first" in " ".join(text.split()), text
        assert "changed=0" in text and not re.search(r"changed=[1-9]", text)


@pytest.mark.long
def test_preflight_validates_nodes_outside_the_inventory(cluster, tmp_path):
    """gpu_nodes and control_plane are empty, as on OpenShift."""
    playbook = ROOT / "playbooks" / "preflight.yml"
    given = {"gpushare_image_delivery": "registry", "scheduler_mode": "dedicated"}
    for names, words in (
        (["gpu1", "gpu7"], "gpushare_nodes: gpu7 isn't a node of the cluster, whose nodes are cp1, gpu1"),
        (["gpu1"], "problem runtime gpu1 runs an unknown container runtime (gpushare_nodes)"),
        ([], "gpu_nodes: the group names no host, and gpushare_nodes no node"),
    ):
        rc, text = cluster.play(tmp_path, playbook, gpushare_nodes=names, **given)
        assert rc != 0 and words in " ".join(text.split()), text
    rc, text = cluster.play(tmp_path, playbook, gpushare_nodes=["gpu1"], preflight_ignore=["runtime"], **given)
    assert rc == 0 and "changed=0" in text, text


def test_a_namespace_of_others_gets_its_labels_back(cluster, tmp_path):
    labels = {"team": "a", ENFORCE: "baseline"}
    name = cluster.api.namespace("theirs", labels)
    before = cluster.api.request("GET", f"{SPACES}/{name}")["metadata"]
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{name}/rolebindings"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    cluster.api.request("POST", path, {"metadata": {"name": "theirs"}, "roleRef": role})
    with PlayedPlugin(cluster.api, name):
        assert cluster.role(tmp_path, "present", "extender", gpushare_namespace=name).changed == 1
        assert cluster.api.request("GET", f"{SPACES}/{name}")["metadata"]["labels"][ENFORCE] == "privileged"
        assert cluster.role(tmp_path, "present", "extender", gpushare_namespace=name).changed == 0
        done = cluster.role(tmp_path, "absent", "extender", gpushare_namespace=name)
    assert done.changed == 2, done.text
    after = cluster.api.request("GET", f"{SPACES}/{name}")["metadata"]
    assert not cluster.there(DAEMONS.format(name)) and cluster.there(f"{path}/theirs")
    assert (after["labels"], after.get("annotations", {})) == (before["labels"], before.get("annotations", {}))
    assert not after.get("deletionTimestamp")


POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
RIGHTS = "/apis/rbac.authorization.k8s.io/v1"


def test_policies_rights_and_namespace_of_the_servers(cluster, tmp_path):
    """From a version with other rights, and back to nothing."""
    with PlayedPlugin(cluster.api, "gpushare-system"):
        deployed_and_removed(cluster, tmp_path)


def deployed_and_removed(cluster, tmp_path):
    rule = {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["patch"]}

    def named(kind):
        items = cluster.api.request("GET", f"{POLICIES if kind == 'policies' else f'{RIGHTS}/{kind}'}")["items"]
        return {item["metadata"]["name"] for item in items if "gpushare" in item["metadata"]["name"]}

    kinds = ("clusterroles", "clusterrolebindings")
    for name in ("extender", "device-plugin"):
        former = {"metadata": {"name": f"gpushare-{name}"}}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"gpushare-{name}"}
        cluster.api.request("POST", f"{RIGHTS}/clusterroles", {**former, "rules": [rule]})
        cluster.api.request("POST", f"{RIGHTS}/clusterrolebindings", {**former, "roleRef": role})
    done = cluster.role(tmp_path, "present", "extender", "device_plugin", gpushare_nodes=["gpu1"])
    # In this order, so that nothing is refused to a server of the earlier version.
    tasks = re.findall(r"TASK \[kubegpu\.share\.gpushare : (Deploy the|Revoke the former)", done.text)
    assert tasks == ["Deploy the", "Revoke the former"] * 2
    metadata = cluster.api.request("GET", f"{SPACES}/gpushare-system")["metadata"]
    assert metadata["annotations"]["kubegpu.share/created"] == "true"
    # The extender's second run is among those of the test above.
    assert cluster.role(tmp_path, "present", "device_plugin", gpushare_nodes=["gpu1"]).changed == 0
    both = {"gpushare:extender", "gpushare:device-plugin"}
    assert [named(kind) for kind in kinds] == [both, both]
    ties = {"gpushare-annotations", "gpushare-device-plugin", "gpushare-extender"}
    assert named("policies") == ties | {"gpushare-shares", "gpushare-privileged"}
    cluster.role(tmp_path, "absent", "device_plugin", "extender", gpushare_nodes=["gpu1"])
    assert [named(kind) for kind in ("policies", *kinds)] == [set(), set(), set()]
    until(lambda: not cluster.there(f"{SPACES}/gpushare-system"))
