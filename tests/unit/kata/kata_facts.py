# SPDX-License-Identifier: GPL-3.0-or-later
"""``gpu_node.passthrough`` of machines whose cards VFIO has, and what the sandbox device plugin writes of them."""

from __future__ import annotations

import dataclasses

from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import Before, Function, Record

VFIO = {"driver": "vfio-pci", "module": "vfio_pci", "override": "vfio-pci"}
SWITCH = {"device": "0x22a3", "kind": "0x068000"}


def function(address="0000:3b:00.0", group="12", device="0x2236", kind="0x030200", **more):
    return Function(address, "0x10de", device, kind, group=group, **{**VFIO, **more})


def facts(*functions, recorded=()):
    """A node's facts, as far as the plan reads them.

    :param recorded: addresses of functions that role passthrough has in its record.
    """
    record = Record(tuple(Before(address, "0x10de", "0x2236", "nvidia", "nvidia", "") for address in recorded))
    rows = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(one).items()}
        for one in functions
    ]
    return {"passthrough": {"functions": rows, "record": record.text() if recorded else None}}


def specification(*groups, kind="nvidia.com/pgpu"):
    """The plugin's file, as its library writes it (orderedyaml with the fields' own order)."""
    lines = ["---", "cdiVersion: 0.5.0", f"kind: {kind}", "devices:"]
    for group in groups:
        lines += [f'- name: "{group}"', "  containerEdits:", "    deviceNodes:", "    - path: /dev/vfio/vfio"]
        lines.append(f"    - path: /dev/vfio/{group}")
    return "\n".join([*lines, "containerEdits: {}", ""])
