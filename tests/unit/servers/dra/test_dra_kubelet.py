# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver's process with kubelet's own plugin manager and DRA manager, of the lab's version, over a real API server.

kubelet_managers.go is built with the modules that the lab's kubelet is built of, which takes minutes once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
from dra_cluster import Cluster
from dra_kit import Refused, result, until
from limit_fakes import R615
from test_dra_process import UUIDS, Process

from lab import build
from lab.paths import cache_root, made_once
from lab.shell import LabError

SOURCE = Path(__file__).with_name("kubelet_managers.go")
NAMES = "gpu.kubegpu.share/claim="
# kubelet deletes the slices of a driver that was away for so long.
WIPING_SECONDS = 30

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is missing: the NVML stand-in can't be built"),
]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of kubelet's managers."""
    tools = build.SETS["kubernetes"]
    try:
        go = build.find_go()
    except LabError as missing:
        pytest.skip(str(missing))
    key = hashlib.sha256(SOURCE.read_bytes() + build.key_of(tools, go).encode()).hexdigest()[:16]
    with made_once(cache_root() / "bin" / f"kubelet-managers-{key}") as fresh:
        if fresh is not None:
            folder = tmp_path_factory.mktemp("go")
            for file in (SOURCE, tools.folder / "go.mod", tools.folder / "go.sum"):
                shutil.copy(file, folder)
            # The module names only commands; the packages of this program are among those of kubelet.
            command = ["nice", go, "build", "-mod=mod", *tools.flags(), "-o", str(fresh / "kubelet-managers"), "."]
            environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
    return cache_root() / "bin" / f"kubelet-managers-{key}" / "kubelet-managers"


class Managers:
    """kubelet's managers as a process; its checkpoint outlives it."""

    def __init__(self, program: Path, process: Process) -> None:
        self._program, self._process = program, process
        self._log = process.root / "kubelet.log"
        self._running: subprocess.Popen[str] | None = None

    def start(self) -> None:
        (self._process.root / "kubelet" / "plugins_registry").mkdir(parents=True, exist_ok=True)
        cluster = self._process.cluster
        command = [str(self._program), f"--kubeconfig={cluster.server.kubeconfig}", f"--node={cluster.node}", "--v=4"]
        with self._log.open("a") as log:
            self._running = subprocess.Popen(
                [*command, f"--root={self._process.root / 'kubelet'}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait(10)
            self._running = None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ask(self, verb: str, pod: str) -> dict[str, list[str]]:
        """Prepare or unprepare a pod's claims.

        :returns: the CDI names of each container.
        :raises Refused: with kubelet's message.
        """
        assert self._running is not None and self._running.stdin is not None and self._running.stdout is not None
        self._running.stdin.write(f"{verb} {self._process.cluster.namespace}/{pod}\n")
        self._running.stdin.flush()
        answer = json.loads(self._running.stdout.readline())
        if "error" in answer:
            raise Refused(answer["error"])
        return t.cast("dict[str, list[str]]", answer["given"])

    def ask_until(self, verb: str, pod: str, seconds: float = 60) -> dict[str, list[str]]:
        """Try again, as kubelet does, until the driver is there."""
        answers: list[dict[str, list[str]]] = []

        def once() -> bool:
            try:
                answers.append(self.ask(verb, pod))
            except Refused as refused:
                # The driver is away, or kubelet drops the one before just now.
                assert any(word in str(refused) for word in ("not registered", "Unavailable", "Canceled")), refused
                return False
            return True

        until(once, seconds)
        return answers[0]


@pytest.fixture
def process(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, drivers: dict[str, Path], program: Path
) -> t.Iterator[Process]:
    one = Process(tmp_path_factory.mktemp("p"), cluster, drivers[R615] / "usr" / "lib64")
    yield one
    one.close()


@pytest.fixture
def kubelet(program: Path, process: Process) -> t.Iterator[Managers]:
    one = Managers(program, process)
    one.start()
    process.start()
    until(lambda: process.ready() == "ok", 60, process.ready)
    yield one
    one.kill()


def pod(process: Process, name: str, card: int, memory: str) -> str:
    """Create a pod of two containers, of which one uses a claim of its own; return the claim's CDI name."""
    cluster = process.cluster
    body = {
        "metadata": {"name": name},
        "spec": {
            "nodeName": cluster.node,
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "containers": [
                {"name": "user", "image": "i", "resources": {"claims": [{"name": "gpu"}]}},
                {"name": "other", "image": "i"},
            ],
        },
    }
    made = cluster.server.request("POST", f"/api/v1/namespaces/{cluster.namespace}/pods", body)
    share = {**result(UUIDS[card].lower(), memory), "pool": cluster.node}
    return f"{NAMES}{cluster.claim(name, share, pods=[(name, made['metadata']['uid'])])}-0"


def test_kubelet_prepares_and_unprepares(process: Process, kubelet: Managers) -> None:
    """Killed in turn and together: each pod has its share, and in the end nothing is left."""
    names = {"first": pod(process, "first", 0, "4Gi")}
    assert kubelet.ask("prepare", "first") == {"user": [names["first"]], "other": []}
    for turn in range(3):
        name = f"driver-{turn}"
        names[name] = pod(process, name, 1, "1Gi")
        process.kill()
        process.start()
        assert kubelet.ask_until("prepare", name)["user"] == [names[name]]
    for turn in range(3):
        name, before = f"kubelet-{turn}", generation(process)
        names[name] = pod(process, name, 1, "1Gi")
        kubelet.kill()
        kubelet.start()
        assert kubelet.ask_until("prepare", name)["user"] == [names[name]]
        # It deletes the slices when it starts.
        until(lambda before=before: generation(process) > before)
    kubelet.kill()
    process.kill()
    kubelet.start()
    process.start()
    # Its checkpoint has the devices of before, to which it adds those of each first answer.
    assert set(kubelet.ask_until("prepare", "first")["user"]) == {names["first"]}
    assert process.specifications() == {one.removeprefix(NAMES)[:-2] for one in names.values()}
    for name in names:
        kubelet.ask("unprepare", name)
    assert process.specifications() == set() and "Traceback" not in process.log


def test_a_container_has_a_request_for_each_of_its_cards(process: Process, kubelet: Managers) -> None:
    """As admission writes it for several containers on several cards: a container names one claim several times."""
    cluster = process.cluster
    containers = [
        {
            "name": f"c{number}",
            "image": "i",
            "resources": {"claims": [{"name": "gpu-mem", "request": f"gpu-{number}-{card}"} for card in range(2)]},
        }
        for number in range(2)
    ]
    spec = {
        "nodeName": cluster.node,
        "resourceClaims": [{"name": "gpu-mem", "resourceClaimName": "grid"}],
        "containers": containers,
    }
    body = {"metadata": {"name": "grid"}, "spec": spec}
    made = cluster.server.request("POST", f"/api/v1/namespaces/{cluster.namespace}/pods", body)
    shares = [
        {**result(UUIDS[card].lower(), f"{gib}Gi"), "pool": cluster.node, "request": f"gpu-{number}-{card}"}
        for card in range(2)
        for number, gib in enumerate((2, 1))
    ]
    uid = cluster.claim("grid", *shares, pods=[("grid", made["metadata"]["uid"])])
    # In the order of the claim's shares: of card 0 for both containers, then of card 1.
    given = kubelet.ask("prepare", "grid")
    assert {name: set(names) for name, names in given.items()} == {
        "c0": {f"{NAMES}{uid}-0", f"{NAMES}{uid}-2"},
        "c1": {f"{NAMES}{uid}-1", f"{NAMES}{uid}-3"},
    }
    kubelet.ask("unprepare", "grid")
    assert process.specifications() == set()


def generation(process: Process) -> int:
    found = process.cluster.slices()
    return int(found[0]["spec"]["pool"]["generation"]) if found else 0


def test_kubelet_says_why_a_claim_is_not_prepared(process: Process, kubelet: Managers) -> None:
    pod(process, "odd", 0, "1500Ki")
    with pytest.raises(Refused, match=r"NodePrepareResources failed for ResourceClaim odd: InvalidAllocation: "):
        kubelet.ask("prepare", "odd")


def test_kubelet_tells_the_pods_of_a_lost_card(process: Process, kubelet: Managers) -> None:
    pod(process, "first", 0, "4Gi")
    kubelet.ask("prepare", "first")
    cards = process.root / "cards"
    with cards.open("ab") as file:
        # NVML's "GPU is lost".
        file.write(b"fault card:0:15\n")
    until(lambda: "Sending health update notification for pods" in kubelet.log, 60)
    assert "Error receiving from WatchResources stream" not in kubelet.log


def test_slices_go_with_a_driver_that_does_not_come_back(process: Process, kubelet: Managers) -> None:
    """They stay over an update of the driver; kubelet deletes them when it is away for half a minute."""
    assert process.kill(signal.SIGTERM) == 0
    began = time.monotonic()
    until(lambda: not process.cluster.slices(), WIPING_SECONDS + 30)
    assert time.monotonic() - began > WIPING_SECONDS / 2
    process.start()
    until(lambda: process.ready() == "ok", 60, process.ready)
    assert process.cluster.slices()
