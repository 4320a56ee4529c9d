# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Package names and name patterns."""

from __future__ import annotations

import fnmatch
import re
import typing as t

# Names of the driver's packages in any catalogue of role driver, which a test compares.
DRIVER = (
    *("nvidia-utils*", "nvidia-compute-utils*", "libnvidia-compute*", "nvidia-dkms*", "nvidia-headless-no-dkms-*"),
    *("nvidia-kernel-*dkms", "nvidia-open-kernel-dkms", "nvidia-driver-cuda", "nvidia-persistenced", "nvidia-smi"),
    *("libcuda1", "nvidia-fabric*manager*", "libnvidia-nscq*", "kmod-nvidia-*dkms", "nvidia-open-kmod"),
    *("nvidia-driver-G0[0-9]*", "nvidia-open-driver-G0[0-9]*", "linux-modules-nvidia-*"),
)
# Metapackages that bring the next kernel of a flavour, and those that bring its headers, by how their names begin:
# linux-image-generic-hwe-22.04 goes with linux-headers-generic-hwe-22.04. A kernel's own package has its whole release.
HEADERS_OF_KERNELS = {
    "linux-image-": "linux-headers-",
    "proxmox-default-kernel": "proxmox-default-headers",
    "proxmox-kernel-": "proxmox-headers-",
    "pve-kernel-": "pve-headers-",
}
_KERNEL = re.compile(r"[0-9]+[.][0-9]+[.][0-9]+|^(unsigned|extra)-|-(dbg|signed|template)$")


def followed(packages: t.Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the installed metapackages of kernels: of each the flavour, and the metapackage of its headers."""
    followers = {}
    for name in packages:
        for start, headers in HEADERS_OF_KERNELS.items():
            if name.startswith(start) and not _KERNEL.search(name[len(start) :]):
                followers[name] = (name[len(start) :], headers + name[len(start) :])
    return followers


def matches_any(name: str, patterns: t.Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def described(version: str, held: bool) -> str:
    """Return a package's line in a diff."""
    return f"{version}, held\n" if held else f"{version}\n"
