# SPDX-License-Identifier: GPL-3.0-or-later
"""Compute which container of a pod may hold how much memory of which card, by kubelet's list. No I/O, no clock."""

from __future__ import annotations

import typing as t

from gpushare.kubelet.pod_resources import Entry, by_pod
from gpushare.node.limits import Target
from gpushare.node.usage import Share
from gpushare.plugin import pod_facts, steering
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

STATUSES = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")


def trim_statuses(status: t.Mapping[str, t.Any]) -> JsonObject:
    """Return the fields of a pod's status that the limits need: names and IDs of the containers that run."""
    statuses = {
        field: [
            {"name": row.get("name", ""), "containerID": row["containerID"], "state": {"running": {}}}
            for row in status.get(field) or []
            if row.get("containerID") and "running" in (row.get("state") or {})
        ]
        for field in STATUSES
    }
    return {field: rows for field, rows in statuses.items() if rows}


def running(pod: JsonObject) -> dict[str, str]:
    """Return the IDs of a pod's running containers, by name."""
    status = pod.get("status") or {}
    identifiers = {}
    for field in STATUSES:
        for row in status.get(field) or []:
            # "containerd://4f1e…", "cri-o://…", "docker://…"
            identifier = str(row.get("containerID") or "").rpartition("://")[2]
            if identifier and "running" in (row.get("state") or {}):
                identifiers[str(row.get("name", ""))] = identifier
    return identifiers


def targets(
    cards: t.Sequence[contract.Card],
    pods: t.Iterable[JsonObject],
    listing: t.Sequence[Entry],
    unit: str,
    exempt: t.Container[str] = (),
) -> list[Target]:
    """Return the running containers of this node's pods, and their limits by kubelet's allocation.

    A container without units, also an ephemeral one, may hold nothing of any card.

    :param pods: of this node, with the statuses of ``trim_statuses``.
    :param listing: from PodResources; the cards of a container that isn't listed yet aren't known.
    :param unit: of the node's shares.
    :param exempt: namespaces whose pods without units aren't limited: among them are NVIDIA's own, which work on all
        cards.
    """
    slots = steering.slots_of(cards)
    listed, limit_targets = by_pod(listing), []
    for pod in pods:
        steps = {step.name: step.units for step in pod_facts.steps(pod)}
        if contract.finished(pod):
            continue
        key, uid = pod_facts.key(pod), contract.pod_uid(pod)
        is_exempt = not steps and key.partition("/")[0] in exempt
        for name, identifier in running(pod).items():
            units = steps.get(name, 0)
            held = _held(cards, slots, pod, name, units, listed.get(key)) if units else {}
            mib = None if held is None else {uuid: n * contract.MIB_PER_UNIT[unit] for uuid, n in held.items()}
            limit_targets.append(Target(key, uid, name, identifier, mib, is_exempt))
    return limit_targets


def shares(
    cards: t.Sequence[contract.Card], pods: t.Iterable[JsonObject], listing: t.Sequence[Entry], unit: str
) -> list[Share]:
    """Return the running containers that have a share, by kubelet's allocation; the parameters are ``targets``'."""
    return [
        Share(
            target.pod,
            target.uid,
            target.container,
            frozenset((target.container_id,)),
            (target.container_id,),
            target.mib,
        )
        for target in targets(cards, pods, listing, unit)
        if target.mib
    ]


def _held(
    cards: t.Sequence[contract.Card],
    slots: steering.Slots,
    pod: JsonObject,
    name: str,
    units: int,
    entry: Entry | None,
) -> dict[str, int] | None:
    """Return a container's units by card; None if its cards aren't known.

    :param name: the container's.
    :param units: what it requests.
    :param entry: its pod's in kubelet's list.
    """
    if entry is None:
        return None
    given = entry.counts.get(name)
    if not given and name not in _plain_inits(pod):
        return None
    # IDs of another plugin, as upstream's, don't identify a card; the pod's annotation does.
    identified = any(slots.named(short) for short in given or ())
    held = _given(slots, given or {}) if identified else _booked(cards, pod, units)
    return held if sum(held.values()) == units else None


def promised_mib(
    cards: t.Sequence[contract.Card], pods: t.Sequence[JsonObject], listing: t.Sequence[Entry], unit: str
) -> dict[str, int]:
    """Return what pods may use of each card (UUID) by kubelet's list, or else by their bookings, in MiB.

    :param pods: of this node.
    :param listing: from PodResources.
    :param unit: of the node's shares.
    """
    listed, slots = steering.held_units(cards, listing), steering.slots_of(cards)
    # IDs of another plugin don't identify a card.
    known = {entry.key for entry in listing if entry.total and all(slots.named(short) for short in entry.total)}
    booked, unknown = contract.used_units(cards, (pod for pod in pods if pod_facts.key(pod) not in known))
    mib = contract.MIB_PER_UNIT[unit]
    return {card.uuid: (listed[card.uuid] + booked[card.index] + unknown) * mib for card in cards}


def _given(slots: steering.Slots, counts: t.Mapping[str, int]) -> dict[str, int]:
    """Return the allocated units by card; empty if an ID identifies no card of this node."""
    held = slots.units(counts)
    return {} if "" in held else held


def _plain_inits(pod: JsonObject) -> set[str]:
    """Return the names of init containers that aren't sidecars; PodResources don't list them."""
    inits = (pod.get("spec") or {}).get("initContainers") or []
    return {str(container.get("name", "")) for container in inits if container.get("restartPolicy") != "Always"}


def _booked(cards: t.Sequence[contract.Card], pod: JsonObject, units: int) -> dict[str, int]:
    """Return the units by card of a container that PodResources don't list, from the pod's confirmed booking."""
    held = contract.booking(pod)
    if held is None or not held.assigned or units % len(held.indices):
        return {}
    by_index = {card.index: card.uuid for card in cards}
    if not all(index in by_index for index in held.indices):
        return {}
    return {by_index[index]: units // len(held.indices) for index in held.indices}
