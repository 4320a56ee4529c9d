# SPDX-License-Identifier: GPL-3.0-or-later
"""One API server with the role's objects for all files; each leaves no pods, nodes and slices there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dra_world import dra_server
from real_apiserver import ApiServer


@pytest.fixture(scope="session")
def dra_api() -> Iterator[ApiServer]:
    with dra_server() as started:
        yield started
