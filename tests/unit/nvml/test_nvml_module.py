# SPDX-License-Identifier: GPL-3.0-or-later
"""The task ``nvml_info`` in a real play over the lab's driver: nvidia-ml-py is copied from the controller."""

from __future__ import annotations

import json
import os
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_runs import ansible
from nvml_kit import compiled
from simulated_driver import CARDS, FIRST, SECOND

# A Python without nvidia-ml-py, as on a node.
NODES_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[JsonObject]:
    """The results of three tasks of one play."""
    folder = compiled(tmp_path_factory.mktemp("played"), "615.71.09")
    (folder / "cards").write_text(CARDS)
    if not os.path.exists(NODES_PYTHON):
        pytest.skip(f"no {NODES_PYTHON} on this machine")
    task = "kubegpu.share.nvml_info"
    play = [
        {
            "hosts": "all",
            "gather_facts": False,
            "tasks": [
                {task: {"timeout": 20}, "register": "one"},
                {task: {"timeout": 0}, "register": "two", "ignore_errors": True},
                {task: {"binding": "/nowhere/pynvml.py"}, "register": "three", "check_mode": True},
                {"copy": {"content": "{{ [one, two, three] | to_json }}", "dest": str(folder / "results")}},
            ],
        }
    ]
    (folder / "play.json").write_text(json.dumps(play))
    done = ansible(
        folder,
        *("ansible-playbook", "-i", "node,", "-c", "local", "play.json"),
        *("-e", f"ansible_python_interpreter={NODES_PYTHON}"),
        LD_LIBRARY_PATH=str(folder),
        KUBEGPU_SIM_CARDS=str(folder / "cards"),
        HOME=str(folder),
    )
    assert done.rc == 0, done.text
    assert not list((folder / ".ansible" / "tmp").glob("*")), "the copy of nvidia-ml-py is removed"
    return t.cast("list[JsonObject]", json.loads((folder / "results").read_text()))


def test_the_cards_are_returned(played: list[JsonObject]) -> None:
    found = played[0]
    assert (found["changed"], found["nvml"]["problem"]) == (False, "")
    assert [card["uuid"] for card in found["nvml"]["cards"]] == [FIRST, SECOND] and found["nvml"]["available"]


def test_an_invalid_time_limit_is_reported(played: list[JsonObject]) -> None:
    assert played[1]["failed"] and played[1]["msg"] == "timeout: 0 isn't between 1 and 600 seconds"


def test_without_nvidia_ml_py_the_problem_is_reported(played: list[JsonObject]) -> None:
    found = played[2]
    assert not found.get("failed")
    if found["nvml"]["available"]:
        pytest.skip(f"{NODES_PYTHON} of this machine has nvidia-ml-py")
    assert "nvidia-ml-py isn't on this node" in found["nvml"]["problem"] and found["nvml"]["cards"] == []
