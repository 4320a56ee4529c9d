# SPDX-License-Identifier: GPL-3.0-or-later
"""What the modules read of this machine, beside what NVIDIA's own tool prints."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from _card import ROOT, facts, first, observed, record
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject

ECC = "ecc.errors.uncorrected.volatile.total"
COLUMNS = f"uuid,name,memory.total,memory.reserved,pci.bus_id,driver_version,compute_mode,{ECC}"


def by_tool() -> JsonObject:
    """The first card, by nvidia-smi."""
    options = (f"--query-gpu={COLUMNS}", "--format=csv,noheader,nounits")
    done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=True, timeout=60)
    row = next(csv.reader(done.stdout.splitlines()))
    return dict(zip(COLUMNS.split(","), (one.strip() for one in row), strict=True))


def by_module(name: str) -> JsonObject:
    """A module's result, as Ansible runs it on this machine."""
    here = ("localhost", "-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}")
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "adhoc", *here, "-m", f"kubegpu.share.{name}"],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"), "ANSIBLE_NOCOLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: JsonObject = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def test_nvml_info_agrees_with_nvidia_smi() -> None:
    tool, card = by_tool(), first()
    ran = by_module("nvml_info")["nvml"]
    record("nvml-info", ran)
    assert {key: ran["cards"][0][key] for key in ("uuid", "name", "minor", "pci", "mig", "compute_mode")} == {
        key: card[key] for key in ("uuid", "name", "minor", "pci", "mig", "compute_mode")
    }
    assert (card["uuid"], card["name"], card["pci"]) == (tool["uuid"], tool["name"], tool["pci.bus_id"])
    assert card["memory"]["total_mib"] == int(tool["memory.total"])
    assert card["memory"]["reserved_mib"] == int(tool["memory.reserved"])
    assert card["compute_mode"] == tool["compute_mode"].lower()
    if tool[ECC].isdecimal():
        assert card["health"]["ecc_uncorrected_volatile"] == int(tool[ECC])
    assert facts()["driver"] == tool["driver_version"]
    assert Path(f"/dev/nvidia{card['minor']}").is_char_device()


def test_node_facts_agree_with_nvidia_smi() -> None:
    tool, seen = by_tool(), observed()
    record("node", seen)
    driver = seen["driver"]
    assert driver["loaded"] and driver["error"] is None
    assert driver["module_version"] == driver["library_version"] == driver["version"] == tool["driver_version"]
    card = driver["cards"][0]
    assert (card["uuid"], card["name"], str(card["memory_mib"])) == (tool["uuid"], tool["name"], tool["memory.total"])
    assert any(one["address"] == card["address"] and one["driver"] == "nvidia" for one in seen["gpus"])
    assert f"/dev/nvidia{card['minor']}" in seen["devices"]["nodes"]
