# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compute which pod holds how much of which card, from the nodes and pods of the API only. No I/O.

The numbers of gpushare's nodes are those of ``kubectl inspect gpushare -d`` for equal, healthy cards; otherwise each
card has its own size.
"""

from __future__ import annotations

import typing as t

from .._core.natural import natural
from . import virtual
from .claims import Read, add_cards, resolve
from .machines import Machine
from .nodes import NodeShares, Part
from .pods import (
    DRA,
    GPUSHARE,
    HAMI,
    NVIDIA,
    VIRTUAL,
    Allocation,
    BackendEntry,
    BackendTotals,
    Claim,
    NodeEntry,
    PodEntry,
)

BACKENDS = (GPUSHARE, DRA, HAMI, NVIDIA, VIRTUAL)


def assemble(
    nodes: t.Sequence[NodeShares],
    claims: t.Sequence[Claim],
    by_claims: Read,
    handlers: t.Mapping[str, str] | None = None,
    machines: t.Mapping[str, Machine] | None = None,
) -> Allocation:
    """Compute the allocation from parsed nodes and pods.

    :param by_claims: what the API has of slices and ResourceClaims.
    :param handlers: see ``virtual.settle_kinds``.
    :param machines: by the name of their node, where role inspect has asked them.
    """
    add_cards(nodes, by_claims)
    cards = virtual.offered(by_claims.slices)
    for_machines = [
        *(claim for claim in claims if claim.backend == VIRTUAL),
        *virtual.claimed(claims, {(claim.namespace, claim.name): claim for claim in by_claims.claims}, cards),
    ]
    virtual.settle_kinds(for_machines, handlers)
    claims = [*resolve((c for c in claims if c.backend != VIRTUAL), by_claims, nodes), *for_machines]
    by_name = {shares.node.name: shares for shares in nodes}
    waiting = []
    for claim in claims:
        if claim.pending:
            waiting.append(_waiting(claim))
        node = by_name.get(claim.node)
        if node:
            _add(node, claim)
    virtual.add_devices(nodes, for_machines, cards, machines or {}, by_claims.problem)
    entries = [
        _node(shares)
        for shares in sorted(nodes, key=lambda shares: natural(shares.node.name))
        if shares.parts or shares.problems
    ]
    totals = _totals(nodes)
    none: BackendTotals = {"backend": "", "unit": None, "total": 0, "used": 0}
    first = totals[0] if totals else none
    return {
        "unit": first["unit"],
        "nodes": entries,
        "waiting": sorted(waiting, key=_by_name),
        "total": first["total"],
        "used": first["used"],
        "totals": totals,
    }


def percent(used: int, total: int) -> int:
    """Return the percentage, truncated as by kubectl inspect."""
    return used * 100 // total if total > 0 else 0


def _add(node: NodeShares, claim: Claim) -> None:
    """Add a pod to the cards that it holds."""
    backend = claim.backend
    if backend == NVIDIA and NVIDIA not in node.parts and HAMI in node.parts:
        # On a node of HAMi this resource is HAMi's.
        backend = HAMI
        claim.entry["problem"] = claim.entry["problem"] or "it has a GPU here that HAMi's scheduler didn't select"
        claim = claim._replace(shares=((None, claim.shares[0][1]._replace(mib=0)),))
        claim.entry["state"] = "unassigned" if claim.entry["state"] == "assigned" else claim.entry["state"]
    if not backend:
        backend = next(iter(node.parts), "")
    part = node.parts.setdefault(backend, Part())
    several = len(claim.shares) > 1
    for key, held in claim.shares:
        entry = claim.entry.copy() if several else claim.entry
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
    asked = claim.entry.get("resources")
    if asked:
        for resource in part.resources:
            resource["used"] += asked.get(resource["name"], 0)


def _waiting(claim: Claim) -> PodEntry:
    entry = claim.entry.copy()
    entry["units"], entry["reason"], entry["backend"] = claim.units, claim.reason, claim.backend
    return entry


def _node(node: NodeShares) -> NodeEntry:
    """Return a node's entry; of several back ends the first one is the node's own, the others are in ``also``."""
    order = sorted(node.parts, key=lambda name: BACKENDS.index(name) if name in BACKENDS else len(BACKENDS))
    backends = [node.parts[name].backend for name in order if node.parts[name].backend]
    parts = [_part(node.parts[name]) for name in order] or [_part(Part())]
    own = t.cast(NodeEntry, parts[0])
    own["backend"] = "mixed" if len(backends) > 1 else backends[0] if backends else "none"
    own["name"], own["address"], own["backends"] = node.node.name, node.node.address, backends
    own["problem"], own["memory_limit"], own["also"] = "; ".join(node.problems), node.memory_limit, parts[1:]
    return own


def _part(part: Part) -> BackendEntry:
    devices = part.devices or []
    for place in [*(card["pods"] for card in part.cards), *(device["pods"] for device in devices), part.pending]:
        if len(place) > 1:
            place.sort(key=_by_name)
    entry: BackendEntry = {
        "backend": part.backend or "none",
        "unit": part.unit,
        "capacity": part.capacity,
        "allocatable": part.allocatable,
        "total": part.total,
        "used": part.used,
        "cards": part.cards,
        "pending": part.pending,
    }
    if part.slots is not None:
        entry["slots"] = part.slots
    if part.gpus is not None:
        entry["gpus"], entry["resources"] = part.gpus, part.resources
    if part.devices is not None:
        entry["resources"], entry["devices"] = part.resources, part.devices
    return entry


def _by_name(entry: PodEntry) -> tuple[str, list[str | int]]:
    return entry["namespace"], natural(entry["name"])


def _totals(nodes: t.Sequence[NodeShares]) -> list[BackendTotals]:
    """Return the totals of each back end; units of different back ends can't be added."""
    totals: list[BackendTotals] = []
    for backend in BACKENDS:
        parts = [node.parts[backend] for node in nodes if backend in node.parts]
        if parts:
            units = {part.unit for part in parts} - {None}
            totals.append(
                {
                    "backend": backend,
                    "unit": units.pop() if len(units) == 1 else None,
                    "total": sum(part.total for part in parts),
                    "used": sum(part.used for part in parts),
                }
            )
    return totals
