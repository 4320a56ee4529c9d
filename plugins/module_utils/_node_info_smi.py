# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What nvidia-smi says: the cards, or in its own words why it can't show them."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._system import Done, System

Json = t.Dict[str, t.Any]

SMI = "/usr/bin/nvidia-smi"
SECONDS = 20
# The name comes third: it may hold a comma, and everything around it can't.
FIELDS = ("index", "uuid", "name", "memory.total", "pci.bus_id", "driver_version")
# Drivers older than the field refuse the whole question; it is asked again without it.
NEWER_FIELDS = ("persistence_mode", "mig.mode.current")
REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')

# nvidia-smi's words for NVML's return codes, as nvmlErrorString has them, and its own where it says more.
WORDS = (
    ("driver/library version mismatch", 18),
    ("nvml/rm version mismatch", 18),
    ("couldn't communicate with the nvidia driver", 9),
    ("driver not loaded", 9),
    ("couldn't find libnvidia-ml", 12),
    ("library not found", 12),
    ("function not found", 13),
    ("gpu is lost", 15),
    ("gpu requires reset", 16),
    ("insufficient permissions", 4),
    ("insufficient external power", 8),
    ("no devices were found", 6),
    ("not found", 6),
    ("corrupted", 14),
    ("operating system", 17),
    ("in use by another client", 19),
    ("insufficient memory", 20),
    ("timeout", 10),
    ("not supported", 3),
    ("uninitialized", 1),
    ("unknown error", 999),
)


def ask(system: System) -> Json:
    """nvidia-smi's answer: ``version``, ``cards``, ``code`` and ``error``; all empty where it isn't installed."""
    if not system.exists(SMI):
        return {"version": None, "cards": [], "code": None, "error": None}
    fields = [*FIELDS, *NEWER_FIELDS]
    for _newer in NEWER_FIELDS:
        done = _query(system, fields)
        refused = REFUSED.search(done.out + done.err)
        if refused is None or refused.group(1) not in NEWER_FIELDS or refused.group(1) not in fields:
            return told(done, fields)
        fields.remove(refused.group(1))
    return told(_query(system, fields), fields)


def _query(system: System, fields: t.Sequence[str]) -> Done:
    # timeout(1) ends an nvidia-smi that hangs; one that can't even be killed is left behind after the outer limit.
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return system.run(["timeout", "-k", "2", str(SECONDS), SMI, *query], timeout=SECONDS + 5)


def told(done: Done, fields: t.Sequence[str]) -> Json:
    """What an ended nvidia-smi said."""
    if done.rc in (124, 137):
        error = f"nvidia-smi didn't answer within {SECONDS} s"
        return {"version": None, "cards": [], "code": None, "error": error}
    rows, other = parse(done.out, fields)
    versions = [row.pop("driver_version") for row in rows]
    words = " ".join([*other, *done.err.split("\n")]).strip()
    if done.rc != 0 and not words:
        words = f"nvidia-smi ended with status {done.rc}"
    failed = done.rc != 0 or bool(other)
    return {
        "version": versions[0] if versions else None,
        "cards": rows,
        "code": code_in(words) if failed else 0,
        "error": words if failed else None,
    }


def code_in(words: str) -> int | None:
    """NVML's return code that these words stand for."""
    lower = words.lower()
    return next((code for part, code in WORDS if part in lower), None)


def parse(text: str, fields: t.Sequence[str]) -> tuple[list[Json], list[str]]:
    """The rows of nvidia-smi's table, and the lines that aren't rows: its complaints."""
    rows: list[Json] = []
    other = []
    behind = fields[3:]
    for line in filter(None, (line.strip() for line in text.splitlines())):
        values = [value.strip() for value in line.split(",")]
        if len(values) < len(fields) or not values[0].isdigit() or not values[1].startswith("GPU-"):
            other.append(line)
            continue
        last = dict(zip(behind, values[-len(behind) :]))
        memory = last["memory.total"]
        rows.append(
            {
                "index": int(values[0]),
                "uuid": values[1],
                "name": ", ".join(values[2 : -len(behind)]),
                "memory_mib": int(memory) if memory.isdigit() else None,
                "address": pci_address(last["pci.bus_id"]),
                "driver_version": last["driver_version"],
                "persistence": switched(last.get("persistence_mode")),
                "mig": switched(last.get("mig.mode.current")),
            }
        )
    return rows, other


def switched(word: str | None) -> bool | None:
    """A mode; None where the card has none or can't say."""
    return {"Enabled": True, "Disabled": False}.get(word or "")


def pci_address(bus: str) -> str:
    """The kernel's form of an address; nvidia-smi writes the domain with eight digits."""
    domain, _colon, rest = bus.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"
