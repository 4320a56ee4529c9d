# SPDX-License-Identifier: GPL-3.0-or-later
"""The report's metrics, read by Prometheus' own parser."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._report.parse import view
from ansible_collections.kubegpu.share.plugins.module_utils._report.prometheus import render
from prometheus_client.parser import text_string_to_metric_families
from report_samples import ALLOCATION, TROUBLE, UUID, card, check, finding, node, report


def metrics(*given):
    text = render(view(*given))
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a metric in two pieces is refused"
    assert all(family.type == "gauge" and family.documentation for family in families)
    samples = [(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples]
    assert len(samples) == len(set(samples)), "a series twice is refused"
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def test_results_findings_and_cards():
    found = metrics(TROUBLE, None)
    first, unhealthy = ("0", "gpu1", UUID.format(1)), ("3", "gpu1", UUID.format(4))
    expected = {
        ("kubegpu_report_result", "FAIL"): 1,
        ("kubegpu_report_result", "PASS"): 0,
        ("kubegpu_report_timestamp_seconds",): 1795348800,
        ("kubegpu_report_transient",): 2,
        ("kubegpu_check_result", "gpushare", "G6", "FAIL"): 1,
        ("kubegpu_check_result", "gpushare", "G6", "PASS"): 0,
        ("kubegpu_check_findings", "gpushare", "G9", "WARN"): 1,
        ("kubegpu_check_findings", "gpushare", "G9", "FAIL"): 0,
        ("kubegpu_check_items", "gpushare", "G10"): 0,
        ("kubegpu_card_memory_total_mebibytes", *first): 16384,
        ("kubegpu_card_memory_claimed_mebibytes", *first): 12288,
        ("kubegpu_card_memory_used_mebibytes", *first): 13900,
        ("kubegpu_card_memory_foreign_mebibytes", *first): 2048,
        ("kubegpu_card_healthy", *first): 1,
        ("kubegpu_card_healthy", *unhealthy): 0,
    }
    assert {series: found.get(series) for series in expected} == expected
    assert ("kubegpu_card_memory_used_mebibytes", *unhealthy) not in found, "what isn't known is no 0"


def test_an_allocation_alone_has_cards_alone():
    found = metrics(None, ALLOCATION)
    assert {name for name, *_labels in found} == {
        "kubegpu_card_memory_total_mebibytes",
        "kubegpu_card_memory_claimed_mebibytes",
        "kubegpu_card_healthy",
    }
    assert render(view(None, {})) == ""


def test_shares_are_no_memory():
    counted = {**ALLOCATION, "nodes": [{**ALLOCATION["nodes"][1], "unit": "count"}]}
    found = metrics(None, counted)
    assert found["kubegpu_card_shares", "0", "gpu2", UUID.format(1)] == 16
    assert found["kubegpu_card_shares_claimed", "0", "gpu2", UUID.format(1)] == 12
    assert not [one for one in found if one[0] == "kubegpu_card_memory_claimed_mebibytes"]


def test_labels_are_escaped_and_doubles_left_out():
    evil = 'a"b\\n\nd{}'
    given = report([check(evil, "FAIL")], [finding(evil)], [node(evil, card(0), card(0))])
    found = metrics({**given, "time": "yesterday"}, None)
    assert ("kubegpu_report_timestamp_seconds",) not in found, "a time that is none"
    shown = 'a"b\\n d{}'
    assert found["kubegpu_check_result", "gpushare", shown, "FAIL"] == 1
    assert found["kubegpu_card_healthy", "0", shown, UUID.format(1)] == 1
