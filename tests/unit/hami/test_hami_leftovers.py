# SPDX-License-Identifier: GPL-3.0-or-later
"""What HAMi leaves in the API: refusals, locks, and objects of a release in whatever state helm left it."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._backends import cluster as backend
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._hami import cluster
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from fake_clock import FakeClock
from fake_kube import FakeKube
from merge_patch import merge_patch

NAMESPACE = "hami-system"
REGISTER = "hami.io/node-nvidia-register"
HELMS = {"meta.helm.sh/release-name": "hami", "meta.helm.sh/release-namespace": NAMESPACE}
MARKED = {"hami.io/node-handshake": "Deleted_2026-11-26 09:00:00"}
CARD = '[{"id":"GPU-1","count":10,"devmem":16384,"devcore":100,"type":"NVIDIA-T4","mode":"hami-core","health":true}]'


class Api(FakeKube):
    """Applies merge patches, also of the status, and calls a function after each request."""

    def __init__(self, *objects):
        super().__init__(*objects)
        self.patched = []
        self.then = lambda: None
        self.answer = None

    def patch(self, ref, body, subresource=""):
        self.requests["PATCH"] += 1
        self.patched.append((str(ref), subresource))
        merge_patch(self.objects[ref], body)
        self.then()
        return self._read(ref)

    def try_create(self, definition):
        self.tried = definition
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(definition)


def a_node(name="gpu1", labels=None, count=None, **annotations):
    status = {
        field: {"cpu": "8", **({"nvidia.com/gpu": count} if count else {})} for field in ("capacity", "allocatable")
    }
    metadata = {"name": name, "labels": labels or {}, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def a_pod(name="one", node="gpu1", phase="Running", labels=None, namespace="default", **annotations):
    metadata = {"name": name, "namespace": namespace, "labels": labels or {}, "annotations": annotations}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }


def a(kind, name, api_version="v1", namespace=NAMESPACE, annotations=None, labels=None):
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    metadata |= {"annotations": annotations or {}, "labels": labels or {}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def remove(kube, scope="nodes", check=False, **params):
    given = {name: argument.get("default") for name, argument in backend.ARGUMENTS.items()}
    clock = FakeClock()
    waiting = Waiting(timeout=30, sleep=clock.sleep, now=clock.now)
    kube.clock = clock
    return cluster.ensure_removed(kube, {**given, "scope": scope, "nodes": ["gpu1", "gone"], **params}, check, waiting)


def test_a_node_gives_up_label_annotations_lock_and_capacity():
    written = {
        REGISTER: "[]",
        "hami.io/node-nvidia-score": "[]",
        "hami.io/mutex.lock": "2026-11-26T09:00:00Z,default,one",
    }
    kept = {"hami.io/device-cordon": "GPU-1", "hami.io/node-handshake": "Requesting_x", "team": "a"}
    labels = {"gpu": "on", "zone": "b"}
    finished = a_pod(phase="Failed", **{"hami.io/bind-phase": "allocating", "hami.io/gpu-scheduler-policy": "spread"})
    kube = Api(a_node("gpu1", labels, "0", **written, **kept), a_node("gpu2", dict(labels), "10", **written), finished)
    assert remove(kube, check=True)["changed"] and not kube.patched
    assert remove(kube)["changed"]
    node = kube.objects[Ref("v1", "Node", "", "gpu1")]
    assert node["metadata"]["labels"] == {"zone": "b"} and node["metadata"]["annotations"] == kept
    assert node["status"] == {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}}
    pod = kube.objects[Ref("v1", "Pod", "default", "one")]
    assert pod["metadata"]["annotations"] == {"hami.io/gpu-scheduler-policy": "spread"}
    assert kube.objects[Ref("v1", "Node", "", "gpu2")]["metadata"]["labels"] == labels
    assert remove(kube)["changed"] is False


def test_what_kubelet_still_reports_is_left_to_it():
    kube = Api(a_node(count="10"))
    kube.objects[Ref("v1", "Node", "", "gpu1")]["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    assert remove(kube)["changed"] is False and not kube.patched


@pytest.mark.parametrize("scope", ["nodes", "cluster"])
def test_pods_with_cards_prevent_it(scope):
    holder = a_pod(**{"hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,5000,0:;"})
    waiting = a_pod("waiting", node="", **{"hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,5000,0:;"})
    ended = a_pod("ended", phase="Succeeded", **{"hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,5000,0:;"})
    kube = Api(a_node(labels={"gpu": "on"}), holder, waiting, ended)
    with pytest.raises(BadInput) as refused:
        remove(kube, scope)
    assert (refused.value.details["code"], refused.value.details["pods"]) == ("pods_hold", ["default/one"])
    assert not kube.patched


def test_annotations_go_when_the_plugin_is_gone():
    """The plugin writes its register again every 30 s."""
    plugin = a_pod("plugin", namespace=NAMESPACE, labels={"app.kubernetes.io/component": "hami-device-plugin"})
    kube = Api(a_node(labels={"gpu": "on"}, **{REGISTER: "[]"}), plugin)
    with pytest.raises(NotInEffect, match="still runs 30 s after the nodes' label was removed: hami-system/plugin"):
        remove(kube)
    assert REGISTER in kube.objects[Ref("v1", "Node", "", "gpu1")]["metadata"]["annotations"]
    kube.objects.pop(Ref("v1", "Pod", NAMESPACE, "plugin"))
    assert remove(kube)["changed"]
    assert kube.objects[Ref("v1", "Node", "", "gpu1")]["metadata"]["annotations"] == {}


def test_it_waits_until_the_scheduler_forgot_the_node():
    scheduler = a_pod("scheduler", "cp1", namespace=NAMESPACE, labels={"app.kubernetes.io/component": "hami-scheduler"})
    node = a_node(labels={"gpu": "on"}, **{"hami.io/node-handshake": "Requesting_2026-11-26 09:00:00"})
    kube = Api(node, scheduler)
    remove(kube)
    assert kube.clock.now() >= 30, "the limit of this test"
    ref = Ref("v1", "Node", "", "gpu1")
    # 2.10 removes it for one round of 15 s, older ones mark it.
    for changed in (lambda found: found.pop("hami.io/node-handshake", None), lambda found: found.update(MARKED)):
        kube = Api(node, scheduler)
        kube.then = lambda kube=kube, changed=changed: changed(kube.objects[ref]["metadata"]["annotations"])
        remove(kube)
        assert kube.clock.now() < 5


def test_the_cluster_keeps_nothing_of_a_release_in_any_state():
    record = {"owner": "helm", "name": "hami", "status": "uninstalling"}
    rbac, apps = "rbac.authorization.k8s.io/v1", "apps/v1"
    ours = [
        a("MutatingWebhookConfiguration", "hami-webhook", "admissionregistration.k8s.io/v1", "", HELMS),
        a("Deployment", "hami-scheduler", apps, annotations=HELMS),
        a("ClusterRole", "hami-scheduler", rbac, "", HELMS),
        a(
            "Job",
            "hami-admission-create",
            "batch/v1",
            annotations={"helm.sh/hook": "pre-install"},
            labels={"app.kubernetes.io/instance": "hami"},
        ),
        a("Secret", "sh.helm.release.v1.hami.v2", labels=record),
        a("Secret", "hami-scheduler-tls"),
        a("Lease", "hami-scheduler", "coordination.k8s.io/v1"),
    ]
    others = [
        a("Namespace", NAMESPACE, namespace=""),
        a("ClusterRole", "other", rbac, "", {**HELMS, "meta.helm.sh/release-name": "other"}),
        a("ConfigMap", "mine"),
        a("Secret", "sh.helm.release.v1.other.v1", labels={**record, "name": "other"}),
        a("Lease", "mine", "coordination.k8s.io/v1"),
    ]
    handshakes = {f"hami.io/node-handshake{vendor}": "Requesting_x" for vendor in ("", "-biren", "-dcu")}
    kube = Api(*others, *ours, a_node("cp1", **handshakes), a_pod(phase="Failed", **{"hami.io/vgpu-time": "1"}))
    kube.requests.clear()
    assert remove(kube, "cluster")["changed"]
    assert {ref.name for ref in kube.objects} == {other["metadata"]["name"] for other in others} | {"cp1", "one"}
    assert kube.objects[Ref("v1", "Node", "", "cp1")]["metadata"]["annotations"] == {}
    assert kube.objects[Ref("v1", "Pod", "default", "one")]["metadata"]["annotations"] == {}
    assert remove(kube, "cluster")["changed"] is False
    first = next(call for call in kube.calls if call.startswith("DELETE"))
    assert "MutatingWebhookConfiguration" in first, "no webhook outlives its server"


def test_the_cluster_keeps_its_parts_while_a_node_has_the_plugin():
    kube = Api(a_node(labels={"gpu": "on"}, **{REGISTER: "[]"}), a("Secret", "hami-scheduler-tls"))
    with pytest.raises(BadInput) as refused:
        remove(kube, "cluster", check=True)
    assert (refused.value.details["code"], refused.value.details["nodes"]) == ("nodes_left", ["gpu1"])


# --------------------------------------------------------------------------- ready


def deployment(available):
    status = {
        "observedGeneration": 1,
        "replicas": 1,
        "updatedReplicas": 1,
        "readyReplicas": available,
        "availableReplicas": available,
    }
    metadata = {
        "name": "hami-scheduler",
        "namespace": NAMESPACE,
        "labels": {"app.kubernetes.io/instance": "hami"},
        "generation": 1,
    }
    spec = {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec, "status": status}


def wait(kube, **params):
    given = {name: argument.get("default") for name, argument in backend.ARGUMENTS.items()}
    given |= {"release": "hami", "namespace": NAMESPACE, "proof_namespace": "default", **params}
    clock = FakeClock()
    return cluster.ensure_ready(kube, given, False, Waiting(timeout=10, sleep=clock.sleep, now=clock.now))


def mutated(scheduler="hami-scheduler", **limits):
    """The API server's answer for a pod after admission."""

    def answer(definition):
        container = {"resources": {"limits": {"nvidia.com/gpumem": "1", **limits}}}
        return {
            "spec": {"schedulerName": definition["spec"].get("schedulerName", scheduler), "containers": [container]}
        }

    return answer


GPU = {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    ("answer", "overwrites", "problem"),
    [
        (mutated(**GPU), True, ""),
        (mutated("default-scheduler", **GPU), False, ""),
        (
            mutated("default-scheduler"),
            True,
            "doesn't change a pod .*scheduler default-scheduler, limits nvidia.com/gpumem",
        ),
        (mutated("default-scheduler", **GPU), True, "doesn't change a pod"),
        (mutated(), False, "doesn't change a pod"),
        (
            KubeError("Pod: failed calling webhook (500)", 500),
            True,
            "would be refused in namespace default: .*failed calling webhook",
        ),
    ],
)
def test_the_webhook_is_proven_by_a_pod_that_is_never_stored(answer, overwrites, problem):
    kube = Api(deployment(1))
    kube.answer = answer
    if problem:
        with pytest.raises(NotInEffect, match=problem):
            wait(kube, overwrites=overwrites)
    else:
        assert wait(kube, overwrites=overwrites)["changed"] is False
        assert ("schedulerName" in kube.tried["spec"]) != overwrites


def test_it_waits_for_pods_and_for_registered_nodes():
    with pytest.raises(NotInEffect, match="0 of 1 pod is ready"):
        wait(Api(deployment(0)), proof_namespace="")
    with pytest.raises(NotInEffect, match="has no Deployment and no DaemonSet"):
        wait(Api(), proof_namespace="")
    for text, problem in (
        (None, "hasn't registered"),
        ("[]", "none of its 0"),
        (CARD.replace(',"health":true', ""), "healthy"),
    ):
        node = a_node(**({REGISTER: text} if text else {}))
        with pytest.raises(NotInEffect, match=f"node gpu1: .*{problem}"):
            wait(Api(deployment(1), plugin(1), node), proof_namespace="", nodes=["gpu1"])
    registered = a_node(**{REGISTER: CARD})
    done = wait(Api(deployment(1), plugin(1), registered), proof_namespace="", nodes=["gpu1"])
    assert done["changed"] is False


def plugin(wanted, component="hami-device-plugin"):
    counts = ("desiredNumberScheduled", "updatedNumberScheduled", "numberReady", "numberAvailable")
    status = {"observedGeneration": 1, **dict.fromkeys(counts, wanted)}
    metadata = {**deployment(1)["metadata"], "name": component}
    spec = {"selector": {"matchLabels": {"a": component}}}
    spec["template"] = {"metadata": {"labels": {"app.kubernetes.io/component": component}}}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec, "status": status}


def test_a_plugin_that_no_node_matches_is_not_taken_for_one_that_runs():
    """What it registered in an earlier life stays on the node."""
    registered = a_node(**{REGISTER: CARD})
    given = {"proof_namespace": "", "nodes": ["gpu1"]}
    for workloads, problem in (
        ([deployment(1), plugin(0)], "hami-device-plugin: no node matches"),
        ([deployment(1)], "no DaemonSet of HAMi's device plugin"),
        ([deployment(1), plugin(1, "hami-mock-device-plugin")], "no DaemonSet of HAMi's device plugin"),
    ):
        with pytest.raises(NotInEffect, match=problem):
            wait(Api(*workloads, registered), **given)
    # Its nodes get their labels after the release, and a plugin for cards of others may have none.
    wait(Api(deployment(1), plugin(0)), proof_namespace="")
    wait(Api(deployment(1), plugin(1), plugin(0, "hami-mlu-device-plugin"), registered), **given)
