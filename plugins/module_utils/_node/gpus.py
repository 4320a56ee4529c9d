# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe a machine's GPUs and NVSwitches on PCI and in /dev."""

from __future__ import annotations

import re

from .._driver.modprobe import module_of
from .._host.cached_reader import names, text, whole
from .._host.system import System
from .._host.types import DeviceFiles, NvSwitch, PciGpu
from .gpu_architecture import generation

PCI = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
# VGA and 3D controllers; audio functions have another class.
DISPLAY = ("0x0300", "0x0302")
BRIDGE = "0x0680"
# In the configuration space of a vGPU: a capability that its maker defines (9), the next one's place, its length, and
# these letters. Bytes that are no text are read as one character.
VGPU_CAPABILITY = re.compile("\t.{1,2}VF", re.DOTALL)
DEVICE_TREE = "/proc/device-tree"
# The directories nvidia-caps* hold capabilities.
NODE = re.compile(r"nvidia(?!-caps).*")


def pci(system: System) -> tuple[list[PciGpu], list[NvSwitch]]:
    """Return NVIDIA's display devices and NVSwitches, each with the kernel driver it is bound to."""
    gpus: list[PciGpu] = []
    switches: list[NvSwitch] = []
    for address in names(system, PCI):
        folder = f"{PCI}/{address}"
        vendor, kind = text(system, f"{folder}/vendor"), text(system, f"{folder}/class")
        if vendor != NVIDIA or not kind.startswith((*DISPLAY, BRIDGE)):
            continue
        device = text(system, f"{folder}/device")
        link = system.link(f"{folder}/driver")
        driver = module_of(link.rpartition("/")[2]) if link else None
        if kind.startswith(BRIDGE):
            switches.append({"address": address, "device": device, "driver": driver})
            continue
        gpus.append(
            {
                "address": address,
                "vendor": vendor,
                "device": device,
                "class": kind,
                "driver": driver,
                "generation": generation(device),
                "vgpu": vgpu(whole(system, f"{folder}/config") or ""),
                "link": {
                    "speed": text(system, f"{folder}/current_link_speed") or None,
                    "width": text(system, f"{folder}/current_link_width") or None,
                    "max_speed": text(system, f"{folder}/max_link_speed") or None,
                    "max_width": text(system, f"{folder}/max_link_width") or None,
                },
            }
        )
    return gpus, switches


def vgpu(config: str) -> bool:
    """Return whether a PCI device is a vGPU, by its configuration space."""
    return bool(VGPU_CAPABILITY.search(config))


def integrated(system: System) -> str:
    """Return the model of a Jetson, whose integrated GPU isn't on PCI; empty for other machines."""
    kinds = whole(system, f"{DEVICE_TREE}/compatible") or ""
    if "nvidia,tegra" not in kinds:
        return ""
    return (whole(system, f"{DEVICE_TREE}/model") or "").strip("\0 \n") or "an NVIDIA Tegra"


def devices(system: System) -> DeviceFiles:
    """Return the driver's device files; runc needs the links in /dev/char to keep devices allowed."""
    nodes = [f"/dev/{name}" for name in names(system, "/dev") if NODE.fullmatch(name)]
    return {
        "nodes": nodes,
        "uvm": "/dev/nvidia-uvm" in nodes,
        "char_links": any(name.startswith("195:") for name in names(system, "/dev/char")),
    }
