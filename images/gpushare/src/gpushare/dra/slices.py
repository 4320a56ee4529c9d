# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's cards as ResourceSlices: what they contain, and what has to be written. No I/O, no clock.

The scheduler takes the first device that fits, in the order of the slices' names and of the devices in them. So the
order of the devices decides which card a claim gets: in that of the cards' index claims fill one card after the other;
with the emptiest card first they are spread. Any change is a new generation of the whole pool, which the scheduler uses
once all of its slices have it.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
import typing as t

from gpushare.dra.claims import DRIVER, MEMORY, device_name
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

API_VERSION, KIND = "resource.k8s.io/v1", "ResourceSlice"
PATH = "/apis/resource.k8s.io/v1/resourceslices"
# The API server allows 128 devices in a slice, and 64 if one has a taint.
DEVICES_PER_SLICE = 64
# On a card that isn't given to pods; its value is the reason's code.
UNHEALTHY = f"{DRIVER}/unhealthy"
# On a card of which a pod holds memory that its claim doesn't have in the API; its value is what became of the claim.
UNBOOKED = f"{DRIVER}/memory-without-claim"
PCI_BUS, PCIE_ROOT = "resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot"
# Characters of an attribute's value, and of an object's name.
VALUE_LENGTH, NAME_LENGTH = 64, 253
_SUFFIXES = ("Mi", "Gi", "Ti", "Pi")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a card's attributes have beside the card itself.

    :param driver: the version of NVIDIA's driver; empty if unknown.
    :param bus: the PCI address by UUID.
    :param roots: the PCIe root by UUID.
    :param limits: whether memory is limited, as in the node's annotation of gpushare's cards, by UUID.
    """

    driver: str = ""
    bus: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    roots: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: t.Mapping[str, str] = dataclasses.field(default_factory=dict)


def quantity(mib: int) -> str:
    """Format MiB as the API server writes them: without a fraction, in the largest unit."""
    steps = 0
    while mib and mib % 1024 == 0 and steps < len(_SUFFIXES) - 1:
        mib, steps = mib // 1024, steps + 1
    return f"{mib}{_SUFFIXES[steps]}"


def semantic_version(text: str) -> str:
    """Convert a driver's version, as ``580.95.05``, to three numbers without leading zeros; empty for others."""
    match = re.fullmatch(r"([0-9]+)\.([0-9]+)(?:\.([0-9]+))?", text)
    return ".".join(str(int(part or 0)) for part in match.groups()) if match else ""


def device(card: contract.Card, unit: str, facts: Facts, unbooked: str = "") -> JsonObject:
    """Return a card as a device; it has one whole unit at the least.

    :param unit: of the cluster's shares, GiB or MiB.
    :param unbooked: the code, if a pod holds memory of it that its claim doesn't have in the API.
    """
    attributes: dict[str, JsonObject] = {
        "uuid": {"string": card.uuid[:VALUE_LENGTH]},
        "index": {"int": card.index},
        "model": {"string": card.model[:VALUE_LENGTH]},
        "driverVersion": {"version": semantic_version(facts.driver)},
        "memoryLimit": {"string": facts.limits.get(card.uuid, "")},
        PCI_BUS: {"string": facts.bus.get(card.uuid, "")},
        PCIE_ROOT: {"string": facts.roots.get(card.uuid, "")},
    }
    mib = contract.MIB_PER_UNIT[unit]
    whole, step = quantity(card.units * mib), quantity(mib)
    # The API server refuses a step that can't be taken.
    policy: JsonObject = {"validRange": {"min": step, "step": step}} if card.units > 1 else {"validValues": [whole]}
    made: JsonObject = {
        "name": device_name(card.uuid),
        "attributes": {name: value for name, value in attributes.items() if "" not in value.values()},
        # A claim that names no amount takes the whole card.
        "capacity": {MEMORY: {"value": whole, "requestPolicy": {"default": whole, **policy}}},
        "allowMultipleAllocations": True,
    }
    reasons = {UNHEALTHY: "" if card.healthy else card.code or "Unknown", UNBOOKED: unbooked}
    if taints := [{"key": key, "value": code, "effect": "NoSchedule"} for key, code in reasons.items() if code]:
        made["taints"] = taints
    return made


def devices(
    cards: t.Iterable[contract.Card],
    unit: str,
    facts: Facts,
    spread_over: t.Mapping[str, int] | None = None,
    unbooked: t.Mapping[str, str] | None = None,
) -> list[JsonObject]:
    """Return the node's devices, in the order in which the scheduler takes them.

    :param unit: of the cluster's shares, GiB or MiB.
    :param spread_over: the MiB that claims hold by card (UUID), where the emptiest card comes first; None for the order
        of the index.
    :param unbooked: codes by the devices of which pods hold memory that their claims don't have in the API.
    """
    held, lost, mib = spread_over or {}, unbooked or {}, contract.MIB_PER_UNIT[unit]

    def place(card: contract.Card) -> tuple[int, int]:
        return (0 if spread_over is None else held.get(card.uuid, 0) - card.units * mib, card.index)

    placed = (card for card in sorted(cards, key=place) if card.units > 0)
    return [device(card, unit, facts, lost.get(device_name(card.uuid), "")) for card in placed]


def trimmed(resource_slice: JsonObject) -> JsonObject:
    """Return a slice without what others record about it."""
    metadata = resource_slice.get("metadata") or {}
    kept = ("name", "resourceVersion", "ownerReferences")
    return {
        "metadata": {key: metadata[key] for key in kept if key in metadata},
        "spec": resource_slice.get("spec") or {},
    }


def announced_cards(current: t.Iterable[JsonObject], unit: str) -> list[contract.Card]:
    """Return the cards in the node's slices, as far as these tell; devices that aren't as ours are left out.

    :param current: the slices in the API.
    :param unit: of the cluster's shares, GiB or MiB.
    """
    cards: dict[int, contract.Card] = {}
    for resource_slice in current:
        for each in (resource_slice.get("spec") or {}).get("devices") or []:
            attributes, capacity = each.get("attributes") or {}, (each.get("capacity") or {}).get(MEMORY) or {}
            uuid = str((attributes.get("uuid") or {}).get("string", ""))
            index = (attributes.get("index") or {}).get("int")
            mib = contract.quantity(capacity.get("value")) >> 20
            if device_name(uuid) == each.get("name") and isinstance(index, int) and index >= 0:
                model = str((attributes.get("model") or {}).get("string", ""))
                cards[index] = contract.Card(index, uuid, 0, mib, contract.units_of(mib, unit), model=model)
    return [cards[index] for index in sorted(cards)]


def slice_name(node: str, number: int) -> str:
    """Return the name of a node's slice, which sorts by its number."""
    ending = f"-{DRIVER}-{number:04d}"
    if len(node) + len(ending) > NAME_LENGTH:
        short = hashlib.sha256(node.encode()).hexdigest()[:16]
        node = f"{node[: NAME_LENGTH - len(ending) - len(short) - 1].rstrip('.-')}-{short}"
    return f"{node}{ending}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What has to be written, in this order.

    :param replace: objects in place of existing ones.
    :param delete: names.
    """

    generation: int
    create: tuple[JsonObject, ...] = ()
    replace: tuple[JsonObject, ...] = ()
    delete: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.create or self.replace or self.delete)


def plan(
    node: str, owner: str, wanted: t.Sequence[JsonObject], current: t.Iterable[JsonObject], generation: int = 0
) -> Plan:
    """Compare the slices with what they should be.

    :param node: the node's name.
    :param owner: the UID of its Node, with which the slices go.
    :param wanted: the node's devices.
    :param current: the driver's slices of this node.
    :param generation: the highest one that was written before.
    """
    groups = [wanted[at : at + DEVICES_PER_SLICE] for at in range(0, len(wanted), DEVICES_PER_SLICE)] or [[]]
    known = {str(resource_slice["metadata"]["name"]): resource_slice for resource_slice in current}
    names = [slice_name(node, number) for number in range(len(groups))]
    present = [known.get(name) for name in names]
    generations = {_generation(resource_slice) for resource_slice in known.values()}
    highest = max([generation, *generations])
    right = [
        resource_slice is not None and _same(resource_slice, node, owner, group, len(groups))
        for resource_slice, group in zip(present, groups, strict=True)
    ]
    # One that was deleted comes back as it was; all others are still complete with it.
    kept = {
        _generation(resource_slice)
        for resource_slice, is_right in zip(present, right, strict=True)
        if resource_slice is not None and is_right
    }
    is_same = len(kept) <= 1 and all(
        is_right or resource_slice is None for resource_slice, is_right in zip(present, right, strict=True)
    )
    now = kept.pop() if is_same and kept else highest + 1
    create, replace = [], []
    for name, resource_slice, group, is_right in zip(names, present, groups, right, strict=True):
        if is_right and resource_slice is not None and _generation(resource_slice) == now:
            continue
        made = _object(name, node, owner, group, now, len(groups))
        if resource_slice is None:
            create.append(made)
        else:
            made["metadata"]["resourceVersion"] = resource_slice["metadata"]["resourceVersion"]
            _keep_times(made, resource_slice)
            replace.append(made)
    # What can't be changed in place; it is made again in the next pass.
    fixed = [
        resource_slice
        for resource_slice in replace
        if _fixed(resource_slice) != _fixed(known[resource_slice["metadata"]["name"]])
    ]
    stale = [name for name in known if name not in names]
    return Plan(
        now,
        tuple(create),
        tuple(resource_slice for resource_slice in replace if resource_slice not in fixed),
        tuple([*stale, *(resource_slice["metadata"]["name"] for resource_slice in fixed)]),
    )


def _object(name: str, node: str, owner: str, group: t.Sequence[JsonObject], generation: int, count: int) -> JsonObject:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": node, "uid": owner, "controller": True},
            ],
        },
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
            "devices": copy.deepcopy(list(group)),
        },
    }


def _same(resource_slice: JsonObject, node: str, owner: str, group: t.Sequence[JsonObject], count: int) -> bool:
    """Return whether a slice is as wanted, whatever its generation."""
    made = _object(str(resource_slice["metadata"]["name"]), node, owner, group, _generation(resource_slice), count)
    spec, owners = resource_slice.get("spec") or {}, resource_slice["metadata"].get("ownerReferences") or []
    devices = [_timeless(each) for each in spec.get("devices") or []]
    return (
        [row.get("uid") for row in owners] == [owner]
        and {**spec, "devices": devices} == made["spec"]
        and made["spec"]["pool"] == spec.get("pool")
    )


def _generation(resource_slice: JsonObject) -> int:
    return int(((resource_slice.get("spec") or {}).get("pool") or {}).get("generation") or 0)


def _fixed(resource_slice: JsonObject) -> tuple[t.Any, ...]:
    spec = resource_slice.get("spec") or {}
    return spec.get("driver"), spec.get("nodeName"), (spec.get("pool") or {}).get("name")


def _timeless(device: JsonObject) -> JsonObject:
    """Return a device without the times that the API server adds to its taints."""
    taints = [
        {key: value for key, value in taint.items() if key != "timeAdded"} for taint in device.get("taints") or []
    ]
    return {**device, "taints": taints} if taints else device


def _keep_times(made: JsonObject, before: JsonObject) -> None:
    """Take over since when each device has had each of its taints."""
    times = {
        (each["name"], taint["key"], taint.get("value"), taint["effect"]): taint["timeAdded"]
        for each in (before.get("spec") or {}).get("devices") or []
        for taint in each.get("taints") or []
        if "timeAdded" in taint
    }
    for each in made["spec"]["devices"]:
        for taint in each.get("taints") or []:
            since = times.get((each["name"], taint["key"], taint.get("value"), taint["effect"]))
            if since:
                taint["timeAdded"] = since
