# SPDX-License-Identifier: GPL-3.0-or-later
"""The agreement of modules' options and documentation, and the nodes that ``cluster_info`` returns."""

from __future__ import annotations

import importlib
from unittest.mock import Mock

import pytest
import yaml
from action_plugins import load
from ansible.module_utils import basic
from ansible_collections.kubegpu.share.plugins.action import cluster_info
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import unpacked
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import LibraryMissing
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.results import clean_json
from fake_kube import FakeKube

MODULES = "ansible_collections.kubegpu.share.plugins.modules."
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "gpu1", "labels": {"gpushare": "true"}},
    "status": {
        "nodeInfo": {"containerRuntimeVersion": "containerd://2.2.9"},
        "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
    },
}


def test_cluster_info():
    found = collect(FakeKube(NODE), {"scheduler": None, "memory_unit": None})
    assert (found["version"], found["sharing_pods"]) == ("v1.36.3", None)
    assert (found["nodes"][0]["runtime"], found["nodes"][0]["address"]) == ("containerd://2.2.9", "192.0.2.1")


def test_plays_get_the_rows_that_they_read_and_preflight_all_of_them_as_one_text():
    # Ansible copies and evaluates data value by value in each task: of 5,000 nodes that took eight seconds.
    control = {"node-role.kubernetes.io/control-plane": ""}
    kinds = {"gpu1": {"gpushare": "true"}, "hami1": {"kubegpu.share/backend": "hami"}, "cp1": control}
    nodes = [{**NODE, "metadata": {"name": name, "labels": labels}} for name, labels in kinds.items()]
    noted = {"kubegpu.share/switch": "x", "other": "y"}
    for name, notes in (("switched", noted), ("named", {}), ("theirs", {"other": "y"})):
        nodes.append({**NODE, "metadata": {"name": name, "labels": {"a": "b"}, "annotations": notes}})
    asked = {"wanted": [{"node": "named", "backend": "nvidia", "allocation": "extender"}], "values": {}}
    given = {"scheduler": None, "memory_unit": None, "backends": {**asked, "switch": [], "alone": []}}
    whole = collect(FakeKube(*nodes), given)
    found = collect(FakeKube(*nodes), {**given, "nodes": "text"})
    assert "all_nodes" not in whole and clean_json(unpacked(found["all_nodes"])) == whole["nodes"]
    assert [row["name"] for row in found["nodes"]] == [*kinds, "switched", "named"]
    kube = FakeKube(*nodes)
    assert collect(kube, {"scheduler": None, "memory_unit": None, "nodes": "none"})["version"] == "v1.36.3"
    assert kube.requests["GET"] == 1


def test_a_text_of_json_hides_no_characters():
    assert clean_json('[{"name": "a\\u001b[2Jb\\nc"}]') == [{"name": "a\ufffd[2Jb c"}]


def info(monkeypatch, transport="local", become=None, environment=None, missing="", **args):
    """Run the action on a cluster of one node; return its result and the options of the modules that it executed."""
    connected, executed = [], []

    def connect(module):
        connected.append(module.params["kubeconfig"])
        if missing:
            raise LibraryMissing(missing)
        return FakeKube(NODE)

    monkeypatch.setattr(cluster_info, "connect", connect)
    connection = Mock(transport=transport, become=become)
    action = load(cluster_info, args, connection=connection)
    action._task.environment = environment
    action._loader.set_basedir("/playbooks")
    monkeypatch.setattr(
        action, "_execute_module", lambda module_args, task_vars: executed.append(module_args) or {"version": "module"}
    )
    return action.run(task_vars={}), connected, executed


def test_cluster_info_is_read_by_the_tasks_own_process_on_the_controller(monkeypatch):
    found, connected, executed = info(monkeypatch, kubeconfig="a/config")
    assert (found["version"], found["changed"], executed) == ("v1.36.3", False, [])
    # As the module has it, which runs in the folder of the playbook.
    assert connected == ["/playbooks/a/config"]
    assert info(monkeypatch, kubeconfig="/root/config")[1] == ["/root/config"]
    assert info(monkeypatch, kubeconfig={"users": []})[1] == [{"users": []}]
    assert info(monkeypatch)[1] == [None]
    assert info(monkeypatch, environment=[{}])[2] == []


@pytest.mark.parametrize(
    "other",
    [
        {"transport": "ssh"},
        {"become": "sudo"},
        {"environment": [{"HTTPS_PROXY": "http://proxy"}]},
        {"missing": "No module named kubernetes"},
    ],
)
def test_cluster_info_is_executed_where_a_module_sees_another_environment(monkeypatch, other):
    found, connected, executed = info(monkeypatch, kubeconfig="a", **other)
    assert (found["version"], executed) == ("module", [{"kubeconfig": "a"}])
    assert connected == (["/playbooks/a"] if "missing" in other else [])


@pytest.mark.parametrize("name", ["cluster_objects", "cluster_info", "gpu_allocation_info"])
def test_the_documentation_has_the_modules_options(name, monkeypatch):
    module = importlib.import_module(MODULES + name)
    found = {}

    class Stop(Exception):
        pass

    def init(self, argument_spec, supports_check_mode):
        found.update(argument_spec)
        assert supports_check_mode
        raise Stop

    monkeypatch.setattr(basic.AnsibleModule, "__init__", init)
    with pytest.raises(Stop):
        module.main()
    documented = yaml.safe_load(module.DOCUMENTATION).get("options", {})
    compare(documented, {key: value for key, value in found.items() if key not in auth_arguments()})
    assert set(auth_arguments()) <= set(found)


def compare(documented, spec):
    assert set(documented) == set(spec)
    for option, one in spec.items():
        described = documented[option]
        assert described["type"] == one.get("type", "str"), option
        for key in ("default", "choices", "elements", "required"):
            assert described.get(key) == one.get(key), (option, key)
