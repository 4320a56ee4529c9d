# SPDX-License-Identifier: GPL-3.0-or-later
"""OpenShift's objects on an API server that has its definitions: the version, and a ClusterPolicy that is ready."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._openshift import gpu_operator as operator
from real_apiserver import MERGE, ApiServer

POLICIES = "/apis/nvidia.com/v1/clusterpolicies"
CONSTRAINTS = "/apis/security.openshift.io/v1/securitycontextconstraints"
# As the GPU Operator labels a node that it manages.
LABELS = {
    "node.openshift.io/os_id": "rhcos",
    **dict.fromkeys((operator.PRESENT, operator.PLUGIN, operator.VALIDATOR, operator.OWN_TOOLKIT), "true"),
}
PARTS = ("daemonsets", "dcgm", "dcgmExporter", "driver", "gfd", "nodeStatusExporter", "operator", "toolkit", "cdi")


def openshift(server: ApiServer) -> None:
    """Make the node gpu1 one of OpenShift 4.23 with the GPU Operator.

    :param server: has the definitions, and the node.
    """
    server.request("PATCH", "/api/v1/nodes/gpu1", {"metadata": {"labels": LABELS}}, MERGE)
    ready: dict[str, t.Any] = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    server.request("PATCH", "/api/v1/nodes/gpu1/status", {"status": {"conditions": [ready]}}, MERGE)
    version = {
        "apiVersion": "config.openshift.io/v1",
        "kind": "ClusterVersion",
        "metadata": {"name": "version"},
        "spec": {"clusterID": "3c2f7d3e-2f3a-4a0e-9d6e-6c6b5f0d9a11"},
    }
    at = "/apis/config.openshift.io/v1/clusterversions"
    server.request("POST", at, version)
    desired = {"version": "4.23.1", "image": "i"}
    status = {"desired": desired, "observedGeneration": 1, "versionHash": "x", "availableUpdates": []}
    server.request("PATCH", f"{at}/version/status", {"status": status}, MERGE)
    spec = {**{part: {} for part in PARTS}, "devicePlugin": {"enabled": True}}
    metadata = {"name": "gpu-cluster-policy"}
    body = {"apiVersion": operator.API, "kind": operator.KIND, "metadata": metadata, "spec": spec}
    server.request("POST", POLICIES, body)
    ready = {"status": {"state": "ready", "namespace": "nvidia-gpu-operator"}}
    server.request("PATCH", f"{POLICIES}/gpu-cluster-policy/status", ready, MERGE)
