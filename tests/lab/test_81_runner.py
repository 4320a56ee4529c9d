# SPDX-License-Identifier: GPL-3.0-or-later
"""ansible-runner, AWX's engine, runs the built collection on the lab with the execution environment's packages.

There is no container: the packages are in a virtual environment of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _lab import INVENTORY, ROOT, JsonObject, Lab

sys.path.insert(0, str(ROOT / "tests"))

import built_collection
import runner

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[runner.Environment]:
    with built_collection.installed() as (folder, _paths):
        yield runner.Environment(tmp_path_factory.mktemp("awx"), folder / "collections")


@pytest.fixture(scope="module")
def inventory() -> JsonObject:
    """The lab's inventory without its kubeconfig, which is a credential's."""
    command = [str(Path(sys.executable).parent / "ansible-inventory"), "-i", INVENTORY, "--list", "--export"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: JsonObject = json.loads(done.stdout)
    del found["all"]["vars"]["gpu_kubeconfig"]
    return found


def run(lab: Lab, environment: runner.Environment, inventory: JsonObject, playbook: str, become: bool) -> runner.Done:
    credential = {
        "file": {"template": lab.kubeconfig.read_text()},
        "env": {"K8S_AUTH_KUBECONFIG": "PATH"},
        "extra_vars": {"gpu_kubeconfig": "PATH"},
    }
    words = ["-u", "root", *(["--become"] if become else []), "--forks", "20", "--diff"]
    done = environment.job(f"playbooks/{playbook}.yml", inventory, credential, *words)
    assert (done.rc, done.status) == (0, "successful"), done.output[-6000:]
    assert not done.results("runner_on_failed") and not done.results("runner_on_unreachable"), done.output[-6000:]
    return done


@pytest.mark.parametrize("playbook", ["preflight", "plan", "site"])
def test_a_set_up_lab_stays_as_it_is(
    lab: Lab, environment: runner.Environment, inventory: JsonObject, playbook: str
) -> None:
    done = run(lab, environment, inventory, playbook, become=True)
    [totals] = [event["event_data"] for event in done.events if event["event"] == "playbook_on_stats"]
    assert not totals["changed"], done.output[-6000:]
    assert set(lab.gpu_nodes) <= set(totals["ok"]), totals
    if playbook == "plan":
        assert "gpu_plan" in done.artifacts


def test_verify_and_inspect_leave_their_results(
    lab: Lab, environment: runner.Environment, inventory: JsonObject
) -> None:
    verified = run(lab, environment, inventory, "verify", become=True).artifacts["gpu_verify"]
    assert verified["counts"]["FAIL"] == 0 and verified["counts"]["PASS"] > 0, verified
    inspected = run(lab, environment, inventory, "inspect", become=False).artifacts["gpu_inspect"]
    assert {node["name"] for node in inspected["nodes"]} == set(lab.gpu_nodes)
    units = sum(card["units"] for name in lab.gpu_nodes for card in lab.cards(name))
    assert [one["total"] for one in inspected["totals"]] == [units]
