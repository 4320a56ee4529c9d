# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What other rooms ask of a runtime's facts: its cgroup driver, and whether it injects devices by CDI. Pure."""

from __future__ import annotations

import re
import typing as t

from .containerd import effective, release
from .types import Kubelet, Runtimes, state_of

# From this release on CDI is always on, and there is no setting for it any more: containerd's RELEASES.md.
ALWAYS_SINCE = (2, 4)
_SETTING = re.compile(r"^[ \t]*enable_cdi[ \t]*=[ \t]*(true|false)[ \t\r]*$", re.MULTILINE)
# From 1.34 on every kubelet asks the runtime, and its own setting counts only where that doesn't answer
# (KubeletCgroupDriverFromCRI: https://kubernetes.io/docs/setup/production-environment/container-runtimes/).
ASKS_SINCE = (1, 34)
# The first releases that answer RuntimeConfig.
ANSWERS_SINCE = {"containerd": (2, 0), "crio": (1, 28)}
TITLES = {"containerd": "containerd", "docker": "Docker", "crio": "CRI-O", "k3s": "k3s", "rke2": "RKE2"}
# The setting that selects each runtime's cgroup driver.
CGROUP_SETTINGS = {
    "docker": '"exec-opts": ["native.cgroupdriver=systemd"] in daemon.json',
    "containerd": "SystemdCgroup of runc's options in containerd's config.toml",
    "crio": "cgroup_manager in crio.conf",
}


def runtime_driver(name: str, runtimes: Runtimes) -> str:
    """Return a runtime's driver, ``systemd`` or ``cgroupfs``; nothing where it is unknown."""
    state = state_of(name, runtimes)
    if name != "containerd" or not state:
        return str(state.get("cgroup_driver") or "") if state else ""
    return effective(str(state.get("dump") or "")).cgroup_driver


def cgroup_driver(kubelet: Kubelet | None, runtimes: Runtimes) -> str:
    """Return the driver of the node's containers: the runtime's, else the kubelet's; nothing where it is unknown."""
    if not kubelet:
        return ""
    return runtime_driver(kubelet["runtime"], runtimes) or kubelet["cgroup_driver"]


def cgroup_mismatch(name: str, runtimes: Runtimes, kubelet: Kubelet | None) -> list[str]:
    """Warn of a kubelet and a runtime with different cgroup drivers, which breaks the pods' limits."""
    state, theirs = state_of(name, runtimes), runtime_driver(name, runtimes)
    if not state or not theirs or not kubelet or kubelet["runtime"] != name:
        return []
    own, first = kubelet["cgroup_driver"], ANSWERS_SINCE.get(name)
    asks = bool(kubelet["version"]) and release(kubelet["version"]) >= ASKS_SINCE
    if asks and first is not None and release(str(state.get("version") or "")) >= first:
        # It takes the runtime's.
        return []
    if not own or own == theirs:
        return []
    setting = CGROUP_SETTINGS.get(name, "cgroupDriver of the kubelet's config.yaml")
    return [
        f"the kubelet's cgroupDriver is {own} and {TITLES[name]}'s is {theirs}, so limits of pods are unreliable; set "
        f"both to the same ({setting})"
    ]


def injects_cdi(state: t.Mapping[str, t.Any]) -> bool:
    """Return whether a containerd injects devices by CDI.

    :param state: its facts, of which ``dump`` and ``version`` are read.
    """
    match = _SETTING.search(str(state.get("dump") or ""))
    return match[1] == "true" if match else release(str(state.get("version") or "")) >= ALWAYS_SINCE
