# SPDX-License-Identifier: GPL-3.0-or-later
"""Which nodes get NVIDIA's device plugins for virtual machines, what they announce, and which cards are refused."""

from __future__ import annotations

import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kata import cdi, plugins
from ansible_collections.kubegpu.share.plugins.module_utils._kata.leftovers import work
from kata_facts import SWITCH, facts, function, specification
from node_fakes import FakeSystem

CARDS = (function(), function("0000:5e:00.0", "31"))
KEPT = {"driver": "nvidia", "module": "nvidia", "override": ""}


def planned(*nodes, **given):
    """The plan for nodes gpu1, gpu2, ... with these facts."""
    names = [f"gpu{number}" for number in range(1, len(nodes) + 1)]
    options = {
        **{
            "kind": "kata",
            "nodes": names,
            "alias": "pgpu",
            "resources": [],
            "selectors": {},
            "facts": dict(zip(names, nodes, strict=True)),
        },
        **{"live": [live(name) for name in names], "pods": [], "policies": [], "assume_bound": False},
    }
    return plugins.plan({**options, **given})


def live(name, digest=None, **allocatable):
    annotations = {plugins.CARDS: digest} if digest else {}
    numbers = {key.replace("_", "/"): value for key, value in allocatable.items()}
    return {"metadata": {"name": name, "annotations": annotations}, "status": {"allocatable": numbers}}


def pod(node, name="plugin-x", **metadata):
    return {"metadata": {"name": name, **metadata}, "spec": {"nodeName": node}}


def codes(result):
    return [problem["code"] for problem in result["problems"]]


def test_nodes_are_grouped_by_what_they_announce_and_get_their_labels():
    switch = function("0000:9b:00.0", "40", **SWITCH)
    found = planned(facts(*CARDS, switch), facts(CARDS[0]), facts(CARDS[0]))
    assert not found["problems"] and not found["operated"] and not found["restart"]
    assert [(group["nodes"], group["resources"]) for group in found["groups"]] == [
        (["gpu1"], {"nvidia.com/pgpu": 2, "nvidia.com/nvswitch": 1}),
        (["gpu2", "gpu3"], {"nvidia.com/pgpu": 1}),
    ]
    [definition] = found["groups"][0]["definitions"]
    # The labels of the back end are role passthrough's.
    assert definition["metadata"]["labels"] == {"node-restriction.kubernetes.io/kubegpu-sandbox": "kata"}
    digests = [
        node["metadata"]["annotations"][plugins.CARDS] for group in found["groups"] for node in group["definitions"]
    ]
    assert digests[1] == digests[2] != digests[0]


def test_a_card_that_stays_with_its_driver_is_not_announced():
    found = planned(facts(CARDS[0], function("0000:5e:00.0", "31", **KEPT)))
    assert found["groups"][0]["resources"] == {"nvidia.com/pgpu": 1}


@pytest.mark.parametrize(
    ("node", "code", "says"),
    [
        ({}, "not_observed", "gpu_nodes"),
        ({"passthrough": None}, "unreadable", "record"),
        ({"passthrough": {"functions": [], "record": "{"}}, "unreadable", "no record of this collection"),
        (facts(), "none_bound", "run role passthrough"),
        (facts(function(**KEPT)), "none_bound", "run role passthrough"),
        (
            facts(CARDS[0], function("0000:5e:00.0", "31", **KEPT), recorded=["0000:5e:00.0"]),
            "not_bound",
            "0000:5e:00.0",
        ),
        (facts(function(driver="nvgrace_gpu_vfio_pci")), "other_driver", "passthrough_driver: vfio-pci"),
        (facts(CARDS[0], function("0000:5e:00.0", "31", "0x2330")), "mixed_models", "0x2236, 0x2330"),
        (facts(CARDS[0], function("0000:5e:00.0", "12")), "shared_group", "IOMMU group 12"),
    ],
)
def test_what_the_plugin_would_announce_wrongly_is_refused(node, code, says):
    found = planned(node)
    assert codes(found) == [code] and says in found["problems"][0]["message"] and not found["groups"]


def test_the_plugin_for_kubevirt_has_models_and_groups_by_itself():
    cards = [function(driver="nvgrace_gpu_vfio_pci"), function("0000:5e:00.0", "12", "0x2330")]
    found = planned(facts(*cards), kind="kubevirt", resources=["nvidia.com/GA102GL_A10"])
    assert found["groups"][0]["resources"] == {"nvidia.com/GA102GL_A10": 0}, "any number above 0"
    assert found["groups"][0]["definitions"][0]["metadata"]["labels"] == {
        "node-restriction.kubernetes.io/kubegpu-sandbox": "kubevirt"
    }
    assert codes(planned(facts(*cards), kind="kubevirt")) == ["no_resource"]


def test_models_of_their_own_names_need_these_names():
    node = facts(CARDS[0], function("0000:5e:00.0", "31", "0x2330"))
    assert codes(planned(node, alias="")) == ["no_resource"]
    found = planned(node, alias="", resources=["nvidia.com/GA102GL_A10", "nvidia.com/GH100_H100_PCIE"])
    assert not found["problems"]


def test_a_plan_assumes_that_role_passthrough_binds_the_cards():
    unbound = facts(function(**KEPT), recorded=["0000:3b:00.0"])
    found = planned(unbound, assume_bound=True)
    assert not found["problems"] and found["groups"][0]["resources"] == {"nvidia.com/pgpu": 0}
    assert codes(planned({}, assume_bound=True)) == ["not_observed"]


def test_only_the_pods_of_nodes_with_other_cards_are_replaced():
    node = facts(*CARDS)
    digest = planned(node)["groups"][0]["definitions"][0]["metadata"]["annotations"][plugins.CARDS]
    nodes = [
        live("gpu1", digest, **{"nvidia.com_pgpu": "2"}),
        live("gpu2", "other", **{"nvidia.com_pgpu": "2"}),
        # A card whose device file went and came back stays unhealthy.
        live("gpu3", digest, **{"nvidia.com_pgpu": "1"}),
        live("gpu4", digest, **{"nvidia.com_pgpu": "0"}),
    ]
    pods = [pod(f"gpu{number}", f"plugin-{number}") for number in (1, 2, 3, 4, 5)]
    pods.append(pod("gpu2", "ending", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert planned(*[node] * 4, live=nodes, pods=pods)["restart"] == ["plugin-2", "plugin-3"]


@pytest.mark.parametrize(
    ("kind", "workloads", "part", "theirs"),
    [
        ("kata", {"enabled": True, "mode": "kata"}, {"kataSandboxDevicePlugin": {"enabled": True}}, True),
        # What isn't mentioned doesn't run.
        ("kata", {"enabled": True, "mode": "kata"}, {}, False),
        ("kata", {"enabled": True, "mode": "kata"}, {"sandboxDevicePlugin": {"enabled": True}}, False),
        ("kata", {"enabled": True, "mode": "kata"}, {"kataSandboxDevicePlugin": {"enabled": False}}, False),
        ("kata", {"enabled": True}, {"kataSandboxDevicePlugin": {"enabled": True}}, False),
        ("kata", {"enabled": False, "mode": "kata"}, {"kataSandboxDevicePlugin": {"enabled": True}}, False),
        ("kubevirt", {"enabled": True}, {"sandboxDevicePlugin": {"enabled": True}}, True),
        ("kubevirt", {"enabled": True}, {}, False),
        ("kubevirt", {"enabled": True, "mode": "kata"}, {"sandboxDevicePlugin": {"enabled": True}}, False),
    ],
)
def test_what_the_gpu_operator_runs_is_left_to_it(kind, workloads, part, theirs):
    policies = [{"spec": {"sandboxWorkloads": workloads, **part}}]
    found = planned(facts(*CARDS), kind=kind, policies=policies, resources=["nvidia.com/pgpu"], pods=[pod("gpu1")])
    assert found["operated"] is theirs and bool(found["restart"]) is not theirs
    metadata = found["groups"][0]["definitions"][0]["metadata"]
    assert (plugins.LABEL in metadata.get("labels", {})) is not theirs and ("annotations" in metadata) is not theirs


def test_the_plugins_specification_is_known_among_others():
    nvidia = specification("12").replace("nvidia.com/pgpu", "nvidia.com/gpu").replace("/dev/vfio/", "/dev/nvidia")
    files = {
        "/var/run/cdi/nvidia.com-pgpu.yaml": specification("12", "31"),
        "/var/run/cdi/nvidia.yaml": nvidia,
        "/var/run/cdi/spec.123.tmp": specification("7"),
        "/etc/cdi/other.json": json.dumps(
            {
                "cdiVersion": "0.5.0",
                "kind": "nvidia.com/pgpu",
                "devices": [{"name": "9", "containerEdits": {"deviceNodes": [{"path": "/dev/vfio/devices/vfio9"}]}}],
            }
        ),
        "/etc/cdi/broken.json": "[" * 100000,
        "/etc/cdi/list.json": "[1]",
    }
    found = cdi.read(FakeSystem(files=files))
    assert cdi.of_kind(found, "nvidia.com/pgpu") == ["9", "12", "31"]
    assert [spec.nodes for spec in found] == [
        ("/dev/vfio/devices/vfio9",),
        ("/dev/vfio/vfio", "/dev/vfio/12", "/dev/vfio/vfio", "/dev/vfio/31"),
    ]


LEFT = {
    "/var/run/cdi/nvidia.com-pgpu.yaml": specification("12"),
    "/var/lib/kubelet/device-plugins/sandbox-pgpu.sock": "",
    # KubeVirt's own.
    "/var/lib/kubelet/device-plugins/kubevirt-kvm.sock": "",
    "/etc/cdi/mine.yaml": specification("12"),
}
GIVEN = {"kubelet_root": "/var/lib/kubelet"}


def test_the_files_that_the_plugin_left_are_removed():
    system = FakeSystem(files=dict(LEFT))
    assert work(system, GIVEN, True)["changed"] and len(system.files) == len(LEFT)
    assert work(system, GIVEN, False)["changed"] and not work(system, GIVEN, False)["changed"]
    assert set(system.files) == {"/var/lib/kubelet/device-plugins/kubevirt-kvm.sock", "/etc/cdi/mine.yaml"}


def test_files_of_a_running_plugin_stay():
    system = FakeSystem(files={**LEFT, "/proc/77/comm": "nvidia-sandbox-\n"})
    with pytest.raises(ShareError, match="process 77"):
        work(system, GIVEN, False)
    assert "/var/run/cdi/nvidia.com-pgpu.yaml" in system.files


def test_a_node_announces_its_own_models_and_vgpus_to_kubevirt_in_their_numbers():
    """A resource of another node's model would be waited for in vain."""
    types = [{"id": "nvidia-592", "name": "NVIDIA A10-12Q", "available": 0}]
    made = [{"uuid": uuid, "type": "nvidia-592"} for uuid in ("a", "b")]
    divided = {**facts(), "gpus": [{"vgpu_host": {"types": types, "vgpus": made}}]}
    selectors = {
        **{"10de:2236": "nvidia.com/GA102GL_A10", "10DE:2330": "nvidia.com/GH100_H100_SXM5_80GB"},
        "NVIDIA A10-12Q": "nvidia.com/NVIDIA_A10-12Q",
    }
    seen = planned(facts(*CARDS), divided, kind="kubevirt", selectors=selectors)
    assert not seen["problems"], seen
    assert {group["nodes"][0]: group["resources"] for group in seen["groups"]} == {
        "gpu1": {"nvidia.com/GA102GL_A10": len(CARDS)},
        "gpu2": {"nvidia.com/NVIDIA_A10-12Q": 2},
    }
    # Of Kata there are no vGPUs.
    assert codes(planned(divided, selectors=selectors)) == ["none_bound"]
    assert codes(planned(facts(*CARDS), kind="kubevirt", selectors={"10DE:2330": "nvidia.com/x"})) == ["no_resource"]
