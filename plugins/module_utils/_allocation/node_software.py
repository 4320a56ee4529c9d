# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who installs driver and container toolkit on a node: the variable ``gpu_node_software``, decided once. Pure."""

from __future__ import annotations

import typing as t

from .._contracts import backends, operator_labels
from .._contracts.backends import OPERANDS
from .._contracts.model import Node
from .._contracts.nvidia_plugin import LABEL_PRESENT
from .._core.types import JsonObject
from . import foreign
from .cluster import Cluster
from .node_backends import Backends

VARIABLE = "gpu_node_software"
AUTO, ROLES, GPU_OPERATOR, PROVIDER = "auto", "roles", "gpu_operator", "provider"
CHOICES = (AUTO, ROLES, GPU_OPERATOR, PROVIDER)
# The operator's label of a node whose toolkit it has.
TOOLKIT_LABEL = (operator_labels.TOOLKIT, "true")
# Labels and systems of nodes whose image, or whose provider's DaemonSet, brings the driver.
PROVIDER_LABELS: t.Mapping[str, str] = {
    "cloud.google.com/gke-gpu-driver-version": "GKE's driver installer",
    "cloud.google.com/gke-accelerator": "GKE's driver installer",
    "bottlerocket.aws/updater-interface-version": "Bottlerocket's image",
    "kubernetes.azure.com/accelerator": "AKS's image",
    "k8s.amazonaws.com/accelerator": "EKS's image",
}
PROVIDER_SYSTEMS: t.Mapping[str, str] = {
    "Container-Optimized OS": "GKE's driver installer",
    "Bottlerocket": "Bottlerocket's image",
}

# Why a node's software is what it is.
REQUESTED, MACHINE, OPERATED, PROVIDED, ASSUMED = "requested", "machine", "operated", "provided", "assumed"
REFUSED = "refused"
REASONS: t.Mapping[str, str] = {
    REQUESTED: "gpu_node_software says so",
    MACHINE: "it is a machine of the group gpu_nodes",
    OPERATED: "NVIDIA's GPU Operator has the node ({who})",
    PROVIDED: "the node shows {who}",
    ASSUMED: "nobody logs in to the node, and no GPU Operator has it",
    REFUSED: "whether NVIDIA's GPU Operator has it isn't known, because the API server refuses this user to list {who} "
    "(HTTP 403)",
}


class Wanted(t.TypedDict):
    """What the variables ask for on a node; ``machine`` is whether it is a host of the group gpu_nodes."""

    node: str
    software: str
    machine: bool


class NodeSoftware(t.TypedDict):
    """Who installs a node's software; ``code`` is a key of ``REASONS``, which ``fields`` complete."""

    node: str
    machine: bool
    wanted: str
    software: str
    code: str
    fields: JsonObject


class Software(t.TypedDict):
    """Who installs the nodes' software.

    ``roles``, ``gpu_operator`` and ``provider`` name nodes, and ``leaving`` those that have this collection's operator
    until this run. ``unused`` is whether that one is there and no node needs it. ``ours`` is whether this collection
    has installed the GPU Operator, or begun to, ``installs`` whether a run has to install it or to keep it as variables
    say, and ``openshift`` whether OLM would install it. Of nodes that somebody's operator has already, nothing is
    installed.
    """

    nodes: list[NodeSoftware]
    roles: list[str]
    gpu_operator: list[str]
    provider: list[str]
    leaving: list[str]
    unused: bool
    ours: bool
    installs: bool
    openshift: bool


class Decided(Backends):
    """The back ends of a cluster, and who installs the software of its nodes."""

    software: Software


def resolve(
    wanted: t.Sequence[Wanted],
    cluster: Cluster,
    ours: bool = False,
    left_out: t.Collection[str] = (),
    openshift: bool = False,
) -> Software:
    """Decide who installs each node's software.

    ``auto`` is the roles on machines, unless the operator has driver and toolkit of the node; the operator where it has
    a node that nobody logs in to; else whoever provides the node.

    :param wanted: of every node of the inventory.
    :param ours: this collection has installed the operator.
    :param left_out: nodes that aren't in the cluster yet, and that this run leaves out.
    :param openshift: whether the cluster is OpenShift, whatever its nodes say.
    """
    nodes = {node.name: node for node in cluster.nodes}
    rows = [_of_node(row, nodes.get(row["node"]), cluster) for row in wanted if row["node"] not in left_out]
    having = {value: [row["node"] for row in rows if row["software"] == value] for value in CHOICES}
    operated = [row for row in rows if row["software"] == GPU_OPERATOR]
    labelled = {node.name for node in cluster.nodes if node.labels.get(backends.SOFTWARE) == backends.OPERATOR}
    # Also those that nobody has named, and that join later.
    needing = labelled - {row["node"] for row in wanted} | {
        row["node"] for row in wanted if row["software"] == GPU_OPERATOR
    }
    return {
        "nodes": rows,
        "roles": having[ROLES],
        "gpu_operator": having[GPU_OPERATOR],
        "provider": having[PROVIDER],
        "leaving": [row["node"] for row in rows if row["node"] in labelled and row["software"] != GPU_OPERATOR],
        "unused": ours and not operated and not needing,
        "ours": ours,
        "installs": any(ours or row["code"] == REQUESTED for row in operated),
        "openshift": openshift,
    }


def owner(node: Node | None, operators: t.Sequence[foreign.Operator]) -> str:
    """Return the ClusterPolicy by which a node has driver and toolkit; empty for none."""
    if node is None or not {foreign.DRIVER_LABEL, TOOLKIT_LABEL} <= node.labels.items():
        return ""
    return next((operator["name"] for operator in operators if operator["drives"] and operator["toolkit"]), "")


def operated(node: Node | None, operators: t.Sequence[foreign.Operator]) -> str:
    """Return the ClusterPolicy that has a node, whatever it installs there; empty for none."""
    labels = node.labels if node is not None else {}
    if labels.get(LABEL_PRESENT) != "true" or labels.get(OPERANDS) == "false":
        return ""
    return next((operator["name"] for operator in operators if operator["kind"] == "ClusterPolicy"), "")


def provided(node: Node | None) -> str:
    """Return what of a provider brings a node's driver; empty where nothing shows it."""
    if node is None:
        return ""
    for system, what in PROVIDER_SYSTEMS.items():
        if system in node.os:
            return what
    return next((what for label, what in PROVIDER_LABELS.items() if label in node.labels), "")


def _unknown(node: Node | None, machine: bool, cluster: Cluster) -> str:
    """Return the resource that would tell whether the operator has a node that it labelled; empty where it is known."""
    policies = foreign.OPERATORS_RESOURCES["ClusterPolicy"]
    labels = node.labels if node is not None else {}
    labelled = labels.get(LABEL_PRESENT) == "true" and labels.get(OPERANDS) != "false"
    if machine:
        labelled = {foreign.DRIVER_LABEL, TOOLKIT_LABEL} <= labels.items()
    return policies if labelled and policies in cluster.operators_refused else ""


def _of_node(wanted: Wanted, node: Node | None, cluster: Cluster) -> NodeSoftware:
    def made(software: str, code: str, who: str = "") -> NodeSoftware:
        return {
            "node": wanted["node"],
            "machine": wanted["machine"],
            "wanted": wanted["software"],
            "software": software,
            "code": code,
            "fields": {"who": who} if who else {},
        }

    if wanted["software"] != AUTO:
        return made(wanted["software"], REQUESTED)
    policy = owner(node, cluster.operators) if wanted["machine"] else operated(node, cluster.operators)
    if policy:
        return made(GPU_OPERATOR, OPERATED, f"ClusterPolicy {policy}")
    who = "" if wanted["machine"] else provided(node)
    refused = "" if who else _unknown(node, wanted["machine"], cluster)
    if refused:
        return made(ROLES if wanted["machine"] else PROVIDER, REFUSED, refused)
    if wanted["machine"]:
        return made(ROLES, MACHINE)
    return made(PROVIDER, PROVIDED, who) if who else made(PROVIDER, ASSUMED)
