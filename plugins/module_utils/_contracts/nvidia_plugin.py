# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The contract of NVIDIA's device plugin: its resources and the labels of GPU feature discovery. No I/O.

Names are those of https://github.com/NVIDIA/k8s-device-plugin up to v0.20.0. It allocates GPUs, replicas of GPUs
(time-slicing, MPS) or MIG devices by count. Only kubelet knows which GPU a pod has; the API doesn't show it.
"""

from __future__ import annotations

import posixpath
import typing as t

from .._core.types import JsonObject
from .._core.untrusted import LabelValue, Refused, label_value

RESOURCE = "nvidia.com/gpu"
RESOURCE_SHARED = "nvidia.com/gpu.shared"
RESOURCE_MIG = "nvidia.com/mig-"

SHARED = ".shared"

# Whether the plugin's DaemonSet runs on the node; whether that of the MPS control daemon does; the name of the node's
# configuration among those of the plugin.
LABEL_PRESENT = "nvidia.com/gpu.present"
LABEL_MPS = "nvidia.com/mps.capable"
LABEL_CONFIG = "nvidia.com/device-plugin.config"
# The layout that the GPU Operator's MIG manager is to make, and how far it is.
LABEL_MIG_CONFIG = "nvidia.com/mig.config"
LABEL_MIG_STATE = "nvidia.com/mig.config.state"

LABEL_COUNT = "nvidia.com/gpu.count"
LABEL_MEMORY = "nvidia.com/gpu.memory"
LABEL_PRODUCT = "nvidia.com/gpu.product"
LABEL_REPLICAS = "nvidia.com/gpu.replicas"
LABEL_STRATEGY = "nvidia.com/gpu.sharing-strategy"
LABEL_MIG_STRATEGY = "nvidia.com/mig.strategy"

# Where a mount names a card, if NVIDIA's container toolkit accepts volume mounts. The toolkit compares the beginning of
# the cleaned path, so that no slash has to follow; no card's name begins with one of "-_.".
DEVICE_MOUNTS = "/var/run/nvidia-container-devices"


def is_gpu_resource(resource: t.Any) -> bool:
    """Return whether a resource is one of the plugin's."""
    return isinstance(resource, str) and (resource in (RESOURCE, RESOURCE_SHARED) or resource.startswith(RESOURCE_MIG))


def unshared(resource: str) -> str:
    """Return the name of a resource whose devices aren't shared, which is the beginning of its labels, too."""
    return resource[: -len(SHARED)] if resource.endswith(SHARED) else resource


def mount_names_cards(path: str) -> bool:
    """Return whether a container's mount path, which may be relative to its root, can name a card."""
    beginning, folder, rest = posixpath.normpath("/" + path.lstrip("/")).partition(DEVICE_MOUNTS)
    return not beginning and bool(folder) and not rest.startswith(("-", "_", "."))


def announced(resources: t.Mapping[str, int]) -> dict[str, int]:
    """Return those of a node's resources that are the plugin's, including those of 0, by name."""
    return {name: number for name, number in sorted(resources.items()) if is_gpu_resource(name)}


def is_kept(resource: str, allocatable: t.Mapping[str, int]) -> bool:
    """Return whether kubelet only keeps a resource: the plugin announces its devices by the other name, shared or not.

    kubelet reports a resource's capacity for five minutes after the plugin left, and its name until kubelet restarts.
    """
    whole = unshared(resource)
    other = whole if resource != whole else whole + SHARED
    return is_gpu_resource(resource) and not allocatable.get(resource) and allocatable.get(other, 0) > 0


def cards(labels: t.Mapping[str, str]) -> tuple[JsonObject, str]:
    """Return a node's GPUs by its labels, all of one kind, null without a label; and which labels are invalid."""
    found: JsonObject = {
        "product": _text(labels.get(LABEL_PRODUCT)),
        "sharing": _text(labels.get(LABEL_STRATEGY)),
        "mig_strategy": _text(labels.get(LABEL_MIG_STRATEGY)),
    }
    wrong = []
    for key, label in (("count", LABEL_COUNT), ("memory_mib", LABEL_MEMORY), ("replicas", LABEL_REPLICAS)):
        value = labels.get(label)
        found[key] = None
        if value is not None and value.isascii() and value.isdigit() and len(value) <= 9:
            found[key] = int(value)
        elif value is not None:
            wrong.append(label)
    return found, f"label {', '.join(wrong)} isn't an integer" if wrong else ""


def _text(value: t.Any) -> LabelValue | None:
    try:
        return label_value(value)
    except Refused:
        return None
