# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of nodes that give cards to virtual machines, by the real walk on facts of a machine with an IOMMU."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from pathlib import Path

import pytest
from ansible.template import trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import Cluster
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import NO_PARTS, resolve
from ansible_collections.kubegpu.share.plugins.module_utils._backends.permitted import permitted
from ansible_collections.kubegpu.share.plugins.module_utils._boot import plan as boot_plan
from ansible_collections.kubegpu.share.plugins.module_utils._boot.apply import BootReconciler
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import node_of
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.operator_labels import WORKLOAD
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import facts as passthrough_facts
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import stages
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.cluster import ClusterTasks, ReadOnce
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.engine import AnsibleEngine
from boot_machines import debian
from fake_kube import FakeKube
from pci_machine import AUDIO, CARD, TWIN, TWIN_AUDIO, Machine
from plan_kit import HostVars, action, facts, host, planned, planner

BOTH = [CARD, TWIN]
FUNCTIONS = {f"PCI device {address}" for address in (CARD, AUDIO, TWIN, TWIN_AUDIO)}
LABELS = {"kubegpu.share/backend": "passthrough", "node-restriction.kubernetes.io/kubegpu-share": "passthrough"}


VGPU_RESOURCE = "nvidia.com/NVIDIA_A10-12Q"
DISABLED = {"enabled": False}


def vgpu_labels():
    return {name: "vgpu" for name in LABELS}


def backends(backend, cards=False, kubevirt=False, there=None):
    """What preflight decides for node gpu1."""
    row = {"node": "gpu1", "backend": backend, "allocation": "extender", "cards": cards}
    made = resolve([row], Cluster("v1.36.3", ()), kubevirt=kubevirt, there={**NO_PARTS, **(there or {})})
    software = {"roles": ["gpu1"], "gpu_operator": [], "ours": False, "installs": False}
    return {**made, "software": software}


def labelled(labels):
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu1", "labels": labels}}


def node(machine, tmp_path, groups=20, tree="debian-12-bare"):
    """The facts of a simulated Debian, with the cards of the stand-in of the kernel."""
    found = copy.deepcopy(facts(tree, Path(tempfile.mkdtemp(dir=tmp_path))))
    boot = dict(BootReconciler(debian(), boot_plan.Options(False)).observe())
    found["iommu"] = {**boot.pop("iommu"), "groups": groups}
    found["boot"] = boot
    found["passthrough"] = passthrough_facts.facts(machine)
    return found


def plan(machine, tmp_path, decided, groups=20, tree="debian-12-bare", **variables):
    given = {"others": {"localhost": {"gpu_backends": decided}}, "gpu_node": node(machine, tmp_path, groups, tree)}
    return planned(host("gpu1", **given, **variables))


def steps_of(found, role):
    return [step for step in found["steps"] if step["role"] == role]


def roles(found):
    return list(dict.fromkeys(step["role"] for step in found["steps"]))


@pytest.mark.parametrize("backend", ["passthrough", "kata"])
def test_all_cards_are_bound_and_nothing_for_containers_is_installed(tmp_path, backend):
    found = plan(Machine(), tmp_path, backends(backend), gpu_backend=backend)
    assert found["refusal"] is None, found["refusal"]
    assert roles(found) == ["node_baseline", "nouveau", "passthrough"]
    [step] = steps_of(found, "passthrough")
    assert step["stage"] == "driver" and step["certain"]
    assert {*step["changes"]} > {*FUNCTIONS, "/etc/udev/rules.d/10-kubegpu-vfio.rules"}


def test_a_machine_whose_cards_are_bound_has_no_step(tmp_path):
    machine = Machine()
    machine.present(*BOTH)
    found = plan(machine, tmp_path, backends("passthrough"))
    assert found["refusal"] is None and steps_of(found, "passthrough") == [], found


def test_without_an_iommu_the_plan_names_arguments_and_reboot(tmp_path):
    machine = Machine()
    for address in (CARD, AUDIO, TWIN, TWIN_AUDIO):
        del machine.links[f"/sys/bus/pci/devices/{address}/iommu_group"]
    given = {"gpu_maintenance": "reboot", "maintenance_cluster": False, "gpu_backend": "passthrough"}
    found = plan(machine, tmp_path, backends("passthrough"), groups=0, **given)
    assert found["refusal"] is None, found["refusal"]
    [arguments] = steps_of(found, "passthrough")
    assert arguments["task"] == "Turn the IOMMU on by kernel arguments"
    assert "/etc/default/grub.d/90-kubegpu.cfg" in arguments["changes"]
    assert ("maintenance", "Reboot the machine") in [(step["stage"], step["task"]) for step in found["steps"]]
    assert "kubegpu_maintenance" in found["groups"]
    assert "get their drivers only after a reboot" in found["notes"][0]
    # Nothing of another kind is hidden behind it, and before anything changes.
    given["passthrough_cards"] = ["0000:77:00.0"]
    found = plan(machine, tmp_path, backends("passthrough"), groups=0, **given)
    assert "is no NVIDIA card of this machine" in found["refusal"]["reason"] and not steps_of(found, "passthrough")


def test_one_card_of_a_node_for_containers_is_bound_before_the_driver_is_installed(tmp_path):
    given = {"gpu_backend": "nvidia", "passthrough_cards": [TWIN], "driver_repo_url": "http://repo.example.org/"}
    found = plan(Machine(), tmp_path, backends("nvidia", cards=True), **given)
    assert roles(found) == ["node_baseline", "nouveau", "passthrough", "driver", "toolkit"]
    [step] = steps_of(found, "passthrough")
    assert FUNCTIONS & {*step["changes"]} == {f"PCI device {address}" for address in (TWIN, TWIN_AUDIO)}


def test_a_node_that_is_still_to_be_switched_keeps_its_cards(tmp_path):
    cluster = Cluster("v1.36.3", (node_of(labelled({"kubegpu.share/backend": "nvidia"})),))
    row = {"node": "gpu1", "backend": "passthrough", "allocation": "extender", "cards": True}
    made = resolve([row], cluster)
    assert (made["nodes"][0]["code"], made["nvidia"], made["binding"]) == ("switch-pending", ["gpu1"], [])
    made["software"] = {"roles": ["gpu1"]}
    given = {"gpu_backend": "passthrough", "passthrough_cards": [TWIN], "driver_repo_url": "http://repo.example.org/"}
    assert "passthrough" not in roles(plan(Machine(), tmp_path, made, **given))


@pytest.mark.parametrize(("state", "runs"), [("", False), ("external", False), ("present", False), ("absent", True)])
def test_role_driver_runs_where_virtual_machines_have_all_cards_only_to_remove_a_driver(state, runs):
    given = {"driver_state": state} if state else {}
    variables = host("gpu1", others={"localhost": {"gpu_backends": backends("passthrough")}}, **given)
    assert AnsibleEngine(action()).holds(trust_as_template(stages.DRIVER), variables) == runs
    alone = {**host("gpu1", gpu_backend="passthrough", **given), "hostvars": {"localhost": {}}}
    assert AnsibleEngine(action()).holds(trust_as_template(stages.DRIVER), alone) == runs


def test_the_cards_of_vgpus_keep_their_driver(tmp_path):
    layouts = {"version": "v1", "vgpu-configs": {"a": [{"devices": "all", "vgpu-devices": {}}]}}
    given = {"driver_state": "external", "vgpu_layout": "a", "vgpu_layouts": layouts}
    found = plan(Machine(), tmp_path, backends("vgpu"), tree="ubuntu-24.04-cuda-repo", **given)
    assert found["refusal"] is None, found["refusal"]
    assert "vgpu" in roles(found) and not {"passthrough", "driver", "toolkit"} & {*roles(found)}


def cluster_plan(kube, decided, hosts, **variables):
    class Fake(ClusterTasks):
        def _with(self, options, work):
            return work(ReadOnce(kube))

    local = {"inventory_hostname": "localhost", "gpu_backends": decided, "groups": {"gpu_nodes": [*hosts]}}
    local |= variables
    hostvars = HostVars({**hosts, "localhost": local})
    made = planner({**local, "hostvars": hostvars}, known=local)
    made._known["hostvars"] = hostvars
    return made.cluster(Fake())


def kubevirt(**spec):
    metadata = {"name": "kubevirt", "namespace": "kubevirt", "resourceVersion": "1"}
    return {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": metadata, "spec": spec}


def cluster_of(*objects, **labels):
    return FakeKube(labelled(labels), *objects)


def test_the_node_is_labelled_and_its_cards_are_permitted_to_kubevirt(tmp_path):
    hosts = {"gpu1": host("gpu1", gpu_node=node(Machine(), tmp_path))}
    found = cluster_plan(cluster_of(kubevirt()), backends("passthrough", kubevirt=True), hosts)
    assert found["refusal"] is None, found["refusal"]
    steps = [(step["stage"], step["role"], step["changes"]) for step in found["steps"]]
    assert steps == [
        ("virtual_nodes", "passthrough", ["Node gpu1"]),
        ("virtual_nodes", "kubevirt_devices", ["KubeVirt kubevirt/kubevirt"]),
    ]
    # Nobody is told where there is no KubeVirt.
    found = cluster_plan(cluster_of(**LABELS), backends("passthrough"), hosts)
    assert (found["steps"], found["refusal"]) == ([], None)


@pytest.mark.parametrize(
    ("backend", "value"), [("passthrough", "vm-passthrough"), ("kata", "vm-passthrough"), ("vgpu", "vm-vgpu")]
)
def test_the_gpu_operator_gets_its_label_where_it_runs_parts_for_virtual_machines(backend, value):
    """Without it the operator would install a driver for containers on such a node, by its default."""
    own = dict.fromkeys(LABELS, backend)
    decided = backends(backend)
    decided["parts"]["kata"] = False
    hosts = {"gpu1": host("gpu1")}
    assert cluster_plan(cluster_of(**own), decided, hosts)["steps"] == []
    decided |= {"workloads": True, "nvidia": ["gpu2"]}
    others = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu2", "labels": {}}}
    [step] = cluster_plan(FakeKube(labelled(own), others), decided, hosts)["steps"]
    assert (step["role"], step["changes"]) == ("passthrough", ["Node gpu1", "Node gpu2"])
    others["metadata"]["labels"] = {WORKLOAD: "container"}
    done = FakeKube(labelled({**own, WORKLOAD: value}), others)
    assert cluster_plan(done, decided, hosts)["steps"] == []


def test_cards_that_this_run_doesnt_know_stay_permitted():
    permitted = {"pciVendorSelector": "10DE:2236", "resourceName": "nvidia.com/10DE_2236"}
    ours = kubevirt(configuration={"permittedHostDevices": {"pciHostDevices": [permitted]}})
    record = json.dumps({"entries": {"pci": [permitted]}}, sort_keys=True)
    ours["metadata"]["annotations"] = {"kubegpu.share/permitted-devices": record}
    decided = backends("passthrough", kubevirt=True)
    found = cluster_plan(cluster_of(ours, **LABELS), decided, {"gpu1": host("gpu1")})
    assert (found["steps"], found["refusal"]) == ([], None)


@pytest.mark.parametrize("device", ["0x22", "x' or 'y"])
def test_a_machine_that_answers_no_id_is_unknown_and_stops_nobody_else(tmp_path, device):
    machines = [{"gpu_node": node(Machine(), tmp_path), "passthrough_cards": ["all"]} for _each in range(2)]
    for function in machines[0]["gpu_node"]["passthrough"]["functions"]:
        function["device"] = device
    made = permitted(dict(zip("ab", machines, strict=True)), {"a": "gpu1", "b": "gpu2"})
    assert made["unknown"] == ["a"] and [*made["cards"]] == ["gpu2"] and made["pci"]


def test_the_types_of_the_layout_are_permitted_to_kubevirt_which_makes_none(tmp_path):
    found = node(Machine(), tmp_path)
    types = [{"id": "nvidia-592", "name": "NVIDIA A10-12Q", "available": 0}]
    made = [{"address": CARD, "uuid": "", "type": "nvidia-592", "iommu_group": 1}]
    host_of = {"framework": "mdev", "types": types, "vgpus": made}
    found["gpus"] = [{"vendor": "0x10de", "device": "0x2236", "vgpu_host": host_of}]
    layouts = {"version": "v1", "vgpu-configs": {"a": [{"devices": "all", "vgpu-devices": {"A10-12Q": 1}}]}}
    hosts = {"gpu1": host("gpu1", gpu_node=found, vgpu_layouts=layouts, vgpu_layout="a")}
    seen = cluster_plan(cluster_of(kubevirt(), **vgpu_labels()), backends("vgpu", kubevirt=True), hosts)
    assert seen["refusal"] is None, seen["refusal"]
    [step] = steps_of(seen, "kubevirt_devices")
    assert step["changes"] == ["KubeVirt kubevirt/kubevirt"]
    permitted_now = {"mediatedDevices": [{"mdevNameSelector": "NVIDIA A10-12Q", "resourceName": VGPU_RESOURCE}]}
    done = kubevirt(configuration={"permittedHostDevices": permitted_now, "mediatedDevicesConfiguration": DISABLED})
    record = {"before": True, "entries": {"mediated": permitted_now["mediatedDevices"]}}
    done["metadata"]["annotations"] = {"kubegpu.share/permitted-devices": json.dumps(record, sort_keys=True)}
    done["spec"]["configuration"] |= {"developerConfiguration": {"featureGates": ["DisableMDEVConfiguration"]}}
    announcing = labelled(vgpu_labels())
    announcing["status"] = {"allocatable": {VGPU_RESOURCE: "1"}}
    seen = cluster_plan(FakeKube(announcing, done), backends("vgpu", kubevirt=True), hosts)
    assert (seen["refusal"], steps_of(seen, "kubevirt_devices")) == (None, [])


def claimed(tmp_path, device, number=1):
    """Variables of a host that says it has so many cards of a model."""
    found = node(Machine(), tmp_path)
    [function] = [each for each in found["passthrough"]["functions"] if each["address"] == CARD]
    twins = [
        {**function, "address": f"0000:{at:02x}:00.0", "device": device, "driver": "vfio-pci"} for at in range(number)
    ]
    found["passthrough"]["functions"] = twins
    return {"gpu_node": found, "passthrough_cards": ["all"]}


@pytest.mark.parametrize(
    ("device", "allowed", "code"),
    [
        # An NVSwitch's id with the class of a card, a model that isn't named, and what is.
        ("0x22a3", (), "unknown_id"),
        ("0x2236", (), ""),
        ("0x2330", ("10DE:2236",), "not_allowed"),
        ("0x2236", ("10de:2236",), ""),
        ("0x9999", ("10DE:9999",), ""),
    ],
)
def test_what_a_node_says_of_its_cards_is_permitted_only_where_that_is_allowed(tmp_path, device, allowed, code):
    """A permission is the whole cluster's, so it would be of other nodes' cards, too."""
    hosts = {"bad": claimed(tmp_path, device), "good": claimed(tmp_path, "0x2236")}
    made = permitted(hosts, {"bad": "gpu1", "good": "gpu2"}, allowed)
    assert [(row["code"], row["node"], row["id"]) for row in made["refused"] if row["node"] == "gpu1"] == (
        [(code, "gpu1", f"10DE:{device[2:].upper()}")] if code else []
    )
    assert ("bad" in made["unknown"]) == ("gpu1" not in made["cards"]) == bool(code)
    assert code == "" or f"10DE:{device[2:].upper()}" not in [row["selector"] for row in made["pci"]]


def test_a_number_of_cards_that_no_machine_has_is_named_and_not_waited_for(tmp_path):
    made = permitted({"bad": claimed(tmp_path, "0x2236", 65)}, {"bad": "gpu1"})
    assert [(row["code"], row["node"], row["number"]) for row in made["refused"]] == [("too_many", "gpu1", 65)]
    assert made["cards"] == {} and made["unknown"] == ["bad"]


def test_the_plan_refuses_a_card_that_nobody_allowed_and_says_which_variable_allows_it(tmp_path):
    hosts = {"gpu1": host("gpu1", **claimed(tmp_path, "0x9999"))}
    decided = backends("passthrough", kubevirt=True)
    found = cluster_plan(cluster_of(kubevirt(), **LABELS), decided, hosts)
    assert not steps_of(found, "kubevirt_devices")
    assert re.search("node gpu1 .* 10DE:9999.*kubevirt_devices_allowed_ids", found["refusal"]["reason"]), found


def test_nvidias_plugin_announces_the_cards_where_the_variable_says_so(tmp_path):
    machine = Machine()
    machine.present(CARD, TWIN)
    hosts = {"gpu1": host("gpu1", gpu_node=node(machine, tmp_path))}
    decided = backends("passthrough", kubevirt=True)
    given = {"kubevirt_devices_external_provider": True}
    # Whole cards have names that only its database of PCI ids says.
    seen = cluster_plan(cluster_of(kubevirt(), **LABELS), decided, hosts, **given)
    assert re.search("name it in kubevirt_devices_pci", seen["refusal"]["reason"]), seen
    given["kubevirt_devices_pci"] = [{"selector": "10DE:2236", "resource": "nvidia.com/GA102GL_A10"}]
    seen = cluster_plan(cluster_of(kubevirt(), **LABELS), decided, hosts, **given)
    assert seen["refusal"] is None, seen["refusal"]
    steps = [step["role"] for step in seen["steps"]]
    assert steps == ["kubevirt_devices", "sandbox_device_plugin", "sandbox_device_plugin"], seen["steps"]


def test_what_nobody_needs_any_more_is_no_longer_permitted(tmp_path):
    ours = kubevirt()
    ours["metadata"]["annotations"] = {"kubegpu.share/permitted-devices": '{"entries": {}, "before": null}'}
    decided = backends("nvidia", kubevirt=True, there={"kubevirt": True})
    decided["parts"]["nvidia"] = False
    assert decided["leaving"]["kubevirt"]
    found = cluster_plan(cluster_of(ours), decided, {"gpu1": host("gpu1")})
    assert [(step["stage"], step["changes"]) for step in found["steps"]] == [
        ("leaving", ["KubeVirt kubevirt/kubevirt"])
    ], found


def test_katas_nodes_get_the_plugin_that_announces_their_cards(tmp_path):
    hosts = {"gpu1": host("gpu1", gpu_node=node(Machine(), tmp_path))}
    found = cluster_plan(cluster_of(), backends("kata"), hosts)
    steps = [(step["role"], step["changes"]) for step in found["steps"]]
    assert steps[0] == ("passthrough", ["Node gpu1"]), found
    # Without kata-deploy there is no RuntimeClass, and the role says so before anything is deployed.
    assert found["refusal"]["role"] == "kata" and "RuntimeClass" in found["refusal"]["reason"], found
    klass = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "kata-qemu-nvidia-gpu"}}
    klass |= {"handler": "kata-qemu-nvidia-gpu"}
    found = cluster_plan(cluster_of(klass), backends("kata"), hosts)
    assert found["refusal"] is None, found["refusal"]
    assert "sandbox_device_plugin" in roles(found) and "kubevirt_devices" not in roles(found)
