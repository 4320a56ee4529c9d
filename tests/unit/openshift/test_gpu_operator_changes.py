# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of the GPU Operator's settings: other nodes, failing changes, and killed runs."""

from __future__ import annotations

import itertools
import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref, ref_of
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import gpu_operator as subject
from memory_kube import MemoryKube

ON, OFF = ("true", "true"), ("false", "false")
POLICY = Ref(subject.API, subject.KIND, "", "gpu-cluster-policy")


class Operator:
    """A simulation: ready two seconds after each change of the policy's spec, unless ``broken``."""

    def __init__(self):
        self.broken = lambda spec: False
        self.generation, self.age = None, 0

    def __call__(self, kube):
        policy = kube.objects[POLICY]
        generation = policy["metadata"].get("generation")
        self.age = self.age + 1 if generation == self.generation else 0
        self.generation = generation
        spec = policy["spec"]
        # As the definition's default has it.
        spec.setdefault("cdi", {}).setdefault("enabled", True)
        ready = self.age >= 2 and not self.broken(spec)
        policy["status"] = {"state": "ready" if ready else "notReady"}


def node(name, runtime="containerd://2.1.0", labels=None):
    given = {subject.PRESENT: "true", subject.PLUGIN: "true", subject.VALIDATOR: "true", **(labels or {})}
    metadata, status = {"name": name, "labels": given}, {"nodeInfo": {"containerRuntimeVersion": runtime}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def cluster(*names, runtime="containerd://2.1.0", cdi_by_default=True):
    cdi = {"enabled": {"default": cdi_by_default}}
    schema = {"properties": {"spec": {"properties": {"cdi": {"properties": cdi}}}}}
    definition = {
        "apiVersion": subject.DEFINITION.api_version,
        "kind": subject.DEFINITION.kind,
        "metadata": {"name": subject.DEFINITION.name},
        "spec": {"versions": [{"schema": {"openAPIV3Schema": schema}}]},
    }
    policy = {
        "apiVersion": subject.API,
        "kind": subject.KIND,
        "metadata": {"name": POLICY.name},
        "spec": {"devicePlugin": {"enabled": True}, "cdi": {"enabled": cdi_by_default}},
    }
    operator = Operator()
    kube = MemoryKube(operator, definition, policy, *(node(name, runtime) for name in names))
    kube.operator = operator
    return kube


def add(kube, *objects):
    for one in objects:
        kube.objects[ref_of(one)] = one


def pod(name, on, resource):
    container = {"resources": {"limits": {resource: "1"}}}
    metadata = {"name": name, "namespace": "default"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": on, "containers": [container]},
    }


def run(kube, *nodes, state="present", check=False):
    waiting = subject.Waiting(timeout=30, pause=5, sleep=kube.sleep, now=kube.now)
    return subject.work(kube, {"state": state, "nodes": list(nodes), "timeout": 30}, check, waiting)


def settings(kube):
    spec = kube.objects[POLICY]["spec"]
    return spec["devicePlugin"].get("enabled"), spec["cdi"].get("enabled")


def labels(kube, name):
    found = kube.objects[Ref("v1", "Node", "", name)]["metadata"]["labels"]
    return found.get(subject.PLUGIN), found.get(subject.VALIDATOR)


def noted(kube):
    text = (kube.objects[POLICY]["metadata"].get("annotations") or {}).get(subject.BEFORE)
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
    kube.objects[Ref("v1", "Node", "", "b")]["metadata"]["labels"].pop(subject.VALIDATOR)
    run(kube, "a", "b")
    assert labels(kube, "a") == labels(kube, "b") == OFF
    assert run(kube, "a")["changed"]
    assert (labels(kube, "a"), labels(kube, "b")) == (OFF, ("true", None))
    assert set(noted(kube)["labels"]) == {"a"}
    assert not run(kube, "a")["changed"]
    # From now on its labels are its user's.
    kube.objects[Ref("v1", "Node", "", "b")]["metadata"]["labels"][subject.PLUGIN] = "false"
    assert not run(kube, "a")["changed"]


def test_deleted_node_is_removed_from_the_note():
    kube = cluster("a", "b", "theirs")
    run(kube, "a", "b")
    kube.objects.pop(Ref("v1", "Node", "", "b"))
    run(kube, "a")
    assert set(noted(kube)["labels"]) == {"a"} and not run(kube, "a")["changed"]


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (lambda kube: labelled(kube, "b"), "b isn't in it and has the label gpushare=true"),
        (lambda kube: add(kube, pod("p", "b", "aliyun.com/gpu-mem")), "the cards that pod default/p still has"),
    ],
)
def test_plugin_not_restored_while_gpushare_runs(mark, words):
    mixed, whole = cluster("a", "b", "theirs"), cluster("a", "b")
    for kube in (mixed, whole):
        run(kube, "a", "b")
        mark(kube)
        assert not run(kube, "a", "b")["changed"]
        before = json.dumps([kube.get(ref) for ref in kube.objects])
        with pytest.raises(BadInput) as failure:
            run(kube, "a")
        assert str(failure.value).startswith("gpushare_nodes: b isn't in it") and words in str(failure.value)
        assert json.dumps([kube.get(ref) for ref in kube.objects]) == before
    run(whole, state="absent")
    assert settings(whole) == (True, True)


def test_node_removed_step_by_step():
    """Follow the README of role gpushare: remove the pods, then the label."""
    kube = cluster("a", "b")
    run(kube, "a", "b")
    labelled(kube, "a")
    labelled(kube, "b")
    holder = pod("p", "b", "aliyun.com/gpu-mem")
    add(kube, holder)
    for taken in (
        lambda: kube.objects.pop(ref_of(holder)),
        lambda: kube.objects[Ref("v1", "Node", "", "b")]["metadata"]["labels"].pop("gpushare"),
    ):
        with pytest.raises(BadInput, match="b isn't in it"):
            run(kube, "a")
        taken()
    kube.before, kube.changes = dict(kube.objects), []
    assert run(kube, "a")["changed"]
    assert (settings(kube), labels(kube, "a"), labels(kube, "b")) == ((True, False), OFF, ON)
    assert not doubled(kube, ["a"])
    assert not run(kube, "a")["changed"]


def labelled(kube, name):
    kube.objects[Ref("v1", "Node", "", name)]["metadata"]["labels"]["gpushare"] = "true"


# --------------------------------------------------------------------------- kills

STEPS = {
    "all nodes": (("a", "b"), lambda kube: None),
    "one node": (("a",), lambda kube: None),
    "a foreign node is added": (("a", "b"), lambda kube: add(kube, node("c", kube.runtime))),
    "a node is removed": (("b",), lambda kube: None),
}
GOOD = {
    "all nodes": ((False, False), {"a": ON, "b": ON}),
    "one node": ((True, False), {"a": OFF, "b": ON}),
    "a foreign node is added": ((True, False), {"a": OFF, "b": OFF, "c": ON}),
    "a node is removed": ((True, False), {"a": ON, "b": OFF}),
}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (None, "all nodes"),
        (None, "one node"),
        ("all nodes", "a foreign node is added"),
        ("all nodes", "one node"),
        ("one node", "all nodes"),
        ("one node", "a node is removed"),
    ],
)
@pytest.mark.parametrize(
    ("runtime", "broken"),
    [
        ("cri-o://1.33.4", False),
        pytest.param("containerd://2.1.0", False, marks=pytest.mark.long),
        ("containerd://2.1.0", True),
    ],
)
def test_killed_run_is_completed_or_reverted_by_the_next(runtime, first, then, broken):
    """Kill a run before each change and read; then repeat it, revert it, or remove everything."""

    def start():
        kube = cluster("a", "b", runtime=runtime)
        kube.runtime = runtime
        if first:
            run(kube, *STEPS[first][0])
        STEPS[then][1](kube)
        kube.state = (settings(kube), {ref.name: labels(kube, ref.name) for ref in kube.objects if ref.kind == "Node"})
        kube.noted = noted(kube)
        # The operator fails with the settings of the killed run.
        kube.operator.broken = lambda spec: broken and now(kube) != kube.state
        return kube

    def now(kube):
        return settings(kube), {ref.name: labels(kube, ref.name) for ref in kube.objects if ref.kind == "Node"}

    def assert_state(kube, name):
        wanted, nodes = GOOD[name]
        assert settings(kube) == wanted
        assert {each: labels(kube, each)[0] == "false" for each in nodes} == {
            each: nodes[each] == OFF for each in nodes
        } or not wanted[0]
        assert not {"paused", "unproven"} & set(noted(kube))
        kube.operator.broken = lambda spec: False
        assert not run(kube, *STEPS[name][0])["changed"]

    def removed(kube):
        kube.operator.broken = lambda spec: False
        run(kube, state="absent")
        assert (settings(kube), noted(kube)) == ((True, True), None)
        assert all(labels(kube, ref.name) == ON for ref in kube.objects if ref.kind == "Node")

    for number in itertools.count():
        kubes = [start() for _run in range(4)]

        def work(kube):
            try:
                run(kube, *STEPS[then][0])
            except NotInEffect:
                assert broken

        ended = [not kube.killed_after(number, lambda kube=kube: work(kube)) for kube in kubes]
        same, back, gone, killed = kubes
        if broken:
            # The repeated run fails, and restores the state before the killed run.
            if not all(ended):
                with pytest.raises(NotInEffect):
                    run(same, *STEPS[then][0])
            assert (now(same), noted(same)) == (same.state, same.noted), number
        else:
            run(same, *STEPS[then][0])
            assert_state(same, then)
        removed(same)
        if first and then != "a foreign node is added":
            back.operator.broken = lambda spec: False
            run(back, *STEPS[first][0])
            assert_state(back, first)
            removed(back)
        removed(gone)
        # The removal is killed as well, after as many changes.
        killed.operator.broken = lambda spec: False
        killed.killed_after(number, lambda killed=killed: run(killed, state="absent"))
        run(killed, *STEPS[then][0])
        assert_state(killed, then)
        removed(killed)
        if all(ended):
            break
    assert number > 6
