# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated hardware of a GPU node: the GPUs that the simulated driver reads, and the PCI devices."""

from __future__ import annotations

import uuid
from pathlib import Path

from lab.shell import run

NAMESPACE = uuid.UUID("6d8f2a0e-3c1b-5e57-9a44-6b67707573fa")
# 0x1eb8 is a Tesla T4, 0x030200 a 3D controller.
PCI = {
    "vendor": "0x10de",
    "device": "0x1eb8",
    "class": "0x030200",
    "subsystem_vendor": "0x10de",
    "subsystem_device": "0x12a2",
    "revision": "0xa1",
    "irq": "0",
    "numa_node": "-1",
    "enable": "1",
    "modalias": "pci:v000010DEd00001EB8sv000010DEsd000012A2bc03sc02i00",
}


def card_uuid(node: str, index: int) -> str:
    """Return a GPU's UUID, which is the same in every lab."""
    return f"GPU-{uuid.uuid5(NAMESPACE, f'{node}/{index}')}"


def bus_address(index: int) -> str:
    return f"0000:{index + 1:02x}:00.0"


def card_name(mib: int) -> str:
    """Return a name that says that the GPU is simulated, with its size in whole GiB, as vendors' names have it."""
    size = f"{mib // 1024}GiB" if mib >= 1024 else f"{mib}MiB"
    return f"Simulated_NVIDIA_GPU_{size}"


def cards_file(node: str, cards: int, mib: int, driver_version: str) -> str:
    """Return the file that stands in for the hardware."""
    lines = [
        f"# The simulated GPUs of {node}; the driver's stand-in reads this again whenever it changes.",
        f"driver {driver_version}",
        "cuda 13000",
    ]
    for index in range(cards):
        facts = {"minor": index, "memory": mib, "bus": bus_address(index), "name": card_name(mib)}
        words = " ".join(f"{name}={value}" for name, value in facts.items())
        lines.append(f"card {index} uuid={card_uuid(node, index)} {words}")
    return "\n".join(lines) + "\n"


def write_node(folder: Path, node: str, cards: int, mib: int, driver_version: str) -> None:
    """Fill a node's folder: hardware/ and pci/ (empty on a node without GPUs)."""
    pci = folder / "pci"
    pci.mkdir(parents=True, exist_ok=True)
    if not cards:
        return
    hardware = folder / "hardware"
    hardware.mkdir(parents=True, exist_ok=True)
    (hardware / "cards").write_text(cards_file(node, cards, mib, driver_version))
    for index in range(cards):
        device = pci / bus_address(index)
        device.mkdir(exist_ok=True)
        for name, value in PCI.items():
            (device / name).write_text(value + "\n")


def group_library(target: Path) -> Path:
    """Compile what answers for VFIO's groups where cards change drivers, for a node of this machine's own release."""
    source = Path(__file__).resolve().parent / "driver" / "vfio_group.c"
    run(["gcc", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared", "-o", str(target), str(source), "-ldl"])
    return target
