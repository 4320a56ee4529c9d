# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A report and an allocation as JSON for machines: what was given, as every JSON reader takes it."""

from __future__ import annotations

import json
import math
import typing as t

from ansible_collections.kubegpu.share.plugins.plugin_utils._report_values import Json


def render(report: Json | None, allocation: Json | None) -> str:
    """The report's keys and ``allocation``, as far as they were given; ASCII, so that no terminal obeys it."""
    whole = {**(report or {}), **({} if allocation is None else {"allocation": allocation})}
    return json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n"


def _plain(value: t.Any) -> t.Any:
    """JSON knows no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
