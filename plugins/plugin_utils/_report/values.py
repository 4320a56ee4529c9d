# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values of an untrusted cluster made safe to show: whole numbers, lists and dictionaries; texts by ``untrusted``."""

from __future__ import annotations

import math
import typing as t

from ...module_utils._core.types import JsonObject

# Beyond it no number of MiB, pods or findings is to be believed.
MOST = 10**12


def whole(value: t.Any) -> int | None:
    """Return a plausible count, or None: not negative, not huge, no boolean, no NaN."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return int(value) if 0 <= value <= MOST else None


def flag(value: t.Any) -> bool | None:
    return value if isinstance(value, bool) else None


def items(value: t.Any) -> list[JsonObject]:
    """Return the dictionaries of a list; empty for any other value."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, (list, tuple)) else []


def mapping(value: t.Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def mib(amount: int | None, shown: str = "") -> str:
    """Format an amount of memory (MiB); exact for whole GiB, else to a tenth.

    :param shown: the unit, ``MiB`` or ``GiB``; by default GiB from 1 GiB on.
    """
    if amount is None:
        return "unknown"
    unit = shown or ("GiB" if amount >= 1024 else "MiB")
    return f"{number(amount, unit) if shown or unit == 'GiB' else amount} {unit}"


def number(amount: int, unit: str) -> str:
    """Format an amount of memory (MiB) in a unit (``MiB`` or ``GiB``), without the unit."""
    if unit != "GiB":
        return f"{amount:,}"
    if 0 < amount < 103:
        # A tenth would be 0.0, or look exact.
        return "<0.1"
    return f"{amount // 1024:,}" if amount % 1024 == 0 else f"{amount / 1024:,.1f}"


def amount(value: int | None, unit: str, shown: str = "") -> str:
    """Format an amount in a card's unit.

    :param unit: ``MiB``, or what is counted.
    :param shown: the unit of memory, see ``mib``.
    """
    return mib(value, shown) if unit == "MiB" or value is None else plural(value, unit.removesuffix("s"))


def percent(part: int | None, of: int | None) -> str:
    """Format a share, truncated as everywhere in the collection; empty if unknown."""
    return f"{part * 100 // of} %" if part is not None and of else ""


def plural(count: int, one: str) -> str:
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
