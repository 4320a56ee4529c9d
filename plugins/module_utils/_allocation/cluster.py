# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a cluster's version and nodes in as few requests as possible."""

from __future__ import annotations

import typing as t

from .._contracts import gpushare as contract
from .._contracts.claim_templates import templates_of_pod
from .._contracts.model import UNFINISHED, node_unit
from .._core import untrusted
from .._core.types import JsonObject
from .._core.untrusted import line
from .._kube.refs import is_ready
from . import foreign

if t.TYPE_CHECKING:
    from .._kube.api import Kube

# Annotations of GPU sharing stacks; others can be large and are dropped.
ANNOTATIONS = ("kubegpu.share/", "hami.io/", "4pd.io/")


class ClusterNode(t.TypedDict):
    """One node as the module ``cluster_info`` returns it."""

    name: str
    address: str
    labels: dict[str, str]
    annotations: dict[str, str]
    taints: list[JsonObject]
    schedulable: bool
    ready: bool
    capacity: dict[str, str]
    allocatable: dict[str, str]
    runtime: str
    kubelet: str
    os: str
    arch: str


class SharingPod(t.TypedDict):
    """A pod that holds a share of a card, in units of its node."""

    namespace: str
    name: str
    node: str
    units: int


class AnnouncedSlice(t.TypedDict):
    """The driver that announces devices of a node by a ResourceSlice.

    :ivar unit: of the shares of this collection's cards; None for other devices, or without any.
    """

    driver: str
    node: str
    unit: str | None


class ClusterState(t.TypedDict):
    """The cluster's version and nodes; ``sharing_pods``, ``claiming_pods`` and ``slices`` are None where not read.

    ``plugins`` are those of others, where a node has one, and ``operators`` what the GPU Operator was told, where it
    labelled a node.
    """

    version: str
    nodes: list[ClusterNode]
    sharing_pods: list[SharingPod] | None
    claiming_pods: list[SharingPod] | None
    slices: list[AnnouncedSlice] | None
    plugins: list[foreign.Plugin]
    operators: list[foreign.Operator]


def collect(
    kube: Kube,
    nodes: t.Sequence[JsonObject],
    version: str,
    memory_unit: str | None = None,
    sharing_pods: bool = False,
    slices: list[AnnouncedSlice] | None = None,
    foreigners: bool = True,
) -> ClusterState:
    """Return the cluster's version and nodes.

    :param nodes: the API's Node objects.
    :param version: the API server's version.
    :param memory_unit: the unit that the nodes will count in. Pods are read only where a node counts in another unit
        now, because changing the unit would invalidate their shares.
    :param sharing_pods: pods are read in any case.
    :param slices: as they were read. Those that count in another unit have pods be read, too.
    :param foreigners: device plugins of others and what the GPU Operator was told are read, where a node shows them.
    """
    pods: list[SharingPod] | None = None
    claiming: list[SharingPod] | None = None
    others_units = {node_unit(contract.node_cards(node)) for node in nodes} | {row["unit"] for row in slices or ()}
    if sharing_pods or (memory_unit is not None and others_units - {None, memory_unit}):
        listed = kube.list_all("v1", "Pod", field_selector=UNFINISHED)
        pods = [_pod(pod) for pod in listed if contract.counts(pod)]
        claiming = [_pod(pod) for pod in listed if templates_of_pod(pod)]
    known = [_node(node) for node in nodes]
    others = any(foreign.announced(node["allocatable"]) for node in known)
    others = others or any(row["driver"] in foreign.DRIVERS for row in slices or ())
    return {
        "version": version,
        "nodes": known,
        "sharing_pods": pods,
        "claiming_pods": claiming,
        "slices": slices,
        "plugins": foreign.plugins(kube.list_all("apps/v1", "DaemonSet")) if others and foreigners else [],
        "operators": foreign.operators(kube, (name for node in known for name in node["labels"])) if foreigners else [],
    }


def _pod(pod: JsonObject) -> SharingPod:
    metadata = pod["metadata"]
    return {
        "namespace": str(metadata.get("namespace", "")),
        "name": str(metadata.get("name", "")),
        "node": contract.pod_node(pod),
        "units": contract.pod_units(pod),
    }


def _node(node: JsonObject) -> ClusterNode:
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    info = status.get("nodeInfo") or {}
    annotations: dict[str, str] = metadata.get("annotations") or {}
    # The first one: a node of two families has one of each, in the order of the cluster's own.
    addresses = {address.get("type"): address.get("address") for address in reversed(status.get("addresses") or [])}
    return {
        "name": line(metadata["name"]),
        # Whoever connects to it parses it: ``untrusted.other_machine``.
        "address": line(addresses.get("InternalIP") or ""),
        "labels": metadata.get("labels") or {},
        "annotations": {key: value for key, value in annotations.items() if key.startswith(ANNOTATIONS)},
        "taints": spec.get("taints") or [],
        "schedulable": not spec.get("unschedulable", False),
        "ready": is_ready(node),
        "capacity": status.get("capacity") or {},
        "allocatable": status.get("allocatable") or {},
        "runtime": line(info.get("containerRuntimeVersion", "")),
        "kubelet": known_version(info.get("kubeletVersion")),
        "os": line(info.get("osImage", "")),
        "arch": line(info.get("architecture", "")),
    }


def known_version(value: t.Any) -> str:
    """Return a version that a node or a server reports; ``unknown`` where it isn't one, and empty where it has none."""
    try:
        return untrusted.version(value)
    except untrusted.Refused:
        return "unknown" if value else ""


def node_cards(node: t.Mapping[str, t.Any]) -> list[contract.Card]:
    """Return the cards that a node, as ``collect`` returns it, announces."""
    return contract.node_cards(
        {"metadata": {"annotations": node["annotations"]}, "status": {"capacity": node["capacity"]}}
    )
