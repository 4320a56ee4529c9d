# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the servers run that serve the whole cluster: a node's kubelet gets the account of each pod there. Pure."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject
from .._kube import tolerations
from .cluster import ClusterNode

# Of the control plane's nodes: since kubeadm 1.20, and before that. No kubelet may set them on its own node.
CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
# Taints that these pods always tolerate: the control plane's own, and those of servers of k3s and RKE2. As in
# roles/gpushare/templates/server_parts.j2.
TOLERATED = (*CONTROL_PLANE_LABELS, "node-role.kubernetes.io/etcd", "CriticalAddonsOnly")
# The variable with further tolerations, and its default: every taint.
VARIABLE = "gpushare_tolerations"
EVERY: tuple[JsonObject, ...] = ({"operator": "Exists"},)

# Of one node: its kubelet chooses them when it registers, and an object of some ten thousands would be refused.
MOST_TAINTS = 50

# On the nodes that a variable names; on the control plane; on the nodes of gpushare, which run pods of tenants.
NAMED, CONTROL_PLANE, GPU_NODES = "named", "control_plane", "gpu_nodes"


class Place(t.TypedDict):
    """Where pods of a server run.

    :ivar place: ``NAMED``, ``CONTROL_PLANE`` or ``GPU_NODES``.
    :ivar nodes: the names of these nodes, empty for ``GPU_NODES``.
    :ivar imported: the playbooks import the servers' image there, rather than each node pulling it.
    :ivar taints: keys of these nodes' own taints that its pods tolerate, besides ``TOLERATED``; none of a node that has
        more than ``MOST_TAINTS``. A Deployment's pods can't tolerate every taint: they would stay on nodes that are
        gone, and return to one that is drained.
    """

    place: str
    nodes: list[str]
    imported: bool
    taints: list[str]


def control_plane(nodes: t.Sequence[ClusterNode], imported: t.Collection[str] | None) -> list[str]:
    """Return the names of the control plane's nodes where the servers' pods can run; none unless they can on all.

    :param imported: nodes that get the servers' image from the playbooks; None where each node pulls it.
    """
    names = [node["name"] for node in nodes if _is_control_plane(node) and not _is_closed(node)]
    return sorted(names) if imported is None or set(names) <= set(imported) else []


def _is_control_plane(node: ClusterNode) -> bool:
    return any(label in node["labels"] for label in CONTROL_PLANE_LABELS)


def _is_closed(node: ClusterNode) -> bool:
    return bool(closing(node))


def closing(node: t.Mapping[str, t.Any]) -> list[JsonObject]:
    """Return the taints of a node that the servers' pods don't tolerate wherever they run."""
    return tolerations.untolerated(tolerations.lasting(node.get("taints") or ()), tolerations.exist(TOLERATED))


def closed_control_plane(nodes: t.Iterable[ClusterNode]) -> dict[str, list[JsonObject]]:
    """Return the control plane's nodes that have such taints, with these."""
    return {node["name"]: closing(node) for node in nodes if _is_control_plane(node) and _is_closed(node)}


def place(
    named: t.Sequence[str],
    nodes: t.Sequence[ClusterNode],
    imported: t.Collection[str] | None,
    sharing: t.Collection[str] = (),
    tolerated: t.Sequence[JsonObject] = EVERY,
) -> Place:
    """Return where a server runs that the playbooks deploy once for the cluster.

    :param named: the variable's nodes; empty to choose.
    :param imported: as for ``control_plane``.
    :param sharing: the nodes of gpushare.
    :param tolerated: the value of ``VARIABLE``.
    """
    known = imported is not None
    if named:
        taints = _own_taints(nodes, named, tolerated)
        return {"place": NAMED, "nodes": list(named), "imported": known, "taints": taints}
    names = control_plane(nodes, imported)
    if names:
        return {"place": CONTROL_PLANE, "nodes": names, "imported": known, "taints": []}
    return {"place": GPU_NODES, "nodes": [], "imported": known, "taints": _own_taints(nodes, sharing, tolerated)}


def _own_taints(
    nodes: t.Iterable[ClusterNode], chosen: t.Collection[str], tolerated: t.Sequence[JsonObject]
) -> list[str]:
    closed = [closing(node) for node in nodes if node["name"] in chosen]
    few = [taints for taints in closed if len(taints) <= MOST_TAINTS]
    return sorted(
        {
            str(taint.get("key"))
            for taints in few
            for taint in taints
            if not tolerations.untolerated((taint,), tolerated)
        }
    )
