# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Take from nodes what a device plugin that is gone has told of them: nobody else does."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan, run

RESOURCES = (contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT)
FIELDS = ("capacity", "allocatable")

# What role gpushare tells the plugin of a node goes too.
ANNOTATIONS = (contract.NODE_CARDS, contract.NODE_LIMIT, contract.NODE_RUNTIME_CDI)

ARGUMENTS: Json = {"nodes": {"type": "list", "elements": "str", "required": True}}


class Announcements:
    """The concern: these nodes tell of no cards."""

    def __init__(self, kube: Kube, nodes: t.Sequence[str]) -> None:
        self._kube = kube
        self._refs = [Ref("v1", "Node", "", name) for name in nodes]

    def observe(self) -> list[tuple[Ref, Json]]:
        found = [(ref, self._kube.get(ref)) for ref in self._refs]
        return [(ref, node) for ref, node in found if node is not None]

    def plan(self, seen: list[tuple[Ref, Json]]) -> Plan:
        changes = []
        for ref, node in seen:
            told = _told(node)
            if told:
                before = "".join(f"{where}: {value}\n" for where, value in told.items())
                changes.append(Change(str(ref), before, "", ref))
        return Plan(tuple(changes))

    def apply(self, seen: list[tuple[Ref, Json]], plan: Plan) -> None:
        for change in plan.changes:
            nothing = dict.fromkeys(RESOURCES)
            self._kube.patch(change.step, {"metadata": {"annotations": dict.fromkeys(ANNOTATIONS)}})
            self._kube.patch(change.step, {"status": {field: dict(nothing) for field in FIELDS}}, "status")


def _told(node: Json) -> dict[str, str]:
    annotations = (node.get("metadata") or {}).get("annotations") or {}
    told = {f"annotation {key}": str(annotations[key]) for key in ANNOTATIONS if key in annotations}
    status = node.get("status") or {}
    for name in RESOURCES:
        values = {field: str((status.get(field) or {}).get(name, "0")) for field in FIELDS}
        # kubelet itself goes on showing a resource whose plugin is gone, with nothing of it to be had: its size for
        # five minutes, then 0 until it is restarted. Taken away, it would come back.
        kubelets = name == contract.RESOURCE_MEMORY and values["allocatable"] == "0"
        if not kubelets:
            told.update({f"{field} {name}": value for field, value in values.items() if value != "0"})
    return told


def forget(kube: Kube, params: Json, check: bool) -> Json:
    """The module's whole work."""
    return {**run(Announcements(kube, params["nodes"]), check), "requests": dict(kube.requests)}
