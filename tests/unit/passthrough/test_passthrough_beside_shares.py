# SPDX-License-Identifier: GPL-3.0-or-later
"""Role passthrough on a node whose other cards containers share: its device plugin ends while a card is bound.

The modules are scripted: the plugin's pod is on the node while the node has the label by which a DaemonSet selects it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_runs import Ran, ansible

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, pathlib
from ansible.plugins.action import ActionBase

FOLDER = pathlib.Path({folder!r})
PLUGIN = {{"metadata": {{"uid": "u-plugin", "namespace": "gpushare-system", "name": "gpushare-device-plugin-x"}}}}

class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        given, state = self._task.args, FOLDER / "plugin"
        checked = bool(self._task.check_mode)
        if {name!r} == "cluster_objects":
            state.write_text(given["state"])
        shown = {{"cluster_objects": ["state", "field_manager", "definitions"]}}
        shown["k8s_info"] = ["namespace", "label_selectors"]
        shown["pci_binding"] = ["stopping"]
        with (FOLDER / "log").open("a") as log:
            row = [{name!r}, checked, {{key: given[key] for key in shown.get({name!r}, []) if key in given}}]
            log.write(json.dumps(row, default=str) + chr(10))
        there = state.read_text() == "present"
        if {name!r} == "k8s_info":
            return {{"changed": False, "resources": [PLUGIN] if there else []}}
        if {name!r} == "cluster_objects":
            return {{"changed": True}}
        holders = json.loads((FOLDER / "holders").read_text()) + (["u-plugin"] if there else [])
        holders = [pod for pod in holders if pod not in given.get("stopping", [])]
        refusals = [{{"code": "held_by_pod", "address": "0000:02:00.0", "pod": pod}} for pod in holders]
        result = {{"changed": True, "reboot_required": False, "busy": [], "cards": [], "refusals": refusals}}
        if (FOLDER / "fails").exists() and not checked:
            return {{"failed": True, "msg": "unbind_timeout"}}
        return {{**result, "failed": True, "msg": f"pods have it: {{holders}}"}} if refusals else result
"""
PLAY = """
- hosts: gpu2
  gather_facts: false
  roles: [kubegpu.share.passthrough]
"""
LABEL = {"node-restriction.kubernetes.io/kubegpu-share": "extender"}
GPU_BACKENDS = {
    "binding": ["gpu2"],
    "driverless": [],
    "nodes": [{"node": "gpu2", "present": ["extender"]}],
    "allocators": {
        "extender": {
            "role": "gpushare",
            "server": ["app.kubernetes.io/name", "gpushare-device-plugin"],
            "namespace": "gpushare-system",
            "restricted": [*LABEL, *LABEL.values()],
        }
    },
}


class Node:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        own, kubernetes = (
            folder / "collections/ansible_collections" / name for name in ("kubegpu/share", "kubernetes/core")
        )
        for place in (own, kubernetes):
            for name in ("plugins/action", "plugins/modules"):
                (place / name).mkdir(parents=True)
        (own / "roles/node_facts/tasks").mkdir(parents=True)
        (own / "meta").symlink_to(ROOT / "meta")
        for name in ("filter", "module_utils", "plugin_utils"):
            (own / "plugins" / name).symlink_to(ROOT / "plugins" / name)
        modules = ((own, "pci_binding"), (own, "cluster_objects"), (own, "kernel_arguments"), (kubernetes, "k8s_info"))
        for place, name in modules:
            (place / f"plugins/action/{name}.py").write_text(SCRIPT.format(folder=str(folder), name=name))
            (place / f"plugins/modules/{name}.py").write_text("")
        for name in ("__init__.py", "passthrough"):
            (own / "roles" / name).symlink_to(ROOT / "roles" / name)
        (own / "roles/node_facts/tasks/main.yml").write_text("[]\n")
        (folder / "play.yml").write_text(PLAY)
        (folder / "plugin").write_text("present")

    def run(self, holders: list[str], *words: str, fails: bool = False) -> tuple[Ran, list[Any]]:
        """Run the role, and return the output and what the modules were asked for."""
        (self._folder / "holders").write_text(json.dumps(holders))
        if fails:
            (self._folder / "fails").touch()
        (self._folder / "log").unlink(missing_ok=True)
        facts = {"iommu": {"groups": 20}, "kernel": {"installed": ["6.1"]}}
        common = {
            "ansible_python_interpreter": sys.executable,
            "passthrough_cards": ["0000:02:00.0"],
            "gpu_node": facts,
        }
        gpus = {"gpu2": {"ansible_connection": "local"}}
        localhost = {"localhost": {"gpu_backends": GPU_BACKENDS, "ansible_connection": "local"}}
        (self._folder / "hosts.yml").write_text(
            yaml.safe_dump({"all": {"hosts": {**gpus, **localhost}, "vars": common}})
        )
        path = str(self._folder / "collections")
        done = ansible(
            self._folder, "ansible-playbook", "-i", "hosts.yml", "play.yml", *words, ANSIBLE_COLLECTIONS_PATH=path
        )
        assert "PLAY RECAP" in done.text, done.text[-3000:]
        return done, [json.loads(line) for line in (self._folder / "log").read_text().splitlines()]

    @property
    def labelled(self) -> bool:
        return (self._folder / "plugin").read_text() == "present"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_device_plugin_ends_while_a_card_is_bound_and_comes_back(node: Node) -> None:
    done, calls = node.run([])
    assert done.rc == 0, done.text[-3000:]
    assert [(name, checked) for name, checked, _given in calls] == [
        ("pci_binding", True),
        ("k8s_info", False),
        ("cluster_objects", False),
        ("k8s_info", False),
        ("pci_binding", False),
        ("cluster_objects", False),
    ]
    wanted = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu2", "labels": LABEL}}
    for (_name, _checked, given), state in zip((calls[2], calls[5]), ("absent", "present"), strict=True):
        assert given == {"state": state, "field_manager": "kubegpu-share-restricted", "definitions": [wanted]}
    # In that namespace alone: a tenant's pod with the label would end the device plugin, or be waited for.
    servers = {"namespace": "gpushare-system", "label_selectors": ["app.kubernetes.io/name=gpushare-device-plugin"]}
    assert calls[1][2] == calls[3][2] == servers
    assert node.labelled


def test_it_comes_back_after_a_binding_that_failed(node: Node) -> None:
    done, _calls = node.run([], fails=True)
    assert done.rc != 0 and "unbind_timeout" in done.text and node.labelled, done.text[-3000:]


def test_a_card_that_a_pod_of_somebody_has_is_refused_before_the_plugin_ends(node: Node) -> None:
    done, calls = node.run(["u-other"])
    assert done.rc != 0 and "u-other" in done.text, done.text[-3000:]
    assert "cluster_objects" not in {name for name, _checked, _given in calls}


def test_check_mode_predicts_the_binding_and_takes_nothing_off_the_node(node: Node) -> None:
    done, calls = node.run([], "--check")
    assert done.rc == 0 and done.changed == 1, done.text[-3000:]
    assert [(name, checked) for name, checked, _given in calls] == [
        ("pci_binding", True),
        ("k8s_info", True),
        ("pci_binding", True),
    ]
    [(option, stopping)] = calls[2][2].items()
    # Ansible's union has an order of its own in each process.
    assert (option, set(stopping)) == ("stopping", {"u-plugin", "gpushare-system/gpushare-device-plugin-x"})
    assert len(stopping) == 2 and node.labelled
    done, calls = node.run(["u-other"], "--check")
    assert done.rc != 0 and "u-other" in done.text and calls[2][2] == {"stopping": []}, done.text[-3000:]


def test_nothing_is_predicted_outside_of_check_mode(node: Node) -> None:
    _done, calls = node.run([])
    assert [given for name, _checked, given in calls if name == "pci_binding"] == [{}, {"stopping": []}]
