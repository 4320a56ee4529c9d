# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe a machine's IOMMU: whether it is on, and which PCI functions it can't tell apart.

A virtual machine is given whole groups: the kernel lets nobody use a function while another driver than VFIO's has a
function of its group, bridges left aside.
"""

from __future__ import annotations

import posixpath
import re
import typing as t

from .cached_reader import names, text
from .system import System
from .types import PciAddress

PCI = "/sys/bus/pci/devices"
GROUPS = "/sys/kernel/iommu_groups"
TABLES = "/sys/firmware/acpi/tables"
# The firmware's descriptions of an IOMMU: Intel's, AMD's, Arm's, and a virtual one's.
KNOWN_TABLES = ("DMAR", "IVRS", "IORT", "VIOT")
# Intel's is on without an argument; with the second all but that of the processor's own graphics.
DEFAULT_ON = ("CONFIG_INTEL_IOMMU_DEFAULT_ON", "CONFIG_INTEL_IOMMU_DEFAULT_ON_INTGPU_OFF")
ARGUMENT = re.compile(r"(?:intel_|amd_)?iommu(?:\.\w+)?=\S+")
NVIDIA = "0x10de"
# Classes of VGA and 3D controllers (audio functions have another), and of NVSwitches.
DISPLAY = ("0x0300", "0x0302")
NVSWITCH = "0x0680"
VIRTUAL = re.compile(r"virtfn(\d+)")
# PCI to PCI bridges, and those to the processor; no driver of theirs moves data by itself.
BRIDGES = ("0x0604", "0x0600")
# What sysfs prints for a function without one.
NO_OVERRIDE = "(null)"


class Iommu(t.TypedDict):
    """``groups`` is their number, 0 where it is off; ``table`` the firmware's (DMAR, IVRS, IORT, VIOT or empty).

    ``arguments`` are those of the running kernel's command line that are about it. ``default_on``: whether this kernel
    turns Intel's IOMMU on by itself; None where that isn't known.
    """

    groups: int
    table: str
    arguments: list[str]
    default_on: bool | None


# Another function of a card's IOMMU group. "class" is a keyword of Python, so the class syntax can't have it.
GroupMember = t.TypedDict(
    "GroupMember",
    {
        "class": str,
        "address": PciAddress,
        "vendor": str,
        "device": str,
        "driver": "str | None",
        "bridge": bool,
    },
)


def observe(system: System, release: str) -> Iommu:
    """Return whether the kernel has groups, and why not.

    :param release: the running kernel's.
    """
    tables = names(system, TABLES)
    config = text(system, f"/boot/config-{release}") or text(system, f"/lib/modules/{release}/config")
    return {
        "groups": len(names(system, GROUPS)),
        "table": next((table for table in KNOWN_TABLES if table in tables), ""),
        "arguments": [word for word in text(system, "/proc/cmdline").split() if ARGUMENT.fullmatch(word)],
        "default_on": any(f"\n{name}=y" in config for name in DEFAULT_ON) if config else None,
    }


def group_of(system: System, address: str, device: str = "") -> int | None:
    """Return the number of a function's group; None without an IOMMU.

    :param device: the UUID of a mediated device on it, whose group is asked for.
    """
    name = (system.link(posixpath.join(PCI, address, device, "iommu_group")) or "").rpartition("/")[2]
    return int(name) if name.isdecimal() else None


def driver_of(system: System, address: str) -> str | None:
    """Return the name of the driver that a function is bound to, as sysfs has it."""
    return (system.link(f"{PCI}/{address}/driver") or "").rpartition("/")[2] or None


def virtual_of(system: System, address: str) -> list[str]:
    """Return the addresses of a function's virtual functions, in the order of their numbers."""
    folder = f"{PCI}/{address}"
    numbers = sorted(int(found.group(1)) for found in map(VIRTUAL.fullmatch, names(system, folder)) if found)
    links = [(system.link(f"{folder}/virtfn{number}") or "").rpartition("/")[2] for number in numbers]
    return [each for each in links if each]


def override_of(system: System, address: str) -> str:
    """Return the driver that alone may take a function; empty where any may."""
    value = text(system, f"{PCI}/{address}/driver_override")
    return "" if value == NO_OVERRIDE else value
