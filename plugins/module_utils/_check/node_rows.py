# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the report's row of each node: what pods claim of its GPUs, and what they use. No I/O."""

from __future__ import annotations

import typing as t

from .._allocation.memory_limit import announced_limit
from .._contracts import gpushare as contract
from .._contracts import hami
from .._core.types import JsonObject
from .grants import usage_of
from .hami import allocation_of, register_of
from .model import DRA, HAMI, NVIDIA, Gpu, Node, Pod
from .nvidia import allocated_entries, replicas_of
from .parse import MAX_NUMBER

Claims = list[tuple[Pod, t.Optional[int]]]


def node_row(node: Node) -> JsonObject:
    """Return a node and its GPUs, as the report has them."""
    backend = "mixed" if len(node.backends) > 1 else node.backends[0] if node.backends else "none"
    if node.sharing:
        cards, unit = _gpushare(node), node.unit
    elif DRA in node.backends:
        cards, unit = _claims(node), node.unit
    elif HAMI in node.backends:
        cards, unit = _hami(node), "MiB"
    else:
        cards, unit = _nvidia(node), "count" if NVIDIA in node.backends else "MiB"
    return {
        "name": node.name,
        "backend": backend,
        "unit": unit,
        "unit_mib": (node.unit_mib if node.sharing or DRA in node.backends else 1) or 1,
        "memory_limit": announced_limit(node.json),
        "cards": cards,
    }


def _card(
    node: Node,
    index: int,
    uuid: str,
    model: str,
    total: int | None,
    healthy: bool,
    claims: Claims,
    reason: str = "",
    claimable: int | None = None,
) -> JsonObject:
    gpu = node.nvml.gpu(uuid)
    sums = [mib for _pod, mib in claims]
    known = [mib for mib in sums if mib is not None]
    return {
        "index": index,
        "uuid": uuid,
        "model": model or (gpu.name if gpu else ""),
        "total_mib": _clip(total if total else gpu.total_mib if gpu else None),
        # What pods can claim: whole units, without what the driver reserves.
        "claimable_mib": _clip(total if claimable is None else claimable),
        "claimed_mib": _clip(sum(known)) if len(known) == len(sums) else None,
        "used_mib": gpu.used_mib if gpu else None,
        "healthy": healthy,
        "reason": reason,
        "pods": [
            {
                "pod": pod.key,
                "uid": pod.uid,
                "claimed_mib": _clip(mib),
                "used_mib": usage_of(gpu, pod).mib if gpu else None,
                "terminating": pod.terminating,
            }
            for pod, mib in claims
        ],
        "foreign_mib": _foreign(gpu, [pod for pod, _mib in claims]) if gpu else None,
    }


def _foreign(gpu: Gpu, pods: list[Pod]) -> int | None:
    """Return memory of processes that belong to none of these pods, in MiB."""
    if gpu.processes is None:
        return None
    uids = {uid for pod in pods for uid in pod.uids}
    others = [one.used_mib for one in gpu.processes if one.pod_uid not in uids]
    known = [one for one in others if one is not None]
    return sum(known) if len(known) == len(others) else None


def _clip(number: int | None) -> int | None:
    """Limit an absurd number to the largest one."""
    return None if number is None else min(number, MAX_NUMBER)


def _gpushare(node: Node) -> list[JsonObject]:
    claims: dict[int, Claims] = {card.index: [] for card in node.cards}
    for pod in node.pods:
        if contract.counts(pod.json):
            for index, units in contract.shares(pod.json).items():
                claims.get(index, []).append((pod, units * node.unit_mib if node.unit_mib else None))
    return [
        _card(
            node,
            card.index,
            card.uuid,
            card.model,
            card.memory_mib,
            card.healthy,
            claims[card.index],
            card.reason,
            card.units * node.unit_mib if node.unit_mib else None,
        )
        for card in node.cards
    ]


def _claims(node: Node) -> list[JsonObject]:
    held: dict[str, Claims] = {device.name: [] for device in node.devices}
    for pod in node.pods:
        for (pool, device), mib in pod.claimed().items() if pod.active else ():
            if pool == node.name:
                held.get(device, []).append((pod, mib))
    return [
        _card(
            node,
            position if one.index is None else one.index,
            one.uuid,
            one.model,
            one.memory_mib,
            one.unhealthy is None,
            held[one.name],
            one.unhealthy or "",
            one.memory_mib // node.unit_mib * node.unit_mib if node.unit_mib else None,
        )
        for position, one in enumerate(node.devices)
    ]


def _hami(node: Node) -> list[JsonObject]:
    claims: dict[str, Claims] = {}
    for pod in node.pods:
        allocation, _problem = allocation_of(pod)
        if pod.active and allocation:
            for uuid, part in hami.held(pod.json, allocation).items():
                claims.setdefault(uuid, []).append((pod, part.mib))
    return [
        _card(node, gpu.index, gpu.uuid, gpu.model, gpu.devmem, gpu.healthy, claims.get(gpu.uuid, []))
        for gpu in register_of(node).gpus
    ]


def _nvidia(node: Node) -> list[JsonObject]:
    replicas = replicas_of(node) or 1
    claims: dict[str, dict[str, tuple[Pod, int | None]]] = {}
    for pod, entry in allocated_entries(node):
        for one in entry.ids:
            uuid = one.partition("::")[0]
            gpu = node.nvml.gpu(uuid)
            size = next((mig.total_mib for mig in gpu.mig if mig.uuid == uuid), gpu.total_mib) if gpu else None
            mine = claims.setdefault(gpu.uuid if gpu else uuid, {})
            _pod, before = mine.get(pod.key, (pod, 0))
            mine[pod.key] = (pod, None if size is None or before is None else before + size // replicas)
    return [
        _card(
            node, gpu.index, gpu.uuid, gpu.name, gpu.total_mib, not gpu.problem, list(claims.get(gpu.uuid, {}).values())
        )
        for gpu in node.nvml.gpus
    ]
