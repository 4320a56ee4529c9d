# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_node_info on whole simulated machines: each distribution, each source of a driver, each fault."""

from __future__ import annotations

import collections

import node_trees
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts
from ansible_collections.kubegpu.share.plugins.modules import gpu_node_info
from node_trees import TreeSystem, expected, load, part

DOCUMENTED = yaml.safe_load(gpu_node_info.RETURN)["gpu_node"]["contains"]


@pytest.fixture(params=node_trees.names(), scope="module")
def collected(request, tmp_path_factory):
    """Collect the facts of a tree once: its name, its facts, the commands that ran."""
    system = TreeSystem(tmp_path_factory.mktemp(request.param), load(request.param))
    return str(request.param), facts.observe(system, ["example.org/a:1"]), system.ran


def test_facts_are_as_expected(collected):
    tree, node, _ran = collected
    wanted = expected(tree)
    assert wanted, "a tree that expects nothing tests nothing"
    assert {path: part(node, path) for path in wanted} == wanted


def test_every_key_is_returned_and_documented(collected):
    node = collected[1]
    assert set(node) == set(DOCUMENTED)
    for section, described in DOCUMENTED.items():
        if "contains" in described and isinstance(node[section], dict):
            assert set(node[section]) == set(described["contains"]), section
        if section == "gpus" and node["gpus"]:
            assert set(node["gpus"][0]) == set(described["contains"])


def test_no_command_runs_twice(collected):
    counts = collections.Counter(line for line in collected[2] if not line.startswith("date "))
    assert [line for line, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("tree", "programs"),
    [
        # A node without a driver: packages, services and the log.
        ("debian-12-bare", ["uname", "dpkg-query", "dmesg"]),
        ("rocky-9-rpmfusion", ["uname", "rpm", "modinfo", "mokutil", "dmesg"]),
        (
            "ubuntu-24.04-cuda-repo",
            ["uname", "dpkg-query", "gcc", "modinfo", "mokutil", "nvidia-smi", "nvidia-ctk", "dmesg", "systemctl"],
        ),
        ("hgx-h100", ["nv-fabricmanager"]),
    ],
)
def test_commands_of_each_kind_of_node(tree, programs, tmp_path):
    system = TreeSystem(tmp_path, load(tree))
    facts.observe(system)
    assert set(programs) <= {line.split()[0] for line in system.ran}


# Packages, services, and one per runtime.
MOST = 13


def test_node_without_a_gpu_runs_few_commands(tmp_path):
    bare = load("debian-12-bare")
    del bare["pci"]["0000:01:00.0"]
    system = TreeSystem(tmp_path, bare)
    facts.observe(system)
    assert "dmesg" not in system.ran, "the log isn't read without a card"
    assert len(system.ran) <= MOST, system.ran


def test_machine_without_any_file_has_all_keys(tmp_path):
    node = facts.observe(TreeSystem(tmp_path, {}))
    assert set(node) == set(DOCUMENTED)
    assert (node["apt"], node["rpm"], node["packages"]) == (None, None, {})
    assert node["distribution"].items() >= {"id": "linux", "family": "linux", "major": 0}.items()
    assert (node["cgroup"], node["security"]["selinux"]) == ({"version": 0}, "")


ASKING = ("apt-cache", "dnf -C", "zypper")


@pytest.mark.parametrize(
    ("tree", "version", "asked"),
    [
        # Nothing to install: a run without changes asks nothing.
        ("ubuntu-24.04-cuda-repo", "580.95.05", False),
        ("ubuntu-24.04-cuda-repo", "590.48.01", True),
        ("debian-12-bare", "580.95.05", True),
        ("debian-12-bare", "", False),
    ],
)
def test_package_lists_are_asked_only_where_the_driver_has_to_be_installed(tree, version, asked, tmp_path):
    system = TreeSystem(tmp_path, load(tree))
    found = facts.observe(system, driver_version=version)["package_lists"]
    assert any(line.startswith(ASKING) for line in system.ran) is asked
    # A tree has no package manager that answers.
    assert (found is not None) is asked and (found is None or found["packages"] == {})
