# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A report of ``gpu_allocation_check`` and an allocation of ``gpu_allocation_info`` as one view.

Both are this collection's own results, so their form isn't examined field by field; ``outcome.render`` refuses what has
another one. Their texts are those of a cluster's nodes and tenants, and each is made one printable line.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._allocation import virtual
from .._contracts import gpushare as contract
from .._core.natural import natural
from .._core.types import JsonObject
from .._core.untrusted import line as text
from . import model
from .model import amount, mib, plural

# The name of an unknown back end.
ANY_BACKEND = "common"
NAME = 260


def view(report: JsonObject | None, allocation: JsonObject | None) -> model.View:
    """Join a report and an allocation, or show one alone; with both, cards are the report's, which measured them."""
    about = allocation or {}
    allocated, checked = about.get("nodes") or [], (report or {}).get("nodes") or []
    given = [_allocated_node(node) for node in allocated]
    parts = [*checked, *(part for node in allocated for part in _parts(node))]
    shown = "GiB" if any(part.get("unit") == "GiB" for part in parts) else "MiB"
    factor = contract.MIB_PER_UNIT.get(about.get("unit") or "")
    waiting = tuple(_waiting(pod, factor, shown) for pod in about.get("waiting") or ())
    if report is None:
        return model.View(
            checked=False,
            time=text(about.get("time"), 60),
            cluster=text(about.get("cluster"), NAME),
            nodes=_sorted(given),
            waiting=waiting,
            unit=shown,
        )
    findings = tuple(sorted((_finding(finding) for finding in report.get("findings") or ()), key=_finding_order))
    checks = _checks(report.get("checks") or [], findings)
    levels = [_level(report.get("result")), *(check.result for check in checks)]
    return model.View(
        checked=True,
        # A report without checks has shown nothing.
        result=model.worst(levels if checks else [*levels, "UNKNOWN"]),
        time=text(report.get("time"), 60),
        cluster=text(report.get("cluster"), NAME),
        samples=report.get("samples"),
        grace_seconds=report.get("grace_seconds"),
        transient=report.get("transient"),
        checks=checks,
        findings=findings,
        nodes=_sorted(_both([_checked_node(node) for node in checked], given)),
        waiting=waiting,
        unit=shown,
    )


def _checks(given: list[JsonObject], findings: t.Sequence[model.Finding]) -> tuple[model.Check, ...]:
    """Return the checks with their findings counted; every finding has a check that is at least as bad."""
    levels: dict[str, list[str]] = {}
    for finding in findings:
        levels.setdefault(finding.check, []).append(finding.level)
    checks: dict[str, model.Check] = {}
    for row in given:
        check = _check(row, levels.get(_name(row.get("id")), []))
        checks.setdefault(check.id, check)
    for name in sorted(set(levels) - set(checks), key=natural):
        checks[name] = _check({"id": name, "result": "PASS", "n": len(levels[name])}, levels[name])
    return tuple(checks.values())


def _check(row: JsonObject, levels: t.Sequence[str]) -> model.Check:
    counts = {level: max(row.get(level.lower()) or 0, levels.count(level)) for level in model.FINDING_LEVELS}
    declared = _level(row.get("result")) if row.get("n") is not None else "UNKNOWN"
    return model.Check(
        id=_name(row.get("id")),
        title=text(row.get("title")),
        backend=text(row.get("backend"), NAME) or ANY_BACKEND,
        result=model.worst([declared, *(level for level, count in counts.items() if count)]),
        items=row.get("n") or 0,
        fail=counts["FAIL"],
        warn=counts["WARN"],
        unknown=counts["UNKNOWN"],
    )


def _finding(row: JsonObject) -> model.Finding:
    level = _level(row.get("level"))
    evidence = ((text(source, 40), text(told)) for source, told in (row.get("evidence") or {}).items())
    return model.Finding(
        check=_name(row.get("check")),
        level=level if level in model.FINDING_LEVELS else "UNKNOWN",
        what=text(row.get("what")) or "The check gives no details.",
        node=text(row.get("node"), NAME),
        card=row.get("card"),
        uuid=text(row.get("uuid"), NAME),
        pod=text(row.get("pod"), NAME * 2),
        container=text(row.get("container"), NAME),
        evidence=tuple((source, told) for source, told in evidence if source and told),
        do=text(row.get("do")),
        seen=row.get("seen"),
    )


def _finding_order(finding: model.Finding) -> tuple[t.Any, ...]:
    """Sort by level, check and place."""
    card = -1 if finding.card is None else finding.card
    names = (natural(finding.check), natural(finding.node), card, natural(finding.pod), natural(finding.container))
    return (model.LEVELS.index(finding.level), *names)


def _checked_node(node: JsonObject) -> model.Node:
    """Return a node of a report, which counts in MiB; its cards' totals are what pods can claim, as an allocation's."""
    cards = [
        dataclasses.replace(
            _card(card),
            total=card.get("claimable_mib", card.get("total_mib")),
            memory_mib=card.get("total_mib"),
            claimed=card.get("claimed_mib"),
            used_mib=card.get("used_mib"),
            foreign_mib=card.get("foreign_mib"),
            pods=tuple(_checked_pod(pod) for pod in card.get("pods") or ()),
        )
        for card in node.get("cards") or ()
    ]
    limit = text(node.get("memory_limit"))
    functions = tuple(_function(function) for function in node.get("virtual_machines") or ())
    name, backend = _name(node.get("name")), text(node.get("backend"), NAME)
    return model.Node(name, backend, tuple(cards), devices=functions, checked=True, limit=limit)


# By the kernel's answer about a function's IOMMU group: the state, and who has it.
_GROUPS: t.Mapping[str, tuple[str, str]] = {
    "held": (virtual.HELD, "a program of the machine has its IOMMU group open, as a virtual machine does"),
    "viable": (virtual.FREE, "free: nobody has its IOMMU group open"),
    "not_viable": (virtual.UNKNOWN, "unknown: its IOMMU group isn't viable"),
}


def _function(function: JsonObject) -> model.Device:
    """Return a function that is recorded for virtual machines, as the checks have asked the kernel about it."""
    answer = text(function.get("state"), NAME)
    state, holder = _GROUPS.get(answer, (virtual.UNKNOWN, "unknown: the kernel didn't say"))
    return model.Device(
        address=text(function.get("address"), NAME),
        name="recorded function",
        kind=model.FUNCTION,
        group=text(function.get("group"), NAME),
        state=state,
        holder=holder,
    )


def _checked_pod(pod: JsonObject) -> model.Pod:
    note = "terminating" if pod.get("terminating") else ""
    return model.Pod(text(pod.get("pod"), NAME * 2) or "?", pod.get("claimed_mib"), pod.get("used_mib"), note)


def _parts(node: JsonObject) -> list[JsonObject]:
    """Return what each back end has on a node."""
    return [node, *(node.get("also") or [])]


def _allocated_node(node: JsonObject) -> model.Node:
    """Return a node of an allocation, which counts in its own units; of several back ends it has all cards."""
    cards: list[model.Card] = []
    pending: list[model.Pod] = []
    resources: list[model.Resource] = []
    devices: list[model.Device] = []
    for part in _parts(node):
        factor = contract.MIB_PER_UNIT.get(part.get("unit") or "")
        unit = "MiB" if factor else "shares" if part.get("unit") == "count" else "units"
        cards += [_allocated_card(card, factor, unit) for card in part.get("cards") or ()]
        pending += [_allocated_pod(pod, factor, unit) for pod in part.get("pending") or ()]
        rows = [_resource(resource, part.get("gpus") or {}) for resource in part.get("resources") or ()]
        of_machines = part.get("devices") is not None
        resources += [dataclasses.replace(row, about="for virtual machines") if of_machines else row for row in rows]
        devices += [_device(device) for device in part.get("devices") or ()]
    return model.Node(
        _name(node.get("name")),
        text(node.get("backend"), NAME),
        tuple(cards),
        tuple(pending),
        tuple(resources),
        tuple(devices),
        text(node.get("problem")),
        limit=text(node.get("memory_limit")),
    )


def _allocated_card(card: JsonObject, factor: int | None, unit: str) -> model.Card:
    return dataclasses.replace(
        _card(card),
        total=_times(card.get("total"), factor),
        claimed=_times(card.get("used"), factor),
        memory_mib=card.get("memory_mib") or None,
        unit=unit,
        pods=tuple(_allocated_pod(pod, factor, unit) for pod in card.get("pods") or ()),
    )


def _resource(resource: JsonObject, gpus: JsonObject) -> model.Resource:
    """Return a resource of NVIDIA's plugin, with its cards by the node's labels."""
    memory, count = gpus.get("memory_mib"), gpus.get("count")
    about = [text(gpus.get("product"), NAME), mib(memory) if memory else "", plural(count, "card") if count else ""]
    return model.Resource(
        _name(resource.get("name")),
        ", ".join(part for part in about if part),
        resource.get("capacity"),
        resource.get("used"),
    )


def _device(device: JsonObject) -> model.Device:
    """Return a card or a vGPU for virtual machines; one of any other state is unknown."""
    group, state = device.get("iommu_group"), device.get("state")
    state = state if state in (virtual.HELD, virtual.FREE) else virtual.UNKNOWN
    return model.Device(
        address=text(device.get("address"), NAME),
        name=text(virtual.device_name(device), NAME),
        kind=text(device.get("kind"), NAME),
        card=text(device.get("card"), NAME),
        uuid=text(device.get("uuid"), NAME),
        driver=text(device.get("driver"), NAME),
        group="" if group is None else str(int(group)),
        resource=text(device.get("resource"), NAME),
        state=state,
        holder=text(virtual.holder_text({**device, "state": state}, pods=True), NAME * 4),
        pods=tuple(_allocated_pod(pod, None, "shares") for pod in device.get("pods") or ()),
    )


def _card(card: JsonObject) -> model.Card:
    """Return what a card has in a report and in an allocation."""
    return model.Card(
        index=card.get("index"),
        uuid=text(card.get("uuid"), NAME),
        model=text(card.get("model"), NAME),
        healthy=card.get("healthy"),
        reason=text(card.get("reason")),
    )


def _allocated_pod(pod: JsonObject, factor: int | None, unit: str) -> model.Pod:
    phase = text(pod.get("phase"), 40).lower()
    note = "" if phase == "running" else phase
    note = ": ".join(
        part for part in ("terminating" if pod.get("terminating") else note, text(pod.get("problem"))) if part
    )
    return model.Pod(_pod_name(pod), _times(pod.get("units"), factor), note=note, unit=unit)


def _waiting(pod: JsonObject, factor: int | None, shown: str) -> model.Waiting:
    """Return a pod without a node; in memory if all nodes have the same unit."""
    units = _times(pod.get("units"), factor)
    requests = "" if units is None else amount(units, "MiB" if factor else "units", shown)
    return model.Waiting(_pod_name(pod), requests, text(pod.get("reason")))


def _both(checked: list[model.Node], given: list[model.Node]) -> list[model.Node]:
    """Return the report's nodes, completed by the allocation's, and the allocation's other nodes."""
    known = {node.name: node for node in given}
    merged = []
    for node in checked:
        other = known.pop(node.name, None)
        if other is not None:
            placed = {pod.name for card in node.cards for pod in card.pods}
            node = dataclasses.replace(
                node,
                backend=node.backend or other.backend,
                cards=tuple(_both_cards(card, other.cards) for card in node.cards) or other.cards,
                pending=tuple(pod for pod in other.pending if pod.name not in placed),
                resources=other.resources,
                devices=other.devices or node.devices,
                problem=other.problem,
                limit=node.limit or other.limit,
            )
        merged.append(node)
    return merged + list(known.values())


def _both_cards(card: model.Card, others: t.Sequence[model.Card]) -> model.Card:
    for other in others:
        if (card.uuid and card.uuid == other.uuid) or (not card.uuid and card.index == other.index):
            notes = {pod.name: pod.note for pod in other.pods}
            return dataclasses.replace(
                card,
                model=card.model or other.model,
                reason=card.reason or other.reason,
                memory_mib=card.memory_mib or other.memory_mib,
                pods=tuple(dataclasses.replace(pod, note=pod.note or notes.get(pod.name, "")) for pod in card.pods),
            )
    return card


def _sorted(nodes: t.Iterable[model.Node]) -> tuple[model.Node, ...]:
    return tuple(sorted(nodes, key=lambda node: natural(node.name)))


def _name(value: t.Any) -> str:
    return text(value, NAME) or "?"


def _pod_name(pod: JsonObject) -> str:
    namespace, name = text(pod.get("namespace"), NAME), text(pod.get("name"), NAME)
    return f"{namespace}/{name}" if namespace else name or "?"


def _level(value: t.Any) -> str:
    """Return a level; UNKNOWN for any other value, since nothing unknown passes."""
    return value if value in model.LEVELS else "UNKNOWN"


def _times(count: int | None, factor: int | None) -> int | None:
    return None if count is None else count * (factor or 1)
