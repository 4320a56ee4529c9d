# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight of the back ends that give cards to virtual machines: what their nodes need, and what contradicts. Pure."""

from __future__ import annotations

import dataclasses
import typing as t

from .._allocation.foreign import Operator
from .._allocation.node_backends import Backends
from .._contracts import operator_labels
from .._contracts.backends import KATA, PASSTHROUGH, VGPU, VIRTUAL
from .._node.types import GpuNode
from .findings import PROBLEM, Finding

DESCRIBED = {
    "virtual-no-login": "Cards of a node that is no host of gpu_nodes are to go to virtual machines.",
    "virtual-iommu": "A machine whose cards are to go to virtual machines has no IOMMU that can be turned on.",
    "virtual-functions": "A card that is to go whole to a virtual machine has virtual functions, or vGPUs.",
    "kata-runtime": "A node of Kata has another container runtime than containerd, which alone gives its pods cards.",
    "vgpu-framework": "NVIDIA's driver is loaded on a machine whose cards are to be divided, and it makes no vGPUs.",
    "virtual-operator": "NVIDIA's GPU Operator would bind or divide cards that roles give to virtual machines.",
    "virtual-driver": "Roles are to install a driver for containers where virtual machines have all cards.",
}
# What of the other findings about a machine matters where no role installs a driver for containers.
OF_MACHINES = frozenset(
    (
        *("distribution", "architecture", "no-gpu", "unknown-cards", "boot-full", "nova-built-in"),
        *("nouveau-in-initramfs", "nouveau-in-use"),
    )
)
SUBJECT = "host {host} "
RUNFILE = "runfile"


@dataclasses.dataclass(frozen=True)
class VirtualOptions:
    """What the variables of a host say about its cards and virtual machines.

    :param backend: gpu_backend; empty where it isn't set.
    :param driver_state: as it is set; empty where it isn't.
    :param driver_source: likewise.
    :param passthrough_state: likewise, and ``vgpu_state``.
    :param cards: passthrough_cards, as entries of ``card_exclusion``.
    """

    backend: str = ""
    driver_state: str = ""
    driver_source: str = ""
    passthrough_state: str = ""
    vgpu_state: str = ""
    cards: tuple[str, ...] = ()


def backend_of(node: str, options: VirtualOptions, known: Backends | None) -> str:
    """Return the back end for virtual machines that a node has in this run; empty for one of containers.

    :param known: the cluster's; None without a cluster, where the variable decides.
    """
    if known is None:
        return options.backend if options.backend in VIRTUAL else ""
    named = {PASSTHROUGH: known["passthrough"], VGPU: known["vgpu"], KATA: known["kata"]}
    return next((backend for backend, nodes in named.items() if node in nodes), "")


def unreached(known: Backends, machines: t.Collection[str]) -> t.Iterator[Finding]:
    """Report nodes that only a role on their machine can set up, and that are no hosts.

    :param machines: the nodes that are hosts of gpu_nodes.
    """
    for node in known["virtual"]:
        if node not in machines:
            yield Finding(
                "virtual-no-login",
                PROBLEM,
                "node {node} is to give its cards to virtual machines, and is no host of the group gpu_nodes, to which "
                "the roles log in",
                "add the host to the group",
                node,
                "gpu_backend",
                {"node": node},
            )


def _divides(card: t.Mapping[str, t.Any]) -> bool:
    """Return whether a card's driver makes vGPUs of it, now or after its virtual functions are enabled."""
    return bool(card["vgpu_host"]["framework"] != "none" or card["virtual_functions"]["total"] > 0)


def kata_runtime(node: str, runtime: str) -> t.Iterator[Finding]:
    """Report a node of Kata whose container runtime gives Kata's pods no cards.

    :param runtime: its name, as the node has it in its status.
    """
    if runtime != "containerd":
        yield Finding(
            "kata-runtime",
            PROBLEM,
            "node {node} has {runtime}, and pods of Kata get cards by containerd only",
            "leave the node out, or set up containerd there",
            node,
            "gpu_backend",
            {"node": node, "runtime": runtime or "an unknown container runtime"},
        )


# By back end: the label's value by which the GPU Operator runs its parts on such a node, and who gives the cards there.
_WORKLOADS = {
    PASSTHROUGH: (operator_labels.WHOLE, "passthrough_state"),
    KATA: (operator_labels.WHOLE, "passthrough_state"),
    VGPU: (operator_labels.DIVIDED, "vgpu_state"),
}


def operator_parts(
    host: str, backend: str, options: VirtualOptions, operators: t.Sequence[Operator]
) -> t.Iterator[Finding]:
    """Report parts of the GPU Operator that would take a node's cards besides the roles.

    :param backend: as ``backend_of`` returns it.
    """
    workload, variable = _WORKLOADS[backend]
    if getattr(options, variable) == "external":
        return
    for operator in operators:
        parts = operator["takes"].get(workload)
        if parts:
            yield Finding(
                "virtual-operator",
                PROBLEM,
                "gives its cards to virtual machines ({backend}) by a role, and {policy} has sandboxWorkloads.enabled, "
                "so that its {parts} would take the same cards",
                "set it to external to leave them to the operator, or turn these parts off there (enabled: false)",
                host,
                variable,
                {"backend": backend, "policy": f"{operator['kind']} {operator['name']}", "parts": parts},
                SUBJECT,
            )


def examine(host: str, backend: str, options: VirtualOptions, facts: GpuNode) -> t.Iterator[Finding]:
    """Return the findings about a machine whose cards are for virtual machines.

    :param backend: as ``backend_of`` returns it.
    """

    def found(id: str, what: str, action: str, variable: str, severity: str = PROBLEM, **fields: t.Any) -> Finding:
        return Finding(id, severity, what, action, host, variable, {"backend": backend, **fields}, SUBJECT)

    seen = facts["passthrough"]
    divided = [row["address"] for row in seen["functions"] if row["virtual"] or row["mdevs"]] if seen else []
    if backend != VGPU and divided:
        yield found(
            "virtual-functions",
            "is to give whole cards to virtual machines ({backend}), and {cards} have virtual functions or vGPUs",
            "remove them (vgpu_state: absent by role vgpu, or sriov_numvfs), or set it to vgpu",
            "gpu_backend",
            cards=divided,
        )
    cards = [card for card in facts["gpus"] if "vgpu_host" in card]
    if backend == VGPU and facts["driver"]["module_version"] and cards and not any(map(_divides, cards)):
        yield found(
            "vgpu-framework",
            "divides its cards into vGPUs, and its driver ({version}) shows no way to make one",
            "install NVIDIA's vGPU manager, which isn't the driver for containers; where it is there, turn on SR-IOV "
            "in the firmware",
            "gpu_backend",
            version=facts["driver"]["module_version"],
        )
    if facts["iommu"]["groups"] == 0 and not facts["iommu"]["table"]:
        yield found(
            "virtual-iommu",
            "has no IOMMU, without which no virtual machine gets a card, and its firmware announces none",
            "turn on VT-d or AMD-Vi in the firmware's setup; a virtual machine needs a virtual IOMMU",
            "",
        )
    if backend != VGPU and options.driver_state == "present":
        yield found(
            "virtual-driver",
            "gives all its cards to virtual machines (gpu_backend: {backend}), and is to have a driver for containers",
            "leave it unset there, or set it to external or absent",
            "driver_state",
        )
    if backend == VGPU and options.driver_state in ("", "present") and options.driver_source != RUNFILE:
        yield found(
            "virtual-driver",
            "divides its cards into vGPUs, which the driver of repositories can't: that is NVIDIA's vGPU manager",
            "set it to runfile, with the manager's file in driver_runfile, or set driver_state to external where the "
            "manager is installed already",
            "driver_source",
        )
