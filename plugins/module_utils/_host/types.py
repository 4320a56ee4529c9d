# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes of the sections of ``gpu_node`` that say which machine it is: system, hardware, security."""

from __future__ import annotations

import typing as t

# Texts that choose a file or a program on other machines, too: observations.py holds the forms on the controller.
Word = t.Annotated[str, r"[A-Za-z0-9][A-Za-z0-9._+-]*"]
Number = t.Annotated[str, r"[A-Za-z0-9 ._+~-]*"]
Folder = t.Annotated[str, r"/|(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)+"]
PciAddress = t.Annotated[str, r"[0-9a-f]{4,8}(:[0-9a-f]{2}){2}\.[0-7]"]


class Distribution(t.TypedDict):
    """An unknown ``family`` is the distribution's own id; ``arch`` is dpkg's name of the architecture."""

    id: Word
    name: str
    version: Number
    major: int
    codename: str
    family: Word
    arch: Word


class PythonInterpreter(t.TypedDict):
    version: str
    executable: str


class Compiler(t.TypedDict):
    """Versions of gcc: the one that built the running kernel, and the installed one; empty where there is none."""

    kernel: str
    gcc: str


class KernelModules(t.TypedDict):
    """Whether a kernel has headers to build modules with, and whether it finds an nvidia module."""

    headers: bool
    nvidia: bool


class Kernel(t.TypedDict):
    """``installed`` are the releases in /boot without rescue kernels: none in a container."""

    release: str
    installed: list[str]
    headers: bool
    compiler: Compiler
    modules: dict[str, KernelModules]
    command_line: str


class Security(t.TypedDict):
    selinux: str
    apparmor: bool


class MachineOwnerKey(t.TypedDict):
    """``key`` is the certificate that modules built here are signed with; None is unknown."""

    key: str
    enrolled: bool | None
    pending: bool | None


class Service(t.TypedDict):
    active: bool
    enabled: bool


class PciLink(t.TypedDict):
    speed: str | None
    width: str | None
    max_speed: str | None
    max_width: str | None


# A card; ``driver`` is what it is bound to, ``vgpu``: a slice of a card. The class syntax can't have "class".
PciGpu = t.TypedDict(
    "PciGpu",
    {
        "class": str,
        "address": PciAddress,
        "vendor": str,
        "device": str,
        "driver": "str | None",
        "generation": str,
        "vgpu": bool,
        "link": PciLink,
    },
)


class ExcludedCard(t.TypedDict):
    """A card that the user keeps from Kubernetes, and the entry of ``gpu_exclude`` that names it."""

    address: str
    uuid: str
    name: str
    entry: str


class Excluded(t.TypedDict):
    """``unmatched`` are the entries that name no card; ``unnamed``: a card's UUID or model isn't known now."""

    cards: list[ExcludedCard]
    unmatched: list[str]
    unnamed: bool


class NvSwitch(t.TypedDict):
    address: PciAddress
    device: str
    driver: str | None


class DeviceFiles(t.TypedDict):
    """The driver's files in /dev; ``char_links`` are those in /dev/char."""

    nodes: list[str]
    uvm: bool
    char_links: bool


class Cgroup(t.TypedDict):
    """``version`` is 0 where there are no control groups."""

    version: int


class Package(t.TypedDict):
    """``origin`` is dpkg's Maintainer or rpm's Vendor; rpm's ``version`` has epoch and release."""

    version: str
    held: bool
    origin: str
