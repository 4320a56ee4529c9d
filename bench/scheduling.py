# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods bound per second by the real kube-scheduler, with and without our extender, alternately in one run.

50 nodes with 8 cards of 80 GiB each, and 500 pods of 1 GiB that exist before the scheduler runs: it is stopped
(SIGSTOP) while they are created, and the time is measured from its SIGCONT to the last pod that a watch shows as bound.
``--preload`` first binds other pods, which stay: the largest cluster that is aimed at has 5,000 nodes and 100,000 pods.
The nodes are objects only: without a controller manager they stay ready, and bound pods needn't run. etcd,
kube-apiserver, kube-scheduler and the extender share this machine, so the CPU time of each per pod is reported too.
Every run with the extender is verified: each pod has a card, and no card is overbooked.

The scheduler's own client isn't limited (``--qps``): by default it writes 50 times a second, which is less than the
extender binds with its own client.

    python bench/scheduling.py [--nodes N] [--pods N] [--preload N] [--rounds N] [--qps N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from processes import TIED, NoResult, Server, account_of, cpu, end_process, memory, verdict

from gpushare.shared._contracts import gpushare as contract  # isort: skip
from gpushare.api.client import KubeApi, KubeError, Stream, connect
from gpushare.shared._core.types import JsonObject
from real_apiserver import ApiServer, Missing

# Of the rate without an extender, binds a second, filter's 99th percentile, and the extender's largest memory.
SHARE, BINDS, FILTER_SECONDS, MEMORY_MB = 0.9, 300.0, 0.005, 250.0
CARDS, CARD_UNITS = 8, 80
LONGEST = 300.0
NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PRELOADED = "preloaded"


class Program:
    """One of the Go programs; its log is in a file, whose end is shown if it doesn't get ready."""

    def __init__(self, folder: Path, name: str, *command: str) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*TIED, *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, ready: Any, what: str) -> None:
        end = time.monotonic() + LONGEST
        while not ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise NoResult(f"{what}; {self.log_end()}")
            time.sleep(0.05)

    def log_end(self) -> str:
        return f"the end of the log of {self.name}: {self._log.read_text(errors='replace')[-1500:]}"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        # A stopped process wouldn't receive SIGTERM.
        self._process.send_signal(signal.SIGCONT)
        end_process(self._process)


@contextlib.contextmanager
def running(program: Program) -> Iterator[Program]:
    try:
        yield program
    finally:
        program.stop()


class Watch:
    """Records when each pod is bound, by a watch of the API server."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube
        self._bound: dict[str, float] = {}
        self._news = threading.Condition()
        self._closed = False
        self._stream: Stream | None = None
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        # Only bound pods: events of the others would cost time.
        bound = f"{PODS}?fieldSelector=spec.nodeName!%3D"
        while not self._closed:
            # The API server ends the watch of a slow client, as this is on a busy machine.
            with contextlib.suppress(KubeError):
                listed = self._kube.get(bound)
                self._see(listed["items"])
                version = listed["metadata"]["resourceVersion"]
                self._stream = self._kube.watch(f"{bound}&watch=1&resourceVersion={version}")
                for event in self._stream:
                    self._see([event["object"]])

    def _see(self, pods: list[JsonObject]) -> None:
        now = time.perf_counter()
        with self._news:
            for pod in pods:
                self._bound.setdefault(str(pod["metadata"].get("name")), now)
            self._news.notify_all()

    def last_of(self, count: int) -> float:
        """Wait until so many pods are bound, and return the time of the last one."""
        end = time.monotonic() + LONGEST
        with self._news:
            while len(self._bound) < count:
                if time.monotonic() > end:
                    raise NoResult(f"only {len(self._bound)} of {count} pods were bound within {LONGEST:.0f} s.")
                self._news.wait(1)
            return max(self._bound.values())

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.close()


class Result(NamedTuple):
    """What one run took.

    :param rate: pods bound per second.
    :param cpu_ms: CPU time per pod, by program.
    :param requests: the extender's API requests per pod, by method and status.
    """

    rate: float
    cpu_ms: dict[str, float]
    requests: dict[str, float]


class Bench:
    def __init__(self, api: ApiServer, folder: Path, options: argparse.Namespace) -> None:
        self.api, self.folder, self.options = api, folder, options
        # A long time limit: on a busy machine this script's own requests are slow.
        self.kube = connect(api.url, str(self.account), 120.0)
        self.made = 0
        # Units of the pods before the runs, by node and card; filter's latest percentile, and the extender's memory.
        self.preloaded: Counter[tuple[str, int]] = Counter()
        self.late, self.memory = list[float](), list[float]()
        # Processes that run during all runs, by name.
        self.standing: dict[str, int] = {}

    # Before the runs.

    def nodes(self) -> None:
        def make(number: int) -> None:
            size = CARD_UNITS * contract.MIB_PER_UNIT["GiB"], CARD_UNITS
            cards = [contract.Card(at, f"GPU-{number:08x}-0-0-0-{at:012x}", at, *size) for at in range(CARDS)]
            name = f"gpu-node-{number:04d}"
            annotations = {contract.NODE_CARDS: contract.cards_to_annotation(cards)}
            self.kube.post(
                "/api/v1/nodes",
                {"metadata": {"name": name, "annotations": annotations, "labels": {"kubernetes.io/hostname": name}}},
            )
            resources = {
                "cpu": "64",
                "memory": "512Gi",
                "pods": "250",
                contract.RESOURCE_MEMORY: str(CARDS * CARD_UNITS),
                contract.RESOURCE_COUNT: str(CARDS),
            }
            ready = {"type": "Ready", "status": "True", "reason": "Simulated", "message": "simulated"}
            status = {"status": {"capacity": resources, "allocatable": resources, "conditions": [ready]}}
            self.kube.patch(f"/api/v1/nodes/{name}/status", status)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(make, range(self.options.nodes)))

    def preload(self) -> None:
        """Create pods of 1 GiB that are bound to cards already."""
        self.kube.post("/api/v1/namespaces", {"metadata": {"name": PRELOADED}})
        limits = {"limits": {contract.RESOURCE_MEMORY: "1"}}

        def make(number: int) -> tuple[str, int]:
            node, index = f"gpu-node-{number % self.options.nodes:04d}", number // self.options.nodes % CARDS
            annotations = {contract.POD_INDEX: str(index), contract.POD_ASSIGNED: "true"}
            pod = {
                "metadata": {"name": f"pod-{number}", "annotations": annotations},
                "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none", "resources": limits}]},
            }
            self.kube.post(f"/api/v1/namespaces/{PRELOADED}/pods", pod)
            return node, index

        began = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            self.preloaded.update(pool.map(make, range(self.options.preload)))
        rate = self.options.preload / (time.perf_counter() - began)
        print(f"{self.options.preload} other pods, created at {rate:.0f} a second", flush=True)

    @cached_property
    def account(self) -> Path:
        return account_of(self.api, self.folder)

    # One run.

    def scheduler(self, extender: int) -> Program:
        """Start a kube-scheduler and wait until it is ready.

        :param extender: the extender's port; 0 for none.
        """
        config: JsonObject = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(self.api.kubeconfig),
                "qps": self.options.qps,
                "burst": 2 * self.options.qps,
            },
        }
        if extender:
            config["extenders"] = [
                {
                    "urlPrefix": f"http://127.0.0.1:{extender}{contract.EXTENDER_PREFIX}",
                    "filterVerb": "filter",
                    "bindVerb": "bind",
                    "nodeCacheCapable": True,
                    "httpTimeout": "30s",
                    "managedResources": [{"name": contract.RESOURCE_MEMORY, "ignoredByScheduler": False}],
                }
            ]
        file = self.folder / "scheduler.yaml"
        file.write_text(yaml.safe_dump(config))
        port = _free_port()
        flags = [f"--config={file}", f"--secure-port={port}", "--bind-address=127.0.0.1", f"--cert-dir={self.folder}"]
        started = Program(self.folder, "kube-scheduler", self.api.programs["kube-scheduler"], *flags)
        started.wait(lambda: _answers(f"https://127.0.0.1:{port}/readyz"), "kube-scheduler doesn't get ready")
        return started

    def run(self, with_extender: bool) -> Result:
        """Bind pods, and check which card each of them has."""
        with contextlib.ExitStack() as stack:
            port = 0
            programs: dict[str, int] = {}
            servers: list[Server] = []
            if with_extender:
                flags = ["--port=0", *self.options.flag]
                server = stack.enter_context(Server("gpushare.extender.command", *flags, account=self.account))
                port = int(server.wait_for("serving")["port"])
                server.wait_for("ready")
                programs["extender"] = server.pid
                servers.append(server)
            scheduler = stack.enter_context(running(self.scheduler(port)))
            programs["kube-scheduler"] = scheduler.pid
            programs |= self.standing
            stopped = [scheduler, *self.partners(with_extender)]
            for program in stopped:
                program.signal(signal.SIGSTOP)
            watch = Watch(self.kube)
            stack.callback(watch.close)
            names = self._make_pods(with_extender)
            # The extender's first lists aren't the pods' cost.
            listed = _requests(_page(port)) if port else {}
            before = {name: cpu(pid) for name, pid in programs.items()}
            began = time.perf_counter()
            for program in stopped:
                program.signal(signal.SIGCONT)
            try:
                rate = len(names) / (watch.last_of(len(names)) - began)
            except NoResult as error:
                logs = [scheduler.log_end(), *(server.log_end() for server in servers)]
                raise NoResult(f"{error} {' '.join(logs)}") from None
            taken = {name: (cpu(pid) - before[name]) / len(names) * 1000 for name, pid in programs.items()}
            asked = dict[str, float]()
            if port:
                page = _page(port)
                spent = {what: count - listed.get(what, 0.0) for what, count in _requests(page).items()}
                asked = {what: count / len(names) for what, count in spent.items() if count}
                self.late.append(_filter_p99(page))
                self.memory.append(memory(programs["extender"], "VmHWM"))
            self._check(with_extender)
        self._remove_pods()
        return Result(rate, taken, asked)

    def partners(self, with_extender: bool) -> list[Program]:
        """Return the programs that wait with the scheduler while a run's pods are created."""
        return []

    def pod_spec(self, with_extender: bool) -> JsonObject:
        """Return the specification of a pod of 1 GiB."""
        limits = {"limits": {contract.RESOURCE_MEMORY: "1"}}
        return {"containers": [{"name": "main", "image": "none", "resources": limits}]}

    def _make_pods(self, with_extender: bool) -> list[str]:
        first, self.made = self.made, self.made + self.options.pods
        names = [f"pod-{number}" for number in range(first, self.made)]
        spec = self.pod_spec(with_extender)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self.kube.post(PODS, {"metadata": {"name": name}, "spec": spec}), names))
        return names

    def _check(self, with_extender: bool) -> None:
        pods = self.kube.get(PODS)["items"]
        if any(not contract.pod_node(pod) for pod in pods):
            raise NoResult("a pod that the watch showed as bound isn't.")
        if not with_extender:
            return
        held = self.preloaded.copy()
        for pod in pods:
            booked = contract.booking(pod)
            if booked is None:
                raise NoResult(f"pod {contract.pod_key(pod)} has no card.")
            held[contract.pod_node(pod), booked.index] += contract.pod_units(pod)
        if over := {card: units for card, units in held.items() if units > CARD_UNITS}:
            raise NoResult(f"cards over their size: {over}.")

    def _remove_pods(self) -> None:
        self.kube.delete(f"{PODS}?gracePeriodSeconds=0")
        end = time.monotonic() + 60
        while self.kube.get(f"{PODS}?limit=1")["items"]:
            if time.monotonic() > end:
                raise NoResult("the pods of a run weren't deleted in time.")
            time.sleep(0.2)


def show(what: str, result: Result) -> None:
    """Print one run."""
    spent = ", ".join(f"{name} {cost:.1f}" for name, cost in sorted(result.cpu_ms.items()))
    print(f"{what:<14} {result.rate:6.0f} pods/s   ms of CPU per pod: {spent}", flush=True)
    if result.requests:
        counts = ", ".join(f"{name} {count:.2f}" for name, count in sorted(result.requests.items()))
        print(f"{'':<23}requests of the extender per pod: {counts}", flush=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _page(port: int) -> str:
    """Return the extender's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def _filter_p99(text: str) -> float:
    """Return the bound of the histogram's part, in seconds, below which 99 % of the filter requests were."""
    rows = re.findall(r'^gpushare_extender_request_seconds_bucket{le="(\S+)",verb="filter"} (\S+)$', text, re.MULTILINE)
    most = max(float(count) for _bound, count in rows)
    return min(float(bound) for bound, count in rows if float(count) >= 0.99 * most)


def _requests(text: str) -> dict[str, float]:
    """Return the extender's API requests without watches, by method and status."""
    found = re.findall(r'^gpushare_api_requests_total{code="(\d+)",method="(\w+)"} (\S+)$', text, re.MULTILINE)
    return {f"{method} {code}": float(count) for code, method, count in found if method != "WATCH"}


def _answers(url: str) -> bool:
    context = ssl.create_default_context()
    # It signs its own certificate.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5, context=context) as answer:
        return bool(answer.status == 200)
    return False


def api_processes(api: ApiServer) -> dict[str, int]:
    """Find the processes of etcd and kube-apiserver by their working directory."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").resolve() == api.folder.resolve():
                found[Path(os.readlink(entry / "exe")).name] = int(entry.name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--preload", type=int, default=0, help="pods that are bound before the runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--qps", type=int, default=5000, help="of the scheduler's client; 50 is Kubernetes' default")
    parser.add_argument("--flag", action="append", default=[], help="further flags of the extender")
    options = parser.parse_args()
    rates: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    try:
        # Without a controller manager nothing would remove the taints of nodes that aren't ready yet.
        server = ApiServer(["--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"])
        with server as api, tempfile.TemporaryDirectory(prefix="kubegpu-bench-") as folder:
            bench = Bench(api, Path(folder), options)
            bench.nodes()
            if options.preload:
                bench.preload()
            bench.standing = api_processes(api)
            print(
                f"{options.pods} pods of 1 GiB on {options.nodes} nodes with {options.preload} others; "
                f"scheduler's client {options.qps} a second; "
                f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n"
            )
            # The first run fills caches and isn't counted.
            bench.run(True)
            for turn in range(options.rounds):
                for with_extender in (False, True) if turn % 2 == 0 else (True, False):
                    result = bench.run(with_extender)
                    rates[with_extender].append(result.rate)
                    costs[with_extender].append(result.cpu_ms)
                    show("with extender" if with_extender else "without", result)
    except (NoResult, KubeError, Missing) as error:
        print(f"no result: {error}", file=sys.stderr)
        return 2
    without, with_it = statistics.median(rates[False]), statistics.median(rates[True])
    print(f"\nmedians: {with_it:.0f} with the extender, {without:.0f} without")
    # Unlike the rates this doesn't depend on other load.
    less, more = (statistics.median(sum(one.values()) for one in costs[which]) for which in (False, True))
    print(f"ms of CPU per pod: {more:.1f} with the extender, {less:.1f} without: {less / more:.0%}\n")
    return verdict(
        [
            (
                f"with the extender at least {SHARE:.0%} of the rate without: {with_it / without:.0%}",
                with_it >= SHARE * without,
            ),
            (f"at least {BINDS:.0f} binds a second: {with_it:.0f}", with_it >= BINDS),
            (
                f"filter's 99th percentile at most {FILTER_SECONDS * 1000:.0f} ms: {max(bench.late) * 1000:.0f}",
                max(bench.late) <= FILTER_SECONDS,
            ),
            (f"at most {MEMORY_MB:.0f} MB: {max(bench.memory):.0f}", max(bench.memory) <= MEMORY_MB),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
