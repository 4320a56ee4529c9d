# SPDX-License-Identifier: GPL-3.0-or-later
"""A real API server with OpenShift's real definitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from definitions import OLD, definitions
from real_apiserver import ApiServer, own_api_server


@pytest.fixture(scope="session")
def openshift() -> Iterator[ApiServer]:
    """The API server with the newest definitions."""
    files = sorted(file for file in definitions().glob("*.yaml") if file.name != OLD)
    with own_api_server() as server:
        server.install(*files)
        for name in ("openshift-config", "openshift-kube-scheduler"):
            server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        yield server
