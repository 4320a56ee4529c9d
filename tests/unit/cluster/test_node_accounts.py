# SPDX-License-Identifier: GPL-3.0-or-later
"""Which node gets which of the servers' accounts: real kube-apiserver with NodeRestriction, controllers and scheduler.

A node that somebody took is played by its kubelet's user. The same node gets the accounts where the servers select
their nodes as they did before, by a label that kubelet may set: so the requests are the ones that an attacker makes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import (
    ALLOCATORS,
    CONTROL_PLANE_LABELS,
)
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.backends import RESTRICTED
from gpushare_objects import rendered
from own_cluster import controllers, scheduler, until
from real_apiserver import MERGE, own_api_server

ACCOUNTS = ("gpushare-device-plugin", "gpushare-dra-driver", "gpushare-dra-templates")
# As kubeadm, k3s and OpenShift start it.
FLAGS = ("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--disable-admission-plugins=")
OURS, TAKEN = {"extender": "gpu1", "dra": "gpu2"}, "web1"
CONTROL, NAMED = "cp1", "infra1"
# Of each value of the label.
SERVERS = {"true": "gpushare-device-plugin", "dra": "gpushare-dra-driver"}


def unrestricted(value: t.Any) -> t.Any:
    """Objects that select nodes by the label that kubelet may set alone, as earlier versions did."""
    if isinstance(value, dict) and value.get("key") == RESTRICTED:
        return {"key": "gpushare", "operator": "In", "values": ["true", "dra"]}
    if isinstance(value, dict):
        return {key: unrestricted(one) for key, one in value.items() if key != RESTRICTED}
    return [unrestricted(one) for one in value] if isinstance(value, list) else value


class Kubelet:
    def __init__(self, server, node, namespace=""):
        self.server, self.node, self.namespace = server, node, namespace
        self.path = f"/api/v1/nodes/{node}"

    def ask(self, method, path, body=None, content="application/json"):
        return self.server.ask(method, path, body, content, f"system:node:{self.node}", "system:nodes")

    def join(self, labels=None):
        return self.ask("POST", "/api/v1/nodes", {"metadata": {"name": self.node, "labels": labels or {}}})

    def label(self, sub="", **labels):
        return self.ask("PATCH", f"{self.path}{sub}", {"metadata": {"labels": labels}}, MERGE)

    def pods(self):
        status, text = self.ask("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.node}")
        assert status == 200, text
        return {item["spec"].get("serviceAccountName"): item["metadata"] for item in json.loads(text)["items"]}

    def token(self, account, pod=None):
        """The status and answer of a request for an account's token, bound to a pod if it has one."""
        spec = {"expirationSeconds": 3600}
        if pod:
            about = {key: pod[key] for key in ("name", "uid")}
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", **about}
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token"
        return self.ask("POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec})


@pytest.fixture(scope="module")
def server():
    with (
        own_api_server(*FLAGS) as server,
        controllers(server, "daemonset", "deployment", "replicaset"),
        scheduler(server),
    ):
        for node in (*OURS.values(), TAKEN, CONTROL, NAMED):
            status, text = Kubelet(server, node).join()
            assert status == 201, text
            amounts = {"cpu": "8", "memory": "16Gi", "pods": "110"}
            conditions = [{"type": "Ready", "status": "True"}]
            status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": conditions}}
            server.request("PATCH", f"/api/v1/nodes/{node}/status", status, MERGE)
            server.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}}, MERGE)
        label = {"metadata": {"labels": {CONTROL_PLANE_LABELS[0]: ""}}}
        server.request("PATCH", f"/api/v1/nodes/{CONTROL}", label, MERGE)
        for allocator, node in OURS.items():
            found = [one for name in ("restricted_label", "nodes") for one in labelled(name, allocator, node)]
            for number, one in enumerate(found):
                server.apply(one, manager=f"tests-{number}")
        yield server


def labelled(template, allocator, node):
    return rendered(template, gpushare_component_nodes=[node], __gpushare_allocation=allocator)


NUMBERS = itertools.count(1)
# Where the server of claim templates runs: as the role chooses it.
PLACES = {
    "gpu_nodes": {"place": "gpu_nodes", "nodes": []},
    "control_plane": {"place": "control_plane", "nodes": [CONTROL]},
    "named": {"place": "named", "nodes": [NAMED]},
}


@contextlib.contextmanager
def deployed(server, change=lambda found: found, place="gpu_nodes"):
    """Deploy the servers in a namespace of their own, and wait until every pod is on a node; remove them at the end."""
    namespace = f"servers-{next(NUMBERS)}"
    server.apply(*change(objects("namespace", "device_plugin", "dra", namespace=namespace, place=place)))
    try:
        until(lambda: settled(server, namespace), 60)
        yield namespace
    finally:
        removed(server, namespace)


def objects(*names, namespace, place="gpu_nodes"):
    return rendered(*names, gpushare_namespace=namespace, __gpushare_templates=PLACES[place])


def pods_of(server, namespace):
    return server.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]


def settled(server, namespace):
    for kind in ("daemonsets", "deployments"):
        for item in server.request("GET", f"/apis/apps/v1/namespaces/{namespace}/{kind}")["items"]:
            status = item.get("status", {})
            wanted = status.get("desiredNumberScheduled", item["spec"].get("replicas"))
            updated = status.get("updatedNumberScheduled", status.get("updatedReplicas", 0))
            if status.get("observedGeneration") != item["metadata"]["generation"] or not wanted or updated != wanted:
                return False
    items = pods_of(server, namespace)
    return items and all(item["spec"].get("nodeName") for item in items)


def removed(server, namespace):
    """No kubelet ends the pods, and their controllers delete them with a grace."""
    for kind in ("daemonsets", "deployments", "replicasets"):
        server.request("DELETE", f"/apis/apps/v1/namespaces/{namespace}/{kind}?propagationPolicy=Background")

    def gone():
        server.request("DELETE", f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")
        return not pods_of(server, namespace)

    until(gone, 60)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", ["true", "dra"])
def test_a_kubelet_labels_its_node_as_ours_and_gets_no_account(server, value, place):
    taken = Kubelet(server, TAKEN)
    assert taken.label(gpushare=value)[0] == 200
    for key, other in (
        *((RESTRICTED, allocator) for allocator in ALLOCATORS),
        *((control_plane_label, "") for control_plane_label in CONTROL_PLANE_LABELS),
    ):
        for sub in ("", "/status"):
            status, text = taken.label(sub, **{key: other})
            assert status == 403 and "is not allowed to modify labels" in text, text
    with deployed(server, place=place) as namespace:
        taken = Kubelet(server, TAKEN, namespace)
        assert taken.pods() == {}
        for account in ACCOUNTS:
            assert taken.token(account)[0] == 403
        # The nodes that are to have them do.
        expected = {OURS["extender"], OURS["dra"], *PLACES[place]["nodes"]}
        items = pods_of(server, namespace)
        assert {item["spec"]["nodeName"] for item in items} == expected
        for item in items:
            account, about = item["spec"]["serviceAccountName"], item["metadata"]
            status, text = Kubelet(server, item["spec"]["nodeName"], namespace).token(account, about)
            assert status == 201, text


@pytest.mark.parametrize("value", ["true", "dra"])
def test_by_labels_that_kubelet_may_set_it_would_get_them(server, value):
    """What the servers selected before; it shows that the requests of the other test would succeed."""
    taken = Kubelet(server, TAKEN)
    assert taken.label(gpushare=value)[0] == 200
    for node in OURS.values():
        server.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}}, MERGE)
    with deployed(server, unrestricted) as namespace:
        for node in OURS.values():
            server.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None, "taints": None}}, MERGE)
        taken = Kubelet(server, TAKEN, namespace)
        got = taken.pods()
        assert set(got) == {SERVERS[value], "gpushare-dra-templates"}
        for account, pod in got.items():
            status, text = taken.token(account, pod)
            assert status == 201, text
            assert json.loads(text)["status"]["token"]


def test_a_new_node_brings_no_restricted_label_and_no_pod_an_account(server):
    status, text = Kubelet(server, "web2").join({"gpushare": "true", RESTRICTED: "extender"})
    assert status == 403 and RESTRICTED in text, text
    # As for a static pod's mirror.
    for marks in ({}, {"kubernetes.io/config.mirror": "1"}):
        pod = {"metadata": {"name": "mirror", "annotations": marks}, "spec": {"nodeName": TAKEN}}
        pod["spec"] |= {"serviceAccountName": "gpushare-dra-driver", "containers": [{"name": "c", "image": "i"}]}
        assert Kubelet(server, TAKEN).ask("POST", "/api/v1/namespaces/default/pods", pod)[0] == 403


def test_a_node_of_one_allocation_gets_no_account_of_the_other(server):
    """Its kubelet may change the label of its allocation, and not the one that an administrator set."""
    with deployed(server, place="control_plane") as namespace:
        for allocator, own, value in (("extender", "true", "dra"), ("dra", "dra", "true")):
            kubelet = Kubelet(server, OURS[allocator], namespace)
            mine = kubelet.pods()
            assert set(mine) == {SERVERS[own]} and kubelet.token(SERVERS[own], mine[SERVERS[own]])[0] == 201
            assert kubelet.label(gpushare=value)[0] == 200
            # Its own server leaves it, and no other comes.
            until(lambda kubelet=kubelet: ended(kubelet), 60)
            assert set(kubelet.pods()) <= {SERVERS[own]} and kubelet.token(SERVERS[value])[0] == 403
            assert kubelet.label(gpushare=own)[0] == 200


def ended(kubelet):
    return all(pod.get("deletionTimestamp") for pod in kubelet.pods().values())


def test_a_daemon_set_of_an_earlier_version_keeps_its_pods(server):
    """Its nodes have the label before it selects by it; a node that nobody named loses its pod."""
    theirs = Kubelet(server, TAKEN)
    assert theirs.label(gpushare="dra")[0] == 200

    def kept(found):
        # The update of a template would end each pod once, whatever it selects.
        return [
            {**one, "spec": {**one["spec"], "updateStrategy": {"type": "OnDelete"}}}
            if one["kind"] == "DaemonSet"
            else one
            for one in found
        ]

    with deployed(server, lambda found: kept(unrestricted(found))) as namespace:
        names = [OURS["extender"], OURS["dra"], TAKEN]
        before = {name: Kubelet(server, name).pods() for name in names}
        server.apply(*kept(objects("device_plugin", "dra", namespace=namespace)))
        until(lambda: "deletionTimestamp" in theirs.pods()["gpushare-dra-driver"], 60)
        for allocator, account in (("extender", "gpushare-device-plugin"), ("dra", "gpushare-dra-driver")):
            now = Kubelet(server, OURS[allocator]).pods()[account]
            assert now["uid"] == before[OURS[allocator]][account]["uid"] and "deletionTimestamp" not in now
