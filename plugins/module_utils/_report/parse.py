# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse a report of ``gpu_allocation_check`` and an allocation of ``gpu_allocation_info``.

Both come from a cluster through variables of a play, so no part of their form is assumed: what can't be parsed is
unknown, and nothing unknown passes.
"""

from __future__ import annotations

import dataclasses
import json
import typing as t

from .._contracts import gpushare as contract
from .._core.natural import natural
from .._core.types import JsonObject
from .._core.untrusted import line as text
from . import model
from .model import amount, flag, items, mapping, mib, plural, whole

# The name of an unknown back end.
ANY_BACKEND = "common"
NAME = 260


def view(report: JsonObject | None, allocation: JsonObject | None) -> model.View:
    """Parse a report, an allocation, or both; with both, cards come from the report, which measured them."""
    allocated, checked = items(mapping(allocation).get("nodes")), items(mapping(report).get("nodes"))
    given = [_allocated_node(node) for node in allocated]
    unit = text(mapping(allocation).get("unit"))
    parts = [*checked, *(part for node in allocated for part in [node, *items(node.get("also"))])]
    shown = "GiB" if "GiB" in {text(part.get("unit")) for part in parts} else "MiB"
    factor = contract.MIB_PER_UNIT.get(unit)
    waiting = tuple(_waiting(pod, factor, shown) for pod in items(mapping(allocation).get("waiting")))
    if report is None:
        return model.View(
            checked=False,
            time=text(mapping(allocation).get("time"), 60),
            cluster=text(mapping(allocation).get("cluster"), NAME),
            nodes=_sorted(given),
            waiting=waiting,
            unit=shown,
        )
    findings = tuple(sorted((_finding(one) for one in items(report.get("findings"))), key=_finding_order))
    checks = _checks(items(report.get("checks")), findings)
    declared = text(report.get("result"))
    levels = [declared if declared in model.LEVELS else "UNKNOWN", *(check.result for check in checks)]
    return model.View(
        checked=True,
        result=model.worst(levels if checks else [*levels, "UNKNOWN"]),
        time=text(report.get("time"), 60),
        cluster=text(report.get("cluster"), NAME),
        samples=whole(report.get("samples")),
        grace_seconds=whole(report.get("grace_seconds")),
        transient=whole(report.get("transient")),
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
    found: dict[str, model.Check] = {}
    for one in given:
        check = _check(one, levels.get(text(one.get("id"), NAME), []))
        found.setdefault(check.id, check)
    for name in sorted(set(levels) - set(found), key=natural):
        found[name] = _check({"id": name, "result": "PASS", "n": len(levels[name])}, levels[name])
    return tuple(found.values())


def _check(one: JsonObject, levels: t.Sequence[str]) -> model.Check:
    fail, warn, unknown = (
        max(whole(one.get(level.lower())) or 0, levels.count(level)) for level in model.FINDING_LEVELS
    )
    declared = text(one.get("result"))
    counted = [level for level, count in zip(model.FINDING_LEVELS, (fail, warn, unknown), strict=True) if count]
    checked = whole(one.get("n"))
    if declared not in model.LEVELS or checked is None:
        counted.append("UNKNOWN")
    return model.Check(
        id=text(one.get("id"), NAME) or "?",
        title=text(one.get("title")),
        backend=text(one.get("backend"), NAME) or ANY_BACKEND,
        result=model.worst([declared if declared in model.LEVELS else "UNKNOWN", *counted]),
        items=checked or 0,
        fail=fail,
        warn=warn,
        unknown=unknown,
    )


def _finding(one: JsonObject) -> model.Finding:
    level = text(one.get("level"))
    given = mapping(one.get("evidence"))
    evidence = ((text(source, 40), _evidence(given[source])) for source in given)
    return model.Finding(
        check=text(one.get("check"), NAME) or "?",
        level=level if level in model.FINDING_LEVELS else "UNKNOWN",
        what=text(one.get("what")) or "The check gives no details.",
        node=text(one.get("node"), NAME),
        card=whole(one.get("card")),
        uuid=text(one.get("uuid"), NAME),
        pod=text(one.get("pod"), NAME * 2),
        container=text(one.get("container"), NAME),
        evidence=tuple((source, value) for source, value in evidence if source and value),
        do=text(one.get("do")),
        seen=whole(one.get("seen")),
    )


def _evidence(value: t.Any) -> str:
    """Return a source's evidence as text; structured data as JSON."""
    if isinstance(value, (dict, list)):
        return text(json.dumps(value, ensure_ascii=False, default=str))
    return text(value)


def _finding_order(finding: model.Finding) -> tuple[t.Any, ...]:
    """Sort by level, check and place."""
    card = -1 if finding.card is None else finding.card
    names = (natural(finding.check), natural(finding.node), card, natural(finding.pod), natural(finding.container))
    return (model.LEVELS.index(finding.level), *names)


def _checked_node(node: JsonObject) -> model.Node:
    """Parse a node of a report, which counts in MiB; its cards' totals are what pods can claim, as an allocation's."""
    cards = [
        dataclasses.replace(
            _card(card),
            total=whole(card.get("claimable_mib", card.get("total_mib"))),
            memory_mib=whole(card.get("total_mib")),
            claimed=whole(card.get("claimed_mib")),
            used_mib=whole(card.get("used_mib")),
            foreign_mib=whole(card.get("foreign_mib")),
            pods=tuple(_checked_pod(pod) for pod in items(card.get("pods"))),
        )
        for card in items(node.get("cards"))
    ]
    limit = text(node.get("memory_limit"))
    return model.Node(_node_name(node), text(node.get("backend"), NAME), tuple(cards), checked=True, limit=limit)


def _checked_pod(pod: JsonObject) -> model.Pod:
    return model.Pod(
        text(pod.get("pod"), NAME * 2) or "?",
        whole(pod.get("claimed_mib")),
        whole(pod.get("used_mib")),
        "terminating" if flag(pod.get("terminating")) else "",
    )


def _allocated_node(node: JsonObject) -> model.Node:
    """Parse a node of an allocation, which counts in its own units; of several back ends it has all cards."""
    cards: list[model.Card] = []
    pending: list[model.Pod] = []
    resources: list[model.Resource] = []
    for part in [node, *items(node.get("also"))]:
        given = text(part.get("unit"))
        factor = contract.MIB_PER_UNIT.get(given)
        unit = "MiB" if factor else "shares" if given == "count" else "units"
        cards += [_allocated_card(card, factor, unit) for card in items(part.get("cards"))]
        pending += [_allocated_pod(pod, factor, unit) for pod in items(part.get("pending"))]
        resources += [_resource(one, mapping(part.get("gpus"))) for one in items(part.get("resources"))]
    return model.Node(
        _node_name(node),
        text(node.get("backend"), NAME),
        tuple(cards),
        tuple(pending),
        tuple(resources),
        text(node.get("problem")),
        limit=text(node.get("memory_limit")),
    )


def _allocated_card(card: JsonObject, factor: int | None, unit: str) -> model.Card:
    return dataclasses.replace(
        _card(card),
        total=_times(whole(card.get("total")), factor),
        claimed=_times(whole(card.get("used")), factor),
        memory_mib=whole(card.get("memory_mib")) or None,
        unit=unit,
        pods=tuple(_allocated_pod(pod, factor, unit) for pod in items(card.get("pods"))),
    )


def _resource(one: JsonObject, gpus: JsonObject) -> model.Resource:
    """Parse a resource of NVIDIA's plugin, with its cards by the node's labels."""
    memory, count = whole(gpus.get("memory_mib")), whole(gpus.get("count"))
    about = [text(gpus.get("product"), NAME), mib(memory) if memory else "", plural(count, "card") if count else ""]
    return model.Resource(
        text(one.get("name"), NAME) or "?",
        ", ".join(part for part in about if part),
        whole(one.get("capacity")),
        whole(one.get("used")),
    )


def _card(card: JsonObject) -> model.Card:
    return model.Card(
        index=whole(card.get("index")),
        uuid=text(card.get("uuid"), NAME),
        model=text(card.get("model"), NAME),
        healthy=flag(card.get("healthy")),
        reason=text(card.get("reason")),
    )


def _allocated_pod(pod: JsonObject, factor: int | None, unit: str) -> model.Pod:
    phase = text(pod.get("phase"), 40)
    note = "terminating" if flag(pod.get("terminating")) else phase.lower() if phase not in ("", "Running") else ""
    note = ": ".join(part for part in (note, text(pod.get("problem"))) if part)
    return model.Pod(_pod_name(pod), _times(whole(pod.get("units")), factor), note=note, unit=unit)


def _waiting(pod: JsonObject, factor: int | None, shown: str) -> model.Waiting:
    """Parse a pod without a node; in memory if all nodes have the same unit."""
    units = _times(whole(pod.get("units")), factor)
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


def _node_name(node: JsonObject) -> str:
    return text(node.get("name"), NAME) or "?"


def _pod_name(pod: JsonObject) -> str:
    namespace, name = text(pod.get("namespace"), NAME), text(pod.get("name"), NAME)
    return f"{namespace}/{name}" if namespace else name or "?"


def _times(count: int | None, factor: int | None) -> int | None:
    return count if count is None or factor is None else whole(count * factor)
