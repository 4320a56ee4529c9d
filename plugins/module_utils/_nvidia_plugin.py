# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The contract of NVIDIA's own device plugin: its resources and the labels of its GPU feature discovery. No I/O.

It hands out GPUs, replicas of GPUs (time-slicing, MPS) or MIG devices, by count. Which card a pod has is known to
kubelet alone: the API doesn't tell it.
"""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json, quantity

RESOURCE = "nvidia.com/gpu"
RESOURCE_SHARED = "nvidia.com/gpu.shared"
RESOURCE_MIG = "nvidia.com/mig-"

LABEL_COUNT = "nvidia.com/gpu.count"
LABEL_MEMORY = "nvidia.com/gpu.memory"
LABEL_PRODUCT = "nvidia.com/gpu.product"
LABEL_REPLICAS = "nvidia.com/gpu.replicas"
LABEL_STRATEGY = "nvidia.com/gpu.sharing-strategy"
LABEL_MIG_STRATEGY = "nvidia.com/mig.strategy"


def is_one(resource: t.Any) -> bool:
    """Whether a resource is one of the plugin's."""
    return isinstance(resource, str) and (resource in (RESOURCE, RESOURCE_SHARED) or resource.startswith(RESOURCE_MIG))


def announced(node: Json, field: str) -> dict[str, int]:
    """Count per resource in ``status.capacity`` (or ``allocatable``), those of 0 too."""
    told = (node.get("status") or {}).get(field) or {}
    return {name: quantity(value) for name, value in sorted(told.items()) if is_one(name)}


def container_counts(container: Json) -> dict[str, int]:
    """Count per resource that one container asks for."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    found = {name: quantity(value) for name, value in asked.items() if is_one(name)}
    return {name: count for name, count in found.items() if count > 0}


def pod_counts(pod: Json) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Count per resource that a pod holds, by Kubernetes' rule for init and sidecar containers; and per container."""
    staying: dict[str, int] = {}
    most: dict[str, int] = {}
    named = []
    spec = pod["spec"]
    inits = [(one, one.get("restartPolicy") != "Always") for one in spec.get("initContainers") or []]
    for one, passing in inits + [(one, False) for one in spec.get("containers") or []]:
        counts = container_counts(one)
        if not counts:
            continue
        named.append((str(one.get("name", "")), sum(counts.values())))
        now = dict(staying)
        for name, count in counts.items():
            now[name] = now.get(name, 0) + count
            most[name] = max(most.get(name, 0), now[name])
        if not passing:
            staying = now
    return most, named


def cards(node: Json) -> tuple[Json, str]:
    """What labels say of a node's cards, all of one kind; null where they say nothing. And what is wrong with them."""
    labels = (node.get("metadata") or {}).get("labels") or {}
    told: Json = {
        "product": _text(labels.get(LABEL_PRODUCT)),
        "sharing": _text(labels.get(LABEL_STRATEGY)),
        "mig_strategy": _text(labels.get(LABEL_MIG_STRATEGY)),
    }
    wrong = []
    for key, label in (("count", LABEL_COUNT), ("memory_mib", LABEL_MEMORY), ("replicas", LABEL_REPLICAS)):
        value = labels.get(label)
        told[key] = None
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9:
            told[key] = int(value)
        elif value is not None:
            wrong.append(label)
    return told, f"label {', '.join(wrong)} isn't a whole number" if wrong else ""


def _text(value: t.Any) -> str | None:
    return value if isinstance(value, str) else None
