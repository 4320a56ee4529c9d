# SPDX-License-Identifier: GPL-3.0-or-later
"""Which nodes can take a pod, and in words why the others can't. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpushare.contract import Wish
from gpushare.extender_state import SEPARATOR, NodeView, Room

UNKNOWN_NODE = "the gpushare extender doesn't know this node yet"
NO_MEMORY = "no GPU memory is announced"
NO_HEALTHY_CARD = "no card is healthy"
NO_SUCH_MODEL = "no healthy card is of a model that the pod takes"

NO_ROOM = Room((), ())

View = Callable[[str], NodeView | None]


class Verdict(NamedTuple):
    """Names of nodes, with the reason where they can't: ``failed`` may change when pods go, ``hopeless`` doesn't."""

    passed: list[str]
    failed: dict[str, str]
    hopeless: dict[str, str]


def judge(names: Iterable[str], view: View, wish: Wish) -> Verdict:
    """Sort nodes by whether they have the cards, and the room on them, that a pod wants."""
    if wish.count > 1 or wish.models or wish.excluded:
        return _judge_cards(names, view, wish)
    verdict = Verdict([], {}, {})
    passed, failed, hopeless = verdict
    units = wish.units
    said: dict[tuple[int, int, int, str], str] = {}
    for name in names:
        node = view(name)
        if node is None:
            failed[name] = UNKNOWN_NODE
            continue
        largest, biggest = node.largest, node.biggest
        if largest >= units:
            passed.append(name)
            continue
        if biggest <= 0:
            hopeless[name] = refusal(node, wish)
            continue
        # Large clusters say the same of many nodes; the words are made once.
        key = largest, biggest, node.unplaced, node.unit
        words = said.get(key)
        if words is None:
            words = said[key] = refusal(node, wish)
        (failed if biggest >= units else hopeless)[name] = words
    return verdict


def _judge_cards(names: Iterable[str], view: View, wish: Wish) -> Verdict:
    """The same for a pod that wants several cards or is particular about them.

    Which models it takes is found out once, not for each card. What is left for a node is a look at the place in its
    ascending room where the least of the wanted cards would be.
    """
    verdict = Verdict([], {}, {})
    passed, failed, hopeless = verdict
    share, count, particular = wish.share, wish.count, bool(wish.models or wish.excluded)
    chosen: dict[str, _Choice] = {}
    said: dict[tuple[int, int, int, int, str], str] = {}
    for name in names:
        node = view(name)
        if node is None:
            failed[name] = UNKNOWN_NODE
            continue
        room = node.room
        if particular:
            choice = chosen.get(node.kinds)
            if choice is None:
                choice = chosen[node.kinds] = _choice(node.kinds, wish)
            if choice is not ALL:
                room = _only(node, choice)
        free, sizes = room
        if len(free) >= count and free[-count] >= share:
            passed.append(name)
            continue
        if node.biggest <= 0:
            hopeless[name] = refusal(node, wish)
            continue
        if not free:
            hopeless[name] = NO_SUCH_MODEL
            continue
        # Large clusters say the same of many nodes; the words are made once, of what they depend on.
        unplaced = node.unplaced
        if count == 1:
            key = free[-1], sizes[-1], unplaced, 0, node.unit
        else:
            cards = len(free)
            settled = cards - bisect_left(free, share - unplaced) if unplaced else 0
            key = cards - bisect_left(free, share), cards - bisect_left(sizes, share), unplaced, settled, node.unit
        words = said.get(key)
        if words is None:
            words = said[key] = _words(node, room, wish)
        (failed if len(sizes) >= count and sizes[-count] >= share else hopeless)[name] = words
    return verdict


# Which of a node's models a pod takes, by their position.
_Choice = tuple[int, ...]
ALL: _Choice = (-1,)


def _choice(kinds: str, wish: Wish) -> _Choice:
    models = kinds.split(SEPARATOR)
    taken = tuple(at for at, model in enumerate(models) if wish.takes(model))
    return ALL if len(taken) == len(models) else taken


def _only(node: NodeView, choice: _Choice) -> Room:
    """What a node has of the cards of some of its models."""
    if not choice or not node.rooms:
        return NO_ROOM
    rooms = [node.rooms[at] for at in choice]
    if len(rooms) == 1:
        return rooms[0]
    free = sorted(units for room in rooms for units in room.free)
    return Room(tuple(free), tuple(sorted(units for room in rooms for units in room.sizes)))


def refusal(node: NodeView, wish: Wish) -> str:
    """Why a node doesn't have the room, or the cards, for a pod.

    Equal numbers give equal words, because the scheduler puts nodes with equal reasons together.
    """
    if not node.cards:
        return NO_MEMORY
    if node.biggest <= 0:
        reasons = sorted({card.reason for card in node.cards if card.reason})
        return f"{NO_HEALTHY_CARD}: {'; '.join(reasons)}" if reasons else NO_HEALTHY_CARD
    choice = _choice(node.kinds, wish)
    return _words(node, node.room if choice is ALL else _only(node, choice), wish)


def _words(node: NodeView, room: Room, wish: Wish) -> str:
    """
    :param room: of the healthy cards that the pod takes.
    """
    if not room.free:
        return NO_SUCH_MODEL
    share, count, cards = wish.share, wish.count, len(room.free)
    unit = f" {node.unit}" if node.unit else ""
    which = " of a model that the pod takes" if wish.models or wish.excluded else ""
    if count > 1:
        large = cards - bisect_left(room.sizes, share)
        if large < count:
            return f"{large} of {count} wanted cards can hold {share}{unit}"
        words = f"{cards - bisect_left(room.free, share)} of {count} wanted cards have {share}{unit} free"
    elif room.sizes[-1] < share:
        return f"largest healthy card{which} holds {room.sizes[-1]} of {share}{unit}"
    else:
        words = f"largest free share on one card{which} is {max(0, room.free[-1])} of {share}{unit}"
    if node.unplaced and cards - bisect_left(room.free, share - node.unplaced) >= count:
        words += f", with {node.unplaced}{unit} held by pods whose card isn't known yet"
    return words
