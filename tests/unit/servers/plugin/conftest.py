# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes with a device plugin, stopped after the test."""

from __future__ import annotations

import shutil
import typing as t
from pathlib import Path

import pytest
from limit_fakes import R580, R615
from plugin_fakes import Node

from lab import packages


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[t.Callable[..., Node]]:
    # A short folder: the path of a unix socket has 107 characters at most.
    root = tmp_path_factory.mktemp("k")
    made: list[Node] = []

    def build(*cards: t.Any, **options: t.Any) -> Node:
        made.append(Node(root, *cards, **options))
        return made[-1]

    yield build
    for one in made:
        one.down()


@pytest.fixture
def node(make: t.Callable[..., Node]) -> Node:
    """A node of two cards whose plugin is registered."""
    return make().up()


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
