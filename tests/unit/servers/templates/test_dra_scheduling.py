# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods with aliyun.com/gpu-mem by the real kube-scheduler, from admission to the allocated card; no kubelet runs."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claims import DRIVER, PodClaim, pod_claims
from dra_cluster import Cluster
from dra_kit import DriverNode
from dra_world import NAMESPACE, account, allocated, node, pod, scheduling
from gpushare.api.client import connect
from gpushare.kubelet.dra import ClaimRef
from gpushare.shared._contracts import gpushare as contract
from gpushare.templates.command import Templates
from own_cluster import controllers, until
from plugin_fakes import seen
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, ApiServer

ACCOUNT = "gpushare-dra-driver"
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe"
PAGE = Path(__file__).resolve().parents[4] / "docs" / "claims.md"


@pytest.fixture(scope="module")
def server(dra_api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """With the server of templates, kube-scheduler and the controller of claims; and no node yet."""
    with scheduling(dra_api):
        kube = connect(dra_api.url, str(account(dra_api, tmp_path_factory.mktemp("account"))))
        templates = Templates(kube, namespace=NAMESPACE, registry=CollectorRegistry())
        templates.start()
        # A server that was killed before hasn't given its Lease back.
        until(lambda: templates.leader.leading, 60)
        yield dra_api
        assert templates.stop()


@pytest.fixture
def place(server: ApiServer) -> Iterator[Any]:
    """A namespace, and nodes that go with their slices after the test."""
    made: list[str] = []
    space = server.namespace()

    def begin(**nodes: list[str]) -> str:
        for name, models in nodes.items():
            node(server, name, *models)
            made.append(name)
        return space

    yield begin
    try:
        _remove_pods(server, space)
    finally:
        for name in made:
            server.request("DELETE", f"/api/v1/nodes/{name}")
            server.request("DELETE", f"/apis/resource.k8s.io/v1/resourceslices/{name}")


def _remove_pods(server: ApiServer, space: str) -> None:
    """Remove the pods of a namespace with their claims.

    No garbage collector runs. kube-scheduler leaves an allocation to it whose pod goes while it is bound, and the
    controller creates the claim of a pod once more if it learns later of the pod's end than of its claim's.
    """
    for item in server.request("GET", f"/api/v1/namespaces/{space}/pods")["items"]:
        name = item["metadata"]["name"]
        server.request("DELETE", f"/api/v1/namespaces/{space}/pods/{name}?gracePeriodSeconds=0")
    claims = f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims"

    def left() -> list[Any]:
        server.request("DELETE", claims)
        return list(server.request("GET", claims)["items"])

    with contextlib.suppress(AssertionError):
        until(lambda: not left(), 60)
    # Says which are left.
    assert left() == []


def run(server: ApiServer, space: str, wanted: dict[str, Any]) -> str:
    server.request("POST", f"/api/v1/namespaces/{space}/pods", wanted)
    return str(wanted["metadata"]["name"])


def got(server: ApiServer, space: str, name: str) -> list[tuple[str, str, str]]:
    return until(lambda: allocated(server, space, name), 30)


def unschedulable(server: ApiServer, space: str, name: str) -> str:
    """Return why kube-scheduler doesn't schedule a pod."""

    def message() -> str:
        status = server.request("GET", f"/api/v1/namespaces/{space}/pods/{name}").get("status", {})
        said = [condition for condition in status.get("conditions", []) if condition["type"] == "PodScheduled"]
        return said[0].get("message", "") if said and status.get("resourceClaimStatuses") else ""

    return until(message, 30)


def test_cards_are_packed_to_the_last_gib_and_no_further(server: ApiServer, place: Any) -> None:
    space = place(a=["", ""])
    pods = [run(server, space, pod(f"p{number}", 5)) for number in range(6)]
    where = [device for name in pods for _request, device, _memory in got(server, space, name)]
    # First fit: of 16 GiB each card has three times 5.
    assert sorted(where) == ["gpu-a-0"] * 3 + ["gpu-a-1"] * 3
    assert got(server, space, run(server, space, pod("last", 1)))[0][1:] == ("gpu-a-0", "1Gi")
    assert "cannot allocate all claims" in unschedulable(server, space, run(server, space, pod("beyond", 2)))
    assert got(server, space, run(server, space, pod("other", 1)))[0][1:] == ("gpu-a-1", "1Gi")


def test_containers_of_a_pod_get_the_same_card_each_its_share(server: ApiServer, place: Any) -> None:
    space = place(a=["", ""])
    got(server, space, run(server, space, pod("before", 10)))
    init = {"name": "i", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": 4}}}
    name = run(server, space, pod("p", 4, 3, initContainers=[init]))
    assert got(server, space, name) == [("gpu-0", "gpu-a-1", "4Gi"), ("gpu-1", "gpu-a-1", "3Gi")]


def test_several_cards_are_different_ones(server: ApiServer, place: Any) -> None:
    space = place(a=["", "", ""])
    got(server, space, run(server, space, pod("before", 14)))
    name = run(server, space, pod("p", 8, annotations={"kubegpu.share/card-count": "2"}))
    assert got(server, space, name) == [("gpu-0", "gpu-a-1", "4Gi"), ("gpu-0", "gpu-a-2", "4Gi")]
    # Of one node.
    place(b=[""])
    beyond = run(server, space, pod("q", 4, annotations={"kubegpu.share/card-count": "4"}))
    assert "cannot allocate all claims" in unschedulable(server, space, beyond)


def test_the_class_as_an_extended_resource_is_a_whole_card(server: ApiServer, place: Any) -> None:
    space = place(a=["", ""])
    got(server, space, run(server, space, pod("before", 4)))
    limits = {f"deviceclass.resource.kubernetes.io/{DRIVER}": "1"}
    container = {"name": "c", "image": "i", "resources": {"limits": limits}}
    wanted = {"metadata": {"name": "whole"}, "spec": {"containers": [container]}}
    name = run(server, space, wanted)

    def claimed() -> list[PodClaim]:
        return list(pod_claims(server.request("GET", f"/api/v1/namespaces/{space}/pods/{name}")))

    [use] = until(claimed, 30)
    [(container_name, request)] = use.containers
    claim = server.request("GET", f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims/{use.claim}")
    [result] = claim["status"]["allocation"]["devices"]["results"]
    # Of the first card somebody has a part.
    assert (container_name, result["request"], result["device"]) == ("c", request, "gpu-a-1")
    assert result["consumedCapacity"] == {"memory": "16Gi"}


def test_the_order_of_a_slices_devices_decides(server: ApiServer, place: Any) -> None:
    """With gpushare_placement: spread the driver writes the emptiest card first whenever what claims hold changes."""
    space = place(a=["", "", ""])
    path = "/apis/resource.k8s.io/v1/resourceslices/a"
    held = dict.fromkeys(("gpu-a-0", "gpu-a-1", "gpu-a-2"), 0)
    for number in range(6):
        slice_of = server.request("GET", path)
        slice_of["spec"]["devices"].sort(key=lambda one: (held[one["name"]], one["name"]))
        slice_of["spec"]["pool"]["generation"] += 1
        server.request("PUT", path, slice_of)
        # Nothing shows when the scheduler has seen it.
        time.sleep(1)
        [(_request, device, _memory)] = got(server, space, run(server, space, pod(f"p{number}", 4)))
        assert held[device] == min(held.values()), (device, held)
        held[device] += 4
    assert set(held.values()) == {8}


def test_several_containers_get_the_same_cards_each_its_share(server: ApiServer, place: Any) -> None:
    space = place(a=["", "", "", ""])
    got(server, space, run(server, space, pod("before", 12)))
    two = {"kubegpu.share/card-count": "2"}
    found = got(server, space, run(server, space, pod("p", 8, 4, annotations=two)))
    assert found == [
        ("gpu-0-0", "gpu-a-1", "4Gi"),
        ("gpu-0-1", "gpu-a-2", "4Gi"),
        ("gpu-1-0", "gpu-a-1", "2Gi"),
        ("gpu-1-1", "gpu-a-2", "2Gi"),
    ]
    # The most cards there are for it: kube-scheduler soon knows that they don't fit.
    four = {"kubegpu.share/card-count": "4"}
    waiting = run(server, space, pod("q", 16, 4, annotations=four))
    assert "cannot allocate all claims" in unschedulable(server, space, waiting)
    small = run(server, space, pod("r", 8, 4, annotations=four))
    assert {device for _request, device, _memory in got(server, space, small)} == {f"gpu-a-{card}" for card in range(4)}


def test_models_select_cards(server: ApiServer, place: Any) -> None:
    space = place(a=["", A100, H100])
    wishes = {
        "h": {"models": "*h100*"},
        "a": {"models": "Tesla*, nvidia ?100-SXM4*"},
        "not-a": {"exclude-models": "*A100*"},
        "not-h": {"models": "NVIDIA*", "exclude-models": "*PCIe"},
    }
    found = {
        name: got(
            server,
            space,
            run(server, space, pod(name, 2, annotations={f"kubegpu.share/{key}": text for key, text in wish.items()})),
        )[0][1]
        for name, wish in wishes.items()
    }
    # A card of unknown model is never accepted by a list.
    assert found == {"h": "gpu-a-2", "a": "gpu-a-1", "not-a": "gpu-a-2", "not-h": "gpu-a-1"}
    # The condition stands in the requests of the first container only.
    both = run(server, space, pod("both", 2, 1, annotations={"kubegpu.share/models": "*h100*"}))
    assert {device for _request, device, _memory in got(server, space, both)} == {"gpu-a-2"}
    cards = {"kubegpu.share/models": "*100*", "kubegpu.share/card-count": "2"}
    each = run(server, space, pod("each", 2, 4, annotations=cards))
    assert [device for _request, device, _memory in got(server, space, each)] == ["gpu-a-1", "gpu-a-2"] * 2
    none = run(server, space, pod("none", 2, annotations={"kubegpu.share/models": "NVIDIA A100"}))
    assert "cannot allocate all claims" in unschedulable(server, space, none)


def test_the_templates_of_the_documentation(server: ApiServer, place: Any) -> None:
    space = place(a=[A100, A100, H100, H100], b=[""])
    found = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    for one in found:
        if one.get("kind") == "ResourceClaimTemplate":
            server.request("POST", f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaimtemplates", one)

    def start(name: str, template: str) -> None:
        wanted = pod(name, 0, resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": template}])
        wanted["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
        run(server, space, wanted)

    start("large", "large")
    assert got(server, space, "large") == [("gpu", "gpu-a-2", "12Gi")]
    start("first", "h100-or-two-a100")
    assert got(server, space, "first") == [("gpu/h100", "gpu-a-3", "12Gi")]
    # Both H100 have 4 GiB left.
    start("second", "h100-or-two-a100")
    assert got(server, space, "second") == [("gpu/a100", "gpu-a-0", "6Gi"), ("gpu/a100", "gpu-a-1", "6Gi")]
    # A condition that can't be evaluated for one card of another node keeps the pod from all nodes.
    (careless,) = (one for one in found if one.get("metadata", {}).get("name") == "large")
    careless["metadata"]["name"] = "careless"
    exactly = careless["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    exactly["selectors"][0]["cel"]["expression"] = 'device.attributes["gpu.kubegpu.share"].model.matches("A100")'
    exactly["capacity"]["requests"]["memory"] = "1Gi"
    server.request("POST", f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaimtemplates", careless)
    start("careless", "careless")
    assert "no such key: model" in unschedulable(server, space, "careless")


RULES = "/apis/resource.k8s.io/v1/devicetaintrules"


@contextlib.contextmanager
def rule(server: ApiServer, effect: str, selector: dict[str, Any] | None) -> Iterator[None]:
    """A DeviceTaintRule, which the API serves from Kubernetes 1.37 on without a switch."""
    taint = {"key": "example.com/maintenance", "effect": effect}
    spec = {"taint": taint, **({} if selector is None else {"deviceSelector": selector})}
    server.request("POST", RULES, {"metadata": {"name": "maintenance"}, "spec": spec})
    try:
        yield
    finally:
        server.request("DELETE", f"{RULES}/maintenance")


def test_an_administrators_rule_keeps_new_pods_off_a_card(server: ApiServer, place: Any) -> None:
    space = place(a=["", ""])
    assert got(server, space, run(server, space, pod("before", 4)))[0][1] == "gpu-a-0"
    with rule(server, "NoSchedule", {"driver": DRIVER, "pool": "a", "device": "gpu-a-0"}):
        assert got(server, space, run(server, space, pod("during", 4)))[0][1] == "gpu-a-1"
        assert got(server, space, "before")[0][1] == "gpu-a-0", "who has it keeps it"
        assert "cannot allocate all claims" in unschedulable(server, space, run(server, space, pod("beyond", 13)))
    assert got(server, space, run(server, space, pod("after", 12)))[0][1] == "gpu-a-0"


def test_a_rule_without_a_selector_is_for_no_card(server: ApiServer, place: Any) -> None:
    """kube-scheduler 1.37.0 takes it for every card; an empty selector is for every card in each release."""
    space = place(a=[""])
    with rule(server, "NoSchedule", None):
        got(server, space, run(server, space, pod("p", 4)))
    with rule(server, "NoSchedule", {}):
        assert "cannot allocate all claims" in unschedulable(server, space, run(server, space, pod("q", 4)))
    got(server, space, "q")


def test_a_rule_with_noexecute_ends_pods(server: ApiServer, place: Any) -> None:
    space = place(a=["", ""])
    for name, memory in (("first", 16), ("second", 16)):
        got(server, space, run(server, space, pod(name, memory)))
    selector = {"driver": DRIVER, "device": "gpu-a-0"}

    def deleted(name: str) -> bool:
        status, found = server.ask("GET", f"/api/v1/namespaces/{space}/pods/{name}")
        return status == 404 or "deletionTimestamp" in found

    with controllers(server, "device-taint-eviction"), rule(server, "NoExecute", selector):
        until(lambda: deleted("first"), 60)
        assert not deleted("second")


def test_a_part_of_a_byte_is_a_unit(server: ApiServer, place: Any) -> None:
    """kube-scheduler computes with thousandths from 1.37 on (its feature DRAFractionalCapacityRange)."""
    space = place(a=[""])
    exactly = {"deviceClassName": DRIVER, "capacity": {"requests": {"memory": "1500m"}}}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    claims = f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims"
    server.request("POST", claims, {"metadata": {"name": "own"}, "spec": spec})
    container = {"name": "c", "image": "i", "resources": {"claims": [{"name": "gpu"}]}}
    wanted = {"containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimName": "own"}]}
    run(server, space, {"metadata": {"name": "p"}, "spec": wanted})

    def results() -> list[Any]:
        status = server.request("GET", f"{claims}/own").get("status", {})
        return list(status.get("allocation", {}).get("devices", {}).get("results", []))

    [result] = until(results, 30)
    assert result["consumedCapacity"] == {"memory": "1Gi"}


# --------------------------------------------------------------------------- with the driver


class Deployed(Cluster):
    """A node whose driver has the account, the rights and the policy of the role."""

    def __init__(self, server: ApiServer, folder: Path, node: str) -> None:
        self.server, self.node, self.namespace = server, node, "default"
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
        status = {"capacity": {"cpu": "8", "memory": "8Gi", "pods": "110"}}
        server.request("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, MERGE)
        server.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}}, MERGE)
        spec = {"serviceAccountName": ACCOUNT, "nodeName": node, "containers": [{"name": "c", "image": "i"}]}
        self.pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        server.request("POST", self.pods, {"metadata": {"name": "driver"}, "spec": spec})
        self.account = server.token(folder, NAMESPACE, ACCOUNT, "driver")

    def remove(self) -> None:
        self.wipe()
        self.server.request("DELETE", f"{self.pods}/driver?gracePeriodSeconds=0")
        self.server.request("DELETE", f"/api/v1/nodes/{self.node}")


@pytest.fixture
def driver_node(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverNode]:
    """A node of two cards, which NVIDIA's specification names; the driver is real, kubelet and cards are doubles."""
    deployed = Deployed(server, tmp_path_factory.mktemp("driver"), "gpu1")
    made = DriverNode(tmp_path_factory.mktemp("d"), deployed)
    (made.root / "nvidia").mkdir()
    names = [{"name": card.uuid} for card in made.nvml.found]
    (made.root / "nvidia" / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": names}))
    made.up()
    yield made
    made.down()
    deployed.remove()


def test_an_unchanged_pod_gets_its_share_of_a_card(server: ApiServer, place: Any, driver_node: DriverNode) -> None:
    """From a pod with aliyun.com/gpu-mem to its containers' variables, with all servers and objects of the role."""
    space = place()

    def prepared(wanted: dict[str, Any]) -> tuple[list[str], list[dict[str, str]]]:
        """Create a pod; return NVIDIA's CDI names, and the variables of the claim's own."""
        got(server, space, run(server, space, wanted))
        status = server.request("GET", f"/api/v1/namespaces/{space}/pods/{wanted['metadata']['name']}")["status"]
        [claim] = status["resourceClaimStatuses"]
        path = f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims/{claim['resourceClaimName']}"
        metadata = server.request("GET", path)["metadata"]
        names = driver_node.kubelet.prepare(ClaimRef(space, metadata["uid"], metadata["name"]))
        own = [driver_node.environment(name) for name in names if name.startswith("gpu.kubegpu.share/")]
        return [name for name in names if name.startswith("nvidia.com/")], own

    first, second = (f"nvidia.com/gpu={seen(number).uuid}" for number in (0, 1))
    cards, own = prepared(pod("p", 4))
    assert cards == [first] and [each["NVIDIA_VISIBLE_DEVICES"] for each in own] == ["void"]
    assert [(each[contract.POD_UNITS], each[contract.POD_INDEX]) for each in own] == [("4", "0")]
    # The first card is full to 3 GiB then, so that both containers go to the second one, each with its own request.
    prepared(pod("before", 9))
    cards, own = prepared(pod("two", 3, 2))
    assert cards == [second] * 2
    assert [(each[contract.POD_UNITS], each[contract.CONTAINER_UNITS]) for each in own] == [("5", "3"), ("5", "2")]
    # A container has a request for each card, and from each of them the variables of both.
    cards, own = prepared(pod("cards", 4, 2, annotations={contract.POD_CARD_COUNT: "2"}))
    assert cards == [first, first, second, second]
    assert [each[contract.CONTAINER_UNITS] for each in own] == ["4", "2", "4", "2"]
    assert {each[contract.POD_UNITS] for each in own} == {"6"}
