# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run of site.yml leaves: the nodes that share cards, what was changed, and the next command. Pure."""

from __future__ import annotations

import dataclasses
import typing as t

from ...module_utils._allocation.allocators import ALLOCATORS
from ...module_utils._contracts import backends
from ...module_utils._contracts.claims import Slice
from ...module_utils._contracts.gpushare import MIB_PER_UNIT
from ...module_utils._contracts.model import Node, node_unit
from ...module_utils._core.types import JsonObject
from .site import counted

NEXT = "ansible-playbook kubegpu.share.acceptance"
# Acceptance knows no claims yet.
NEXT_CLAIMS = "kubectl get resourceclaims --all-namespaces"


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
    nodes: t.Sequence[Node],
    plan: JsonObject | None,
    check: bool,
    slices: t.Iterable[Slice] | None = None,
) -> Summary:
    """Return the summary.

    :param plan: the plan with which the run began, as ``SitePlan.result`` returns it; None without one.
    :param check: the run was in check mode.
    :param slices: where the cards are allocated by claims; None where they aren't.
    """
    steps = None if plan is None else sum(len(host["steps"]) for host in [*plan["hosts"].values(), plan["cluster"]])
    sharing = [node.cards for node in nodes if node.cards]
    units = {node_unit(cards) for cards in sharing}
    announced = Summary(
        nodes=len(sharing),
        cards=sum(map(len, sharing)),
        units=sum(card.units for cards in sharing for card in cards),
        unit=(units.pop() or "") if len(units) == 1 else "",
        steps=steps,
        check=check,
        others=_others(nodes),
    )
    return announced if slices is None else _with_slices(announced, slices)


def _others(nodes: t.Iterable[Node]) -> dict[str, JsonObject]:
    """Return what nodes of other back ends than gpushare announce."""
    others: dict[str, JsonObject] = {}
    for node in nodes:
        name = node.labels.get(backends.LABEL, "")
        if name not in ALLOCATORS:
            continue
        summed = others.setdefault(name, {"nodes": 0, "resources": {}})
        summed["nodes"] += 1
        for resource, number in node.allocatable.items():
            if ALLOCATORS[name].announces(resource):
                summed["resources"][resource] = summed["resources"].get(resource, 0) + number
    return others


def _with_slices(announced: Summary, slices: t.Iterable[Slice]) -> Summary:
    """Return a summary with what the DRA driver announces, too."""
    # Only this collection's slices have devices.
    ours = [slice_ for slice_ in slices if slice_.devices]
    sizes = [device.memory_mib for slice_ in ours for device in slice_.devices]
    unit = "MiB" if announced.unit == "MiB" or any(mib % 1024 for mib in sizes) else "GiB"
    return dataclasses.replace(
        announced,
        nodes=announced.nodes + len({slice_.node for slice_ in ours}),
        cards=announced.cards + len(sizes),
        units=announced.units + sum(sizes) // MIB_PER_UNIT[unit],
        unit=unit if sizes else announced.unit,
        # Acceptance runs by the extender.
        next=NEXT_CLAIMS if sizes and not announced.nodes else announced.next,
    )
