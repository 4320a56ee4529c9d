# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of reading the allocation: 1,000 nodes of 8 cards with 20,000 pods in a real kube-apiserver, then 5,000 nodes
with 100,000 pods.

``gpu_allocation_info`` and ``gpu_allocation_check`` as whole processes, as Ansible starts them, and for the first size
a plain full list of the same nodes and pods by the same Python client: seconds, seconds of a processor, maximum memory
of the process, requests, and bytes received. All of them run in turn, so that their ratios hold on a busy machine, too.

With ``--inspect`` also ``kubectl-inspect-gpushare -d``, whose source is
https://github.com/AliyunContainerService/gpushare-device-plugin; in its folder in a GOPATH it is built by
``GO111MODULE=off go build ./cmd/inspect``. The goals are then a quarter of its time and a tenth of its memory.

    python bench/allocation.py [--nodes N] [--pods N] [--factor N] [--rounds N] [--clients N] [--inspect PROGRAM]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible
import yaml
from processes import ROOT, NoResult, verdict

from gpushare.shared._contracts import gpushare as contract  # isort: skip
from gpushare.api.client import Kube, KubeError, connect  # isort: skip
from real_apiserver import ApiServer, Missing  # isort: skip

CARDS, CARD_UNITS, UNITS = 8, 80, 2
# Of the module, without another program to compare with.
SECONDS, MEGABYTES = 1.2, 56.0
# Shares of kubectl-inspect-gpushare.
OF_TIME, OF_MEMORY = 1 / 4, 1 / 10
MODULES = "ansible_collections.kubegpu.share.plugins.modules"
UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"
PLAIN = f"""
import json, sys
import kubernetes
kubernetes.config.load_kube_config(sys.argv[1])
core = kubernetes.client.CoreV1Api()
nodes = core.list_node().items
pods = core.list_pod_for_all_namespaces(field_selector={UNFINISHED!r}).items
print(json.dumps({{"nodes": len(nodes), "pods": len(pods), "requests": {{"GET": 2}}}}))
"""
# The maximum memory of a child includes that of its parent before exec, so a small process starts it.
MEASURE = """
import json, os, sys, time
began = time.perf_counter()
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_pid, status, used = os.wait4(pid, 0)
used_by = {"seconds": time.perf_counter() - began, "cpu": used.ru_utime + used.ru_stime, "kib": used.ru_maxrss}
open(sys.argv[1], "w").write(json.dumps({**used_by, "status": os.waitstatus_to_exitcode(status)}))
"""


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu: float
    megabytes: float
    answer: dict[str, Any]


# --------------------------------------------------------------------------- the cluster


def node(number: int) -> dict[str, Any]:
    cards = [
        contract.Card(
            at, f"GPU-{number:08x}-0000-4000-8000-{at:012x}", at, CARD_UNITS * 1024, CARD_UNITS, model="NVIDIA H100"
        )
        for at in range(CARDS)
    ]
    annotations = {
        contract.NODE_CARDS: contract.cards_to_annotation(cards),
        "node.alpha.kubernetes.io/ttl": "0",
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
    }
    labels = {
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        "kubernetes.io/hostname": f"gpu-node-{number:05d}",
        contract.NODE_LABEL: contract.NODE_LABEL_VALUE,
    }
    return {"metadata": {"name": f"gpu-node-{number:05d}", "annotations": annotations, "labels": labels}}


def node_status(number: int) -> dict[str, Any]:
    announced = {
        "cpu": "128",
        "memory": "1056Gi",
        "pods": "110",
        "ephemeral-storage": "1800Gi",
        contract.RESOURCE_MEMORY: str(CARDS * CARD_UNITS),
        contract.RESOURCE_COUNT: str(CARDS),
    }
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
    return {
        "capacity": announced,
        "allocatable": announced,
        "addresses": [{"type": "InternalIP", "address": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"}],
        "conditions": [
            {
                "type": kind,
                "status": str(kind == "Ready"),
                "reason": f"Kubelet{kind}",
                "message": f"kubelet reports {kind}",
            }
            for kind in kinds
        ],
        # As many as kubelet reports.
        "images": [
            {"names": [f"registry.example/image-{at}@sha256:{at:064x}"], "sizeBytes": 10**9} for at in range(50)
        ],
    }


def pod(number: int, nodes: int) -> dict[str, Any]:
    """Return a training pod of ordinary size, with the annotations of the extender and the device plugin."""
    card = number // nodes % CARDS
    annotations = {
        contract.POD_INDEX: str(card),
        contract.POD_CARD_UNITS: str(CARD_UNITS),
        contract.POD_UNITS: str(UNITS),
        contract.POD_ASSIGNED: "true",
        contract.POD_ASSUME_TIME: "1790000000000000000",
    }
    container = {
        "name": "main",
        "image": "registry.example/team/training:2026.11",
        "command": ["python", "-m", "training.run", "--config=/config/run.yaml"],
        "env": [{"name": f"SETTING_{at}", "value": f"value-{at}-of-{number}"} for at in range(8)],
        "resources": {"limits": {contract.RESOURCE_MEMORY: str(UNITS), "cpu": "4", "memory": "32Gi"}},
        "volumeMounts": [{"name": "config", "mountPath": "/config"}, {"name": "data", "mountPath": "/data"}],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 10},
    }
    return {
        "metadata": {
            "name": f"training-{number % 97}-{number:06d}",
            "labels": {"app": f"training-{number % 97}", "team": f"team-{number % 40}"},
            "annotations": annotations,
        },
        "spec": {
            "nodeName": f"gpu-node-{number % nodes:05d}",
            "containers": [container],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [{"name": "config", "configMap": {"name": "training"}}, {"name": "data", "emptyDir": {}}],
        },
    }


def pod_status(number: int) -> dict[str, Any]:
    began = "2026-11-22T10:00:00Z"
    return {
        "phase": "Running",
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": began}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "podIP": "10.1.2.3",
        "podIPs": [{"ip": "10.1.2.3"}],
        "hostIP": "10.0.0.1",
        "startTime": began,
        "containerStatuses": [
            {
                "name": "main",
                "image": "registry.example/team/training:2026.11",
                "imageID": f"registry.example/team/training@sha256:{7:064x}",
                "containerID": f"containerd://{number:064x}",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": began}},
            }
        ],
    }


def fill(kube: Kube, nodes: range, pods: range, clients: int) -> None:
    """Create nodes and pods, each with the status that kubelet reports.

    :param nodes: numbers of the new nodes.
    :param pods: numbers of the new pods.
    :param clients: parallel requests.
    """

    def add(path: str, made: dict[str, Any], status: dict[str, Any]) -> None:
        kube.post(path, made)
        kube.patch(f"{path}/{made['metadata']['name']}/status", {"status": status})

    def add_node(number: int) -> None:
        add("/api/v1/nodes", node(number), node_status(number))

    def add_pod(number: int) -> None:
        add("/api/v1/namespaces/default/pods", pod(number, nodes.stop), pod_status(number))

    with ThreadPoolExecutor(clients) as pool:
        for work, numbers in ((add_node, nodes), (add_pod, pods)):
            # In parts, since each pending call is an object.
            for start in range(numbers.start, numbers.stop, 5000):
                list(pool.map(work, range(start, min(start + 5000, numbers.stop))))


# --------------------------------------------------------------------------- measurement


class Counter:
    """Forwards connections to the API server, and counts them and the bytes that it sends.

    :param url: the API server's.
    """

    def __init__(self, url: str) -> None:
        self.bytes = self.connections = 0
        host, _colon, port = url.partition("//")[2].partition(":")
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, args=((host, int(port)),), daemon=True).start()

    def _accept(self, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, server = self._server.accept()[0], socket.create_connection(address)
                self.connections += 1
                for way in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._copy, args=way, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, count: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.bytes += len(data) if count else 0
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()


def cost(command: list[str], text: str, kubeconfig: Path) -> Cost:
    """Run a program and measure it with its children; the answer is its output, if that is JSON.

    :param text: its standard input.
    :param kubeconfig: for a program that takes it from the environment.
    """
    packages = [str(ROOT / ".collections"), str(Path(ansible.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages), "KUBECONFIG": str(kubeconfig)}
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryDirectory() as own,
    ):
        given.write(text)
        given.seek(0)
        used = Path(own) / "used"
        measured = [sys.executable, "-S", "-c", MEASURE, str(used), *command]
        subprocess.run(measured, stdin=given, stdout=out, env=environment, check=True)
        measured_cost = json.loads(used.read_text())
        out.seek(0)
        output = out.read()
    if measured_cost["status"]:
        raise NoResult(f"{command[-1]} ends with {measured_cost['status']}: {output[-500:]}")
    answer = json.loads(output) if output.lstrip().startswith("{") else {"text": output}
    megabytes = measured_cost["kib"] * 1024 / 1e6
    return Cost(measured_cost["seconds"], measured_cost["cpu"], megabytes, answer)


def ways(kubeconfig: Path, plain: bool, inspect: str) -> dict[str, tuple[list[str], str]]:
    """Return the command and the standard input of each program.

    :param plain: with a plain list, which takes ten gigabytes for 100,000 pods.
    :param inspect: the path of kubectl-inspect-gpushare; empty without it.
    """
    arguments = json.dumps({"ANSIBLE_MODULE_ARGS": {"kubeconfig": str(kubeconfig)}})
    found = {
        "gpu_allocation_info": ([sys.executable, "-m", f"{MODULES}.gpu_allocation_info"], arguments),
        # Without evidence of the machines: only the cost of the API.
        "gpu_allocation_check": ([sys.executable, "-m", f"{MODULES}.gpu_allocation_check"], arguments),
    }
    if plain:
        found["plain list"] = ([sys.executable, "-c", PLAIN, str(kubeconfig)], "")
    if inspect:
        found["kubectl inspect"] = ([inspect, "-d"], "")
    return found


def traffic(kubeconfig: Path, name: str, plain: bool, inspect: str) -> tuple[int, int]:
    """Run a program once more, and return its connections and the bytes that it receives."""
    config = yaml.safe_load(kubeconfig.read_text())
    counter = Counter(config["clusters"][0]["cluster"]["server"])
    try:
        config["clusters"][0]["cluster"]["server"] = counter.url
        with tempfile.TemporaryDirectory() as own:
            file = Path(own) / "kubeconfig"
            file.write_text(yaml.safe_dump(config))
            cost(*ways(file, plain, inspect)[name], file)
    finally:
        counter.close()
    return counter.connections, counter.bytes


def compared(
    kubeconfig: Path, nodes: int, pods: int, rounds: int, plain: bool = True, inspect: str = ""
) -> dict[str, Cost]:
    """Measure all programs alternately; return the median cost of each.

    :param nodes: how many there are, as for pods.
    :param rounds: how often each program runs.
    :param plain: see ``ways``, as for ``inspect``.
    """
    programs = ways(kubeconfig, plain, inspect)
    print(f"\n{nodes:,} nodes x {CARDS} cards, {pods:,} pods")
    costs: dict[str, list[Cost]] = {name: [] for name in programs}
    for _round in range(rounds):
        for name, way in programs.items():
            costs[name].append(cost(*way, kubeconfig))
    found = costs["gpu_allocation_info"][0].answer
    counted = len(found["nodes"]), found["used"], found["total"]
    if counted != (nodes, pods * UNITS, nodes * CARDS * CARD_UNITS):
        raise NoResult(f"the module reports {counted} (nodes, used, total), which isn't what was created.")
    if plain:
        listed = costs["plain list"][0].answer
        if (listed["nodes"], listed["pods"]) != (nodes, pods):
            raise NoResult(f"the plain list has {listed['nodes']} nodes and {listed['pods']} pods.")
    if inspect and str(pods * UNITS) not in costs["kubectl inspect"][0].answer["text"].rpartition("Cluster")[2]:
        raise NoResult("kubectl inspect prints another sum.")
    medians = {}
    for name, each in costs.items():
        one = medians[name] = Cost(
            statistics.median(run.seconds for run in each),
            statistics.median(run.cpu for run in each),
            statistics.median(run.megabytes for run in each),
            {},
        )
        requests = sum(each[0].answer.get("requests", {}).values())
        connections, received = traffic(kubeconfig, name, plain, inspect)
        print(
            f"  {name:<22} {one.seconds:6.2f} s  {one.cpu:6.2f} s of a processor  {one.megabytes:7.1f} MB "
            f"{requests or '?':>4} requests  {connections:3} connections  {received / 1e6:7.1f} MB received"
        )
    return medians


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=20000)
    parser.add_argument("--factor", type=int, default=5, help="of the second size to the first; 1 omits it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inspect", default="", help="path of kubectl-inspect-gpushare, to compare with it")
    parser.add_argument("--clients", type=int, default=16, help="parallel requests that create the objects")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    try:
        with ApiServer() as api:
            kube = connect(api.url, str(api.service_account(api.folder / "account")), 120.0)
            kube.post("/api/v1/namespaces/default/configmaps", {"metadata": {"name": "training"}})
            fill(kube, range(options.nodes), range(options.pods), options.clients)
            medians = compared(api.kubeconfig, options.nodes, options.pods, options.rounds, inspect=options.inspect)
            small, other = medians["gpu_allocation_info"], medians.get("kubectl inspect")
            seconds = SECONDS if other is None else other.seconds * OF_TIME
            megabytes = MEGABYTES if other is None else other.megabytes * OF_MEMORY
            goals = [
                (f"under {seconds:.2f} s: {small.seconds:.2f}", small.seconds < seconds),
                (f"under {megabytes:.0f} MB: {small.megabytes:.0f}", small.megabytes < megabytes),
            ]
            if options.factor > 1:
                nodes, pods = options.nodes * options.factor, options.pods * options.factor
                fill(kube, range(options.nodes, nodes), range(options.pods, pods), options.clients)
                large = compared(api.kubeconfig, nodes, pods, options.rounds, plain=False)["gpu_allocation_info"]
                for what, first, second in (
                    ("time", small.seconds, large.seconds),
                    ("memory", small.megabytes, large.megabytes),
                ):
                    # A fifth more than linear is noise and caches.
                    grown = second / first
                    goals.append(
                        (f"{what} grows no faster than the cluster: {grown:.1f} times", grown <= options.factor * 1.2)
                    )
    except (NoResult, KubeError, Missing) as error:
        print(f"no result: {error}", file=sys.stderr)
        return 2
    print()
    return verdict(goals)


if __name__ == "__main__":
    sys.exit(main())
