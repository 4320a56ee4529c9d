# SPDX-License-Identifier: GPL-3.0-or-later
"""Removal of namespaces without objects of others, and of the device plugin's node annotations."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._backends.node_status import remove_stale
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from fake_kube import FakeKube, actions, apply_set

SPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpushare-system"}}
OURS = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "ours", "namespace": "gpushare-system"},
    "data": {},
}


DAEMON_SET = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d"}
POLICY = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "name": "p"}
DATABASE = {"apiVersion": "db.example.org/v1", "kind": "Database", "name": "theirs"}


def thing(kind, name, api_version="v1", **more):
    metadata = {"name": name, "namespace": "gpushare-system", **more.pop("metadata", {})}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **more}


def remove(kube, check=False):
    return apply_set(kube, [SPACE, OURS], check, state="absent")


@pytest.mark.parametrize(
    "other",
    [
        thing("ConfigMap", "kube-root-ca.crt"),
        thing("ConfigMap", "openshift-service-ca.crt"),
        thing("Secret", "default-token-x", type="kubernetes.io/service-account-token"),
        thing("Pod", "p", metadata={"ownerReferences": [DAEMON_SET]}),
        thing(
            "ConfigMap", "c", metadata={"ownerReferences": [{"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy"}]}
        ),
        thing("Pod", "p", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
    ],
    ids=lambda one: one["metadata"]["name"],
)
def test_namespace_with_default_objects_is_deleted(other):
    kube = FakeKube(SPACE, OURS, other)
    result = remove(kube)
    assert actions(result) == {"Namespace": "deleted", "ConfigMap": "deleted"} and result["changed"]


@pytest.mark.parametrize(
    "other",
    [
        thing("ConfigMap", "theirs"),
        thing("Secret", "theirs", type="Opaque"),
        thing("Pod", "theirs"),
        thing("Service", "theirs"),
        thing("PersistentVolumeClaim", "theirs"),
        thing("Deployment", "theirs", "apps/v1"),
        thing("CronJob", "theirs", "batch/v1"),
        # An operator's, whose resource isn't looked for, and which would be deleted with them.
        thing("Deployment", "theirs", "apps/v1", metadata={"ownerReferences": [DATABASE]}),
        thing("Secret", "theirs", type="Opaque", metadata={"ownerReferences": [DATABASE]}),
        thing("Pod", "theirs", metadata={"ownerReferences": [DAEMON_SET, DATABASE]}),
    ],
    ids=lambda one: one["kind"] + "-owned" * bool(one["metadata"].get("ownerReferences")),
)
def test_namespace_with_objects_of_others_is_kept(other):
    kube = FakeKube(SPACE, OURS, other)
    predicted = remove(kube, check=True)
    result = remove(kube)
    assert predicted["objects"] == result["objects"]
    assert actions(result) == {"Namespace": "kept", "ConfigMap": "deleted"}
    kept = next(row for row in result["objects"] if row["action"] == "kept")
    assert kept["because"] == f"{other['kind']} theirs"
    again = remove(kube)
    assert not again["changed"] and actions(again) == {"Namespace": "kept", "ConfigMap": "absent"}


# --------------------------------------------------------------------------- nodes


def node(name, amounts=None):
    amounts = amounts or {"cpu": "2", contract.RESOURCE_MEMORY: "32", contract.RESOURCE_COUNT: "2"}
    metadata = {"name": name, "annotations": {contract.NODE_CARDS: "[]", "theirs": "x"}}
    status = {field: dict(amounts) for field in ("capacity", "allocatable")}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def live(kube, name):
    return kube.objects[Ref("v1", "Node", "", name)]


def test_annotations_and_resources_are_removed_from_nodes():
    kube = FakeKube(node("gpu1"), node("gpu2"))
    predicted = remove_stale(kube, {"nodes": ["gpu1", "gone"]}, True)
    assert predicted["changed"] and "PATCH" not in predicted["requests"]
    result = remove_stale(kube, {"nodes": ["gpu1", "gone"]}, False)
    assert result["diff"] == predicted["diff"] and len(result["diff"]) == 1
    assert "capacity aliyun.com/gpu-mem: 32" in result["diff"][0]["before"] and result["diff"][0]["after"] == ""
    assert live(kube, "gpu1")["metadata"]["annotations"] == {"theirs": "x"}
    assert live(kube, "gpu1")["status"] == {"capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}}
    assert live(kube, "gpu2")["status"] == node("gpu2")["status"]
    assert not remove_stale(kube, {"nodes": ["gpu1"]}, False)["changed"]


@pytest.mark.parametrize("capacity", ["32", "0"])
def test_kubelets_own_capacity_is_unchanged(capacity):
    one = node("gpu1", {contract.RESOURCE_MEMORY: "0"})
    one["metadata"]["annotations"] = {}
    one["status"]["capacity"] = {contract.RESOURCE_MEMORY: capacity}
    kube = FakeKube(one)
    assert not remove_stale(kube, {"nodes": ["gpu1"]}, False)["changed"] and not kube.requests["PATCH"]
    live(kube, "gpu1")["status"]["capacity"][contract.RESOURCE_COUNT] = "2"
    result = remove_stale(kube, {"nodes": ["gpu1"]}, False)
    assert result["diff"][0]["before"] == "capacity aliyun.com/gpu-count: 2\n"
