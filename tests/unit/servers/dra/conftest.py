# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes in a real API server, each with an account for its driver."""

from __future__ import annotations

import itertools
import typing as t
from pathlib import Path

import pytest
from dra_cluster import Cluster
from dra_kit import NODE, DriverNode
from real_apiserver import ApiServer, api_server

__all__ = ["api_server"]

_numbers = itertools.count(1)


@pytest.fixture
def cluster(api_server: ApiServer, tmp_path: Path) -> t.Iterator[Cluster]:
    """The API server with a node of its own."""
    made = Cluster(api_server, tmp_path / "account", f"{NODE}-{next(_numbers)}")
    yield made
    made.wipe()
    api_server.request("DELETE", f"/api/v1/nodes/{made.node}")


@pytest.fixture
def make(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[t.Callable[..., DriverNode]]:
    # A short folder: the path of a unix socket has 107 characters at most.
    made: list[DriverNode] = []

    def build(*cards: t.Any, **more: t.Any) -> DriverNode:
        made.append(DriverNode(tmp_path_factory.mktemp("d"), cluster, *cards, **more))
        return made[-1]

    yield build
    for one in made:
        one.down()


@pytest.fixture
def node(make: t.Callable[..., DriverNode]) -> DriverNode:
    """A node of two cards whose driver is ready."""
    made = make()
    made.up()
    return made
