# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the servers run that serve the whole cluster: a node's kubelet gets the account of each pod there. Pure."""

from __future__ import annotations

import typing as t

from .cluster import ClusterNode

# Of the control plane's nodes: since kubeadm 1.20, and before that. No kubelet may set them on its own node.
CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
# Taints of a node's condition, which come and go.
CONDITIONS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
REPELLING = ("NoSchedule", "NoExecute")

# On the nodes that a variable names; on the control plane; on the nodes of gpushare, which run pods of tenants.
NAMED, CONTROL_PLANE, GPU_NODES = "named", "control_plane", "gpu_nodes"


class Place(t.TypedDict):
    """Where pods of a server run.

    :ivar place: ``NAMED``, ``CONTROL_PLANE`` or ``GPU_NODES``.
    :ivar nodes: the names of these nodes, empty for ``GPU_NODES``.
    :ivar imported: the playbooks import the servers' image there, rather than each node pulling it.
    """

    place: str
    nodes: list[str]
    imported: bool


def control_plane(nodes: t.Sequence[ClusterNode], imported: t.Collection[str] | None) -> list[str]:
    """Return the names of the control plane's nodes where the servers' pods can run; none unless they can on all.

    :param imported: nodes that get the servers' image from the playbooks; None where each node pulls it.
    """
    found = [node["name"] for node in nodes if _is_control_plane(node) and not _is_closed(node)]
    return sorted(found) if imported is None or set(found) <= set(imported) else []


def _is_control_plane(node: ClusterNode) -> bool:
    return any(label in node["labels"] for label in CONTROL_PLANE_LABELS)


def _is_closed(node: ClusterNode) -> bool:
    """Return whether a node has a taint that the servers' pods don't tolerate."""
    taints = [str(one.get("key", "")) for one in node.get("taints", ()) if one.get("effect") in REPELLING]
    return any(key not in CONTROL_PLANE_LABELS and not key.startswith(CONDITIONS) for key in taints)


def place(named: t.Sequence[str], nodes: t.Sequence[ClusterNode], imported: t.Collection[str] | None) -> Place:
    """Return where a server runs that the playbooks deploy once for the cluster.

    :param named: the variable's nodes; empty to choose.
    :param imported: as for ``control_plane``.
    """
    if named:
        return {"place": NAMED, "nodes": list(named), "imported": imported is not None}
    found = control_plane(nodes, imported)
    return {"place": CONTROL_PLANE if found else GPU_NODES, "nodes": found, "imported": imported is not None}
