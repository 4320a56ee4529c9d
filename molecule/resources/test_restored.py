# SPDX-License-Identifier: GPL-3.0-or-later
"""After uninstall.yml every file and every answer of the machine's tools is as before the installation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

testinfra_hosts = ["ansible://gpu_nodes"]

SNAPSHOT = Path(__file__).resolve().parent / "snapshot.py"
Snapshot = dict[str, Any]


@pytest.fixture(scope="module")
def before(host: Any) -> Snapshot:
    return dict(json.loads(host.file("/run/before.json").content_string))


@pytest.fixture(scope="module")
def after(host: Any) -> Snapshot:
    return dict(json.loads(host.check_output(f"python3 - <<'SNAPSHOT'\n{SNAPSHOT.read_text()}\nSNAPSHOT")))


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each entry that was added, removed or changed."""
    return [
        f"{name}: {then.get(name, 'missing')} -> {now.get(name, 'missing')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def test_every_file_is_restored(before: Snapshot, after: Snapshot) -> None:
    found = differences(before["files"], after["files"])
    assert not found, "\n".join(found)


def test_every_tool_reports_the_same_state(before: Snapshot, after: Snapshot) -> None:
    found = differences(before["answers"], after["answers"])
    assert not found, "\n".join(found)


def test_the_snapshots_are_not_empty(before: Snapshot) -> None:
    """A comparison of nothing with nothing would pass."""
    assert len(before["files"]) > 1000
    assert before["answers"]["containerd"] and before["answers"]["services"]
    assert before["answers"]["packages of dpkg"] or before["answers"]["packages of rpm"]
