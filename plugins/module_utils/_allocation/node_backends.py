# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which back end has a node's cards, who allocates them, and where the cluster's servers run: decided once. Pure."""

from __future__ import annotations

import typing as t

from .._contracts import claim_templates
from .._contracts import gpushare as contract
from .._contracts.backends import GPUSHARE, HAMI, KATA, NVIDIA, PASSTHROUGH, VGPU
from .._contracts.model import Node
from .._core.types import JsonObject
from .._kube import tolerations
from .allocators import ALLOCATORS, CLAIMS_SINCE, DRA, EXTENDER, is_virtual, lacks_restricted, release
from .cluster import Cluster

# Values of gpushare_allocation, a node's variable.
AUTO = "auto"
ALLOCATIONS = (EXTENDER, DRA, AUTO)
# On a node, while playbooks/switch.yml switches it: the new allocator.
SWITCHING = "kubegpu.share/switch"
# The feature gate by which the control plane divides a device by claims.
GATE = "DRAConsumableCapacity"
OPENSHIFT_LABEL = "node.openshift.io/os_id"
# Values that claims can do, by variable; what isn't here they can't do yet.
POSSIBLE: t.Mapping[str, tuple[t.Any, ...]] = {
    "gpushare_extender_image": ("",),
    "gpushare_device_plugin_image": ("",),
    "gpushare_extender_metrics": (False,),
    "scheduler_mode": ("auto",),
}

# Other variables that are read here: nodes of the server of claim templates, and, where the playbooks import the
# servers' image, the control plane's nodes in the inventory, which get it; None where each node pulls it.
TEMPLATES_NODES, IMPORTED = "gpushare_dra_templates_nodes", "imported"

# By back end of a chart, the variables with its release and the namespace of that.
RELEASES: t.Mapping[str, tuple[str, str]] = {
    HAMI: ("hami_release", "hami_namespace"),
    NVIDIA: ("nvidia_device_plugin_release", "nvidia_device_plugin_namespace"),
}

# Which new pods that ask for aliyun.com/gpu-mem admission turns into claims: all, those that ask for it, or none.
CLAIMS_ALL, CLAIMS_ASKED, CLAIMS_NONE = "all", "asked", "none"

# Why a node has its allocation.
REQUESTED = "requested"
PRESENT = "present"
PENDING = "switch-pending"
SWITCHED = "switched"
JOINED = "joined"
SERVED = "claims-served"
VERSION = "claims-version"
GATE_OFF = "claims-gate"
UNABLE = "claims-unable"
PODS = "extender-pods"
REASONS: t.Mapping[str, str] = {
    REQUESTED: "{wanted} is set",
    PRESENT: "the node has it already",
    PENDING: "the node still has it; playbooks/switch.yml switches the node to {wanted}",
    SWITCHED: "playbooks/switch.yml switches the node",
    JOINED: "the cluster's other nodes have it",
    SERVED: "Kubernetes {version} divides a card by claims, and no pod runs under the extender",
    VERSION: "Kubernetes {version} is older than {since}, from which on a card is divided by claims",
    GATE_OFF: "the feature gate {gate} is off in kube-apiserver",
    UNABLE: "{variable} is {value}, which claims can't do",
    PODS: "{count} pods run under the extender",
}


class _Wanted(t.TypedDict):
    node: str
    backend: str
    allocation: str


class Wanted(_Wanted, total=False):
    """What the variables ask for on a node.

    ``cards`` is whether they name cards for virtual machines (``passthrough_cards``), whatever the node's back end is.
    """

    cards: bool


class NodeBackend(t.TypedDict):
    """A node's back end.

    ``allocation`` is the allocator of its cards, a key of ``ALLOCATORS``, and ``backend`` that one's; ``wanted`` is
    what the variables ask for, an allocator or ``auto``; ``present`` is what the node has now. ``code`` is a key of
    ``REASONS``, which ``fields`` complete.
    """

    node: str
    backend: str
    allocation: str
    wanted: str
    present: list[str]
    code: str
    fields: JsonObject


class Parts(t.TypedDict):
    """Whether the cluster has, or needs, parts of each allocator beside those of the nodes.

    ``kubevirt`` are the entries by which KubeVirt permits cards to virtual machines; none where it isn't installed.
    """

    extender: bool
    dra: bool
    hami: bool
    nvidia: bool
    kata: bool
    kubevirt: bool


class Backends(t.TypedDict):
    """The back ends of a cluster.

    ``extender``, ``dra``, ``hami``, ``nvidia``, ``passthrough``, ``vgpu`` and ``kata`` name nodes, ``gpushare`` those
    that have it or are to have it, and so need its image. ``virtual`` are the nodes whose cards are all for virtual
    machines, ``driverless`` those of them on which the host needs no driver, and ``binding`` the nodes some or all of
    whose cards VFIO gets. ``parts`` are needed in the cluster; ``there`` are in it, and ``leaving`` are those of them
    that no node needs. ``dedicated`` is whether a scheduler of its own has the extender. ``claims`` is one of
    ``CLAIMS_ALL``, ``CLAIMS_ASKED`` and ``CLAIMS_NONE``. ``absent`` are nodes that are left out, since the cluster has
    none of them. ``allocators`` has each allocator's ``role``, the label and the ``namespace`` of its
    ``server``, and the ``restricted`` label of its nodes. ``templates`` is where the server of claim templates runs,
    and ``control_plane_image`` whether machines of the control plane get the servers' image. ``unrestricted`` are nodes
    that nobody named and that lose their server in this run: it was selected by a label that kubelet may set, and will
    be by the restricted one, which they haven't.
    ``workloads``: NVIDIA's GPU Operator runs parts for virtual machines, on nodes by the label of its that says so.
    ``openshift`` is OpenShift's version; empty for another cluster, or where it isn't known.
    """

    nodes: list[NodeBackend]
    absent: list[str]
    gpushare: list[str]
    extender: list[str]
    dra: list[str]
    hami: list[str]
    nvidia: list[str]
    passthrough: list[str]
    vgpu: list[str]
    kata: list[str]
    virtual: list[str]
    driverless: list[str]
    binding: list[str]
    parts: Parts
    there: Parts
    leaving: Parts
    dedicated: bool
    claims: str
    allocators: dict[str, JsonObject]
    templates: Place
    control_plane_image: bool
    unrestricted: list[str]
    workloads: bool
    openshift: str


NO_PARTS: Parts = {
    "extender": False,
    "dra": False,
    "hami": False,
    "nvidia": False,
    "kata": False,
    "kubevirt": False,
}


def observed(cluster: Cluster) -> dict[str, frozenset[str]]:
    """Return the allocators of each node's cards now; several where a change wasn't completed."""
    sliced = {row["node"] for row in cluster.slices or () if row["driver"] == claim_templates.DRIVER}
    shared = {pod.node for pod in cluster.sharing_pods or ()}
    by_node = {}
    for node in cluster.nodes:
        given = {EXTENDER: _is_announced(node) or node.name in shared, DRA: node.name in sliced}
        by_node[node.name] = frozenset(
            allocation
            for allocation, allocator in ALLOCATORS.items()
            if given.get(allocation) or allocator.labels(node.labels)
        )
    return by_node


def _is_announced(node: Node) -> bool:
    # kubelet reports the capacity of a removed plugin for five minutes, with nothing allocatable, and that of one that
    # is down, too: then its annotation is there.
    return node.allocatable.get(contract.RESOURCE_MEMORY, 0) > 0 or contract.NODE_CARDS in node.annotations


def no_claims(cluster: Cluster, capacity: bool | None, values: t.Mapping[str, t.Any]) -> tuple[str, JsonObject]:
    """Return why the cluster can't have claims, as code and fields; an empty code where it can.

    :param capacity: whether the API server keeps the capacity that a claim asks for; None if it isn't known.
    :param values: of the variables in ``POSSIBLE``.
    """
    version = cluster.version
    if release(version) < CLAIMS_SINCE:
        return VERSION, {"version": version, "since": ".".join(map(str, CLAIMS_SINCE))}
    if capacity is False:
        return GATE_OFF, {"gate": GATE, "version": version}
    for name, possible in POSSIBLE.items():
        if values.get(name, possible[0]) not in possible:
            return UNABLE, {"variable": name, "value": values[name]}
    return "", {}


def resolve(
    wanted: t.Sequence[Wanted],
    cluster: Cluster,
    capacity: bool | None = None,
    values: t.Mapping[str, t.Any] | None = None,
    switch: t.Collection[str] = (),
    there: Parts | None = None,
    dedicated: bool = False,
    alone: t.Collection[str] = (),
    selecting: t.Collection[str] = (),
    kubevirt: bool = False,
) -> Backends:
    """Decide each node's back end and allocation.

    A node keeps the allocation that it has, whatever its variable says, unless it is in ``switch``: a card that is
    given away by one mustn't be given away by the other.

    :param wanted: of every node whose cards are used.
    :param capacity: as for ``no_claims``, like ``values``.
    :param switch: nodes that are switched in this run.
    :param there: the parts that are in the cluster; None if they weren't looked for.
    :param dedicated: a scheduler of its own has the extender.
    :param alone: nodes that join in this run, beside which nothing changes: of the others, those that aren't in the
        cluster yet are left out. Empty where all nodes are set up.
    :param selecting: allocators whose server in the cluster selects its nodes without the restricted label.
    :param kubevirt: the cluster has KubeVirt.
    """
    now = observed(cluster)
    values = values or {}
    absent = [row["node"] for row in wanted if is_absent(row["node"], cluster, alone)]
    wanted = [row for row in wanted if row["node"] not in absent]
    by_default = _default(cluster, no_claims(cluster, capacity, values), now)
    nodes = [_of_node(row, now.get(row["node"], frozenset()), by_default, row["node"] in switch) for row in wanted]
    having = {value: [node["node"] for node in nodes if node["allocation"] == value] for value in ALLOCATORS}
    driverless = [*having[PASSTHROUGH], *having[KATA]]
    some = {row["node"] for row in wanted if row.get("cards")}
    # A node that is still to be switched to virtual machines keeps its cards until then.
    by_card = [
        node["node"]
        for node in nodes
        if node["node"] in some and not (is_virtual(node["allocation"]) or is_virtual(node["wanted"]))
    ]
    needed = {value: bool(names) for value, names in having.items() if value in NO_PARTS}
    needed["kubevirt"] = kubevirt and bool(having[PASSTHROUGH] or having[VGPU] or by_card)
    # The schedulers use the extender before the first node announces its cards to them.
    needed[EXTENDER] = needed[EXTENDER] or any(node["wanted"] == EXTENDER for node in nodes)
    there = there or NO_PARTS
    # Of nodes that nobody named: a part that serves them doesn't leave.
    named = {row["node"] for row in wanted}
    others = frozenset().union(*(given for name, given in now.items() if name not in named))
    own = [node for node in nodes if node["backend"] == GPUSHARE or node["wanted"] in ALLOCATIONS]
    imported = values.get(IMPORTED, ())
    tolerated = values.get(TOLERATIONS, EVERY_TAINT)
    sharing = [node["node"] for node in own]
    templates = server_place(values.get(TEMPLATES_NODES) or (), cluster.nodes, imported, sharing, tolerated)
    on_control_plane = bool(own) and not {*templates["nodes"]}.isdisjoint(imported or ())
    return {
        "nodes": nodes,
        "absent": absent,
        "gpushare": sharing,
        "extender": having[EXTENDER],
        "dra": having[DRA],
        "hami": having[HAMI],
        "nvidia": having[NVIDIA],
        "passthrough": having[PASSTHROUGH],
        "vgpu": having[VGPU],
        "kata": having[KATA],
        "virtual": [*having[PASSTHROUGH], *having[VGPU], *having[KATA]],
        "driverless": driverless,
        "binding": [*driverless, *by_card],
        "parts": t.cast(Parts, needed),
        "there": there,
        "dedicated": dedicated,
        "leaving": t.cast(
            Parts,
            {
                name: here and not needed[name] and name not in others
                for name, here in t.cast(JsonObject, there).items()
            },
        ),
        "claims": claims_of(having[EXTENDER], having[DRA]),
        "allocators": {
            name: {
                "role": allocator.role,
                "server": list(allocator.server),
                "namespace": str(values.get(allocator.namespace) or ""),
                "restricted": list(allocator.restricted),
            }
            for name, allocator in ALLOCATORS.items()
        },
        "templates": templates,
        "control_plane_image": needed[EXTENDER] or on_control_plane,
        "unrestricted": [
            node.name
            for node in cluster.nodes
            if node.name not in named and any(lacks_restricted(node.labels, allocator) for allocator in selecting)
        ],
        "workloads": any(operator["workloads"] for operator in cluster.operators),
        "openshift": "",
    }


def is_absent(node: str, cluster: Cluster, alone: t.Collection[str]) -> bool:
    """Return whether a node is left out where nodes join: it is none of them, and not in the cluster.

    :param alone: as for ``resolve``.
    """
    return bool(alone) and node not in alone and all(other.name != node for other in cluster.nodes)


def as_it_is(cluster: Cluster) -> Backends:
    """Return the back ends as the nodes have them now, whatever variables ask for.

    A cluster without any such node has the extender's parts, if it has parts.
    """
    wanted = []
    for name, allocations in observed(cluster).items():
        # In the order of the table: with several a change wasn't completed.
        first = next((allocator for allocator in ALLOCATORS if allocator in allocations), None)
        if first is not None:
            own = ALLOCATORS[first].backend == GPUSHARE
            backend = ALLOCATORS[first].backend
            wanted.append(Wanted(node=name, backend=backend, allocation=first if own else EXTENDER))
    resolved = resolve(wanted, cluster)
    parts = resolved["parts"]
    return {**resolved, "parts": {**parts, "extender": parts["extender"] or not any(parts.values())}}


def claims_of(extender: t.Collection[str], dra: t.Collection[str]) -> str:
    """Return which pods are turned into claims, where these nodes have either allocation."""
    if not dra:
        return CLAIMS_NONE
    return CLAIMS_ASKED if extender else CLAIMS_ALL


def _default(
    cluster: Cluster, unable: tuple[str, JsonObject], now: t.Mapping[str, frozenset[str]]
) -> tuple[str, str, JsonObject]:
    """Return what ``auto`` is on a node that has nothing yet: allocation, code and fields."""
    code, fields = unable
    if code:
        return EXTENDER, code, fields
    others = frozenset().union(*now.values()) & {EXTENDER, DRA}
    pods = len(cluster.sharing_pods or ())
    if pods:
        return EXTENDER, PODS, {"count": pods}
    if len(others) == 1:
        return (EXTENDER if EXTENDER in others else DRA), JOINED, {}
    return DRA, SERVED, {"version": cluster.version}


def _of_node(
    wanted: Wanted, now: frozenset[str], by_default: tuple[str, str, JsonObject], switched: bool
) -> NodeBackend:
    target = wanted["allocation"] if wanted["backend"] == GPUSHARE else wanted["backend"]

    def made(allocation: str, code: str, fields: JsonObject | None = None) -> NodeBackend:
        return {
            "node": wanted["node"],
            "backend": ALLOCATORS[allocation].backend,
            "allocation": allocation,
            "wanted": target,
            "present": sorted(now),
            "code": code,
            "fields": {"wanted": target} if fields is None else fields,
        }

    # With several another finding stops the run.
    [present] = now if len(now) == 1 else [""]
    if target == AUTO and ALLOCATORS.get(present, ALLOCATORS[HAMI]).backend == GPUSHARE:
        return made(present, PRESENT)
    if switched and (present or target != AUTO):
        return made(by_default[0] if target == AUTO else target, SWITCHED)
    if present and present != target:
        return made(present, PENDING)
    return made(by_default[0], by_default[1], by_default[2]) if target == AUTO else made(target, REQUESTED)


# Of the control plane's nodes: since kubeadm 1.20, and before that. No kubelet may set them on its own node.
CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
# Taints that these pods always tolerate: the control plane's own, and those of servers of k3s and RKE2. As in
# roles/gpushare/templates/server_parts.j2.
TOLERATED = (*CONTROL_PLANE_LABELS, "node-role.kubernetes.io/etcd", "CriticalAddonsOnly")
# The variable with further tolerations, and its default: every taint.
TOLERATIONS = "gpushare_tolerations"
EVERY_TAINT: tuple[JsonObject, ...] = ({"operator": "Exists"},)

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


def control_plane(nodes: t.Sequence[Node], imported: t.Collection[str] | None) -> list[str]:
    """Return the names of the control plane's nodes where the servers' pods can run; none unless they can on all.

    :param imported: nodes that get the servers' image from the playbooks; None where each node pulls it.
    """
    names = [node.name for node in nodes if is_control_plane(node) and not closing_taints(node)]
    return sorted(names) if imported is None or set(names) <= set(imported) else []


def is_control_plane(node: Node) -> bool:
    """Return whether a node has a label of the control plane."""
    return any(label in node.labels for label in CONTROL_PLANE_LABELS)


def closing_taints(node: Node) -> list[JsonObject]:
    """Return the taints of a node that the servers' pods don't tolerate wherever they run."""
    return tolerations.untolerated(tolerations.lasting(node.taints), tolerations.exist(TOLERATED))


def closed_control_plane(nodes: t.Iterable[Node]) -> dict[str, list[JsonObject]]:
    """Return the control plane's nodes that have such taints, with these."""
    return {node.name: closing_taints(node) for node in nodes if is_control_plane(node) and closing_taints(node)}


def server_place(
    named: t.Sequence[str],
    nodes: t.Sequence[Node],
    imported: t.Collection[str] | None,
    sharing: t.Collection[str] = (),
    tolerated: t.Sequence[JsonObject] = EVERY_TAINT,
) -> Place:
    """Return where a server runs that the playbooks deploy once for the cluster.

    :param named: the variable's nodes; empty to choose.
    :param imported: as for ``control_plane``.
    :param sharing: the nodes of gpushare.
    :param tolerated: the value of the variable ``TOLERATIONS``.
    """
    known = imported is not None
    if named:
        taints = _own_taints(nodes, named, tolerated)
        return {"place": NAMED, "nodes": list(named), "imported": known, "taints": taints}
    names = control_plane(nodes, imported)
    if names:
        return {"place": CONTROL_PLANE, "nodes": names, "imported": known, "taints": []}
    return {"place": GPU_NODES, "nodes": [], "imported": known, "taints": _own_taints(nodes, sharing, tolerated)}


def _own_taints(nodes: t.Iterable[Node], chosen: t.Collection[str], tolerated: t.Sequence[JsonObject]) -> list[str]:
    closed = [closing_taints(node) for node in nodes if node.name in chosen]
    few = [taints for taints in closed if len(taints) <= MOST_TAINTS]
    return sorted(
        {
            str(taint.get("key"))
            for taints in few
            for taint in taints
            if not tolerations.untolerated((taint,), tolerated)
        }
    )
