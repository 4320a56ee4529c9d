# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender on large clusters: time to ready, memory, CPU at rest, filter while it is scraped, and its bind rate.

1,000 nodes of 8 cards with 20,000 pods, then 5,000 with 100,000: a process of its own serves recorded lists (created
once and kept as bytes), so that its CPU time isn't the extender's. Then the same clients bind pods at a real
kube-apiserver, directly and through the extender alternately: the extender's rate relative to the API server's.

    python bench/extender_large.py [--nodes N] [--pods N] [--factor N] [--seconds N] [--binds N] [--clients N]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from processes import (
    NoResult,
    Server,
    account_of,
    check_filtered,
    cpu_for,
    memory,
    p99,
    percentiles,
    service_account,
    verdict,
    watch_without_events,
)

from extender_filter import asking, node, pod, wanted  # isort: skip
from gpushare.api.client import KubeApi, KubeError, connect
from gpushare.shared._contracts import gpushare as contract

from lab.shell import every

CARDS = 8
READY_SECONDS, MEMORY_MB, FILTER_MS = 5.0, 100.0, 3.0
# Of the larger cluster.
LARGE_MEMORY_MB, LARGE_FILTER_MS = 250.0, 5.0
FILTER = f"{contract.EXTENDER_PREFIX}/filter"
BIND = f"{contract.EXTENDER_PREFIX}/bind"


# --------------------------------------------------------------------------- recorded lists


def serve(nodes: int, pods: int, folder: Path) -> None:
    """Serve lists of nodes and pods in pages, and watches with bookmarks alone, until standard input ends.

    It creates a service account in the folder and prints its path.
    """
    recorded = {
        "/api/v1/nodes": [json.dumps(node(number, CARDS)).encode() for number in range(nodes)],
        "/api/v1/pods": [json.dumps(pod(number, nodes, CARDS)).encode() for number in range(pods)],
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            query = parse_qs(split.query)
            if "watch" in query:
                return watch_without_events(self)
            # No pod has a claim.
            items = [] if "labelSelector" in query else recorded.get(split.path, [])
            start = int(query.get("continue", ["0"])[0])
            stop = min(len(items), start + int(query.get("limit", [len(items)])[0]))
            more = b',"continue":"%d"' % stop if stop < len(items) else b""
            self.answer(b'{"metadata":{"resourceVersion":"1"%s},"items":[%s]}' % (more, b",".join(items[start:stop])))

        def do_POST(self) -> None:
            # The extender's checks at its start succeed.
            self.answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        do_PUT = do_PATCH = do_DELETE = do_POST

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(service_account(folder, server), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


@contextlib.contextmanager
def recorded_api(nodes: int, pods: int, folder: Path) -> Iterator[Path]:
    """Start such a server; yields its service account."""
    command = [sys.executable, __file__, f"--serve={folder}", f"--nodes={nodes}", f"--pods={pods}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        account = process.stdout.readline().strip()
        if not account:
            raise NoResult("the recorded API server doesn't start.")
        try:
            yield Path(account)
        finally:
            process.stdin.close()


def extender(account: Path) -> Server:
    return Server("gpushare.extender.command", "--port=0", account=account)


class Asker:
    """A client with one connection, as kube-scheduler."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        self._connection.request(method, path, body or None, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise NoResult(f"{path} answers {answer.status}: {data[:300].decode(errors='replace')}")
        return data

    def timed(self, body: bytes, requests: int) -> list[float]:
        times, answer = [], b""
        for _request in range(max(1, requests)):
            began = time.perf_counter()
            answer = self.ask("POST", FILTER, body)
            times.append(time.perf_counter() - began)
        check_filtered(answer)
        return times


def offered(nodes: int) -> int:
    """Return how many nodes kube-scheduler passes to an extender at most, without percentageOfNodesToScore."""
    return min(nodes, max(100, nodes * max(5, 50 - nodes // 125) // 100))


def large(nodes: int, pods: int, seconds: float, requests: int) -> tuple[float, float, float, float]:
    """Measure one size.

    :returns: the seconds to ready, MB resident, and the 99th percentile of filter in seconds: of all nodes, and of as
        many as kube-scheduler passes.
    """
    print(f"\n{nodes:,} nodes x {CARDS} cards, {pods:,} pods")
    with (
        tempfile.TemporaryDirectory() as name,
        recorded_api(nodes, pods, Path(name)) as account,
        extender(account) as server,
    ):
        port = int(server.wait_for("serving")["port"])
        server.wait_for("ready")
        ready = time.perf_counter() - server.began
        asker, scraper = Asker(port), Asker(port)
        while True:
            with contextlib.suppress(NoResult):
                asker.ask("GET", "/readyz")
                break
            time.sleep(0.02)
        print(f"  ready                        after {ready:.1f} s")
        held, most = memory(server.pid), memory(server.pid, "VmHWM")
        print(f"  memory                       {held:.0f} MB, maximum {most:.0f} MB")
        silent = cpu_for(server.pid, seconds)
        with every(10, lambda: scraper.ask("GET", "/readyz")):
            probed = cpu_for(server.pid, seconds)
        with every(15, lambda: scraper.ask("GET", "/metrics")):
            scraped = cpu_for(server.pid, max(seconds, 31))
        print(
            f"  CPU at rest                  {silent:.2%} of a core; {probed:.2%} with kubelet's probes, "
            f"{scraped:.2%} with a scrape every 15 s"
        )
        began = time.perf_counter()
        size = len(scraper.ask("GET", "/metrics"))
        print(f"  a scrape                     {(time.perf_counter() - began) * 1000:.0f} ms, {size / 1e6:.1f} MB")
        late = 0.0
        for what, units in (("every node has free units", 1), ("half have", 60), ("none has", 79)):
            body = wanted(asking(units, nodes), nodes)
            asker.timed(body, requests // 10)
            times = asker.timed(body, requests)
            late = max(late, p99(times))
            print(f"  filter, {what:<25} {percentiles(times)}")
        fewer = offered(nodes)
        body = wanted(asking(79, nodes), fewer)
        asker.timed(body, requests // 10)
        times = asker.timed(body, requests)
        usual = p99(times)
        print(f"  filter, {f'none of {fewer} has':<25} {percentiles(times)}")
        body = wanted(asking(60, nodes), nodes)
        with every(0.5, lambda: scraper.ask("GET", "/metrics")):
            times = asker.timed(body, requests)
        print(f"  filter, scraped twice a second   {percentiles(times)}")
        held, most = memory(server.pid), memory(server.pid, "VmHWM")
        print(f"  memory after that            {held:.0f} MB, maximum {most:.0f} MB")
        return ready, held, late, usual


# --------------------------------------------------------------------------- binding at a real API server


def binds(nodes: int, count: int, clients: int, rounds: int) -> float:
    """Bind pods directly and through the extender alternately; return the ratio of the best rates."""
    from real_apiserver import ApiServer, Missing

    try:
        server = ApiServer()
    except Missing as error:
        raise NoResult(f"no bind rate: {error}.") from None
    with server as api, tempfile.TemporaryDirectory() as folder:
        account = account_of(api, Path(folder))
        kube = connect(api.url, str(account), 120.0)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: _make_node(kube, number), range(nodes)))
        direct, through, asked = [], [], []
        print(f"\n{count} binds by {clients} clients on {nodes} nodes, at a real kube-apiserver")
        for turn in range(rounds):
            direct.append(_rate(kube, nodes, count, clients, f"direct-{turn}", 0))
            with extender(account) as running:
                port = int(running.wait_for("serving")["port"])
                running.wait_for("ready")
                before = _requests(port)
                through.append(_rate(kube, nodes, count, clients, f"extender-{turn}", port))
                asked.append((_requests(port) - before) / count)
        print(f"  directly                     {max(direct):.0f} a second (of {_listed(direct)})")
        print(f"  through the extender         {max(through):.0f} a second (of {_listed(through)})")
        print(f"  requests of the extender     {min(asked):.2f} per bind")
        return max(through) / max(direct)


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


def _make_node(kube: KubeApi, number: int) -> None:
    made = node(number, CARDS)
    del made["metadata"]["resourceVersion"]
    status = made.pop("status")
    kube.post("/api/v1/nodes", made)
    kube.patch(f"/api/v1/nodes/{made['metadata']['name']}/status", {"status": status})


def _rate(kube: KubeApi, nodes: int, count: int, clients: int, prefix: str, port: int) -> float:
    """Return the pods bound per second.

    :param port: of the extender; 0 binds directly.
    """
    names = [f"{prefix}-{number}" for number in range(count)]

    def make(name: str) -> Any:
        limits = {contract.RESOURCE_MEMORY: "1"}
        containers = [{"name": "main", "image": "none", "resources": {"limits": limits}}]
        pod = {"metadata": {"name": name}, "spec": {"containers": containers}}
        return kube.post("/api/v1/namespaces/default/pods", pod)

    kept = threading.local()

    def bind(number: int) -> None:
        home, name, uid = f"gpu-node-{number % nodes:04d}", names[number], pods[number]["metadata"]["uid"]
        if not port:
            metadata = {"name": name, "namespace": "default", "uid": uid}
            target = {"apiVersion": "v1", "kind": "Node", "name": home}
            kube.post(f"/api/v1/namespaces/default/pods/{name}/binding", {"metadata": metadata, "target": target})
            return
        if not hasattr(kept, "asker"):
            kept.asker = Asker(port)
        # As kube-scheduler.
        kept.asker.ask("POST", FILTER, json.dumps({"Pod": pods[number], "NodeNames": [home]}).encode())
        asked = {"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": home}
        error = json.loads(kept.asker.ask("POST", BIND, json.dumps(asked).encode()))["Error"]
        if error:
            raise NoResult(f"the extender can't bind: {error}")

    with ThreadPoolExecutor(clients) as pool:
        pods = list(pool.map(make, names))
        began = time.perf_counter()
        list(pool.map(bind, range(count)))
        rate = count / (time.perf_counter() - began)
        list(pool.map(lambda name: _remove(kube, name), names))
    return rate


def _remove(kube: KubeApi, name: str) -> None:
    try:
        kube.delete(f"/api/v1/namespaces/default/pods/{name}?gracePeriodSeconds=0")
    except KubeError as error:
        if error.status != 404:
            raise


def _requests(port: int) -> float:
    """Return the extender's own count of its API requests without watches."""
    text = Asker(port).ask("GET", "/metrics").decode()
    rows = [row for row in text.splitlines() if row.startswith("gpushare_api_requests_total{")]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows if 'method="WATCH"' not in row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=20000)
    parser.add_argument("--factor", type=int, default=5, help="of the second size to the first; 1 omits it")
    parser.add_argument("--seconds", type=float, default=30, help="measured time at rest")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--binds", type=int, default=2000, help="0 omits them")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.nodes, options.pods, options.serve)
        return 0
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    try:
        ready, held, late, _usual = large(options.nodes, options.pods, options.seconds, options.requests)
        goals = [
            (f"ready within {READY_SECONDS:.0f} s: {ready:.1f}", ready <= READY_SECONDS),
            (f"under {MEMORY_MB:.0f} MB: {held:.0f}", held < MEMORY_MB),
            (f"filter's 99th percentile under {FILTER_MS:.0f} ms: {late * 1000:.2f}", late * 1000 < FILTER_MS),
        ]
        if options.factor > 1:
            factor = options.factor
            size = options.nodes * factor, options.pods * factor
            *more, usual = large(*size, options.seconds, options.requests // factor)
            goals += [
                (f"the larger one under {LARGE_MEMORY_MB:.0f} MB: {more[1]:.0f}", more[1] < LARGE_MEMORY_MB),
                (
                    f"its filter's 99th percentile of the nodes that kube-scheduler passes under {LARGE_FILTER_MS:.0f} "
                    f"ms: {usual * 1000:.2f}",
                    usual * 1000 < LARGE_FILTER_MS,
                ),
            ]
            for what, small, big in zip(("time to ready", "memory", "filter"), (ready, held, late), more, strict=True):
                # A fifth more than linear is noise, caches and the interpreter's own share.
                text = f"{what} grows no faster than the cluster: {big / small:.1f} times"
                goals.append((text, big / small <= factor * 1.2))
        if options.binds:
            part = binds(options.nodes, options.binds, options.clients, options.rounds)
            print(f"  that is                      {part:.0%} of the API server's rate")
    except (NoResult, KubeError) as error:
        print(f"no result: {error}", file=sys.stderr)
        return 2
    print()
    return verdict(goals)


if __name__ == "__main__":
    sys.exit(main())
