# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render a report and an allocation as strict JSON."""

from __future__ import annotations

import json
import math
import typing as t

from ...module_utils._core.types import JsonObject


def render(report: JsonObject | None, allocation: JsonObject | None) -> str:
    """Return the report's keys and ``allocation``; ASCII, so that it contains no terminal sequences."""
    whole = {**(report or {}), **({} if allocation is None else {"allocation": allocation})}
    return json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n"


def _plain(value: t.Any) -> t.Any:
    """Replace NaN and infinity, which JSON doesn't have, by null."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
