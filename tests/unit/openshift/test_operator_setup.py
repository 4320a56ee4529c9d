# SPDX-License-Identifier: GPL-3.0-or-later
"""The GPU Operator and node feature discovery by OLM, played in memory, with kills; and the wait for the operator.

What the operator's controller reports and which fields of nodes are its, is what the real one did on 2026-11-29:
test_real_gpu_operator.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import operator_labels
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.nvidia_plugin import LABEL_PRESENT
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.objects import CREATED
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import gpu_operator, olm, operator_plan
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import operator_setup as subject
from definitions import definitions
from memory_kube import MemoryKube
from own_cluster import controllers
from real_apiserver import Refused, own_api_server
from real_operators import anything
from simulation import Simulation, module_of
from test_operator_plan import found, options

SPACE, NFD = "nvidia-gpu-operator", "openshift-nfd"
CATALOG = {"channel": "c", "source": "s", "source_namespace": "m", "starting_csv": ""}
POLICY = Ref(gpu_operator.API, gpu_operator.KIND, "", subject.POLICY_NAME)
INSTANCE = Ref(*subject.DISCOVERY, NFD, subject.DISCOVERY_NAME)
LABEL = f"{operator_labels.PREFIX}driver"


def subscription(package, namespace):
    return Ref(olm.SUBSCRIPTIONS, "Subscription", namespace, package)


BRINGS = {"nfd": "nodefeaturediscoveries.nfd.openshift.io", operator_plan.PACKAGE: "clusterpolicies.nvidia.com"}


class Olm:
    """OLM and the operator: a Subscription brings a definition and a version, and a ClusterPolicy labels and readies.

    :ivar why: the condition of Subscriptions that can't be resolved; empty where they can.
    """

    why = ""

    def __call__(self, kube):
        for ref, live in list(kube.objects.items()):
            if ref.kind != "Subscription":
                continue
            if self.why:
                live["status"] = {"conditions": [{"type": "ResolutionFailed", "status": "True", "message": self.why}]}
                continue
            name = BRINGS[live["spec"]["name"]]
            kube.objects.setdefault(olm.definition_ref(name), definition(name))
            live["status"] = {"installedCSV": f"{live['spec']['name']}.v1"}
            version = Ref(olm.SUBSCRIPTIONS, "ClusterServiceVersion", ref.namespace, f"{live['spec']['name']}.v1")
            metadata = {"name": version.name, "namespace": version.namespace}
            metadata["labels"] = {f"operators.coreos.com/{live['spec']['name']}.{ref.namespace}": ""}
            kube.objects.setdefault(
                version, {"apiVersion": version.api_version, "kind": version.kind, "metadata": metadata}
            )
        if POLICY in kube.objects:
            kube.objects[POLICY]["status"] = {"state": "ready", "namespace": SPACE}
            for ref, node in kube.objects.items():
                if ref.kind == "Node":
                    node["metadata"]["labels"].update({LABEL_PRESENT: "true", LABEL: "true"})
                    fields = {f"f:{name}": {} for name in (LABEL_PRESENT, LABEL)}
                    entry = {"manager": "gpu-operator", "fieldsV1": {"f:metadata": {"f:labels": fields}}}
                    node["metadata"]["managedFields"] = [entry]


def node(name):
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"users": "own"}}}


def definition(name):
    conditions = [{"type": "Established", "status": "True"}]
    given = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": name}}
    return {**given, "status": {"conditions": conditions}}


def cluster(*objects):
    return MemoryKube(Olm(), node("a"), *objects)


def params(state="present", **given):
    policy = operator_plan.plan(options(chart=False, nodes=["a"]), found())["policy"]
    return {
        **{"state": state, "subscription": {"namespace": SPACE, **CATALOG}, "discovery": {"namespace": NFD, **CATALOG}},
        **{"instance": {"operand": {}}, "policy": policy, "nodes": ["a"], "definitions": [], **given},
    }


def run(kube, state="present", check=False, timeout=5.0, **given):
    return subject.work(kube, params(state, **given), check, Waiting(timeout, 0.5, kube.sleep, kube.now))


def test_olm_installs_both_packages_in_their_order_and_a_second_run_changes_nothing():
    kube = cluster()
    planned = run(kube, check=True)
    assert planned["changed"] and not kube.changes
    assert run(kube)["changed"]
    made = [ref.kind for _verb, ref, _body in kube.changes]
    assert made == ["Namespace", "OperatorGroup", "Subscription", subject.DISCOVERY[1], *made[:3], gpu_operator.KIND]
    assert kube.objects[POLICY]["spec"]["devicePlugin"] == {"enabled": False}
    assert not run(kube)["changed"] and not run(kube, check=True)["changed"]
    assert run(kube, "ready")["changed"] is False


def test_killed_anywhere_the_next_run_finishes_and_absent_leaves_nothing():
    before = cluster().objects
    for step in range(60):
        kube = cluster()
        if not kube.killed_after(step, functools.partial(run, kube)):
            break
        run(kube)
        assert not run(kube)["changed"]
        kube.killed_after(step, functools.partial(run, kube, "absent"))
        run(kube, "absent")
        assert not run(kube, "absent")["changed"]
        kept = {ref for ref in kube.objects if ref.kind not in ("CustomResourceDefinition", "Namespace")}
        assert kept == set(before)
        assert kube.objects[Ref("v1", "Node", "", "a")]["metadata"]["labels"] == {"users": "own"}
        # The role removes it, with the label by which the operator is known.
        assert [ref.name for ref in kube.objects if ref.kind == "Namespace"] == [SPACE]
    else:
        pytest.fail("it was always killed")


def test_what_module_gpu_operator_has_changed_stays_and_the_rest_follows():
    kube = cluster()
    run(kube)
    kube.objects[POLICY]["spec"]["cdi"]["enabled"] = True
    kube.objects[POLICY]["spec"]["driver"]["enabled"] = False
    assert run(kube)["changed"]
    spec = kube.objects[POLICY]["spec"]
    assert spec["cdi"] == {"enabled": True} and spec["driver"]["enabled"] is True
    wanted = copy.deepcopy(params()["policy"])
    wanted["devicePlugin"]["enabled"] = True
    assert run(kube, policy=wanted)["changed"] and kube.objects[POLICY]["spec"]["devicePlugin"]["enabled"] is True
    # Where the module has disabled it.
    kube.objects[POLICY]["spec"]["devicePlugin"]["enabled"] = False
    note = '{"fields": {"devicePlugin.enabled": true}}'
    kube.objects[POLICY]["metadata"]["annotations"][gpu_operator.BEFORE] = note
    assert not run(kube, policy=wanted)["changed"]


def test_what_others_have_stays():
    theirs = {"apiVersion": INSTANCE.api_version, "kind": INSTANCE.kind, "metadata": {"name": "x", "namespace": "y"}}
    kube = cluster(definition(BRINGS["nfd"]), {**theirs, "spec": {}})
    run(kube)
    assert INSTANCE not in kube.objects and subscription("nfd", NFD) not in kube.objects
    run(kube, "absent")
    assert [ref.name for ref in kube.objects if ref.kind == INSTANCE.kind] == ["x"]
    elsewhere = {"apiVersion": olm.SUBSCRIPTIONS, "kind": "Subscription", "spec": {"name": "nfd"}}
    for status in ({}, {"installedCSV": "nfd.v4.18.0"}):
        kube = cluster({**elsewhere, "metadata": {"name": "nfd", "namespace": "other"}, "status": status})
        run(kube)
        # One that OLM hasn't followed is nobody's discovery.
        assert (subscription("nfd", NFD) in kube.objects) is not bool(status)
    policy = {"apiVersion": POLICY.api_version, "kind": POLICY.kind, "metadata": {"name": "theirs"}, "spec": {}}
    with pytest.raises(BadInput, match="ClusterPolicy theirs is somebody else's"):
        run(cluster(definition("clusterpolicies.nvidia.com"), policy))


def test_a_catalog_without_the_package_is_said_and_nothing_else_is_made():
    kube = cluster()
    kube._operator.why = "no operators found in package nfd"
    with pytest.raises(NotInEffect, match=r"OLM doesn't install nfd within 5 s: ResolutionFailed: no operators found"):
        run(kube)
    assert POLICY not in kube.objects


def test_a_group_of_several_namespaces_is_refused():
    group = {"apiVersion": olm.GROUPS, "kind": "OperatorGroup", "metadata": {"name": "g", "namespace": SPACE}}
    kube = cluster({**group, "spec": {}})
    with pytest.raises(BadInput, match="OperatorGroup g in"):
        run(kube)
    assert not kube.changes


@pytest.mark.parametrize(
    ("state", "label", "why"),
    [
        (None, "true", "there is no ClusterPolicy"),
        ({"state": "notReady"}, "true", "ClusterPolicy gpu-cluster-policy is notReady: driver waits"),
        # The real controller is ready where no node has the label of a card.
        ({"state": "ready"}, None, r"found no card on a \(label nvidia.com/gpu.present\)"),
    ],
)
def test_ready_needs_a_policy_that_is_ready_and_nodes_with_its_label(state, label, why):
    kube = cluster()
    run(kube)
    kube._operator = lambda _kube: None
    error = {"type": "Error", "status": "True", "message": "driver waits"}
    kube.objects[POLICY]["status"] = {**(state or {}), "conditions": [error]}
    if state is None:
        del kube.objects[POLICY]
    kube.objects[Ref("v1", "Node", "", "a")]["metadata"]["labels"][LABEL_PRESENT] = label
    assert not run(kube, "ready", check=True)["changed"] and run(kube, "ready", check=True)["unready"]
    with pytest.raises(NotInEffect, match=why):
        run(kube, "ready")


def test_ready_on_no_node_is_refused():
    with pytest.raises(BadInput, match="gpu_operator_nodes"):
        run(cluster(), "ready", nodes=[])


def test_of_a_node_only_what_the_operators_programs_alone_have_set_is_removed():
    names = ("nvidia.com/both", "nvidia.com/mine", "nvidia.com/theirs", "other.example/theirs", "nvidia.com/gone")
    paused = "nvidia.com/gpu.deploy.operator-validator"

    def entry(manager, *labels):
        return {"manager": manager, "fieldsV1": {"f:metadata": {"f:labels": {f"f:{one}": {} for one in labels}}}}

    fields = [entry("gpu-operator", names[0], *names[2:]), entry("kubectl", names[0]), entry("me", names[1])]
    # Module gpu_operator's patch, which names no manager.
    fields.append(entry("kubegpu.share", paused))
    live = node("a")
    live["metadata"] |= {"managedFields": fields, "labels": dict.fromkeys((*names[:4], paused), "x")}
    assert subject.left_on(live) == {"labels": [paused, "nvidia.com/theirs"]}


def test_a_namespace_that_is_being_deleted_is_waited_for_by_the_user():
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE, "deletionTimestamp": "x"}}
    with pytest.raises(ShareError, match=f"Namespace {SPACE} is being deleted"):
        run(cluster(space))


def test_objects_without_this_collections_mark_are_never_removed():
    kube = cluster()
    run(kube)
    for ref, live in kube.objects.items():
        if ref.kind != "Node":
            (live["metadata"].get("annotations") or {}).pop(CREATED, None)
    kept = set(kube.objects)
    run(kube, "absent")
    assert set(kube.objects) == kept


# --------------------------------------------------------------------------- on the real definitions


class OlmOnServer(Simulation):
    """OLM on a real API server: a Subscription brings the definition of its package, and no version."""

    def __init__(self, server):
        super().__init__()
        self.server, self.brought = server, set()

    def _step(self):
        with contextlib.suppress(Refused):
            for one in self.server.request("GET", f"/apis/{olm.SUBSCRIPTIONS}/subscriptions")["items"]:
                package = one["spec"]["name"]
                if package not in self.brought:
                    self.brought.add(package)
                    if package == "nfd":
                        kind = anything("nodefeaturediscoveries", "NodeFeatureDiscovery", "nfd.openshift.io")
                        file = self.server.folder / "nfd.yaml"
                        file.write_text(yaml.safe_dump(kind))
                        self.server.install(file)
                    else:
                        self.server.install(definitions() / "clusterpolicies.nvidia.com.yaml")


def test_the_real_definitions_accept_what_is_made_and_nothing_of_it_stays():
    names = ("subscriptions.operators.coreos.com", "operatorgroups.operators.coreos.com")
    files = [definitions() / f"{name}.yaml" for name in names]
    with own_api_server() as server, controllers(server, "garbage-collector", "namespace"):
        server.install(*files)
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": "a"}})
        given = params(nodes=["a"])

        def run_on_server(state):
            # As each task has a connection of its own.
            kube = RealKube.of_module(module_of(server, subject.ARGUMENTS))
            return subject.work(kube, {**given, "state": state}, False, Waiting(30, 0.2))

        with OlmOnServer(server):
            assert run_on_server("present")["changed"]
            assert not run_on_server("present")["changed"]
        policy = server.request("GET", f"/apis/{gpu_operator.API}/clusterpolicies/{subject.POLICY_NAME}")
        assert policy["spec"]["operator"]["use_ocp_driver_toolkit"] is True
        assert run_on_server("absent")["changed"] and not run_on_server("absent")["changed"]
        for path in ("subscriptions", "operatorgroups"):
            version = olm.SUBSCRIPTIONS if path == "subscriptions" else olm.GROUPS
            assert server.request("GET", f"/apis/{version}/{path}")["items"] == []
