# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the section ``runtimes`` of ``gpu_node``."""

from __future__ import annotations

from .._host.system import System
from .._rancher.settings import K3S, RKE2
from . import containerd_query, crio_query, docker_query, k3s_query
from .types import Runtimes


def observe(system: System) -> Runtimes:
    """Return the state of each container runtime; None for one that isn't installed."""
    return {
        "containerd": containerd_query.observe(system),
        "docker": docker_query.observe(system),
        "crio": crio_query.observe(system),
        "k3s": k3s_query.observe(system, K3S),
        "rke2": k3s_query.observe(system, RKE2),
    }
