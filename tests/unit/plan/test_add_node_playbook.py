# SPDX-License-Identifier: GPL-3.0-or-later
"""add_node.yml by the real ansible-playbook on a real API server: a node joins, and nothing else is changed."""

from __future__ import annotations

import json

import pytest
from claims_cluster import CLUSTER_WIDE, PLAYBOOKS, words_of
from own_cluster import run_playbook

JOINED = {"gpushare_nodes": ["gpu1", "gpu2"]}


def specified(cluster):
    """What the collection's objects ask for; their status changes by itself, and slices are the driver's."""
    found = {}
    for path in CLUSTER_WIDE:
        if path.endswith("/resourceslices"):
            continue
        for one in cluster.server.request("GET", f"/apis/{path}")["items"]:
            about = one["metadata"]
            found[path, about["name"]] = {
                **{key: value for key, value in one.items() if key not in ("metadata", "status")},
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

    done = joined(cluster, tmp_path)
    assert done.rc == 0, done.text
    assert cluster.labels("gpu2")["gpushare"] == "dra" and specified(cluster) == before
    plan = cluster.play(tmp_path, "plan.yml", "-e", "plan_output=plan.json", **JOINED)
    assert plan.rc == 0 and json.loads((tmp_path / "plan.json").read_text())["changes"] is False, plan.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Name the node that joins: -e add_node=NODE"),
        (("--limit", "gpu2"), "Without localhost in the limit nothing reads the cluster"),
    ],
)
def test_it_begins_only_with_a_node_and_the_cluster(tmp_path, words, said):
    done = run_playbook(tmp_path, PLAYBOOKS / "add_node.yml", *words, groups={"gpu_nodes": ["gpu1", "gpu2"]})
    assert done.rc != 0 and said in words_of(done), done.text
    assert "TASK [Check the variables" not in done.text
