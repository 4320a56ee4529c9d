# SPDX-License-Identifier: GPL-3.0-or-later
"""MachineConfigs in a pool of our own and in an existing one, and killed runs."""

from __future__ import annotations

import itertools
import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref, ref_of
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import machine_config as subject
from memory_kube import MemoryKube

LABEL = "node-role.kubernetes.io/gpu"
WORKER = "node-role.kubernetes.io/worker"
CONFIG = Ref(subject.API, "MachineConfig", "", "99-gpushare")
POOL = Ref(subject.API, "MachineConfigPool", "", "gpu")
BAD = "no-such-argument=1"


class Operator:
    """A simulation of the Machine Config Operator: it reports a change one second later, and updates node by node."""

    def __init__(self):
        self.have = {}

    def __call__(self, kube):
        nodes = {ref.name: one["metadata"]["labels"] for ref, one in kube.objects.items() if ref.kind == "Node"}
        pools = {ref.name: one for ref, one in kube.objects.items() if ref.kind == "MachineConfigPool"}
        ours = kube.objects.get(CONFIG)
        gpu = [name for name, labels in nodes.items() if "gpu" in pools and self._in(pools["gpu"], labels)]
        for name, pool in pools.items():
            members = gpu if name == "gpu" else [one for one in nodes if WORKER in nodes[one] and one not in gpu]
            arguments = (ours["spec"].get("kernelArguments") or []) if ours and name == "gpu" else []
            content = json.dumps(ours["spec"], sort_keys=True) if ours and name == "gpu" else ""
            rendered = f"rendered-{name}-{abs(hash(content)) % 10**8}"
            source = [{"name": CONFIG.name}] if ours and name == "gpu" else []
            kube.objects[Ref(subject.API, "MachineConfig", "", rendered)] = {
                "apiVersion": subject.API,
                "kind": "MachineConfig",
                "metadata": {"name": rendered},
                "spec": ours["spec"] if ours and name == "gpu" else {},
            }
            generation = pool["metadata"].get("generation")
            given = {"configuration": {"name": rendered, "source": source}}
            kube.set(ref_of(pool), {**pool, "spec": {**pool["spec"], **given}})
            pool = kube.objects[ref_of(pool)]
            bad = BAD in arguments and bool(members)
            behind = [one for one in members if self.have.get(one, "") != content]
            if behind and not bad and not pool["spec"].get("paused"):
                self.have[behind.pop()] = content
            done = not behind and not bad
            pool["status"] = {
                "observedGeneration": generation,
                "machineCount": len(members),
                "readyMachineCount": len(members) - len(behind),
                "configuration": {"name": rendered if done else "rendered-before"},
                "conditions": [
                    {"type": "Updated", "status": str(done)},
                    {"type": "Updating", "status": str(not done)},
                    {"type": "Degraded", "status": str(bad), "message": "can't reconcile config"},
                ],
            }

    @staticmethod
    def _in(pool, labels):
        return all(labels.get(key) == value for key, value in pool["spec"]["nodeSelector"]["matchLabels"].items())


def theirs():
    pool = subject.pool_of("gpu")
    pool["metadata"] = {"name": "gpu"}
    return pool


def cluster(pool=None, members=()):
    definition = {
        "apiVersion": subject.DEFINITION.api_version,
        "kind": subject.DEFINITION.kind,
        "metadata": {"name": subject.DEFINITION.name},
    }
    worker = {
        "apiVersion": subject.API,
        "kind": "MachineConfigPool",
        "metadata": {"name": "worker"},
        "spec": {
            "machineConfigSelector": {"matchLabels": {subject.ROLE: "worker"}},
            "nodeSelector": {"matchLabels": {WORKER: ""}},
        },
    }
    nodes = []
    for name in ("w1", "w2", "w3"):
        labels = {WORKER: "", **({LABEL: ""} if name in members else {})}
        nodes.append({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    kube = MemoryKube(Operator(), definition, worker, *nodes, *([pool] if pool else []))
    settle(kube)
    return kube


def settle(kube):
    for _second in range(8):
        kube.sleep(1)


def params(**given):
    defaults = {name: spec.get("default") for name, spec in subject.ARGUMENTS.items()}
    return {**defaults, "nodes": ["w1"], **given}


def run(kube, check=False, **given):
    waiting = subject.Waiting(timeout=300, pause=10, sleep=kube.sleep, now=kube.now)
    return subject.work(kube, params(**given), check, waiting)


def labelled(kube):
    return {ref.name for ref, one in kube.objects.items() if ref.kind == "Node" and LABEL in one["metadata"]["labels"]}


def configured(kube):
    settle(kube)
    return {name for name, content in kube._operator.have.items() if content}


def notes(kube, ref):
    return (kube.objects[ref]["metadata"].get("annotations") or {}) if ref in kube.objects else {}


# --------------------------------------------------------------------------- another's pool


def test_removal_from_an_existing_pool_keeps_its_own_nodes():
    kube = cluster(theirs(), members=["w2"])
    before = json.dumps(theirs()["spec"]["nodeSelector"])
    assert run(kube, nodes=["w1", "w2"])["changed"]
    assert labelled(kube) == {"w1", "w2"} == configured(kube)
    assert not run(kube, nodes=["w1", "w2"])["changed"]
    assert run(kube, state="absent", check=True)["changed"] and labelled(kube) == {"w1", "w2"}
    assert run(kube, state="absent")["changed"]
    assert labelled(kube) == {"w2"} and CONFIG not in kube.objects and configured(kube) == set()
    assert json.dumps(kube.objects[POOL]["spec"]["nodeSelector"]) == before and notes(kube, POOL) == {}
    assert not run(kube, state="absent")["changed"]


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
    kube.objects[Ref("v1", "Node", "", "w2")]["metadata"]["labels"][LABEL] = ""
    run(kube, state="absent")
    assert labelled(kube) == {"w2", "w3"}


def test_our_pool_is_removed_with_all_nodes():
    kube = cluster()
    run(kube, nodes=["w1"])
    kube.objects[Ref("v1", "Node", "", "w2")]["metadata"]["labels"][LABEL] = ""
    run(kube, state="absent")
    assert labelled(kube) == set() == configured(kube) and POOL not in kube.objects


def test_pool_with_another_label_or_paused_refused():
    pool = theirs()
    pool["spec"]["nodeSelector"] = {"matchLabels": {"example.org/gpu": ""}}
    kube = cluster(pool)
    with pytest.raises(BadInput, match="pool: MachineConfigPool gpu exists and doesn't select node w1 by the label"):
        run(kube)
    kube = cluster(theirs(), members=["w2"])
    run(kube)
    kube.objects[POOL]["spec"]["paused"] = True
    changes = len(kube.changes)
    with pytest.raises(BadInput, match="pool: MachineConfigPool gpu is paused"):
        run(kube, state="absent")
    assert len(kube.changes) == changes


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

    def gone(kube):
        assert labelled(kube) == own and CONFIG not in kube.objects and configured(kube) == set()
        assert notes(kube, POOL) == {} and (POOL in kube.objects) == bool(own)
        assert not run(kube, state="absent")["changed"]

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
        run(same, state="absent")
        gone(same)
        run(away, state="absent")
        gone(away)
        # The removal is killed as well, and repeated.
        twice.killed_after(number, lambda twice=twice: run(twice, state="absent"))
        run(twice, state="absent")
        gone(twice)
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
        run(away, state="absent")
        assert labelled(away) == own and CONFIG not in away.objects and configured(away) == set(), number
        run(back, nodes=["w1"])
        assert labelled(back) == {"w1", *own} == configured(back), number
        run(back, state="absent")
        with pytest.raises(NotInEffect):
            run(bad, nodes=["w1"], kernel_arguments=[BAD])
        run(bad, state="absent")
        for kube in (back, bad):
            assert labelled(kube) == own and CONFIG not in kube.objects and configured(kube) == set(), number
            assert notes(kube, POOL) == {}
        if all(ended):
            break
    assert number > 6
