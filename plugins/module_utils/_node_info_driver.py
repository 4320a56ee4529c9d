# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The driver as a machine has it: by its module, by its library and by NVML, and who brought it. Sections as JSON."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _node_info_smi as smi
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_files import names, target, text
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

PROC = "/proc/driver/nvidia"
MODULE = "/sys/module/nvidia"
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
FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
INFINIBAND = "/sys/class/infiniband"

# Packages that bring the kernel module or NVML's library. Everything else may come from anywhere without harm.
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
# Which words in a package's Maintainer or Vendor tell who made it; the first that fits.
MAKERS = (
    ("rpmfusion", re.compile(r"rpm ?fusion", re.IGNORECASE)),
    ("elrepo", re.compile(r"elrepo", re.IGNORECASE)),
    ("negativo17", re.compile(r"negativo17", re.IGNORECASE)),
    ("distribution", re.compile(r"debian|ubuntu|suse|almalinux|amazon|fedora|red hat|rocky|oracle", re.IGNORECASE)),
    ("nvidia", re.compile(r"nvidia", re.IGNORECASE)),
)
# Ubuntu's graphics-drivers PPA has Ubuntu's own maintainers; only its versions tell.
PPA_VERSION = re.compile(r"~gpu\d")
# Names that only one maker uses, for packages that don't say who made them.
NAMES = (
    ("rpmfusion", re.compile(r"xorg-x11-drv-nvidia.*")),
    ("elrepo", re.compile(r"nvidia-x11-drv.*")),
    ("negativo17", re.compile(r"dkms-nvidia.*")),
)


def driver(system: System, modules: t.Sequence[str], packages: Json) -> Json:
    """The section ``driver`` without its fabric manager.

    ``error`` has nvidia-smi's own words where it fails or shows a card that it can't read.

    :param modules: names of the driver's modules that the running kernel finds.
    :param packages: all installed packages.
    """
    proc = text(system, f"{PROC}/version")
    version = text(system, f"{MODULE}/version") or version_in(proc)
    seen = smi.ask(system)
    for card in seen["cards"]:
        card["minor"] = minor(system, card["address"])
    modes = [card["persistence"] for card in seen["cards"]]
    return {
        "loaded": system.exists(MODULE),
        "module_version": version or None,
        "module_open": "Open Kernel Module" in proc if proc else None,
        "library_version": library_version(system),
        **module_file(system, modules),
        **seen,
        "persistence": all(modes) if modes and None not in modes else None,
        "others": other_managers(system, packages),
    }


def version_in(proc: str) -> str:
    """The version in the words of /proc/driver/nvidia/version."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]+)", proc)
    return found.group(1) if found else ""


def library_version(system: System) -> str:
    """The version in the name of the file that programs load as NVML."""
    for folder in LIBRARIES:
        path = target(system, f"{folder}/{LIBRARY}")
        found = re.search(r"/libnvidia-ml\.so\.(\d+\.[\d.]*\d)$", path)
        if found and system.exists(path):
            return found.group(1)
    return ""


def module_file(system: System, modules: t.Sequence[str]) -> Json:
    """What modinfo says of the module that modprobe would load: it may be another than the one that runs."""
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
    """N of /dev/nvidiaN, which needn't be the card's index."""
    found = re.search(r"^Device Minor:\s*(\d+)", text(system, f"{PROC}/gpus/{address}/information"), re.MULTILINE)
    return int(found.group(1)) if found else None


def fabric(system: System, gpus: t.Sequence[Json], switches: t.Sequence[Json]) -> Json:
    """The fabric manager's version, and whether this machine's cards work only with it."""
    found = None
    if system.exists(FABRIC_MANAGER):
        done = system.run([FABRIC_MANAGER, "-v"], timeout=10)
        found = re.search(r"version is\s*:\s*(\d[\d.]*)", done.out + done.err)
    return {"version": found.group(1) if found else "", "needed": bool(switches) or _hidden_switches(system, gpus)}


def _hidden_switches(system: System, gpus: t.Sequence[Json]) -> bool:
    """NVSwitches since Blackwell aren't on PCI: an InfiniBand device that manages them says so in its product data."""
    # Product data is slow to read, so it is read only where such a switch can be.
    if not any(gpu["generation"] in ("blackwell", "unknown") for gpu in gpus):
        return False
    return any("SW_MNG" in text(system, f"{INFINIBAND}/{name}/device/vpd") for name in names(system, INFINIBAND))


def other_managers(system: System, packages: Json) -> list[str]:
    """Who brings a driver to this machine: at most one of them may."""
    found = []
    if system.exists("/usr/bin/nvidia-uninstall") or system.exists("/usr/bin/nvidia-installer"):
        found.append("runfile")
    # The operator's driver container mounts its root there; the empty folder alone means nothing.
    if names(system, "/run/nvidia/driver"):
        found.append("gpu-operator")
    makers = {
        maker(name, package.get("version", ""), package.get("origin", ""))
        for name, package in packages.items()
        if DRIVER_PACKAGE.fullmatch(name)
    }
    return [*found, *sorted(makers - {""})]


def maker(name: str, version: str, origin: str) -> str:
    """Who made a package of the driver; empty where nothing tells."""
    if PPA_VERSION.search(version):
        return "graphics-ppa"
    if origin:
        return next((who for who, pattern in MAKERS if pattern.search(origin)), "")
    return next((who for who, pattern in NAMES if pattern.fullmatch(name)), "")
