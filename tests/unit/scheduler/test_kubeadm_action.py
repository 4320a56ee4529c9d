# SPDX-License-Identifier: GPL-3.0-or-later
"""The task ``kubeadm_config`` in a play on a real API server, and with concurrent changes."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import manifests
import pytest
import real_kubeadm
from action_plugins import load
from ansible_collections.kubegpu.share.plugins.action import kubeadm_config as action
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import kubeadm as module
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.kubeadm_edit import cluster_configuration
from own_cluster import run_playbook
from real_apiserver import ApiServer, api_server
from test_kubeadm_config import USERS_LIST, FakeKube, stored

__all__ = ["api_server"]


PATH = "/api/v1/namespaces/kube-system/configmaps"
TEXT = stored("v1beta4", "v1.36.3", USERS_LIST)

# The options and check mode of each step.
STEPS: dict[str, tuple[JsonObject, bool]] = {
    "check": ({}, True),
    "add": ({}, False),
    "again": ({}, False),
    "check_removal": ({"state": "absent"}, True),
    "take": ({"state": "absent"}, False),
    "taken": ({"state": "absent"}, False),
}


@pytest.fixture(scope="module")
def played(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, JsonObject]:
    """Run all steps in one play; return each result, and the ConfigMap after it as ``<step>_map``."""
    folder = tmp_path_factory.mktemp("kubeadm")
    data = {module.KEY: TEXT, "other": "stays"}
    api_server.request("POST", PATH, {"metadata": {"name": "kubeadm-config"}, "data": data})
    read = f"{api_server.programs['kubectl']} --kubeconfig={api_server.kubeconfig} --namespace=kube-system"
    read += " get configmap kubeadm-config -o json"
    tasks: list[JsonObject] = []
    for name, (arguments, check) in STEPS.items():
        options = {"kubeconfig": str(api_server.kubeconfig), **arguments}
        task = {"kubegpu.share.kubeadm_config": options, "check_mode": check, "diff": True}
        tasks.append({**task, "register": name})
        tasks.append({"ansible.builtin.command": read, "register": f"{name}_map"})
    results = ", ".join(f"'{name}': {name}, '{name}_map': {name}_map.stdout | from_json" for name in STEPS)
    content = {"content": f"{{{{ {{ {results} }} | to_json }}}}", "dest": str(folder / "results.json")}
    tasks.append({"ansible.builtin.copy": content})
    done = run_playbook(folder, [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}])
    api_server.ask("DELETE", f"{PATH}/kubeadm-config")
    assert done.rc == 0, done.text
    return t.cast("dict[str, JsonObject]", json.loads((folder / "results.json").read_text()))


def test_check_mode_changes_nothing_and_predicts_the_diff(played: dict[str, JsonObject]) -> None:
    for check, real in (("check", "add"), ("check_removal", "take")):
        assert played[check]["changed"] and played[check]["diff"] == played[real]["diff"]
    assert played["check_map"]["data"][module.KEY] == TEXT
    assert played["check_removal_map"] == played["again_map"]


def test_extender_added_once(played: dict[str, JsonObject], tmp_path: Path) -> None:
    [diff] = played["add"]["diff"]
    data = played["add_map"]["data"]
    assert diff["before"] == TEXT and diff["after"] == data[module.KEY] != TEXT
    assert played["add"]["kept"] and data["other"] == "stays"
    assert real_kubeadm.complaint(data[module.KEY], tmp_path) == ""
    assert not played["again"]["changed"] and played["again_map"] == played["add_map"]


def test_removal_restores_every_byte(played: dict[str, JsonObject]) -> None:
    assert played["take"]["changed"] and not played["take"]["kept"]
    assert played["take_map"]["data"] == {module.KEY: TEXT, "other": "stays"}
    assert not played["taken"]["changed"] and played["taken_map"] == played["take_map"]


# --------------------------------------------------------------------------- concurrent changes


def act(kube: FakeKube, check: bool = False, **arguments: t.Any) -> JsonObject:
    one = load(action, arguments, check)

    def execute(module_args: JsonObject, task_vars: t.Any) -> JsonObject:
        assert not {"machines", "version"} & set(module_args), "the module has no use for them"
        try:
            return module.work({"plan": None, **module_args}, t.cast(t.Any, kube))
        except ShareError as error:
            return {"failed": True, "msg": str(error)}

    one._execute_module = execute
    done: JsonObject = one.run(task_vars={})
    return done


def test_cluster_without_kubeadm_config() -> None:
    result = act(FakeKube(None))
    assert not result["changed"] and not result["kept"]
    assert result["reason"] == "ConfigMap kube-system/kubeadm-config doesn't exist"


def test_concurrent_change_is_kept() -> None:
    kube = FakeKube(TEXT)
    theirs = iter([TEXT.replace("clusterName: kubernetes", "clusterName: second")])

    def meanwhile() -> None:
        for text in theirs:
            kube.change(text)

    kube.meanwhile = meanwhile
    done = act(kube)
    assert done["changed"] and not done.get("failed")
    assert kube.map is not None and "clusterName: second" in kube.map["data"][module.KEY]
    [diff] = done["diff"]
    assert diff["after"] == kube.map["data"][module.KEY] and "clusterName: second" in diff["before"]


def test_concurrent_equal_change_is_no_change() -> None:
    kube, text = FakeKube(TEXT), cluster_configuration(TEXT, present=True).text
    kube.meanwhile = lambda: kube.change(text)
    assert not act(kube)["changed"]


def test_conflicts_end_after_five_tries() -> None:
    kube = FakeKube(TEXT)
    kube.meanwhile = lambda: kube.change(f"{kube.map['data'][module.KEY]}# more\n" if kube.map else "")
    done = act(kube)
    assert done["failed"] and "changed by another client 5 times in a row; nothing was written" in done["msg"]


def test_kubeadm_config_follows_the_machines() -> None:
    def observation(manifest: str | None) -> JsonObject:
        return {"manifest_path": cp.MANIFEST, "manifest": manifest}

    own, users = observation(manifests.kubeadm(36)), observation(manifests.WITH_CONFIG)
    kube = FakeKube(TEXT)
    done = act(kube, machines={"cp1": own, "cp2": users})
    assert not done["changed"] and not done["kept"]
    assert done["reason"].startswith("kube-scheduler on cp2 has --config=/etc/scheduler/config.yaml, which isn't in ")
    for missing in ({}, observation(None)):
        done = act(kube, machines={"cp1": own, "cp2": missing})
        assert not done["changed"] and done["reason"].endswith("this run has no facts of cp2")
    assert "isn't a result of control_plane_info" in act(kube, machines={"cp1": {"x": 1}})["msg"]
    done = act(kube, machines={"cp1": own, "cp2": own})
    assert done["changed"] and done["kept"] and kube.map is not None
    assert not act(kube, machines={"cp1": {"x": 1}}, state="absent").get("failed"), "removal ignores the machines"
    assert kube.map["data"][module.KEY] == TEXT


def test_unknown_machine_version_requires_option() -> None:
    image = manifests.kubeadm(36).replace(":v1.36.3", ":ours")
    machines = {"cp1": {"manifest_path": cp.MANIFEST, "manifest": image}}
    assert act(FakeKube(TEXT), machines=machines)["msg"].startswith("scheduler_version: ")
    assert act(FakeKube(TEXT), machines=machines, version="1.36.3")["kept"]


def test_errors_are_returned() -> None:
    kube = FakeKube(TEXT)
    kube.refusal = ShareError("its user may not do this")
    assert act(kube)["msg"] == "its user may not do this"
    assert not act(kube, check=True).get("failed")
    done = act(FakeKube(TEXT.replace("v1beta4", "v1alpha1")))
    assert done["failed"] and "holds a kubeadm.k8s.io/v1alpha1" in done["msg"]
