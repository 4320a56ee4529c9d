# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's stand-in of NVML beside the library of this machine's driver, call by call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _card import HERE, Holders, record
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from nvml_difference import description, differences

from lab import packages


def asked(library: str, **environment: str) -> JsonObject:
    done = subprocess.run(
        [sys.executable, HERE / "nvml_calls.py", library],
        capture_output=True, text=True, check=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip
    found: JsonObject = json.loads(done.stdout)
    return found


def compare(name: str, folder: Path) -> None:
    """Compare all answers of both libraries.

    :param name: of what is recorded.
    :param folder: for the stand-in, which has the same cards and processes.
    """
    real = asked("libnvidia-ml.so.1")
    version = real["nvmlSystemGetDriverVersion"]["text"]
    packages.compile_driver(folder, version)
    cards = folder / "cards"
    cards.write_text(description(real))
    stand_in = asked(str(folder / f"libnvidia-ml.so.{version}"), KUBEGPU_SIM_CARDS=str(cards))
    found = differences(real, stand_in)
    record(name, {"real": real, "description": description(real), "differences": found})
    assert found == {}


@pytest.mark.parametrize("programs", [0, 2], ids=["idle", "two programs"])
def test_the_stand_in_answers_as_the_library(holders: Holders, tmp_path: Path, programs: int) -> None:
    for number in range(programs):
        holders.start(1024 * (number + 1))
    compare(f"library-{programs}", tmp_path)
