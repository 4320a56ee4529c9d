# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose cards are divided by claims: the cards in slices, and which pod holds what. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import claim_templates as templates
from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts import hami
from .nodes import Node, Part, card_entry, limit_of_cards
from .pods import DRA, GPUSHARE, MOST, Claim, PodReader, Shares


class Read(t.NamedTuple):
    """What the API has of claims.

    :param problem: why it can't be read; empty where it was, or where there is none.
    :param unreadable: objects that are malformed.
    """

    slices: tuple[dra.Slice, ...] = ()
    claims: tuple[dra.Claim, ...] = ()
    problem: str = ""
    unreadable: tuple[str, ...] = ()


def may_exist(nodes: t.Iterable[Node], claims: t.Iterable[Claim]) -> bool:
    """Return whether there may be claims: a pod names one, or a node is to share cards and no device plugin does."""
    return any(one.labelled and not _has_plugin(one) for one in nodes) or any(one.uses for one in claims)


def _has_plugin(node: Node) -> bool:
    """Return whether a device plugin announces the node's cards; kubelet reports a removed one for five minutes."""
    part = node.parts.get(GPUSHARE)
    return part is not None and (bool(part.allocatable) or node.announced)


# --------------------------------------------------------------------------- nodes


def add_cards(nodes: t.Iterable[Node], found: Read) -> None:
    """Add the cards in slices to their nodes."""
    by_node = dra.newest(found.slices)
    for node in nodes:
        if found.problem and node.labelled and not _has_plugin(node):
            node.problems.append(f"the cards that it may divide by claims are unknown: {found.problem}")
        if node.name in by_node:
            _add(node, by_node[node.name])


def _add(node: Node, slices: t.Sequence[dra.Slice]) -> None:
    count = slices[0].count
    if len(slices) != count:
        node.problems.append(
            f"{len(slices)} of the {count} ResourceSlices of its pool are there: kube-scheduler allocates none of its "
            "cards until the DRA driver has written the others"
        )
    if not _has_plugin(node):
        node.parts.pop(GPUSHARE, None)
    devices = [device for one in slices for device in one.devices]
    units = {device.unit for device in devices}
    part = node.parts[DRA] = Part(DRA, units.pop() if len(units) == 1 else "MiB" if units else None)
    for position, device in enumerate(devices):
        total = _units(device.memory_mib, part.unit)
        healthy = device.unhealthy is None
        index = position if device.index is None else device.index
        # The card's whole size isn't in a slice.
        entry = card_entry(index, device.uuid, device.model, 0, total, healthy, device.unhealthy or "")
        part.cards.append(entry)
        part.keys[device.name] = entry
        part.total += total
        part.allocatable += total if healthy else 0
    part.capacity = part.total
    if not node.memory_limit:
        node.memory_limit = limit_of_cards([device.limit for device in devices])


def _units(mib: int, unit: str | None) -> int:
    return min(contract.units_of(mib, unit or "GiB"), MOST)


# --------------------------------------------------------------------------- pods


def resolve(claims: t.Iterable[Claim], found: Read, nodes: t.Iterable[Node]) -> t.Iterator[Claim]:
    """Return what pods hold, with the cards of their ResourceClaims; and what claims hold that no pod uses.

    Of several pods that use one claim, the first has its memory, since they share it.

    :param claims: of pods, as they were read.
    """
    units = {node.name: node.parts[DRA].unit for node in nodes if DRA in node.parts}
    known = set(units.values()) - {None}
    usual = known.pop() if len(known) == 1 else "GiB"
    by_name = {(one.namespace, one.name): one for one in found.claims if one.ours}
    users: dict[str, str] = {}
    for one in claims:
        if not one.uses:
            yield one
            continue
        resolved = _resolved(one, by_name, users, units, usual)
        if resolved is not None:
            yield resolved
    reader = PodReader()
    for held in found.claims:
        if held.parts and held.uid not in users:
            yield _unused(held, reader, units, usual)


def _resolved(
    one: Claim,
    by_name: t.Mapping[tuple[str, str], dra.Claim],
    users: dict[str, str],
    units: t.Mapping[str, str | None],
    usual: str | None,
) -> Claim | None:
    """Return what a pod holds by its claims; None where none of them is for cards of this collection's driver."""
    entry = one.entry
    shares: dict[str, int] = {}
    containers: dict[str, int] = {}
    node, wanted, problems, ours = one.node, 0, [], False
    for use in one.uses:
        claim = by_name.get((entry["namespace"], use.claim))
        if claim is None:
            ours = ours or bool(use.units())
            wanted += use.units()
            continue
        ours = True
        if not claim.parts:
            wanted += _units(claim.wanted_mib, usual)
            continue
        if claim.users and entry["uid"] not in {user.uid for user in claim.users}:
            problems.append(f"its claim {claim.name} isn't reserved for it")
            continue
        node = node or claim.parts[0].pool
        if one.node and any(part.pool != one.node for part in claim.parts):
            problems.append(f"its claim {claim.name} has a card of another node ({claim.parts[0].pool})")
            continue
        first = users.setdefault(claim.uid, entry["name"])
        if first != entry["name"]:
            problems.append(f"it shares claim {claim.name} with pod {first}, which is listed with its memory")
        unit = units.get(node, usual)
        for (_pool, device), mib in claim.mib().items():
            shares[device] = shares.get(device, 0) + (_units(mib, unit) if first == entry["name"] else 0)
        # A container may have a request for each of its cards.
        for container, request in dict.fromkeys((name, templates.container_of(one)) for name, one in use.containers):
            held = _units(sum(claim.mib(request).values()), unit)
            containers[container] = containers.get(container, 0) + held
    if not ours:
        return None
    running = entry["phase"] == "Running"
    entry["assigned"] = bool(shares) and running
    entry["problem"] = entry["problem"] or "; ".join(problems)
    entry["containers"] = [{"name": name, "units": held} for name, held in containers.items()]
    if entry["state"] not in ("pending", "terminating"):
        entry["state"] = "assigned" if entry["assigned"] else "unassigned"
    given: Shares = tuple((device, _held(held)) for device, held in shares.items()) or ((None, _held(wanted)),)
    return one._replace(node=node, shares=given)


def _unused(claim: dra.Claim, reader: PodReader, units: t.Mapping[str, str | None], usual: str | None) -> Claim:
    """Return a row for a claim that holds memory although no pod that hasn't ended uses it."""
    users = ", ".join(user.name for user in claim.users)
    problem = f"this is no pod but a claim, which holds memory although {users or 'no pod'} doesn't use it"
    plain = {"metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid}}
    entry = reader.entry({**plain, "spec": {"nodeName": claim.parts[0].pool}}, [], False, False, problem)
    unit = units.get(claim.parts[0].pool, usual)
    shares = tuple((device, _held(_units(mib, unit))) for (_pool, device), mib in claim.mib().items())
    return Claim(claim.parts[0].pool, DRA, False, shares, entry)


def _held(units: int) -> hami.Held:
    return hami.Held(units, 0, 0)
