# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The capacity of nodes, by the contract of each back end, and whether the driver enforces shares. No I/O."""

from __future__ import annotations

import dataclasses
import sys
import typing as t

from .._contracts import backends, hami
from .._contracts import gpushare as contract
from .._contracts import nvidia_plugin as nvidia
from .._core.types import JsonObject
from .._core.untrusted import line
from .pods import GPUSHARE, HAMI, MALFORMED, MOST, NVIDIA, Card, CardEntry, PodEntry, ResourceEntry


def mode(value: t.Any) -> str:
    """Return the variable's value; YAML parses a bare ``off`` as false."""
    text = str(value)
    return "off" if text.lower() in ("off", "false", "no") else text


def announced_limit(node: JsonObject) -> str:
    """Return what a node's device plugin announces about limits; empty if nothing, as upstream's."""
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(contract.NODE_LIMIT)
    return line(text or "")


def limit_of_cards(limits: t.Iterable[str]) -> str:
    """Return what a node's cards in slices say about limits, as a device plugin announces it; the worst card counts.

    :param limits: of each card: enforced, off, or the code of the reason why there is none; empty if unknown.
    """
    known = [one for one in limits if one]
    codes = sorted({one for one in known if one not in (contract.LIMIT_ENFORCED, contract.LIMIT_OFF)})
    if codes:
        return contract.LIMIT_UNENFORCED + ", ".join(codes)
    return contract.LIMIT_OFF if contract.LIMIT_OFF in known else known[0] if known else ""


# Its cards are known by gpu-mem and gpu-count only.
UPSTREAM = "gpushare-upstream"

# Without the cards' own sizes, kubectl inspect's guess: more than so many units on a card are MiB.
MOST_GIB_ON_A_CARD = 100


@dataclasses.dataclass
class Part:
    """One back end on one node.

    :param backend: ``gpushare``, ``gpushare-upstream``, ``dra``, ``hami``, ``nvidia``; empty if the node advertises
        nothing.
    :param unit: ``GiB``, ``MiB``, ``count`` or None.
    :param keys: cards by the key that claims use for them.
    :param slots: of HAMi's nodes.
    :param gpus: of NVIDIA's nodes, by their labels.
    """

    backend: str = ""
    unit: str | None = None
    capacity: int = 0
    allocatable: int = 0
    cards: list[CardEntry] = dataclasses.field(default_factory=list)
    keys: dict[Card, CardEntry] = dataclasses.field(default_factory=dict)
    pending: list[PodEntry] = dataclasses.field(default_factory=list)
    slots: dict[str, int] | None = None
    gpus: JsonObject | None = None
    resources: list[ResourceEntry] = dataclasses.field(default_factory=list)
    total: int = 0
    used: int = 0


@dataclasses.dataclass
class Node:
    """A node with its back ends.

    :param labelled: it is to share its cards, by a device plugin or by the DRA driver.
    :param announced: its annotation of a device plugin lists cards.
    """

    name: str
    address: str = ""
    memory_limit: str = ""
    labelled: bool = False
    announced: bool = False
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def read_node(node: t.Any) -> list[Node]:
    """Parse a node; empty if not even its name can be read."""
    metadata = node.get("metadata") if isinstance(node, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        return []
    found = Node(name)
    for read in (_about, _gpushare, _hami_or_nvidia):
        try:
            read(node, found)
        except MALFORMED:
            found.problems.append("its object in the API is malformed")
    found.problems = list(dict.fromkeys(found.problems))
    return [found]


def card_unit(units: int, shared_mib: int) -> str | None:
    """Return the memory unit in which a card is announced; None if its size is unknown.

    :param shared_mib: its memory without the reserve.
    """
    if shared_mib <= 0 or units <= 0:
        return None
    return next((unit for unit in contract.MIB_PER_UNIT if contract.units_of(shared_mib, unit) == units), None)


def node_unit(cards: t.Sequence[contract.Card]) -> str | None:
    """Return the memory unit of a node, by its cards' sizes, or estimated without these."""
    units = {unit for unit in (card_unit(card.units, card.shared_mib) for card in cards) if unit}
    if units:
        return units.pop() if len(units) == 1 else None
    largest = max((card.units for card in cards), default=0)
    return None if largest <= 0 else "MiB" if largest > MOST_GIB_ON_A_CARD else "GiB"


def _about(node: JsonObject, found: Node) -> None:
    found.memory_limit = announced_limit(node)
    labels = node["metadata"].get("labels") or {}
    found.labelled = labels.get(contract.NODE_LABEL) in contract.NODE_LABEL_VALUES
    found.announced = bool((node["metadata"].get("annotations") or {}).get(contract.NODE_CARDS))
    for one in (node.get("status") or {}).get("addresses") or []:
        if one.get("type") == "InternalIP":
            found.address = str(one.get("address", ""))
            break


def _gpushare(node: JsonObject, found: Node) -> None:
    text = (node["metadata"].get("annotations") or {}).get(contract.NODE_CARDS)
    capacity = _known(contract.node_resource(node, contract.RESOURCE_MEMORY), contract.RESOURCE_MEMORY, found)
    allocatable = _known(
        contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable"), contract.RESOURCE_MEMORY, found
    )
    left = backends.is_left(node["metadata"].get("labels"), contract.RESOURCE_MEMORY, allocatable)
    if not (text or allocatable or (capacity and not left)):
        return
    part = Part(GPUSHARE if text else UPSTREAM, capacity=capacity, allocatable=allocatable)
    found.parts[GPUSHARE] = part
    cards = _cards(text, found) if text else None
    if cards is None:
        cards = _equal_cards(node, found)
    part.unit = node_unit(cards)
    for card in cards:
        entry = card_entry(card.index, card.uuid, card.model, card.memory_mib, card.units, card.healthy, card.reason)
        part.cards.append(entry)
        part.keys[card.index] = entry
        part.total += card.units


def _cards(text: t.Any, found: Node) -> list[contract.Card] | None:
    try:
        cards = contract.cards_from_annotation(text)
    except contract.ContractError:
        cards = []
        found.problems.append(f"its annotation {contract.NODE_CARDS} can't be parsed")
        return None
    if any(max(card.units, card.memory_mib, card.reserved_mib, card.index, abs(card.minor)) > MOST for card in cards):
        found.problems.append(f"its annotation {contract.NODE_CARDS} has a number above {MOST}")
        return None
    if any(min(card.memory_mib, card.reserved_mib) < 0 for card in cards):
        found.problems.append(f"its annotation {contract.NODE_CARDS} has a negative number")
        return None
    return cards


def _equal_cards(node: JsonObject, found: Node) -> list[contract.Card]:
    """Divide the node's units by the number of its cards, as upstream does."""
    if contract.node_resource(node, contract.RESOURCE_COUNT) > contract.MOST_CARDS:
        found.problems.append(f"its {contract.RESOURCE_COUNT} is above {contract.MOST_CARDS}, which is implausible")
        return []
    annotations = {**(node["metadata"].get("annotations") or {}), contract.NODE_CARDS: ""}
    cards = contract.node_cards({**node, "metadata": {"annotations": annotations}})
    return [card for card in cards if card.units <= MOST]


def _hami_or_nvidia(node: JsonObject, found: Node) -> None:
    annotations = node["metadata"].get("annotations") or {}
    counts, left = nvidia.announced(node, "capacity"), nvidia.announced(node, "allocatable")
    for name in counts:
        counts[name] = _known(counts[name], name, found)
    for name in left:
        left[name] = _known(left[name], name, found)
    # kubelet keeps the name of a resource that isn't announced any more.
    gone = {name for name in {*counts, *left} if not (counts.get(name) or left.get(name))}
    counts, left = ({name: count for name, count in one.items() if name not in gone} for one in (counts, left))
    register = annotations.get(hami.NODE_REGISTER)
    if register and hami.is_abandoned(annotations.get(hami.NODE_HANDSHAKE)):
        found.problems.append(f"its annotation {hami.NODE_REGISTER} is a leftover of HAMi, which doesn't run there now")
    elif register:
        _hami(register, counts, left, found)
        return
    if any(left.values()) or (
        any(counts.values())
        and backends.given(node["metadata"].get("labels")) not in (backends.GPUSHARE, backends.HAMI)
    ):
        _nvidia(node, counts, left, found)


def _hami(register: t.Any, counts: t.Mapping[str, int], left: t.Mapping[str, int], found: Node) -> None:
    try:
        gpus = hami.registered(register)
    except hami.HamiError as error:
        gpus = []
        found.problems.append(str(error))
    part = found.parts[HAMI] = Part(HAMI, "MiB")
    part.slots = {"capacity": counts.get(hami.RESOURCE_COUNT, 0), "allocatable": left.get(hami.RESOURCE_COUNT, 0)}
    for gpu in gpus:
        # The card's own memory is unknown: a node may announce more than it has.
        entry = card_entry(gpu.index, gpu.uuid, gpu.model, 0, gpu.devmem, gpu.healthy, "")
        entry["slots"], entry["cores"], entry["mode"] = gpu.count, gpu.devcore, gpu.mode
        entry["slots_used"] = entry["cores_used"] = 0
        part.cards.append(entry)
        part.keys[gpu.uuid] = entry
        part.capacity += gpu.devmem
        part.allocatable += gpu.devmem if gpu.healthy else 0
    part.total = part.capacity


def _nvidia(node: JsonObject, counts: t.Mapping[str, int], left: t.Mapping[str, int], found: Node) -> None:
    part = found.parts[NVIDIA] = Part(NVIDIA, "count")
    gpus, problem = nvidia.cards(node)
    found.problems += [problem] if problem else []
    names = sorted({*counts, *left})
    part.gpus = gpus
    part.resources = [
        {"name": name, "capacity": counts.get(name, 0), "allocatable": left.get(name, 0), "used": 0} for name in names
    ]
    part.capacity = part.total = sum(counts.values())
    part.allocatable = sum(left.values())


def card_entry(index: int, uuid: str, model: str, memory_mib: int, total: int, healthy: bool, reason: str) -> CardEntry:
    """Return the entry of a card that no pod holds yet.

    :param memory_mib: its size; 0 if it is unknown.
    :param total: its units.
    :param reason: why it isn't healthy.
    """
    return {
        "index": index,
        "uuid": uuid,
        "model": sys.intern(model),
        "memory_mib": memory_mib,
        "healthy": healthy,
        "reason": reason,
        "total": total,
        "used": 0,
        "pods": [],
    }


def _known(count: int, name: str, found: Node) -> int:
    if count > MOST:
        found.problems.append(f"its {name} is above {MOST}, which is implausible")
        return 0
    return count
