# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a variable holds tolerations as the API server takes them. Pure."""

from __future__ import annotations

import typing as t

from ...module_utils._core.types import JsonObject

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
OPERATORS = ("Exists", "Equal")
FIELDS = ("key", "operator", "value", "effect", "tolerationSeconds")


def problem(tolerations: t.Any) -> str:
    """Return why a variable holds no tolerations that the API server takes; empty where it does."""
    if not isinstance(tolerations, list):
        return "it isn't a list"
    for number, one in enumerate(tolerations, 1):
        text = _problem(one) if isinstance(one, dict) else "is no mapping"
        if text:
            return f"its entry {number} {text}"
    return ""


def _problem(one: JsonObject) -> str:
    others = sorted(str(name) for name in one if name not in FIELDS)
    if others:
        return f"has {' and '.join(others)}, and a toleration has {', '.join(FIELDS)} only"
    for name in ("key", "operator", "value", "effect"):
        if not isinstance(one.get(name), (str, type(None))):
            return f"has a {name} that is no text: quote it"
    seconds = one.get("tolerationSeconds")
    if seconds is not None and (not isinstance(seconds, int) or isinstance(seconds, bool)):
        return "has tolerationSeconds that are no whole number"
    if one.get("operator") not in (None, "", *OPERATORS):
        return f"has the operator {one['operator']}, which is none of {', '.join(OPERATORS)}"
    if one.get("effect") not in (None, "", *EFFECTS):
        return f"has the effect {one['effect']}, which is none of {', '.join(EFFECTS)}"
    if not one.get("key") and one.get("operator") != "Exists":
        return "has no key: that is valid with the operator Exists only"
    if one.get("operator") == "Exists" and one.get("value"):
        return "has a value, which the operator Exists doesn't take"
    if seconds is not None and one.get("effect") != "NoExecute":
        return "has tolerationSeconds, which need the effect NoExecute"
    return ""
