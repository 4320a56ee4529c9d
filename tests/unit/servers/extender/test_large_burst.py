# SPDX-License-Identifier: GPL-3.0-or-later
"""A burst of pods on 1,000 nodes of a real API server, in which the leading extender is killed."""

from __future__ import annotations

import json
import queue
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from api_double import make_node
from extender_kit import bind_request, eventually
from gpushare.shared._contracts import gpushare as contract
from real_apiserver import MERGE, ApiServer, own_api_server
from test_double_booking import PODS, Auditor, Process

SIZE, COUNT, BURST = 4, 1000, 2000
NODES = {f"gpu-node-{number:04d}": (SIZE,) for number in range(COUNT)}
# Bound when the leader is killed; from then on the other one has this time until it binds at full rate.
KILLED_AT, TAKEOVER_SECONDS, RATE = 600, 5.0, 100.0
LIMIT = 180.0
# Lists of pods, and nothing else.
POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, verbs: [list], resources: [{group: "", resources: [pods]}]}
- {level: None}
"""


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[tuple[ApiServer, Path]]:
    """A real API server, and the file in which it records each list of pods."""
    policy, log = tmp_path / "policy.yaml", tmp_path / "audit.log"
    policy.write_text(POLICY)
    with own_api_server(f"--audit-policy-file={policy}", f"--audit-log-path={log}") as server:
        yield server, log


def lists(log: Path) -> list[str]:
    """The extenders' lists of all namespaces' pods so far; that of one name, before a watch, isn't one."""
    events = map(json.loads, log.read_text().splitlines())
    made = [event["requestURI"] for event in events if event.get("userAgent", "").startswith("gpushare/")]
    return [uri for uri in made if uri.startswith("/api/v1/pods?") and "labelSelector" not in uri]


class Burst:
    """Threads that ask for a pod's nodes and bind it, as a scheduler, at the extender that leads now."""

    def __init__(self, leading: list[Process]) -> None:
        self.leading = leading
        self.waiting: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._schedule, args=(number,), daemon=True) for number in range(16)]

    def _schedule(self, seed: int) -> None:
        chance, names = random.Random(seed), list(NODES)
        while not self.ended.is_set():
            try:
                pod = self.waiting.get(timeout=0.2)
            except queue.Empty:
                continue
            extender = self.leading[0]
            # As kube-scheduler: 100 of a large cluster's nodes.
            body = {"Pod": pod, "NodeNames": chance.sample(names, 100)}
            answer = extender.ask("POST", "/gpushare-scheduler/filter", body) or {}
            fitting = answer.get("NodeNames")
            node = chance.choice(fitting) if fitting else ""
            bound = node and extender.ask("POST", "/gpushare-scheduler/bind", bind_request(pod, node))
            if not bound or bound["Error"]:
                time.sleep(0.05)
                self.waiting.put(pod)


@pytest.mark.long
def test_fault_12_a_killed_leader_in_a_burst_costs_seconds(audited: tuple[ApiServer, Path], tmp_path: Path) -> None:
    """Nothing is booked twice, no bind lists pods, and the other extender binds at full rate within seconds."""
    server, log = audited
    account = tmp_path / "account"
    server.service_account(account)
    options = [f"--api-server={server.url}", f"--service-account={account}"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: make(server, name), NODES))
        auditor = Auditor(server, NODES)
        pods = list(pool.map(lambda number: create(server, number), range(BURST)))
    extenders = [Process(*options) for _number in range(2)]
    burst = Burst([extenders[0]])
    try:
        for extender in extenders:
            extender.start()
        for extender in extenders:
            eventually(lambda extender=extender: extender.ask("GET", "/gpushare-scheduler/inspect"), 60)
        for pod in pods:
            burst.waiting.put(pod)
        for thread in [threading.Thread(target=auditor.follow, daemon=True), *burst.threads]:
            thread.start()
        eventually(lambda: auditor.bound or auditor.failed, LIMIT)
        # The first bind of a cluster has no Lease that names a version.
        before = len(lists(log))
        eventually(lambda: len(auditor.bound) >= KILLED_AT or auditor.failed, LIMIT)
        extenders[0].signal(signal.SIGKILL)
        extenders[0].port = 0
        burst.leading[0] = extenders[1]
        time.sleep(TAKEOVER_SECONDS)
        began, bound = time.monotonic(), len(auditor.bound)
        eventually(lambda: len(auditor.bound) == BURST or auditor.over or auditor.failed, LIMIT)
        rate = (BURST - bound) / (time.monotonic() - began)
        print(f"{bound} bound {TAKEOVER_SECONDS:.0f} s after the kill, then {rate:.0f} binds a second")
    finally:
        burst.ended.set()
        for extender in extenders:
            if extender.process is not None:
                extender.kill()
    assert not auditor.failed, auditor.failed
    assert not auditor.over, auditor.over[:5]
    # Without the burst's last pods, which wait for their turn after a refusal.
    assert bound > BURST - 100 or rate >= RATE
    assert before and lists(log)[before:] == []


def make(server: ApiServer, name: str) -> None:
    node = make_node(name, SIZE)
    server.request("POST", "/api/v1/nodes", {"metadata": node["metadata"]})
    server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": node["status"]}, MERGE)


def create(server: ApiServer, number: int) -> dict[str, object]:
    limits = {contract.RESOURCE_MEMORY: str(1 + number % 2)}
    spec = {"containers": [{"name": "c", "image": "none", "resources": {"limits": limits}}]}
    return server.request("POST", PODS, {"metadata": {"name": f"p{number}"}, "spec": spec})
