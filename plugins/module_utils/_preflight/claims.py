# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight of ``gpushare_allocation``: what cards by claims need, and that no card is given away twice. Pure."""

from __future__ import annotations

import dataclasses
import typing as t

from .._allocation import foreign
from .._allocation import node_backends as backends
from .._allocation.allocators import ALLOCATORS, CLAIMS_SINCE, DRA, EXTENDER
from .._allocation.cluster import Cluster
from .._allocation.node_backends import GATE, POSSIBLE
from .._allocation.node_software import Software
from .._contracts import hami
from .._contracts.backends import GPUSHARE, LABEL, NVIDIA, RESTRICTED
from .._contracts.gpushare import NODE_LABEL
from .._contracts.model import Node
from .._core.types import JsonObject
from .._kube import tolerations
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
BACKEND = "gpu_backend"
SWITCH = "kubegpu.share.switch {asked} {which}"
# What gives away the cards, where two do.
TITLES = {EXTENDER: "the device plugin", DRA: "the DRA driver"}
DESCRIBED = {
    "allocation": "Who allocates the cards of the nodes with gpushare_allocation: auto, and why.",
    "claims-unserved": f"The cluster can't divide a device by claims: before 1.36, or with the gate {GATE} off.",
    "claims-unable": "A variable asks for what gpushare_allocation: dra can't do.",
    "claims-preemption": "kube-scheduler evicts no pod for a claim.",
    "switch-pending": "A node has another back end or allocation than its variable asks for, and keeps it in this run.",
    "hami-takes-pods": "HAMi's webhook takes pods that are for nodes of another device plugin.",
    "hami-scheduler-name": "HAMi's webhook leaves pods alone that name no scheduler.",
    "others-release": "A release of helm that this collection didn't make has the name of the one to deploy.",
    "operator-configured": "The GPU Operator's device plugin is configured, and no chart is installed.",
    "operator-claims": "The GPU Operator allocates all cards by claims.",
    "switch-unfinished": "A run of playbooks/switch.yml ended before its node was switched.",
    "unnamed-node": "A node that nobody named would lose its server, which needs the restricted label from now on.",
    "templates-nodes": "gpushare_dra_templates_nodes names a node that can't run gpushare-dra-templates.",
    "templates-place": "gpushare-dra-templates runs on nodes that run pods of tenants, whose kubelets get its account.",
    "two-backends": "Two back ends, or extender and DRA driver, both give away a node's cards.",
}


@dataclasses.dataclass(frozen=True)
class Claims:
    """What was decided of the nodes, and what is known of claims.

    :param values: of the variables in ``POSSIBLE``.
    :param capacity: whether the API server keeps the capacity that a claim asks for; None if it wasn't asked.
    :param backends: as they were resolved; None without a cluster.
    :param switch: nodes that are switched in this run.
    :param releases: by back end, helm's releases of others that have the name of ours, as ``namespace/name``.
    :param software: who installs the nodes' driver and toolkit; None without a cluster.
    :param unreached: nodes that are no hosts of the inventory.
    """

    values: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)
    capacity: bool | None = None
    backends: backends.Backends | None = None
    switch: t.Collection[str] = ()
    releases: t.Mapping[str, t.Sequence[str]] = dataclasses.field(default_factory=dict)
    software: Software | None = None
    unreached: t.Collection[str] = ()

    def shares(self, node: str) -> bool:
        """Return whether a node has gpushare, or is to have it."""
        return self.backends is None or node in self.backends["gpushare"]

    def installed_by_roles(self, node: str) -> bool:
        """Return whether roles install a node's driver and toolkit."""
        return self.software is None or node in self.software["roles"]

    def moves(self, node: Node) -> bool:
        """Return whether this run switches a node, which it doesn't where it has the back end already."""
        rows = self.backends["nodes"] if self.backends and node.name in self.switch else []
        begun = backends.SWITCHING in node.annotations
        return any(row["node"] == node.name and (begun or row["present"] != [row["allocation"]]) for row in rows)

    def which(self, nodes: t.Sequence[str]) -> str:
        """Return the option by which playbooks/switch.yml switches nodes, all of which are hosts, or none."""
        return f"{'-e switch_nodes=' if nodes[0] in self.unreached else '--limit '}{','.join(nodes)}"

    def by_extender(self, node: str) -> bool:
        """Return whether a node's cards are the extender's."""
        return self.backends is None or node in self.backends["extender"]


def examine(claims: Claims, cluster: Cluster, shared: frozenset[str]) -> t.Iterator[Finding]:
    """Return all findings.

    :param shared: nodes whose cards are to be shared.
    """
    nodes = claims.backends["nodes"] if claims.backends else []
    if any(DRA in (row["wanted"], row["allocation"]) for row in nodes):
        yield from _served(claims, cluster)
    if any(DRA in (row["wanted"], row["allocation"]) for row in nodes):
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
    if claims.backends:
        yield from _unnamed(claims.backends)
        yield from _templates(claims, claims.backends, cluster)
        yield from _webhook(claims, claims.backends, cluster)
        yield from _operators(claims.backends, cluster)
        yield from _releases(claims, cluster)
    announced = {(announced_slice["node"], announced_slice["driver"]) for announced_slice in cluster.slices or ()}
    for node, driver in ((node, driver) for node in cluster.nodes for driver in foreign.DRIVERS):
        if node.name in shared and (node.name, driver) in announced:
            title, how = foreign.DRIVERS[driver]
            here = [plugin for plugin in foreign.on_node(cluster.plugins, node.labels) if "dra" in plugin["name"]]
            yield Finding(
                "foreign-plugin",
                PROBLEM,
                "node {node} has ResourceSlices of {driver}: {plugin} gives away the same cards",
                foreign.way_out(here)
                if any(plugin["owner"] for plugin in here)
                else f"remove that driver from the node ({how})",
                node.name,
                fields={
                    "named_by": "gpu_nodes",
                    "node": node.name,
                    "driver": driver,
                    "plugin": foreign.told(here) or title,
                    "plugins": here,
                },
            )


def _served(claims: Claims, cluster: Cluster) -> t.Iterator[Finding]:
    """Report everything that the cluster or a variable lacks for claims."""
    code, _fields = backends.no_claims(cluster, claims.capacity, {})
    fields = {
        "version": cluster.version,
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
    by_answer: dict[tuple[str, str], list[backends.NodeBackend]] = {}
    for row in nodes:
        if row["wanted"] == backends.AUTO and row["code"] != backends.SWITCHED:
            by_answer.setdefault((row["allocation"], row["code"]), []).append(row)
    for (allocation, code), members in by_answer.items():
        fields = {
            **members[0]["fields"],
            "nodes": [row["node"] for row in members],
            "allocation": allocation,
            "code": code,
        }
        what = f"auto is {{allocation}} on {{nodes}}, because {backends.REASONS[code]}"
        yield Finding("allocation", NOTE, what, variable=VARIABLE, fields=fields)


def _changes(claims: Claims, cluster: Cluster, nodes: t.Sequence[backends.NodeBackend]) -> t.Iterator[Finding]:
    """Report nodes between two allocations, and those whose variable asks for another than they have."""
    now = backends.observed(cluster)
    marks = {node.name: node.annotations.get(backends.SWITCHING) for node in cluster.nodes}
    others = [row for row in nodes if row["node"] not in claims.switch]
    for row in others:
        mark = marks.get(row["node"])
        which = claims.which([row["node"]])
        fields = {"node": row["node"], "which": which, "asked": _asked(mark or row["wanted"], row["present"])}
        if mark:
            yield Finding(
                "switch-unfinished",
                PROBLEM,
                "node {node} is between two back ends: a run that was to switch it to {wanted} ended early",
                f"run the same command again: {SWITCH}",
                row["node"],
                fields={**fields, "wanted": mark},
            )
        elif len(now.get(row["node"], ())) > 1:
            yield Finding(
                "two-backends",
                PROBLEM,
                "the cards of node {node} are given away by {both}",
                f"{SWITCH} leaves one of them",
                row["node"],
                variable=_variable(row),
                fields={**fields, "both": " and by ".join(_title(name) for name in row["present"])},
            )
    # In a run of switch.yml the variable is that of the nodes that it switches.
    pending = (
        []
        if claims.switch
        else [row for row in others if row["code"] == backends.PENDING and not marks.get(row["node"])]
    )

    def kind(row: backends.NodeBackend) -> tuple[str, str, bool]:
        return row["wanted"], row["allocation"], row["node"] in claims.unreached

    for wanted, present, unreached in dict.fromkeys(map(kind, pending)):
        alike = [row for row in pending if kind(row) == (wanted, present, unreached)]
        names = [row["node"] for row in alike]
        yield Finding(
            "switch-pending",
            WARNING,
            "node{s} {nodes} {has} {present} now, and this run leaves it so: a card mustn't be given away twice",
            f"switch the nodes, one after another: {SWITCH}",
            variable=_variable(alike[0]),
            fields={
                "nodes": names,
                "which": claims.which(names),
                "wanted": wanted,
                "asked": _asked(wanted, [present]),
                "present": present,
                "s": "s" if len(names) > 1 else "",
                "has": "have" if len(names) > 1 else "has",
            },
        )


def _unnamed(known: backends.Backends) -> t.Iterator[Finding]:
    """Report nodes whose server would leave them in this run: they have the label that kubelet may set, only."""
    names = known["unrestricted"]
    if names:
        yield Finding(
            "unnamed-node",
            PROBLEM,
            "{nodes} {has} the label {label} and {is_} named nowhere: from this run on the servers run on nodes with "
            "the label {restricted} only, which no kubelet can set, and would leave {nodes}",
            "name what is yours there or in group gpu_nodes, and take the label off others: "
            "kubectl label node NAME {label}-",
            variable="gpushare_nodes",
            fields={
                "nodes": names,
                "label": NODE_LABEL,
                "restricted": RESTRICTED,
                "has": "have" if len(names) > 1 else "has",
                "is_": "are" if len(names) > 1 else "is",
            },
        )


def _templates(claims: Claims, observed: backends.Backends, cluster: Cluster) -> t.Iterator[Finding]:
    """Report where the server of claim templates can't run, or runs beside pods of tenants."""
    where = observed["templates"]
    if not observed["parts"]["dra"] or backends.IMPORTED not in claims.values:
        return
    fields: JsonObject = {"server": "gpushare-dra-templates", "where": where["place"]}
    tolerated = claims.values.get(backends.TOLERATIONS, backends.EVERY_TAINT)
    named = [node for node in cluster.nodes if node.name in where["nodes"]]
    closed = {node.name: tolerations.untolerated(backends.closing_taints(node), tolerated) for node in named}
    known = {node.name for node in cluster.nodes}
    imported = {*(claims.values.get(backends.IMPORTED) or ()), *observed["gpushare"]}
    unknown = [name for name in where["nodes"] if name not in known]
    without = [name for name in where["nodes"] if where["imported"] and name not in imported]
    if unknown:
        what, do = "{nodes} isn't in the cluster", "use names of the cluster's nodes"
        fields["nodes"] = unknown
        yield Finding("templates-nodes", PROBLEM, what, do, variable=backends.TEMPLATES_NODES, fields=fields)
    elif without:
        what = "{nodes} gets no image of {server}: only hosts of the groups control_plane and gpu_nodes import it"
        do = "name such hosts, or put the servers' image into a registry"
        fields["nodes"] = without
        yield Finding("templates-nodes", PROBLEM, what, do, variable=backends.TEMPLATES_NODES, fields=fields)
    elif where["place"] == backends.NAMED and all(closed.values()):
        what = "{server} tolerates none of the taints of {nodes}"
        do = "add their tolerations to gpushare_tolerations, or name other nodes"
        fields["nodes"] = _tainted(closed)
        yield Finding("templates-nodes", PROBLEM, what, do, variable=backends.TEMPLATES_NODES, fields=fields)
    elif where["place"] == backends.GPU_NODES and backends.closed_control_plane(cluster.nodes):
        what = "{server} runs on the nodes with shared cards, since it doesn't tolerate the taints of {nodes}: who "
        what += "takes a node with shared cards gets its account, which lists all pods"
        do = "name nodes of the control plane there, whose taints it then tolerates"
        fields["nodes"] = _tainted(backends.closed_control_plane(cluster.nodes))
        yield Finding("templates-place", WARNING, what, do, variable=backends.TEMPLATES_NODES, fields=fields)
    elif where["place"] == backends.GPU_NODES:
        what = "{server} runs on the nodes with shared cards, since no control plane can run it: who takes one of them "
        what += "gets its account, which lists all pods"
        do = "name nodes without pods of tenants there, or, where the playbooks import its image, all nodes of the "
        do += "control plane in the group control_plane"
        yield Finding("templates-place", WARNING, what, do, variable=backends.TEMPLATES_NODES, fields=fields)


def _tainted(taints_by_node: t.Mapping[str, t.Sequence[JsonObject]]) -> list[str]:
    return [f"{name} ({', '.join(tolerations.shown(taints))})" for name, taints in taints_by_node.items()]


def _webhook(claims: Claims, known: backends.Backends, cluster: Cluster) -> t.Iterator[Finding]:
    """Say which pods HAMi's webhook takes where another device plugin announces the same resource."""
    resource = hami.RESOURCE_COUNT
    announcing = {node.name for node in cluster.nodes if resource in foreign.announced(node.allocatable)}
    others = sorted((announcing | set(known["nvidia"])) - set(known["hami"]))
    if not known["hami"] or not others:
        return
    variable = "hami_overwrite_default_scheduler"
    value = claims.values.get(variable)
    fields: JsonObject = {"others": others, "resource": resource, "value": value}
    fields.update(scheduler=hami.SCHEDULER, label=LABEL)
    if value == "always":
        yield Finding(
            "hami-takes-pods",
            WARNING,
            "with {value} HAMi's webhook takes all pods that request {resource}, also those for {others}",
            "set it to auto, or label those pods or their namespaces hami.io/webhook=ignore",
            variable=variable,
            fields=fields,
        )
    else:
        yield Finding(
            "hami-scheduler-name",
            NOTE,
            "HAMi's webhook leaves pods alone that name no scheduler: {others} have {resource} by another plugin; from "
            "Kubernetes 1.30 on those are refused that another scheduler could bind to HAMi's nodes",
            "set schedulerName: {scheduler} in pods for HAMi's nodes, and nodeSelector {label}: nvidia in others",
            variable=variable,
            fields=fields,
        )


def has_cluster_policy(operators: t.Iterable[foreign.Operator]) -> bool:
    """Return whether the GPU Operator was told something by a ClusterPolicy."""
    return any(operator["kind"] == "ClusterPolicy" for operator in operators)


def _operators(known: backends.Backends, cluster: Cluster) -> t.Iterator[Finding]:
    """Report what the GPU Operator does with the nodes of other back ends than gpushare."""
    # Beside a ClusterPolicy a GPUCluster has the nodes with this label, or none in the releases that refuse both.
    policy = has_cluster_policy(cluster.operators)
    by_claims = {node.name for node in cluster.nodes if not policy or node.labels.get(foreign.MODE) == "dra"}
    claimed = [name for name in (*known["nvidia"], *known["hami"]) if name in by_claims]
    for operator in cluster.operators:
        fields = {"operator": f"{operator['kind']} {operator['name']}", "nodes": known["nvidia"] or known["hami"]}
        if operator["kind"] == "ClusterPolicy" and known["nvidia"]:
            yield Finding(
                "operator-configured",
                NOTE,
                "the GPU Operator ({operator}) runs the device plugin on {nodes}: it gets these; no chart is installed",
                variable="nvidia_device_plugin_configurations",
                fields=fields,
            )
        elif operator["kind"] == "GPUCluster" and claimed:
            yield Finding(
                "operator-claims",
                PROBLEM,
                "{operator} lets the GPU Operator allocate the cards of {nodes} by claims",
                "label the nodes {mode}=device-plugin after their pods with cards have ended, or take them out and "
                "request the cards by ResourceClaims"
                if policy
                else "delete it and use a ClusterPolicy, or request the cards by ResourceClaims and take the nodes out",
                variable=BACKEND,
                fields={**fields, "nodes": claimed, "mode": foreign.MODE},
            )


def _releases(claims: Claims, cluster: Cluster) -> t.Iterator[Finding]:
    """Report charts of others that a run would change, or because of whose objects helm would fail."""
    # There the GPU Operator deploys NVIDIA's device plugin.
    operated = has_cluster_policy(cluster.operators)
    for backend, releases in claims.releases.items():
        if backend == NVIDIA and operated:
            continue
        variable, space = backends.RELEASES[backend]
        namespace, name = claims.values.get(space), claims.values.get(variable)
        fields = {
            "releases": list(releases),
            "namespace": namespace,
            "label": LABEL,
            "backend": backend,
        }
        if f"{namespace}/{name}" in releases:
            what = "helm's release {releases} is there, which this collection didn't make: its values would be replaced"
            do = (
                "remove it, set another name, or leave it to this collection: "
                "kubectl label namespace {namespace} {label}={backend}"
            )
        else:
            what = "helm's release {releases} has objects of the whole cluster, by the names of those to be deployed"
            do = "remove it, or set another name"
        yield Finding("others-release", PROBLEM, what, do, variable=variable, fields=fields)


def _variable(row: backends.NodeBackend) -> str:
    """Return the variable of which a node has another value."""
    own = {name for name, allocator in ALLOCATORS.items() if allocator.backend == GPUSHARE}
    return VARIABLE if {row["wanted"], *row["present"]} <= {*own, backends.AUTO} else BACKEND


def _asked(wanted: str, present: t.Iterable[str]) -> str:
    """Return the options by which playbooks/switch.yml switches a node.

    :param wanted: an allocator, or ``auto``.
    :param present: the node's allocators.
    """
    allocator = ALLOCATORS.get(wanted)
    if allocator and allocator.backend != GPUSHARE:
        return f"-e {BACKEND}={allocator.backend}"
    others = any(ALLOCATORS[name].backend != GPUSHARE for name in present)
    return (f"-e {BACKEND}={GPUSHARE} " if others else "") + f"-e {VARIABLE}={wanted}"


def _title(name: str) -> str:
    return TITLES.get(name, ALLOCATORS[name].title)
