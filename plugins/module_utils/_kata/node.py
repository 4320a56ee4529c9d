# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node has for pods of Kata with cards, and what it lacks; module ``kata_info``."""

from __future__ import annotations

import re
import typing as t

from .._core.types import JsonObject
from .._host.system import System
from .._runtime import containerd, kubelet
from .._runtime.containerd import RUNTIME_NAME, effective, release
from . import cdi, messages, shim

KVM = "/dev/kvm"
# Of containerd's runtimes: io.containerd.kata.v2, io.containerd.kata-qemu-nvidia-gpu.v2.
TYPE = re.compile(r"io\.containerd\.kata(-[A-Za-z0-9-]+)*\.v2")
GATE = "KubeletPodResourcesGet"
# The first release of kubelet in which the gate is on by default.
GATE_SINCE = (1, 34)
LEAST_TIMEOUT = 20 * 60.0
# kubelet's own default.
DEFAULT_TIMEOUT = "2m"
SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
ARGUMENTS: JsonObject = {
    "handler": {"type": "str", "required": True},
    "shim": {"type": "path", "default": "/opt/kata/bin/containerd-shim-kata-v2"},
    "config": {"type": "path", "default": ""},
    "cards": {"type": "int", "default": 0},
}


class KataNode(t.TypedDict):
    """What was observed.

    ``handler_loaded``: the running containerd has the runtime: its files have it, and it was started after them.
    ``runtime`` is the one that kubelet uses, ``type`` the runtime's type. ``hypervisor``, ``cold_plug``, ``root_ports``
    and ``socket`` are the shim's configuration. ``timeout`` is kubelet's, in its own words; ``gate`` is None where its
    release decides. Of k3s and RKE2, whose kubelet is a part of them, ``timeout`` is None. ``devices`` are those of the
    CDI specifications, each as ``kind=name``; with ``iommufd`` they are named by their device files.
    """

    kvm: bool
    shim: str
    shim_there: bool
    config: str
    config_there: bool
    hypervisor: str
    hypervisor_there: bool
    cold_plug: str
    root_ports: str
    socket: str
    socket_there: bool
    runtime: str
    handlers: list[str]
    handler_loaded: bool
    type: str
    default_runtime: str
    kubelet: str
    timeout: str | None
    gate: bool | None
    devices: list[str]
    iommufd: bool


def observe(system: System, params: JsonObject) -> KataNode:
    """Observe a node."""
    state = containerd.observe(system)
    seen = effective(state["dump"] if state else "")
    loaded = state is not None and state["service_active"] and not state["stale"]
    runtime = seen.runtimes.get(params["handler"], {})
    path = str(runtime.get(("options", "ConfigPath")) or params["config"] or "")
    program = str(runtime.get(("runtime_path",)) or params["shim"])
    values = shim.read(system, path) if path else None
    known = values or {}
    settings = kubelet.settings(system)
    serving = kubelet.observe(system)
    names = sorted(seen.names)
    socket = known.get("runtime.pod_resource_api_sock", "")
    hypervisor = shim.hypervisor(known, "path")
    specs = cdi.read(system)
    return {
        "kvm": system.exists(KVM),
        "shim": program,
        "shim_there": system.exists(program),
        "config": path,
        "config_there": values is not None,
        "hypervisor": hypervisor,
        "hypervisor_there": bool(hypervisor) and system.exists(hypervisor),
        "cold_plug": shim.hypervisor(known, "cold_plug_vfio"),
        "root_ports": shim.hypervisor(known, "pcie_root_port"),
        "socket": socket,
        "socket_there": bool(socket) and system.exists(socket),
        "runtime": serving["runtime"] if serving else "",
        "handlers": names,
        "handler_loaded": params["handler"] in names and loaded,
        "type": str(runtime.get(("runtime_type",)) or ""),
        "default_runtime": seen.default_runtime,
        "kubelet": serving["version"] if serving else "",
        "timeout": settings.runtime_request_timeout if settings else None,
        "gate": settings.gate(GATE) if settings else None,
        "devices": [f"{spec.kind}={name}" for spec in specs for name in spec.devices],
        "iommufd": any(node.startswith(cdi.CDEVS) for spec in specs for node in spec.nodes),
    }


def seconds_of(duration: str) -> float:
    """Return the seconds of a duration as Go writes it, as 20m or 1h30m; 0 for anything else."""
    parts = _DURATION.findall(duration)
    if "".join(number + unit for number, unit in parts) != duration:
        return 0.0
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def problems(seen: KataNode, params: JsonObject) -> list[JsonObject]:
    """Return what the node lacks.

    :param params: the module's options.
    """
    handler, cards = params["handler"], params["cards"]
    rows = []
    if not seen["kvm"]:
        rows.append(messages.row("no_kvm"))
    if seen["runtime"] not in ("", "containerd", "k3s", "rke2"):
        rows.append(messages.row("other_runtime", runtime=seen["runtime"]))
    if not seen["shim_there"]:
        rows.append(messages.row("no_shim", path=seen["shim"]))
    rows += _of_containerd(seen, handler)
    if not seen["config_there"]:
        rows.append(messages.row("no_config", path=seen["config"]))
    else:
        rows += _of_config(seen, cards)
    return rows + _of_kubelet(seen)


def _of_containerd(seen: KataNode, handler: str) -> list[JsonObject]:
    if seen["runtime"] not in ("", "containerd"):
        # That of k3s and RKE2 isn't asked.
        return []
    rows = []
    if handler not in seen["handlers"]:
        available = f"it has {', '.join(seen['handlers'])}" if seen["handlers"] else "it couldn't be read"
        rows.append(messages.row("no_handler", handler=handler, available=available))
    elif not TYPE.fullmatch(seen["type"]):
        rows.append(messages.row("not_kata", handler=handler, type=seen["type"]))
    elif not seen["handler_loaded"]:
        rows.append(messages.row("not_loaded", handler=handler))
    if seen["default_runtime"] == RUNTIME_NAME:
        rows.append(messages.row("default_nvidia"))
    return rows


def _of_config(seen: KataNode, cards: int) -> list[JsonObject]:
    rows, path = [], seen["config"]
    if not seen["hypervisor_there"]:
        rows.append(messages.row("no_hypervisor", path=path, hypervisor=seen["hypervisor"]))
    if seen["cold_plug"] in ("", "no-port"):
        rows.append(messages.row("no_cold_plug", path=path, found=seen["cold_plug"]))
    ports = int(seen["root_ports"]) if seen["root_ports"].isdecimal() else 0
    if ports < max(cards, 1):
        rows.append(messages.row("root_ports", path=path, found=ports, cards=cards))
    if not seen["socket"]:
        rows.append(messages.row("no_pod_resources", path=path, wanted=SOCKET))
    elif not seen["socket_there"]:
        rows.append(messages.row("pod_resources_missing", path=path, found=seen["socket"]))
    return rows


def _of_kubelet(seen: KataNode) -> list[JsonObject]:
    rows = []
    new = release(seen["kubelet"]) >= GATE_SINCE
    if seen["kubelet"] and seen["gate"] is not True and (seen["gate"] is False or not new):
        rows.append(messages.row("kubelet_gate", version=seen["kubelet"]))
    if seen["timeout"] is not None:
        timeout = seen["timeout"] or DEFAULT_TIMEOUT
        if seconds_of(timeout) < LEAST_TIMEOUT:
            rows.append(messages.row("kubelet_timeout", found=timeout))
    return rows


def work(system: System, params: JsonObject) -> JsonObject:
    """Run the module."""
    seen = observe(system, params)
    return {"changed": False, "kata": seen, "problems": problems(seen, params)}
