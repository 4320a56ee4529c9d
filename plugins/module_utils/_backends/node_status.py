# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove what a removed device plugin left on its nodes; module ``backend_objects``."""

from __future__ import annotations

import fnmatch
import typing as t

from .._contracts import gpushare as contract
from .._contracts.gpushare import STATUS_FIELDS, left_behind, node_resource
from .._core.errors import NotInEffect
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.refs import Ref

PAUSE = 5.0


class Resources:
    """Reconciler: these nodes have none of the resources, but those that kubelet still announces.

    :param patterns: names of resources, as a shell matches them.
    """

    def __init__(self, kube: Kube, nodes: t.Sequence[str], patterns: t.Sequence[str]) -> None:
        self._kube = kube
        self._refs = [Ref("v1", "Node", "", name) for name in nodes]
        self._patterns = patterns

    def observe(self) -> dict[Ref, JsonObject]:
        """Return the nodes that exist."""
        found = ((ref, self._kube.get(ref)) for ref in self._refs)
        return {ref: node for ref, node in found if node is not None}

    def _names(self, node: JsonObject) -> list[str]:
        status = node.get("status") or {}
        names = {name for field in STATUS_FIELDS for name in status.get(field) or {}}
        return [name for name in sorted(names) if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)]

    def plan(self, state: dict[Ref, JsonObject]) -> Plan:
        changes = []
        for ref, node in state.items():
            if gone := list(left_behind(node, self._names(node))):
                changes.append(Change(f"{ref} status", "".join(f"{name}: 0\n" for name in gone), "", (ref, gone)))
        return Plan(tuple(changes))

    def apply(self, state: dict[Ref, JsonObject], plan: Plan) -> None:
        for change in plan.changes:
            ref, gone = change.step
            self._kube.patch(ref, {"status": {field: dict.fromkeys(gone) for field in STATUS_FIELDS}}, "status")

    def announced(self, field: str) -> dict[str, dict[str, int]]:
        """Return the nodes that still have the resources in a field, with the numbers."""
        counts = {}
        for ref, node in self.observe().items():
            numbers = {name: node_resource(node, name, field) for name in self._names(node)}
            counts[ref.name] = {name: number for name, number in numbers.items() if number}
        return {name: resources for name, resources in counts.items() if resources}


def remove(kube: Kube, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module.

    :param kube: the cluster.
    :param params: the module's options.
    :param check: predict the changes without applying them or waiting.
    :param waiting: the clock, for tests.
    :raises NotInEffect: a device plugin still announces a resource; its details have the nodes.
    """
    reconciler = Resources(kube, params["nodes"], params["resources"])
    clock = waiting or Waiting(0, PAUSE)
    if not check:
        left = _wait(reconciler, "allocatable", params["plugin_timeout"], clock)
        if left:
            raise NotInEffect(
                f"{_text(left)} after {params['plugin_timeout']} s, so a device plugin still runs there: find its pod "
                "on the node and who runs it, and run again",
                announced=left,
            )
        _wait(reconciler, "capacity", params["kubelet_timeout"], clock)
    result = run(reconciler, check)
    return {**result, "left": reconciler.announced("capacity"), "requests": dict(kube.requests)}


def _wait(reconciler: Resources, field: str, timeout: float, clock: Waiting) -> dict[str, dict[str, int]]:
    """Wait until no node has the resources in a field, and return what is left at the end of the time."""
    end = clock.now() + timeout
    while True:
        left = reconciler.announced(field)
        if not left or clock.now() >= end:
            return left
        clock.sleep(clock.pause)


def _text(left: t.Mapping[str, t.Mapping[str, int]]) -> str:
    return "; ".join(
        f"node {node} announces {', '.join(f'{name} {number}' for name, number in resources.items())}"
        for node, resources in left.items()
    )


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
    stale = {f"annotation {key}": str(annotations[key]) for key in ANNOTATIONS if key in annotations}
    for name in RESOURCES:
        values = {field: contract.node_resource(node, name, field) for field in contract.STATUS_FIELDS}
        # What kubelet announces stays; see contract.left_behind.
        if name != contract.RESOURCE_MEMORY or values["allocatable"]:
            stale.update({f"{field} {name}": str(value) for field, value in values.items() if value})
    return stale


def remove_stale(kube: Kube, params: JsonObject, check: bool) -> JsonObject:
    """Remove what gpushare's device plugin left on nodes, whose server has gone without removing it."""
    return {**run(Announcements(kube, params["nodes"]), check), "requests": dict(kube.requests)}
