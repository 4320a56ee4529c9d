# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the section ``driver``: by the kernel module, the library and nvidia-smi, and which source installed it."""

from __future__ import annotations

import re
import typing as t

from .._host.cached_reader import names, text
from .._host.system import System
from .._host.types import NvSwitch, Package, PciGpu
from . import nvidia_smi as smi
from . import persistence, provided, runfile
from .library import MODULE, PROC, library_version, loaded_version
from .types import Fabric, InstalledDriver, ModuleFile

FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
INFINIBAND = "/sys/class/infiniband"

# Packages with the kernel module or NVML's library. Two sources of these conflict; of all others they don't.
DRIVER_PACKAGE = re.compile(
    r"(?:akmod|kmod|dkms)-nvidia.*"
    r"|nvidia-(?:dkms|kernel-dkms|open-kernel-dkms|kernel-open-dkms|kernel-source|open-driver|headless).*"
    r"|nvidia-(?:tesla|legacy)-.*-(?:kernel-dkms|driver)"
    r"|nvidia-driver(?:-(?:\d.*|cuda|cuda-libs|libs|bin|NVML|G\d\d.*))?"
    r"|nvidia-(?:compute|gfx|utils|compute-utils)-?(?:G\d\d.*|\d.*)"
    r"|linux-(?:modules|objects)-nvidia-.*"
    r"|libnvidia-(?:compute.*|ml1?|(?:tesla|legacy)-.*-ml1)"
    r"|xorg-x11-drv-nvidia.*"
    r"|nvidia-x11-drv.*"
)
# Words in a package's Maintainer or Vendor that identify its source; the first match counts.
MAKERS = (
    ("rpmfusion", re.compile(r"rpm ?fusion", re.IGNORECASE)),
    ("elrepo", re.compile(r"elrepo", re.IGNORECASE)),
    ("negativo17", re.compile(r"negativo17", re.IGNORECASE)),
    ("distribution", re.compile(r"debian|ubuntu|suse|almalinux|amazon|fedora|red hat|rocky|oracle", re.IGNORECASE)),
    ("nvidia", re.compile(r"nvidia", re.IGNORECASE)),
)
# Packages of Ubuntu's graphics-drivers PPA have Ubuntu's maintainers; only their versions differ.
PPA_VERSION = re.compile(r"~gpu\d")
# Names that only one source uses, for packages without Vendor.
NAMES = (
    ("rpmfusion", re.compile(r"xorg-x11-drv-nvidia.*")),
    ("elrepo", re.compile(r"nvidia-x11-drv.*")),
    ("negativo17", re.compile(r"dkms-nvidia.*")),
)


def driver(system: System, modules: t.Sequence[str], packages: t.Mapping[str, Package]) -> InstalledDriver:
    """Return the section ``driver`` without its fabric manager.

    ``error`` is nvidia-smi's message where it fails or lists a card that it can't read.

    :param modules: names of the driver's modules that the running kernel would load.
    :param packages: all installed packages.
    """
    proc = text(system, f"{PROC}/version")
    provider = provided.find(system)
    seen = smi.ask(system, provider.smi, provider.program) if provider else smi.ask(system)
    root = provider.root if provider else "/"
    for card in seen["cards"]:
        card["minor"] = minor(system, card["address"])
    ours = runfile.record(system)
    modes = [card["persistence"] for card in seen["cards"]]
    return {
        "loaded": system.exists(MODULE),
        "module_version": loaded_version(system) or None,
        "module_open": "Open Kernel Module" in proc if proc else None,
        "library_version": library_version(system, root),
        **module_file(system, modules),
        **seen,
        "persistence": all(modes) if modes and None not in modes else None,
        "persistence_daemon": {
            "enables": persistence.enables(system),
            "masked": persistence.masked(system),
            "files": persistence.own_files(system),
        },
        "runfile": ours._asdict() if ours else None,
        "others": [*([provider.id] if provider else []), *other_managers(system, packages)],
        "root": root,
    }


def module_file(system: System, modules: t.Sequence[str]) -> ModuleFile:
    """Return modinfo's fields of the module that modprobe would load, which may differ from the loaded one."""
    found: dict[str, str] = {}
    if modules:
        done = system.run(["modinfo", modules[0]], timeout=10)
        lines = [re.match(r"(\w+):\s+(.*\S)", line) for line in done.out.splitlines()] if done.rc == 0 else []
        found = {line.group(1): line.group(2) for line in lines if line}
    return {
        "file_version": found.get("version", ""),
        "signer": found.get("signer", ""),
        "license": found.get("license", ""),
    }


def minor(system: System, address: str) -> int | None:
    """Return N of /dev/nvidiaN, which may differ from the card's index."""
    found = re.search(r"^Device Minor:\s*(\d+)", text(system, f"{PROC}/gpus/{address}/information"), re.MULTILINE)
    return int(found.group(1)) if found else None


def fabric(system: System, gpus: t.Sequence[PciGpu], switches: t.Sequence[NvSwitch]) -> Fabric:
    """Return the fabric manager's version, and whether this machine's cards need it."""
    found = None
    if system.exists(FABRIC_MANAGER):
        done = system.run([FABRIC_MANAGER, "-v"], timeout=10)
        found = re.search(r"version is\s*:\s*(\d[\d.]*)", done.out + done.err)
    return {"version": found.group(1) if found else "", "needed": bool(switches) or _hidden_switches(system, gpus)}


def _hidden_switches(system: System, gpus: t.Sequence[PciGpu]) -> bool:
    """Return whether there are Blackwell's NVSwitches: not on PCI, but the VPD of an InfiniBand device has SW_MNG."""
    # VPD is slow to read, so it is read only where such a switch is possible.
    if not any(gpu["generation"] in ("blackwell", "unknown") for gpu in gpus):
        return False
    return any("SW_MNG" in text(system, f"{INFINIBAND}/{name}/device/vpd") for name in names(system, INFINIBAND))


def other_managers(system: System, packages: t.Mapping[str, Package]) -> list[str]:
    """Return the sources that installed a driver on this machine itself: more than one conflict."""
    found = []
    if system.exists("/usr/bin/nvidia-uninstall") or system.exists("/usr/bin/nvidia-installer"):
        found.append("runfile")
    makers = {
        maker(name, package.get("version", ""), package.get("origin", ""))
        for name, package in packages.items()
        if DRIVER_PACKAGE.fullmatch(name)
    }
    return [*found, *sorted(makers - {""})]


def maker(name: str, version: str, origin: str) -> str:
    """Return the source of a driver package; empty where it is unknown."""
    if PPA_VERSION.search(version):
        return "graphics-ppa"
    if origin:
        return next((who for who, pattern in MAKERS if pattern.search(origin)), "")
    return next((who for who, pattern in NAMES if pattern.fullmatch(name)), "")
