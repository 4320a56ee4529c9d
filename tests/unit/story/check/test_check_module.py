# SPDX-License-Identifier: GPL-3.0-or-later
"""The real main() of gpu_allocation_check over a made-up API server."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.module_utils import _check_cluster as cluster
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_info import UNFINISHED
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.modules import gpu_allocation_check as module
from check_kit import failing, recorded
from check_mutations import MUTATIONS

Json = dict[str, Any]


class Kube:
    """A cluster that is listed; a kind that is an error is refused."""

    def __init__(self, world: Json, **refused: ShareError) -> None:
        self.world, self.refused = world, refused
        self.requests: collections.Counter[str] = collections.Counter()
        self.asked: list[tuple[str, str, str]] = []

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[Json]:
        self.requests["GET"] += 1
        self.asked.append((kind, namespace, field_selector))
        if kind in self.refused:
            raise self.refused[kind]
        return self.world[f"{kind.lower()}s"]


def run(kube: Kube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **arguments: Any) -> Json:
    monkeypatch.setattr(module.RealKube, "of_module", staticmethod(lambda _module: kube))
    monkeypatch.setattr(cluster, "_now", lambda: kube.world["now"])
    world = kube.world
    given = {"nodes": world["evidence"], "story": world["story"], "extender": world["extender"], **arguments}
    with patch_module_args(given), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def test_a_healthy_cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kube = Kube(recorded("ours_envvar"))
    told = run(kube, monkeypatch, capsys)
    assert (told["report"]["result"], told.get("changed", False), told["requests"]) == ("PASS", False, {"GET": 2})
    assert kube.asked == [("Node", "", ""), ("Pod", "", UNFINISHED)]
    again = run(kube, monkeypatch, capsys, before=told["report"])
    assert (again["report"]["samples"], again["report"]["result"]) == (2, "PASS")


def test_upstreams_nodes_need_configmaps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kube = Kube(recorded("upstream_head"))
    assert run(kube, monkeypatch, capsys)["report"]["result"] == "PASS"
    assert kube.asked[-1] == ("ConfigMap", "kube-system", "") and len(kube.asked) == 3
    refused = Kube(kube.world, ConfigMap=ShareError("kubeconfig: its user may not do this: configmaps is forbidden"))
    report = run(refused, monkeypatch, capsys)["report"]
    assert failing(report, "UNKNOWN") == {"G11"}
    assert "configmaps is forbidden" in report["findings"][0]["what"]


def test_options_reach_the_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (broken,) = [one for one in MUTATIONS if one.check == "G12" and one.level == "FAIL"]
    world = recorded(broken.world)
    broken.change(world)
    assert failing(run(Kube(world), monkeypatch, capsys)["report"]) == {"G12"}
    more = ["default-scheduler", "volcano"]
    assert run(Kube(world), monkeypatch, capsys, schedulers=more, grace_seconds=7)["report"]["result"] == "PASS"
    assert failing(run(Kube(world), monkeypatch, capsys, schedulers=more, extender={})["report"], "UNKNOWN") == {"G10"}


def test_what_can_not_be_served_is_the_modules_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kube = Kube(recorded("ours_cdi"))
    told = run(kube, monkeypatch, capsys, before={"result": "PASS"})
    assert told["failed"] and told["msg"].startswith("before: this isn't a report")
    told = run(kube, monkeypatch, capsys, grace_seconds=-1)
    assert told["failed"] and told["msg"].startswith("grace_seconds: -1")
    told = run(Kube(kube.world, Pod=ShareError("pods is forbidden")), monkeypatch, capsys)
    assert told["failed"] and told["msg"] == "pods is forbidden"


def test_options_are_documented_as_they_are() -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    assert list(documented) == list(cluster.ARGUMENTS)
    for name, told in documented.items():
        spec = cluster.ARGUMENTS[name]
        assert {key: told.get(key) for key in ("type", "default", "elements")} == {
            key: spec.get(key) for key in ("type", "default", "elements")
        }, name
    returned = yaml.safe_load(module.RETURN)["report"]["contains"]
    world = recorded("ours_cdi")
    report = cluster.look(
        Kube(world),
        {**{key: one.get("default") for key, one in cluster.ARGUMENTS.items()}, "nodes": world["evidence"]},
        now=world["now"],
    )["report"]
    assert set(returned) == set(report)
