# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Preflight of ``gpushare_allocation``: what cards by claims need, and that no card is given away twice. Pure."""

from __future__ import annotations

import dataclasses
import typing as t

from .._allocation import foreign
from .._allocation import node_backends as backends
from .._allocation.cluster import ClusterState
from .._allocation.node_backends import CLAIMS_SINCE, DRA, EXTENDER, GATE, POSSIBLE
from .findings import NOTE, PROBLEM, WARNING, Finding

# Variables of the extender and the device plugin alone: where a node has them, they mean those.
OF_EXTENDER = frozenset(
    (
        "gpushare_extender_image",
        "gpushare_device_plugin_image",
        "gpushare_extender_metrics",
        "scheduler_mode",
    )
)
VARIABLE = "gpushare_allocation"
SWITCH = "playbooks/switch.yml -e gpushare_allocation={wanted} --limit {hosts}"
DESCRIBED = {
    "allocation": "Who allocates the cards of the nodes with gpushare_allocation: auto, and why.",
    "claims-unserved": f"The cluster can't divide a device by claims: before 1.36, or with the gate {GATE} off.",
    "claims-unable": "A variable asks for what gpushare_allocation: dra can't do.",
    "claims-preemption": "kube-scheduler evicts no pod for a claim.",
    "switch-pending": "A node has another allocation than its variable asks for, and keeps it in this run.",
    "switch-unfinished": "A run of playbooks/switch.yml ended before its node was switched.",
    "two-backends": "gpushare gives away the cards of a node for which gpu_backend names another back end.",
    "two-allocations": "Extender and DRA driver both announce a node's cards, or pods hold them by both.",
}


@dataclasses.dataclass(frozen=True)
class Claims:
    """What was decided of the nodes, and what is known of claims.

    :param values: of the variables in ``POSSIBLE``.
    :param capacity: whether the API server keeps the capacity that a claim asks for; None if it wasn't asked.
    :param backends: as they were resolved; None without a cluster.
    :param switch: nodes that are switched in this run.
    """

    values: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)
    capacity: bool | None = None
    backends: backends.Backends | None = None
    switch: t.Collection[str] = ()

    def by_extender(self, node: str) -> bool:
        """Return whether a node's cards are the extender's."""
        return self.backends is None or node in self.backends["extender"]


def examine(claims: Claims, cluster: ClusterState, shared: frozenset[str]) -> t.Iterator[Finding]:
    """Return all findings.

    :param shared: nodes whose cards are to be shared.
    """
    nodes = claims.backends["nodes"] if claims.backends else []
    if any(DRA in (one["wanted"], one["allocation"]) for one in nodes):
        yield from _served(claims, cluster)
    if any(DRA in (one["wanted"], one["allocation"]) for one in nodes):
        yield Finding(
            "claims-preemption",
            NOTE,
            "{dra} evicts no pod for one of higher priority: kube-scheduler has no preemption for claims",
            "set it to {extender} where that is needed",
            variable=VARIABLE,
            fields={"dra": DRA, "extender": EXTENDER},
        )
    yield from _automatic(nodes)
    yield from _changes(claims, cluster, nodes)
    others = {one["node"] for one in cluster["slices"] or () if one["driver"] == foreign.DRIVER}
    for node in cluster["nodes"]:
        if node["name"] in shared & others:
            here = [one for one in foreign.on_node(cluster["plugins"], node["labels"]) if "dra" in one["name"]]
            yield Finding(
                "foreign-plugin",
                PROBLEM,
                "node {node} has ResourceSlices of {driver}: {plugin} gives away the same cards",
                foreign.way_out(here)
                if any(one["owner"] for one in here)
                else "remove that driver from the node (its nodeAffinity, or resources.gpus.enabled=false)",
                node["name"],
                fields={
                    "named_by": "gpu_nodes",
                    "node": node["name"],
                    "driver": foreign.DRIVER,
                    "plugin": foreign.told(here) or "NVIDIA's DRA driver",
                    "plugins": here,
                },
            )


def _served(claims: Claims, cluster: ClusterState) -> t.Iterator[Finding]:
    """Report everything that the cluster or a variable lacks for claims."""
    code, _fields = backends.no_claims(cluster, claims.capacity, {})
    fields = {
        "version": cluster["version"],
        "gate": GATE,
        "since": ".".join(map(str, CLAIMS_SINCE)),
        "extender": EXTENDER,
        "dra": DRA,
        "variable": VARIABLE,
    }
    texts = {
        backends.VERSION: (
            "claims-unserved",
            "the cluster runs Kubernetes {version}, and the feature gate {gate} is on from {since}",
            "upgrade the cluster, or set it to {extender}",
        ),
        backends.GATE_OFF: (
            "claims-unserved",
            "the feature gate {gate} is off in kube-apiserver ({version}), which drops the memory from a claim",
            "switch it on in kube-apiserver, kube-scheduler, kube-controller-manager and kubelet",
        ),
        backends.ON_OPENSHIFT: (
            "claims-unable",
            "{dra} isn't possible on OpenShift: its servers have no security context constraints there yet",
            "set it to {extender}",
        ),
    }
    if code:
        id, what, action = texts[code]
        yield Finding(id, PROBLEM, what, action, variable=VARIABLE, fields=fields)
    mixed = bool(claims.backends and claims.backends["parts"]["extender"])
    for name, possible in POSSIBLE.items():
        if mixed and name in OF_EXTENDER:
            continue
        value = claims.values.get(name, possible[0])
        if value not in possible:
            yield Finding(
                "claims-unable",
                PROBLEM,
                "{value} isn't possible with {variable}: {dra}",
                "leave it unset, or set {variable} to {extender}",
                variable=name,
                fields={**fields, "value": value},
            )


def _automatic(nodes: t.Iterable[backends.NodeBackend]) -> t.Iterator[Finding]:
    """Say what ``auto`` is, once for all nodes with one reason."""
    found: dict[tuple[str, str], list[backends.NodeBackend]] = {}
    for one in nodes:
        if one["wanted"] == backends.AUTO and one["code"] != backends.SWITCHED:
            found.setdefault((one["allocation"], one["code"]), []).append(one)
    for (allocation, code), members in found.items():
        fields = {
            **members[0]["fields"],
            "nodes": [one["node"] for one in members],
            "allocation": allocation,
            "code": code,
        }
        what = f"auto is {{allocation}} on {{nodes}}, because {backends.REASONS[code]}"
        yield Finding("allocation", NOTE, what, variable=VARIABLE, fields=fields)


def _changes(claims: Claims, cluster: ClusterState, nodes: t.Sequence[backends.NodeBackend]) -> t.Iterator[Finding]:
    """Report nodes between two allocations, and those whose variable asks for another than they have."""
    now = backends.observed(cluster)
    marks = {node["name"]: node["annotations"].get(backends.SWITCHING) for node in cluster["nodes"]}
    others = [one for one in nodes if one["node"] not in claims.switch]
    for one in others:
        fields = {"node": one["node"], "hosts": one["node"], "wanted": marks.get(one["node"]) or one["wanted"]}
        if marks.get(one["node"]):
            yield Finding(
                "switch-unfinished",
                PROBLEM,
                "node {node} is between two allocations: a run that was to take it over to {wanted} ended early",
                f"run the same command again: {SWITCH}",
                one["node"],
                fields=fields,
            )
        elif one["backend"] != backends.GPUSHARE and one["present"]:
            yield Finding(
                "two-backends",
                PROBLEM,
                "gpushare gives away the cards of node {node} ({present}), and {backend} would do so a second time",
                "set it to gpushare for the node, or take gpushare off the node first (roles/gpushare/README.md)",
                one["node"],
                variable="gpu_backend",
                fields={**fields, "present": one["present"], "backend": one["backend"]},
            )
        elif len(now.get(one["node"], ())) > 1:
            yield Finding(
                "two-allocations",
                PROBLEM,
                "the cards of node {node} are given away by the device plugin and by the DRA driver",
                f"{SWITCH} leaves one of them",
                one["node"],
                variable=VARIABLE,
                fields=fields,
            )
    # In a run of switch.yml the variable is that of the nodes that it switches.
    pending = (
        []
        if claims.switch
        else [one for one in others if one["code"] == backends.PENDING and not marks.get(one["node"])]
    )
    for wanted in dict.fromkeys(one["wanted"] for one in pending):
        names = [one["node"] for one in pending if one["wanted"] == wanted]
        yield Finding(
            "switch-pending",
            WARNING,
            "node{s} {nodes} {has} {present} now, and this run leaves it so: a card mustn't be given away twice",
            f"switch the nodes, one after another: {SWITCH}",
            variable=VARIABLE,
            fields={
                "nodes": names,
                "hosts": ",".join(names),
                "wanted": wanted,
                "present": EXTENDER if wanted == DRA else DRA,
                "s": "s" if len(names) > 1 else "",
                "has": "have" if len(names) > 1 else "has",
            },
        )
