# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of reading the allocation: 1,000 nodes of 8 cards with 20,000 pods in a real kube-apiserver, then 5,000 nodes
with 100,000 pods.

``gpu_allocation_info`` and ``gpu_allocation_check`` as whole processes, as Ansible starts them, and for the first size
a plain full list of the same nodes and pods by the same Python client: seconds, maximum memory of the process, and
requests. For comparison, on a machine of two cores kubectl-inspect-gpushare took 2.3 to 4.4 s and 310 MB for the first
size.

    python bench/allocation.py [--nodes N] [--pods N] [--factor N] [--rounds N] [--clients N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible
from processes import ROOT, NoResult, verdict

from gpushare.shared._contracts import gpushare as contract  # isort: skip
from gpushare.api.client import Kube, KubeError, connect  # isort: skip
from real_apiserver import ApiServer, Missing  # isort: skip

CARDS, CARD_UNITS, UNITS = 8, 80, 2
SECONDS, MEGABYTES = 1.5, 103.0
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
pid = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[2:]], os.environ)
_pid, status, used = os.wait4(pid, 0)
used_by = {"seconds": time.perf_counter() - began, "cpu": used.ru_utime + used.ru_stime, "kib": used.ru_maxrss}
open(sys.argv[1], "w").write(json.dumps({**used_by, "status": os.waitstatus_to_exitcode(status)}))
"""


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu: float
    megabytes: float
    requests: int
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


def cost(command: list[str], text: str) -> Cost:
    """Run a process and measure it with its children."""
    packages = [str(ROOT / ".collections"), str(Path(ansible.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
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
    answer = json.loads(output)
    requests = sum(answer["requests"].values())
    megabytes = measured_cost["kib"] * 1024 / 1e6
    return Cost(measured_cost["seconds"], measured_cost["cpu"], megabytes, requests, answer)


def compared(kubeconfig: Path, nodes: int, pods: int, rounds: int, plain: bool = True) -> Cost:
    """Measure all methods alternately; return the module's median cost.

    :param plain: measure a plain list too, which takes ten gigabytes for 100,000 pods.
    """
    arguments = json.dumps({"ANSIBLE_MODULE_ARGS": {"kubeconfig": str(kubeconfig)}})
    ways = {
        "gpu_allocation_info": (["-m", f"{MODULES}.gpu_allocation_info"], arguments),
        # Without evidence of the machines: only the cost of the API.
        "gpu_allocation_check": (["-m", f"{MODULES}.gpu_allocation_check"], arguments),
    }
    if plain:
        ways["plain list"] = (["-c", PLAIN, str(kubeconfig)], "")
    print(f"\n{nodes:,} nodes x {CARDS} cards, {pods:,} pods")
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _round in range(rounds):
        for name, way in ways.items():
            costs[name].append(cost(*way))
    found = costs["gpu_allocation_info"][0].answer
    counted = len(found["nodes"]), found["used"], found["total"]
    if counted != (nodes, pods * UNITS, nodes * CARDS * CARD_UNITS):
        raise NoResult(f"the module reports {counted} (nodes, used, total), which isn't what was created.")
    if plain:
        listed = costs["plain list"][0].answer
        if (listed["nodes"], listed["pods"]) != (nodes, pods):
            raise NoResult(f"the plain list has {listed['nodes']} nodes and {listed['pods']} pods.")
    medians = {}
    for name, each in costs.items():
        one = medians[name] = Cost(
            statistics.median(run.seconds for run in each),
            statistics.median(run.cpu for run in each),
            statistics.median(run.megabytes for run in each),
            each[0].requests,
            {},
        )
        print(
            f"  {name:<22} {one.seconds:6.2f} s  {one.cpu:6.2f} s of a processor  {one.megabytes:7.1f} MB "
            f"{one.requests:4} requests"
        )
    return medians["gpu_allocation_info"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=20000)
    parser.add_argument("--factor", type=int, default=5, help="of the second size to the first; 1 omits it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16, help="parallel requests that create the objects")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    try:
        with ApiServer() as api:
            kube = connect(api.url, str(api.service_account(api.folder / "account")), 120.0)
            kube.post("/api/v1/namespaces/default/configmaps", {"metadata": {"name": "training"}})
            fill(kube, range(options.nodes), range(options.pods), options.clients)
            small = compared(api.kubeconfig, options.nodes, options.pods, options.rounds)
            goals = [
                (f"under {SECONDS} s: {small.seconds:.2f}", small.seconds < SECONDS),
                (f"under {MEGABYTES:.0f} MB: {small.megabytes:.0f}", small.megabytes < MEGABYTES),
            ]
            if options.factor > 1:
                nodes, pods = options.nodes * options.factor, options.pods * options.factor
                fill(kube, range(options.nodes, nodes), range(options.pods, pods), options.clients)
                large = compared(api.kubeconfig, nodes, pods, options.rounds, plain=False)
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
