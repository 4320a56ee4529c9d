# SPDX-License-Identifier: GPL-3.0-or-later
"""A real API server with a GPU node, whose driver has an account with the rights that it needs and no more."""

from __future__ import annotations

import itertools
import typing as t
from pathlib import Path

import pytest
from real_apiserver import ApiServer

_numbers = itertools.count(1)

RULES = [
    {
        "apiGroups": ["resource.k8s.io"],
        "resources": ["resourceslices"],
        "verbs": ["get", "list", "watch", "create", "update", "delete"],
    },
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
]


class Cluster:
    """The API with one node; ``account`` is the folder of the driver's account, bound to a pod on that node."""

    def __init__(self, server: ApiServer, folder: Path, node: str) -> None:
        self.server, self.node = server, node
        self.namespace = server.namespace("dra")
        created = server.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
        self.uid = created["metadata"]["uid"]
        name = f"driver-{self.namespace}"
        server.request("POST", f"/api/v1/namespaces/{self.namespace}/serviceaccounts", {"metadata": {"name": name}})
        group = "/apis/rbac.authorization.k8s.io/v1"
        server.request("POST", f"{group}/clusterroles", {"metadata": {"name": name}, "rules": RULES})
        server.request(
            "POST",
            f"{group}/clusterrolebindings",
            {
                "metadata": {"name": name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
            },
        )
        pod = {
            "metadata": {"name": "driver"},
            "spec": {"serviceAccountName": name, "nodeName": node, "containers": [{"name": "c", "image": "i"}]},
        }
        server.request("POST", f"/api/v1/namespaces/{self.namespace}/pods", pod)
        self.account = server.token(folder, self.namespace, name, "driver")

    def allow(self, rule: t.Any) -> None:
        """Give the driver's account one more right."""
        path = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/driver-{self.namespace}"
        role = self.server.request("GET", path)
        role["rules"].append(rule)
        self.server.request("PUT", path, role)

    def slices(self) -> list[t.Any]:
        """The node's slices, by name."""
        path = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3D{self.node}"
        return sorted(self.server.request("GET", path)["items"], key=lambda one: str(one["metadata"]["name"]))

    def wipe(self) -> None:
        """Delete the node's slices, as kubelet does when it starts."""
        path = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3D{self.node}"
        self.server.request("DELETE", path)

    def claim(self, name: str, *results: t.Any, pods: t.Sequence[tuple[str, str]] = ()) -> str:
        """Create a claim that is allocated as the scheduler does it, and return its UID.

        :param pods: names and UIDs of the pods that it is reserved for.
        """
        collection = f"/apis/resource.k8s.io/v1/namespaces/{self.namespace}/resourceclaims"
        exactly = {"deviceClassName": "gpu.kubegpu.share", "capacity": {"requests": {"memory": "1Gi"}}}
        requests = dict.fromkeys(str(result["request"]) for result in results)
        body = {
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": request, "exactly": exactly} for request in requests]}},
        }
        created = self.server.request("POST", collection, body)
        created["status"] = {
            "allocation": {"devices": {"results": list(results)}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": uid} for pod, uid in pods],
        }
        self.server.request("PUT", f"{collection}/{name}/status", created)
        return str(created["metadata"]["uid"])

    def release(self, name: str) -> None:
        """Free a claim and delete it, as its controller does when its pods have ended."""
        path = f"/apis/resource.k8s.io/v1/namespaces/{self.namespace}/resourceclaims/{name}"
        found = self.server.request("GET", path)
        found["status"] = {}
        self.server.request("PUT", f"{path}/status", found)
        self.server.request("DELETE", path)


@pytest.fixture
def cluster(api_server: ApiServer, tmp_path: Path) -> t.Iterator[Cluster]:
    """The API server with a node of its own."""
    made = Cluster(api_server, tmp_path / "account", f"gpu-node-{next(_numbers)}")
    yield made
    made.wipe()
    api_server.request("DELETE", f"/api/v1/nodes/{made.node}")
