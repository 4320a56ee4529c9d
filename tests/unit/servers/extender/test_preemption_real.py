# SPDX-License-Identifier: GPL-3.0-or-later
"""Preemption by card with a real kube-scheduler, API server and Eviction API; kubelet is a stand-in.

The lab has a fragmented node, with a real kubelet.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from extender_kit import Client, eventually
from gpushare.api.client import connect
from gpushare.extender.command import Extender
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from gpushare_objects import rendered
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, ApiServer, Refused

PODS = "/api/v1/namespaces/default/pods"
NODE = "gpu1"
PRIORITIES = {"low": 100, "middle": 200, "raised": 300, "high": 1000}


@pytest.fixture(scope="module")
def server(own_server: ApiServer) -> ApiServer:
    """The API server, with priority classes and a node of two cards."""
    server = own_server
    # Only with these do extenders exchange claims.
    server.apply(*rendered("rights", __gpushare_cluster={"version": "v1.36.0"}))
    for name, value in PRIORITIES.items():
        server.request(
            "POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": value}
        )
    cards = [contract.Card(n, f"GPU-0000000{n}-0000-0000-0000-000000000000", n, 16384, 16) for n in range(2)]
    annotations = {contract.NODE_CARDS: contract.cards_to_annotation(cards)}
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": NODE, "annotations": annotations}})
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", contract.RESOURCE_MEMORY: "32"}
    ready = {"type": "Ready", "status": "True", "reason": "t", "message": "t"}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    server.request("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, MERGE)
    # Every new node has the taint of one that isn't ready.
    server.request("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": None}}, MERGE)
    return server


class Kubelet:
    """A stand-in: pods run as soon as they are bound, and are deleted as soon as they are terminating."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped.wait(0.1):
            with contextlib.suppress(Refused, OSError):
                self._tick()

    def _tick(self) -> None:
        for pod in self.server.request("GET", PODS)["items"]:
            path = f"{PODS}/{pod['metadata']['name']}"
            if contract.terminating(pod):
                self.server.request("DELETE", f"{path}?gracePeriodSeconds=0")
            elif contract.pod_node(pod) and pod["status"]["phase"] == "Pending":
                ready = {"type": "Ready", "status": "True"}
                running = {"status": {"phase": "Running", "conditions": [ready]}}
                self.server.request("PATCH", f"{path}/status", running, "application/strategic-merge-patch+json")


def clear(server: ApiServer) -> None:
    """Delete all pods."""
    for name in there(server):
        with contextlib.suppress(Refused):
            server.request("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")


def start_extender(server: ApiServer, stack: contextlib.ExitStack) -> Client:
    """Start an extender with a service account that may do everything, one for all tests of this server."""
    folder = server.folder / "account"
    if not folder.exists():
        server.service_account(folder)
    kube = connect(server.url, str(folder))
    extender = Extender(kube, port=0, registry=CollectorRegistry(), namespace="default")
    extender.start()
    stack.callback(extender.stop)
    eventually(lambda: extender.unready() is None, 30)
    return Client(extender)


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Start a scheduler with the extender; all pods go afterwards."""
    stack = contextlib.ExitStack()

    def start(preempt_verb: bool = True) -> None:
        extender = start_extender(server, stack).extender
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(server.kubeconfig)},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 1,
            "extenders": [
                {
                    "urlPrefix": f"http://127.0.0.1:{extender.service.port}/gpushare-scheduler",
                    "filterVerb": "filter",
                    "bindVerb": "bind",
                    **({"preemptVerb": "preempt"} if preempt_verb else {}),
                    "nodeCacheCapable": True,
                    "managedResources": [{"name": contract.RESOURCE_MEMORY, "ignoredByScheduler": False}],
                    "ignorable": False,
                }
            ],
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        log = stack.enter_context((tmp_path / "scheduler.log").open("wb"))
        command = [server.programs["kube-scheduler"], f"--config={tmp_path}/config.yaml", "--secure-port=0"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        stack.callback(Kubelet(server).stop)

    yield start
    stack.close()
    clear(server)
    with contextlib.suppress(Refused):
        server.request("DELETE", "/apis/policy/v1/namespaces/default/poddisruptionbudgets/web")


def make(server: ApiServer, name: str, units: int, priority: str, card: int | None = None, **labels: str) -> JsonObject:
    """A pod for the scheduler, or with a card one that runs on it."""
    spec: JsonObject = {
        "priorityClassName": priority,
        "terminationGracePeriodSeconds": 30,
        "containers": [{"name": "c", "image": "i", "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}}}],
    }
    metadata: JsonObject = {"name": name, "labels": labels}
    if card is not None:
        spec["nodeName"] = NODE
        metadata["annotations"] = {contract.POD_INDEX: str(card), contract.POD_ASSIGNED: "true"}
    return server.request("POST", PODS, {"metadata": metadata, "spec": spec})  # type: ignore[no-any-return]


def there(server: ApiServer) -> dict[str, JsonObject]:
    return {pod["metadata"]["name"]: pod for pod in server.request("GET", PODS)["items"]}


def card_of(server: ApiServer, name: str) -> int | None:
    pod = there(server)[name]
    held = contract.booking(pod)
    return held.index if contract.pod_node(pod) and held is not None else None


@pytest.mark.parametrize("preempt_verb", [True, False], ids=["preemptVerb", "without"])
def test_the_schedulers_own_preemption_gets_the_pod_its_memory(
    server: ApiServer, cluster: Callable[..., None], preempt_verb: bool
) -> None:
    """By the total, the two pods of the lowest priority would be evicted, which are on two cards.

    preemptVerb evicts the pods of one card instead.
    """
    for name, card, priority in (("a", 0, "low"), ("b", 0, "raised"), ("c", 1, "middle"), ("d", 1, "middle")):
        make(server, name, 8, priority, card)
    cluster(preempt_verb)
    make(server, "high", 16, "high")
    eventually(lambda: card_of(server, "high") is not None, 60)
    if preempt_verb:
        assert card_of(server, "high") == 1
        assert set(there(server)) == {"a", "b", "high"}
        events = server.request("GET", "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=c")["items"]
        preempted = [one.get("message") or one.get("note") for one in events if one["reason"] == "Preempted"]
        assert any("GPU memory" not in str(text) for text in preempted), "evicted by kube-scheduler itself"


def test_a_disruption_budget_is_respected(server: ApiServer, cluster: Callable[..., None]) -> None:
    make(server, "x", 9, "low", 0, app="web")
    make(server, "y", 9, "middle", 1)
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    made = server.request("POST", budgets, {"metadata": {"name": "web"}, "spec": spec})
    status = {"disruptionsAllowed": 0, "observedGeneration": made["metadata"]["generation"]}
    status |= dict.fromkeys(("currentHealthy", "desiredHealthy", "expectedPods"), 1)
    server.request("PATCH", f"{budgets}/web/status", {"status": status}, MERGE)
    cluster()
    eventually(lambda: there(server)["x"]["status"]["phase"] == "Running", 20)
    make(server, "high", 10, "high")
    eventually(lambda: card_of(server, "high") == 1, 30)
    assert set(there(server)) == {"x", "high"}
    assert not contract.terminating(there(server)["x"])
