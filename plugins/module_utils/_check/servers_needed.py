# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of this collection's servers a cluster needs: those of the extender, of claims, or of both. Pure."""

from __future__ import annotations

from .._core.types import JsonObject
from .._scheduler import constants
from .common import allocation_of, backend_of, has_label
from .model import DRA, EXTENDER, Node, Snapshot

COMPONENT = "app.kubernetes.io/component"
DRA_DRIVER, DRA_TEMPLATES = "dra-driver", "dra-templates"


def has_labels(pod: JsonObject, key: str, value: str) -> bool:
    """Return whether a pod has a label of this value."""
    return ((pod.get("metadata") or {}).get("labels") or {}).get(key) == value


def is_server(pod: JsonObject, component: str) -> bool:
    """Return whether a pod is one of this collection's servers."""
    return has_labels(pod, *constants.PART_OF) and has_labels(pod, COMPONENT, component)


def gpu_nodes(snapshot: Snapshot) -> list[Node]:
    """Return gpushare's nodes: those with its label, and observed GPU nodes that no other back end was given."""
    return [node for node in snapshot.nodes if has_label(node) or (node.observed and not backend_of(node))]


def allocations(snapshot: Snapshot) -> dict[str, str]:
    """Return who is to allocate the cards of each GPU node.

    A node that shows nothing of it is as the others, if they are all alike.
    """
    usual = _usual(snapshot)
    return {node.name: allocation_of(node) or usual for node in gpu_nodes(snapshot)}


def needed(snapshot: Snapshot) -> frozenset[str]:
    """Return the allocations whose servers the cluster needs; none where all nodes have other back ends."""
    found = frozenset(allocations(snapshot).values())
    if found or any(backend_of(node) for node in snapshot.nodes):
        return found
    return frozenset((_usual(snapshot),))


def _usual(snapshot: Snapshot) -> str:
    known = {allocation_of(node) for node in gpu_nodes(snapshot)} - {""}
    if not known and snapshot.servers is not None:
        known = {DRA for pod in snapshot.servers.pods if is_server(pod, DRA_TEMPLATES)}
    return DRA if known == {DRA} else EXTENDER
