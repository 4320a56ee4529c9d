# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove the capacity and annotations that a removed device plugin left on its nodes."""

from __future__ import annotations

import typing as t

from .._contracts import gpushare as contract
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._kube.api import Kube
from .._kube.refs import Ref

RESOURCES = (contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT)

# The last one is set by role gpushare.
ANNOTATIONS = (contract.NODE_CARDS, contract.NODE_LIMIT, contract.NODE_RUNTIME_CDI)


class Announcements:
    """Reconciler: these nodes announce no cards."""

    def __init__(self, kube: Kube, nodes: t.Sequence[str]) -> None:
        self._kube = kube
        self._refs = [Ref("v1", "Node", "", name) for name in nodes]

    def observe(self) -> list[tuple[Ref, JsonObject]]:
        found = [(ref, self._kube.get(ref)) for ref in self._refs]
        return [(ref, node) for ref, node in found if node]

    def plan(self, observed: list[tuple[Ref, JsonObject]]) -> Plan:
        changes = []
        for ref, node in observed:
            if stale := _stale_values(node):
                before = "".join(f"{place}: {value}\n" for place, value in stale.items())
                changes.append(Change(str(ref), before, "", ref))
        return Plan(tuple(changes))

    def apply(self, observed: list[tuple[Ref, JsonObject]], plan: Plan) -> None:
        for change in plan.changes:
            self._kube.patch(change.step, {"metadata": {"annotations": dict.fromkeys(ANNOTATIONS)}})
            status = dict.fromkeys(contract.STATUS_FIELDS, dict.fromkeys(RESOURCES))
            self._kube.patch(change.step, {"status": status}, "status")


def _stale_values(node: JsonObject) -> dict[str, str]:
    annotations = (node.get("metadata") or {}).get("annotations") or {}
    found = {f"annotation {key}": str(annotations[key]) for key in ANNOTATIONS if key in annotations}
    for name in RESOURCES:
        values = {field: contract.node_resource(node, name, field) for field in contract.STATUS_FIELDS}
        # What kubelet announces stays; see contract.left_behind.
        if name != contract.RESOURCE_MEMORY or values["allocatable"]:
            found.update({f"{field} {name}": str(value) for field, value in values.items() if value})
    return found


def remove_stale(kube: Kube, params: JsonObject, check: bool) -> JsonObject:
    """Remove stale announcements; see module backend_objects."""
    return {**run(Announcements(kube, params["nodes"]), check), "requests": dict(kube.requests)}
