# SPDX-License-Identifier: GPL-3.0-or-later
"""The suites of virtual machines over a simulated cluster: KubeVirt and Kata do what they do, or not, or aren't there.

No virtual machine is started by these tests: KubeVirt, Kata and KVM are played.
"""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._e2e import kata, kubevirt
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.kata import runtime_class
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import (
    KATA,
    PASSTHROUGH,
    VGPU,
    Options,
    namespace,
)
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.run import run
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import CommandFailed
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from fake_clock import FakeClock
from fake_kube import FakeKube

A10, PGPU, KVM = "nvidia.com/GA102GL_A10", "nvidia.com/pgpu", kubevirt.KVM
READY = {"phase": "Deployed", "conditions": [{"type": "Available", "status": "True"}]}


def node(backend, labels=(), kernel="6.1.0-50-amd64", **resources):
    named = {"A10": A10, "PGPU": PGPU, "KVM": KVM}
    amounts = {named[key]: str(value) for key, value in resources.items()}
    given = {"kubegpu.share/backend": backend, "kubernetes.io/hostname": "gpu1", **dict(labels)}
    status = {"conditions": [{"type": "Ready", "status": "True"}], "capacity": amounts, "allocatable": amounts}
    status["nodeInfo"] = {"kernelVersion": kernel}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu1", "labels": given}, "status": status}


def hypervisor(status=None, definition=True):
    """KubeVirt's definition and its object."""
    objects = []
    if definition:
        crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
        objects.append({**crd, "metadata": {"name": kubevirt.DEFINITION}})
    if status is not None:
        metadata = {"name": "kubevirt", "namespace": "kubevirt"}
        objects.append({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": metadata, "status": status})
    return objects


class Cluster(FakeKube):
    """KubeVirt starts a virtual machine in a pod where a device is left; Kata's pods start at once.

    :ivar faults: ``permitted`` (KubeVirt refuses the device), ``starts`` (no virtual machine runs), ``counted`` (more
        run than fit), ``elsewhere`` (it runs on another node), ``device`` (its pod holds none), ``kernel`` (a container
        has the node's), ``seen`` (a container sees two cards).
    """

    def __init__(self, *objects, faults=()):
        super().__init__(*objects)
        self.faults = faults

    def apply(self, definition, manager):
        if definition["kind"] == "VirtualMachineInstance":
            if "permitted" in self.faults:
                raise KubeError("admission webhook denied the request: GPU isn't permitted", 422)
            done = self.add(definition)
            self.launch(done)
            return copy.deepcopy(done)
        done = super().apply(definition, manager)
        if definition["kind"] == "Pod":
            self.place(self.objects[Ref("v1", "Pod", *(done["metadata"][key] for key in ("namespace", "name")))])
        return done

    def launch(self, machine):
        name, space = machine["metadata"]["name"], machine["metadata"]["namespace"]
        [gpu] = machine["spec"]["domain"]["devices"]["gpus"]
        owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": name, "uid": "u"}
        limits = {} if "device" in self.faults else {gpu["deviceName"]: "1"}
        pod = self.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"virt-launcher-{name}",
                    "namespace": space,
                    "labels": {"kubevirt.io": "virt-launcher"},
                    "ownerReferences": [owner],
                },
                "spec": {"containers": [{"name": "compute", "resources": {"limits": limits}}]},
            }
        )
        self.place(pod)
        live = self.objects[Ref("kubevirt.io/v1", "VirtualMachineInstance", space, name)]
        bound = pod["spec"].get("nodeName")
        live["status"] = {"phase": "Scheduling"}
        if bound and "starts" not in self.faults:
            live["status"] = {"phase": "Running", "nodeName": "gpu9" if "elsewhere" in self.faults else bound}

    def place(self, pod):
        limits = pod["spec"]["containers"][0]["resources"].get("limits") or {}
        wanted = [key for key in limits if key.startswith("nvidia.com/")]
        there = self.objects[Ref("v1", "Node", "", "gpu1")]["status"]["allocatable"]
        pods = [one for ref, one in self.objects.items() if ref.kind == "Pod" and one["spec"].get("nodeName")]
        for key in wanted:
            held = sum(key in (one["spec"]["containers"][0]["resources"].get("limits") or {}) for one in pods)
            if held >= int(there.get(key, 0)) and "counted" not in self.faults:
                message = f"0/1 nodes are available: 1 Insufficient {key}."
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                pod["status"] = {"phase": "Pending", "conditions": [condition]}
                return
        pod["spec"]["nodeName"] = "gpu1"
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "c0", "state": {"running": {}}}]}

    def delete(self, ref, *rest, **more):
        done = super().delete(ref, *rest, **more)
        if ref.kind == "Namespace":
            for other in [one for one in self.objects if one.namespace == ref.name]:
                del self.objects[other]
        return done

    def execute(self, namespace, pod, container, argv):
        spec = self.objects[Ref("v1", "Pod", namespace, pod)]["spec"]
        assert spec["runtimeClassName"] == "secure"
        cards = [0, 1] if "seen" in self.faults else [0]
        line = " ".join(argv)
        if line == "uname -r":
            return "6.1.0-50-amd64\n" if "kernel" in self.faults else "6.18.5-nvidia-gpu\n"
        if line == "ls /dev":
            return "\n".join(["full", *(f"nvidia{card}" for card in cards), "nvidiactl"])
        if line == "nvidia-smi -L":
            return "\n".join(f"GPU {card}: A10 (UUID: GPU-{card})" for card in cards)
        raise CommandFailed(f"{argv[0]} ended with 1", 1)


def suite(kube, name, **options):
    clock = FakeClock()
    given = Options(suite=name, **options)
    done = run(kube, kube.execute, given, False, Waiting(60, sleep=clock.sleep, now=clock.now))
    left = [ref for ref in kube.objects if ref.kind in ("Pod", "Namespace", "VirtualMachineInstance")]
    assert not left, "everything is removed"
    return done


def results(done):
    return {step["id"]: (step["result"], step["code"]) for step in done["acceptance"]["steps"]}


SCHEDULABLE = {"kubevirt.io/schedulable": "true"}
MACHINES = {"labels": SCHEDULABLE, "A10": 1, "KVM": 1000}


# --------------------------------------------------------------------------- KubeVirt


@pytest.mark.parametrize("name", [PASSTHROUGH, VGPU])
def test_a_machine_gets_the_card_and_a_second_one_waits(name):
    kube = Cluster(node(name, **MACHINES), *hypervisor(READY))
    done = suite(kube, name)
    assert results(done) == {
        "M00": ("PASS", ""),
        "M01": ("PASS", ""),
        "M02": ("PASS", ""),
        "M03": ("UNKNOWN", ""),
        "M99": ("PASS", ""),
    }, done["table"]
    [works] = [step for step in done["acceptance"]["steps"] if step["id"] == "M03"]
    assert works["unshown"] and works["by"] == ["silicon"]
    assert {check["backend"] for check in done["checks"]} == {name}
    assert done["acceptance"]["node"] == "gpu1"


def test_a_machine_is_kept_to_the_node_and_has_the_resource_and_the_users_image():
    options = Options(suite=PASSTHROUGH, machine_image="registry.example/guest:1", node_selector={"zone": "a"})
    made = kubevirt.machine("m", A10, "gpu1", options)
    assert made["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "gpu1", "zone": "a"}
    assert made["spec"]["domain"]["devices"]["gpus"] == [{"name": "gpu", "deviceName": A10}]
    assert made["spec"]["volumes"] == [{"name": "disk", "containerDisk": {"image": "registry.example/guest:1"}}]
    assert "volumes" not in kubevirt.machine("m", A10, "gpu1", Options(suite=PASSTHROUGH))["spec"]


@pytest.mark.parametrize(
    ("objects", "code"),
    [
        ([node(PASSTHROUGH, **MACHINES)], "no_kubevirt"),
        ([node(PASSTHROUGH, **MACHINES), *hypervisor(READY, definition=False)], "no_kubevirt"),
        ([node(PASSTHROUGH, **MACHINES), *hypervisor()], "kubevirt_not_ready"),
        ([node(PASSTHROUGH, **MACHINES), *hypervisor({})], "kubevirt_not_ready"),
        ([node(PASSTHROUGH, **MACHINES), *hypervisor({**READY, "phase": "Deploying"})], "kubevirt_not_ready"),
        ([node(PASSTHROUGH, **MACHINES), *hypervisor({"phase": "Deployed"})], "kubevirt_not_ready"),
        ([node(PASSTHROUGH, **{**MACHINES, "labels": {}}), *hypervisor(READY)], "not_schedulable"),
        ([node(PASSTHROUGH, labels=SCHEDULABLE, A10=1), *hypervisor(READY)], "no_kvm"),
        ([node(PASSTHROUGH, **{**MACHINES, "A10": 0}), *hypervisor(READY)], "no_resource"),
        ([node(PASSTHROUGH, labels=SCHEDULABLE, PGPU=1, KVM=1), *hypervisor(READY)], "no_resource"),
    ],
)
def test_what_isnt_there_is_a_code_and_never_a_pass(objects, code):
    kube = Cluster(*copy.deepcopy(objects))
    done = suite(kube, PASSTHROUGH)
    assert results(done) == {"M00": ("skipped", code)}, done["table"]
    assert done["acceptance"]["result"] == "skipped" and not done["changed"]
    assert not [call for call in kube.calls if not call.startswith("GET")], "nothing was created"


def test_a_cluster_without_such_a_node_is_skipped():
    done = suite(Cluster(node("nvidia", **MACHINES), *hypervisor(READY)), PASSTHROUGH)
    assert results(done) == {"M00": ("skipped", "")}


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("permitted", {"M01": "FAIL", "M02": "skipped"}),
        ("starts", {"M01": "FAIL", "M02": "skipped"}),
        ("elsewhere", {"M01": "FAIL", "M02": "skipped"}),
        ("device", {"M01": "FAIL", "M02": "skipped"}),
        ("counted", {"M01": "PASS", "M02": "FAIL"}),
    ],
)
def test_a_step_fails_where_what_it_proves_isnt_so(fault, failing):
    kube = Cluster(node(PASSTHROUGH, **MACHINES), *hypervisor(READY), faults=(fault,))
    found = results(suite(kube, PASSTHROUGH))
    assert {key: found[key][0] for key in failing} == failing


def test_with_two_cards_left_no_second_machine_is_started():
    found = results(suite(Cluster(node(PASSTHROUGH, **{**MACHINES, "A10": 2}), *hypervisor(READY)), PASSTHROUGH))
    assert (found["M01"], found["M02"]) == (("PASS", ""), ("skipped", "no_second"))


def test_the_namespace_lets_kubevirts_pods_run_and_that_of_other_suites_doesnt():
    level = "pod-security.kubernetes.io/enforce"
    found = {
        name: namespace(Options(suite=name), "r")["metadata"]["labels"][level]
        for name in (PASSTHROUGH, VGPU, KATA, "hami")
    }
    assert found == {PASSTHROUGH: "privileged", VGPU: "privileged", KATA: "restricted", "hami": "restricted"}


# --------------------------------------------------------------------------- Kata

IMAGE = {"image": "registry.example/cuda:1"}


def secure(handler="kata-qemu-nvidia-gpu", name="secure", **more):
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name},
        "handler": handler,
        **more,
    }


def by_case(done):
    titles = {case.title: case.id for case in kata.CASES}
    return {titles[step["title"]]: step["result"] for step in done["acceptance"]["steps"] if step["title"] in titles}


def test_katas_pods_have_the_class_and_the_card():
    done = suite(Cluster(node(KATA, PGPU=1), secure()), KATA, **IMAGE)
    assert by_case(done) == {
        "starts": "PASS",
        "one_more": "PASS",
        "another_kernel": "PASS",
        "device_node": "PASS",
        "one_card": "PASS",
        "computes": "UNKNOWN",
    }, done["table"]


@pytest.mark.parametrize(
    ("fault", "failing"),
    [("kernel", {"another_kernel"}), ("seen", {"device_node", "one_card"}), ("counted", {"one_more"})],
)
def test_a_case_of_kata_fails_where_what_it_proves_isnt_so(fault, failing):
    found = by_case(suite(Cluster(node(KATA, PGPU=1), secure(), faults=(fault,)), KATA, **IMAGE))
    assert {case for case, result in found.items() if result == "FAIL"} == failing


NFD = {"feature.node.kubernetes.io/cpu-cpuid.AVX2": "true"}
SELECTOR = {"scheduling": {"nodeSelector": {"nvidia.com/cc.ready.state": "false"}}}


@pytest.mark.parametrize(
    ("objects", "code"),
    [
        ([node(KATA, PGPU=1)], "no_runtime_class"),
        ([node(KATA, PGPU=1), secure("nvidia")], "no_runtime_class"),
        ([node(KATA, PGPU=1), secure(**SELECTOR)], "not_selected"),
        ([node(KATA, labels=NFD, PGPU=1), secure()], "no_kvm"),
    ],
)
def test_what_kata_needs_and_isnt_there_is_a_code(objects, code):
    kube = Cluster(*copy.deepcopy(objects))
    assert results(suite(kube, KATA, **IMAGE)) == {"M00": ("skipped", code)}
    assert not [call for call in kube.calls if not call.startswith("GET")], "nothing was created"


@pytest.mark.parametrize("labels", [{**NFD, kata.VIRTUALIZATION[0]: "true"}, {**NFD, kata.VIRTUALIZATION[1]: "true"}])
def test_a_processor_that_can_virtualize_is_used(labels):
    assert by_case(suite(Cluster(node(KATA, labels=labels, PGPU=1), secure()), KATA, **IMAGE))["starts"] == "PASS"


def test_the_image_has_to_be_named():
    with pytest.raises(BadInput, match="image: not set"):
        suite(Cluster(node(KATA, PGPU=1), secure()), KATA)


@pytest.mark.parametrize(
    ("classes", "named", "expected"),
    [
        ({"a": "kata-qemu-nvidia-gpu", "b": "runc"}, None, "a"),
        ({"a": "kata-qemu-nvidia-gpu", "b": "kata-qemu-nvidia-gpu-snp"}, None, "a"),
        ({"a": "kata-qemu"}, None, ""),
        ({"a": "kata-qemu"}, "a", "a"),
    ],
)
def test_the_runtime_class(classes, named, expected):
    assert runtime_class(classes, named) == expected


@pytest.mark.parametrize(
    ("classes", "named", "message"),
    [
        ({"a": "runc"}, "a", "isn't Kata's"),
        ({"a": "runc"}, "b", "no RuntimeClass b"),
        ({"a": "kata-qemu-nvidia-gpu", "b": "kata-nvidia-gpu-runtime-rs"}, None, "a, b: name one"),
    ],
)
def test_a_runtime_class_that_doesnt_fit(classes, named, message):
    with pytest.raises(BadInput, match=message):
        runtime_class(classes, named)
