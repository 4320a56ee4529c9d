# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the report of one or two samples; what only one of two has was transient. No I/O."""

from __future__ import annotations

import dataclasses
import datetime
import typing as t

from .._core.errors import BadInput
from .._core.natural import natural
from .._core.types import JsonObject
from .common import has_gpus
from .model import Snapshot
from .node_rows import node_row
from .parse import Reader
from .registry import ALL, run
from .result import FAIL, LEVELS, PASS, UNKNOWN, WARN, Finding


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
    for check, compared, found in run(snapshot, scope):
        kept = found if first is None else [confirmed(one, check.confirm, first) for one in found]
        mine = [one for one in kept if one is not None]
        transient += sum(now is None and one.level != UNKNOWN for one, now in zip(found, kept))
        levels = [one.level for one in mine]
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
    levels = [one.level for one in findings]
    nodes = sorted((node for node in snapshot.nodes if has_gpus(node)), key=lambda node: natural(node.name))
    return {
        "result": worst(levels),
        "time": datetime.datetime.fromtimestamp(snapshot.now, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cluster": cluster,
        "samples": 1 if first is None else 2,
        "grace_seconds": snapshot.options.grace_seconds,
        "counts": {
            **{level: levels.count(level) for level in (FAIL, WARN, UNKNOWN)},
            PASS: sum(one["result"] == PASS for one in checks),
        },
        "checks": checks,
        "findings": [one.plain() for one in sorted(findings, key=_order)],
        "nodes": [node_row(node) for node in nodes],
        "transient": transient + (first.unmatched if first is not None else 0),
    }


def _order(one: Finding) -> tuple[t.Any, ...]:
    """Sort the worst first, then by place."""
    card = -1 if one.card is None else one.card
    return LEVELS.index(one.level), natural(one.node), card, one.check, natural(one.pod), one.container, one.cause


def worst(levels: t.Iterable[str]) -> str:
    """Return the worst of these levels; PASS where there is none."""
    return min(levels, key=LEVELS.index, default=PASS)


class FirstSample:
    """The findings of the first sample's report.

    :raises BadInput: it isn't a report.
    """

    def __init__(self, report: JsonObject) -> None:
        findings = report.get("findings")
        if not isinstance(findings, list) or not all(isinstance(one, dict) for one in findings):
            raise BadInput("before: this isn't a report of gpu_allocation_check, which has a list of findings")
        self._findings: dict[tuple[t.Any, ...], list[Finding]] = {}
        self._without_data: set[tuple[str, str, int | None]] = set()
        self._unmatched: set[tuple[t.Any, ...]] = set()
        for one in findings:
            self._add(_parse_finding(one))

    def _add(self, finding: Finding) -> None:
        self._findings.setdefault(finding.identity, []).append(finding)
        if finding.level in (FAIL, WARN):
            self._unmatched.add((*finding.identity, finding.pod_uid))
        elif finding.node and not (finding.pod or finding.container or finding.key):
            self._without_data.add((finding.check, finding.node, finding.card))

    def level(self, finding: Finding) -> str:
        """Return the level of the same finding in the first sample; empty where that doesn't have it."""
        same = [one for one in self._findings.get(finding.identity, ()) if finding.same_cause(one)]
        self._unmatched -= {(*one.identity, one.pod_uid) for one in same}
        return worst(one.level for one in same) if same else ""

    def had_no_data(self, finding: Finding) -> bool:
        """Return whether the check had no data of this node, or GPU, in the first sample."""
        return any((finding.check, finding.node, card) in self._without_data for card in (None, finding.card))

    @property
    def unmatched(self) -> int:
        """Number of FAIL and WARN for which ``level`` found no match."""
        return len(self._unmatched)


def _parse_finding(one: JsonObject) -> Finding:
    reader = Reader()
    parts = {
        name: reader.number(part, "parts") or 0 for name, part in reader.mapping(one.get("parts"), "parts").items()
    }
    names = ("check", "cause", "level", "node", "pod", "container", "pod_uid", "key")
    texts: JsonObject = {name: reader.text(one.get(name), name) for name in names}
    finding = Finding(
        **texts, card=reader.number(one.get("card"), "card"), parts=parts, most=reader.number(one.get("most"), "most")
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
