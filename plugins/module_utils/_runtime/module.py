# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module ``container_runtime``: its arguments, the choice of the runtime, and the execution of the plan."""

from __future__ import annotations

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._host.file_transaction import replacements
from .._host.system import System
from .._rancher.settings import K3S, RKE2
from .containerd import Options, effective
from .containerd_apply import ELSEWHERE, ContainerdEngine, belongs_to, cri_disabled
from .crio_apply import CrioEngine
from .docker_apply import DockerEngine
from .engine import ConfigUpdate, Engine
from .k3s_apply import K3sEngine
from .types import Kubelet, Runtimes, state_of

AUTO = "auto"
RUNTIMES = ("containerd", "docker", "crio", "k3s", "rke2")
ARGUMENTS: JsonObject = {
    "runtime": {"type": "str", "choices": [AUTO, *RUNTIMES], "default": AUTO},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "binary": {"type": "path", "default": "/usr/bin/nvidia-container-runtime"},
    "set_default": {"type": "bool", "default": True},
    "cdi": {"type": "bool", "default": True},
    "enable_cri": {"type": "bool", "default": False},
    "replace_default": {"type": "bool", "default": False},
    "timeout": {"type": "int", "default": 120},
    "observed": {"type": "dict"},
    "plan": {"type": "dict"},
}


def run_plan(params: JsonObject, system: System) -> JsonObject:
    """Execute the plan that the action plugin made on the controller."""
    plan = params["plan"]
    if not plan:
        raise BadInput("plan: this module only runs through its action plugin, which makes the plan")
    engine = engine_of(plan, system, options_of(params))
    done = ConfigUpdate(system, engine, params["timeout"]).run(replacements(plan["files"]))
    return {"changed": True, "runtime": plan["runtime"], **done}


def options_of(params: JsonObject) -> Options:
    """Convert the module's arguments."""
    return Options(
        present=params["state"] == "present",
        default=params["set_default"],
        binary=params["binary"],
        cdi=params["cdi"],
        enable_cri=params["enable_cri"],
        replace_default=params["replace_default"],
    )


def engine_of(plan: JsonObject, system: System, options: Options) -> Engine:
    """Create the engine of a plan, as the action plugin handed it over."""
    runtime = plan["runtime"]
    if runtime == "docker":
        return DockerEngine(system, options, bool(plan.get("restart")))
    if runtime == "crio":
        return CrioEngine(system, options)
    if runtime in ("k3s", "rke2"):
        return K3sEngine(system, options, K3S if runtime == "k3s" else RKE2)
    return ContainerdEngine(system, options, plan.get("expected") or (), plan.get("users_default"))


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
