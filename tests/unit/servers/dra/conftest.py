# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes in a real API server, each with an account for its driver."""

from __future__ import annotations

import itertools
import typing as t
from pathlib import Path

import pytest
from dra_cluster import Cluster
from dra_kit import NODE
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
