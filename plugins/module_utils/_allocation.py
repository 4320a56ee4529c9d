# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Who holds how much of which card: computed from nodes and pods of the API alone. No I/O.

The numbers are those of ``kubectl inspect gpushare -d`` where its assumptions hold (equal cards, all of them healthy);
where they don't, each card has its own size.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, Json
from ansible_collections.kubegpu.share.plugins.module_utils._memory_limit import told

# Without the cards' own sizes, kubectl inspect's guess: more than so many units on a card are MiB.
MOST_GIB_ON_A_CARD = 100


def card_unit(units: int, memory_mib: int) -> str | None:
    """In which memory unit a card is announced, or None where its size isn't known."""
    if memory_mib <= 0 or units <= 0:
        return None
    return next((unit for unit in contract.MIB_PER_UNIT if contract.units_of(memory_mib, unit) == units), None)


def node_unit(cards: t.Sequence[Card]) -> str | None:
    """In which memory unit a node counts: told by its cards, or guessed where they don't tell."""
    told = {unit for unit in (card_unit(card.units, card.memory_mib) for card in cards) if unit}
    if told:
        return told.pop() if len(told) == 1 else None
    largest = max((card.units for card in cards), default=0)
    return None if largest <= 0 else "MiB" if largest > MOST_GIB_ON_A_CARD else "GiB"


def allocation(nodes: t.Iterable[Json], pods: t.Iterable[Json]) -> Json:
    """The allocation of a cluster, as plain data; nodes in natural order of their names."""
    by_node: dict[str, list[Json]] = {}
    waiting = []
    for pod in pods:
        if contract.counts(pod):
            by_node.setdefault(contract.pod_node(pod), []).append(pod)
        elif not contract.pod_node(pod) and not contract.finished(pod) and contract.pod_units(pod) > 0:
            waiting.append({**_name(pod), "units": contract.pod_units(pod), "reason": _unscheduled(pod)})
    found = [_node(node, by_node.get(node["metadata"]["name"], [])) for node in nodes]
    shown = sorted((one for one in found if one is not None), key=lambda one: natural(one["name"]))
    units = {one["unit"] for one in shown if one["unit"]}
    return {
        "unit": units.pop() if len(units) == 1 else None,
        "nodes": shown,
        "waiting": sorted(waiting, key=lambda one: (one["namespace"], natural(one["name"]))),
        "total": sum(one["total"] for one in shown),
        "used": sum(one["used"] for one in shown),
    }


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key in which gpu2 comes before gpu10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", text)
    return [(0, int(number), "") if number else (1, 0, word) for number, word in parts]


def percent(used: int, total: int) -> int:
    """Truncated, as kubectl inspect does."""
    return used * 100 // total if total > 0 else 0


def _node(node: Json, pods: list[Json]) -> Json | None:
    capacity = contract.node_resource(node, contract.RESOURCE_MEMORY)
    allocatable = contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable")
    cards = contract.node_cards(node)
    if not (cards or capacity or allocatable or pods):
        return None
    held: dict[int, list[Json]] = {card.index: [] for card in cards}
    pending: list[Json] = []
    for pod in sorted(pods, key=lambda one: (str(one["metadata"].get("namespace")), natural(one["metadata"]["name"]))):
        shares = contract.shares(pod) or {-1: contract.pod_units(pod)}
        for index, units in shares.items():
            held.get(index, pending).append(_pod(pod, units))
    used, unknown = contract.used_units(cards, pods)
    return {
        "name": node["metadata"]["name"],
        "address": _address(node),
        "unit": node_unit(cards),
        "memory_limit": told(node),
        "capacity": capacity,
        "allocatable": allocatable,
        "total": sum(card.units for card in cards),
        "used": sum(used.values()) + unknown,
        "cards": [
            {
                "index": card.index,
                "uuid": card.uuid,
                "model": card.model,
                "memory_mib": card.memory_mib,
                "healthy": card.healthy,
                "reason": card.reason,
                "total": card.units,
                "used": used[card.index],
                "pods": held[card.index],
            }
            for card in cards
        ],
        "pending": pending,
    }


def _pod(pod: Json, units: int) -> Json:
    """A pod and what it holds of one card; a pod of several cards is on each of them."""
    booked = contract.booking(pod)
    return {
        **_name(pod),
        "units": units,
        "phase": str((pod.get("status") or {}).get("phase", "Unknown")),
        "assigned": booked is not None and booked.assigned,
        "terminating": bool((pod.get("metadata") or {}).get("deletionTimestamp")),
    }


def _name(pod: Json) -> dict[str, str]:
    metadata = pod.get("metadata") or {}
    return {"namespace": str(metadata.get("namespace", "")), "name": str(metadata.get("name", ""))}


def _address(node: Json) -> str:
    for one in (node.get("status") or {}).get("addresses") or []:
        if one.get("type") == "InternalIP":
            return str(one.get("address", ""))
    return ""


def _unscheduled(pod: Json) -> str:
    for one in (pod.get("status") or {}).get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return " ".join(str(one.get("message") or one.get("reason") or "").split())
    return ""
