# SPDX-License-Identifier: GPL-3.0-or-later
"""The marks of the tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: needs the running lab (make lab-up)")
    config.addinivalue_line("markers", "long: takes minutes, and is run by make test-faults only")
