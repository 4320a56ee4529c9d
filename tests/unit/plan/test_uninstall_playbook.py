# SPDX-License-Identifier: GPL-3.0-or-later
"""uninstall.yml by the real ansible-playbook: without a cluster, and where a switch wasn't completed."""

from __future__ import annotations

import yaml
from own_cluster import ROOT, run_playbook
from real_apiserver import MERGE, own_api_server

UNINSTALL = ROOT / "playbooks" / "uninstall.yml"
SWITCH = {"kubegpu.share/switch": "hami", "kubegpu.share/switch-from": "extender"}


def test_machines_without_a_cluster(tmp_path):
    """As after nodes.yml alone: no kubeconfig, no control plane."""
    done = run_playbook(tmp_path, UNINSTALL)
    assert done.rc == 0 and "No cluster was queried" in done.text, done.text


def test_a_cluster_that_is_gone_is_left_out_by_a_variable(tmp_path):
    kubeconfig = tmp_path / "gone"
    user = {"name": "u", "user": {"token": "t"}}
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    kubeconfig.write_text(
        yaml.safe_dump({"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "x"})
    )
    given = {"gpu_kubeconfig": str(kubeconfig)}
    refused = run_playbook(tmp_path, UNINSTALL, **given)
    said = " ".join(refused.text.split())
    assert refused.rc != 0 and "127.0.0.1:1 can't be reached" in said, refused.text
    assert "Nothing was changed. Where the cluster is gone for good, -e uninstall_cluster=false" in said
    done = run_playbook(tmp_path, UNINSTALL, "-e", "uninstall_cluster=false", **given)
    assert done.rc == 0 and "No cluster was queried" in done.text, done.text
    # In every play, also in those that have no host here.
    plays = yaml.safe_load(UNINSTALL.read_text())
    asked = [play["vars"]["__uninstall_cluster"] for play in plays if "__uninstall_cluster" in play.get("vars", {})]
    assert len(asked) > 1 and len(set(asked)) == 1 and "uninstall_cluster | default(" in asked[0]


def test_nodes_of_a_switch_that_was_not_completed_are_as_before(tmp_path):
    with own_api_server() as server:
        for name, more in (("gpu1", {}), ("gpu2", {"kubegpu.share/switch-cordoned": "true"}), ("other", None)):
            server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}, "spec": {"unschedulable": True}})
            if more is not None:
                body = {"metadata": {"annotations": {**SWITCH, **more, "theirs": "x"}}}
                server.request("PATCH", f"/api/v1/nodes/{name}", body, MERGE)
        plays = yaml.safe_load(UNINSTALL.read_text())
        [play] = [one for one in plays if "switches" in one["name"]]
        read = {
            "kubegpu.share.cluster_info": {"kubeconfig": str(server.kubeconfig)},
            "register": "__scheduler_cluster_info",
        }
        play["tasks"] = [read, *play["tasks"]]
        done = run_playbook(tmp_path, [play], gpu_kubeconfig=str(server.kubeconfig))
        assert (done.rc, done.changed) == (0, 2), done.text
        # The same on a run of a single machine, in whose plays there is no localhost.
        body = {"metadata": {"name": "gpu3", "annotations": SWITCH}, "spec": {"unschedulable": True}}
        server.request("POST", "/api/v1/nodes", body)
        leave = {"ansible.builtin.include_role": {"name": "kubegpu.share.switch", "tasks_from": "leave"}}
        play = {"hosts": "gpu3", "gather_facts": False, "tasks": [leave]}
        given = {"groups": {"gpu_nodes": ["gpu3"]}, "gpu_kubeconfig": str(server.kubeconfig)}
        done = run_playbook(tmp_path, [play], **given)
        assert (done.rc, done.changed) == (0, 1), done.text
        nodes = {one["metadata"]["name"]: one for one in server.request("GET", "/api/v1/nodes")["items"]}
    assert {name: one["spec"].get("unschedulable", False) for name, one in nodes.items()} == {
        "gpu1": False,
        # As the user had it before.
        "gpu2": True,
        "gpu3": False,
        "other": True,
    }
    for name, kept in (("gpu1", {"theirs": "x"}), ("gpu2", {"theirs": "x"}), ("gpu3", {})):
        assert nodes[name]["metadata"].get("annotations", {}) == kept


def test_the_dra_drivers_folder_goes_when_no_claim_is_prepared(tmp_path):
    folder = tmp_path / "kubelet/plugins/gpu.kubegpu.share"
    record = folder / "claims" / "0f5b8a1e-0000-4000-8000-000000000001.json"
    *_others, play = yaml.safe_load(UNINSTALL.read_text())
    del play["roles"]
    found = {"ansible.builtin.set_fact": {"gpu_backends": {"dra": ["gpu1"]}}}
    known = {"hosts": "localhost", "gather_facts": False, "tasks": [found]}

    def run(*plays, **more):
        given = {"gpushare_kubelet_root": str(tmp_path / "kubelet"), **more}
        done = run_playbook(tmp_path, [*plays, play], groups={"gpu_nodes": ["gpu1"]}, **given)
        assert done.rc == 0, done.text
        return done.changed, folder.exists()

    gone = {"uninstall_cluster": False, "gpushare_allocation": "dra"}
    for plays, more in (((known,), {}), ((), gone)):
        record.parent.mkdir(parents=True)
        (folder / "lock").touch()
        record.touch()
        assert run(*plays, **more) == (0, True)
        record.unlink()
        assert run() == (0, True), "a node of another back end"
        assert run(*plays, **more) == (1, False)
        assert run(*plays, **more) == (0, False)
