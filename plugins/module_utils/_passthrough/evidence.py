# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter to what verify needs to know of cards that virtual machines are to have: the records, files and sysfs.

It reads two files where a node has no such card, and imports nothing of the collection, since every node gets it.
Changes nothing.
"""

from __future__ import annotations

import json
import os
import typing as t

# As the modules of the roles have them: the test reads what those write.
RECORD, VGPU_RECORD = "/var/lib/kubegpu-share/passthrough.json", "/var/lib/kubegpu-share/vgpu.json"
RULE, MODPROBE = "/etc/udev/rules.d/10-kubegpu-vfio.rules", "/etc/modprobe.d/kubegpu-vfio.conf"
HOOK, DRACUT = "/etc/initramfs-tools/hooks/kubegpu-vfio", "/etc/dracut.conf.d/kubegpu-vfio.conf"
PCI, MDEVS = "sys/bus/pci/devices", "sys/bus/mdev/devices"
NVIDIA, DISPLAY, BRIDGES = "0x10de", "0x03", ("0x0604", "0x0600")
# The kernel lets a group be used beside these, and without a driver.
HARMLESS = ("", "pci-stub", "pcieport")


class RecordedFunction(t.TypedDict):
    """A function that role passthrough has given to VFIO.

    ``present``: PCI has it, with the recorded ids. ``foreign``: those of its IOMMU group that keep a virtual machine
    from it, with their drivers. ``ruled``: the udev rule has it.
    """

    address: str
    uuid: str
    present: bool
    driver: str
    group: str
    foreign: list[str]
    ruled: bool


class RecordedVgpus(t.TypedDict):
    """How many vGPUs a card is to have by role vgpu's record, and how many it has."""

    address: str
    wanted: int
    found: int


class Evidence(t.TypedDict):
    """``others``: NVIDIA's cards that no VFIO driver has. ``missing``: files that bind at boot and aren't there."""

    problem: str
    functions: list[RecordedFunction]
    missing: list[str]
    others: int
    vgpus: list[RecordedVgpus]


def evidence(root: str = "/") -> Evidence | None:
    """Return the evidence; None where neither role has recorded anything.

    :param root: of the machine's file system.
    """
    machine = _Machine(root)
    bound, vgpus = machine.text(RECORD), machine.text(VGPU_RECORD)
    if bound is None and vgpus is None:
        return None
    problems = []
    functions: list[RecordedFunction] = []
    cards: list[RecordedVgpus] = []
    try:
        functions = [machine.function(row) for row in json.loads(bound)["functions"]] if bound else []
    except (ValueError, KeyError, TypeError, AttributeError):
        problems.append(f"{RECORD} is no record of this collection")
    try:
        cards = [machine.card(row) for row in json.loads(vgpus)["cards"]] if vgpus else []
    except (ValueError, KeyError, TypeError, AttributeError):
        problems.append(f"{VGPU_RECORD} is no record of this collection")
    missing = [path for path in (RULE, MODPROBE) if machine.text(path) is None] if functions else []
    if functions and machine.text(HOOK) is None and machine.text(DRACUT) is None:
        missing.append(f"{HOOK} or {DRACUT}")
    return {
        "problem": "; ".join(problems),
        "functions": functions,
        "missing": missing,
        "others": machine.others(),
        "vgpus": cards,
    }


class _Machine:
    """What is read; nothing raises."""

    def __init__(self, root: str) -> None:
        self._root = root

    def text(self, path: str) -> str | None:
        try:
            with open(os.path.join(self._root, path.lstrip("/")), encoding="utf-8", errors="replace") as file:
                return file.read(1 << 20)
        except OSError:
            return None

    def _names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self._root, path)))
        except OSError:
            return []

    def _link(self, path: str) -> str:
        try:
            return os.readlink(os.path.join(self._root, path))
        except OSError:
            return ""

    def _field(self, address: str, name: str) -> str:
        return (self.text(f"{PCI}/{address}/{name}") or "").strip()

    def _driver(self, address: str) -> str:
        return os.path.basename(self._link(f"{PCI}/{address}/driver"))

    def function(self, row: t.Mapping[str, t.Any]) -> RecordedFunction:
        address = str(row["address"])
        group = os.path.basename(self._link(f"{PCI}/{address}/iommu_group"))
        members = self._names(f"sys/kernel/iommu_groups/{group}/devices") if group else []
        return {
            "address": address,
            "uuid": str(row.get("uuid") or ""),
            "present": all(self._field(address, name) == row[name] for name in ("vendor", "device")),
            "driver": self._driver(address),
            "group": group,
            "foreign": [f"{one} ({self._driver(one)})" for one in members if self._is_foreign(one)],
            "ruled": f'KERNEL=="{address}"' in (self.text(RULE) or ""),
        }

    def _is_foreign(self, address: str) -> bool:
        driver = self._driver(address)
        return driver not in HARMLESS and "vfio" not in driver and not self._field(address, "class").startswith(BRIDGES)

    def others(self) -> int:
        cards = [
            address
            for address in self._names(PCI)
            if self._field(address, "vendor") == NVIDIA
            and self._field(address, "class").startswith(DISPLAY)
            and not self._link(f"{PCI}/{address}/physfn")
        ]
        return sum("vfio" not in self._driver(address) for address in cards)

    def card(self, row: t.Mapping[str, t.Any]) -> RecordedVgpus:
        """Count the vGPUs of a recorded card: mediated devices, and virtual functions with a type."""
        card = str(row["address"])
        virtual = [
            os.path.basename(self._link(f"{PCI}/{card}/{name}"))
            for name in self._names(f"{PCI}/{card}")
            if name.startswith("virtfn")
        ]
        functions = {card, *virtual} - {""}
        mediated = [self._link(f"{MDEVS}/{name}").split("/")[-2:-1] for name in self._names(MDEVS)]
        typed = [one for one in functions if self._field(one, "nvidia/current_vgpu_type") not in ("", "0")]
        found = len(typed) + sum(parent[0] in functions for parent in mediated if parent)
        return {"address": card, "wanted": sum(row["wanted"].values()), "found": found}
