# SPDX-License-Identifier: GPL-3.0-or-later
"""Two extenders as processes, two schedulers whose leadership changes, a real API server behind a failing network.

An auditor watches the API server itself and adds up each card at every event: no card ever exceeds its size.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from api_double import make_node
from chaos_proxy import ChaosProxy
from extender_kit import bind_request, environment
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from real_apiserver import MERGE, ApiServer
from service_account import service_account

NODES = MappingProxyType({"gpu1": (16, 16), "gpu2": (16, 16), "gpu3": (24,), "gpu4": (8, 8, 8)})
PODS = "/api/v1/namespaces/default/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
LATE = (0.6, 2.5)
DISTURBANCES = ("leader", "leader", "leader", "calm", "bad", "worse", "pause", "pause", "kill")
HERE = Path(__file__).parent


class Auditor:
    """Follows all pods; ``over`` has a message for each card that ever held more than its size."""

    def __init__(self, server: ApiServer, nodes: Mapping[str, tuple[int, ...]] = NODES) -> None:
        self.server, self.nodes, self.over = server, nodes, list[str]()
        self.pods: dict[str, JsonObject] = {}
        self.bound: set[str] = set()
        self.events = 0
        self.lock = threading.Lock()
        self._used = {name: dict.fromkeys(range(len(cards)), 0) for name, cards in nodes.items()}
        self.failed = ""
        listed = server.request("GET", "/api/v1/pods")
        self._version = listed["metadata"]["resourceVersion"]
        for pod in listed["items"]:
            self._take("ADDED", pod)

    def follow(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self.failed = repr(error)

    def _follow(self) -> None:
        host, context = self.server.url.partition("//")[2], self.server._context
        # Without a timeout: once every pod is bound nothing happens, for as long as the extenders are compared.
        connection = http.client.HTTPSConnection(host, context=context)
        connection.request("GET", f"/api/v1/pods?watch=1&resourceVersion={self._version}&timeoutSeconds=3600")
        response = connection.getresponse()
        assert response.status == 200
        for line in response:
            event = json.loads(line)
            assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event
            with self.lock:
                self._take(event["type"], event["object"])
                self.events += 1
        # The API server ends the watch of a client that doesn't keep up.
        self.failed = "the watch has ended"

    def _take(self, kind: str, pod: JsonObject) -> None:
        uid = contract.pod_uid(pod)
        before = self.pods.pop(uid, None)
        if before is not None:
            self._add(before, -1)
        if kind != "DELETED":
            self.pods[uid] = pod
            self._add(pod, 1)

    def _add(self, pod: JsonObject, sign: int) -> None:
        node = contract.pod_node(pod)
        if not node:
            return
        self.bound.add(pod["metadata"]["name"])
        shares = contract.shares(pod)
        assert shares, f"{pod['metadata']['name']} is bound without a card"
        for index, units in shares.items():
            self._used[node][index] += sign * units
            held, size = self._used[node][index], self.nodes[node][index]
            if held > size:
                self.over.append(f"{pod['metadata']['name']}: {node} card {index} has {held} of {size}")

    def snapshot(self) -> tuple[list[JsonObject], list[JsonObject], dict[str, dict[int, int]]]:
        """The pods that aren't bound, those that are, and the used units by node and card."""
        with self.lock:
            pods = list(self.pods.values())
            used = {name: dict(cards) for name, cards in self._used.items()}
        waiting = [pod for pod in pods if not contract.pod_node(pod)]
        return waiting, [pod for pod in pods if contract.pod_node(pod)], used


class Process:
    """An extender that can be killed, stopped, and started again; ``program`` are Python's arguments."""

    program: tuple[str, ...] = (str(HERE / "hasty_extender.py"),)

    def __init__(self, *options: str) -> None:
        self.options, self.port = options, 0
        self.log: deque[str] = deque(maxlen=20)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, *self.program, *self.options, "--port=0", "--log-format=json"]
        self.process = process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.log.append(line.strip())
            if '"port"' in line and process is self.process:
                self.port = json.loads(line)["port"]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.port = 0

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ask(self, method: str, path: str, body: JsonObject | None = None) -> JsonObject | None:
        """The answer; None without one."""
        if not self.port:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=8)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request(method, path, json.dumps(body) if body else None)
            response = connection.getresponse()
            answer = response.read()
            return json.loads(answer) if response.status == 200 else None
        return None


class Cluster:
    """The API server, two extenders, two schedulers, and everything that disturbs them."""

    def __init__(self, server: ApiServer, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = server
        self.proxy = ChaosProxy(server.url, server._context, seed, LATE)
        # Any token will do: the proxy is the client of the API server.
        account = service_account(folder, self.proxy.url)
        self.extenders = [Process(*account) for _number in range(2)]
        self.ending = threading.Event()
        self.leader = 0
        self.answers: Counter[str] = Counter()
        self.chaos: Counter[str] = Counter()
        for name, sizes in NODES.items():
            self.make_node(name, *sizes)
        self.auditor = Auditor(server)

    def make_node(self, name: str, *sizes: int) -> None:
        node = make_node(name, *sizes)
        self.server.request("POST", "/api/v1/nodes", {"metadata": node["metadata"]})
        self.server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": node["status"]}, MERGE)

    def make_pods(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            units, annotations = self.random.randint(1, 6), {}
            if number % 10 == 0:
                units, annotations = 2 * units, {contract.POD_CARD_COUNT: "2"}
            limits = {contract.RESOURCE_MEMORY: str(units)}
            pod = {
                "metadata": {"name": f"p{number}", "annotations": annotations},
                "spec": {"containers": [{"name": "c", "image": "none", "resources": {"limits": limits}}]},
            }
            self.server.request("POST", PODS, pod)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.proxy:
            for extender in self.extenders:
                extender.start()
            threads = [threading.Thread(target=self.auditor.follow, daemon=True)]
            threads += [threading.Thread(target=self.schedule, args=(number % 2,)) for number in range(8)]
            threads += [threading.Thread(target=self.reap), threading.Thread(target=self.disturb)]
            try:
                for thread in threads:
                    thread.start()
                yield
            finally:
                self.ending.set()
                for thread in threads[1:]:
                    thread.join(20)
                for extender in self.extenders:
                    extender.signal(signal.SIGCONT)
                    extender.kill()

    def schedule(self, number: int) -> None:
        """Bind pods as a worker of one scheduler, while it leads and sometimes afterwards."""
        chance = random.Random(self.random.random())
        extender = self.extenders[number]
        while not self.ending.wait(chance.uniform(0, 0.02)):
            waiting, _bound, _used = self.auditor.snapshot()
            if not waiting or (self.leader != number and chance.random() < 0.7):
                continue
            # Of the first ones, so that both schedulers often have the same.
            pod = chance.choice(waiting[:6])
            body = {"Pod": pod, "NodeNames": list(NODES)}
            answer = extender.ask("POST", "/gpushare-scheduler/filter", body)
            if not answer or not answer.get("NodeNames"):
                continue
            bind = bind_request(pod, chance.choice(answer["NodeNames"]))
            bound = extender.ask("POST", "/gpushare-scheduler/bind", bind)
            self.answers["none" if bound is None else "refused" if bound["Error"] else "bound"] += 1

    def reap(self) -> None:
        """Delete pods, the more of them the fuller the cards are."""
        chance = random.Random(self.random.random())
        size = sum(sum(cards) for cards in NODES.values())
        while not self.ending.wait(0.02):
            _waiting, bound, used = self.auditor.snapshot()
            full = sum(sum(cards.values()) for cards in used.values()) / size
            if bound and chance.random() < full:
                name = chance.choice(bound)["metadata"]["name"]
                self.server.ask("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")

    def disturb(self) -> None:
        """Change leaders, kill and pause extenders, and change how often the API fails."""
        chance, left = random.Random(self.random.random()), list[str]()
        while not self.ending.wait(chance.uniform(0.3, 1.2)):
            extender = chance.choice(self.extenders)
            # All of them in any order, and again: if each were chosen by chance, a run might lack one.
            left = left or chance.sample(DISTURBANCES, len(DISTURBANCES))
            what = left.pop()
            self.chaos[what] += 1
            if what == "leader":
                self.leader = 1 - self.leader
            elif what in ("calm", "bad", "worse"):
                self.proxy.rate = {"calm": 0.01, "bad": 0.08, "worse": 0.25}[what]
            elif what == "pause":
                extender.signal(signal.SIGSTOP)
                self.ending.wait(chance.uniform(0.2, 2.5))
                extender.signal(signal.SIGCONT)
            elif what == "kill":
                extender.kill()
                extender.start()
        self.proxy.rate = 0.0

    def disagreement(self, seconds: float) -> str:
        """How an extender's cache differs from the API so many seconds after the last change; empty if it doesn't."""
        self.proxy.rate, end, message = 0.0, time.monotonic() + seconds, "never compared"
        while message and time.monotonic() < end:
            time.sleep(0.2)
            message = ""
            for number, extender in enumerate(self.extenders):
                answer = extender.ask("GET", "/gpushare-scheduler/inspect") or {"nodes": []}
                _waiting, _bound, used = self.auditor.snapshot()
                cache = {
                    node["name"]: {card["id"]: card["usedGPU"] for card in node["devs"]} for node in answer["nodes"]
                }
                if cache != used:
                    message += f"extender {number} has {cache}, the API {used}; its log: {list(extender.log)}; "
        return message


@pytest.fixture
def build(own_server: ApiServer, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make a cluster, by its seed; its objects are deleted afterwards."""
    yield lambda seed: Cluster(own_server, tmp_path, seed)
    for kind in ("/api/v1/nodes", LEASES, PODS):
        for item in own_server.request("GET", kind)["items"]:
            own_server.ask("DELETE", f"{kind}/{item['metadata']['name']}?gracePeriodSeconds=0")


@pytest.mark.parametrize("pods", [300, pytest.param(3000, marks=pytest.mark.long)])
def test_fault_12_no_card_is_ever_over_its_size(build: Callable[..., Cluster], pods: int) -> None:
    cluster = build(pods)
    auditor, made, began = cluster.auditor, 0, time.monotonic()
    limit = began + 90 + pods * 0.3
    with cluster.running():
        while not auditor.over and not auditor.failed:
            if len(auditor.bound) >= pods and all(cluster.chaos[what] for what in DISTURBANCES):
                break
            assert time.monotonic() < limit, f"{len(auditor.bound)} of {pods} bound; {cluster.answers}, {cluster.chaos}"
            waiting = len(auditor.snapshot()[0])
            if made < pods and waiting < 30:
                cluster.make_pods(made, min(50, pods - made))
                made = min(pods, made + 50)
            time.sleep(0.1)
        took = time.monotonic() - began
        cluster.ending.set()
        # A process that was killed last starts anew, and its mirrors wait up to 12 s between two attempts.
        disagreement = "" if auditor.over else cluster.disagreement(90)
    facts = f"{took:.0f} s, {auditor.events} events, {cluster.answers}, {cluster.chaos}, {cluster.proxy.done}"
    print(facts)
    assert not auditor.failed, auditor.failed
    assert not auditor.over, (auditor.over[:5], facts)
    assert len(auditor.bound) == pods
    assert min(cluster.chaos[what] for what in ("leader", "pause", "kill", "worse")) > 0, facts
    assert min(cluster.proxy.done[what] for what in ("409", "429", "500", "500 after", "slow", "dropped after")) > 0
    assert not disagreement, disagreement


def test_the_real_api_server_takes_the_pods_version_as_a_precondition(own_server: ApiServer) -> None:
    """The fence depends on it: a Binding with an old version is refused, and one with the current version accepted."""
    pod = {"metadata": {"name": "fenced"}, "spec": {"containers": [{"name": "c", "image": "none"}]}}
    old = own_server.request("POST", PODS, pod)["metadata"]
    path, version = f"{PODS}/fenced", {"resourceVersion": old["resourceVersion"]}
    fence = {"metadata": {"annotations": {contract.POD_FENCED: "1"}, **version}}
    assert own_server.ask("PATCH", path, fence, MERGE)[0] == 200
    assert own_server.ask("PATCH", path, fence, MERGE)[0] == 409, "one fence for each version"
    metadata = {"name": "fenced", "uid": old["uid"], "annotations": {contract.POD_INDEX: "0"}, **version}
    binding = {"metadata": metadata, "target": {"kind": "Node", "name": "somewhere"}}
    status, text = own_server.ask("POST", f"{path}/binding", binding)
    assert status == 409 and "ResourceVersion" in text
    now = own_server.request("GET", path)
    assert "nodeName" not in now["spec"]
    metadata["resourceVersion"] = now["metadata"]["resourceVersion"]
    assert own_server.ask("POST", f"{path}/binding", binding)[0] == 201
    assert own_server.request("GET", path)["metadata"]["annotations"][contract.POD_INDEX] == "0"
    own_server.ask("DELETE", f"{path}?gracePeriodSeconds=0")


def test_the_real_api_server_keeps_a_lease_as_the_ledger_needs_it(own_server: ApiServer) -> None:
    lease = {"metadata": {"name": "register"}, "spec": {"holderIdentity": "one"}}
    path, first = f"{LEASES}/register", own_server.request("POST", LEASES, lease)
    assert own_server.ask("POST", LEASES, lease)[0] == 409
    first["spec"]["holderIdentity"] = "two"
    second = own_server.request("PUT", path, first)
    assert second["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    assert own_server.ask("PUT", path, first)[0] == 409, "an old version"
    assert own_server.ask("DELETE", path)[0] == 200
    assert own_server.ask("PUT", path, second)[0] in (404, 409), "a deleted Lease"
    again = own_server.request("POST", LEASES, lease)
    second["metadata"]["resourceVersion"] = again["metadata"]["resourceVersion"]
    assert own_server.ask("PUT", path, second)[0] == 409, "another Lease of that name"
    own_server.ask("DELETE", path)
