# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of attacks by a pod: docs/gpushare.md has exactly the rows that the lab executes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from _attacks import BY_FROM, NOTHING, TABLE, Outcome, page
from gpushare.http.limits import BODY_BYTES, SMALL_BODY_BYTES, Limits
from gpushare.http.service import LARGE_BODY_BYTES, METRICS_LIMITS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "gpushare.md").read_text()
PLAYED = ast.parse((ROOT / "tests" / "lab" / "test_42_attacks.py").read_text())
ON_THE_NODE = (Outcome.FAILS, Outcome.TAKES, Outcome.ALL, Outcome.NO_START)
ON_THE_API = (Outcome.REFUSED, Outcome.WARNED, Outcome.UNSEEN)


def test_the_page_has_the_table_of_the_lab() -> None:
    section = PAGE.split("\n## What a pod can try\n")[1].split("\n##")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == page()


def test_every_row_and_every_lab_step_match() -> None:
    (plays,) = (
        node.value
        for node in PLAYED.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "PLAYS"
    )
    assert isinstance(plays, ast.Dict)
    known = [key.value for key in plays.keys if isinstance(key, ast.Constant)]
    named = [play for row in TABLE for play in row.plays]
    assert len(known) == len(set(known)) and sorted(named) == sorted(known)
    assert all(row.plays for row in TABLE)


def test_each_row_about_the_network_names_tests() -> None:
    section = PAGE.split("\n## What a client on the network can try\n")[1].split("\n## ")[0]
    rows = [line.split("|")[3] for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows and [row for row in rows if not re.search(r"`test_\w+`", row)] == []


def test_the_pages_numbers_are_the_servers_limits() -> None:
    scheduler, metrics = Limits(), METRICS_LIMITS
    mib = 1 << 20
    for text in (
        f"has {metrics.peer} (metrics) or {scheduler.peer} (TLS of schedulers)",
        f"have {metrics.anonymous} of the {metrics.connections} connections of metrics, "
        f"and {scheduler.anonymous} of the {scheduler.connections} of schedulers",
        f"must be complete {scheduler.head:.0f} s after the connection began",
        f"a request has {scheduler.request:.0f} s, an answer too",
        f"{SMALL_BODY_BYTES >> 10} KiB, but {BODY_BYTES // mib} MiB on the schedulers' routes",
        f"all together hold {scheduler.bodies // mib} MiB",
        f"of more than {LARGE_BODY_BYTES // mib} MiB",
    ):
        assert text in PAGE
    assert (metrics.head, metrics.request, metrics.answer) == (scheduler.head, scheduler.request, scheduler.request)
    assert scheduler.answer == scheduler.request


def test_outcomes_outside_the_lab_have_a_unit_test() -> None:
    outside = [cell for row in TABLE for cell in row.cells if cell.outcome is Outcome.ELSEWHERE and cell is not NOTHING]
    assert outside
    sources = "\n".join(path.read_text() for path in (ROOT / "tests" / "unit" / "servers").rglob("test_*.py"))
    for cell in outside:
        assert cell.proof and f"def {cell.proof}(" in sources, cell


def test_every_test_that_the_page_names_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", PAGE)) - {"test_attack"}
    assert len(names) > 50
    assert [name for name in sorted(names) if f"def {name}(" not in tests] == []


def test_lab_steps_have_observable_outcomes() -> None:
    for row in TABLE:
        assert {cell.outcome for cell in row.cells[:3]} <= set(ON_THE_NODE), row.pod
        assert row.policy.outcome in ON_THE_API, row.pod


def test_deny_and_the_toolkits_setting_leave_only_pods_that_own_the_node() -> None:
    """What the policy doesn't refuse gets no card of others where the toolkit refuses, which deny has by default."""
    unseen = [row for row in TABLE if row.policy.outcome is not Outcome.REFUSED or row.policy is BY_FROM]
    left = [row.pod for row in unseen if row.refusing.outcome not in (Outcome.FAILS, Outcome.NO_START)]
    assert left == ["is privileged, and asks for a share", "is privileged, and asks for no share"]
