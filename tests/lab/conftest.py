# SPDX-License-Identifier: GPL-3.0-or-later
"""End to end, on the running lab. In the order of the files' names; the first needs a lab that nothing has touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from _lab import LAB, LOGS, REPORT, Lab

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the measurements, at any verbosity."""
    for line in REPORT:
        terminalreporter.write_line(line)


def is_up() -> bool:
    """Test whether the lab's API server answers."""
    if not (LAB / "state.json").exists():
        return False
    try:
        return bool(Lab().api.call("GET", "/version"))
    except Exception:  # whatever keeps it from answering, the lab isn't up
        return False


@pytest.fixture(scope="session")
def lab() -> Lab:
    if not is_up():
        pytest.fail("The lab isn't up: run make lab-up first.", pytrace=False)
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in LOGS.glob("*.log"):
        old.unlink()
    return Lab()


@pytest.fixture(scope="session")
def every_test(request: pytest.FixtureRequest) -> bool:
    """Whether the tests marked ``long`` run too."""
    return "not long" not in request.config.option.markexpr
