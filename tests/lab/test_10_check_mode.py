# SPDX-License-Identifier: GPL-3.0-or-later
"""``site.yml --check --diff`` on untouched machines succeeds, changes nothing and lists every change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from _lab import Done, Lab
from _snapshot import BASELINE, cluster_objects, node_files

Before = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def checked(lab: Lab) -> tuple[Done, Before]:
    """The run, and the state before it."""
    if any(re.search(r"nvidia|nouveau|/[0-9]*kubegpu-(?!lab)", path) for path in node_files(lab, lab.gpu_nodes[0])):
        pytest.fail("The lab has been touched: run make lab-down lab-up first.", pytrace=False)
    before = {name: node_files(lab, name) for name in lab.nodes}
    before["objects"] = cluster_objects(lab)
    done = lab.playbook("playbooks/site.yml", "--check", "--diff")
    BASELINE.write_text(json.dumps({"before": before, "diff": done.out}))
    return done, before


def test_it_succeeds(checked: tuple[Done, Before]) -> None:
    done = checked[0]
    assert done.rc == 0, done.out[-8000:]
    assert done.recap, done.out[-8000:]
    for host, sums in done.recap.items():
        assert sums["failed"] == sums["unreachable"] == 0, f"{host}: {sums}"
        assert sums["changed"] > 0, f"{host} would have nothing to do: {sums}"


def test_it_changes_nothing(lab: Lab, checked: tuple[Done, Before]) -> None:
    before = checked[1]
    assert {name: node_files(lab, name) for name in lab.nodes} == {name: before[name] for name in lab.nodes}
    assert cluster_objects(lab) == before["objects"]


def test_the_plan_names_what_check_mode_names(lab: Lab, checked: tuple[Done, Before], tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    done = lab.playbook("playbooks/plan.yml", "-e", f"plan_output={output}")
    done.assert_unchanged()
    plan = json.loads(output.read_text())
    steps = [step for part in (*plan["hosts"].values(), plan["cluster"]) for step in part["steps"]]
    planned = {name for step in steps for name in step["changes"]}
    headers = set(re.findall(r"^\+\+\+ after: (.+?)\s*$", checked[0].out, re.MULTILINE))
    # What a step removes has a header before only.
    headers |= set(re.findall(r"^--- before: (.+?)\s*$", checked[0].out, re.MULTILINE))
    assert planned and planned == headers
    assert set(plan["restarts"]) == {"containerd", "kube-scheduler"} and plan["drained"] == []
