# SPDX-License-Identifier: GPL-3.0-or-later
"""The page as text: values of the cluster are escaped, large clusters are folded, bars add up."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._report import html as bars
from ansible_collections.kubegpu.share.plugins.module_utils._report.model import Card, Pod
from ansible_collections.kubegpu.share.plugins.module_utils._report.parse import view
from report_samples import ALLOCATION, HEALTHY, NVIDIA, TROUBLE, card, check, finding, large, node, pod, report

ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "article", "section"),
    *("h1", "h2", "h3", "h4", "p", "span", "b", "a", "div", "dl", "dt", "dd", "ul", "li", "i", "u", "br"),
    *("details", "summary", "table", "thead", "tbody", "tr", "th", "td"),
    *("label", "input", "output", "script"),
}
VOID = {"meta", "br", "input"}
SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)


class Page(HTMLParser):
    """Elements and attributes of a page; fails if the elements aren't nested properly."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text, self.ids, self.links = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        names = [name for name, _value in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name == "href"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(given=None, allocation=None):
    return Page(bars.render(view(given, allocation)))


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> javascript:alert(3) {{ 7*7 }} {% raw %} </style><!--"


def poisoned(value):
    """Return the same data with the attack in every text."""
    if isinstance(value, dict):
        return {key: poisoned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    return EVIL if isinstance(value, str) and value not in ("FAIL", "WARN", "UNKNOWN", "PASS", "GiB") else value


@pytest.mark.parametrize(
    ("given", "allocation"),
    [(poisoned(TROUBLE), None), (None, poisoned(ALLOCATION)), (poisoned(TROUBLE), poisoned(ALLOCATION))],
    ids=["report", "allocation", "both"],
)
def test_values_of_the_cluster_are_escaped(given, allocation):
    found = page(given, allocation)
    assert {tag for tag, _attributes in found.elements} <= ELEMENTS
    attributes = {(tag, name) for tag, given in found.elements for name in given}
    assert not [
        attribute
        for attribute in attributes
        if attribute[1].startswith("on") or attribute[1] in ("src", "srcset", "formaction")
    ]
    assert all(link.startswith(("#node-", "#check-")) for link in found.links)
    assert sum(tag == "script" for tag, _given in found.elements) == 1
    styles = [given["style"] for _tag, given in found.elements if "style" in given]
    assert all(style.replace(".", "").rstrip("%").split(":")[-1].isdigit() for style in styles if "width" in style)
    assert "<script>alert(1)</script>" in "".join(found.text)
    assert "{{ 7*7 }} {% raw %}" in "".join(found.text), "values of the cluster are no template"


def test_the_attack_in_keys_and_sources():
    wrong = finding("C2", evidence={EVIL: EVIL, "nvml": {EVIL: [EVIL]}})
    found = page(report([check("C2", "FAIL")], [wrong], []))
    assert {tag for tag, _attributes in found.elements} <= ELEMENTS
    assert sum(tag == "script" for tag, _given in found.elements) == 1


def test_the_policy_allows_style_and_the_filter_only_and_comes_first():
    text = bars.render(view(TROUBLE, None))
    (script,) = SCRIPT.findall(text)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; base-uri 'none'" in text
    # No data of the cluster is in the script.
    assert SCRIPT.findall(bars.render(view({}, poisoned(ALLOCATION)))) == [script]
    assert text.index("Content-Security-Policy") < text.index("<style>")
    licence = "https://www.gnu.org/licenses/gpl-3.0.txt"
    assert "http" not in text.replace("http-equiv", "").replace("https://192.0.2.10:6443", "").replace(licence, "")
    assert "url(" not in text and "@import" not in text


def test_ids_are_unique_and_links_have_targets():
    found = page(TROUBLE, ALLOCATION)
    assert len(found.ids) == len(set(found.ids))
    assert found.links and {link[1:] for link in found.links} <= set(found.ids)
    # Each finding leads to its check, which says what holds where it passes.
    checks = re.findall(
        r'<tr id="(check-[0-9]+)"><th scope="row"><b>([^<]+)</b> ([^<]+) <', bars.render(view(TROUBLE, None))
    )
    assert [name for _anchor, name, _title in checks] == [one["id"] for one in TROUBLE["checks"] if one["id"] != "H1"]
    anchors = {name: anchor for anchor, name, _title in checks}
    assert {f"#{anchors[one['check']]}" for one in TROUBLE["findings"]} <= set(found.links)


OLD = {**ALLOCATION["nodes"][1], "memory_limit": "unenforced: the driver is too old"}
NAMED = {
    **{**ALLOCATION, "cluster": "https://192.0.2.1:6443", "time": "2026-11-26T03:00:00Z"},
    "nodes": [OLD, {**ALLOCATION["nodes"][0], "memory_limit": "off"}],
}
IN_MIB: JsonObject = json.loads(
    json.dumps({**ALLOCATION, "unit": "MiB", "nodes": [ALLOCATION["nodes"][1]]}).replace('"GiB"', '"MiB"'),
    # Sizes and shares of the samples are in GiB.
    object_hook=lambda one: {
        key: value * 1024 if key in ("total", "used", "units") and isinstance(value, int) else value
        for key, value in one.items()
    },
)


UNENFORCED = {**HEALTHY, "nodes": [{**HEALTHY["nodes"][0], "memory_limit": "unenforced: the driver is too old"}]}


@pytest.mark.parametrize(
    ("given", "allocation", "texts"),
    [
        (UNENFORCED, None, ["limits not enforced", "Memory limit: unenforced: the driver is too old"]),
        (HEALTHY, None, ["No finding.", "GPUs agree", "of 3 checks passed, 1 had nothing to check"]),
        ({}, None, ["No check ran", "UNKNOWN", "No finding is listed.", "No node shares a GPU."]),
        (None, ALLOCATION, ["nothing was checked", "ECC errors", "b/late", "b/big", "no card has so much"]),
        (None, ALLOCATION, ["1 card · 14 GiB of 16 GiB claimed", "45 % claimed of 31 GiB GPU memory"]),
        (None, ALLOCATION, ["Memoryin GiB", "Namespaces NamespacePodsClaimed a2 12 GiB b1 2 GiB", "limits enforced"]),
        (None, NAMED, ["Clusterhttps://192.0.2.1:6443Time2026-11-26T03:00:00Z", "limits not enforced", "limits off"]),
        (None, NAMED, ["Memory limit: unenforced: the driver is too old"]),
        (None, IN_MIB, ["Memoryin MiB", "14,336 MiB of 16,384 MiB claimed", "b/bigno card has so much 65,536 MiB"]),
        (None, NVIDIA, ["nvidia.com/gpu.shared 3 of 8 shares", "NVIDIA-H200, 140.4 GiB, 2 cards", "its label"]),
        (None, NVIDIA, ["a/two it asks twice", "2 shares", "1 node, held by 2 pods"]),
        (None, {}, ["No node shares a GPU."]),
        (TROUBLE, ALLOCATION, ["overbooked", "foreign use", "2.1 more than claimed", "not checked"]),
    ],
    ids=[
        "limits",
        "healthy",
        "empty",
        "allocation",
        "sums",
        "spaces",
        "named",
        "why",
        "MiB",
        "counted",
        "pods",
        "nothing",
        "trouble",
    ],
)
def test_the_text_of_each_page(given, allocation, texts):
    shown = " ".join("".join(page(given, allocation).text).split())
    assert [text for text in texts if text not in shown] == []
    assert ("Findings" in shown) == (given is not None)


def test_all_memory_of_a_page_has_one_unit():
    shown = "".join(page(TROUBLE, ALLOCATION).text)
    own = [match for match in re.findall("[0-9] ([MG]iB)", shown.partition("Nodes and cards")[2]) if match != "GiB"]
    assert own == [], "the findings' evidence is the check's own text"
    (box,) = bars._nodes(view(report([check("G6")], [], [SMALL]), None))
    assert [(row.claimed, row.used) for row in box.cards[0].rows] == [("1", "<0.1"), ("0.5", "0"), ("2.4", "unknown")]


SMALL = node("gpu1", card(0, pod("a/x", 1024, 20), pod("a/y", 512, 0), pod("b/z", 2500), used_mib=20))


def test_namespaces_are_summed_over_cards_and_units():
    both = {**NVIDIA["nodes"][0], "also": [ALLOCATION["nodes"][1]]}
    found = bars._namespaces(view(None, {"nodes": [both]}))
    assert [(one.name, one.pods, one.claimed, one.used) for one in found] == [
        ("a", 2, "12 GiB, 3 shares", ""),
        ("b", 1, "2 GiB", ""),
    ]
    # A pod of two cards is one pod, with the sum of both; what wasn't measured is unknown.
    two = node("gpu1", card(0, pod("a/x", 1024, 512)), card(1, pod("a/x", 1024, 512), pod("b/y", 512)))
    found = bars._namespaces(view(report([check("G6")], [], [two]), None))
    assert [(one.name, one.pods, one.claimed, one.used) for one in found] == [
        ("a", 1, "2 GiB", "1 GiB"),
        ("b", 1, "0.5 GiB", "unknown"),
    ]


def test_a_healthy_card_has_no_reason():
    one = report([check("G6")], [], [node("gpu1", card(0, reason="long ago"))])
    assert "long ago" not in bars.render(view(one, None))


def test_a_large_cluster_is_folded():
    given = large(1000)
    text = bars.render(view(given, None))
    assert len(text) < 15_000_000
    details = re.findall("<details[^>]*>", text)
    nodes = [detail for detail in details if 'id="node-' in detail]
    assert len(nodes) == 1000
    assert sum(one.endswith(" open>") for one in nodes) == bars.OPEN_DESPITE
    # Findings beyond the first ones are folded.
    assert text.count("<article") == 100
    # And so are forty namespaces.
    assert len(details) == 1002


def test_a_small_cluster_is_open():
    found = page(TROUBLE)
    assert all("open" in given for tag, given in found.elements if tag == "details")


def widths(drawn):
    return [(segment.kind, segment.key, float(segment.width)) for segment in drawn.segments]


def test_bars_of_a_card_have_one_scale():
    pods = (Pod("a/b", 400, 350), Pod("a/c", 100, 50))
    claimed, used = bars.bars(Card(0, total=1000, claimed=500, used_mib=700, foreign_mib=100, pods=pods))
    assert widths(claimed) == [("p0", "1", 40.0), ("p1", "2", 10.0)]
    assert widths(used) == [("p0", "1", 35.0), ("p1", "2", 5.0), ("foreign", "", 10.0), ("rest", "", 20.0)]
    assert (claimed.text, claimed.share, claimed.limit) == ("500 MiB of 1000 MiB", "50 %", "")


def test_an_overbooked_card_shows_its_size():
    claimed, used = bars.bars(Card(0, total=1000, claimed=1250, used_mib=500, pods=(Pod("a/b", 1250, 500),)))
    assert widths(claimed) == [("p0", "1", 100.0)] and claimed.limit == "80.000"
    assert widths(used) == [("p0", "1", 40.0)] and used.limit == ""


def test_unmeasured_memory_is_not_zero():
    claimed, used = bars.bars(Card(0, total=1000, claimed=500, pods=(Pod("a/b", 500),)))
    assert claimed.known and not used.known and used.text == "not measured"
    nothing, zero = bars.bars(Card(0, total=1000, claimed=0, used_mib=0))
    assert nothing.known and zero.known and not zero.segments
    unknown, _used = bars.bars(Card(None))
    assert not unknown.known


def test_unaccounted_claims_and_inconsistent_sums():
    claimed, _used = bars.bars(Card(0, total=1000, claimed=900, pods=(Pod("a/b", 500),)))
    assert widths(claimed) == [("p0", "1", 50.0), ("rest", "", 40.0)]
    # Pods that hold more than the card's sum are drawn, within the bar.
    claimed, used = bars.bars(Card(0, total=1000, claimed=100, used_mib=10, pods=(Pod("a/b", 2000, 4000),)))
    assert widths(claimed) == [("p0", "1", 50.0)] and widths(used) == [("p0", "1", 100.0)]


def test_shares_and_memory_have_their_own_scales():
    claimed, used = bars.bars(
        Card(0, total=10, claimed=5, unit="shares", memory_mib=1000, used_mib=100, pods=(Pod("a/b", 5, 100),))
    )
    assert widths(claimed) == [("p0", "1", 50.0)] and widths(used) == [("p0", "1", 10.0)]
    assert (claimed.text, used.text) == ("5 of 10 shares", "100 MiB of 1000 MiB")


def test_every_pod_of_a_card_is_in_its_table():
    pods = [pod(f"a/p{n}", 100, 90) for n in range(30)]
    shown = page(report([check("G6")], [], [node("gpu1", card(0, *pods))])).text
    assert {one for one in shown if one.startswith("a/p")} == {f"a/p{n}" for n in range(30)}


def test_the_clusters_memory_is_what_pods_can_claim():
    # 16376 MiB by NVML are 15 units of 1 GiB, as the table of inspect says.
    cards = [{**card(index, total=16376), "claimable_mib": 15360} for index in range(4)]
    shown = view(report([check("C1")], [], [node("gpu1", *cards)]), None)
    assert "60 GiB GPU memory" in bars.render(shown)
    # The card's own size stays beside it.
    assert [one.size_mib for one in shown.nodes[0].cards] == [16376] * 4
