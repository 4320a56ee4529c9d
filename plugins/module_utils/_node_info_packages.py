# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Installed packages, of whichever kind a machine's are."""

from __future__ import annotations

import fnmatch
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _apt_observe as apt
from ansible_collections.kubegpu.share.plugins.module_utils import _rpm_observe as rpm
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

# Of some hundred packages these are told of.
TOLD = (
    "*nvidia*",
    "*cuda*",
    "*nvlsm*",
    "*libnvsdm*",
    "infiniband-diags",
    "linux-headers-*",
    "kernel*-devel*",
    "kernel-headers*",
    "kernel-syms*",
    "dkms",
)
RPM_FAMILIES = ("redhat", "suse")


def observe(system: System, family: str, native: str) -> Json:
    """The sections ``apt`` and ``rpm``, of which one is None, and all ``packages``.

    :param family: the distribution's, whose own database counts: the other's tools may be installed beside it.
    :param native: dpkg's name of the machine's own architecture.
    """
    if family in RPM_FAMILIES or not system.exists(apt.STATUS):
        found = rpm.observe(system)
        if found["rpm"] is not None:
            return {"apt": None, "rpm": found["rpm"], "packages": found["packages"]}
    seen = apt.observe(system, native)
    return {"apt": seen["apt"], "rpm": None, "packages": seen["packages"]}


def told(packages: Json, patterns: t.Sequence[str]) -> Json:
    """Those packages that anybody asks for."""
    wanted = (*TOLD, *patterns)
    return {
        name: package
        for name, package in packages.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)
    }
