# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of more than one file."""

from __future__ import annotations

import pytest
from claims_cluster import Cluster
from own_cluster import controllers
from real_apiserver import api_server, own_api_server

__all__ = ["api_server", "cluster"]


@pytest.fixture(scope="module")
def cluster():
    with own_api_server() as server, controllers(server, "namespace", "garbage-collector"):
        made = Cluster(server)
        with made.kubelets():
            yield made
