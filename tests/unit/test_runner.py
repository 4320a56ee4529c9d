# SPDX-License-Identifier: GPL-3.0-or-later
"""The runner: changed agrees with the plan, check mode changes nothing, and a change without effect is an error."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Change, Plan, run, run_module


class Number:
    """A reconciler of one number."""

    def __init__(self, now: int, wanted: int, inert: bool = False) -> None:
        self.now, self.wanted, self.inert = now, wanted, inert

    def observe(self) -> int:
        return self.now

    def plan(self, seen: int) -> Plan:
        return Plan() if seen == self.wanted else Plan((Change("number", str(seen), str(self.wanted)),))

    def apply(self, seen: int, plan: Plan) -> None:
        if not self.inert:
            self.now = self.wanted


def test_nothing_to_do() -> None:
    assert run(Number(1, 1), check=False) == {"changed": False, "diff": []}


@pytest.mark.parametrize(("check", "after"), [(True, 1), (False, 2)])
def test_the_diff_is_the_plan_with_and_without_check_mode(check: bool, after: int) -> None:
    number = Number(1, 2)
    result = run(number, check)
    assert result["changed"] and number.now == after
    assert result["diff"] == [{"before_header": "number", "after_header": "number", "before": "1", "after": "2"}]


def test_a_change_without_effect_is_an_error() -> None:
    with pytest.raises(NotInEffect, match="have no effect: number"):
        run(Number(1, 2, inert=True), check=False)


def test_errors_become_module_failures() -> None:
    def refuse() -> dict[str, object]:
        raise BadInput("x: no", line=3)

    module = Mock()
    run_module(module, refuse)
    run_module(module, lambda: {"changed": False})
    assert module.mock_calls == [call.fail_json(msg="x: no", line=3), call.exit_json(changed=False)]
