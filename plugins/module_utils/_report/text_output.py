# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render a report for a terminal: findings first, then the checks, then the result in one line."""

from __future__ import annotations

import textwrap

from .._core.columns import columns
from .model import FINDING_LEVELS, NOT_HERE, NOTHING, Card, Finding, Resource, View, amount, mib, percent, plural

WIDTH = 110
INDENT = " " * 9
# Findings of one check, so that one broken rack doesn't hide the others. Files contain all of them.
MOST_OF_A_CHECK = 20
BAR = 20


def render(view: View) -> str:
    allocated = [_cards(view), _devices(view), _waiting(view)]
    parts = [_findings(view), _checks(view), _devices(view), _transient(view)] if view.checked else allocated
    return "\n".join([*(part for part in parts if part), _result(view)])


def _findings(view: View) -> str:
    shown: dict[str, int] = {}
    lines = []
    for finding in view.findings:
        shown[finding.check] = shown.get(finding.check, 0) + 1
        if shown[finding.check] <= MOST_OF_A_CHECK:
            lines.append(_finding(finding))
    lines += [
        f"{INDENT}and {count - MOST_OF_A_CHECK} more of {check}\n"
        for check, count in shown.items()
        if count > MOST_OF_A_CHECK
    ]
    return "\n".join(lines)


def _finding(finding: Finding) -> str:
    head = f"{finding.level:<8} {finding.check}  {finding.where or 'cluster'}\n"
    details = [*finding.evidence, *([("do", finding.do)] if finding.do else [])]
    names = max((len(name) for name, _text in details), default=0)
    return head + _wrapped(INDENT, finding.what) + "".join(_wrapped(f"{INDENT}{n:<{names}}  ", w) for n, w in details)


def _wrapped(first: str, text: str) -> str:
    """Wrap a text behind its label; further lines are indented."""
    # Names and UUIDs aren't broken, so that they can be copied.
    return (
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def _checks(view: View) -> str:
    rows = [["CHECK", "BACKEND", "RESULT", "ITEMS", "FAIL", "WARN", "UNKNOWN", "INVARIANT"]]
    for check in view.present:
        counts = [str(check.found(level) or "-") for level in FINDING_LEVELS]
        rows.append([check.id, check.backend, check.label, str(check.items), *counts, check.title])
    for backend, group in view.absent.items():
        count = f"{plural(len(group), 'check')} of this back end had nothing to check"
        rows.append([f"{group[0].id[0]}*", backend, NOT_HERE, "-", "-", "-", "-", count])
    return columns(rows, right=(3, 4, 5, 6)) if view.checks else ""


def _transient(view: View) -> str:
    if not view.transient:
        return ""
    return f"{plural(view.transient, 'contradiction')} of the first sample only, which is no finding.\n"


def _result(view: View) -> str:
    if not view.checked:
        cards, devices = sum(len(node.cards) for node in view.nodes), len(view.devices)
        others = f", {devices:,} for virtual machines" if devices else ""
        return f"{plural(len(view.nodes), 'node')}, {plural(cards, 'card')}{others}. Nothing was checked.\n"
    counts = ", ".join(f"{view.found(level)} {level}" for level in FINDING_LEVELS)
    passed = f"{view.checks_with('PASS')} of {plural(len(view.checks), 'check')} passed"
    empty = view.checks_with(NOTHING)
    rest = f", {empty} had nothing to check" if empty else ""
    return f"{view.result}: {view.headline} {counts}; {passed}{rest}.\n"


def _cards(view: View) -> str:
    rows = [["NODE", "CARD", "", "CLAIMED", "TOTAL", "", "USED", "PODS", ""]]
    for node in view.nodes:
        for card in node.cards:
            rows.append([node.name, "?" if card.index is None else str(card.index), *_card(card)])
        for resource in node.resources:
            share = percent(resource.claimed, resource.total)
            claimed, total = amount(resource.claimed, "shares"), amount(resource.total, "shares")
            rows.append([node.name, "-", _bar(resource), claimed, total, share, "-", "", resource.name])
        for unit in dict.fromkeys(pod.unit for pod in node.pending):
            mine = [pod for pod in node.pending if pod.unit == unit]
            held = amount(sum(pod.claimed or 0 for pod in mine), unit)
            rows.append([node.name, "?", "", held, "", "", "", str(len(mine)), "card unknown"])
        if node.problem or not (node.cards or node.pending or node.resources or node.devices):
            rows.append([node.name, "", "", "", "", "", "", "", node.problem or "no card"])
    return columns(rows, right=(1, 3, 4, 5, 6, 7)) if len(rows) > 1 else "No node shares a GPU.\n"


def _devices(view: View) -> str:
    rows = [["NODE", "ADDRESS", "FOR VIRTUAL MACHINES", "DRIVER", "GROUP", "HOLDER"]]
    for node, device in view.devices:
        rows.append([node.name, device.address, device.name, device.driver or "-", device.group or "-", device.holder])
    return columns(rows) if len(rows) > 1 else ""


def _card(card: Card) -> list[str]:
    used = "-" if card.used_mib is None else mib(card.used_mib)
    state = f"UNHEALTHY {card.reason}".strip() if card.healthy is False else ""
    total, claimed = amount(card.total, card.unit), amount(card.claimed, card.unit)
    return [_bar(card), claimed, total, percent(card.claimed, card.total), used, str(len(card.pods)), state]


def _bar(card: Card | Resource) -> str:
    """Draw the claimed part; ``!`` at the end if it exceeds the total."""
    if card.claimed is None or not card.total:
        return "[" + "?" * BAR + "]"
    full = min(BAR, -(-card.claimed * BAR // card.total))
    return "[" + "#" * full + "." * (BAR - full) + ("!" if card.claimed > card.total else "]")


def _waiting(view: View) -> str:
    lines = [
        f"  {row.pod} requests {row.requests or '?'}: {row.reason or 'not scheduled yet'}\n" for row in view.waiting
    ]
    return "Waiting for a card:\n" + "".join(lines) if lines else ""
