# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of ``container_runtime``: for the runtime that the kubelet uses, or the requested one; its cgroup driver."""

from __future__ import annotations

import dataclasses

from .._rancher.settings import K3S, RKE2
from . import containerd_plan, crio_plan, docker_plan, k3s_plan
from .common import RuntimePlan
from .containerd import Options
from .module import choose
from .properties import kubelet_driver, runtime_driver
from .types import Kubelet, Runtimes

TITLES = {"containerd": "containerd", "docker": "Docker", "crio": "CRI-O", "k3s": "k3s", "rke2": "RKE2"}
# The setting that selects each runtime's cgroup driver.
CGROUP_SETTINGS = {
    "docker": '"exec-opts": ["native.cgroupdriver=systemd"] in daemon.json',
    "containerd": "SystemdCgroup of runc's options in containerd's config.toml",
    "crio": "cgroup_manager in crio.conf",
}


def make_plan(requested: str, wanted: Options, runtimes: Runtimes, kubelet: Kubelet | None) -> RuntimePlan:
    """Compare the node with the requested state.

    :param requested: the option ``runtime``.
    :param wanted: the requested state.
    :param runtimes: ``gpu_node.runtimes``.
    :param kubelet: ``gpu_node.kubelet``.
    :raises BadInput: the request can't be served; nothing was changed.
    :raises NotInEffect: our files are in place and containerd's effective configuration differs.
    """
    name = choose(requested, wanted.present, runtimes, kubelet)
    if name == "docker":
        planned = docker_plan.make_plan(wanted, runtimes.get("docker"))
    elif name == "containerd":
        serves_kubelet = kubelet is not None and kubelet["runtime"] == "containerd"
        planned = containerd_plan.make_plan(wanted, runtimes.get("containerd"), serves_kubelet)
    elif name == "crio":
        planned = crio_plan.make_plan(wanted, runtimes.get("crio"))
    elif name == "k3s":
        planned = k3s_plan.make_plan(K3S, wanted, runtimes.get("k3s"))
    elif name == "rke2":
        planned = k3s_plan.make_plan(RKE2, wanted, runtimes.get("rke2"))
    else:
        return RuntimePlan()
    notes = cgroup_mismatch(name, runtimes, kubelet) if wanted.present else []
    return dataclasses.replace(planned, runtime=name, warnings=(*planned.warnings, *notes))


def cgroup_mismatch(name: str, runtimes: Runtimes, kubelet: Kubelet | None) -> list[str]:
    """Warn of a kubelet and a runtime with different cgroup drivers, which breaks the pods' limits."""
    theirs = runtime_driver(name, runtimes)
    own = kubelet_driver(kubelet, runtimes) if kubelet and kubelet["runtime"] == name else ""
    if not theirs or not own or theirs == own:
        return []
    setting = CGROUP_SETTINGS.get(name, "cgroupDriver of the kubelet's config.yaml")
    return [
        f"the kubelet's cgroupDriver is {own} and {TITLES[name]}'s is {theirs}, so limits of pods are unreliable; set "
        f"both to the same ({setting})"
    ]
