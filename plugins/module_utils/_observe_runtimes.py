# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at all container runtimes of a node: section ``runtimes`` of the observation."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import (
    _observe_containerd,
    _observe_crio,
    _observe_docker,
    _observe_k3s,
)
from ansible_collections.kubegpu.share.plugins.module_utils._k3s import K3S, RKE2
from ansible_collections.kubegpu.share.plugins.module_utils._system import System


def observe(system: System) -> dict[str, t.Any]:
    """What is known of each runtime; None for one that isn't there."""
    return {
        "containerd": _observe_containerd.observe(system),
        "docker": _observe_docker.observe(system),
        "crio": _observe_crio.observe(system),
        "k3s": _observe_k3s.observe(system, K3S),
        "rke2": _observe_k3s.observe(system, RKE2),
    }
