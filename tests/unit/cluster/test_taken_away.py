# SPDX-License-Identifier: GPL-3.0-or-later
"""What uninstall takes from a cluster: namespaces in which nobody else has anything, and what nodes were told of."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_objects import converge
from ansible_collections.kubegpu.share.plugins.module_utils._node_announcements import forget
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting
from fake_kube import FakeKube

SPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpushare-system"}}
OURS = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "ours", "namespace": "gpushare-system"},
    "data": {},
}


def thing(kind, name, api_version="v1", **more):
    metadata = {"name": name, "namespace": "gpushare-system", **more.pop("metadata", {})}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **more}


def gone(kube, check=False):
    params = {
        "definitions": [SPACE, OURS],
        "state": "absent",
        "field_manager": "kubegpu-share",
        "replace_unready": False,
        "wait": False,
        "node_resources": [],
    }
    return converge(kube, params, check, Waiting(timeout=1))


def actions(result):
    return {row["kind"]: row["action"] for row in result["objects"]}


@pytest.mark.parametrize(
    "other",
    [
        thing("ConfigMap", "kube-root-ca.crt"),
        thing("ConfigMap", "openshift-service-ca.crt"),
        thing("Secret", "default-token-x", type="kubernetes.io/service-account-token"),
        thing("Pod", "p", metadata={"ownerReferences": [{"kind": "DaemonSet", "name": "d"}]}),
        thing("Pod", "p", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
    ],
    ids=lambda one: one["metadata"]["name"],
)
def test_namespace_goes_with_what_kubernetes_puts_into_each(other):
    kube = FakeKube(SPACE, OURS, other)
    result = gone(kube)
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
    ],
    ids=lambda one: one["kind"],
)
def test_namespace_in_which_others_have_something_stays(other):
    kube = FakeKube(SPACE, OURS, other)
    predicted = gone(kube, check=True)
    result = gone(kube)
    assert predicted["objects"] == result["objects"]
    assert actions(result) == {"Namespace": "kept", "ConfigMap": "deleted"}
    kept = next(row for row in result["objects"] if row["action"] == "kept")
    assert kept["because"] == f"{other['kind']} theirs"
    again = gone(kube)
    assert not again["changed"] and actions(again) == {"Namespace": "kept", "ConfigMap": "absent"}


# --------------------------------------------------------------------------- nodes


class Nodes:
    """Nodes behind merge patches of themselves and of their status."""

    def __init__(self, *nodes):
        self.nodes = {node["metadata"]["name"]: node for node in nodes}
        self.requests: dict[str, int] = {}

    def get(self, ref):
        self.requests["GET"] = self.requests.get("GET", 0) + 1
        return self.nodes.get(ref.name)

    def patch(self, ref, body, subresource=""):
        self.requests["PATCH"] = self.requests.get("PATCH", 0) + 1
        assert set(body) == ({"status"} if subresource == "status" else {"metadata"})
        merged(self.nodes[ref.name], body)


def merged(live, body):
    for key, value in body.items():
        if value is None:
            live.pop(key, None)
        elif isinstance(value, dict):
            merged(live.setdefault(key, {}), value)
        else:
            live[key] = value


def node(name, **resources):
    return {
        "metadata": {"name": name, "annotations": {contract.NODE_CARDS: "[]", "theirs": "x"}},
        "status": {
            field: {"cpu": "2", contract.RESOURCE_MEMORY: "32", contract.RESOURCE_COUNT: "2"}
            for field in ("capacity", "allocatable")
        },
    }


def test_nodes_tell_of_no_cards_any_more():
    kube = Nodes(node("gpu1"), node("gpu2"))
    predicted = forget(kube, {"nodes": ["gpu1", "gone"]}, True)
    assert predicted["changed"] and "PATCH" not in predicted["requests"]
    result = forget(kube, {"nodes": ["gpu1", "gone"]}, False)
    assert result["diff"] == predicted["diff"] and len(result["diff"]) == 1
    assert "capacity aliyun.com/gpu-mem: 32" in result["diff"][0]["before"] and result["diff"][0]["after"] == ""
    assert kube.nodes["gpu1"]["metadata"]["annotations"] == {"theirs": "x"}
    assert kube.nodes["gpu1"]["status"] == {"capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}}
    assert kube.nodes["gpu2"] == node("gpu2")
    assert not forget(kube, {"nodes": ["gpu1"]}, False)["changed"]


@pytest.mark.parametrize("capacity", ["32", "0"])
def test_what_kubelet_shows_of_a_plugin_that_is_gone_is_left_to_it(capacity):
    one = node("gpu1")
    one["metadata"]["annotations"] = {}
    one["status"] = {
        "capacity": {contract.RESOURCE_MEMORY: capacity},
        "allocatable": {contract.RESOURCE_MEMORY: "0"},
    }
    kube = Nodes(one)
    assert not forget(kube, {"nodes": ["gpu1"]}, False)["changed"] and "PATCH" not in kube.requests
    one["status"]["capacity"][contract.RESOURCE_COUNT] = "2"
    result = forget(kube, {"nodes": ["gpu1"]}, False)
    assert result["diff"][0]["before"] == "capacity aliyun.com/gpu-count: 2\n"
