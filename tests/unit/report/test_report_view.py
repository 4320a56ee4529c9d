# SPDX-License-Identifier: GPL-3.0-or-later
"""Views of reports and allocations: what is none is refused, and nothing unknown passes."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line
from ansible_collections.kubegpu.share.plugins.module_utils._report import outcome
from ansible_collections.kubegpu.share.plugins.module_utils._report.model import mib
from ansible_collections.kubegpu.share.plugins.module_utils._report.parse import view
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from report_samples import ALLOCATION, LEVELS, NVIDIA, TROUBLE, card, check, finding, node, pod, report


@pytest.mark.parametrize(
    ("given_text", "shown"),
    [
        (None, ""),
        (" two\n lines\t", "two lines"),
        ("\x1b[31mred\x1b[0m", "red"),
        # Visible, so that nothing behind the beginning of a sequence is hidden.
        ("\x1b]0;title\x07rest", "\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}rest"),
        ("\x1b]0;never ends", "\N{REPLACEMENT CHARACTER}]0;never ends"),
        ("a\x00b\x08c\x9bd", "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c\N{REPLACEMENT CHARACTER}d"),
        ("user\u202egpj", "user\N{REPLACEMENT CHARACTER}gpj"),
        ("\ud800", "\N{REPLACEMENT CHARACTER}"),
        ("\uffff", "\N{REPLACEMENT CHARACTER}"),
        ("µ漢\U0001f600", "µ漢\U0001f600"),
        ({"a": 1}, "{'a': 1}"),
        (True, "True"),
    ],
    ids=str,
)
def test_texts_are_one_printable_line(given_text, shown):
    assert line(given_text) == shown


def test_long_texts_are_truncated_visibly():
    assert line("x" * 5000) == "x" * 1999 + "…"
    assert line(" " * 100000 + "y") == "…"
    assert line("x" * 2000) == "x" * 2000


def test_memory_as_text():
    shown = ["unknown", "512 MiB", "1 GiB", "1.5 GiB", "2,048 GiB"]
    assert [mib(one) for one in (None, 512, 1024, 1536, 1024 * 2048)] == shown


def test_a_report_is_as_bad_as_its_worst_finding():
    assert view(report([check("G6")], [finding("G6")], []), None).result == "FAIL"
    assert view(report([check("G6")], [finding("G6", "WARN")], []), None).checks[0].result == "WARN"
    assert view(report([check("G6", warn=1)], [], []), None).result == "WARN"
    # A finding of a check that isn't listed, with an unknown level.
    other = view(report([check("G6")], [finding("X1", "SEVERE")], []), None)
    assert [(one.id, one.result) for one in other.checks] == [("G6", "PASS"), ("X1", "UNKNOWN")]
    assert other.result == "UNKNOWN"


@pytest.mark.parametrize(("checks", "result"), [([], "PASS"), ([check("G6")], "fine"), ([check("G6", n=None)], "PASS")])
def test_incomplete_reports_are_unknown(checks, result):
    assert view(report(checks, [], [], result), None).result == "UNKNOWN"
    assert view({"result": result}, None).result == view({}, None).result == "UNKNOWN"


def test_a_check_without_items_has_not_passed():
    shown = view(report([check("G6", n=0), check("G7")], [], []), None)
    assert [one.label for one in shown.checks] == ["nothing to check", "PASS"]
    assert shown.checks_with("PASS") == 1
    assert view(report([check("G6", n=0)], [], []), None).headline == "The checks found nothing to check."


def test_an_allocation_counts_in_its_own_units():
    gpu2, gpu10 = view(None, ALLOCATION).nodes
    assert (gpu2.cards[0].total, gpu2.cards[0].claimed) == (16384, 12288)
    assert [(one.name, one.claimed, one.note) for one in gpu2.cards[0].pods] == [
        ("a/one", 4096, ""),
        ("a/two", 8192, "terminating"),
    ]
    assert [(one.name, one.claimed, one.note) for one in gpu2.pending] == [("b/late", 2048, "pending")]
    assert (gpu10.cards[0].total, gpu10.cards[0].memory_mib) == (15360, 16276)
    assert [one.requests for one in view(None, ALLOCATION).waiting] == ["64 GiB"]
    assert [one.requests for one in view(None, {**ALLOCATION, "unit": None}).waiting] == ["64 units"]


def test_resources_without_cards():
    (dgx,) = view(None, NVIDIA).nodes
    assert not dgx.cards and dgx.problem.startswith("its label")
    (one,) = dgx.resources
    assert (one.name, one.about, one.total, one.claimed) == (
        "nvidia.com/gpu.shared",
        "NVIDIA-H200, 140.4 GiB, 2 cards",
        8,
        3,
    )
    assert [(pod.name, pod.claimed, pod.unit, pod.note) for pod in dgx.pending] == [
        ("a/one", 2, "shares", ""),
        ("a/two", 1, "shares", "it asks twice"),
    ]


def test_a_node_of_two_backends_has_the_cards_of_both():
    both = {**NVIDIA["nodes"][0], "also": [ALLOCATION["nodes"][1]]}
    (dgx,) = view(None, {"nodes": [both]}).nodes
    assert [one.unit for one in dgx.cards] == ["MiB"] and len(dgx.resources) == 1
    units = {"a/one": "shares", "a/two": "shares", "b/late": "MiB"}
    assert {pod.name: pod.unit for pod in dgx.pending} == units


def test_pods_of_the_report_are_not_pending():
    mine = report([check("N2")], [], [node("dgx1", card(0, pod("a/one", 100, 50)), backend="nvidia")])
    mine["nodes"][0]["unit"] = "count"
    (dgx,) = view(mine, NVIDIA).nodes
    assert [pod.name for pod in dgx.pending] == ["a/two"]
    assert (dgx.cards[0].unit, dgx.cards[0].claimed) == ("MiB", 100), "a report counts in MiB"


@pytest.mark.parametrize(("unit", "shown"), [("count", "shares"), (None, "units"), ("furlong", "units")])
def test_cards_that_are_not_counted_in_memory(unit, shown):
    nodes = [{**one, "unit": unit} for one in ALLOCATION["nodes"]]
    gpu2 = view(None, {**ALLOCATION, "nodes": nodes}).nodes[0]
    assert (gpu2.cards[0].unit, gpu2.cards[0].total, gpu2.cards[0].claimed) == (shown, 16, 12)
    assert gpu2.cards[0].memory_mib == 16384


def test_a_report_is_completed_by_the_allocation():
    mine = report([check("G6")], [], [node("gpu2", card(0, pod("a/two", 8192, 1), healthy=False, model=""))])
    shown = view(mine, ALLOCATION)
    gpu2, gpu10 = shown.nodes
    assert (gpu2.cards[0].reason, gpu2.cards[0].model) == ("ECC errors", "NVIDIA T4")
    assert gpu2.cards[0].pods[0].note == "terminating"
    assert gpu2.cards[0].claimed == 8192, "the report's numbers stay"
    assert (gpu2.checked, gpu10.checked) == (True, False)


TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from([*LEVELS, "GiB", "count", "gpushare", "<b>", "\x1b[2J", "\ud800", '"\\\n'])
)


def like(sample: object) -> st.SearchStrategy[object]:
    """Data of a sample's form with any texts and numbers, of which any may be missing."""
    if isinstance(sample, dict):
        if set(sample) <= {"api", "nvml", "proc", "kubelet", "extender"}:
            return st.dictionaries(TEXTS, TEXTS, max_size=3)
        return st.fixed_dictionaries({}, optional={key: like(value) for key, value in sample.items()})
    if isinstance(sample, list):
        return st.lists(st.one_of([like(one) for one in sample]), max_size=3) if sample else st.just([])
    if isinstance(sample, bool):
        return st.none() | st.booleans()
    return st.none() | (TEXTS if isinstance(sample, str) else st.integers(0, 10**15))


@example({"result": "FAIL"}, None)
@given(st.none() | like(TROUBLE), st.none() | like(ALLOCATION) | like(NVIDIA))
def test_any_texts_and_numbers_are_rendered(given_report, given_allocation):
    files = {"html": "page", "json": "data", "prometheus": "metrics", "junit": "cases" if given_report else None}
    rendered = outcome.render(
        {"text": None, "prometheus_mode": "0644", "report": given_report, "allocation": given_allocation, **files}
    )
    written = {target.argument: target.content for target in rendered.targets}
    assert written["html"].endswith("</html>\n")
    written["html"].encode()
    assert not any(ord(one) < 32 and one != "\n" for one in rendered.text)
    if given_report:
        root = ElementTree.fromstring(written["junit"].encode())
        if rendered.result == "FAIL":
            assert root.get("failures") != "0"
    list(text_string_to_metric_families(written["prometheus"]))
    json.loads(written["json"], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("given_report", "given_allocation"),
    [
        ({"nodes": 7}, None),
        ({"findings": ["x"]}, None),
        ({"checks": [{"id": "C1", "n": 1, "fail": "many"}]}, None),
        ({"nodes": [{"cards": [[]]}]}, None),
        (None, {"nodes": {"n1": {}}}),
        (None, {"nodes": [{"cards": [{"total": [1], "used": "x"}], "unit": "GiB"}]}),
        ([], None),
    ],
    ids=str,
)
def test_what_is_no_result_is_refused(given_report, given_allocation):
    files = dict.fromkeys(("text", "html", "json", "junit", "prometheus"))
    with pytest.raises(BadInput, match="aren't the results of gpu_allocation_check and gpu_allocation_info"):
        outcome.render({**files, "prometheus_mode": "0644", "report": given_report, "allocation": given_allocation})
