# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Trees of a chart's values: read, set and merge by paths such as ``scheduler.service.type``. Pure."""

from __future__ import annotations

import copy
import difflib
import typing as t

from ...module_utils._core.types import JsonObject

MISSING: t.Any = object()


class Finding(t.TypedDict):
    """A problem, or a note that changes nothing.

    :ivar code: identifies it; nothing decides by the message.
    :ivar path: the value or variable concerned; empty where there is none.
    """

    code: str
    path: str
    message: str


def finding(code: str, path: str, message: str) -> Finding:
    """Return a finding."""
    return {"code": code, "path": path, "message": message}


def get(values: JsonObject, path: str) -> t.Any:
    """Return the value at a path, or ``MISSING``."""
    at: t.Any = values
    for key in path.split("."):
        if not isinstance(at, dict) or key not in at:
            return MISSING
        at = at[key]
    return at


def put(values: JsonObject, path: str, value: t.Any) -> None:
    """Set the value at a path; what isn't a map on the way is replaced by one."""
    *folders, last = path.split(".")
    at = values
    for key in folders:
        if not isinstance(at.get(key), dict):
            at[key] = {}
        at = at[key]
    at[last] = value


def take(values: JsonObject, path: str) -> t.Any:
    """Remove the value at a path and return it, or ``MISSING``; maps that become empty go with it."""
    head, _dot, rest = path.partition(".")
    if not rest:
        return values.pop(head, MISSING)
    inner = values.get(head)
    if not isinstance(inner, dict):
        return MISSING
    value = take(inner, rest)
    if value is not MISSING and not inner:
        del values[head]
    return value


def merged(base: JsonObject, over: JsonObject) -> JsonObject:
    """Merge two trees as helm does: maps by key, everything else is replaced."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result[key] = merged(below, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def leaves(values: JsonObject, above: str = "") -> t.Iterator[tuple[str, t.Any]]:
    """Yield path and value of everything that isn't a map with keys."""
    for key, value in values.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def unknown(values: JsonObject, known: JsonObject, open_maps: t.Collection[str]) -> list[Finding]:
    """Return the values that a chart doesn't have, which helm would ignore without a word.

    :param values: what is set.
    :param known: the chart's own values.
    :param open_maps: paths below which every key is allowed, such as selectors.
    """
    found = []
    names = [path for path, _value in leaves(known)]
    for path, _value in leaves(values):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            at = ".".join(parts[:depth])
            here = get(known, at)
            if at in open_maps or (here is not MISSING and (not isinstance(here, dict) or not here)):
                break
            if here is MISSING:
                close = difflib.get_close_matches(path, names, 1)
                hint = f"; it has {close[0]}" if close else ""
                message = f"the chart has no value {path}, and helm would ignore it{hint}"
                found.append(finding("unknown_value", path, message))
                break
    return found
