# SPDX-License-Identifier: GPL-3.0-or-later
"""Readiness of a rollout, and the reasons from pods and events."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.assertions import pod_state
from ansible_collections.kubegpu.share.plugins.module_utils._kube import rollout


def workload(kind, generation=1, spec=None, **status):
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "w", "namespace": "n", "generation": generation, "uid": "u"},
        "spec": spec or {},
        "status": {"observedGeneration": 1, **status},
    }


DONE = {"desiredNumberScheduled": 2, "updatedNumberScheduled": 2, "numberReady": 2, "numberAvailable": 2}
ON_DELETE = {"updateStrategy": {"type": "OnDelete"}}


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (workload("DaemonSet", **DONE), None),
        (workload("DaemonSet", 2, **DONE), "hasn't processed the change"),
        (workload("DaemonSet", **{**DONE, "updatedNumberScheduled": 1}), "1 of 2 pods are of the new revision"),
        (workload("DaemonSet", **{**DONE, "numberReady": 0}), "0 of 2 pods are ready"),
        (workload("DaemonSet", **{**DONE, "numberAvailable": 1}), "1 of 2 pods are available"),
        (workload("DaemonSet", spec=ON_DELETE, **{**DONE, "updatedNumberScheduled": 0}), None),
        (workload("DaemonSet", desiredNumberScheduled=0), "no node matches its selectors"),
        (workload("DaemonSet", spec=ON_DELETE), "no node matches its selectors"),
        ({**workload("DaemonSet"), "status": {}}, "hasn't processed"),
        (workload("Deployment", replicas=1, updatedReplicas=1, readyReplicas=1, availableReplicas=1), None),
        (workload("Deployment", replicas=2, updatedReplicas=1, readyReplicas=1, availableReplicas=1), "old revision"),
        (workload("Deployment", updatedReplicas=1), "0 of 1 pod is ready"),
        (workload("Deployment", spec={"replicas": 0}), "scaled to 0"),
        (workload("StatefulSet", spec={"replicas": 0}), "scaled to 0"),
        (workload("StatefulSet", spec={"replicas": 2}, updatedReplicas=2, readyReplicas=1), "1 of 2 pods are ready"),
        ({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}, None),
    ],
)
def test_not_ready_reason(live, message):
    reason = rollout.not_ready_reason(live)
    assert reason is None if message is None else message in reason


def test_a_daemonset_runs_on_as_many_nodes_as_it_is_asked_for():
    """None where its nodes get their labels later; all schedulers' nodes where one without an extender fails pods."""
    none, two = workload("DaemonSet"), workload("DaemonSet", **DONE)
    assert rollout.not_ready_reason(none, min_nodes=0) is None
    assert rollout.not_ready_reason(two, min_nodes=2) is None
    assert "only 2 of 3 nodes match" in rollout.not_ready_reason(two, min_nodes=3)


def test_a_node_announces_its_resources():
    allocatable = {"a/b": "0", "c/d": "1"}
    node = {"kind": "Node", "metadata": {"name": "g"}, "status": {"allocatable": allocatable}}
    assert rollout.not_ready_reason(node, {"c/d": 0}) is None
    assert rollout.not_ready_reason(node, {"a/b": 0, "c/d": 0}) == "Node g doesn't announce a/b"
    assert rollout.not_ready_reason(node, {"c/d": 1}) is None
    assert rollout.not_ready_reason(node, {"c/d": 4}) == "Node g announces 1 c/d, not 4"


def pod(name="p", node="gpu1", **status):
    found = {"metadata": {"name": name, "namespace": "n", "uid": f"uid-{name}"}, "spec": {}, "status": status}
    if node:
        found["spec"]["nodeName"] = node
    return found


def event(kind, name, reason, message, uid=None, when="1"):
    return {
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": when,
        "involvedObject": {"kind": kind, "name": name, **({"uid": uid} if uid else {})},
    }


def container(state, value, **more):
    """A pod of one container in this state."""
    return pod(containerStatuses=[{"name": "c", "state": {state: value}, **more}])


WAITING = {"reason": "ImagePullBackOff", "message": "Back-off"}
CRASHED = {"terminated": {"exitCode": 2, "reason": "Error", "message": "no\nflag"}}
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
ENDED = {"name": "i", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
PROBE = "Unhealthy: Readiness probe failed: 503: NVML isn't there"


@pytest.mark.parametrize(
    ("one", "reasons"),
    [
        (container("waiting", WAITING), [" on gpu1: container c is waiting: ImagePullBackOff (Back-off)"]),
        (
            container("waiting", {"reason": "CrashLoopBackOff"}, lastState=CRASHED),
            [" on gpu1: container c is waiting: CrashLoopBackOff; before that, it ended with code 2 (Error): no flag"],
        ),
        (pod(node="", phase="Pending", conditions=[UNSCHEDULED]), [" isn't scheduled: 0/3 nodes are available"]),
        (pod(initContainerStatuses=[ENDED]), [" on gpu1: container i ended with code 1 (Error)"]),
        (pod(phase="Failed", reason="Evicted", message="disk"), [" on gpu1: Evicted disk"]),
        (pod(phase="Pending"), [" on gpu1 is Pending and not ready"]),
        (pod(conditions=[{"type": "Ready", "status": "True"}]), []),
    ],
)
def test_reasons_of_pods(one, reasons):
    # This event only repeats the container's state.
    events = [event("Pod", "p", "BackOff", "Back-off pulling")]
    assert rollout.reasons(None, [one], events) == [f"pod p{text}" for text in reasons]


def test_the_last_event_of_a_pod_is_a_reason():
    events = [
        event("Pod", "p", "Unhealthy", "old", when="1"),
        event("Pod", "p", *PROBE.split(": ", 1), when="2"),
        event("Pod", "other", "Unhealthy", "not this one", when="3"),
    ]
    assert rollout.reasons(None, [container("running", {}, ready=False)], events) == [
        "pod p on gpu1: container c is running but not ready",
        f"pod p on gpu1: {PROBE}",
    ]


# As k3s' containerd 2.2.9 and runc wrote it on a machine that forbids the change: the cause is the end.
SANDBOX = (
    "(combined from similar events): Failed to create pod sandbox: rpc error: code = Unknown desc = failed to start "
    'sandbox "125447f129dfa8440e8042be60ccbad085db40e6500a124e3493af93887a63a3": failed to create containerd task: '
    "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "
    "can't get final child's PID from pipe: EOF"
)


def test_a_long_message_of_the_runtime_keeps_its_cause():
    one = container("waiting", {"reason": "ContainerCreating"})
    for found in (
        rollout.reasons(None, [one], [event("Pod", "p", "FailedCreatePodSandBox", SANDBOX)])[-1],
        rollout.reasons(None, [container("waiting", {"reason": "CreateContainerError", "message": SANDBOX})], [])[0],
    ):
        assert "Failed to create pod sandbox" in found
        assert "can't get final child's PID from pipe: EOF" in found
        assert len(found) < 400
    one = container("waiting", {"reason": "ContainerCreating"})
    summary = pod_state(one, [event("Pod", "p", "FailedCreatePodSandBox", SANDBOX, uid="uid-p")]).summary
    assert summary.endswith("can't get final child's PID from pipe: EOF")


def test_without_pods_the_workloads_events_are_reported():
    live = workload("DaemonSet")
    events = [
        event("DaemonSet", "w", "FailedCreate", "violates PodSecurity", uid="u"),
        event("DaemonSet", "w", "FailedCreate", "of an earlier one of this name", uid="old"),
    ]
    assert rollout.reasons(live, [], events) == ["DaemonSet n/w: FailedCreate: violates PodSecurity"]


def test_a_terminating_pod_isnt_ready():
    leaving = pod(conditions=[{"type": "Ready", "status": "True"}])
    leaving["metadata"]["deletionTimestamp"] = "now"
    assert not rollout.ready(leaving)
    assert rollout.reasons(None, [leaving], []) == ["pod p on gpu1 is being deleted"]


def test_reasons_are_limited():
    assert len(rollout.reasons(None, [pod(name=f"p{number}", phase="Pending") for number in range(50)], [])) == 6
