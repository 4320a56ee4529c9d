# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated NVML, queried by NVIDIA's real nvidia-ctk for a CDI specification, as toolkit and GPU Operator do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from simulated_driver import CARDS, FIRST, SECOND, VERSION, Driver

from lab import build
from lab.shell import LabError


@cache
def tool() -> str:
    try:
        return str(build.binaries("toolkit") / "nvidia-ctk")
    except (LabError, OSError) as error:
        pytest.skip(f"no container toolkit: {error}")


def names(driver: Driver, root: Path) -> list[str]:
    """The devices of the specification for the driver's cards."""
    libraries, devices = root / "usr" / "lib64", root / "dev"
    for folder in (libraries, devices):
        folder.mkdir(parents=True)
    for library in ("libnvidia-ml.so", "libcuda.so"):
        shutil.copy(driver.folder / f"{library}.{VERSION}", libraries)
        (libraries / f"{library}.1").symlink_to(f"{library}.{VERSION}")
    # nvidia-ctk requires character devices, of any number.
    for device in ("nvidia1", "nvidia3", "nvidiactl"):
        (devices / device).symlink_to("/dev/null")
    done = subprocess.run(
        [tool(), "cdi", "generate", "--mode=nvml", f"--driver-root={root}", f"--dev-root={root}", "--format=json"],
        env={**os.environ, "KUBEGPU_SIM_CARDS": str(driver.cards), "KUBEGPU_SIM_DEV": str(devices)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [str(one["name"]) for one in json.loads(done.stdout)["devices"]]


@pytest.mark.parametrize("mig", ["", " mig=disabled"])
def test_every_card_without_mig_has_its_name(driver: Driver, tmp_path: Path, mig: str) -> None:
    driver.cards.write_text(CARDS.replace("_8GiB", f"_8GiB{mig}"))
    assert {FIRST, SECOND, "all"} <= set(names(driver, tmp_path))


def test_a_card_with_mig_on_and_no_instances_has_none(driver: Driver, tmp_path: Path) -> None:
    driver.cards.write_text(CARDS.replace("_8GiB", "_8GiB mig=enabled"))
    found = names(driver, tmp_path)
    assert FIRST in found and SECOND not in found


def test_only_a_card_with_mig_on_can_have_instances(driver: Driver) -> None:
    """Zero where MIG is missing or disabled: an index beyond the maximum is refused."""
    for mig, expected in (("", [0, 3]), (" mig=disabled", [0, 6]), (" mig=enabled", [7, 6])):
        driver.cards.write_text(CARDS.replace("_8GiB", f"_8GiB{mig}"))
        count = "n.nvmlDeviceGetMaxMigDeviceCount(second)"
        answer = driver.query(f"report([{count}, code(n.nvmlDeviceGetMigDeviceHandleByIndex, second, 0)])")
        assert answer == expected, mig
