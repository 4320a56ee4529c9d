# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's slices on a real API server, which validates devices, capacities and taints."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import typing as t
from pathlib import Path

import pytest
from dra_cluster import Cluster
from dra_kit import until
from gpushare.api.client import KubeApi, KubeError, connect
from gpushare.dra import publisher as publisher_module
from gpushare.dra import slices
from gpushare.dra.owner import Owner, node_of_token
from gpushare.dra.publisher import Publisher
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from real_apiserver import own_api_server


@pytest.fixture
def kube(cluster: Cluster) -> t.Iterator[KubeApi]:
    found = connect(cluster.server.url, str(cluster.account))
    yield found
    found.close()


@contextlib.contextmanager
def publishing(cluster: Cluster, kube: KubeApi) -> t.Iterator[Publisher]:
    one = Publisher(kube, cluster.node, Owner(kube, cluster.node, cluster.account / "token"), (0.05, 0.2))
    one.mirror.start()
    try:
        assert one.mirror.wait_synced(20)
        yield one
    finally:
        one.mirror.stop()


def settled(publisher: Publisher, devices: list[JsonObject]) -> None:
    """Publish devices, and wait until nothing is left to write."""
    publisher.publish(devices)
    until(lambda: (publisher.step(0.05), publisher.reason is None and publisher.mirror.items())[1])
    for _pass in range(3):
        publisher.step(0.05)
    assert publisher.reason is None


def cards(count: int, units: int = 16, **more: t.Any) -> list[contract.Card]:
    model = "NVIDIA Simulated GPU with a name that is longer than any attribute's value"
    return [
        contract.Card(n, f"GPU-{n:08x}-1111-2222-3333-444444444444", n, units * 1024, units, model=model, **more)
        for n in range(count)
    ]


FACTS = slices.Facts(
    "580.95.05",
    {card.uuid: f"0000:{card.index:02x}:00.0" for card in cards(70)},
    {card.uuid: "pci0000:00" for card in cards(70)},
    {card.uuid: "enforced" for card in cards(70)},
)


def test_the_api_server_accepts_every_kind_of_card(cluster: Cluster, kube: KubeApi) -> None:
    """Many cards, one unit, an odd number of MiB, no driver's version, each reason for which a card isn't given."""
    sick = [
        dataclasses.replace(card, healthy=False, code=str(code))
        for card, code in zip(cards(70), contract.Reason, strict=False)
    ]
    for unit, found in (
        ("GiB", cards(70)),
        ("GiB", cards(2, units=1)),
        ("GiB", cards(1, units=2)),
        ("MiB", cards(1, units=15784)),
        ("GiB", sick),
        ("GiB", cards(1, healthy=False)),
        ("GiB", []),
    ):
        with publishing(cluster, kube) as publisher:
            devices = slices.devices(found, unit, FACTS)
            settled(publisher, devices)
            there = cluster.slices()
            assert len(there) == max(1, -(-len(found) // 64))
            written = [device for each in there for device in each["spec"].get("devices", [])]
            for one in written:
                for taint in one.get("taints", []):
                    assert taint.pop("timeAdded")
            assert written == devices
            pools = [each["spec"]["pool"] for each in there]
            assert all(pool == {**pools[0], "name": cluster.node, "resourceSliceCount": len(there)} for pool in pools)
            # What the API has made of it isn't another state.
            done = publisher.written
            publisher.wake()
            publisher.step(1)
            assert publisher.written == done


def test_slices_are_restored_and_changed_as_a_pool(cluster: Cluster, kube: KubeApi) -> None:
    with publishing(cluster, kube) as publisher:
        settled(publisher, slices.devices(cards(70), "GiB", FACTS))
        first, second = cluster.slices()
        for one in (first, second):
            (owner,) = one["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", cluster.node, cluster.uid)
        generation = first["spec"]["pool"]["generation"]
        # A person deletes one: it comes back, and the pool isn't incomplete in between.
        path = "/apis/resource.k8s.io/v1/resourceslices"
        cluster.server.request("DELETE", f"{path}/{second['metadata']['name']}")
        until(lambda: (publisher.step(0.1), len(cluster.slices()) == 2)[1])
        assert [one["spec"]["pool"]["generation"] for one in cluster.slices()] == [generation] * 2
        # kubelet starts.
        cluster.wipe()
        until(lambda: (publisher.step(0.1), len(cluster.slices()) == 2)[1])
        # A card is lost and comes back.
        sick = [dataclasses.replace(card, healthy=card.index != 3, code="CardLost") for card in cards(70)]
        settled(publisher, slices.devices(sick, "GiB", FACTS))
        first, second = cluster.slices()
        (taint,) = first["spec"]["devices"][3]["taints"]
        assert (taint["key"], taint["value"], taint["effect"]) == (slices.UNHEALTHY, "CardLost", "NoSchedule")
        assert first["spec"]["pool"]["generation"] == second["spec"]["pool"]["generation"] > generation
        settled(publisher, slices.devices(cards(70), "GiB", FACTS))
        assert not any("taints" in device for each in cluster.slices() for device in each["spec"]["devices"])
        # Somebody edits one, and makes another one.
        changed = cluster.slices()[0]
        changed["spec"]["devices"] = changed["spec"]["devices"][:2]
        cluster.server.request("PUT", f"{path}/{changed['metadata']['name']}", changed)
        foreign = {**changed, "metadata": {"name": f"{cluster.node}-foreign"}}
        cluster.server.request("POST", path, {**foreign, "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"})
        until(lambda: (publisher.step(0.1), [len(one["spec"]["devices"]) for one in cluster.slices()] == [64, 6])[1])


def test_where_the_api_drops_taints_the_card_is_left_out(tmp_path: Path) -> None:
    """The feature DRADeviceTaints is off: a taint would keep no pod away, and the slices would never be as wanted."""
    with own_api_server("--feature-gates=DRADeviceTaints=false,DRADeviceTaintRules=false") as server:
        cluster = Cluster(server, tmp_path / "account", "gpu-node-without-taints")
        kube = connect(server.url, str(cluster.account))
        with publishing(cluster, kube) as publisher:
            first, second = cards(2)
            healthy = slices.devices([first, second], "GiB", FACTS)
            held = slices.devices([first, second], "GiB", FACTS, unbooked={first.uuid.lower(): "ClaimNotFound"})
            sick = slices.devices([dataclasses.replace(first, healthy=False, code="CardLost"), second], "GiB", FACTS)
            for devices in (healthy, held, healthy, sick, healthy):
                settled(publisher, devices)
                names = [device["name"] for each in cluster.slices() for device in each["spec"]["devices"]]
                assert names == [device["name"] for device in devices if "taints" not in device]
                done = publisher.written
                publisher.wake()
                publisher.step(0.1)
                assert publisher.written == done
        kube.close()


def test_slices_that_somebody_deletes_at_once_are_no_storm(
    cluster: Cluster, kube: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the garbage collector does after the Node was deleted and joined again, while the token names the old one."""
    monkeypatch.setattr(publisher_module, "WRITES_AT_ONCE", 4)
    devices = slices.devices(cards(2), "GiB", FACTS)
    with publishing(cluster, kube) as publisher:
        publisher.publish(devices)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            publisher.step(0.02)
            cluster.wipe()
        assert 4 <= publisher.written <= 9
        # Nobody deletes them any more.
        settled(publisher, devices)
        assert len(cluster.slices()) == 1


def test_the_owner_is_in_the_token_and_no_right_to_nodes_is_needed(
    cluster: Cluster, kube: KubeApi, tmp_path: Path
) -> None:
    token = cluster.account / "token"
    assert node_of_token(token.read_text()) == (cluster.node, cluster.uid)
    assert Owner(kube, cluster.node, token)() == cluster.uid
    # A token without a pod, as outside of a cluster: the node is read.
    with pytest.raises(KubeError) as refused:
        Owner(kube, cluster.node, tmp_path / "none")()
    assert refused.value.status == 403
    admin = connect(cluster.server.url, str(cluster.server.service_account(tmp_path / "admin", cluster.namespace)))
    assert Owner(admin, cluster.node, tmp_path / "admin" / "token")() == cluster.uid
    admin.close()


def test_what_the_api_says_of_a_claim_that_is_gone(cluster: Cluster, kube: KubeApi) -> None:
    """Not what it says of a version that it doesn't serve (any more), with the same status and reason."""
    path = f"/namespaces/{cluster.namespace}/resourceclaims/none"
    for version, name in (("v1", "none"), ("v9", "")):
        with pytest.raises(KubeError) as refused:
            kube.get(f"/apis/resource.k8s.io/{version}{path}?resourceVersion=0")
        assert (refused.value.status, refused.value.reason, refused.value.name) == (404, "NotFound", name)


@pytest.mark.parametrize("token", ["", "a.b.c", "a.e30.c", "a.bnVsbA.c", "a.!!!.c", "a." + "W10" + ".c"])
def test_a_token_of_any_content(token: str) -> None:
    assert node_of_token(token) == ("", "")


def test_a_refusal_is_reported_until_it_is_gone(cluster: Cluster, kube: KubeApi) -> None:
    with publishing(cluster, kube) as publisher:
        assert publisher.reason == "the node's ResourceSlices aren't written yet"
        bad = slices.devices(cards(1), "GiB", FACTS)
        bad[0]["name"] = "GPU_1"
        publisher.publish(bad)
        publisher.step(0.1)
        assert "the node's ResourceSlices can't be written: " in str(publisher.reason)
        assert "spec.devices[0].name" in str(publisher.reason)
        settled(publisher, slices.devices(cards(1), "GiB", FACTS))
