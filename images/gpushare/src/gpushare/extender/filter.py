# SPDX-License-Identifier: GPL-3.0-or-later
"""Select the nodes with enough free GPU memory for a pod, and name the reason for each other node. No I/O."""

from __future__ import annotations

import dataclasses
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpushare.extender.state import SEPARATOR, Capacity, NodeView
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Demand, Reason, Refusal
from gpushare.shared._core.types import JsonObject

UNKNOWN_NODE = str(Refusal(Reason.NODE_UNKNOWN, "the gpushare extender doesn't know this node yet"))
NO_MEMORY = Refusal(Reason.NO_GPU_MEMORY, "the node announces no GPU memory")
NO_MATCHING_MODEL = Refusal(Reason.NO_MATCHING_MODEL, "no healthy card is of a model that the pod accepts")

View = Callable[[str], NodeView | None]


class FilterResult(NamedTuple):
    """Names of nodes. ``failed`` nodes may pass when pods end, ``unresolvable`` ones don't; both with the reason."""

    passed: list[str]
    failed: dict[str, str]
    unresolvable: dict[str, str]


@dataclasses.dataclass(frozen=True)
class RefusedPod:
    """A pod that no node of a filter request can take now.

    :param nodes: those that may take it when pods end.
    :param filtered: all nodes of the request.
    :param freed: the state's counter before the evaluation: while it is unchanged, no memory has become free.
    :param preempts: whether the pod may have others evicted.
    """

    namespace: str
    name: str
    uid: str
    demand: Demand
    priority: int
    nodes: Sequence[str]
    filtered: Sequence[str]
    freed: int
    preempts: bool = True

    @classmethod
    def of(
        cls, pod: JsonObject, demand: Demand, nodes: Sequence[str], filtered: Sequence[str], freed: int = 0
    ) -> RefusedPod:
        """Make it of a scheduler's copy of the pod.

        :param nodes: see the class, as for ``filtered`` and ``freed``.
        """
        metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
        names = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        priority, preempts = contract.pod_priority(pod), spec.get("preemptionPolicy") != "Never"
        # Hundreds of such pods may be kept, and each request has strings of its own.
        kept = [sys.intern(name) for name in nodes], [sys.intern(name) for name in filtered]
        return cls(*names, contract.pod_uid(pod), demand, priority, *kept, freed, preempts)


def evaluate(names: Iterable[str], view: View, demand: Demand) -> FilterResult:
    """Divide nodes by whether they have the cards, and the free memory on them, that a pod requests.

    :param view: looks up a node by its name.
    """
    if demand.count > 1 or demand.models or demand.excluded:
        return _evaluate_cards(names, view, demand)
    result = FilterResult([], {}, {})
    passed, failed, unresolvable = result
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
        # In large clusters many nodes have the same message; it is built once.
        key = largest, largest_card, node.unplaced, node.unit
        text = texts.get(key)
        if text is None:
            text = texts[key] = str(refusal(node, demand))
        (failed if largest_card >= units else unresolvable)[name] = text
    return result


def _evaluate_cards(names: Iterable[str], view: View, demand: Demand) -> FilterResult:
    """Do the same for a pod that requests several cards or certain models.

    The accepted models are determined once, not for each card. For each node one element of its sorted free memory is
    compared: that of the last requested card.
    """
    result = FilterResult([], {}, {})
    passed, failed, unresolvable = result
    share, count, by_model = demand.share, demand.count, bool(demand.models or demand.excluded)
    chosen: dict[str, _Choice] = {}
    texts: dict[tuple[int, int, int, int, str], str] = {}
    no_model = str(NO_MATCHING_MODEL)
    for name in names:
        node = view(name)
        if node is None:
            failed[name] = UNKNOWN_NODE
            continue
        capacity = node.capacity
        if by_model:
            choice = chosen.get(node.kinds)
            if choice is None:
                choice = chosen[node.kinds] = _choice(node.kinds, demand)
            if not choice and node.largest_card > 0:
                unresolvable[name] = no_model
                continue
            if choice is not ALL:
                capacity = _selected(node, choice)
        free, sizes = capacity
        if len(free) >= count and free[-count] >= share:
            passed.append(name)
            continue
        if node.largest_card <= 0:
            unresolvable[name] = str(refusal(node, demand))
            continue
        # In large clusters many nodes have the same message; it is built once for all that it depends on.
        unplaced = node.unplaced
        if count == 1:
            key = free[-1], sizes[-1], unplaced, 0, node.unit
        else:
            cards = len(free)
            settled = cards - bisect_left(free, share - unplaced) if unplaced else 0
            key = cards - bisect_left(free, share), cards - bisect_left(sizes, share), unplaced, settled, node.unit
        text = texts.get(key)
        if text is None:
            text = texts[key] = str(_insufficient(node, capacity, demand))
        (failed if len(sizes) >= count and sizes[-count] >= share else unresolvable)[name] = text
    return result


# The positions of those of a node's models that a pod accepts.
_Choice = tuple[int, ...]
ALL: _Choice = (-1,)


def _choice(kinds: str, demand: Demand) -> _Choice:
    models = kinds.split(SEPARATOR)
    accepted = tuple(at for at, model in enumerate(models) if demand.accepts_model(model))
    return ALL if len(accepted) == len(models) else accepted


def _selected(node: NodeView, choice: _Choice) -> Capacity:
    """Return the capacity of the cards of some of a node's models."""
    selected = [node.by_model[at] for at in choice] if node.by_model else []
    if len(selected) == 1:
        return selected[0]
    free = sorted(units for capacity in selected for units in capacity.free)
    return Capacity(tuple(free), tuple(sorted(units for capacity in selected for units in capacity.sizes)))


def refusal(node: NodeView, demand: Demand) -> Refusal:
    """Return why a node doesn't have the free memory, or the cards, for a pod.

    Equal numbers give equal text, because the scheduler groups nodes by it.
    """
    if not node.cards:
        return NO_MEMORY
    if node.largest_card <= 0:
        reasons = "; ".join(sorted({card.reason for card in node.cards if card.reason}))
        return Refusal(Reason.NO_HEALTHY_CARD, "no card is healthy" + (f": {reasons}" if reasons else ""))
    choice = _choice(node.kinds, demand)
    return _insufficient(node, node.capacity if choice is ALL else _selected(node, choice), demand)


def _insufficient(node: NodeView, capacity: Capacity, demand: Demand) -> Refusal:
    """Return why a node's cards can't hold a pod.

    :param capacity: of the healthy cards that the pod accepts.
    """
    if not capacity.free:
        return NO_MATCHING_MODEL
    share, count, cards = demand.share, demand.count, len(capacity.free)
    unit = f" {node.unit}" if node.unit else ""
    which = " of a model that the pod accepts" if demand.models or demand.excluded else ""
    if count > 1:
        large = cards - bisect_left(capacity.sizes, share)
        if large < count:
            text = f"{large} of {count} requested cards can hold {share}{unit}"
            return Refusal(Reason.CARD_TOO_SMALL, text)
        text = f"{cards - bisect_left(capacity.free, share)} of {count} requested cards have {share}{unit} free"
    elif capacity.sizes[-1] < share:
        text = f"largest healthy card{which} holds {capacity.sizes[-1]} of {share}{unit}"
        return Refusal(Reason.CARD_TOO_SMALL, text)
    else:
        text = f"largest free share on one card{which} is {max(0, capacity.free[-1])} of {share}{unit}"
    if node.unplaced and cards - bisect_left(capacity.free, share - node.unplaced) >= count:
        text += f", with {node.unplaced}{unit} held by pods whose card isn't known yet"
    return Refusal(Reason.INSUFFICIENT_GPU_MEMORY, text)
