# SPDX-License-Identifier: GPL-3.0-or-later
"""What would stop gpushare_allocation: dra, or the way back."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.claims import POSSIBLE, Claims, examine
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import examine as examine_all
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect
from fake_kube import FakeKube
from test_preflight import R615, cards, facts, gpu_pod, node

OURS = "gpu.kubegpu.share"


def announced(driver, name):
    spec = {"driver": driver, "nodeName": name}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": driver}, "spec": spec}


def found(claims, *objects, version="v1.36.3"):
    nodes = [] if any(one["kind"] == "Node" for one in objects) else [node("gpu1"), node("cp1")]
    kube = FakeKube(*nodes, *objects)
    kube.version_answer = {"gitVersion": version}
    cluster = collect(kube, {"memory_unit": "GiB", "scheduler": None, "sharing_pods": True})
    return {one.id: one.text for one in examine(claims, cluster, {"gpu1"})}


def test_a_cluster_that_can_do_it_has_a_note_that_nothing_is_preempted():
    assert found(Claims("dra", capacity=True)) == {
        "claims-preemption": "gpushare_allocation: dra evicts no pod for one of higher priority: kube-scheduler has no "
        "preemption for claims; set it to extender where that is needed"
    }
    assert found(Claims()) == {}


@pytest.mark.parametrize(
    ("version", "capacity", "sentence"),
    [
        ("v1.35.2", None, "runs Kubernetes v1.35.2, and the feature gate DRAConsumableCapacity is on from 1.36"),
        ("v1.34.10", None, "runs Kubernetes v1.34.10, and the feature gate DRAConsumableCapacity is on from 1.36"),
        ("unknown", None, "runs Kubernetes unknown, and the feature gate DRAConsumableCapacity is on from 1.36"),
        ("v1.36.3", False, "the feature gate DRAConsumableCapacity is off in kube-apiserver (v1.36.3)"),
        ("v2.0.0", False, "the feature gate DRAConsumableCapacity is off in kube-apiserver (v2.0.0)"),
    ],
)
def test_a_cluster_that_cannot_divide_a_device_is_refused_by_the_gates_name(version, capacity, sentence):
    assert sentence in found(Claims("dra", capacity=capacity), version=version)["claims-unserved"]
    assert "claims-unserved" not in found(Claims("extender", capacity=capacity), version=version)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("gpushare_placement", "spread"),
        ("gpushare_memory_limit_violation", "evict"),
        ("gpushare_extender_image", "example.org/e:1"),
        ("gpushare_device_plugin_image", "example.org/p:1"),
        ("gpushare_extender_metrics", True),
        ("scheduler_mode", "dedicated"),
    ],
)
def test_what_claims_cannot_do_is_refused_by_name(variable, value):
    assert variable in POSSIBLE
    text = found(Claims("dra", {variable: value}, True))["claims-unable"]
    assert text.startswith(f"{variable}: {value} isn't possible with gpushare_allocation: dra")
    assert "claims-unable" not in found(Claims("extender", {variable: value}))


def test_openshift_is_refused():
    openshift = node("gpu1", labels={"node.openshift.io/os_id": "rhcos"})
    assert "isn't possible on OpenShift" in found(Claims("dra", capacity=True), openshift)["claims-unable"]


def test_a_node_has_one_allocation():
    announcing = node("gpu1", {contract.RESOURCE_MEMORY: "32"})
    given = "given away by the device plugin, as resource aliyun.com/gpu-mem, and dra would give them away a second"
    none = {contract.RESOURCE_MEMORY: "0"}
    down = node("gpu1", {contract.RESOURCE_MEMORY: "32"}, cards(32, 32768), free=none)
    for objects in ([announcing], [down], [node("gpu1"), gpu_pod()]):
        text = found(Claims("dra", capacity=True), *objects)["two-allocations"]
        assert given in text and "uninstall.yml -e gpushare_allocation=extender first" in text
    # A plugin that has just left, and other nodes.
    left = node("gpu1", {contract.RESOURCE_MEMORY: "32"}, free=none)
    other = node("gpu2", {contract.RESOURCE_MEMORY: "32"})
    assert "two-allocations" not in found(Claims("dra", capacity=True), left, other, announced(OURS, "gpu1"))
    text = found(Claims(), announced(OURS, "gpu1"))["two-allocations"]
    assert "given away by the DRA driver gpu.kubegpu.share, and extender would give them away a second time" in text
    assert found(Claims(), announced(OURS, "gpu2")) == {}


@pytest.mark.parametrize("allocation", ["extender", "dra"])
def test_nvidias_driver_gives_away_the_same_cards(allocation):
    claims = Claims(allocation, capacity=True)
    text = found(claims, announced("gpu.nvidia.com", "gpu1"), announced("nic.example.org", "gpu1"))["foreign-plugin"]
    assert text.startswith("node gpu1 has ResourceSlices of gpu.nvidia.com")
    assert "foreign-plugin" not in found(claims, announced("gpu.nvidia.com", "gpu2"))


def test_claims_need_no_list_of_device_ids():
    """80 GiB in MiB are more IDs than a device plugin can send."""
    kube = FakeKube(node("gpu1"))
    kube.version_answer = {"gitVersion": "v1.36.3"}
    cluster = collect(kube, {"memory_unit": "MiB", "scheduler": None})
    host = Host("gpu1", "gpu1", "gpu_nodes", facts(memory=81920), R615)

    def ids(allocation):
        options = Options(memory_unit="MiB", claims=Claims(allocation, capacity=True))
        return {one.id for one in examine_all(options, cluster, [host])}

    assert "device-list" in ids("extender")
    assert "device-list" not in ids("dra")


def test_slices_are_read_in_one_request_where_they_may_be():
    kube = FakeKube(node("gpu1"), announced(OURS, "gpu1"))
    kube.version_answer = {"gitVersion": "v1.35.0"}
    assert collect(kube, {"memory_unit": "GiB", "scheduler": None})["slices"] is None
    kube.version_answer = {"gitVersion": "v1.36.0"}
    assert collect(kube, {"memory_unit": None, "scheduler": None})["slices"] is None
    assert collect(kube, {"memory_unit": "GiB", "scheduler": None})["slices"] == [{"driver": OURS, "node": "gpu1"}]
    read = kube.list_all

    def refused(api_version, kind, *rest, **more):
        if kind == "ResourceSlice":
            raise KubeError("may not list resourceslices", status=403)
        return read(api_version, kind, *rest, **more)

    kube.list_all = refused
    assert collect(kube, {"memory_unit": "GiB", "scheduler": None})["slices"] is None
