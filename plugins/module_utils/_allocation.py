# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Who holds how much of which card: computed from nodes and pods of the API alone. No I/O.

The numbers of gpushare's nodes are those of ``kubectl inspect gpushare -d`` where its assumptions hold (equal cards,
all of them healthy); where they don't, each card has its own size.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._allocation_nodes import (
    Node,
    Part,
    card_unit,
    node_unit,
    read_node,
)
from ansible_collections.kubegpu.share.plugins.module_utils._allocation_pods import (
    GPUSHARE,
    HAMI,
    NVIDIA,
    Claim,
    PodReader,
)
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

__all__ = ["allocation", "assembled", "card_unit", "natural", "node_unit", "percent"]

BACKENDS = (GPUSHARE, HAMI, NVIDIA)
_DIGITS = re.compile(r"([0-9]+)")


def allocation(nodes: t.Iterable[t.Any], pods: t.Iterable[t.Any]) -> Json:
    """The allocation of a cluster, as plain data; nodes in natural order of their names."""
    read = PodReader()
    return assembled([one for node in nodes for one in read_node(node)], (one for pod in pods for one in read(pod)))


def assembled(nodes: t.Sequence[Node], claims: t.Iterable[Claim]) -> Json:
    """The same from nodes and pods that have been read."""
    by_name = {node.name: node for node in nodes}
    waiting = []
    for claim in claims:
        if claim.waits:
            waiting.append(_waiting(claim))
        node = by_name.get(claim.node)
        if node:
            _put(node, claim)
    shown = [_node(node) for node in sorted(nodes, key=lambda node: natural(node.name)) if node.parts or node.problems]
    totals = _totals(nodes)
    first = totals[0] if totals else {"unit": None, "total": 0, "used": 0}
    return {
        "unit": first["unit"],
        "nodes": shown,
        "waiting": sorted(waiting, key=_by_name),
        "total": first["total"],
        "used": first["used"],
        "totals": totals,
    }


def natural(text: str) -> list[str | int]:
    """A sort key in which gpu2 comes before gpu10."""
    # No name of Kubernetes is longer; and Python reads no longer numbers.
    parts: list[str | int] = list(_DIGITS.split(text[:300]))
    parts[1::2] = map(int, parts[1::2])
    return parts


def percent(used: int, total: int) -> int:
    """Truncated, as kubectl inspect does."""
    return used * 100 // total if total > 0 else 0


def _put(node: Node, claim: Claim) -> None:
    """Put what a pod holds on the cards that it is of."""
    backend = claim.backend
    if backend == NVIDIA and NVIDIA not in node.parts and HAMI in node.parts:
        # There, its resource is HAMi's.
        backend = HAMI
        claim.entry["problem"] = claim.entry["problem"] or "it has a GPU here that HAMi's scheduler didn't choose"
        claim = claim._replace(shares=((None, claim.shares[0][1]._replace(mib=0)),))
        claim.entry["state"] = "unassigned" if claim.entry["state"] == "assigned" else claim.entry["state"]
    if not backend:
        backend = next(iter(node.parts), "")
    part = node.parts.setdefault(backend, Part())
    several = len(claim.shares) > 1
    for key, held in claim.shares:
        entry = {**claim.entry} if several else claim.entry
        entry["units"] = held.mib
        part.used += held.mib
        card = part.keys.get(key)
        if card is None:
            part.pending.append(entry)
            continue
        card["pods"].append(entry)
        card["used"] += held.mib
        if backend == HAMI:
            entry["cores"], entry["slots"] = held.cores, held.slots
            card["cores_used"] += held.cores
            card["slots_used"] += held.slots
    resources = {one["name"]: one for one in part.more.get("resources", ())}
    for name, count in (claim.entry.get("resources") or {}).items():
        if name in resources:
            resources[name]["used"] += count


def _waiting(claim: Claim) -> Json:
    return {**claim.entry, "units": claim.units, "reason": claim.reason, "backend": claim.backend}


def _node(node: Node) -> Json:
    """A node as it is told; of several backends the first one is the node's own, the others are beside it."""
    order = sorted(node.parts, key=lambda name: BACKENDS.index(name) if name in BACKENDS else len(BACKENDS))
    backends = [node.parts[name].backend for name in order if node.parts[name].backend]
    parts = [_part(node.parts[name]) for name in order] or [_part(Part())]
    return {
        "name": node.name,
        "address": node.address,
        "backend": "mixed" if len(backends) > 1 else backends[0] if backends else "none",
        "backends": backends,
        "problem": "; ".join(node.problems),
        "memory_limit": node.memory_limit,
        **{key: value for key, value in parts[0].items() if key != "backend"},
        "also": parts[1:],
    }


def _part(part: Part) -> Json:
    for place in [*(card["pods"] for card in part.cards), part.pending]:
        if len(place) > 1:
            place.sort(key=_by_name)
    return {
        "backend": part.backend or "none",
        "unit": part.unit,
        "capacity": part.capacity,
        "allocatable": part.allocatable,
        "total": part.total,
        "used": part.used,
        "cards": part.cards,
        "pending": part.pending,
        **part.more,
    }


def _by_name(entry: Json) -> tuple[str, list[str | int]]:
    return entry["namespace"], natural(entry["name"])


def _totals(nodes: t.Sequence[Node]) -> list[Json]:
    """What each backend has and has given away in the cluster: their units can't be added."""
    found: list[Json] = []
    for backend in BACKENDS:
        parts = [node.parts[backend] for node in nodes if backend in node.parts]
        if parts:
            units = {part.unit for part in parts} - {None}
            found.append(
                {
                    "backend": backend,
                    "unit": units.pop() if len(units) == 1 else None,
                    "total": sum(part.total for part in parts),
                    "used": sum(part.used for part in parts),
                }
            )
    return found
