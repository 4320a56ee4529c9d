# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render a report as one complete HTML page; the template is ``page.html.j2``.

Its only script is the filter of ``page_filter.js``; the page's policy allows it by its hash, and without it the page
shows everything.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import typing as t
from pathlib import Path

from .._allocation import virtual
from .._contracts import gpushare as contract
from .._core.libraries import jinja2
from .._core.natural import natural
from . import model
from .model import Card, amount, mib, number, percent, plural

# Colors of pods; their numbers distinguish them without color too.
COLORS = 8
OTHER = "foreign"
REST = "rest"


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a bar.

    :param kind: ``p0`` to ``p7`` for a pod, ``foreign`` for other processes, ``rest`` for unaccounted memory.
    :param key: the pod's number on its card; empty for the others.
    :param width: in percent of the bar, for CSS.
    """

    kind: str
    key: str
    title: str
    width: str


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar.

    :param text: its sum as text.
    :param known: False if it wasn't measured.
    :param limit: the card's size in percent, if more is claimed or used; else empty.
    """

    label: str
    text: str
    share: str
    known: bool
    segments: tuple[Segment, ...]
    limit: str = ""


def bars(card: Card, shown: str = "") -> tuple[Bar, Bar]:
    """Return the claimed and the used bar of a card; both have one scale if both count in MiB.

    :param shown: the unit of memory, see ``mib``.
    """
    size, pods = card.size_mib, card.pods
    named = sum(pod.claimed or 0 for pod in pods)
    claimed = named if card.claimed is None and pods else card.claimed
    claims = [
        (_kind(n), str(n + 1), f"{pod.name}: {amount(pod.claimed, card.unit, shown)}", pod.claimed or 0)
        for n, pod in enumerate(pods)
    ]
    if claimed is not None and claimed > named:
        claims.append((REST, "", f"of no known pod: {amount(claimed - named, card.unit, shown)}", claimed - named))

    uses = [
        (_kind(n), str(n + 1), f"{pod.name}: {mib(pod.used_mib, shown)}", pod.used_mib or 0)
        for n, pod in enumerate(pods)
    ]
    if card.foreign_mib:
        uses.append((OTHER, "", f"processes of none of these pods: {mib(card.foreign_mib, shown)}", card.foreign_mib))
    accounted = sum(part for *_names, part in uses)
    measured = card.used_mib is not None or card.foreign_mib is not None or any(p.used_mib is not None for p in pods)
    used = card.used_mib if card.used_mib is not None else accounted if measured else None
    if used is not None and used > accounted:
        uses.append((REST, "", f"unaccounted: {mib(used - accounted, shown)}", used - accounted))

    claim_scale = max(card.total or 0, claimed or 0, named)
    use_scale = max(size or 0, used or 0, accounted)
    if card.unit == "MiB":
        claim_scale = use_scale = max(claim_scale, use_scale)
    return (
        _bar("Claimed", claims, claimed, card.total, claim_scale, (card.unit, shown)),
        _bar("Used", uses, used, size, use_scale, ("MiB", shown)),
    )


def _kind(number: int) -> str:
    return f"p{number % COLORS}"


def _bar(
    label: str,
    parts: list[tuple[str, str, str, int]],
    value: int | None,
    total: int | None,
    scale: int,
    units: tuple[str, str],
) -> Bar:
    """Return a bar of parts without the empty ones.

    :param parts: kind, key, title and size of each.
    :param value: their sum; None if unknown.
    :param total: what there is.
    :param scale: the size of the whole bar.
    :param units: what is counted, and the unit of memory; see ``amount``.
    """
    if value is None:
        return Bar(label, "not measured" if label == "Used" else "unknown", "", False, ())
    segments = tuple(
        Segment(kind, key, title, f"{part * 100 / scale:.3f}".rstrip("0").rstrip("."))
        for kind, key, title, part in parts
        if part and scale
    )
    over = bool(total) and max(value, sum(part for *_names, part in parts)) > (total or 0)
    limit = f"{(total or 0) * 100 / scale:.3f}" if over else ""
    text = amount(value, *units)
    if total:
        text = f"{text if units[0] == 'MiB' else f'{value:,}'} of {amount(total, *units)}"
    return Bar(label, text, percent(value, total), True, segments, limit)


# Beside this file, in a checkout and in an installed collection.
TEMPLATE = Path(__file__).with_name("page.html.j2")
FILTER = Path(__file__).with_name("page_filter.js")
# Nodes are folded if a cluster has more cards than this, except for the first few with a problem.
MANY_CARDS = 64
OPEN_DESPITE = 8
# Findings of a level that are shown; the others are folded.
MANY_FINDINGS = 40
# Namespaces that are shown; more are folded.
MANY_NAMESPACES = 12
# Marks of what a device plugin announces about memory limits.
LIMITS = {
    contract.LIMIT_ENFORCED: ("PASS", "limits enforced"),
    # A reason follows.
    contract.LIMIT_UNENFORCED.partition(":")[0]: ("WARN", "limits not enforced"),
    contract.LIMIT_OFF: ("none", "limits off"),
}
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
    bars: tuple[Bar, ...]
    rows: list[Row]
    measured: bool


@dataclasses.dataclass(frozen=True)
class Namespace:
    """What the pods of a namespace hold together."""

    name: str
    pods: int
    claimed: str
    used: str


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
    cards: list[CardBox]
    devices: tuple[model.Device, ...]


def render(view: model.View) -> str:
    """Return the page."""
    script = _lines(FILTER.read_text(encoding="utf-8"))
    page = _template().render(
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode(),
        namespaces=_namespaces(view),
        many_namespaces=MANY_NAMESPACES,
        anchors={check.id: f"check-{at}" for at, check in enumerate(view.checks)},
        view=view,
        not_here=model.NOT_HERE,
        sources=SOURCES,
        levels=model.FINDING_LEVELS,
        titles={check.id: check.title for check in view.checks},
        facts=_facts(view),
        tiles=list(_tiles(view)),
        findings=_findings(view),
        nodes=_nodes(view),
        places={node.name: f"node-{at}" for at, node in enumerate(view.nodes)},
        many=_many(view),
    )
    return _lines(page)


def _lines(text: str) -> str:
    """Return a text without its empty lines."""
    return "".join(f"{line}\n" for line in text.splitlines() if line)


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
        ("Memory", f"in {view.unit}" if any(node.cards or node.pending for node in view.nodes) else ""),
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
    pods |= {pod.name for _node, device in view.devices for pod in device.pods}
    count, kind = (len(cards), "card") if cards else (len(view.nodes), "node")
    on_nodes = f" on {plural(len(view.nodes), 'node')}" if cards else ""
    yield Tile(f"{count:,}", f"{kind}{'s' * (count != 1)}{on_nodes}, held by {plural(len(pods), 'pod')}")
    devices = [device for _node, device in view.devices if device.kind != model.FUNCTION]
    if devices:
        held, unknown = (sum(one.state == state for one in devices) for state in (virtual.HELD, virtual.UNKNOWN))
        label = f"of {len(devices):,} cards and vGPUs for virtual machines held"
        label += f", {unknown:,} unknown" if unknown else ""
        yield Tile(f"{held:,}", label, "UNKNOWN" if unknown else "none")
    total = _claimed_bar(view.nodes, view.unit)
    if total.known:
        yield Tile(total.share, f"claimed of {mib(_total(cards), view.unit)} GPU memory", drawn=total)


def _total(cards: t.Iterable[model.Card]) -> int:
    return sum(card.total or 0 for card in cards if card.unit == "MiB")


def _namespaces(view: model.View) -> list[Namespace]:
    """Return the sums of each namespace, in the order of their names."""
    pods: dict[str, list[model.Pod]] = {}
    for node in view.nodes:
        on_cards = [pod for card in node.cards for pod in card.pods]
        on_devices = [pod for device in node.devices for pod in device.pods]
        for pod in (*on_cards, *on_devices, *node.pending):
            pods.setdefault(pod.name.partition("/")[0] if "/" in pod.name else "", []).append(pod)
    return [_namespace(name, pods[name], view) for name in sorted(pods, key=natural)]


def _namespace(name: str, pods: t.Sequence[model.Pod], view: model.View) -> Namespace:
    claimed: dict[str, int] = {}
    for pod in pods:
        claimed[pod.unit] = claimed.get(pod.unit, 0) + (pod.claimed or 0)
    used = [pod.used_mib for pod in pods if pod.used_mib is not None]
    return Namespace(
        name=name or "?",
        pods=len({pod.name for pod in pods}),
        claimed=", ".join(amount(claimed[unit], unit, view.unit) for unit in sorted(claimed)),
        used=mib(sum(used), view.unit) if len(used) == len(pods) else "unknown" if view.checked else "",
    )


def _claimed_bar(nodes: t.Sequence[model.Node], shown: str) -> Bar:
    """Draw the claimed memory of nodes, also by pods without a card; unknown without a total."""
    cards = [card for node in nodes for card in node.cards]
    total = _total(cards)
    claimed = sum(card.claimed or 0 for card in cards if card.unit == "MiB")
    claimed += sum(pod.claimed or 0 for node in nodes for pod in node.pending if pod.unit == "MiB")
    if not total:
        return Bar("Claimed", "unknown", "", False, ())
    text = f"{mib(claimed, shown)} of {mib(total, shown)}"
    width = f"{min(100.0, claimed * 100 / total):.2f}"
    return Bar("Claimed", text, percent(claimed, total), True, (Segment("p0", "", text, width),) if claimed else ())


def _resource_bar(resource: model.Resource) -> Bar:
    """Draw a resource without cards as a bar."""
    pods = (model.Pod("", resource.claimed, unit="shares"),) if resource.claimed else ()
    claimed, _used = bars(model.Card(None, total=resource.total, claimed=resource.claimed, unit="shares", pods=pods))
    segments = tuple(Segment("p0", "", "", segment.width) for segment in claimed.segments)
    return dataclasses.replace(claimed, label=resource.name, segments=segments)


def _findings(view: model.View) -> list[tuple[str, list[model.Finding], list[model.Finding]]]:
    """Return findings by level: those that are shown, and those that are folded."""
    groups = (
        (level, [finding for finding in view.findings if finding.level == level]) for level in model.FINDING_LEVELS
    )
    return [(level, findings[:MANY_FINDINGS], findings[MANY_FINDINGS:]) for level, findings in groups if findings]


def _nodes(view: model.View) -> t.Iterator[NodeBox]:
    """Yield the nodes one by one, so that a large cluster's page isn't held in memory twice."""
    by_node: dict[str, dict[str, int]] = {}
    for finding in view.findings:
        levels = by_node.setdefault(finding.node, {})
        levels[finding.level] = levels.get(finding.level, 0) + 1
    many, opened = _many(view), 0
    for at, node in enumerate(view.nodes):
        levels = by_node.get(node.name, {})
        bad = sum(card.healthy is False for card in node.cards)
        wrong = bool(bad or levels.get("FAIL"))
        opened += wrong
        unknown = sum(device.state == virtual.UNKNOWN for device in node.devices)
        resources = [_resource_bar(resource) for resource in node.resources]
        claimed = _claimed_bar([node], view.unit)
        parts = [plural(len(node.cards), "card")] if node.cards or not (resources or node.devices) else []
        parts += [f"{len(node.devices):,} for virtual machines"] if node.devices else []
        parts += [f"{claimed.text} claimed"] if claimed.known else []
        parts += [f"{bar.label} {bar.text}" for bar in resources]
        yield NodeBox(
            name=node.name,
            place=f"node-{at}",
            backend=node.backend,
            found=[(level, levels[level]) for level in model.FINDING_LEVELS if level in levels],
            marks=[("FAIL", plural(bad, "unhealthy card"))] * bool(bad)
            + [("UNKNOWN", "not checked")] * int(view.checked and not node.checked)
            + ([_limit(node.limit)] if node.limit else [])
            + ([("UNKNOWN", f"{unknown} of unknown holder")] if unknown else []),
            open=not many or (wrong and opened <= OPEN_DESPITE),
            text=" · ".join(parts),
            drawn=resources[0] if resources and not claimed.known else claimed,
            problem=node.problem,
            about=[f"{resource.name}: {resource.about or 'its cards are unknown'}" for resource in node.resources]
            + ([f"Memory limit: {node.limit}"] if ":" in node.limit else []),
            pending=[_row(n, pod, view.unit) for n, pod in enumerate(node.pending)],
            cards=[_card(card, view) for card in node.cards],
            devices=node.devices,
        )


def _limit(announced: str) -> tuple[str, str]:
    """Return the mark of a node's memory limits: whether its pods are kept to their shares."""
    return LIMITS.get(announced.partition(":")[0], ("UNKNOWN", "limits unknown"))


def _card(card: model.Card, view: model.View) -> CardBox:
    claimed, used = bars(card, view.unit)
    rows = [_row(place, pod, view.unit) for place, pod in enumerate(card.pods)]
    if card.foreign_mib:
        rows.append(
            Row(OTHER, "", "others", "processes of none of these pods", "", number(card.foreign_mib, view.unit))
        )
    return CardBox(
        index="?" if card.index is None else card.index,
        model=card.model,
        uuid=card.uuid,
        bad=card.healthy is False,
        over=card.claimed is not None and card.total is not None and card.claimed > card.total,
        foreign=bool(card.foreign_mib),
        reason="" if card.healthy else card.reason,
        # An allocation alone measures nothing.
        bars=(claimed, used) if view.checked or used.known else (claimed,),
        rows=rows,
        measured=used.known,
    )


def _row(place: int, pod: model.Pod, shown: str) -> Row:
    over = pod.used_mib is not None and pod.claimed is not None and pod.unit == "MiB" and pod.used_mib > pod.claimed
    if pod.claimed is not None and pod.unit == "MiB":
        claimed = number(pod.claimed, shown)
    else:
        claimed = amount(pod.claimed, pod.unit)
    return Row(
        kind=f"p{place % COLORS}",
        key=str(place + 1),
        name=pod.name,
        note=pod.note,
        claimed=claimed,
        used="unknown" if pod.used_mib is None else number(pod.used_mib, shown),
        over=f"{number((pod.used_mib or 0) - (pod.claimed or 0), shown)} more than claimed" if over else "",
    )
