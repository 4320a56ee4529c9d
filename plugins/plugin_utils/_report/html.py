# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Render a report as one HTML page without scripts or further files; the template is ``page.html.j2``."""

from __future__ import annotations

import dataclasses
import functools
import typing as t
from pathlib import Path

import jinja2

from . import model
from .html_bars import COLORS, OTHER, Bar, Segment, bars
from .values import amount, mib, percent, plural

# Beside this file, in a checkout and in an installed collection.
TEMPLATE = Path(__file__).with_name("page.html.j2")
# Nodes are folded if a cluster has more cards than this, except for the first few with a problem.
MANY_CARDS = 64
OPEN_DESPITE = 8
# Findings of a level that are shown; the others are folded.
MANY_FINDINGS = 40
SOURCES = {
    "api": "Kubernetes API",
    "kubelet": "kubelet",
    "nvml": "GPU (NVML)",
    "proc": "processes (/proc)",
    "extender": "scheduler extender",
}


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    number: str
    label: str
    level: str = "none"
    hot: bool = False
    drawn: Bar | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A pod in a card's table."""

    kind: str
    key: str
    name: str
    note: str
    claimed: str
    used: str
    over: str = ""


@dataclasses.dataclass(frozen=True)
class CardBox:
    """A card with its bars and pods."""

    index: int | str
    model: str
    uuid: str
    bad: bool
    over: bool
    foreign: bool
    reason: str
    bars: tuple[Bar, Bar]
    rows: list[Row]
    unit: str
    measured: bool


@dataclasses.dataclass(frozen=True)
class NodeBox:
    """A node with its cards; ``found`` counts its findings by level."""

    name: str
    place: str
    backend: str
    found: list[tuple[str, int]]
    marks: list[tuple[str, str]]
    open: bool
    text: str
    drawn: Bar
    problem: str
    about: list[str]
    pending: list[Row]
    unit: str
    cards: list[CardBox]


def render(view: model.View) -> str:
    """Return the page."""
    page = _template().render(
        view=view,
        sources=SOURCES,
        levels=model.FINDING_LEVELS,
        titles={check.id: check.title for check in view.checks},
        facts=_facts(view),
        tiles=list(_tiles(view)),
        findings=_findings(view),
        nodes=_nodes(view),
        places={node.name: f"node-{number}" for number, node in enumerate(view.nodes)},
        many=_many(view),
    )
    return "".join(f"{line}\n" for line in page.splitlines() if line)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _many(view: model.View) -> bool:
    return sum(len(node.cards) for node in view.nodes) > MANY_CARDS


def _facts(view: model.View) -> list[tuple[str, str]]:
    two = f"2, {view.grace_seconds} s apart" if view.grace_seconds is not None else "2"
    facts = [
        ("Cluster", view.cluster),
        ("Time", view.time),
        ("Samples", two if view.samples == 2 else str(view.samples or "")),
        ("Gone in the second sample", str(view.transient) if view.transient else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _tiles(view: model.View) -> t.Iterator[Tile]:
    """Yield the numbers at the top: findings by level, checks that passed, the cluster's memory."""
    if view.checked:
        for level in model.FINDING_LEVELS:
            count = view.found(level)
            label = f"{level} {'finding' if count == 1 else 'findings'}"
            yield Tile(f"{count:,}", label, level if count else "none", count > 0)
        passed, empty = view.checks_with("PASS"), view.checks_with(model.NOTHING)
        label = f"of {plural(len(view.checks), 'check')} passed" + (f", {empty} had nothing to check" if empty else "")
        yield Tile(f"{passed:,}", label, "PASS" if passed else "none", passed > 0)
    cards = [card for node in view.nodes for card in node.cards]
    pods = {pod.name for card in cards for pod in card.pods}
    pods |= {pod.name for node in view.nodes for pod in node.pending}
    count, kind = (len(cards), "card") if cards else (len(view.nodes), "node")
    on_nodes = f" on {plural(len(view.nodes), 'node')}" if cards else ""
    yield Tile(f"{count:,}", f"{kind}{'s' * (count != 1)}{on_nodes}, held by {plural(len(pods), 'pod')}")
    total = _claimed_bar(view.nodes)
    if total.known:
        yield Tile(total.share, f"claimed of {mib(_total(cards))} GPU memory", drawn=total)


def _total(cards: t.Iterable[model.Card]) -> int:
    return sum(card.total or 0 for card in cards if card.unit == "MiB")


def _claimed_bar(nodes: t.Sequence[model.Node]) -> Bar:
    """Draw the claimed memory of nodes, also by pods without a card; unknown without a total."""
    cards = [card for node in nodes for card in node.cards]
    total = _total(cards)
    claimed = sum(card.claimed or 0 for card in cards if card.unit == "MiB")
    claimed += sum(pod.claimed or 0 for node in nodes for pod in node.pending if pod.unit == "MiB")
    if not total:
        return Bar("Claimed", "unknown", "", False, ())
    text = f"{mib(claimed)} of {mib(total)}"
    width = f"{min(100.0, claimed * 100 / total):.2f}"
    return Bar("Claimed", text, percent(claimed, total), True, (Segment("p0", "", text, width),) if claimed else ())


def _resource_bar(one: model.Resource) -> Bar:
    """Draw a resource without cards as a bar."""
    pods = (model.Pod("", one.claimed, unit="shares"),) if one.claimed else ()
    claimed, _used = bars(model.Card(None, total=one.total, claimed=one.claimed, unit="shares", pods=pods))
    segments = tuple(Segment("p0", "", "", segment.width) for segment in claimed.segments)
    return dataclasses.replace(claimed, label=one.name, segments=segments)


def _findings(view: model.View) -> list[tuple[str, list[model.Finding], list[model.Finding]]]:
    """Return findings by level: those that are shown, and those that are folded."""
    groups = ((level, [one for one in view.findings if one.level == level]) for level in model.FINDING_LEVELS)
    return [(level, found[:MANY_FINDINGS], found[MANY_FINDINGS:]) for level, found in groups if found]


def _nodes(view: model.View) -> t.Iterator[NodeBox]:
    """Yield the nodes one by one, so that a large cluster's page isn't held in memory twice."""
    found: dict[str, dict[str, int]] = {}
    for finding in view.findings:
        levels = found.setdefault(finding.node, {})
        levels[finding.level] = levels.get(finding.level, 0) + 1
    many, opened = _many(view), 0
    for number, node in enumerate(view.nodes):
        levels = found.get(node.name, {})
        bad = sum(card.healthy is False for card in node.cards)
        wrong = bool(bad or levels.get("FAIL"))
        opened += wrong
        resources = [_resource_bar(one) for one in node.resources]
        claimed = _claimed_bar([node])
        parts = [plural(len(node.cards), "card")] if node.cards or not resources else []
        parts += [f"{claimed.text} claimed"] if claimed.known else []
        parts += [f"{one.label} {one.text}" for one in resources]
        yield NodeBox(
            name=node.name,
            place=f"node-{number}",
            backend=node.backend,
            found=[(level, levels[level]) for level in model.FINDING_LEVELS if level in levels],
            marks=[("FAIL", plural(bad, "unhealthy card"))] * bool(bad)
            + [("UNKNOWN", "not checked")] * int(view.checked and not node.checked),
            open=not many or (wrong and opened <= OPEN_DESPITE),
            text=" · ".join(parts),
            drawn=resources[0] if resources and not claimed.known else claimed,
            problem=node.problem,
            about=[f"{one.name}: {one.about or 'its cards are unknown'}" for one in node.resources],
            pending=[_row(n, pod) for n, pod in enumerate(node.pending)],
            # Each row has its own unit if they differ.
            unit="MiB" if all(pod.unit == "MiB" for pod in node.pending) else "",
            cards=[_card(card) for card in node.cards],
        )


def _card(card: model.Card) -> CardBox:
    claimed, used = bars(card)
    rows = [_row(number, pod) for number, pod in enumerate(card.pods)]
    if card.foreign_mib:
        rows.append(Row(OTHER, "", "others", "processes of none of these pods", "", f"{card.foreign_mib:,}"))
    return CardBox(
        index="?" if card.index is None else card.index,
        model=card.model,
        uuid=card.uuid,
        bad=card.healthy is False,
        over=card.claimed is not None and card.total is not None and card.claimed > card.total,
        foreign=bool(card.foreign_mib),
        reason="" if card.healthy else card.reason,
        bars=(claimed, used),
        rows=rows,
        unit=card.unit,
        measured=used.known,
    )


def _row(number: int, pod: model.Pod) -> Row:
    over = pod.used_mib is not None and pod.claimed is not None and pod.unit == "MiB" and pod.used_mib > pod.claimed
    claimed = f"{pod.claimed:,}" if pod.claimed is not None and pod.unit == "MiB" else amount(pod.claimed, pod.unit)
    return Row(
        kind=f"p{number % COLORS}",
        key=str(number + 1),
        name=pod.name,
        note=pod.note,
        claimed=claimed,
        used="unknown" if pod.used_mib is None else f"{pod.used_mib:,}",
        over=f"{(pod.used_mib or 0) - (pod.claimed or 0):,} more than claimed" if over else "",
    )
