# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A report as JUnit XML: a suite per backend, a case per check and node, so that CI shows who failed where.

FAIL is a failure, UNKNOWN is skipped with its reason (and so is a check with nothing to look at), WARN passes and says
why in system-out. A case passes only where its check looked, and nothing of what it found is unaccounted for.
"""

from __future__ import annotations

import collections
import typing as t
from xml.etree import ElementTree

from ansible_collections.kubegpu.share.plugins.plugin_utils._report_model import NOTHING, Check, Finding, View, worst
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_values import text

# Cases that are about no node.
CLUSTER = "cluster"


class _Case(t.NamedTuple):
    name: str
    result: str
    findings: list[Finding]
    words: str = ""


def render(view: View) -> str:
    """The document; of the schema that Jenkins' xUnit plugin checks, which GitLab and others read too."""
    suites: dict[str, list[tuple[Check, _Case]]] = {}
    found: dict[str, list[Finding]] = {}
    for finding in view.findings:
        found.setdefault(finding.check, []).append(finding)
    for check in view.checks:
        cases = suites.setdefault(check.backend, [])
        cases += [(check, case) for case in _cases(view, check, found.get(check.id, []))]
    if not view.checks:
        suites[CLUSTER] = [(Check("none", "A check was made"), _Case(CLUSTER, "UNKNOWN", [], view.headline))]
    root = ElementTree.Element("testsuites", {"name": "kubegpu.share"})
    total: collections.Counter[str] = collections.Counter()
    for backend, cases in suites.items():
        total += _suite(root, backend, cases, view)
    root.attrib |= {"tests": str(total.total()), "failures": str(total["FAIL"]), "errors": "0"}
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _cases(view: View, check: Check, findings: t.Sequence[Finding]) -> list[_Case]:
    """What a check said of each node, and of the cluster."""
    by_node: dict[str, list[Finding]] = {}
    for finding in findings:
        by_node.setdefault(finding.node, []).append(finding)
    # A check that has more than its findings tell can't vouch for any node.
    explained = worst(finding.level for finding in findings) == check.result
    if check.looked_at and explained:
        for known in view.nodes:
            if _concerns(check, known.backend):
                by_node.setdefault(known.name, [])
    if not explained or not by_node:
        by_node.setdefault("", [])
    cases = []
    for node, mine in by_node.items():
        result = worst(finding.level for finding in mine)
        words = ""
        if not node and not explained:
            result, words = worst([result, check.result]), "The check tells no more than its result."
        elif not check.looked_at and not mine:
            result, words = "UNKNOWN", NOTHING.capitalize()
        cases.append(_Case(f"node {node}" if node else CLUSTER, result, mine, words))
    return cases


def _concerns(check: Check, backend: str) -> bool:
    """Whether a check looks at nodes of a backend; those of the servers are about the cluster."""
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
        # The form of most schemas knows no zone; the time is UTC.
        "timestamp": view.time.removesuffix("Z"),
    }
    suite = ElementTree.SubElement(root, "testsuite", {name: value for name, value in about.items() if value})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("cluster", view.cluster), ("result", view.result), ("backend", backend)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for check, case in cases:
        title = f"{check.id} {check.title}".strip()
        names = {"classname": f"kubegpu.share.{backend}.{check.id}", "name": f"{title} [{case.name}]", "time": "0"}
        _say(ElementTree.SubElement(suite, "testcase", names), case)
    return count


def _say(element: ElementTree.Element, case: _Case) -> None:
    if case.result == "PASS":
        return
    same = [finding for finding in case.findings if finding.level == case.result]
    message = text("; ".join(finding.what for finding in same), 500) or case.words
    body = "\n\n".join([_words(finding) for finding in case.findings] or [case.words])
    if case.result == "FAIL":
        ElementTree.SubElement(element, "failure", {"type": "FAIL", "message": message}).text = body
    elif case.result == "UNKNOWN":
        ElementTree.SubElement(element, "skipped", {"type": "UNKNOWN", "message": message}).text = body
    else:
        ElementTree.SubElement(element, "system-out").text = body


def _words(finding: Finding) -> str:
    lines = [f"{finding.level}: {finding.what}", finding.where]
    lines += [f"{plane}: {said}" for plane, said in finding.evidence]
    lines += [f"do: {finding.do}"] if finding.do else []
    return "\n".join(line for line in lines if line)
