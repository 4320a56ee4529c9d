# SPDX-License-Identifier: GPL-3.0-or-later
"""The canary over a made-up cluster: it sings on a healthy one, and each way to break it is told by its own step."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._canary_objects import LABEL, LABEL_VALUE, RUN_LABEL
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError

sys.path.insert(0, str(Path(__file__).parent))

from canary_cluster import AWAY, FORBIDDEN, SPACE, Broken, Cluster, attempt, node, results, what

TWO = {"Y1": "PASS", "Y2": "PASS", "Y3": "PASS", "Y4": "PASS", "Y5": "skipped", "Y6": "PASS", "Y7": "PASS"}


def left_nothing(cluster: Cluster) -> None:
    assert cluster.spaces == {}
    assert cluster.ours() == []


# --------------------------------------------------------------------------- healthy


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [[16, 16], [16, 10], [80] * 8, [11, 24], [80, 10, 10], [6, 4, 2], [16384, 16384], [5, 5], [3, 3, 3], [141] * 16],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_healthy(sizes: list[int], spread: bool, words: bool) -> None:
    cluster = Cluster([node("gpu1", sizes)], Broken(spread=spread, upstream_words=words))
    found = attempt(cluster)
    assert results(found) == TWO, found["canary"]["steps"]
    assert found["canary"]["result"] == "PASS"
    assert found["changed"] is True
    assert found["findings"] == []
    assert found["canary"]["node"] == "gpu1"
    left_nothing(cluster)


@pytest.mark.parametrize("sizes", [[16], [1]], ids=["16", "1"])
def test_one_card_shows_what_it_can(sizes: list[int]) -> None:
    found = attempt(Cluster([node("gpu1", sizes)]))
    assert results(found) == {**TWO, "Y3": "skipped", "Y4": "skipped"}
    assert "kube-scheduler's own count" in what(found, "Y3")
    assert "no two cards" in what(found, "Y4")
    assert found["canary"]["result"] == "PASS"


@pytest.mark.parametrize("sizes", [[6, 5], [4, 4]], ids=["6-5", "4-4"])
def test_cards_whose_rests_are_small_show_fragments_only(sizes: list[int]) -> None:
    """There is no size of which the next pod fits the rests of both cards together."""
    assert results(attempt(Cluster([node("gpu1", sizes)]))) == {**TWO, "Y3": "skipped"}


def test_cards_that_are_filled_show_fragments_afterwards() -> None:
    found = attempt(Cluster([node("gpu1", [2, 2])]))
    assert results(found) == {**TWO, "Y3": "skipped"}
    assert what(found, "Y4").startswith("3 of 4 units free")


def test_one_freer_card_is_all_that_is_taken() -> None:
    cluster = Cluster([node("gpu1", [16, 16]), node("gpu2", [16, 16])])
    cluster.stranger("theirs", "gpu2", 6, 1)
    found = attempt(cluster)
    assert results(found) == TWO
    assert found["canary"]["node"] == "gpu2"
    assert what(found, "Y2") == "1 pod of 11 units on card 0 (1) of node gpu2"
    assert what(found, "Y6").endswith("a pod of the 16 units that were free ran after them on card 0")


def test_upstream_leaves_a_pod_of_one_card_unassigned() -> None:
    one = node("gpu1", [16])
    del one["metadata"]["annotations"][contract.NODE_CARDS]
    assert results(attempt(Cluster([one], Broken(never_assigned=True))))["Y2"] == "PASS"


def test_pods_are_restricted_and_on_one_node() -> None:
    cluster = Cluster([node("gpu1", [16, 10])])
    attempt(cluster, image="mine", image_pull_policy="Never", scheduler_name="own", priority_class="low")
    assert len(cluster.created) == 4
    for pod in cluster.created:
        spec = pod["spec"]
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65534,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        (container,) = spec["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert (container["image"], container["imagePullPolicy"]) == ("mine", "Never")
        assert (spec["schedulerName"], spec["priorityClassName"]) == ("own", "low")
        assert spec["terminationGracePeriodSeconds"] == 1
        assert spec["automountServiceAccountToken"] is False
        assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
        assert "nodeSelector" not in spec
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu1"]}]}
        assert pod["metadata"]["labels"][LABEL] == LABEL_VALUE
    assert not any(one.startswith("LIST DaemonSet") for one in cluster.asked)


def test_everything_is_in_its_own_namespace() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    attempt(cluster)
    writes = [one for one in cluster.asked if one.split()[0] in ("PATCH", "DELETE")]
    assert writes and all(f"Namespace {SPACE}" in one or f"Pod {SPACE}/" in one for one in writes)


def test_check_mode_makes_nothing() -> None:
    cluster = Cluster([node("gpu1", [16, 10])])
    found = attempt(cluster, check=True)
    assert found["canary"]["result"] == "skipped"
    assert "would make namespace gpushare-canary, run 1 pods of 11 units on node gpu1" in what(found, "Y1")
    assert found["changed"] is True
    assert not any(one.split()[0] in ("PATCH", "DELETE") for one in cluster.asked)


# --------------------------------------------------------------------------- not to be told apart


def test_no_gpushare_is_skipped_in_one_sentence() -> None:
    plain = {"metadata": {"name": "a"}, "status": {"capacity": {"cpu": "4"}}}
    hami = {
        "metadata": {"name": "b", "annotations": {"hami.io/node-nvidia-register": "[]"}},
        "status": {"capacity": {"nvidia.com/gpu": "10"}},
    }
    stock = {"metadata": {"name": "c"}, "status": {"capacity": {"nvidia.com/gpu": "1"}}}
    for nodes, words in (
        ([], "no node announces aliyun.com/gpu-mem"),
        ([plain], "no node announces aliyun.com/gpu-mem"),
        ([plain, hami], "what HAMi gives away here can't be told apart"),
        ([stock, hami], "what HAMi and NVIDIA's device plugin gives away"),
    ):
        cluster = Cluster(nodes)
        found = attempt(cluster)
        assert found["canary"]["result"] == "skipped" and found["changed"] is False
        assert words in what(found, "Y1")
        assert cluster.created == [] and cluster.spaces == {}


def test_no_free_share_is_skipped() -> None:
    cluster = Cluster([node("gpu1", [16])])
    cluster.stranger("all", "gpu1", 16, 0)
    found = attempt(cluster)
    assert found["canary"]["result"] == "skipped"
    assert what(found, "Y1") == "no node has a free share to try (gpu1: no card of it has a free share)"


def test_nodes_that_would_mislead_are_not_used() -> None:
    mixed, cordoned, strays, weak, good = (node(f"gpu{n}", [16, 10]) for n in range(5))
    mixed["status"]["capacity"]["nvidia.com/gpu"] = "2"
    cordoned["spec"]["unschedulable"] = True
    cluster = Cluster([mixed, cordoned, strays, weak, good])
    cluster.stranger("cardless", "gpu2", 2, None)
    cluster.stranger("weak", "gpu3", 2, 0, priority=-1)
    assert attempt(cluster)["canary"]["node"] == "gpu4"
    del cluster.nodes["gpu4"]
    assert attempt(cluster)["canary"]["result"] == "skipped"
    for name, words in (
        ("gpu0", "NVIDIA's device plugin gives its GPUs away too"),
        ("gpu1", "takes no pods"),
        ("gpu2", "2 units of it are held by pods whose card the API doesn't tell"),
        ("gpu3", "could be evicted (theirs/weak)"),
    ):
        assert words in what(attempt(cluster, node=name), "Y1")


def test_a_node_that_is_named() -> None:
    cluster = Cluster([node("gpu1", [16, 10]), node("gpu2", [16, 16])])
    assert attempt(cluster, node="gpu2")["canary"]["node"] == "gpu2"
    with pytest.raises(BadInput, match="node: the cluster has no node gpu3"):
        attempt(cluster, node="gpu3")


def test_pods_of_lower_priority_are_not_evicted() -> None:
    """A default PriorityClass makes the canary stronger than what runs there."""
    cluster = Cluster([node("gpu1", [16, 10])], Broken(default_priority=1000))
    cluster.stranger("theirs", "gpu1", 2, 1, priority=0)
    found = attempt(cluster)
    assert results(found) == {**TWO, "Y3": "skipped", "Y4": "skipped"}
    assert "kube-scheduler could evict theirs/theirs for it" in what(found, "Y3")


def test_a_priority_that_evicts_nobody_shows_all() -> None:
    cluster = Cluster([node("gpu1", [16, 10])], Broken(default_priority=1000))
    cluster.stranger("theirs", "gpu1", 2, 1, priority=0)
    add = cluster.add

    def never(pod: dict[str, object]) -> object:
        pod["spec"]["preemptionPolicy"] = "Never"  # type: ignore[index]
        return add(pod)

    cluster.add = never  # type: ignore[method-assign]
    assert results(attempt(cluster, priority_class="polite")) == TWO


# --------------------------------------------------------------------------- broken


@pytest.mark.parametrize(
    ("broken", "step", "words"),
    [
        (Broken(no_extender=True), "Y2", "was bound to node gpu1 without a card"),
        (Broken(wrong_total=True), "Y2", "ALIYUN_COM_GPU_MEM_DEV=7, not 16, the units of its card"),
        (Broken(wrong_units=True), "Y2", "ALIYUN_COM_GPU_MEM_POD=999, not 6, the units of the pod"),
        (Broken(wrong_card=True), "Y2", "is on card 9, which node gpu1 doesn't have"),
        (Broken(no_assume_time=True), "Y2", "has ALIYUN_COM_GPU_MEM_ASSUME_TIME=None"),
        (Broken(never_assigned=True), "Y2", "runs, and ALIYUN_COM_GPU_MEM_ASSIGNED isn't true"),
        (Broken(admission_error=True), "Y2", "was refused on node gpu1: Failed; UnexpectedAdmissionError"),
        (Broken(never_runs="no-gpu-has-6GiB-to-run"), "Y2", "doesn't run on node gpu1 within 20 s"),
        (Broken(scheduler_error=True), "Y2", "the scheduler can't place pod"),
        (Broken(stale_scheduler=30), "Y2", "is Pending though a card of node gpu1 has 16 free"),
        (Broken(overbooks=True), "Y3", "card 0 of node gpu1 is booked with 18 of 16 units"),
        (Broken(stale_scheduler=3), "Y3", "kube-scheduler refuses pod"),
        (Broken(never_frees=True), "Y6", "is Pending though a card of node gpu1 has 16 free"),
        (Broken(plugin_gone_after_deletion=True), "Y6", "has 0 units to give, where it had 32"),
        (Broken(pods_stay=True), "Y6", "is still there 20 s after its deletion"),
    ],
    ids=lambda one: one if isinstance(one, str) and one.startswith("Y") else "",
)
def test_each_break_fails_its_own_step(broken: Broken, step: str, words: str) -> None:
    # 24 of 32 units are taken by Y2: a scheduler that has lost 3 places these pods, and counts 5 of the 8 left.
    found = attempt(Cluster([node("gpu1", [16, 16])], broken))
    bad = {one: result for one, result in results(found).items() if result in ("FAIL", "UNKNOWN")}
    assert found["canary"]["result"] == "FAIL", found["canary"]["steps"]
    first = min(bad)
    assert (first, bad[first]) == (step, "FAIL"), found["canary"]["steps"]
    assert words in what(found, step)
    finding = next(one for one in found["findings"] if one["check"] == step)
    assert finding["node"] == "gpu1" and finding["do"] and finding["level"] == "FAIL"


def test_an_extender_that_hears_late_is_not_a_failure() -> None:
    """A pod that was refused for what has just gone is made once more: nobody looks at the first one again."""
    cluster = Cluster([node("gpu1", [16, 16])], Broken(frees_late=30))
    seen: list[str] = []
    cluster.on_request = seen.append
    assert results(attempt(cluster, timeout=120)) == TWO
    assert sum(1 for one in seen if one.startswith("PATCH Pod") and "/again-" in one) == 2


def test_no_extender_and_a_plugin_that_names_cards_afterwards() -> None:
    """That a pod was bound without a card is seen, though it has one a moment later."""
    cluster = Cluster([node("gpu1", [16, 16])], Broken(no_extender=True, plugin_names_cards=True))
    found = attempt(cluster)
    assert results(found)["Y2"] == "FAIL"
    assert "without a card" in what(found, "Y2")
    left_nothing(cluster)


def test_no_extender_when_only_the_pod_too_many_shows_it() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])

    def breaks(asked: str) -> None:
        cluster.broken.no_extender |= "more-" in asked

    cluster.on_request = breaks
    found = attempt(cluster)
    assert results(found)["Y3"] == "FAIL"
    assert "its scheduler doesn't ask the extender" in what(found, "Y3")
    assert results(found)["Y7"] == "PASS"
    left_nothing(cluster)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Broken(pending_for="1 Insufficient cpu"), "for a reason that isn't gpushare's: 0/1 nodes"),
        (Broken(silent=True), "no scheduler said why within 20 s"),
        (Broken(never_runs="ImagePullBackOff"), "Pending; ImagePullBackOff; says kubelet"),
        (Broken(never_runs="ContainerCreating"), "Pending; ContainerCreating; says kubelet"),
    ],
    ids=["cpu", "silent", "image", "creating"],
)
def test_what_says_nothing_of_gpushare_is_unknown(broken: Broken, words: str) -> None:
    cluster = Cluster([node("gpu1", [16, 16])], broken)
    found = attempt(cluster)
    assert found["canary"]["result"] == "UNKNOWN"
    assert results(found) == {**TWO, "Y2": "UNKNOWN", **dict.fromkeys(("Y3", "Y4", "Y5", "Y6"), "skipped")}
    assert words in what(found, "Y2")
    left_nothing(cluster)


def test_the_pod_too_many_waits_for_another_reason() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])

    def later(asked: str) -> None:
        if "more-" in asked:
            cluster.broken.pending_for = "1 Insufficient pods"

    cluster.on_request = later
    found = attempt(cluster)
    assert results(found)["Y3"] == "UNKNOWN"
    assert "a reason that isn't the extender's" in what(found, "Y3")


def test_why_a_container_is_not_made_comes_from_events() -> None:
    cluster = Cluster([node("gpu1", [16, 10])], Broken(never_runs="ContainerCreating"))
    about = {"uid": "uid-1"}
    cluster.events = [
        {"type": "Warning", "reason": "FailedMount", "message": "no such volume", "involvedObject": about}
    ]
    assert "no such volume" in what(attempt(cluster), "Y2")


def test_an_image_is_not_the_gpu_s_fault() -> None:
    """Its name may say nvidia, by which the runtime's own errors are known."""
    cluster = Cluster([node("gpu1", [16, 10])], Broken(never_runs="ErrImagePull"))
    cluster.clock.listeners.append(
        lambda: (
            [
                one["status"]["containerStatuses"][0]["state"]["waiting"].update(message="nvidia/cuda: not found")
                for one in cluster.ours()
                if one["status"].get("containerStatuses")
            ]
            and None
        )
    )
    found = attempt(cluster)
    assert results(found)["Y2"] == "UNKNOWN"
    assert "nvidia/cuda: not found" in what(found, "Y2")
    assert "option image" in found["findings"][0]["do"]


def test_a_pod_that_was_refused_tells_more_than_one_that_waits() -> None:
    cluster = Cluster([node("gpu1", [16, 16])], Broken(admission_error=True))
    bound = cluster._schedule
    cluster._schedule = lambda pod: bound(pod) if pod["metadata"]["name"] == "share-3" else None  # type: ignore
    found = attempt(cluster)
    assert results(found)["Y2"] == "FAIL"
    assert what(found, "Y2").startswith("pod share-3 was refused on node gpu1")


def test_a_refusal_must_stand() -> None:
    """The first look of a scheduler that knows no cards is at something else."""
    cluster = Cluster([node("gpu1", [16, 16])])
    bound = cluster._schedule

    def schedule(pod: object) -> None:
        refused_before = bool(pod["status"].get("conditions"))
        cluster.broken.no_extender = pod["metadata"]["name"].startswith("more-") and refused_before
        bound(pod)

    cluster._schedule = schedule  # type: ignore[method-assign]
    found = attempt(cluster)
    assert results(found)["Y3"] == "FAIL"
    assert "its scheduler doesn't ask the extender" in what(found, "Y3")


def test_a_card_that_dies_meanwhile_is_no_failure() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])

    def dies(asked: str) -> None:
        if asked.startswith("DELETE Pod") and "share-1" in asked:
            one = cluster.nodes["gpu1"]
            first, second = contract.node_cards(one)
            dead = dataclasses.replace(second, healthy=False)
            one["metadata"]["annotations"][contract.NODE_CARDS] = contract.cards_to_annotation([first, dead])
            one["status"]["allocatable"][contract.RESOURCE_MEMORY] = "16"

    cluster.on_request = dies
    found = attempt(cluster)
    assert results(found)["Y6"] == "UNKNOWN"
    assert "its cards changed meanwhile" in what(found, "Y6")


def test_few_of_many_nodes_are_looked_at() -> None:
    cluster = Cluster([node(f"gpu{n}", [16, 16]) for n in range(60)])
    attempt(cluster, check=True)
    assert sum(1 for one in cluster.asked if one.startswith("LIST Pod spec.nodeName")) == 10
    assert sum(1 for one in cluster.asked if one.startswith("LIST Pod ")) == 10


# --------------------------------------------------------------------------- the namespace


def test_a_foreign_namespace_is_refused_and_kept() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    for labels in ({}, {LABEL: "false"}, None):
        cluster.spaces[SPACE] = {"metadata": {"name": SPACE, "labels": labels}}
        for check in (False, True):
            with pytest.raises(BadInput, match="namespace: gpushare-canary exists and isn't the canary's"):
                attempt(cluster, check=check)
        assert SPACE in cluster.spaces and "deletionTimestamp" not in cluster.spaces[SPACE]["metadata"]
    assert cluster.created == []


def test_a_namespace_made_by_others_at_the_same_time_is_given_back() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])

    def race(asked: str) -> None:
        if asked == f"PATCH Namespace {SPACE}" and SPACE not in cluster.spaces:
            theirs = {"managedFields": [{"manager": "kubectl-create"}], "name": SPACE, "labels": {}}
            cluster.spaces[SPACE] = {"metadata": theirs}

    cluster.on_request = race
    with pytest.raises(BadInput, match="somebody else made gpushare-canary at the same time"):
        attempt(cluster)
    assert cluster.spaces[SPACE]["metadata"]["labels"] == {}
    assert f"DELETE Namespace {SPACE}" not in cluster.asked


def leftover(cluster: Cluster) -> None:
    cluster.spaces[SPACE] = {"metadata": {"name": SPACE, "labels": {LABEL: LABEL_VALUE, RUN_LABEL: "old"}}}
    pod = cluster.stranger("share-1", "gpu1", 16, 0)
    cluster.pods.pop("theirs/share-1")
    pod["metadata"]["namespace"] = SPACE
    cluster.pods[f"{SPACE}/share-1"] = pod


def test_what_a_killed_run_left_is_removed_first() -> None:
    """On this node it holds all that there is."""
    cluster = Cluster([node("gpu1", [16])])
    leftover(cluster)
    found = attempt(cluster)
    assert results(found) == {**TWO, "Y3": "skipped", "Y4": "skipped"}
    assert what(found, "Y1") == "namespace gpushare-canary, after what an earlier run left was removed"
    left_nothing(cluster)


def test_nothing_is_left_once_the_left_overs_are_gone() -> None:
    """Others take what is free while they are removed."""
    cluster = Cluster([node("gpu1", [32])])
    leftover(cluster)

    def comes(asked: str) -> None:
        if asked.startswith("DELETE Namespace"):
            cluster.stranger("fast", "gpu1", 32, 0)

    cluster.on_request = comes
    found = attempt(cluster)
    assert found["canary"]["result"] == "skipped"
    assert found["changed"] is True
    assert cluster.created == []
    left_nothing(cluster)


def test_check_mode_keeps_what_a_killed_run_left() -> None:
    cluster = Cluster([node("gpu1", [16])])
    leftover(cluster)
    assert attempt(cluster, check=True)["canary"]["result"] == "skipped"
    assert SPACE in cluster.spaces


def test_left_overs_that_stay_are_told() -> None:
    cluster = Cluster([node("gpu1", [16])], Broken(space_stays=True))
    leftover(cluster)
    found = attempt(cluster)
    assert found["canary"]["result"] == "UNKNOWN"
    assert "of an earlier run can't be removed: it is still there" in what(found, "Y1")
    assert cluster.created == []


def test_only_its_own_namespace_goes() -> None:
    """Another canary took the namespace over in the middle."""
    cluster = Cluster([node("gpu1", [16, 16])])

    def other(asked: str) -> None:
        if "more-" in asked:
            cluster.spaces[SPACE]["metadata"]["labels"][RUN_LABEL] = "other"

    cluster.on_request = other
    attempt(cluster)
    assert SPACE in cluster.spaces and "deletionTimestamp" not in cluster.spaces[SPACE]["metadata"]


def test_a_pod_that_somebody_removed_is_unknown() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.clock.listeners.append(lambda: cluster.pods.pop(f"{SPACE}/share-2", None) and None)
    found = attempt(cluster)
    assert results(found)["Y2"] == "UNKNOWN"
    assert "pod share-2 is gone: somebody else removed it" in what(found, "Y2")


def test_a_namespace_that_stays_is_told_with_the_command() -> None:
    found = attempt(Cluster([node("gpu1", [16, 16])], Broken(space_stays=True)))
    assert results(found)["Y7"] == "UNKNOWN"
    assert found["canary"]["result"] == "UNKNOWN"
    assert "kubectl delete namespace gpushare-canary" in found["findings"][-1]["do"]


def test_pods_wait_for_their_service_account() -> None:
    cluster = Cluster([node("gpu1", [16, 16])], Broken(late_account=5))
    assert results(attempt(cluster)) == TWO


# --------------------------------------------------------------------------- rights and an API server that goes


@pytest.mark.parametrize(
    ("asked", "step", "made"),
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
def test_a_right_that_is_missing(asked: str, step: str, made: bool) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.failing = {asked: FORBIDDEN}
    found = attempt(cluster)
    assert results(found)[step] == "UNKNOWN", found["canary"]["steps"]
    assert "may not do this" in what(found, step)
    assert "FAIL" not in results(found).values()
    assert found["canary"]["result"] == "UNKNOWN"
    if made and step != "Y7":
        left_nothing(cluster)


def test_without_the_right_to_read_events() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.failing = {"LIST Event": FORBIDDEN}
    assert results(attempt(cluster)) == TWO


def test_without_the_right_to_find_an_image() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.failing = {"LIST DaemonSet": FORBIDDEN}
    with pytest.raises(BadInput, match="image: not set, and the device plugin's can't be looked up"):
        attempt(cluster)
    assert results(attempt(cluster, image="mine")) == TWO


def test_an_api_server_that_is_not_there_at_all_is_told_at_once() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.failing = {"": AWAY}
    with pytest.raises(BadInput, match="can't be reached"):
        attempt(cluster)
    assert cluster.clock.time == 0


@pytest.mark.parametrize("at", ["share-1", "share-4", "more-", "fragmented-", "again-", "DELETE Pod"])
def test_an_api_server_that_dies_in_the_middle(at: str) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])

    def dies(asked: str) -> None:
        if at in asked:
            cluster.failing = {"": AWAY}

    cluster.on_request = dies
    found = attempt(cluster)
    assert found["canary"]["result"] == "UNKNOWN"
    assert "FAIL" not in results(found).values()
    assert results(found)["Y7"] == "UNKNOWN"
    assert "can't be reached" in what(found, "Y7")
    assert "kubectl delete namespace gpushare-canary" in found["findings"][-1]["do"]
    # Only one step waited for it.
    assert list(results(found).values()).count("UNKNOWN") == 2
    # The clean-up was tried until its own time was over.
    assert cluster.asked[-1] == f"GET Namespace {SPACE}"


@pytest.mark.parametrize("at", ["share-1", "more-", "fragmented-", "again-", "DELETE"])
def test_an_api_server_that_comes_back(at: str) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    back: list[float] = []

    def away(asked: str) -> None:
        if at in asked and not back:
            back.append(cluster.clock.time + 7)
            cluster.failing = {"": AWAY}
        if back and cluster.clock.time >= back[0]:
            cluster.failing = {}

    cluster.on_request = away
    assert results(attempt(cluster)) == TWO
    left_nothing(cluster)


# --------------------------------------------------------------------------- signals and surprises


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda one: one.name)
@pytest.mark.parametrize("at", ["PATCH Namespace", "share-2", "more-", "again-"])
def test_a_signal_ends_it_politely(number: signal.Signals, at: str) -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    sent: list[str] = []

    def send(asked: str) -> None:
        # Twice: the second comes while it cleans up.
        if (at in asked and not sent) or (asked.startswith("DELETE Namespace") and len(sent) == 1):
            sent.append(asked)
            os.kill(os.getpid(), number)

    cluster.on_request = send
    with pytest.raises(ShareError, match=f"ended by signal {int(number)}; namespace gpushare-canary is gone") as ended:
        attempt(cluster)
    assert ended.value.details["changed"] is True
    left_nothing(cluster)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_signal_before_anything_is_made() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.on_request = lambda asked: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ShareError, match="ended by signal 15; nothing was made"):
        attempt(cluster)
    assert cluster.spaces == {}


def test_a_mistake_of_ours_cleans_up_too() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])

    def mistake(asked: str) -> None:
        if "more-" in asked:
            raise ZeroDivisionError

    cluster.on_request = mistake
    with pytest.raises(ZeroDivisionError):
        attempt(cluster)
    left_nothing(cluster)


def test_no_time_is_refused() -> None:
    with pytest.raises(BadInput, match="timeout"):
        attempt(Cluster([node("gpu1", [16, 16])]), timeout=0)


# --------------------------------------------------------------------------- more than a share


def refuses(code: object) -> object:
    def execute(namespace: str, pod: str, container: str, argv: object) -> str:
        assert (namespace, pod, container, argv) == (SPACE, "share-1", "c0", ["hold", "more"])
        if code == 0:
            return "held"
        raise ShareError(f"exec in pod {pod}: hold ended with {code}: out of memory")

    return execute


@pytest.mark.parametrize(
    ("limit", "code", "result", "words"),
    [
        ("off", 0, "PASS", "gpushare counts memory, and nobody enforces shares"),
        ("off", 1, "UNKNOWN", "it failed where nobody enforces shares"),
        ("enforced", 0, "FAIL", "held more than its share, though node gpu1 says it enforces them"),
        ("enforced", 1, "PASS", "refused, as it must be"),
        ("enforced", 127, "UNKNOWN", "couldn't be tried"),
        ("enforced", 126, "UNKNOWN", "couldn't be tried"),
        # It didn't end in time.
        ("enforced", None, "UNKNOWN", "couldn't be tried"),
        ("unenforced: old driver", 0, "PASS", "nobody enforces"),
    ],
)
def test_more_than_a_share(limit: str, code: int | None, result: str, words: str) -> None:
    one = node("gpu1", [16, 16], **{contract.NODE_LIMIT: limit})
    found = attempt(Cluster([one]), refuses(code), allocate_command=["hold", "more"])
    assert results(found) == {**TWO, "Y5": result}
    assert words in what(found, "Y5")


# --------------------------------------------------------------------------- churn


def test_others_take_the_room_before_the_pods_come() -> None:
    """The first plan can't be carried out; the next one is for what is left."""
    cluster = Cluster([node("gpu1", [16, 16])])

    def comes(asked: str) -> None:
        if asked.startswith("PATCH Pod") and "share-1" in asked and "theirs/fast" not in cluster.pods:
            cluster.stranger("fast", "gpu1", 14, 0)

    cluster.on_request = comes
    found = attempt(cluster)
    assert results(found) == TWO
    assert what(found, "Y2") == "2 pods of 6 units on card 1 (2) of node gpu1"
    # That there is no room any more is seen at once.
    assert cluster.clock.time < 20
    assert [one["pod"] for one in found["canary"]["pods"]][:6] == [f"{SPACE}/share-{n}" for n in range(1, 7)]


def test_others_take_the_room_every_time() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    numbers = iter(range(100))

    def comes(asked: str) -> None:
        if asked.startswith("PATCH Pod") and "share-" in asked:
            free = {card: left for card, left in cluster._free("gpu1").items() if left > 0}
            for card, left in free.items():
                cluster.stranger(f"fast-{next(numbers)}", "gpu1", left - left // 2, card)

    cluster.on_request = comes
    found = attempt(cluster)
    assert found["canary"]["result"] in ("UNKNOWN", "skipped")
    assert "FAIL" not in results(found).values()
    left_nothing(cluster)


def test_others_leave_before_the_pod_too_many_is_judged() -> None:
    cluster = Cluster([node("gpu1", [16, 16, 16])])
    cluster.stranger("guest", "gpu1", 6, 2)
    found_room: list[str] = []

    def goes(asked: str) -> None:
        if asked.startswith("PATCH Pod") and "more-" in asked:
            found_room.append(asked)
            cluster.leaves("guest")

    cluster.on_request = goes
    found = attempt(cluster)
    assert results(found) == TWO
    assert len(found_room) == 2
    left_nothing(cluster)


def test_others_come_before_the_pod_too_many_is_judged() -> None:
    """kube-scheduler's count refuses it then: nothing follows."""
    cluster = Cluster([node("gpu1", [16, 16])])

    def comes(asked: str) -> None:
        if asked.startswith("PATCH Pod") and "more-" in asked and "theirs/a" not in cluster.pods:
            for name, card in (("a", 0), ("b", 1)):
                cluster.stranger(name, "gpu1", 4, card)

    cluster.on_request = comes
    found = attempt(cluster)
    assert results(found)["Y3"] in ("skipped", "UNKNOWN")
    assert "FAIL" not in results(found).values()


def test_memory_that_is_kept_for_a_pod_is_no_stale_count() -> None:
    cluster = Cluster([node("gpu1", [16, 16])], Broken(stale_scheduler=30))
    cluster.pods["theirs/preemptor"] = {
        "metadata": {"name": "preemptor", "namespace": "theirs", "labels": {contract.POD_CLAIM: "true"}},
        "spec": {"nodeName": "elsewhere"},
        "status": {"phase": "Running"},
    }
    found = attempt(cluster)
    assert results(found)["Y2"] == "UNKNOWN"
    assert "others took the room" in what(found, "Y2")


@pytest.mark.parametrize("seed", range(12))
def test_no_false_alarm_under_churn(seed: int) -> None:
    """Others come and go at every moment, through the same extender; never is the cluster blamed for it."""
    cluster = Cluster([node("gpu1", [16, 16]), node("gpu2", [24, 11, 16])], Broken(spread=bool(seed % 2)))
    state = [seed * 7919 + 1]

    def draw(below: int) -> int:
        state[0] = (state[0] * 1103515245 + 12345) % 2**31
        return (state[0] >> 8) % below

    def churn() -> None:
        name = f"guest-{draw(6)}"
        if f"theirs/{name}" in cluster.pods:
            cluster.leaves(name)
            return
        where = ("gpu1", "gpu2")[draw(2)]
        units = 1 + draw(8)
        fitting = [card for card, left in cluster._free(where).items() if left >= units]
        if fitting:
            cluster.stranger(name, where, units, fitting[draw(len(fitting))])["metadata"]["uid"] += str(state[0])
            cluster.booked[contract.pod_uid(cluster.pods[f"theirs/{name}"])] = cluster.booked.pop(f"theirs-{name}")

    cluster.clock.listeners.append(lambda: [churn() for _time in range(draw(3))] and None)
    found = attempt(cluster)
    assert "FAIL" not in results(found).values(), found["canary"]["steps"]
    left_nothing(cluster)
