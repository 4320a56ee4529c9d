# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose names YAML would read as a number, a truth value or nothing; Kubernetes allows each of them."""

from __future__ import annotations

import pytest
from role_templates import objects, variables_of

TEMPLATES = {
    "gpushare": ({"gpushare_component_nodes": [], "__gpushare_allocation": "dra"}, "nodes"),
    "hami": ({"hami_nodes": []}, "nodes"),
    "nvidia_device_plugin": (
        {"__nvidia_device_plugin_named": [], "__nvidia_device_plugin_labels": {"nvidia.com/gpu.present": "true"}},
        "nodes",
    ),
}


@pytest.mark.parametrize("name", ["1001", "1e3", "0x10", "010", "on", "null", "1.5"])
@pytest.mark.parametrize("role", TEMPLATES)
def test_a_node_keeps_its_name(role, name):
    given, template = TEMPLATES[role]
    [node] = objects(role, template, **{key: [name] if value == [] else value for key, value in given.items()})
    assert node["metadata"]["name"] == name


@pytest.mark.parametrize("name", ["1001", "on"])
def test_the_runtime_of_a_node_and_the_pod_that_proves_a_switch_keep_it(name):
    runtimes = {"containerd": {"dump": "enable_cdi = true"}}
    hosts = {"groups": {"gpu_nodes": [name]}, "hostvars": {name: {"gpu_node": {"runtimes": runtimes}}}}
    [node] = objects("gpushare", "node_runtimes", gpushare_component_nodes=[name], **hosts)
    assert node["metadata"]["name"] == name
    needs = {"namespace": "n", "labels": {}, "node_labels": {"gpu": "on"}, "scheduler": "", "runtime_class": ""}
    needs |= {"image": "i", "command": ["true"], "resources": {}}
    switch = {**variables_of("switch", "vars"), "switch_canary_image": "", "switch_node_name": name}
    switch |= {"__switch_canary_needs": needs, "__switch_live": {"labels": {"kubernetes.io/hostname": name}}}
    [pod] = objects("switch", "canary", **switch)
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/hostname": name, "gpu": "on"}
