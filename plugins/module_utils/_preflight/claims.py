# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Preflight of ``gpushare_allocation``: what cards by claims need, and that no card is given away twice. Pure."""

from __future__ import annotations

import dataclasses
import typing as t

from .._allocation.cluster import ClusterNode, ClusterState
from .._contracts import claim_templates
from .._contracts import gpushare as contract
from .._scheduler.detect import CLAIMS_SINCE, OPENSHIFT_LABEL, release
from .findings import NOTE, PROBLEM, Finding

EXTENDER, DRA = "extender", "dra"
GATE = "DRAConsumableCapacity"
# NVIDIA's driver for dynamic resource allocation, which announces whole cards.
NVIDIA = "gpu.nvidia.com"
VARIABLE = "gpushare_allocation"
# Values that claims can do; what isn't here they can't do yet.
POSSIBLE: t.Mapping[str, tuple[t.Any, ...]] = {
    "gpushare_placement": ("binpack",),
    "gpushare_memory_limit_violation": ("report",),
    "gpushare_extender_image": ("",),
    "gpushare_device_plugin_image": ("",),
    "gpushare_extender_metrics": (False,),
    "scheduler_mode": ("auto",),
}
DESCRIBED = {
    "claims-unserved": f"The cluster can't divide a device by claims: before 1.36, or with the gate {GATE} off.",
    "claims-unable": "A variable asks for what gpushare_allocation: dra can't do.",
    "claims-preemption": "kube-scheduler evicts no pod for a claim.",
    "two-allocations": "The other value of gpushare_allocation announces a node's cards, or its pods hold them.",
}


@dataclasses.dataclass(frozen=True)
class Claims:
    """What is known of claims.

    :param allocation: the variable ``gpushare_allocation``.
    :param values: of the variables in ``POSSIBLE``.
    :param capacity: whether the API server keeps the capacity that a claim asks for; None if it wasn't asked.
    """

    allocation: str = EXTENDER
    values: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)
    capacity: bool | None = None


def examine(claims: Claims, cluster: ClusterState, shared: t.Collection[str]) -> t.Iterator[Finding]:
    """Return all findings.

    :param shared: nodes whose cards are to be shared.
    """
    by_claims = claims.allocation == DRA
    if by_claims:
        yield from _served(claims, cluster["version"])
        yield from _values(claims)
        yield from _openshift(cluster)
        yield Finding(
            "claims-preemption",
            NOTE,
            "{dra} evicts no pod for one of higher priority: kube-scheduler has no preemption for claims",
            "set it to {extender} where that is needed",
            variable=VARIABLE,
            fields={"dra": DRA, "extender": EXTENDER},
        )
    nodes = [node for node in cluster["nodes"] if node["name"] in shared]
    slices = cluster["slices"] or ()
    yield from _twice(claims, cluster, nodes)
    foreign = {one["node"] for one in slices if one["driver"] == NVIDIA}
    for node in nodes:
        if node["name"] in foreign:
            yield Finding(
                "foreign-plugin",
                PROBLEM,
                "node {node} has ResourceSlices of {driver}: NVIDIA's DRA driver gives away the same cards",
                "remove that driver from the node (its nodeAffinity, or resources.gpus.enabled=false)",
                node["name"],
                fields={"node": node["name"], "driver": NVIDIA},
            )


def _served(claims: Claims, version: str) -> t.Iterator[Finding]:
    fields = {"version": version, "gate": GATE, "since": ".".join(map(str, CLAIMS_SINCE)), "extender": EXTENDER}
    if release(version) < CLAIMS_SINCE:
        what = "the cluster runs Kubernetes {version}, and the feature gate {gate} is on from {since}"
        action = "upgrade the cluster, or set it to {extender}"
    elif claims.capacity is False:
        what = "the feature gate {gate} is off in kube-apiserver ({version}), which drops the memory from a claim"
        action = "switch it on in kube-apiserver, kube-scheduler, kube-controller-manager and kubelet"
    else:
        return
    yield Finding("claims-unserved", PROBLEM, what, action, variable=VARIABLE, fields=fields)


def _values(claims: Claims) -> t.Iterator[Finding]:
    for name, possible in POSSIBLE.items():
        value = claims.values.get(name, possible[0])
        if value not in possible:
            yield Finding(
                "claims-unable",
                PROBLEM,
                "{value} isn't possible with {variable}: {dra}",
                "leave it unset, or set {variable} to {extender}",
                variable=name,
                fields={"value": value, "variable": VARIABLE, "dra": DRA, "extender": EXTENDER},
            )


def _openshift(cluster: ClusterState) -> t.Iterator[Finding]:
    if any(OPENSHIFT_LABEL in node["labels"] for node in cluster["nodes"]):
        what = "{dra} isn't possible on OpenShift: its servers have no security context constraints there yet"
        fields = {"dra": DRA, "extender": EXTENDER}
        yield Finding("claims-unable", PROBLEM, what, "set it to {extender}", variable=VARIABLE, fields=fields)


def _twice(claims: Claims, cluster: ClusterState, nodes: t.Sequence[ClusterNode]) -> t.Iterator[Finding]:
    """Report nodes on which the other allocation is at work."""
    by_claims = claims.allocation == DRA
    names = {node["name"] for node in nodes}
    if by_claims:
        by = "the device plugin, as resource {what}"
        found = {node["name"] for node in nodes if _is_announced(node)}
        found |= {pod["node"] for pod in cluster["sharing_pods"] or ()} & names
    else:
        by = "the DRA driver {what}"
        found = {one["node"] for one in cluster["slices"] or () if one["driver"] == claim_templates.DRIVER} & names
    if not found:
        return
    fields = {
        "nodes": sorted(found),
        "value": claims.allocation,
        "what": contract.RESOURCE_MEMORY if by_claims else claim_templates.DRIVER,
        "other": EXTENDER if by_claims else DRA,
    }
    yield Finding(
        "two-allocations",
        PROBLEM,
        f"the cards of node {{nodes}} are given away by {by}, and {{value}} would give them away a second time",
        "drain the nodes and run playbooks/uninstall.yml -e gpushare_allocation={other} first",
        variable=VARIABLE,
        fields=fields,
    )


def _is_announced(node: ClusterNode) -> bool:
    # kubelet reports the capacity of a removed plugin for five minutes, with nothing allocatable, and that of one that
    # is down, too: then its annotation is there.
    allocatable = contract.quantity(node["allocatable"].get(contract.RESOURCE_MEMORY, 0))
    return allocatable > 0 or contract.NODE_CARDS in node["annotations"]
