# SPDX-License-Identifier: GPL-3.0-or-later
"""Who may write what, on a real API server with the roles' permissions and policies.

The servers' accounts have real tokens, those of plugins bound to their pods, and the servers' own code sends their
requests. Tenants are impersonated; they have the rights of ``edit``.
"""

from __future__ import annotations

import json
import types
import typing as t

import pytest
import role_templates
from gpushare.api.client import KubeError, connect
from gpushare.extender.bind import BindRequest
from gpushare.extender.binding_status import BindingStatus, Entry, binding_status, patch_pod
from gpushare.extender.claims import Claims, claim_of
from gpushare.extender.command import Extender
from gpushare.extender.retry import RetryQueue
from gpushare.extender.state import Claim, State
from gpushare.plugin import cleanup, reconcile
from gpushare.shared._contracts import gpushare as contract
from gpushare_objects import rendered
from own_cluster import until
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, own_api_server

NAMESPACE = "gpushare-system"
SCHEDULERS = "gpushare-scheduler"
STRATEGIC = "application/strategic-merge-patch+json"
MEMORY, COUNT = contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT
TENANT = "tenant"
CARDS = tuple(contract.Card(n, f"GPU-0000000{n}-0000-0000-0000-000000000000", n, 16384, 16) for n in range(2))
# The API server says so, whatever the policy's own message is.
REFUSES = "ValidatingAdmissionPolicy 'gpushare-"
SERVERS_ONLY = "is written by gpushare's servers only"


def policies(version="v1.36.0"):
    """The policies of role gpushare for a cluster of this version."""
    release = {"__gpushare_cluster": {"version": version}}
    return rendered("rights", **release)


class World:
    """The API server with two GPU nodes, the servers' accounts, and a tenant's namespace."""

    def __init__(self, server):
        self.server, self.space = server, server.namespace()
        self._serial = 0
        scheduler = {"scheduler_dedicated_namespace": SCHEDULERS, "scheduler_extender_preemption": True}
        scheduler |= {"__scheduler_extender_namespace": NAMESPACE}
        scheduler["__scheduler_dedicated"] = {"policy_api": "admissionregistration.k8s.io/v1"}
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": SCHEDULERS}})
        server.apply(*rendered("namespace", "extender", "device_plugin"))
        server.apply(*role_templates.objects("scheduler", "dedicated/rights", **scheduler))
        edit = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:aggregate-to-edit"}
        # More than tenants have: what RBAC doesn't refuse, the policies have to.
        self.allow(TENANT, ["pods/status", "pods/binding", "bindings"], ["create", "update", "patch"])
        self.allow(TENANT, ["nodes", "nodes/status"], ["update", "patch"])
        self.bind_role(TENANT, edit)
        for node in ("gpu1", "gpu2"):
            server.request("POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": {"gpushare": "true"}}})
            amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", MEMORY: "32"}
            status = {"status": {"capacity": amounts, "allocatable": amounts}}
            server.request("PATCH", f"/api/v1/nodes/{node}/status", status, MERGE)
        server.apply(*policies(), *role_templates.objects("scheduler", "dedicated/account", **scheduler))
        self.plugin = self.account("gpushare-device-plugin", "gpu1")
        self.extender = self.account("gpushare-extender")
        self.scheduler = self.account("gpushare-scheduler", namespace=SCHEDULERS)
        # Every policy is in effect.
        forged = pod("p", {contract.POD_INDEX: "0"})
        until(lambda: REFUSES in self.asks(TENANT, "POST", self.path("?dryRun=All"), forged))
        for kube in (self.plugin, self.extender, self.scheduler):
            name = self.bound("gpu1")
            until(lambda kube=kube, name=name: REFUSES in refusal(kube, self.path(name), self.labelled()))

    def account(self, name, node="", namespace=NAMESPACE):
        """The client of a server; its token is bound to its pod on this node, if there is one."""
        bound = ""
        if node:
            bound = f"{name}-{node}"
            one = pod(bound)
            one["spec"] |= {"nodeName": node, "serviceAccountName": name}
            self.server.request("POST", f"/api/v1/namespaces/{namespace}/pods", one)
        folder = self.server.folder / f"token-{name}-{node}"
        return connect(self.server.url, str(self.server.token(folder, namespace, name, bound)))

    def allow(self, user, resources, verbs, group=""):
        self._serial += 1
        name = f"test-{self._serial}"
        rules = [{"apiGroups": [group], "resources": resources, "verbs": verbs}]
        self.server.request("POST", f"{RBAC}/clusterroles", {"metadata": {"name": name}, "rules": rules})
        self.bind_role(user, {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name})

    def bind_role(self, user, role):
        self._serial += 1
        subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
        wanted = {"metadata": {"name": f"test-{self._serial}"}, "roleRef": role, "subjects": [subject]}
        self.server.request("POST", f"{RBAC}/clusterrolebindings", wanted)

    def labelled(self):
        """A patch that is another one each time."""
        self._serial += 1
        return {"metadata": {"labels": {"serial": str(self._serial)}}}

    def path(self, name=""):
        base = f"/api/v1/namespaces/{self.space}/pods"
        return f"{base}{name}" if not name or name.startswith("?") else f"{base}/{name}"

    def make(self, annotations=None, node=None, **spec):
        """Create a pod as an administrator, bound or not; return its name."""
        self._serial += 1
        one = pod(f"pod-{self._serial}", annotations)
        one["spec"] |= spec | ({"nodeName": node} if node else {})
        self.server.request("POST", self.path(), one)
        return one["metadata"]["name"]

    def bound(self, node, annotations=None):
        return self.make(annotations, node)

    def get(self, name):
        return self.server.request("GET", self.path(name))

    def asks(self, user, method, path, body, content="application/json"):
        """Return the reason for which a user's request is refused; empty where it isn't."""
        status, text = self.server.ask(method, path, body, content, user)
        if status < 400:
            return ""
        assert status == 403, text
        return json.loads(text)["message"]


RBAC = "/apis/rbac.authorization.k8s.io/v1"
LABELS = {"labels": {"team": "other"}}


def pod(name, annotations=None, units=1):
    one = {"name": "c", "image": "i", "resources": {"limits": {MEMORY: str(units)}}}
    return {"metadata": {"name": name, "annotations": annotations or {}}, "spec": {"containers": [one]}}


def refusal(kube, path, body):
    """Return the reason for which a server's patch is refused; empty where it isn't."""
    try:
        kube.patch(f"{path}/status", body)
    except KubeError as error:
        assert error.status == 403, error
        return error.message
    return ""


@pytest.fixture(scope="module")
def world() -> t.Iterator[World]:
    with own_api_server() as server:
        yield World(server)


# --------------------------------------------------------------------------- tenants

WRITTEN = (*contract.POD_ANNOTATIONS, contract.POD_CLAIM, contract.POD_FENCED, contract.POD_RETRY)
FORGED = (*WRITTEN, "kubegpu.share/of-a-later-version", "ALIYUN_COM_GPU_MEM_OTHER")
FREE = (*contract.POD_DEMANDS, "kubegpu.share/image-archive-sha256", "example.org/kubegpu.share", "team")


@pytest.mark.parametrize("user", [TENANT, "system:serviceaccount:kube-system:replicaset-controller"])
@pytest.mark.parametrize("key", FORGED)
def test_nobody_creates_a_pod_with_an_annotation_of_the_servers(world, user, key):
    """A tenant, and the controller of a tenant's template, which says in an event what to remove."""
    said = world.asks(user, "POST", world.path("?dryRun=All"), pod("p", {"team": "a", key: "0"}))
    assert f"{key} {SERVERS_ONLY}: remove it from the object or template" in said


@pytest.mark.parametrize("user", [TENANT, "system:serviceaccount:kube-system:replicaset-controller"])
def test_the_users_own_annotations_pass(world, user):
    assert world.asks(user, "POST", world.path("?dryRun=All"), pod("p", dict.fromkeys(FREE, "1"))) == ""


@pytest.mark.parametrize("key", WRITTEN)
@pytest.mark.parametrize("value", ["1", None], ids=["changed", "removed"])
@pytest.mark.parametrize("sub", ["", "/status"], ids=["pods", "pods/status"])
def test_nobody_changes_an_annotation_of_the_servers(world, key, value, sub):
    name = world.bound("gpu1", {key: "0"})
    said = world.asks(TENANT, "PATCH", world.path(name) + sub, {"metadata": {"annotations": {key: value}}}, MERGE)
    assert f"{key} {SERVERS_ONLY}: leave it as it is" in said


@pytest.mark.parametrize("sub", ["", "/status"], ids=["pods", "pods/status"])
def test_nobody_adds_an_annotation_or_label_of_the_servers(world, sub):
    name = world.make()
    for field, key in (("annotations", contract.POD_CLAIM), ("labels", contract.POD_CLAIM)):
        said = world.asks(TENANT, "PATCH", world.path(name) + sub, {"metadata": {field: {key: "true"}}}, MERGE)
        assert f"{key} {SERVERS_ONLY}" in said


@pytest.mark.parametrize("legacy", [False, True])
def test_a_binding_brings_no_annotation_of_the_servers(world, legacy):
    """The API server would copy it to the pod."""
    name = world.make()
    path = f"/api/v1/namespaces/{world.space}/bindings" if legacy else f"{world.path(name)}/binding"
    target = {"apiVersion": "v1", "kind": "Node", "name": "gpu1"}
    body = {"metadata": {"name": name, "annotations": {contract.POD_INDEX: "0"}}, "target": target}
    assert SERVERS_ONLY in world.asks(TENANT, "POST", path, body)
    body["metadata"]["annotations"] = {"team": "a"}
    assert world.asks(TENANT, "POST", path, body) == ""


@pytest.mark.parametrize("key", [contract.NODE_CARDS, contract.NODE_LIMIT, contract.NODE_RUNTIME_CDI])
def test_nobody_changes_an_annotation_of_a_node(world, key):
    for sub in ("", "/status"):
        path, body = f"/api/v1/nodes/gpu2{sub}", {"metadata": {"annotations": {key: "x"}}}
        assert f"{key} {SERVERS_ONLY}" in world.asks(TENANT, "PATCH", path, body, MERGE)
    other = {"metadata": {"annotations": {"kubegpu.share/maintenance": "cordoned", "team": "a"}}}
    assert world.asks(TENANT, "PATCH", "/api/v1/nodes/gpu2", other, MERGE) == ""


def test_the_rest_of_a_pods_life_goes_on(world):
    """Labels, a user's annotations, kubectl debug, eviction and deletion of a pod with a booking."""
    name = world.bound("gpu1", dict.fromkeys(WRITTEN, "0"))
    path, demands = world.path(name), dict.fromkeys(contract.POD_DEMANDS, "x")
    metadata = {**LABELS, "annotations": demands}
    assert world.asks(TENANT, "PATCH", path, {"metadata": metadata}, MERGE) == ""
    debugger = {"spec": {"ephemeralContainers": [{"name": "d", "image": "i"}]}}
    world.server.request("PATCH", f"{path}/ephemeralcontainers", debugger, STRATEGIC)
    whole = world.get(name)
    whole["metadata"]["labels"] = {"a": "b"}
    assert world.asks(TENANT, "PUT", path, whole) == ""
    assert world.asks(TENANT, "DELETE", f"{path}?dryRun=All", None) == ""


def as_kubelet(world, *words, text=""):
    flags = ("--as=system:node:gpu1", "--as-group=system:nodes", "--as-group=system:authenticated")
    return world.server.kubectl(*flags, f"--namespace={world.space}", *words, text=text)


def test_kubelet_reports_status_and_mirrors_static_pods(world):
    node = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node"}
    world.bind_role("system:node:gpu1", node)
    # kubectl reads what it patches.
    world.allow("system:node:gpu1", ["pods/status"], ["get"])
    name = world.bound("gpu1", dict.fromkeys(WRITTEN, "0"))
    patch = json.dumps({"status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}})
    done = as_kubelet(world, "patch", "pod", name, "--subresource=status", f"--patch={patch}")
    assert done.returncode == 0, done.stderr
    assert world.get(name)["status"]["phase"] == "Running"
    mirror = pod("mirror", {contract.POD_INDEX: "0", "kubernetes.io/config.mirror": "x"}, units=0)
    mirror["spec"]["nodeName"] = "gpu1"
    text = json.dumps({"apiVersion": "v1", "kind": "Pod", **mirror})
    done = as_kubelet(world, "create", "--dry-run=server", "--filename=-", text=text)
    assert done.returncode == 0, done.stderr


def test_an_administrator_and_who_has_the_right_may_write_them(world):
    name = world.bound("gpu1")
    body = {"metadata": {"annotations": {contract.POD_INDEX: "0"}}}
    world.server.request("PATCH", world.path(name), body, MERGE)
    world.bind_role(
        "restorer", {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:aggregate-to-edit"}
    )
    body["metadata"]["annotations"][contract.POD_INDEX] = "1"
    # First it must have the rights of the role.
    until(lambda: SERVERS_ONLY in world.asks("restorer", "PATCH", world.path(name), body, MERGE))
    world.allow("restorer", ["annotations"], ["write"], "kubegpu.share")
    until(lambda: world.asks("restorer", "PATCH", world.path(name), body, MERGE) == "")


# --------------------------------------------------------------------------- the device plugin


def test_the_plugin_announces_its_cards_and_takes_them_back(world):
    """The real patches of the plugin and of ``--cleanup``."""
    path = "/api/v1/nodes/gpu1"
    world.plugin.patch(f"{path}/status", reconcile.node_patch(CARDS, contract.LIMIT_OFF, world.plugin.get(path)))
    node = world.plugin.get(path)
    assert contract.node_cards(node) == list(CARDS) and contract.node_resource(node, COUNT) == 2
    assert reconcile.node_patch(CARDS, contract.LIMIT_OFF, node) == {}
    world.plugin.patch(f"{path}/status", cleanup.node_patch(node))
    assert cleanup.node_patch(world.plugin.get(path)) == {}


def test_the_plugin_corrects_the_pods_of_its_node(world):
    name = world.bound("gpu1", {"team": "a", contract.POD_INDEX: "1", contract.POD_INDICES: "0,1"})
    corrected = contract.booking_annotations(CARDS[:1], world.get(name), 1, assigned=True)
    uid = world.get(name)["metadata"]["uid"]
    assert refusal(world.plugin, world.path(name), {"metadata": {"uid": uid, "annotations": corrected}}) == ""
    found = world.get(name)
    assert contract.booking(found) == contract.Booking((0,), True, 1)
    assert (
        found["metadata"]["annotations"]["team"] == "a" and contract.POD_INDICES not in found["metadata"]["annotations"]
    )
    with pytest.raises(KubeError) as refused:
        world.plugin.patch(f"{world.path(name)}/status", {"metadata": {"uid": "another", "annotations": {}}})
    assert refused.value.status in (409, 422)


INDEX = {"metadata": {"annotations": {contract.POD_INDEX: "0"}}}
ANNOUNCED = {"metadata": {"annotations": {contract.NODE_CARDS: "[]"}}}
PLUGINS_OWN_NODE = "may write this node and its pods only"


@pytest.mark.parametrize(
    ("what", "body", "words"),
    [
        ("node gpu2", ANNOUNCED, PLUGINS_OWN_NODE),
        ("node gpu2", {"status": {"capacity": {COUNT: "9"}}}, PLUGINS_OWN_NODE),
        ("pod of gpu2", INDEX, PLUGINS_OWN_NODE),
        ("waiting pod", INDEX, PLUGINS_OWN_NODE),
        *(
            (what, body, words)
            for what in ("node gpu1", "pod of gpu1")
            for body, words in [
                ({"metadata": {"annotations": {"team": "b"}}}, "may not write annotation team"),
                ({"metadata": {"annotations": {contract.POD_CLAIM: "x"}}}, "may not write annotation kubegpu.share/cl"),
                ({"metadata": LABELS}, "no other field"),
                ({"metadata": {"finalizers": ["example.org/stay"]}}, "no other field"),
                ({"status": {"phase": "Failed"}}, "no other field"),
                ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, "no other field"),
            ]
        ),
        ("node gpu1", {"metadata": {"annotations": {contract.NODE_RUNTIME_CDI: "true"}}}, "may not write annotation"),
        ("node gpu1", {"status": {"capacity": {"cpu": "99"}}}, "writes no resource of a node but"),
        ("node gpu1", {"status": {"allocatable": {"nvidia.com/gpu": "8"}}}, "writes no resource of a node but"),
        ("node gpu1", {"status": {"allocatable": {"memory": None}}}, "writes no resource of a node but"),
        ("node gpu1", {"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.66"}]}}, "no other field"),
        ("pod of gpu1", {"status": {"podIPs": [{"ip": "10.0.0.66"}], "podIP": "10.0.0.66"}}, "no other field"),
    ],
)  # fmt: skip
def test_the_plugin_writes_nothing_else(world, what, body, words):
    kind, _of, node = what.rpartition(" ")
    if kind == "node":
        path = f"/api/v1/nodes/{node}"
    else:
        path = world.path(world.make() if kind == "waiting" else world.bound(node))
    before = world.server.request("GET", path)
    assert words in refusal(world.plugin, path, body)
    # Kubernetes' own writers aside, there are none here.
    assert world.server.request("GET", path)["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


@pytest.mark.parametrize("what", ["pods", "nodes"])
def test_the_servers_change_no_specification(world, what):
    """By the status the API server ignores it; the whole object RBAC refuses."""
    name = world.bound("gpu1")
    path = world.path(name) if what == "pods" else "/api/v1/nodes/gpu1"
    before = world.server.request("GET", path)["spec"]
    servers = [world.plugin, world.extender, world.scheduler] if what == "pods" else [world.plugin]
    for kube in servers:
        body = {"spec": {"unschedulable": True} if what == "nodes" else {"activeDeadlineSeconds": 1}}
        kube.patch(f"{path}/status", body)
        assert world.server.request("GET", path)["spec"] == before
        with pytest.raises(KubeError, match="cannot patch resource"):
            kube.patch(path, body)


def test_a_token_without_a_node_is_refused_since_every_token_has_one(world):
    """Before Kubernetes 1.32 the claim could be switched off, and then the plugin has to go on."""
    unbound = world.account("gpushare-device-plugin")
    name = world.bound("gpu1")
    assert "of node may write this node" in refusal(unbound, world.path(name), INDEX)
    try:
        world.server.apply(*policies("v1.31.4"))
        until(lambda: refusal(unbound, world.path(name), INDEX) == "")
        assert "no other field" in refusal(unbound, world.path(name), {"metadata": LABELS})
        assert PLUGINS_OWN_NODE in refusal(world.plugin, world.path(world.bound("gpu2")), INDEX)
    finally:
        world.server.apply(*policies())
        other = world.bound("gpu1")
        until(lambda: refusal(unbound, world.path(other), INDEX) != "")


def test_an_earlier_version_goes_on_during_an_update(world):
    """It writes whole pods and nodes, with rights that are revoked only after the last one has ended."""
    user = f"system:serviceaccount:{NAMESPACE}:gpushare-device-plugin"
    world.allow(user, ["pods", "nodes"], ["patch"])
    name = world.bound("gpu1", {contract.POD_INDEX: "1"})
    former = world.plugin.patch(world.path(name), INDEX)
    assert former["metadata"]["annotations"] == INDEX["metadata"]["annotations"]
    world.plugin.patch("/api/v1/nodes/gpu1", ANNOUNCED)
    for body, words in (
        ({"spec": {"unschedulable": True}}, "no other field"),
        ({"metadata": LABELS}, "no other field"),
    ):
        with pytest.raises(KubeError, match=words):
            world.plugin.patch("/api/v1/nodes/gpu1", body)


# --------------------------------------------------------------------------- extenders


@pytest.mark.parametrize("account", ["extender", "scheduler"])
def test_what_an_extender_writes_on_a_waiting_pod(world, account):
    """A claim and its end, a fence, a request for another try, and the removal of an old booking."""
    kube = getattr(world, account)
    name = world.make(dict.fromkeys(contract.POD_ANNOTATIONS, "0"))
    found = kube.get(world.path(name))
    uid, version = found["metadata"]["uid"], found["metadata"]["resourceVersion"]
    claims = Claims(kube, State())
    claims.check_policy()
    claim = Claim(uid, world.space, name, "gpu1", ((0, 1),), 0, frozenset({"v"}))
    claims.publish(claim)
    assert claim_of(kube.get(world.path(name))) == claim
    claims.withdraw(claim)
    assert contract.POD_CLAIM not in str(world.get(name)["metadata"].get("labels"))
    version = kube.get(world.path(name))["metadata"]["resourceVersion"]
    entry = Entry(uid, world.space, name, "gpu1", ((0, 1),), 0, version, "other")
    status, fenced = binding_status(kube, entry)
    assert status is BindingStatus.VOID and contract.POD_FENCED in fenced["metadata"]["annotations"]
    RetryQueue(kube, State())._request_retry(types.SimpleNamespace(uid=uid, namespace=world.space, name=name))
    assert contract.POD_RETRY in world.get(name)["metadata"]["annotations"]
    patch_pod(kube, world.space, name, {"uid": uid, "annotations": dict.fromkeys(contract.POD_ANNOTATIONS)})
    assert not set(contract.POD_ANNOTATIONS) & set(world.get(name)["metadata"]["annotations"])


def test_a_claim_of_a_bound_pod_is_removed_and_nothing_else(world):
    name = world.bound("gpu1", {contract.POD_CLAIM: "{}", contract.POD_INDEX: "0"})
    other = {"metadata": {"annotations": {contract.POD_INDEX: "1"}}}
    for kube in (world.extender, world.scheduler):
        assert "may not write annotation ALIYUN" in refusal(kube, world.path(name), other)
        patch_pod(kube, world.space, name, {"annotations": {contract.POD_CLAIM: None}})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"metadata": {"annotations": {"team": "b"}}}, "may not write annotation team"),
        (
            {"metadata": {"annotations": {contract.POD_PLACEMENT: "spread"}}},
            "may not write annotation kubegpu.share/pl",
        ),
        ({"metadata": LABELS}, "writes no label of a pod but"),
        ({"metadata": {"finalizers": ["example.org/stay"]}}, "no other field"),
    ],
)
@pytest.mark.parametrize("account", ["extender", "scheduler"])
def test_an_extender_writes_nothing_else(world, account, body, words):
    assert words in refusal(getattr(world, account), world.path(world.make()), body)


def test_a_status_is_kube_schedulers_and_not_the_extenders(world):
    name, condition = world.make(), {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    body = {"status": {"conditions": [condition], "nominatedNodeName": "gpu1"}}
    assert "no other field" in refusal(world.extender, world.path(name), body)
    assert refusal(world.scheduler, world.path(name), body) == ""
    assert world.get(name)["status"]["nominatedNodeName"] == "gpu1"


@pytest.mark.parametrize("account", ["extender", "scheduler"])
def test_an_extender_writes_no_node(world, account):
    user = f"system:serviceaccount:{NAMESPACE if account == 'extender' else SCHEDULERS}:gpushare-{account}"
    for sub in ("nodes", "nodes/status"):
        assert not world.server.may(user, "patch", sub)
    assert "cannot patch resource" in refusal(getattr(world, account), "/api/v1/nodes/gpu1", ANNOUNCED)


@pytest.mark.parametrize("account", ["extender", "scheduler"])
def test_an_extender_binds_with_its_own_annotations_only(world, account):
    """The real extender with this account, and a Binding with another annotation."""
    kube = getattr(world, account)
    world.server.request("PATCH", "/api/v1/nodes/gpu2/status", reconcile.node_patch(CARDS, "off", {}), MERGE)
    name = world.make({"team": "a"})
    target = {"apiVersion": "v1", "kind": "Node", "name": "gpu2"}
    for key in ("team", contract.POD_CLAIM):
        metadata = {"name": name, "annotations": {contract.POD_INDEX: "0", key: "b"}}
        with pytest.raises(KubeError, match="may not write annotation"):
            kube.post(f"{world.path(name)}/binding", {"metadata": metadata, "target": target})
    extender = Extender(kube, port=0, registry=CollectorRegistry(), namespace=NAMESPACE)
    extender.start()
    try:
        until(lambda: extender.unready() is None)
        outcome = extender.binder.bind(BindRequest(world.space, name, "", "gpu2"))
    finally:
        extender.stop()
    assert outcome.result == "bound", outcome
    found = world.get(name)
    assert contract.pod_node(found) == "gpu2" and contract.booking(found).indices == (0,)


# --------------------------------------------------------------------------- the policies themselves


def test_every_annotation_of_the_contract_is_guarded():
    """A later annotation of the contract has to be a demand, or is refused by its prefix."""
    values = {value for name, value in vars(contract).items() if name.startswith("POD_") and isinstance(value, str)}
    for key in values - set(contract.POD_DEMANDS):
        assert key in FORGED or key.startswith(("ALIYUN_COM_GPU_MEM_", "kubegpu.share/")), key
