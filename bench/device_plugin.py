# SPDX-License-Identifier: GPL-3.0-or-later
"""The device plugin on a full node: latency of kubelet's calls, memory, and CPU time at rest.

The real command with the lab's simulated NVIDIA library, 8 cards of 80 GiB (640 device IDs), a simulated kubelet with
real gRPC, and an API server over HTTPS. 110 pods, kubelet's default maximum, are created and removed one by one; then
the idle node is measured.

    python bench/device_plugin.py [--cards N] [--gib N] [--pods N] [--turns N] [--seconds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from processes import ROOT, NoResult, Server, cpu, cpu_for, memory, p99, percentiles, service_account, verdict

sys.path += [
    str(ROOT / "tests" / "unit" / folder) for folder in ("servers", "servers/plugin", "servers/extender", "kubelet")
]

import grpc
from gpushare.api.client import KubeError
from gpushare.kubelet import wire
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import NODE, FakeKube, FakeKubelet, make_pod, seen
from unix_http import ask_socket

from lab.packages import compile_driver
from lab.shell import LabError, every

ALLOCATE_MS, MEMORY_MB, REST = 5.0, 60.0, 0.005
DRIVER = "580.95.05"


class Kubelet(FakeKubelet):
    """Measures the time of each of its calls."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.times: dict[str, list[float]] = {}

    def _unary(self, channel: grpc.Channel, method: wire.Method) -> Any:
        call = FakeKubelet._unary(channel, method)
        times = self.times.setdefault(method.path.rpartition("/")[2], [])

        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            answer = call(*given, **named)
            times.append(time.perf_counter() - began)
            return answer

        return timed


@contextlib.contextmanager
def api(kube: FakeKube, folder: Path) -> Iterator[Path]:
    """Serve the API server in memory over HTTPS; yields the folder of a service account for it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            if "watch=1" not in self.path:
                self.answer(lambda: kube.get(self.path))
                return
            self.send_response(200)
            # In chunks, as the real one, so that a client receives each event immediately.
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(OSError, KubeError):
                for event in kube.watch(self.path):
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.flush()

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(lambda: kube.patch(self.path, body))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(lambda: kube.post(self.path, body))

        def answer(self, ask: Any) -> None:
            try:
                status, value = 200, ask()
            except KubeError as error:
                status, value = error.status or 500, {"reason": error.reason, "message": error.message}
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    account = service_account(folder, server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield account
    finally:
        server.shutdown()
        server.server_close()


def driver(folder: Path, cards: int, gib: int) -> dict[str, str]:
    """Compile the simulated NVIDIA library, and return the environment that selects it and its cards."""
    compile_driver(folder, DRIVER)
    (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{DRIVER}")
    found = [seen(index, gib) for index in range(cards)]
    rows = [
        f"card {one.index} uuid={one.uuid} minor={one.minor} memory={one.memory_mib} "
        f"bus=0000:{one.index + 1:02x}:00.0 name=Simulated_GPU"
        for one in found
    ]
    (folder / "cards").write_text("\n".join([f"driver {DRIVER}", "cuda 13000", *rows, ""]))
    return {"LD_LIBRARY_PATH": str(folder), "KUBEGPU_SIM_CARDS": str(folder / "cards")}


def until(condition: Any, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise NoResult(f"not within {seconds:.0f} s: {what}.")
        time.sleep(0.05)


def measure(folder: Path, options: argparse.Namespace) -> list[tuple[str, bool]]:
    kube, kubelet = FakeKube(), Kubelet(folder)
    kube.put({"metadata": {"name": NODE, "uid": "uid-node"}, "status": {"capacity": {"cpu": "64"}}})
    kubelet.start()
    total = options.cards * options.gib
    with api(kube, folder) as account:
        status = folder / "status.sock"
        flags = ["--node-name", NODE, f"--status-socket={status}", f"--kubelet-dir={folder}"]
        environment = driver(folder, options.cards, options.gib)
        with Server("gpushare.plugin.command", *flags, account=account, environment=environment) as server:
            server.wait_for("started")
            until(lambda: len(kubelet.healthy) == total, "kubelet has all device IDs")
            print(f"registered with {total} device IDs after {time.perf_counter() - server.began:.1f} s")
            running: deque[Any] = deque()
            taken = 0.0
            units = max(1, total // options.pods // 2)
            for turn in range(options.pods + options.turns):
                if len(running) == options.pods:
                    gone = running.popleft()
                    kubelet.remove(gone)
                    kube.remove(kube.pod(contract.pod_key(gone)))
                if turn == options.pods:
                    # From here on the node is full.
                    kubelet.times.clear()
                    taken = cpu(server.pid)
                pod = make_pod(f"pod-{turn}", units, booked=turn % options.cards, card_units=options.gib)
                kube.put(pod)
                kubelet.add(pod)
                current = kube.pod(contract.pod_key(pod))
                current["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
                kube.put(current)
                running.append(pod)
            last, assigned = contract.pod_key(running[-1]), contract.POD_ASSIGNED
            until(lambda: kube.pod(last)["metadata"]["annotations"][assigned] == "true", "the last pod is confirmed")
            each = (cpu(server.pid) - taken) / options.turns
            for call, times in kubelet.times.items():
                print(f"{call:<24} {percentiles(times)}   ({len(times)} calls)")
            # Unlike wall time this doesn't depend on other load. It includes the work for the watch's events and for
            # kubelet's list, which is read for some seconds after the last pod.
            print(f"CPU for each pod         {each * 1000:.1f} ms")
            late = p99(kubelet.times["Allocate"])
            # The plugin reads kubelet's list more often for some seconds after an allocation.
            time.sleep(5)

            rest = cpu_for(server.pid, options.seconds)
            with every(15, lambda: ask_socket(status, "/metrics")):
                scraped = cpu_for(server.pid, max(options.seconds, 31))
            held, most = memory(server.pid), memory(server.pid, "VmHWM")
            print(f"CPU at rest              {rest:.2%} of a core; {scraped:.2%} with a scrape every 15 s")
            print(f"memory                   {held:.0f} MB, maximum {most:.0f} MB, with {options.pods} pods")
    kubelet.stop()
    return [
        (f"Allocate's 99th percentile under {ALLOCATE_MS:.0f} ms: {late * 1000:.2f}", late * 1000 < ALLOCATE_MS),
        (f"under {MEMORY_MB:.0f} MB: {held:.0f}", held < MEMORY_MB),
        (f"at rest under {REST:.1%} of a core: {rest:.2%}", rest < REST),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--gib", type=int, default=80)
    parser.add_argument("--pods", type=int, default=110)
    parser.add_argument("--turns", type=int, default=1000, help="pods that are created and removed on the full node")
    parser.add_argument("--seconds", type=float, default=60, help="measured time at rest")
    options = parser.parse_args()
    print(f"{options.cards} cards of {options.gib} GiB; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors\n")
    try:
        with tempfile.TemporaryDirectory(prefix="kg-") as folder:
            goals = measure(Path(folder), options)
    except (NoResult, LabError, OSError, subprocess.SubprocessError) as error:
        print(f"no result: {error}", file=sys.stderr)
        return 2
    print()
    return verdict(goals)


if __name__ == "__main__":
    sys.exit(main())
