# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A machine's GPUs and NVSwitches as PCI and /dev show them. Sections as plain JSON."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpu_generation import generation
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_files import names, text
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

PCI = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
# VGA and 3D controllers; audio functions have another class.
DISPLAY = ("0x0300", "0x0302")
BRIDGE = "0x0680"
LINK = ("speed", "width")
# Capabilities lie in folders of their own.
NODE = re.compile(r"nvidia(?!-caps).*")


def pci(system: System) -> tuple[list[Json], list[Json]]:
    """NVIDIA's display devices and NVSwitches, and the kernel driver that each is bound to."""
    gpus = []
    switches = []
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
                    **{name: text(system, f"{folder}/current_link_{name}") or None for name in LINK},
                    **{f"max_{name}": text(system, f"{folder}/max_link_{name}") or None for name in LINK},
                },
            }
        )
    return gpus, switches


def devices(system: System) -> Json:
    """The driver's device nodes; ``char_links`` are those in /dev/char, which runc needs to keep devices allowed."""
    nodes = [f"/dev/{name}" for name in names(system, "/dev") if NODE.fullmatch(name)]
    return {
        "nodes": nodes,
        "uvm": "/dev/nvidia-uvm" in nodes,
        "char_links": any(name.startswith("195:") for name in names(system, "/dev/char")),
    }
