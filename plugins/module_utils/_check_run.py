# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""All invariants over one moment of a cluster, and the report of one or two such moments. No I/O."""

from __future__ import annotations

import dataclasses
import datetime
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import (
    _check_common,
    _check_gpushare,
    _check_gpushare_kubelet,
    _check_gpushare_pods,
    _check_gpushare_sick,
    _check_hami,
    _check_hami_pods,
    _check_hami_use,
    _check_nodes,
    _check_nvidia,
    _check_nvidia_use,
    _check_processes,
)
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import natural
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import concerns
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import HAMI, NVIDIA, Node, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import Reader, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_report import node_of
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import (
    FAIL,
    LEVELS,
    PASS,
    UNKNOWN,
    WARN,
    Check,
    Finding,
    Tally,
)
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

# What the words of verification_info mean here.
STORY = (("problems", FAIL), ("notes", WARN), ("unknown", UNKNOWN))
# Its sums over pods are G6's, which tells two moments with the same sum apart by the pods.
SUMS = re.compile(r"node (\S+): pods hold [0-9]+ units of (?:card .*, which has [0-9]+|which the API .*)")


def servers_agree(snapshot: Snapshot, tally: Tally) -> None:
    """S1: what ``verification_info`` found of servers and scheduler."""
    if snapshot.options.story is None:
        return
    reader = Reader()
    story = reader.obj(snapshot.options.story, "story")
    tally.seen(len(reader.texts(story.get("passed"), "story.passed")))
    for key, level in STORY:
        for sentence in reader.texts(story.get(key), f"story.{key}"):
            tally.seen()
            sums = SUMS.fullmatch(sentence)
            if sums is not None and any(node.name == sums[1] and node.sharing for node in snapshot.nodes):
                continue
            say = {FAIL: tally.fail, WARN: tally.warn, UNKNOWN: tally.unknown}[level]
            say(shorten(sentence, 600), "run site.yml again" if level == FAIL else "")
    for sentence in reader.damage:
        tally.unknown(f"what is known of the servers can't be read: {sentence}")


def _order(check: Check) -> tuple[int, list[str | int]]:
    return "CGHNS".index(check.id[0]), natural(check.id)


CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (
            *_check_common.CHECKS,
            *_check_nodes.CHECKS,
            *_check_processes.CHECKS,
            *_check_gpushare.CHECKS,
            *_check_gpushare_kubelet.CHECKS,
            *_check_gpushare_pods.CHECKS,
            *_check_gpushare_sick.CHECKS,
            *_check_hami.CHECKS,
            *_check_hami_pods.CHECKS,
            *_check_hami_use.CHECKS,
            *_check_nvidia.CHECKS,
            *_check_nvidia_use.CHECKS,
            Check(
                "S1",
                "servers",
                "Servers and scheduler are as they should be",
                "what the module verification_info says",
                "FAIL its problems; WARN its notes; UNKNOWN",
                cluster=servers_agree,
            ),
        ),
        key=_order,
    )
)


def concerned(check: Check, node: Node) -> bool:
    """Whether a check looks at a node."""
    return {
        "common": concerns(node),
        "gpushare": node.sharing,
        "hami": HAMI in node.backends,
        "nvidia": NVIDIA in node.backends,
    }.get(check.backend, False)


def _guarded(tally: Tally, work: t.Callable[[], None]) -> None:
    """Whatever nobody thought of is no pass, and no reason to hear nothing of all the others."""
    try:
        work()
    except Exception as error:
        tally.unknown(
            f"this check can't be made of what was found ({type(error).__name__}: {shorten(str(error))})",
            "report it, with what gpu_allocation_check was given",
        )


def _of_node(function: t.Callable[[Node, Snapshot, Tally], None], node: Node, whole: Snapshot, tally: Tally) -> None:
    _guarded(tally, lambda: function(node, whole, tally))


def _of_cluster(function: t.Callable[[Snapshot, Tally], None], whole: Snapshot, tally: Tally) -> None:
    _guarded(tally, lambda: function(whole, tally))


def run(snapshot: Snapshot) -> list[tuple[Check, int, list[Finding]]]:
    """Each check, how many things it looked at, and what it found."""
    results = []
    for check in CHECKS:
        tallies = []
        if check.cluster is not None:
            tallies.append(Tally(check.id))
            _of_cluster(check.cluster, snapshot, tallies[-1])
        for node in snapshot.nodes:
            if check.node is not None and concerned(check, node):
                tallies.append(Tally(check.id, node.name))
                _of_node(check.node, node, snapshot, tallies[-1])
        results.append((check, sum(tally.n for tally in tallies), [one for tally in tallies for one in tally.findings]))
    return results


# --------------------------------------------------------------------------- two samples


Identity = t.Tuple[t.Any, ...]


class Before:
    """What a report of the first sample found.

    :raises BadInput: it isn't a report.
    """

    def __init__(self, report: Json) -> None:
        findings = report.get("findings")
        if not isinstance(findings, list) or not all(isinstance(one, dict) for one in findings):
            raise BadInput("before: this isn't a report of gpu_allocation_check, which has a list of findings")
        self._found: dict[Identity, list[Finding]] = {}
        self._blind: set[tuple[str, str, int | None]] = set()
        self._passing: set[Identity] = set()
        for one in findings:
            self._add(_found_before(one))

    def _add(self, finding: Finding) -> None:
        self._found.setdefault(finding.identity, []).append(finding)
        if finding.level in (FAIL, WARN):
            self._passing.add((*finding.identity, finding.pod_uid))
        elif finding.node and not (finding.pod or finding.container or finding.key):
            self._blind.add((finding.check, finding.node, finding.card))

    def level(self, finding: Finding) -> str:
        """How bad the same was then; empty where it wasn't there."""
        same = [one for one in self._found.get(finding.identity, ()) if finding.again(one)]
        self._passing -= {(*one.identity, one.pod_uid) for one in same}
        return worst(one.level for one in same) if same else ""

    def blind(self, finding: Finding) -> bool:
        """Whether the check could tell nothing of this node, or card, then."""
        return any((finding.check, finding.node, card) in self._blind for card in (None, finding.card))

    @property
    def passed(self) -> int:
        """FAIL and WARN that nobody has asked for again."""
        return len(self._passing)


def _found_before(one: Json) -> Finding:
    reader = Reader()
    most = reader.number(one.get("most"), "most")
    parts = {name: reader.number(part, "parts") or 0 for name, part in reader.obj(one.get("parts"), "parts").items()}
    finding = Finding(
        check=reader.text(one.get("check"), "check"),
        level=reader.text(one.get("level"), "level"),
        node=reader.text(one.get("node"), "node"),
        what=reader.text(one.get("what"), "what"),
        card=reader.number(one.get("card"), "card"),
        pod=reader.text(one.get("pod"), "pod"),
        container=reader.text(one.get("container"), "container"),
        pod_uid=reader.text(one.get("pod_uid"), "pod_uid"),
        key=reader.text(one.get("key"), "key"),
        parts=parts,
        most=most,
    )
    if not reader.damage and finding.level not in LEVELS:
        reader.bad("level", "one of " + ", ".join(LEVELS), finding.level)
    if reader.damage:
        raise BadInput(f"before: a finding of this report can't be read: {reader.damage[0]}")
    return finding


def _confirmed(one: Finding, confirm: bool, before: Before) -> Finding | None:
    """A finding of the second sample as both samples have it; None for what passes by itself."""
    then = before.level(one)
    if one.level != UNKNOWN and (then == UNKNOWN or (not then and before.blind(one))):
        return dataclasses.replace(one, level=UNKNOWN, what=f"{one.what} (the first sample couldn't tell)")
    if then:
        milder = max(one.level, then, key=LEVELS.index)
        return dataclasses.replace(one, level=one.level if then == UNKNOWN else milder, seen=2)
    return one if one.level == UNKNOWN and not (confirm and one.key) else None


def report(snapshot: Snapshot, cluster: str = "", before: Json | None = None) -> Json:
    """The report.

    :param cluster: the API server's address.
    :param before: the report of the first sample. FAIL and WARN then count only where both samples have them.
    :raises BadInput: ``before`` isn't a report.
    """
    first = None if before is None else Before(before)
    findings: list[Finding] = []
    checks = []
    transient = 0
    for check, number, found in run(snapshot):
        kept = found if first is None else [_confirmed(one, check.confirm, first) for one in found]
        mine = [one for one in kept if one is not None]
        transient += sum(now is None and one.level != UNKNOWN for one, now in zip(found, kept))
        levels = [one.level for one in mine]
        checks.append(
            {
                "id": check.id,
                "backend": check.backend,
                "title": check.title,
                "result": worst(levels),
                "n": number,
                **{level.lower(): levels.count(level) for level in (FAIL, WARN, UNKNOWN)},
            }
        )
        findings += mine
    levels = [one.level for one in findings]
    return {
        "result": worst(levels),
        "time": datetime.datetime.fromtimestamp(snapshot.now, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cluster": cluster,
        "samples": 1 if first is None else 2,
        "grace_seconds": snapshot.options.grace,
        "counts": {
            **{level: levels.count(level) for level in (FAIL, WARN, UNKNOWN)},
            PASS: sum(one["result"] == PASS for one in checks),
        },
        "checks": checks,
        "findings": [one.plain() for one in sorted(findings, key=_weight)],
        "nodes": [
            node_of(node) for node in sorted(snapshot.nodes, key=lambda one: natural(one.name)) if concerns(node)
        ],
        "transient": transient + (first.passed if first is not None else 0),
    }


def worst(levels: t.Iterable[str]) -> str:
    return min(levels, key=LEVELS.index, default=PASS)


def _weight(one: Finding) -> tuple[t.Any, ...]:
    """The worst first, then by place."""
    card = -1 if one.card is None else one.card
    return LEVELS.index(one.level), natural(one.node), card, one.check, natural(one.pod), one.container, one.what
