# SPDX-License-Identifier: GPL-3.0-or-later
"""Only the driver announces its cards, and only its own node's: a real API server and kube-scheduler.

kube-scheduler counts what is allocated by driver, pool and device. So whoever announced a card of another node's pool
for its own node could have it taken by pods that run elsewhere.
"""

from __future__ import annotations

import json

import pytest
from dra_world import allocated, node, pod, scheduling
from gpushare.shared._contracts import claim_templates as contract
from gpushare.templates.objects import template_of
from gpushare_objects import rendered
from own_cluster import until
from real_apiserver import MERGE, own_api_server

FLAGS = ("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction")
SLICES = f"/apis/{contract.API_VERSION}/resourceslices"
PODS = "/api/v1/namespaces/default/pods"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
OTHER = "other-driver"
ONLY = "are written by gpushare's DRA driver only"
TAKEN = "system:node:web1", "system:nodes"


@pytest.fixture(scope="module")
def server():
    with own_api_server(*FLAGS) as started:
        started.apply(*rendered("namespace", "dra", "dra_admission"))
        until(lambda: "resourceClaims" in started.ask("POST", f"{PODS}?dryRun=All", pod("p", 1))[1])
        node(started, "gpu1", "NVIDIA A100")
        node(started, "web1")
        started.request("DELETE", f"{SLICES}/web1")
        rule = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["*"]}
        started.request("POST", f"{RBAC}/clusterroles", {"metadata": {"name": OTHER}, "rules": [rule]})
        bound = {
            "metadata": {"name": OTHER},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": OTHER},
            "subjects": [{"kind": "User", "name": OTHER, "apiGroup": "rbac.authorization.k8s.io"}],
        }
        started.request("POST", f"{RBAC}/clusterrolebindings", bound)
        until(lambda: ONLY in ask(started, (OTHER, ""), "POST", f"{SLICES}?dryRun=All", announced(started)))
        yield started


def announced(server, driver=contract.DRIVER):
    """The card of gpu1, as one of the node web1."""
    one = server.request("GET", f"{SLICES}/gpu1")
    pool = {"name": "gpu1", "generation": 9, "resourceSliceCount": 1}
    return {"metadata": {"name": "theirs"}, "spec": {**one["spec"], "driver": driver, "nodeName": "web1", "pool": pool}}


def ask(server, who, method, path, body=None, content="application/json"):
    status, text = server.ask(method, path, body, content, *who)
    return "" if status < 400 else json.loads(text)["message"]


def test_the_cards_of_a_node_are_not_taken_by_pods_of_another(server):
    """The attack as a whole, by the kubelet of a node that isn't ours."""
    said = ask(server, TAKEN, "POST", SLICES, announced(server))
    server.apply(template_of("default", "gpu-mem-16", "GiB"))
    with scheduling(server):
        server.request("PATCH", "/api/v1/nodes/web1", {"metadata": {"labels": {"where": "web1"}}}, MERGE)
        server.request("POST", PODS, pod("theirs", 16, nodeSelector={"where": "web1"}))
        until(lambda: allocated(server, "default", "theirs") or unschedulable(server, "theirs"))
        server.request("POST", PODS, pod("victim", 16))
        until(lambda: allocated(server, "default", "victim") or unschedulable(server, "victim"))
    assert [one[1] for one in allocated(server, "default", "victim")] == ["gpu-gpu1-0"]
    assert ONLY in said


def unschedulable(server, name):
    conditions = server.request("GET", f"{PODS}/{name}").get("status", {}).get("conditions", [])
    return any(condition.get("reason") == "Unschedulable" for condition in conditions)


@pytest.mark.parametrize("who", [TAKEN, (OTHER, "")], ids=["kubelet", "another driver"])
def test_nobody_else_writes_a_slice_of_the_driver(server, who):
    theirs = announced(server, "nic.example.org")
    assert ask(server, who, "POST", SLICES, theirs) == ""
    path = f"{SLICES}/theirs"
    # The driver of a slice is immutable; what it has isn't. (The Node authorizer learns of a slice from its watch.)
    until(lambda: ask(server, who, "PATCH", path, {"spec": {"pool": {"generation": 10}}}, MERGE) == "")
    assert "immutable" in ask(server, who, "PATCH", path, {"spec": {"driver": contract.DRIVER}}, MERGE)
    assert ask(server, who, "DELETE", path) == ""
    own = announced(server)
    own["spec"]["pool"]["name"] = "web1"
    assert ONLY in ask(server, who, "POST", f"{SLICES}?dryRun=All", own)


def test_an_administrator_and_kubelet_s_removal(server):
    own = announced(server)
    assert ask(server, ("", ""), "POST", SLICES, own) == ""
    changed = {"spec": {"pool": {"generation": 10}}}
    until(lambda: ONLY in ask(server, TAKEN, "PATCH", f"{SLICES}/theirs", changed, MERGE))
    # When a driver has gone, kubelet removes its slices.
    assert ask(server, TAKEN, "DELETE", f"{SLICES}/theirs") == ""
