# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a card's vGPUs in sysfs. A part of the program at boot, so that it imports nothing of other packages.

Which framework a card has is decided by what sysfs shows, never by the kernel's version: a function with the folder
mdev_supported_types has mediated devices, and one with nvidia/current_vgpu_type is itself a vGPU once a type's id is
written there (vGPU 17 and later). Ids differ between drivers, so types are known by their names.
https://docs.nvidia.com/vgpu/latest/grid-vgpu-user-guide/, https://docs.kernel.org/driver-api/vfio-mediated-device.html
"""

from __future__ import annotations

import collections
import dataclasses
import json
import posixpath
import re
import typing as t

PCI = "/sys/bus/pci/devices"
RECORD = "/var/lib/kubegpu-share/vgpu.json"
# Names of types by their ids, as far as this boot has shown them: a virtual function's list has only those that it
# can still become. A driver that is loaded again forgets the vGPUs, and so does a boot these names.
NAMES = "/run/kubegpu-share-vgpu.json"
MDEV, VENDOR = "mdev", "vendor"
NO_TYPE = "0"
# As in _host/iommu.py, which isn't there at boot.
DISPLAY = ("0x0300", "0x0302")
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# How the kernel names mediated devices, and what a vGPU manager lists.
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
VIRTUAL = re.compile(r"virtfn([0-9]+)")


class Reader(t.Protocol):
    """What of ``System`` is used here; an unreadable file counts as missing."""

    def read(self, path: str) -> str | None: ...

    def names(self, path: str) -> list[str]: ...

    def exists(self, path: str) -> bool: ...

    def link(self, path: str) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class VGpu:
    """
    :param function: the PCI address that has it.
    :param key: its UUID, or the address where the function is the vGPU.
    :param id: of its type.
    :param name: of its type, without the maker: ``A10-4Q``; where it isn't known, ``type`` and the id.
    """

    function: str
    key: str
    id: str
    name: str

    @property
    def named(self) -> bool:
        """Whether the name of its type is known."""
        return self.name != unknown(self.id)

    @property
    def folder(self) -> str:
        """Its folder in sysfs."""
        return f"{PCI}/{self.function}" + ("" if self.key == self.function else f"/{self.key}")


@dataclasses.dataclass(frozen=True)
class Type:
    """
    :param name: as the driver gives it, with the maker.
    :param available: how many more of it a function can have.
    """

    id: str
    name: str
    available: int


@dataclasses.dataclass(frozen=True)
class Function:
    """A PCI function that can have vGPUs."""

    address: str
    framework: str
    types: tuple[Type, ...]
    vgpus: tuple[VGpu, ...]

    @property
    def creatable(self) -> dict[str, str]:
        """The names of the types that it can still have, without the maker, by id."""
        return {each.id: short(each.name) for each in self.types if each.available}


@dataclasses.dataclass(frozen=True)
class Card:
    """
    :param device: its PCI ids, device then vendor, as ``0x223610DE``.
    :param driver: None where it has none.
    :param most_functions: virtual functions that it can have; 0 without SR-IOV.
    :param virtual: the addresses of those that it has.
    :param functions: those of them, or the card itself, that can have vGPUs.
    """

    address: str
    device: str
    driver: str | None
    most_functions: int
    virtual: tuple[str, ...]
    functions: tuple[Function, ...]

    @property
    def vgpus(self) -> tuple[VGpu, ...]:
        return tuple(vgpu for function in self.functions for vgpu in function.vgpus)

    @property
    def framework(self) -> str:
        """``mdev``, ``vendor``, or empty where no function can have vGPUs, maybe because it has none yet."""
        return self.functions[0].framework if self.functions else ""

    @property
    def offered(self) -> list[Type]:
        """The types that its functions list, each with how many more of it they can have together."""
        found: dict[str, Type] = {}
        for each in (each for function in self.functions for each in function.types):
            more = found[each.id].available if each.id in found else 0
            found[each.id] = dataclasses.replace(each, available=more + each.available)
        return list(found.values())

    def names(self) -> set[str]:
        """The types that can be created now, or are there."""
        return {name for function in self.functions for name in function.creatable.values()} | set(self.counts())

    def counts(self) -> dict[str, int]:
        """How many vGPUs of each type there are."""
        return dict(collections.Counter(vgpu.name for vgpu in self.vgpus))


def pci_ids(vendor: str, device: str) -> str:
    """Return a card's PCI ids as layouts have them, device then vendor."""
    return f"0x{device.removeprefix('0x')}{vendor.removeprefix('0x')}".upper().replace("0X", "0x")


def short(name: str) -> str:
    """Return a type's name as NVIDIA's tools take it: ``NVIDIA A10-4Q`` and ``GRID T4-1Q`` by the last word."""
    words = name.split()
    return words[-1] if words else ""


def cards(reader: Reader) -> list[str]:
    """Return the addresses of NVIDIA's cards, in the order of their indices; virtual functions are no cards."""
    return [
        address
        for address in reader.names(PCI)
        if ADDRESS.fullmatch(address)
        and _text(reader, f"{PCI}/{address}/vendor") == "0x10de"
        and _text(reader, f"{PCI}/{address}/class").startswith(DISPLAY)
        and not reader.exists(f"{PCI}/{address}/physfn")
    ]


def card(reader: Reader, address: str) -> Card:
    """Return what sysfs shows of a card."""
    folder = f"{PCI}/{address}"
    driver = reader.link(f"{folder}/driver")
    numbers = sorted(int(match.group(1)) for match in map(VIRTUAL.fullmatch, reader.names(folder)) if match)
    virtual = [posixpath.basename(reader.link(f"{folder}/virtfn{number}") or "") for number in numbers]
    functions = [_function(reader, each) for each in (address, *virtual) if ADDRESS.fullmatch(each)]
    return Card(
        address,
        pci_ids(*(_text(reader, f"{folder}/{name}") for name in ("vendor", "device"))),
        posixpath.basename(driver) if driver else None,
        _count(reader, f"{folder}/sriov_totalvfs"),
        tuple(virtual),
        named([function for function in functions if function is not None], known(reader.read(NAMES))),
    )


def named(functions: t.Sequence[Function], names: t.Mapping[str, str]) -> tuple[Function, ...]:
    """Return functions whose vGPUs have their types' names.

    A virtual function that is a vGPU doesn't list its own type; another one of the card may.

    :param names: those that this boot has shown, by the ids.
    """
    names = {**names, **{each.id: short(each.name) for function in functions for each in function.types}}
    return tuple(
        dataclasses.replace(
            function,
            vgpus=tuple(
                dataclasses.replace(vgpu, name=names.get(vgpu.id) or unknown(vgpu.id)) for vgpu in function.vgpus
            ),
        )
        for function in functions
    )


def known(text: str | None) -> dict[str, str]:
    """Return the names of types by their ids, of the file ``NAMES``."""
    try:
        return {str(number): str(name) for number, name in json.loads(text or "{}").items()}
    except (ValueError, AttributeError):
        # A file of another program, or half a file: then a name isn't known.
        return {}


def unknown(number: str) -> str:
    """Return the name of a type whose name isn't known."""
    return f"type {number}"


def _function(reader: Reader, address: str) -> Function | None:
    folder = f"{PCI}/{address}"
    offered = reader.names(f"{folder}/mdev_supported_types")
    if offered:
        place = f"{folder}/mdev_supported_types"
        types = tuple(
            Type(name, _text(reader, f"{place}/{name}/name"), _count(reader, f"{place}/{name}/available_instances"))
            for name in offered
        )
        return Function(address, MDEV, types, tuple(_mediated(reader, address)))
    current = _text(reader, f"{folder}/nvidia/current_vgpu_type")
    if not current.isdecimal():
        return None
    if current != NO_TYPE:
        return Function(address, VENDOR, (), (VGpu(address, address, current, ""),))
    listed = reader.read(f"{folder}/nvidia/creatable_vgpu_types") or ""
    return Function(address, VENDOR, tuple(_creatable(listed)), ())


def _creatable(listed: str) -> t.Iterator[Type]:
    """Yield the types of the lines ``number : name``; the first line is a heading."""
    for line in listed.split("\n"):
        number, _colon, name = (part.strip() for part in line.partition(":"))
        if number.isascii() and number.isdecimal() and name:
            yield Type(number, name, 1)


def _mediated(reader: Reader, address: str) -> t.Iterator[VGpu]:
    for name in reader.names(f"{PCI}/{address}"):
        kind = (reader.link(f"{PCI}/{address}/{name}/mdev_type") or "").rpartition("/")[2]
        if UUID.fullmatch(name) and kind:
            yield VGpu(address, name, kind, "")


def _text(reader: Reader, path: str) -> str:
    return (reader.read(path) or "").strip()


def _count(reader: Reader, path: str) -> int:
    content = _text(reader, path)
    return int(content) if content.isdecimal() else 0
