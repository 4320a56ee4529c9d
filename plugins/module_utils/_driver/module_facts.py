# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the sections ``dkms`` and ``log``: the driver's modules in dkms' tree and in the kernel's log."""

from __future__ import annotations

import re
import typing as t

from .._host.cached_reader import names
from .._host.system import System, target
from .types import DkmsModule, KernelLog

TREE = "/var/lib/dkms"
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
# A module that Secure Boot or lockdown rejected.
REJECTED = re.compile(
    r"Key was rejected by service"
    r"|Loading of (?:unsigned module|module with unavailable key) is rejected"
    r"|unsigned module loading is restricted"
)
# The message spans lines, each with its own prefix.
UNSUPPORTED = re.compile(r"not supported by (?:the )?(?:NVIDIA )?open\b")
REQUIRED = re.compile(r"requires use of (?:the )?NVIDIA open kernel modules")


def dkms(system: System) -> list[DkmsModule]:
    """Return dkms' modules by its own tree: the command is a shell script that takes a second for a few kernels."""
    rows: list[DkmsModule] = []
    for module in names(system, TREE):
        folder = f"{TREE}/{module}"
        for version in names(system, folder):
            if system.exists(f"{folder}/{version}/source"):
                found = _states(system, folder, version)
                rows += [
                    {"module": module, "version": version, "kernel": release, "state": state}
                    for release, state in sorted(found.items())
                ] or [{"module": module, "version": version, "kernel": "", "state": "added"}]
    return rows


def _states(system: System, folder: str, version: str) -> dict[str, str]:
    """Return the state of a module for each kernel."""
    found = {}
    for release in names(system, f"{folder}/{version}"):
        if release not in ("source", "build") and any(
            system.exists(f"{folder}/{version}/{release}/{arch}/module")
            for arch in names(system, f"{folder}/{version}/{release}")
        ):
            found[release] = "built"
    for name in names(system, folder):
        # kernel-<release>-<arch> links to <version>/<release it was built for>/<arch>.
        path = target(system, f"{folder}/{name}").split("/") if name.startswith("kernel-") else []
        if path[-3:-2] == [version]:
            release = name[len("kernel-") : -len("-" + path[-1])]
            found[release] = "installed" if path[-2] == release else "installed-weak"
    return found


def log(system: System, interesting: bool) -> KernelLog:
    """Return the driver's errors in the kernel's log since boot.

    :param interesting: there is a card or a driver; otherwise the log isn't read.
    """
    out = system.run(["dmesg"], timeout=10).out if interesting else ""
    return {
        "xids": [{"address": address, "code": code} for address, code in dict.fromkeys(xids(out))],
        "key_rejected": bool(REJECTED.search(out)),
        "unsupported_by_open": bool(UNSUPPORTED.search(out)),
        "requires_open": bool(REQUIRED.search(out)),
    }


def xids(out: str) -> t.Iterator[tuple[str, int]]:
    """Yield address and code of each Xid; the driver leaves out the address' function."""
    for address, code in XID.findall(out):
        yield (address if "." in address else f"{address}.0").lower(), int(code)
