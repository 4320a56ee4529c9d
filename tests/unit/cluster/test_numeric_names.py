# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose names YAML would read as a number, a truth value or nothing; Kubernetes allows each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import wanted_backends
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import stages
from role_templates import evaluated, objects, variables_of

ROOT = Path(__file__).resolve().parents[3]

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
    [pod] = objects("switch", "canary", **switch, __switch_canary_needs=needs)
    [term] = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchFields"][0]["values"] == [name] and pod["spec"]["nodeSelector"] == {"gpu": "on"}


def test_a_name_that_yaml_read_as_a_number_is_the_nodes_name():
    hosts = {"groups": {"gpu_nodes": ["gpu-1"]}, "hostvars": {"gpu-1": {"gpu_node_name": 1001, "gpu_backend": "hami"}}}
    found = wanted_backends(hosts["hostvars"], hosts["groups"]["gpu_nodes"], [1002])
    assert [(one["node"], one["backend"]) for one in found] == [("1002", "gpushare"), ("1001", "hami")]
    hosts["hostvars"]["gpu-1"]["gpu_node"] = {"runtimes": {"containerd": {"dump": "enable_cdi = true"}}}
    [node] = objects("gpushare", "node_runtimes", gpushare_component_nodes=["1001"], **hosts)
    assert node["metadata"]["name"] == "1001"


def test_uninstall_refuses_pods_of_a_node_whose_name_yaml_read_as_a_number():
    [text] = [
        play["vars"]["__uninstall_names"]
        for play in yaml.safe_load((ROOT / "playbooks/uninstall.yml").read_text())
        if "__uninstall_names" in play.get("vars", {})
    ]
    given = {"__uninstall_hosts": ["gpu-1"], "hostvars": {"gpu-1": {"gpu_node_name": 1001}}, "__uninstall_all": True}
    assert set(evaluated(text, gpushare_nodes=[1002], **given)) == {"gpu-1", "1001", "1002"}


def test_every_expression_takes_a_hosts_node_name_as_text():
    files = [
        path for folder in ("playbooks", "roles") for path in (ROOT / folder).rglob("*.*") if path.parent.name != "meta"
    ]
    with_default = re.compile(r"gpu_node_name \| default\([^)]*\)( \| string)?")
    found = [(file.name, match) for file in files for match in with_default.finditer(file.read_text())]
    assert len(found) >= 9
    assert [(name, match[0]) for name, match in found if not match[1]] == []
    assert stages.NODE.endswith("| string")
