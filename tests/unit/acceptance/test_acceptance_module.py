# SPDX-License-Identifier: GPL-3.0-or-later
"""The module's own main(), over a made-up cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.modules import gpu_acceptance
from fake_clock import FakeClock

sys.path.insert(0, str(Path(__file__).parent))

from acceptance_cluster import Broken, FakeCluster


def outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: Broken, **arguments: Any
) -> tuple[FakeCluster, dict[str, Any]]:
    clock = FakeClock()
    cluster = FakeCluster({"gpu1": [16, 16]}, clock, broken)
    monkeypatch.setattr(gpu_acceptance.RealKube, "of_module", classmethod(lambda kind, module: None))
    monkeypatch.setattr(gpu_acceptance, "ApiCluster", lambda kube: cluster)
    monkeypatch.setattr(gpu_acceptance, "RealClock", lambda: clock)
    with patch_module_args({"kubeconfig": "/nowhere", **arguments}), pytest.raises(SystemExit):
        gpu_acceptance.main()
    return cluster, json.loads(capsys.readouterr().out)


def test_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, found = outcome(monkeypatch, capsys, Broken(), image="mine", node_selector={}, timeout=10)
    assert not found.get("failed")
    assert found["changed"] is False
    assert [row["result"] for row in found["rows"]] == ["pass"] * 6
    assert cluster.created[0]["spec"]["containers"][0]["image"] == "mine"


def test_fail_carries_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, found = outcome(monkeypatch, capsys, Broken(no_runtime=True), timeout=10)
    assert found["failed"] is True
    assert found["msg"].startswith("acceptance failed: d, e\n")
    assert found["table"] in found["msg"]
    assert cluster.spaces == {}


def test_check_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, found = outcome(monkeypatch, capsys, Broken(), _ansible_check_mode=True)
    assert not found.get("failed")
    assert {row["result"] for row in found["rows"]} == {"skip"}
    assert cluster.created == []
