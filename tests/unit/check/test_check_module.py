# SPDX-License-Identifier: GPL-3.0-or-later
"""The real main() of gpu_allocation_check over a fake API server."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.module_utils._check import collect as cluster
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import UNFINISHED
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.modules import gpu_allocation_check as module
from check_kit import failing, recorded
from check_mutations import MUTATIONS


class Kube:
    """Lists a world's objects; listing a kind in ``refused`` raises its error."""

    def __init__(self, world: JsonObject, **refused: ShareError) -> None:
        self.world, self.refused, self.server = world, refused, "https://192.0.2.1:6443"
        self.requests: collections.Counter[str] = collections.Counter()
        self.listed: list[tuple[str, str, str]] = []

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[JsonObject]:
        self.requests["GET"] += 1
        self.listed.append((kind, namespace, field_selector))
        if kind in self.refused:
            raise self.refused[kind]
        return self.world[f"{kind.lower()}s"]


Run = Callable[..., JsonObject]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def main(kube: Kube, **arguments: Any) -> JsonObject:
        monkeypatch.setattr(module, "connect", lambda _module: kube)
        monkeypatch.setattr(cluster, "_now", lambda: kube.world["now"])
        given = {"nodes": kube.world["evidence"], "extender": kube.world["extender"], **arguments}
        with patch_module_args(given), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return main


def test_a_healthy_cluster(run: Run) -> None:
    kube = Kube(recorded("ours_envvar"))
    done = run(kube)
    assert (done["report"]["result"], done.get("changed", False), done["requests"]) == ("PASS", False, {"GET": 2})
    assert done["report"]["cluster"] == kube.server
    assert kube.listed == [("Node", "", ""), ("Pod", "", UNFINISHED)]
    again = run(kube, before=done["report"])
    assert (again["report"]["samples"], again["report"]["result"]) == (2, "PASS")


def test_configmaps_are_listed_for_upstreams_nodes(run: Run) -> None:
    kube = Kube(recorded("upstream_head"))
    assert run(kube)["report"]["result"] == "PASS"
    assert kube.listed[-1] == ("ConfigMap", "kube-system", "") and len(kube.listed) == 3
    refused = Kube(kube.world, ConfigMap=ShareError("kubeconfig: its user may not do this: configmaps is forbidden"))
    report = run(refused)["report"]
    assert failing(report, "UNKNOWN") == {"G11"}
    assert "configmaps is forbidden" in report["findings"][0]["what"]


def test_options_reach_the_checks(run: Run) -> None:
    (broken,) = [mutation for mutation in MUTATIONS if mutation.check == "G12" and mutation.level == "FAIL"]
    world = recorded(broken.world)
    broken.change(world)
    assert failing(run(Kube(world))["report"]) == {"G12"}
    more = ["default-scheduler", "volcano"]
    assert run(Kube(world), schedulers=more, grace_seconds=7)["report"]["result"] == "PASS"
    assert failing(run(Kube(world), schedulers=more, extender={})["report"], "UNKNOWN") == {"G10"}


def test_invalid_options_and_api_errors_fail_the_module(run: Run) -> None:
    kube = Kube(recorded("ours_cdi"))
    for done, message in (
        (run(kube, before={"result": "PASS"}), "before: this isn't a report"),
        (run(kube, grace_seconds=-1), "grace_seconds: -1"),
        (run(Kube(kube.world, Pod=ShareError("pods is forbidden"))), "pods is forbidden"),
    ):
        assert done["failed"] and done["msg"].startswith(message)


def test_options_are_documented_as_they_are() -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    assert list(documented) == list(cluster.ARGUMENTS)
    for name, option in documented.items():
        for key in ("type", "default", "elements"):
            assert option.get(key) == cluster.ARGUMENTS[name].get(key), name
    returned = yaml.safe_load(module.RETURN)["report"]["contains"]
    world = recorded("ours_cdi")
    report = cluster.check(
        Kube(world),
        {**{key: argument.get("default") for key, argument in cluster.ARGUMENTS.items()}, "nodes": world["evidence"]},
        now=world["now"],
    )["report"]
    assert set(returned) == set(report)


def test_pods_that_kubelet_refused_are_read_where_hami_is(run: Run) -> None:
    class WithFailed(Kube):
        def list_all(
            self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
        ) -> list[JsonObject]:
            found = super().list_all(api_version, kind, namespace, field_selector, label_selector)
            failed = [one for one in found if one["status"].get("phase") == "Failed"] if kind == "Pod" else []
            return failed if field_selector == "status.phase=Failed" else [one for one in found if one not in failed]

    for name, requests in (("hami_json", 3), ("nvidia_exclusive", 2)):
        world = recorded(name)
        for reason in ("UnexpectedAdmissionError", "Evicted"):
            failed = json.loads(json.dumps(world["pods"][0]))
            failed["metadata"].update(name=reason.lower(), uid=f"uid-{reason}", annotations={})
            failed["spec"]["schedulerName"] = "default-scheduler"
            failed["status"] = {"phase": "Failed", "reason": reason}
            world["pods"].append(failed)
        done = run(WithFailed(world))
        assert done["requests"] == {"GET": requests}
        refused = [finding for finding in done["report"]["findings"] if finding.get("cause") == "refused"]
        assert [one["pod"] for one in refused] == (["default/unexpectedadmissionerror"] if requests == 3 else [])
