# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes and pods whose shares are claims, as they would look under the extender, so that the suites judge both alike.

A claim is a booking: what it is allocated becomes the annotations of gpushare's contract on its pod, and the cards in
slices become those of the node. No I/O.
"""

from __future__ import annotations

import copy
import typing as t

from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._core.types import JsonObject

# The text of kube-scheduler's condition where no card has room for a claim (kubernetes v1.36.3, dynamicresources).
REFUSAL = "cannot allocate all claims"


class Cards(t.NamedTuple):
    """The cards in a node's slices, and the unit of their memory."""

    devices: tuple[dra.Device, ...]
    unit: str

    def card(self, device: str) -> contract.Card | None:
        """Return the card of a device; its minor number isn't in a slice, and its index stands in for it."""
        for position, one in enumerate(self.devices):
            if one.name == device:
                index = position if one.index is None else one.index
                units = contract.units_of(one.memory_mib, self.unit)
                healthy, limit = one.unhealthy is None, one.limit
                about: JsonObject = {"model": one.model, "reason": one.unhealthy or "", "limit": limit}
                return contract.Card(index, one.uuid, index, one.memory_mib, units, healthy, **about)
        return None


def cards_by_node(slices: t.Iterable[JsonObject]) -> dict[str, Cards]:
    """Return the cards in slices by node.

    :raises ContractError: a slice is malformed.
    """
    found = dra.newest(map(dra.slice_of, slices))
    return {node: _cards([device for one in mine for device in one.devices]) for node, mine in found.items()}


def _cards(devices: t.Sequence[dra.Device]) -> Cards:
    units = {one.unit for one in devices}
    return Cards(tuple(devices), units.pop() if len(units) == 1 else "MiB")


def as_announced(node: JsonObject, cards: Cards | None) -> JsonObject:
    """Return a node as a device plugin would announce its cards; unchanged where it has none in slices."""
    if cards is None:
        return node
    found = copy.deepcopy(node)
    mine = [card for card in (cards.card(one.name) for one in cards.devices) if card is not None]
    metadata, status = found.setdefault("metadata", {}), found.setdefault("status", {})
    limits = sorted({card.limit for card in mine if card.limit})
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        contract.NODE_CARDS: contract.cards_to_annotation(mine),
        **({contract.NODE_LIMIT: limits[0]} if len(limits) == 1 else {}),
    }
    for field, counted in (("capacity", mine), ("allocatable", [card for card in mine if card.healthy])):
        amounts = {contract.RESOURCE_MEMORY: sum(card.units for card in counted), contract.RESOURCE_COUNT: len(mine)}
        status[field] = {**(status.get(field) or {}), **{key: str(value) for key, value in amounts.items()}}
    return found


def as_booked(
    pods: t.Iterable[JsonObject], claims: t.Iterable[JsonObject], by_node: t.Mapping[str, Cards]
) -> list[JsonObject]:
    """Return pods as the extender would have booked them, and a pod for each claim that holds memory without one.

    Of several pods that share a claim, the first has its memory.

    :raises ContractError: a claim is malformed.
    """
    known = {(one.namespace, one.name): one for one in map(dra.claim_of, claims) if one.ours}
    used: set[str] = set()
    found = []
    for pod in pods:
        mine = [known.get((_namespace(pod), one.claim)) for one in dra.pod_claims(pod)]
        held = [one for one in mine if one is not None and one.parts and _is_of(one, pod) and one.uid not in used]
        used |= {one.uid for one in held}
        found.append(_booked(pod, held, by_node) if held else pod)
    for one in known.values():
        if one.parts and one.uid not in used:
            metadata = {"namespace": one.namespace, "name": f"claim {one.name}", "uid": one.uid}
            left: JsonObject = {"metadata": metadata, "spec": {"nodeName": one.parts[0].pool, "containers": [{}]}}
            found.append(_booked(left, [one], by_node))
    return found


def _namespace(pod: JsonObject) -> str:
    return str((pod.get("metadata") or {}).get("namespace") or "")


def _is_of(claim: dra.Claim, pod: JsonObject) -> bool:
    return contract.pod_uid(pod) in {user.uid for user in claim.users}


def _booked(pod: JsonObject, held: t.Sequence[dra.Claim], by_node: t.Mapping[str, Cards]) -> JsonObject:
    """Return a pod with the annotations of what its claims hold, all of it as its first container's request."""
    cards = by_node.get(held[0].parts[0].pool)
    if cards is None:
        return pod
    mib: dict[str, int] = {}
    for claim in held:
        for (_pool, device), amount in claim.mib().items():
            mib[device] = mib.get(device, 0) + amount
    units = contract.units_of(sum(mib.values()), cards.unit)
    found = copy.deepcopy(pod)
    first = found["spec"]["containers"][0]
    first["resources"] = {**(first.get("resources") or {}), "limits": {contract.RESOURCE_MEMORY: str(units)}}
    mine = [card for card in map(cards.card, mib) if card is not None]
    # A claim of a card that no slice has is a pod without a card.
    written = contract.booking_annotations(mine, found, 1, True) if len(mine) == len(mib) else {}
    metadata = found["metadata"]
    metadata["annotations"] = {**(metadata.get("annotations") or {}), **contract.merge_only(written, {})}
    return found
