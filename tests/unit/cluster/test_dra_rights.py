# SPDX-License-Identifier: GPL-3.0-or-later
"""What the DRA driver's account may write, on a real API server; its tokens are bound to its pods, as kubelet's are."""

from __future__ import annotations

import json

import pytest
from gpushare.api.client import KubeError, connect
from gpushare_objects import rendered
from own_cluster import until
from real_apiserver import own_api_server
from test_gpushare_on_api import listed

NAMESPACE, ACCOUNT = "gpushare-system", "gpushare-dra-driver"
DRIVER = "gpu.kubegpu.share"
PATH = "/apis/resource.k8s.io/v1/resourceslices"
ITS_OWN = "may write its own node's ResourceSlices only"


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started:
        started.apply(*rendered("namespace", "dra"))
        for name in ("gpu1", "gpu2"):
            started.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        yield started


@pytest.fixture(scope="module")
def kube(server, tmp_path_factory):
    """The driver of node gpu1, when the policy is in effect."""
    kube = driver_of(server, tmp_path_factory.mktemp("token"), "gpu1")

    def in_effect():
        try:
            kube.post(f"{PATH}?dryRun=All", announced("probe", "gpu2"))
        except KubeError as error:
            return ITS_OWN in str(error)
        return False

    until(in_effect)
    return kube


def driver_of(server, folder, node):
    spec = {"nodeName": node, "serviceAccountName": ACCOUNT, "containers": [{"name": "c", "image": "i"}]}
    pod = {"metadata": {"name": f"driver-{node}"}, "spec": spec}
    server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
    return connect(server.url, str(server.token(folder, NAMESPACE, ACCOUNT, pod=f"driver-{node}")))


def announced(name, node="gpu1", driver=DRIVER):
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {"metadata": {"name": name}, "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": []}}


def refused(call, text):
    with pytest.raises(KubeError) as error:
        call()
    assert text in str(error.value)


def test_kubectl_lists_exactly_these_permissions(server):
    slices = {
        f"{verb} resourceslices.resource.k8s.io" for verb in ("get", "list", "watch", "create", "update", "delete")
    }
    assert listed(server, ACCOUNT, "default") == slices | {"get resourceclaims.resource.k8s.io"}
    assert listed(server, ACCOUNT, NAMESPACE) == slices | {"get resourceclaims.resource.k8s.io"}


def test_only_with_evictions_it_may_evict_and_write_events():
    def rights(**variables):
        (role,) = (
            one
            for one in rendered("dra", **variables)
            if (one["kind"], one["metadata"]["name"]) == ("ClusterRole", "gpushare:dra-driver")
        )
        return {
            f"{verb} {resource}" for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
        }

    more = rights(gpushare_memory_limit_violation="evict") - rights()
    assert more == {"create pods/eviction", "create events"}


def test_a_driver_announces_the_cards_of_its_own_node(kube):
    made = kube.post(PATH, announced("gpu1-0"))
    made["spec"]["pool"]["generation"] = 2
    made = kube.put(f"{PATH}/gpu1-0", made)
    assert kube.get(f"{PATH}/gpu1-0")["spec"]["pool"]["generation"] == 2
    kube.delete(f"{PATH}/gpu1-0")


def test_a_driver_writes_no_slice_of_another_node(server, kube):
    text = "gpushare's DRA driver of node gpu1 " + ITS_OWN
    refused(lambda: kube.post(PATH, announced("gpu2-1", "gpu2")), text)
    theirs = server.request("POST", PATH, announced("gpu2-0", "gpu2"))
    theirs["spec"]["pool"]["generation"] = 2
    refused(lambda: kube.put(f"{PATH}/gpu2-0", theirs), text)
    refused(lambda: kube.delete(f"{PATH}/gpu2-0"), text)
    everywhere = announced("all")
    del everywhere["spec"]["nodeName"]
    everywhere["spec"]["allNodes"] = True
    refused(lambda: kube.post(PATH, everywhere), text)


def test_a_driver_writes_no_slice_of_another_driver(server, kube):
    text = "may write ResourceSlices of the driver gpu.kubegpu.share only"
    refused(lambda: kube.post(PATH, announced("nic-1", driver="nic.example.org")), text)
    server.request("POST", PATH, announced("nic-0", driver="nic.example.org"))
    refused(lambda: kube.delete(f"{PATH}/nic-0"), text)


def test_a_driver_writes_no_pool_of_another_node(kube):
    text = "may write its own node's pool only"
    theirs = announced("gpu1-3")
    theirs["spec"]["pool"]["name"] = "gpu2"
    refused(lambda: kube.post(PATH, theirs), text)


def test_a_token_without_a_node_writes_nothing(server, kube, tmp_path):
    unbound = connect(server.url, str(server.token(tmp_path / "token", NAMESPACE, ACCOUNT)))
    refused(lambda: unbound.post(PATH, announced("gpu1-2")), "of node (unknown) " + ITS_OWN)


@pytest.mark.parametrize(
    "variables",
    [
        {"gpushare_memory_limit": "off", "gpushare_ignore_xids": [13], "gpushare_image_pull_secrets": ["one"]},
        {"gpushare_memory_unit": "MiB", "gpushare_cdi_folders": ["/etc/cdi"], "gpushare_runtime_class": "nvidia"},
        {"__gpushare_image_sha256": "abc", "gpushare_device_plugin_capabilities": []},
    ],
    ids=",".join,
)
def test_the_api_server_accepts_every_variant_strictly(server, variables):
    server.apply(*rendered("dra", "dra_admission", "admission", gpushare_allocation="dra", **variables), dry_run=True)


@pytest.fixture
def guarded(server):
    """Return a function that asks for a pod, where the policy of what names cards is in effect."""
    policy = rendered("admission", gpushare_allocation="dra", gpushare_admission="deny")
    server.apply(*policy, *rendered("dra_admission"))
    path = "/api/v1/namespaces/default/pods?dryRun=All"

    def ask(env=(LEGACY,), resources=None, claims=(), init=False):
        one = {"name": "c", "image": "i", "env": list(env), "resources": resources or {}}
        spec = {"containers": [{"name": "d", "image": "i"}], "initContainers": [one]} if init else {"containers": [one]}
        return server.ask("POST", path, {"metadata": {"name": "p"}, "spec": {**spec, "resourceClaims": list(claims)}})

    until(lambda: EVERY_CARD in ask()[1])
    until(lambda: ask(resources=SHARE)[0] != 403)
    return ask


LEGACY = {"name": "CUDA_VERSION", "value": "12"}
VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
EVERY_CARD = "container c sets CUDA_VERSION without NVIDIA_VISIBLE_DEVICES"
SHARE = {"limits": {"aliyun.com/gpu-mem": 1}}
NAMED = {"claims": [{"name": "gpu-mem", "request": "gpu-0"}]}


@pytest.mark.parametrize(
    "claim",
    [
        {"resourceClaimTemplateName": "of-no-device"},
        # A template of this name may be the namespace's owner's, and so may the claim that is made by it.
        {"resourceClaimTemplateName": "gpu-mem-1"},
        {"resourceClaimName": "of-no-device"},
    ],
    ids=str,
)
@pytest.mark.parametrize("init", [False, True], ids=["container", "init container"])
def test_a_claim_of_any_name_is_no_share(guarded, claim, init):
    """What is in a claim no policy sees; the driver sets nothing for a claim that has no device of it."""
    claims = [{"name": "gpu-mem", **claim}]
    assert EVERY_CARD in guarded(claims=claims, resources=NAMED, init=init)[1]
    assert guarded(claims=claims, resources=NAMED, init=init, env=[LEGACY, VOID])[0] == 201
    assert EVERY_CARD in guarded(claims=claims, resources={**NAMED, "limits": {"aliyun.com/gpu-mem": 0}}, init=init)[1]


@pytest.mark.parametrize("init", [False, True], ids=["container", "init container"])
@pytest.mark.parametrize(
    ("env", "set_to"),
    [
        ([LEGACY], [LEGACY, VOID]),
        ([LEGACY, {"name": "NVIDIA_VISIBLE_DEVICES"}], [LEGACY, {"name": "NVIDIA_VISIBLE_DEVICES"}]),
        ([{"name": "A", "value": "1"}], [{"name": "A", "value": "1"}]),
        ([], None),
    ],
)
def test_a_turned_pod_sees_no_card_but_those_of_its_claim(guarded, init, env, set_to):
    """The driver's specification replaces the value; where the claim brings none, there is no card."""
    status, text = guarded(resources=SHARE, env=env, init=init)
    assert (status, '"resourceClaimTemplateName":"gpu-mem-1"' in text) == (201, True), text
    found = json.loads(text)["spec"]["initContainers" if init else "containers"][0]
    assert found.get("env") == set_to
