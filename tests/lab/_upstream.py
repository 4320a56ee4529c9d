# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the stand-in for upstream's device plugin on a node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from _lab import RESOURCE, JsonObject, Lab, until
from _pods import DAEMONSET, MERGE, STRATEGIC, is_announced, plugin, plugin_pod_spec

PROGRAM = Path(__file__).with_name("upstream_plugin.py")
NAMESPACE = "lab-upstream"
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterrole"


def _rights(lab: Lab) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        # As the admission policy wants it of a server that isn't this collection's.
        {"apiGroups": ["kubegpu.share"], "resources": ["annotations"], "verbs": ["write"]},
    ]
    lab.api.call("POST", f"{ROLE}s", {"metadata": {"name": NAMESPACE}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAMESPACE}
    wanted = {"metadata": {"name": NAMESPACE}, "subjects": [subject], "roleRef": reference}
    lab.api.call("POST", f"{ROLE}bindings", wanted)


def _pod(lab: Lab, node: str) -> JsonObject:
    socket = "/var/lib/kubelet/device-plugins"
    one = {
        "name": "device-plugin",
        "image": lab.image(),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "/program/upstream_plugin.py"],
        "env": [
            {"name": "NODE_NAME", "value": node},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
        ],
        "securityContext": {"privileged": True, "runAsUser": 0},
        "volumeMounts": [{"name": "socket", "mountPath": socket}, {"name": "program", "mountPath": "/program"}],
    }
    volumes = [
        {"name": "socket", "hostPath": {"path": socket}},
        {"name": "program", "configMap": {"name": "program"}},
    ]
    spec = {
        "nodeName": node,
        "containers": [one],
        "volumes": volumes,
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{"operator": "Exists"}],
    }
    return {
        "metadata": {"name": "gpushare-device-plugin-ds", "labels": {"name": "gpushare-device-plugin-ds"}},
        "spec": spec,
    }


def _ours(lab: Lab, node: str, there: bool) -> None:
    """Exclude a node from the gpushare DaemonSet, or none."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    affinity = None if there else {"nodeAffinity": required}
    lab.api.call("PATCH", DAEMONSET, {"spec": {"template": {"spec": {"affinity": affinity}}}}, STRATEGIC)


def _without_plugin(lab: Lab, node: str) -> bool:
    found = [pod for pod in lab.server_pods("gpushare-device-plugin") if pod["spec"].get("nodeName") == node]
    return not found


@contextlib.contextmanager
def upstream(lab: Lab, node: str) -> Iterator[None]:
    cards = len(lab.cards(node))
    affinity = plugin_pod_spec(lab).get("affinity")
    assert affinity is None, "our DaemonSet has an affinity of its own, which this would overwrite"
    with lab.api.namespace(NAMESPACE) as name:
        try:
            _rights(lab)
            program = {"metadata": {"name": "program"}, "data": {PROGRAM.name: PROGRAM.read_text()}}
            lab.api.call("POST", f"/api/v1/namespaces/{name}/configmaps", program)
            _ours(lab, node, there=False)
            until(lambda: _without_plugin(lab, node), f"our plugin has left {node}", 120)
            # kubelet goes on telling of the units a while; they must be the stand-in's that are waited for below.
            until(lambda: lab.allocatable(node) == 0, f"{node} has nothing to give", 60)
            gone = {"metadata": {"annotations": dict.fromkeys(["kubegpu.share/cards", "kubegpu.share/memory-limit"])}}
            lab.api.call("PATCH", f"/api/v1/nodes/{node}", gone, MERGE)
            lab.api.call("POST", f"/api/v1/namespaces/{name}/pods", _pod(lab, node))

            def announces() -> bool:
                there: JsonObject = lab.api.node(node)
                assert "kubegpu.share/cards" not in there["metadata"]["annotations"]
                return int(there["status"]["allocatable"].get(RESOURCE, "0")) > 0

            until(announces, f"{node} announces its memory by the stand-in", 90)
            yield
        finally:
            lab.api.delete(f"/api/v1/namespaces/{name}/pods/gpushare-device-plugin-ds")
            _ours(lab, node, there=True)
            for kind in ("roles", "rolebindings"):
                lab.api.delete(f"{ROLE.removesuffix('role')}{kind}/{NAMESPACE}")
            until(lambda: plugin(lab, node), f"our plugin is back on {node}", 120)
            until(lambda: is_announced(lab, node, cards), f"{node} announces its cards", 120)
