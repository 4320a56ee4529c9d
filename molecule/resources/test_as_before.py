# SPDX-License-Identifier: GPL-3.0-or-later
"""After uninstall.yml: the machine is what it was before, down to its bytes, and says so itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

testinfra_hosts = ["ansible://gpu_nodes"]

LOOK = Path(__file__).resolve().parent / "look.py"
Look = dict[str, Any]


@pytest.fixture(scope="module")
def before(host: Any) -> Look:
    return dict(json.loads(host.file("/run/before.json").content_string))


@pytest.fixture(scope="module")
def after(host: Any) -> Look:
    return dict(json.loads(host.check_output(f"python3 - <<'LOOK'\n{LOOK.read_text()}\nLOOK")))


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each thing that came, went or changed."""
    return [
        f"{name}: {then.get(name, 'was not there')} -> {now.get(name, 'is gone')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def test_every_file_is_as_before(before: Look, after: Look) -> None:
    found = differences(before["files"], after["files"])
    assert not found, "\n".join(found)


def test_every_tool_says_what_it_said_before(before: Look, after: Look) -> None:
    found = differences(before["answers"], after["answers"])
    assert not found, "\n".join(found)


def test_the_look_saw_something(before: Look) -> None:
    """A comparison of nothing with nothing would pass."""
    assert len(before["files"]) > 1000
    assert before["answers"]["containerd"] and before["answers"]["services"]
    assert before["answers"]["packages of dpkg"] or before["answers"]["packages of rpm"]
