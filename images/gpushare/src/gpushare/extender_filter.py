# SPDX-License-Identifier: GPL-3.0-or-later
"""Which nodes can take a pod, and in words why the others can't. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpushare.extender_state import NodeView

UNKNOWN_NODE = "the gpushare extender doesn't know this node yet"
NO_MEMORY = "no GPU memory is announced"
NO_HEALTHY_CARD = "no card is healthy"


class Verdict(NamedTuple):
    """Names of nodes, with the reason where they can't: ``failed`` may change when pods go, ``hopeless`` doesn't."""

    passed: list[str]
    failed: dict[str, str]
    hopeless: dict[str, str]


def judge(names: Iterable[str], view: Callable[[str], NodeView | None], units: int) -> Verdict:
    """Sort nodes by whether one card has room for so many units."""
    verdict = Verdict([], {}, {})
    passed, failed, hopeless = verdict
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
        # Large clusters say the same of many nodes; the words are made once.
        key = largest, biggest if node.cards else -1, node.unplaced, node.unit
        words = said.get(key)
        if words is None:
            words = said[key] = refusal(node, units)
        (failed if biggest >= units else hopeless)[name] = words
    return verdict


def refusal(node: NodeView, units: int) -> str:
    """Why no card of a node can take so many units.

    Equal numbers give equal words, because the scheduler puts nodes with equal reasons together.
    """
    if not node.cards:
        return NO_MEMORY
    if node.biggest <= 0:
        return NO_HEALTHY_CARD
    unit = f" {node.unit}" if node.unit else ""
    if node.biggest < units:
        return f"largest healthy card holds {node.biggest} of {units}{unit}"
    words = f"largest free share on one card is {node.largest} of {units}{unit}"
    if node.unplaced and node.largest + node.unplaced >= units:
        words += f", with {node.unplaced}{unit} held by pods whose card isn't known yet"
    return words
