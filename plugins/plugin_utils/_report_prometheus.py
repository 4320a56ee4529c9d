# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A report as text for Prometheus' node_exporter (its textfile collector).

Written by hand and not by prometheus_client, which the collection doesn't ask for on the controller.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/, text-based.
"""

from __future__ import annotations

import datetime
import typing as t

from ansible_collections.kubegpu.share.plugins.plugin_utils._report_model import (
    FINDING_LEVELS,
    LEVELS,
    Card,
    Node,
    View,
)

Sample = tuple[dict[str, str], int | float]


def render(view: View) -> str:
    """The metrics; those of checks only where there is a report, each card's only as far as its value is known."""
    return "".join(_metric(*one) for one in [*_checks(view), *_cards(view)])


def _checks(view: View) -> t.Iterator[tuple[str, str, list[Sample]]]:
    if not view.checked:
        return
    result: list[Sample] = [({"result": level}, int(view.result == level)) for level in LEVELS]
    yield "kubegpu_report_result", "1 for the result of the whole report.", result
    seconds = _seconds(view.time)
    yield "kubegpu_report_timestamp_seconds", "When the report was made.", [({}, seconds)] if seconds else []
    gone: list[Sample] = [] if view.transient is None else [({}, view.transient)]
    yield "kubegpu_report_transient", "What was seen in the first sample alone, which is no finding.", gone
    results: list[Sample] = []
    findings: list[Sample] = []
    looked: list[Sample] = []
    for check in view.checks:
        labels = {"check": check.id, "backend": check.backend}
        results += [({**labels, "result": level}, int(check.result == level)) for level in LEVELS]
        findings += [({**labels, "level": level}, check.found(level)) for level in FINDING_LEVELS]
        looked.append((labels, check.looked_at))
    yield "kubegpu_check_result", "1 for the result of a check; PASS with nothing looked at says nothing.", results
    yield "kubegpu_check_findings", "Findings of a check.", findings
    yield "kubegpu_check_looked_at", "How many things a check looked at.", looked


def _cards(view: View) -> t.Iterator[tuple[str, str, list[Sample]]]:
    cards = [(node, card) for node in view.nodes for card in node.cards]

    def samples(value: t.Callable[[Card], int | None]) -> list[Sample]:
        told = ((_labels(node, card), value(card)) for node, card in cards)
        return [(labels, number) for labels, number in told if number is not None]

    yield "kubegpu_card_memory_total_mebibytes", "Memory of a card.", samples(lambda card: card.size_mib)
    claimed = samples(lambda card: card.claimed if card.unit == "MiB" else None)
    yield "kubegpu_card_memory_claimed_mebibytes", "Memory of a card that pods were given.", claimed
    used = samples(lambda card: card.used_mib)
    yield "kubegpu_card_memory_used_mebibytes", "Memory of a card in use by whomever, as NVML says.", used
    foreign = samples(lambda card: card.foreign_mib)
    yield "kubegpu_card_memory_foreign_mebibytes", "Memory of a card in use by processes of none of its pods.", foreign
    total = samples(lambda card: card.total if card.unit == "shares" else None)
    yield "kubegpu_card_shares", "Shares of a card that is shared by count.", total
    taken = samples(lambda card: card.claimed if card.unit == "shares" else None)
    yield "kubegpu_card_shares_claimed", "Shares of such a card that pods were given.", taken
    healthy = samples(lambda card: None if card.healthy is None else int(card.healthy))
    yield "kubegpu_card_healthy", "1 while a card is healthy.", healthy


def _labels(node: Node, card: Card) -> dict[str, str]:
    return {"node": node.name, "card": "" if card.index is None else str(card.index), "uuid": card.uuid}


def _metric(name: str, about: str, samples: list[Sample]) -> str:
    """One metric; nothing without a sample. The same labels twice would make Prometheus refuse the whole file."""
    lines: dict[str, int | float] = {}
    for labels, value in samples:
        lines.setdefault(_series(name, labels), value)
    if not lines:
        return ""
    body = "".join(f"{series} {value}\n" for series, value in lines.items())
    return f"# HELP {name} {about}\n# TYPE {name} gauge\n{body}"


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _seconds(moment: str) -> float | None:
    try:
        when = datetime.datetime.fromisoformat(moment)
        return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
