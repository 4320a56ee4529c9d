# SPDX-License-Identifier: GPL-3.0-or-later
"""Observations of machines have the types that their modules promise, or fail the task of that machine alone."""

from __future__ import annotations

import copy
import json
import sys
import time

import action_plugins
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.action import image_build
from ansible_collections.kubegpu.share.plugins.module_utils._documents import toml_editor
from ansible_collections.kubegpu.share.plugins.module_utils._hami import values as hami_runtime
from ansible_collections.kubegpu.share.plugins.module_utils._images.build import archive_of, bill_of
from ansible_collections.kubegpu.share.plugins.module_utils._node.facts import observe
from ansible_collections.kubegpu.share.plugins.module_utils._nvidia import plan as nvidia_plan
from ansible_collections.kubegpu.share.plugins.module_utils._preflight import node as preflight_node
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.properties import injects_cdi
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import observations, python_probe
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
        ("kernel.installed", ["x" * (200 << 10)] * 100, "it is larger than any machine's"),
        ("distribution.name", "x" * (300 << 10), "gpu_node.distribution.name is longer than any machine's"),
        ("driver.module_version", "5" * 5000, "gpu_node.driver.module_version has a number that is longer"),
        ("distribution.major", 10**400, "gpu_node.distribution.major is a number that no machine has"),
        ("driver.runfile", {"x": float("nan")}, "is a number that no machine has"),
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"address": "../../../etc"}, "gpus[0].address is '../../../etc', which doesn't have the form"),
        ({"group": [{"address": "0000:01:00.0/../.."}]}, "gpus[0].group[0]"),
        ({"iommu_group": "12"}, "gpus[0].iommu_group is text, not int"),
        ({"vgpu_host": {"framework": "xen", "types": [], "vgpus": []}}, "gpus[0].vgpu_host.framework is 'xen', which"),
        (
            {"vgpu_host": {"framework": "mdev", "types": [{"id": "../x", "name": "", "available": 1}], "vgpus": []}},
            "gpus[0].vgpu_host.types[0].id is '../x', which",
        ),
    ],
)
def test_what_paths_are_made_of_has_its_form(node, changes, sentence):
    changed = copy.deepcopy(node)
    changed["gpus"][0].update(changes)
    assert sentence in observations.problem("gpu_node_info", {"gpu_node": changed})


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


def test_a_machine_says_nothing_of_preflights_own_about_itself(tmp_path):
    """And one that has no facts isn't left out of what is checked."""
    hosts = {"good": {"ansible_python_interpreter": sys.executable}}
    for name, added in (("says", {"trouble": {"id": "x"}}), ("hides", {"replaced": {"gpu_node": None}})):
        (tmp_path / name).mkdir()
        hosts[name] = {"ansible_python_interpreter": str(TakenMachine(tmp_path / name).python)}
        (tmp_path / name / "added.json").write_text(json.dumps(added))
    given = {"ansible_connection": "local", "preflight_scope": "nodes", "gpushare_image_delivery": "registry"}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_nodes": {"hosts": hosts, "vars": given}}))
    machines = {"name": "kubegpu.share.preflight", "tasks_from": "machines"}
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.import_role": machines}]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    (tmp_path / "empty.cfg").touch()
    done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", "play.yml", ANSIBLE_CONFIG="empty.cfg")
    said = " ".join(done.text.split())
    assert "Problems, listed above" in said and said.count("no-facts") == 1, done.text
    assert "no-facts hides" in said and "has no facts" in said, done.text


@pytest.mark.parametrize("blank", ["\n", " ", "\t\n", "\r\n"])
def test_texts_of_a_machine_are_searched_in_linear_time(node, blank):
    """The longest text that is accepted, in which each search could begin anew at each line."""
    text = blank * (observations.LONGEST_TEXT // len(blank))
    state = {"dump": text, "default_runtime": None}
    changed = {**node, "runtimes": {**node["runtimes"], "containerd": state}}
    changed |= {"kubelet": {"runtime": "containerd", "cgroup_driver": "systemd"}}
    changed |= {"toolkit": {**node["toolkit"], "config": {**(node["toolkit"]["config"] or {}), "text": text}}}
    began = time.process_time()
    nvidia_plan.injection_of(changed)
    hami_runtime.node_runtime("gpu1", changed)
    preflight_node.examine(preflight_node.Machine("gpu1", changed, preflight_node.NodeOptions(), "GiB", "off"))
    assert not injects_cdi(state)
    python_probe.node("VERSION\n" * 30_000)
    assert time.process_time() - began < 5


def test_a_deep_key_of_a_machines_file_is_one_sentence():
    with pytest.raises(toml_editor.Unparsable, match="nested too deeply"):
        toml_editor.Document("config.toml", "a" + ".a" * 3000 + " = 1")


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
