# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose cards are divided by claims: two lists of the API besides nodes and pods, cards, and who holds what."""

from __future__ import annotations

import typing as t

from .._contracts import claim_templates, virtual
from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts.gpushare import ContractError
from .._contracts.model import Pod
from .._kube.errors import KubeError
from .._kube.stream import Wanted, listed
from .nodes import NodeShares, Part, card_entry, limit_of_cards
from .pods import DRA, GPUSHARE, MOST, Claim, PodReader, Shares, held_units

if t.TYPE_CHECKING:
    from .._kube.api import Kube
    from .._kube.stream import Streams


class Read(t.NamedTuple):
    """What the API has of claims.

    :param problem: why it can't be read; empty where it was, or where there is none.
    :param unreadable: objects that are malformed.
    """

    slices: tuple[dra.Slice, ...] = ()
    claims: tuple[dra.Claim, ...] = ()
    problem: str = ""
    unreadable: tuple[str, ...] = ()


def may_exist(nodes: t.Iterable[NodeShares], claims: t.Iterable[Claim]) -> bool:
    """Return whether there may be claims: a pod names one, a node is to share cards and no device plugin does, or it
    may have cards that NVIDIA's DRA driver gives to virtual machines.
    """
    for shares in nodes:
        if (shares.labelled and not _has_plugin(shares)) or shares.node.labels.get(virtual.SCHEDULABLE) == "true":
            return True
    return any(claim.uses for claim in claims)


def _has_plugin(shares: NodeShares) -> bool:
    """Return whether a device plugin announces the node's cards; kubelet reports a removed one for five minutes."""
    part = shares.parts.get(GPUSHARE)
    return part is not None and (bool(part.allocatable) or shares.node.announced)


# --------------------------------------------------------------------------- nodes


def add_cards(nodes: t.Iterable[NodeShares], in_api: Read) -> None:
    """Add the cards in slices to their nodes."""
    by_node = dra.newest(in_api.slices)
    for shares in nodes:
        if in_api.problem and shares.labelled and not _has_plugin(shares):
            shares.problems.append(f"the cards that it may divide by claims are unknown: {in_api.problem}")
        if shares.node.name in by_node:
            _add(shares, by_node[shares.node.name])


def _add(node: NodeShares, slices: t.Sequence[dra.Slice]) -> None:
    count = slices[0].count
    if len(slices) != count:
        node.problems.append(
            f"{len(slices)} of the {count} ResourceSlices of its pool are there: kube-scheduler allocates none of its "
            "cards until the DRA driver has written the others"
        )
    if not _has_plugin(node):
        node.parts.pop(GPUSHARE, None)
    devices = [device for of_pool in slices for device in of_pool.devices]
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


def resolve(claims: t.Iterable[Claim], in_api: Read, nodes: t.Iterable[NodeShares]) -> t.Iterator[Claim]:
    """Return what pods hold, with the cards of their ResourceClaims; and what claims hold that no pod uses.

    Of several pods that use one claim, the first has its memory, since they share it.

    :param claims: of pods, as they were read.
    """
    units = {shares.node.name: shares.parts[DRA].unit for shares in nodes if DRA in shares.parts}
    known = set(units.values()) - {None}
    usual = known.pop() if len(known) == 1 else "GiB"
    by_name = {(claim.namespace, claim.name): claim for claim in in_api.claims if claim.ours}
    users: dict[str, str] = {}
    for pod in claims:
        if not pod.uses:
            yield pod
            continue
        resolved = _resolved(pod, by_name, users, units, usual)
        if resolved is not None:
            yield resolved
    reader = PodReader()
    for held in in_api.claims:
        if held.parts and held.uid not in users:
            yield _unused(held, reader, units, usual)


def _resolved(
    pod: Claim,
    by_name: t.Mapping[tuple[str, str], dra.Claim],
    users: dict[str, str],
    units: t.Mapping[str, str | None],
    usual: str | None,
) -> Claim | None:
    """Return what a pod holds by its claims; None where none of them is for cards of this collection's driver."""
    entry = pod.entry
    shares: dict[str, int] = {}
    containers: dict[str, int] = {}
    node, wanted, problems, ours = pod.node, 0, [], False
    for use in pod.uses:
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
        if pod.node and any(part.pool != pod.node for part in claim.parts):
            problems.append(f"its claim {claim.name} has a card of another node ({claim.parts[0].pool})")
            continue
        first = users.setdefault(claim.uid, entry["name"])
        if first != entry["name"]:
            problems.append(f"it shares claim {claim.name} with pod {first}, which is listed with its memory")
        unit = units.get(node, usual)
        for (_pool, device), mib in claim.mib().items():
            shares[device] = shares.get(device, 0) + (_units(mib, unit) if first == entry["name"] else 0)
        # A container may have a request for each of its cards.
        for container, request in dict.fromkeys(
            (name, claim_templates.container_of(request)) for name, request in use.containers
        ):
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
    given: Shares = tuple((device, held_units(held)) for device, held in shares.items()) or (
        (None, held_units(wanted)),
    )
    return pod._replace(node=node, shares=given)


def _unused(claim: dra.Claim, reader: PodReader, units: t.Mapping[str, str | None], usual: str | None) -> Claim:
    """Return a row for a claim that holds memory although no pod that hasn't ended uses it."""
    users = ", ".join(user.name for user in claim.users)
    problem = f"this is no pod but a claim, which holds memory although {users or 'no pod'} doesn't use it"
    in_place = Pod(claim.namespace, claim.name, claim.uid, frozenset({claim.uid}), claim.parts[0].pool)
    entry = reader.entry(in_place, [], False, False, problem)
    unit = units.get(claim.parts[0].pool, usual)
    shares = tuple((device, held_units(_units(mib, unit))) for (_pool, device), mib in claim.mib().items())
    return Claim(claim.parts[0].pool, DRA, False, shares, entry)


def read(kube: Kube | Streams) -> Read:
    """List the slices and the claims of the cluster, with one request each."""
    unreadable: list[str] = []

    def keep(parse: t.Callable[[t.Any], t.Any]) -> t.Callable[[t.Any], list[t.Any]]:
        def kept(raw: t.Any) -> list[t.Any]:
            try:
                return [parse(raw)]
            except ContractError as error:
                unreadable.append(str(error))
                return []

        return kept

    version = claim_templates.API_VERSION
    wanted = (
        Wanted("ResourceSlice", keep(dra.slice_of), api_version=version),
        Wanted("ResourceClaim", keep(dra.claim_of), api_version=version),
    )
    try:
        slices, claims = listed(kube, *wanted)
    except KubeError as error:
        if error.status == 404:
            # The API server doesn't serve this version: no share can be a claim.
            return Read()
        if error.status == 403:
            return Read(problem=str(error))
        raise
    return Read(tuple(slices), tuple(claims), "", tuple(unreadable))
