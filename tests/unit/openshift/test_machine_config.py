# SPDX-License-Identifier: GPL-3.0-or-later
"""MachineConfigs for GPU nodes, with a simulated operator: on the real definitions, and in memory with kills."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import threading
import time
import tomllib

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref, ref_of
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import machine_config as subject
from memory_kube import MemoryKube
from played_operator import conditions
from real_apiserver import MERGE, Refused
from simulation import Simulation, module_of

API = "/apis/machineconfiguration.openshift.io/v1"
LABEL, WORKER = "node-role.kubernetes.io/gpu", "node-role.kubernetes.io/worker"
CONFIG = Ref(subject.API, "MachineConfig", "", "99-gpushare")
POOL = Ref(subject.API, "MachineConfigPool", "", "gpu")
BAD = "no-such-argument=1"
UNPACKED = (
    "Node worker-1 is reporting: \"can't reconcile config rendered-gpu-1 with rendered-gpu-2: ignition links section "
    'contains changes"'
)


def collect(server):
    """Complete foreground deletions, as kube-controller-manager does."""
    for plural in ("machineconfigs", "machineconfigpools"):
        for item in server.request("GET", f"{API}/{plural}")["items"]:
            if item["metadata"].get("deletionTimestamp"):
                path = f"{API}/{plural}/{item['metadata']['name']}"
                server.ask("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)


class Updates:
    """The operator's decisions, simulated: it updates one node of each pool at a time; ``BAD`` degrades a pool."""

    def __init__(self):
        self.have = {}
        self.joined = []

    def advance(self, nodes, pools, ours):
        """Update nodes; yield each pool with its rendered configuration, the sources of that, and its status."""
        gpu = [name for name, labels in nodes.items() if "gpu" in pools and LABEL in labels]
        for name, pool in pools.items():
            members = gpu if name == "gpu" else [node for node in nodes if WORKER in nodes[node] and node not in gpu]
            spec = ours["spec"] if ours and name == "gpu" else {}
            content = json.dumps(spec, sort_keys=True) if spec else ""
            rendered = {"name": f"rendered-{name}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"}
            source = [{"apiVersion": subject.API, "kind": "MachineConfig", "name": CONFIG.name}] if spec else []
            broken = bool(members) and BAD in (spec.get("kernelArguments") or [])
            behind = [member for member in members if self.have.get(member, "") != content]
            if behind and not broken and not pool["spec"].get("paused"):
                self.joined.append((name, behind[-1]))
                self.have[behind.pop()] = content
            done = not behind and not broken
            status = {
                "machineCount": len(members),
                "readyMachineCount": len(members) - len(behind),
                "updatedMachineCount": len(members) - len(behind),
                "degradedMachineCount": int(broken),
                "configuration": {"name": rendered["name"] if done else "rendered-before"},
                "conditions": conditions(
                    Updated=(done, ""),
                    Updating=(not done, ""),
                    NodeDegraded=(broken, UNPACKED if broken else ""),
                    Degraded=(broken, ""),
                ),
            }
            live = {"apiVersion": subject.API, "kind": "MachineConfig", "metadata": rendered, "spec": spec}
            yield pool, live, {"configuration": {**rendered, "source": source}}, status


class Played(Simulation):
    """The Machine Config Operator on a real API server."""

    def __init__(self, server):
        super().__init__()
        self.server, self.asleep = server, False
        self._at_work = threading.Lock()
        self._updates = Updates()
        self.joined = self._updates.joined

    def _step(self):
        with self._at_work, contextlib.suppress(Refused):
            if not self.asleep:
                collect(self.server)
                self._sync()

    def fall_asleep(self):
        """Stop after the step in progress."""
        with self._at_work:
            self.asleep = True

    def _list(self, path):
        return {item["metadata"]["name"]: item for item in self.server.request("GET", path)["items"]}

    def _sync(self):
        nodes = {name: one["metadata"].get("labels", {}) for name, one in self._list("/api/v1/nodes").items()}
        pools, ours = self._list(f"{API}/machineconfigpools"), self._list(f"{API}/machineconfigs").get(CONFIG.name)
        for pool, rendered, given, status in self._updates.advance(nodes, pools, ours):
            path = f"{API}/machineconfigpools/{pool['metadata']['name']}"
            if (pool["spec"].get("configuration") or {}).get("name") != rendered["metadata"]["name"]:
                self.server.apply(rendered)
                self.server.request("PATCH", path, {"spec": given}, MERGE)
                pool = self.server.request("GET", path)
            status["observedGeneration"] = pool["metadata"]["generation"]
            self.server.request("PATCH", f"{path}/status", {"status": status}, MERGE)


class Operator(Updates):
    """The Machine Config Operator in memory: it reports a change one second later."""

    def __call__(self, kube):
        nodes = {ref.name: one["metadata"]["labels"] for ref, one in kube.objects.items() if ref.kind == "Node"}
        pools = {ref.name: one for ref, one in kube.objects.items() if ref.kind == "MachineConfigPool"}
        for pool, rendered, given, status in self.advance(nodes, pools, kube.objects.get(CONFIG)):
            kube.objects[ref_of(rendered)] = rendered
            status["observedGeneration"] = pool["metadata"].get("generation")
            kube.set(ref_of(pool), {**pool, "spec": {**pool["spec"], **given}, "status": status})


def node(name, *roles):
    labels = {f"node-role.kubernetes.io/{role}": "" for role in roles}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def theirs(name="gpu", **spec):
    """A pool that another has created."""
    pool = subject.pool_of(name)
    return {**pool, "metadata": {"name": name}, "spec": {**pool["spec"], **spec}}


def workers():
    """OpenShift's own pool."""
    labels = {"matchLabels": {subject.ROLE: "worker"}}
    return theirs("worker", machineConfigSelector=labels, nodeSelector={"matchLabels": {WORKER: ""}})


@pytest.fixture
def kube(openshift):
    """Two workers and a node of the control plane, and the pool of workers."""
    for path in ("/api/v1/nodes", f"{API}/machineconfigs", f"{API}/machineconfigpools"):
        openshift.request("DELETE", path)
    collect(openshift)
    for each in (node("worker-1", "worker"), node("worker-2", "worker"), node("master-0", "master")):
        openshift.request("POST", "/api/v1/nodes", each)
    openshift.apply(workers())
    return RealKube.of_module(module_of(openshift, subject.ARGUMENTS))


def cluster(pool=None, members=()):
    """Three workers in memory, some of them in a pool of another."""
    definition = {
        "apiVersion": subject.DEFINITION.api_version,
        "kind": subject.DEFINITION.kind,
        "metadata": {"name": subject.DEFINITION.name},
    }
    nodes = [node(name, "worker", *(["gpu"] if name in members else [])) for name in ("w1", "w2", "w3")]
    kube = MemoryKube(Operator(), definition, workers(), *nodes, *([pool] if pool else []))
    settle(kube)
    return kube


def settle(kube):
    for _second in range(8):
        kube.sleep(1)


def params(**given):
    defaults = {name: spec.get("default") for name, spec in subject.ARGUMENTS.items()}
    return {**defaults, "nodes": ["w1"], **given}


def machine_config(**given):
    return subject.machine_config(subject.Options.of(params(**given)))


def run(kube, check=False, timeout=25.0, **given):
    waiting = Waiting(timeout, 0.05)
    if isinstance(kube, MemoryKube):
        waiting = Waiting(timeout=300, pause=10, sleep=kube.sleep, now=kube.now)
    else:
        given = {"nodes": ["worker-1"], **given}
    return subject.work(kube, params(**given), check, waiting)


def labelled(kube):
    return {one["metadata"]["name"] for one in kube.list_all("v1", "Node") if LABEL in one["metadata"]["labels"]}


def configured(kube):
    settle(kube)
    return {name for name, content in kube._operator.have.items() if content}


def notes(kube, ref):
    return ((kube.get(ref) or {"metadata": {}})["metadata"].get("annotations")) or {}


def gone(kube, ref):
    end = time.monotonic() + 10
    while kube.get(ref) and time.monotonic() < end:
        time.sleep(0.05)
    return not kube.get(ref)


# --------------------------------------------------------------------------- the real definitions


def test_gpu_nodes_configured_and_restored(kube, openshift):
    with Played(openshift) as operator:
        runtime = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
        before = run(kube, check=True, runtime_path=runtime)
        assert kube.get(CONFIG) is None and labelled(kube) == set()
        done = run(kube, runtime_path=runtime)
        assert done["changed"] and done["diff"] == before["diff"]
        live = kube.get(CONFIG)
        assert live["metadata"]["labels"][subject.ROLE] == "gpu"
        assert live["spec"]["kernelArguments"] == ["modprobe.blacklist=nouveau", "rd.driver.blacklist=nouveau"]
        files = {
            file["path"]: base64.b64decode(file["contents"]["source"].partition("base64,")[2]).decode()
            for file in live["spec"]["config"]["storage"]["files"]
        }
        assert files["/etc/modprobe.d/blacklist-nouveau.conf"].startswith("blacklist nouveau\n")
        crio = tomllib.loads(files["/etc/crio/crio.conf.d/99-nvidia.conf"])["crio"]["runtime"]
        assert crio["default_runtime"] == "nvidia" and crio["runtimes"]["nvidia"]["runtime_type"] == "oci"
        assert subject.BEFORE not in notes(kube, POOL)
        assert labelled(kube) == {"worker-1"} and ("gpu", "worker-1") in operator.joined
        assert not run(kube, runtime_path=runtime)["changed"]
        assert run(kube, state="absent", nodes=[])["changed"]
        assert labelled(kube) == set() and gone(kube, CONFIG) and gone(kube, POOL)
        assert not run(kube, state="absent", nodes=[])["changed"]


def test_existing_pool_keeps_its_nodes(kube, openshift):
    openshift.apply(theirs())
    openshift.request("PATCH", "/api/v1/nodes/worker-2", {"metadata": {"labels": {LABEL: ""}}}, MERGE)
    with Played(openshift) as operator:
        assert run(kube)["changed"] and labelled(kube) == {"worker-1", "worker-2"}
        # The note on the MachineConfig outlives another apply of it.
        assert run(kube, kernel_arguments=["intel_iommu=on"])["changed"]
        before = len(operator.joined)
        assert run(kube, state="absent", nodes=[], check=True)["changed"] and labelled(kube) == {"worker-1", "worker-2"}
        assert run(kube, state="absent", nodes=[])["changed"]
        assert labelled(kube) == {"worker-2"} and ("gpu", "worker-2") in operator.joined[before:]
        assert gone(kube, CONFIG) and kube.get(POOL) and subject.BEFORE not in notes(kube, POOL)
        assert not run(kube, state="absent", nodes=[])["changed"]


def test_degraded_pool_rolls_back_with_the_operators_message(kube, openshift):
    with Played(openshift):
        with pytest.raises(NotInEffect) as failure:
            run(kube, kernel_arguments=[BAD])
        assert "can't reconcile config" in str(failure.value) and str(failure.value).endswith("it was rolled back")
        assert gone(kube, CONFIG) and labelled(kube) == set()
        run(kube)
        with pytest.raises(NotInEffect, match="NodeDegraded"):
            run(kube, kernel_arguments=[BAD])
        assert kube.get(CONFIG)["spec"]["kernelArguments"] == list(subject.NOUVEAU_ARGUMENTS)
        assert labelled(kube) == {"worker-1"}


def test_unfinished_added_node_leaves_the_others_configured(kube, openshift):
    with Played(openshift) as operator:
        run(kube)
        operator.fall_asleep()
        with pytest.raises(NotInEffect, match=r"not within 1 s: pool gpu counts 1 of 2 nodes"):
            run(kube, nodes=["worker-1", "worker-2"], timeout=1.0)
        assert labelled(kube) == {"worker-1"} and kube.get(CONFIG)


def test_pool_status_older_than_the_change_is_ignored(kube, openshift):
    with Played(openshift) as operator:
        run(kube)
        # The pool's status is that of the configuration before.
        operator.fall_asleep()
        with pytest.raises(NotInEffect, match=r"doesn't contain 99-gpushare as it is now; it was rolled back"):
            run(kube, kernel_arguments=["intel_iommu=on"], timeout=1.5)
        assert kube.get(CONFIG)["spec"]["kernelArguments"] == list(subject.NOUVEAU_ARGUMENTS)


def test_rendered_config_may_contain_more_files():
    spec = machine_config(kernel_arguments=["a=1"])["spec"]
    rendered = {"spec": {**spec, "kernelArguments": ["quiet", *spec["kernelArguments"]]}}
    assert subject.holds(rendered, spec)
    assert not subject.holds(rendered, {**spec, "kernelArguments": ["b=2"]})
    other = {**spec, "config": {"storage": {"files": [subject.file_of(subject.NOUVEAU_FILE, "another")]}}}
    assert not subject.holds(rendered, other) and not subject.holds(None, spec)


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": ["master-0"]}, "nodes: master-0 is a node of the control plane"),
        ({"nodes": ["worker-9"]}, "nodes: the cluster has no node worker-9"),
        ({"nodes": []}, "nodes: the list is empty"),
        ({"pool": "worker"}, "pool: 'worker' can't be"),
        ({"pool": "GPU nodes"}, "pool: 'GPU nodes' can't be"),
        ({"nouveau": False}, "none of them is set"),
        ({"runtime_path": "nvidia-runtime"}, "runtime_path: 'nvidia-runtime' isn't an absolute path"),
        ({"kernel_arguments": ["a b"]}, "kernel_arguments: 'a b' isn't one argument"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(given, message):
    kube = cluster()
    kube.objects[ref_of(node("master-0"))] = node("master-0", "master")
    with pytest.raises(BadInput) as failure:
        run(kube, **given)
    assert message in str(failure.value) and not kube.changes


def selecting(*roles):
    return {"machineConfigSelector": {"matchExpressions": [{"key": subject.ROLE, "operator": "In", "values": roles}]}}


def in_pool_infra(kube):
    kube.objects[ref_of(theirs("infra"))] = theirs("infra")
    kube.objects[ref_of(node("w1"))]["metadata"]["labels"]["node-role.kubernetes.io/infra"] = ""


def their_config(kube):
    kube.objects[CONFIG] = {**machine_config(kernel_arguments=["quiet"]), "metadata": {"name": CONFIG.name}}


def degraded_workers(kube):
    live = kube.objects[ref_of(workers())]
    live["status"] = {"conditions": conditions(Degraded=(True, "Node w2 is reporting: disk full"))}


@pytest.mark.parametrize(
    ("pool", "change", "message"),
    [
        (None, in_pool_infra, "nodes: w1 is in pool infra already"),
        (theirs(paused=True), None, "is paused"),
        (theirs(**selecting("gpu")), None, "doesn't select the MachineConfigs of workers"),
        (theirs(**selecting("x")), None, "doesn't select MachineConfigs of role gpu"),
        (
            theirs(nodeSelector={"matchLabels": {"example.org/gpu": ""}}),
            None,
            "pool: MachineConfigPool gpu exists and doesn't select node w1 by the label",
        ),
        (None, their_config, "MachineConfig 99-gpushare exists and isn't ours"),
        (None, degraded_workers, "pool worker is Degraded: Node w2 is reporting: disk full"),
    ],
)
def test_foreign_pools_and_configs_refused(pool, change, message):
    kube = cluster(pool)
    if change:
        change(kube)
    with pytest.raises(BadInput, match=message):
        run(kube)
    assert not kube.changes


def test_removal_from_a_paused_pool_refused():
    kube = cluster(theirs(), members=["w2"])
    run(kube)
    kube.objects[POOL]["spec"]["paused"] = True
    changes = len(kube.changes)
    with pytest.raises(BadInput, match="pool: MachineConfigPool gpu is paused"):
        run(kube, state="absent")
    assert len(kube.changes) == changes


# --------------------------------------------------------------------------- another's pool


def test_nodes_added_later_are_removed_and_failed_ones_kept():
    kube = cluster(theirs(), members=["w3"])
    run(kube, nodes=["w1"])
    run(kube, nodes=["w1", "w2"])
    assert json.loads(notes(kube, CONFIG)[subject.LABELLED]) == ["w1", "w2"]
    with pytest.raises(NotInEffect, match="it was rolled back"):
        run(kube, nodes=["w1", "w2", "w3"], kernel_arguments=[BAD])
    assert labelled(kube) == {"w1", "w2", "w3"}
    run(kube, state="absent")
    assert labelled(kube) == {"w3"}


def test_rolled_back_node_belongs_to_its_user():
    kube = cluster(theirs(), members=["w3"])
    run(kube, nodes=["w1"])
    with pytest.raises(NotInEffect, match="it was rolled back"):
        run(kube, nodes=["w1", "w2"], kernel_arguments=[BAD])
    kube.objects[ref_of(node("w2"))]["metadata"]["labels"][LABEL] = ""
    run(kube, state="absent")
    assert labelled(kube) == {"w2", "w3"}


def test_our_pool_is_removed_with_all_nodes():
    kube = cluster()
    run(kube, nodes=["w1"])
    kube.objects[ref_of(node("w2"))]["metadata"]["labels"][LABEL] = ""
    run(kube, state="absent")
    assert labelled(kube) == set() == configured(kube) and POOL not in kube.objects


@pytest.mark.parametrize(
    ("term", "labels", "taken"),
    [
        ({"key": "a", "operator": "Exists"}, {"a": ""}, True),
        ({"key": "a", "operator": "Exists"}, {}, False),
        ({"key": "a", "operator": "DoesNotExist"}, {}, True),
        ({"key": "a", "operator": "DoesNotExist"}, {"a": ""}, False),
        ({"key": "a", "operator": "In", "values": ["x", "y"]}, {"a": "y"}, True),
        ({"key": "a", "operator": "In", "values": ["x", "y"]}, {"a": "z"}, False),
        ({"key": "a", "operator": "NotIn", "values": ["x"]}, {"a": "x"}, False),
        ({"key": "a", "operator": "NotIn", "values": ["x"]}, {}, True),
    ],
)
def test_pool_selectors(term, labels, taken):
    assert subject._matches({"spec": {"nodeSelector": {"matchExpressions": [term]}}}, labels) is taken
    assert not subject._matches({"spec": {}}, labels)


# --------------------------------------------------------------------------- kills


def assert_removed(kube, own, number):
    assert labelled(kube) == own and CONFIG not in kube.objects and configured(kube) == set(), number
    assert notes(kube, POOL) == {} and (POOL in kube.objects) == bool(own)
    assert not run(kube, state="absent")["changed"]


@pytest.mark.parametrize("given", [{}, {"kernel_arguments": [BAD]}])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("pool", ["ours", "theirs"])
def test_killed_run_is_completed_or_reverted_by_the_next(pool, there, given):
    """Kill a run before each change and read while nodes are added; then repeat it, or remove everything."""
    own = {"w3"} if pool == "theirs" else set()

    def start():
        kube = cluster(theirs() if own else None, members=own)
        if there:
            run(kube, nodes=["w1"])
        return kube

    def bring(kube):
        try:
            run(kube, nodes=["w1", "w2"], **given)
        except NotInEffect:
            assert given

    for number in itertools.count():
        same, away, twice = start(), start(), start()
        ended = [not kube.killed_after(number, lambda kube=kube: bring(kube)) for kube in (same, away, twice)]
        bring(same)
        assert subject.BEFORE not in notes(same, POOL)
        if not given:
            assert labelled(same) == {"w1", "w2", *own} == configured(same), number
            assert not run(same, nodes=["w1", "w2"])["changed"]
        elif there:
            assert labelled(same) == {"w1", *own} == configured(same), number
        else:
            assert labelled(same) == own and CONFIG not in same.objects and configured(same) == set(), number
        # The removal is killed as well, and repeated.
        twice.killed_after(number, lambda twice=twice: run(twice, state="absent"))
        for kube in (same, away, twice):
            run(kube, state="absent")
            assert_removed(kube, own, number)
        if all(ended):
            break
    assert number > 6


@pytest.mark.parametrize("pool", ["ours", "theirs"])
def test_killed_removal_is_completed_or_reverted_by_the_next(pool):
    own = {"w3"} if pool == "theirs" else set()
    for number in itertools.count():
        away, back, bad = (cluster(theirs() if own else None, members=own) for _kind in range(3))
        ended = []
        for kube in (away, back, bad):
            run(kube, nodes=["w1"])
            ended.append(not kube.killed_after(number, lambda kube=kube: run(kube, state="absent")))
        run(back, nodes=["w1"])
        assert labelled(back) == {"w1", *own} == configured(back), number
        with pytest.raises(NotInEffect):
            run(bad, nodes=["w1"], kernel_arguments=[BAD])
        for kube in (away, back, bad):
            run(kube, state="absent")
            assert_removed(kube, own, number)
        if all(ended):
            break
    assert number > 6
