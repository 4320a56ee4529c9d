# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what matters of a Kata shim's configuration: single values of a TOML file and of its drop-ins.

Nodes have no TOML library, and these are plain keys with plain values, each on a line (kata-containers 4.1.0,
src/runtime/config/configuration-qemu-nvidia-gpu.toml.in). Files in config.d beside it are read after it, in their order
(src/runtime/pkg/katautils/config.go).
"""

from __future__ import annotations

import posixpath
import re

from .._host.system import System

DROP_INS = "config.d"
_TABLE = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\"-]+)\s*\]\s*(#.*)?$")
_PAIR = re.compile(r"^\s*([A-Za-z0-9_-]+)\s*=\s*(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^#\s]+)\s*(#.*)?$")


def parse(text: str) -> dict[str, str]:
    """Return single values by table and key, as ``hypervisor.qemu.pcie_root_port``; strings without their quotes."""
    found: dict[str, str] = {}
    table = ""
    for line in text.splitlines():
        if header := _TABLE.match(line):
            table = header[1].replace('"', "")
        elif pair := _PAIR.match(line):
            found[f"{table}.{pair[1]}" if table else pair[1]] = pair[2].strip("\"'")
    return found


def read(system: System, path: str) -> dict[str, str] | None:
    """Return the values of a configuration and its drop-ins; None where it isn't there."""
    text = system.read(path)
    if text is None:
        return None
    values = parse(text)
    folder = posixpath.join(posixpath.dirname(path), DROP_INS)
    for name in system.names(folder):
        if name.endswith(".toml"):
            values.update(parse(system.read(f"{folder}/{name}") or ""))
    return values


def hypervisor(values: dict[str, str], key: str) -> str:
    """Return a value of the hypervisor's table, whichever hypervisor it is; empty where it isn't there."""
    for name in sorted(values):
        parts = name.split(".")
        if parts[0] == "hypervisor" and len(parts) == 3 and parts[2] == key:
            return values[name]
    return ""
