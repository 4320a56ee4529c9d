# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler name of the workloads: the one that the cluster's admission policy requires."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROOT = Path(__file__).resolve().parents[3]
NAME = "gpushare-scheduler"


def found(mode, openshift="", policy=False):
    return {"scheduler_detected": {"mode": mode, "openshift": openshift, "takes_policy": policy}}


@pytest.mark.parametrize(
    ("localhost", "variables", "name"),
    [
        (found("dedicated"), {}, NAME),
        (found("dedicated"), {"scheduler_name": "cards"}, "cards"),
        (found("openshift", "4.20.3"), {}, NAME),
        (found("openshift", "4.9.59", True), {}, ""),
        (found("static_pod"), {}, ""),
        # Without detection.
        ({}, {"scheduler_mode": "dedicated"}, NAME),
        ({}, {}, ""),
    ],
)
def test_the_workloads_name_the_detected_scheduler(localhost, variables, name):
    source = yaml.safe_load((ROOT / "roles/acceptance/defaults/main.yml").read_text())["acceptance_scheduler_name"]
    given = {"hostvars": {"localhost": localhost}, **variables}
    assert Templar(loader=DataLoader(), variables=given).template(trust_as_template(source)) == name


def test_the_playbook_detects_the_scheduler_first():
    limit, play = yaml.safe_load((ROOT / "playbooks/acceptance.yml").read_text())
    assert limit["ansible.builtin.import_playbook"] == "limit.yml"
    first, then = play["roles"]
    assert (first["role"], first["scheduler_step"]) == ("kubegpu.share.scheduler", "detect")
    # Nodes are taken as they are, so that hosts' variables and the inventory decide nothing.
    assert first["scheduler_backends"] == {"wanted": None}
    assert then == "kubegpu.share.acceptance"


@pytest.mark.parametrize(("variables", "placement"), [({}, "binpack"), ({"gpushare_placement": "spread"}, "spread")])
def test_the_workloads_expect_the_clusters_placement(variables, placement):
    defaults = yaml.safe_load((ROOT / "roles/acceptance/defaults/main.yml").read_text())
    [run] = [
        one["kubegpu.share.gpu_acceptance"]
        for one in yaml.safe_load((ROOT / "roles/acceptance/tasks/main.yml").read_text())
        if "kubegpu.share.gpu_acceptance" in one
    ]
    given = {"acceptance_placement": trust_as_template(defaults["acceptance_placement"]), **variables}
    assert Templar(loader=DataLoader(), variables=given).template(trust_as_template(run["placement"])) == placement
