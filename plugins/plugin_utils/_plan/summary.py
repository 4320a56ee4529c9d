# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run of site.yml leaves: the nodes that share cards, what was changed, and the next command. Pure."""

from __future__ import annotations

import dataclasses
import fnmatch
import typing as t

from ...module_utils._allocation.node_backends import ALLOCATORS, LABEL_BACKEND
from ...module_utils._contracts import claim_templates as claims
from ...module_utils._contracts import gpushare as contract
from ...module_utils._contracts.model import node_unit
from ...module_utils._core.types import JsonObject
from .site import counted

NEXT = "ansible-playbook kubegpu.share.acceptance"
# Acceptance knows no claims yet.
NEXT_CLAIMS = "kubectl get resourceclaims --all-namespaces"
GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Summary:
    """The cluster after a run.

    :param nodes: nodes that announce cards.
    :param units: the memory that they share, in ``unit``.
    :param unit: ``GiB`` or ``MiB``; empty where the nodes differ or none shares a card.
    :param steps: steps of the plan; None where no plan was made.
    :param check: nothing was changed.
    :param next: the command that follows.
    :param others: of each other allocator, the number of its nodes, and what they announce by resource.
    """

    nodes: int
    cards: int
    units: int
    unit: str
    steps: int | None
    check: bool
    next: str = NEXT
    others: t.Mapping[str, JsonObject] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        """Return the summary for people."""
        parts = []
        if self.nodes:
            shared = f"{self.units} {self.unit}" if self.unit else counted(self.units, "unit")
            parts.append(f"{counted(self.nodes, 'node')}, {counted(self.cards, 'card')}, {shared} shared")
        elif not self.others:
            parts.append("No node shares a card")
        for name, other in self.others.items():
            announced = ", ".join(f"{number} {resource}" for resource, number in other["resources"].items())
            nodes = counted(other["nodes"], "node")
            parts.append(f"{ALLOCATORS[name].title}: {nodes}, {announced or 'nothing announced'}")
        if self.steps is None:
            following = self.next
        elif not self.steps:
            parts.append("nothing changed")
            following = self.next
        elif self.check:
            parts.append(f"{counted(self.steps, 'step')} would be done")
            following = "the same command without --check"
        else:
            parts.append(f"{counted(self.steps, 'step')} done")
            following = self.next
        return "; ".join([*parts, f"next: {following}"])


def summary(
    nodes: t.Iterable[JsonObject],
    plan: JsonObject | None,
    check: bool,
    slices: t.Iterable[JsonObject] | None = None,
) -> Summary:
    """Return the summary.

    :param nodes: the API's Node objects.
    :param plan: the plan with which the run began, as ``SitePlan.result`` returns it; None without one.
    :param check: the run was in check mode.
    :param slices: the API's ResourceSlices, where the cards are allocated by claims; None where they aren't.
    """
    steps = None if plan is None else sum(len(host["steps"]) for host in [*plan["hosts"].values(), plan["cluster"]])
    nodes = list(nodes)
    sharing = [cards for cards in map(contract.node_cards, nodes) if cards]
    others = _others(nodes)
    units = {node_unit(cards) for cards in sharing}
    announced = Summary(
        nodes=len(sharing),
        cards=sum(map(len, sharing)),
        units=sum(card.units for cards in sharing for card in cards),
        unit=(units.pop() or "") if len(units) == 1 else "",
        steps=steps,
        check=check,
        others=others,
    )
    return announced if slices is None else _with_slices(announced, slices)


def _others(nodes: t.Iterable[JsonObject]) -> dict[str, JsonObject]:
    """Return what nodes of other back ends than gpushare announce."""
    others: dict[str, JsonObject] = {}
    for node in nodes:
        name = str((node["metadata"].get("labels") or {}).get(LABEL_BACKEND))
        if name not in ALLOCATORS:
            continue
        summed = others.setdefault(name, {"nodes": 0, "resources": {}})
        summed["nodes"] += 1
        for resource, text in ((node.get("status") or {}).get("allocatable") or {}).items():
            if any(fnmatch.fnmatchcase(resource, pattern) for pattern in ALLOCATORS[name].resources):
                summed["resources"][resource] = summed["resources"].get(resource, 0) + contract.quantity(text)
    return others


def _with_slices(announced: Summary, slices: t.Iterable[JsonObject]) -> Summary:
    """Return a summary with what the DRA driver announces, too."""
    ours = [slice_["spec"] for slice_ in slices if slice_["spec"].get("driver") == claims.DRIVER]
    devices = [device for spec in ours for device in spec.get("devices") or []]
    sizes = [contract.quantity(device["capacity"][claims.CAPACITY]["value"]) for device in devices]
    nodes = {spec.get("nodeName") for spec in ours if spec.get("devices")}
    unit = "MiB" if announced.unit == "MiB" or any(size % GIB for size in sizes) else "GiB"
    shared = sum(sizes) // (GIB // 1024 if unit == "MiB" else GIB)
    return dataclasses.replace(
        announced,
        nodes=announced.nodes + len(nodes),
        cards=announced.cards + len(devices),
        units=announced.units + shared,
        unit=unit if devices else announced.unit,
        # Acceptance runs by the extender.
        next=NEXT_CLAIMS if devices and not announced.nodes else announced.next,
    )
