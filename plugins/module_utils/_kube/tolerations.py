# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Taints of nodes, and whether tolerations of pods match them, as Kubernetes' scheduler decides. Pure."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject

# Effects that keep pods away; PreferNoSchedule doesn't.
REPELLING = ("NoSchedule", "NoExecute")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
OPERATORS = ("Exists", "Equal")
FIELDS = ("key", "operator", "value", "effect", "tolerationSeconds")
# Beginnings of the keys that Kubernetes, network plugins and autoscalers set for a while: DaemonSets tolerate the first
# by themselves, and the others end without anybody's doing.
PASSING = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "node.cilium.io/",
    "node.cluster.x-k8s.io/",
    "karpenter.sh/",
    "ToBeDeletedByClusterAutoscaler",
    "DeletionCandidateOfClusterAutoscaler",
)


def lasting(taints: t.Iterable[JsonObject]) -> list[JsonObject]:
    """Return the taints that keep pods away and stay: those of administrators and distributions."""
    return [one for one in untolerated(taints, ()) if not str(one.get("key") or "").startswith(PASSING)]


def untolerated(taints: t.Iterable[JsonObject], tolerations: t.Sequence[JsonObject]) -> list[JsonObject]:
    """Return the taints that keep a pod away, since none of its tolerations matches them."""
    return [
        one for one in taints if one.get("effect") in REPELLING and not any(_matches(each, one) for each in tolerations)
    ]


def exist(keys: t.Iterable[str]) -> list[JsonObject]:
    """Return tolerations of all taints that have one of these keys."""
    return [{"key": key, "operator": "Exists"} for key in keys]


def shown(taints: t.Iterable[JsonObject]) -> list[str]:
    """Return taints as kubectl writes them, each once."""
    found = []
    for one in taints:
        value = f"={one['value']}" if one.get("value") else ""
        found.append(f"{one.get('key')}{value}:{one.get('effect')}")
    return list(dict.fromkeys(found))


def _matches(toleration: JsonObject, taint: JsonObject) -> bool:
    key, effect = toleration.get("key") or "", toleration.get("effect") or ""
    if effect not in ("", taint.get("effect")) or key not in ("", taint.get("key")):
        return False
    if toleration.get("operator") == "Exists":
        return True
    # Without a key, only Exists is valid.
    return bool(key) and (toleration.get("value") or "") == (taint.get("value") or "")


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
