# SPDX-License-Identifier: GPL-3.0-or-later
"""Role hami on a real API server with real controllers, by the real helm; chart, kubelet and webhook are stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from own_cluster import controllers, run_playbook, until
from real_apiserver import MERGE, own_api_server
from standin_cluster import NODE, Cluster, chart

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
CONTROLLERS = ("deployment", "replicaset", "daemonset", "garbage-collector", "namespace")
KINDS = (
    "namespaces",
    "mutatingwebhookconfigurations",
    "clusterroles",
    "clusterrolebindings",
    "runtimeclasses",
    "validatingadmissionpolicies,validatingadmissionpolicybindings",
    "secrets",
    "configmaps",
    "leases",
    "serviceaccounts",
    "deployments,daemonsets,replicasets,pods,services,roles,rolebindings",
)


@pytest.fixture(scope="module")
def cluster():
    with own_api_server() as api, controllers(api, *CONTROLLERS), Cluster(api).running() as started:
        yield started


@pytest.fixture
def role(cluster, helm, tmp_path):
    """Run one step of the role."""

    def run(step, *words, fails=False, **variables):
        given = variables_of(cluster, helm, step, **variables)
        done = run_playbook(
            tmp_path, [{"hosts": "localhost", "gather_facts": False, "roles": ["kubegpu.share.hami"]}], *words, **given
        )
        assert (done.rc != 0) == fails, done.text
        return done

    return run


def variables_of(cluster, helm, step, **variables):
    values = {
        "scheduler": {"admissionWebhook": {"customURL": {"enabled": True, "host": "127.0.0.1", "port": cluster.port}}}
    }
    usual = {
        "gpu_kubeconfig": str(cluster.api.kubeconfig),
        "hami_helm": str(helm),
        "hami_chart_ref": f"{chart()}",
        "hami_nodes": [NODE],
        "hami_injection": "class",
        "hami_wait_timeout": 60,
        "hami_values": values,
    }
    return {"hami_step": step, **usual, **variables}


def objects(cluster):
    """Every object that a step may create, by its name; what controllers make of the others is left out."""
    found = set()
    for kinds in KINDS:
        done = cluster.api.kubectl("get", kinds, "--all-namespaces", "--output=name")
        assert done.returncode == 0, done.stderr
        found |= {f"{kinds} {line}" for line in done.stdout.splitlines()}
    return found


def node(cluster, name=NODE):
    found = cluster.api.request("GET", f"/api/v1/nodes/{name}")
    labels, annotations = found["metadata"].get("labels") or {}, found["metadata"].get("annotations") or {}
    status = found.get("status") or {}
    return {
        "labels": labels,
        "annotations": {key for key in annotations if "hami" in key},
        "resource": {field: (status.get(field) or {}).get("nvidia.com/gpu") for field in ("capacity", "allocatable")},
    }


CLEAN = {"labels": {}, "annotations": set(), "resource": {"capacity": None, "allocatable": None}}


def test_the_steps_there_and_back(cluster, role):
    before = objects(cluster)
    first = role("cluster", "--check")
    assert first.changed and objects(cluster) == before
    assert role("cluster").changed
    hook = cluster.api.request(
        "GET", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/hami-webhook"
    )["webhooks"][0]
    assert hook["failurePolicy"] == "Ignore" and hook["clientConfig"]["caBundle"]
    expressions = hook["namespaceSelector"]["matchExpressions"]
    assert {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": ["hami-system", "kube-system"],
    } in expressions
    assert role("cluster").changed == 0
    assert role("nodes").changed == 1
    restricted = {"node-restriction.kubernetes.io/kubegpu-share": "hami"}
    assert node(cluster)["labels"] == {"gpu": "on", "kubegpu.share/backend": "hami"} | restricted
    assert node(cluster)["resource"]["allocatable"] == "10"
    assert role("nodes").changed == 0
    assert role("cluster").changed == 0, "a node more changes nothing of the cluster's parts"
    daemon_sets = "/apis/apps/v1/namespaces/hami-system/daemonsets"
    [deleted] = cluster.api.request("GET", daemon_sets)["items"]
    cluster.api.request("DELETE", f"{daemon_sets}/{deleted['metadata']['name']}")
    assert role("cluster", "--check").changed == 1 and role("cluster").changed == 1
    [restored] = cluster.api.request("GET", daemon_sets)["items"]
    assert restored["spec"]["template"]["spec"] == deleted["spec"]["template"]["spec"]
    assert role("cluster").changed == 0

    # Each removal refuses while the other is still needed.
    assert "nodes_left" in role("remove", fails=True).text
    holder = {
        "metadata": {"name": "holder", "annotations": {"hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,1000,0:;"}}
    }
    pods = "/api/v1/namespaces/default/pods"
    cluster.api.request(
        "POST", pods, {**holder, "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "i"}]}}
    )
    assert "pods_hold" in role("remove_nodes", fails=True).text
    cluster.api.request("DELETE", f"{pods}/holder?gracePeriodSeconds=0")

    # The plugin goes in the middle of a bind: its lock and the failed pod's annotations stay.
    failed = {
        "metadata": {
            "name": "failed",
            "annotations": {"hami.io/bind-phase": "allocating", "hami.io/gpu-scheduler-policy": "spread"},
        }
    }
    cluster.api.request(
        "POST", pods, {**failed, "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "i"}]}}
    )
    cluster.api.request("PATCH", f"{pods}/failed/status", {"status": {"phase": "Failed"}}, MERGE)
    lock = {"hami.io/mutex.lock": "2026-11-26T09:00:00Z,default,failed", "hami.io/device-cordon": "GPU-1"}
    cluster.api.request("PATCH", f"/api/v1/nodes/{NODE}", {"metadata": {"annotations": lock}}, MERGE)
    assert role("remove_nodes").changed == 1
    # kubelet lets the resource go after five minutes, here at once; until then it is kubelet's.
    until(lambda: node(cluster)["resource"]["capacity"] in ("0", None))
    role("remove_nodes")
    left = node(cluster)
    assert left["labels"] == {} and left["resource"] == CLEAN["resource"]
    assert left["annotations"] == {"hami.io/device-cordon", "hami.io/node-handshake"}, (
        "a user's wish, and the scheduler's"
    )
    assert set(cluster.api.request("GET", f"{pods}/failed")["metadata"]["annotations"]) == {
        "hami.io/gpu-scheduler-policy"
    }
    assert role("remove_nodes").changed == 0

    cluster.api.request(
        "POST", "/apis/coordination.k8s.io/v1/namespaces/hami-system/leases", {"metadata": {"name": "hami-scheduler"}}
    )
    assert role("remove", "--check").changed and role("remove").changed
    until(lambda: cluster.api.ask("GET", "/api/v1/namespaces/hami-system")[0] == 404)
    cluster.api.request(
        "PATCH", f"/api/v1/nodes/{NODE}", {"metadata": {"annotations": {"hami.io/device-cordon": None}}}, MERGE
    )
    cluster.api.request("DELETE", f"{pods}/failed?gracePeriodSeconds=0")
    assert objects(cluster) == before and node(cluster) == CLEAN
    assert role("remove").changed == 0


def test_a_pod_that_another_scheduler_would_bind_to_hamis_nodes_is_refused(cluster, role):
    """The plugin there would give it the cards of a pod that HAMi's scheduler has bound."""
    role("cluster", hami_values={"scheduler": {"admissionWebhook": {"enabled": False}}})
    term = {"key": "kubegpu.share/backend", "operator": "NotIn", "values": ["hami"]}
    away, here = [{"matchExpressions": [term]}], [{"matchExpressions": [{**term, "operator": "In"}]}]
    required = "requiredDuringSchedulingIgnoredDuringExecution"

    def ask(count="1", init=False, **spec):
        asking = {"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": count}}}
        containers = {"containers": [{"name": "d", "image": "i"}, asking]}
        if init:
            containers = {"containers": [{"name": "d", "image": "i"}], "initContainers": [asking]}
        pod = {"metadata": {"generateName": "p-"}, "spec": {**containers, **spec}}
        return cluster.api.ask("POST", "/api/v1/namespaces/default/pods?dryRun=All", pod)

    until(lambda: ask()[0] == 422 or ask()[0] == 403)
    for refused in (
        {},
        {"init": True},
        {"schedulerName": "another"},
        {"nodeName": NODE},
        {"nodeSelector": {"kubegpu.share/backend": "hami"}},
        {"nodeSelector": {"kubernetes.io/hostname": "a"}},
        {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": here}}}},
        {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": away + here}}}},
    ):
        status, text = ask(**refused)
        assert status == 403 and "schedulerName: hami-scheduler for HAMi's nodes" in text, (refused, status, text)
    for accepted in (
        {"count": "0"},
        {"schedulerName": "hami-scheduler"},
        {"nodeSelector": {"kubegpu.share/backend": "nvidia"}},
        {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": away}}}},
    ):
        assert ask(**accepted)[0] == 201, accepted
    role("remove")
    until(lambda: ask()[0] == 201)


def test_a_webhook_that_changes_no_pods_is_an_error(cluster, role):
    values = {"scheduler": {"admissionWebhook": {"customURL": {"enabled": True, "host": "127.0.0.1", "port": 1}}}}
    text = " ".join(role("cluster", fails=True, hami_values=values, hami_wait_timeout=8).text.split())
    assert "HAMi's webhook doesn't change a pod with nvidia.com/gpumem in namespace default" in text
    values["scheduler"]["admissionWebhook"]["failurePolicy"] = "Fail"
    text = " ".join(role("cluster", fails=True, hami_values=values, hami_wait_timeout=8).text.split())
    assert "would be refused in namespace default" in text and "connection refused" in text
    # It heals, and its removal isn't stopped by the webhook.
    assert role("cluster").changed
    role("remove")


def test_a_namespace_of_others_gets_its_labels_back(cluster, role):
    cluster.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "hami-system", "labels": {"team": "a"}}})
    before = objects(cluster)
    role("cluster")
    role("remove")
    assert objects(cluster) == before
    assert cluster.api.request("GET", "/api/v1/namespaces/hami-system")["metadata"]["labels"] == {
        "kubernetes.io/metadata.name": "hami-system",
        "team": "a",
    }
    cluster.api.request("DELETE", "/api/v1/namespaces/hami-system")
    until(lambda: cluster.api.ask("GET", "/api/v1/namespaces/hami-system")[0] == 404)


RELEASES = "/api/v1/namespaces/hami-system/secrets?labelSelector=owner=helm"


def recorded(cluster, *states):
    """Whether helm has recorded the release in one of these states."""
    found = json.loads(cluster.api.ask("GET", RELEASES)[1]).get("items") or []
    return any(one["metadata"]["labels"]["status"] in states for one in found)


def exists(kind):
    return lambda cluster: bool(cluster.api.kubectl("get", kind, "--all-namespaces", "--output=name").stdout.strip())


def is_begun(cluster):
    return recorded(cluster, "pending-install")


def is_gone(kind):
    return lambda cluster: not exists(kind)(cluster)


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        ("cluster", exists("secrets")),
        ("cluster", is_begun),
        ("cluster", exists("mutatingwebhookconfigurations")),
        ("remove", is_gone("mutatingwebhookconfigurations")),
        ("remove", lambda cluster: recorded(cluster, "uninstalling")),
        ("remove", is_gone("deployments")),
        ("remove", is_gone("secrets")),
    ],
    ids=["certificate", "helm begins", "webhook", "no webhook", "helm uninstalls", "no pods", "no certificate"],
)
def test_a_step_that_is_killed_goes_on(cluster, helm, role, tmp_path, step, moment):
    """Kill ansible with helm and all modules at a moment; the next run completes the step."""
    before = objects(cluster)
    if step == "remove":
        role("cluster")
    play, given = tmp_path / "killed.yml", tmp_path / "given.json"
    play.write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "roles": ["kubegpu.share.hami"]}]))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    given.write_text(json.dumps({**local, **variables_of(cluster, helm, step)}))
    home = {"ANSIBLE_COLLECTIONS_PATH": str(HERE.parents[2] / ".collections"), "ANSIBLE_HOME": str(tmp_path / "home")}
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", play, "-e", f"@{given}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **home}, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
        try:
            until(lambda: moment(cluster) or process.poll() is not None, seconds=300, pause=0.02)
            killed = process.poll() is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert killed, (tmp_path / "log").read_text()
    if step == "cluster":
        role("cluster")
        assert role("cluster").changed == 0
    role("remove")
    until(lambda: cluster.api.ask("GET", "/api/v1/namespaces/hami-system")[0] == 404)
    assert objects(cluster) == before
