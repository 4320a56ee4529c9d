# SPDX-License-Identifier: GPL-3.0-or-later
"""The module's own main(), over a made-up cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_cluster, _canary_run
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting
from ansible_collections.kubegpu.share.plugins.modules import gpu_canary

sys.path.insert(0, str(Path(__file__).parent))

from canary_cluster import SPACE, Broken, Cluster, node


def outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cluster: Cluster, **arguments: Any
) -> dict[str, Any]:
    clock = cluster.clock
    monkeypatch.setattr(gpu_canary.RealKube, "of_module", classmethod(lambda kind, module: cluster))
    monkeypatch.setattr(_canary_run, "Waiting", lambda timeout: Waiting(timeout, 1.0, clock.sleep, clock.now))
    with patch_module_args({"kubeconfig": "/nowhere", **arguments}), pytest.raises(SystemExit):
        gpu_canary.main()
    return json.loads(capsys.readouterr().out)


def test_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    found = outcome(monkeypatch, capsys, cluster, image="mine", runtime_class="nvidia", namespace="other")
    assert not found.get("failed")
    assert (found["changed"], found["canary"]["result"], found["canary"]["namespace"]) == (True, "PASS", "other")
    assert {one["spec"]["runtimeClassName"] for one in cluster.created} == {"nvidia"}
    assert [one["id"] for one in found["checks"]] == [f"Y{n}" for n in range(1, 8)]
    assert {one["backend"] for one in found["checks"]} == {"gpushare"}
    assert {"pod", "uid", "units", "node", "card", "phase", "says"} == set(found["canary"]["pods"][0])


def test_fail_is_for_the_play_to_decide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = outcome(monkeypatch, capsys, Cluster([node("gpu1", [16, 16])], Broken(no_extender=True)), timeout=10)
    assert not found.get("failed")
    assert found["canary"]["result"] == "FAIL"
    (finding,) = found["findings"]
    assert set(finding) == {
        *("check", "level", "node", "card", "uuid", "pod", "container", "what", "evidence", "do", "seen")
    }
    assert finding["pod"].startswith(f"{SPACE}/share-") and finding["evidence"]["api"]


def test_check_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    found = outcome(monkeypatch, capsys, cluster, _ansible_check_mode=True)
    assert (found["changed"], found["canary"]["result"], cluster.created) == (True, "skipped", [])


def test_a_foreign_namespace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.spaces["default"] = {"metadata": {"name": "default"}}
    found = outcome(monkeypatch, capsys, cluster, namespace="default")
    assert found["failed"] is True
    assert found["msg"].startswith("namespace: default exists and isn't the canary's")


@pytest.mark.parametrize("code", [1, 127, None])
def test_how_a_command_ended_is_read_from_the_door_s_own_words(
    monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """The step over_allocate reads the status out of the error that this door raises."""

    class Channel:
        returncode = code

        def run_forever(self, timeout: int) -> None: ...

        def read_stdout(self, timeout: int) -> str:
            return ""

        def read_stderr(self, timeout: int) -> str:
            return "out of memory"

        def close(self) -> None: ...

    class Kube:
        api_client = None

    class Api:
        connect_get_namespaced_pod_exec = None

    monkeypatch.setattr(_acceptance_cluster, "stream", lambda *what, **how: Channel())
    monkeypatch.setattr(_acceptance_cluster, "CoreV1Api", lambda client: Api())
    with pytest.raises(ShareError, match=f" ended with {code}: "):
        _acceptance_cluster.ApiCluster(Kube()).execute("ns", "pod", "c0", ["hold"])  # type: ignore[arg-type]
