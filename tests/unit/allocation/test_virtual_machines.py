# SPDX-License-Identifier: GPL-3.0-or-later
"""Who has which card or vGPU for virtual machines, by the API alone, by machines and by NVIDIA's DRA driver."""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import virtual
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.machines import machine_of
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import collect
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.virtual import is_kata, is_resource
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.checkpoint import parse_checkpoint
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.types import no_pod_resources
from ansible_collections.kubegpu.share.plugins.module_utils._node.gpus import pci
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.facts import facts
from node_trees import TreeSystem, load
from virtual_machines import A10, CLAIM, MADE, NAME, PGPU, VGPU, divided, gpu, in_slice, machine, node, pod

FIRST, SECOND, THIRD = "0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0"
KATA = [{"metadata": {"name": "secure"}, "handler": "kata-qemu-nvidia-gpu"}]
PLAIN = [{"metadata": {"name": "secure"}, "handler": "nvidia"}]
DESKTOP = pod("virt-launcher-desktop", machine="desktop")


class Cluster:
    """The lists of an API; a status instead of a list is refused."""

    def __init__(self, nodes, pods, **others):
        self.requests = {}
        self.lists = {"Node": nodes, "Pod": pods, **others}

    def list_all(self, api_version, kind, namespace="", label_selector="", field_selector=""):
        self.requests[kind] = self.requests.get(kind, 0) + 1
        listed = self.lists.get(kind, [])
        if isinstance(listed, int):
            raise KubeError(f"{kind}: refused", listed)
        return copy.deepcopy(listed)


def seen(nodes, pods, machines=None, **others):
    """The node's part of virtual machines, and the whole result."""
    result = collect(Cluster(nodes, pods, **others), ("table", "wide"), machines)
    [found] = [part for one in result["nodes"] for part in (one, *one["also"]) if "devices" in part]
    assert json.loads(json.dumps(result["nodes"])) == result["nodes"]
    return found, result


def states(part):
    return {
        (device["address"], device["uuid"]): (
            device["state"],
            device["reason"] or [(pod["kind"], pod["machine"] or pod["name"]) for pod in device["pods"]],
        )
        for device in part["devices"]
    }


def held(kind, name):
    return "held", [(kind, name)]


# --------------------------------------------------------------------------- the API alone


def test_the_api_alone_says_who_has_how_many_and_never_that_a_card_is_free():
    part, result = seen([node()], [DESKTOP, pod("plain")])
    assert (part["backend"], part["unit"], part["total"], part["used"], part["devices"]) == (
        "passthrough", "count", 2, 2, []
    )  # fmt: skip
    assert [(each["name"], each["kind"], each["machine"]) for each in part["pending"]] == [
        ("plain", "container", ""),
        ("virt-launcher-desktop", "virtual_machine", "desktop"),
    ]
    assert part["resources"] == [{"name": A10, "capacity": 2, "allocatable": 2, "used": 2}]
    text = "".join(result["table"])
    assert "virtual machine team/desktop" in text and "free" not in text
    assert "cards and vGPUs for virtual machines (count): 2/2" in text


@pytest.mark.parametrize(("classes", "kind"), [(KATA, "kata"), (PLAIN, "container"), ([], "unknown"), (403, "unknown")])
def test_a_runtime_class_decides_whether_a_pod_is_katas(classes, kind):
    pods = [pod("secured", PGPU, runtime="secure")]
    part, _result = seen([node("kata", resources={PGPU: 1})], pods, RuntimeClass=classes)
    assert [each["kind"] for each in part["pending"]] == [kind]


def test_runtime_classes_are_asked_for_only_where_a_pod_names_one():
    _part, result = seen([node()], [DESKTOP])
    assert result["requests"] == {"Node": 1, "Pod": 1}


def test_another_error_of_runtime_classes_ends_the_run():
    with pytest.raises(KubeError):
        seen([node()], [pod("secured", PGPU, runtime="secure")], RuntimeClass=500)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda metadata: metadata.pop("labels"), ""),
        (lambda metadata: metadata.pop("ownerReferences"), ""),
        (lambda metadata: metadata["ownerReferences"][0].update(apiVersion="evil.example/v1"), ""),
        (lambda metadata: metadata["ownerReferences"][0].update(kind="ReplicaSet"), ""),
        (lambda metadata: None, "desktop"),
    ],
)
def test_a_virtual_machines_pod_has_its_label_and_its_owner(change, name):
    launcher = copy.deepcopy(DESKTOP)
    change(launcher["metadata"])
    part, _result = seen([node()], [launcher])
    [entry] = part["pending"]
    assert (entry["machine"], entry["kind"]) == (name, "virtual_machine" if name else "container")


def test_a_node_of_such_a_back_end_is_listed_while_nobody_announces_its_cards():
    part, _result = seen([node("vgpu", resources={})], [])
    assert (part["backend"], part["total"], part["devices"]) == ("vgpu", 0, [])


def test_other_nodes_and_network_cards_have_no_such_part():
    result = collect(Cluster([node("", resources={"nvidia.com/hostdev": 4, "nvidia.com/gpu": 1})], []), ())
    assert [one["backend"] for one in result["nodes"]] == ["nvidia"]


def test_a_mixed_node_has_both_parts():
    nodes = [node("nvidia", resources={"nvidia.com/gpu": 1, A10: 1})]
    part, result = seen(nodes, [DESKTOP, pod("trains", "nvidia.com/gpu")], {NAME: machine(gpu(FIRST, 14))})
    [one] = result["nodes"]
    assert (one["backend"], one["backends"]) == ("mixed", ["nvidia", "virtual"])
    assert [each["name"] for each in one["pending"]] == ["trains"]
    assert [each["name"] for each in part["pending"]] == ["virt-launcher-desktop"]
    assert [(row["backend"], row["used"]) for row in result["totals"]] == [("nvidia", 1), ("virtual", 1)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (A10, True),
        (VGPU, True),
        ("nvidia.com/2236", True),
        (PGPU, True),
        ("nvidia.com/gpu", False),
        ("nvidia.com/mig-1g.10gb", False),
        ("nvidia.com/gpumem", False),
        ("nvidia.com/resibp65s0", False),
        ("nvidia.com/GH100_H100_NVSWITCH", False),
        ("devices.kubevirt.io/kvm", False),
        (None, False),
    ],
)
def test_names_of_resources(name, expected):
    assert is_resource(name) is expected


@pytest.mark.parametrize(("handler", "kata"), [("kata", True), ("kata-clh", True), ("runc", False), ("katana", False)])
def test_katas_handlers(handler, kata):
    assert is_kata(handler) is kata


# --------------------------------------------------------------------------- machines


def test_kubelet_says_which_card_a_machine_has_and_which_is_free():
    cards = machine(
        gpu(FIRST, 14), gpu(SECOND, 15), registered={A10: ["14", "15"]}, entries={"uid-virt-launcher-desktop": ["15"]}
    )
    part, result = seen([node()], [DESKTOP], {NAME: cards})
    assert states(part) == {(FIRST, ""): ("free", []), (SECOND, ""): held("virtual_machine", "desktop")}
    first = part["devices"][0]
    assert first == {
        "kind": "card",
        "card": FIRST,
        "address": FIRST,
        "uuid": "",
        "type": "",
        "device": "10de:2236",
        "model": "GA102GL_A10",
        "driver": "vfio-pci",
        "iommu_group": 14,
        "resource": A10,
        "state": "free",
        "reason": "",
        "pods": [],
    }
    assert part["pending"] == [] and part["used"] == 1
    text, wide = "".join(result["table"]), "".join(result["wide"])
    assert ["0000:3b:00.0", "GA102GL_A10", "(10de:2236)", "vfio-pci", "14", "free"] in [
        line.split() for line in text.splitlines()
    ]
    assert "virtual machine team/desktop\n" in text
    assert "virtual machine team/desktop (pod virt-launcher-desktop)\n" in wide


def test_the_text_of_role_inspect_is_the_same_as_its_object():
    cards = machine(gpu(FIRST, 14), registered={A10: ["14"]})
    assert machine_of(json.dumps(cards)) == machine_of(cards) != machine_of({"problem": "x"})


def test_pod_resources_name_the_pod_too_and_know_that_a_checkpoints_entry_is_old():
    old = {"uid-ended": ["14"]}
    cards = {"registered": {A10: ["14", "15"]}, "entries": old, "listed": {"virt-launcher-desktop": ["15"]}}
    part, _result = seen([node()], [DESKTOP], {NAME: machine(gpu(FIRST, 14), gpu(SECOND, 15), **cards)})
    assert states(part) == {(FIRST, ""): ("free", []), (SECOND, ""): held("virtual_machine", "desktop")}


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        # Nobody announces it: a virtual machine of libvirt may have it.
        (machine(gpu(FIRST, 14)), "not_announced"),
        # A pod that ended, or one of another resource.
        (machine(gpu(FIRST, 14), registered={A10: ["14"]}, entries={"uid-other": ["14"]}), "pod_unknown"),
        (machine(gpu(FIRST, 14), registered={A10: ["14"]}, listed={"other": ["14"]}), "pod_unknown"),
        (machine(gpu(FIRST, 14), checkpoint={"state": "missing", "problem": "no file"}), "kubelet_unknown"),
        ({**machine(gpu(FIRST, 14)), "kubelet": None}, "kubelet_unknown"),
        (machine(gpu(FIRST, 14, "nvidia", driver_override="vfio-pci"), registered={A10: ["14"]}), "not_bound"),
    ],
)
def test_what_nobody_says_is_unknown_and_never_free(cards, reason):
    part, result = seen([node()], [], {NAME: cards})
    assert states(part) == {(FIRST, ""): ("unknown", reason)}
    assert f"unknown: {virtual.REASONS[reason]}\n" in "".join(result["table"])


def test_claims_that_cant_be_read_leave_a_card_unknown():
    cards = machine(gpu(FIRST, 14), registered={A10: ["14"]})
    labelled = node(labels={"kubevirt.io/schedulable": "true"})
    part, _result = seen([labelled], [], {NAME: cards}, ResourceSlice=403, ResourceClaim=403)
    assert states(part) == {(FIRST, ""): ("unknown", "claims_unknown")}


@pytest.mark.parametrize("given", [{}, [], "no JSON", None, {"gpus": [{}]}, machine({"address": FIRST})])
def test_a_machine_of_another_form_is_a_problem_of_its_node(given):
    part, result = seen([node()], [DESKTOP], {NAME: given})
    assert part["devices"] == [] and [each["name"] for each in part["pending"]] == ["virt-launcher-desktop"]
    assert "what its machine answered is malformed" in result["nodes"][0]["problem"]


@pytest.mark.parametrize(
    "given",
    [
        machine(gpu(5, 1)),
        machine(gpu(FIRST, 1) | {"address": ["vfio"]}),
        machine(gpu(FIRST, "1")),
        machine(gpu(FIRST, 1.5)),
        machine(divided(FIRST, FIRST, 7, 1) | {"driver": {"a": "vfio"}}),
        machine(
            gpu(FIRST, 1, "nvidia", virtual_functions={"enabled": [{"address": 7, "driver": "vfio", "iommu_group": 1}]})
        ),
    ],
    ids=["number", "list", "group", "fraction", "dictionary", "function"],
)
def test_a_machine_whose_texts_are_none_doesnt_end_the_inspection_of_the_cluster(given):
    other = node(name="n2")
    result = collect(Cluster([node(), other], [DESKTOP]), ("table", "wide"), {NAME: given})
    assert "what its machine answered is malformed" in result["nodes"][0]["problem"]
    assert "n2" in "".join(result["wide"])


def test_a_machine_that_couldnt_be_reached_is_a_problem_of_its_node():
    part, result = seen([node()], [DESKTOP], {NAME: {"problem": "its machine is unreachable: no\x1b[2J route"}})
    assert part["devices"] == []
    problem = result["nodes"][0]["problem"]
    assert problem.startswith("its cards for virtual machines are unknown: its machine is unreachable")
    assert "\x1b" not in problem


@pytest.mark.parametrize("key", [MADE, "40"], ids=["NVIDIA's plugin", "KubeVirt's own"])
def test_a_mediated_device_is_known_by_its_uuid_and_by_its_group(key):
    cards = machine(divided(THIRD, THIRD, MADE, 40), registered={VGPU: [key]}, entries={"uid-v": [key]})
    launcher = pod("v", VGPU, machine="desktop")
    part, _result = seen([node("vgpu", resources={VGPU: 1})], [launcher], {NAME: cards})
    assert states(part) == {(THIRD, MADE): held("virtual_machine", "desktop")}
    [device] = part["devices"]
    assert (device["kind"], device["type"], device["driver"]) == ("vgpu", "A10-12Q", "nvidia")


def test_a_vgpu_on_a_virtual_function():
    cards = machine(divided(THIRD, "0000:86:00.4", None, 41), registered={VGPU: ["41"]})
    part, _result = seen([node("vgpu", resources={VGPU: 1})], [], {NAME: cards})
    assert states(part) == {("0000:86:00.4", ""): ("free", [])}
    [device] = part["devices"]
    assert (device["card"], device["type"], device["iommu_group"]) == (THIRD, "A10-12Q", 41)


def test_vfios_own_device_is_a_key_too():
    files = [{"address": FIRST, "driver": "vfio-pci", "nodes": ["/dev/vfio/14", "/dev/vfio/devices/vfio3"]}]
    cards = machine(gpu(FIRST, 14), functions=files, registered={PGPU: ["vfio3"]}, entries={"uid-k": ["vfio3"]})
    nodes, pods = [node("kata", resources={PGPU: 1})], [pod("k", PGPU, runtime="secure")]
    part, _result = seen(nodes, pods, {NAME: cards}, RuntimeClass=KATA)
    assert states(part) == {(FIRST, ""): held("kata", "k")}
    # Its resource is the same for every model.
    assert part["devices"][0]["model"] == ""


def test_a_machine_with_two_cards_of_which_one_is_known_waits_for_the_other():
    cards = machine(gpu(FIRST, 14), registered={A10: ["14", "99"]}, entries={"uid-big": ["14", "99"]})
    part, result = seen([node()], [pod("big", count=2, machine="big")], {NAME: cards})
    assert states(part) == {(FIRST, ""): held("virtual_machine", "big")}
    assert [(each["name"], each["units"]) for each in part["pending"]] == [("big", 1)] and part["used"] == 2
    [row] = [line for line in "".join(result["table"]).splitlines() if line.startswith("team")]
    assert row.split()[-1] == "2"


def test_cards_of_containers_arent_listed():
    part, _result = seen([node()], [], {NAME: machine(gpu(FIRST, 14, "nvidia"), gpu(SECOND, 15))})
    assert [device["address"] for device in part["devices"]] == [SECOND]


def test_the_facts_of_gpu_node_info_and_of_kubelets_checkpoint_are_taken_as_they_are(tmp_path):
    system = TreeSystem(tmp_path, load("vfio-host"))
    gpus, _switches = pci(system)
    entry = {"PodUID": "uid-v", "ContainerName": "compute", "ResourceName": VGPU, "DeviceIDs": {"-1": ["47"]}}
    registered = {VGPU: ["47"], A10: ["12"]}
    written = {"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": registered}, "Checksum": 1}
    kubelet = {
        "checkpoint": parse_checkpoint(json.dumps(written).encode(), ["nvidia.com/"]),
        "pod_resources": no_pod_resources("missing", "no socket"),
    }
    assert kubelet["checkpoint"]["state"] == "ok"
    observed = {"gpus": gpus, "functions": facts(system)["functions"], "kubelet": kubelet}
    launcher = pod("v", VGPU, machine="desktop")
    part, _result = seen([node("vgpu", resources={VGPU: 1, A10: 1})], [launcher], {NAME: json.dumps(observed)})
    assert states(part) == {
        ("0000:01:00.0", ""): ("free", []),
        ("0000:41:00.4", "c2b1a5f4-0000-4000-8000-0123456789ab"): held("virtual_machine", "desktop"),
    }
    assert [(device["driver"], device["iommu_group"]) for device in part["devices"]] == [
        ("vfio-pci", 12),
        ("nvidia", 47),
    ]


# --------------------------------------------------------------------------- NVIDIA's DRA driver

CLAIMS = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "desktop-gpu"}]}
DRA_NODE = node("", resources={}, labels={"kubevirt.io/schedulable": "true"})


def dra_pod(name, **more):
    return pod(name, "", spec=CLAIMS, **more)


def test_a_claim_says_which_card_a_machine_has():
    pods = [dra_pod("virt-launcher-desktop", machine="desktop")]
    part, result = seen([DRA_NODE], pods, ResourceSlice=[in_slice(FIRST, SECOND)], ResourceClaim=[CLAIM])
    assert states(part) == {(FIRST, ""): held("virtual_machine", "desktop"), (SECOND, ""): ("free", [])}
    assert (part["backend"], part["total"], part["used"], part["pending"]) == ("virtual", 2, 1, [])
    assert part["devices"][0]["model"] == "NVIDIA A10"
    assert "virtual machine team/desktop" in "".join(result["table"])


def test_a_container_that_has_the_card_by_its_other_device_holds_it():
    claim = copy.deepcopy(CLAIM)
    claim["status"]["allocation"]["devices"]["results"][0]["device"] = "gpu-0"
    part, _result = seen([DRA_NODE], [dra_pod("trains")], ResourceSlice=[in_slice(FIRST)], ResourceClaim=[claim])
    assert states(part) == {(FIRST, ""): held("container", "trains")}


def test_claims_and_the_machine_are_about_the_same_card():
    pods = [dra_pod("virt-launcher-desktop", machine="desktop")]
    cards = {NAME: machine(gpu(FIRST, 14), gpu(SECOND, 15))}
    part, _result = seen([DRA_NODE], pods, cards, ResourceSlice=[in_slice(FIRST, SECOND)], ResourceClaim=[CLAIM])
    assert states(part) == {(FIRST, ""): held("virtual_machine", "desktop"), (SECOND, ""): ("free", [])}
    assert part["devices"][0]["iommu_group"] == 14


def test_a_cluster_without_kubevirt_and_claims_isnt_asked_for_them():
    _part, result = seen([node()], [])
    assert "ResourceSlice" not in result["requests"]
    _part, result = seen([node(labels={"kubevirt.io/schedulable": "true"})], [])
    assert result["requests"]["ResourceSlice"] == 1


@pytest.mark.parametrize("address", ["", "0000:3b:00.0/../../x", "\x1b[2J"])
def test_an_address_that_is_none_is_no_card(address):
    result = collect(Cluster([DRA_NODE], [], ResourceSlice=[in_slice(address)]), ())
    assert result["nodes"] == []
