# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook init by real ansible-playbook, and the inventory that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from allocation_snapshots import row
from ansible_collections.kubegpu.share.plugins.filter.inventory import initial_inventory
from ansible_runs import ansible

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = (
    "init_gpu_nodes=gpu-node-1=192.0.2.11,gpu-node-2=192.0.2.12",
    "init_control_plane=control-plane-1=192.0.2.1",
)


def init(folder, *variables, words=(), **more):
    extra = [word for variable in variables for word in ("-e", variable)]
    given = {"HOME": str(folder / "home"), "KUBECONFIG": "", "K8S_AUTH_KUBECONFIG": "", **more}
    return ansible(folder, "ansible-playbook", "kubegpu.share.init", *extra, *words, **given)


def written(folder):
    """The hosts of an inventory and the variables of all of them."""
    return [yaml.safe_load((folder / name).read_text()) for name in ("hosts.yml", "group_vars/all/main.yml")]


def test_the_example_inventory_is_what_init_writes(tmp_path):
    assert init(tmp_path, *EXAMPLE, words=("--check",))[0] == 0
    assert not (tmp_path / "inventory").exists()
    rc, text = init(tmp_path, *EXAMPLE)
    assert rc == 0, text
    for name in ("hosts.yml", "group_vars/all/main.yml"):
        assert (tmp_path / "inventory" / name).read_text() == (ROOT / "inventories/example" / name).read_text(), name
    rc, text = ansible(tmp_path, "ansible-inventory", "-i", "inventory", "--list")
    assert rc == 0, text
    read = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert read["gpu_nodes"]["hosts"] == ["gpu-node-1", "gpu-node-2"]
    variables = read["_meta"]["hostvars"]["gpu-node-1"]
    assert variables == {"ansible_host": "192.0.2.11", "ansible_user": "root", "gpu_kubeconfig": "~/.kube/config"}
    rc, text = init(tmp_path, "init_gpu_nodes=gpu1")
    assert rc != 0 and f"init_folder: {tmp_path}/inventory/hosts.yml and" in " ".join(text.split()), text
    assert "gpu1" not in (tmp_path / "inventory/hosts.yml").read_text()


def test_variables_of_an_archive_stand_beside_those_that_init_has_written(tmp_path):
    assert init(tmp_path, "init_gpu_nodes=gpu1")[0] == 0
    # As airgap_push.yml writes it.
    (tmp_path / "inventory/group_vars/all/airgap.yml").write_text("airgap_registry: r.example.org\n")
    rc, text = ansible(tmp_path, "ansible-inventory", "-i", "inventory", "--host", "gpu1")
    assert rc == 0 and "airgap_registry" in text and "gpu_kubeconfig" in text, text


def test_variables_of_the_old_layout_arent_hidden_by_a_folder(tmp_path):
    (tmp_path / "inventory/group_vars").mkdir(parents=True)
    (tmp_path / "inventory/group_vars/all.yml").write_text("gpu_backend: hami\n")
    rc, text = init(tmp_path, "init_gpu_nodes=gpu1")
    assert rc != 0 and f"{tmp_path}/inventory/group_vars/all.yml would be overwritten" in " ".join(text.split()), text
    assert not (tmp_path / "inventory/group_vars/all").exists()


def test_options_are_written_as_valid_yaml(tmp_path):
    given = {
        "init_folder": "inventories/prod",
        "init_kubeconfig": "admin #1.conf",
        "init_gpu_nodes": ["on", "1e5=gpu.example.org"],
        "init_user": "ada",
        "init_ssh_key": "~/.ssh/gpu",
    }
    rc, text = init(tmp_path, json.dumps(given))
    assert rc == 0 and "ansible-playbook -i inventories/prod kubegpu.share.preflight" in text, text
    hosts, variables = written(tmp_path / "inventories/prod")
    assert hosts["gpu_nodes"]["hosts"] == {"on": None, "1e5": {"ansible_host": "gpu.example.org"}}
    assert variables == {
        "ansible_become": True,
        "ansible_ssh_private_key_file": "~/.ssh/gpu",
        "ansible_user": "ada",
        "gpu_kubeconfig": f"{tmp_path}/admin #1.conf",
    }


def test_the_kubeconfig_of_the_environment_is_read_and_written(tmp_path):
    rc, text = init(tmp_path, KUBECONFIG="none.conf")
    text = " ".join(text.split())
    assert rc != 0 and f"{tmp_path}/none.conf isn't a file" in text, text
    assert "-e init_gpu_nodes=NAME=ADDRESS" in text and not (tmp_path / "inventory").exists()
    rc, text = init(tmp_path, "init_gpu_nodes=gpu1", KUBECONFIG="a.conf", K8S_AUTH_KUBECONFIG="~/b.conf:c.conf")
    assert rc == 0, text
    both = f"{tmp_path}/home/b.conf:{tmp_path}/c.conf"
    assert written(tmp_path / "inventory")[1]["gpu_kubeconfig"] == both


def node(name, address="", labels=(), capacity=None, os="Debian GNU/Linux 12"):
    return row(name, address=address, labels=dict.fromkeys(labels, "true"), capacity=capacity or {}, os=os)


SERVER = node("cp1", "192.0.2.1", ["node-role.kubernetes.io/control-plane"])
PLANE = {**SERVER, "taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}
COREOS = "Red Hat Enterprise Linux CoreOS 9.6"


@pytest.mark.parametrize(
    ("nodes", "options", "gpus", "planes", "over_api", "assumed"),
    [
        ([PLANE, node("w1", "192.0.2.2"), node("w2")], {}, ["w1", "w2"], ["cp1"], [], True),
        ([PLANE, node("w1"), node("w2", labels=["nvidia.com/gpu.present"])], {}, ["w2"], ["cp1"], [], False),
        ([node("w1"), node("w2", labels=["feature.node.kubernetes.io/pci-10de.present"])], {}, ["w2"], [], [], False),
        ([PLANE, node("w1", capacity={"aliyun.com/gpu-mem": 16}), node("w2")], {}, ["w1"], ["cp1"], [], False),
        ([node("w1", capacity={"nvidia.com/gpu": 0})], {}, ["w1"], [], [], True),
        ([PLANE, node("w1")], {"ssh": False}, [], [], ["w1"], True),
        ([{**PLANE, "os": COREOS}, node("w1", os=COREOS), node("w2")], {}, ["w2"], [], ["w1"], True),
        # A server of k3s or RKE2 is a worker, too.
        ([SERVER], {}, ["cp1"], ["cp1"], [], True),
        ([SERVER, node("w1")], {}, ["cp1", "w1"], ["cp1"], [], True),
        ([{**SERVER, "taints": [{"key": "a", "effect": "PreferNoSchedule"}]}], {}, ["cp1"], ["cp1"], [], True),
        ([SERVER, node("w1", capacity={"nvidia.com/gpu": 1})], {}, ["w1"], ["cp1"], [], False),
        ([PLANE], {}, [], ["cp1"], [], True),
        ([PLANE], {"gpu_nodes": "a=1.2.3.4, b", "control_plane": ["c"]}, ["a", "b"], ["c"], [], False),
    ],
)
def test_machines_are_those_of_the_cluster_or_named(nodes, options, gpus, planes, over_api, assumed):
    found = initial_inventory(nodes, **options)
    assert (list(found["gpu_nodes"]), list(found["control_plane"])) == (gpus, planes)
    assert (found["gpushare_nodes"], found["assumed"]) == (over_api, assumed)


def test_every_commented_option_exists_and_shows_its_default():
    specs = [yaml.safe_load(path.read_text()) for path in (ROOT / "roles").glob("*/meta/argument_specs.yml")]
    options = {
        name: option
        for spec in specs
        for entry in spec["argument_specs"].values()
        for name, option in entry.get("options", {}).items()
    }
    paragraphs = (ROOT / "inventories/example/group_vars/all/main.yml").read_text().split("\n\n")
    named = set()
    of_all = {"gpu_maintenance": "never", "gpu_backend": "gpushare", "gpu_node_software": "auto", "gpu_exclude": "[]"}
    for paragraph in paragraphs:
        example = False
        for line in paragraph.splitlines():
            match = re.fullmatch(r"# ([a-z]+_\w+): (.*)", line)
            if not match or match[1].startswith("ansible_"):
                example = "(e.g.)" in line if line.startswith("#") else example
                continue
            name = match[1]
            named.add(name)
            # Of the whole collection, and described with the roles that take it.
            if name in of_all:
                assert match[2] == of_all[name]
            elif not example:
                assert yaml.safe_load(match[2]) == options[name].get("default"), name
            else:
                assert name in options, name
    assert {"gpushare_memory_unit", "driver_version", "image_build_host", "preflight_ignore"} <= named
