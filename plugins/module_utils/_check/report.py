# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the report of one or two samples, with a row per node; what only one of two has was transient. No I/O."""

from __future__ import annotations

import dataclasses
import datetime
import typing as t

from .._allocation.pods import held_by_hami
from .._contracts.model import Pod
from .._core.errors import BadInput
from .._core.natural import natural
from .._core.types import JsonObject
from .common import has_gpus
from .evidence import Reader
from .grants import usage_of
from .hami import allocation_of, register_of
from .model import DRA, HAMI, NVIDIA, Gpu, Node, Snapshot
from .nvidia import allocated_entries, replicas_of
from .parse import MAX_NUMBER
from .registry import ALL, run
from .result import FAIL, LEVELS, PASS, UNKNOWN, WARN, Finding

Claims = list[tuple[Pod, t.Optional[int]]]
# The planes that the evidence of a machine has.
OF_MACHINE = frozenset(("kubelet", "nvml", "proc"))


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
        "memory_limit": node.announced_limit,
        "source": node.source,
        "cards": cards,
        "virtual_machines": [
            {"address": function.address, "group": function.group, "state": function.state}
            for function in (node.virtual.functions if node.virtual else ())
        ],
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
    others = [process.used_mib for process in gpu.processes if process.pod_uid not in uids]
    known = [used for used in others if used is not None]
    return sum(known) if len(known) == len(others) else None


def _clip(number: int | None) -> int | None:
    """Limit an absurd number to the largest one."""
    return None if number is None else min(number, MAX_NUMBER)


def _gpushare(node: Node) -> list[JsonObject]:
    claims: dict[int, Claims] = {card.index: [] for card in node.cards}
    for pod in node.pods:
        if pod.holds_units:
            for index, units in pod.booked.items():
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
            position if device.index is None else device.index,
            device.uuid,
            device.model,
            device.memory_mib,
            device.unhealthy is None,
            held[device.name],
            device.unhealthy or "",
            device.memory_mib // node.unit_mib * node.unit_mib if node.unit_mib else None,
        )
        for position, device in enumerate(node.devices)
    ]


def _hami(node: Node) -> list[JsonObject]:
    claims: dict[str, Claims] = {}
    for pod in node.pods:
        allocation, _problem = allocation_of(pod)
        if pod.active and allocation:
            for uuid, part in held_by_hami(pod, allocation).items():
                claims.setdefault(uuid, []).append((pod, part.mib))
    return [
        _card(node, gpu.index, gpu.uuid, gpu.model, gpu.devmem, gpu.healthy, claims.get(gpu.uuid, []))
        for gpu in register_of(node).gpus
    ]


def _nvidia(node: Node) -> list[JsonObject]:
    replicas = replicas_of(node) or 1
    claims: dict[str, dict[str, tuple[Pod, int | None]]] = {}
    for pod, entry in allocated_entries(node):
        for device in entry.ids:
            uuid = device.partition("::")[0]
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


def report(snapshot: Snapshot, cluster: str = "", before: JsonObject | None = None, scope: str = ALL) -> JsonObject:
    """Run the checks and make the report.

    :param cluster: the API server's address.
    :param before: the report of the first sample. FAIL and WARN then count only where both samples have them.
    :param scope: which checks run; see ``registry.SCOPES``.
    :raises BadInput: ``before`` isn't a report.
    """
    first = None if before is None else FirstSample(before)
    findings: list[Finding] = []
    checks = []
    transient = 0
    for check, compared, of_check in run(snapshot, scope):
        kept = of_check if first is None else [confirmed(finding, check.confirm, first) for finding in of_check]
        mine = [finding for finding in kept if finding is not None]
        transient += sum(now is None and finding.level != UNKNOWN for finding, now in zip(of_check, kept))
        levels = [finding.level for finding in mine]
        checks.append(
            {
                "id": check.id,
                "backend": check.backend,
                "title": check.documentation.title,
                "result": worst(levels),
                "n": compared,
                **{level.lower(): levels.count(level) for level in (FAIL, WARN, UNKNOWN)},
            }
        )
        findings += mine
    levels = [finding.level for finding in findings]
    sources = {node.name: node.source for node in snapshot.nodes if node.source}
    findings = [_with_source(finding, sources.get(finding.node, "")) for finding in findings]
    nodes = sorted((node for node in snapshot.nodes if has_gpus(node)), key=lambda node: natural(node.name))
    return {
        "result": worst(levels),
        "time": datetime.datetime.fromtimestamp(snapshot.now, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cluster": cluster,
        "samples": 1 if first is None else 2,
        "grace_seconds": snapshot.options.grace_seconds,
        "counts": {
            **{level: levels.count(level) for level in (FAIL, WARN, UNKNOWN)},
            PASS: sum(row["result"] == PASS for row in checks),
        },
        "checks": checks,
        "findings": [finding.plain() for finding in sorted(findings, key=_order)],
        "nodes": [node_row(node) for node in nodes],
        "transient": transient + (first.unmatched if first is not None else 0),
    }


def _with_source(finding: Finding, source: str) -> Finding:
    """Return a finding that says whose word its evidence is, where that isn't the machine's own."""
    of_machine = OF_MACHINE.intersection(finding.evidence) or finding.level == UNKNOWN
    if not (source and of_machine):
        return finding
    return dataclasses.replace(finding, evidence={**finding.evidence, "source": source})


def _order(finding: Finding) -> tuple[t.Any, ...]:
    """Sort the worst first, then by place."""
    card = -1 if finding.card is None else finding.card
    place = (natural(finding.node), card, finding.check, natural(finding.pod), finding.container)
    return (LEVELS.index(finding.level), *place, finding.cause)


def worst(levels: t.Iterable[str]) -> str:
    """Return the worst of these levels; PASS where there is none."""
    return min(levels, key=LEVELS.index, default=PASS)


class FirstSample:
    """The findings of the first sample's report.

    :raises BadInput: it isn't a report.
    """

    def __init__(self, report: JsonObject) -> None:
        findings = report.get("findings")
        if not isinstance(findings, list) or not all(isinstance(finding, dict) for finding in findings):
            raise BadInput("before: this isn't a report of gpu_allocation_check, which has a list of findings")
        self._findings: dict[tuple[t.Any, ...], list[Finding]] = {}
        self._without_data: set[tuple[str, str, int | None]] = set()
        self._unmatched: set[tuple[t.Any, ...]] = set()
        for finding in findings:
            self._add(_parse_finding(finding))

    def _add(self, finding: Finding) -> None:
        self._findings.setdefault(finding.identity, []).append(finding)
        if finding.level in (FAIL, WARN):
            self._unmatched.add((*finding.identity, finding.pod_uid))
        elif finding.node and not (finding.pod or finding.container or finding.key):
            self._without_data.add((finding.check, finding.node, finding.card))

    def level(self, finding: Finding) -> str:
        """Return the level of the same finding in the first sample; empty where that doesn't have it."""
        same = [earlier for earlier in self._findings.get(finding.identity, ()) if finding.same_cause(earlier)]
        self._unmatched -= {(*earlier.identity, earlier.pod_uid) for earlier in same}
        return worst(earlier.level for earlier in same) if same else ""

    def had_no_data(self, finding: Finding) -> bool:
        """Return whether the check had no data of this node, or GPU, in the first sample."""
        return any((finding.check, finding.node, card) in self._without_data for card in (None, finding.card))

    @property
    def unmatched(self) -> int:
        """Number of FAIL and WARN for which ``level`` found no match."""
        return len(self._unmatched)


def _parse_finding(raw: JsonObject) -> Finding:
    reader = Reader()
    parts = {
        name: reader.number(part, "parts") or 0 for name, part in reader.mapping(raw.get("parts"), "parts").items()
    }
    names = ("check", "cause", "level", "node", "pod", "container", "pod_uid", "key")
    texts: JsonObject = {name: reader.text(raw.get(name), name) for name in names}
    finding = Finding(
        **texts, card=reader.number(raw.get("card"), "card"), parts=parts, most=reader.number(raw.get("most"), "most")
    )
    if not reader.unreadable and finding.level not in LEVELS:
        reader.reject("level", "one of " + ", ".join(LEVELS), finding.level)
    if reader.unreadable:
        raise BadInput(f"before: a finding of this report can't be read: {reader.unreadable[0]}")
    return finding


def confirmed(finding: Finding, confirm: bool, first: FirstSample) -> Finding | None:
    """Return the second sample's finding as both samples have it; None for a transient one.

    :param confirm: an UNKNOWN that has a key counts in two samples only.
    """
    before = first.level(finding)
    if finding.level != UNKNOWN and (before == UNKNOWN or (not before and first.had_no_data(finding))):
        return dataclasses.replace(finding, level=UNKNOWN, unconfirmed=True)
    if before:
        milder = max(finding.level, before, key=LEVELS.index)
        return dataclasses.replace(finding, level=finding.level if before == UNKNOWN else milder, seen=2)
    return finding if finding.level == UNKNOWN and not (confirm and finding.key) else None
