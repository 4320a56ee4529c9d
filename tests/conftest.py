# SPDX-License-Identifier: GPL-3.0-or-later
"""Register the marks of the tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: needs the running lab (make lab-up)")
    config.addinivalue_line("markers", "long: left to `make test-all`; nothing that an ordinary change breaks")
