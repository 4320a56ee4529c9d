# SPDX-License-Identifier: GPL-3.0-or-later
"""A compiled driver for every test, with a file of cards of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from simulated_driver import VERSION, Driver

from lab import packages


@pytest.fixture(scope="session")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("no gcc on this machine to compile the simulated driver with")
    folder = tmp_path_factory.mktemp("driver")
    packages.compile_driver(folder, VERSION)
    (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{VERSION}")
    (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
    return folder


@pytest.fixture
def driver(driver_folder: Path, tmp_path: Path) -> Driver:
    made = Driver(driver_folder, tmp_path / "cards")
    made.describe()
    return made
