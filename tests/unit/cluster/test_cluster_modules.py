# SPDX-License-Identifier: GPL-3.0-or-later
"""The agreement of modules' options and documentation, and the nodes that ``cluster_info`` returns."""

from __future__ import annotations

import importlib

import pytest
import yaml
from ansible.module_utils import basic
from ansible_collections.kubegpu.share.plugins.action import preflight
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect
from ansible_collections.kubegpu.share.plugins.modules import preflight as preflight_module
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


def test_the_documentation_has_the_action_plugins_options():
    compare(yaml.safe_load(preflight_module.DOCUMENTATION)["options"], preflight.ARGUMENTS)
