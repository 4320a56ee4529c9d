# SPDX-License-Identifier: GPL-3.0-or-later
"""Acceptance over a made-up cluster: it passes on a healthy one, and each check fails on one that is broken."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as plan
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._acceptance import Wish, run
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from fake_clock import FakeClock

sys.path.insert(0, str(Path(__file__).parent))

from acceptance_cluster import Broken, FakeCluster

TWO_BY_TWO = {"gpu1": [16, 16], "gpu2": [16, 16]}


def results(found: dict[str, object]) -> dict[str, str]:
    return {row["id"]: row["result"] for row in found["rows"]}  # type: ignore[attr-defined]


def details(found: dict[str, object]) -> dict[str, str]:
    return {row["id"]: row["detail"] for row in found["rows"]}  # type: ignore[attr-defined]


def attempt(cluster: FakeCluster, clock: FakeClock, wish: Wish | None = None, check: bool = False) -> dict[str, object]:
    """The result, also where the run fails."""
    try:
        return run(cluster, clock, wish or Wish(timeout=20), check)
    except ShareError as error:
        assert str(error).startswith("acceptance"), error
        assert error.details["table"] in str(error)
        return dict(error.details)


@pytest.mark.parametrize(
    "nodes",
    [
        TWO_BY_TWO,
        {"gpu1": [16] * 8},
        {"gpu1": [11, 24]},
        {"gpu1": [80, 10, 10]},
        {"one": [64], "two": [6, 5]},
        {"gpu1": [16384, 16384]},
        {"gpu1": [4, 4]},
    ],
)
def test_healthy(nodes: dict[str, list[int]]) -> None:
    clock = FakeClock()
    cluster = FakeCluster(nodes, clock)
    found = attempt(cluster, clock)
    assert results(found) == dict.fromkeys("abcdef", "pass"), found["table"]
    assert found["changed"] is False
    assert cluster.spaces == {}
    assert cluster.pods() == [] or all(one["metadata"].get("deletionTimestamp") for one in cluster.pods())
    assert "6 passed, 0 failed, 0 skipped" in str(found["table"])


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (Broken(no_extender=True), {"b"}),
        (Broken(spread=True), {"a"}),
        (Broken(anything_fits=True), {"b", "c"}),
        (Broken(scheduler_words=True), {"b"}),
        (Broken(says_nothing=True), {"b", "c"}),
        (Broken(wrong_card_mounted=True), {"d", "e"}),
        (Broken(all_cards_mounted=True), {"d", "e"}),
        (Broken(no_runtime=True), {"d", "e"}),
        (Broken(containers_split=True), {"e"}),
        (Broken(extender_never_frees=True), {"f"}),
        (Broken(plugin_gone_after_deletion=True), {"f"}),
        (Broken(pods_never_run=True), {"a", "b", "d", "e"}),
        (Broken(never_assigned=True), {"a", "b", "e"}),
    ],
    ids=lambda value: next((name for name, on in vars(value).items() if on), "") if isinstance(value, Broken) else "",
)
def test_the_right_check_fails(broken: Broken, failing: set[str]) -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock, broken)
    found = attempt(cluster, clock)
    failed = {letter for letter, result in results(found).items() if result == "fail"}
    # What follows from the fault may fail too; what is named must, and what doesn't depend on it mustn't.
    assert failing <= failed, found["table"]
    if not (
        broken.anything_fits or broken.pods_never_run or broken.never_assigned or broken.plugin_gone_after_deletion
    ):
        assert failed - failing <= ({"b"} if broken.spread else set()), found["table"]
    assert cluster.spaces == {}


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ({"gpu1": [16], "gpu2": [16]}, "only one healthy card"),
        # Three pods of 1 unit fill the first card.
        ({"gpu1": [3, 3]}, "all on one card"),
    ],
)
def test_what_a_cluster_cannot_show_is_skipped_with_the_reason(nodes: dict[str, list[int]], reason: str) -> None:
    clock = FakeClock()
    found = attempt(FakeCluster(nodes, clock), clock)
    assert results(found) == {"a": "pass", "b": "skip", "c": "pass", "d": "pass", "e": "pass", "f": "pass"}
    assert reason in details(found)["b"]


def test_other_peoples_pods_are_counted_and_left_alone() -> None:
    clock = FakeClock()
    cluster = FakeCluster({"gpu1": [16, 16]}, clock)
    cluster.spaces["theirs"] = {}
    pod = plan.Workload("theirs", "image", {}, None).pod("training", [10])
    cluster.create_pod(pod)
    clock.sleep(1)
    clock.sleep(1)
    found = attempt(cluster, clock)
    assert results(found) == dict.fromkeys("abcdef", "pass"), found["table"]
    assert [one["metadata"]["name"] for one in cluster.pods()] == ["training"]
    assert list(cluster.spaces) == ["theirs"]
    # Three pods beside the ten units, as binpack wants.
    assert "card 0" in details(found)["a"]


def test_leftovers_of_a_killed_run_are_removed_first() -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock)
    cluster.create_namespace(plan.namespace("kubegpu-acceptance-dead"))
    cluster.create_pod(plan.Workload("kubegpu-acceptance-dead", "image", {}, None).pod("left", [16]))
    clock.sleep(1)
    found = attempt(cluster, clock)
    assert results(found) == dict.fromkeys("abcdef", "pass"), found["table"]
    assert cluster.spaces == {}


def test_a_namespace_that_stays_fails_the_run_with_its_name() -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock, Broken(namespace_stays=True))
    with pytest.raises(ShareError, match=r"kubegpu-acceptance-[0-9a-f]{6} is still there") as caught:
        run(cluster, clock, Wish(timeout=5), check=False)
    assert [row["result"] for row in caught.value.details["rows"]] == ["pass"] * 6


def test_a_crash_inside_leaves_nothing_behind() -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock)

    def crash(pod: Json) -> None:
        raise RuntimeError("the door broke")

    cluster.on_create = crash
    with pytest.raises(RuntimeError):
        run(cluster, clock, Wish(timeout=5), check=False)
    assert cluster.spaces == {}


def test_a_signal_leaves_nothing_behind() -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock)
    cluster.on_create = lambda pod: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ShareError, match="ended by signal 15"):
        run(cluster, clock, Wish(timeout=5), check=False)
    assert cluster.spaces == {}
    assert signal.getsignal(signal.SIGTERM) == before


def test_check_mode_creates_nothing() -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock)
    cluster.create_namespace(plan.namespace("kubegpu-acceptance-dead"))
    found = attempt(cluster, clock, check=True)
    assert set(results(found).values()) == {"skip"}
    assert cluster.created == []
    assert list(cluster.spaces) == ["kubegpu-acceptance-dead"]


def test_the_image_is_the_plugins_own_unless_chosen() -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock)
    attempt(cluster, clock)
    assert {one["spec"]["containers"][0]["image"] for one in cluster.created} == {"registry.example/gpushare:1"}
    assert "schedulerName" not in cluster.created[0]["spec"]
    chosen = Wish(image="mine:2", runtime_class="nvidia", scheduler_name="other", timeout=20)
    attempt(cluster, clock, chosen)
    last = cluster.created[-1]["spec"]
    assert (last["containers"][0]["image"], last["runtimeClassName"]) == ("mine:2", "nvidia")
    assert last["schedulerName"] == "other"


def test_no_image_to_be_found_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock)
    monkeypatch.setattr(cluster, "daemonsets", list)
    with pytest.raises(BadInput, match=r"^acceptance_image: "):
        run(cluster, clock, Wish(), check=False)
    assert cluster.created == []


def test_no_usable_node_names_the_variable() -> None:
    clock = FakeClock()
    cluster = FakeCluster(TWO_BY_TWO, clock)
    with pytest.raises(BadInput, match=r"^acceptance_node_selector: "):
        run(cluster, clock, Wish(node_selector={"pool": "none"}), check=False)
    assert cluster.spaces == {}


def test_a_full_cluster_is_refused() -> None:
    clock = FakeClock()
    cluster = FakeCluster({"gpu1": [1, 1]}, clock)
    cluster.spaces["theirs"] = {}
    for number in range(2):
        cluster.create_pod(plan.Workload("theirs", "image", {}, None).pod(f"p{number}", [1]))
    for _second in range(3):
        clock.sleep(1)
    with pytest.raises(BadInput, match=r"^no node of the cluster .* has aliyun\.com/gpu-mem free"):
        run(cluster, clock, Wish(), check=False)


def test_pods_are_small_and_end_by_themselves() -> None:
    pod = plan.Workload("ns", "image", {"pool": "gpu"}, None).pod("p", [2, 1], "gpu1")
    assert contract.pod_units(pod) == 3
    assert pod["spec"]["activeDeadlineSeconds"] == plan.POD_SECONDS
    assert pod["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert "nodeName" not in pod["spec"], "the scheduler must place it"
