# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Read a report of ``gpu_allocation_check`` and an allocation of ``gpu_allocation_info`` into what renderings show.

Both come out of a cluster through variables of a play, so nothing of their shape is taken for granted: what can't be
read is unknown, and nothing that is unknown passes.
"""

from __future__ import annotations

import dataclasses
import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import natural
from ansible_collections.kubegpu.share.plugins.plugin_utils import _report_model as model
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_values import (
    Json,
    amount,
    flag,
    items,
    mapping,
    mib,
    plural,
    text,
    whole,
)

# How the backends are called where there is none or a strange one.
ANY_BACKEND = "common"
NAME = 260


def view(report: Json | None, allocation: Json | None) -> model.View:
    """What to show of a report, an allocation, or both; of both, cards are the report's, which has measured them."""
    given = [_allocated_node(node) for node in items(mapping(allocation).get("nodes"))]
    unit = text(mapping(allocation).get("unit"))
    waiting = tuple(_waiting(pod, contract.MIB_PER_UNIT.get(unit)) for pod in items(mapping(allocation).get("waiting")))
    if report is None:
        return model.View(checked=False, nodes=_sorted(given), waiting=waiting)
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
        nodes=_sorted(_both([_checked_node(node) for node in items(report.get("nodes"))], given)),
        waiting=waiting,
    )


def _checks(given: list[Json], findings: t.Sequence[model.Finding]) -> tuple[model.Check, ...]:
    """The checks with their findings counted; a finding is never better than its check, and never without one."""
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


def _check(one: Json, levels: t.Sequence[str]) -> model.Check:
    fail, warn, unknown = (
        max(whole(one.get(level.lower())) or 0, levels.count(level)) for level in model.FINDING_LEVELS
    )
    declared = text(one.get("result"))
    told = [level for level, count in zip(model.FINDING_LEVELS, (fail, warn, unknown), strict=True) if count]
    looked_at = whole(one.get("n"))
    if declared not in model.LEVELS or looked_at is None:
        told.append("UNKNOWN")
    return model.Check(
        id=text(one.get("id"), NAME) or "?",
        title=text(one.get("title")),
        backend=text(one.get("backend"), NAME) or ANY_BACKEND,
        result=model.worst([declared if declared in model.LEVELS else "UNKNOWN", *told]),
        looked_at=looked_at or 0,
        fail=fail,
        warn=warn,
        unknown=unknown,
    )


def _finding(one: Json) -> model.Finding:
    level = text(one.get("level"))
    planes = mapping(one.get("evidence"))
    said = ((text(plane, 40), _evidence(planes[plane])) for plane in planes)
    return model.Finding(
        check=text(one.get("check"), NAME) or "?",
        level=level if level in model.FINDING_LEVELS else "UNKNOWN",
        what=text(one.get("what")) or "The check says no more than that.",
        node=text(one.get("node"), NAME),
        card=whole(one.get("card")),
        uuid=text(one.get("uuid"), NAME),
        pod=text(one.get("pod"), NAME * 2),
        container=text(one.get("container"), NAME),
        evidence=tuple((plane, words) for plane, words in said if plane and words),
        do=text(one.get("do")),
        seen=whole(one.get("seen")),
    )


def _evidence(value: t.Any) -> str:
    """What a plane says; data that isn't a sentence is shown as JSON."""
    if isinstance(value, (dict, list)):
        return text(json.dumps(value, ensure_ascii=False, default=str))
    return text(value)


def _finding_order(finding: model.Finding) -> tuple[t.Any, ...]:
    """The worst first, then by check and place."""
    card = -1 if finding.card is None else finding.card
    names = (natural(finding.check), natural(finding.node), card, natural(finding.pod), natural(finding.container))
    return (model.LEVELS.index(finding.level), *names)


def _checked_node(node: Json) -> model.Node:
    """A node of a report, which counts in MiB."""
    cards = [
        dataclasses.replace(
            _card(card),
            total=whole(card.get("total_mib")),
            claimed=whole(card.get("claimed_mib")),
            used_mib=whole(card.get("used_mib")),
            foreign_mib=whole(card.get("foreign_mib")),
            pods=tuple(_checked_pod(pod) for pod in items(card.get("pods"))),
        )
        for card in items(node.get("cards"))
    ]
    return model.Node(_node_name(node), text(node.get("backend"), NAME), tuple(cards), checked=True)


def _checked_pod(pod: Json) -> model.Pod:
    return model.Pod(
        text(pod.get("pod"), NAME * 2) or "?",
        whole(pod.get("claimed_mib")),
        whole(pod.get("used_mib")),
        "terminating" if flag(pod.get("terminating")) else "",
    )


def _allocated_node(node: Json) -> model.Node:
    """A node of an allocation, which counts in its own units; of several backends, the cards of all of them."""
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
    )


def _allocated_card(card: Json, factor: int | None, unit: str) -> model.Card:
    return dataclasses.replace(
        _card(card),
        total=_times(whole(card.get("total")), factor),
        claimed=_times(whole(card.get("used")), factor),
        memory_mib=whole(card.get("memory_mib")) or None,
        unit=unit,
        pods=tuple(_allocated_pod(pod, factor, unit) for pod in items(card.get("pods"))),
    )


def _resource(one: Json, gpus: Json) -> model.Resource:
    """A resource of NVIDIA's plugin, with what labels tell of the cards behind it."""
    memory, count = whole(gpus.get("memory_mib")), whole(gpus.get("count"))
    about = [text(gpus.get("product"), NAME), mib(memory) if memory else "", plural(count, "card") if count else ""]
    return model.Resource(
        text(one.get("name"), NAME) or "?",
        ", ".join(part for part in about if part),
        whole(one.get("capacity")),
        whole(one.get("used")),
    )


def _card(card: Json) -> model.Card:
    return model.Card(
        index=whole(card.get("index")),
        uuid=text(card.get("uuid"), NAME),
        model=text(card.get("model"), NAME),
        healthy=flag(card.get("healthy")),
        reason=text(card.get("reason")),
    )


def _allocated_pod(pod: Json, factor: int | None, unit: str) -> model.Pod:
    phase = text(pod.get("phase"), 40)
    note = "terminating" if flag(pod.get("terminating")) else phase.lower() if phase not in ("", "Running") else ""
    note = ": ".join(part for part in (note, text(pod.get("problem"))) if part)
    return model.Pod(_pod_name(pod), _times(whole(pod.get("units")), factor), note=note, unit=unit)


def _waiting(pod: Json, factor: int | None) -> model.Waiting:
    """A pod without a node; in MiB where all nodes count alike."""
    units = _times(whole(pod.get("units")), factor)
    asks = "" if units is None else amount(units, "MiB" if factor else "units")
    return model.Waiting(_pod_name(pod), asks, text(pod.get("reason")))


def _both(checked: list[model.Node], given: list[model.Node]) -> list[model.Node]:
    """The report's nodes with what only the allocation knows of them; its other nodes after them."""
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


def _node_name(node: Json) -> str:
    return text(node.get("name"), NAME) or "?"


def _pod_name(pod: Json) -> str:
    namespace, name = text(pod.get("namespace"), NAME), text(pod.get("name"), NAME)
    return f"{namespace}/{name}" if namespace else name or "?"


def _times(count: int | None, factor: int | None) -> int | None:
    return count if count is None or factor is None else whole(count * factor)
