# SPDX-License-Identifier: GPL-3.0-or-later
"""The canary over a simulated cluster: it passes on a healthy one, and each fault fails its own step."""

from __future__ import annotations

import dataclasses
import os
import signal
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.client import is_transient
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import CANARY, LABEL, RUN_LABEL
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import CommandFailed
from suite_cluster import AWAY, FORBIDDEN, SPACE, Cluster, Faults, attempt, node, results, what

TWO = {"Y1": "PASS", "Y2": "PASS", "Y3": "PASS", "Y4": "PASS", "Y5": "skipped", "Y6": "PASS", "Y7": "PASS"}


def left_nothing(cluster: Cluster) -> None:
    assert cluster.namespaces == {}
    assert cluster.ours() == []


def two_cards(**faults: t.Any) -> Cluster:
    """A node of two cards of 16 units."""
    return Cluster([node("gpu1", [16, 16])], Faults(**faults))


# --------------------------------------------------------------------------- healthy


LONG = pytest.mark.long
EVERY_SIZE = [[16, 16], [16, 10], [80] * 8, [11, 24], [80, 10, 10], [6, 4, 2], [16384] * 2, [5, 5], [3] * 3, [141] * 16]


@pytest.mark.parametrize("spread", [False, pytest.param(True, marks=LONG)])
@pytest.mark.parametrize("text", [False, pytest.param(True, marks=LONG)])
@pytest.mark.parametrize("sizes", EVERY_SIZE, ids=lambda sizes: "-".join(map(str, sizes)))
def test_a_healthy_cluster_passes(sizes: list[int], spread: bool, text: bool) -> None:
    cluster = Cluster([node("gpu1", sizes)], Faults(spread=spread, upstream_text=text))
    found = attempt(cluster)
    assert results(found) == TWO, found["acceptance"]["steps"]
    assert found["acceptance"]["result"] == "PASS"
    assert found["changed"] is True
    assert found["findings"] == []
    assert found["acceptance"]["node"] == "gpu1"
    writes = [one for one in cluster.requested if one.split()[0] in ("PATCH", "DELETE")]
    assert writes and all(f"Namespace {SPACE}" in one or f"Pod {SPACE}/" in one for one in writes)
    left_nothing(cluster)


@pytest.mark.parametrize(
    ("sizes", "skipped", "texts"),
    [
        ([16], ["Y3", "Y4"], {"Y3": "kube-scheduler's own count", "Y4": "doesn't have two cards"}),
        ([1], ["Y3", "Y4"], {}),
        # No size exists whose next pod fits the remainders of both cards together.
        ([6, 5], ["Y3"], {}),
        ([4, 4], ["Y3"], {}),
        # Filled cards show fragments after the release.
        ([2, 2], ["Y3"], {"Y4": "3 of 4 units free"}),
    ],
    ids=str,
)
def test_steps_that_the_cards_sizes_make_impossible_are_skipped(
    sizes: list[int], skipped: list[str], texts: dict[str, str]
) -> None:
    found = attempt(Cluster([node("gpu1", sizes)]))
    assert results(found) == {**TWO, **dict.fromkeys(skipped, "skipped")}
    assert found["acceptance"]["result"] == "PASS"
    assert all(text in what(found, step) for step, text in texts.items())


def test_a_node_with_one_freer_card_is_preferred() -> None:
    cluster = Cluster([node("gpu1", [16, 16]), node("gpu2", [16, 16])])
    cluster.add_other("theirs", "gpu2", 6, 1)
    found = attempt(cluster)
    assert results(found) == TWO
    assert found["acceptance"]["node"] == "gpu2"
    assert what(found, "Y2") == "1 pod of 11 units on card 0 (1) of node gpu2"
    assert what(found, "Y6").endswith("a pod of the 16 units that were free ran after them on card 0")


def test_upstreams_plugin_leaves_a_pod_of_one_card_unassigned() -> None:
    one = node("gpu1", [16])
    del one["metadata"]["annotations"][contract.NODE_CARDS]
    assert results(attempt(Cluster([one], Faults(never_assigned=True))))["Y2"] == "PASS"


def test_pods_are_restricted_and_on_one_node() -> None:
    cluster = Cluster([node("gpu1", [16, 10])])
    attempt(
        cluster, image="mine", image_pull_policy="Never", scheduler_name="own", priority_class="low", runtime_class="r"
    )
    assert len(cluster.created) == 4
    for pod in cluster.created:
        spec = pod["spec"]
        profile = {"type": "RuntimeDefault"}
        assert spec["securityContext"] == {"runAsNonRoot": True, "runAsUser": 65534, "seccompProfile": profile}
        (container,) = spec["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert (container["image"], container["imagePullPolicy"]) == ("mine", "Never")
        assert (spec["schedulerName"], spec["priorityClassName"], spec["runtimeClassName"]) == ("own", "low", "r")
        assert spec["terminationGracePeriodSeconds"] == 1
        assert spec["automountServiceAccountToken"] is False
        assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
        assert "nodeSelector" not in spec
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu1"]}]}
        assert pod["metadata"]["labels"][LABEL] == CANARY
    assert not any(one.startswith("LIST DaemonSet") for one in cluster.requested)


def test_check_mode_creates_nothing() -> None:
    cluster = Cluster([node("gpu1", [16, 10])])
    found = attempt(cluster, check=True)
    assert found["acceptance"]["result"] == "skipped"
    assert "would create namespace gpushare-canary, run 1 pods of 11 units on node gpu1" in what(found, "Y1")
    assert found["changed"] is True
    assert not any(one.split()[0] in ("PATCH", "DELETE") for one in cluster.requested)


# --------------------------------------------------------------------------- nothing to test


def test_a_cluster_without_gpushare_is_skipped() -> None:
    gpus = {"capacity": {"nvidia.com/gpu": "10"}}
    plain = {"metadata": {"name": "a"}, "status": {"capacity": {"cpu": "4"}}}
    hami = {"metadata": {"name": "b", "annotations": {"hami.io/node-nvidia-register": "[]"}}, "status": gpus}
    stock = {"metadata": {"name": "c"}, "status": gpus}
    for nodes, text in (
        ([], "no node advertises aliyun.com/gpu-mem"),
        ([plain], "no node advertises aliyun.com/gpu-mem"),
        ([plain, hami], "the allocations of HAMi here don't follow"),
        ([stock, hami], "the allocations of HAMi and NVIDIA's device plugin here"),
    ):
        cluster = Cluster(nodes)
        found = attempt(cluster)
        assert found["acceptance"]["result"] == "skipped" and found["changed"] is False
        assert text in what(found, "Y1")
        assert cluster.created == [] and cluster.namespaces == {}


def test_a_full_node_is_skipped() -> None:
    cluster = Cluster([node("gpu1", [16])])
    cluster.add_other("all", "gpu1", 16, 0)
    found = attempt(cluster)
    assert found["acceptance"]["result"] == "skipped"
    assert what(found, "Y1") == "no node has free memory that can be used (gpu1: no card of it has free memory)"


def test_unusable_nodes_are_reported() -> None:
    mixed, cordoned, strays, weak, good = (node(f"gpu{n}", [16, 10]) for n in range(5))
    for one in (mixed, good):
        one["status"]["capacity"]["nvidia.com/gpu"] = "2"
    mixed["status"]["allocatable"]["nvidia.com/gpu"] = "2"
    # It was switched to gpushare, and kubelet still reports the back end before.
    good["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    good["metadata"].setdefault("labels", {})["gpushare"] = "true"
    cordoned["spec"]["unschedulable"] = True
    cluster = Cluster([mixed, cordoned, strays, weak, good])
    cluster.add_other("cardless", "gpu2", 2, None)
    cluster.add_other("weak", "gpu3", 2, 0, priority=-1)
    assert attempt(cluster)["acceptance"]["node"] == "gpu4"
    del cluster.nodes["gpu4"]
    assert attempt(cluster)["acceptance"]["result"] == "skipped"
    for name, text in (
        ("gpu0", "NVIDIA's device plugin allocates its GPUs too"),
        ("gpu1", "is cordoned"),
        ("gpu2", "2 units of it are held by pods whose card isn't in the API"),
        ("gpu3", "could be preempted (theirs/weak)"),
    ):
        assert text in what(attempt(cluster, node=name), "Y1")


def test_option_node_selects_the_node() -> None:
    cluster = Cluster([node("gpu1", [16, 10]), node("gpu2", [16, 16])])
    assert attempt(cluster, node="gpu2")["acceptance"]["node"] == "gpu2"
    with pytest.raises(BadInput, match="node: the cluster has no node gpu3"):
        attempt(cluster, node="gpu3")


@pytest.mark.parametrize("policy", ["PreemptLowerPriority", "Never"])
def test_pods_of_lower_priority_are_not_preempted(policy: str) -> None:
    """A default PriorityClass gives the canary a higher priority than the node's pods; one may never preempt."""
    cluster = Cluster([node("gpu1", [16, 10])], Faults(default_priority=1000, preemption_policy=policy))
    cluster.add_other("theirs", "gpu1", 2, 1, priority=0)
    found = attempt(cluster)
    if policy == "Never":
        assert results(found) == TWO
    else:
        assert results(found) == {**TWO, "Y3": "skipped", "Y4": "skipped"}
        assert "kube-scheduler could preempt theirs/theirs for it" in what(found, "Y3")


# --------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("faults", "step", "text"),
    [
        (Faults(no_extender=True), "Y2", "was bound to node gpu1 without a card"),
        (Faults(wrong_total=True), "Y2", "ALIYUN_COM_GPU_MEM_DEV=7, not 16, the units of its card"),
        (Faults(wrong_units=True), "Y2", "ALIYUN_COM_GPU_MEM_POD=999, not 6, the units of the pod"),
        (Faults(wrong_card=True), "Y2", "is on card 9, which node gpu1 doesn't have"),
        (Faults(no_assume_time=True), "Y2", "has ALIYUN_COM_GPU_MEM_ASSUME_TIME=None"),
        (Faults(never_assigned=True), "Y2", "runs, and ALIYUN_COM_GPU_MEM_ASSIGNED isn't true"),
        (Faults(admission_error=True), "Y2", "was refused on node gpu1: Failed; UnexpectedAdmissionError"),
        (Faults(never_runs="no-gpu-has-6GiB-to-run"), "Y2", "doesn't run on node gpu1 within 20 s"),
        (Faults(scheduler_error=True), "Y2", "the scheduler can't place pod"),
        (Faults(stale_scheduler=30), "Y2", "is Pending though a card of node gpu1 has 16 free"),
        (Faults(overbooks=True), "Y3", "card 0 of node gpu1 is booked with 18 of 16 units"),
        (Faults(stale_scheduler=3), "Y3", "kube-scheduler refuses pod"),
        (Faults(never_frees=True), "Y6", "is Pending though a card of node gpu1 has 16 free"),
        (Faults(plugin_gone_after_deletion=True), "Y6", "advertises 0 units, and advertised 32 before"),
        (Faults(pods_remain=True), "Y6", "still exists 20 s after its deletion"),
    ],
    ids=lambda one: one if isinstance(one, str) and one.startswith("Y") else "",
)
def test_each_fault_fails_its_own_step(faults: Faults, step: str, text: str) -> None:
    # Y2 takes 24 of 32 units: a scheduler that has lost 3 places these pods, and counts 5 of the remaining 8.
    found = attempt(Cluster([node("gpu1", [16, 16])], faults))
    bad = {one: result for one, result in results(found).items() if result in ("FAIL", "UNKNOWN")}
    assert found["acceptance"]["result"] == "FAIL", found["acceptance"]["steps"]
    first = min(bad)
    assert (first, bad[first]) == (step, "FAIL"), found["acceptance"]["steps"]
    assert text in what(found, step)
    finding = next(one for one in found["findings"] if one["check"] == step)
    assert finding["node"] == "gpu1" and finding["do"] and finding["level"] == "FAIL"


def test_a_late_service_account_and_unreadable_events_are_no_failure() -> None:
    cluster = two_cards(late_account=5)
    cluster.failing = {"LIST Event": FORBIDDEN}
    assert results(attempt(cluster)) == TWO


def test_only_a_forbidden_request_waits_for_the_service_account() -> None:
    text = 'serviceaccount "default" not found'
    assert [is_transient(KubeError(text, status, message=text)) for status in (403, 404)] == [True, False]
    uncounted = 'pods "x" is forbidden: status unknown for quota: mine, resources: pods'
    assert is_transient(KubeError(uncounted, 403, message=uncounted))


def test_an_extender_that_frees_late_is_not_a_failure() -> None:
    """A refused pod is created once more: kube-scheduler doesn't retry the first one without an event."""
    cluster = two_cards(frees_late=30)
    assert results(attempt(cluster, timeout=120)) == TWO
    assert sum(one.startswith("PATCH Pod") and "/again-" in one for one in cluster.requested) == 2


def test_no_extender_and_a_plugin_that_sets_the_card_afterwards() -> None:
    """A pod that was bound without a card is detected, though it has one a moment later."""
    cluster = two_cards(no_extender=True, plugin_sets_card=True)
    found = attempt(cluster)
    assert results(found)["Y2"] == "FAIL"
    assert "without a card" in what(found, "Y2")
    left_nothing(cluster)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (Faults(pending_for="1 Insufficient cpu"), "for a reason that isn't gpushare's: 0/1 nodes"),
        (Faults(no_reason=True), "no scheduler gave a reason within 20 s"),
        (Faults(never_runs="ImagePullBackOff"), "Pending; ImagePullBackOff; kubelet's message"),
        (Faults(never_runs="ContainerCreating"), "Pending; ContainerCreating; kubelet's message"),
    ],
    ids=["cpu", "no_reason", "image", "creating"],
)
def test_other_problems_are_unknown(faults: Faults, text: str) -> None:
    cluster = Cluster([node("gpu1", [16, 16])], faults)
    found = attempt(cluster)
    assert found["acceptance"]["result"] == "UNKNOWN"
    assert results(found) == {**TWO, "Y2": "UNKNOWN", **dict.fromkeys(("Y3", "Y4", "Y5", "Y6"), "skipped")}
    assert text in what(found, "Y2")
    left_nothing(cluster)


@pytest.mark.parametrize(
    ("fault", "value", "result", "text"),
    [
        ("no_extender", True, "FAIL", "its scheduler doesn't call the extender"),
        ("pending_for", "1 Insufficient pods", "UNKNOWN", "a reason that isn't the extender's"),
    ],
)
def test_a_fault_that_begins_with_the_pod_that_exceeds_the_node(
    fault: str, value: object, result: str, text: str
) -> None:
    cluster = two_cards()
    cluster.before("more-", lambda: setattr(cluster.faults, fault, value))
    found = attempt(cluster)
    assert (results(found)["Y3"], results(found)["Y7"]) == (result, "PASS")
    assert text in what(found, "Y3")
    left_nothing(cluster)


def test_events_explain_a_container_that_is_not_created() -> None:
    cluster = two_cards(never_runs="ContainerCreating")
    event = {"type": "Warning", "reason": "FailedMount", "message": "no such volume"}
    cluster.events = [{**event, "involvedObject": {"uid": "uid-1"}}]
    assert "no such volume" in what(attempt(cluster), "Y2")


def test_an_image_problem_is_not_a_failure() -> None:
    """Its name may contain nvidia, which otherwise marks an error of the GPU runtime."""
    cluster = Cluster([node("gpu1", [16, 10])], Faults(never_runs="ErrImagePull"))

    def describe() -> None:
        for pod in cluster.ours():
            for container in pod["status"].get("containerStatuses", []):
                container["state"]["waiting"]["message"] = "nvidia/cuda: not found"

    cluster.clock.listeners.append(describe)
    found = attempt(cluster)
    assert results(found)["Y2"] == "UNKNOWN"
    assert "nvidia/cuda: not found" in what(found, "Y2")
    assert "option image" in found["findings"][0]["do"]


def test_a_refused_pod_is_reported_before_a_waiting_one() -> None:
    cluster = two_cards(admission_error=True)
    bound = cluster._schedule
    cluster._schedule = lambda pod: bound(pod) if pod["metadata"]["name"] == "share-3" else None  # type: ignore
    found = attempt(cluster)
    assert results(found)["Y2"] == "FAIL"
    assert what(found, "Y2").startswith("pod share-3 was refused on node gpu1")


def test_only_a_lasting_refusal_passes() -> None:
    """A scheduler without the extender may refuse a pod first, and bind it a moment later."""
    cluster = two_cards()
    bound = cluster._schedule

    def schedule(pod: object) -> None:
        refused_before = bool(pod["status"].get("conditions"))
        cluster.faults.no_extender = pod["metadata"]["name"].startswith("more-") and refused_before
        bound(pod)

    cluster._schedule = schedule  # type: ignore[method-assign]
    found = attempt(cluster)
    assert results(found)["Y3"] == "FAIL"
    assert "its scheduler doesn't call the extender" in what(found, "Y3")


def test_a_card_failing_during_the_run_is_unknown() -> None:
    cluster = two_cards()

    def fail() -> None:
        one = cluster.nodes["gpu1"]
        first, second = contract.node_cards(one)
        dead = dataclasses.replace(second, healthy=False)
        one["metadata"]["annotations"][contract.NODE_CARDS] = contract.cards_to_annotation([first, dead])
        one["status"]["allocatable"][contract.RESOURCE_MEMORY] = "16"

    cluster.before(f"DELETE Pod {SPACE}/share-1", fail)
    found = attempt(cluster)
    assert results(found)["Y6"] == "UNKNOWN"
    assert "its cards changed meanwhile" in what(found, "Y6")


def test_at_most_ten_nodes_are_examined() -> None:
    cluster = Cluster([node(f"gpu{n}", [16, 16]) for n in range(60)])
    attempt(cluster, check=True)
    assert sum(1 for one in cluster.requested if one.startswith("LIST Pod spec.nodeName")) == 10
    assert sum(1 for one in cluster.requested if one.startswith("LIST Pod ")) == 10


# --------------------------------------------------------------------------- the namespace


def test_another_clients_namespace_is_refused_and_kept() -> None:
    cluster = two_cards()
    for labels in ({}, {LABEL: "false"}, None):
        cluster.namespaces[SPACE] = {"metadata": {"name": SPACE, "labels": labels}}
        for check in (False, True):
            with pytest.raises(BadInput, match="namespace: gpushare-canary exists and isn't the suite's"):
                attempt(cluster, check=check)
        assert SPACE in cluster.namespaces and "deletionTimestamp" not in cluster.namespaces[SPACE]["metadata"]
    assert cluster.created == []


def test_a_concurrently_created_namespace_is_kept() -> None:
    cluster = two_cards()

    def race(request: str) -> None:
        if request == f"PATCH Namespace {SPACE}" and SPACE not in cluster.namespaces:
            theirs = {"managedFields": [{"manager": "kubectl-create"}], "name": SPACE, "labels": {}}
            cluster.namespaces[SPACE] = {"metadata": theirs}

    cluster.on_request = race
    with pytest.raises(BadInput, match="another client created gpushare-canary at the same time"):
        attempt(cluster)
    assert cluster.namespaces[SPACE]["metadata"]["labels"] == {}
    assert f"DELETE Namespace {SPACE}" not in cluster.requested


def leftover(cluster: Cluster) -> None:
    cluster.namespaces[SPACE] = {"metadata": {"name": SPACE, "labels": {LABEL: CANARY, RUN_LABEL: "old"}}}
    pod = cluster.add_other("share-1", "gpu1", 16, 0)
    cluster.pods.pop("theirs/share-1")
    pod["metadata"]["namespace"] = SPACE
    cluster.pods[f"{SPACE}/share-1"] = pod


def test_leftovers_of_a_killed_run_are_removed_first() -> None:
    """The leftovers hold all memory of this node."""
    cluster = Cluster([node("gpu1", [16])])
    leftover(cluster)
    found = attempt(cluster)
    assert results(found) == {**TWO, "Y3": "skipped", "Y4": "skipped"}
    assert what(found, "Y1") == "namespace gpushare-canary, after the leftovers of an earlier run were removed"
    left_nothing(cluster)


def test_others_take_the_memory_of_leftovers() -> None:
    """Others take the free memory while the leftovers are removed."""
    cluster = Cluster([node("gpu1", [32])])
    leftover(cluster)

    cluster.before("DELETE Namespace", lambda: cluster.add_other("fast", "gpu1", 32, 0))
    found = attempt(cluster)
    assert found["acceptance"]["result"] == "skipped"
    assert found["changed"] is True
    assert cluster.created == []
    left_nothing(cluster)


def test_check_mode_keeps_leftovers() -> None:
    cluster = Cluster([node("gpu1", [16])])
    leftover(cluster)
    assert attempt(cluster, check=True)["acceptance"]["result"] == "skipped"
    assert SPACE in cluster.namespaces


def test_leftovers_that_remain_are_reported() -> None:
    cluster = Cluster([node("gpu1", [16])], Faults(namespace_remains=True))
    leftover(cluster)
    found = attempt(cluster)
    assert found["acceptance"]["result"] == "UNKNOWN"
    assert "of an earlier run can't be removed: it still exists" in what(found, "Y1")
    assert cluster.created == []


def test_only_its_own_namespace_is_removed() -> None:
    """Another run took the namespace over meanwhile."""
    cluster = two_cards()
    cluster.before("more-", lambda: cluster.namespaces[SPACE]["metadata"]["labels"].update({RUN_LABEL: "other"}))
    attempt(cluster)
    assert SPACE in cluster.namespaces and "deletionTimestamp" not in cluster.namespaces[SPACE]["metadata"]


def test_a_pod_removed_by_another_client_is_unknown() -> None:
    cluster = two_cards()
    cluster.clock.listeners.append(lambda: cluster.pods.pop(f"{SPACE}/share-2", None) and None)
    found = attempt(cluster)
    assert results(found)["Y2"] == "UNKNOWN"
    assert "pod share-2 doesn't exist any more: another client removed it" in what(found, "Y2")


def test_a_namespace_that_remains_is_reported_with_the_command() -> None:
    found = attempt(two_cards(namespace_remains=True))
    assert results(found)["Y7"] == "UNKNOWN"
    assert found["acceptance"]["result"] == "UNKNOWN"
    assert "kubectl delete namespace gpushare-canary" in found["findings"][-1]["do"]


# --------------------------------------------------------------------------- missing rights and API server failures


@pytest.mark.parametrize(
    ("call", "step", "created"),
    [
        ("LIST Node", "Y1", False),
        ("LIST Pod spec.nodeName", "Y1", False),
        (f"GET Namespace {SPACE}", "Y1", False),
        (f"PATCH Namespace {SPACE}", "Y1", False),
        (f"PATCH Pod {SPACE}", "Y2", True),
        (f"LIST Pod {SPACE}", "Y2", True),
        ("GET Node", "Y2", True),
        (f"DELETE Pod {SPACE}", "Y3", True),
        (f"DELETE Namespace {SPACE}", "Y7", True),
    ],
)
def test_a_missing_right(call: str, step: str, created: bool) -> None:
    cluster = two_cards()
    cluster.failing = {call: FORBIDDEN}
    found = attempt(cluster)
    assert results(found)[step] == "UNKNOWN", found["acceptance"]["steps"]
    assert "may not do this" in what(found, step)
    assert "FAIL" not in results(found).values()
    assert found["acceptance"]["result"] == "UNKNOWN"
    if created and step != "Y7":
        left_nothing(cluster)


def test_without_the_right_to_find_an_image() -> None:
    cluster = two_cards()
    cluster.failing = {"LIST DaemonSet": FORBIDDEN}
    with pytest.raises(BadInput, match="image: not set, and the device plugin's image can't be read"):
        attempt(cluster)
    assert results(attempt(cluster, image="mine")) == TWO


def test_an_unreachable_api_server_fails_at_once() -> None:
    cluster = two_cards()
    cluster.failing = {"": AWAY}
    with pytest.raises(BadInput, match="can't be reached"):
        attempt(cluster)
    assert cluster.clock.time == 0


@pytest.mark.parametrize("at", ["share-1", "share-4", "more-", "fragmented-", "again-", "DELETE Pod"])
def test_an_api_server_failing_during_the_run_is_unknown(at: str) -> None:
    cluster = two_cards()
    cluster.before(at, lambda: cluster.failing.update({"": AWAY}))
    found = attempt(cluster)
    assert found["acceptance"]["result"] == "UNKNOWN"
    assert "FAIL" not in results(found).values()
    assert results(found)["Y7"] == "UNKNOWN"
    assert "can't be reached" in what(found, "Y7")
    assert "kubectl delete namespace gpushare-canary" in found["findings"][-1]["do"]
    # Only one step waited for it.
    assert list(results(found).values()).count("UNKNOWN") == 2
    # The clean-up was retried until its own timeout.
    assert cluster.requested[-1] == f"GET Namespace {SPACE}"


@pytest.mark.parametrize("at", ["share-1", "more-", "fragmented-", "again-", "DELETE"])
def test_a_short_outage_of_the_api_server_is_waited_out(at: str) -> None:
    cluster = two_cards()
    back: list[float] = []

    def away(request: str) -> None:
        if at in request and not back:
            back.append(cluster.clock.time + 7)
            cluster.failing = {"": AWAY}
        if back and cluster.clock.time >= back[0]:
            cluster.failing = {}

    cluster.on_request = away
    assert results(attempt(cluster)) == TWO
    left_nothing(cluster)


# --------------------------------------------------------------------------- signals and exceptions


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda one: one.name)
@pytest.mark.parametrize("at", ["PATCH Namespace", "share-2", "more-", "again-"])
def test_a_signal_cleans_up(number: signal.Signals, at: str) -> None:
    cluster = two_cards()
    before = [signal.getsignal(one) for one in SIGNALS]
    sent: list[str] = []

    def send(request: str) -> None:
        # The second signal arrives during the clean-up.
        if (at in request and not sent) or (request.startswith("DELETE Namespace") and len(sent) == 1):
            sent.append(request)
            os.kill(os.getpid(), number)

    cluster.on_request = send
    message = f"interrupted by signal {int(number)}; namespace gpushare-canary is removed"
    with pytest.raises(ShareError, match=message) as interrupted:
        attempt(cluster)
    assert interrupted.value.details["changed"] is True
    left_nothing(cluster)
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_a_signal_before_anything_is_created() -> None:
    cluster = two_cards()
    cluster.on_request = lambda request: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ShareError, match="interrupted by signal 15; nothing was created"):
        attempt(cluster)
    assert cluster.namespaces == {}


def test_an_unexpected_exception_cleans_up() -> None:
    cluster = two_cards()
    cluster.before("more-", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attempt(cluster)
    left_nothing(cluster)


def test_a_zero_timeout_is_refused() -> None:
    with pytest.raises(BadInput, match="timeout"):
        attempt(two_cards(), timeout=0)


# --------------------------------------------------------------------------- more than a share


def refuses(code: object) -> object:
    def execute(namespace: str, pod: str, container: str, argv: object) -> str:
        assert (namespace, pod, container, argv) == (SPACE, "share-1", "c0", ["hold", "more"])
        if code == 0:
            return "held"
        raise CommandFailed(f"exec in pod {pod}: hold ended with {code}: out of memory", code)

    return execute


@pytest.mark.parametrize(
    ("limit", "code", "result", "text"),
    [
        ("off", 0, "PASS", "gpushare counts memory, and this node enforces no shares"),
        ("off", 102, "UNKNOWN", "failed on a node that enforces no shares"),
        ("off", 1, "UNKNOWN", "showed no refusal"),
        ("enforced", 0, "FAIL", "held more than its share, though node gpu1 announces"),
        ("enforced", 102, "PASS", "refused, as expected"),
        # Whatever it prints: it isn't there, it crashed, it has a fault of its own.
        ("enforced", 127, "UNKNOWN", "showed no refusal"),
        ("enforced", 139, "UNKNOWN", "showed no refusal"),
        ("enforced", 1, "UNKNOWN", "showed no refusal"),
        # It didn't end in time.
        ("enforced", None, "UNKNOWN", "showed no refusal"),
        ("unenforced: old driver", 0, "PASS", "enforces no shares"),
    ],
)
def test_exceeding_the_share(limit: str, code: int | None, result: str, text: str) -> None:
    one = node("gpu1", [16, 16], **{contract.NODE_LIMIT: limit})
    found = attempt(Cluster([one]), refuses(code), allocate_command=["hold", "more"])
    assert results(found) == {**TWO, "Y5": result}
    assert text in what(found, "Y5")


# --------------------------------------------------------------------------- churn


def test_others_take_the_memory_before_the_pods_are_placed() -> None:
    """The first plan is impossible; the next one is for the remaining memory."""
    cluster = two_cards()

    def comes(request: str) -> None:
        if request.startswith("PATCH Pod") and "share-1" in request and "theirs/fast" not in cluster.pods:
            cluster.add_other("fast", "gpu1", 14, 0)

    cluster.on_request = comes
    found = attempt(cluster)
    assert results(found) == TWO
    assert what(found, "Y2") == "2 pods of 6 units on card 1 (2) of node gpu1"
    # That the memory is gone is detected at once.
    assert cluster.clock.time < 20
    assert [pod["pod"] for pod in found["acceptance"]["pods"]][:6] == [f"{SPACE}/share-{n}" for n in range(1, 7)]


def test_others_take_the_memory_every_time() -> None:
    cluster = two_cards()
    numbers = iter(range(100))

    def comes(request: str) -> None:
        if request.startswith("PATCH Pod") and "share-" in request:
            free = {card: left for card, left in cluster._free("gpu1").items() if left > 0}
            for card, left in free.items():
                cluster.add_other(f"fast-{next(numbers)}", "gpu1", left - left // 2, card)

    cluster.on_request = comes
    found = attempt(cluster)
    assert found["acceptance"]["result"] in ("UNKNOWN", "skipped")
    assert "FAIL" not in results(found).values()
    left_nothing(cluster)


def test_others_leave_before_the_pod_that_exceeds_the_node_is_evaluated() -> None:
    cluster = Cluster([node("gpu1", [16, 16, 16])])
    cluster.add_other("guest", "gpu1", 6, 2)
    cluster.before(f"PATCH Pod {SPACE}/more-", lambda: cluster.remove_other("guest"))
    found = attempt(cluster)
    assert results(found) == TWO
    assert sum(f"PATCH Pod {SPACE}/more-" in one for one in cluster.requested) == 2
    left_nothing(cluster)


def test_others_come_before_the_pod_that_exceeds_the_node_is_evaluated() -> None:
    """kube-scheduler's own count refuses it then, which proves nothing."""
    cluster = two_cards()

    def come() -> None:
        if "theirs/a" not in cluster.pods:
            cluster.add_other("a", "gpu1", 4, 0)
            cluster.add_other("b", "gpu1", 4, 1)

    cluster.before(f"PATCH Pod {SPACE}/more-", come)
    found = attempt(cluster)
    assert results(found)["Y3"] in ("skipped", "UNKNOWN")
    assert "FAIL" not in results(found).values()


def test_memory_reserved_for_a_preemptor_is_not_a_stale_count() -> None:
    cluster = two_cards(stale_scheduler=30)
    preemptor = cluster.add_other("preemptor", "elsewhere", 0, None)
    preemptor["metadata"]["labels"] = {contract.POD_CLAIM: "true"}
    found = attempt(cluster)
    assert results(found)["Y2"] == "UNKNOWN"
    assert "other pods took the memory" in what(found, "Y2")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=LONG) for seed in range(2, 12))])
def test_no_failure_under_churn(seed: int) -> None:
    """Other pods come and go at every moment, through the same extender, and never make a step fail."""
    cluster = Cluster([node("gpu1", [16, 16]), node("gpu2", [24, 11, 16])], Faults(spread=bool(seed % 2)))
    state = [seed * 7919 + 1]

    def draw(below: int) -> int:
        state[0] = (state[0] * 1103515245 + 12345) % 2**31
        return (state[0] >> 8) % below

    def churn() -> None:
        name = f"guest-{draw(6)}"
        if f"theirs/{name}" in cluster.pods:
            cluster.remove_other(name)
            return
        where = ("gpu1", "gpu2")[draw(2)]
        units = 1 + draw(8)
        fitting = [card for card, left in cluster._free(where).items() if left >= units]
        if fitting:
            cluster.add_other(name, where, units, fitting[draw(len(fitting))])["metadata"]["uid"] += str(state[0])
            cluster.booked[contract.pod_uid(cluster.pods[f"theirs/{name}"])] = cluster.booked.pop(f"theirs-{name}")

    cluster.clock.listeners.append(lambda: [churn() for _time in range(draw(3))] and None)
    found = attempt(cluster)
    assert "FAIL" not in results(found).values(), found["acceptance"]["steps"]
    left_nothing(cluster)
