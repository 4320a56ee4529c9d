# SPDX-License-Identifier: GPL-3.0-or-later
"""The report as JUnit XML, read back."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._report.junit import render
from ansible_collections.kubegpu.share.plugins.module_utils._report.parse import view
from report_samples import HEALTHY, TROUBLE, card, check, finding, node, report


def parsed(given):
    text = render(view(given, None))
    root = ElementTree.fromstring(text.encode())
    conforms(root)
    return root


def conforms(root):
    """Assert Jenkins' schema for the elements in use."""
    assert root.tag == "testsuites" and set(root.attrib) <= {"name", "tests", "failures", "errors", "time"}
    for suite in root:
        assert suite.tag == "testsuite"
        assert {"name", "tests", "failures", "errors"} <= set(suite.attrib)
        assert set(suite.attrib) <= {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"}
        cases = suite.findall("testcase")
        assert [one.tag for one in suite] == ["properties", *["testcase"] * len(cases)]
        assert all(set(one.attrib) == {"name", "value"} for one in suite.find("properties"))
        assert int(suite.get("tests")) == len(cases)
        assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
        assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped"))
        for case in cases:
            assert set(case.attrib) == {"name", "classname", "time"}
            assert len(case) <= 1
            assert all(one.tag in ("failure", "skipped", "system-out") for one in case)
    assert int(root.get("tests")) == len(root.findall("testsuite/testcase"))
    assert int(root.get("failures")) == len(root.findall("testsuite/testcase/failure"))
    names = [(one.get("classname"), one.get("name")) for one in root.iter("testcase")]
    assert len(names) == len(set(names)), "CI merges cases of one name"


def outcomes(root):
    """The outcome of each check and node."""
    found = {}
    for case in root.iter("testcase"):
        where = case.get("name").rsplit("[", 1)[1].rstrip("]")
        found[case.get("classname").split(".")[-1], where] = case[0].tag if len(case) else "passed"
    return found


def test_a_case_for_each_check_and_node():
    root = parsed(TROUBLE)
    assert [suite.get("name") for suite in root] == [
        f"kubegpu.share.{one}" for one in ("common", "gpushare", "hami", "servers")
    ]
    assert outcomes(root) == {
        **{(check, f"node gpu{n}"): "passed" for check in ("C2", "C5", "G6", "G7", "G9") for n in (1, 2, 3)},
        ("C2", "node gpu1"): "failure",
        ("C5", "node gpu3"): "skipped",
        ("G6", "node gpu1"): "failure",
        ("G9", "node gpu1"): "system-out",
        ("G10", "cluster"): "skipped",
        ("H1", "cluster"): "skipped",
        ("S1", "cluster"): "passed",
    }
    failure = root.find(".//failure")
    assert failure.get("message") == "A process uses the card outside any pod."
    assert "its cgroup is /user.slice" in failure.text and "do: Ask who runs" in failure.text
    assert root[0].get("timestamp") == "2026-11-22T12:00:00"


def test_nothing_fails_on_a_healthy_cluster():
    root = parsed(HEALTHY)
    assert root.get("failures") == "0"
    assert outcomes(root)["G10", "cluster"] == "skipped"
    assert root.find(".//skipped").get("message") == "Nothing to check"


@pytest.mark.parametrize(("level", "tag"), [("FAIL", "failure"), ("UNKNOWN", "skipped"), ("WARN", "system-out")])
def test_a_check_without_listed_findings_passes_on_no_node(level, tag):
    given = report([check("G6", level)], [], [node("gpu1", card())], level)
    assert outcomes(parsed(given)) == {("G6", "cluster"): tag}


def test_several_findings_of_a_node_are_one_case_and_the_worst_counts():
    both = [finding("G6", "WARN", what="first"), finding("G6", what="second"), finding("G6", "UNKNOWN", node="")]
    root = parsed(report([check("G6", "FAIL", 3)], both, [node("gpu1", card())], "FAIL"))
    assert outcomes(root) == {("G6", "node gpu1"): "failure", ("G6", "cluster"): "skipped"}
    assert root.find(".//failure").get("message") == "second"
    assert "first" in root.find(".//failure").text


def test_without_a_check_nothing_passes():
    assert outcomes(parsed({})) == {("none", "cluster"): "skipped"}


def test_a_report_that_says_worse_than_its_checks_fails():
    root = parsed(report([check("G6")], [finding("G6", "")], [], "FAIL"))
    assert root.get("failures") == "1"


def test_characters_that_xml_forbids_are_replaced():
    evil = "]]></failure><x a='&\"\x00\x0b\ud800\uffff\x1b[31m"
    root = parsed(report([check(evil, "FAIL", title=evil)], [finding(evil, what=evil, node=evil)], []))
    assert root.find(".//failure").get("message").startswith("]]></failure><x a='&\"")
    assert not list(root.iter("x"))
