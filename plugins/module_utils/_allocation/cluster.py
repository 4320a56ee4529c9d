# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster's version and nodes, read in as few requests as possible, and as ``cluster_info`` returns them."""

from __future__ import annotations

import base64
import dataclasses
import json
import typing as t
import zlib

from .._contracts.model import UNFINISHED, Node, Pod, PodParser, announced_cards, node_unit, well_formed
from .._core import untrusted
from .._core.types import JsonObject
from . import foreign

if t.TYPE_CHECKING:
    from .._kube.api import Kube

# Annotations of GPU sharing stacks; others can be large and are dropped.
ANNOTATIONS = ("kubegpu.share/", "hami.io/", "4pd.io/")
# The fields of a node that are returned as they are.
NODE_FIELDS = ("name", "address", "labels", "schedulable", "capacity", "allocatable", "runtime", "os", "arch")


class AnnouncedSlice(t.TypedDict):
    """The driver that announces devices of a node by a ResourceSlice.

    :ivar unit: of the shares of this collection's cards; None for other devices, or without any.
    """

    driver: str
    node: str
    unit: str | None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The cluster's version and nodes.

    :param sharing_pods: bound, with units of cards; None where pods weren't read, as for ``claiming_pods``.
    :param claiming_pods: with a claim from a template of gpushare.
    :param slices: None where they weren't read.
    :param plugins: of others, where a node has one.
    :param operators: what the GPU Operator was told, where it labelled a node.
    :param operators_refused: resources with what it was told, where the user may not list them.
    """

    version: str
    nodes: tuple[Node, ...]
    sharing_pods: tuple[Pod, ...] | None = None
    claiming_pods: tuple[Pod, ...] | None = None
    slices: t.Sequence[AnnouncedSlice] | None = None
    plugins: t.Sequence[foreign.Plugin] = ()
    operators: t.Sequence[foreign.Operator] = ()
    operators_refused: t.Sequence[str] = ()

    def result(self) -> JsonObject:
        """Return it as the module ``cluster_info`` does; of pods namespace, name, node and units."""
        return {
            **vars(self),
            "nodes": [_node_row(node) for node in self.nodes],
            "sharing_pods": _pod_rows(self.sharing_pods),
            "claiming_pods": _pod_rows(self.claiming_pods),
        }


def packed(rows: t.Sequence[JsonObject]) -> str:
    """Return rows of nodes as one short text: Ansible copies and evaluates data value by value, and prints it."""
    return base64.b64encode(zlib.compress(json.dumps(rows).encode(), 1)).decode()


def unpacked(text: str) -> str:
    """Return the JSON of rows of nodes from what ``packed`` returned."""
    return zlib.decompress(base64.b64decode(text)).decode()


def rows_of(result: t.Mapping[str, t.Any]) -> t.Sequence[JsonObject]:
    """Return the rows of all nodes from the result of the module ``cluster_info``."""
    rows = json.loads(unpacked(result["all_nodes"])) if "all_nodes" in result else result["nodes"]
    return t.cast("t.Sequence[JsonObject]", rows)


def _node_row(node: Node) -> JsonObject:
    return {
        **{field: getattr(node, field) for field in NODE_FIELDS},
        "annotations": {key: value for key, value in node.annotations.items() if key.startswith(ANNOTATIONS)},
        "taints": list(node.taints),
        "ready": node.ready == "True",
        "kubelet": known_version(node.kubelet_version),
    }


def _pod_rows(pods: t.Iterable[Pod] | None) -> list[JsonObject] | None:
    if pods is None:
        return None
    return [{"namespace": pod.namespace, "name": pod.name, "node": pod.node, "units": pod.units} for pod in pods]


def cluster_of(result: JsonObject) -> Cluster:
    """Return the cluster that the module ``cluster_info`` returned."""
    return Cluster(
        result["version"],
        tuple(map(node_of_row, result["nodes"])),
        _pods_of_rows(result["sharing_pods"]),
        _pods_of_rows(result["claiming_pods"]),
        *(result[field] for field in ("slices", "plugins", "operators", "operators_refused")),
    )


def node_of_row(row: JsonObject) -> Node:
    """Return a node of the result of ``cluster_info``."""
    cards, problem = announced_cards(row["annotations"], row["capacity"])
    return Node(
        **{field: row[field] for field in NODE_FIELDS},
        annotations=row["annotations"],
        taints=tuple(row["taints"]),
        ready=str(row["ready"]),
        kubelet_version=row["kubelet"],
        cards=cards,
        cards_problem=problem,
    )


def _pods_of_rows(rows: t.Iterable[JsonObject] | None) -> tuple[Pod, ...] | None:
    return None if rows is None else tuple(Pod(**row, uid="", uids=frozenset()) for row in rows)


def collect(
    kube: Kube,
    nodes: t.Sequence[Node],
    version: str,
    memory_unit: str | None = None,
    sharing_pods: bool = False,
    slices: list[AnnouncedSlice] | None = None,
    foreigners: bool = True,
) -> Cluster:
    """Return the cluster's version and nodes.

    :param version: the API server's version.
    :param memory_unit: the unit that the nodes will count in. Pods are read only where a node counts in another unit
        now, because changing the unit would invalidate their shares.
    :param sharing_pods: pods are read in any case.
    :param slices: as they were read. Those that count in another unit have pods be read, too.
    :param foreigners: device plugins of others and what the GPU Operator was told are read, where a node shows them.
    """
    sharing: tuple[Pod, ...] | None = None
    claiming: tuple[Pod, ...] | None = None
    others_units = {node_unit(node.cards) for node in nodes} | {row["unit"] for row in slices or ()}
    if sharing_pods or (memory_unit is not None and others_units - {None, memory_unit}):
        pods = well_formed("pod", map(PodParser(), kube.list_all("v1", "Pod", field_selector=UNFINISHED)))
        sharing = tuple(pod for pod in pods if pod.holds_units)
        claiming = tuple(pod for pod in pods if any(use.units() for use in pod.uses))
    others = any(foreign.announced(node.allocatable) for node in nodes)
    others = others or any(row["driver"] in foreign.DRIVERS for row in slices or ())
    labels = (name for node in nodes for name in node.labels)
    return Cluster(
        version,
        tuple(nodes),
        sharing,
        claiming,
        slices,
        foreign.plugins(kube.list_all("apps/v1", "DaemonSet")) if others and foreigners else [],
        *(foreign.operators(kube, labels) if foreigners else ([], [])),
    )


def known_version(value: t.Any) -> str:
    """Return a version that a node or a server reports; ``unknown`` where it isn't one, and empty where it has none."""
    try:
        return untrusted.version(value)
    except untrusted.Refused:
        return "unknown" if value else ""
