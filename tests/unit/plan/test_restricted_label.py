# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes of an earlier version get the restricted label, by the real ansible-playbook on a real API server."""

from __future__ import annotations

import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.backends import RESTRICTED
from claims_cluster import GIVEN, words_of
from own_cluster import run_playbook, until
from real_apiserver import MERGE

DAEMON_SET = "/apis/apps/v1/namespaces/gpushare-system/daemonsets/gpushare-dra-driver"
NODE = "/api/v1/nodes/gpu1"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"


def role(cluster, folder, state="present", **more):
    given = {"gpushare_component": "dra", "gpushare_state": state, "gpu_kubeconfig": str(cluster.server.kubeconfig)}
    play = {"hosts": "localhost", "gather_facts": False, "roles": [{"role": "kubegpu.share.gpushare", **given, **more}]}
    return run_playbook(folder, [play], **GIVEN)


def selector(cluster):
    return cluster.server.request("GET", DAEMON_SET)["spec"]["template"]["spec"]["nodeSelector"]


@pytest.fixture
def former(cluster, tmp_path):
    """The cluster as an earlier version left it, which selected nodes by the label that kubelet may set alone."""
    if cluster.server.ask("GET", DAEMON_SET)[0] == 404:
        done = role(cluster, tmp_path)
        assert done.rc == 0, done.text
    without = {"spec": {"template": {"spec": {"nodeSelector": {RESTRICTED: None}}}}}
    cluster.server.request("PATCH", DAEMON_SET, without, MERGE)
    cluster.server.request("PATCH", NODE, {"metadata": {"labels": {RESTRICTED: None}}}, MERGE)
    return cluster


def refusing(server, kind):
    """Have the API server refuse changes of a kind's objects, as where a run is killed before them."""
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": [kind]}
    name = {"name": "refuses"}
    spec = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "false", "message": "not now"}],
    }
    server.request("POST", f"{POLICIES}ies", {"metadata": name, "spec": spec})
    spec = {"policyName": "refuses", "validationActions": ["Deny"]}
    server.request("POST", f"{POLICIES}ybindings", {"metadata": name, "spec": spec})
    patch = {"metadata": {"labels": {"x": "y"}}}
    until(lambda: server.ask("PATCH", f"{DAEMON_SET}?dryRun=All", patch, MERGE)[0] >= 400)


def test_a_node_that_nobody_named_stops_the_run(former, tmp_path):
    """An inventory of other nodes would take the server off this one."""
    former.server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu2"}})
    try:
        refused = former.play(tmp_path, "plan.yml", gpushare_nodes=["gpu2"])
        assert refused.rc != 0 and "gpu1 has the label gpushare and is named nowhere" in words_of(refused), refused.text
        assert selector(former) == {"gpushare": "dra"}
    finally:
        former.server.request("DELETE", "/api/v1/nodes/gpu2")


def test_the_nodes_have_the_label_before_the_daemon_set_selects_by_it(former, tmp_path):
    planned = former.play(tmp_path, "plan.yml", "-e", "plan_output=plan.json")
    assert planned.rc == 0 and planned.changed == 0, planned.text
    steps = json.loads((tmp_path / "plan.json").read_text())["cluster"]["steps"]
    changes = [change for step in steps for change in step["changes"]]
    [node] = [at for at, change in enumerate(changes) if "Node gpu1" in change]
    [workload] = [at for at, change in enumerate(changes) if "DaemonSet gpushare-system/gpushare-dra-driver" in change]
    assert node < workload and RESTRICTED not in former.labels()

    refusing(former.server, "daemonsets")
    try:
        ended = role(former, tmp_path)
        assert ended.rc != 0 and "not now" in ended.text, ended.text
        # Its pods stay, whatever the node has.
        assert former.labels() == {"gpushare": "dra", RESTRICTED: "dra"} and selector(former) == {"gpushare": "dra"}
    finally:
        for kind in ("ybindings", "ies"):
            former.server.request("DELETE", f"{POLICIES}{kind}/refuses")
    until(lambda: former.server.ask("PATCH", f"{DAEMON_SET}?dryRun=All", {"metadata": {}}, MERGE)[0] == 200)
    done = role(former, tmp_path)
    assert done.rc == 0 and done.changed, done.text
    assert selector(former) == {"gpushare": "dra", RESTRICTED: "dra"} == former.labels()
    assert not role(former, tmp_path).changed
    # Both leave with the node, by the part of role switch.
    gone = role(former, tmp_path, "absent", gpushare_component="node", gpushare_node_allocation="dra")
    assert gone.rc == 0 and former.labels() == {}, gone.text
