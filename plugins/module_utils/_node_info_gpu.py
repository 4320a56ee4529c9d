# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A machine's GPUs: what PCI has, what the driver shows of it, who manages the driver. Sections as plain JSON."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

PCI = "/sys/bus/pci/devices"
PROC = "/proc/driver/nvidia"
NVIDIA = "0x10de"
# VGA and 3D controllers; NVSwitches and audio functions have other classes.
DISPLAY = ("0x0300", "0x0302")
SMI = "/usr/bin/nvidia-smi"
SMI_SECONDS = 20
FIELDS = "index,uuid,name,memory.total,pci.bus_id,driver_version"
CTK = "/usr/bin/nvidia-ctk"
BINARIES = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-cdi-hook")


def gpus(system: System) -> list[Json]:
    """NVIDIA's display devices on PCI and the kernel driver that each is bound to."""
    found = []
    for address in system.names(PCI):
        names = ("vendor", "device", "class")
        device = {name: (system.read(f"{PCI}/{address}/{name}") or "").strip() for name in names}
        if device["vendor"] == NVIDIA and device["class"].startswith(DISPLAY):
            link = system.link(f"{PCI}/{address}/driver")
            found.append({"address": address, **device, "driver": link.rpartition("/")[2] if link else None})
    return found


def driver(system: System) -> Json:
    """The loaded kernel module and what nvidia-smi sees through it.

    ``error`` has nvidia-smi's own words where it fails or shows a card that it can't read.
    """
    text = system.read(f"{PROC}/version") or ""
    version = (system.read("/sys/module/nvidia/version") or "").strip() or _version_in(text)
    seen: Json = {"version": None, "cards": [], "error": None}
    if system.exists(SMI):
        seen = _smi(system)
    return {
        "module_version": version or None,
        "module_open": "Open Kernel Module" in text if text else None,
        **seen,
        "others": other_managers(system),
    }


def _version_in(text: str) -> str:
    found = re.search(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]+)", text)
    return found.group(1) if found else ""


def _smi(system: System) -> Json:
    # timeout(1) ends an nvidia-smi that hangs; one that can't even be killed is left behind after the outer limit.
    argv = ["timeout", "-k", "2", str(SMI_SECONDS), SMI, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    done = system.run(argv, timeout=SMI_SECONDS + 5)
    if done.rc in (124, 137):
        return {"version": None, "cards": [], "error": f"nvidia-smi didn't answer within {SMI_SECONDS} s"}
    rows, other = parse_smi(done.out)
    versions = [row.pop("driver_version") for row in rows]
    for row in rows:
        row["minor"] = minor(system, row["address"])
    words = " ".join([*other, *done.err.split("\n")]).strip()
    if done.rc != 0 and not words:
        words = f"nvidia-smi ended with status {done.rc}"
    return {
        "version": versions[0] if versions else None,
        "cards": rows,
        "error": words if done.rc != 0 or other else None,
    }


def parse_smi(text: str) -> tuple[list[Json], list[str]]:
    """The rows of nvidia-smi's table, and the lines that aren't rows: its complaints."""
    rows: list[Json] = []
    other = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 6 or not fields[0].isdigit() or not fields[1].startswith("GPU-"):
            other.append(line)
            continue
        # A name may hold a comma; everything around it can't.
        memory, bus, version = fields[-3:]
        rows.append(
            {
                "index": int(fields[0]),
                "uuid": fields[1],
                "name": ", ".join(fields[2:-3]),
                "memory_mib": int(memory) if memory.isdigit() else None,
                "address": pci_address(bus),
                "driver_version": version,
            }
        )
    return rows, other


def pci_address(bus: str) -> str:
    """The kernel's form of an address; nvidia-smi writes the domain with eight digits."""
    domain, _colon, rest = bus.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def minor(system: System, address: str) -> int | None:
    """N of /dev/nvidiaN, which needn't be the card's index."""
    found = re.search(r"^Device Minor:\s*(\d+)", system.read(f"{PROC}/gpus/{address}/information") or "", re.MULTILINE)
    return int(found.group(1)) if found else None


def other_managers(system: System) -> list[str]:
    """Who else brings a driver to this machine, beside its package manager."""
    found = []
    if system.exists("/usr/bin/nvidia-uninstall"):
        found.append("runfile")
    # The operator's driver container mounts its root there; the empty folder alone means nothing.
    if system.names("/run/nvidia/driver"):
        found.append("gpu-operator")
    return found


def toolkit(system: System) -> Json:
    """NVIDIA's container toolkit as it answers, not as its packages say."""
    found = None
    if system.exists(CTK):
        found = re.search(r"version\s+v?([0-9]\S*)", system.run([CTK, "--version"], timeout=10).out)
    return {
        "version": found.group(1) if found else None,
        "binaries": [name for name in BINARIES if system.exists(f"/usr/bin/{name}")],
    }
