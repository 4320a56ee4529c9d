# SPDX-License-Identifier: GPL-3.0-or-later
"""Real operators on a real API server, with the real DaemonSet controller; kubelet and the scheduler are played.

The operators' programs are no part of the project. A variable names the checkout in which one was built:
KUBEGPU_GPU_OPERATOR (NVIDIA/gpu-operator, program ``gpu-operator``), KUBEGPU_SECONDARY_SCHEDULER_OPERATOR
(openshift/secondary-scheduler-operator, program ``secondary-scheduler-operator``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
from real_apiserver import MERGE, ApiServer, Refused
from simulation import Simulation

CONTROLLERS = ("daemonset", "deployment", "replicaset", "garbagecollector", "serviceaccount")
PRESENT = "feature.node.kubernetes.io/pci-10de.present"
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}


def checkout(variable: str, program: str) -> Path:
    """The folder that a variable names; the test is skipped without it."""
    folder = Path(os.environ.get(variable) or "/nonexistent")
    if not os.access(folder / program, os.X_OK):
        pytest.skip(f"{variable} names no checkout with the built program {program}")
    return folder


class Program(t.NamedTuple):
    """A running program: its log, and whether it has ended by itself."""

    log: Path
    ended: t.Callable[[], bool]


@contextlib.contextmanager
def running(server: ApiServer, program: str, *flags: str, cwd: Path | None = None, **env: str) -> t.Iterator[Program]:
    """Run a program beside a server until the context ends."""
    log = server.folder / f"{Path(program).name}.log"
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*tied, program, *flags],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd or server.folder,
            env={**os.environ, "KUBECONFIG": str(server.kubeconfig), **env},
            start_new_session=True,
        )
    try:
        yield Program(log, lambda: process.poll() is not None)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def controller_manager(server: ApiServer) -> contextlib.AbstractContextManager[Program]:
    """Run the real controllers of DaemonSets, Deployments and garbage."""
    program = server.programs["kube-controller-manager"]
    kubeconfig = f"--kubeconfig={server.kubeconfig}"
    named = f"--controllers={','.join(CONTROLLERS)}"
    return running(server, program, kubeconfig, named, "--leader-elect=false", "--secure-port=0")


def anything(plural: str, kind: str, group: str, namespaced: bool = True, version: str = "v1") -> dict[str, t.Any]:
    """A definition of a resource that an operator needs and whose content doesn't matter."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": plural, "kind": kind, "singular": kind.lower(), "listKind": f"{kind}List"}
    scope = "Namespaced" if namespaced else "Cluster"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": scope, "names": names, "versions": [served]},
    }


class Nodes(Simulation):
    """Play kubelet and the scheduler for some nodes: each pod's init containers run one after the other.

    The validator's containers write the files that other pods wait for, and its end removes them; a reboot removes
    all of them. A node announces a card while the GPU Operator's device plugin runs on it.
    """

    def __init__(self, server: ApiServer, names: t.Sequence[str], runtime: str, **labels: str) -> None:
        super().__init__()
        self.server, self.names = server, tuple(names)
        self.files: dict[str, set[str]] = {name: set() for name in names}
        # The containers that have run, by the pod's UID.
        self.done: dict[str, int] = {}
        self.down: set[str] = set()
        system = {"ID": "ubuntu", "VERSION_ID": "24.04"}
        found = {f"feature.node.kubernetes.io/system-os_release.{key}": value for key, value in system.items()}
        found |= {PRESENT: "true", "feature.node.kubernetes.io/kernel-version.full": "6.8.0-1-generic", **labels}
        for name in names:
            server.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": found}})
            info = {"nodeInfo": {"containerRuntimeVersion": runtime}, "conditions": [READY]}
            server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": info}, MERGE)
            # kubelet and the node lifecycle controller remove it.
            server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, MERGE)

    def stop(self, name: str) -> None:
        """Take a node down: its pods aren't ready, and its /run is empty."""
        self.down.add(name)
        self.files[name].clear()
        self._ready(name, "False")
        for pod in self._pods():
            if pod["spec"].get("nodeName") == name:
                self.done.pop(pod["metadata"]["uid"], None)
                self._report(pod, False)

    def start(self, name: str) -> None:
        """Bring it back: kubelet starts all containers of its pods again."""
        self._ready(name, "True")
        self.down.discard(name)

    def _ready(self, name: str, status: str) -> None:
        change = {"status": {"conditions": [{**READY, "status": status}]}}
        self.server.request("PATCH", f"/api/v1/nodes/{name}/status", change, MERGE)

    def _pods(self) -> list[dict[str, t.Any]]:
        return list(self.server.request("GET", "/api/v1/pods")["items"])

    def _step(self) -> None:
        for pod in self._pods():
            with contextlib.suppress(Refused):
                self._pod(pod)

    def _pod(self, pod: dict[str, t.Any]) -> None:
        spec, metadata = pod["spec"], pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        name = spec.get("nodeName") or self._wanted(spec)
        if name not in self.names or name in self.down:
            return
        role = metadata.get("labels", {}).get("app", "")
        if metadata.get("deletionTimestamp"):
            if role == "nvidia-operator-validator":
                self.files[name].clear()
            self._announce(role, name, 0)
            self.server.request("DELETE", f"{path}?gracePeriodSeconds=0")
        elif not spec.get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}}
            self.server.request("POST", f"{path}/binding", {**binding, "target": {"kind": "Node", "name": name}})
        else:
            self._run(pod, role, name)

    def _run(self, pod: dict[str, t.Any], role: str, name: str) -> None:
        """Run its next containers; one each step."""
        containers, uid = pod["spec"].get("initContainers") or [], pod["metadata"]["uid"]
        number = self.done.get(uid, 0)
        if number < len(containers):
            if self._ends(containers[number], name):
                self.done[uid] = number + 1
        elif number == len(containers):
            self.done[uid] = number + 1
            self._report(pod, True)
            self._announce(role, name, 1)

    def _ends(self, container: dict[str, t.Any], name: str) -> bool:
        """Run an init container; False while it waits."""
        script = " ".join(container.get("args") or [])
        files = self.files[name]
        if "toolkit-ready" in script:
            return "toolkit-ready" in files
        env = {one["name"]: one.get("value") for one in container.get("env") or []}
        component = str(env.get("COMPONENT") or "")
        if component == "plugin":
            capacity = self.server.request("GET", f"/api/v1/nodes/{name}")["status"].get("capacity") or {}
            if capacity.get("nvidia.com/gpu", "0") == "0":
                return False
        if component:
            files.add(f"{component}-ready")
        return True

    def _announce(self, role: str, name: str, count: int) -> None:
        if role == "nvidia-device-plugin-daemonset":
            number = {"nvidia.com/gpu": str(count)}
            change = {"status": {"capacity": number, "allocatable": number}}
            self.server.request("PATCH", f"/api/v1/nodes/{name}/status", change, MERGE)

    def _report(self, pod: dict[str, t.Any], ready: bool) -> None:
        metadata, now = pod["metadata"], time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        given = {"status": "True" if ready else "False", "lastTransitionTime": now}
        conditions = [{"type": kind, **given} for kind in ("Initialized", "ContainersReady", "Ready")]
        statuses = [
            {
                "name": container["name"],
                "image": "i",
                "imageID": "i",
                "ready": ready,
                "restartCount": 0,
                "started": ready,
            }
            for container in pod["spec"]["containers"]
        ]
        status = {"phase": "Running", "conditions": conditions, "containerStatuses": statuses, "startTime": now}
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        self.server.request("PATCH", path, {"status": status}, MERGE)

    def _wanted(self, spec: dict[str, t.Any]) -> str:
        """The node of a DaemonSet's pod, which its affinity names; of other pods the first."""
        try:
            affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            return str(affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])
        except (KeyError, IndexError):
            return self.names[0]
