# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's filter on a large cluster: latency and memory with 1,000 nodes of 8 cards and 20,000 pods.

The extender runs in its own process with an API server of this script, so that its memory is measured alone. Requests
are those of kube-scheduler, over HTTP and without HTTP in this process. Three loads of ordinary pods: every node has
free units, no node has (the answer has a reason for each of the 1,000), half of them have. Three others: a pod of two
cards, one that requests a model, and one of a high priority, which may preempt others. Last, the time to find the
victims of a preemption on 100 nodes, as many as kube-scheduler offers. Latencies are wall time, so run it on a quiet
machine; "cpu" is the CPU time of a request, which other load hardly affects.

    python bench/extender_filter.py [--nodes N] [--cards N] [--pods N] [--requests N]
"""

from __future__ import annotations

import argparse
import functools
import gc
import http.client
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from processes import JsonObject, Server, check_filtered, cpu, memory, service_account, watch_without_events  # isort: skip
from gpushare.extender.bind import Outcome
from gpushare.extender.preemption import Preemption, Victims
from gpushare.extender.routes import Api, Metrics
from gpushare.extender.state import State, node_row, pod_row
from gpushare.http.service import Request
from gpushare.shared._contracts import gpushare as contract
from prometheus_client import CollectorRegistry

CARD_UNITS = 80
FILLER = "x" * 2500


def node(number: int, cards: int) -> JsonObject:
    listed = [
        contract.Card(
            index,
            f"GPU-{number:08x}-0000-0000-0000-{index:012x}",
            index,
            CARD_UNITS * 1024,
            CARD_UNITS,
            model="NVIDIA H100 80GB HBM3" if number % 3 else "NVIDIA A100-SXM4-80GB",
        )
        for index in range(cards)
    ]
    return {
        "metadata": {
            "name": f"gpu-node-{number:04d}",
            "annotations": {contract.NODE_CARDS: contract.cards_to_annotation(listed), "filler": FILLER},
            "resourceVersion": "1",
        },
        "status": {
            "capacity": {contract.RESOURCE_MEMORY: str(cards * CARD_UNITS), contract.RESOURCE_COUNT: str(cards)}
        },
    }


def pod(number: int, nodes: int, cards: int) -> JsonObject:
    """Return a running pod; the cards of even nodes are nearly full."""
    home, card = number % nodes, (number // nodes) % cards
    return {
        "metadata": {
            "name": f"training-{number % 97}-{number:06d}",
            "namespace": f"team-{number % 40}",
            "uid": f"{number:08x}-1111-2222-3333-444444444444",
            "resourceVersion": "1",
            "annotations": {contract.POD_INDEX: str(card), contract.POD_ASSIGNED: "true", "filler": FILLER},
        },
        "spec": {
            "nodeName": f"gpu-node-{home:04d}",
            "containers": [
                {"name": "main", "resources": {"limits": {contract.RESOURCE_MEMORY: "20" if home % 2 == 0 else "2"}}}
            ],
        },
        "status": {"phase": "Running"},
    }


def asking(units: int, nodes: int, priority: int = 0, **annotations: str) -> JsonObject:
    """Return a pending pod of ordinary size."""
    waiting = pod(10**6, nodes, 1)
    waiting["metadata"]["annotations"] = {"filler": FILLER, **annotations}
    container = {"name": "main", "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}}}
    waiting["spec"] = {"containers": [container], "priority": priority}
    return waiting


def wanted(waiting: JsonObject, nodes: int) -> bytes:
    """Return kube-scheduler's request."""
    names = [f"gpu-node-{number:04d}" for number in range(nodes)]
    return json.dumps({"Pod": waiting, "Nodes": None, "NodeNames": names}).encode()


def victims(state: State, nodes: int, requests: int) -> tuple[list[float], int]:
    """Return the times in ms of a preemption's answer for 100 nodes, and the number of nodes with victims."""

    class Allowing:
        """An API that allows every eviction."""

        def post(self, _path: str, _body: JsonObject) -> JsonObject:
            return {}

    allowing: Any = Allowing()
    preemption = Preemption(allowing, state, allowing)
    high = asking(70, nodes, priority=1000)
    offered = {}
    for number in range(0, min(nodes, 200), 2):
        name = f"gpu-node-{number:04d}"
        offered[name] = Victims(tuple(row.uid for row in state.evictable(name)[:3]), 0)
    times = []
    answer: dict[str, Victims] = {}
    for _round in range(requests):
        began = time.perf_counter()
        answer = preemption.answer(high, contract.demand(high), offered)
        times.append((time.perf_counter() - began) * 1000)
        state.unclaim(contract.pod_uid(high))
    return sorted(times), len(answer)


def serve(options: argparse.Namespace) -> ThreadingHTTPServer:
    """Start an API server whose lists are created page by page, and whose watches have bookmarks alone."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            query = parse_qs(split.query)
            if "watch" in query:
                return watch_without_events(self)
            if not split.path.endswith(("/nodes", "/pods")):
                # The pending pods don't exist.
                self.send_error(404)
                return
            pods = split.path.endswith("/pods")
            total = options.pods if pods else options.nodes
            if "labelSelector" in query:
                # No pod has a claim.
                total = 0
            start = int(query.get("continue", ["0"])[0])
            stop = min(total, start + int(query.get("limit", [total])[0]))
            items = [
                pod(number, options.nodes, options.cards) if pods else node(number, options.cards)
                for number in range(start, stop)
            ]
            metadata = {"resourceVersion": "1", **({"continue": str(stop)} if stop < total else {})}
            data = json.dumps({"metadata": metadata, "items": items}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


def timed(ask: Callable[[], bytes], requests: int, pid: int) -> tuple[list[float], float, JsonObject]:
    times = []
    for _warmup in range(requests // 10):
        ask()
    before = cpu(pid)
    answer = b""
    for _round in range(requests):
        began = time.perf_counter()
        answer = ask()
        times.append((time.perf_counter() - began) * 1000)
    check_filtered(answer)
    return sorted(times), (cpu(pid) - before) / requests * 1000, json.loads(answer)


def report(what: str, times: list[float], taken: float, answer: JsonObject) -> None:
    passed, refused = len(answer["NodeNames"]), len(answer["FailedNodes"]) + len(answer["FailedAndUnresolvableNodes"])
    middle, late, last = times[len(times) // 2], times[int(len(times) * 0.99)], times[-1]
    print(
        f"{what:<40} cpu {taken:5.2f}  p50 {middle:6.2f}  p99 {late:6.2f}  max {last:6.2f} ms"
        f"   {passed} pass, {refused} refused"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--pods", type=int, default=20000)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    pods = {
        "every node has free units": asking(1, options.nodes),
        "half of the nodes have": asking(60, options.nodes),
        "no node has": asking(79, options.nodes),
        "two cards": asking(120, options.nodes, **{contract.POD_CARD_COUNT: "2"}),
        "a model": asking(60, options.nodes, **{contract.POD_MODELS: "*H100*"}),
        "high priority, no node has": asking(79, options.nodes, priority=1000),
    }
    loads = {name: wanted(waiting, options.nodes) for name, waiting in pods.items()}
    print(f"{options.nodes} nodes x {options.cards} cards, {options.pods} pods; load {os.getloadavg()[0]:.1f}\n")

    with tempfile.TemporaryDirectory() as folder:
        api_server = serve(options)
        account = service_account(Path(folder), api_server)
        threading.Thread(target=api_server.serve_forever, daemon=True).start()
        with Server("gpushare.extender.command", "--port=0", account=account) as extender:
            connection = http.client.HTTPConnection("127.0.0.1", int(extender.wait_for("serving")["port"]))
            extender.wait_for("ready")
            ready = time.perf_counter() - extender.began

            def over_http(body: bytes) -> bytes:
                connection.request("POST", "/gpushare-scheduler/filter", body)
                return connection.getresponse().read()

            for name, body in loads.items():
                report(f"HTTP, {name}", *timed(functools.partial(over_http, body), options.requests, extender.pid))
            now, peak = memory(extender.pid), memory(extender.pid, "VmHWM")
            print(f"\nextender: {now:.0f} MB resident, maximum {peak:.0f} MB, ready after {ready:.1f} s\n")

    state = State()
    for number in range(options.nodes):
        state.node_changed("", None, node_row(node(number, options.cards)))
    for number in range(options.pods):
        state.pod_changed("", None, pod_row(pod(number, options.nodes, options.cards)))
    gc.collect()
    gc.freeze()
    api = Api(state, lambda _: Outcome("failed"), lambda: None, Metrics(CollectorRegistry()))
    handler = api.routes()[("POST", f"{contract.EXTENDER_PREFIX}/filter")]
    for name, body in loads.items():
        request = Request("POST", "/filter", "", body)
        ask = functools.partial(lambda request: handler(request).body, request)
        report(f"in process, {name}", *timed(ask, options.requests, os.getpid()))
    times, found = victims(state, options.nodes, max(1, options.requests // 20))
    print(f"\nvictims on {found} of 100 nodes: p50 {times[len(times) // 2]:.0f}  max {times[-1]:.0f} ms")


if __name__ == "__main__":
    main()
