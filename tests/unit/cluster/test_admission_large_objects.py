# SPDX-License-Identifier: GPL-3.0-or-later
"""Objects with more entries than a policy looks through are refused by their size, or left alone as they are.

What the policies cost the API server is measured by bench/admission.py; here no clock is read.
"""

from __future__ import annotations

import json

import pytest
import role_templates
from gpushare_objects import rendered
from own_cluster import until
from real_apiserver import MERGE, own_api_server

STRATEGIC = "application/strategic-merge-patch+json"
MEMORY = "aliyun.com/gpu-mem"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
NAMESPACE, SCHEDULERS = "gpushare-system", "gpushare-scheduler"
TENANT, ADMINISTRATOR = "tenant", ""
PLUGIN = f"system:serviceaccount:{NAMESPACE}:gpushare-device-plugin"
EXTENDER = f"system:serviceaccount:{NAMESPACE}:gpushare-extender"
ENTRIES, CONTAINERS = 500, 250
MANY = ENTRIES + 1
TOO_MANY = "where there are more than 500 of them: remove some"
CAPACITY = {f"example.org/{n}": "1" for n in range(MANY)}


def keys(number):
    return {f"key-{n}": "" for n in range(number)}


def container(name="c", **more):
    return {"name": name, "image": "i", **more}


def pod(*containers, metadata=None, **spec):
    return {
        "metadata": {"name": "p", **(metadata or {})},
        "spec": {"containers": list(containers) or [container()], **spec},
    }


def granted(server, *users, name="everything", groups=("", "resource.k8s.io")):
    """More than tenants have: what RBAC doesn't refuse, the policies have to."""
    subjects = [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"} for user in users]
    rule = {"apiGroups": list(groups), "resources": ["*"], "verbs": ["*"]}
    server.request("POST", f"{RBAC}/clusterroles", {"metadata": {"name": name}, "rules": [rule]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    wanted = {"metadata": {"name": name}, "roleRef": role, "subjects": subjects}
    server.request("POST", f"{RBAC}/clusterrolebindings", wanted)


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started:
        granted(started, TENANT, PLUGIN, EXTENDER)
        granted(started, PLUGIN, EXTENDER, name="servers", groups=["kubegpu.share"])
        # From the policy of what names cards.
        labels = {"kubegpu.share/admission": "exempt"}
        started.request("POST", "/api/v1/namespaces", {"metadata": {"name": "exempt", "labels": labels}})
        yield started


@pytest.fixture(scope="module")
def rights(server):
    """The policies of the servers' rights are in effect; a pod and a node are from before."""
    for name, metadata in (("old", {"annotations": keys(MANY)}), ("labelled", {"labels": keys(3 * MANY)})):
        metadata = {"metadata": {"name": name, **metadata, "finalizers": ["example.org/stay"]}}
        server.request("POST", "/api/v1/nodes", metadata)
        server.request("POST", PODS, {**pod(), **metadata})
    server.request("PATCH", "/api/v1/nodes/labelled/status", {"status": {"capacity": CAPACITY}}, MERGE)
    server.apply(*rendered("rights", __gpushare_cluster={"version": "v1.36.0"}))
    forged = pod(metadata={"annotations": {"kubegpu.share/cards": "0"}})
    until(lambda: server.ask("POST", f"{PODS}?dryRun=All", forged, user=TENANT)[0] == 403)
    touched = {"metadata": {"labels": {"a": "b"}}}
    for user in (PLUGIN, EXTENDER):
        until(lambda user=user: server.ask("PATCH", f"{PODS}/old?dryRun=All", touched, MERGE, user)[0] == 403)
    return server


PODS, EXEMPT = (f"/api/v1/namespaces/{name}/pods" for name in ("default", "exempt"))


def said(server, method, path, body=None, content=MERGE, user=TENANT):
    """Return the message of a refusal; empty where the request is admitted."""
    content = "application/json" if method == "POST" else content
    status, text = server.ask(method, f"{path}?dryRun=All", body, content, user)
    assert status < 400 or status == 403, text
    return "" if status < 400 else json.loads(text)["message"]


@pytest.mark.parametrize(
    "key", ["key", "kubegpu.share/claim", "ALIYUN_COM_GPU_MEM_IDX", "kubegpu.share/of-a-later-version"]
)
def test_a_pod_of_too_many_annotations_is_refused(rights, key):
    """An annotation of the servers can't hide among others."""
    metadata = {"annotations": {**keys(ENTRIES), key: "0"}}
    assert TOO_MANY in said(rights, "POST", PODS, pod(metadata=metadata))
    metadata = {"annotations": {**keys(ENTRIES - 1), key: "0"}}
    assert ("is written by gpushare's servers only" in said(rights, "POST", PODS, pod(metadata=metadata))) == (
        key != "key"
    )


@pytest.mark.parametrize("where", [f"{PODS}/old", f"{PODS}/old/status"])
def test_annotations_of_a_large_object_stay_as_they_are(rights, where):
    for change in ({"new": "1"}, {"key-1": "1"}, {"key-1": None}, {"kubegpu.share/cards": "1"}):
        assert TOO_MANY in said(rights, "PATCH", where, {"metadata": {"annotations": change}})
    # Who has the right, as an administrator.
    assert rights.ask("PATCH", f"{where}?dryRun=All", {"metadata": {"annotations": {"key-1": None}}}, MERGE)[0] == 200


@pytest.mark.parametrize("where", ["/api/v1/nodes/old", "/api/v1/nodes/old/status"])
def test_annotations_of_the_servers_are_found_among_any_number_of_a_nodes(rights, where):
    assert said(rights, "PATCH", where, {"metadata": {"annotations": {"new": "1", "key-1": None}}}) == ""
    changed = {"metadata": {"annotations": {"new": "1", "kubegpu.share/cards": "1"}}}
    assert "kubegpu.share/cards is written by" in said(rights, "PATCH", where, changed)


@pytest.mark.parametrize("name", ["old", "labelled"])
@pytest.mark.parametrize("root", [PODS, "/api/v1/nodes"])
def test_the_rest_of_a_large_objects_life_goes_on(rights, root, name):
    where = f"{root}/{name}"
    condition = {"status": {"conditions": [{"type": "example.org/Fine", "status": "True"}]}}
    assert said(rights, "PATCH", where, {"metadata": {"labels": {"a": "b"}}}) == ""
    assert said(rights, "PATCH", f"{where}/status", condition) == ""
    assert said(rights, "PATCH", where, {"metadata": {"finalizers": None}}) == ""
    assert said(rights, "DELETE", where) == ""


def test_a_label_of_the_servers_is_found_among_any_number(rights):
    metadata = {"labels": {**keys(3 * MANY), "kubegpu.share/claim": "x"}}
    assert "kubegpu.share/claim is written by" in said(rights, "POST", PODS, pod(metadata=metadata))
    assert said(rights, "POST", PODS, pod(metadata={"labels": keys(3 * MANY)})) == ""


def test_a_binding_of_too_many_annotations_is_refused(rights):
    body = {"metadata": {"name": "old", "annotations": keys(MANY)}, "target": {"kind": "Node", "name": "old"}}
    assert TOO_MANY in said(rights, "POST", f"{PODS}/old/binding", body)
    assert "may not write annotation one of more than 500 here" in said(
        rights, "POST", f"{PODS}/old/binding", body, user=EXTENDER
    )


@pytest.mark.parametrize(("user", "policy"), [(PLUGIN, "gpushare-device-plugin"), (EXTENDER, "gpushare-extender")])
def test_the_servers_change_no_annotation_of_a_large_object(rights, user, policy):
    for change in ({"ALIYUN_COM_GPU_MEM_IDX": "1"}, {"key-1": "1"}):
        text = said(rights, "PATCH", f"{PODS}/old/status", {"metadata": {"annotations": change}}, user=user)
        assert f"'{policy}'" in text and (
            user == PLUGIN or "may not write annotation one of more than 500 here" in text
        )


def test_the_plugin_changes_no_amount_among_too_many(rights):
    change = {"status": {"capacity": {"aliyun.com/gpu-count": "1"}}}
    assert "device plugin" in said(rights, "PATCH", "/api/v1/nodes/labelled/status", change, user=PLUGIN)


# --------------------------------------------------------------------------- what names cards


@pytest.fixture(scope="module")
def shares(server):
    """The policy of what names cards is in effect, and pods are from before."""
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "shares"}})
    space = "/api/v1/namespaces/shares/pods"
    old = {"name": "old", "annotations": keys(MANY), "finalizers": ["example.org/stay"]}
    server.request("POST", space, pod(metadata=old))
    debugged = pod(metadata={"name": "debugged"})
    server.request("POST", space, debugged)
    many = {"spec": {"ephemeralContainers": [container(f"e{n}") for n in range(CONTAINERS + 1)]}}
    server.request("PATCH", f"{space}/debugged/ephemeralcontainers", many, STRATEGIC)
    server.request("POST", space, pod(metadata={"name": "empty"}))
    server.apply(*rendered("admission", gpushare_admission="deny", gpushare_admission_env_from="deny"))
    taking = pod(container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]))
    until(lambda: server.ask("POST", f"{space}?dryRun=All", taking)[0] == 403)
    return server


SHARES = "/api/v1/namespaces/shares/pods"
VOLUMES = [{"name": "v", "emptyDir": {}}]


def env(number):
    return [{"name": f"E{n}"} for n in range(number)]


def mounts(number):
    return [{"name": "v", "mountPath": f"/m{n}"} for n in range(number)]


ALL = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
LARGE = {
    "containers": (pod(*(container(f"c{n}") for n in range(CONTAINERS + 1))), "more than 250 containers"),
    "init containers": (
        pod(initContainers=[container(f"i{n}") for n in range(CONTAINERS)]),
        "more than 250 containers",
    ),
    "env": (pod(container(env=[*env(ENTRIES), ALL])), "more than 500 entries in env, envFrom or volumeMounts"),
    "env of the last": (
        pod(container(), container("d", env=[*env(ENTRIES), {"name": "CUDA_VERSION", "value": "1"}])),
        "more than 500 entries in env, envFrom or volumeMounts",
    ),
    "env of all": (
        pod(*(container(f"c{n}", env=env(ENTRIES)) for n in range(4)), container("last", env=[ALL])),
        "more than 2000 entries in env, envFrom and volumeMounts of its containers",
    ),
    "envFrom": (
        pod(container(envFrom=[{"prefix": f"P{n}", "configMapRef": {"name": "m"}} for n in range(MANY)])),
        "more than 500 entries in env, envFrom or volumeMounts",
    ),
    "mounts": (
        pod(container(volumeMounts=mounts(MANY)), volumes=VOLUMES),
        "more than 500 entries in env, envFrom or volumeMounts",
    ),
    "annotations": (
        pod(metadata={"annotations": {**keys(ENTRIES), "cdi.k8s.io/x": "a"}}),
        "more than 500 annotations",
    ),
    "a long path": (
        pod(container(volumeMounts=[{"name": "v", "mountPath": "/" * 300 + "var/run/nvidia-container-devices"}]),
            volumes=VOLUMES),
        "mounts something under /var/run/nvidia-container-devices",
    ),
}  # fmt: skip


def asked(server, method, path, body=None, content=MERGE):
    """As an administrator, whom the policies of the servers' rights let pass."""
    return said(server, method, path, body, content, ADMINISTRATOR)


@pytest.mark.parametrize("case", LARGE)
def test_a_large_pod_is_refused_by_its_size(shares, case):
    one, message = LARGE[case]
    assert message in asked(shares, "POST", SHARES, one)


def test_the_largest_pods_that_are_looked_through(shares):
    for one in (
        pod(*(container(f"c{n}") for n in range(CONTAINERS))),
        pod(container(env=env(ENTRIES), volumeMounts=mounts(ENTRIES)), volumes=VOLUMES),
        pod(*(container(f"c{n}", env=env(ENTRIES)) for n in range(4))),
        pod(metadata={"annotations": keys(ENTRIES)}),
        pod(container(volumeMounts=[{"name": "v", "mountPath": "/" * 3000}]), volumes=VOLUMES),
    ):
        assert asked(shares, "POST", SHARES, one) == ""
    hidden = pod(container(env=[*env(ENTRIES - 1), ALL]))
    assert "container c sets NVIDIA_VISIBLE_DEVICES" in asked(shares, "POST", SHARES, hidden)


def test_a_large_pod_from_before_goes_on(shares):
    old, debugged = f"{SHARES}/old", f"{SHARES}/debugged"
    assert asked(shares, "PATCH", old, {"metadata": {"labels": {"a": "b"}}}) == ""
    assert asked(shares, "PATCH", old, {"metadata": {"finalizers": None}}) == ""
    assert asked(shares, "PATCH", f"{old}/status", {"status": {"message": "fine"}}) == ""
    assert asked(shares, "DELETE", old) == ""
    assert "more than 500 annotations" in asked(
        shares, "PATCH", old, {"metadata": {"annotations": {"cdi.k8s.io/x": "a"}}}
    )
    assert asked(shares, "PATCH", debugged, {"metadata": {"labels": {"a": "b"}}}) == ""
    another = {"spec": {"ephemeralContainers": [container("another", env=[ALL])]}}
    assert "more than 250 containers" in asked(shares, "PATCH", f"{debugged}/ephemeralcontainers", another, STRATEGIC)
    many = {"spec": {"ephemeralContainers": [container(f"e{n}") for n in range(CONTAINERS + 1)]}}
    assert "more than 250 containers" in asked(shares, "PATCH", f"{SHARES}/empty/ephemeralcontainers", many, STRATEGIC)


# --------------------------------------------------------------------------- claims, HAMi and the dedicated scheduler


@pytest.fixture(scope="module")
def others():
    """In an API server of its own, for its policies change what the others look at."""
    with own_api_server() as started:
        granted(started, TENANT)
        started.apply(*rendered("dra_admission"))
        until(lambda: "resourceClaims" in started.ask("POST", f"{PODS}?dryRun=All", pod(share()))[1])
        until(lambda: started.ask("POST", f"{PODS}?dryRun=All", pod(share(), nodeName="n"))[0] == 403)
        yield started


def share(name="c", **more):
    return container(name, resources={"limits": {MEMORY: "1"}}, **more)


def nic(number):
    return [{"name": f"nic-{n}", "resourceClaimName": "nic"} for n in range(number)]


CLAIMS = {
    "containers that may ask": (
        pod(*(container(f"c{n}") for n in range(CONTAINERS)), share()),
        "can't be turned into a claim: the pod has more than 64 containers",
    ),
    "containers": (
        pod(share(), *(container(f"d{n}") for n in range(64))),
        "can't be turned into a claim: the pod has more than 64 containers",
    ),
    "claims": (pod(share(), resourceClaims=nic(65)), "can't be turned into a claim: the pod has more than 64 claims"),
    "env": (pod(share(env=env(MANY))), "a container that asks for it has more than 500 variables in env"),
    "env of all": (
        pod(*(share(f"c{n}", env=env(100)) for n in range(20)), share(env=env(1))),
        "the containers that ask for it have more than 2000 variables in env together",
    ),
    "patterns": (
        pod(share(), metadata={"annotations": {"kubegpu.share/models": "," * 100_000}}),
        "kubegpu.share/models has more than 16 patterns",
    ),
    "a pattern": (
        pod(share(), metadata={"annotations": {"kubegpu.share/exclude-models": "a" * 100_000}}),
        "kubegpu.share/exclude-models has a pattern of more than 128 characters",
    ),
    "digits": (
        pod(share(), metadata={"annotations": {"kubegpu.share/card-count": "0" * 100_000 + "1"}}),
        "kubegpu.share/card-count is no number of cards from 1 to 32",
    ),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_a_large_pod_is_not_turned_into_a_claim(others, case):
    one, message = CLAIMS[case]
    assert message in said(others, "POST", PODS, one)


def test_the_largest_pods_that_are_turned(others):
    status, text = others.ask(
        "POST",
        f"{PODS}?dryRun=All",
        pod(share(env=env(ENTRIES)), *(container(f"d{n}") for n in range(63)), resourceClaims=nic(64)),
    )
    assert (status, '"resourceClaimTemplateName":"gpu-mem-1"' in text) == (201, True), text
    assert said(others, "POST", PODS, pod(*(container(f"c{n}") for n in range(CONTAINERS)))) == ""


@pytest.mark.parametrize("role", ["scheduler", "hami"])
def test_a_pod_of_too_many_containers_cannot_hide_its_request(server, role):
    if role == "hami":
        policies = role_templates.objects(
            "hami", "policy", __hami_resource=MEMORY, __hami_scheduler_name="hami-scheduler"
        )
    else:
        served = {"__scheduler_dedicated": {"policy_api": "admissionregistration.k8s.io/v1"}}
        names = {"scheduler_name": SCHEDULERS, "scheduler_dedicated_admission": "deny"}
        policies = role_templates.objects("scheduler", "dedicated/policy", **names, **served)
    server.apply(*policies)
    try:
        until(lambda: server.ask("POST", f"{EXEMPT}?dryRun=All", pod(share()))[0] == 403)
        hidden = pod(*(container(f"c{n}") for n in range(CONTAINERS)), share())
        assert f"a pod of more than 250 containers isn't searched for {MEMORY}" in said(server, "POST", EXEMPT, hidden)
        assert said(server, "POST", EXEMPT, pod(*(container(f"c{n}") for n in range(CONTAINERS)))) == ""
        if role == "hami":
            expression = {"key": "kubegpu.share/backend", "operator": "NotIn", "values": ["hami"]}
            for number, refused in ((250, False), (251, True)):
                terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}] * number}
                away = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
                assert ("needs schedulerName" in said(server, "POST", EXEMPT, pod(share(), affinity=away))) == refused
    finally:
        for policy in policies:
            plural = f"validatingadmissionpolic{'ybindings' if policy['kind'].endswith('Binding') else 'ies'}"
            server.request("DELETE", f"/apis/{policy['apiVersion']}/{plural}/{policy['metadata']['name']}")
        until(lambda: server.ask("POST", f"{EXEMPT}?dryRun=All", pod(share()))[0] == 201)
