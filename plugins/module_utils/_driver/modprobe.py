# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files that prevent the kernel's own drivers, nouveau and nova, from being loaded."""

from __future__ import annotations

PATH = "/etc/modprobe.d/blacklist-nouveau.conf"
# nouveau's successor in the kernel, in the order of unloading: https://docs.kernel.org/gpu/nova/
# The one that draws was called nova before it was called nova_drm.
NOVA = ("nova", "nova_drm", "nova_core")
# The two lines of NVIDIA's installation guide: the first prevents loading it, the second prevents it from using a GPU.
# The others are there before the kernel is: an update that brings nova would take the cards at its first boot.
DIRECTIVES = ("blacklist nouveau", "options nouveau modeset=0", *(f"blacklist {name}" for name in NOVA))

# dracut puts /etc/modprobe.d only into images for one host. Cloud machines have images for every host, nouveau inside.
DRACUT_PATH = "/etc/dracut.conf.d/kubegpu-nouveau.conf"


# The kernel's own drivers, which keep a card from NVIDIA's, by module; with the name of each at a sentence's beginning.
IN_KERNEL = {"nouveau": "Nouveau", NOVA[-1]: "Nova (nova_core)"}


def module_of(driver: str | None) -> str | None:
    """Return the module of a driver on PCI: nova's has been NovaCore there, and may get its module's name."""
    return NOVA[-1] if driver and driver.lower().replace("-", "").replace("_", "") == "novacore" else driver


def directives(text: str) -> list[str]:
    """Return a modprobe.d file's directives with single blanks, without comments."""
    lines = (" ".join(line.split("#", 1)[0].split()) for line in text.splitlines())
    return [line for line in lines if line]


def blacklisted(text: str) -> bool:
    """Return whether a modprobe.d file prevents loading nouveau."""
    return DIRECTIVES[0] in directives(text)
