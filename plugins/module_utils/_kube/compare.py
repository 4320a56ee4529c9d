# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare live objects with desired ones. Pure.

A desired object names only the fields that this collection sets; the API server adds defaults, and others add labels,
sidecars and status. It is in effect if the live object contains it, and if no field is left that this collection owns
but no longer sets. ``managedFields`` shows those fields; a digest in an annotation shows them inside lists that the API
server treats as one value.
"""

from __future__ import annotations

import json
import re
import typing as t
from fractions import Fraction

from .._core.types import JsonObject
from .refs import FIELD_MANAGER

# Lists that the API server merges by these keys; it replaces others as a whole.
LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
    "webhooks": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ports": ("containerPort", "port", "protocol"),
}

# Below these keys "0.5" and "500m" are the same quantity.
QUANTITIES = frozenset(
    {"limits", "requests", "capacity", "allocatable", "hard", "sizeLimit", "storage", "divisor", "podFixed"}
)


class _Missing:
    """The type of a missing field."""


MISSING: t.Final = _Missing()


def managed_part(live: JsonObject, desired: JsonObject, manager: str = FIELD_MANAGER) -> JsonObject:
    """Return the part of a live object that a definition manages; it equals the definition if nothing has to be done.

    The part consists of the definition's fields with their live values, and of fields that the manager owns although
    the definition no longer sets them.

    :param manager: the field manager.
    """
    now = _desired_fields(live, desired, False)
    kept = now if isinstance(now, dict) else {}
    left = _leftovers(live, _owned_fields(live, manager), desired)
    return t.cast(JsonObject, _merge(kept, left)) if isinstance(left, dict) else kept


def _desired_fields(live: t.Any, desired: t.Any, quantities: bool, field: str = "") -> t.Any:
    """Return the live values of the desired fields, in the desired spelling where both mean the same."""
    if isinstance(desired, dict) and isinstance(live, dict):
        result = {}
        for key, wanted in desired.items():
            if key in live:
                result[key] = _desired_fields(live[key], wanted, quantities or key in QUANTITIES, key)
            elif wanted in ({}, []):
                # The API server omits empty maps and lists.
                result[key] = wanted
        return result
    if isinstance(desired, list) and isinstance(live, list):
        if field in LIST_KEYS and all(isinstance(item, dict) for item in live + desired):
            pairs = [(_item_like(live, wanted, field), wanted) for wanted in desired]
            return [_desired_fields(item, wanted, quantities) for item, wanted in pairs if item is not None]
        if len(live) != len(desired):
            return live
        each = [_desired_fields(item, wanted, quantities) for item, wanted in zip(live, desired)]
        return desired if each == desired else live
    if _equal(live, desired, quantities):
        return desired
    return live


def _item_like(items: list[JsonObject], wanted: JsonObject, field: str) -> JsonObject | None:
    """Return the item of a keyed list with the keys of a desired item."""
    keys = [key for key in LIST_KEYS[field] if key in wanted]
    for item in items:
        if keys and all(item.get(key) == wanted[key] for key in keys):
            return item
    return None


def _equal(live: t.Any, desired: t.Any, quantities: bool) -> bool:
    if live == desired:
        return True
    if not quantities or isinstance(live, (dict, list)) or isinstance(desired, (dict, list)):
        return False
    number, other = parse_quantity(live), parse_quantity(desired)
    return number is not None and number == other


def parse_quantity(value: t.Any) -> Fraction | None:
    """Parse a quantity ("500m", "1Gi", "1e3", 2) as an exact number; None if it is invalid."""
    match = re.fullmatch(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?", str(value))
    if not match:
        return None
    suffix = match.group(2) or ""
    if suffix.endswith("i"):
        factor = Fraction(1024) ** ("KMGTPE".index(suffix[0]) + 1)
    elif suffix in ("n", "u", "m"):
        factor = Fraction(1000) ** (-1 - "mun".index(suffix))
    elif suffix in tuple("kMGTPE"):
        factor = Fraction(1000) ** ("kMGTPE".index(suffix) + 1)
    else:
        factor = Fraction(10) ** int(suffix[1:] or 0)
    return Fraction(match.group(1).rstrip(".")) * factor


def _owned_fields(live: JsonObject, manager: str) -> JsonObject:
    for entry in (live.get("metadata") or {}).get("managedFields") or []:
        applied = entry.get("manager") == manager and entry.get("operation") == "Apply"
        if applied and not entry.get("subresource"):
            return entry.get("fieldsV1") or {}
    return {}


def _leftovers(live: t.Any, fields: JsonObject, desired: t.Any) -> t.Any:
    """Return owned fields that the desired object doesn't set.

    :param fields: the owned fields, in the format fieldsV1.
    """
    inner = {name: sub for name, sub in fields.items() if name != "."}
    if isinstance(live, dict):
        result = {}
        for name, sub in inner.items():
            key = name[2:]
            if not name.startswith("f:") or key not in live:
                continue
            if isinstance(desired, dict) and key in desired:
                left = _leftovers(live[key], sub, desired[key]) if sub else MISSING
            else:
                left = _leftovers(live[key], sub, None) if sub else live[key]
            if left is not MISSING:
                result[key] = left
        return result or MISSING
    if isinstance(live, list):
        items = []
        for name, sub in inner.items():
            item = _item_at(live, name)
            if item is MISSING:
                continue
            wanted = _item_at(desired if isinstance(desired, list) else [], name)
            if wanted is MISSING and not isinstance(item, dict):
                items.append(item)
            elif isinstance(item, dict):
                left = _leftovers(item, sub, None if wanted is MISSING else wanted)
                if left is not MISSING:
                    # The key fields identify the item.
                    items.append({**(json.loads(name[2:]) if name.startswith("k:") else {}), **left})
        return items or MISSING
    return MISSING


def _item_at(items: list[t.Any], name: str) -> t.Any:
    """Return the item of a list that a path element of fieldsV1 (``k:{…}`` or ``v:…``) names."""
    wanted: t.Any = json.loads(name[2:]) if name[:2] in ("k:", "v:") else MISSING
    for item in items:
        if name.startswith("v:") and item == wanted:
            return item
        # A key that the definition leaves to its default (the protocol of a port) makes no difference.
        if name.startswith("k:") and isinstance(item, dict):
            known = {key: item[key] for key in wanted if key in item}
            if known and all(wanted[key] == value for key, value in known.items()):
                return item
    return MISSING


def _merge(kept: t.Any, left: t.Any, field: str = "") -> t.Any:
    if isinstance(kept, dict) and isinstance(left, dict):
        shared = {key: _merge(kept[key], left[key], key) if key in kept else left[key] for key in left}
        return {**kept, **shared}
    if isinstance(kept, list) and isinstance(left, list):
        result = list(kept)
        for item in left:
            match = _item_like(result, item, field) if field in LIST_KEYS and isinstance(item, dict) else None
            if match is None:
                result.append(item)
            else:
                result[result.index(match)] = _merge(match, item)
        return result
    return kept
