# SPDX-License-Identifier: GPL-3.0-or-later
"""Reports, tables and findings of a cluster whose every text is hostile, through the real writers, read by parsers."""

from __future__ import annotations

import html.parser
import json
from xml.etree import ElementTree

import hostile
import pytest
from allocation_snapshots import allocation, node, pod
from ansible_collections.kubegpu.share.plugins.filter.controller import FilterModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import table
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._e2e import result
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.findings import PROBLEM, Finding, Findings
from ansible_collections.kubegpu.share.plugins.module_utils._report import outcome
from prometheus_client.parser import text_string_to_metric_families
from report_samples import card, check, finding, report
from report_samples import node as reported
from report_samples import pod as held

FILES = ("html", "json", "junit", "prometheus")
EVERY = pytest.mark.parametrize("text", hostile.TEXTS, ids=lambda one: ascii(one)[:30])


def clean(written: str) -> None:
    match = hostile.FORBIDDEN.search(written)
    assert not match, ascii(written[max(0, match.start() - 100) : match.end() + 40]) if match else ""
    written.encode()


def rendered(text: str) -> dict[str, str]:
    wrong = finding(text, node=text, pod=text, container=text, what=text, do=text, evidence={text: text}, uuid=text)
    cards = [card(0, held(text, 1, 1), model=text, uuid=text, healthy=False, reason=text)]
    shown = report([check(text, "FAIL", backend=text, title=text)], [wrong], [reported(text, *cards)], cluster=text)
    waiting = [{"namespace": text, "name": text, "units": 1, "reason": text}]
    allocation = {"nodes": [{"name": text, "problem": text, "memory_limit": text}], "waiting": waiting, "unit": "GiB"}
    params = {"text": None, "report": shown, "allocation": allocation, "prometheus_mode": "0644"}
    made = outcome.render({**params, **dict.fromkeys(FILES, "/nowhere")})
    return {"text": made.text, **{target.argument: target.content for target in made.targets}}


class Page(html.parser.HTMLParser):
    """The tags of a page and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        assert not [name for name, _value in attrs if name.startswith("on")]

    def handle_data(self, data) -> None:
        self.text += data


@EVERY
def test_reports(text: str) -> None:
    found = rendered(text)
    for written in found.values():
        clean(written)
    page = Page()
    page.feed(found["html"])
    assert page.tags.count("script") == 1 and "MARKER" not in found["html"].replace("touch MARKER", "")
    root = ElementTree.fromstring(found["junit"].encode())
    assert len(root.findall(".//failure")) == 1 and not list(root.iter("x"))
    names = {family.name for family in text_string_to_metric_families(found["prometheus"])}
    assert names and all(name.startswith("kubegpu_") for name in names)
    json.loads(found["json"])


@pytest.mark.parametrize("text", hostile.HONEST)
def test_honest_texts_are_in_every_report(text: str) -> None:
    found = rendered(text)
    page = Page()
    page.feed(found["html"])
    assert (
        text in page.text
        and text in found["prometheus"]
        and text in json.dumps(json.loads(found["json"]), ensure_ascii=False)
    )
    assert text in ElementTree.fromstring(found["junit"].encode()).find(".//failure").text
    assert text in found["text"]


@EVERY
def test_tables_of_inspect(text: str) -> None:
    cards = [{"index": 0, "uuid": text, "minor": 0, "memoryMiB": 16384, "units": 16, "healthy": False}]
    annotation = json.dumps([{**cards[0], "model": text, "reason": text, "code": text, "limit": text}])
    taken = node("gpu1", {contract.NODE_CARDS: annotation, contract.NODE_LIMIT: text}, mem=16, count=1)
    taken["status"]["addresses"] = [{"type": "InternalIP", "address": text}]
    waiting = pod(text, [{"name": text, "resources": {"limits": {contract.RESOURCE_MEMORY: "2"}}}], "", {}, "Pending")
    waiting["metadata"]["namespace"] = text
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": text}]
    bound = pod("a", [{"name": text, "resources": {"limits": {contract.RESOURCE_MEMORY: "2"}}}], "gpu1", {})
    bound["metadata"]["namespace"] = text
    found = allocation([taken], [waiting, bound])
    for wide in (False, True):
        shown = table(found, wide)
        clean(shown)
        assert not [line for line in shown.splitlines() if line.startswith(("ok: ", "forged"))]
        assert "gpu1" in shown


@EVERY
def test_findings_of_preflight_and_steps_of_acceptance(text: str) -> None:
    found = Findings(
        [Finding("no-facts", PROBLEM, "can't be read: {reason}", "repair {host}", "gpu1", fields={"reason": text})]
    )
    for _severity, shown in found.entries(100):
        clean(shown)
        assert not [line for line in shown.splitlines() if line.startswith(("ok: ", "forged"))]
    step = result.StepResult("W1", result.FAIL, text, text, text, 0, text)
    clean(result.table([step], "Steps"))
    clean(result.shorten(text))


@EVERY
def test_texts_of_other_modules_in_messages_of_roles(text: str) -> None:
    shown = FilterModule().filters()["printable"](text)
    clean(shown)
    assert "\n" not in shown and len(shown) <= 2000
