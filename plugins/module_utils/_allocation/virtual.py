# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which virtual machine, Kata pod or container has which card or vGPU; what nobody says is unknown. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import claims as dra
from .._contracts import virtual
from .._core.natural import natural
from .machines import CARD, UNOBSERVED, VGPU, Function, Machine
from .nodes import NodeShares, Part, virtual_part
from .pods import VIRTUAL, Claim, DeviceEntry, PodEntry

HELD, FREE, UNKNOWN = "held", "free", "unknown"
REASONS: t.Mapping[str, str] = {
    "not_observed": "its machine wasn't observed",
    "kubelet_unknown": "what kubelet has allocated isn't known",
    "claims_unknown": "ResourceClaims can't be read",
    "not_bound": "no VFIO driver has it yet",
    "not_announced": "nobody announces it to Kubernetes; a virtual machine outside of it may have it",
    "pod_unknown": "kubelet has allocated it to a pod that the API doesn't show, or that has ended",
}
# How people read the kinds of holders.
KINDS: t.Mapping[str, str] = {
    virtual.MACHINE: "virtual machine",
    virtual.SANDBOX: "Kata pod",
    virtual.CONTAINER: "pod",
    virtual.UNKNOWN: "pod whose RuntimeClass isn't known",
}


class Card(t.NamedTuple):
    """A card that NVIDIA's DRA driver offers to virtual machines, by its address.

    :param names: its devices: for virtual machines, and for containers.
    """

    device: virtual.Device
    names: frozenset[str]


Offered = t.Mapping[str, t.Mapping[str, Card]]


def offered(slices: t.Iterable[dra.Slice]) -> Offered:
    """Return the cards in slices that virtual machines can have, by node and address."""
    by_node: dict[str, dict[str, Card]] = {}
    for node, of_node in dra.newest(slices, virtual.DRIVER).items():
        devices = [device for item in of_node for device in item.cards if device.address]
        for device in devices:
            if device.vfio:
                names = frozenset(each.name for each in devices if each.address == device.address)
                by_node.setdefault(node, {})[device.address] = Card(device, names)
    return by_node


def claimed(
    claims: t.Iterable[Claim], known: t.Mapping[tuple[str, str], dra.Claim], cards: Offered
) -> t.Iterator[Claim]:
    """Yield what pods have of these cards by their claims.

    :param claims: of pods, as they were read.
    :param known: ResourceClaims by namespace and name.
    """
    places = {
        (node, name): address
        for node, offers in cards.items()
        for address, card in offers.items()
        for name in card.names
    }
    for pod in claims:
        held = [known[key].cards for use in pod.uses if (key := (pod.entry["namespace"], use.claim)) in known]
        addresses = tuple(places[place] for of_claim in held for place in of_claim if place in places)
        if addresses:
            [(card, share)] = pod.shares
            shares = ((card, share._replace(mib=len(addresses))),)
            running: PodEntry = {"assigned": pod.entry["phase"] == "Running", "resources": {}}
            entry = t.cast(PodEntry, {**pod.entry, **pod.holder, **running})
            yield pod._replace(backend=VIRTUAL, shares=shares, entry=entry, uses=(), addresses=addresses)


def settle_kinds(claims: t.Iterable[Claim], handlers: t.Mapping[str, str] | None) -> None:
    """Set who the holders are whose RuntimeClass decides.

    :param handlers: of the cluster's RuntimeClasses by name; None where they can't be read.
    """
    for claim in claims:
        if claim.backend == VIRTUAL and not claim.entry["kind"]:
            handler = None if handlers is None else handlers.get(claim.entry["runtime_class"])
            kata = handler is not None and virtual.is_kata(handler)
            claim.entry["kind"] = virtual.SANDBOX if kata else virtual.CONTAINER if handler else virtual.UNKNOWN


def add_devices(
    nodes: t.Iterable[NodeShares],
    claims: t.Iterable[Claim],
    cards: Offered,
    machines: t.Mapping[str, Machine],
    problem: str,
) -> None:
    """Add each node's cards and vGPUs for virtual machines, with the pods that have them.

    :param claims: all, of which those of virtual machines' cards are placed here.
    :param machines: by the name of their node.
    :param problem: why ResourceClaims can't be read; empty where they can, or where there are none.
    """
    by_node: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.backend == VIRTUAL:
            by_node.setdefault(claim.node, []).append(claim)
    for shares in nodes:
        name = shares.node.name
        machine = machines.get(name, UNOBSERVED)
        offers = cards.get(name, {})
        if not (machine.functions or offers or VIRTUAL in shares.parts):
            continue
        part = virtual_part(shares)
        here = by_node.get(name, [])
        seen = {function.address for function in machine.functions if function.kind == CARD}
        devices = [_of_machine(function, machine, here, offers, problem) for function in machine.functions]
        devices += [_of_slice(card, here, machine, problem) for address, card in offers.items() if address not in seen]
        part.devices = sorted(devices, key=lambda device: (natural(device["address"]), natural(device["uuid"])))
        if machine.problem and name in machines:
            shares.problems.append(f"its cards for virtual machines are unknown: {machine.problem}")
        if not part.resources:
            part.total = part.capacity = part.allocatable = len(devices)
        _settle(part)


def _of_machine(
    function: Function, machine: Machine, claims: t.Sequence[Claim], offers: t.Mapping[str, Card], problem: str
) -> DeviceEntry:
    resource = next((machine.registered[key] for key in sorted(function.keys) if key in machine.registered), "")
    offer = offers.get(function.address) if function.kind == CARD else None
    pods, lost = _by_kubelet(function, machine, claims)
    if offer is not None:
        pods += [claim.entry for claim in claims if function.address in claim.addresses and claim.entry not in pods]
    reason = ""
    if not pods:
        doubts = {
            "not_bound": not function.bound and offer is None,
            "kubelet_unknown": bool(machine.silent),
            "pod_unknown": lost,
            "claims_unknown": bool(problem),
            "not_announced": not resource and offer is None,
        }
        reason = next((code for code, holds in doubts.items() if holds), "")
    return {
        "kind": function.kind,
        "card": function.card,
        "address": function.address,
        "uuid": function.uuid,
        "type": function.type,
        "device": function.device,
        "model": offer.device.model if offer else _model(resource) if function.kind == CARD else "",
        "driver": function.driver,
        "iommu_group": function.group,
        "resource": resource,
        "state": HELD if pods else UNKNOWN if reason else FREE,
        "reason": reason,
        "pods": [_held(entry) for entry in pods],
    }


def _by_kubelet(function: Function, machine: Machine, claims: t.Sequence[Claim]) -> tuple[list[PodEntry], bool]:
    """Return the pods that have a function by kubelet, and whether it gave the function to one that isn't known."""
    uids = {uid for key in function.keys for uid in machine.entries.get(key, ())}
    names: set[tuple[str, str]] = set()
    if machine.listed is not None:
        names = {pod for key in function.keys for pod in machine.listed.get(key, ())}
    pods = [
        claim.entry
        for claim in claims
        if not claim.addresses
        and (claim.entry["uid"] in uids or (claim.entry["namespace"], claim.entry["name"]) in names)
    ]
    known = {(entry["namespace"], entry["name"]) for entry in pods}
    # Of the checkpoint's entries those of ended pods stay for a while, and PodResources has none of these.
    lost = bool(names - known) if machine.listed is not None else bool(uids - {entry["uid"] for entry in pods})
    return pods, lost


def _of_slice(card: Card, claims: t.Sequence[Claim], machine: Machine, problem: str) -> DeviceEntry:
    """Return a card of which only NVIDIA's DRA driver tells; who has it stands in claims."""
    pods = [claim.entry for claim in claims if card.device.address in claim.addresses]
    return {
        "kind": CARD,
        "card": card.device.address,
        "address": card.device.address,
        "uuid": "",
        "type": "",
        "device": card.device.device,
        "model": card.device.model,
        # The driver binds a card when a claim needs it.
        "driver": "",
        "iommu_group": None,
        "resource": "",
        "state": HELD if pods else UNKNOWN if problem else FREE,
        "reason": "" if pods or not problem else "claims_unknown",
        "pods": [_held(entry) for entry in pods],
    }


def _held(entry: PodEntry) -> PodEntry:
    return {**entry, "units": 1}


def _model(resource: str) -> str:
    """Return the name of a card by its resource, which NVIDIA's plugins make of the database of PCI ids."""
    return "" if resource == virtual.KATA_RESOURCE else resource.partition("/")[2]


def device_name(device: t.Mapping[str, t.Any]) -> str:
    """Return what a ``DeviceEntry`` is: a vGPU's type, or a card's model."""
    if device["kind"] == VGPU:
        return f"vGPU {device['type']}" if device["type"] else "virtual function"
    return f"{device['model']} ({device['device']})" if device["model"] else device["device"] or "card"


def holder_name(entry: t.Mapping[str, t.Any]) -> str:
    """Return who a pod with a card for virtual machines is."""
    return f"{KINDS[entry['kind']]} {entry['namespace']}/{entry['machine'] or entry['name']}"


def holder_text(device: t.Mapping[str, t.Any], pods: bool = False) -> str:
    """Return who has a card or a vGPU; names are as the API has them.

    :param device: a ``DeviceEntry``.
    :param pods: name the pod of a virtual machine, too.
    """
    if device["state"] == UNKNOWN:
        return f"unknown: {REASONS.get(device['reason'], device['reason'])}"
    if device["state"] == FREE:
        return FREE
    return ", ".join(
        f"{holder_name(entry)} (pod {entry['name']})" if pods and entry["machine"] else holder_name(entry)
        for entry in device["pods"]
    )


def _settle(part: Part) -> None:
    """Leave in ``pending`` the pods of which not all devices are known."""
    placed: dict[str, int] = {}
    for device in part.devices or ():
        for entry in device["pods"]:
            placed[entry["uid"]] = placed.get(entry["uid"], 0) + 1
    left = []
    for entry in part.pending:
        units = entry["units"] - placed.get(entry["uid"], 0)
        if units > 0:
            left.append({**entry, "units": units} if units < entry["units"] else entry)
    part.pending = left
