# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Taints of nodes, and whether tolerations of pods match them, as Kubernetes' scheduler decides. Pure."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject

# Effects that keep pods away; PreferNoSchedule doesn't.
REPELLING = ("NoSchedule", "NoExecute")
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
    return [taint for taint in untolerated(taints, ()) if not str(taint.get("key") or "").startswith(PASSING)]


def untolerated(taints: t.Iterable[JsonObject], tolerations: t.Sequence[JsonObject]) -> list[JsonObject]:
    """Return the taints that keep a pod away, since none of its tolerations matches them."""
    away = (taint for taint in taints if taint.get("effect") in REPELLING)
    return [taint for taint in away if not any(_matches(each, taint) for each in tolerations)]


def exist(keys: t.Iterable[str]) -> list[JsonObject]:
    """Return tolerations of all taints that have one of these keys."""
    return [{"key": key, "operator": "Exists"} for key in keys]


def shown(taints: t.Iterable[JsonObject]) -> list[str]:
    """Return taints as kubectl writes them, each once."""
    texts = []
    for taint in taints:
        value = f"={taint['value']}" if taint.get("value") else ""
        texts.append(f"{taint.get('key')}{value}:{taint.get('effect')}")
    return list(dict.fromkeys(texts))


def _matches(toleration: JsonObject, taint: JsonObject) -> bool:
    key, effect = toleration.get("key") or "", toleration.get("effect") or ""
    if effect not in ("", taint.get("effect")) or key not in ("", taint.get("key")):
        return False
    if toleration.get("operator") == "Exists":
        return True
    # Without a key, only Exists is valid.
    return bool(key) and (toleration.get("value") or "") == (taint.get("value") or "")
