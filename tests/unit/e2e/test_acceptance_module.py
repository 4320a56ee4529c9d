# SPDX-License-Identifier: GPL-3.0-or-later
"""The module's own main(), over a simulated cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._e2e import run
from ansible_collections.kubegpu.share.plugins.module_utils._kube import pod_exec
from ansible_collections.kubegpu.share.plugins.modules import gpu_acceptance
from suite_cluster import SPACE, Cluster, Faults, node

Module = Callable[..., dict[str, Any]]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Module:
    def main(cluster: Cluster, **arguments: Any) -> dict[str, Any]:
        clock = cluster.clock
        monkeypatch.setattr(gpu_acceptance.RealKube, "of_module", classmethod(lambda kind, module: cluster))
        monkeypatch.setattr(gpu_acceptance, "PodExec", lambda kube: cluster.devices)
        monkeypatch.setattr(run, "Waiting", lambda timeout: Waiting(timeout, 1.0, clock.sleep, clock.now))
        with patch_module_args({"kubeconfig": "/nowhere", **arguments}), pytest.raises(SystemExit):
            gpu_acceptance.main()
        return json.loads(capsys.readouterr().out)

    return main


def test_workloads_is_the_default(module: Module) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    found = module(cluster, image="mine", timeout=10)
    assert not found.get("failed") and found["changed"] is True
    assert found["acceptance"]["suite"] == "workloads" and found["acceptance"]["result"] == "PASS"
    assert [check["id"] for check in found["checks"]] == [f"W{n}" for n in range(1, 9)]
    assert cluster.created[0]["spec"]["containers"][0]["image"] == "mine"


def test_canary(module: Module) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    found = module(cluster, suite="canary", image="mine", runtime_class="nvidia", namespace="other")
    assert not found.get("failed")
    assert found["changed"] and found["acceptance"].items() >= {"result": "PASS", "namespace": "other"}.items()
    assert {one["spec"]["runtimeClassName"] for one in cluster.created} == {"nvidia"}
    assert [check["id"] for check in found["checks"]] == [f"Y{n}" for n in range(1, 8)]
    assert {check["backend"] for check in found["checks"]} == {"gpushare"}
    assert {"pod", "uid", "units", "node", "card", "phase", "summary"} == set(found["acceptance"]["pods"][0])


def test_a_failed_step_doesnt_fail_the_module(module: Module) -> None:
    cluster = Cluster([node("gpu1", [16, 16])], Faults(no_extender=True))
    found = module(cluster, suite="canary", timeout=10)
    assert not found.get("failed")
    assert found["acceptance"]["result"] == "FAIL" and "1 failed" in found["table"]
    (finding,) = found["findings"]
    assert set(finding) == {
        *("check", "level", "node", "card", "uuid", "pod", "container", "what", "evidence", "do", "seen")
    }
    assert finding["pod"].startswith(f"{SPACE}/share-") and finding["evidence"]["api"]


def test_another_clients_namespace(module: Module) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.namespaces["default"] = {"metadata": {"name": "default"}}
    found = module(cluster, namespace="default")
    assert found["failed"] is True
    assert found["msg"].startswith("namespace: default exists and isn't the suite's")


@pytest.mark.parametrize("code", [1, 127])
def test_a_commands_exit_status(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    channel = Mock()
    causes = [{"reason": "ExitCode", "message": str(code)}]
    channel.read_channel.return_value = json.dumps({"status": "Failure", "details": {"causes": causes}})
    channel.is_open.side_effect, channel.peek_channel.return_value = [True, False], ""
    channel.read_stdout.return_value, channel.read_stderr.return_value = "", "out of memory"
    monkeypatch.setattr(pod_exec, "stream", lambda *arguments, **options: channel)
    monkeypatch.setattr(pod_exec, "CoreV1Api", lambda client: Mock())
    with pytest.raises(pod_exec.CommandFailed, match=f" ended with {code}: ") as failed:
        pod_exec.PodExec(SimpleNamespace(api_client=SimpleNamespace()))("ns", "pod", "c0", ["hold"])
    assert failed.value.status == code
