# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A report as one HTML page that needs nothing else: no network, no script, no file beside it."""

from __future__ import annotations

import dataclasses
import functools
import typing as t

import jinja2
from ansible_collections.kubegpu.share.plugins.plugin_utils import _report_model as model
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_bars import COLOURS, FOREIGN, Bar, Segment, bars
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_page import PAGE, POLICY
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_style import STYLE
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_values import Json, amount, mib, percent, plural
from markupsafe import Markup

# More cards than that and nodes are folded, but for the first few that have something wrong.
MANY_CARDS = 64
OPEN_DESPITE = 8
# So many findings of a level are shown, the others are folded.
MANY_FINDINGS = 40
PLANES = {
    "api": "Kubernetes API",
    "kubelet": "kubelet",
    "nvml": "GPU (NVML)",
    "proc": "processes (/proc)",
    "extender": "scheduler extender",
}


def render(view: model.View) -> str:
    page = _template().render(
        view=view,
        policy=POLICY,
        style=Markup(STYLE),
        planes=PLANES,
        levels=model.FINDING_LEVELS,
        titles={check.id: check.title for check in view.checks},
        facts=_facts(view),
        tiles=_tiles(view),
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
    return environment.from_string(PAGE)


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


def _tiles(view: model.View) -> list[Json]:
    """The numbers at the top: findings by level, checks that passed, the cluster's memory."""
    tiles: list[Json] = []
    if view.checked:
        for level in model.FINDING_LEVELS:
            count = view.found(level)
            words = f"{level} {'finding' if count == 1 else 'findings'}"
            tiles.append(
                {
                    "number": f"{count:,}",
                    "words": words,
                    "level": level if count else "none",
                    "hot": count > 0,
                    "bar": None,
                }
            )
        passed = view.checks_with("PASS")
        empty = view.checks_with(model.NOTHING)
        words = f"of {plural(len(view.checks), 'check')} passed" + (f", {empty} had nothing to check" if empty else "")
        tiles.append(
            {
                "number": f"{passed:,}",
                "words": words,
                "level": "PASS" if passed else "none",
                "hot": passed > 0,
                "bar": None,
            }
        )
    cards = [card for node in view.nodes for card in node.cards]
    pods = {pod.name for card in cards for pod in card.pods}
    pods |= {pod.name for node in view.nodes for pod in node.pending}
    count, what = (len(cards), "card") if cards else (len(view.nodes), "node")
    where = f" on {plural(len(view.nodes), 'node')}" if cards else ""
    words = f"{what if count == 1 else what + 's'}{where}, held by {plural(len(pods), 'pod')}"
    tiles.append({"number": f"{count:,}", "words": words, "level": "none", "hot": False, "bar": None})
    whole = _sum(view.nodes)
    if whole.known:
        words = f"claimed of {mib(_total(cards))} GPU memory"
        tiles.append({"number": whole.share, "words": words, "level": "none", "hot": False, "bar": whole})
    return tiles


def _total(cards: t.Iterable[model.Card]) -> int:
    return sum(card.total or 0 for card in cards if card.unit == "MiB")


def _sum(nodes: t.Sequence[model.Node]) -> Bar:
    """What is claimed of nodes as one bar of one segment, by pods on no card too; unknown without a size in memory."""
    cards = [card for node in nodes for card in node.cards]
    total = _total(cards)
    claimed = sum(card.claimed or 0 for card in cards if card.unit == "MiB")
    claimed += sum(pod.claimed or 0 for node in nodes for pod in node.pending if pod.unit == "MiB")
    if not total:
        return Bar("Claimed", "unknown", "", False, ())
    words = f"{mib(claimed)} of {mib(total)}"
    width = f"{min(100.0, claimed * 100 / total):.2f}"
    return Bar("Claimed", words, percent(claimed, total), True, (Segment("p0", "", words, width),) if claimed else ())


def _counted(one: model.Resource) -> Bar:
    """A resource without cards as a bar."""
    pods = (model.Pod("", one.claimed, unit="shares"),) if one.claimed else ()
    whole, _used = bars(model.Card(None, total=one.total, claimed=one.claimed, unit="shares", pods=pods))
    return dataclasses.replace(
        whole, label=one.name, segments=tuple(Segment("p0", "", "", x.width) for x in whole.segments)
    )


def _findings(view: model.View) -> list[Json]:
    groups = []
    for level in model.FINDING_LEVELS:
        found = [finding for finding in view.findings if finding.level == level]
        if found:
            groups.append({"level": level, "shown": found[:MANY_FINDINGS], "more": found[MANY_FINDINGS:]})
    return groups


def _nodes(view: model.View) -> t.Iterator[Json]:
    """The nodes one by one, so that a large cluster's page isn't held twice."""
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
        counted = [_counted(one) for one in node.resources]
        whole = _sum([node])
        words = [plural(len(node.cards), "card")] if node.cards or not counted else []
        words += [f"{whole.words} claimed"] if whole.known else []
        words += [f"{one.label} {one.words}" for one in counted]
        whole = counted[0] if counted and not whole.known else whole
        yield {
            "name": node.name,
            "place": f"node-{number}",
            "backend": node.backend,
            "found": [(level, levels[level]) for level in model.FINDING_LEVELS if level in levels],
            "marks": [("FAIL", plural(bad, "unhealthy card"))] * bool(bad)
            + [("UNKNOWN", "not checked")] * int(view.checked and not node.checked),
            "open": not many or (wrong and opened <= OPEN_DESPITE),
            "words": " · ".join(words),
            "bar": whole,
            "problem": node.problem,
            "about": [f"{one.name}: {one.about or 'no card is told of'}" for one in node.resources],
            "pending": [_row(n, pod) for n, pod in enumerate(node.pending)],
            # The rows tell their units themselves where these are mixed.
            "unit": "MiB" if all(pod.unit == "MiB" for pod in node.pending) else "",
            "cards": [_card(card) for card in node.cards],
        }


def _card(card: model.Card) -> Json:
    claimed, used = bars(card)
    rows = [_row(number, pod) for number, pod in enumerate(card.pods)]
    if card.foreign_mib:
        rows.append(
            {"kind": FOREIGN, "key": "", "name": "others", "note": "processes of none of these pods", "claimed": ""}
            | {"used": f"{card.foreign_mib:,}", "over": ""}
        )
    return {
        "index": "?" if card.index is None else card.index,
        "model": card.model,
        "uuid": card.uuid,
        "bad": card.healthy is False,
        "over": card.claimed is not None and card.total is not None and card.claimed > card.total,
        "foreign": bool(card.foreign_mib),
        "reason": "" if card.healthy else card.reason,
        "bars": (claimed, used),
        "rows": rows,
        "unit": card.unit,
        "measured": used.known,
    }


def _row(number: int, pod: model.Pod) -> Json:
    over = pod.used_mib is not None and pod.claimed is not None and pod.unit == "MiB" and pod.used_mib > pod.claimed
    claimed = f"{pod.claimed:,}" if pod.claimed is not None and pod.unit == "MiB" else amount(pod.claimed, pod.unit)
    return {
        "kind": f"p{number % COLOURS}",
        "key": str(number + 1),
        "name": pod.name,
        "note": pod.note,
        "claimed": claimed,
        "used": "unknown" if pod.used_mib is None else f"{pod.used_mib:,}",
        "over": f"{(pod.used_mib or 0) - (pod.claimed or 0):,} more than claimed" if over else "",
    }
