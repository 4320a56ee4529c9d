# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes in a real API server, each with an account for its driver."""

from __future__ import annotations

import typing as t

import pytest
from dra_cluster import Cluster, cluster
from dra_kit import DriverNode
from real_apiserver import api_server

__all__ = ["api_server", "cluster"]


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
