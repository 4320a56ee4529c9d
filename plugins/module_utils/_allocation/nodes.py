# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The capacity of nodes, by the contract of each back end, and whether the driver enforces shares. No I/O."""

from __future__ import annotations

import dataclasses
import sys
import typing as t

from .._contracts import backends, hami, virtual
from .._contracts import gpushare as contract
from .._contracts import nvidia_plugin as nvidia
from .._contracts.model import Node, node_of, node_unit
from .._core.types import JsonObject
from .pods import GPUSHARE, HAMI, MOST, NVIDIA, VIRTUAL, Card, CardEntry, DeviceEntry, PodEntry, ResourceEntry


def limit_of_cards(limits: t.Iterable[str]) -> str:
    """Return what a node's cards in slices say about limits, as a device plugin announces it; the worst card counts.

    :param limits: of each card: enforced, off, or the code of the reason why there is none; empty if unknown.
    """
    known = [limit for limit in limits if limit]
    codes = sorted({limit for limit in known if limit not in (contract.LIMIT_ENFORCED, contract.LIMIT_OFF)})
    if codes:
        return contract.LIMIT_UNENFORCED + ", ".join(codes)
    return contract.LIMIT_OFF if contract.LIMIT_OFF in known else known[0] if known else ""


# Its cards are known by gpu-mem and gpu-count only.
UPSTREAM = "gpushare-upstream"


@dataclasses.dataclass
class Part:
    """One back end on one node.

    :param backend: ``gpushare``, ``gpushare-upstream``, ``dra``, ``hami``, ``nvidia``; of cards for virtual machines
        ``passthrough``, ``vgpu``, ``kata``, or ``virtual`` where the node has none of these; empty if the node
        advertises nothing.
    :param unit: ``GiB``, ``MiB``, ``count`` or None.
    :param keys: cards by the key that claims use for them.
    :param slots: of HAMi's nodes.
    :param gpus: of NVIDIA's nodes, by their labels.
    :param devices: cards for virtual machines; None for other back ends.
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
    devices: list[DeviceEntry] | None = None
    total: int = 0
    used: int = 0


@dataclasses.dataclass
class NodeShares:
    """A node with what its back ends have and pods hold.

    :param memory_limit: whether the driver limits memory, as its device plugin or its slices announce it.
    :param parts: by back end.
    :param problems: what of it can't be read, or is implausible.
    """

    node: Node
    memory_limit: str = ""
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def labelled(self) -> bool:
        """It is to share its cards, by a device plugin or by the DRA driver."""
        return self.node.labels.get(contract.NODE_LABEL) in contract.NODE_LABEL_VALUES


def read_node(raw: t.Any) -> list[NodeShares]:
    """Parse a node; empty if it has no name."""
    node = node_of(raw)
    if node is None:
        return []
    read = NodeShares(node, node.announced_limit, problems=[node.problem] if node.problem else [])
    _gpushare(read)
    _hami_or_nvidia(read)
    _virtual(read)
    read.problems = list(dict.fromkeys(read.problems))
    return [read]


def _gpushare(read: NodeShares) -> None:
    node = read.node
    capacity, allocatable = (
        _known(amounts.get(contract.RESOURCE_MEMORY, 0), contract.RESOURCE_MEMORY, read)
        for amounts in (node.capacity, node.allocatable)
    )
    left = backends.is_left(node.labels, contract.RESOURCE_MEMORY, allocatable)
    if not (node.announced or allocatable or (capacity and not left)):
        return
    part = Part(GPUSHARE if node.announced else UPSTREAM, capacity=capacity, allocatable=allocatable)
    read.parts[GPUSHARE] = part
    cards = _cards(read)
    part.unit = node_unit(cards)
    for card in cards:
        entry = card_entry(card.index, card.uuid, card.model, card.memory_mib, card.units, card.healthy, card.reason)
        part.cards.append(entry)
        part.keys[card.index] = entry
        part.total += card.units


def _cards(read: NodeShares) -> t.Sequence[contract.Card]:
    """Return the node's cards; where its annotation is of no use, as upstream divides its units among them."""
    node = read.node
    if node.announced:
        if node.cards_problem:
            read.problems.append(f"its annotation {contract.NODE_CARDS} can't be parsed")
        elif any(max(card.memory_mib, card.reserved_mib, abs(card.minor)) > MOST for card in node.cards):
            read.problems.append(f"its annotation {contract.NODE_CARDS} has a number above {MOST}")
        elif any(min(card.memory_mib, card.reserved_mib) < 0 for card in node.cards):
            read.problems.append(f"its annotation {contract.NODE_CARDS} has a negative number")
        else:
            return node.cards
    count = node.capacity.get(contract.RESOURCE_COUNT, 0)
    if count > contract.MOST_CARDS:
        read.problems.append(f"its {contract.RESOURCE_COUNT} is above {contract.MOST_CARDS}, which is implausible")
    return contract.equal_cards(node.capacity.get(contract.RESOURCE_MEMORY, 0), count)


def _hami_or_nvidia(read: NodeShares) -> None:
    node = read.node
    counts, left = (
        {name: _known(number, name, read) for name, number in nvidia.announced(amounts).items()}
        for amounts in (node.capacity, node.allocatable)
    )
    # kubelet keeps the name of a resource that isn't announced any more.
    gone = {name for name in {*counts, *left} if not (counts.get(name) or left.get(name))}
    counts, left = ({name: number for name, number in part.items() if name not in gone} for part in (counts, left))
    register = node.annotations.get(hami.NODE_REGISTER)
    if register and hami.is_abandoned(node.annotations.get(hami.NODE_HANDSHAKE)):
        read.problems.append(f"its annotation {hami.NODE_REGISTER} is a leftover of HAMi, which doesn't run there now")
    elif register:
        _hami(register, counts, left, read)
        return
    if any(left.values()) or (
        any(counts.values())
        and backends.given(node.labels) not in (backends.GPUSHARE, backends.HAMI, *backends.VIRTUAL)
    ):
        _nvidia(counts, left, read)


def _hami(register: str, counts: t.Mapping[str, int], left: t.Mapping[str, int], read: NodeShares) -> None:
    try:
        gpus = hami.registered(register)
    except hami.HamiError as error:
        gpus = []
        read.problems.append(str(error))
    part = read.parts[HAMI] = Part(HAMI, "MiB")
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


def _nvidia(counts: t.Mapping[str, int], left: t.Mapping[str, int], read: NodeShares) -> None:
    part = read.parts[NVIDIA] = Part(NVIDIA, "count")
    part.gpus, problem = nvidia.cards(read.node.labels)
    read.problems += [problem] if problem else []
    names = sorted({*counts, *left})
    part.resources = [
        {"name": name, "capacity": counts.get(name, 0), "allocatable": left.get(name, 0), "used": 0} for name in names
    ]
    part.capacity = part.total = sum(counts.values())
    part.allocatable = sum(left.values())


def virtual_part(read: NodeShares) -> Part:
    """Return a node's part of cards for virtual machines."""
    part = read.parts.setdefault(VIRTUAL, Part(unit="count"))
    if part.devices is None:
        named = str(read.node.labels.get(backends.LABEL))
        part.backend, part.unit, part.devices = named if named in backends.VIRTUAL else VIRTUAL, "count", []
    return part


def _virtual(read: NodeShares) -> None:
    counts, left = (
        {name: _known(number, name, read) for name, number in amounts.items() if virtual.is_resource(name)}
        for amounts in (read.node.capacity, read.node.allocatable)
    )
    names = sorted(name for name in {*counts, *left} if counts.get(name) or left.get(name))
    # A node of such a back end is listed also while nobody announces its cards.
    if not names and read.node.labels.get(backends.LABEL) not in backends.VIRTUAL:
        return
    part = virtual_part(read)
    part.resources = [
        {"name": name, "capacity": counts.get(name, 0), "allocatable": left.get(name, 0), "used": 0} for name in names
    ]
    part.capacity = part.total = sum(row["capacity"] for row in part.resources)
    part.allocatable = sum(row["allocatable"] for row in part.resources)


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


def _known(count: int, name: str, read: NodeShares) -> int:
    if count > MOST:
        read.problems.append(f"its {name} is above {MOST}, which is implausible")
        return 0
    return count
