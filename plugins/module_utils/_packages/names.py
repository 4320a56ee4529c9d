# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Package names and name patterns."""

from __future__ import annotations

import fnmatch
import typing as t

# Names of the driver's packages in any catalogue of role driver, which a test compares.
DRIVER = (
    *("nvidia-utils*", "nvidia-compute-utils*", "libnvidia-compute*", "nvidia-dkms*", "nvidia-headless-no-dkms-*"),
    *("nvidia-kernel-*dkms", "nvidia-open-kernel-dkms", "nvidia-driver-cuda", "nvidia-persistenced", "nvidia-smi"),
    *("libcuda1", "nvidia-fabric*manager*", "libnvidia-nscq*", "kmod-nvidia-*dkms", "nvidia-open-kmod"),
    *("nvidia-driver-G0[0-9]*", "nvidia-open-driver-G0[0-9]*", "linux-modules-nvidia-*"),
)


def matches_any(name: str, patterns: t.Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def described(version: str, held: bool) -> str:
    """Return a package's line in a diff."""
    return f"{version}, held\n" if held else f"{version}\n"
