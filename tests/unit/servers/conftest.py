# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's simulated driver, for the real processes of both servers of a node."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from limit_fakes import R580, R615

from lab import packages


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The simulated driver in two versions, by version; each a folder as the driver's packages leave it."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc on this machine to compile the simulated driver with")
    found = {}
    for version in (R615, R580):
        root = tmp_path_factory.mktemp(f"driver-{version}")
        packages.compile_driver(root, version)
        libraries = root / "usr" / "lib64"
        libraries.mkdir(parents=True)
        (root / f"libnvidia-ml.so.{version}").rename(libraries / f"libnvidia-ml.so.{version}")
        (libraries / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")
        found[version] = root
    return found
