# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cgroup drivers of a kubelet and of its container runtime. Pure."""

from __future__ import annotations

from .containerd import effective, release
from .types import Kubelet, Runtimes, state_of

# From 1.34 on every kubelet asks the runtime, and its own setting counts only where that doesn't answer
# (KubeletCgroupDriverFromCRI: https://kubernetes.io/docs/setup/production-environment/container-runtimes/).
ASKS_SINCE = (1, 34)
# The first releases that answer RuntimeConfig.
ANSWERS_SINCE = {"containerd": (2, 0), "crio": (1, 28)}


def asks_runtime(kubelet: Kubelet, runtimes: Runtimes) -> bool:
    """Return whether the kubelet takes the cgroup driver from its runtime."""
    state = state_of(kubelet["runtime"], runtimes)
    first = ANSWERS_SINCE.get(kubelet["runtime"])
    asks = bool(kubelet["version"]) and release(kubelet["version"]) >= ASKS_SINCE
    return asks and first is not None and state is not None and release(str(state.get("version") or "")) >= first


def runtime_driver(name: str, runtimes: Runtimes) -> str:
    """Return a runtime's driver, ``systemd`` or ``cgroupfs``; nothing where it is unknown."""
    state = state_of(name, runtimes)
    if name != "containerd" or not state:
        return str(state.get("cgroup_driver") or "") if state else ""
    return effective(str(state.get("dump") or "")).cgroup_driver


def kubelet_driver(kubelet: Kubelet, runtimes: Runtimes) -> str:
    """Return the driver that the kubelet uses; nothing where it is unknown."""
    if asks_runtime(kubelet, runtimes):
        return runtime_driver(kubelet["runtime"], runtimes) or kubelet["cgroup_driver"]
    return kubelet["cgroup_driver"]


def cgroup_driver(kubelet: Kubelet | None, runtimes: Runtimes) -> str:
    """Return the driver of the node's containers: the runtime's, else the kubelet's; nothing where it is unknown."""
    if not kubelet:
        return ""
    return runtime_driver(kubelet["runtime"], runtimes) or kubelet["cgroup_driver"]
