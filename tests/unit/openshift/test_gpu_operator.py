# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's GPU Operator beside gpushare, simulated: on the real ClusterPolicy definition, and in memory with kills.

The simulation replays what its real controller did: recorded/gpu_operator_26_7.yml, by test_real_gpu_operator.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import operator_labels
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref, ref_of
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import gpu_operator as subject
from memory_kube import MemoryKube
from real_apiserver import MERGE, Refused
from simulation import Simulation, module_of

ON, OFF = ("true", "true"), ("false", "true")
CLAIMS = [{"name": "gpu-mem", "resourceClaimTemplateName": "gpu-mem-4"}]
CRIO, CONTAINERD = "cri-o://1.33.4", "containerd://2.1.0"
POLICY = Ref(subject.API, subject.KIND, "", "gpu-cluster-policy")
DAEMON_SETS = "/apis/apps/v1/namespaces/default/daemonsets"
TOOLKIT = f"{DAEMON_SETS}/{subject.TOOLKIT}"
POLICIES = "/apis/nvidia.com/v1/clusterpolicies"


RECORDED = yaml.safe_load((Path(__file__).parent / "recorded/gpu_operator_26_7.yml").read_text())
DEPLOYED = (subject.PRESENT, *(f"{subject.DEPLOY}{name}" for name in RECORDED["cri-o"]["deploy_labels"]))


def recorded(runtime, change):
    """What the real controller did after a change: the last state, and the DaemonSets that it changed."""
    found = RECORDED[runtime.partition(":")[0]]["changes"][change]
    return found["states"][-1], found.get("changed", ()), found.get("waiting", ())


class Operator:
    """A simulation in memory: ready two seconds after each change of the policy's spec, unless ``broken``.

    A node is in ``without`` when its pods restarted without the validator, for whose file they wait.
    """

    def __init__(self):
        self.broken = lambda spec: False
        self.generation, self.age = None, 0
        self.toolkits = None
        self.without = set()

    def __call__(self, kube):
        policy = kube.objects[POLICY]
        generation = policy["metadata"].get("generation")
        self.age = self.age + 1 if generation == self.generation else 0
        spec = policy["spec"]
        # As the definition's default has it.
        if "cdi" in spec:
            spec["cdi"].setdefault("enabled", True)
        if self.age == 0 and self.generation is not None:
            self.label(kube)
        self.generation = generation
        self.follow(kube, spec)
        ready = self.age >= 2 and not self.broken(spec) and not self.without
        policy["status"] = {"state": "ready" if ready else "notReady"}

    def label(self, kube):
        """Set missing deploy labels, which the controller does when the policy's spec changes, and not before."""
        assert "labels" not in RECORDED["cri-o"]["changes"]["a validator's label removed"]
        assert RECORDED["cri-o"]["changes"]["plugin not checked"]["labels"] == {"a": {"operator-validator": "true"}}
        for node in self.nodes(kube).values():
            for key in DEPLOYED:
                node["metadata"]["labels"].setdefault(key, "true")

    def follow(self, kube, spec):
        """Change the DaemonSets with CDI, of which only the toolkit's is an object here."""
        ref = Ref("apps/v1", "DaemonSet", "gpu-operator", subject.TOOLKIT)
        live, mode = kube.objects[ref], (spec.get("cdi") or {}).get("enabled", True)
        nodes = self.nodes(kube)
        if live["spec"].get("cdi") != mode:
            live["spec"]["cdi"] = mode
            for name in nodes:
                _state, changed, _waiting = recorded(
                    nodes[name]["status"]["nodeInfo"]["containerRuntimeVersion"], "cdi off"
                )
                live["metadata"]["generation"] += subject.TOOLKIT in changed
                self.restart(name)
        number = self.toolkits if self.toolkits is not None else 1
        counted = ("desiredNumberScheduled", "updatedNumberScheduled", "numberReady", "numberAvailable")
        live["status"] = {"observedGeneration": live["metadata"]["generation"], **dict.fromkeys(counted, number)}
        for name, node in nodes.items():
            if node["metadata"]["labels"].get(subject.VALIDATOR) == "true":
                self.without.discard(name)
        self.without &= set(nodes)

    def restart(self, name):
        """Restart the pods of a node, as a reboot does, too."""
        for change in ("cdi off, validators paused", "and starts"):
            for runtime in (CRIO, CONTAINERD):
                state, _changed, waiting = recorded(runtime, change)
                assert state == "notReady" and waiting and subject.TOOLKIT not in waiting
        self.without.add(name)

    @staticmethod
    def nodes(kube):
        found = {ref.name: one for ref, one in kube.objects.items() if ref.kind == "Node"}
        kept = {subject.PRESENT: "true", subject.OPERANDS: "true", operator_labels.WORKLOAD: "container"}
        return {
            name: one
            for name, one in found.items()
            if all(one["metadata"]["labels"].get(key, value) == value for key, value in kept.items())
            and subject.PRESENT in one["metadata"]["labels"]
            and one["metadata"]["labels"].get(f"{subject.DEPLOY}vfio-manager") is None
        }


class Played(Simulation):
    """The same on a real API server; a broken one isn't ready while its device plugin is disabled."""

    def __init__(self, server, broken=False):
        super().__init__()
        self.server, self.broken, self.generation = server, broken, None
        self.validators = set()

    def _step(self):
        with contextlib.suppress(Refused):
            live = self.server.request("GET", f"{POLICIES}/{POLICY.name}")
            if live["metadata"]["generation"] != self.generation:
                for state in RECORDED["cri-o"]["changes"]["cdi off"]["states"][1:-1]:
                    self._report(state)
                for item in self.server.request("GET", "/api/v1/nodes")["items"]:
                    if item["metadata"].get("labels", {}).get(subject.VALIDATOR) == "false":
                        self.validators.add(item["metadata"]["name"])
                self._end.wait(0.1)
                self._roll_out(live["spec"]["cdi"]["enabled"])
                if not (self.broken and live["spec"]["devicePlugin"].get("enabled") is False):
                    self._report("ready")
                self.generation = live["metadata"]["generation"]

    def _roll_out(self, cdi):
        """Change the DaemonSet, and report its pods as its controller would."""
        change = {"spec": {"template": {"metadata": {"labels": {"cdi": str(cdi)}}}}}
        number = self.server.request("PATCH", TOOLKIT, change, MERGE)["metadata"]["generation"]
        counted = ("desiredNumberScheduled", "currentNumberScheduled", "updatedNumberScheduled", "numberReady")
        status = {"observedGeneration": number, "numberMisscheduled": 0, **dict.fromkeys(counted, 2)}
        self.server.request("PATCH", f"{TOOLKIT}/status", {"status": {**status, "numberAvailable": 2}}, MERGE)

    def _report(self, state):
        error = {"type": "Error", "status": "True", "reason": "OperandNotReady", "message": "toolkit isn't ready"}
        conditions = [{**error, "lastTransitionTime": "2026-11-21T12:00:00Z"}] if self.broken else []
        status = {"status": {"state": state, "conditions": conditions}}
        self.server.request("PATCH", f"{POLICIES}/{POLICY.name}/status", status, MERGE)


def node(name, runtime=CONTAINERD, gpu=True):
    labels = dict.fromkeys(DEPLOYED, "true") if gpu else {}
    status = {"nodeInfo": {"containerRuntimeVersion": runtime}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def policy(name=POLICY.name, **spec):
    return {"apiVersion": subject.API, "kind": subject.KIND, "metadata": {"name": name}, "spec": spec}


def toolkit():
    metadata = {"name": subject.TOOLKIT, "namespace": "gpu-operator", "generation": 1}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": {"cdi": True}}


def cluster(*names, runtime=CONTAINERD, cdi_by_default=True):
    cdi = {"enabled": {"default": cdi_by_default}}
    schema = {"properties": {"spec": {"properties": {"cdi": {"properties": cdi}}}}}
    definition = {
        "apiVersion": subject.DEFINITION.api_version,
        "kind": subject.DEFINITION.kind,
        "metadata": {"name": subject.DEFINITION.name},
        "spec": {"versions": [{"schema": {"openAPIV3Schema": schema}}]},
    }
    live = policy(devicePlugin={"enabled": True}, cdi={"enabled": cdi_by_default})
    kube = MemoryKube(Operator(), definition, live, toolkit(), *(node(name, runtime) for name in names))
    kube.operator = kube._operator
    return kube


def add(kube, *objects):
    for one in objects:
        kube.objects[ref_of(one)] = one


def pod(name, on, resource, **spec):
    metadata = {"name": name, "namespace": "default"}
    spec = {"nodeName": on, "containers": [{"resources": {"limits": {resource: "1"}}}], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def run(kube, *nodes, state="present", check=False, timeout=20.0):
    waiting = Waiting(timeout, 0.15)
    if isinstance(kube, MemoryKube):
        waiting = Waiting(timeout=30, pause=5, sleep=kube.sleep, now=kube.now)
    return subject.work(kube, {"state": state, "nodes": list(nodes), "timeout": 30}, check, waiting)


def settings(kube):
    spec = kube.get(POLICY)["spec"]
    return spec["devicePlugin"].get("enabled"), spec["cdi"].get("enabled")


def labels(kube, name):
    found = kube.get(Ref("v1", "Node", "", name))["metadata"]["labels"]
    return found.get(subject.PLUGIN), found.get(subject.VALIDATOR)


def node_labels(kube, name):
    return kube.objects[Ref("v1", "Node", "", name)]["metadata"]["labels"]


def noted(kube):
    text = (kube.get(POLICY)["metadata"].get("annotations") or {}).get(subject.BEFORE)
    return json.loads(text) if text is not None else None


def doubled(kube, ours):
    """Return whether NVIDIA's device plugin was enabled on one of these nodes after any change of the last run."""
    spec, found = dict(kube.before[POLICY]["spec"]), False
    live = {name: dict(kube.before[Ref("v1", "Node", "", name)]["metadata"]["labels"]) for name in ours}
    for _verb, ref, body in kube.changes:
        if ref == POLICY:
            spec.update(body.get("spec") or {})
        elif ref.name in live:
            live[ref.name].update(body["metadata"]["labels"])
        on = spec["devicePlugin"].get("enabled") is not False
        found = found or (on and any(one.get(subject.PLUGIN) != "false" for one in live.values()))
    return found


# --------------------------------------------------------------------------- the real definition


@pytest.fixture
def kube(openshift):
    """A cluster of three nodes, two of them with GPUs, whose ClusterPolicy has the definition's defaults."""
    for path in ("/api/v1/nodes", POLICIES, f"{DAEMON_SETS}?propagationPolicy=Background"):
        openshift.request("DELETE", path)
    template = {"metadata": {"labels": {"app": "t"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    spec = {"selector": {"matchLabels": {"app": "t"}}, "template": template}
    metadata = {"name": subject.TOOLKIT}
    openshift.request("POST", DAEMON_SETS, {**toolkit(), "metadata": metadata, "spec": spec})
    for each in (node("worker-1", CRIO), node("worker-2", CRIO), node("master-0", CRIO, gpu=False)):
        openshift.request("POST", "/api/v1/nodes", each)
    parts = ("daemonsets", "dcgm", "dcgmExporter", "driver", "gfd", "nodeStatusExporter", "operator", "toolkit", "cdi")
    openshift.request("POST", POLICIES, policy(**{part: {} for part in parts}, devicePlugin={"enabled": True}))
    return RealKube.of_module(module_of(openshift, subject.ARGUMENTS))


def test_device_plugin_and_cdi_disabled_and_restored(kube, openshift):
    assert settings(kube) == (True, True)
    with Played(openshift) as operator:
        before = run(kube, "worker-1", "worker-2", check=True)
        assert settings(kube) == (True, True)
        done = run(kube, "worker-1", "worker-2")
        assert done["changed"] and done["diff"] == before["diff"] and len(done["reasons"]) == 2
        assert settings(kube) == (False, False)
        # On CRI-O the validator is paused while the runtime's mode changes.
        assert operator.validators == {"worker-1", "worker-2"} and labels(kube, "worker-1") == ON
        assert not run(kube, "worker-1", "worker-2")["changed"]
        assert run(kube, state="absent")["changed"]
        assert (settings(kube), noted(kube)) == ((True, True), None)
        assert not run(kube, state="absent")["changed"]


def test_unready_operator_rolls_back(kube, openshift):
    with Played(openshift, broken=True):
        with pytest.raises(NotInEffect, match=r"its state is notReady: toolkit isn't ready; it was rolled back"):
            run(kube, "worker-1", "worker-2", timeout=1.5)
        assert settings(kube) == (True, True) and labels(kube, "worker-1") == ON


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kube: add(kube, pod("p", "a", "nvidia.com/gpu")), "pod default/p asks for NVIDIA's own resources"),
        (
            lambda kube: add(kube, pod("p", "a", "cpu", runtimeClassName="nvidia-cdi")),
            "gpu_operator: pod default/p use a runtime class of CDI",
        ),
        (lambda kube: kube.objects[POLICY]["spec"]["cdi"].update(nriPluginEnabled=True), "nriPluginEnabled"),
        (lambda kube: add(kube, policy("second")), "several ClusterPolicies (gpu-cluster-policy, second)"),
    ],
)
def test_change_that_harms_pods_refused(change, message):
    kube = cluster("a", "b")
    change(kube)
    with pytest.raises(BadInput) as failure:
        run(kube, "a", "b")
    assert message in str(failure.value) and not kube.changes


def test_pods_that_wait_for_a_node_are_named_and_stop_nothing():
    """Those that a switch has evicted wait so, and any tenant may create one."""
    kube = cluster("a")
    add(kube, pod("evicted", "", "nvidia.com/mig-1g.5gb"))
    done = run(kube, "a")
    assert settings(kube) == (False, False)
    assert "pod default/evicted waits for NVIDIA's own resources, which no node announces then" in done["reasons"]


def test_hamis_nodes_lose_cdi_and_keep_their_pods():
    """HAMi's pods ask for the same resource, and select their card by the variable that CDI ignores."""
    kube = cluster("a", "theirs")
    node_labels(kube, "a")["kubegpu.share/backend"] = "hami"
    add(kube, pod("of-hami", "a", "nvidia.com/gpu"))
    run(kube, "a")
    assert settings(kube) == (True, False) and labels(kube, "a") == OFF
    # Not in the list any more, it is HAMi's as long as it has the label.
    with pytest.raises(BadInput, match="so both HAMi's device plugin and the operator's would allocate its cards"):
        run(kube, "theirs")


def test_nothing_to_change_without_the_operator_or_its_nodes():
    kube = cluster("a")
    with pytest.raises(BadInput, match=r"gpushare_nodes: none of them .* whose nodes are a$"):
        run(kube, "elsewhere")
    kube.objects.pop(POLICY)
    assert run(kube, "a") == {"changed": False, "diff": [], "policy": "", "reasons": []}


def test_cdi_kept_without_toolkit():
    kube = cluster("a")
    kube.objects[POLICY]["spec"]["toolkit"] = {"enabled": False}
    run(kube, "a")
    assert settings(kube) == (False, True)


# --------------------------------------------------------------------------- a change that fails


def test_failed_added_node_leaves_the_others_configured():
    kube = cluster("a", "b", "c", cdi_by_default=False)
    run(kube, "a")
    before = noted(kube)
    kube.operator.broken = lambda spec: True
    with pytest.raises(NotInEffect, match="its state is notReady; it was rolled back"):
        run(kube, "a", "b")
    assert (labels(kube, "a"), labels(kube, "b")) == (OFF, ON)
    assert noted(kube) == before
    kube.operator.broken = lambda spec: False
    assert not run(kube, "a")["changed"] and run(kube, "a", "b")["changed"]
    run(kube, state="absent")
    assert (labels(kube, "a"), labels(kube, "b"), noted(kube)) == (ON, ON, None)


def test_failed_cdi_change_keeps_plugin_disabled():
    kube = cluster("a", cdi_by_default=False)
    run(kube, "a")
    assert settings(kube) == (False, False)
    before = noted(kube)
    # The operator is upgraded, and its new default is written into the policy.
    add(kube, *(one for ref, one in cluster(cdi_by_default=True).objects.items() if ref == subject.DEFINITION))
    kube.objects[POLICY]["spec"]["cdi"] = {"enabled": True}
    kube.operator.broken = lambda spec: not spec["cdi"]["enabled"]
    with pytest.raises(NotInEffect, match="rolled back"):
        run(kube, "a")
    assert settings(kube) == (False, True) and noted(kube) == before


def test_refused_request_rolls_back():
    kube = cluster("a", "b", "c")
    kube.refused = ("b",)
    with pytest.raises(NotInEffect, match=r"Node b: the API server refuses it .403.; .*the rollback failed too"):
        run(kube, "a", "b")
    # Its label couldn't be set, so it can't be restored either; the next run does the rest.
    kube.refused = ()
    run(kube, "a")
    assert (labels(kube, "a"), labels(kube, "b"), settings(kube)) == (OFF, ON, (True, False))
    assert set(noted(kube)) == {"fields", "labels"}
    run(kube, state="absent")
    assert (labels(kube, "a"), settings(kube), noted(kube)) == (ON, (True, True), None)


# --------------------------------------------------------------------------- other nodes


def test_added_foreign_node_gets_its_device_plugin():
    kube = cluster("a")
    run(kube, "a")
    assert settings(kube) == (False, False) and labels(kube, "a") == ON
    add(kube, node("theirs"))
    kube.before, kube.changes = dict(kube.objects), []
    assert run(kube, "a", check=True)["changed"] and not kube.changes
    assert run(kube, "a")["changed"]
    assert (settings(kube), labels(kube, "a"), labels(kube, "theirs")) == ((True, False), OFF, ON)
    assert not doubled(kube, ["a"])
    assert not run(kube, "a")["changed"]
    # Once all nodes are gpushare's, it is disabled everywhere again.
    assert run(kube, "a", "theirs")["changed"]
    assert settings(kube) == (False, False)
    run(kube, state="absent")
    assert (settings(kube), labels(kube, "a"), labels(kube, "theirs"), noted(kube)) == ((True, True), ON, ON, None)


def test_plugin_disabled_by_the_user_stays_disabled():
    kube = cluster("a")
    kube.objects[POLICY]["spec"]["devicePlugin"] = {"enabled": False}
    run(kube, "a")
    add(kube, node("theirs"))
    run(kube, "a")
    assert settings(kube) == (False, False) and labels(kube, "a") == ON


def test_removed_node_gets_its_labels_back():
    kube = cluster("a", "b", "theirs")
    # The operator doesn't notice that a label was removed, so none is removed.
    node_labels(kube, "b").pop(subject.PLUGIN)
    run(kube, "a", "b")
    assert labels(kube, "a") == labels(kube, "b") == OFF
    assert run(kube, "a")["changed"]
    assert (labels(kube, "a"), labels(kube, "b")) == (OFF, ON)
    assert set(noted(kube)["labels"]) == {"a"}
    assert not run(kube, "a")["changed"]
    # From now on its labels are its user's.
    node_labels(kube, "b")[subject.PLUGIN] = "false"
    assert not run(kube, "a")["changed"]


def test_deleted_node_is_removed_from_the_note():
    kube = cluster("a", "b", "theirs")
    run(kube, "a", "b")
    kube.objects.pop(Ref("v1", "Node", "", "b"))
    run(kube, "a")
    assert set(noted(kube)["labels"]) == {"a"} and not run(kube, "a")["changed"]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (lambda kube: node_labels(kube, "b").update(gpushare="true"), "b isn't in it and has the label gpushare=true"),
        (
            lambda kube: node_labels(kube, "b").update(gpushare="dra"),
            "both its DRA driver and the device plugin",
        ),
        (lambda kube: add(kube, pod("p", "b", "aliyun.com/gpu-mem")), "the cards that pod default/p still has"),
        (lambda kube: add(kube, pod("p", "b", "cpu", resourceClaims=CLAIMS)), "the cards that pod default/p still has"),
    ],
)
def test_plugin_not_restored_while_gpushare_runs(mark, message):
    mixed, whole = cluster("a", "b", "theirs"), cluster("a", "b")
    for kube in (mixed, whole):
        run(kube, "a", "b")
        mark(kube)
        assert not run(kube, "a", "b")["changed"]
        before = json.dumps([kube.get(ref) for ref in kube.objects])
        with pytest.raises(BadInput) as failure:
            run(kube, "a")
        assert str(failure.value).startswith("gpushare_nodes: b isn't in it") and message in str(failure.value)
        assert json.dumps([kube.get(ref) for ref in kube.objects]) == before
    run(whole, state="absent")
    assert settings(whole) == (True, True)


def test_node_removed_step_by_step():
    """Follow the README of role gpushare: remove the pods, then the label."""
    kube = cluster("a", "b")
    run(kube, "a", "b")
    for name in ("a", "b"):
        node_labels(kube, name)["gpushare"] = "true"
    holder = pod("p", "b", "aliyun.com/gpu-mem")
    add(kube, holder)
    for taken in (lambda: kube.objects.pop(ref_of(holder)), lambda: node_labels(kube, "b").pop("gpushare")):
        with pytest.raises(BadInput, match="b isn't in it"):
            run(kube, "a")
        taken()
    kube.before, kube.changes = dict(kube.objects), []
    assert run(kube, "a")["changed"]
    assert (settings(kube), labels(kube, "a"), labels(kube, "b")) == ((True, False), OFF, ON)
    assert not doubled(kube, ["a"])
    assert not run(kube, "a")["changed"]


# --------------------------------------------------------------------------- kills

FOREIGN = "a foreign node is added"
# gpushare's nodes; afterwards: device plugin and CDI of the policy, labels of the nodes
STATES = {
    "all nodes": (("a", "b"), (False, False), {"a": ON, "b": ON}),
    "one node": (("a",), (True, False), {"a": OFF, "b": ON}),
    FOREIGN: (("a", "b"), (True, False), {"a": OFF, "b": OFF, "c": ON}),
    "a node is removed": (("b",), (True, False), {"a": ON, "b": OFF}),
}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (None, "all nodes"),
        (None, "one node"),
        ("all nodes", FOREIGN),
        ("all nodes", "one node"),
        ("one node", "all nodes"),
        ("one node", "a node is removed"),
    ],
)
@pytest.mark.parametrize(("runtime", "broken"), [(CRIO, False), (CONTAINERD, False), (CONTAINERD, True)])
def test_killed_run_is_completed_or_reverted_by_the_next(runtime, first, then, broken):
    """Kill a run before each change and read; then repeat it, revert it, or remove everything."""

    def start():
        kube = cluster("a", "b", runtime=runtime)
        if first:
            run(kube, *STATES[first][0])
        if then == FOREIGN:
            add(kube, node("c", runtime))
        kube.state, kube.noted = now(kube), noted(kube)
        # The operator fails with the settings of the killed run.
        kube.operator.broken = lambda spec: broken and now(kube) != kube.state
        return kube

    def now(kube):
        return settings(kube), {ref.name: labels(kube, ref.name) for ref in kube.objects if ref.kind == "Node"}

    def assert_state(kube, name):
        shared, wanted, nodes = STATES[name]
        assert settings(kube) == wanted
        assert {each: labels(kube, each)[0] == "false" for each in nodes} == {
            each: nodes[each] == OFF for each in nodes
        } or not wanted[0]
        assert not {"paused", "unproven"} & set(noted(kube))
        kube.operator.broken = lambda spec: False
        assert not run(kube, *shared)["changed"]

    def removed(kube):
        kube.operator.broken = lambda spec: False
        run(kube, state="absent")
        assert (settings(kube), noted(kube)) == ((True, True), None)
        assert all(labels(kube, ref.name) == ON for ref in kube.objects if ref.kind == "Node")

    for number in itertools.count():
        kubes = [start() for _run in range(4)]

        def work(kube):
            try:
                run(kube, *STATES[then][0])
            except NotInEffect:
                assert broken

        ended = [not kube.killed_after(number, lambda kube=kube: work(kube)) for kube in kubes]
        same, back, gone, killed = kubes
        if broken:
            # The repeated run fails, and restores the state before the killed run.
            if not all(ended):
                with pytest.raises(NotInEffect):
                    run(same, *STATES[then][0])
            assert (now(same), noted(same)) == (same.state, same.noted), number
        else:
            run(same, *STATES[then][0])
            assert_state(same, then)
        removed(same)
        if first and then != FOREIGN:
            back.operator.broken = lambda spec: False
            run(back, *STATES[first][0])
            assert_state(back, first)
            removed(back)
        removed(gone)
        # The removal is killed as well, after as many changes.
        killed.operator.broken = lambda spec: False
        killed.killed_after(number, lambda killed=killed: run(killed, state="absent"))
        run(killed, *STATES[then][0])
        assert_state(killed, then)
        removed(killed)
        if all(ended):
            break
    assert number > 6


# --------------------------------------------------------------------------- the toolkit, the validator


@pytest.mark.parametrize("by_default", [True, False])
def test_validators_return_before_the_operator_is_ready(by_default):
    """On CRI-O it isn't ready without them: its pods restart with CDI, and wait for a file of the validator."""
    kube = cluster("a", "b", runtime=CRIO, cdi_by_default=by_default)
    assert run(kube, "a", "b")["changed"] and not run(kube, "a", "b")["changed"]
    assert labels(kube, "a") == labels(kube, "b") == ON
    run(kube, state="absent")
    assert (settings(kube), labels(kube, "a"), noted(kube)) == ((True, by_default), ON, None)


def test_no_pod_of_the_toolkit_is_no_success():
    kube = cluster("a", runtime=CRIO)
    kube.operator.toolkits = 0
    with pytest.raises(NotInEffect, match=r"DaemonSet nvidia-container-toolkit-daemonset: 0 of 0 pods; it was rolled"):
        run(kube, "a")
    assert (settings(kube), labels(kube, "a"), noted(kube)) == ((True, True), ON, None)


def test_validator_of_an_older_release_returns_to_mixed_nodes():
    kube = cluster("a", "theirs", cdi_by_default=False)
    mine = {"env": [{"name": "WITH_WORKLOAD", "value": "true"}, {"name": "X", "value": "y"}]}
    kube.objects[POLICY]["spec"]["validator"] = {"plugin": mine}
    node_labels(kube, "a").update({subject.PLUGIN: "false", subject.VALIDATOR: "false"})
    note = {"labels": {"a": {subject.PLUGIN: "true", subject.VALIDATOR: None}}}
    kube.objects[POLICY]["metadata"]["annotations"] = {subject.BEFORE: json.dumps(note)}
    assert run(kube, "a")["changed"] and labels(kube, "a") == OFF
    env = {one["name"]: one["value"] for one in kube.get(POLICY)["spec"]["validator"]["plugin"]["env"]}
    assert env == {"X": "y", **subject.NO_PLUGIN_CHECK}
    assert not run(kube, "a")["changed"]
    run(kube, state="absent")
    assert kube.get(POLICY)["spec"]["validator"]["plugin"] == mine and labels(kube, "a") == ON


# --------------------------------------------------------------------------- shapes of clusters


def second(kube, name="second", **status):
    add(kube, {**policy(name, devicePlugin={"enabled": True}, cdi={"enabled": True}), "status": status})
    return Ref(subject.API, subject.KIND, "", name)


def test_policy_in_use_is_the_one_with_a_state():
    """The controller never writes ignored: it reports no state of the second ClusterPolicy."""
    kube = cluster("a")
    other = second(kube)
    kube.sleep(1)
    assert run(kube, "a")["policy"] == POLICY.name and settings(kube) == (False, False)
    assert kube.get(other)["spec"] == {"devicePlugin": {"enabled": True}, "cdi": {"enabled": True}}
    second(kube, state="ready")
    with pytest.raises(BadInput, match=r"several ClusterPolicies \(gpu-cluster-policy, second\).* don't tell which"):
        run(kube, "a")


def test_toolkit_of_the_nodes_own_leaves_cdi_alone():
    """With CRI-O the module waited for a DaemonSet without pods, and rolled back."""
    kube = cluster("a", "b", runtime=CRIO)
    for name in ("a", "b"):
        node_labels(kube, name)[subject.OWN_TOOLKIT] = "false"
    kube.operator.toolkits = 0
    assert run(kube, "a", "b")["changed"] and settings(kube) == (False, True)
    assert not any(ref.kind == "Node" for _verb, ref, _body in kube.changes)
    # One node with the operator's toolkit is enough.
    node_labels(kube, "b")[subject.OWN_TOOLKIT] = "true"
    kube.operator.toolkits, kube.changes = 1, []
    run(kube, "a", "b")
    assert settings(kube) == (False, False)
    assert {ref.name for _verb, ref, _body in kube.changes if ref.kind == "Node"} == {"b"}


def test_node_without_the_operators_pods_is_left_alone():
    kube = cluster("a", "theirs", runtime=CRIO)
    node_labels(kube, "a").clear()
    node_labels(kube, "a").update({subject.PRESENT: "true", subject.OPERANDS: "false"})
    assert not run(kube, "a")["changed"]
    node_labels(kube, "a").update(dict.fromkeys(DEPLOYED, "true"))
    node_labels(kube, "a").pop(subject.OPERANDS)
    run(kube, "a")
    node_labels(kube, "a")[subject.OPERANDS] = "false"
    for key in DEPLOYED[1:]:
        node_labels(kube, "a").pop(key)
    # Its user has taken it from the operator: the others' settings return, and no label that would start a plugin.
    assert run(kube, "a")["changed"] and (settings(kube), noted(kube)) == ((True, True), None)
    assert labels(kube, "a") == (None, None)


def test_policy_that_was_made_anew():
    """As by a new installation of the operator: its note is gone, and the nodes' labels stayed."""
    kube = cluster("a", "mine", "theirs")
    node_labels(kube, "mine")[subject.PLUGIN] = "false"
    run(kube, "a", "mine")
    for name in ("a", "mine"):
        node_labels(kube, name)["gpushare"] = "true"
    # What its user has disabled before stays so.
    run(kube, "a", "mine")
    assert "mine" not in noted(kube)["labels"]
    add(kube, policy(devicePlugin={"enabled": True}, cdi={"enabled": True}))
    assert run(kube, "a", "mine")["changed"] and not run(kube, "a", "mine")["changed"]
    run(kube, state="absent")
    assert (settings(kube), noted(kube), labels(kube, "a")) == ((True, True), None, ON)


@pytest.mark.parametrize("by_label", [True, False])
def test_node_for_virtual_machines_is_no_other_node(by_label):
    kube = cluster("a", "vm", runtime=CRIO)
    sandbox = {"enabled": True} if by_label else {"enabled": True, "defaultWorkload": "vm-passthrough"}
    kube.objects[POLICY]["spec"]["sandboxWorkloads"] = sandbox
    node_labels(kube, "vm").clear()
    node_labels(kube, "vm").update({subject.PRESENT: "true", f"{subject.DEPLOY}vfio-manager": "true"})
    kind, name = ("vm-passthrough", "vm") if by_label else ("container", "a")
    node_labels(kube, name)[operator_labels.WORKLOAD] = kind
    before = dict(node_labels(kube, "vm"))
    run(kube, "a")
    assert (settings(kube), labels(kube, "a")) == ((False, False), ON)
    assert node_labels(kube, "vm") == before
    run(kube, state="absent")
    assert node_labels(kube, "vm") == before and settings(kube) == (True, True)


@pytest.mark.parametrize(
    ("label", "sandbox", "workload"),
    [
        ("vm-passthrough", {}, "container"),
        ("vm-passthrough", {"enabled": False, "defaultWorkload": "vm-vgpu"}, "container"),
        ("vm-passthrough", {"enabled": True, "defaultWorkload": "container"}, "vm-passthrough"),
        ("vm-vgpu", {"enabled": True}, "vm-vgpu"),
        ("container", {"enabled": True, "defaultWorkload": "vm-vgpu"}, "container"),
        (None, {"enabled": True, "defaultWorkload": "vm-vgpu"}, "vm-vgpu"),
        (None, {"enabled": True}, "container"),
        # Another word counts as none.
        ("vm_passthrough", {"enabled": True, "defaultWorkload": "vm-vgpu"}, "vm-vgpu"),
        ("", {"enabled": True, "defaultWorkload": "else"}, "container"),
    ],
)
def test_a_nodes_workload_is_that_of_the_operator(label, sandbox, workload):
    labels = {} if label is None else {operator_labels.WORKLOAD: label}
    assert operator_labels.workload_of(labels, {"sandboxWorkloads": sandbox}) == workload


@pytest.mark.parametrize(
    ("part", "usual"),
    [
        *[("driver", True), ("toolkit", True), ("sandboxWorkloads", False), ("vfioManager", False)],
        *[("vgpuManager", False), ("vgpuDeviceManager", False), ("sandboxDevicePlugin", False)],
        ("kataSandboxDevicePlugin", False),
    ],
)
def test_a_part_that_isnt_mentioned_runs_as_the_operator_has_it(part, usual):
    for spec in ({}, {part: None}, {part: {}}, {part: {"enabled": None}}):
        assert operator_labels.runs(spec, part) is usual
    for enabled in (True, False):
        assert operator_labels.runs({part: {"enabled": enabled}}, part) is enabled


@pytest.mark.parametrize("key", [subject.PLUGIN, subject.OWN_TOOLKIT])
def test_node_that_the_operator_is_changing_is_refused(key):
    """Its driver manager would set the labels back to what they were when it began."""
    kube = cluster("a", "theirs")
    for state, name in (("present", "a"), ("absent", "a")):
        node_labels(kube, "a")[key] = "paused-for-driver-upgrade"
        kube.changes, message = [], f"changing node {name} .{key} is paused-for-driver-upgrade."
        if state == "absent":
            # A label that gpushare has disabled isn't paused.
            node_labels(kube, "a").update({subject.PLUGIN: "false", "nvidia.com/gpu.deploy.dcgm": "paused-for-x"})
            message = r"changing node a .*, or if it has given up set the label to true"
        with pytest.raises(BadInput, match=message):
            run(kube, "a", state=state)
        assert not kube.changes
        node_labels(kube, "a").update(dict.fromkeys(DEPLOYED, "true"))
        node_labels(kube, "a").pop("nvidia.com/gpu.deploy.dcgm", None)
        if state == "present":
            run(kube, "a")
    # Another node's upgrade is no matter.
    node_labels(kube, "theirs")[subject.PLUGIN] = "paused-for-driver-upgrade"
    assert run(kube, "a")["changed"]


def test_operator_that_was_not_ready_before_is_said_so():
    kube = cluster("a")
    kube.operator.broken = lambda spec: True
    kube.sleep(1)
    with pytest.raises(NotInEffect, match=r"isn't ready with the change, nor was it before \(notReady\): not within"):
        run(kube, "a")


@pytest.mark.parametrize("theirs", [{}, {"default": True}])
def test_nothing_is_left_in_the_policy(theirs):
    kube = cluster("a", "theirs")
    schema = kube.objects[subject.DEFINITION]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema["spec"]["properties"]["cdi"]["properties"]["default"] = {"default": False}
    kube.objects[POLICY]["spec"].pop("cdi")
    before = json.dumps(kube.get(POLICY)["spec"])
    run(kube, "a")
    # The API server's default, or what its user sets meanwhile.
    kube.objects[POLICY]["spec"]["cdi"].update({"default": False, **theirs})
    run(kube, state="absent")
    left = kube.get(POLICY)["spec"]
    kept = left.pop("cdi", {})
    assert json.dumps(left) == before and kept == ({**theirs, "enabled": True} if theirs else {})


@pytest.mark.parametrize("runtime", [CRIO, CONTAINERD])
def test_mixed_cluster_is_ready_after_a_reboot(runtime):
    """With the real controller: test_mixed_cluster_stays_ready_after_reboots."""
    kube = cluster("a", "theirs", runtime=runtime)
    run(kube, "a")
    for name in ("a", "theirs"):
        kube.operator.restart(name)
        kube.sleep(5)
        assert kube.get(POLICY)["status"]["state"] == "ready"
    # As releases before 1.1.0 left it.
    node_labels(kube, "a")[subject.VALIDATOR] = "false"
    kube.operator.restart("a")
    kube.sleep(5)
    assert kube.get(POLICY)["status"]["state"] == "notReady"
