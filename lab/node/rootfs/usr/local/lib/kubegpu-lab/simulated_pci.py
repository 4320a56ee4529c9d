# SPDX-License-Identifier: GPL-3.0-or-later
"""SIMULATION. Gives a lab node PCI cards that can change drivers, until it ends: files over sysfs, and VFIO's in /dev.

It takes the cards as /sys/bus/pci/devices shows them, gives each an audio function and an IOMMU group, and answers in
the place of /sys/bus/pci and /sys/kernel/iommu_groups. VFIO's device files are there while a group's function is on
vfio-pci; each is another /dev/null. Who has one open is taken for a virtual machine that has the card: until it is
closed, an unbind waits. The simulated NVIDIA module makes and removes its own files.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pci_files
from pci_bus import NVIDIA, VFIO, Bus, Function, with_audio

STATE = Path("/run/kubegpu-lab/pci")
PCI, GROUPS, DEVICES = Path("/sys/bus/pci"), Path("/sys/kernel/iommu_groups"), Path("/dev/vfio")
MODULE = "/usr/lib/nvidia-sim/nvidia-sim"
LOADED = Path("/proc/driver/nvidia/version")
NULL = os.makedev(1, 3)


def cards(folder: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return each card's plain files, and the drivers of those that have one, by address."""
    fields, drivers = {}, {}
    for device in sorted(folder.iterdir()):
        fields[device.name] = {
            one.name: one.read_text().strip() for one in device.iterdir() if one.is_file() and not one.is_symlink()
        }
        if (device / "driver").is_symlink():
            drivers[device.name] = os.readlink(device / "driver").rpartition("/")[2]
    return fields, drivers


def is_open(path: Path) -> bool:
    """Test whether a process has a file open."""
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(handle) == str(path):
                return True
        except OSError:
            # It has ended, or closed the file.
            continue
    return False


def _device(path: Path, mode: int) -> None:
    path.unlink(missing_ok=True)
    os.mknod(path, stat.S_IFCHR | mode, NULL)
    path.chmod(mode)


class Node:
    """What a change of drivers changes beside sysfs."""

    def __init__(self) -> None:
        self.bus: Bus | None = None
        self._lock = threading.Lock()

    def group(self, function: Function) -> Path:
        return DEVICES / str(function.group)

    def held(self, function: Function) -> bool:
        return function.driver == VFIO and is_open(self.group(function))

    def moved(self, function: Function, old: str) -> None:
        assert self.bus is not None
        with self._lock:
            if VFIO in (function.driver, old):
                members = [one for one in self.bus.functions() if one.group == function.group]
                if not any(one.driver == VFIO for one in members):
                    self.group(function).unlink(missing_ok=True)
                elif not self.group(function).exists():
                    _device(self.group(function), 0o600)
            if NVIDIA in (function.driver, old):
                _start_module()


def _start_module() -> None:
    """Have the simulated module make and remove its files as the cards' drivers are now."""
    if os.access(MODULE, os.X_OK):
        subprocess.run([MODULE, "start"], check=False, stdin=subprocess.DEVNULL)


def main() -> None:
    node = Node()
    found, drivers = cards(PCI / "devices")
    if not found:
        sys.exit("simulated_pci: this node has no simulated card")
    node.bus = Bus(with_audio(found, drivers), node.held, node.moved)
    STATE.mkdir(parents=True, exist_ok=True)
    files = pci_files.Files(node.bus.tree, STATE)
    server = threading.Thread(target=files.serve, daemon=True)
    server.start()
    DEVICES.mkdir(exist_ok=True)
    _device(DEVICES / "vfio", 0o666)
    pci_files.bind(STATE / "pci", PCI)
    pci_files.bind(STATE / "iommu_groups", GROUPS)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    notify(b"READY=1")
    while server.is_alive() and not stop.wait(0.5):
        pass


def end() -> None:
    """Show what was there before, also after a server that was killed."""
    for place in (GROUPS, PCI, STATE):
        pci_files.unmount(place)
    for path in DEVICES.glob("*"):
        path.unlink()
    if DEVICES.is_dir():
        DEVICES.rmdir()
    # The folder that is seen again has the drivers of the time before.
    for link in (PCI / "devices").glob("*/driver"):
        link.unlink()
    if LOADED.exists():
        _start_module()


def notify(text: bytes) -> None:
    """Tell systemd, if it has started this."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(text, address.replace("@", "\0", 1))


if __name__ == "__main__":
    end() if sys.argv[1:] == ["end"] else main()
