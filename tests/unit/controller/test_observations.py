# SPDX-License-Identifier: GPL-3.0-or-later
"""Observations of machines have the types that their modules promise, or fail the task of that machine alone."""

from __future__ import annotations

import copy
import json
import sys

import action_plugins
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.action import image_build
from ansible_collections.kubegpu.share.plugins.module_utils._images.build import archive_of, bill_of
from ansible_collections.kubegpu.share.plugins.module_utils._node.facts import observe
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations
from ansible_runs import ROOT, ansible
from node_trees import TreeSystem, load
from taken_machine import TakenMachine

TREES = sorted(path.parent.name for path in (ROOT / "tests/unit/node/trees").glob("*/tree.yml"))


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    tree = TreeSystem(tmp_path_factory.mktemp("tree"), load("hgx-h100"))
    return json.loads(json.dumps(observe(tree, content=True)))


@pytest.mark.parametrize("tree", TREES)
def test_what_real_machines_answer_is_accepted(tmp_path, tree):
    found = json.loads(json.dumps(observe(TreeSystem(tmp_path, load(tree)), content=True)))
    assert observations.problem("gpu_node_info", {"gpu_node": found}) == ""


def nested(levels):
    value = {}
    for _level in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("", [], "gpu_node is a list, not a dictionary"),
        ("", "x", "gpu_node is text, not a dictionary"),
        ("driver", None, "gpu_node.driver is null, not a dictionary"),
        ("distribution.id", {"a": 1}, "gpu_node.distribution.id is a dictionary, not text"),
        ("distribution.id", "../../../../tmp/x", "gpu_node.distribution.id is '../../../../tmp/x', which doesn't have"),
        ("distribution.version", "/tmp/x.1", "gpu_node.distribution.version is '/tmp/x.1', which"),
        ("distribution.family", "debian\n", "gpu_node.distribution.family is 'debian\\n', which doesn't have the form"),
        ("distribution.major", "24", "gpu_node.distribution.major is text, not int"),
        ("distribution.major", True, "gpu_node.distribution.major is a truth value, not int"),
        ("distribution.name", "\ud800", "gpu_node.distribution.name isn't valid text"),
        ("driver.root", "/run/../etc", "gpu_node.driver.root is '/run/../etc', which doesn't have the form"),
        ("driver.module_version", ["580"], "gpu_node.driver.module_version is a list, not text"),
        ("driver.cards", {"0": {}}, "gpu_node.driver.cards is a dictionary, not a list"),
        ("toolkit.binaries", ["/tmp/x/nvidia-ctk"], "gpu_node.toolkit.binaries[0] is '/tmp/x/nvidia-ctk', which"),
        ("services", {"x": "active"}, "gpu_node.services.'x' is text, not a dictionary"),
        ("driver.runfile", nested(10_000), "is nested too deep"),
        ("more", 1, "gpu_node has the unknown key 'more'"),
        ("distribution.name", "x" * (17 << 20), "it is larger than any machine's"),
        ("gpus", [{}] * 600_000, "gpu_node.gpus[0] has no"),
        ("kernel.installed", ["x"] * 600_000, "it is larger than any machine's"),
    ],
)
def test_another_shape_is_one_sentence(node, path, value, sentence):
    changed = {"gpu_node": copy.deepcopy(node)}
    place, *keys = ["gpu_node", *filter(None, path.split("."))]
    where = changed
    for key in keys:
        where, place = where[place], key
    where[place] = value
    said = observations.problem("gpu_node_info", changed)
    assert sentence in said and "\n" not in said and len(said) < 500


def test_a_missing_section_is_named(node):
    assert "gpu_node has no kernel" in observations.problem(
        "control_plane_info", {"gpu_node": {key: value for key, value in node.items() if key != "kernel"}}
    )


def test_only_the_machine_that_answers_otherwise_fails(tmp_path):
    taken = TakenMachine(tmp_path)
    taken.adds(gpu_node={"distribution": "everything"}, nvml=[], kubelet={"root": 1})
    hosts = {
        "good": {"ansible_python_interpreter": sys.executable},
        "taken": {"ansible_python_interpreter": str(taken.python)},
    }
    inventory = {"all": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    facts = {"ansible.builtin.include_role": {"name": "kubegpu.share.node_facts"}}
    more = [
        {f"kubegpu.share.{name}": {}, "register": name, "ignore_errors": True}
        for name in ("nvml_info", "kubelet_devices_info")
    ]
    told = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} {{ gpu_node.distribution.family }}"}}
    play = {"hosts": "all", "gather_facts": False, "tasks": [*more, facts, told]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    (tmp_path / "empty.cfg").touch()
    done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", "play.yml", ANSIBLE_CONFIG="empty.cfg")
    said = " ".join(done.text.split())
    for name in ("nvml_info", "kubelet_devices_info", "gpu_node_info"):
        assert said.count(f"The machine's answer isn't what {name} returns") == 2, done.text
    assert "fatal: [taken]" in said and "Traceback" not in said and "fatal: [good]" not in said
    assert '"msg": "good ' in said and '"msg": "taken ' not in said


@pytest.mark.parametrize(
    ("archives", "refused"),
    [
        (lambda right: right, False),
        (lambda right: {**right, "linux/amd64": "/tmp/ansible.cfg"}, True),
        (lambda right: {**right, "x": right["linux/amd64"]}, True),
        (lambda right: [], True),
        (lambda right: {}, True),
    ],
)
def test_a_build_machine_chooses_no_names_of_files_on_the_controller(monkeypatch, archives, refused):
    params = {
        "reference": "localhost/x/y:1",
        "folder": "/srv/images",
        "platforms": ["linux/amd64"],
        "base": "localhost/b:1",
    }
    right = {"linux/amd64": archive_of(params, "linux/amd64")}
    answer = {
        "changed": False,
        "archives": archives(right),
        "bills": {one: bill_of(path) for one, path in right.items()},
    }
    action = action_plugins.load(image_build, params)
    monkeypatch.setattr(action, "_execute_module", lambda module_args, task_vars: dict(answer))
    done = action.run(task_vars={})
    assert bool(done.get("failed")) is refused, done
