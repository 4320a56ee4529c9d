# SPDX-License-Identifier: GPL-3.0-or-later
"""Both suites with claims, on a real API server with admission policies, kube-scheduler and the server of templates.

kubelet is played: it runs each bound pod, and ends it when it is deleted.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claim_templates import Shape
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import PodParser, node_of
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.assertions import (
    as_announced,
    as_booked,
    cards_by_node,
    pod_state,
)
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import NAMESPACES, Options, node_state
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.run import run
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from dra_objects import claim, slices_of, turned
from dra_world import NAMESPACE, account, dra_server, scheduling
from gpushare.api.client import connect
from gpushare.templates.command import Templates
from own_cluster import controllers
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, ApiServer

CARDS = [contract.Card(at, f"GPU-5a4d7f2{at}", at, 16384, 16, model="NVIDIA T4") for at in (0, 1)]
FOUR, PAIR, SPREAD = Shape((4,)), Shape((4, 2)), Shape((8,), cards=2)
NODE: JsonObject = {
    "metadata": {"name": "gpu1", "labels": {"gpushare": "dra"}},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}


# --------------------------------------------------------------------------- claims as bookings


def state(pods: list[JsonObject], claims: list[JsonObject], cards: list[contract.Card] = CARDS) -> Any:
    by_node = cards_by_node(slices_of("gpu1", cards, limits="enforced"))
    return node_state(
        as_announced(node_of(NODE), by_node.get("gpu1")), as_booked(map(PodParser(), pods), claims, by_node)
    )


def test_what_claims_hold_is_not_free() -> None:
    pods = [turned(1, FOUR), turned(2, PAIR), turned(3, SPREAD)]
    claims = [claim(1, FOUR, CARDS[:1]), claim(2, PAIR, [CARDS[0]] * 2), claim(3, SPREAD, CARDS)]
    found = state(pods, claims)
    assert (found.free, found.total_free, found.allocatable) == ({0: 2, 1: 12}, 14, 32)
    assert found.booked_units(0, "default") == 14 and found.memory_limit == "enforced"
    # A claim without a pod holds its memory, too.
    assert state(pods[1:], claims).free == found.free
    by_node = cards_by_node(slices_of("gpu1", CARDS))
    (booked,) = [pod_state(pods[1], booked=pod) for pod in as_booked(map(PodParser(), pods[1:2]), claims[1:2], by_node)]
    assert (booked.index, booked.assigned, booked.annotations[contract.POD_UNITS]) == (0, True, "6")
    # One that isn't allocated, or is another pod's, is no booking.
    for other in (claim(1, FOUR), claim(1, FOUR, CARDS[:1], pods={"other": "uid"})):
        bare = pod_state(pods[0], booked=as_booked(map(PodParser(), pods[:1]), [other], by_node)[0])
        assert bare.index is None


# --------------------------------------------------------------------------- the suites


class Kubelet:
    """Runs what is bound to the node, and ends what is deleted."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._stopped = threading.Event()
        self.wrong = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.3):
            # The server may be slow for a moment.
            with contextlib.suppress(OSError):
                self._pass()

    def _pass(self) -> None:
        for item in self.server.request("GET", "/api/v1/pods")["items"]:
            space, name = item["metadata"]["namespace"], item["metadata"]["name"]
            path = f"/api/v1/namespaces/{space}/pods/{name}"
            if item["metadata"].get("deletionTimestamp"):
                # A claim is freed when its pod has ended; the pod, which owns it, goes after it.
                self.server.ask("PATCH", f"{path}/status", {"status": {"phase": "Succeeded"}}, MERGE)
                self.server.ask("DELETE", path, {"gracePeriodSeconds": 0})
            elif item["spec"].get("nodeName") and item["status"]["phase"] == "Pending":
                containers = [
                    {"name": each["name"], "image": "i", "imageID": "", "ready": True, "restartCount": 0}
                    | {"state": {"running": {}}}
                    for each in item["spec"]["containers"]
                ]
                status = {"phase": "Running", "containerStatuses": containers}
                self.server.ask("PATCH", f"{path}/status", {"status": status}, MERGE)

    def execute(self, space: str, pod: str, container: str, argv: Any) -> str:
        """``ls /dev`` in a container: the card of its claim, whose number is another than its index."""
        assert list(argv) == ["ls", "/dev"]
        found = self.server.request("GET", f"/api/v1/namespaces/{space}/pods/{pod}")
        (made,) = found["status"]["resourceClaimStatuses"]
        path = f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims/{made['resourceClaimName']}"
        results = self.server.request("GET", path)["status"]["allocation"]["devices"]["results"]
        (device,) = {result["device"] for result in results}
        number = [card.uuid.lower() for card in CARDS].index(device) + 3
        return f"null\nnvidiactl\nnvidia{number if container != self.wrong else 9}\n"


@pytest.fixture(scope="module")
def kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    with dra_server() as server, scheduling(server), controllers(server, "namespace", "garbage-collector"):
        folder: Path = tmp_path_factory.mktemp("account")
        served = Templates(
            connect(server.url, str(account(server, folder))), namespace=NAMESPACE, registry=CollectorRegistry()
        )
        served.start()
        server.request("POST", "/api/v1/nodes", {"metadata": NODE["metadata"]})
        status = {"capacity": {"cpu": "8", "memory": "8Gi", "pods": "110"}, **NODE["status"]}
        server.request("PATCH", "/api/v1/nodes/gpu1/status", {"status": status}, MERGE)
        server.request("PATCH", "/api/v1/nodes/gpu1", {"spec": {"taints": None}}, MERGE)
        for one in slices_of("gpu1", CARDS):
            body = {**one, "metadata": {"name": one["metadata"]["name"]}}
            server.request("POST", "/apis/resource.k8s.io/v1/resourceslices", body)
        made = Kubelet(server)
        with made.running():
            yield made
        assert served.stop()


def suite(kubelet: Kubelet, name: str) -> JsonObject:
    options = Options(suite=name, image="i", timeout=60)
    module = types.SimpleNamespace(params={"kubeconfig": str(kubelet.server.kubeconfig)}, no_log_values=set())
    return dict(run(RealKube.of_module(module), kubelet.execute, options, False, Waiting(60, 0.5)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["workloads", "canary"])
def test_a_cluster_of_claims_passes(kubelet: Kubelet, name: str) -> None:
    """Packed to the last unit and refused beyond it, the node's cards alone, several containers, and all removed."""
    kubelet.wrong = ""
    found = suite(kubelet, name)
    assert found["acceptance"]["result"] == "PASS", found["table"]
    skipped = [step["id"] for step in found["acceptance"]["steps"] if step["result"] == "skipped"]
    assert skipped == (["Y5"] if name == "canary" else []), found["table"]
    assert "cannot allocate all claims" in found["table"]
    assert kubelet.server.ask("GET", f"/api/v1/namespaces/{NAMESPACES[name]}")[0] == 404
    assert kubelet.server.request("GET", "/apis/resource.k8s.io/v1/resourceclaims")["items"] == []


@pytest.mark.long
def test_a_container_with_another_card_fails(kubelet: Kubelet) -> None:
    kubelet.wrong = "c1"
    steps = {step["id"]: step["result"] for step in suite(kubelet, "workloads")["acceptance"]["steps"]}
    assert steps["W6"] == "FAIL" and steps["W5"] == "PASS"
