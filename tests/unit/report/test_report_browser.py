# SPDX-License-Identifier: GPL-3.0-or-later
"""The page in a real headless browser: on a phone, on a screen, in dark mode and on paper."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import headless_browser
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._report import html
from ansible_collections.kubegpu.share.plugins.module_utils._report.parse import view
from report_samples import ALLOCATION, HEALTHY, NVIDIA, TROUBLE, card, check, finding, large, node, pod, report
from test_report_html import EVIL, poisoned

pytestmark = pytest.mark.skipif(
    headless_browser.find() is None,
    reason="no Chromium here (Debian's package chromium-headless-shell; .ci/setup installs it where it can be had)",
)

PHONE, SCREEN = (360, 740), (1280, 900)
LONG = "x" * 300
ENDLESS = report(
    [check(LONG, "FAIL", backend=LONG, title=LONG)],
    [finding(LONG, node=LONG, uuid=LONG, pod=LONG, container=LONG, what=LONG, do=LONG, evidence={LONG: LONG})],
    [node(LONG, card(0, pod(LONG, 10**11, 10**11), uuid=LONG, model=LONG, reason=LONG, healthy=False), backend=LONG)],
    "FAIL",
    cluster=LONG,
)
PAGES = {
    "healthy": (HEALTHY, None),
    "trouble": (TROUBLE, ALLOCATION),
    "allocation": (None, ALLOCATION),
    "counted": (None, NVIDIA),
    "empty": ({}, None),
    "endless": (ENDLESS, None),
    "attack": (poisoned(TROUBLE), poisoned(ALLOCATION)),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[headless_browser.Browser]:
    with headless_browser.Browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for name, given in PAGES.items():
        made[name] = folder / f"{name}.html"
        made[name].write_text(html.render(view(*given)))
    return made


ONE = [pytest.param("trouble", PHONE, "light", id="trouble-phone-light")]
OTHERS = [
    pytest.param(name, size, scheme, id=f"{name}-{word}-{scheme}", marks=pytest.mark.long)
    for name, (size, word), scheme in itertools.product(
        PAGES, [(PHONE, "phone"), (SCREEN, "screen")], ["light", "dark"]
    )
    if (name, word, scheme) != ("trouble", "phone", "light")
]


@pytest.mark.parametrize(("name", "size", "scheme"), [*ONE, *OTHERS])
def test_the_page_fits_and_loads_nothing(browser, pages, name, size, scheme):
    browser.open(pages[name], *size, scheme)
    assert browser.run("document.documentElement.scrollWidth") <= size[0]
    # No text is cut off within its box.
    cut = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.bar') &&
        e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != 'inline')
        .map(e => e.className || e.tagName)"""
    assert browser.run(cut) == []
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.complaints() == []


def test_the_policy_blocks_scripts_and_images(browser, pages):
    browser.open(pages["attack"], *SCREEN)
    # The page's own filter.
    assert browser.run("document.scripts.length + document.images.length") == 1
    assert EVIL.partition(" ")[0] in browser.run("document.body.innerText")
    # The policy blocks even a script and an image that are added to the page.
    inside = """(() => { window.ran = false; const s = document.createElement('script');
        s.textContent = 'window.ran = true'; document.body.append(s);
        const i = new Image(); i.src = 'https://evil.example/x.png'; document.body.append(i);
        return new Promise(done => setTimeout(() => done(window.ran), 200)); })()"""
    assert browser.run(inside) is False
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())
    blocked = [event for event in browser.events if event.get("method") == "Network.loadingFailed"]
    assert all(one["params"].get("blockedReason") == "csp" for one in blocked)


@pytest.mark.parametrize("size", [PHONE, pytest.param(SCREEN, marks=pytest.mark.long)], ids=["phone", "screen"])
def test_each_finding_is_readable(browser, pages, size):
    browser.open(pages["trouble"], *size)
    shown = " ".join(browser.run("document.querySelector('main').innerText").split())
    for one in TROUBLE["findings"]:
        for words in (one["what"], one["do"], *one["evidence"].values()):
            assert words in shown
    # Findings are before nodes, and the worst is the first.
    assert shown.index(TROUBLE["findings"][1]["what"]) < shown.index(TROUBLE["findings"][0]["what"])
    assert shown.index("The cards of the node couldn't be read") < shown.index("Nodes and cards") < shown.index("G10")
    hidden = "[...document.querySelectorAll('.finding *')].filter(e => !e.checkVisibility() || !e.offsetHeight).length"
    assert browser.run(hidden) == 0


BARS = """[...document.querySelectorAll('.card')].map(card => [...card.querySelectorAll('.bar')].map(bar =>
    [...bar.querySelectorAll('i')].map(i => i.getBoundingClientRect().width / bar.getBoundingClientRect().width)))"""


@pytest.mark.parametrize("size", [PHONE, pytest.param(SCREEN, marks=pytest.mark.long)], ids=["phone", "screen"])
def test_bars_are_drawn_in_proportion(browser, pages, size):
    browser.open(pages["trouble"], *size)
    first, second = browser.run(BARS)[:2]
    assert first[0] == pytest.approx([8192 / 16384, 4096 / 16384], abs=0.005)
    rest = 13900 - 7702 - 3890 - 2048
    assert first[1] == pytest.approx([one / 16384 for one in (7702, 3890, 2048, rest)], abs=0.006)
    # The scale of an overbooked card is what was given away.
    assert second[0] == pytest.approx([one / 18432 for one in (4096, 8192, 6144)], abs=0.005)
    end = """(() => { const bar = document.querySelectorAll('.card')[1].querySelector('.bar');
        const box = bar.getBoundingClientRect(), end = bar.querySelector('u').getBoundingClientRect();
        return (end.right - box.left) / box.width; })()"""
    assert browser.run(end) == pytest.approx(16384 / 18432, abs=0.01)


CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const linear = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(linear);
    return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()) || !e.checkVisibility()) continue;
    const a = light(parse(getComputedStyle(e).color).slice(0, 3)), b = light(behind(e).slice(0, 3));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) bad.push([e.className || e.tagName, e.textContent.trim().slice(0, 20), ratio]);
  }
  return bad; })()"""


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["trouble", "healthy", "allocation"])
def test_everything_has_contrast(browser, pages, name, scheme):
    browser.open(pages[name], *SCREEN, scheme)
    assert browser.run(CONTRAST) == []
    dark = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", dark)[0]) < 64) is (scheme == "dark")


@pytest.mark.long
def test_eight_pods_have_eight_colours_that_can_be_read(browser, tmp_path):
    page = tmp_path / "page.html"
    pods = [pod(f"a/p{n}", 1024, 1000) for n in range(9)]
    page.write_text(html.render(view(report([check("G6")], [], [node("gpu1", card(0, *pods))]), None)))
    browser.open(page, *SCREEN)
    colours = browser.run(
        "[...document.querySelector('.card .bar').querySelectorAll('i')].map(i => getComputedStyle(i).backgroundColor)"
    )
    assert len(set(colours)) == 8 and colours[0] == colours[8]
    assert browser.run(CONTRAST) == []


def test_the_page_is_accessible(browser, pages):
    browser.open(pages["trouble"], *SCREEN)
    assert browser.run("document.documentElement.lang") == "en"
    levels = browser.run("[...document.querySelectorAll('h1,h2,h3,h4')].map(e => +e.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), "no level is skipped"
    assert browser.run("[...document.querySelectorAll('table')].every(t => t.querySelector('thead th[scope=col]'))")
    assert browser.run("[...document.querySelectorAll('tbody tr')].every(r => r.cells[0].scope == 'row')")
    labels = browser.run("[...document.querySelectorAll('.card .bar')].map(b => b.getAttribute('aria-label'))")
    assert labels[:2] == ["Claimed: 12 GiB of 16 GiB, 75 %", "Used: 13.6 GiB of 16 GiB, 84 %"]
    assert "Used: not measured" in labels
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    shown = [one for one in tree if one.get("role", {}).get("value") in ("image", "link")]
    assert [one for one in shown if not one.get("name", {}).get("value")] == []


@pytest.mark.long
def test_print_is_white_complete_and_needs_no_color(browser, pages):
    browser.open(pages["trouble"], 794, 1123, "dark", "print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run(CONTRAST) == []
    kept = """['.finding', '.card', '.bar', '.tile', 'tr'].every(
        one => getComputedStyle(document.querySelector(one)).breakInside == 'avoid')"""
    assert browser.run(kept)
    # Browsers leave backgrounds out by themselves, and the bars are backgrounds.
    assert browser.run("getComputedStyle(document.querySelector('.bar i')).printColorAdjust") == "exact"
    # Without any colour: each level is a word, each piece of a bar has the number of its pod in the table.
    shown = browser.run("document.body.innerText")
    assert all(word in shown for word in ("FAIL", "WARN", "UNKNOWN", "PASS", "overbooked", "unhealthy", "foreign use"))
    keys = """[...document.querySelectorAll('.card')].every(card => [...card.querySelectorAll('.bar i')].every(i =>
        !/^p/.test(i.className) || [...card.querySelectorAll('.key')].some(k => k.innerText == i.innerText)))"""
    assert browser.run(keys)


@pytest.mark.long
def test_folded_findings_are_printed(browser, tmp_path):
    page = tmp_path / "page.html"
    many = [finding("C2", node=f"gpu{number}", what=f"Finding {number}.") for number in range(60)]
    page.write_text(html.render(view(report([check("C2", "FAIL")], many, []), None)))
    seen = """[...document.querySelectorAll('.finding h3')].filter(
        e => e.checkVisibility({contentVisibilityAuto: true})).length"""
    browser.open(page, *SCREEN)
    assert browser.run(seen) == 40
    browser.open(page, 794, 1123, media="print")
    assert browser.run(seen) == 60


@pytest.mark.long
def test_a_large_cluster_opens(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(html.render(view(large(1000), None)))
    for size in (PHONE, SCREEN):
        browser.open(page, *size)
        assert browser.run("document.documentElement.scrollWidth") <= size[0]
    assert browser.run("document.querySelectorAll('.card').length") == 8000
    assert browser.complaints() == []
    # A link of a finding leads to its node, which unfolds.
    browser.run("document.querySelector('#node-500 summary').click()")
    assert browser.run("document.querySelector('#node-500 .card .bar i').getBoundingClientRect().width") > 10


TYPE = """(words => { const field = document.getElementById('words'); field.value = words;
    field.dispatchEvent(new Event('input')); })"""
SHOWN = (
    """[...document.querySelectorAll('%s')].filter(e => e.checkVisibility()).map(e => e.innerText.split('\\n')[0])"""
)


def test_the_filter_shows_what_has_every_word(browser, pages):
    browser.open(pages["trouble"], *PHONE)
    every = {name: browser.run(SHOWN % name) for name in (".node h3", ".card h4", ".finding h3", ".sums tbody th")}
    assert every[".node h3"] == ["gpu1", "gpu2", "gpu3", "gpu10"]
    # A pod of one card: its card, its node, its namespace isn't named so, and the findings that name it.
    browser.run(f"{TYPE}('NOTEBOOK research')")
    assert browser.run(SHOWN % ".node h3") == ["gpu1"] and browser.run(SHOWN % ".card h4") == ["GPU 1"]
    assert len(browser.run(SHOWN % ".finding h3")) == 2
    assert browser.run("document.querySelector('#filter output').innerText") == "3 shown"
    # A node with all of its cards.
    browser.run(f"{TYPE}('gpu3')")
    assert browser.run(SHOWN % ".node h3") == ["gpu3"] and len(browser.run(SHOWN % ".card h4")) == 1
    browser.run(f"{TYPE}('nothing-has-this')")
    assert browser.run(SHOWN % ".node h3") == browser.run(SHOWN % ".finding h3") == []
    assert browser.run("document.querySelector('#filter output').innerText") == "0 shown"
    browser.run(f"{TYPE}('')")
    assert {name: browser.run(SHOWN % name) for name in every} == every
    assert browser.complaints() == []


def test_without_scripts_the_page_is_complete_and_has_no_filter(browser, pages):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["trouble"], *PHONE)
        assert browser.run("document.getElementById('words').checkVisibility()") is False
        assert browser.run(SHOWN % ".node h3") == ["gpu1", "gpu2", "gpu3", "gpu10"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
