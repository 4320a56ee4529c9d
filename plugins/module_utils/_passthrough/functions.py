# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe NVIDIA's functions on PCI with their IOMMU groups, drivers and displays."""

from __future__ import annotations

import fnmatch
import re
import typing as t

from .._host import iommu
from .._host.cached_reader import names, text
from .._host.iommu import GROUPS, NVIDIA, PCI
from .._host.system import System, target
from .model import GENERIC, Function, driver_of

DRIVERS = "/sys/bus/pci/drivers"
MDEVS = "/sys/bus/mdev/devices"
GRAPHICS = "/sys/class/graphics"
CONSOLES = "/sys/class/vtconsole"
VFIO = "/dev/vfio"
# Of USB in sysfs: a bus, and a device by its bus and ports.
USB_BUS, USB_DEVICE = re.compile(r"usb\d+"), re.compile(r"\d+-\d+(\.\d+)*")
ALIAS = re.compile(r"^alias (vfio_pci:\S+) (\S+)$", re.MULTILINE)


def functions(system: System, variants: t.Sequence[tuple[str, str]]) -> dict[str, Function]:
    """Return NVIDIA's functions and all of their IOMMU groups, by address.

    :param variants: of VFIO's driver, as ``best_driver`` takes them.
    """
    own = [name for name in names(system, PCI) if text(system, f"{PCI}/{name}/vendor") == NVIDIA]
    groups = {group_of(system, name) for name in own} - {""}
    members = {name for group in groups for name in names(system, f"{GROUPS}/{group}/devices")}
    consoles = _consoles(system) if own else ""
    devices = {name: target(system, f"{MDEVS}/{name}") for name in names(system, MDEVS)} if own else {}
    return {
        name: _function(system, name, variants, consoles, devices)
        for name in sorted({*own, *members})
        if system.exists(f"{PCI}/{name}")
    }


def group_of(system: System, address: str) -> str:
    """Return the number of a function's IOMMU group; empty without one."""
    number = iommu.group_of(system, address)
    return "" if number is None else str(number)


def driver_name(system: System, address: str) -> str:
    """Return the name of a function's driver; empty without one."""
    return iommu.driver_of(system, address) or ""


def driver_module(system: System, driver: str) -> str:
    """Return the module of a driver on PCI; empty for one that is built in."""
    return (system.link(f"{DRIVERS}/{driver}/module") or "").rpartition("/")[2] if driver else ""


def _function(
    system: System,
    address: str,
    aliases: t.Sequence[tuple[str, str]],
    consoles: str,
    mdevs: t.Mapping[str, str],
) -> Function:
    folder = f"{PCI}/{address}"
    driver, group = driver_name(system, address), group_of(system, address)
    return Function(
        address=address,
        vendor=text(system, f"{folder}/vendor"),
        device=text(system, f"{folder}/device"),
        kind=text(system, f"{folder}/class"),
        driver=driver,
        module=driver_module(system, driver),
        override=iommu.override_of(system, address),
        group=group,
        boot_display=text(system, f"{folder}/boot_vga") == "1",
        console=f"/{address}/" in consoles,
        physical=(system.link(f"{folder}/physfn") or "").rpartition("/")[2],
        virtual=len(iommu.virtual_of(system, address)),
        mdevs=tuple(sorted(name for name, path in mdevs.items() if f"/{address}/" in path)),
        best=best_driver(text(system, f"{folder}/modalias"), aliases),
        nodes=tuple(
            path
            for path in (
                f"{VFIO}/{group}",
                *(f"{VFIO}/devices/{name}" for name in names(system, f"{folder}/vfio-dev")),
            )
            if group and system.exists(path)
        ),
        usb=tuple(usb_devices(system, folder)),
    )


def usb_devices(system: System, folder: str) -> list[str]:
    """Return the USB devices behind a function that this machine uses: a keyboard, a disk; hubs don't count.

    :param folder: of the function in sysfs.
    """
    buses = [f"{folder}/{name}" for name in names(system, folder) if USB_BUS.fullmatch(name)]
    return sorted(row for bus in buses for row in _usb_below(system, bus))


def _usb_below(system: System, folder: str) -> t.Iterator[str]:
    """Yield the devices below a bus or a hub whose interfaces have drivers."""
    for name in names(system, folder):
        if not USB_DEVICE.fullmatch(name):
            continue
        place = f"{folder}/{name}"
        yield from _usb_below(system, place)
        interfaces = [each for each in names(system, place) if each.startswith(f"{name}:")]
        drivers = {(system.link(f"{place}/{each}/driver") or "").rpartition("/")[2] for each in interfaces}
        # One that a program drives by itself has usbfs.
        using = sorted(drivers - {"", "hub"})
        if using:
            ids = ":".join(text(system, f"{place}/{each}") for each in ("idVendor", "idProduct"))
            yield f"{name} {ids} {' '.join(using)}"


def best_driver(modalias: str, aliases: t.Sequence[tuple[str, str]]) -> str:
    """Return the VFIO driver with the fewest wildcards that knows a function, as libvirt chooses it.

    :param modalias: of the function, which begins with ``pci:``.
    :param aliases: of VFIO's variants, and their modules.
    """
    name = "vfio_pci:" + modalias.partition(":")[2]
    known = [(pattern.count("*"), module) for pattern, module in aliases if fnmatch.fnmatchcase(name, pattern)]
    return driver_of(min(known)[1]) if known else GENERIC


def _consoles(system: System) -> str:
    """Return the paths of the framebuffers that a console uses, one a line."""
    bound = any(
        "frame buffer" in text(system, f"{CONSOLES}/{name}/name") and text(system, f"{CONSOLES}/{name}/bind") == "1"
        for name in names(system, CONSOLES)
    )
    shown = [name for name in names(system, GRAPHICS) if re.fullmatch(r"fb\d+", name)] if bound else []
    return "".join(target(system, f"{GRAPHICS}/{name}") + "/\n" for name in shown)
