# SPDX-License-Identifier: GPL-3.0-or-later
"""What runs in the guest at the end of each boot: it looks, runs the roles' modules, and prints JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils._driver.nouveau_apply import Image
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import files
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import restore, sysfs
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu.machine import RealMachine
from fakes import ALONE, DEVICES, driver_of, killed, module

CARDS = [f"0000:{bus:02x}:00.0" for bus in ALONE]
FIRST, TWIN, MIXED, INSTANCES = CARDS
AUDIO = FIRST.replace(".0", ".1")
UNIT = "kubegpu-share-vgpu.service"
# Two sizes on one card, and types of GPU instances on the other one: each needs what enabling the functions forgets.
LAYOUTS = {
    "version": "v1",
    "vgpu-configs": {
        # The first card's functions then have their types in an order that no boot would give them by the types alone.
        "first": [{"devices": [2], "vgpu-devices": {"A10-4Q": 1, "A10-12Q": 1}}],
        "second": [{"devices": [2], "vgpu-devices": {"A10-4Q": 2}}],
        "mine": [
            {"devices": [2], "vgpu-devices": {"A10-4Q": 2, "A10-12Q": 1}},
            {"devices": [3], "vgpu-devices": {"A10-1-6C": 2}},
        ],
    },
}
PRESENT: dict[str, dict[str, Any]] = {
    "nouveau": {},
    "pci_binding": {"cards": [FIRST], "live": False},
    "vgpu": {"layout": "mine", "layouts": LAYOUTS},
}


def look() -> dict[str, Any]:
    """Return what this boot has made of the machine."""
    seen = [sysfs.card(restore.Local(), address) for address in CARDS]
    shown = subprocess.run(
        ["systemctl", "show", UNIT, "--property=ActiveState,Result,UnitFileState,ExecMainStatus"],
        capture_output=True,
        text=True,
        check=True,
    )
    log = subprocess.run(["journalctl", "-q", "-o", "cat", "-u", UNIT], capture_output=True, text=True, check=False)
    return {
        "early": modules("/run/modules-of-initramfs"),
        "late": modules("/proc/modules"),
        "drivers": {address: driver_of(address) for address in (*CARDS, AUDIO)},
        "overrides": {address: (DEVICES / address / "driver_override").read_text().strip() for address in CARDS},
        "virtual": {card.address: len(card.virtual) for card in seen},
        "vgpus": {card.address: [[vgpu.function, vgpu.name] for vgpu in card.vgpus] for card in seen},
        "set": {
            address: [(DEVICES / address / "simulated" / name).read_text().strip() for name in ("mixed", "mig")]
            for address in (MIXED, INSTANCES)
        },
        "unit": dict(line.split("=", 1) for line in shown.stdout.splitlines()),
        "log": log.stdout,
    }


def modules(path: str) -> list[str]:
    return [line.split()[0] for line in Path(path).read_text().splitlines()]


def run(name: str, **given: Any) -> dict[str, Any]:
    """Run a module, and say on the console how long it took."""
    began = time.monotonic()
    result = module(name, **given)
    print(f"{name} {given.get('state', 'present')}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return result


def stopped() -> None:
    """Have earlier layouts, and runs that were killed on the way: what comes next completes what they have begun."""
    for layout in ("first", "second"):
        run("vgpu", layout=layout, layouts=LAYOUTS)
    killed(RealMachine, "put", lambda *_arguments: True, "vgpu", **PRESENT["vgpu"])
    binding = PRESENT["pci_binding"]
    killed(RealSystem, "write", lambda _system, path, *_more: path == files.RULE, "pci_binding", **binding)
    killed(Image, "rebuild", lambda _image: True, "pci_binding", first=True, **binding)


def main(step: str) -> None:
    report: dict[str, Any] = {"seen": look()}
    if step == "apply":
        stopped()
        report["stopped"] = look()
    if step != "look":
        report["present"] = {name: run(name, **given) for name, given in PRESENT.items()}
        report["now"] = look()
    if step == "again_and_undo":
        killed(Image, "rebuild", lambda _image: True, "pci_binding", first=True, state="absent")
        report["absent"] = {name: run(name, state="absent") for name in PRESENT}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
