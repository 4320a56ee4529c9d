# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render a report for the textfile collector of Prometheus' node_exporter.

Without prometheus_client: it would be one more requirement on the controller, for the ten lines that format a gauge.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/, text format 0.0.4.
"""

from __future__ import annotations

import datetime
import typing as t

from .._allocation import virtual
from .model import FINDING_LEVELS, FUNCTION, LEVELS, Card, Node, View

Sample = tuple[dict[str, str], float]


def render(view: View) -> str:
    """Return the metrics; those of checks only with a report, and those of a card only if the value is known."""
    return "".join(_metric(*metric) for metric in [*_checks(view), *_cards(view), *_devices(view)])


def _checks(view: View) -> t.Iterator[tuple[str, str, list[Sample]]]:
    if not view.checked:
        return
    result: list[Sample] = [({"result": level}, int(view.result == level)) for level in LEVELS]
    yield "kubegpu_report_result", "1 for the result of the whole report.", result
    seconds = _seconds(view.time)
    yield "kubegpu_report_timestamp_seconds", "When the report was created.", [({}, seconds)] if seconds else []
    gone: list[Sample] = [] if view.transient is None else [({}, view.transient)]
    yield "kubegpu_report_transient", "Contradictions in the first sample only, which are no findings.", gone
    results: list[Sample] = []
    findings: list[Sample] = []
    items: list[Sample] = []
    for check in view.checks:
        labels = {"check": check.id, "backend": check.backend}
        results += [({**labels, "result": level}, int(check.result == level)) for level in LEVELS]
        findings += [({**labels, "level": level}, check.found(level)) for level in FINDING_LEVELS]
        items.append((labels, check.items))
    yield "kubegpu_check_result", "1 for the result of a check; PASS without items proves nothing.", results
    yield "kubegpu_check_findings", "Findings of a check.", findings
    yield "kubegpu_check_items", "Items that a check was applied to.", items


def _cards(view: View) -> t.Iterator[tuple[str, str, list[Sample]]]:
    cards = [(node, card) for node in view.nodes for card in node.cards]

    def samples(value: t.Callable[[Card], int | None]) -> list[Sample]:
        values = ((_labels(node, card), value(card)) for node, card in cards)
        return [(labels, number) for labels, number in values if number is not None]

    yield "kubegpu_card_memory_total_mebibytes", "Memory of a card.", samples(lambda card: card.size_mib)
    claimed = samples(lambda card: card.claimed if card.unit == "MiB" else None)
    yield "kubegpu_card_memory_claimed_mebibytes", "Memory of a card that is allocated to pods.", claimed
    used = samples(lambda card: card.used_mib)
    yield "kubegpu_card_memory_used_mebibytes", "Memory of a card in use, as measured by NVML.", used
    foreign = samples(lambda card: card.foreign_mib)
    yield "kubegpu_card_memory_foreign_mebibytes", "Memory of a card in use by processes of none of its pods.", foreign
    total = samples(lambda card: card.total if card.unit == "shares" else None)
    yield "kubegpu_card_shares", "Shares of a card that is shared by count.", total
    taken = samples(lambda card: card.claimed if card.unit == "shares" else None)
    yield "kubegpu_card_shares_claimed", "Shares of such a card that are allocated to pods.", taken
    healthy = samples(lambda card: None if card.healthy is None else int(card.healthy))
    yield "kubegpu_card_healthy", "1 while a card is healthy.", healthy


def _devices(view: View) -> t.Iterator[tuple[str, str, list[Sample]]]:
    """Yield the metrics of cards and vGPUs for virtual machines; of one whose holder is unknown only that."""
    samples: list[Sample] = []
    counts: dict[tuple[str, str, str], int] = {}
    for node, device in (row for row in view.devices if row[1].kind != FUNCTION):
        place = {"node": node.name, "address": device.address, "uuid": device.uuid, "kind": device.kind}
        if device.state != virtual.UNKNOWN:
            samples.append((place, int(device.state == virtual.HELD)))
        counts.setdefault((node.name, device.kind, device.state), 0)
        counts[node.name, device.kind, device.state] += 1
    about = "1 while a virtual machine or a pod has this card or vGPU for virtual machines, 0 while it is free."
    yield "kubegpu_virtual_device_held", about, samples
    rows: list[Sample] = [
        ({"node": node, "kind": kind, "state": state}, count) for (node, kind, state), count in counts.items()
    ]
    yield "kubegpu_virtual_devices", "Cards and vGPUs for virtual machines that are held, free or unknown.", rows


def _labels(node: Node, card: Card) -> dict[str, str]:
    return {"node": node.name, "card": "" if card.index is None else str(card.index), "uuid": card.uuid}


def _metric(name: str, about: str, samples: list[Sample]) -> str:
    """Return one metric; empty without a sample. Prometheus would reject the whole file for duplicate labels."""
    lines: dict[str, float] = {}
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
