# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render a report as JUnit XML: a suite for each back end, a case for each check and node.

FAIL is a failure, UNKNOWN is skipped with its reason (and so is a check without items), WARN passes with its reason in
system-out. A case passes only if its check had items and all of its findings are listed.
"""

from __future__ import annotations

import collections
import typing as t
from xml.etree import ElementTree

from .._core.untrusted import line
from .model import NOTHING, Check, Finding, View, worst

# The name of cases without a node.
CLUSTER = "cluster"


class _Case(t.NamedTuple):
    name: str
    result: str
    findings: list[Finding]
    text: str = ""


def render(view: View) -> str:
    """Return the document, in the schema of Jenkins' xUnit plugin, which GitLab and others read too."""
    suites: dict[str, list[tuple[Check, _Case]]] = {}
    by_check: dict[str, list[Finding]] = {}
    for finding in view.findings:
        by_check.setdefault(finding.check, []).append(finding)
    for check in view.checks:
        cases = suites.setdefault(check.backend, [])
        cases += [(check, case) for case in _cases(view, check, by_check.get(check.id, []))]
    if not view.checks:
        result = worst(["UNKNOWN", view.result])
        suites[CLUSTER] = [(Check("none", "A check ran"), _Case(CLUSTER, result, [], view.headline))]
    elif worst(check.result for check in view.checks) != view.result:
        # The report says worse than its checks do.
        suites.setdefault(CLUSTER, []).append(
            (Check("result", "The report"), _Case(CLUSTER, view.result, [], view.headline))
        )
    root = ElementTree.Element("testsuites", {"name": "kubegpu.share"})
    total: collections.Counter[str] = collections.Counter()
    for backend, cases in suites.items():
        total += _suite(root, backend, cases, view)
    root.attrib |= {"tests": str(total.total()), "failures": str(total["FAIL"]), "errors": "0"}
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _cases(view: View, check: Check, findings: t.Sequence[Finding]) -> list[_Case]:
    """Return a check's cases: one for each node, and one for the cluster."""
    by_node: dict[str, list[Finding]] = {}
    for finding in findings:
        by_node.setdefault(finding.node, []).append(finding)
    # A check with more findings than are listed can't pass on any node.
    explained = worst(finding.level for finding in findings) == check.result
    if check.items and explained:
        for known in view.nodes:
            if _concerns(check, known.backend):
                by_node.setdefault(known.name, [])
    if not explained or not by_node:
        by_node.setdefault("", [])
    cases = []
    for node, mine in by_node.items():
        result = worst(finding.level for finding in mine)
        reason = ""
        if not node and not explained:
            result, reason = worst([result, check.result]), "The check gives no details."
        elif not check.items and not mine:
            result, reason = "UNKNOWN", NOTHING.capitalize()
        cases.append(_Case(f"node {node}" if node else CLUSTER, result, mine, reason))
    return cases


def _concerns(check: Check, backend: str) -> bool:
    """Return whether a check concerns nodes of a back end; those of the servers concern the cluster."""
    return check.backend == "common" or backend == "mixed" or backend.split("-")[0] == check.backend


def _suite(
    root: ElementTree.Element, backend: str, cases: t.Sequence[tuple[Check, _Case]], view: View
) -> collections.Counter[str]:
    count = collections.Counter(case.result for _check, case in cases)
    about = {
        "name": f"kubegpu.share.{backend}",
        "tests": str(len(cases)),
        "failures": str(count["FAIL"]),
        "errors": "0",
        "skipped": str(count["UNKNOWN"]),
        "time": "0",
        # Most schemas have no time zone; the time is UTC.
        "timestamp": view.time.removesuffix("Z"),
    }
    suite = ElementTree.SubElement(root, "testsuite", {name: value for name, value in about.items() if value})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("cluster", view.cluster), ("result", view.result), ("backend", backend)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for check, case in cases:
        title = f"{check.id} {check.title}".strip()
        names = {"classname": f"kubegpu.share.{backend}.{check.id}", "name": f"{title} [{case.name}]", "time": "0"}
        _add_outcome(ElementTree.SubElement(suite, "testcase", names), case)
    return count


def _add_outcome(element: ElementTree.Element, case: _Case) -> None:
    if case.result == "PASS":
        return
    same = [finding for finding in case.findings if finding.level == case.result]
    message = line("; ".join(finding.what for finding in same), 500) or case.text
    body = "\n\n".join([_finding_text(finding) for finding in case.findings] or [case.text])
    if case.result == "FAIL":
        ElementTree.SubElement(element, "failure", {"type": "FAIL", "message": message}).text = body
    elif case.result == "UNKNOWN":
        ElementTree.SubElement(element, "skipped", {"type": "UNKNOWN", "message": message}).text = body
    else:
        ElementTree.SubElement(element, "system-out").text = body


def _finding_text(finding: Finding) -> str:
    lines = [f"{finding.level}: {finding.what}", finding.where]
    lines += [f"{source}: {value}" for source, value in finding.evidence]
    lines += [f"do: {finding.do}"] if finding.do else []
    return "\n".join(line for line in lines if line)
