# SPDX-License-Identifier: GPL-3.0-or-later
"""add_node.yml by the real ansible-playbook on a real API server: a node joins, and nothing else is changed."""

from __future__ import annotations

import json

import pytest
from claims_cluster import CLUSTER_WIDE, PLAYBOOKS, words_of
from own_cluster import run_playbook
from role_templates import value, variables_of

JOINED = {"gpushare_nodes": ["gpu1", "gpu2"]}


def specified(cluster):
    """What the collection's objects ask for; their status changes by itself, and slices are the driver's."""
    found = {}
    for path in CLUSTER_WIDE:
        if path.endswith("/resourceslices"):
            continue
        for item in cluster.server.request("GET", f"/apis/{path}")["items"]:
            about = item["metadata"]
            found[path, about["name"]] = {
                **{key: value for key, value in item.items() if key not in ("metadata", "status")},
                **{key: about.get(key) for key in ("uid", "generation", "labels", "annotations")},
            }
    return found


def joined(cluster, folder, node="gpu2", **variables):
    return cluster.play(folder, "add_node.yml", "-e", f"add_node={node}", **{**JOINED, **variables})


@pytest.mark.long
def test_it_changes_the_node_alone_and_refuses_where_more_would_change(cluster, tmp_path):
    done = cluster.play(tmp_path, "site.yml")
    assert done.rc == 0, done.text
    cluster.server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu2"}})
    before = specified(cluster)

    refused = joined(cluster, tmp_path, gpushare_image="registry.example.org/gpushare:2")
    assert refused.rc != 0 and "More than gpu2 would change" in words_of(refused), refused.text
    assert "DaemonSet gpushare-system/gpushare-dra-driver" in words_of(refused).partition("More than gpu2")[2]
    forgotten = {"gpushare_nodes": ["gpu1", "gpu2", "gpu3"]}
    cluster.server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu3"}})
    refused = joined(cluster, tmp_path, **forgotten)
    assert refused.rc != 0 and "More than gpu2 would change: Node gpu3" in words_of(refused), refused.text
    assert joined(cluster, tmp_path, "gpu9").rc != 0
    assert specified(cluster) == before and "gpushare" not in cluster.labels("gpu2")

    # One that isn't in the cluster yet stops no other.
    done = joined(cluster, tmp_path, gpushare_nodes=["gpu1", "gpu2", "gpu7"])
    assert done.rc == 0 and "since they aren't in the cluster yet: gpu7" in words_of(done), done.text
    assert cluster.labels("gpu2")["gpushare"] == "dra" and specified(cluster) == before
    plan = cluster.play(tmp_path, "plan.yml", "-e", "plan_output=plan.json", **JOINED)
    assert plan.rc == 0 and json.loads((tmp_path / "plan.json").read_text())["changes"] is False, plan.text


@pytest.mark.long
def test_a_machine_that_isnt_in_the_cluster_yet_is_not_connected(cluster, tmp_path):
    gone = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    groups = {"gpu_nodes": {"gpu7": {**gone, "gpu_node_name": "node7"}}}
    given = {"gpushare_nodes": ["gpu1"], "gpu_kubeconfig": str(cluster.server.kubeconfig), "groups": groups}
    given |= {"gpushare_image_delivery": "registry", "preflight_ignore": ["runtime"]}
    refused = run_playbook(tmp_path, PLAYBOOKS / "preflight.yml", **given)
    assert refused.rc != 0 and "unreachable" in refused.text and "unknown-node" in refused.text, refused.text
    done = run_playbook(tmp_path, PLAYBOOKS / "preflight.yml", "-e", "add_node=gpu1", **given)
    assert done.rc == 0 and "since they aren't in the cluster yet: gpu7" in words_of(done), done.text


GROUPS = {"gpu_nodes": ["gpu1", "gpu2", "gpu3"]}
HOSTS = {
    "gpu1": {"gpu_node": {"driver": {"module_version": "580.95.05", "cards": [{"uuid": "GPU-1"}]}}},
    "gpu2": {"gpu_node_name": "node2", "gpu_node": {"driver": {"module_version": "580.95.05", "cards": []}}},
    # Its machine wasn't connected.
    "gpu3": {"gpu_node_name": "node3"},
}


def known(absent):
    local = {"gpu_backends": {"absent": absent}}
    return {"groups": GROUPS, "hostvars": {**HOSTS, "localhost": local}}


@pytest.mark.parametrize(
    ("named", "nodes"),
    [([], []), ("gpu2,pool-1", ["node2", "pool-1"]), (["gpu1"], ["gpu1"])],
)
def test_hosts_that_join_have_their_names_in_the_cluster(named, nodes):
    given = {**variables_of("preflight", "vars"), **known([]), "preflight_gpu_nodes": GROUPS["gpu_nodes"]}
    assert value("preflight", "__preflight_alone", **{**given, "preflight_alone": named}) == nodes


def test_nothing_waits_for_what_is_known_of_a_machine_that_was_left_out():
    """Neither the device plugin's capabilities nor the checks at the end."""
    servers = {**variables_of("gpushare", "vars"), "gpushare_nodes": ["gpu1", "node2", "node3"]}
    assert value("gpushare", "__gpushare_driver_limits", **servers, **known([])) is True
    assert value("gpushare", "__gpushare_driver_limits", **servers, **known(["node3"])) is False
    checks = {**variables_of("verify", "vars"), "verify_gpu_nodes": GROUPS["gpu_nodes"]}
    everybody = {"gpu1": ["GPU-1"], "node2": [], "node3": []}
    assert value("verify", "__verify_node_uuids", **checks, **known([])) == everybody
    del everybody["node3"]
    assert value("verify", "__verify_node_uuids", **checks, **known(["node3"])) == everybody
    control = {**checks, "verify_control_plane": "gpu1,gpu3"}
    assert value("verify", "__verify_control_plane_names", **control, **known(["node3"])) == ["gpu1"]


def test_it_begins_only_with_a_node(tmp_path):
    done = run_playbook(tmp_path, PLAYBOOKS / "add_node.yml", groups={"gpu_nodes": ["gpu1", "gpu2"]})
    assert done.rc != 0 and "Name the node that joins: -e add_node=NODE" in words_of(done), done.text
    assert "TASK [Check the variables" not in done.text
