# SPDX-License-Identifier: GPL-3.0-or-later
"""MachineConfigs for nodes with GPUs: the real definitions, and a simulated Machine Config Operator."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
import tomllib
from types import SimpleNamespace

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import machine_config as subject
from played_operator import conditions
from real_apiserver import MERGE, Refused
from simulation import Simulation

API = "/apis/machineconfiguration.openshift.io/v1"
LABEL = "node-role.kubernetes.io/gpu"
UNPACKED = (
    "Node worker-1 is reporting: \"can't reconcile config rendered-gpu-1 with rendered-gpu-2: ignition links section "
    'contains changes"'
)


def collect(server):
    """Complete foreground deletions, as kube-controller-manager does."""
    for plural in ("machineconfigs", "machineconfigpools"):
        for one in server.request("GET", f"{API}/{plural}")["items"]:
            if one["metadata"].get("deletionTimestamp"):
                path = f"{API}/{plural}/{one['metadata']['name']}"
                server.ask("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)


class Played(Simulation):
    """Render configurations and update each pool node by node; a pool with ``bad`` arguments degrades."""

    def __init__(self, server, bad=(), asleep=False):
        super().__init__()
        self.server, self.bad, self.asleep = server, set(bad), asleep
        self._at_work = threading.Lock()
        self.rendered = {}
        self.joined = []
        self.known = {"gpu": {}, "worker": {}}

    def _step(self):
        with self._at_work, contextlib.suppress(Refused):
            if not self.asleep:
                collect(self.server)
                self._sync()

    def fall_asleep(self):
        """Stop after the step in progress."""
        with self._at_work:
            self.asleep = True

    def _sync(self):
        nodes = self.server.request("GET", "/api/v1/nodes")["items"]
        configs = {one["metadata"]["name"]: one for one in self.server.request("GET", f"{API}/machineconfigs")["items"]}
        gpu = [one["metadata"]["name"] for one in nodes if LABEL in one["metadata"].get("labels", {})]
        for pool in self.server.request("GET", f"{API}/machineconfigpools")["items"]:
            name = pool["metadata"]["name"]
            members = gpu if name == "gpu" else [one["metadata"]["name"] for one in nodes][: len(nodes) - len(gpu)]
            mine = configs.get("99-gpushare") if name == "gpu" else None
            digest = hashlib.sha256(json.dumps((mine or {}).get("spec"), sort_keys=True).encode()).hexdigest()
            rendered = f"rendered-{name}-{digest[:10]}"
            if (pool["spec"].get("configuration") or {}).get("name") != rendered:
                made = {"apiVersion": subject.API, "kind": "MachineConfig", "metadata": {"name": rendered}}
                self.server.apply({**made, "spec": (mine or {}).get("spec", {})})
                source = [{"apiVersion": subject.API, "kind": "MachineConfig", "name": "99-gpushare"}] if mine else []
                given = {"configuration": {"name": rendered, "source": source}}
                self.server.request("PATCH", f"{API}/machineconfigpools/{name}", {"spec": given}, MERGE)
                pool = self.server.request("GET", f"{API}/machineconfigpools/{name}")
            broken = bool(mine) and bool(members) and bool(self.bad & set(mine["spec"].get("kernelArguments") or []))
            have = self.known[name]
            behind = [one for one in members if have.get(one) != rendered]
            if behind and not broken:
                have[behind[0]] = rendered
                self.joined.append((name, behind[0]))
            ready = sum(1 for one in members if have.get(one) == rendered)
            done = ready == len(members) and not broken
            status = {
                "observedGeneration": pool["metadata"]["generation"],
                "machineCount": len(members),
                "readyMachineCount": ready,
                "updatedMachineCount": ready,
                "degradedMachineCount": int(broken),
                "configuration": {"name": rendered if done else "rendered-before"},
                "conditions": conditions(
                    Updated=(done, ""),
                    Updating=(not done, ""),
                    NodeDegraded=(broken, UNPACKED if broken else ""),
                    Degraded=(broken, ""),
                ),
            }
            self.server.request("PATCH", f"{API}/machineconfigpools/{name}/status", {"status": status}, MERGE)


@pytest.fixture
def kube(openshift):
    """Two workers and a node of the control plane, and the pool of workers."""
    for path in ("/api/v1/nodes", f"{API}/machineconfigs", f"{API}/machineconfigpools"):
        openshift.request("DELETE", path)
    collect(openshift)
    for name, role in (("worker-1", "worker"), ("worker-2", "worker"), ("master-0", "master")):
        labels = {f"node-role.kubernetes.io/{role}": ""}
        openshift.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
    worker = {
        "apiVersion": subject.API,
        "kind": "MachineConfigPool",
        "metadata": {"name": "worker"},
        "spec": {
            "machineConfigSelector": {"matchLabels": {subject.ROLE: "worker"}},
            "nodeSelector": {"matchLabels": {"node-role.kubernetes.io/worker": ""}},
        },
    }
    openshift.apply(worker)
    module = SimpleNamespace(
        params={**dict.fromkeys(subject.ARGUMENTS), "kubeconfig": str(openshift.kubeconfig)}, no_log_values=set()
    )
    return RealKube.of_module(module)


def params(**given):
    defaults = {name: spec.get("default") for name, spec in subject.ARGUMENTS.items()}
    return {**defaults, "nodes": ["worker-1"], **given}


def run(kube, check=False, timeout=25.0, **given):
    return subject.work(kube, params(**given), check, subject.Waiting(timeout=timeout, pause=0.05))


def labelled(server):
    nodes = server.request("GET", "/api/v1/nodes")["items"]
    return {one["metadata"]["name"] for one in nodes if LABEL in one["metadata"].get("labels", {})}


def gone(server, plural, name):
    end = time.monotonic() + 10
    while name in names(server, plural) and time.monotonic() < end:
        time.sleep(0.05)
    return name not in names(server, plural)


def names(server, plural):
    found = {one["metadata"]["name"] for one in server.request("GET", f"{API}/{plural}")["items"]}
    return {name for name in found if not name.startswith("rendered-")}


def test_gpu_nodes_configured_and_restored(kube, openshift):
    with Played(openshift) as operator:
        before = run(kube, check=True, runtime_path="/usr/local/nvidia/toolkit/nvidia-container-runtime")
        assert names(openshift, "machineconfigs") == set() and labelled(openshift) == set()
        done = run(kube, runtime_path="/usr/local/nvidia/toolkit/nvidia-container-runtime")
        assert done["changed"] and done["diff"] == before["diff"]
        live = openshift.request("GET", f"{API}/machineconfigs/99-gpushare")
        assert live["metadata"]["labels"][subject.ROLE] == "gpu"
        assert live["spec"]["kernelArguments"] == ["modprobe.blacklist=nouveau", "rd.driver.blacklist=nouveau"]
        files = {
            one["path"]: base64.b64decode(one["contents"]["source"].partition("base64,")[2]).decode()
            for one in live["spec"]["config"]["storage"]["files"]
        }
        assert files["/etc/modprobe.d/blacklist-nouveau.conf"].startswith("blacklist nouveau\n")
        crio = tomllib.loads(files["/etc/crio/crio.conf.d/99-nvidia.conf"])["crio"]["runtime"]
        assert crio["default_runtime"] == "nvidia" and crio["runtimes"]["nvidia"]["runtime_type"] == "oci"
        pool = openshift.request("GET", f"{API}/machineconfigpools/gpu")
        assert subject.BEFORE not in pool["metadata"].get("annotations", {})
        assert labelled(openshift) == {"worker-1"} and ("gpu", "worker-1") in operator.joined
        assert not run(kube, runtime_path="/usr/local/nvidia/toolkit/nvidia-container-runtime")["changed"]
        assert run(kube, state="absent", nodes=[])["changed"]
        assert labelled(openshift) == set()
        assert gone(openshift, "machineconfigs", "99-gpushare") and gone(openshift, "machineconfigpools", "gpu")
        assert not run(kube, state="absent", nodes=[])["changed"]


def test_existing_pool_keeps_its_nodes(kube, openshift):
    pool = subject.pool_of("gpu")
    pool["metadata"] = {"name": "gpu"}
    openshift.apply(pool)
    openshift.request("PATCH", "/api/v1/nodes/worker-2", {"metadata": {"labels": {LABEL: ""}}}, MERGE)
    with Played(openshift) as operator:
        assert run(kube)["changed"] and labelled(openshift) == {"worker-1", "worker-2"}
        # The note on the MachineConfig outlives another apply of it.
        assert run(kube, kernel_arguments=["intel_iommu=on"])["changed"]
        before = len(operator.joined)
        assert run(kube, state="absent", nodes=[])["changed"]
        assert labelled(openshift) == {"worker-2"} and ("gpu", "worker-2") in operator.joined[before:]
        assert gone(openshift, "machineconfigs", "99-gpushare") and not gone(openshift, "machineconfigpools", "gpu")
        live = openshift.request("GET", f"{API}/machineconfigpools/gpu")
        assert subject.BEFORE not in (live["metadata"].get("annotations") or {})
        assert not run(kube, state="absent", nodes=[])["changed"]


def test_degraded_pool_rolls_back_with_the_operators_message(kube, openshift):
    with Played(openshift, bad=["no-such-argument=1"]):
        with pytest.raises(NotInEffect) as failure:
            run(kube, kernel_arguments=["no-such-argument=1"])
        assert "can't reconcile config" in str(failure.value) and str(failure.value).endswith("it was rolled back")
        assert gone(openshift, "machineconfigs", "99-gpushare") and labelled(openshift) == set()
        run(kube)
        with pytest.raises(NotInEffect, match="NodeDegraded"):
            run(kube, kernel_arguments=["no-such-argument=1"])
        live = openshift.request("GET", f"{API}/machineconfigs/99-gpushare")
        assert live["spec"]["kernelArguments"] == list(subject.NOUVEAU_ARGUMENTS) and labelled(openshift) == {
            "worker-1"
        }


def test_unfinished_added_node_leaves_the_others_configured(kube, openshift):
    with Played(openshift) as operator:
        run(kube)
        operator.fall_asleep()
        with pytest.raises(NotInEffect, match=r"not within 1 s: pool gpu counts 1 of 2 nodes"):
            run(kube, nodes=["worker-1", "worker-2"], timeout=1.0)
        assert labelled(openshift) == {"worker-1"} and names(openshift, "machineconfigs") == {"99-gpushare"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": ["master-0"]}, "nodes: master-0 is a node of the control plane"),
        ({"nodes": ["worker-9"]}, "nodes: the cluster has no node worker-9"),
        ({"nodes": []}, "nodes: the list is empty"),
        ({"pool": "worker"}, "pool: 'worker' can't be"),
        ({"pool": "GPU nodes"}, "pool: 'GPU nodes' can't be"),
        ({"nouveau": False}, "none of them is set"),
        (
            {"runtime_path": "nvidia-container-runtime"},
            "runtime_path: 'nvidia-container-runtime' isn't an absolute path",
        ),
        ({"kernel_arguments": ["a b"]}, "kernel_arguments: 'a b' isn't one argument"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(kube, openshift, given, words):
    with pytest.raises(BadInput) as failure:
        run(kube, **given)
    assert words in str(failure.value)
    assert names(openshift, "machineconfigs") == set() and names(openshift, "machineconfigpools") == {"worker"}


def test_foreign_pools_and_configs_refused(kube, openshift):
    pool = subject.pool_of("infra")
    pool["metadata"] = {"name": "infra"}
    openshift.apply(pool)
    openshift.request(
        "PATCH", "/api/v1/nodes/worker-1", {"metadata": {"labels": {"node-role.kubernetes.io/infra": ""}}}, MERGE
    )
    with pytest.raises(BadInput, match="nodes: worker-1 is in pool infra already"):
        run(kube)
    openshift.request("DELETE", f"{API}/machineconfigpools/infra")
    for change, words in (
        ({"paused": True}, "is paused"),
        (
            {
                "machineConfigSelector": {
                    "matchExpressions": [{"key": subject.ROLE, "operator": "In", "values": ["gpu"]}]
                }
            },
            "doesn't select the MachineConfigs of workers",
        ),
        (
            {"machineConfigSelector": {"matchExpressions": [{"key": subject.ROLE, "operator": "In", "values": ["x"]}]}},
            "doesn't select MachineConfigs of role gpu",
        ),
    ):
        pool = subject.pool_of("gpu")
        pool["spec"].update(change)
        openshift.apply(pool)
        with pytest.raises(BadInput, match=words):
            run(kube)
    openshift.request("DELETE", f"{API}/machineconfigpools/gpu")
    theirs = {**subject.machine_config(params()), "metadata": {"name": "99-gpushare"}}
    theirs["spec"]["kernelArguments"] = ["quiet"]
    openshift.apply(theirs)
    with pytest.raises(BadInput, match="MachineConfig 99-gpushare exists and isn't ours"):
        run(kube)
    degraded = {"status": {"conditions": conditions(Degraded=(True, "Node worker-2 is reporting: disk full"))}}
    openshift.request("PATCH", f"{API}/machineconfigpools/worker/status", degraded, MERGE)
    with pytest.raises(BadInput, match="pool worker is Degraded: Node worker-2 is reporting: disk full"):
        run(kube)


def test_pool_status_older_than_the_change_is_ignored(kube, openshift):
    with Played(openshift) as operator:
        run(kube)
        # The pool's status is that of the configuration before.
        operator.fall_asleep()
        with pytest.raises(NotInEffect, match=r"doesn't contain 99-gpushare as it is now; it was rolled back"):
            run(kube, kernel_arguments=["intel_iommu=on"], timeout=1.5)
        live = openshift.request("GET", f"{API}/machineconfigs/99-gpushare")
        assert live["spec"]["kernelArguments"] == list(subject.NOUVEAU_ARGUMENTS)


def test_rendered_config_may_contain_more_files():
    spec = subject.machine_config(params(kernel_arguments=["a=1"]))["spec"]
    rendered = {"spec": {**spec, "kernelArguments": ["quiet", *spec["kernelArguments"]]}}
    assert subject.holds(rendered, spec)
    assert not subject.holds(rendered, {**spec, "kernelArguments": ["b=2"]})
    other = {**spec, "config": {"storage": {"files": [subject.file_of(subject.NOUVEAU_FILE, "another")]}}}
    assert not subject.holds(rendered, other) and not subject.holds(None, spec)
