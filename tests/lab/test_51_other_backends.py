# SPDX-License-Identifier: GPL-3.0-or-later
"""The real HAMi and NVIDIA's real device plugin on the lab's nodes, beside gpushare and instead of it, and back.

Neither is in a package registry, so ``KUBEGPU_LAB_BACKENDS`` names a YAML file: ``images``, archives for the nodes, and
``variables``, the roles' variables that name the charts. ``KUBEGPU_LAB_RECORD=<folder>`` keeps the states, which
tests/unit/check/recordings is made of. The module restores the first state at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from _lab import CHECKPOINT, RESOURCE, Done, JsonObject, Lab, until
from _pods import body, container
from _record import record
from _switching import Load

from lab import build
from lab import engine as engines

FILE, RECORD = os.environ.get("KUBEGPU_LAB_BACKENDS", ""), os.environ.get("KUBEGPU_LAB_RECORD", "")
SPACE = "lab-backends"
MANIFEST = "/etc/kubernetes/manifests/kube-scheduler.yaml"
GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
# Labels of the device plugins' pods, one of each.
PLUGINS = {
    "gpushare": ("app.kubernetes.io/component", "device-plugin"),
    "hami": ("app.kubernetes.io/component", "hami-device-plugin"),
    "nvidia": ("app.kubernetes.io/name", "nvidia-device-plugin"),
}
ALLOCATE = ["nvidia-smi", "simulated-allocation", "2000", "--cuda", "--seconds", "1"]
CONFIGURATIONS: JsonObject = {
    "exclusive": {},
    "quarters": {"sharing": "time-slicing", "replicas": 4, "rename": True, "fail_requests_greater_than_one": True},
    "halves": {"sharing": "mps", "replicas": 2},
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not FILE, reason="KUBEGPU_LAB_BACKENDS names no file with the images and charts of HAMi and NVIDIA"
    ),
]


class Backends:
    """The lab with a back end for each node, as its inventory has it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        given = yaml.safe_load(Path(FILE).read_text())
        helm = str(build.built(build.HELM) / "helm")
        variables = {
            **{"hami_helm": helm, "nvidia_device_plugin_helm": helm, "acceptance_image": lab.state["base_image"]},
            **{"nvidia_device_plugin_configurations": CONFIGURATIONS, "nvidia_device_plugin_default": "exclusive"},
            **{"acceptance_allocate_command": ALLOCATE},
            **{"maintenance_force": True, "maintenance_delete_emptydir_data": True},
            **given["variables"],
        }
        self.lab = lab
        self.variables, self.inventory = folder / "variables.json", folder / "backends.yml"
        self._given = variables
        self._write()
        self.of = dict.fromkeys(lab.gpu_nodes, "gpushare")
        self._images = given["images"]

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """Import the archives into each node's containerd, and remove them afterwards."""
        engine = engines.find()
        assert engine is not None
        containerd = ("ctr", "--namespace=k8s.io", "images")
        before = {}
        for name, node in self.lab.nodes.items():
            before[name] = self._names(name)
            for archive in self._images:
                with Path(archive).open("rb") as source:
                    engine.docker("exec", "-i", node["container"], *containerd, "import", "-", source=source)
        yield
        for name in self.lab.nodes:
            self.lab.ssh(name, " ".join([*containerd, "rm", *sorted(self._names(name) - before[name])]))

    def _names(self, node: str) -> set[str]:
        return set(self.lab.ssh(node, "ctr --namespace=k8s.io images ls -q").split())

    def _write(self, **more: t.Any) -> None:
        self.variables.write_text(json.dumps({**self._given, **more}))

    @contextlib.contextmanager
    def configured(self, **more: t.Any) -> Iterator[None]:
        """Add variables for the playbooks."""
        self._write(**more)
        try:
            yield
        finally:
            self._write()

    def arguments(self) -> list[str]:
        hosts = {name: {"gpu_backend": backend} for name, backend in self.of.items()}
        self.inventory.write_text(yaml.safe_dump({"all": {"children": {"lab_backends": {"hosts": hosts}}}}))
        return ["-i", str(self.inventory), "-e", f"@{self.variables}"]

    def run(self, playbook: str, *more: str) -> Done:
        done = self.lab.playbook(f"playbooks/{playbook}.yml", *self.arguments(), *more, seconds=1200)
        assert done.rc == 0, done.out[-8000:]
        return done

    def switch(self, node: str, to: str) -> None:
        """Switch a node, and require that verify.yml finds nothing and that site.yml has nothing to do."""
        self.run("switch", "-e", f"gpu_backend={to}", "--limit", node)
        self.of[node] = to
        self.run("site")
        self.verified()

    def verified(self) -> None:
        done = self.run("verify")
        assert not re.search(r"^(FAIL|UNKNOWN) ", done.out, re.MULTILINE), done.out[-8000:]
        self.run("site").assert_unchanged()

    def given_twice(self) -> set[str]:
        """Return the nodes on which device plugins of two back ends run."""
        seen: dict[str, set[str]] = {}
        for pod in self.lab.api.items("/api/v1/pods"):
            labels, node = pod["metadata"].get("labels", {}), pod["spec"].get("nodeName", "")
            running = pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
            ready = running and all(status.get("ready") for status in pod["status"].get("containerStatuses", []))
            for backend, (label, value) in PLUGINS.items():
                if ready and labels.get(label) == value and node in self.of:
                    seen.setdefault(node, set()).add(backend)
        return {node for node, backends in seen.items() if len(backends) > 1}

    def pod(self, name: str, node: str, holds: int = 0, **limits: int) -> str:
        """Create a pod for a node's back end, and wait until it runs.

        :param holds: MiB that its program allocates.
        """
        wanted = body(
            name,
            container(self.lab, resources={"limits": {_RESOURCES[key]: str(value) for key, value in limits.items()}}),
            node=node,
        )
        if holds:
            command = ["nvidia-smi", "simulated-allocation", str(holds), "--cuda", "--seconds", "3600"]
            wanted["spec"]["containers"][0]["command"] = command
        if self.of[node] == "hami":
            wanted["spec"]["schedulerName"] = "hami-scheduler"
        elif self.of[node] == "nvidia":
            # Beside HAMi's nodes it is refused without.
            wanted["spec"]["nodeSelector"]["kubegpu.share/backend"] = "nvidia"
        self.lab.api.call("POST", f"/api/v1/namespaces/{SPACE}/pods", wanted)
        self.lab.api.wait_running(SPACE, [name], 180)
        return name

    def state_of(self, name: str) -> tuple[str, str, int]:
        pod = self.lab.api.pod(SPACE, name)
        [status] = pod["status"]["containerStatuses"]
        assert pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        return pod["metadata"]["uid"], pod["status"]["startTime"], status["restartCount"]

    def delete(self, *names: str) -> None:
        for name in names:
            self.lab.api.delete(f"/api/v1/namespaces/{SPACE}/pods/{name}")
        until(
            lambda: not {pod["metadata"]["name"] for pod in self.lab.api.pods(SPACE)} & set(names), f"{names} gone", 60
        )

    def recorded(self, name: str) -> None:
        if RECORD:
            record(self.lab, name, Path(RECORD), *self.arguments())


_RESOURCES = {
    "units": RESOURCE,
    "gpu": GPU,
    "shared": SHARED,
    "mib": "nvidia.com/gpumem",
    "cores": "nvidia.com/gpucores",
}


@pytest.fixture(scope="module")
def backends(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    made = Backends(lab, tmp_path_factory.mktemp("backends"))
    before = {name: lab.ssh(name, f"sha256sum < {MANIFEST}") for name in lab.control_planes}
    with made.imported(), lab.api.namespace(SPACE):
        try:
            yield made
        finally:
            everywhere(made, "gpushare")
    made.verified()
    assert {name: lab.ssh(name, f"sha256sum < {MANIFEST}") for name in lab.control_planes} == before


@contextlib.contextmanager
def undisturbed(backends: Backends, *names: str) -> Iterator[None]:
    """Require that pods of other nodes run on as if nothing had happened."""
    before = {name: backends.state_of(name) for name in names}
    yield
    assert {name: backends.state_of(name) for name in names} == before


def test_there_and_back_under_load(backends: Backends, lab: Lab) -> None:
    first, second = lab.gpu_nodes[:2]
    load = Load(lab, SPACE, backends.given_twice)
    kept = backends.pod("ours", second, units=3)
    backends.pod("evicted", first, units=3)
    with load.running():
        with undisturbed(backends, kept):
            backends.switch(first, "hami")
        hami = backends.pod("of-hami", first, holds=2000, gpu=1, mib=3000)
        with undisturbed(backends, hami):
            backends.switch(second, "nvidia")
        nvidia = backends.pod("of-nvidia", second, holds=1000, gpu=1)
        backends.verified()
        backends.recorded("hami-and-nvidia")
        with undisturbed(backends, nvidia):
            backends.switch(first, "nvidia")
        other = backends.pod("of-nvidia-too", first, gpu=1)
        backends.of = dict.fromkeys(lab.gpu_nodes, "gpushare")
        backends.run("site")
        with undisturbed(backends, nvidia):
            backends.run("switch", "--limit", first)
        assert other not in {pod["metadata"]["name"] for pod in lab.api.pods(SPACE)}
        kept = backends.pod("ours-again", first, units=3)
        with undisturbed(backends, kept):
            backends.run("switch", "--limit", second)
            # NVIDIA's chart goes with its last node.
            backends.run("site")
            backends.verified()
    assert load.wrong == [] and load.made > 20 and load.samples > 100
    backends.delete(kept)


def accepted(backends: Backends) -> dict[str, dict[str, str]]:
    """Run acceptance.yml, and return the results of each suite by case."""
    done = backends.run("acceptance")
    results: dict[str, dict[str, str]] = {}
    for line in done.out.splitlines():
        if suite := re.match(r"suite (\w+)", line):
            results[suite[1]] = {}
        elif case := re.match(r"(\w\d+)  .*  (PASS|FAIL|UNKNOWN|skipped)  ", line):
            results[list(results)[-1]][case[1]] = case[2]
    return results


def test_acceptance_of_each(backends: Backends, lab: Lab) -> None:
    first, second = lab.gpu_nodes[:2]
    backends.switch(first, "hami")
    backends.switch(second, "nvidia")
    results = accepted(backends)
    assert results.keys() == {"hami", "nvidia"}
    # The last one of HAMi: a program that allocates 2000 MiB in a container of 3000 MiB.
    assert {results["hami"][f"M0{number}"] for number in range(1, 10)} == {"PASS"}
    assert {results["nvidia"][f"M0{number}"] for number in range(1, 5)} == {"PASS"}


def everywhere(backends: Backends, backend: str) -> None:
    """Give all nodes to one back end."""
    backends.of = dict.fromkeys(backends.of, backend)
    backends.run("site")
    backends.run("switch")
    backends.run("site")


def test_every_sharing(backends: Backends, lab: Lab) -> None:
    """Time-slicing and MPS by the real plugin: two pods of one card each, and verify.yml without a finding."""
    first, second = lab.gpu_nodes[:2]
    with backends.configured(nvidia_device_plugin_node_configurations={first: "halves", second: "quarters"}):
        everywhere(backends, "nvidia")
        names = [backends.pod(f"mps-{number}", first, gpu=1) for number in range(2)]
        names += [backends.pod(f"sliced-{number}", second, holds=1000, shared=1) for number in range(2)]
        backends.verified()
        backends.recorded("nvidia-mps-and-time-slicing")
        backends.delete(*names)


def test_hami_with_more_memory_than_there_is(backends: Backends, lab: Lab) -> None:
    """Each card gives away three times its memory: a pod may have more than the card, and ten pods run."""
    first = lab.gpu_nodes[0]
    with backends.configured(hami_memory_scaling=3, hami_split_count=5, acceptance_allocate_command=[]):
        everywhere(backends, "hami")
        node = lab.api.node(first)
        rows = json.loads(node["metadata"]["annotations"]["hami.io/node-nvidia-register"])
        assert node["status"]["allocatable"][GPU] == str(5 * len(rows))
        name = backends.pod("more", first, gpu=1, mib=rows[0]["devmem"] * 2 // 3)
        assert "CUDA_OVERSUBSCRIBE=true" in lab.inside(SPACE, name, "c0", "env")
        backends.verified()
        backends.recorded("hami-scaled")
        backends.delete(name)
        assert accepted(backends)["hami"]["M01"] == "PASS"


def workloads(lab: Lab) -> dict[str, tuple[str, int]]:
    """Return uid and generation of each Deployment and DaemonSet."""
    found = [one for kind in ("deployments", "daemonsets") for one in lab.api.items(f"/apis/apps/v1/{kind}")]
    return {
        f"{one['metadata']['namespace']}/{one['metadata']['name']}": (
            one["metadata"]["uid"],
            one["metadata"]["generation"],
        )
        for one in found
    }


def join_again(lab: Lab, node: str) -> None:
    """Make a node one that has just joined: without what kubelet knows of devices.

    HAMi's scheduler may run on it, and moves to another one with the Node.
    """
    path = f"/api/v1/nodes/{node}"

    def no_plugin() -> bool:
        pods = lab.api.items(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}")
        labels = {label for pod in pods for label in pod["metadata"].get("labels", {}).items()}
        return not labels & set(PLUGINS.values())

    # uninstall.yml has taken it off the node.
    until(no_plugin, f"no device plugin on {node}", 30)
    lab.ssh(node, f"systemctl stop kubelet && rm -f {CHECKPOINT}")
    lab.api.delete(path)
    lab.ssh(node, "systemctl start kubelet")
    until(lambda: lab.api.node(node)["metadata"]["name"] == node, "a new Node", 60)
    lab.wait_ready()


@pytest.mark.parametrize("backend", ["hami", "nvidia"])
def test_a_node_joins(backends: Backends, lab: Lab, backend: str) -> None:
    """A node without marks, as kubeadm join leaves it, gets the back end; nothing else is changed."""
    first, second = lab.gpu_nodes[:2]
    everywhere(backends, backend)
    backends.run("uninstall", "--limit", second)
    join_again(lab, second)
    kept = backends.pod("kept", first, holds=500, gpu=1, **({"mib": 1000} if backend == "hami" else {}))
    before = workloads(lab)
    with undisturbed(backends, kept):
        done = backends.run("add_node", "-e", f"add_node={second}")
    assert {host for host, sums in done.recap.items() if sums["changed"]} <= {second, "localhost"}
    assert workloads(lab) == before
    backends.verified()
    backends.delete(kept)
