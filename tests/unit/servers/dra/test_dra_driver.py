# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole driver between kubelet's gRPC, a real API server, simulated cards and a tree of cgroups."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import threading
import time
import typing as t

import pytest
from dra_kit import DriverNode, Refused, ref, tried, until
from gpushare.dra import command, preparation
from gpushare.kubelet import dra, wire
from gpushare.nvml.library import MIG
from gpushare.nvml.limits import MIB, Limit
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import seen


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIMIT_SECONDS", "PREPARED_SECONDS", "LISTING_SECONDS", "STEP_SECONDS"):
        monkeypatch.setattr(command, name, 0.2)


FIRST, SECOND = seen(0).uuid, seen(1).uuid


def test_a_node_and_a_claim(node: DriverNode) -> None:
    first, second = node.devices()
    assert (first["name"], second["name"]) == (FIRST.lower(), SECOND.lower())
    assert first["attributes"]["driverVersion"] == {"version": "615.71.9"}
    assert first["attributes"]["memoryLimit"] == {"string": "enforced"}
    claim = node.claim(1, (0, "4Gi"))
    pod = node.cgroups.pod(1)
    (name,) = node.kubelet.prepare(claim)
    # The driver holds the pod before any of its containers is there, and closes the other card to it.
    assert node.limits.mib_of(pod) == {FIRST: 4096, SECOND: 1}
    assert node.environment(name) == {
        "NVIDIA_VISIBLE_DEVICES": FIRST,
        "NVIDIA_GPU_MEMORY_LIMIT": "4096",
        "NVIDIA_GPU_MEMORY_REQUEST": "0",
        "ALIYUN_COM_GPU_MEM_IDX": "0",
        "ALIYUN_COM_GPU_MEM_DEV": "16",
        "ALIYUN_COM_GPU_MEM_POD": "4",
        "ALIYUN_COM_GPU_MEM_CONTAINER": "4",
    }
    labels = f'card="0",model="Simulated NVIDIA GPU",node="{node.cluster.node}",uuid="{FIRST}"'
    until(lambda: node.metric(f"gpushare_plugin_card_held_units{{{labels}}}") == 4)
    assert node.metric("gpushare_dra_prepared_claims") == 1
    assert node.metric('gpushare_plugin_call_seconds_count{call="prepare"}') == 1
    assert 'gpushare_build_info{component="dra-driver"' in node.page("/metrics")[1]
    node.kubelet.unprepare(claim)
    assert list(node.cdi.iterdir()) == []
    assert node.page("/healthz") == (200, "ok")


def test_with_spread_the_emptiest_card_is_offered_first(make: t.Callable[..., DriverNode]) -> None:
    node = make(seen(0), seen(1), seen(2))
    node.up(placement="spread")

    def order() -> list[int]:
        return [device["attributes"]["index"]["int"] for device in node.devices()]

    assert order() == [0, 1, 2]
    claims = [node.claim(1, (0, "4Gi")), node.claim(2, (1, "6Gi"))]
    node.kubelet.prepare(claims[0])
    until(lambda: order() == [1, 2, 0])
    node.kubelet.prepare(claims[1])
    until(lambda: order() == [2, 0, 1])
    # The next process knows what is prepared.
    node.stop()
    node.start(placement="spread")
    until(lambda: node.page("/readyz")[1] == "ok")
    assert order() == [2, 0, 1]
    node.kubelet.unprepare(claims[0])
    until(lambda: order() == [0, 2, 1])


def test_a_container_cannot_widen_its_limit(node: DriverNode) -> None:
    """What the toolkit sets from the container's environment is read back."""
    claim = node.claim(1, (0, "4Gi"))
    container = node.cgroups.container(1, 1)
    node.limits.kept[FIRST, str(container)] = Limit(0, 16384 * MIB)
    node.kubelet.prepare(claim)
    node.kubelet.pods = {"pod1": [[claim.uid]]}
    until(lambda: node.limits.mib_of(container).get(FIRST) == 4096)
    # It is raised again, also that of the pod.
    for folder in (container, node.cgroups.pod(1)):
        node.limits.kept[FIRST, str(folder)] = Limit(0, 9000 * MIB)
        until(lambda folder=folder: node.limits.mib_of(folder)[FIRST] == 4096)
    until(lambda: node.metric("gpushare_plugin_limits_corrected_total"))
    # It allocated more before: reported, and closed as soon as it can be.
    other = node.claim(2, (1, "1Gi"))
    greedy = node.cgroups.container(2, 2)
    node.limits.held[SECOND, str(greedy)] = 3000 * MIB
    node.limits.kept[SECOND, str(greedy)] = Limit(0, 8000 * MIB)
    node.kubelet.prepare(other)
    node.kubelet.pods["pod2"] = [[other.uid]]
    until(lambda: "MemoryLimitExceeded" in str([device["attributes"]["memoryLimit"] for device in node.devices()]))
    assert node.limits.mib_of(greedy)[SECOND] == 3000
    node.limits.held[SECOND, str(greedy)] = 0
    until(lambda: [device["attributes"]["memoryLimit"] for device in node.devices()] == [{"string": "enforced"}] * 2)
    assert node.limits.mib_of(greedy)[SECOND] == 1024


def test_containers_of_one_pod_hold_no_more_than_its_claims(node: DriverNode) -> None:
    """The driver counts the nearest limit only, and the toolkit has limited each container to the claim's memory."""
    claim = node.claim(1, (0, "4Gi"))
    containers = [node.cgroups.container(1, number) for number in range(3)]
    node.kubelet.prepare(claim)
    for folder in containers[1:]:
        node.limits.kept[FIRST, str(folder)] = Limit(0, 4096 * MIB)
    # Until kubelet lists them, nobody knows which of them have the claim.
    time.sleep(0.6)
    assert node.limits.mib_of(containers[1]) == {FIRST: 4096}
    node.kubelet.pods = {"pod1": [[claim.uid], [], [claim.uid]]}
    until(lambda: [node.limits.mib_of(folder) for folder in containers] == [{}] * 3)
    assert node.limits.mib_of(node.cgroups.pod(1)) == {FIRST: 4096, SECOND: 1}
    # A higher one of a container's own goes, too.
    node.limits.kept[FIRST, str(containers[2])] = Limit(0, 9000 * MIB)
    until(lambda: node.limits.mib_of(containers[2]) == {})


def test_each_container_has_its_own_request(node: DriverNode) -> None:
    """One claim with a request for each container, as admission makes it: nobody gets the other's part."""
    claim = node.claim(1, (0, "3Gi"), (0, "1Gi"), requests=("gpu-0", "gpu-1"))
    sandbox, large, small = (node.cgroups.container(1, number) for number in range(3))
    given = [node.environment(name) for name in node.kubelet.prepare(claim)]
    assert [one["NVIDIA_GPU_MEMORY_LIMIT"] for one in given] == ["3072", "1024"]
    # The toolkit has set one of them by now: the other container isn't closed.
    node.limits.kept[FIRST, str(large)] = Limit(0, 3072 * MIB)
    node.kubelet.pods = {"pod1": [[claim.uid], [claim.uid]]}
    time.sleep(0.6)
    assert node.limits.mib_of(large) == {FIRST: 3072}
    assert node.limits.mib_of(small) == node.limits.mib_of(sandbox) == {}
    node.limits.kept[FIRST, str(small)] = Limit(0, 1024 * MIB)
    until(lambda: node.limits.mib_of(sandbox) == {FIRST: 1})
    assert (node.limits.mib_of(large), node.limits.mib_of(small)) == ({FIRST: 3072}, {FIRST: 1024})
    # One has the other's, too: the pod's limit holds for all.
    node.limits.kept[FIRST, str(small)] = Limit(0, 3072 * MIB)
    until(lambda: [node.limits.mib_of(folder) for folder in (sandbox, large, small)] == [{}] * 3)
    assert node.limits.mib_of(node.cgroups.pod(1)) == {FIRST: 4096, SECOND: 1}


def memory_limits(node: DriverNode) -> list[str]:
    return [device["attributes"]["memoryLimit"]["string"] for device in node.devices()]


def test_the_memory_of_a_pod_with_several_containers_is_its_own(
    make: t.Callable[..., DriverNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which control group is which container's isn't known; what the pod's own holds is compared with its claims."""
    monkeypatch.setattr("gpushare.node.limit_enforcer.UNACCOUNTED_SECONDS", 0.0)
    monkeypatch.setattr("gpushare.dra.command.USAGE_SECONDS", 0.1)
    node = make(*(dataclasses.replace(seen(number), reserved_mib=256) for number in (0, 1)))
    node.up()
    claim = node.claim(1, (0, "3Gi"), (0, "1Gi"), requests=("gpu-0", "gpu-1"))
    pod = str(node.cgroups.pod(1))
    for number in range(2):
        node.cgroups.container(1, number)
    node.kubelet.prepare(claim)
    node.kubelet.pods = {"pod1": [[claim.uid], [claim.uid]]}
    node.limits.held[FIRST, pod] = 3000 * MIB
    labels = f'card="0",model="Simulated NVIDIA GPU",node="{node.cluster.node}",uuid="{FIRST}"'
    until(lambda: node.metric(f"gpushare_plugin_card_limited_used_bytes{{{labels}}}") == 3000 * MIB)
    # One sample for the pod, without a container's name.
    of_pod = f'container="",namespace="{node.cluster.namespace}",node="{node.cluster.node}",pod="pod1"'
    place = f'{of_pod},uuid="{FIRST}"'
    until(lambda: node.metric(f"container_accelerator_memory_used_bytes{{{place}}}") == 3000 * MIB)
    assert node.metric(f"container_accelerator_memory_total_bytes{{{place}}}") == 4096 * MIB
    time.sleep(0.6)
    assert memory_limits(node) == ["enforced", "enforced"]
    node.limits.held[FIRST, pod] = 5000 * MIB
    until(lambda: memory_limits(node) == ["MemoryLimitExceeded", "enforced"])
    assert "hold 5000 MiB of card 0, and its claims give it 4096 MiB" in node.driver.enforcer.violations[0].text  # type: ignore[union-attr]
    node.limits.held[FIRST, pod] = 3000 * MIB
    until(lambda: memory_limits(node) == ["enforced", "enforced"])
    node.limits.held[SECOND, pod] = 100 * MIB
    until(lambda: memory_limits(node) == ["enforced", "ForeignMemoryHeld"])


def test_a_pod_that_holds_more_than_its_claim(
    make: t.Callable[..., DriverNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the device plugin, by the same code."""
    monkeypatch.setattr("gpushare.node.evictions.LASTING_SECONDS", 0.0)
    node = make()
    node.cluster.allow({"apiGroups": [""], "resources": ["pods/eviction", "events"], "verbs": ["create"]})
    node.up(evict=True)
    server, pods = node.cluster.server, f"/api/v1/namespaces/{node.cluster.namespace}/pods"
    spec = {"nodeName": node.cluster.node, "containers": [{"name": "c", "image": "i"}]}
    running = {
        name: server.request("POST", pods, {"metadata": {"name": name}, "spec": spec})["metadata"]["uid"]
        for name in ("greedy", "other")
    }
    for number, (name, uid) in enumerate(running.items()):
        pod = node.cgroups.root / "kubepods.slice" / f"kubepods-pod{uid.replace('-', '_')}.slice"
        container = pod / f"cri-containerd-{number:064x}.scope"
        container.mkdir(parents=True)
        (container / "cgroup.procs").write_text("1\n")
        if name == "greedy":
            node.limits.held[FIRST, str(container)] = 9000 * MIB
            node.limits.kept[FIRST, str(container)] = Limit(0, 16384 * MIB)
        result = {"request": "gpu", "driver": "gpu.kubegpu.share", "pool": node.cluster.node, "device": FIRST.lower()}
        made = node.cluster.claim(name, {**result, "consumedCapacity": {"memory": "4Gi"}}, pods=[(name, uid)])
        node.kubelet.prepare(dra.ClaimRef(node.cluster.namespace, made, name))
        node.kubelet.pods[name] = [[made]]
    until(lambda: memory_limits(node)[0] == "MemoryLimitExceeded")
    until(lambda: node.metric('gpushare_plugin_evictions_total{result="evicted"}'))
    # Nothing runs on the node that would end the pod; one without a grace period is gone.
    there = [pod["metadata"] for pod in server.request("GET", pods)["items"]]
    left = {metadata["name"] for metadata in there if "deletionTimestamp" not in metadata}
    assert left & set(running) == {"other"}
    listed = f"/api/v1/namespaces/{node.cluster.namespace}/events?fieldSelector=involvedObject.name%3Dgreedy"
    (event,) = until(lambda: server.request("GET", listed)["items"])
    assert event["reason"] == "GpuPodEvicted" and event["message"].startswith(
        "MemoryLimitExceeded: this pod is evicted"
    )


@pytest.mark.parametrize("evict", [False, True])
def test_a_pod_whose_claim_was_removed(
    make: t.Callable[..., DriverNode], monkeypatch: pytest.MonkeyPatch, evict: bool
) -> None:
    """Its card is tainted, the next pod's Event is true and names nobody, and only with the option it is evicted."""
    monkeypatch.setattr("gpushare.node.evictions.LASTING_SECONDS", 0.0)
    monkeypatch.setattr(preparation, "BOOKING_SECONDS", 0.3)
    monkeypatch.setattr(preparation, "PASSING_SECONDS", 2.0)
    node = make()
    if evict:
        node.cluster.allow({"apiGroups": [""], "resources": ["pods/eviction", "events"], "verbs": ["create"]})
    node.up(evict=evict)
    server, pods = node.cluster.server, f"/api/v1/namespaces/{node.cluster.namespace}/pods"
    body = {
        "metadata": {"name": "keeps"},
        "spec": {"nodeName": node.cluster.node, "containers": [{"name": "c", "image": "i"}]},
    }
    identity = server.request("POST", pods, body)["metadata"]["uid"]
    share = {"request": "gpu", "driver": "gpu.kubegpu.share", "pool": node.cluster.node, "device": FIRST.lower()}
    made = node.cluster.claim("kept", {**share, "consumedCapacity": {"memory": "12Gi"}}, pods=[("keeps", identity)])
    kept = dra.ClaimRef(node.cluster.namespace, made, "kept")
    node.kubelet.prepare(kept)
    node.cluster.release("kept")
    victim = node.claim(2, (0, "12Gi"))
    with pytest.raises(Refused) as refused:
        node.kubelet.prepare(victim)
    assert str(refused.value).startswith(
        f"CardFull: claim {node.cluster.namespace}/claim2 is allocated 12288 MiB of card 0, and 4096 of its 16384 MiB "
        "are free, since claims of pods that haven't ended (1) hold 12288 MiB, 12288 of them without having these in "
        "the API (any more): the card gets no further pods as long as that is so. Delete this pod if a new one may "
        "have another card; "
    )
    assert "kept" not in str(refused.value) and "keeps" not in str(refused.value)
    taints = [[(taint["key"], taint["value"]) for taint in device.get("taints", [])] for device in node.devices()]
    assert taints == [[("gpu.kubegpu.share/memory-without-claim", "ClaimNotFound")], []]
    until(lambda: node.metric("gpushare_dra_unbooked_cards") == 1)
    assert node.metric('gpushare_plugin_refusals_total{reason="CardFull"}') == 1
    events = f"/api/v1/namespaces/{node.cluster.namespace}/events?fieldSelector=involvedObject.name%3Dkeeps"
    if evict:
        (event,) = until(lambda: server.request("GET", events)["items"])
        assert event["message"].startswith("MemoryWithoutClaim: this pod is evicted: it holds 12288 MiB of card ")
        assert node.metric('gpushare_plugin_evictions_total{result="evicted"}') == 1
    else:
        assert server.request("GET", events)["items"] == [] and server.request("GET", f"{pods}/keeps")
    node.kubelet.unprepare(kept)
    until(lambda: not any("taints" in device for device in node.devices()))
    assert node.kubelet.prepare(victim)
    until(lambda: node.metric("gpushare_dra_unbooked_cards") == 0)


def test_two_claims_of_one_pod_and_two_pods_of_one_claim(make: t.Callable[..., DriverNode]) -> None:
    node = make()
    (node.root / "nvidia").mkdir()
    names = [{"name": one.uuid} for one in node.nvml.found]
    (node.root / "nvidia" / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": names}))
    node.up()
    pod, later = node.cgroups.pod(9), node.cgroups.pod(8)
    one, two = node.claim(1, (0, "4Gi"), pods=(9,)), node.claim(2, (0, "1Gi"), (1, "2Gi"), pods=(9,))
    found = node.kubelet.prepare(one, two)
    assert [name for name in found if name.startswith("nvidia.com/")] == [
        f"nvidia.com/gpu={uuid}" for uuid in (FIRST, FIRST, SECOND)
    ]
    assert {node.environment(name)["NVIDIA_VISIBLE_DEVICES"] for name in found if "claim=" in name} == {"void"}
    assert node.limits.mib_of(pod) == {FIRST: 5120, SECOND: 2048}
    # A second pod uses the claim: kubelet doesn't prepare it again. Together they hold no more than it has.
    path = f"/apis/resource.k8s.io/v1/namespaces/{one.namespace}/resourceclaims/{one.name}"
    second = {"resource": "pods", "name": "pod8", "uid": str(later.name)[12:-6].replace("_", "-")}

    def reserve(change: t.Callable[[list[t.Any]], object]) -> None:
        claim = node.cluster.server.request("GET", path)
        change(claim["status"]["reservedFor"])
        node.cluster.server.request("PUT", f"{path}/status", claim)

    reserve(lambda pods: pods.append(second))
    # The toolkit has limited its container by the claim's variable.
    container = node.cgroups.container(8, 1)
    node.limits.kept[FIRST, str(container)] = Limit(0, 4096 * MIB)
    node.kubelet.pods = {"pod9": [[one.uid, two.uid]], "pod8": [[one.uid]]}
    until(lambda: node.limits.mib_of(later) == {FIRST: 2048, SECOND: 1})
    until(lambda: node.limits.mib_of(container) == {FIRST: 2048})
    until(lambda: node.limits.mib_of(pod) == {FIRST: 2048 + 1024, SECOND: 2048})
    # It ends, and the API notices that a moment later.
    node.kubelet.pods = {"pod9": [[one.uid, two.uid]]}
    shutil.rmtree(later)
    time.sleep(0.6)
    reserve(lambda pods: pods.remove(second))
    until(lambda: node.limits.mib_of(pod) == {FIRST: 5120, SECOND: 2048})


def test_a_card_with_mig_is_announced_and_not_given_to_pods(make: t.Callable[..., DriverNode]) -> None:
    node = make(dataclasses.replace(seen(0), problem=MIG), seen(1))
    node.up()
    assert [[taint["value"] for taint in device.get("taints", [])] for device in node.devices()] == [["MIGEnabled"], []]
    with pytest.raises(Refused, match=r"^MIGEnabled: claim \S+/claim1: card 0 .* MIG is on: its instances have memory"):
        node.kubelet.prepare(node.claim(1, (0, "4Gi")))
    node.nvml.found = [seen(0), seen(1)]
    until(lambda: not any("taints" in device for device in node.devices()))


def test_a_card_is_lost_and_comes_back(node: DriverNode) -> None:
    claim = node.claim(1, (0, "4Gi"))
    node.kubelet.prepare(claim)
    cards = list(node.nvml.found)
    node.nvml.found = cards[1:]
    until(lambda: "taints" in node.devices()[0])
    (taint,) = node.devices()[0]["taints"]
    assert (taint["key"], taint["value"]) == ("gpu.kubegpu.share/unhealthy", "CardLost")
    assert "taints" not in node.devices()[1]
    # A claim that was allocated before isn't prepared now; of one that is prepared no new sandbox starts without it.
    late = node.claim(2, (0, "1Gi"))
    with pytest.raises(Refused, match=r"^CardLost: claim \S+/claim2: card 0 "):
        node.kubelet.prepare(late)
    node.kubelet.stop()
    node.kubelet.start()
    until(lambda: node.kubelet.endpoints)
    with pytest.raises(Refused, match=rf"^CardLost: claim \S+/claim1: card 0 \({FIRST}\): NVML .* delete the pod"):
        node.kubelet.prepare(claim)
    assert len(list(node.cdi.iterdir())) == 1
    node.nvml.found = cards
    until(lambda: not any("taints" in device for device in node.devices()))
    assert node.kubelet.prepare(claim) and node.kubelet.prepare(late)
    # All are lost: the pool keeps them, and nothing can be scheduled.
    node.nvml.problem = "NVIDIA's driver doesn't answer"
    until(lambda: ["taints" in device for device in node.devices()] == [True, True])
    until(lambda: node.page("/readyz") == (503, "NVIDIA's driver doesn't answer"))


def test_a_card_has_another_uuid_after_a_reboot(
    make: t.Callable[..., DriverNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "PASSING_SECONDS", 0)
    node = make(seen(0), seen(1), seen(2))
    node.nvml.found = [seen(0), seen(1)]
    node.up()
    claim = node.claim(1, (0, "4Gi"))
    node.kubelet.prepare(claim)
    node.down()
    for file in node.cdi.iterdir():
        file.unlink()
    node.nvml.found = [dataclasses.replace(seen(2), index=0), seen(1)]
    # Before NVML has answered, nothing is said of a card.
    node.nvml.problem = "NVIDIA's driver doesn't answer"
    node.kubelet.start()
    node.start()
    until(lambda: node.kubelet.endpoints)
    with pytest.raises(Refused, match=r"^NotReady: the cards of node \S+ aren't known: NVIDIA's driver doesn't answer"):
        node.kubelet.prepare(claim)
    node.nvml.problem = ""
    until(lambda: len(node.devices()) == 2)
    gone = rf"^UnknownCard: claim \S+/claim1 has a part of card {FIRST.lower()}, and .*: delete the pod"
    with pytest.raises(Refused, match=gone):
        node.kubelet.prepare(claim)
    node.kubelet.unprepare(claim)
    assert node.kubelet.prepare(node.claim(2, (1, "4Gi")))


def test_a_card_that_is_lost_while_the_driver_is_away(make: t.Callable[..., DriverNode]) -> None:
    node = make(seen(0), seen(1), seen(2))
    node.up()
    claim = node.claim(1, (0, "4Gi"))
    node.kubelet.prepare(claim)
    node.stop()
    # NVML numbers those that are left.
    node.nvml.found = [dataclasses.replace(seen(2), index=0)]
    node.start()
    names = [seen(0).uuid.lower(), seen(2).uuid.lower()]
    until(lambda: [device["name"] for device in node.devices()] == names)
    first, last = node.devices()
    assert [taint["value"] for taint in first["taints"]] == ["CardLost"] and "taints" not in last
    assert [one["attributes"]["index"]["int"] for one in (first, last)] == [0, 2]
    # Nobody has a part of it any more.
    until(lambda: tried(lambda: node.kubelet.unprepare(claim)))
    node.stop()
    node.start()
    until(lambda: [device["name"] for device in node.devices()] == names[1:])


@pytest.mark.parametrize("watch", dra.WATCHES, ids=dra.HEALTH_SERVICES)
def test_kubelet_is_told_of_the_cards_health(
    node: DriverNode, monkeypatch: pytest.MonkeyPatch, watch: wire.Method
) -> None:
    """It shows that in the status of pods, so that no right to write Events is needed."""
    monkeypatch.setattr(command, "HEALTH_SECONDS", 0.3)
    with node.kubelet.watching(watch) as seen_by_kubelet:
        healthy = {FIRST.lower(): (1, ""), SECOND.lower(): (1, "")}
        until(lambda: seen_by_kubelet[-1:] == [healthy])
        # It is repeated, since kubelet forgets it.
        until(lambda: len(seen_by_kubelet) > 3)
        cards = list(node.nvml.found)
        node.nvml.found = cards[:1]
        lost = 2, f"CardLost: card 1 ({SECOND}) NVML doesn't answer for it"
        until(lambda: seen_by_kubelet[-1] == {**healthy, SECOND.lower(): lost})
        node.nvml.found = cards
        until(lambda: seen_by_kubelet[-1] == healthy)
    # The stream's end frees its thread: more streams than threads.
    for _stream in range(20):
        with node.kubelet.watching() as more:
            until(lambda more=more: more)
    assert node.kubelet.prepare(node.claim(1, (0, "1Gi")))


def test_an_xid_taints_a_card_for_a_while(make: t.Callable[..., DriverNode]) -> None:
    node = make()
    node.up(xid_quiet=1.5)
    node.nvml.fail(1, 48)
    until(lambda: ["taints" in device for device in node.devices()] == [False, True])
    assert node.devices()[1]["taints"][0]["value"] == "XIDError"
    until(lambda: not any("taints" in device for device in node.devices()))


def test_a_driver_without_cards_withdraws_the_slices_of_the_one_before(make: t.Callable[..., DriverNode]) -> None:
    node = make()
    driver = node.up()
    claim = node.claim(1, (0, "4Gi"))
    node.kubelet.prepare(claim)
    node.stop()
    assert len(node.devices()) == 2
    node.nvml.problem = "NVIDIA's driver isn't there"
    node.start()
    until(lambda: node.cluster.slices() and not node.devices())
    # kubelet can still unprepare.
    until(lambda: tried(lambda: node.kubelet.unprepare(claim)))
    assert driver is not node.driver


def test_required_limits(make: t.Callable[..., DriverNode]) -> None:
    """A card that can't be limited is tainted; a pod that can't be isn't started."""
    node = make(driver="580.95.05")
    node.kubelet.start()
    node.start(memory_limit="required")
    until(lambda: ["taints" in device for device in node.devices()] == [True, True])
    assert node.devices()[0]["taints"][0]["value"] == "MemoryLimitUnavailable"
    node.limits.version = "615.71.09"
    until(lambda: node.page("/readyz")[1] == "ok")
    until(lambda: not any("taints" in device for device in node.devices()))
    claim = node.claim(1, (0, "4Gi"))
    with pytest.raises(Refused, match=r"^MemoryLimitFailed: claim \S+/claim1: the cgroup of pod \S+/pod1 isn't found"):
        node.kubelet.prepare(claim)
    pod = node.cgroups.pod(1)
    assert node.kubelet.prepare(claim) and node.limits.mib_of(pod) == {FIRST: 4096, SECOND: 1}
    # A claim is reserved for two pods, of which kubelet starts one.
    shared, pod = node.claim(2, (0, "2Gi"), pods=(2, 3)), node.cgroups.pod(2)
    assert node.kubelet.prepare(shared) and node.limits.mib_of(pod) == {FIRST: 1024, SECOND: 1}


def test_limits_turned_off_and_a_reserve_that_is_not_sold(make: t.Callable[..., DriverNode]) -> None:
    node = make(dataclasses.replace(seen(0), reserved_mib=450), seen(1))
    node.up(memory_limit="off", reserve_mib=100, unit="MiB")
    assert [device["capacity"]["memory"]["value"] for device in node.devices()] == ["15834Mi", "16284Mi"]
    pod = node.cgroups.pod(1)
    (name,) = node.kubelet.prepare(node.claim(1, (1, "2Gi")))
    assert "NVIDIA_GPU_MEMORY_LIMIT" not in node.environment(name) and node.limits.mib_of(pod) == {}
    assert node.devices()[0]["attributes"]["memoryLimit"] == {"string": "off"}


# --------------------------------------------------------------------------- kubelet


def test_kubelet_restarts_and_wipes_the_slices(node: DriverNode) -> None:
    claim = node.claim(1, (0, "4Gi"))
    first = node.kubelet.prepare(claim)
    for _turn in range(3):
        node.kubelet.stop()
        node.kubelet.start()
        until(lambda: node.kubelet.endpoints)
        until(lambda: len(node.devices()) == 2)
    # It appends the devices of each first call to its checkpoint.
    until(lambda: tried(lambda: node.kubelet.prepare(claim)))
    assert set(node.kubelet.prepare(claim)) == set(first)
    until(lambda: node.metric("gpushare_plugin_registrations") == 4)
    assert node.kubelet.refusals == []
    node.kubelet.unprepare(claim)
    assert list(node.cdi.iterdir()) == []


def test_sockets_that_are_removed_are_made_again(node: DriverNode) -> None:
    folders = node.kubelet.registry, node.root / "kubelet" / "plugins" / "gpu.kubegpu.share"
    for number, folder in enumerate(folders, 1):
        (path,) = folder.glob("*.sock")
        path.unlink()
        until(path.exists)
        claim = node.claim(number, (0, "1Gi"))
        until(lambda claim=claim: tried(lambda: node.kubelet.prepare(claim)))


def test_a_second_process_waits_for_the_first(node: DriverNode, make: t.Callable[..., DriverNode]) -> None:
    """A pod that was deleted by force may still run when the DaemonSet makes the next one."""
    first = node.driver
    assert first is not None
    claim = node.claim(1, (0, "4Gi"))
    node.kubelet.prepare(claim)
    status = str(node.root / "second.sock")
    second = node.start(status_socket=status)
    until(lambda: "another process of the driver still runs" in str(second.unready()))
    assert len(list(node.kubelet.registry.glob("*.sock"))) == 1
    registrations = node.kubelet.registrations
    first.stop()
    until(lambda: second.unready() is None)
    until(lambda: node.kubelet.registrations == registrations + 1 and len(node.kubelet.endpoints) == 1)
    until(lambda: tried(lambda: node.kubelet.unprepare(claim)))


def test_what_a_killed_process_left(make: t.Callable[..., DriverNode]) -> None:
    node = make()
    own = node.root / "kubelet" / "plugins" / "gpu.kubegpu.share"
    own.mkdir(parents=True)
    left = [node.kubelet.registry / "gpu.kubegpu.share-0badcafe.sock", own / "dra-0badcafe.sock"]
    for path in left:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    other = node.kubelet.registry / "gpu.nvidia.com-reg.sock"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(other))
    node.up()
    until(lambda: not any(path.exists() for path in left))
    assert other.exists() and len(node.kubelet.endpoints) == 1
    node.stop()
    assert list(node.kubelet.registry.glob("gpu.kubegpu.share*")) == [] == list(own.glob("*.sock"))
    assert len(node.devices()) == 2, "the slices stay when the driver is updated"


def test_several_claims_at_once(node: DriverNode) -> None:
    refs = [node.claim(number, (number % 2, "2Gi")) for number in range(1, 13)]
    answers: list[t.Any] = []
    threads = [
        threading.Thread(target=lambda one=one: answers.append(node.kubelet.call(dra.PREPARE, one))) for one in refs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 12 and all(not each.error for answer in answers for each in answer.claims.values())
    assert len(list(node.cdi.iterdir())) == 12
    missing = ref(99)._replace(namespace=node.cluster.namespace)
    mixed = node.kubelet.call(dra.PREPARE, missing, refs[0])
    assert mixed.claims[missing.uid].error.startswith("ClaimNotFound: ") and mixed.claims[refs[0].uid].devices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory-unit", "GB"], "--memory-unit: 'GB' is none of GiB, MiB"),
        (["--claim-cdi-folder", "cdi"], "--claim-cdi-folder: 'cdi' is no absolute path"),
        (["--node-name", ""], "NODE_NAME must name this node"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--node-name", "gpu1", *arguments])
    assert message in capsys.readouterr().err


def test_the_annotations_reasons_have_codes_for_taints() -> None:
    """A taint's value is a label's value."""
    assert all(code.value.isalnum() and len(code.value) <= 63 for code in contract.Reason)
