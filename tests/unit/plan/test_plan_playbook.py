# SPDX-License-Identifier: GPL-3.0-or-later
"""plan.yml and site.yml by the real ansible-playbook on a real API server; its nodes are no hosts."""

from __future__ import annotations

import json
import re

import pytest
from own_cluster import ROOT, controllers, own_api_server, run_playbook
from real_apiserver import MERGE

PLAYBOOKS = ROOT / "playbooks"
# A managed cluster: its scheduler stays, and a dedicated one is added.
GIVEN = {
    "gpushare_nodes": ["gpu1"],
    "scheduler_mode": "dedicated",
    "gpushare_image_delivery": "registry",
    "preflight_ignore": ["runtime"],
    "gpushare_wait_timeout": 5,
    "scheduler_replicas": 1,
    "scheduler_dedicated_timeout": 5,
}


@pytest.fixture(scope="module")
def api():
    with own_api_server() as server, controllers(server, "daemonset", "deployment"):
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu1"}})
        amounts = {"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"}
        status = {"status": {"capacity": amounts, "allocatable": amounts}}
        server.request("PATCH", "/api/v1/nodes/gpu1/status", status, MERGE)
        yield server


def play(api, folder, name, *words, **variables):
    return run_playbook(folder, PLAYBOOKS / name, *words, gpu_kubeconfig=str(api.kubeconfig), **GIVEN, **variables)


def objects(api):
    paths = ("/api/v1/namespaces", "/apis/apps/v1/daemonsets", "/apis/apps/v1/deployments", "/api/v1/nodes")
    return {
        path: [
            (one["metadata"]["uid"], one["metadata"]["resourceVersion"]) for one in api.request("GET", path)["items"]
        ]
        for path in paths
    }


def test_plan_predicts_what_check_mode_predicts_and_changes_nothing(api, tmp_path):
    before = objects(api)
    done = play(api, tmp_path, "plan.yml", "-e", "plan_output=plan.json")
    assert done.rc == 0 and done.changed == 0, done.text
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert f"The plan is in {tmp_path / 'plan.json'}." in done.text
    made = {name for one in plan["cluster"]["steps"] for name in one["changes"]}
    checked = play(api, tmp_path, "site.yml", "--check", "--diff")
    assert checked.rc == 0, checked.text
    headers = set(re.findall(r"^\+\+\+ after: (.+)$", checked.text, re.MULTILINE))
    assert headers and headers == made
    assert objects(api) == before
    assert plan["changes"] is True and "PLAY [Deploy the device plugin" in checked.text
    assert "would be done; next: the same command without --check" in " ".join(checked.text.split())
