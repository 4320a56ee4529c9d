# SPDX-License-Identifier: GPL-3.0-or-later
"""A compiled driver for every test, with its own file of cards."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_driver import VERSION, Driver, compiled


@pytest.fixture(scope="session")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("driver"), VERSION)


@pytest.fixture
def driver(driver_folder: Path, tmp_path: Path) -> Driver:
    return Driver(driver_folder, tmp_path / "cards").describe()
