# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the cluster says of itself and its nodes, in as few requests as that takes."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import node_unit
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube

UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"
# Annotations of GPU sharing stacks; the others are none of our business and can be large.
ANNOTATIONS = ("kubegpu.share/", "hami.io/", "4pd.io/")


def look(kube: Kube, memory_unit: str | None = None) -> Json:
    """The cluster's version and nodes.

    :param memory_unit: the unit that the nodes are about to count in. Only where one counts in another unit now, the
        pods are asked for too: they are what such a change would hurt.
    """
    version = kube.version()
    nodes = kube.list_all("v1", "Node")
    pods = None
    units = {node_unit(contract.node_cards(node)) for node in nodes} - {None, memory_unit}
    if memory_unit is not None and units:
        pods = [_sharing(pod) for pod in kube.list_all("v1", "Pod", field_selector=UNFINISHED) if contract.counts(pod)]
    return {
        "version": str(version.get("gitVersion", "")),
        "nodes": [_node(node) for node in nodes],
        "sharing_pods": pods,
        "requests": dict(kube.requests),
    }


def _sharing(pod: Json) -> Json:
    metadata = pod["metadata"]
    return {
        "namespace": str(metadata.get("namespace", "")),
        "name": str(metadata.get("name", "")),
        "node": contract.pod_node(pod),
        "units": contract.pod_units(pod),
    }


def _node(node: Json) -> Json:
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    about = status.get("nodeInfo") or {}
    annotations: dict[str, str] = metadata.get("annotations") or {}
    addresses = {one.get("type"): one.get("address") for one in status.get("addresses") or []}
    return {
        "name": str(metadata["name"]),
        "address": str(addresses.get("InternalIP") or ""),
        "labels": metadata.get("labels") or {},
        "annotations": {key: value for key, value in annotations.items() if key.startswith(ANNOTATIONS)},
        "taints": spec.get("taints") or [],
        "schedulable": not spec.get("unschedulable", False),
        "ready": any(
            one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or []
        ),
        "capacity": status.get("capacity") or {},
        "allocatable": status.get("allocatable") or {},
        "runtime": str(about.get("containerRuntimeVersion", "")),
        "kubelet": str(about.get("kubeletVersion", "")),
        "os": str(about.get("osImage", "")),
        "arch": str(about.get("architecture", "")),
    }


def node_cards(node: Json) -> list[contract.Card]:
    """The cards of a node as ``look`` returns it."""
    return contract.node_cards(
        {"metadata": {"annotations": node["annotations"]}, "status": {"capacity": node["capacity"]}}
    )


ARGUMENTS: Json = {"memory_unit": {"type": "str", "choices": ["GiB", "MiB"]}}
