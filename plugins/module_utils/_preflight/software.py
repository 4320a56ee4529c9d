# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight of ``gpu_node_software``: who installs driver and toolkit, and that no node gets them twice. Pure."""

from __future__ import annotations

import typing as t

from .._allocation import node_software
from .._allocation.cluster import Cluster
from .._allocation.node_software import GPU_OPERATOR, MACHINE, PROVIDER, REASONS, ROLES, NodeSoftware, Software
from .._contracts.backends import OPERANDS
from .._driver import nvidia_smi
from .._node.types import GpuNode
from .claims import has_cluster_policy
from .findings import NOTE, PROBLEM, Finding

VARIABLE = node_software.VARIABLE
DESCRIBED = {
    "node-software": "Who installs driver and container toolkit of the nodes with gpu_node_software: auto, and why.",
    "software-owned": "The GPU Operator has driver and toolkit of a node, which roles are to install.",
    "software-no-login": "Roles are to install driver and toolkit of a node that is no host of gpu_nodes.",
    "software-host-driver": "The GPU Operator is to install a driver on a machine that has one of its own.",
    "software-kept-away": "The GPU Operator is to install the software of a node that it leaves alone.",
    "software-leaving": "A node leaves this collection's GPU Operator, whose driver may stay loaded until a reboot.",
    "gpu-operator-unused": "This collection has installed the GPU Operator, and no node's software is its any more.",
    "gpu-operator-missing": "The GPU Operator is to install nodes' software, isn't there, and this run installs none.",
}
TITLES = {ROLES: "the roles have", GPU_OPERATOR: "NVIDIA's GPU Operator has", PROVIDER: "the node's provider has"}
# What to do about what ``auto`` has decided, by its reason; else the operator is offered.
ACTIONS: t.Mapping[str, str] = {
    node_software.OPERATED: "",
    node_software.REFUSED: "give the user of gpu_kubeconfig the verbs get and list on {who}, or set it to who has to",
}
# Why a finding about what roles install doesn't matter where they install nothing: of these the machine itself is at
# fault, or its cards.
OF_MACHINES = frozenset(
    (
        *("no-gpu", "no-own-memory", "architecture", "card-lost", "link-degraded", "unknown-cards"),
        *("device-list", "small-card", "mandatory-access", "selinux-type", "vgpu-licence", "fabric-state"),
    )
)


def examine(
    software: Software, cluster: Cluster, facts: t.Mapping[str, GpuNode], external: bool, host_driver: bool
) -> t.Iterator[Finding]:
    """Return all findings.

    :param facts: of machines, by the node's name, where they were collected.
    :param external: this run installs no operator (``gpu_operator_state``).
    :param host_driver: the operator uses the machines' own drivers (``gpu_operator_driver``).
    """
    nodes = {node.name: node for node in cluster.nodes}
    for row in software["nodes"]:
        node = nodes.get(row["node"])
        policy = node_software.owner(node, cluster.operators)
        if row["software"] == ROLES:
            yield from _roles(row, policy)
        elif row["software"] == GPU_OPERATOR:
            yield from _operator(row, facts.get(row["node"]), host_driver)
            if node is not None and node.labels.get(OPERANDS) == "false" and not software["ours"]:
                yield _found(
                    "software-kept-away",
                    row,
                    "the operator runs nothing there (label {label}=false)",
                    "remove the label, or set it to {roles} or {provider}",
                    label=OPERANDS,
                    roles=ROLES,
                    provider=PROVIDER,
                )
    there = software["ours"] or has_cluster_policy(cluster.operators)
    if software["gpu_operator"] and external and not there:
        yield Finding(
            "gpu-operator-missing",
            PROBLEM,
            "the cluster has no ClusterPolicy, by which the GPU Operator would install driver and toolkit of {nodes}",
            "install the operator, or set it to present",
            variable="gpu_operator_state",
            fields={"nodes": software["gpu_operator"]},
        )
    yield from _left(software)
    yield from _automatic(software["nodes"])


def _found(id: str, row: NodeSoftware, what: str, action: str, **fields: t.Any) -> Finding:
    return Finding(id, PROBLEM, what, action, row["node"], VARIABLE, {"node": row["node"], **fields}, "node {node}: ")


def _roles(row: NodeSoftware, policy: str) -> t.Iterator[Finding]:
    if policy:
        yield _found(
            "software-owned",
            row,
            "it is {roles}, and NVIDIA's GPU Operator has driver and toolkit of the node (ClusterPolicy {policy}): "
            "both would change its driver",
            "leave it at auto, or label the node {label}=false and reboot it",
            roles=ROLES,
            policy=policy,
            label=OPERANDS,
        )
    if not row["machine"]:
        yield _found(
            "software-no-login",
            row,
            "it is {roles}, and the node is no host of the group gpu_nodes, to which they would log in",
            "add the host to the group, or set it to {operator} or {provider}",
            roles=ROLES,
            operator=GPU_OPERATOR,
            provider=PROVIDER,
        )


def _operator(row: NodeSoftware, facts: GpuNode | None, host_driver: bool) -> t.Iterator[Finding]:
    version = (facts["driver"]["module_version"] or facts["driver"]["version"] or "") if facts else ""
    provider = nvidia_smi.of(facts["driver"]["others"]) if facts else None
    by_container = provider is not None and provider.root == nvidia_smi.OPERATOR_ROOT
    if version and not by_container and not host_driver:
        yield _found(
            "software-host-driver",
            row,
            "it is {operator}, and the machine has a driver of its own ({version}), over which the operator's "
            "container installs none",
            "leave it at auto, remove that driver (kubegpu.share.uninstall --limit {node}), or set gpu_operator_driver "
            "to host, with which the operator uses it",
            operator=GPU_OPERATOR,
            version=version,
        )


def _left(software: Software) -> t.Iterator[Finding]:
    """Report nodes that leave this collection's operator, and an operator that no node needs any more."""
    fields = {"nodes": software["leaving"], "label": OPERANDS}
    if software["leaving"] and software["installs"] and software["ours"]:
        yield Finding(
            "software-leaving",
            NOTE,
            "the GPU Operator has {nodes} until this run, which labels them {label}=false: its pods leave, with its "
            "driver where nothing uses that",
            "reboot them when no pod there has a card",
            variable=VARIABLE,
            fields=fields,
        )
    if software["unused"]:
        more = " -e gpu_operator_openshift=true" if software["openshift"] else ""
        yield Finding(
            "gpu-operator-unused",
            NOTE,
            "this collection has installed NVIDIA's GPU Operator, no node's software is its any more, and it stays",
            "remove it with: ansible localhost -i INVENTORY -m ansible.builtin.include_role -a "
            "name=kubegpu.share.gpu_operator -e gpu_operator_step=remove" + more,
            variable=VARIABLE,
            fields=fields,
        )


def _automatic(nodes: t.Iterable[NodeSoftware]) -> t.Iterator[Finding]:
    """Report what ``auto`` has decided, where it isn't what machines always have."""
    decided: dict[tuple[str, str, str], list[NodeSoftware]] = {}
    for row in nodes:
        if row["wanted"] == node_software.AUTO and row["code"] != MACHINE:
            who = str(row["fields"].get("who", ""))
            decided.setdefault((row["software"], row["code"], who), []).append(row)
    for (software, code, who), rows in decided.items():
        names = [row["node"] for row in rows]
        yield Finding(
            "node-software",
            NOTE,
            "{title} to install driver and toolkit of {nodes}: " + REASONS[code],
            ACTIONS.get(code, "set it to {operator} where the operator is to be installed for them"),
            variable=VARIABLE,
            fields={
                "title": TITLES[software],
                "nodes": [*names[:10], "…"] if len(names) > 10 else names,
                "who": who,
                "operator": GPU_OPERATOR,
            },
        )
