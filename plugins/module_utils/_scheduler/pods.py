# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Recognize kube-scheduler's pods by what they run: their labels and names differ between installers. Pure."""

from __future__ import annotations

import posixpath
import re

from .._core.types import JsonObject
from .constants import CONTAINER

# The API server's copy of a pod that a kubelet runs from a file.
MIRROR = "kubernetes.io/config.mirror"
# Older releases have one image for each architecture.
_IMAGE = re.compile(rf"{CONTAINER}(-(amd64|arm|arm64|ppc64le|s390x))?")
# The one program that older releases have for all components, and kube-scheduler's names in it.
_HYPERKUBE, _IN_HYPERKUBE = "hyperkube", ("scheduler", CONTAINER)


def runs_scheduler(pod: JsonObject) -> bool:
    """Return whether a pod is a kube-scheduler that a kubelet runs from a file (a static pod)."""
    return is_mirror(pod) and scheduler_container(pod) is not None


def is_mirror(pod: JsonObject) -> bool:
    """Return whether a kubelet runs a pod from a file."""
    return MIRROR in ((pod.get("metadata") or {}).get("annotations") or {})


def scheduler_container(pod: JsonObject) -> JsonObject | None:
    """Return the container that runs kube-scheduler: by its name, else by its program or its image."""
    containers: list[JsonObject] = (pod.get("spec") or {}).get("containers") or []
    named = [container for container in containers if container.get("name") == CONTAINER]
    return next(iter(named or [container for container in containers if _runs(container)]), None)


def _runs(container: JsonObject) -> bool:
    words = [str(word) for part in ("command", "args") for word in container.get(part) or []]
    program = posixpath.basename(words[0]) if words else ""
    image = str(container.get("image") or "").partition("@")[0].rpartition("/")[2].partition(":")[0]
    in_hyperkube = program == _HYPERKUBE and words[1:2] and words[1] in _IN_HYPERKUBE
    return program == CONTAINER or bool(in_hyperkube) or _IMAGE.fullmatch(image) is not None
