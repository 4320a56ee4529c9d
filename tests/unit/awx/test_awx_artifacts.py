# SPDX-License-Identifier: GPL-3.0-or-later
"""What a job leaves in AWX: the stats that playbooks set, which AWX keeps as the job's artifacts."""

from __future__ import annotations

import json
import re
import sys

import yaml
from allocation_snapshots import asks, booked, ours, pod
from kube_api import Api, kubeconfig
from verify_kit import ROOT, Stage, run_playbook

FILES = [*ROOT.glob("roles/**/*.yml"), *ROOT.glob("roles/**/*.j2"), *ROOT.glob("playbooks/*.yml")]


def artifacts(text):
    return json.loads(re.search(r"RUN: (\{.*\})", text).group(1))


def test_inspect_leaves_the_totals_and_the_first_hundred_nodes(tmp_path):
    api = Api()
    nodes = [ours(f"n{number}") for number in range(1, 103)]
    api.lists = {"/api/v1/nodes": nodes, "/api/v1/pods": [pod("a", [asks(mem=10)], annotations=booked(1, 10))]}
    config = tmp_path / "config"
    config.write_text(json.dumps(kubeconfig(api.url)))
    words = ["-e", f"gpu_kubeconfig={config}", "-e", f"ansible_python_interpreter={sys.executable}"]
    rc, text = run_playbook(tmp_path, ROOT / "playbooks" / "inspect.yml", *words)
    api.close()
    assert rc == 0, text
    left = artifacts(text)["gpu_inspect"]
    assert left["totals"] == [{"backend": "gpushare", "unit": "GiB", "total": 3264, "used": 10}]
    assert left["nodes"][0] == {"name": "n1", "backend": "gpushare", "unit": "GiB", "total": 32, "used": 10}
    assert (len(left["nodes"]), left["nodes_left_out"]) == (100, 2)


def test_acceptance_leaves_its_steps_also_where_one_failed(tmp_path):
    stage = Stage(tmp_path)
    steps = [{"id": "A1", "title": "Pods run", "result": "FAIL", "what": "none ran", "do": "Look.", "unshown": False}]
    found = {"result": "FAIL", "steps": steps, "suites": []}
    stage.returns("gpu_acceptance", {"acceptance": found, "table": "A1 FAIL"})
    rc, text = stage.play(playbook=ROOT / "playbooks" / "acceptance.yml")
    assert rc == 2 and "acceptance: FAIL: none ran" in text, text
    assert artifacts(text)["gpu_acceptance"] == {"result": "FAIL", "steps": steps}


def test_acceptance_passes_without_what_only_a_real_card_shows_and_not_without_a_kind_of_node(tmp_path):
    stage = Stage(tmp_path)
    passed = {
        "id": "M01",
        "title": "Pods run",
        "result": "PASS",
        "what": "2 run",
        "do": "",
        "code": "",
        "unshown": False,
    }
    silicon = {**passed, "id": "M02", "result": "UNKNOWN", "what": "only a real card", "unshown": True}
    skipped = {**passed, "id": "M00", "result": "skipped", "what": "no node of HAMi can be used"}
    suites = [{"suite": "nvidia", "result": "UNKNOWN", "steps": [passed, silicon]}]

    def play(*more):
        every = [*suites, *more]
        steps = [step for one in every for step in one["steps"]]
        found = {"result": "UNKNOWN", "steps": steps, "suites": every}
        stage.returns("gpu_acceptance", {"acceptance": found, "table": "T"})
        return stage.play(playbook=ROOT / "playbooks" / "acceptance.yml")

    rc, text = play()
    assert rc == 0, text
    rc, text = play({"suite": "hami", "result": "skipped", "steps": [skipped]})
    assert rc == 2 and "acceptance: skipped: no node of HAMi can be used" in text, text


def test_readonly_access_leaves_the_account_and_no_token(tmp_path, api_server):
    written = tmp_path / "reader"
    words = [f"gpu_kubeconfig={api_server.kubeconfig}", f"readonly_access_kubeconfig={written}"]
    words += ["readonly_access_name=awx-reader", f"ansible_python_interpreter={sys.executable}"]
    playbook = ROOT / "playbooks" / "readonly_access.yml"
    rc, text = run_playbook(tmp_path, playbook, *(word for each in words for word in ("-e", each)))
    assert rc == 0, text
    left = artifacts(text)["gpu_readonly_access"]
    assert left.pop("expires") > "2026"
    assert left == {"state": "present", "account": "kube-system/awx-reader", "kubeconfig": str(written)}
    assert yaml.safe_load(written.read_text())["users"][0]["user"]["token"] not in text


def test_no_variable_has_an_artifacts_name():
    """AWX gives a job's artifacts to the later jobs of a workflow as extra variables, which take precedence."""
    texts = {path: path.read_text() for path in FILES}
    names = set(re.findall(r"^\| \w+ \| `(\w+)` \|", (ROOT / "docs" / "howto" / "awx.md").read_text(), re.MULTILINE))
    found = {name for text in texts.values() for name in re.findall(r"set_stats:\n\s+data:\n\s+(\w+):", text)}
    # plan.yml's is set by an action plugin.
    assert names == found | {"gpu_plan"}
    for path, text in texts.items():
        rest = re.sub(r"set_stats:\n\s+data:\n\s+\w+:", "", text)
        # Neither a module's name nor what a message or a comment says.
        rest = re.sub(r"#.*|'[^'\n]*'|\"[^\"{\n]*\"", "", rest)
        used = [name for name in names if re.search(rf"(?<![\w.(]){name}(?![\w)])", rest)]
        assert not used, path
