# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards by claims on OpenShift: ansible-playbook on a real API server with OpenShift's definitions."""

from __future__ import annotations

import json

import pytest
from claims_cluster import CLUSTER_WIDE, Cluster
from definitions import OLD, definitions
from openshift_parts import CONSTRAINTS, LABELS, POLICIES, openshift
from own_cluster import controllers, until
from real_apiserver import MERGE, own_api_server

RECORD = "/api/v1/namespaces/kube-system/configmaps/kubegpu-share"


@pytest.fixture(scope="module")
def cluster():
    files = sorted(file for file in definitions().glob("*.yaml") if file.name != OLD)
    with own_api_server() as server, controllers(server, "namespace", "garbage-collector"):
        server.install(*files)
        made = Cluster(server)
        openshift(server)
        with made.kubelets():
            yield made


def policy(cluster):
    live = cluster.server.request("GET", f"{POLICIES}/gpu-cluster-policy")
    return live["spec"]["devicePlugin"].get("enabled"), live["spec"]["cdi"].get("enabled")


def constraints(cluster):
    return sorted(item["metadata"]["name"] for item in cluster.server.request("GET", CONSTRAINTS)["items"])


def planned(cluster, folder):
    done = cluster.play(folder, "plan.yml", "-e", "plan_output=plan.json")
    assert done.rc == 0 and done.changed == 0, done.text
    steps = json.loads((folder / "plan.json").read_text())["cluster"]["steps"]
    return {change for step in steps for change in step["changes"]}, done.text


def test_the_plan_has_the_servers_constraints_and_no_scheduler(cluster, tmp_path):
    changes, text = planned(cluster, tmp_path)
    for name in ("gpushare-dra-driver", "gpushare-dra-templates"):
        assert f"SecurityContextConstraints {name}" in changes
        assert f"Role gpushare-system/{name}-scc" in changes and f"RoleBinding gpushare-system/{name}-scc" in changes
    assert "ClusterPolicy gpu-cluster-policy" in changes and "DaemonSet gpushare-system/gpushare-dra-driver" in changes
    for other in ("Subscription", "SecondaryScheduler", "Scheduler cluster", "gpushare-extender"):
        assert not any(other in change for change in changes), changes
    assert "claims-unable" not in text and "claims-preemption" in text


@pytest.mark.long
def test_site_sets_it_up_and_uninstall_leaves_nothing(cluster, tmp_path):
    assert (policy(cluster), constraints(cluster), cluster.named()) == ((True, True), [], {})
    done = cluster.play(tmp_path, "site.yml")
    assert done.rc == 0, done.text
    assert constraints(cluster) == ["gpushare-dra-driver", "gpushare-dra-templates"]
    # With CDI the variable that the claims' own specification sets would be ignored.
    assert policy(cluster) == (False, False)
    assert cluster.labels()["gpushare"] == "dra" and "gpushare-extender" not in cluster.named()["daemonsets"]
    namespace = cluster.server.request("GET", "/api/v1/namespaces/gpushare-system")["metadata"]["labels"]
    assert namespace["security.openshift.io/scc.podSecurityLabelSync"] == "false"
    assert cluster.server.request("GET", RECORD)["data"] == {"owner": "playbook"}
    user = {"verb": "use", "resource": "securitycontextconstraints", "group": "security.openshift.io"}
    for name in ("gpushare-dra-driver", "gpushare-dra-templates"):
        account = f"system:serviceaccount:gpushare-system:{name}"
        assert cluster.server.may(account, **user, namespace="gpushare-system", name=name)
        assert not cluster.server.may(account, **user, namespace="gpushare-system", name="privileged")

    again = cluster.play(tmp_path, "site.yml")
    assert again.rc == 0 and again.changed == 0, again.text
    checked = cluster.play(tmp_path, "verify.yml")
    assert checked.rc == 0, checked.text
    # Nothing else differs, and it is a change: the record, and then that its checks have passed.
    cluster.server.request("PATCH", RECORD, {"data": {"owner": "GPUShare/main"}}, MERGE)
    taken = cluster.play(tmp_path, "site.yml", gpu_owner_take_over="GPUShare/main")
    assert (taken.rc, taken.changed) == (0, 2), taken.text
    assert "Takes over what GPUShare/main has set up." in taken.text
    assert cluster.server.request("GET", RECORD)["data"] == {"owner": "playbook"}
    # The operator's resource has nothing to remove here, and playbooks know it.
    refused = cluster.play(tmp_path, "uninstall.yml", gpu_owner="GPUShare/main")
    assert refused.rc != 0 and refused.changed == 0 and "playbook owns what is set up" in " ".join(refused.text.split())

    removed = cluster.play(tmp_path, "uninstall.yml")
    assert removed.rc == 0, removed.text
    assert (policy(cluster), constraints(cluster), cluster.named()) == ((True, True), [], {})
    assert {name: text for name, text in cluster.labels().items() if "kubernetes.io" not in name} == LABELS
    until(lambda: cluster.server.ask("GET", "/api/v1/namespaces/gpushare-system")[0] == 404, 180)
    until(lambda: cluster.server.ask("GET", RECORD)[0] == 404)
    assert cluster.play(tmp_path, "uninstall.yml").changed == 0
    assert all("gpushare" not in cluster.server.ask("GET", f"/apis/{path}")[1] for path in CLUSTER_WIDE)
