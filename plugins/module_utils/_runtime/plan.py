# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of ``container_runtime``: for the runtime that the kubelet uses, or the requested one."""

from __future__ import annotations

import dataclasses

from .._core.errors import BadInput
from .._rancher.settings import K3S, RKE2
from . import containerd_plan, crio_plan, docker_plan, k3s_plan
from .common import RuntimePlan
from .containerd import Options, effective
from .containerd_apply import ELSEWHERE, belongs_to, cri_disabled
from .module import AUTO, RUNTIMES
from .properties import cgroup_mismatch
from .types import Kubelet, Runtimes, state_of


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


def choose(requested: str, present: bool, runtimes: Runtimes, kubelet: Kubelet | None) -> str:
    """Choose the runtime to configure.

    :param requested: the option ``runtime``.
    :param present: whether NVIDIA's runtime is added or removed.
    :param runtimes: ``gpu_node.runtimes``.
    :param kubelet: ``gpu_node.kubelet``.
    :returns: one of RUNTIMES; empty where there is none and nothing has to be removed.
    :raises BadInput: the user has to choose.
    """
    containerd = runtimes.get("containerd")
    own = containerd.get("embedded", "") if containerd else ""
    if requested != AUTO:
        if requested == "containerd" and (own in ELSEWHERE or own in ("k3s", "rke2")) and present:
            raise BadInput(belongs_to(own))
        return requested
    ours = [name for name in RUNTIMES if has_our_settings(name, runtimes)]
    if not present and len(ours) == 1:
        # Even if the kubelet uses another runtime by now.
        return ours[0]
    if kubelet and kubelet["runtime"]:
        return kubelet["runtime"]
    if own in ELSEWHERE:
        if not present:
            return ""
        raise BadInput(belongs_to(own))
    if kubelet and kubelet["endpoint"]:
        raise BadInput(
            f"runtime_name: the kubelet uses {kubelet['endpoint']}, which belongs to no supported runtime; set "
            f"runtime_name to one of {', '.join(RUNTIMES)}"
        )
    installed = [name for name in RUNTIMES if (state := state_of(name, runtimes)) and state["version"]]
    if containerd and "docker" in installed and cri_disabled(effective(containerd.get("dump", ""))):
        # The containerd of Docker's package serves Docker alone.
        installed = [name for name in installed if name != "containerd"]
    if len(installed) == 1:
        return installed[0]
    if not installed or not (present or ours):
        if present:
            raise BadInput("runtime_name: no container runtime is installed on this node")
        return ""
    raise BadInput(
        f"runtime_name: this node has {' and '.join(installed)} and no kubelet that names the one it uses; set "
        f"runtime_name to {' or '.join(installed)}"
    )


def has_our_settings(name: str, runtimes: Runtimes) -> bool:
    """Return whether a runtime's configuration still holds settings of this module."""
    state = state_of(name, runtimes)
    if not state:
        return False
    if state.get("pending") or state.get("ours"):
        return True
    containerd = runtimes.get("containerd") if name == "containerd" else None
    if not containerd:
        return False
    marked = any("# kubegpu.share" in text for text in containerd.get("files", {}).values())
    return marked or bool(containerd.get("drop_in"))
