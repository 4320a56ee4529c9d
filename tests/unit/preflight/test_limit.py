# SPDX-License-Identifier: GPL-3.0-or-later
"""A --limit that leaves out what a playbook needs is refused: it would end well and have done nothing."""

from __future__ import annotations

import re

import pytest
import yaml
from ansible_runs import ROOT, ansible, write_inventory
from real_apiserver import own_api_server

PLAYBOOKS = {path.stem: path for path in sorted((ROOT / "playbooks").glob("*.yml"))}
FIRST = "limit.yml"
# None can be reached: a limit that isn't refused changes no machine.
AWAY = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
GROUPS = {"gpu_nodes": dict.fromkeys(["gpu1", "gpu2"], AWAY), "control_plane": dict.fromkeys(["cp1", "cp2"], AWAY)}
LOCALHOST = "--limit gpu1 leaves out localhost, {}: add it (--limit 'localhost,gpu1')"
REFUSED = {
    "acceptance": ("gpu1", LOCALHOST.format("which creates the workloads")),
    "add_node": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "build_images": ("gpu1", LOCALHOST.format("where the image is built")),
    "init": ("gpu1", LOCALHOST.format("which writes the inventory")),
    "airgap_download": ("gpu1", LOCALHOST.format("which downloads the archive")),
    "airgap_list": ("gpu1", LOCALHOST.format("which writes the list")),
    "airgap_push": ("gpu1", LOCALHOST.format("which pushes the images and writes the variables")),
    "inspect": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "nodes": ("cp1", "--limit cp1 leaves out gpu_nodes, whose machines it prepares: add it (--limit 'gpu_nodes,cp1')"),
    "passthrough": (
        "cp1",
        "--limit cp1 leaves out gpu_nodes, whose cards it gives away: add it (--limit 'gpu_nodes,cp1')",
    ),
    "plan": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "preflight": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "readonly_access": ("gpu1", LOCALHOST.format("which creates the account")),
    "site": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "switch": ("cp1", "--limit cp1 leaves out gpu_nodes, whose nodes it switches: add it (--limit 'gpu_nodes,cp1')"),
    "uninstall": (
        "cp1",
        "--limit cp1 leaves out localhost and gpu_nodes, where it would clean up: "
        "add it (--limit 'localhost,gpu_nodes,cp1')",
    ),
    "verify": ("gpu1", LOCALHOST.format("which runs the checks")),
}
MIRROR = "kubernetes.io/config.mirror"
# The others' first play is the same, which a test of the files shows.
USUAL = ("preflight", "nodes", "uninstall")


def play(folder, playbook, *words, groups=GROUPS, **variables):
    write_inventory(folder, groups, **variables)
    return ansible(folder, "ansible-playbook", "-i", "hosts.yml", playbook, *words)


def first_import(path):
    """The first entry of a playbook, and of the one that it imports first."""
    first = yaml.safe_load(path.read_text())[0]
    imported = first.get("ansible.builtin.import_playbook")
    return first if imported in (None, FIRST) else first_import(path.with_name(imported))


def test_every_playbook_begins_with_the_refusal():
    assert set(REFUSED) == set(PLAYBOOKS) - {"limit"}
    for name in REFUSED:
        assert first_import(PLAYBOOKS[name])["ansible.builtin.import_playbook"] == FIRST, name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in REFUSED]
)
def test_a_limit_that_would_leave_nothing_to_do(tmp_path, name):
    limit, said = REFUSED[name]
    done = play(tmp_path, PLAYBOOKS[name], "--limit", limit)
    assert done.rc == 2 and said in done.text and "failed=1" in done.text, done.text
    assert done.text.count("TASK [") == 1, done.text


def test_a_group_without_hosts_is_nothing_to_do(tmp_path):
    done = play(tmp_path, PLAYBOOKS["nodes"], groups={"control_plane": ["cp1"]})
    assert done.rc == 2 and "The group gpu_nodes has no host: there is nothing to do" in done.text, done.text


def needs(tmp_path, *words, needed, groups=GROUPS):
    """Run the refusal alone, for each of the needs."""
    imported = {"ansible.builtin.import_playbook": str(PLAYBOOKS["limit"])}
    plays = [{**imported, "vars": {"__preflight_needs": {"why": "which it needs", **need}}} for need in needed]
    (tmp_path / "needs.yml").write_text(yaml.safe_dump(plays))
    done = play(tmp_path, "needs.yml", *words, groups=groups)
    return done.rc, done.text


ON_LOCALHOST = {"hosts": ["localhost"], "names": ["localhost"]}


def test_a_run_without_a_limit_has_no_task_more(tmp_path):
    rc, text = needs(tmp_path, needed=[ON_LOCALHOST])
    assert rc == 0 and "TASK [" not in text, text


@pytest.mark.parametrize("limit", ["localhost,gpu1", "gpu*,localhost,!gpu2", "@hosts.txt"])
def test_a_limit_with_localhost_in_any_form(tmp_path, limit):
    (tmp_path / "hosts.txt").write_text("gpu1\nlocalhost\n")
    # No host at all is needed, and all of them are there.
    rc, text = needs(tmp_path, "--limit", limit, needed=[ON_LOCALHOST, {"hosts": [], "every": True}])
    assert rc == 0 and "skipped=2" in text, text


def test_a_pattern_of_many_hosts_is_not_listed(tmp_path):
    groups = {"gpu_nodes": [f"gpu{at}" for at in range(5)]}
    rc, text = needs(tmp_path, "--limit", "gpu*:!gpu4", groups=groups, needed=[ON_LOCALHOST])
    assert rc == 2, text
    assert "--limit gpu*:!gpu4 leaves out localhost, which it needs: add it (--limit 'localhost,HOST,…')" in text, text


def test_each_host_may_be_needed(tmp_path):
    """As of uninstall.yml: a scheduler that keeps its configuration asks an extender that is gone."""
    needed = [{"hosts": hosts, "every": True} for hosts in (["cp1"], ["cp1", "cp2"])]
    rc, text = needs(tmp_path, "--limit", "localhost,cp1", needed=needed)
    assert rc == 2 and "leaves out cp2, which it needs: add it (--limit 'cp2,cp1,localhost')" in text, text
    assert text.count("TASK [") == 2, text


def test_add_node_takes_no_limit_without_a_node(tmp_path):
    """It would be site.yml for all nodes."""
    done = play(tmp_path, PLAYBOOKS["add_node"], "--limit", "localhost,cp1")
    assert done.rc == 2 and "Name the node that joins: -e add_node=NODE" in done.text, done.text


@pytest.mark.long
def test_uninstall_leaves_no_scheduler_with_an_extender_that_is_gone(tmp_path):
    labels = {"component": "kube-scheduler", "tier": "control-plane"}
    container = {"name": "kube-scheduler", "image": "registry.k8s.io/kube-scheduler:v1.36.3"}
    container["command"] = ["kube-scheduler", "--kubeconfig=/etc/kubernetes/scheduler.conf"]
    with own_api_server() as api:
        for name in ("gpu1", "cp1", "cp2"):
            roles = {"node-role.kubernetes.io/control-plane": ""} if name != "gpu1" else {}
            api.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": roles}})
        for name in ("cp1", "cp2"):
            about = {"name": f"kube-scheduler-{name}", "labels": labels, "annotations": {MIRROR: "1"}}
            pod = {"metadata": about, "spec": {"nodeName": name, "containers": [container]}}
            api.request("POST", "/api/v1/namespaces/kube-system/pods", pod)
        words = ("--limit", "localhost,cp1")
        done = play(tmp_path, PLAYBOOKS["uninstall"], *words, gpu_kubeconfig=str(api.kubeconfig))
    said = "leaves out cp2, whose kube-scheduler would go on asking the extender, which is removed: add it"
    assert done.rc == 2 and said in done.text and not re.search("changed=[1-9]", done.text), done.text
