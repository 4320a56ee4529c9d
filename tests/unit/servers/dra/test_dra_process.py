# SPDX-License-Identifier: GPL-3.0-or-later
"""The real command as a process of its own, with the real nvidia-ml-py over the lab's simulated library.

kubelet's double uses it over gRPC, and the API server is a real one; the tests kill it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import typing as t
from pathlib import Path

import gpushare
import pytest
from dra_cluster import Cluster
from dra_kit import CgroupTree, Kubelet, result, tried, uid, until
from gpushare.dra.claims import DRIVER
from gpushare.dra.specifications import claim_of
from gpushare.kubelet import dra
from limit_fakes import R615
from real_apiserver import MERGE
from unix_http import ask_socket

UUIDS = tuple(f"GPU-{number:08x}-1111-2222-3333-444444444444" for number in range(2))
# What the simulated driver keeps of a card.
RESERVED_MIB = 256


class Process:
    """The driver's process, and all that is around it.

    :param library: the folder of the simulated driver's library.
    """

    def __init__(self, root: Path, cluster: Cluster, library: Path) -> None:
        self.root, self.cluster, self._library = root, cluster, library
        self.cgroups = CgroupTree(root / "cgroup")
        self.kubelet = Kubelet(root / "kubelet", cluster.wipe)
        self.cdi, self.nvidias, self.status_socket = root / "cdi", root / "nvidia", root / "status.sock"
        self._log = root / "log"
        self._process: subprocess.Popen[bytes] | None = None
        # The cards' UUIDs; and a command that starts it.
        self.uuids, self.started_by = UUIDS, tuple[str, ...]()
        self._plug_in()

    def _plug_in(self) -> None:
        rows = [
            f"card {number} uuid={uuid} minor={number} memory={16384 + RESERVED_MIB} bus=0000:0{number + 1}:00.0 "
            "name=Simulated_GPU mig=disabled"
            for number, uuid in enumerate(UUIDS)
        ]
        (self.root / "cards").write_text("\n".join([f"driver {R615}", "cuda 13000", *rows, ""]))

    @property
    def driver_environment(self) -> dict[str, str]:
        """The environment of a program that uses the simulated driver."""
        return {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(self._library),
            "KUBEGPU_SIM_CARDS": str(self.root / "cards"),
        }

    def start(self, *arguments: str) -> None:
        with self._log.open("ab") as stream:
            self._process = subprocess.Popen(
                [
                    *self.started_by,
                    *(sys.executable, "-m", "gpushare.dra.command", "--node-name", self.cluster.node),
                    *("--log-format", "json", "--kubelet-dir", str(self.root / "kubelet")),
                    *("--api-server", self.cluster.server.url, "--service-account", str(self.cluster.account)),
                    *("--cdi-folders", str(self.nvidias), "--claim-cdi-folder", str(self.cdi)),
                    *("--cgroup-root", str(self.cgroups.root), "--status-socket", str(self.status_socket)),
                    *("--query-interval", "0.3", *arguments),
                ],
                env={**self.driver_environment, "PYTHONPATH": str(Path(gpushare.__file__).parents[1])},
                stderr=stream,
            )

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(20)
        self._process = None
        return code

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def state(self) -> str:
        """Whether the process runs, and what it has written last."""
        code = self._process.poll() if self._process is not None else "none"
        return f"exit status {code}, registered at {self.kubelet.endpoints}, log: {self.log[-2000:]}"

    def ready(self) -> str:
        try:
            return ask_socket(self.status_socket, "/readyz")[1]
        except OSError as error:
            return str(error)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        self.kubelet.stop()

    def claim(self, number: int, card: int, memory: str) -> dra.ClaimRef:
        share = {**result(self.uuids[card].lower(), memory), "pool": self.cluster.node}
        found = self.cluster.claim(f"claim{number}", share, pods=[(f"pod{number}", uid(0x1000 + number))])
        return dra.ClaimRef(self.cluster.namespace, found, f"claim{number}")

    def specifications(self) -> set[str]:
        """The UIDs of the claims that the container runtime finds."""
        found = set()
        for file in self.cdi.glob("*.json"):
            for entry in json.loads(file.read_text())["devices"]:
                found.add(claim_of(f"gpu.kubegpu.share/claim={entry['name']}"))
        return found


@pytest.fixture
def process(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, drivers: dict[str, Path]
) -> t.Iterator[Process]:
    one = Process(tmp_path_factory.mktemp("p"), cluster, drivers[R615] / "usr" / "lib64")
    yield one
    one.close()


def test_killed_again_and_again_while_pods_come_and_go(process: Process) -> None:
    """With kubelet restarted, too: in the end all is there of the claims that are there, and nothing of others."""
    kubelet, dice = process.kubelet, random.Random(3)
    kubelet.start()
    process.start()
    until(lambda: process.ready() == "ok", 60, process.ready)
    stop, problems = threading.Event(), list[str]()
    # Each worker has a card's half for its claims.
    alive: dict[str, dra.ClaimRef] = {}

    def until_done(call: t.Callable[[], object]) -> None:
        # Beside a lab that compiles, a process may take a minute to start.
        until(lambda: tried(call), 300, process.state, pause=0.2)

    def work(worker: int) -> None:
        number = worker * 1000
        try:
            while True:
                is_last = stop.is_set()
                number += 1
                claim = process.claim(number, worker % 2, "8Gi")
                until_done(functools.partial(kubelet.prepare, claim))
                names = {name.removeprefix("gpu.kubegpu.share/claim=") for name in kubelet.prepare(claim)}
                there = {
                    entry["name"]
                    for file in process.cdi.glob(f"*{claim.uid}.json")
                    for entry in json.loads(file.read_text())["devices"]
                }
                if not names <= there:
                    problems.append(f"{claim.name}: {names} of {there}")
                if is_last:
                    alive[claim.uid] = claim
                    return
                until_done(functools.partial(kubelet.unprepare, claim))
                process.cluster.release(claim.name)
        except BaseException as error:
            problems.append(repr(error))
            raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for turn in range(5):
        time.sleep(dice.uniform(0.3, 1.5))
        process.kill()
        if turn % 3 == 2:
            kubelet.stop()
            kubelet.start()
        process.start()
        until(lambda: kubelet.endpoints, 60, process.ready)
    stop.set()
    for worker in workers:
        worker.join(700)
    assert not problems and len(alive) == 4
    until(lambda: process.ready() == "ok", 60, process.ready)
    assert process.specifications() == set(alive)
    assert {file.stem for file in (process.root / "kubelet/plugins/gpu.kubegpu.share/claims").iterdir()} == set(alive)
    for claim in alive.values():
        kubelet.unprepare(claim)
    assert process.specifications() == set() and kubelet.claims == {}
    assert "Traceback" not in process.log
    assert len([line for line in process.log.splitlines() if '"claim prepared"' in line]) > 8, "it was no burst"


# --------------------------------------------------------------------------- with kube-scheduler

SCHEDULER = "scheduler-of-shares"
API = "/apis/resource.k8s.io/v1"


@pytest.fixture
def scheduler(cluster: Cluster, tmp_path: Path) -> t.Iterator[None]:
    """A real kube-scheduler for the pods that name it, and a node that they fit on."""
    server, node = cluster.server, f"/api/v1/nodes/{cluster.node}"
    server.request("PATCH", node, {"metadata": {"labels": {"kubernetes.io/hostname": cluster.node}}}, MERGE)
    room = {"cpu": "8", "memory": "8Gi", "pods": "50"}
    ready = {"type": "Ready", "status": "True", "reason": "Simulated", "message": "simulated"}
    status = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
    server.request("PATCH", f"{node}/status", status, MERGE)
    selectors = [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]
    about = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": DRIVER}}
    server.apply({**about, "spec": {"selectors": selectors}})
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(server.kubeconfig)},
        "profiles": [{"schedulerName": SCHEDULER}],
    }
    (tmp_path / "scheduler.json").write_text(json.dumps(config))
    with (tmp_path / "scheduler.log").open("wb") as log:
        process = subprocess.Popen(
            [
                server.programs["kube-scheduler"],
                f"--config={tmp_path / 'scheduler.json'}",
                *("--secure-port=0", f"--cert-dir={tmp_path}"),
            ],
            stderr=log,
        )
    yield
    process.kill()
    process.wait()


class Tenant:
    """A user with the role edit in a namespace of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.namespace = cluster, cluster.server.namespace("tenant")
        self.user = f"user-of-{self.namespace}"
        group = "rbac.authorization.k8s.io"
        # The role edit consists of these; no controller aggregates them here.
        for part in ("view", "edit"):
            role = {"apiGroup": group, "kind": "ClusterRole", "name": f"system:aggregate-to-{part}"}
            cluster.server.request(
                "POST",
                f"/apis/{group}/v1/namespaces/{self.namespace}/rolebindings",
                {
                    "metadata": {"name": part},
                    "roleRef": role,
                    "subjects": [{"kind": "User", "name": self.user, "apiGroup": group}],
                },
            )

    def ask(self, method: str, path: str, body: t.Any = None, content: str = "application/json") -> t.Any:
        return self.cluster.server.request(method, path, body, content, user=self.user)

    def run(self, name: str, memory: str) -> None:
        """Create a claim, and a pod of that name with it."""
        exactly = {"deviceClassName": DRIVER, "capacity": {"requests": {"memory": memory}}}
        body = {"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
        self.ask("POST", f"{API}/namespaces/{self.namespace}/resourceclaims", body)
        spec = {
            "schedulerName": SCHEDULER,
            "nodeSelector": {"kubernetes.io/hostname": self.cluster.node},
            "tolerations": [{"operator": "Exists"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}],
        }
        self.ask("POST", f"/api/v1/namespaces/{self.namespace}/pods", {"metadata": {"name": name}, "spec": spec})

    def placed(self, name: str) -> tuple[dra.ClaimRef, str] | None:
        """The claim of a bound pod, and its card; None while the pod waits."""
        # The pod first: it is bound when the claim has its allocation.
        if "nodeName" not in self.ask("GET", f"/api/v1/namespaces/{self.namespace}/pods/{name}")["spec"]:
            return None
        claim = self.ask("GET", f"{API}/namespaces/{self.namespace}/resourceclaims/{name}")
        (found,) = claim["status"]["allocation"]["devices"]["results"]
        return dra.ClaimRef(self.namespace, claim["metadata"]["uid"], name), str(found["device"])

    def why(self, name: str) -> str:
        """Why a pod waits, in kube-scheduler's words."""
        pod = self.ask("GET", f"/api/v1/namespaces/{self.namespace}/pods/{name}")
        found = {condition["type"]: condition.get("message", "") for condition in pod["status"].get("conditions", [])}
        return str(found.get("PodScheduled", ""))

    def take_away(self, name: str) -> None:
        """Remove a claim while its pod runs."""
        path = f"{API}/namespaces/{self.namespace}/resourceclaims/{name}"
        self.ask("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)
        self.ask("DELETE", path)
        assert self.cluster.server.ask("GET", path)[0] == 404


@pytest.mark.usefixtures("scheduler")
def test_a_claim_that_is_removed_while_its_pod_runs_gives_its_memory_to_nobody(process: Process) -> None:
    """By a tenant with the role edit: the next pod gets another card, and one for which there is none waits."""
    cluster, kubelet = process.cluster, process.kubelet

    def taints() -> list[list[str]]:
        devices = [device for each in cluster.slices() for device in each["spec"].get("devices", [])]
        assert all(each["effect"] == "NoSchedule" for device in devices for each in device.get("taints", []))
        return [[f"{each['key']}={each['value']}" for each in device.get("taints", [])] for device in devices]

    kubelet.start()
    process.start()
    until(lambda: process.ready() == "ok", 60, process.ready)
    attacker, victim = Tenant(cluster), Tenant(cluster)
    attacker.run("keeps", "10Gi")
    kept, card = until(lambda: attacker.placed("keeps"), 60, lambda: attacker.why("keeps"))
    assert kubelet.prepare(kept) and card == UUIDS[0].lower() and taints() == [[], []]
    attacker.take_away("keeps")
    mark = ["gpu.kubegpu.share/memory-without-claim=ClaimNotFound"]
    # The claim is read every ten seconds.
    until(lambda: taints() == [mark, []], 30, lambda: str(taints()))
    victim.run("first", "10Gi")
    found, card = until(lambda: victim.placed("first"), 60, lambda: victim.why("first"))
    assert card == UUIDS[1].lower() and kubelet.prepare(found)
    victim.run("second", "10Gi")
    until(lambda: "cannot allocate all claims" in victim.why("second"), 60, lambda: victim.why("second"))
    # Neither the driver's end nor kubelet's, which wipes the slices, makes the card free for a moment.
    process.kill()
    kubelet.stop()
    kubelet.start()
    process.start()
    until(taints, 60, process.ready)
    assert taints() == [mark, []]
    until(lambda: process.ready() == "ok", 60, process.ready)
    assert victim.placed("second") is None
    # The pod has ended.
    kubelet.unprepare(kept)
    until(lambda: taints() == [[], []], 20, lambda: str(taints()))
    found, card = until(lambda: victim.placed("second"), 60, lambda: victim.why("second"))
    assert card == UUIDS[0].lower() and kubelet.prepare(found)


def test_excluded_cards_are_in_no_slice(process: Process) -> None:
    """A claim that has a card before it is excluded keeps it, with a taint that no other claim tolerates."""

    def offered() -> list[tuple[str, list[str]]]:
        return [
            (device["name"], [taint["value"] for taint in device.get("taints", [])])
            for piece in process.cluster.slices()
            for device in piece["spec"]["devices"]
        ]

    first, second = (uuid.lower() for uuid in UUIDS)
    process.kubelet.start()
    process.start()
    until(lambda: process.ready() == "ok", 60, process.ready)
    until(lambda: offered() == [(first, []), (second, [])], 60)
    devices = [device for piece in process.cluster.slices() for device in piece["spec"]["devices"]]
    addresses = [device["attributes"]["resource.kubernetes.io/pciBusID"]["string"] for device in devices]
    assert addresses == ["0000:01:00.0", "0000:02:00.0"]
    assert [device["capacity"]["memory"]["value"] for device in devices] == ["16Gi", "16Gi"]
    claim = process.claim(1, 0, "4Gi")
    assert process.kubelet.prepare(claim)
    assert process.kill(signal.SIGTERM) == 0 and "Traceback" not in process.log
    assert list((process.root / "kubelet" / "plugins_registry").iterdir()) == []
    entries = json.dumps({"nodes": [process.cluster.node], "cards": ["01:00.0"]})
    process.start("--exclude-cards", entries)
    until(lambda: offered() == [(first, ["Excluded"]), (second, [])], 60)
    until(lambda: process.ready() == "ok", 60)
    process.cluster.release("claim1")
    process.kubelet.unprepare(claim)
    until(lambda: offered() == [(second, [])], 60)
    process.kill(signal.SIGTERM)
    process.start()
    until(lambda: offered() == [(first, []), (second, [])], 60)
