# SPDX-License-Identifier: GPL-3.0-or-later
"""The servers under a real kubelet, scheduler and runtime: annotation, kubelet and container agree."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from _lab import RESOURCE, JsonObject, Lab, until
from _pods import containers, delete_pods, wait_settled

NAMESPACE = "lab-servers"
# Once is luck: the order in which kubelet serves two pods varies.
TIMES, MANY_TIMES = 5, 20


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


@pytest.fixture(scope="module")
def tenants(lab: Lab, namespace: str) -> Iterator[list[JsonObject]]:
    """Pods on both cards of a node, one of them with two containers, which survive all following tests."""
    node, image = lab.gpu_nodes[0], lab.image()
    sizes = {"tenant-1": [9], "tenant-2": [9], "tenant-3": [2, 1]}
    for name, units in sizes.items():
        lab.api.create_pod(namespace, name, units, image, node)
    pods = wait_settled(lab, namespace, list(sizes))
    cards = {pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] for pod in pods}
    assert len(cards) == 2, "9 and 9 units don't fit one card of 16"
    yield pods
    delete_pods(lab, namespace, list(sizes))


def test_fault_02_two_pods_at_once_many_times(lab: Lab, namespace: str, every_test: bool) -> None:
    """Each pod takes more than half a card, so that each needs its own, in whatever order kubelet serves them."""
    node, image = lab.gpu_nodes[-1], lab.image()
    units = max(card["units"] for card in lab.cards(node)) // 2 + 1
    assert len(lab.cards(node)) == 2
    for number in range(MANY_TIMES if every_test else TIMES):
        names = [f"twin-{number}-a", f"twin-{number}-b"]
        for name in names:
            lab.api.create_pod(namespace, name, [units], image, node)
        pods = wait_settled(lab, namespace, names)
        assert {pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] for pod in pods} == {"0", "1"}
        delete_pods(lab, namespace, names)


def test_pod_that_bypasses_the_scheduler(lab: Lab, namespace: str) -> None:
    node = lab.gpu_nodes[-1]
    lab.api.create_pod(namespace, "around", [5], lab.image(), node, bound=True)
    pod = wait_settled(lab, namespace, ["around"])[0]
    assert pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_POD"] == "5"
    delete_pods(lab, namespace, ["around"])


def assert_undisturbed(lab: Lab, namespace: str, before: list[JsonObject]) -> None:
    """Assert that the tenants run undisturbed, everything agrees, and a new pod runs."""
    names = [one["metadata"]["name"] for one in before]
    node = before[0]["spec"]["nodeName"]
    total = sum(card["units"] for card in lab.cards(node))
    until(lambda: lab.allocatable(node) == total, f"{RESOURCE} allocatable on {node}", 90)
    assert containers(wait_settled(lab, namespace, names)) == containers(before)
    assert_new_pod_runs(lab, namespace, node)


def assert_new_pod_runs(lab: Lab, namespace: str, node: str) -> None:
    """Create a pod until it runs: kubelet rejects pods before its node's plugin is back, as a controller would see."""
    name = "newcomer"

    def running() -> bool:
        status = next((pod["status"] for pod in lab.api.pods(namespace) if pod["metadata"]["name"] == name), None)
        if status is None:
            lab.api.create_pod(namespace, name, [1], lab.image(), node)
        elif status.get("phase") == "Failed":
            assert status["reason"] == "UnexpectedAdmissionError", status
            delete_pods(lab, namespace, [name])
        return status is not None and status.get("phase") == "Running"

    until(running, f"pod {name} Running", 90)
    wait_settled(lab, namespace, [name])
    delete_pods(lab, namespace, [name])


def kill(lab: Lab, node: str, command: str) -> None:
    """SIGKILL a server on its node, and wait until its successor runs."""
    # The brackets keep pgrep from finding the shell that it runs in.
    find = f"pgrep -f '[{command[0]}]{command[1:]}'; true"
    before = set(lab.ssh(node, find).split())
    assert before, f"{command} doesn't run on {node}"
    lab.ssh(node, f"kill -9 {' '.join(before)}")
    until(lambda: set(lab.ssh(node, find).split()) - before, f"{command} runs again on {node}", 60)


def test_plugin_killed(lab: Lab, namespace: str, tenants: list[JsonObject]) -> None:
    kill(lab, lab.gpu_nodes[0], "gpushare-device-plugin")
    assert_undisturbed(lab, namespace, tenants)


def test_extender_killed(lab: Lab, namespace: str, tenants: list[JsonObject]) -> None:
    for name in lab.control_planes:
        kill(lab, name, "gpushare-extender")
    assert_undisturbed(lab, namespace, tenants)


@pytest.mark.long
def test_api_servers_down_for_half_a_minute(lab: Lab, namespace: str, tenants: list[JsonObject]) -> None:
    """Running pods go on running, and everything agrees again afterwards."""
    node = lab.gpu_nodes[0]
    manifest = "/etc/kubernetes/manifests/kube-apiserver.yaml"
    aside = "/root/kube-apiserver.yaml"
    try:
        for name in lab.control_planes:
            lab.ssh(name, f"mv {manifest} {aside}")
        until(lambda: not any(lab.api_answers(name) for name in lab.control_planes), "no API server is there", 60)
        time.sleep(30)
        assert not any(lab.api_answers(name) for name in lab.control_planes)
        for pod in tenants:
            assert len(lab.devices(node, pod)) == len(pod["spec"]["containers"]), pod["metadata"]["name"]
    finally:
        for name in lab.control_planes:
            lab.ssh(name, f"[ ! -e {aside} ] || mv {aside} {manifest}")
    lab.wait_ready()
    assert_undisturbed(lab, namespace, tenants)
