# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module ``container_runtime``: its arguments, and the execution of the plan."""

from __future__ import annotations

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._host.file_transaction import replacements
from .._host.system import System
from .._rancher.settings import K3S, RKE2
from .containerd import Options
from .containerd_apply import ContainerdEngine
from .crio_apply import CrioEngine
from .docker_apply import DockerEngine
from .engine import ConfigUpdate, Engine
from .k3s_apply import K3sEngine

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
