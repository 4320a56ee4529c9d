# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_node_info over whole made-up machines: each distribution, each way to have a driver, each failure."""

from __future__ import annotations

import collections

import node_trees
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _node_info
from ansible_collections.kubegpu.share.plugins.modules import gpu_node_info
from node_trees import TreeSystem, expected, load, part

KEYS = set(
    [
        "distribution",
        "python",
        "kernel",
        "secure_boot",
        "security",
        "mok",
        "reboot_required",
        "services",
        "gpus",
        "nvswitches",
        "nouveau",
        "driver",
        "memory_limit",
        "toolkit",
        "cdi",
        "cgroup",
        "devices",
        "dkms",
        "log",
        "apt",
        "rpm",
        "packages",
        "sources_stale",
        "runtimes",
        "kubelet",
        "first_look",
        "toolkit_legacy",
        "maintenance",
        "images",
    ]
)


@pytest.fixture(params=node_trees.names())
def tree(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_is_seen_of_it(tree, tmp_path):
    seen = _node_info.observe(TreeSystem(tmp_path, load(tree)))
    wanted = expected(tree)
    assert wanted, "a tree that expects nothing tests nothing"
    assert {path: part(seen, path) for path in wanted} == wanted


def test_every_key_is_there_and_documented(tree, tmp_path):
    seen = _node_info.observe(TreeSystem(tmp_path, load(tree)))
    assert set(seen) == KEYS
    documented = node_trees.yaml.safe_load(gpu_node_info.RETURN)["gpu_node"]["contains"]
    assert set(documented) == KEYS
    for section, described in documented.items():
        if "contains" in described and isinstance(seen[section], dict):
            assert set(seen[section]) == set(described["contains"]), section
        if section == "gpus" and seen["gpus"]:
            assert set(seen["gpus"][0]) == set(described["contains"])


def test_no_command_runs_twice(tree, tmp_path):
    system = TreeSystem(tmp_path, load(tree))
    _node_info.observe(system, ["example.org/a:1"])
    assert [
        line for line, count in collections.Counter(system.ran).items() if count > 1 and not line.startswith("date ")
    ] == []


@pytest.mark.parametrize(
    ("tree", "programs"),
    [
        # A node without a card costs what its packages and services cost, and nothing for NVIDIA.
        ("debian-12-bare", ["uname", "dpkg-query", "dmesg"]),
        ("rocky-9-rpmfusion", ["uname", "rpm", "modinfo", "mokutil", "dmesg"]),
        (
            "ubuntu-24.04-cuda-repo",
            ["uname", "dpkg-query", "gcc", "modinfo", "mokutil", "nvidia-smi", "nvidia-ctk", "dmesg", "systemctl"],
        ),
        ("hgx-h100", ["nv-fabricmanager"]),
    ],
)
def test_what_is_run_for_it(tree, programs, tmp_path):
    system = TreeSystem(tmp_path, load(tree))
    _node_info.observe(system)
    assert set(programs) <= {line.split()[0] for line in system.ran}


# Its packages, its services, and for each runtime whether it is there.
MOST = 13


def test_a_node_without_a_gpu_costs_few_commands(tmp_path):
    bare = load("debian-12-bare")
    del bare["pci"]["0000:01:00.0"]
    system = TreeSystem(tmp_path, bare)
    _node_info.observe(system)
    assert "dmesg" not in system.ran, "the log of a machine without a card is nobody's business"
    assert len(system.ran) <= MOST, system.ran


def test_a_machine_with_nothing_at_all(tmp_path):
    seen = _node_info.observe(TreeSystem(tmp_path, {}))
    assert set(seen) == KEYS
    assert (seen["apt"], seen["rpm"], seen["packages"]) == (None, None, {})
    assert (seen["distribution"]["id"], seen["distribution"]["family"], seen["distribution"]["major"]) == (
        "linux",
        "linux",
        0,
    )
