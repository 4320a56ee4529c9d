# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide which nodes can take a pod, and why the others can't. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpushare.extender.state import SEPARATOR, NodeView, Room
from gpushare.shared._contracts.gpushare import Demand, Reason, Refusal

UNKNOWN_NODE = str(Refusal(Reason.NODE_UNKNOWN, "the gpushare extender doesn't know this node yet"))
NO_MEMORY = Refusal(Reason.NO_GPU_MEMORY, "the node announces no GPU memory")
NO_MATCHING_MODEL = Refusal(Reason.NO_MATCHING_MODEL, "no healthy card is of a model that the pod accepts")

NO_ROOM = Room((), ())

View = Callable[[str], NodeView | None]


class Verdict(NamedTuple):
    """Names of nodes, with the reason where they can't: ``failed`` may change when pods go, ``hopeless`` doesn't."""

    passed: list[str]
    failed: dict[str, str]
    unresolvable: dict[str, str]


def judge(names: Iterable[str], view: View, demand: Demand) -> Verdict:
    """Sort nodes by whether they have the cards, and the free memory on them, that a pod requests."""
    if demand.count > 1 or demand.models or demand.excluded:
        return _evaluate_cards(names, view, demand)
    verdict = Verdict([], {}, {})
    passed, failed, unresolvable = verdict
    units = demand.units
    texts: dict[tuple[int, int, int, str], str] = {}
    for name in names:
        node = view(name)
        if node is None:
            failed[name] = UNKNOWN_NODE
            continue
        largest, largest_card = node.largest, node.largest_card
        if largest >= units:
            passed.append(name)
            continue
        if largest_card <= 0:
            unresolvable[name] = str(refusal(node, demand))
            continue
        # In large clusters many nodes have the same text; it is built once.
        key = largest, largest_card, node.unplaced, node.unit
        text = texts.get(key)
        if text is None:
            text = texts[key] = str(refusal(node, demand))
        (failed if largest_card >= units else unresolvable)[name] = text
    return verdict


def _evaluate_cards(names: Iterable[str], view: View, demand: Demand) -> Verdict:
    """The same for a pod that wants several cards or is particular about them.

    The accepted models are determined once, not for each card. For each node one element of its sorted free memory is
    compared: that of the last requested card.
    """
    verdict = Verdict([], {}, {})
    passed, failed, unresolvable = verdict
    share, count, by_model = demand.share, demand.count, bool(demand.models or demand.excluded)
    chosen: dict[str, _Choice] = {}
    texts: dict[tuple[int, int, int, int, str], str] = {}
    for name in names:
        node = view(name)
        if node is None:
            failed[name] = UNKNOWN_NODE
            continue
        room = node.room
        if by_model:
            choice = chosen.get(node.kinds)
            if choice is None:
                choice = chosen[node.kinds] = _choice(node.kinds, demand)
            if choice is not ALL:
                room = _selected(node, choice)
        free, sizes = room
        if len(free) >= count and free[-count] >= share:
            passed.append(name)
            continue
        if node.largest_card <= 0:
            unresolvable[name] = str(refusal(node, demand))
            continue
        if not free:
            unresolvable[name] = str(NO_MATCHING_MODEL)
            continue
        # In large clusters many nodes have the same text; it is built once, by what it depends on.
        unplaced = node.unplaced
        if count == 1:
            key = free[-1], sizes[-1], unplaced, 0, node.unit
        else:
            cards = len(free)
            settled = cards - bisect_left(free, share - unplaced) if unplaced else 0
            key = cards - bisect_left(free, share), cards - bisect_left(sizes, share), unplaced, settled, node.unit
        text = texts.get(key)
        if text is None:
            text = texts[key] = str(_lack(node, room, demand))
        (failed if len(sizes) >= count and sizes[-count] >= share else unresolvable)[name] = text
    return verdict


# Which of a node's models a pod takes, by their position.
_Choice = tuple[int, ...]
ALL: _Choice = (-1,)


def _choice(kinds: str, demand: Demand) -> _Choice:
    models = kinds.split(SEPARATOR)
    taken = tuple(at for at, model in enumerate(models) if demand.accepts_model(model))
    return ALL if len(taken) == len(models) else taken


def _selected(node: NodeView, choice: _Choice) -> Room:
    """What a node has of the cards of some of its models."""
    if not choice or not node.rooms:
        return NO_ROOM
    rooms = [node.rooms[at] for at in choice]
    if len(rooms) == 1:
        return rooms[0]
    free = sorted(units for room in rooms for units in room.free)
    return Room(tuple(free), tuple(sorted(units for room in rooms for units in room.sizes)))


def refusal(node: NodeView, demand: Demand) -> Refusal:
    """Why a node doesn't have the room, or the cards, for a pod.

    Equal numbers give equal words, because the scheduler puts nodes with equal reasons together.
    """
    if not node.cards:
        return NO_MEMORY
    if node.largest_card <= 0:
        reasons = "; ".join(sorted({card.reason for card in node.cards if card.reason}))
        return Refusal(Reason.NO_HEALTHY_CARD, "no card is healthy" + (f": {reasons}" if reasons else ""))
    choice = _choice(node.kinds, demand)
    return _lack(node, node.room if choice is ALL else _selected(node, choice), demand)


def _lack(node: NodeView, room: Room, demand: Demand) -> Refusal:
    """
    :param room: of the healthy cards that the pod takes.
    """
    if not room.free:
        return NO_MATCHING_MODEL
    share, count, cards = demand.share, demand.count, len(room.free)
    unit = f" {node.unit}" if node.unit else ""
    which = " of a model that the pod accepts" if demand.models or demand.excluded else ""
    if count > 1:
        large = cards - bisect_left(room.sizes, share)
        if large < count:
            text = f"{large} of {count} requested cards can hold {share}{unit}"
            return Refusal(Reason.CARD_TOO_SMALL, text)
        text = f"{cards - bisect_left(room.free, share)} of {count} requested cards have {share}{unit} free"
    elif room.sizes[-1] < share:
        text = f"largest healthy card{which} holds {room.sizes[-1]} of {share}{unit}"
        return Refusal(Reason.CARD_TOO_SMALL, text)
    else:
        text = f"largest free share on one card{which} is {max(0, room.free[-1])} of {share}{unit}"
    if node.unplaced and cards - bisect_left(room.free, share - node.unplaced) >= count:
        text += f", with {node.unplaced}{unit} held by pods whose card isn't known yet"
    return Refusal(Reason.INSUFFICIENT_GPU_MEMORY, text)
