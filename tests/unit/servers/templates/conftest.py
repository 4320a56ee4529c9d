# SPDX-License-Identifier: GPL-3.0-or-later
"""One API server with the role's objects for all files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dra_world import dra_server
from gpushare.shared._contracts import claim_templates as contract
from real_apiserver import ApiServer


@pytest.fixture(scope="session")
def _api() -> Iterator[ApiServer]:
    with dra_server() as started:
        yield started


@pytest.fixture(scope="module")
def dra_api(_api: ApiServer) -> Iterator[ApiServer]:
    """The API server, where no file leaves pods, nodes and slices for the next one's kube-scheduler."""
    yield _api
    spaces = {pod["metadata"]["namespace"] for pod in _api.request("GET", "/api/v1/pods")["items"]}
    for pods in sorted(f"/api/v1/namespaces/{space}/pods?gracePeriodSeconds=0" for space in spaces):
        _api.request("DELETE", pods)
    _api.request("DELETE", "/api/v1/nodes")
    _api.request("DELETE", f"/apis/{contract.API_VERSION}/resourceslices")
