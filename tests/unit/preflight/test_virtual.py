# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose cards are for virtual machines: what is decided of them, and what preflight refuses."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import cluster_of
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.nodes import read_node
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.claims import Claims
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options, examine
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import (
    card_exclusions,
    cards_left_alone,
    wanted_backends,
)
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.virtual import VirtualOptions
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect
from fake_kube import FakeKube
from test_preflight import R615, facts, given_away, node

LABEL = "kubegpu.share/backend"
BACKENDS = ("passthrough", "vgpu", "kata")
LISTS = ("extender", "dra", "hami", "nvidia", *BACKENDS)
ADDRESS, UUID = "0000:3b:00.0", "GPU-5a4d7f2e-0000-4000-8000-000000000000"


def read(backend, *objects, cards=False, switch=(), api=FakeKube):
    """The result of cluster_info."""
    nodes = [] if any(item["kind"] == "Node" for item in objects) else [node("gpu1")]
    kube = api(*nodes, *objects)
    rows = [{"node": "gpu1", "backend": backend, "allocation": "extender", "cards": cards}]
    software = [{"node": "gpu1", "software": "auto", "machine": True}]
    backends = {"wanted": rows, "software": software, "values": {}, "switch": switch, "alone": ()}
    return collect(kube, {"memory_unit": "GiB", "scheduler": None, "backends": backends})


def kubevirt(annotations=None):
    metadata = {"name": "kubevirt", "namespace": "kubevirt", "annotations": annotations or {}}
    return {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": metadata, "spec": {}}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_node_is_in_the_list_of_its_back_end_and_in_no_other(backend):
    made = read(backend)["backends"]
    assert [name for name in LISTS if made[name]] == [backend] and made["gpushare"] == []
    assert made["virtual"] == ["gpu1"]
    assert made["driverless"] == made["binding"] == ([] if backend == "vgpu" else ["gpu1"])
    assert [name for name, needed in made["parts"].items() if needed] == (["kata"] if backend == "kata" else [])
    assert made["nodes"][0]["code"] == "requested"


@pytest.mark.parametrize(
    ("present", "wanted"), [("nvidia", "passthrough"), ("passthrough", "nvidia"), ("kata", "vgpu")]
)
def test_a_node_keeps_its_back_end_until_it_is_switched(present, wanted):
    live = node("gpu1", labels={LABEL: present})
    made = read(wanted, live, cards=True)["backends"]
    assert [name for name in LISTS if made[name]] == [present] and made["nodes"][0]["code"] == "switch-pending"
    assert ("gpu1" in made["binding"]) == (present in ("passthrough", "kata"))
    made = read(wanted, live, switch=["gpu1"])["backends"]
    assert [name for name in LISTS if made[name]] == [wanted] and made["nodes"][0]["code"] == "switched"


def test_cards_of_a_node_of_another_back_end_are_bound_and_permitted():
    made = read("nvidia", kubevirt(), cards=True)["backends"]
    assert (made["nvidia"], made["binding"], made["virtual"]) == (["gpu1"], ["gpu1"], [])
    assert made["parts"]["kubevirt"] and not made["leaving"]["kubevirt"]


def test_kubevirt_is_looked_for_only_where_virtual_machines_get_cards():
    class Refusing(FakeKube):
        def list_all(self, api_version, kind, *given, **more):
            if kind in ("KubeVirt", "HyperConverged"):
                raise KubeError("refused", 403)
            return super().list_all(api_version, kind, *given, **more)

    kube = FakeKube(kubevirt(), node("gpu1"))
    read("nvidia", api=lambda *_objects: kube)
    assert not [call for call in kube.calls if "KubeVirt" in call]
    assert read("passthrough", kubevirt())["backends"]["parts"]["kubevirt"]
    assert not read("passthrough", api=Refusing)["backends"]["parts"]["kubevirt"]
    # Kata's virtual machines aren't KubeVirt's.
    assert not read("kata", kubevirt())["backends"]["parts"]["kubevirt"]
    ours = kubevirt({"kubegpu.share/permitted-devices": "{}"})
    made = read("kata", ours)["backends"]
    assert made["there"]["kubevirt"] and made["leaving"]["kubevirt"]
    # A node had given away some of its cards, which only KubeVirt's object still tells.
    made = read("nvidia", ours, node("gpu1", labels={"kubevirt.io/schedulable": "true"}))["backends"]
    assert made["leaving"]["kubevirt"] and not made["parts"]["kubevirt"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_kubelet_still_reports_of_the_back_end_before_counts_no_share(backend):
    for resource in ("nvidia.com/gpu", "aliyun.com/gpu-mem"):
        [shares] = read_node(node("gpu1", {resource: "8"}, labels={LABEL: backend}, free={resource: "0"}))
        assert [*shares.parts] == ["virtual"] and not shares.parts["virtual"].capacity and not shares.labelled
        [shares] = read_node(node("gpu1", {resource: "8"}, labels={LABEL: backend}))
        assert {*shares.parts} > {"virtual"}, "somebody does give them away"


def findings(backend, objects=None, known=None, switch=(), **virtual):
    cluster = read(backend, *(objects or ()), cards=bool(virtual.get("cards")), switch=switch)
    decided = cluster["backends"]
    claims = Claims(cluster["given"], cluster["capacity"], decided, (), cluster["releases"], decided["software"])
    about = VirtualOptions(backend=backend, **virtual)
    iommu = {"groups": 20, "table": "DMAR", "arguments": [], "default_on": None}
    known = {"passthrough": None, "iommu": iommu, **(known or facts())}
    hosts = [Host("gpu1", "gpu1", "gpu_nodes", known, R615, (), None, about)]
    return {finding.id: finding for finding in examine(Options(claims=claims), cluster_of(cluster), hosts)}


@pytest.mark.parametrize("backend", ["passthrough", "kata"])
def test_a_driver_for_containers_is_refused_where_virtual_machines_have_all_cards(backend):
    for state in ("", "external", "absent"):
        assert findings(backend, driver_state=state) == {}
    [refused] = findings(backend, driver_state="present").values()
    assert (refused.id, refused.severity, refused.variable) == ("virtual-driver", "problem", "driver_state")
    assert f"gives all its cards to virtual machines (gpu_backend: {backend})" in refused.text
    # Their cards are gone from the host, and that is what was asked for.
    assert findings(backend, known=given_away("vfio-pci", "vfio-pci")) == {}


def policy(workloads=True, **parts):
    """A ClusterPolicy, with the parts for virtual machines as they are given."""
    spec = {name: {"enabled": enabled} for name, enabled in parts.items()}
    spec["sandboxWorkloads"] = {"enabled": workloads}
    return {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "gpus"}, "spec": spec}


OPERATED = {"nvidia.com/gpu.deploy.operands": "true"}


@pytest.mark.parametrize(
    ("backend", "parts", "refused"),
    [
        ("passthrough", {"vfioManager": True}, ["vfioManager"]),
        ("kata", {"vfioManager": True}, ["vfioManager"]),
        ("vgpu", {"vgpuDeviceManager": True}, ["vgpuDeviceManager"]),
        ("vgpu", {"vgpuManager": True, "vgpuDeviceManager": True}, ["vgpuManager", "vgpuDeviceManager"]),
        # What isn't mentioned doesn't run.
        ("passthrough", {}, []),
        ("kata", {}, []),
        ("vgpu", {}, []),
        ("vgpu", {"vfioManager": True}, []),
        ("passthrough", {"vfioManager": False}, []),
        ("vgpu", {"vgpuDeviceManager": False}, []),
        ("passthrough", {"workloads": False, "vfioManager": True}, []),
    ],
)
def test_parts_of_the_gpu_operator_that_would_take_the_same_cards_are_refused(backend, parts, refused):
    objects = [node("gpu1", labels=OPERATED), policy(**parts)]
    given = {"driver_state": "external"}
    seen = findings(backend, objects, **given)
    assert [*seen] == (["virtual-operator"] if refused else [])
    if refused:
        assert (seen["virtual-operator"].fields["parts"], seen["virtual-operator"].severity) == (refused, "problem")
    variable = "vgpu_state" if backend == "vgpu" else "passthrough_state"
    assert findings(backend, objects, **given, **{variable: "external"}) == {}
    assert read(backend, *objects)["backends"]["workloads"] == parts.get("workloads", True)


def test_vgpus_need_the_vgpu_manager():
    for given in ({"driver_state": "external"}, {"driver_source": "runfile"}):
        assert findings("vgpu", **given) == {}
    [refused] = findings("vgpu").values()
    assert (refused.id, refused.variable) == ("virtual-driver", "driver_source")


def test_all_cards_of_a_node_that_shares_them_are_refused():
    refused = findings("nvidia", cards=("all",))["cards-given-away"]
    assert refused.variable == "passthrough_cards" and "set gpu_backend to passthrough" in refused.do
    assert "cards-given-away" not in findings("nvidia", cards=(ADDRESS,))
    assert "cards-given-away" not in findings("passthrough", cards=("all",))


def test_cards_that_vfio_has_are_no_problem_where_the_switch_returns_them():
    known = given_away("vfio-pci", "vfio-pci")
    assert "cards-given-away" in findings("gpushare", known=known)
    switched = [node("gpu1", labels={LABEL: "passthrough"})]
    assert "cards-given-away" not in findings("gpushare", switched, known, switch=["gpu1"])


def test_a_card_for_virtual_machines_is_no_card_that_the_back_end_cant_leave_alone():
    known = facts()
    known["driver"]["excluded"] = {
        "cards": [{"address": ADDRESS, "uuid": "", "name": "", "entry": ADDRESS}],
        "unmatched": [UUID.lower()],
        "unnamed": True,
    }
    excluded = {"exclude-unsupported", "exclude-unmatched"}
    assert excluded <= {*findings("nvidia", known=known)}
    assert not excluded & {*findings("nvidia", known=known, cards=(ADDRESS, UUID.lower()))}


def test_only_a_machine_gives_its_cards_to_virtual_machines():
    cluster = read("passthrough")
    claims = Claims({}, None, cluster["backends"], (), {}, cluster["backends"]["software"])
    found = {
        finding.id: finding for finding in examine(Options(nodes=["gpu1"], claims=claims), cluster_of(cluster), [])
    }
    assert "is no host of the group gpu_nodes" in found["virtual-no-login"].text


def test_the_variables_say_which_cards_the_back_end_leaves_alone():
    hostvars = {
        "a": {"gpu_backend": "nvidia", "gpu_exclude": ["NVIDIA T400*"], "passthrough_cards": [ADDRESS]},
        "b": {"gpu_backend": "passthrough", "passthrough_cards": ["all"]},
        "c": {},
    }
    rows = {row["node"]: row for row in wanted_backends(hostvars, ["a", "b", "c"])}
    assert [(name, row.get("cards", False)) for name, row in rows.items()] == [("a", True), ("b", True), ("c", False)]
    assert cards_left_alone(["x"], [ADDRESS], "nvidia") == ["x", ADDRESS]
    assert cards_left_alone(["x"], f"{ADDRESS}, {UUID}", "") == ["x", ADDRESS, UUID]
    assert cards_left_alone(None, ["all"], "nvidia") == [] == cards_left_alone(None, [ADDRESS], "kata")
    [option] = card_exclusions(hostvars, ["a", "b", "c"])
    assert '"nodes":["a"]' in option and ADDRESS in option and "t400" in option


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_machine_lacks_for_virtual_machines_is_said_before_anything_changes(backend):
    known = {**facts(), "iommu": {"groups": 0, "table": "", "arguments": [], "default_on": None}}
    known["passthrough"] = {"functions": [{"address": ADDRESS, "virtual": 4, "mdevs": []}]}
    given = {"driver_state": "external"}
    mixed = set() if backend == "vgpu" else {"virtual-functions"}
    assert {*findings(backend, known=known, **given)} == {"virtual-iommu", *mixed}
    # An argument of the kernel's turns it on.
    known["iommu"]["table"] = "DMAR"
    assert {*findings(backend, known=known, **given)} == mixed
    assert findings("nvidia", known=known) == {}


@pytest.mark.parametrize("runtime", ["docker", "cri-o", ""])
def test_pods_of_kata_get_cards_by_containerd_only(runtime):
    live = node("gpu1", runtime=f"{runtime}://1" if runtime else "")
    assert "by containerd only" in findings("kata", [live])["kata-runtime"].text
    assert "kata-runtime" not in findings("passthrough", [live])


def test_a_driver_that_makes_no_vgpus_is_refused():
    known = facts()
    known["driver"]["module_version"] = "580.95.05"
    for framework, functions, refused in (
        ("none", 0, True),
        ("mdev", 0, False),
        ("vendor", 16, False),
        ("none", 16, False),
    ):
        for card in known["gpus"]:
            card.update(vgpu_host={"framework": framework}, virtual_functions={"total": functions})
        assert ("vgpu-framework" in findings("vgpu", known=known, driver_state="external")) == refused
    known["driver"]["module_version"] = None
    assert "vgpu-framework" not in findings("vgpu", known=known, driver_state="external")
