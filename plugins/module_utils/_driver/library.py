# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The versions of the installed and of the loaded driver, by files alone, and the record of a node's maintenance."""

from __future__ import annotations

import re
import typing as t

from .._host.cached_reader import text
from .._host.system import System, target

MODULE = "/sys/module/nvidia"
PROC = "/proc/driver/nvidia"
LIBRARY = "libnvidia-ml.so.1"
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
)


def library_version(system: System, root: str = "/") -> str:
    """Return the version in the name of the file that programs load as NVML; empty where there is none.

    :param root: of the driver's files.
    """
    for folder in LIBRARIES:
        path = target(system, f"{root.rstrip('/')}{folder}/{LIBRARY}")
        match = re.search(r"/libnvidia-ml\.so\.(\d+\.[\d.]*\d)$", path)
        if match and system.exists(path):
            return match.group(1)
    return ""


def loaded_version(system: System) -> str:
    """Return the version of the loaded kernel module; empty where none is loaded."""
    version = text(system, f"{MODULE}/version")
    if version:
        return version
    match = re.search(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]+)", text(system, f"{PROC}/version"))
    return match.group(1) if match else ""


class CardInformation(t.NamedTuple):
    """What the driver tells about a card in /proc.

    :param uuid: in lower case; empty where it isn't known.
    :param minor: N of /dev/nvidiaN, which may differ from the card's index; None where it isn't known.
    """

    uuid: str
    minor: int | None


UNKNOWN_UUID = "?"


def card_information(system: System, address: str) -> CardInformation:
    """Return what NVIDIA's driver tells about a card that it has.

    The driver knows the UUID only after the card's first use, and writes question marks before.
    """
    content = text(system, f"{PROC}/gpus/{address}/information")
    uuid = re.search(r"^GPU UUID:\s*(GPU-\S+)", content, re.MULTILINE)
    minor = re.search(r"^Device Minor:\s*(\d+)", content, re.MULTILINE)
    known = uuid.group(1).lower() if uuid and UNKNOWN_UUID not in uuid.group(1) else ""
    return CardInformation(known, int(minor.group(1)) if minor else None)


# Which services to start again, written before the first one stops.
RECORD = "/var/lib/kubegpu-share/kernel-driver.json"


def unfinished(system: System) -> bool:
    """Return whether an interrupted run left services stopped."""
    return system.exists(RECORD)
