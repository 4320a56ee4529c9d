# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite of NVIDIA's device plugin over a simulated cluster, whose kubelet and plugin do what they do, or not."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.allocators import ALLOCATORS
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import Cluster as State
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import observed
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import Node, node_of
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.cases import parse
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import ALL, NVIDIA, Options
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nvidia import CASES, announced
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.run import kinds, run, run_all
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import CommandFailed
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from fake_clock import FakeClock
from fake_kube import FakeKube

GPU, SHARED, PROFILE = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
CONFIG = "nvidia.com/device-plugin.config"


def configuration(mig="none", key="", rename=False, only_one=None):
    """As the plugin reads it, with four replicas of a shared card."""
    document = {"version": "v1", "flags": {"migStrategy": mig}}
    if key:
        one = {"renameByDefault": rename, "resources": [{"name": GPU, "replicas": 4}]}
        one |= {} if only_one is None else {"failRequestsGreaterThanOne": only_one}
        document["sharing"] = {key: one}
    return document


def node(name, resources, config="", **labels):
    amounts = {key: str(value) for key, value in resources.items()}
    ready = [{"type": "Ready", "status": "True"}]
    given = {"nvidia.com/gpu.count": "2", **({CONFIG: config} if config else {}), **labels}
    status = {"conditions": ready, "capacity": amounts, "allocatable": amounts}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": given}, "status": status}


class Cluster(FakeKube):
    """Pods get a card in turn, where the node has one left.

    :param configurations: the plugin's, by name; None where its ConfigMap can't be read.
    :ivar faults: what doesn't work: ``seen`` (containers have all cards), ``admission`` (kubelet refuses nothing),
        ``mps`` (no variable), ``counted`` (more pods run than fit).
    """

    def __init__(self, nodes, configurations, *faults):
        volumes = [{"name": "available-configs", "configMap": {"name": "configs"}}]
        pod = {"containers": [{"name": "p", "image": "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"}], "volumes": volumes}
        plugin = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "p", "namespace": "n"}}
        objects = [*nodes, {**plugin, "spec": {"template": {"metadata": {}, "spec": pod}}}]
        if configurations is not None:
            data = {name: json.dumps(configuration) for name, configuration in configurations.items()}
            objects.append(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "configs", "namespace": "n"},
                    "data": data,
                }
            )
        super().__init__(*objects)
        self.configurations, self.faults = configurations or {}, faults
        self.turn = itertools.count()

    def apply(self, definition, manager):
        done = super().apply(definition, manager)
        if definition["kind"] == "Pod":
            self.schedule(
                self.objects[Ref("v1", "Pod", *(definition["metadata"][key] for key in ("namespace", "name")))]
            )
        return done

    def schedule(self, pod):
        [term] = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        [name] = term["matchFields"][0]["values"]
        not_hamis = {"key": "kubegpu.share/backend", "operator": "NotIn", "values": ["hami"]}
        assert term["matchExpressions"] == [not_hamis], "admission refuses other pods where HAMi is"
        there = self.objects[Ref("v1", "Node", "", name)]
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        [(resource, wanted)] = [(key, int(value)) for key, value in limits.items() if key.startswith("nvidia")]
        held = sum(
            int(one["spec"]["containers"][0]["resources"]["limits"].get(resource, 0))
            for one in self.list_all("v1", "Pod", field_selector=f"spec.nodeName={name}")
        )
        free = int(there["status"]["allocatable"].get(resource, 0)) - held
        if wanted > free and "counted" not in self.faults:
            message = f"0/1 nodes are available: 1 Insufficient {resource}."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
            return
        pod["spec"]["nodeName"] = name
        sharing = self.configurations.get(there["metadata"]["labels"].get(CONFIG), {}).get("sharing", {})
        refuses = any(one.get("failRequestsGreaterThanOne", key == "mps") for key, one in sharing.items())
        if refuses and wanted > 1 and "admission" not in self.faults:
            pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"}
            return
        pod["card"] = next(self.turn) % 2
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "c0", "state": {"running": {}}}]}

    def execute(self, namespace, pod, container, argv):
        found = self.objects[Ref("v1", "Pod", namespace, pod)]
        labels = self.objects[Ref("v1", "Node", "", found["spec"]["nodeName"])]["metadata"]["labels"]
        cards = [0, 1] if "seen" in self.faults else [found["card"]]
        mig = "MIG" in labels.get("nvidia.com/gpu.product", "")
        line = " ".join(argv)
        if line == "ls /dev":
            return "\n".join(["full", *(f"nvidia{card}" for card in cards), "nvidiactl", "nvidia-uvm", "nvidia-caps"])
        if line == "nvidia-smi -L":
            listed = [f"GPU {at}: T4 (UUID: GPU-{card})" for at, card in enumerate(cards)]
            return "\n".join([*listed, *(["  MIG 1g.10gb     Device  0: (UUID: MIG-1)"] if mig else [])])
        if line.startswith("nvidia-smi"):
            return "\n".join(f"GPU-{card}" for card in cards)
        if line == "ls /dev/nvidia-caps":
            return "nvidia-cap3\nnvidia-cap4\n"
        if "PIPE" in line and "mps" not in self.faults:
            return "control\nlog\n" if argv[0] == "sh" else "/mps/nvidia.com/gpu/pipe\n"
        raise CommandFailed(f"{argv[0]} ended with 1", 1)


MIG = {"nvidia.com/gpu.product": "A100-MIG-1g.10gb"}
NODES = {
    "exclusive": (node("gpu1", {GPU: 2}, "c"), configuration()),
    "time-slicing": (node("gpu1", {GPU: 8}, "c"), configuration(key="timeSlicing")),
    "renamed": (node("gpu1", {SHARED: 8}, "c"), configuration(key="timeSlicing", rename=True, only_one=True)),
    "mps": (node("gpu1", {GPU: 8}, "c"), configuration(key="mps")),
    "single": (node("gpu1", {GPU: 7}, "c", **MIG), configuration("single")),
    "mixed": (node("gpu1", {PROFILE: 7, GPU: 1}, "c", **MIG), configuration("mixed")),
}
EVERY = {"all", "device_node", "one_card"}
# The cases that run on each kind of node and pass; the others need a program or silicon.
PASSING = {
    "exclusive": EVERY | {"whole_cards"},
    "time-slicing": EVERY | {"shared_card", "two_granted"},
    "renamed": EVERY | {"shared_card", "old_name", "two_refused"},
    "mps": EVERY | {"shared_card", "two_refused", "mps_environment", "mps_pipe"},
    "single": EVERY | {"mig_device", "mig_capabilities"},
    "mixed": EVERY | {"mig_device", "mig_capabilities"},
}


def suite(kube, **options):
    clock = FakeClock()
    given = {"suite": NVIDIA, "image": "example.org/cuda:1", **options}
    work = run_all if given["suite"] == ALL else run
    done = work(kube, kube.execute, Options(**given), False, Waiting(60, sleep=clock.sleep, now=clock.now))
    assert not [ref for ref in kube.objects if ref.kind in ("Pod", "Namespace")], "everything is removed"
    return done


def results(done):
    by_title = {case.title: case.id for case in CASES}
    return {by_title[step["title"]]: step["result"] for step in done["acceptance"]["steps"] if step.get("proves")}


def of(kind, *faults):
    there, document = NODES[kind]
    return Cluster([json.loads(json.dumps(there))], {"c": document}, *faults)


@pytest.mark.parametrize("kind", NODES)
def test_the_cases_follow_from_how_the_node_announces_its_cards(kind):
    done = suite(of(kind))
    found = results(done)
    # On a MIG node of two cards there aren't whole ones to compare.
    assert {id for id, result in found.items() if result == "PASS"} == PASSING[kind] | (
        {"whole_cards"} if kind in ("single", "mixed") else set()
    ), done["table"]
    assert set(found.values()) <= {"PASS", "UNKNOWN"}, done["table"]
    unshown = {step["title"] for step in done["acceptance"]["steps"] if step["unshown"]}
    assert unshown == {case.title for case in CASES if found.get(case.id) == "UNKNOWN"}
    assert {check["backend"] for check in done["checks"]} == {"nvidia"}


@pytest.mark.parametrize(
    ("kind", "fault", "failing"),
    [
        ("exclusive", "counted", {"all"}),
        ("exclusive", "seen", {"device_node", "one_card", "whole_cards"}),
        ("renamed", "admission", {"two_refused"}),
        ("mps", "mps", {"mps_environment", "mps_pipe"}),
    ],
)
def test_a_case_fails_where_what_it_proves_isnt_so(kind, fault, failing):
    found = results(suite(of(kind, fault)))
    assert {id for id, result in found.items() if result == "FAIL"} == failing


def test_a_program_decides_where_one_is_named():
    kube = of("mps")
    execute, images = kube.execute, []

    def with_programs(namespace, pod, container, argv):
        images.append(kube.objects[Ref("v1", "Pod", namespace, pod)]["spec"]["containers"][0]["image"])
        if argv == ["hold"]:
            raise CommandFailed("hold ended with 102", 102)
        return "" if argv == ["vectorAdd"] else execute(namespace, pod, container, argv)

    kube.execute = with_programs
    given = {"program_command": ["vectorAdd"], "program_image": "example.org/samples:1", "allocate_command": ["hold"]}
    found = results(suite(kube, **given))
    assert found["computes"] == found["mps_memory"] == "PASS" and images.count("example.org/samples:1") == 1
    kube.execute = lambda *words: ""
    assert results(suite(kube, **given))["mps_memory"] == "FAIL"
    # A program that ends with 1 shows nothing of the limit.
    kube.execute = execute
    assert results(suite(kube, **given))["mps_memory"] == "UNKNOWN"


def test_labels_do_where_the_configuration_cant_be_read():
    labels = {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/mig.strategy": "none"}
    one = announced(node_of(node("gpu1", {GPU: 8}, "c", **labels)), None)
    assert (one.kinds, one.cards) == ({"shared", "time-slicing", "same-name"}, 2)
    found = results(suite(Cluster([node("gpu1", {GPU: 8}, "c", **labels)], None)))
    # Whether two replicas are granted isn't known then.
    assert not {"two_refused", "two_granted"} & set(found) and found["shared_card"] == "PASS"


def test_users_add_cases():
    case = {"id": "mine", "title": "t", "proves": "p", "evidence": ["NVML"], "limits": {"card": 1}, "at_most": 1}
    case |= {"command": ["nvidia-smi", "-L"], "finds": "^GPU .*T4"}

    def result_of(**more):
        done = suite(of("exclusive"), cases=[{**case, **more}])
        return {step["title"]: step["result"] for step in done["acceptance"]["steps"]}.get("t")

    assert result_of() == "PASS" and result_of(finds="H100") == "FAIL" and result_of(times=2) == "FAIL"
    assert result_of(kinds=["mps"]) is None and result_of(suite="hami") is None
    for wrong in ({"kinds": ["cheap"]}, {"finds": "("}):
        with pytest.raises(BadInput):
            result_of(**wrong)


def test_a_mixed_cluster_is_tested_by_a_suite_for_each_kind_of_node():
    slices, whole = NODES["time-slicing"][1], NODES["exclusive"][1]
    nodes = [node("gpu1", {GPU: 2}, "whole"), node("gpu2", {GPU: 8}, "slices"), node("gpu3", {GPU: 2}, "whole")]
    done = suite(Cluster(nodes, {"whole": whole, "slices": slices}, "seen"), suite=ALL)
    assert [(suite["suite"], suite["node"], suite["result"]) for suite in done["acceptance"]["suites"]] == [
        ("nvidia", "gpu2", "FAIL"),
        ("nvidia", "gpu1", "FAIL"),
    ]
    assert done["acceptance"]["result"] == "FAIL" and done["acceptance"]["untested"] == []
    assert {step["node"] for step in done["acceptance"]["steps"]} == {"gpu1", "gpu2"}
    assert "suite nvidia, whole: gpu1, gpu3\n" in done["table"] and "suite nvidia, slices: gpu2\n" in done["table"]
    # Without an image for NVIDIA's nodes nothing is known of them.
    done = suite(Cluster(nodes, {"whole": whole, "slices": slices}), suite=ALL, image=None)
    assert done["acceptance"]["result"] == "UNKNOWN" and "image: not set" in done["acceptance"]["steps"][0]["what"]


KEPT = {"capacity": "16", "allocatable": "0"}


def test_the_kinds_of_nodes():
    gpushare = node("a", {"aliyun.com/gpu-mem": 16}, gpushare="true")
    claims = node("b", {"aliyun.com/gpu-mem": 16}, gpushare="dra")
    hami = node("c", {GPU: 20})
    hami["metadata"]["annotations"] = {"hami.io/node-nvidia-register": "[]"}
    nodes = [node("n2", {GPU: 2}), hami, claims, gpushare, node("n1", {GPU: 2}, "whole"), node("cpu", {})]
    # kubelet still reports what it had before it was switched.
    status = nodes[0]["status"]
    status.update({field: {**status[field], "aliyun.com/gpu-mem": size} for field, size in KEPT.items()})
    nodes[0]["metadata"]["labels"]["kubegpu.share/backend"] = "nvidia"
    assert kinds(map(node_of, nodes)) == [
        ("workloads", "dra", ["b"]),
        ("workloads", "extender", ["a"]),
        ("hami", "", ["c"]),
        ("nvidia", "exclusive", ["n2"]),
        ("nvidia", "whole", ["n1"]),
    ]


@pytest.mark.parametrize(
    ("backend", "labels", "kind"),
    [
        ("gpushare", {"gpushare": "true"}, ("workloads", "extender")),
        ("gpushare", {"gpushare": "dra"}, ("workloads", "dra")),
        ("hami", {"kubegpu.share/backend": "hami"}, ("hami", "")),
        ("nvidia", {"kubegpu.share/backend": "nvidia"}, ("nvidia", "exclusive")),
    ],
)
def test_a_node_that_was_given_to_a_back_end_is_of_its_kind_whatever_others_left_there(backend, labels, kind):
    """The registry of back ends decides, as for the plan: suite, capacity and annotations of the former one don't."""
    one = node("a", {GPU: 2, "aliyun.com/gpu-mem": 16}, **labels)
    one["metadata"]["annotations"] = {"hami.io/node-nvidia-register": "[]", "kubegpu.share/cards": "[]"}
    assert kinds([node_of(one)]) == [(*kind, ["a"])]
    state = State("v1.36.3", (Node("a", labels=labels),))
    assert {ALLOCATORS[name].backend for name in observed(state)["a"]} == {backend}


def test_a_node_without_its_cards_is_tested_and_not_left_out():
    """Its back end's server may be down."""
    done = suite(Cluster([node("gpu1", {}, gpushare="true")], {}), suite=ALL)
    [one] = done["acceptance"]["suites"]
    assert (one["suite"], one["result"]) == ("workloads", "skipped") and "no node advertises" in done["table"]


def test_the_example_of_the_roles_page_is_a_case():
    page = (Path(__file__).parents[3] / "roles/acceptance/README.md").read_text()
    [example] = re.findall(r"```yaml\n(acceptance_cases:.*?)```", page, re.DOTALL)
    [case] = parse(yaml.safe_load(example)["acceptance_cases"])
    assert (case.suite, case.kinds, case.mismatch("25"), bool(case.mismatch("100"))) == (NVIDIA, ("mps",), "", True)
