# SPDX-License-Identifier: GPL-3.0-or-later
"""On which nodes the extender's DaemonSet runs, by the real DaemonSet controller; nodes as installers make them."""

from __future__ import annotations

import types

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube import apply_set
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from gpushare_objects import rendered
from own_cluster import controllers, until
from real_apiserver import MERGE, own_api_server

ROLE = "node-role.kubernetes.io/"
TAINTS = {
    "kubeadm": [(f"{ROLE}control-plane", "", "NoSchedule")],
    "master": [(f"{ROLE}master", "", "NoSchedule")],
    # RKE2 and k3s as their documentation keeps pods away; the second as Rancher does.
    "critical": [("CriticalAddonsOnly", "true", "NoExecute")],
    "roles": [(f"{ROLE}etcd", "true", "NoExecute"), (f"{ROLE}control-plane", "true", "NoSchedule")],
    "own": [("dedicated", "infra", "NoSchedule"), ("example.org/x", "", "NoExecute")],
    "none": [],
}
LABELS = {
    "kubeadm": {f"{ROLE}control-plane": ""},
    "master": {f"{ROLE}master": ""},
    "rancher": {f"{ROLE}control-plane": "true", f"{ROLE}etcd": "true", f"{ROLE}master": "true"},
    # RKE2 from 1.34 on.
    "rke2": {f"{ROLE}control-plane": "true", f"{ROLE}etcd": "true"},
    "none": {},
}
SCHEDULERS = {f"{labels}-{taints}": (labels, taints) for labels in LABELS for taints in TAINTS}
OTHERS = {"etcd1": ({f"{ROLE}etcd": "true"}, "roles"), "gpu1": ({}, "none"), "gpu2": ({"gpushare": "true"}, "own")}
BARE = sorted(name for name, (labels, _taints) in SCHEDULERS.items() if labels == "none")


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started, controllers(started, "daemonset"):
        nodes = {name: (LABELS[labels], taints) for name, (labels, taints) in SCHEDULERS.items()} | OTHERS
        for name, (labels, taints) in nodes.items():
            wanted = [{"key": key, "value": value, "effect": effect} for key, value, effect in TAINTS[taints]]
            node = {"metadata": {"name": name, "labels": labels}, "spec": {"taints": wanted}}
            started.request("POST", "/api/v1/nodes", node)
            # The API server adds the taint of a node that isn't ready.
            started.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": wanted}}, MERGE)
        yield started


def deploy(server, minimum, **variables):
    """Deploy it as role gpushare does; return the nodes of its pods."""
    parameters = {"kubeconfig": str(server.kubeconfig)}
    kube = RealKube.of_module(types.SimpleNamespace(params=parameters, no_log_values=set()))
    given = {name: argument.get("default") for name, argument in apply_set.ARGUMENTS.items()}
    given |= {"definitions": rendered("namespace", "extender", **variables), "wait": True, "min_nodes": minimum}
    with pytest.raises(NotInEffect) as waited:
        # No kubelet runs, so no pod is ever ready.
        apply_set.ensure(kube, given, False, Waiting(timeout=5, pause=0.5))
    return str(waited.value)


def nodes_of_pods(server):
    pods = server.request("GET", "/api/v1/namespaces/gpushare-system/pods")["items"]
    terms = [
        pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        for pod in pods
    ]
    return sorted(term[0]["matchFields"][0]["values"][0] for term in terms)


def test_it_runs_beside_every_scheduler_whatever_labels_and_taints_its_node_has(server):
    text = deploy(server, len(SCHEDULERS))
    assert f"only {len(SCHEDULERS) - len(BARE)} of {len(SCHEDULERS)} nodes match" in text, text
    text = deploy(server, len(SCHEDULERS), __gpushare_unlabelled=BARE)
    assert f"0 of {len(SCHEDULERS)} pods are ready" in text, text
    until(lambda: nodes_of_pods(server) == sorted(SCHEDULERS))
