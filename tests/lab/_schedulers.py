# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe the control planes' schedulers from outside of their nodes, and probe scheduling with a pod every second."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import re
import threading
import time
import typing as t
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import urllib3
import yaml
from _lab import Api, ApiError, JsonObject, Lab, until

from lab import engine as engines
from lab.shell import in_background

MANIFESTS = "/etc/kubernetes/manifests"
SCHEDULER = f"{MANIFESTS}/kube-scheduler.yaml"
API_SERVER = f"{MANIFESTS}/kube-apiserver.yaml"
FOLDER = "/etc/kubernetes/kubegpu-share"
CONFIG = f"{FOLDER}/scheduler.yaml"
KUBEADMS = {"etcd.yaml", "kube-apiserver.yaml", "kube-controller-manager.yaml", "kube-scheduler.yaml"}
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-scheduler"


class Process(t.NamedTuple):
    """A process, by this machine's process IDs."""

    pid: int
    name: str
    parent: int


def processes() -> dict[int, Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _bracket, tail = path.read_text().rpartition(")")
            fields = tail.split()
            # What has ended and is not yet taken notice of runs no more.
            if fields[0] not in "ZX":
                pid = int(path.parent.name)
                found[pid] = Process(pid, head.partition("(")[2], int(fields[1]))
    return found


class Inside:
    """Read the nodes through this machine's /proc, which needs no process on them and no API."""

    def __init__(self, lab: Lab) -> None:
        self.first: dict[str, int] = {}
        self.refresh(lab)

    def refresh(self, lab: Lab) -> None:
        """Read each node's first process again, which changes when the node is restarted."""
        engine = engines.find()
        assert engine is not None
        self.first = {
            name: int(engine.out("inspect", "--format={{.State.Pid}}", node["container"]))
            for name, node in lab.nodes.items()
        }

    def path(self, node: str, path: str) -> Path:
        """Return the path to a node's file; not for links, which would lead to this machine's files."""
        return Path(f"/proc/{self.first[node]}/root{path}")

    def read(self, node: str, path: str) -> bytes | None:
        try:
            return self.path(node, path).read_bytes()
        except OSError:
            return None

    def _line(self, all_of_them: dict[int, Process], pid: int) -> Iterator[Process]:
        """Yield a process and its ancestors."""
        while pid in all_of_them:
            yield all_of_them[pid]
            pid = all_of_them[pid].parent

    def node_of(self, pid: int, everything: dict[int, Process] | None = None) -> str:
        """Return the node that a process belongs to; empty for none."""
        nodes = {first: name for name, first in self.first.items()}
        line = self._line(everything or processes(), pid)
        return next((nodes[one.pid] for one in line if one.pid in nodes), "")

    def schedulers(self) -> dict[str, list[int]]:
        """Return the kube-scheduler processes of each node."""
        found: dict[str, list[int]] = {name: [] for name in self.first}
        everything = processes()
        for one in everything.values():
            if one.name == "kube-scheduler":
                node = self.node_of(one.pid, everything)
                if node:
                    found[node].append(one.pid)
        return found

    def modules(self, node: str) -> list[int]:
        """Return the processes that Ansible runs on a node by SSH."""
        everything = processes()
        found = []
        for one in everything.values():
            # The kernel's list is long, and the moment short.
            if one.name.startswith("python3") and self.node_of(one.pid, everything) == node:
                above = [each.name for each in self._line(everything, one.pid)]
                if any(name.startswith("sshd") for name in above):
                    found.append(one.pid)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A scheduler's manifest and configuration; equal ones may differ in the number of the configuration's stamp."""

    manifest: bytes
    config: bytes | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[bytes, bytes | None]:
        return re.sub(rb"(scheduler-config-sha256: \w{64})-\d+", rb"\1", self.manifest), self.config


class Watch:
    """Check continuously that no node runs two schedulers, and that the manifest folder has only kubeadm's files."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.inside = Inside(lab)
        self.wrong: list[str] = []
        self.samples = 0
        self._stop = threading.Event()

    def _sample(self) -> None:
        for node, pids in self.inside.schedulers().items():
            if len(pids) > 1:
                self.wrong.append(f"{node} ran {len(pids)} schedulers")
        for node in self._lab.control_planes:
            with contextlib.suppress(OSError):
                names = {path.name for path in self.inside.path(node, MANIFESTS).iterdir()}
                self.wrong += [f"{node}: {name} lay in {MANIFESTS}" for name in names - KUBEADMS]
        self.samples += 1

    def _loop(self) -> None:
        while not self._stop.wait(0.2):
            self._sample()

    def running(self) -> contextlib.AbstractContextManager[None]:
        return in_background(self._loop, self._stop)


class SchedulingProbe:
    """Create a pod without a GPU every second, and record how long each waits for a node.

    Its node exists only in the API, so that nothing but scheduling is measured. Any API server that answers is used.
    """

    NAMESPACE = NODE = "lab-probe"

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._create_by = [lab.api_of(name, 3) for name in lab.control_planes]
        self._query_by = [lab.api_of(name, 3) for name in lab.control_planes]
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._waiting: dict[str, tuple[float, str]] = {}
        self.waits: list[tuple[float, str]] = []
        self.during = ""
        self._began = time.monotonic()

    def seconds(self) -> float:
        """How long the probe has existed."""
        return time.monotonic() - self._began

    def _by(self, apis: list[Api], method: str, path: str, body: JsonObject | None = None) -> JsonObject | None:
        """Ask the API servers in turn; None if none answers."""
        for number, api in enumerate(list(apis)):
            try:
                found = api.call(method, path, body)
            except ApiError as error:
                if error.status < 500:
                    # A request that got no answer may have been carried out all the same.
                    return {} if error.status == 409 else None
            except (OSError, urllib3.exceptions.HTTPError):
                continue
            else:
                apis.insert(0, apis.pop(number))
                return found
        return None

    def _create(self) -> None:
        pods = f"/api/v1/namespaces/{self.NAMESPACE}/pods"
        for number in itertools.count():
            if self._stop.wait(1):
                return
            name = f"probe-{number}"
            body: JsonObject = {
                "metadata": {"name": name},
                "spec": {
                    "containers": [{"name": "c0", "image": "localhost/none:0"}],
                    "nodeSelector": {self.NODE: "true"},
                    "tolerations": [{"operator": "Exists"}],
                    "terminationGracePeriodSeconds": 0,
                    "automountServiceAccountToken": False,
                },
            }
            began = time.monotonic()
            with self._guard:
                self._waiting[name] = (began, self.during)
            if self._by(self._create_by, "POST", pods, body) is None:
                with self._guard:
                    self._waiting.pop(name, None)

    def _observe(self) -> None:
        pods = f"/api/v1/namespaces/{self.NAMESPACE}/pods"
        while not self._stop.wait(0.25):
            found = self._by(self._query_by, "GET", pods)
            now = time.monotonic()
            for pod in (found or {}).get("items", []):
                name = pod["metadata"]["name"]
                if pod["spec"].get("nodeName"):
                    with self._guard:
                        began, during = self._waiting.pop(name, (0.0, ""))
                    if began:
                        self.waits.append((now - began, during))
                    self._by(self._query_by, "DELETE", f"{pods}/{name}")

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        node = {
            "metadata": {"name": self.NODE, "labels": {self.NODE: "true"}},
            # Nobody runs what others would put here.
            "spec": {"taints": [{"key": self.NODE, "effect": "NoSchedule"}]},
        }
        self._lab.api.delete(f"/api/v1/nodes/{self.NODE}")
        self._lab.api.call("POST", "/api/v1/nodes", node)
        capacity = {
            "status": {
                "capacity": {"pods": "5000"},
                "allocatable": {"pods": "5000"},
                # kubeadm upgrade compares every node's with its own.
                "nodeInfo": {"kubeletVersion": self._lab.api.call("GET", "/version")["gitVersion"]},
            }
        }
        kind = "application/merge-patch+json"
        self._lab.api.call("PATCH", f"/api/v1/nodes/{self.NODE}/status", capacity, kind)
        try:
            with (
                self._lab.api.namespace(self.NAMESPACE),
                in_background(self._create, self._stop),
                in_background(self._observe, self._stop),
            ):
                yield
        finally:
            self._lab.api.delete(f"/api/v1/nodes/{self.NODE}")

    def unscheduled(self) -> list[str]:
        with self._guard:
            return list(self._waiting)

    def longest(self) -> tuple[float, str]:
        return max(self.waits, default=(0.0, ""))


class ControlPlane:
    """One control plane's scheduler."""

    def __init__(self, lab: Lab, inside: Inside, node: str) -> None:
        self._lab = lab
        self._inside = inside
        self.node = node

    def state(self) -> State:
        manifest = self._inside.read(self.node, SCHEDULER)
        assert manifest is not None, f"{self.node} has no {SCHEDULER}"
        return State(manifest, self._inside.read(self.node, self.config_path(manifest)))

    @staticmethod
    def config_path(manifest: bytes) -> str:
        command = yaml.safe_load(manifest)["spec"]["containers"][0]["command"]
        return next((word.partition("=")[2] for word in command if word.startswith("--config=")), CONFIG)

    def digest(self, path: str) -> str:
        text = self._inside.read(self.node, path)
        return hashlib.sha256(text).hexdigest() if text is not None else ""

    def seconds(self) -> str:
        """The extender's timeout in the configuration, by which tests tell one from another; empty for none."""
        match = re.search(rb"httpTimeout: ['\"]?(\w+)", self._inside.read(self.node, CONFIG) or b"")
        return match[1].decode() if match else ""

    def pids(self) -> list[int]:
        return self._inside.schedulers()[self.node]

    def health(self) -> str:
        return self._lab.ssh(
            self.node, "curl -sk -m 3 -o /dev/null -w '%{http_code}' https://127.0.0.1:10259/healthz; true"
        ).strip()

    def assert_no_leftovers(self) -> None:
        names = self._lab.ssh(self.node, f"find {FOLDER} -mindepth 1 2>/dev/null; true").split()
        assert [name for name in names if name not in (CONFIG, f"{FOLDER}/backup")] == [], f"{self.node}: {names}"


def assert_healthy(lab: Lab, planes: Sequence[ControlPlane]) -> None:
    """Assert that each node runs one healthy, stable scheduler with its manifest's command."""

    def steady() -> bool:
        pids = {plane.node: plane.pids() for plane in planes}
        assert [len(pid) for pid in pids.values()] == [1] * len(planes), f"schedulers: {pids}"
        for plane in planes:
            assert plane.health() == "200", f"{plane.node}: /healthz says {plane.health()}"
        time.sleep(4)
        assert {plane.node: plane.pids() for plane in planes} == pids, "a scheduler was started again"
        return True

    until(steady, "healthy schedulers", 90)
    for plane in planes:
        command = yaml.safe_load(plane.state().manifest)["spec"]["containers"][0]["command"]
        running = Path(f"/proc/{plane.pids()[0]}/cmdline").read_bytes().split(b"\0")
        assert [word.decode() for word in running if word] == command, f"{plane.node} runs {running}"


def holder(lab: Lab) -> str:
    """Return the control plane whose scheduler holds the lease; empty if none does."""
    return holder_identity(lab).rpartition("_")[0]


def holder_identity(lab: Lab) -> str:
    """Return the identity of the process that holds the lease, which begins with its node; empty if none does."""
    for name in lab.control_planes:
        with contextlib.suppress(ApiError, OSError, urllib3.exceptions.HTTPError):
            spec = lab.api_of(name, 5).call("GET", LEASE)["spec"]
            return str(spec.get("holderIdentity") or "")
    return ""


def summary(watch: Watch, probe: SchedulingProbe) -> str:
    """Return the measured times in a line."""
    by_test = Counter(during for _wait, during in probe.waits)
    wait, during = probe.longest()
    return (
        f"a pod without a GPU every second through {len(by_test)} tests: {len(probe.waits)} pods, the longest waited "
        f"{wait:.1f} s ({during}); {watch.samples} samples of the control planes, "
        f"{len(watch.wrong)} with two schedulers"
    )
