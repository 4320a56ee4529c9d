# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What HAMi leaves in the API, and what becomes of pods without it: labels, annotations, locks and refusals. No I/O."""

from __future__ import annotations

import re

from .._core.types import JsonObject
from .hami import NODE_HANDSHAKE, RESOURCE_COUNT, RESOURCES_OF_ITS_OWN

# HAMi's device plugin runs on nodes with this label; its pods have the other one.
NODE_LABEL = ("gpu", "on")
PLUGIN_LABEL = ("app.kubernetes.io/component", "hami-device-plugin")
SCHEDULER_LABEL = ("app.kubernetes.io/component", "hami-scheduler")
# What HAMi itself writes; other annotations with its prefix are its users' wishes.
_WRITTEN_ON_NODES = re.compile(r"hami\.io/(node-.+|mutex\.lock)")
_WRITTEN_ON_PODS = re.compile(r"hami\.io/(vgpu-.+|bind-(time|phase)|.+-devices-(to-allocate|allocated))")
# kubelet's reason for a pod whose cards the device plugin doesn't allocate.
REFUSED = "UnexpectedAdmissionError"
# The values of a container's CUDA_DISABLE_CONTROL with which HAMi's plugin doesn't load its library.
DISABLE_CONTROL, DISABLED = "CUDA_DISABLE_CONTROL", ("1", "t", "T", "true", "TRUE", "True")


def node_annotations(node: JsonObject, handshakes: bool) -> list[str]:
    """Return the annotations that HAMi wrote on a node.

    :param handshakes: include those that its scheduler writes on every node of the cluster, every minute.
    """
    return [key for key in _matching(node, _WRITTEN_ON_NODES) if handshakes or not key.startswith(NODE_HANDSHAKE)]


def pod_annotations(pod: JsonObject) -> list[str]:
    """Return the annotations that HAMi wrote on a pod."""
    return _matching(pod, _WRITTEN_ON_PODS)


def is_refused(pod: JsonObject) -> bool:
    """Return whether kubelet refused a pod that requests cards because none were allocated to it."""
    status, containers = pod.get("status") or {}, (pod.get("spec") or {}).get("containers") or []
    wanted = (RESOURCE_COUNT, *RESOURCES_OF_ITS_OWN)
    limits = [name for container in containers for name in (container.get("resources") or {}).get("limits") or {}]
    return status.get("reason") == REFUSED and any(name in limits for name in wanted)


def _matching(item: JsonObject, pattern: re.Pattern[str]) -> list[str]:
    annotations = (item.get("metadata") or {}).get("annotations") or {}
    return sorted(key for key in annotations if pattern.fullmatch(key))
