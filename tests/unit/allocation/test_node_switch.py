# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that changes its allocation: which pods leave it, and what is left of an allocation."""

from __future__ import annotations

import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import allocators
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_switch import ensure
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import refused as error_of
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from fake_clock import FakeClock
from fake_kube import FakeKube

OURS = "gpu.kubegpu.share"
MEMORY = "aliyun.com/gpu-mem"
# Of the servers, by allocator.
SANDBOX = "kubegpu-sandbox"
NAMESPACES = {
    **{"extender": "gpushare-system", "dra": "gpushare-system", "hami": "hami", "nvidia": "plugin"},
    **{"passthrough": SANDBOX, "vgpu": SANDBOX, "kata": SANDBOX},
}
OWNED = [{"kind": "ReplicaSet", "name": "r", "controller": True}]


def node(labels=None, annotations=None, free="0", name="gpu1", resources=None):
    metadata = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    status = {"allocatable": {MEMORY: free, **(resources or {})}, "capacity": {MEMORY: "32"}}
    status["conditions"] = [{"type": "Ready", "status": "True"}]
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def pod(name, limits=None, on="gpu1", owners=tuple(OWNED), phase="Running", labels=None, volumes=(), **metadata):
    metadata = {"name": name, "namespace": "default", "uid": name, "labels": labels or {}, **metadata}
    if owners:
        metadata["ownerReferences"] = list(owners)
    spec = {"nodeName": on, "containers": [{"name": "c", "resources": {"limits": limits or {}}}]}
    if volumes:
        spec["volumes"] = list(volumes)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": phase}}


def server(namespace, label, value, kind="DaemonSet"):
    """A pod of an allocator's device plugin."""
    owner = {"kind": kind, "name": "d", "controller": True}
    return pod("s", owners=[owner], labels={label: value}, namespace=namespace)


def claim(name, user, driver=OURS, pool="gpu1"):
    status = {
        "allocation": {"devices": {"results": [{"driver": driver, "pool": pool, "device": "gpu-0"}]}},
        "reservedFor": [{"resource": "pods", "name": user, "uid": user}],
    }
    metadata = {"name": name, "namespace": "default", "uid": name}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata}
    return {**body, "spec": {"devices": {}}, "status": status}


def slice_of(driver=OURS, on="gpu1"):
    spec = {"driver": driver, "nodeName": on}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{on}-{driver}"},
        "spec": spec,
    }


def params(state, **given):
    usual = {"node": "gpu1", "force": False, "delete_emptydir_data": False, "grace_period": None, "timeout": 10}
    usual["namespaces"] = NAMESPACES
    return {**usual, "state": state, "allocator": None, **given}


def run(kube, state, check=False, **given):
    clock = FakeClock()
    return ensure(kube, params(state, **given), check, Waiting(10, 2, sleep=clock.sleep, now=clock.now))


def left(kube):
    return {ref.name for ref in kube.objects if ref.kind == "Pod"}


def test_exactly_the_pods_with_a_card_leave_the_node():
    beside = pod("whole", {"nvidia.com/gpu": "1"})
    # As charts write it for a container without a card.
    beside["spec"]["containers"].append({"name": "sidecar", "resources": {"limits": {"nvidia.com/gpu": "0"}}})
    kube = FakeKube(
        node(),
        pod("shares", {MEMORY: "2"}),
        pod("claims"),
        beside,
        pod("plain", {"cpu": "1"}),
        pod("done", {MEMORY: "2"}, phase="Succeeded"),
        pod("elsewhere", {MEMORY: "2"}, on="gpu2"),
        pod("nic"),
        claim("a", "claims"),
        claim("b", "nic", driver="nic.example.org"),
    )
    assert run(kube, "drained", check=True)["changed"] and "shares" in left(kube)
    result = run(kube, "drained")
    assert [one["before_header"] for one in result["diff"]] == [
        "Pod default/shares",
        "Pod default/claims",
        "Pod default/whole",
    ]
    assert left(kube) == {"plain", "done", "elsewhere", "nic"}
    assert not run(kube, "drained")["changed"]


@pytest.mark.parametrize(
    ("refused", "allowed", "reason"),
    [
        (pod("p", {MEMORY: "2"}, owners=None), {"force": True}, "no controller that makes it again (maintenance_force"),
        (pod("p", {MEMORY: "2"}, volumes=[{"emptyDir": {}}]), {"delete_emptydir_data": True}, "data in an emptyDir"),
        (
            pod("p", {MEMORY: "2"}, owners=[{"kind": "DaemonSet", "name": "d", "controller": True}]),
            None,
            "a pod of DaemonSet d, which would make it again",
        ),
        (pod("p", {MEMORY: "2"}, annotations={"kubernetes.io/config.mirror": "x"}), None, "a static pod"),
    ],
)
def test_nothing_is_evicted_where_one_pod_may_not_be(refused, allowed, reason):
    kube = FakeKube(node(), pod("other", {MEMORY: "2"}), refused)
    with pytest.raises(BadInput, match="Nothing was evicted") as error:
        run(kube, "drained")
    assert reason in str(error.value) and error.value.details["pods"] == ["default/p"]
    assert left(kube) == {"other", "p"}
    if allowed:
        run(kube, "drained", **allowed)
        assert left(kube) == set()


def test_a_disruption_budget_holds_and_is_named_at_the_end():
    kube = FakeKube(node(), pod("kept", {MEMORY: "2"}), pod("other", {MEMORY: "2"}))
    evict, refusals = kube.evict, []

    def refused(namespace, name, grace=None):
        if name == "kept" and len(refusals) < most:
            refusals.append(name)
            body = {
                "message": "Cannot evict pod.",
                "details": {"causes": [{"message": "The disruption budget b has 2."}]},
            }
            raise error_of(429, "", json.dumps({**body, "reason": "TooManyRequests"}), "", "")
        evict(namespace, name, grace)

    kube.evict, most = refused, 100
    said = r"after 10 s: default/kept \(Cannot evict pod. The disruption budget b has 2.\)$"
    with pytest.raises(NotInEffect, match=said):
        run(kube, "drained")
    assert left(kube) == {"kept"}
    refusals.clear()
    most = 2
    run(kube, "drained")
    assert left(kube) == set()


def test_a_node_whose_kubelet_is_away_is_named_where_its_pods_stay():
    stays = pod("stays", {MEMORY: "2"}, deletionTimestamp="2026-11-26T00:00:00Z")
    kube = FakeKube({**node(), "status": {}}, stays)
    with pytest.raises(NotInEffect, match=r"default/stays\. The node isn't Ready, so its kubelet ends no pod$"):
        run(kube, "drained")


# Of each, the allocator that is to have the node, and what is left of another.
REMAINS = {
    "label": ("dra", node(labels={"gpushare": "true"}), []),
    "annotation": ("hami", node(annotations={"kubegpu.share/cards": "[]"}), []),
    "resource": ("nvidia", node(free="32"), []),
    "server": ("dra", node(), [server("gpushare-system", "app.kubernetes.io/name", "gpushare-device-plugin")]),
    "pod": ("extender", node(), [pod("p", {MEMORY: "2"})]),
    "slice": ("extender", node(), [slice_of()]),
    "claim": ("hami", node(), [claim("c", "gone")]),
    "label ": ("nvidia", node(labels={"gpushare": "dra"}), []),
    "server ": ("extender", node(), [server("gpushare-system", "app.kubernetes.io/name", "gpushare-dra-driver")]),
    "label  ": ("nvidia", node(labels={"kubegpu.share/backend": "hami"}), []),
    "annotation ": ("extender", node(annotations={"hami.io/node-nvidia-register": "[]"}), []),
    "server  ": ("nvidia", node(), [server("hami", "app.kubernetes.io/component", "hami-device-plugin")]),
    # Both have the resource: before HAMi's label is there, it is the other's.
    "resource ": ("hami", node(resources={"nvidia.com/gpu": "2"}), []),
    "resource  ": ("dra", node(resources={"nvidia.com/mig-1g.10gb": "7"}), []),
}


@pytest.mark.parametrize("name", REMAINS)
def test_each_thing_that_is_left_is_named(name):
    allocator, live, others = REMAINS[name]
    kube = FakeKube(live, *others)
    assert [one["code"] for one in run(kube, "clean", True, allocator=allocator)["remains"]] == [name.strip()]
    with pytest.raises(NotInEffect, match=f"isn't clean for {allocator} after 10 s: {name.strip()} ") as error:
        run(kube, "clean", allocator=allocator)
    assert error.value.details["remains"][0]["code"] == name.strip()


@pytest.mark.parametrize("allocator", ["extender", "dra", "hami", "nvidia", "kata", "passthrough"])
def test_a_tenants_pod_with_the_label_of_a_server_is_none(allocator):
    """By its label alone it would hinder each switch of its node, until an administrator deletes it."""
    label, value = allocators.ALLOCATORS[allocator].server
    other = "nvidia" if allocator != "nvidia" else "dra"
    own = NAMESPACES[allocator]
    for tenants in (server("team", label, value), server(own, label, value, "ReplicaSet")):
        assert run(FakeKube(node(), tenants), "clean", allocator=other)["remains"] == []
    left_over = run(FakeKube(node(), server(own, label, value)), "clean", True, allocator=other)["remains"]
    assert left_over == [{"code": "server", "name": f"{own}/s"}]


def test_what_the_other_allocation_or_another_node_has_is_no_remains():
    others = [slice_of(on="gpu2"), slice_of("nic.example.org"), claim("c", "p", pool="gpu2"), pod("plain")]
    kube = FakeKube(node(labels={"gpushare": "dra"}), *others)
    assert run(kube, "clean", allocator="dra")["remains"] == []
    kube = FakeKube(node(labels={"gpushare": "true"}, annotations={"kubegpu.share/cards": "[]"}, free="32"), *others)
    assert run(kube, "clean", allocator="extender")["remains"] == []
    kube = FakeKube(node(labels={"kubegpu.share/backend": "hami"}, resources={"nvidia.com/gpu": "20"}), *others)
    assert run(kube, "clean", allocator="hami")["remains"] == []


def test_a_malformed_claim_is_named_and_nothing_leaves():
    broken = claim("c", "p")
    del broken["status"]["reservedFor"][0]["uid"]
    kube = FakeKube(node(), pod("p", {MEMORY: "4"}), broken)
    with pytest.raises(ShareError, match="a ResourceClaim is malformed"):
        run(kube, "drained")
    assert left(kube) == {"p"}


def test_before_claims_were_there_none_are_read():
    kube = FakeKube(node(), pod("p", {MEMORY: "2"}))
    kube.version_answer = {"gitVersion": "v1.30.0"}
    run(kube, "drained")
    assert left(kube) == set() and not [call for call in kube.calls if "Resource" in str(call)]
    assert Ref("v1", "Node", "", "gpu1") in kube.objects


def machine_pod(name, limits):
    """A virtual machine of KubeVirt's, as its controller makes the pod."""
    made = pod(name, limits)
    made["metadata"].setdefault("labels", {})["kubevirt.io"] = "virt-launcher"
    owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": name, "controller": True}
    made["metadata"]["ownerReferences"] = [owner]
    return made


def test_nothing_is_evicted_while_a_virtual_machine_has_a_card():
    card = {"nvidia.com/10DE_2236": "1"}
    kube = FakeKube(node(), pod("shares", {MEMORY: "2"}), machine_pod("vm", {**card, "devices.kubevirt.io/kvm": "1"}))
    for force in (False, True):
        with pytest.raises(BadInput, match=r"default/vm is a virtual machine with a card.*Nothing was evicted"):
            run(kube, "drained", force=force, delete_emptydir_data=force)
    assert left(kube) == {"shares", "vm"}
    assert ["pod", "default/vm"] in [
        [*one.values()] for one in run(kube, "clean", allocator="nvidia", check=True)["remains"]
    ]
    # A virtual machine without a card stays; any other pod with one goes, whatever its runtime.
    kube = FakeKube(
        node(),
        machine_pod("nic", {"devices.kubevirt.io/kvm": "1", "example.org/nic": "1"}),
        pod("network", {"nvidia.com/sriov_cx5": "1"}),
        pod("others", card),
        pod("kata", {"nvidia.com/pgpu": "1"}),
    )
    run(kube, "drained")
    assert left(kube) == {"nic", "network"}
    named = FakeKube(node(), machine_pod("vm", {"example.org/card": "1"}))
    assert not run(named, "drained")["changed"]
    with pytest.raises(BadInput, match="is a virtual machine with a card"):
        run(named, "drained", resources=["example.org/card"])


def test_a_pod_that_only_calls_itself_a_virtual_machine_is_evicted_like_any_other():
    labels = {"kubevirt.io": "virt-launcher"}
    kube = FakeKube(node(), *(pod(name, {name: "1"}, labels=labels) for name in (MEMORY, "nvidia.com/gpu")))
    run(kube, "drained")
    assert left(kube) == set()


def test_a_pod_that_takes_a_card_as_virtual_machines_do_leaves_before_it_goes():
    kube = FakeKube(node(), pod("plain", {"nvidia.com/GA102GL_A10": "1"}), pod("named", {"example.org/card": "1"}))
    found = run(kube, "clean", allocator="nvidia", check=True, resources=["example.org/card"])["remains"]
    assert {one["name"] for one in found if one["code"] == "pod"} == {"default/plain", "default/named"}


def test_a_plugin_of_two_back_ends_for_virtual_machines_is_left_of_neither():
    plugin = server("kubegpu-sandbox", "app.kubernetes.io/component", "kubevirt")
    live = node()
    live["metadata"].setdefault("labels", {})["kubegpu.share/backend"] = "passthrough"
    kube = FakeKube(live, plugin)
    found = {
        allocator: run(kube, "clean", allocator=allocator, check=True)["remains"] for allocator in ("vgpu", "nvidia")
    }
    assert [one["code"] for one in found["vgpu"]] == ["label"]
    assert {one["code"] for one in found["nvidia"]} == {"label", "server"}
