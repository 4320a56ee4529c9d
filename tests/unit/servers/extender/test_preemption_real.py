# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof of the extender, and preemption by card, with a real kube-scheduler and API server; kubelet is a stand-in.

The lab has a fragmented node, with a real kubelet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import threading
from collections.abc import Iterator

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._host import http_probe
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.apply import REQUEST, problem
from extender_kit import eventually
from gpushare.api.client import connect
from gpushare.extender.command import Extender
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from gpushare_objects import rendered
from ports import free_port
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


@dataclasses.dataclass(frozen=True)
class Proof:
    """What role scheduler's request said of the extender before it was started and after, and a pod's node then."""

    before: str
    after: str
    node: str


@pytest.fixture(scope="module")
def proof(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    """Start a scheduler, and its extender only once a pod has been refused for the lack of it."""
    folder, port = tmp_path_factory.mktemp("scheduler"), free_port()
    url = f"http://127.0.0.1:{port}{contract.EXTENDER_PREFIX}"
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(server.kubeconfig)},
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 1,
        "extenders": [
            {
                "urlPrefix": url,
                "filterVerb": "filter",
                "bindVerb": "bind",
                "preemptVerb": "preempt",
                "nodeCacheCapable": True,
                "managedResources": [{"name": contract.RESOURCE_MEMORY, "ignoredByScheduler": False}],
                "ignorable": False,
            }
        ],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [server.programs["kube-scheduler"], f"--config={folder}/config.yaml", "--secure-port=0"]

    def asked() -> str:
        return problem(http_probe.post(f"{url}/filter", REQUEST))[0]

    def refused() -> bool:
        conditions = there(server)["share"]["status"].get("conditions") or [{}]
        return "connection refused" in str(conditions[0].get("message", ""))

    kube = connect(server.url, str(server.service_account(server.folder / "account")))
    with (folder / "log").open("wb") as log, contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        make(server, "share", 1, "low")
        eventually(refused, 60)
        before = asked()
        extender = Extender(kube, port=port, registry=CollectorRegistry(), namespace="default")
        extender.start()
        stack.callback(extender.stop)
        eventually(lambda: extender.unready() is None, 60)
        after = asked()
        node = eventually(lambda: contract.pod_node(there(server)["share"]), 60)
        stack.callback(Kubelet(server).stop)
        yield Proof(before, after, node)


@pytest.fixture(autouse=True)
def no_pods(server: ApiServer, proof: Proof) -> None:
    """Each test begins without pods of the one before."""
    for name in there(server):
        with contextlib.suppress(Refused):
            server.request("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")


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


def test_kube_scheduler_places_a_share_only_where_the_proof_succeeds(proof: Proof) -> None:
    assert proof == Proof("refused", "", NODE)


def test_the_schedulers_own_preemption_gets_the_pod_its_memory(server: ApiServer) -> None:
    """By the total, the two pods of the lowest priority would be evicted, which are on two cards.

    preemptVerb evicts the pods of one card instead.
    """
    for name, card, priority in (("a", 0, "low"), ("b", 0, "raised"), ("c", 1, "middle"), ("d", 1, "middle")):
        make(server, name, 8, priority, card)
    make(server, "high", 16, "high")
    eventually(lambda: card_of(server, "high") is not None, 60)
    assert card_of(server, "high") == 1
    assert set(there(server)) == {"a", "b", "high"}
    events = server.request("GET", "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=c")["items"]
    preempted = [event.get("message") or event.get("note") for event in events if event["reason"] == "Preempted"]
    assert any("GPU memory" not in str(text) for text in preempted), "evicted by kube-scheduler itself"


def test_a_disruption_budget_is_respected(server: ApiServer) -> None:
    make(server, "x", 9, "low", 0, app="web")
    make(server, "y", 9, "middle", 1)
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    made = server.request("POST", budgets, {"metadata": {"name": "web"}, "spec": spec})
    status = {"disruptionsAllowed": 0, "observedGeneration": made["metadata"]["generation"]}
    status |= dict.fromkeys(("currentHealthy", "desiredHealthy", "expectedPods"), 1)
    server.request("PATCH", f"{budgets}/web/status", {"status": status}, MERGE)
    eventually(lambda: there(server)["x"]["status"]["phase"] == "Running", 20)
    make(server, "high", 10, "high")
    eventually(lambda: card_of(server, "high") == 1, 30)
    assert set(there(server)) == {"x", "high"}
    assert not contract.terminating(there(server)["x"])
