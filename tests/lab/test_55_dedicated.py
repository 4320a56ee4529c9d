# SPDX-License-Identifier: GPL-3.0-or-later
"""A dedicated scheduler beside the cluster's: pods select it by name, and one replica may die at any time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _lab import REPORT, RESOURCE, ApiError, JsonObject, Lab, until
from _schedulers import Inside, processes
from _snapshot import cluster_objects

from lab.shell import in_background

# It is brought up, killed and taken away; without kubelet the unit tests do that too.
pytestmark = pytest.mark.long
PLAYBOOK = "tests/lab/dedicated_scheduler.yml"
NAMESPACE = "lab-dedicated"
NAME = "gpushare-scheduler"
LABEL = f"app.kubernetes.io/name={NAME}"
# A lease that nobody gave back is free after 15 s.
LONGEST = 60.0


@pytest.fixture(scope="module")
def before(lab: Lab) -> dict[str, str]:
    return cluster_objects(lab)


@pytest.fixture(scope="module")
def dedicated(lab: Lab, before: dict[str, str]) -> Iterator[None]:
    done = lab.playbook(PLAYBOOK)
    try:
        assert done.rc == 0, done.out[-8000:]
        yield
    finally:
        gone = lab.playbook(PLAYBOOK, "-e", "scheduler_state=absent")
        assert gone.rc == 0, gone.out[-8000:]


@pytest.fixture(scope="module")
def namespace(lab: Lab, dedicated: None) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


def pods(lab: Lab) -> list[JsonObject]:
    """Return the dedicated scheduler's pods."""
    return lab.api.items(f"/api/v1/pods?labelSelector={LABEL}")


def leader(lab: Lab) -> JsonObject:
    """Return the pod that holds the lease."""
    found = [one for one in lab.api.items("/apis/coordination.k8s.io/v1/leases") if one["metadata"]["name"] == NAME]
    assert len(found) == 1, "its lease"
    holder = str(found[0]["spec"]["holderIdentity"]).rpartition("_")[0]
    return next(pod for pod in pods(lab) if pod["metadata"]["name"] == holder)


def ready(lab: Lab) -> bool:
    found = pods(lab)
    return len(found) >= 2 and all(
        all(status["ready"] for status in pod["status"].get("containerStatuses", [{"ready": False}])) for pod in found
    )


def delete_pods(lab: Lab, namespace: str, names: list[str]) -> None:
    for name in names:
        lab.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
    until(lambda: not {pod["metadata"]["name"] for pod in lab.api.pods(namespace)} & set(names), "pods gone", 60)


def bound_by(lab: Lab, namespace: str, pod: str) -> list[str]:
    """Return the reporter of the pod's Scheduled Event."""
    path = f"/api/v1/namespaces/{namespace}/events?fieldSelector=reason=Scheduled,involvedObject.name={pod}"
    return [one.get("reportingComponent") or one["source"]["component"] for one in lab.api.items(path)]


def test_two_replicas_on_different_nodes(lab: Lab, dedicated: None) -> None:
    until(lambda: ready(lab), "ready", 90)
    nodes = [pod["spec"]["nodeName"] for pod in pods(lab)]
    assert len(nodes) == len(set(nodes)) >= 2


def test_second_run_changes_nothing(lab: Lab, dedicated: None) -> None:
    lab.playbook(PLAYBOOK).assert_unchanged()


def test_a_gpu_pod_for_another_scheduler_is_refused(lab: Lab, namespace: str) -> None:
    def refusal() -> str:
        try:
            lab.api.create_pod(namespace, "astray", [1], lab.image())
        except ApiError as error:
            return str(error)
        lab.api.delete(f"/api/v1/namespaces/{namespace}/pods/astray")
        raise AssertionError("a pod went to the cluster's scheduler")

    # A policy needs a moment until every API server knows it.
    message = until(refusal, "refused", 30)
    assert NAME in message and RESOURCE in message, message


def test_a_pod_without_gpu_memory_uses_the_default_scheduler(lab: Lab, namespace: str) -> None:
    container = {"name": "c0", "image": lab.image(), "imagePullPolicy": "IfNotPresent", "command": ["sleep", "3600"]}
    spec: JsonObject = {"containers": [container], "terminationGracePeriodSeconds": 0}
    lab.api.call("POST", f"/api/v1/namespaces/{namespace}/pods", {"metadata": {"name": "plain"}, "spec": spec})
    lab.api.wait_running(namespace, ["plain"])
    assert until(lambda: bound_by(lab, namespace, "plain"), "its event", 30) == ["default-scheduler"]
    delete_pods(lab, namespace, ["plain"])


def test_a_gpu_pod_gets_its_card(lab: Lab, namespace: str) -> None:
    names = ["first", "second"]
    for name in names:
        lab.api.create_pod(namespace, name, [2], lab.image(), scheduler=NAME)
    lab.api.wait_running(namespace, names)
    until(lambda: lab.assert_agreement([lab.api.pod(namespace, name) for name in names]), "all sources agree", 30)
    until(lambda: [bound_by(lab, namespace, name) for name in names] == [[NAME], [NAME]], "the events", 30)
    delete_pods(lab, namespace, names)


@pytest.mark.parametrize("what", ["its scheduler is killed", "its extender is killed", "its pod is deleted"])
def test_the_leader_dies(lab: Lab, namespace: str, what: str) -> None:
    """A pod with a share every two seconds: each is bound in time, and no card is overbooked."""
    until(lambda: ready(lab), "ready", 120)
    first: JsonObject = until(lambda: leader(lab), "a leader", 60)
    waits: dict[str, float] = {}
    stop = threading.Event()
    names = [f"steady-{number}" for number in range(14)]

    def poll() -> None:
        began: dict[str, float] = {}
        while not stop.wait(0.25):
            for pod in lab.api.pods(namespace):
                name = pod["metadata"]["name"]
                began.setdefault(name, time.monotonic())
                if pod["spec"].get("nodeName"):
                    waits.setdefault(name, time.monotonic() - began[name])

    with in_background(poll, stop):
        for number, name in enumerate(names):
            if number == 2:
                kill(lab, first, what)
            lab.api.create_pod(namespace, name, [1], lab.image(), scheduler=NAME)
            time.sleep(2)
        until(lambda: set(names) <= set(waits), "every pod is bound", LONGEST)
    longest = max(waits[name] for name in names)
    REPORT.append(f"dedicated scheduler, {what}: {len(names)} pods, the longest waited {longest:.1f} s")
    assert longest < LONGEST
    lab.api.wait_running(namespace, names, 90)
    until(lambda: lab.assert_agreement([lab.api.pod(namespace, name) for name in names]), "all sources agree", 30)
    assert len(lab.api.pods(namespace)) == len(names)
    delete_pods(lab, namespace, names)
    until(lambda: ready(lab), "two of it again", 120)


def kill(lab: Lab, pod: JsonObject, what: str) -> None:
    metadata = pod["metadata"]
    if "deleted" in what:
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        lab.api.call("DELETE", path, {"gracePeriodSeconds": 0})
        return
    word = "gpushare-scheduler/config.yaml" if "scheduler" in what else "gpushare-extender"
    inside = Inside(lab)
    node = pod["spec"]["nodeName"]
    uid = metadata["uid"].replace("-", "_")
    found = []
    for process in processes().values():
        try:
            words = (Path("/proc") / str(process.pid) / "cmdline").read_bytes().decode(errors="replace")
            groups = (Path("/proc") / str(process.pid) / "cgroup").read_text()
        except OSError:
            continue
        if word in words and uid in groups and inside.node_of(process.pid) == node:
            found.append(process.pid)
    assert len(found) == 1, f"{word} on {node}: {found}"
    os.kill(found[0], signal.SIGKILL)


def test_removal_restores_the_cluster(lab: Lab, before: dict[str, str], namespace: str) -> None:
    gone = lab.playbook(PLAYBOOK, "-e", "scheduler_state=absent")
    assert gone.rc == 0, gone.out[-8000:]
    own = {key: text for key, text in cluster_objects(lab).items() if NAMESPACE not in key}
    assert own == before
    lab.playbook(PLAYBOOK, "-e", "scheduler_state=absent").assert_unchanged()

    def accepted() -> bool:
        lab.api.create_pod(namespace, "again", [1], lab.image())
        return True

    until(accepted, "the policy is gone", 30)
    lab.api.wait_running(namespace, ["again"])
    delete_pods(lab, namespace, ["again"])
