# SPDX-License-Identifier: GPL-3.0-or-later
"""Two extenders as processes, two schedulers whose leadership changes, a real API server behind a network that fails.

An auditor watches the API server itself and adds up each card at every event: no card ever exceeds its size.
KUBEGPU_LONG=1 makes it 10,000 pods.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpushare
import pytest
import yaml
from api_double import make_node
from chaos_proxy import ChaosProxy
from gpushare.shared._contracts import gpushare as contract
from real_apiserver import ApiServer, Missing
from service_account import service_account

NODES = {"gpu1": (16, 16), "gpu2": (16, 16), "gpu3": (24,), "gpu4": (8, 8, 8)}
NAMESPACE = "default"
LATE = (0.6, 2.5)
DISTURBANCES = ("leader", "leader", "leader", "calm", "bad", "worse", "pause", "pause", "kill")
HERE = Path(__file__).parent
POD = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
JsonObject = dict[str, Any]


class Direct:
    """A client of the API server itself, with a connection for each thread."""

    def __init__(self, server: ApiServer) -> None:
        config = yaml.safe_load(server.kubeconfig.read_text())
        user = config["users"][0]["user"]
        self.host = server.url.partition("//")[2]
        self.context = ssl.create_default_context(cafile=config["clusters"][0]["cluster"]["certificate-authority"])
        self.context.load_cert_chain(user["client-certificate"], user["client-key"])
        self._local = threading.local()

    def connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self.host, context=self.context, timeout=60)

    def ask(
        self, method: str, path: str, body: JsonObject | None = None, kind: str = "application/json"
    ) -> tuple[int, JsonObject]:
        if not hasattr(self._local, "connection"):
            self._local.connection = self.connection()
        connection = self._local.connection
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


class Auditor:
    """Follows all pods; ``over`` is each card that ever held more than it can, in words."""

    def __init__(self, direct: Direct) -> None:
        self.direct, self.over = direct, list[str]()
        self.pods: dict[str, JsonObject] = {}
        self.bound: set[str] = set()
        self.events = 0
        self.changed = threading.Condition()
        self._used = {name: dict.fromkeys(range(len(cards)), 0) for name, cards in NODES.items()}
        _status, listed = direct.ask("GET", "/api/v1/pods")
        self._version = listed["metadata"]["resourceVersion"]
        self._response: http.client.HTTPResponse | None = None
        self.failed = ""

    def follow(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self.failed = repr(error)

    def _follow(self) -> None:
        connection = self.direct.connection()
        connection.request("GET", f"/api/v1/pods?watch=1&resourceVersion={self._version}&timeoutSeconds=3600")
        response = connection.getresponse()
        assert response.status == 200
        for line in response:
            event = json.loads(line)
            assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event
            with self.changed:
                self._take(event["type"], event["object"])
                self.events += 1
                self.changed.notify_all()

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
            if self._used[node][index] > NODES[node][index]:
                held = self._used[node][index]
                self.over.append(f"{pod['metadata']['name']}: {node} card {index} has {held} of {NODES[node][index]}")

    def look(self) -> tuple[list[JsonObject], list[JsonObject], dict[str, dict[int, int]]]:
        """The pods that aren't bound, those that are, and what is held."""
        with self.changed:
            pods = list(self.pods.values())
            used = {name: dict(cards) for name, cards in self._used.items()}
        waiting = [pod for pod in pods if not contract.pod_node(pod)]
        return waiting, [pod for pod in pods if contract.pod_node(pod)], used


class Process:
    """An extender that can be killed, stopped, and started again."""

    def __init__(self, *options: str) -> None:
        self.options, self.port = options, 0
        self.log: deque[str] = deque(maxlen=20)
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0

    def start(self) -> None:
        self.process = process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "hasty_extender.py"),
                *self.options,
                "--port=0",
                "--log-format=json",
            ],
            env={**os.environ, **POD, "PYTHONPATH": str(Path(gpushare.__file__).parents[1])},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.starts += 1
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

    def ask(self, method: str, path: str, body: JsonObject | None = None, seconds: float = 8.0) -> JsonObject | None:
        """What it answers; None where it doesn't."""
        if not self.port:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, json.dumps(body) if body else None)
            response = connection.getresponse()
            answer = response.read()
            return json.loads(answer) if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


class Cluster:
    """All of it."""

    def __init__(self, server: ApiServer, folder: Path, seed: int, *options: str) -> None:
        self.random = random.Random(seed)
        self.direct = Direct(server)
        self.proxy = ChaosProxy(server.url, self.direct.context, seed, LATE)
        # The token is anybody's: the proxy is the client of the API server.
        account = service_account(folder, self.proxy.url)
        self.extenders = [Process(*options, *account) for _number in range(2)]
        self.ending = threading.Event()
        self.leader = 0
        self.answers: Counter[str] = Counter()
        self.chaos: Counter[str] = Counter()
        for name, sizes in NODES.items():
            self.make_node(name, *sizes)
        self.auditor = Auditor(self.direct)

    def make_node(self, name: str, *sizes: int) -> None:
        node = make_node(name, *sizes)
        assert self.direct.ask("POST", "/api/v1/nodes", {"metadata": node["metadata"]})[0] == 201
        merge = "application/merge-patch+json"
        assert self.direct.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": node["status"]}, merge)[0] == 200

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
            status, answer = self.direct.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
            assert status == 201, answer

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
        """A worker of one scheduler: while it leads, and sometimes when it doesn't any more, it binds pods."""
        chance = random.Random(self.random.random())
        extender = self.extenders[number]
        while not self.ending.wait(chance.uniform(0, 0.02)):
            waiting, _bound, _used = self.auditor.look()
            if not waiting or (self.leader != number and chance.random() < 0.7):
                continue
            # Of the first ones, so that both schedulers often have the same.
            pod = chance.choice(waiting[:6])
            body = {"Pod": pod, "NodeNames": list(NODES)}
            answer = extender.ask("POST", "/gpushare-scheduler/filter", body)
            if not answer or not answer.get("NodeNames"):
                continue
            metadata = pod["metadata"]
            wanted = {"PodName": metadata["name"], "PodNamespace": NAMESPACE, "PodUID": metadata["uid"]}
            wanted["Node"] = chance.choice(answer["NodeNames"])
            bound = extender.ask("POST", "/gpushare-scheduler/bind", wanted)
            self.answers["none" if bound is None else "refused" if bound["Error"] else "bound"] += 1

    def reap(self) -> None:
        """Pods end, the more the fuller the cards are."""
        chance = random.Random(self.random.random())
        room = sum(sum(cards) for cards in NODES.values())
        while not self.ending.wait(0.02):
            _waiting, bound, used = self.auditor.look()
            full = sum(sum(cards.values()) for cards in used.values()) / room
            if bound and chance.random() < full:
                name = chance.choice(bound)["metadata"]["name"]
                body = {"gracePeriodSeconds": 0}
                self.direct.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", body)

    def disturb(self) -> None:
        """Leaders change, extenders are killed and paused, the API has good times and bad ones."""
        chance, left = random.Random(self.random.random()), list[str]()
        while not self.ending.wait(chance.uniform(0.3, 1.2)):
            extender = chance.choice(self.extenders)
            # All of them in any order, and again: of those chosen one by one, a run may lack one.
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

    def agree(self, seconds: float) -> str:
        """Once all is quiet, each extender knows what the API knows; what doesn't fit after so many seconds."""
        self.proxy.rate, end, words = 0.0, time.monotonic() + seconds, ""
        while time.monotonic() < end:
            words = ""
            for number, extender in enumerate(self.extenders):
                answer = extender.ask("GET", "/gpushare-scheduler/inspect")
                _waiting, _bound, used = self.auditor.look()
                seen = {
                    node["name"]: {card["id"]: card["usedGPU"] for card in node["devs"]}
                    for node in (answer or {"nodes": []})["nodes"]
                }
                if seen != used:
                    words += f"extender {number} has {seen}, the API {used}; its log: {list(extender.log)}; "
            if not words:
                return ""
            time.sleep(0.2)
        return words


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    try:
        fresh = ApiServer()
    except Missing as missing:
        pytest.skip(str(missing))
    with fresh as running:
        yield running


@pytest.fixture
def build(server: ApiServer, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes a cluster, by seed and options; what it leaves behind is cleared for who comes next."""
    made: list[Cluster] = []

    def build(seed: int, *options: str) -> Cluster:
        made.append(Cluster(server, tmp_path, seed, *options))
        return made[-1]

    yield build
    for cluster in made:
        clear(cluster)


def clear(cluster: Cluster) -> None:
    direct, body = cluster.direct, {"gracePeriodSeconds": 0}
    for pod in direct.ask("GET", "/api/v1/pods")[1]["items"]:
        direct.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", body)
    for kind in ("/api/v1/nodes", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"):
        for one in direct.ask("GET", kind)[1]["items"]:
            direct.ask("DELETE", f"{kind}/{one['metadata']['name']}")


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
            waiting = len(auditor.look()[0])
            if made < pods and waiting < 30:
                cluster.make_pods(made, min(50, pods - made))
                made = min(pods, made + 50)
            time.sleep(0.1)
        took = time.monotonic() - began
        cluster.ending.set()
        # A process that was killed last starts anew, and its mirrors wait up to 12 s between two attempts.
        disagreement = "" if auditor.over else cluster.agree(90)
    facts = f"{took:.0f} s, {auditor.events} events, {cluster.answers}, {cluster.chaos}, {cluster.proxy.done}"
    print(facts)
    assert not auditor.failed, auditor.failed
    assert not auditor.over, (auditor.over[:5], facts)
    assert len(auditor.bound) == pods
    assert min(cluster.chaos[what] for what in ("leader", "pause", "kill", "worse")) > 0, facts
    assert min(cluster.proxy.done[what] for what in ("409", "429", "500", "500 after", "slow", "dropped after")) > 0
    assert not disagreement, disagreement


@pytest.mark.long
def test_fault_12_the_audit_finds_double_bookings(build: Callable[..., Cluster]) -> None:
    """Without compare-and-swap the ledger doesn't prevent them, and the audit reports that.

    Long: it tests the test above.
    """
    cluster = build(1, "--without-compare-and-swap")
    auditor, made, end = cluster.auditor, 0, time.monotonic() + 90
    with cluster.running():
        while not auditor.over and time.monotonic() < end:
            assert not auditor.failed, auditor.failed
            if len(auditor.look()[0]) < 30:
                cluster.make_pods(made, 50)
                made += 50
            time.sleep(0.05)
    assert auditor.over, f"not found: {len(auditor.bound)} pods bound, {cluster.answers}"


def test_the_real_api_server_takes_the_pods_version_as_a_precondition(server: ApiServer) -> None:
    """What the fence is made of: a Binding of a version that is gone is refused; of the right one it is taken."""
    server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", bare("fenced"))
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/fenced"
    old = server.request("GET", path)["metadata"]
    mark = {"metadata": {"annotations": {contract.POD_FENCED: "1"}, "resourceVersion": old["resourceVersion"]}}
    merge = "application/merge-patch+json"
    assert server.ask("PATCH", path, mark, merge)[0] == 200
    assert server.ask("PATCH", path, mark, merge)[0] == 409, "the fence is put up once for a version"
    binding = {
        "metadata": {"name": "fenced", "uid": old["uid"], "resourceVersion": old["resourceVersion"]},
        "target": {"kind": "Node", "name": "somewhere"},
    }
    status, words = server.ask("POST", f"{path}/binding", binding)
    assert status == 409 and "ResourceVersion" in words
    assert "nodeName" not in server.request("GET", path)["spec"]
    binding["metadata"]["resourceVersion"] = server.request("GET", path)["metadata"]["resourceVersion"]
    binding["metadata"]["annotations"] = {contract.POD_INDEX: "0"}
    assert server.ask("POST", f"{path}/binding", binding)[0] == 201
    assert server.request("GET", path)["metadata"]["annotations"][contract.POD_INDEX] == "0"
    server.ask("DELETE", path, {"gracePeriodSeconds": 0})


def bare(name: str) -> JsonObject:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "none"}]}}


def test_the_real_api_server_keeps_a_lease_as_the_ledger_needs_it(server: ApiServer) -> None:
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
    lease = {"metadata": {"name": "register"}, "spec": {"holderIdentity": "one"}}
    first = server.request("POST", path, lease)
    assert server.ask("POST", path, lease)[0] == 409
    first["spec"]["holderIdentity"] = "two"
    second = server.request("PUT", f"{path}/register", first)
    assert second["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    assert server.ask("PUT", f"{path}/register", first)[0] == 409, "of a version that is gone"
    assert server.ask("DELETE", f"{path}/register")[0] == 200
    assert server.ask("PUT", f"{path}/register", second)[0] in (404, 409), "of one that was deleted"
    again = server.request("POST", path, lease)
    second["metadata"]["resourceVersion"] = again["metadata"]["resourceVersion"]
    assert server.ask("PUT", f"{path}/register", second)[0] == 409, "of another one of that name"
    server.ask("DELETE", f"{path}/register")
