# SPDX-License-Identifier: GPL-3.0-or-later
"""The workloads suite over a simulated cluster: it passes on a healthy one, and each fault fails its own step."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import WORKLOADS, Options, PodTemplate
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.run import Outcome
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.workloads import device_files
from suite_cluster import Cluster, Faults, attempt, node, results, what

PASSED = {f"W{number}": "PASS" for number in range(1, 9)}


def two_by_two(faults: Faults | None = None) -> Cluster:
    return Cluster([node("gpu1", [16, 16]), node("gpu2", [16, 16])], faults)


def run_workloads(cluster: Cluster, check: bool = False, **options: object) -> Outcome:
    found = attempt(cluster, cluster.devices, check, suite=WORKLOADS, **options)
    assert check or cluster.namespaces == {}
    return found


@pytest.mark.parametrize(
    "sizes",
    [[[16, 16], [16, 16]], [[16] * 8], [[11, 24]], [[80, 10, 10]], [[64], [6, 5]], [[16384, 16384]], [[4, 4]]],
    ids=str,
)
def test_healthy(sizes: list[list[int]]) -> None:
    cluster = Cluster([node(f"gpu{number}", size) for number, size in enumerate(sizes)])
    found = run_workloads(cluster)
    assert results(found) == PASSED, found["table"]
    assert found["acceptance"]["result"] == "PASS" and found["findings"] == []
    assert {one["spec"]["containers"][0]["image"] for one in cluster.created} == {"registry.example/gpushare:1"}
    assert not any("schedulerName" in one["spec"] for one in cluster.created)
    assert "8 passed, 0 failed, 0 unknown, 0 skipped" in found["table"]
    assert cluster.pods == {}


@pytest.mark.parametrize(
    ("faults", "failing"),
    [
        (Faults(no_extender=True), {"W2", "W3", "W6"}),
        (Faults(spread=True), {"W2"}),
        (Faults(anything_fits=True), {"W3", "W4"}),
        (Faults(pending_for="1 Insufficient cpu"), {"W2", "W3"}),
        (Faults(no_reason=True), {"W2", "W3", "W4"}),
        (Faults(wrong_card_mounted=True), {"W5", "W6"}),
        (Faults(all_cards_mounted=True), {"W5", "W6"}),
        (Faults(no_runtime=True), {"W5", "W6"}),
        (Faults(containers_split=True), {"W6"}),
        (Faults(never_frees=True), {"W7"}),
        (Faults(plugin_gone_after_deletion=True), {"W7"}),
        (Faults(never_runs="ContainerCreating"), {"W2", "W3", "W6"}),
        (Faults(never_assigned=True), {"W2", "W3", "W6"}),
    ],
    ids=lambda value: next((name for name, on in vars(value).items() if on), "") if isinstance(value, Faults) else "",
)
def test_each_fault_fails_its_own_step(faults: Faults, failing: set[str]) -> None:
    found = run_workloads(two_by_two(faults), timeout=5)
    failed = {one for one, result in results(found).items() if result in ("FAIL", "UNKNOWN")}
    # A step that follows from the fault may fail too; an independent one must not.
    assert failing <= failed, found["table"]
    independent = not (faults.anything_fits or faults.plugin_gone_after_deletion or faults.never_frees)
    if independent and "W2" not in failing:
        assert failed == failing, found["table"]
    assert found["acceptance"]["result"] in ("FAIL", "UNKNOWN")


@pytest.mark.parametrize("sizes", [[[16, 16], [16, 16]], [[16] * 8], [[11, 24]], [[80, 10, 10]]], ids=str)
def test_where_pods_are_spread_they_have_to_be(sizes: list[list[int]]) -> None:
    nodes = [node(f"gpu{number}", size) for number, size in enumerate(sizes)]
    found = run_workloads(Cluster(nodes, Faults(spread=True)), placement="spread")
    assert results(found) == PASSED, found["table"]
    packed = run_workloads(Cluster(nodes), placement="spread")
    assert results(packed) == {**PASSED, "W2": "FAIL"}, packed["table"]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([[16], [16]], "only one healthy card"),
        # Three pods of 1 unit fill the first card.
        ([[3, 3]], "all on one card"),
    ],
    ids=str,
)
def test_an_impossible_step_is_skipped_with_the_reason(sizes: list[list[int]], reason: str) -> None:
    found = run_workloads(Cluster([node(f"gpu{number}", size) for number, size in enumerate(sizes)]))
    assert results(found) == {**PASSED, "W3": "skipped"}
    assert reason in what(found, "W3")


def test_other_pods_are_counted_and_kept() -> None:
    cluster = Cluster([node("gpu1", [16, 16])])
    cluster.add_other("training", "gpu1", 10, 0)
    found = run_workloads(cluster)
    assert results(found) == PASSED, found["table"]
    assert list(cluster.pods) == ["theirs/training"]
    # Binpack places the three pods beside the ten units.
    assert "card 0" in what(found, "W2")


def test_check_mode_creates_nothing() -> None:
    cluster = two_by_two()
    found = run_workloads(cluster, check=True)
    assert results(found) == {"W1": "skipped"} and found["changed"] is True
    assert "would create namespace kubegpu-acceptance" in what(found, "W1")
    assert cluster.created == [] and cluster.namespaces == {}


def test_pods_created_during_the_run_are_no_failure() -> None:
    """Another pod takes the rest of the first card between the first and the second of W2."""
    cluster = Cluster([node("gpu1", [4, 16])])
    cluster.before("/share-2", lambda: cluster.add_other("fast", "gpu1", 3, 0))
    found = run_workloads(cluster)
    assert results(found)["W2"] == "skipped", found["table"]


def test_no_image_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = two_by_two()
    listed = cluster.list_all
    monkeypatch.setattr(
        cluster, "list_all", lambda *which, **more: [] if which[1] == "DaemonSet" else listed(*which, **more)
    )
    with pytest.raises(BadInput, match=r"^image: "):
        run_workloads(cluster)
    assert cluster.created == []


def test_no_usable_node_is_skipped() -> None:
    found = run_workloads(two_by_two(), node_selector={"pool": "none"})
    assert found["acceptance"]["result"] == "skipped"
    assert "gpu1: it hasn't the labels pool=none" in what(found, "W1")
    full = Cluster([node("gpu1", [1])])
    full.add_other("all", "gpu1", 1, 0)
    assert "gpu1: no card of it has free memory" in what(run_workloads(full), "W1")


def test_pods_are_small_and_end_by_themselves() -> None:
    pod = PodTemplate(Options(WORKLOADS, node_selector={"pool": "gpu"}), "image", "run", 1000).pod("p", [2, 1], "gpu1")
    assert contract.pod_units(pod) == 3
    assert pod["spec"]["activeDeadlineSeconds"] == 3600
    assert pod["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert "nodeName" not in pod["spec"], "the scheduler must place it"


def test_device_nodes_of_cards_only() -> None:
    assert device_files("null\nnvidia-uvm\nnvidia10\nnvidia0\nnvidiactl\nnvidia-caps\n") == ["nvidia0", "nvidia10"]


def test_a_run_tests_nodes_of_one_allocation_and_names_the_others() -> None:
    cluster = Cluster([node("gpu1", [16, 16]), node("gpu2", [16, 16])])
    cluster.nodes["gpu1"]["metadata"]["labels"] = {"gpushare": "true", "pool": "a"}
    cluster.nodes["gpu2"]["metadata"]["labels"] = {"gpushare": "dra"}
    found = run_workloads(cluster, node_selector={"pool": "a"}, scheduler_name="gpushare-scheduler")
    assert results(found) == PASSED and found["acceptance"]["untested"] == ["gpu2"], found["table"]
    assert (
        "Not tested: gpu2, whose cards kube-scheduler by claims allocates; run it on one of them, too."
        in found["table"]
    )
    # Admission leaves these pods for the extender.
    assert {one["metadata"]["labels"]["kubegpu.share/allocation"] for one in cluster.created} == {"extender"}
    cluster.nodes["gpu2"]["metadata"]["labels"] = {"gpushare": "true"}
    assert run_workloads(cluster)["acceptance"]["untested"] == []


def test_a_pod_for_claims_asks_for_them_and_names_no_scheduler_of_the_extender() -> None:
    template = PodTemplate(Options(suite=WORKLOADS, scheduler_name="gpushare-scheduler"), "i", "run", 65534)
    by_claims, by_extender = (template.pod("p", [1], "gpu1", one) for one in ("dra", "extender"))
    assert by_claims["metadata"]["labels"]["kubegpu.share/allocation"] == "dra"
    assert "schedulerName" not in by_claims["spec"]
    assert by_extender["spec"]["schedulerName"] == "gpushare-scheduler"
