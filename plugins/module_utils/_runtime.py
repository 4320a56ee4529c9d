# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The module ``container_runtime``: which runtime of a node it is about, and the way from its plan to the engine."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._containerd import (
    ELSEWHERE,
    Wanted,
    belongs_to,
    cri_disabled,
    effective,
)
from ansible_collections.kubegpu.share.plugins.module_utils._containerd_apply import Containerd
from ansible_collections.kubegpu.share.plugins.module_utils._crio_apply import Crio
from ansible_collections.kubegpu.share.plugins.module_utils._docker_apply import Docker
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._k3s import K3S, RKE2
from ansible_collections.kubegpu.share.plugins.module_utils._k3s_apply import Rancher
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import replacements
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Apply, Engine
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

AUTO = "auto"
RUNTIMES = ("containerd", "docker", "crio", "k3s", "rke2")
ARGUMENTS: Json = {
    "runtime": {"type": "str", "choices": [AUTO, *RUNTIMES], "default": AUTO},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "binary": {"type": "path", "default": "/usr/bin/nvidia-container-runtime"},
    "set_default": {"type": "bool", "default": True},
    "cdi": {"type": "bool", "default": True},
    "enable_cri": {"type": "bool", "default": False},
    "timeout": {"type": "int", "default": 120},
    "observed": {"type": "dict"},
    "plan": {"type": "dict"},
}


def work(params: Json, system: System) -> Json:
    """The module: carry out the plan that the action plugin made on the controller."""
    plan = params["plan"]
    if not plan:
        raise BadInput("plan: this module only runs through its action plugin, which makes the plan")
    wanted = wanted_of(params)
    done = Apply(system, engine(plan["runtime"], system, wanted, plan), params["timeout"]).run(
        replacements(plan["files"])
    )
    return {"changed": True, "runtime": plan["runtime"], **done}


def wanted_of(params: Json) -> Wanted:
    """From the module's arguments."""
    return Wanted(
        params["state"] == "present", params["set_default"], params["binary"], params["cdi"], params["enable_cri"]
    )


def engine(runtime: str, system: System, wanted: Wanted, plan: Json) -> Engine:
    """The engine that a plan is for."""
    if runtime == "docker":
        return Docker(system, wanted, bool(plan.get("restart")))
    if runtime == "crio":
        return Crio(system, wanted)
    if runtime in ("k3s", "rke2"):
        return Rancher(system, wanted, K3S if runtime == "k3s" else RKE2)
    return Containerd(system, wanted)


def choose(asked: str, present: bool, runtimes: Json, kubelet: Json | None) -> str:
    """The runtime that the module is about.

    :param asked: the option ``runtime``.
    :param runtimes: section of the observation; a runtime that isn't there is None.
    :param kubelet: section of the observation.
    :returns: one of RUNTIMES; empty where there is none and nothing has to be taken out.
    :raises BadInput: the user has to choose.
    """
    containerd = runtimes.get("containerd") or {}
    own = containerd.get("embedded", "")
    elsewhere = own in ELSEWHERE
    if asked != AUTO:
        if asked == "containerd" and (elsewhere or own in ("k3s", "rke2")) and present:
            raise BadInput(belongs_to(own))
        return asked
    ours = [name for name in RUNTIMES if has_ours(name, runtimes.get(name))]
    if not present and len(ours) == 1:
        # Whatever the kubelet uses by now.
        return ours[0]
    if kubelet and kubelet.get("runtime"):
        return str(kubelet["runtime"])
    if elsewhere:
        if not present:
            return ""
        raise BadInput(belongs_to(own))
    if kubelet and kubelet.get("endpoint"):
        raise BadInput(
            f"runtime_name: the kubelet uses {kubelet['endpoint']}, which no runtime known here has; "
            f"set runtime_name to one of {', '.join(RUNTIMES)}"
        )
    there = [name for name in RUNTIMES if (runtimes.get(name) or {}).get("version")]
    if "docker" in there and "containerd" in there and cri_disabled(effective(containerd.get("dump") or "")):
        # The containerd that Docker's package brings serves Docker alone.
        there.remove("containerd")
    if len(there) == 1:
        return there[0]
    if not there or not (present or ours):
        if present:
            raise BadInput("runtime_name: no container runtime is installed on this node")
        return ""
    raise BadInput(
        f"runtime_name: this node has {' and '.join(there)} and no kubelet that says which one counts; "
        f"set runtime_name to {' or '.join(there)}"
    )


def has_ours(name: str, observed: Json | None) -> bool:
    """Something that this module has put into a runtime's configuration is still in it."""
    if not observed:
        return False
    if observed.get("pending"):
        return True
    if name == "containerd":
        texts = (observed.get("files") or {}).values()
        return bool(observed.get("drop_in")) or any("# kubegpu.share" in text for text in texts)
    return bool(observed.get("ours"))
