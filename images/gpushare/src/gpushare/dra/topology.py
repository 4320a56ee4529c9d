# SPDX-License-Identifier: GPL-3.0-or-later
"""Read from sysfs where a card is plugged in."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")


def pcie_root(sysfs: Path, bus: str) -> str:
    """Return the PCIe root of a device as the standard attribute has it, for example ``pci0000:00``; empty if unknown.

    :param sysfs: where sysfs is mounted.
    :param bus: the device's PCI address.
    """
    link = sysfs / "bus" / "pci" / "devices" / bus
    try:
        parts = link.resolve(strict=True).parts if bus else ()
    except (OSError, RuntimeError):
        return ""
    return next((part for part in parts if _ROOT.fullmatch(part)), "")
