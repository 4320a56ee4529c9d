# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe a machine's GPUs and NVSwitches on PCI and in /dev."""

from __future__ import annotations

import re

from .._host.cached_reader import names, text
from .._host.system import System
from .._host.types import DeviceFiles, NvSwitch, PciGpu
from .gpu_architecture import generation

PCI = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
# VGA and 3D controllers; audio functions have another class.
DISPLAY = ("0x0300", "0x0302")
BRIDGE = "0x0680"
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
        driver = link.rpartition("/")[2] if link else None
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
                "link": {
                    "speed": text(system, f"{folder}/current_link_speed") or None,
                    "width": text(system, f"{folder}/current_link_width") or None,
                    "max_speed": text(system, f"{folder}/max_link_speed") or None,
                    "max_width": text(system, f"{folder}/max_link_width") or None,
                },
            }
        )
    return gpus, switches


def devices(system: System) -> DeviceFiles:
    """Return the driver's device files; runc needs the links in /dev/char to keep devices allowed."""
    nodes = [f"/dev/{name}" for name in names(system, "/dev") if NODE.fullmatch(name)]
    return {
        "nodes": nodes,
        "uvm": "/dev/nvidia-uvm" in nodes,
        "char_links": any(name.startswith("195:") for name in names(system, "/dev/char")),
    }
