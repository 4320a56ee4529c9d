# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether an entry of a variable is a toleration that the API server takes. Pure."""

from __future__ import annotations

import typing as t

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
OPERATORS = ("Exists", "Equal")
FIELDS = ("key", "operator", "value", "effect", "tolerationSeconds")


def problem(entry: t.Any) -> str:
    """Return why the API server refuses an entry, as the end of a sentence about it; empty where it doesn't."""
    if not isinstance(entry, dict):
        return "is no mapping"
    others = sorted(str(name) for name in entry if name not in FIELDS)
    if others:
        return f"has {' and '.join(others)}, and a toleration has {', '.join(FIELDS)} only"
    for name in ("key", "operator", "value", "effect"):
        if not isinstance(entry.get(name), (str, type(None))):
            return f"has a {name} that is no text: quote it"
    seconds = entry.get("tolerationSeconds")
    if seconds is not None and (not isinstance(seconds, int) or isinstance(seconds, bool)):
        return "has tolerationSeconds that are no whole number"
    if entry.get("operator") not in (None, "", *OPERATORS):
        return f"has the operator {entry['operator']}, which is none of {', '.join(OPERATORS)}"
    if entry.get("effect") not in (None, "", *EFFECTS):
        return f"has the effect {entry['effect']}, which is none of {', '.join(EFFECTS)}"
    if not entry.get("key") and entry.get("operator") != "Exists":
        return "has no key: that is valid with the operator Exists only"
    if entry.get("operator") == "Exists" and entry.get("value"):
        return "has a value, which the operator Exists doesn't take"
    if seconds is not None and entry.get("effect") != "NoExecute":
        return "has tolerationSeconds, which need the effect NoExecute"
    return ""
