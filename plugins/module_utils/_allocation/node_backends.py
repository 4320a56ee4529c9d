# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which back end has a node's cards and who allocates them: decided once, from variables and cluster. Pure."""

from __future__ import annotations

import re
import typing as t

from .._contracts import claim_templates
from .._contracts import gpushare as contract
from .._core.types import JsonObject
from .cluster import ClusterNode, ClusterState

# Values of gpu_backend, a node's variable.
GPUSHARE, HAMI, NVIDIA = "gpushare", "hami", "nvidia"
# The role of each.
ROLES: t.Mapping[str, str] = {GPUSHARE: "gpushare", HAMI: "hami", NVIDIA: "nvidia_device_plugin"}
BACKENDS = tuple(ROLES)
# Those whose role site.yml runs. The others are refused before any machine is connected.
DEPLOYED = (GPUSHARE,)
# Values of gpushare_allocation, a node's variable.
EXTENDER, DRA, AUTO = "extender", "dra", "auto"
ALLOCATIONS = (EXTENDER, DRA, AUTO)
# The value of the label gpushare on a node, by who allocates its cards: it has one value, so one DaemonSet selects it.
LABELS: t.Mapping[str, str] = {EXTENDER: contract.NODE_LABEL_VALUE, DRA: contract.NODE_LABEL_CLAIMS}
# On a node, while playbooks/switch.yml switches it: the new allocation.
SWITCHING = "kubegpu.share/switch"

# The first release whose kube-apiserver and kube-scheduler divide a device by claims, by the feature gate.
CLAIMS_SINCE = (1, 36)
GATE = "DRAConsumableCapacity"
OPENSHIFT_LABEL = "node.openshift.io/os_id"
# Values that claims can do, by variable; what isn't here they can't do yet.
POSSIBLE: t.Mapping[str, tuple[t.Any, ...]] = {
    "gpushare_extender_image": ("",),
    "gpushare_device_plugin_image": ("",),
    "gpushare_extender_metrics": (False,),
    "scheduler_mode": ("auto",),
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
ON_OPENSHIFT = "claims-openshift"
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
    ON_OPENSHIFT: "the DRA driver doesn't run on OpenShift yet",
    PODS: "{count} pods run under the extender",
}


class Wanted(t.TypedDict):
    """What the variables ask for on a node."""

    node: str
    backend: str
    allocation: str


class NodeBackend(t.TypedDict):
    """A node's back end.

    ``allocation`` is empty for another back end than gpushare; ``wanted`` is the variable's value, ``present`` what the
    node has now. ``code`` is a key of ``REASONS``, which ``fields`` complete.
    """

    node: str
    backend: str
    allocation: str
    wanted: str
    present: list[str]
    code: str
    fields: JsonObject


class Parts(t.TypedDict):
    """Whether the cluster has, or needs, parts of each allocation beside those of the nodes."""

    extender: bool
    dra: bool


class Backends(t.TypedDict):
    """The back ends of a cluster.

    ``extender``, ``dra``, ``hami`` and ``nvidia`` name nodes. ``parts`` are needed in the cluster; ``there`` are
    in it, and ``leaving`` are those of them that no node needs. ``dedicated`` is whether a scheduler of its own has the
    extender. ``claims`` is one of ``CLAIMS_ALL``, ``CLAIMS_ASKED`` and ``CLAIMS_NONE``.
    """

    nodes: list[NodeBackend]
    extender: list[str]
    dra: list[str]
    hami: list[str]
    nvidia: list[str]
    parts: Parts
    there: Parts
    leaving: Parts
    dedicated: bool
    claims: str


def release(version: str) -> tuple[int, int]:
    """Return major and minor number of a version; zeros for one that has none."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def observed(cluster: ClusterState) -> dict[str, frozenset[str]]:
    """Return who allocates cards of each node now; two values where a change wasn't completed."""
    sliced = {one["node"] for one in cluster["slices"] or () if one["driver"] == claim_templates.DRIVER}
    shared = {pod["node"] for pod in cluster["sharing_pods"] or ()}
    found = {}
    for node in cluster["nodes"]:
        by_extender = _is_announced(node) or node["name"] in shared
        label = node["labels"].get(contract.NODE_LABEL)
        found[node["name"]] = frozenset(
            allocation
            for allocation, there in ((EXTENDER, by_extender), (DRA, node["name"] in sliced))
            if there or label == LABELS[allocation]
        )
    return found


def _is_announced(node: ClusterNode) -> bool:
    # kubelet reports the capacity of a removed plugin for five minutes, with nothing allocatable, and that of one that
    # is down, too: then its annotation is there.
    allocatable = contract.quantity(node["allocatable"].get(contract.RESOURCE_MEMORY, 0))
    return allocatable > 0 or contract.NODE_CARDS in node["annotations"]


def no_claims(cluster: ClusterState, capacity: bool | None, values: t.Mapping[str, t.Any]) -> tuple[str, JsonObject]:
    """Return why the cluster can't have claims, as code and fields; an empty code where it can.

    :param capacity: whether the API server keeps the capacity that a claim asks for; None if it isn't known.
    :param values: of the variables in ``POSSIBLE``.
    """
    version = cluster["version"]
    if release(version) < CLAIMS_SINCE:
        return VERSION, {"version": version, "since": ".".join(map(str, CLAIMS_SINCE))}
    if capacity is False:
        return GATE_OFF, {"gate": GATE, "version": version}
    if any(OPENSHIFT_LABEL in node["labels"] for node in cluster["nodes"]):
        return ON_OPENSHIFT, {}
    for name, possible in POSSIBLE.items():
        if values.get(name, possible[0]) not in possible:
            return UNABLE, {"variable": name, "value": values[name]}
    return "", {}


def resolve(
    wanted: t.Sequence[Wanted],
    cluster: ClusterState,
    capacity: bool | None = None,
    values: t.Mapping[str, t.Any] | None = None,
    switch: t.Collection[str] = (),
    there: Parts | None = None,
    dedicated: bool = False,
) -> Backends:
    """Decide each node's back end and allocation.

    A node keeps the allocation that it has, whatever its variable says, unless it is in ``switch``: a card that is
    given away by one mustn't be given away by the other.

    :param wanted: of every node whose cards are used.
    :param capacity: as for ``no_claims``, like ``values``.
    :param switch: nodes that are switched in this run.
    :param there: the parts that are in the cluster; None if they weren't looked for.
    :param dedicated: a scheduler of its own has the extender.
    """
    now = observed(cluster)
    by_default = _default(cluster, no_claims(cluster, capacity, values or {}), now)
    nodes = [_of_node(one, now.get(one["node"], frozenset()), by_default, one["node"] in switch) for one in wanted]
    by_allocation = {value: [one["node"] for one in nodes if one["allocation"] == value] for value in (EXTENDER, DRA)}
    # The schedulers use the extender before the first node announces its cards to them.
    parts = Parts(
        extender=any(EXTENDER in (one["allocation"], one["wanted"]) for one in nodes), dra=bool(by_allocation[DRA])
    )
    there = there or Parts(extender=False, dra=False)
    return {
        "nodes": nodes,
        "extender": by_allocation[EXTENDER],
        "dra": by_allocation[DRA],
        "hami": [one["node"] for one in nodes if one["backend"] == HAMI],
        "nvidia": [one["node"] for one in nodes if one["backend"] == NVIDIA],
        "parts": parts,
        "there": there,
        "dedicated": dedicated,
        "leaving": Parts(
            extender=there["extender"] and not parts["extender"],
            dra=there["dra"] and not parts["dra"],
        ),
        "claims": claims_of(by_allocation[EXTENDER], by_allocation[DRA]),
    }


def as_it_is(cluster: ClusterState) -> Backends:
    """Return the back ends as the nodes have them now, whatever variables ask for.

    A cluster without any such node has the extender's parts, if it has parts.
    """
    wanted = [
        Wanted(node=name, backend=GPUSHARE, allocation=EXTENDER if EXTENDER in allocations else DRA)
        for name, allocations in observed(cluster).items()
        if allocations
    ]
    found = resolve(wanted, cluster)
    parts = found["parts"]
    return {**found, "parts": Parts(extender=parts["extender"] or not parts["dra"], dra=parts["dra"])}


def claims_of(extender: t.Collection[str], dra: t.Collection[str]) -> str:
    """Return which pods are turned into claims, where these nodes have either allocation."""
    if not dra:
        return CLAIMS_NONE
    return CLAIMS_ASKED if extender else CLAIMS_ALL


def _default(
    cluster: ClusterState, unable: tuple[str, JsonObject], now: t.Mapping[str, frozenset[str]]
) -> tuple[str, str, JsonObject]:
    """Return what ``auto`` is on a node that has nothing yet: allocation, code and fields."""
    code, fields = unable
    if code:
        return EXTENDER, code, fields
    others = frozenset().union(*now.values()) if now else frozenset()
    pods = len(cluster["sharing_pods"] or ())
    if pods:
        return EXTENDER, PODS, {"count": pods}
    if len(others) == 1:
        return (EXTENDER if EXTENDER in others else DRA), JOINED, {}
    return DRA, SERVED, {"version": cluster["version"]}


def _of_node(
    wanted: Wanted, now: frozenset[str], by_default: tuple[str, str, JsonObject], switched: bool
) -> NodeBackend:
    found: NodeBackend = {
        "node": wanted["node"],
        "backend": wanted["backend"],
        "allocation": "",
        "wanted": wanted["allocation"] if wanted["backend"] == GPUSHARE else "",
        "present": sorted(now),
        "code": REQUESTED,
        "fields": {"wanted": wanted["allocation"]},
    }
    if wanted["backend"] != GPUSHARE:
        return found
    if switched and wanted["allocation"] != AUTO:
        return {**found, "allocation": wanted["allocation"], "code": SWITCHED}
    # With two values another finding stops the run.
    present = sorted(now - {wanted["allocation"]}) if len(now) == 1 else []
    if present:
        return {**found, "allocation": present[0], "code": PRESENT if wanted["allocation"] == AUTO else PENDING}
    if wanted["allocation"] == AUTO:
        allocation, code, fields = by_default
        return {**found, "allocation": allocation, "code": code, "fields": fields}
    return {**found, "allocation": wanted["allocation"]}
