# SPDX-License-Identifier: GPL-3.0-or-later
"""``make test-changed`` selects the tests that a change touches, and no others."""

from __future__ import annotations

import pytest

from tests import changed


@pytest.mark.parametrize(
    ("path", "touched", "untouched"),
    [
        ("plugins/module_utils/_contracts/gpushare.py", "test_contract", "test_lab_network"),
        ("plugins/module_utils/_core/wait.py", "test_wait", "test_lab_network"),
        ("docs/monitoring.md", "test_monitoring_page", "test_contract"),
        ("lab/network.py", "test_lab_network", "test_contract"),
    ],
)
def test_a_changed_file_selects_the_tests_that_depend_on_it(path: str, touched: str, untouched: str) -> None:
    names = {test.stem for test in changed.selected({path})}
    assert touched in names
    assert untouched not in names


def test_a_changed_role_selects_the_tests_that_run_it() -> None:
    names = {test.stem for test in changed.selected({"roles/driver/tasks/main.yml"})}
    assert "test_driver_role" in names and "test_contract" not in names


def test_a_changed_requirement_selects_every_test() -> None:
    assert len(changed.selected({"requirements.txt"})) == len(list(changed.UNIT.rglob("test_*.py")))


def test_a_generated_page_selects_no_test() -> None:
    assert changed.selected({"docs/reference/preflight_role.rst", "changelogs/fragments/x.yml"}) == []
