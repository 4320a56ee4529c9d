# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the packages sections of ``gpu_node``, with whichever package manager the node has."""

from __future__ import annotations

import typing as t

from .._host.system import System
from . import apt_query as apt
from . import rpm_query as rpm
from .names import matches_any
from .types import InstalledPackage, PackageFacts

# Of several hundred packages gpu_node lists these.
REPORTED = (
    "*nvidia*",
    "*cuda*",
    "*nvlsm*",
    "*libnvsdm*",
    "infiniband-diags",
    "linux-headers-*",
    "linux-image-*",
    "proxmox-*",
    "pve-headers*",
    "pve-kernel-*",
    "kernel*-devel*",
    "kernel-headers*",
    "kernel-syms*",
    "dkms",
)
RPM_FAMILIES = ("redhat", "suse")


def observe(system: System, family: str, native: str) -> PackageFacts:
    """Return the sections ``apt``, ``rpm`` and all ``packages``.

    :param family: the distribution's family, whose own database counts: tools of the other may be installed beside it.
    :param native: dpkg's name of the machine's architecture.
    """
    if family in RPM_FAMILIES or not system.exists(apt.STATUS):
        section, packages = rpm.observe(system)
        if section is not None:
            return {"apt": None, "rpm": section, "packages": packages}
    apt_section, packages = apt.observe(system, native)
    return {"apt": apt_section, "rpm": None, "packages": packages}


def reported(packages: t.Mapping[str, InstalledPackage], patterns: t.Sequence[str]) -> dict[str, InstalledPackage]:
    """Return the packages that ``gpu_node`` lists.

    :param patterns: of further package names.
    """
    wanted = (*REPORTED, *patterns)
    return {name: package for name, package in packages.items() if matches_any(name, wanted)}
