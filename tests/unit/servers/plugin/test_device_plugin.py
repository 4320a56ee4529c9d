# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole device plugin over real gRPC, against a kubelet that does its own accounting."""

from __future__ import annotations

import threading
import time
import typing as t

import pytest
from gpushare.api.client import KubeError
from gpushare.kubelet import wire
from gpushare.plugin import command, reconcile
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import (
    NODE,
    FakeKube,
    Node,
    Rejected,
    container,
    environment,
    make_pod,
    refused_allocation,
    seen,
    until,
)

# --------------------------------------------------------------------------- upstream's faults


def test_fault_01_both_containers_of_a_pod_are_on_its_card(node: Node) -> None:
    pod = node.run(make_pod("two", 3, 2, booked=1))
    assert node.visible(pod) == {seen(1).uuid}
    assert node.kubelet.envs[pod["metadata"]["uid"]] == {
        "c0": environment(seen(1).uuid, card=1, pod=5, container=3),
        "c1": environment(seen(1).uuid, card=1, pod=5, container=2),
    }
    until(lambda: node.agrees(pod))


@pytest.mark.parametrize("booked", [1, None])
def test_fault_01_while_the_mirror_lacks_the_pod(node: Node, booked: int | None) -> None:
    """kubelet knew the pod first: each of its containers needs a read from the API, not the first alone."""
    node.run(make_pod("filler", 10, booked=0))
    pod = make_pod("two", 5, 5, booked=booked)
    mirrored = node.running.pods.items
    node.running.pods.items = lambda: [one for one in mirrored() if one["metadata"]["name"] != "two"]  # type: ignore[method-assign]
    node.kube.put(pod)
    node.admit(pod)
    assert node.visible(pod) == {seen(1).uuid}
    node.running.pods.items = mirrored  # type: ignore[method-assign]
    until(lambda: node.agrees(pod))


def test_fault_01_while_neither_mirror_nor_api_has_the_pod(node: Node) -> None:
    """Neither the mirror nor the API itself: the first container's card is a guess, and the second follows it."""
    node.run(make_pod("filler", 10, booked=0))
    node.kube.refuse["/pods"] = KubeError(500, "InternalError", "no")
    unknown = make_pod("unknown", 2, 2)
    node.kubelet.add(unknown)
    assert node.visible(unknown) == {seen(0).uuid}
    # The first container fills the card; the second would fit on the other one alone.
    with pytest.raises(Rejected, match=r"requests 3 more units of it, of which 0 are free"):
        node.kubelet.add(make_pod("torn", 2, 3))


def test_fault_02_two_pods_at_once_repeatedly(node: Node) -> None:
    """Both pods are bound before kubelet admits either, and the later one is sometimes admitted first."""
    for turn in range(6):
        pods = [make_pod(f"a{turn}", 5, booked=turn % 2), make_pod(f"b{turn}", 5, booked=1 - turn % 2)]
        for pod in pods:
            node.kube.put(pod)
        for pod in pods if turn % 3 else reversed(pods):
            node.admit(pod)
        for pod in pods:
            until(lambda pod=pod: node.agrees(pod))
            assert node.annotations(pod)[contract.POD_INDEX] == pod["metadata"]["annotations"][contract.POD_INDEX]
            node.kubelet.remove(pod)
            node.kube.remove(pod)
    assert node.kube.events == []


def test_fault_04_and_05_each_card_has_its_own_units_and_its_uuid_for_any_minor(make: t.Callable[..., Node]) -> None:
    node = make(seen(0, 2, minor=3), seen(1, 11, minor=0), seen(2, 40)).up()
    ids = sorted(node.kubelet.healthy)
    assert len(ids) == 53
    assert [sum(unit.startswith(f"{n:08x}-") for unit in ids) for n in range(3)] == [2, 11, 40]
    until(lambda: contract.node_cards(node.kube.node()))
    cards = contract.node_cards(node.kube.node())
    assert [(card.index, card.uuid, card.minor, card.units) for card in cards] == [
        (0, seen(0).uuid, 3, 2),
        (1, seen(1).uuid, 0, 11),
        (2, seen(2).uuid, 2, 40),
    ]
    small = node.run(make_pod("small", 2, booked=0))
    assert node.visible(small) == {seen(0).uuid}
    pod = node.run(make_pod("large", 30))
    assert node.visible(pod) == {seen(2).uuid}
    until(lambda: node.agrees(pod) and node.annotations(pod)[contract.POD_CARD_UNITS] == "40")
    with pytest.raises(
        Rejected, match=r"requests 12 units of aliyun\.com/gpu-mem on one card; the largest free share is 11"
    ):
        node.run(make_pod("nowhere", 12))


def test_fault_09_a_container_without_a_driver_requests_its_restart(
    make: t.Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's files come into a container when it is made, and not later."""
    monkeypatch.setattr(command, "NO_CARDS_SECONDS", 1.0)
    node = make()
    node.nvml.problem = "NVIDIA's driver isn't there: libnvidia-ml.so.1 can't be loaded"
    node.start_plugin()
    assert node.page("/healthz") == (200, "ok")
    until(lambda: node.page("/healthz")[1].startswith(node.nvml.problem + ", for 1 s"))
    assert node.page("/healthz")[0] == 500
    node.nvml.problem = ""
    until(lambda: node.page("/healthz") == (200, "ok"))


def test_fault_14_no_debug_endpoint(node: Node) -> None:
    for path in ("/", "/debug", "/debug/pprof/", "/debug/vars", "/stack", "/metrics2"):
        status, text = node.page(path)
        assert status == 404 and "nothing at" in text, path


def test_fault_15_kubelet_restarts(node: Node) -> None:
    before = node.run(make_pod("before", 6, booked=1))
    until(lambda: node.agrees(before))
    envs, patches = dict(node.kubelet.envs), len(node.kube.patches)
    for turn in range(3):
        node.kubelet.stop()
        time.sleep(0.3 * turn)
        node.kubelet.start()
        until(lambda: node.kubelet.registered, what="registered again")
        # Before kubelet has its pods again, it lists none; their annotations must stay.
        assert node.annotations(before)[contract.POD_ASSIGNED] == "true"
        node.kubelet.readd(before)
    assert node.kubelet.envs == envs and node.agrees(before)
    assert [path for path, _patch in node.kube.patches[patches:] if "/pods/" in path] == []
    after = node.run(make_pod("after", 12, booked=1))
    assert node.visible(after) == {seen(0).uuid}
    until(lambda: node.agrees(after))
    until(lambda: node.kube.reasons("default/after") == ["GpuCardCorrected"])
    until(lambda: node.ready() == "ok")


def test_fault_15_a_lost_socket_or_a_closed_device_list(node: Node) -> None:
    (node.kubelet.folder / "kubegpu-gpushare.sock").unlink()
    until(lambda: node.kubelet.registrations >= 2 and node.kubelet.registered)
    assert node.kubelet._channel is not None
    node.kubelet._channel.close()
    until(lambda: not node.kubelet.registered)
    until(lambda: node.kubelet.registered, 15, "registered again")
    pod = node.run(make_pod("pod", 2, booked=0))
    until(lambda: node.agrees(pod))


def test_fault_17_too_many_units_are_refused_before_registering(make: t.Callable[..., Node]) -> None:
    node = make(seen(0, 80), seen(1, 80), unit="MiB")
    node.kubelet.start()
    node.start_plugin()
    reason = until(lambda: text if "gpushare_memory_unit: MiB makes" in (text := node.ready()) else "")
    assert reason.endswith("bytes where kubelet accepts 4194304; use GiB") and "\n" not in reason
    time.sleep(0.5)
    assert node.kubelet.registrations == 0
    assert not (node.kubelet.folder / "kubegpu-gpushare.sock").exists()


def test_fault_17_the_maximum_of_units_works(make: t.Callable[..., Node]) -> None:
    node = make(seen(0, 40), seen(1, 40), unit="MiB").up()
    assert len(node.kubelet.healthy) == 81920
    pod = node.run(make_pod("pod", 20000, booked=1, card_units=40960))
    assert node.visible(pod) == {seen(1).uuid}
    until(lambda: node.agrees(pod), 20)


def test_fault_18_ready_metrics_and_events(node: Node) -> None:
    until(lambda: node.ready() == "ok")
    pod = node.run(make_pod("pod", 3))
    until(lambda: node.agrees(pod))
    labels = f'{{card="0",model="Simulated NVIDIA GPU",node="{NODE}",uuid="{seen(0).uuid}"}}'
    until(lambda: node.metric(f"gpushare_plugin_card_held_units{labels}") == 3)
    assert node.metric(f"gpushare_plugin_card_units{labels}") == 16
    assert node.metric("gpushare_plugin_allocations_total") == 1
    assert node.metric('gpushare_plugin_corrections_total{kind="GpuCardAssigned"}') == 1
    assert node.metric('gpushare_plugin_call_seconds_count{call="allocate"}') == 1
    assert node.metric('gpushare_plugin_call_seconds_count{call="preferred"}') == 1
    assert node.metric('gpushare_plugin_device_injection{mode="envvar"}') == 1
    event = until(lambda: node.kube.events)[0]
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "pod"}
    assert event["involvedObject"] == about | {"uid": pod["metadata"]["uid"]}
    assert event["message"] == f"kubelet gave this pod 3 units of card 0 ({seen(0).uuid})"
    assert abs(int(node.annotations(pod)[contract.POD_ASSUME_TIME]) - time.time_ns()) < 60e9
    with pytest.raises(Rejected):
        node.run(make_pod("large", 17))
    assert node.metric('gpushare_plugin_refusals_total{reason="InsufficientGPUMemory"}') == 1


# --------------------------------------------------------------------------- pods


def test_fault_06_only_an_init_container_requests_units(node: Node) -> None:
    pod = node.run(make_pod("pod", 0, inits=[container("load", 4)], booked=1))
    assert node.visible(pod) == {seen(1).uuid}
    until(lambda: node.agrees(pod))
    # It is complete, and not mistaken for the next pod.
    other = node.run(make_pod("other", 4, booked=0))
    assert node.visible(other) == {seen(0).uuid}


@pytest.mark.parametrize("before", [4, 0])
def test_a_successor_missing_from_the_mirror_is_not_mistaken_for_its_predecessor(node: Node, before: int) -> None:
    """As a StatefulSet's pods are: one name, other cards; the first may have wanted no units at all."""
    old = node.run(make_pod("web-0", before, booked=0 if before else None))
    until(lambda: any(pod["status"]["startTime"] for pod in node.running.pods.items()))
    mirrored = node.running.pods.items()
    node.running.pods.items = lambda: mirrored  # type: ignore[method-assign]
    node.kubelet.remove(old)
    node.kube.remove(old)
    new = make_pod("web-0", 4, booked=1)
    node.kube.put(new)
    node.kubelet.add(new)
    assert node.visible(new) == {seen(1).uuid}


def test_pods_of_the_mirror_are_not_read_from_the_api(node: Node) -> None:
    for name in ("first", "second"):
        pod = make_pod(name, 2, 2, booked=1)
        node.kube.put(pod)
        until(lambda name=name: node.running.pods.get(f"default/{name}"))
        asked = len(node.kube.gets)
        node.admit(pod)
        assert len(node.kube.gets) == asked


def test_a_pod_of_the_same_name_on_another_node_is_ignored(node: Node) -> None:
    """kubelet lists a pod that was deleted in the API, where a pod of that name runs on another node."""
    node.kube.put(make_pod("pod", 4, booked=1, node="gpu2"))
    node.kubelet.add(pod := make_pod("pod", 4))
    assert "/api/v1/namespaces/default/pods/pod" in node.kube.gets
    assert node.visible(pod) == {seen(0).uuid}


def test_podresources_unavailable(node: Node) -> None:
    """The oldest assumed pod of that size is chosen; afterwards the annotations are corrected."""
    node.kubelet.podresources_fails = True
    first, second = make_pod("first", 4, booked=1), make_pod("second", 4, booked=0)
    node.kube.put(first)
    node.kube.put(second)
    node.mirrored(2)
    node.admit(second)
    node.admit(first)
    assert node.visible(second) == {seen(1).uuid}
    until(lambda: "PodResources" in node.ready())
    node.kubelet.podresources_fails = False
    until(lambda: node.agrees(first) and node.agrees(second))
    until(lambda: node.ready() == "ok")


def test_patch_of_a_replaced_pod_is_refused_by_its_uid(node: Node) -> None:
    """The mirror is behind: the API has a successor already."""
    pod = make_pod("web-0", 4, booked=0, started=True)
    node.running.pods.items = lambda: [pod]  # type: ignore[method-assign]
    successor = make_pod("web-0", 4, booked=1)
    node.kube.put(successor)
    node.kubelet.add(pod)
    until(lambda: any("/pods/" in path for path, _patch in node.kube.patches))
    time.sleep(0.3)
    assert node.annotations(successor)[contract.POD_ASSIGNED] == "false"
    uids = {body["metadata"]["uid"] for path, body in node.kube.patches if "/pods/" in path}
    assert uids == {pod["metadata"]["uid"]}


def test_a_conflict_is_retried(make: t.Callable[..., Node]) -> None:
    """The API server merges a patch a few times and gives up where the pod keeps changing; nothing else retries."""
    node = make().up(resync=3600)
    node.kube.refuse["/pods/pod"] = KubeError(409, "Conflict", "the object has been modified")
    pod = node.run(make_pod("pod", 4, booked=0))
    time.sleep(reconcile.BUSY_SECONDS + 0.5)
    assert node.annotations(pod)[contract.POD_ASSIGNED] == "false"
    node.kube.refuse.clear()
    until(lambda: node.agrees(pod))


def test_late_annotation_of_the_extender_is_corrected_at_once(make: t.Callable[..., Node]) -> None:
    """A bind that timed out is tried again: the extender's second booking lands on a pod that runs already."""
    node = make().up(resync=3600)
    pod = node.run(make_pod("pod", 4, booked=0))
    until(lambda: node.agrees(pod))
    # The time in which everything is compared after an Allocate is over.
    time.sleep(reconcile.BUSY_SECONDS + 0.5)
    late = node.kube.pod("default/pod")
    late["metadata"]["annotations"].update({contract.POD_INDEX: "1", contract.POD_ASSIGNED: "false"})
    node.kube.put(late)
    until(lambda: node.agrees(pod))
    assert node.annotations(pod)[contract.POD_INDEX] == "0"


# --------------------------------------------------------------------------- outages


def test_api_unreachable(node: Node) -> None:
    until(lambda: node.kube.node()["status"].get("allocatable"))
    known = make_pod("known", 4, booked=1)
    node.kube.put(known)
    node.mirrored(1)
    running = node.run(make_pod("running", 2, booked=0))
    until(lambda: node.agrees(running))
    node.kube.go_away()
    began = time.monotonic()
    node.kubelet.add(known)
    unknown = make_pod("unknown", 4)
    node.kubelet.add(unknown)
    assert time.monotonic() - began < 5
    assert node.visible(known) == {seen(1).uuid}
    until(lambda: "can't be corrected" in node.ready())
    time.sleep(0.5)
    node.kube.down = False
    node.kube.put(unknown)
    node.report(known)
    node.report(unknown)
    until(lambda: node.agrees(known) and node.agrees(unknown) and node.agrees(running))
    until(lambda: node.ready() == "ok")


@pytest.mark.parametrize("way", ["gone", "hanging"])
def test_without_the_api_a_plugin_is_alive(
    make: t.Callable[..., Node], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """kubelet would restart every plugin of the cluster while the API server is stopped."""
    monkeypatch.setattr(command, "LIMIT_SECONDS", 0.2)
    node = make().up()
    resume = threading.Event()
    if way == "gone":
        node.kube.go_away()
    else:
        for name in ("get", "post", "patch"):
            monkeypatch.setattr(node.kube, name, lambda *_given: resume.wait(60) and {})
    began = time.monotonic()
    until(lambda: all(when > began for when in node.running.workers.last_active.values()), 20, "each thread works")
    assert node.running.workers.last_active and node.page("/healthz") == (200, "ok")
    resume.set()


def test_a_hanging_api_costs_no_more_than_the_deadline(node: Node) -> None:
    pod = make_pod("pod", 4)
    hang = threading.Event()
    real = node.kube.get
    node.kube.get = lambda path: hang.wait(20) and real(path)  # type: ignore[method-assign, assignment, return-value]
    began = time.monotonic()
    node.kubelet.add(pod)
    assert time.monotonic() - began < 5
    hang.set()


def test_plugin_killed_between_the_two_calls(node: Node) -> None:
    """Its record of the pod is lost, and found again in kubelet's list."""
    pod = make_pod("pod", 3, 2, booked=1)

    def kill() -> None:
        node.kubelet.before_allocate = lambda: None
        node.running.admission._asked.clear()

    node.kubelet.before_allocate = kill
    node.run(pod)
    envs = node.kubelet.envs[pod["metadata"]["uid"]]
    assert [envs[name]["ALIYUN_COM_GPU_MEM_POD"] for name in ("c0", "c1")] == ["5", "5"]
    until(lambda: node.agrees(pod))


def test_units_of_an_unknown_pod_are_not_assigned_to_the_last_known_one(node: Node) -> None:
    last = node.run(make_pod("last", 4, 3))
    node.kubelet.remove(last)
    node.kube.remove(last)
    node.mirrored(0)
    node.kube.refuse["/pods"] = KubeError(500, "InternalError", "no")
    node.kubelet.add(unknown := make_pod("unknown", 4))
    assert node.kubelet.envs[unknown["metadata"]["uid"]]["c0"]["ALIYUN_COM_GPU_MEM_POD"] == "4"


def test_plugin_starts_before_kubelet_and_with_the_api_away(make: t.Callable[..., Node]) -> None:
    kube = FakeKube()
    kube.put({"metadata": {"name": NODE, "uid": "uid-node"}})
    kube.down = True
    node = make(kube=kube)
    node.start_plugin()
    until(lambda: "kubelet isn't there" in node.ready())
    node.kubelet.start()
    until(lambda: node.kubelet.registered, 15)
    until(lambda: "can't be read from the API yet" in node.ready())
    kube.down = False
    until(lambda: node.ready() == "ok")


# --------------------------------------------------------------------------- cards and node


def test_node_annotations_are_written_and_restored(make: t.Callable[..., Node]) -> None:
    node = make().up(resync=3600)
    until(lambda: node.kube.node()["status"].get("allocatable"))
    time.sleep(reconcile.BUSY_SECONDS + 0.5)
    status = node.kube.node()["status"]
    assert status["capacity"] == {"cpu": "4", contract.RESOURCE_COUNT: "2"}
    assert status["allocatable"] == {contract.RESOURCE_COUNT: "2"}
    cards = contract.node_cards(node.kube.node())
    assert [(card.uuid, card.memory_mib, card.units, card.model) for card in cards] == [
        (seen(n).uuid, 16384, 16, "Simulated NVIDIA GPU") for n in range(2)
    ]
    bare = node.kube.node()
    bare["metadata"]["annotations"] = {}
    bare["status"] = {"capacity": {"cpu": "4"}, "nodeInfo": status["nodeInfo"]}
    node.kube.put(bare)
    until(lambda: node.kube.node()["status"] == status and contract.node_cards(node.kube.node()) == cards)


def test_no_writes_when_everything_agrees(node: Node) -> None:
    pod = node.run(make_pod("pod", 4, booked=0))
    until(lambda: node.agrees(pod) and node.kube.node()["status"].get("allocatable"))
    time.sleep(0.5)
    patches = len(node.kube.patches)
    time.sleep(2.5)
    assert len(node.kube.patches) == patches


# --------------------------------------------------------------------------- calls that kubelet never makes


def test_allocations_that_are_refused_and_calls_without_an_effect(node: Node) -> None:
    both = f"a container's 2 units must be of one card; these are 1 of {seen(0).uuid}, 1 of {seen(1).uuid}"
    for ids, message in (
        (["00000000-1", "00000001-1"], both),
        (["00000000-1", "ffffffff-1"], "device ID 'ffffffff-1' names no card of this node"),
        (["nonsense"], "device ID 'nonsense' names no card of this node"),
        ([], "a container's 0 units must be of one card"),
    ):
        assert message in refused_allocation(node, *ids)
    socket = str(node.kubelet.folder / "kubegpu-gpushare.sock")
    wire.call(socket, wire.PRE_START, wire.message(wire.PRE_START.request)(devices_ids=["00000000-1"]), 5)
    options = wire.call(socket, wire.OPTIONS, wire.message("v1beta1.Empty")(), 5)
    assert options.get_preferred_allocation_available and not options.pre_start_required
