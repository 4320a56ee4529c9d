# SPDX-License-Identifier: GPL-3.0-or-later
"""plan.yml and site.yml by the real ansible-playbook on a real API server; its nodes are no hosts."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.cluster import ClusterTasks
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.site import SitePlan
from ansible_runs import write_inventory
from own_cluster import ROOT, controllers, run_playbook
from real_apiserver import MERGE, own_api_server
from role_templates import evaluated

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
            (item["metadata"]["uid"], item["metadata"]["resourceVersion"]) for item in api.request("GET", path)["items"]
        ]
        for path in paths
    }


def test_plan_predicts_what_check_mode_predicts_and_changes_nothing(api, tmp_path):
    (tmp_path / "ansible.cfg").write_text("[defaults]\nshow_custom_stats = True\n")
    before = objects(api)
    done = play(api, tmp_path, "plan.yml", "-e", "plan_output=plan.json")
    assert done.rc == 0 and done.changed == 0, done.text
    # Each costs a process per host.
    assert done.text.count("\nTASK [") <= 15, done.text
    # What AWX keeps as an artifact.
    assert '"gpu_plan": {' in done.text.partition("CUSTOM STATS")[2]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert f"The plan is in {tmp_path / 'plan.json'}." in done.text
    made = {name for step in plan["cluster"]["steps"] for name in step["changes"]}
    checked = play(api, tmp_path, "site.yml", "--check", "--diff")
    assert checked.rc == 0, checked.text
    headers = set(re.findall(r"^\+\+\+ after: (.+)$", checked.text, re.MULTILINE))
    assert headers and headers == made
    assert objects(api) == before
    assert "ConfigMap kube-system/kubegpu-share" not in checked.text
    assert plan["changes"] is True and "PLAY [Deploy the device plugin" in checked.text
    assert "would be done; next: the same command without --check" in " ".join(checked.text.split())


def test_the_gpu_operator_comes_before_what_announces_cards(api, tmp_path):
    before = objects(api)
    given = {"gpu_node_software": "gpu_operator", "gpu_operator_helm": str(tmp_path / "helm")}
    refused = play(api, tmp_path, "plan.yml", **given)
    assert refused.rc != 0 and "there is no" in refused.text and "gpu_operator_helm" in refused.text, refused.text
    (tmp_path / "helm").touch(0o755)
    done = play(api, tmp_path, "plan.yml", "-e", "plan_output=plan.json", **given)
    assert done.rc == 0 and done.changed == 0, done.text
    steps = json.loads((tmp_path / "plan.json").read_text())["cluster"]["steps"]
    assert [step["stage"] for step in steps][:4] == ["gpu_operator"] * 4 and steps[4]["stage"] != "gpu_operator"
    changes = [name for step in steps[:3] for name in step["changes"]]
    assert changes == ["Namespace gpu-operator", "Node gpu1", "helm release gpu-operator/gpu-operator"]
    assert steps[3]["waits"] == ["the GPU Operator: there is no ClusterPolicy"]
    assert objects(api) == before


def test_the_record_of_a_run_without_checks_is_found_and_uninstall_removes_it(api, tmp_path):
    tasks = [{"ansible.builtin.include_tasks": str(ROOT / "roles/plan/tasks/record.yml")}]
    connection = {"gpu_kubeconfig": str(api.kubeconfig)}

    def found():
        return ClusterTasks().unverified({"kubeconfig": str(api.kubeconfig)})

    assert not found()
    done = run_playbook(tmp_path, [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}], **connection)
    assert (done.rc, done.changed) == (0, 1), done.text
    assert found()
    # The last play alone; the tests of the lab run all of them.
    [task] = yaml.safe_load((ROOT / "roles/plan/tasks/record.yml").read_text())
    detected = {"mode": "dedicated"}
    done = play(api, tmp_path, "uninstall.yml", "--start-at-task", task["name"], scheduler_detected=detected)
    assert (done.rc, done.changed) == (0, 1), done.text
    assert not found(), done.text


def hosts_of_plays(folder, planned):
    """Return the hosts of each play that follows the plan, by its name, with this result of the plan."""
    plays = [play for name in ("nodes", "site") for play in yaml.safe_load((PLAYBOOKS / f"{name}.yml").read_text())]
    # The first play of nodes.yml is for its use alone.
    plays = [play for play in plays if "hosts" in play][1:]
    groups = {"gpu_nodes": ["gpu1", "gpu2"], "control_plane": ["cp1"], "kubegpu_schedulers": ["cp1"]}
    write_inventory(folder, groups)
    inventory = InventoryManager(loader=DataLoader(), sources=[str(folder / "hosts.yml")])
    known = {"groups": groups, "hostvars": {"localhost": {"plan_site": planned} if planned else {}}}
    return {
        play["name"]: sorted(host.name for host in inventory.get_hosts(evaluated(play["hosts"], **known)))
        for play in plays
    }


def test_a_play_runs_on_the_hosts_of_the_plan_and_without_a_plan_on_all(tmp_path):
    step = {"stage": "runtime", "restarts": [], "role": "runtime", "module": "m", "certain": True}
    plan = {"steps": [step], "groups": ["gpu_nodes"], "refusal": None, "notes": []}
    empty = {**plan, "steps": []}
    unchanged = hosts_of_plays(tmp_path, {"plan": {"patterns": SitePlan({"gpu1": empty}, empty).patterns()}})
    assert [name for name, hosts in unchanged.items() if hosts] == ["Print what there is now"]
    changed = hosts_of_plays(
        tmp_path, {"plan": {"patterns": SitePlan({"gpu1": empty, "gpu2": plan}, empty).patterns()}}
    )
    assert changed["Install the container toolkit and configure the container runtime"] == ["gpu2"]
    assert changed["Install the NVIDIA driver on the GPU nodes"] == []
    assert changed["Check that scheduler, kubelet and GPUs agree"] == ["localhost"]
    whole = hosts_of_plays(tmp_path, None)
    assert whole["Install the NVIDIA driver on the GPU nodes"] == ["gpu1", "gpu2"]
    assert whole["Build and import the servers' image where a machine lacks it"] == ["cp1", "gpu1", "gpu2"]
    assert whole["Configure kube-scheduler to use the extender, one machine at a time, the leader last"] == ["cp1"]


def test_what_the_operator_owns_is_refused_before_any_change_and_taken_over_on_purpose(api, tmp_path):
    at = "/api/v1/namespaces/kube-system/configmaps"
    made = {"metadata": {"name": "kubegpu-share"}, "data": {"owner": "GPUShare/main"}}
    # No garbage collector runs here, for which a deleted object waits.
    gone = {"propagationPolicy": "Background"}
    api.ask("DELETE", f"{at}/kubegpu-share", gone)
    api.request("POST", at, made)
    try:
        before = objects(api)
        for name, said in (("site.yml", "each would undo the other's"), ("uninstall.yml", "this run is for playbook")):
            refused = play(api, tmp_path, name)
            text = " ".join(refused.text.split())
            assert refused.rc != 0 and refused.changed == 0, refused.text
            assert f"GPUShare/main owns what is set up in this cluster, and {said}" in text.replace(
                "this run is for playbook: ", ""
            ), refused.text
            assert "There is no GPUShare/main any more" in text and "Nothing was changed" in text
        assert objects(api) == before and api.request("GET", f"{at}/kubegpu-share")["data"] == made["data"]
        planned = play(api, tmp_path, "plan.yml", "-e", "plan_output=plan.json", gpu_owner_take_over="GPUShare/main")
        assert planned.rc == 0 and planned.changed == 0, planned.text
        assert "owner-taken" in planned.text and "Takes over what GPUShare/main has set up." in planned.text
        assert json.loads((tmp_path / "plan.json").read_text())["taken_from"] == "GPUShare/main"
    finally:
        api.request("DELETE", f"{at}/kubegpu-share", gone)


def test_a_resource_that_owns_nothing_removes_nothing(api, tmp_path):
    shown = (ROOT / "operator/playbooks/uninstall.yml").read_text()
    plays = yaml.safe_load(shown.replace("kubegpu.share.uninstall", str(PLAYBOOKS / "uninstall.yml")))
    before = objects(api)
    connection = {"gpu_kubeconfig": str(api.kubeconfig), "gpu_owner": "GPUShare/main"}
    done = run_playbook(tmp_path, plays, **GIVEN, **connection)
    assert done.rc == 0 and done.changed == 0, done.text
    assert objects(api) == before and "ok: [localhost]" in done.text
