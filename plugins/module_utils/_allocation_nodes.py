# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What nodes have to give away, by the contract of each backend. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils import _hami as hami
from ansible_collections.kubegpu.share.plugins.module_utils import _nvidia_plugin as nvidia
from ansible_collections.kubegpu.share.plugins.module_utils._allocation_pods import (
    GPUSHARE,
    HAMI,
    JUNK,
    MOST,
    NVIDIA,
    Card,
)
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._memory_limit import told

# Only gpu-mem and gpu-count tell of its cards.
UPSTREAM = "gpushare-upstream"

# Without the cards' own sizes, kubectl inspect's guess: more than so many units on a card are MiB.
MOST_GIB_ON_A_CARD = 100
# More cards than any machine has: a number of them that is made up must not make so many.
MOST_CARDS = 1024


@dataclasses.dataclass
class Part:
    """One backend on one node.

    :param backend: ``gpushare``, ``gpushare-upstream``, ``hami``, ``nvidia``; empty where nothing is announced.
    :param unit: ``GiB``, ``MiB``, ``count`` or None.
    :param cards: as they are told, with nothing on them yet.
    :param keys: a card by what claims call it.
    :param more: what only this backend has.
    """

    backend: str = ""
    unit: str | None = None
    capacity: int = 0
    allocatable: int = 0
    cards: list[Json] = dataclasses.field(default_factory=list)
    keys: dict[Card, Json] = dataclasses.field(default_factory=dict)
    pending: list[Json] = dataclasses.field(default_factory=list)
    more: Json = dataclasses.field(default_factory=dict)
    total: int = 0
    used: int = 0


@dataclasses.dataclass
class Node:
    """A node as far as allocation has to do with it."""

    name: str
    address: str = ""
    memory_limit: str = ""
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def read_node(node: t.Any) -> list[Node]:
    """A node; nothing where not even its name can be read."""
    metadata = node.get("metadata") if isinstance(node, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        return []
    found = Node(name)
    for read in (_about, _gpushare, _hami_or_nvidia):
        try:
            read(node, found)
        except JUNK:
            found.problems.append("it isn't written as the API server writes a node")
    found.problems = list(dict.fromkeys(found.problems))
    return [found]


def card_unit(units: int, memory_mib: int) -> str | None:
    """In which memory unit a card is announced, or None where its size isn't known."""
    if memory_mib <= 0 or units <= 0:
        return None
    return next((unit for unit in contract.MIB_PER_UNIT if contract.units_of(memory_mib, unit) == units), None)


def node_unit(cards: t.Sequence[contract.Card]) -> str | None:
    """In which memory unit a node counts: told by its cards, or guessed where they don't tell."""
    told = {unit for unit in (card_unit(card.units, card.memory_mib) for card in cards) if unit}
    if told:
        return told.pop() if len(told) == 1 else None
    largest = max((card.units for card in cards), default=0)
    return None if largest <= 0 else "MiB" if largest > MOST_GIB_ON_A_CARD else "GiB"


def _about(node: Json, found: Node) -> None:
    found.memory_limit = told(node)
    for one in (node.get("status") or {}).get("addresses") or []:
        if one.get("type") == "InternalIP":
            found.address = str(one.get("address", ""))
            break


def _gpushare(node: Json, found: Node) -> None:
    text = (node["metadata"].get("annotations") or {}).get(contract.NODE_CARDS)
    capacity = _known(contract.node_resource(node, contract.RESOURCE_MEMORY), contract.RESOURCE_MEMORY, found)
    allocatable = _known(
        contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable"), contract.RESOURCE_MEMORY, found
    )
    if not (text or capacity or allocatable):
        return
    part = Part(GPUSHARE if text else UPSTREAM, capacity=capacity, allocatable=allocatable)
    found.parts[GPUSHARE] = part
    cards = _cards(text, found) if text else None
    if cards is None:
        cards = _equal_cards(node, found)
    part.unit = node_unit(cards)
    for card in cards:
        shown = _card(card.index, card.uuid, card.model, card.memory_mib, card.units, card.healthy, card.reason)
        part.cards.append(shown)
        part.keys[card.index] = shown
        part.total += card.units


def _cards(text: t.Any, found: Node) -> list[contract.Card] | None:
    try:
        cards = contract.cards_from_annotation(text)
    except contract.ContractError:
        cards = []
        found.problems.append(f"its annotation {contract.NODE_CARDS} can't be read")
        return None
    if any(max(card.units, card.memory_mib, card.index, abs(card.minor)) > MOST for card in cards):
        found.problems.append(f"its annotation {contract.NODE_CARDS} has a number above {MOST}")
        return None
    if any(card.memory_mib < 0 for card in cards):
        found.problems.append(f"its annotation {contract.NODE_CARDS} has a negative number")
        return None
    return cards


def _equal_cards(node: Json, found: Node) -> list[contract.Card]:
    """As upstream does it: all that the node has, divided by the number of its cards."""
    if contract.node_resource(node, contract.RESOURCE_COUNT) > MOST_CARDS:
        found.problems.append(f"its {contract.RESOURCE_COUNT} is above {MOST_CARDS}, which can't be true")
        return []
    annotations = {**(node["metadata"].get("annotations") or {}), contract.NODE_CARDS: ""}
    cards = contract.node_cards({**node, "metadata": {"annotations": annotations}})
    return [card for card in cards if card.units <= MOST]


def _hami_or_nvidia(node: Json, found: Node) -> None:
    annotations = node["metadata"].get("annotations") or {}
    counts, left = nvidia.announced(node, "capacity"), nvidia.announced(node, "allocatable")
    for name in counts:
        counts[name] = _known(counts[name], name, found)
    for name in left:
        left[name] = _known(left[name], name, found)
    register = annotations.get(hami.NODE_REGISTER)
    if register and hami.gone(annotations.get(hami.NODE_HANDSHAKE)):
        found.problems.append(f"its annotation {hami.NODE_REGISTER} was left behind by HAMi, which is gone from it")
    elif register:
        _hami(register, counts, left, found)
        return
    if any(counts.values()) or any(left.values()):
        _nvidia(node, counts, left, found)


def _hami(register: t.Any, counts: t.Mapping[str, int], left: t.Mapping[str, int], found: Node) -> None:
    try:
        gpus = hami.registered(register)
    except hami.HamiError as error:
        gpus = []
        found.problems.append(str(error))
    part = found.parts[HAMI] = Part(HAMI, "MiB")
    part.more["slots"] = {
        "capacity": counts.get(hami.RESOURCE_COUNT, 0),
        "allocatable": left.get(hami.RESOURCE_COUNT, 0),
    }
    for gpu in gpus:
        # How much memory the card itself has can't be told from this: a node may give out more than there is.
        shown = _card(gpu.index, gpu.uuid, gpu.model, 0, gpu.devmem, gpu.healthy, "")
        shown.update(slots=gpu.count, slots_used=0, cores=gpu.devcore, cores_used=0, mode=gpu.mode)
        part.cards.append(shown)
        part.keys[gpu.uuid] = shown
        part.capacity += gpu.devmem
        part.allocatable += gpu.devmem if gpu.healthy else 0
    part.total = part.capacity


def _nvidia(node: Json, counts: t.Mapping[str, int], left: t.Mapping[str, int], found: Node) -> None:
    part = found.parts[NVIDIA] = Part(NVIDIA, "count")
    gpus, problem = nvidia.cards(node)
    found.problems += [problem] if problem else []
    names = sorted({*counts, *left})
    part.more["gpus"] = gpus
    part.more["resources"] = [
        {"name": name, "capacity": counts.get(name, 0), "allocatable": left.get(name, 0), "used": 0} for name in names
    ]
    part.capacity = part.total = sum(counts.values())
    part.allocatable = sum(left.values())


def _card(index: int, uuid: str, model: str, memory_mib: int, total: int, healthy: bool, reason: str) -> Json:
    return {
        "index": index,
        "uuid": uuid,
        "model": model,
        "memory_mib": memory_mib,
        "healthy": healthy,
        "reason": reason,
        "total": total,
        "used": 0,
        "pods": [],
    }


def _known(count: int, name: str, found: Node) -> int:
    if count > MOST:
        found.problems.append(f"its {name} is above {MOST}, which can't be true")
        return 0
    return count
