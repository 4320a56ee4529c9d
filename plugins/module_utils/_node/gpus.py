# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe a machine's GPUs and NVSwitches on PCI and in /dev, each with its generation.

Source: the public PCI id database (pci-ids.ucw.cz, version 2026.05.24, vendor 10de), whose names begin with the chip,
and for Blackwell also the list of chips in NVIDIA's gpu-admin-tools. NVIDIA gives each chip blocks of 64 or 128 ids; a
whole block is listed here, so that later cards with a listed chip are covered. An id outside of all blocks is
``unknown``: older than Kepler, or newer than this list.
"""

from __future__ import annotations

import re

from .._driver.nouveau import module_of
from .._host import iommu
from .._host.cached_reader import Lenient, names, text, whole
from .._host.iommu import PCI, GroupMember
from .._host.system import System
from .._host.types import DeviceFiles, NvSwitch
from .._passthrough.functions import functions
from .._passthrough.model import Function
from .._vgpu import sysfs
from .types import Display, NodeGpu, Vgpu, VgpuHost, VgpuType, VirtualFunctions

UNKNOWN = "unknown"

# First and last id of a block, and the chips that have it.
BLOCKS = (
    (0x0FC0, 0x0FFF, "kepler"),  # GK107
    (0x1000, 0x103F, "kepler"),  # GK110, GK110B, GK180, GK210
    (0x1180, 0x11FF, "kepler"),  # GK104, GK106
    (0x1280, 0x12BF, "kepler"),  # GK208
    (0x1340, 0x13FF, "maxwell"),  # GM108, GM107, GM204
    (0x1400, 0x143F, "maxwell"),  # GM206
    (0x1600, 0x167F, "maxwell"),  # GM204, mobile
    (0x1740, 0x17FF, "maxwell"),  # GM108 and GM107, mobile; GM200
    (0x15F0, 0x15FF, "pascal"),  # GP100
    (0x1720, 0x173F, "pascal"),  # GP100
    (0x1B00, 0x1D7F, "pascal"),  # GP102, GP104, GP106, GP107, GP108
    (0x1D80, 0x1DFF, "volta"),  # GV100
    (0x1E00, 0x1FFF, "turing"),  # TU102, TU104, TU106, TU117
    (0x2180, 0x21FF, "turing"),  # TU116
    (0x2080, 0x20FF, "ampere"),  # GA100
    (0x2200, 0x227F, "ampere"),  # GA102
    (0x2400, 0x25FF, "ampere"),  # GA103, GA104, GA106, GA107
    (0x2300, 0x23FF, "hopper"),  # GH100
    (0x2680, 0x28FF, "ada"),  # AD102, AD103, AD104, AD106, AD107
    (0x2900, 0x29FF, "blackwell"),  # GB100, GB102
    (0x2B00, 0x2DFF, "blackwell"),  # GB10B, GB202, GB203, GB206, GB207
    (0x2E00, 0x2E7F, "blackwell"),  # GB20B
    (0x2F00, 0x2F7F, "blackwell"),  # GB205
    (0x3180, 0x327F, "blackwell"),  # GB110, GB112
    (0x3300, 0x337F, "blackwell"),  # GB120
)


def generation(device: str) -> str:
    """Return the generation's name in lower case.

    :param device: the id as sysfs has it, such as ``0x1eb8``.
    """
    try:
        number = int(device, 16)
    except ValueError:
        return UNKNOWN
    return next((name for first, last, name in BLOCKS if first <= number <= last), UNKNOWN)


# In the configuration space of a vGPU: a capability that its maker defines (9), the next one's place, its length, and
# these letters. Bytes that are no text are read as one character.
VGPU_CAPABILITY = re.compile("\t.{1,2}VF", re.DOTALL)
FRAMEBUFFER = re.compile(r"fb\d+")
DEVICE_TREE = "/proc/device-tree"
# The directories nvidia-caps* hold capabilities.
NODE = re.compile(r"nvidia(?!-caps).*")


def pci(system: System) -> tuple[list[NodeGpu], list[NvSwitch]]:
    """Return NVIDIA's cards and NVSwitches, each with the kernel driver it is bound to.

    Both are made of what role passthrough sees of the same functions. A card's virtual functions are no cards, and
    belong to it.
    """
    gpus: list[NodeGpu] = []
    switches: list[NvSwitch] = []
    seen = functions(system, ())
    for address, function in seen.items():
        driver = module_of(function.driver or None)
        if function.switch:
            switches.append({"address": address, "device": function.device, "driver": driver})
        if not function.card:
            continue
        folder, virtual = f"{PCI}/{address}", virtual_functions(system, address)
        gpus.append(
            {
                "address": address,
                "vendor": function.vendor,
                "device": function.device,
                "class": function.kind,
                "driver": driver,
                "driver_override": function.override,
                "generation": generation(function.device),
                "vgpu": vgpu(whole(system, f"{folder}/config") or ""),
                "link": {
                    "speed": text(system, f"{folder}/current_link_speed") or None,
                    "width": text(system, f"{folder}/current_link_width") or None,
                    "max_speed": text(system, f"{folder}/max_link_speed") or None,
                    "max_width": text(system, f"{folder}/max_link_width") or None,
                },
                "iommu_group": int(function.group) if function.group else None,
                "group": [
                    _member(other) for other in seen.values() if other is not function and _together(other, function)
                ],
                "display": display(system, function),
                "numa_node": numa_node(text(system, f"{folder}/numa_node")),
                "reset_methods": text(system, f"{folder}/reset_method").split(),
                "virtual_functions": virtual,
                "vgpu_host": vgpu_host(system, sysfs.card(Lenient(system), address)),
            }
        )
    return gpus, switches


def _together(function: Function, other: Function) -> bool:
    """Return whether two functions go to one virtual machine or to none."""
    return bool(function.group) and function.group == other.group


def _member(function: Function) -> GroupMember:
    return {
        "address": function.address,
        "class": function.kind,
        "vendor": function.vendor,
        "device": function.device,
        "driver": function.driver or None,
        "bridge": function.bridge,
    }


def vgpu(config: str) -> bool:
    """Return whether a PCI device is a vGPU, by its configuration space."""
    return bool(VGPU_CAPABILITY.search(config))


def numa_node(content: str) -> int | None:
    """Return the number in a device's file ``numa_node``; None on a machine without NUMA, which has -1."""
    return int(content) if content.isdecimal() else None


def display(system: System, function: Function) -> Display:
    """Return what of a card is a display: a virtual machine that gets it takes the screen away."""
    folder = f"{PCI}/{function.address}"
    cards = [f"{folder}/drm/{card}" for card in names(system, f"{folder}/drm") if card.startswith("card")]
    frames = [name for place in (folder, *cards) for name in names(system, f"{place}/graphics")]
    connectors = [(card, name) for card in cards for name in names(system, card) if "-" in name]
    return {
        "boot": function.boot_display,
        "framebuffers": [name for name in frames if FRAMEBUFFER.fullmatch(name)],
        "connectors": [name for card, name in connectors if text(system, f"{card}/{name}/status") == "connected"],
    }


def virtual_functions(system: System, address: str) -> VirtualFunctions:
    """Return a card's virtual functions in the order of their numbers."""
    total = text(system, f"{PCI}/{address}/sriov_totalvfs")
    if not total.isdecimal():
        return {"total": 0, "enabled": []}
    return {
        "total": int(total),
        "enabled": [
            {"address": each, "driver": iommu.driver_of(system, each), "iommu_group": iommu.group_of(system, each)}
            for each in iommu.virtual_of(system, address)
        ],
    }


def vgpu_host(system: System, card: sysfs.Card) -> VgpuHost:
    """Return which vGPUs a card can have, and has, by what its driver shows, whatever kernel and release it is."""
    types: list[VgpuType] = [{"id": each.id, "name": each.name, "available": each.available} for each in card.offered]
    vgpus = [_vgpu(system, each) for each in card.vgpus]
    return {"framework": card.framework or "none", "types": types, "vgpus": vgpus}


def _vgpu(system: System, made: sysfs.VGpu) -> Vgpu:
    uuid = made.key if made.key != made.function else None
    group = iommu.group_of(system, made.function, uuid or "")
    return {"address": made.function, "uuid": uuid, "type": made.id, "iommu_group": group}


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
