# SPDX-License-Identifier: GPL-3.0-or-later
"""The main() of each module with a simulated API server, and the agreement of options and documentation."""

from __future__ import annotations

import importlib
import json

import pytest
import yaml
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import AUTH_ARG_SPEC
from fake_kube import FakeKube

MODULES = "ansible_collections.kubegpu.share.plugins.modules."
ACTIONS = "ansible_collections.kubegpu.share.plugins.action."

CARDS = [contract.Card(0, "GPU-aaaaaaaa", 0, 16384, 16, True, "T4")]
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {
        "name": "gpu1",
        "labels": {"gpushare": "true"},
        "annotations": {contract.NODE_CARDS: contract.cards_to_annotation(CARDS)},
    },
    "status": {
        "capacity": {contract.RESOURCE_MEMORY: "16"},
        "allocatable": {contract.RESOURCE_MEMORY: "16"},
        "nodeInfo": {"containerRuntimeVersion": "containerd://2.2.9"},
        "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
    },
}


@pytest.fixture
def kube(monkeypatch):
    return FakeKube(NODE)


def call(name, kube, monkeypatch, capsys, **arguments):
    module = importlib.import_module(MODULES + name)

    def client(_module):
        if isinstance(kube, Exception):
            raise kube
        return kube

    monkeypatch.setattr(module.RealKube, "of_module", staticmethod(client))
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def test_cluster_objects(kube, monkeypatch, capsys):
    definition = "apiVersion: v1\nkind: Namespace\nmetadata: {name: n}\n"
    arguments = {"definitions": definition, "_ansible_diff": True}
    predicted = call("cluster_objects", kube, monkeypatch, capsys, **arguments, _ansible_check_mode=True)
    done = call("cluster_objects", kube, monkeypatch, capsys, **arguments)
    assert predicted["changed"] and done["changed"]
    assert predicted["diff"] == done["diff"]
    assert done["objects"] == [{"kind": "Namespace", "namespace": "", "name": "n", "action": "created"}]
    assert not call("cluster_objects", kube, monkeypatch, capsys, **arguments)["changed"]


def test_cluster_info(kube, monkeypatch, capsys):
    found = call("cluster_info", kube, monkeypatch, capsys)
    assert found["version"] == "v1.36.3"
    assert found["nodes"][0]["runtime"] == "containerd://2.2.9"
    assert (found["nodes"][0]["address"], found["sharing_pods"]) == ("192.0.2.1", None)


def test_gpu_allocation_info(kube, monkeypatch, capsys):
    found = call("gpu_allocation_info", kube, monkeypatch, capsys)
    assert (found["total"], found["used"], found["unit"]) == (16, 0, "GiB")
    assert found["table"].startswith("NAME:       gpu1\n")
    assert found["requests"] == {"GET": 2}


def test_an_error_fails_the_module(monkeypatch, capsys):
    found = call("cluster_info", BadInput("kubeconfig: is no file", more=1), monkeypatch, capsys)
    assert (found["failed"], found["msg"], found["more"]) == (True, "kubeconfig: is no file", 1)


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
    compare(documented, {key: value for key, value in found.items() if key not in AUTH_ARG_SPEC})
    assert set(AUTH_ARG_SPEC) <= set(found)


def compare(documented, spec):
    assert set(documented) == set(spec)
    for option, one in spec.items():
        described = documented[option]
        assert described["type"] == one.get("type", "str"), option
        for key in ("default", "choices", "elements", "required"):
            assert described.get(key) == one.get(key), (option, key)


def test_the_documentation_has_the_action_plugins_options():
    action = importlib.import_module(ACTIONS + "preflight")
    documented = yaml.safe_load(importlib.import_module(MODULES + "preflight").DOCUMENTATION)["options"]
    compare(documented, action.ARGUMENTS)
