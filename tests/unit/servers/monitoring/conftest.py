# SPDX-License-Identifier: GPL-3.0-or-later
"""Both servers at once, with the doubles of the folders extender and plugin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "extender"), str(HERE.parent / "plugin")]

from both_servers import Both  # noqa: E402


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    servers = Both(tmp_path_factory.mktemp("b"))
    yield servers
    servers.close()
