# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two bars of a card, its claimed and its used memory, as segments of one scale."""

from __future__ import annotations

import dataclasses

from .model import Card
from .values import amount, mib, percent

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
