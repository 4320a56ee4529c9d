# SPDX-License-Identifier: GPL-3.0-or-later
"""Another driver on one node of a busy cluster: the node is drained and returned, other nodes aren't affected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from _lab import RESOURCE, Done, JsonObject, Lab, until

NAMESPACE = "lab-maintenance"
PLAYBOOK = "playbooks/nodes.yml"
OLDER = "580.82.07"
# In the lab a unit plays the kernel module.
SERVICES = ["nvidia-sim"]
ANNOTATION = "kubegpu.share/maintenance"


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


def maintain(lab: Lab, folder: Path, node: str, **variables: object) -> Done:
    """Run the playbook for the nodes, with variables for one of them."""
    extra = folder / "one.yml"
    extra.write_text(yaml.safe_dump({"all": {"hosts": {node: {"maintenance_services": SERVICES, **variables}}}}))
    return lab.playbook(PLAYBOOK, "-i", str(extra), "-e", "gpu_maintenance=drain")


def deployment(lab: Lab, namespace: str, name: str, node: str) -> None:
    """A Deployment of one pod with a share of a card on one node."""
    labels = {"app": name}
    container: JsonObject = {
        "name": "c0",
        "image": lab.image(),
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "resources": {"limits": {RESOURCE: "2"}},
    }
    spec: JsonObject = {
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "nodeSelector": {"kubernetes.io/hostname": node},
    }
    body: JsonObject = {
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    lab.api.call("POST", f"/apis/apps/v1/namespaces/{namespace}/deployments", body)


def running(lab: Lab, namespace: str, app: str) -> JsonObject:
    """Wait until the Deployment's only pod runs with its card."""

    def found() -> JsonObject:
        pods = [one for one in lab.api.pods(namespace) if one["metadata"]["labels"].get("app") == app]
        assert [one["status"].get("phase") for one in pods] == ["Running"], [one["status"] for one in pods]
        lab.assert_agreement(pods)
        return pods[0]

    pod: JsonObject = until(found, f"pod of {app} Running", 120)
    return pod


def unaffected_state(lab: Lab, node: str) -> JsonObject:
    """Return what must not change on an unaffected node."""
    own = lab.api.node(node)
    script = "systemctl show -p ActiveEnterTimestampMonotonic kubelet containerd nvidia-sim nvidia-persistenced"
    pods = [pod for pod in lab.api.items("/api/v1/pods") if pod["spec"].get("nodeName") == node]
    return {
        "driver": driver(lab, node),
        "services": lab.ssh(node, script),
        "unschedulable": own["spec"].get("unschedulable", False),
        "containers": sorted(
            (status["containerID"], status["restartCount"])
            for pod in pods
            for status in pod["status"]["containerStatuses"]
        ),
    }


def driver(lab: Lab, node: str) -> tuple[str, str]:
    """Return the versions of the loaded module and of the library."""
    module = lab.ssh(node, "sed -n 's/.*Kernel Module for [^ ]*  \\([0-9.]*\\)  .*/\\1/p' /proc/driver/nvidia/version")
    library = lab.ssh(node, "nvidia-smi --query-gpu=driver_version --format=csv,noheader | sort -u")
    return module.strip(), library.strip()


def given_back(lab: Lab, node: str, version: str) -> None:
    assert driver(lab, node) == (version, version)
    own = lab.api.node(node)
    assert not own["spec"].get("unschedulable") and ANNOTATION not in own["metadata"]["annotations"]
    assert lab.ssh(node, "systemctl is-active kubelet nvidia-sim nvidia-persistenced").split() == ["active"] * 3
    assert lab.ssh(node, "ls -A /var/lib/kubegpu-share 2>/dev/null; true").split().count("kernel-driver.json") == 0
    total = sum(card["units"] for card in lab.cards(node))
    until(lambda: lab.allocatable(node) == total, f"{RESOURCE} allocatable on {node}", 90)


@pytest.mark.long
def test_another_driver_on_one_node_and_back(lab: Lab, namespace: str, tmp_path: Path) -> None:
    node, other = lab.gpu_nodes[-1], lab.gpu_nodes[0]
    assert node != other
    newer = str(lab.state["settings"]["driver_version"])
    assert driver(lab, node) == (newer, newer)
    deployment(lab, namespace, "tenant", node)
    deployment(lab, namespace, "neighbour", other)
    tenant = running(lab, namespace, "tenant")
    running(lab, namespace, "neighbour")
    plugin = next(pod for pod in lab.server_pods("gpushare-device-plugin") if pod["spec"]["nodeName"] == node)
    before = unaffected_state(lab, other)

    for version, variables in ((OLDER, {"driver_version": OLDER}), (newer, {})):
        done = maintain(lab, tmp_path, node, **variables)
        assert done.rc == 0, done.out[-8000:]
        given_back(lab, node, version)
        evicted, tenant = tenant, running(lab, namespace, "tenant")
        assert tenant["metadata"]["uid"] != evicted["metadata"]["uid"]
        # The DaemonSet's pod stayed, and its container was made anew, with the new driver's library.
        later = next(pod for pod in lab.server_pods("gpushare-device-plugin") if pod["spec"]["nodeName"] == node)
        assert later["metadata"]["uid"] == plugin["metadata"]["uid"]
        assert (
            later["status"]["containerStatuses"][0]["restartCount"]
            > (plugin["status"]["containerStatuses"][0]["restartCount"])
        )
        plugin = later
        assert unaffected_state(lab, other) == before
        maintain(lab, tmp_path, node, **variables).assert_unchanged()


@pytest.mark.long
def test_a_node_cordoned_before_stays_cordoned(lab: Lab, namespace: str, tmp_path: Path) -> None:
    node = lab.gpu_nodes[-1]
    newer = str(lab.state["settings"]["driver_version"])
    path, kind = f"/api/v1/nodes/{node}", "application/merge-patch+json"
    lab.api.call("PATCH", path, {"spec": {"unschedulable": True}}, kind)
    try:
        done = maintain(lab, tmp_path, node, driver_version=OLDER)
        assert done.rc == 0, done.out[-8000:]
        assert lab.api.node(node)["spec"]["unschedulable"] is True
        assert driver(lab, node) == (OLDER, OLDER)
    finally:
        lab.api.call("PATCH", path, {"spec": {"unschedulable": None}}, kind)
    done = maintain(lab, tmp_path, node)
    assert done.rc == 0, done.out[-8000:]
    given_back(lab, node, newer)


@pytest.mark.long
def test_a_pod_without_a_controller_blocks_the_drain(lab: Lab, namespace: str, tmp_path: Path) -> None:
    """The driver isn't touched, the node stays cordoned, and the next run continues."""
    node = lab.gpu_nodes[-1]
    newer = str(lab.state["settings"]["driver_version"])
    lab.api.create_pod(namespace, "lonely", [1], lab.image(), node)
    pod = lab.api.wait_running(namespace, ["lonely"])[0]
    done = maintain(lab, tmp_path, node, driver_version=OLDER)
    assert done.rc != 0
    assert f"{namespace}/lonely" in done.out and f"Node {node} stays cordoned" in done.out, done.out[-6000:]
    assert driver(lab, node) == (newer, newer)
    own = lab.api.node(node)
    assert own["spec"]["unschedulable"] is True and ANNOTATION in own["metadata"]["annotations"]
    assert lab.api.pod(namespace, "lonely")["metadata"]["uid"] == pod["metadata"]["uid"]
    lab.api.delete(f"/api/v1/namespaces/{namespace}/pods/lonely")
    until(lambda: "lonely" not in json.dumps([one["metadata"]["name"] for one in lab.api.pods(namespace)]), "gone", 60)
    # The driver is as it was: what is left to do is to give the node back.
    done = maintain(lab, tmp_path, node)
    assert done.rc == 0, done.out[-8000:]
    given_back(lab, node, newer)
