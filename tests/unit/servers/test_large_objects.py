# SPDX-License-Identifier: GPL-3.0-or-later
"""The servers as processes in their manifests' memory, with the largest pods that a real API server accepts.

Where this machine lets the tests make a cgroup, the processes have the limit in it; their peak is compared with the
limit everywhere.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
import typing as t
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from api_double import make_node
from extender_kit import bind_request, environment, eventually
from gpushare.shared._contracts import gpushare as contract
from limit_fakes import R580
from plugin_fakes import NODE
from real_apiserver import MERGE, ApiServer, own_api_server
from role_templates import ROLES
from test_plugin_process import Process as PluginProcess

MIB = 1 << 20
PODS = "/api/v1/namespaces/default/pods"
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
# Less than half of the smallest limit, and less than what a page of the large pods is in memory once it is decoded.
MOST = 100 * MIB
UNGATED = {"spec": {"schedulingGates": None}}
GATED = {"schedulingGates": [{"name": "kubegpu.share/never"}]}
# What a pod may be large by; the API server stores 1.5 MiB of each, in its own notation.
LARGE: dict[str, t.Callable[[], dict[str, t.Any]]] = {
    "secrets": lambda: {"imagePullSecrets": [{"name": "a"}] * 200_000},
    "empty": lambda: {"imagePullSecrets": [{}] * 200_000},
    "tolerations": lambda: {"tolerations": [{"operator": "Exists"}] * 80_000},
    "environment": lambda: {"env": [{"name": f"A{at}", "value": "x" * 60} for at in range(12_000)]},
    "escapes": lambda: {"env": [{"name": "A", "value": "<" * 450_000}]},
    "containers": lambda: {"more": [{"name": f"c{at}", "image": "i"} for at in range(6_000)]},
    "annotations": lambda: {"annotations": {f"a/{at}": "x" for at in range(20_000)}},
}


def large_pod(name: str, kind: str, units: int = 1, **spec: t.Any) -> dict[str, t.Any]:
    """A pod that asks for GPU memory, and is large by something else."""
    parts = LARGE[kind]()
    limits = {contract.RESOURCE_MEMORY: str(units)}
    first = {"name": "main", "image": "i", "resources": {"limits": limits}, "env": parts.pop("env", [])}
    containers = [first, *parts.pop("more", [])]
    metadata = {"name": name, "annotations": parts.pop("annotations", {})}
    return {"metadata": metadata, "spec": {"containers": containers, **parts, **spec}}


def limit_of(file: str, number: int = 0) -> int:
    """The memory limit in bytes that a manifest of role gpushare gives a server."""
    text = (ROLES / "gpushare" / "templates" / file).read_text()
    return int(re.findall(r"server\.restricted\('[^']*', '[^']*', '([0-9]+)Mi'", text)[number]) * MIB


# --------------------------------------------------------------------------- processes with a limit


class Cgroup:
    """A memory cgroup; ``join`` is a command before another one, which does nothing where there can't be one."""

    def __init__(self, limit: int) -> None:
        self.folder: Path | None = None
        self.join: list[str] = []
        for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            folder = Path(root) / f"kubegpu-test-{uuid.uuid4().hex[:8]}"
            try:
                if not (Path(root) / "cgroup.procs").exists():
                    continue
                folder.mkdir()
            except OSError:
                continue
            try:
                (folder / file).write_text(str(limit))
            except OSError:
                folder.rmdir()
                continue
            self.folder = folder
            self.join = ["sh", "-c", f'echo $$ >{folder}/cgroup.procs && exec "$@"', "sh"]
            return

    def remove(self) -> None:
        if self.folder is not None:
            eventually(self._is_removed)

    def _is_removed(self) -> bool:
        assert self.folder is not None
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return not self.folder.exists()


def peak(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+([0-9]+) kB", text)
    assert match is not None, "the process has ended"
    return int(match[1]) * 1024


def ask(port: int, method: str, path: str, body: t.Any = None) -> t.Any:
    """A request to the extender, as a scheduler sends it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConnectionError(answer.status)
        return json.loads(answer.read())


def used_units(port: int) -> int:
    """The units of the node that are held."""
    return int(ask(port, "GET", f"/gpushare-scheduler/inspect/{NODE}")["nodes"][0]["usedGPU"])


class Server:
    """A server's process with a limit of memory."""

    def __init__(self, limit: int, folder: Path, module: str, *options: str) -> None:
        self.limit, self.cgroup, self._log = limit, Cgroup(limit), folder / f"{module}.log"
        with self._log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*self.cgroup.join, sys.executable, "-m", module, "--log-format=json", *options],
                env=environment(),
                stderr=stream,
            )

    def lines(self) -> list[t.Any]:
        # The last one may be incomplete.
        complete = self._log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines()]

    def line(self, message: str) -> t.Any:
        """Wait for a message in the log."""

        def found() -> t.Any:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self._log.read_text()[-1000:]}"
            return next((line for line in self.lines() if line["message"] == message), None)

        return eventually(found, 120)

    def check(self, what: str) -> None:
        """Compare its peak with what it may be."""
        assert self.process.poll() is None, f"{what}: ended with {self.process.returncode}"
        most = peak(self.process.pid)
        print(f"{what}: at most {most / MIB:.0f} MiB of {self.limit / MIB:.0f}")
        assert most < MOST < self.limit / 2
        assert not [line for line in self.lines() if "exception" in line]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.cgroup.remove()


# --------------------------------------------------------------------------- the cluster


class Cluster:
    """A real API server with large pods: some are bound to a node, and some wait behind a scheduling gate."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        server.service_account(folder / "account")
        self.account = (f"--api-server={server.url}", f"--service-account={folder / 'account'}")
        node = make_node(NODE, 32, 32)
        server.request("POST", "/api/v1/nodes", {"metadata": node["metadata"]})
        server.request("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": node["status"]}, MERGE)
        # Of the API server: nobody says that the node is ready.
        server.request("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": None}}, MERGE)
        kinds = [*LARGE, "secrets"]
        bound = [large_pod(f"bound-{at}", kind, nodeName=NODE) for at, kind in enumerate(kinds)]
        claims = [{"name": "gpu-mem", "resourceClaimTemplateName": "gpu-mem-4"}]
        gated = [large_pod(f"gated-{at}", kind, resourceClaims=claims, **GATED) for at, kind in enumerate(LARGE)]
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda pod: server.request("POST", PODS, pod), [*bound, *gated]))
        self.sizes = [len(json.dumps(pod, separators=(",", ":"))) for pod in made]
        self.gated = made[len(bound) :]
        self.bound = len(bound)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with own_api_server() as server:
        made = Cluster(server, tmp_path_factory.mktemp("c"))
        print(f"\n{len(made.sizes)} pods of {min(made.sizes) / 1e6:.1f} to {max(made.sizes) / 1e6:.1f} MB of JSON")
        yield made


def test_the_extender_serves_beside_large_pods(cluster: Cluster, tmp_path: Path) -> None:
    """It lists them, counts each, and answers filters and binds of large pods, 16 at once."""
    extender = Server(limit_of("extender.yml.j2"), tmp_path, "gpushare.extender.command", "--port=0", *cluster.account)
    try:
        port = extender.line("serving")["port"]
        extender.line("ready")
        extender.check("the extender's list")
        eventually(lambda: used_units(port) == cluster.bound)
        pods = [pod for pod in cluster.gated if contract.pod_units(pod) and len(pod["spec"]["containers"]) < 1000]

        def filtered(pod: t.Any) -> t.Any:
            # More than 24 MiB of bodies aren't held at once: some are refused, for now.
            while True:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    return ask(port, "POST", "/gpushare-scheduler/filter", {"Pod": pod, "NodeNames": [NODE, "other"]})
                time.sleep(0.1)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(filtered, (pods * 3)[:16]))
        passed = [answer for answer in answers if answer["NodeNames"] == [NODE]]
        assert len(passed) == len(answers), answers
        extender.check("16 filters of large pods")
        many = next(pod for pod in cluster.gated if len(pod["spec"]["containers"]) > contract.MOST_CONTAINERS)
        assert "containers" in filtered(many)["FailedAndUnresolvableNodes"][NODE]
        # Gates are the scheduler's: without them these pods may be bound. Of such a pod a patch takes seconds.
        names = [pod["metadata"]["name"] for pod in pods if "tolerations" in pod["spec"]][:1]
        ready = [cluster.server.request("PATCH", f"{PODS}/{name}", UNGATED, MERGE) for name in names]

        def bind(pod: t.Any) -> str:
            # For the first bind all pods are listed once more, within some seconds.
            while True:
                error = str(ask(port, "POST", "/gpushare-scheduler/bind", bind_request(pod, NODE))["Error"])
                if not error.startswith(str(contract.Reason.LEDGER_UNAVAILABLE)):
                    return error

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(bind, ready)) == [""] * len(ready)
        eventually(lambda: used_units(port) == cluster.bound + len(ready))
        extender.check(f"{len(ready)} binds of large pods")
    finally:
        extender.close()


def test_the_server_of_templates_serves_beside_large_pods(cluster: Cluster, tmp_path: Path) -> None:
    """It lists them and makes the template that they name; later ones come as events."""
    options = (*cluster.account, "--lease-namespace=default")
    templates = Server(limit_of("dra.yml.j2"), tmp_path, "gpushare.templates.command", *options)
    try:
        templates.line("serving")

        def names() -> set[str]:
            return {template["metadata"]["name"] for template in cluster.server.request("GET", TEMPLATES)["items"]}

        eventually(lambda: "gpu-mem-4" in names() or templates.process.poll() is not None, 120)
        templates.check("the templates' list")
        claims = [{"name": "gpu-mem", "resourceClaimTemplateName": "gpu-mem-7"}]
        for kind in ("secrets", "tolerations"):
            pod = large_pod(f"late-{kind}", kind, resourceClaims=claims, **GATED)
            cluster.server.request("POST", PODS, pod)
        eventually(lambda: "gpu-mem-7" in names() or templates.process.poll() is not None, 60)
        templates.check("the templates' events")
    finally:
        templates.close()


def test_the_device_plugin_serves_beside_large_pods(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, drivers: dict[str, Path]
) -> None:
    """It lists all pods of its node in one answer, and reads them again while kubelet admits a pod."""
    process = PluginProcess(tmp_path_factory.mktemp("p"), drivers[R580] / "usr" / "lib64")
    limit = limit_of("device_plugin.yml.j2")
    cgroup = Cgroup(limit)
    process.started_by, process._account = tuple(cgroup.join), cluster.account
    try:
        process.node.kubelet.start()
        process.start()
        eventually(lambda: len(process.node.kubelet.healthy) == 32 and process.ready() == "ok", 120)
        assert process._process is not None
        most = peak(process._process.pid)
        print(f"the device plugin: at most {most / MIB:.0f} MiB of {limit / MIB:.0f}")
        assert most < MOST < limit / 2
        assert "Traceback" not in process.log
    finally:
        process.close()
        cgroup.remove()
