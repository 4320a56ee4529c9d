# SPDX-License-Identifier: GPL-3.0-or-later
"""A claim that has memory of a card stays allocated while its pod lives; real kube-scheduler and controller of claims.

They run under Kubernetes' own identities, with its own rights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess

import pytest
from dra_world import allocated, node, pod
from gpushare.shared._contracts import claim_templates as contract
from gpushare.templates.objects import template_of
from gpushare_objects import rendered
from own_cluster import until
from real_apiserver import MERGE, own_api_server

FINALIZER = "resource.kubernetes.io/delete-protection"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
HOLDS = "the claim holds memory of a card"
TENANT, OWNER, OTHER_DRIVER, GRANTED = "tenant", "namespace-owner", "other-driver", "granted"
APPLY = "application/apply-patch+yaml"
BINDING = 'requires resource="resourceclaims/binding"'


@contextlib.contextmanager
def kubernetes(server):
    """Run kube-scheduler and kube-controller-manager as a cluster has them: each with its own user."""
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    manager = server.kubeconfig_of("system:kube-controller-manager")
    scheduler = server.kubeconfig_of("system:kube-scheduler")
    commands = (
        ["kube-scheduler", f"--kubeconfig={scheduler}", f"--authentication-kubeconfig={scheduler}"],
        [
            "kube-controller-manager",
            f"--kubeconfig={manager}",
            "--use-service-account-credentials",
            "--controllers=resourceclaim-controller,garbage-collector-controller,namespace-controller",
        ],
    )
    with contextlib.ExitStack() as stack:
        for program, *flags in commands:
            log = stack.enter_context((server.folder / f"{program}.log").open("wb"))
            command = [*tied, server.programs[program], *flags, "--leader-elect=false", "--secure-port=0"]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        yield


def bound(server, user, role, namespace="", kind="ClusterRole"):
    where = f"namespaces/{namespace}/rolebindings" if namespace else "clusterrolebindings"
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    wanted = {
        "metadata": {"name": f"{user}-{role}".replace(":", "-")},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [subject],
    }
    server.request("POST", f"{RBAC}/{where}", wanted)


def role(server, name, *resources):
    rule = {"apiGroups": ["resource.k8s.io"], "resources": list(resources), "verbs": ["*"]}
    server.request("POST", f"{RBAC}/clusterroles", {"metadata": {"name": name}, "rules": [rule]})


@pytest.fixture(scope="module")
def server(dra_api):
    node(dra_api, "gpu1", "NVIDIA A100", memory="16Gi")
    # ClusterRoles aren't aggregated here: this is the part of edit.
    bound(dra_api, TENANT, "system:aggregate-to-edit", "default")
    bound(dra_api, TENANT, "system:aggregate-to-view", "default")
    role(dra_api, "everything-of-claims", "*")
    bound(dra_api, OWNER, "everything-of-claims", "default")
    role(dra_api, "status-of-claims", "resourceclaims", "resourceclaims/status", "resourceclaims/driver")
    bound(dra_api, OTHER_DRIVER, "status-of-claims")
    role(dra_api, "releases-claims", "resourceclaims", "resourceclaims/binding")
    bound(dra_api, GRANTED, "releases-claims")
    with kubernetes(dra_api):
        yield dra_api


@pytest.fixture
def claim(server):
    """The path of a claim by template whose pod holds 16 GiB, all that there is."""
    server.apply(template_of("default", "gpu-mem-16", "GiB"))
    server.request("POST", PODS, pod("holder", 16))
    until(lambda: allocated(server, "default", "holder"))
    name = server.request("GET", f"{PODS}/holder")["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
    yield f"{CLAIMS}/{name}"
    server.request("DELETE", f"{PODS}/holder?gracePeriodSeconds=0")
    # Kubernetes' own controllers release it.
    until(lambda: server.ask("GET", f"{CLAIMS}/{name}")[0] == 404)


PODS = "/api/v1/namespaces/default/pods"
CLAIMS = f"/apis/{contract.API_VERSION}/namespaces/default/resourceclaims"


def said(server, user, method, path, body=None, content=MERGE):
    status, text = server.ask(method, path, body, content, user)
    assert status < 400 or status in (403, 422), text
    return "" if status < 400 else json.loads(text)["message"]


WITHOUT = {"metadata": {"finalizers": None}}
EMPTIED = {"status": {"allocation": None, "reservedFor": None}}


@pytest.mark.parametrize("user", [TENANT, OWNER, OTHER_DRIVER])
def test_the_finalizer_of_an_allocated_claim_stays(server, claim, user):
    """By a patch of any kind, an update, and in every version of the API; also if the claim is being deleted."""
    assert HOLDS in said(server, user, "PATCH", claim, WITHOUT)
    other = {"metadata": {"finalizers": ["example.org/mine"]}}
    assert HOLDS in said(server, user, "PATCH", claim, other)
    assert HOLDS in said(server, user, "PATCH", f"{claim}?dryRun=All", WITHOUT)
    steps = [{"op": "remove", "path": "/metadata/finalizers"}]
    assert HOLDS in said(server, user, "PATCH", claim, steps, "application/json-patch+json")
    whole = server.request("GET", claim)
    whole["metadata"]["finalizers"] = []
    assert HOLDS in said(server, user, "PUT", claim, whole, "application/json")
    for version in ("v1beta1", "v1beta2"):
        older = claim.replace("/v1/", f"/{version}/")
        if server.ask("GET", older)[0] == 200:
            assert HOLDS in said(server, user, "PATCH", older, WITHOUT)
    assert said(server, user, "DELETE", f"{claim}?gracePeriodSeconds=0") == ""
    assert HOLDS in said(server, user, "PATCH", claim, WITHOUT)
    found = server.request("GET", claim)
    assert found["metadata"]["finalizers"] == [FINALIZER] and found["status"]["allocation"]


def test_what_is_applied_owns_no_finalizer_of_others(server, claim):
    """Server-side apply takes away only what its manager has set, whichever manager a tenant says he is."""
    name = claim.rpartition("/")[2]
    wanted = {
        "apiVersion": contract.API_VERSION,
        "kind": "ResourceClaim",
        "metadata": {"name": name, "labels": {"a": "b"}},
    }
    for manager in ("kubectl", "kube-scheduler"):
        said(server, TENANT, "PATCH", f"{claim}?fieldManager={manager}&force=true", wanted, APPLY)
    assert server.request("GET", claim)["metadata"]["finalizers"] == [FINALIZER]


def test_the_memory_is_given_to_nobody_else(server, claim):
    """The attack as a whole: the holder's claim is to go, and its pod to run on."""
    server.request("POST", PODS, pod("victim", 16))
    try:
        said(server, TENANT, "PATCH", claim, WITHOUT)
        said(server, TENANT, "DELETE", claim)
        said(server, TENANT, "PATCH", claim, WITHOUT)
        waiting = until(lambda: _unschedulable(server, "victim"))
        assert waiting and allocated(server, "default", "victim") == []
        assert server.request("GET", claim)["status"]["reservedFor"]
    finally:
        server.request("DELETE", f"{PODS}/victim?gracePeriodSeconds=0")


def _unschedulable(server, name):
    conditions = server.request("GET", f"{PODS}/{name}").get("status", {}).get("conditions", [])
    return [condition for condition in conditions if condition.get("reason") == "Unschedulable"]


def test_the_status_of_an_allocated_claim_stays(server, claim):
    """A tenant may not write it, and Kubernetes asks others for the right to allocate."""
    assert "cannot patch resource" in said(server, TENANT, "PATCH", f"{claim}/status", EMPTIED)
    for user in (OWNER, OTHER_DRIVER):
        for change in (
            EMPTIED,
            {"status": {"reservedFor": []}},
            {"status": {"allocation": {"devices": {"results": []}}}},
        ):
            text = said(server, user, "PATCH", f"{claim}/status", change)
            assert BINDING in text or HOLDS in text, text
    assert server.request("GET", claim)["status"]["reservedFor"]


def test_the_rest_of_a_claims_life_goes_on(server, claim):
    labelled = {
        "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}, "finalizers": [FINALIZER, "example.org/mine"]}
    }
    assert said(server, TENANT, "PATCH", claim, labelled) == ""
    assert said(server, TENANT, "PATCH", claim, {"metadata": {"finalizers": [FINALIZER]}}) == ""


@pytest.mark.parametrize("user", [GRANTED, ""])
def test_who_may_allocate_may_release(server, claim, user):
    """An administrator, and who was given the right in the whole cluster."""
    assert said(server, user, "PATCH", f"{claim}?dryRun=All", WITHOUT) == ""


def test_claims_that_are_not_allocated_or_of_others_are_left_alone(server):
    for name in ("mine", "theirs"):
        metadata = {"name": name, "finalizers": [FINALIZER]}
        server.request("POST", CLAIMS, {"metadata": metadata, "spec": {}})
    results = [{"request": "r", "driver": "nic.example.org", "pool": "p", "device": "d"}]
    status = {"status": {"allocation": {"devices": {"results": results}}}}
    server.ask("PATCH", f"{CLAIMS}/theirs/status", status, MERGE)
    for name in ("mine", "theirs"):
        assert said(server, TENANT, "PATCH", f"{CLAIMS}/{name}", WITHOUT) == ""
        server.request("DELETE", f"{CLAIMS}/{name}")


def test_without_kubernetes_own_check_of_the_status():
    """The gate is off: nobody has the right to allocate, and who may write the status could release every claim."""
    with own_api_server("--feature-gates=DRAResourceClaimGranularStatusAuthorization=false") as server:
        server.apply(*rendered("namespace", "dra"))
        role(server, "status-of-claims", "resourceclaims", "resourceclaims/status")
        own = ["system:kube-scheduler", "system:serviceaccount:kube-system:resource-claim-controller"]
        for user in (OTHER_DRIVER, *own):
            bound(server, user, "status-of-claims")
        server.request("POST", CLAIMS, {"metadata": {"name": "c", "finalizers": [FINALIZER]}, "spec": ASKED})
        results = [{"request": "gpu-0", "driver": contract.DRIVER, "pool": "p", "device": "d"}]
        reserved = [{"resource": "pods", "name": "p", "uid": "u"}]
        status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}
        path = f"{CLAIMS}/c"
        server.request("PATCH", f"{path}/status", {"status": status}, MERGE, user=own[0])
        until(lambda: HOLDS in said(server, OTHER_DRIVER, "PATCH", f"{path}?dryRun=All", WITHOUT))
        for change in (EMPTIED, {"status": {"reservedFor": []}}):
            assert HOLDS in said(server, OTHER_DRIVER, "PATCH", f"{path}/status", change)
        # As the driver of a network card that the claim has, too.
        devices = [{"driver": contract.DRIVER, "pool": "p", "device": "d", "conditions": []}]
        assert said(server, OTHER_DRIVER, "PATCH", f"{path}/status", {"status": {"devices": devices}}) == ""
        for user in own:
            assert said(server, user, "PATCH", f"{path}/status?dryRun=All", EMPTIED) == ""
            assert said(server, user, "PATCH", f"{path}?dryRun=All", WITHOUT) == ""


ASKED = {"devices": {"requests": [{"name": "gpu-0", "exactly": {"deviceClassName": contract.DRIVER}}]}}
