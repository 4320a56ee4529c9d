# SPDX-License-Identifier: GPL-3.0-or-later
"""Shares by claims (DRA) beside the extender: pods bound per second on one cluster, and the time of Prepare.

The cluster is that of ``scheduling.py``, with 1,000 nodes whose 8 cards are in ResourceSlices as well as in the
annotations that the extender reads. 500 pods of 1 GiB exist before kube-scheduler and the controller of claims run:
both are stopped (SIGSTOP) while the pods are created, so that the time includes the claims' creation.
Every run is verified: each pod has a card, and no card is overbooked.

Then the real ``gpushare-dra-driver`` prepares and unprepares claims on a full node: 8 cards of 80 GiB by the lab's
simulated NVIDIA library, a stand-in for kubelet with real gRPC, the same API server. ``device_plugin.py`` has the time
of the device plugin's Allocate. Last, how long the server of templates takes for a pod while pods of another namespace
name very many templates; that is of its own code alone, whose requests do nothing.

    python bench/dra.py [--nodes N] [--pods N] [--rounds N] [--qps N] [--claims N] [--turns N] [--names N]
    python bench/dra.py --only-names
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from device_plugin import driver, until
from processes import ROOT, NoResult, Server, cpu, memory, percentiles
from scheduling import CARD_UNITS, CARDS, NAMESPACE, Bench, Program, api_processes, running, show

sys.path += [str(ROOT / "tests" / "unit" / folder) for folder in ("servers/dra", "servers/templates")]

from dra_cluster import Cluster
from dra_kit import Kubelet, uid
from gpushare.api.client import KubeError
from gpushare.dra.claims import device_name
from gpushare.kubelet import dra
from gpushare.shared._contracts import claim_templates as contract
from gpushare.shared._core.types import JsonObject
from gpushare.templates.keeper import Keeper
from gpushare.templates.rows import MOST_PER_POD
from plugin_fakes import seen
from real_apiserver import ApiServer, Missing

from lab.shell import LabError

API = f"/apis/{contract.API_VERSION}"
CLAIMS = f"{API}/namespaces/{NAMESPACE}/resourceclaims"
TEMPLATE = "gpu-mem-1"


class ClaimsBench(Bench):
    """Without the extender the pods have claims."""

    controllers: Program

    def nodes(self) -> None:
        super().nodes()
        self.kube.post(
            f"{API}/deviceclasses",
            {
                "metadata": {"name": contract.DRIVER},
                "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{contract.DRIVER}"'}}]},
            },
        )
        exactly = {"deviceClassName": contract.DRIVER, "capacity": {"requests": {contract.CAPACITY: "1Gi"}}}
        spec = {"spec": {"devices": {"requests": [{"name": "gpu-0", "exactly": exactly}]}}}
        self.kube.post(
            f"{API}/namespaces/{NAMESPACE}/resourceclaimtemplates", {"metadata": {"name": TEMPLATE}, "spec": spec}
        )
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._slice, range(self.options.nodes)))

    def _slice(self, number: int) -> None:
        """Announce a node's cards as its driver does."""
        name, memory = f"gpu-node-{number:04d}", f"{CARD_UNITS}Gi"
        policy = {"default": memory, "validRange": {"min": "1Gi", "step": "1Gi"}}
        devices = [
            {
                "name": f"gpu-{number:08x}-{at}",
                "attributes": {"index": {"int": at}},
                "capacity": {contract.CAPACITY: {"value": memory, "requestPolicy": policy}},
                "allowMultipleAllocations": True,
            }
            for at in range(CARDS)
        ]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": contract.DRIVER, "nodeName": name, "pool": pool, "devices": devices}
        self.kube.post(f"{API}/resourceslices", {"metadata": {"name": name}, "spec": spec})

    @contextlib.contextmanager
    def controller(self) -> Iterator[None]:
        """Run the controller of claims."""
        flags = [f"--kubeconfig={self.api.kubeconfig}", "--controllers=resourceclaim-controller"]
        flags += [f"--kube-api-qps={self.options.qps}", f"--kube-api-burst={2 * self.options.qps}"]
        flags += ["--leader-elect=false", "--secure-port=0", "--profiling=false"]
        name = "kube-controller-manager"
        with running(Program(self.folder, name, self.api.programs[name], *flags)) as self.controllers:
            self.standing[name] = self.controllers.pid
            yield

    def partners(self, with_extender: bool) -> list[Program]:
        return [self.controllers]

    def pod_spec(self, with_extender: bool) -> JsonObject:
        if with_extender:
            return super().pod_spec(with_extender)
        resources = {"claims": [{"name": "gpu-mem"}]}
        return {
            "resourceClaims": [{"name": "gpu-mem", "resourceClaimTemplateName": TEMPLATE}],
            "containers": [{"name": "main", "image": "none", "resources": resources}],
        }

    def _check(self, with_extender: bool) -> None:
        super()._check(with_extender)
        if with_extender:
            return
        held = Counter[str]()
        claims = self.kube.get(CLAIMS)["items"]
        for claim in claims:
            results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
            if len(results) != 1 or results[0]["consumedCapacity"][contract.CAPACITY] != "1Gi":
                raise NoResult(f"claim {claim['metadata']['name']} has {results}.")
            held[results[0]["device"]] += 1
        if len(claims) != self.options.pods or max(held.values()) > CARD_UNITS:
            raise NoResult(f"{len(claims)} claims for {self.options.pods} pods, or a card over its size: {held}.")

    def _remove_pods(self) -> None:
        super()._remove_pods()
        # Without the garbage collector nothing else deletes them; their controller ends the protection.
        self.kube.delete(CLAIMS)
        until(lambda: not self.kube.get(f"{CLAIMS}?limit=1")["items"], "the claims of a run are deleted")


class TimedKubelet(Kubelet):
    """Measures the time of each of its calls."""

    def __init__(self, root: Path, wipe: Any) -> None:
        super().__init__(root, wipe)
        self.times: dict[str, list[float]] = {}

    def call(self, method: Any, *refs: dra.ClaimRef, timeout: float = 20.0) -> Any:
        began = time.perf_counter()
        answer = super().call(method, *refs, timeout=timeout)
        self.times.setdefault(method.path.rpartition("/")[2], []).append(time.perf_counter() - began)
        return answer


def prepare(api: ApiServer, folder: Path, options: argparse.Namespace) -> None:
    """Measure the driver on a node with as many claims as kubelet has pods."""
    cluster = Cluster(api, folder / "account", "bench-node")
    (cluster.account / "url").write_text(api.url)
    kubelet = TimedKubelet(folder / "kubelet", cluster.wipe)
    cgroups = folder / "cgroup"
    cgroups.mkdir()
    (cgroups / "cgroup.controllers").write_text("memory\n")
    kubelet.start()
    flags = [
        *("--node-name", cluster.node, "--kubelet-dir", str(folder / "kubelet")),
        *("--cdi-folders", str(folder / "nvidia"), "--claim-cdi-folder", str(folder / "cdi")),
        *("--cgroup-root", str(cgroups), "--status-socket", str(folder / "status.sock")),
    ]
    library = folder / "library"
    library.mkdir()
    cards = [seen(index, CARD_UNITS) for index in range(CARDS)]

    def claim(number: int) -> dra.ClaimRef:
        share = {
            **{"request": "gpu", "driver": contract.DRIVER, "pool": cluster.node, "shareID": uid(0x10000 + number)},
            **{"device": device_name(cards[number % CARDS].uuid), "consumedCapacity": {contract.CAPACITY: "1Gi"}},
        }
        found = cluster.claim(f"claim{number}", share, pods=[(f"pod{number}", uid(0x1000 + number))])
        return dra.ClaimRef(cluster.namespace, found, f"claim{number}")

    environment = driver(library, CARDS, CARD_UNITS)
    with Server("gpushare.dra.command", *flags, account=cluster.account, environment=environment) as server:
        until(lambda: kubelet.endpoints and cluster.slices(), "the driver is registered and announces its cards")
        held: deque[dra.ClaimRef] = deque()
        for number in range(options.claims):
            held.append(claim(number))
            kubelet.prepare(held[-1])
        # From here on the node is full.
        kubelet.times.clear()
        made = [claim(options.claims + number) for number in range(options.turns)]
        before = cpu(server.pid)
        for one in made:
            gone = held.popleft()
            kubelet.unprepare(gone)
            kubelet.prepare(one)
            held.append(one)
        each = (cpu(server.pid) - before) / options.turns
        print(f"\nthe driver on a node with {options.claims} claims:")
        for call, times in sorted(kubelet.times.items()):
            print(f"{call:<24} {percentiles(times)}   ({len(times)} calls)")
        print(f"CPU for each claim       {each * 1000:.1f} ms\nmemory                   {memory(server.pid):.0f} MB")
    kubelet.stop()


def name_many(names: int) -> None:
    """Measure the server of templates with so many different names that pods of one namespace wait for."""

    class Silent:
        """An API that makes every template; a pod's Events go nowhere."""

        def __init__(self) -> None:
            self.made: dict[str, float] = {}

        def post(self, path: str, body: JsonObject) -> JsonObject:
            self.made.setdefault(path.split("/")[5], time.perf_counter())
            return body

        def pod(self, *_event: str) -> bool:
            return True

    def pod(space: str, number: int, *units: int) -> JsonObject:
        claims = [{"name": f"c{at}", "resourceClaimTemplateName": f"gpu-mem-{one}"} for at, one in enumerate(units)]
        metadata = {"namespace": space, "name": f"pod-{number}", "uid": f"{number:036}", "resourceVersion": "1"}
        return {"metadata": metadata, "spec": {"resourceClaims": claims}}

    api: Any = Silent()
    keeper = Keeper(api, "MiB", lambda: True, api)
    for mirror in (keeper.pods, keeper.templates):
        mirror._synced.set()
    pods = [pod("many", at, *range(at + 1, at + 1 + MOST_PER_POD)) for at in range(0, names, MOST_PER_POD)]
    began = time.perf_counter()
    for one in pods:
        keeper.pods._upsert(one)
    taken, turns = time.perf_counter() - began, []
    keeper.work()
    for number in range(200):
        began = time.perf_counter()
        keeper.pods._upsert(pod("many", number, *range(number + 1, number + MOST_PER_POD)))
        keeper.work()
        turns.append(time.perf_counter() - began)
    began = time.perf_counter()
    keeper.pods._upsert(pod("victim", 0, 4))
    keeper.work()
    waited = api.made["victim"] - began
    print(
        f"\nthe server of templates, {names} names of {len(pods)} pods in one namespace, {len(keeper.pods)} pods kept:"
    )
    print(f"to take them over        {taken:.1f} s, {taken / len(pods) * 1e6:.0f} us for a pod")
    print(f"a pass after a change    {percentiles(turns)}")
    print(f"another namespace's pod  {waited * 1000:.1f} ms until its template is made")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--qps", type=int, default=5000, help="of the clients of scheduler and controller")
    parser.add_argument("--claims", type=int, default=110, help="that the node holds while its driver is measured")
    parser.add_argument("--turns", type=int, default=500, help="claims that are prepared on the full node")
    parser.add_argument("--names", type=int, default=200_000, help="that pods name of templates")
    parser.add_argument("--only-names", action="store_true", help="measure the server of templates alone")
    options = parser.parse_args()
    if options.only_names:
        name_many(options.names)
        return 0
    options.flag, options.preload = [], 0
    rates: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}
    try:
        server = ApiServer(["--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"])
        with server as api, tempfile.TemporaryDirectory(prefix="kg-") as name:
            folder = Path(name)
            bench = ClaimsBench(api, folder, options)
            bench.nodes()
            bench.standing = api_processes(api)
            print(
                f"{options.pods} pods of 1 GiB on {options.nodes} nodes; clients {options.qps} a second; "
                f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n"
            )
            with bench.controller():
                for turn in range(options.rounds + 1):
                    for with_extender in (False, True) if turn % 2 == 0 else (True, False):
                        result = bench.run(with_extender)
                        # The first of each fills caches and isn't counted.
                        if turn:
                            rates[with_extender].append(result.rate)
                            costs[with_extender].append(sum(result.cpu_ms.values()))
                            show("extender" if with_extender else "claims", result)
            own = folder / "node"
            own.mkdir()
            prepare(api, own, options)
        name_many(options.names)
    except (NoResult, KubeError, Missing, LabError, OSError, subprocess.SubprocessError) as error:
        print(f"no result: {error}", file=sys.stderr)
        return 2
    rate, cost = (partial(lambda found, which: statistics.median(found[which]), found) for found in (rates, costs))
    print(
        f"\nmedians: {rate(False):.0f} pods/s by claims, {rate(True):.0f} by the extender: "
        f"{rate(False) / rate(True):.0%}; ms of CPU per pod {cost(False):.1f} and {cost(True):.1f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
