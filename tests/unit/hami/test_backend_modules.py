# SPDX-License-Identifier: GPL-3.0-or-later
"""The two modules of all back ends: which work each state is, and what no back end has."""

from __future__ import annotations

import base64
import gzip
import json

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.kubegpu.share.plugins.module_utils._backends import cluster, machine
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from fake_kube import FakeKube
from test_hami_leftovers import Api

LEFT = {"nvidia.com/gpu": "0"}


def params(module, **given):
    result = ArgumentSpecValidator(module.ARGUMENTS).validate(given)
    assert not result.error_messages, result.error_messages
    return result.validated_parameters


def secret(name, namespace, manifest, status="deployed"):
    """A release as helm 3 records it."""
    chart = {"metadata": {"name": "chart", "version": "1.0.0"}}
    body = {"info": {"status": status}, "chart": chart, "manifest": manifest}
    text = base64.b64encode(base64.b64encode(gzip.compress(json.dumps(body).encode()))).decode()
    labels = {"owner": "helm", "name": name, "version": "1", "status": status}
    metadata = {"name": f"sh.helm.release.v1.{name}.v1", "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"release": text}}


def node(annotations=None, labels=None, resources=None):
    metadata = {"name": "gpu1", "annotations": annotations or {}, "labels": labels or {}}
    status = {"capacity": resources or {}, "allocatable": resources or {}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


@pytest.mark.parametrize(
    ("backend", "live", "more"),
    [
        ("gpushare", node({"kubegpu.share/cards": "[]"}), {}),
        ("hami", node({"hami.io/node-nvidia-register": "[]"}, {"gpu": "on", "kubegpu.share/backend": "hami"}), {}),
        ("nvidia", node(resources=LEFT), {"resources": ["nvidia.com/*"]}),
    ],
)
def test_what_a_back_ends_server_wrote_goes_from_its_node_and_stays_elsewhere(backend, live, more):
    def off(name, check=False):
        given = {"backend": backend, "state": "off_nodes", "nodes": [name], "kubelet_timeout": 0, **more}
        return cluster.ensure(kube, params(cluster, **given), check)["changed"]

    kube = Api(live)
    assert off("gpu1", check=True) and not off("gpu2")
    assert off("gpu1") and not off("gpu1")
    [left] = kube.list_all("v1", "Node")
    assert not left["metadata"]["annotations"] and not left["metadata"]["labels"] and not left["status"]["capacity"]


def test_a_state_that_a_back_end_does_not_have_is_refused():
    with pytest.raises(BadInput, match="state: ready isn't one of nvidia's, which are complete, off_nodes"):
        cluster.ensure(FakeKube(), params(cluster, backend="nvidia", state="ready"), False)


MANIFEST = """
---
# Source: chart/templates/daemonset.yaml
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: plugin, labels: {app: plugin}}
spec: {template: {spec: {containers: [{name: c, image: i}]}}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: theirs}
data: {key: chart}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: plugin}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata: {name: plugin}
"""
HOOK = """
---
apiVersion: v1
kind: ConfigMap
metadata: {name: hook, annotations: {helm.sh/hook: test}}
"""
FORGED = """
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: forged}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: User, name: tenant, apiGroup: rbac.authorization.k8s.io}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: plugin}
automountServiceAccountToken: true
"""
CHART = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: plugin}
automountServiceAccountToken: false
"""


@pytest.mark.parametrize("backend", ["hami", "nvidia"])
def test_who_writes_helms_records_has_nothing_created(backend):
    """By right of Secrets in one namespace: what is created is as the chart has it, and only what it has."""
    kube = FakeKube({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}}, secret("r", "n", FORGED))
    given = {"backend": backend, "state": "complete", "release": "r", "namespace": "n"}
    with pytest.raises(BadInput, match="without the chart nothing is created"):
        cluster.ensure(kube, params(cluster, **given), False)
    assert cluster.ensure(kube, params(cluster, **given, rendered=CHART), False)["changed"]
    assert not kube.list_all("rbac.authorization.k8s.io/v1", "ClusterRoleBinding")
    [made] = kube.list_all("v1", "ServiceAccount", "n")
    assert made["automountServiceAccountToken"] is False


@pytest.mark.parametrize("backend", ["hami", "nvidia"])
def test_what_somebody_deleted_of_a_release_is_created_again(backend):
    def complete(check=False, rendered=MANIFEST + HOOK):
        given = {"backend": backend, "state": "complete", "release": "r", "namespace": "n", "rendered": rendered}
        return cluster.ensure(kube, params(cluster, **given), check)

    edited = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "theirs", "namespace": "n"},
        "data": {"k": "v"},
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}}
    kube = FakeKube(namespace, secret("r", "n", MANIFEST), edited)
    planned = complete(check=True, rendered="")
    assert [one["after_header"] for one in planned["diff"]] == ["ClusterRole plugin", "DaemonSet n/plugin"]
    assert complete()["changed"] and not complete()["changed"]
    [made] = kube.list_all("apps/v1", "DaemonSet", "n")
    marks = {"meta.helm.sh/release-name": "r", "meta.helm.sh/release-namespace": "n"}
    assert made["metadata"]["labels"] == {"app": "plugin", "app.kubernetes.io/managed-by": "Helm"}
    assert made["metadata"]["annotations"] == marks
    assert kube.list_all("v1", "ConfigMap", "n")[0]["data"] == {"k": "v"}
    # An unfinished release is helm's matter.
    kube = FakeKube(secret("r", "n", MANIFEST, status="pending-upgrade"))
    assert not complete()["changed"]


def test_hamis_release_is_ready_only_with_its_webhook():
    kube = FakeKube(node())
    kube.try_create = lambda one: one
    given = {"backend": "hami", "state": "ready", "proof_namespace": "default", "nodes": ["gpu1"]}
    unready = cluster.ensure(kube, params(cluster, **given), True)["unready"]
    assert [one.partition(" ")[0] for one in unready] == ["the", "HAMi's", "node"], unready


def test_each_back_end_with_files_has_its_own_removal():
    assert set(machine.REMOVED) == {"hami", "kata", "nvidia"}
    # One option of either is none of the other's.
    assert set(machine.ARGUMENTS) == {"backend", "library_folder", "mps_root", "kubelet_root"}
