# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of NVIDIA's device plugin: configurations, the chart's values, labels of nodes, MIG layouts."""

from __future__ import annotations

import copy
import json

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._nvidia.plan import injection_of, plan

LAYOUTS = yaml.safe_load("""
version: v1
mig-configs:
  seven:
    - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}
  unequal:
    - {devices: [0], mig-enabled: true, mig-devices: {3g.40gb: 1, 1g.10gb+me: 1}}
    - {devices: [1], mig-enabled: false}
  kinds:
    - {devices: all, device-filter: "0x20B010DE", mig-enabled: true, mig-devices: {1g.5gb: 7}}
    - {devices: all, device-filter: ["0x233010DE"], mig-enabled: true, mig-devices: {2g.20gb: 3}}
""")
CONTAINERD = {"kubelet": {"runtime": "containerd"}}


def containerd(dump, **more):
    return {**CONTAINERD, "runtimes": {"containerd": {"dump": dump}}, **more}


PLAIN = '[plugins."io.containerd.grpc.v1.cri".containerd]\n  default_runtime_name = "runc"\n'
HANDLER = PLAIN + '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\n'
BY_DEFAULT = HANDLER.replace('"runc"', '"nvidia"')
CDI = HANDLER + "  enable_cdi = true\n"


def planned(configurations=None, **more):
    options = {
        "nodes": ["gpu1"],
        "configurations": {"whole": {}} if configurations is None else configurations,
        "default": next(iter(configurations)) if configurations else "whole",
        "node_configurations": {},
        "mig_layouts": {},
        "operator": False,
        "injection": "auto",
        "runtime_class": "",
        "image": "",
        "gfd": False,
        "tolerations": [{"operator": "Exists"}],
        "values": {},
        "facts": {},
        "assume_runtime": False,
    }
    return plan({**options, **more})


def codes(result):
    return [(problem["code"], problem["where"].removeprefix("nvidia_device_plugin_")) for problem in result["problems"]]


def document(result, name):
    return yaml.safe_load(result["values"]["config"]["map"][name])


def test_a_card_of_ones_own():
    result = planned()
    assert result["problems"] == []
    assert document(result, "whole") == {
        "version": "v1",
        "flags": {"migStrategy": "none", "plugin": {"deviceListStrategy": ["envvar"], "deviceIDStrategy": "uuid"}},
    }
    [node] = result["nodes"]
    assert node["resources"] == {"nvidia.com/gpu": 0}
    assert node["labels"] == {
        "kubegpu.share/backend": "nvidia",
        "nvidia.com/gpu.present": "true",
        "nvidia.com/device-plugin.config": "whole",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.strategy": "none",
    }


@pytest.mark.parametrize(
    ("given", "sharing", "labels", "resource"),
    [
        (
            {"sharing": "time-slicing", "replicas": 4, "rename": True, "fail_requests_greater_than_one": True},
            ("timeSlicing", 4, True, True),
            {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/gpu.replicas": "4"},
            "nvidia.com/gpu.shared",
        ),
        ({"sharing": "time-slicing", "replicas": 2}, ("timeSlicing", 2, False, False), {}, "nvidia.com/gpu"),
        # The plugin's own default, which its version 0.20 makes a choice.
        (
            {"sharing": "mps", "replicas": 3},
            ("mps", 3, False, True),
            {"nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/mps.capable": "true"},
            "nvidia.com/gpu",
        ),
        (
            {"sharing": "mps", "replicas": 3, "fail_requests_greater_than_one": False},
            ("mps", 3, False, False),
            {},
            "nvidia.com/gpu",
        ),
    ],
)
def test_shared_cards(given, sharing, labels, resource):
    result = planned({"shared": given})
    kind, replicas, rename, fails = sharing
    assert document(result, "shared")["sharing"] == {
        kind: {
            "renameByDefault": rename,
            "failRequestsGreaterThanOne": fails,
            "resources": [{"name": "nvidia.com/gpu", "replicas": replicas}],
        }
    }
    assert labels.items() <= result["nodes"][0]["labels"].items()
    assert result["groups"][0]["resources"] == {resource: 0}


class Tagged(int):
    """A number as Ansible has it: of a class of its own."""


def test_numbers_are_ansibles():
    layouts = {
        "version": "v1",
        "mig-configs": {"c": [{**ALL, "devices": [Tagged(0)], "mig-devices": {"1g.5gb": Tagged(7)}}]},
    }
    given = {"sharing": "time-slicing", "replicas": Tagged(2), "mig_strategy": "mixed", "mig_layout": "c"}
    result = planned({"c": {**given, "resources": ["nvidia.com/mig-1g.5gb"]}}, mig_layouts=layouts)
    assert result["problems"] == []
    assert document(result, "c")["sharing"]["timeSlicing"]["resources"][0]["replicas"] == 2


def test_nodes_with_configurations_of_their_own_are_waited_for_by_what_they_announce():
    configurations = {
        "whole": {},
        "quarters": {"sharing": "time-slicing", "replicas": 4, "rename": True},
        "unequal": {"mig_strategy": "mixed", "mig_layout": "unequal"},
    }
    chosen = {"gpu2": "quarters", "gpu3": "unequal"}
    result = planned(
        configurations, nodes=["gpu1", "gpu2", "gpu3", "gpu4"], node_configurations=chosen, mig_layouts=LAYOUTS
    )
    assert [(group["nodes"], group["resources"]) for group in result["groups"]] == [
        (["gpu1", "gpu4"], {"nvidia.com/gpu": 0}),
        (["gpu2"], {"nvidia.com/gpu.shared": 0}),
        (["gpu3"], {"nvidia.com/gpu": 0, "nvidia.com/mig-1g.10gb.me": 0, "nvidia.com/mig-3g.40gb": 0}),
    ]
    operators = [
        definition["metadata"]["labels"] for group in result["operator_groups"] for definition in group["definitions"]
    ]
    deployed = {f"nvidia.com/gpu.deploy.{one}": "true" for one in ("device-plugin", "operator-validator")}
    deployed["kubegpu.share/backend"] = "nvidia"
    divided = {"nvidia.com/device-plugin.config": "unequal", "nvidia.com/mig.config": "unequal"}
    assert operators[-1] == {**divided, **deployed}
    assert operators[0] == {"nvidia.com/device-plugin.config": "whole", **deployed}
    assert result["mig_strategy"] == "mixed"


def test_the_gpu_operator_has_one_mig_strategy_and_its_own_way_to_a_card():
    configurations = {"one": {"mig_strategy": "single", "mig_layout": "seven"}, "two": {"mig_strategy": "mixed"}}
    configurations["two"]["mig_layout"] = "unequal"
    given = {"nodes": ["gpu1", "gpu2"], "node_configurations": {"gpu2": "two"}, "mig_layouts": LAYOUTS}
    assert codes(planned(configurations, **given, operator=True)) == [
        ("operator_mig_strategies", "node_configurations"),
    ]
    assert planned(configurations, **given)["problems"] == []
    result = planned(facts={"gpu1": containerd(PLAIN)}, operator=True)
    assert result["nodes"][0]["labels"]["nvidia.com/device-plugin.config"] == "whole"


def test_shared_mig_devices_by_their_profiles():
    given = {"sharing": "time-slicing", "replicas": 2, "rename": True, "mig_strategy": "mixed", "mig_layout": "seven"}
    result = planned({"m": {**given, "resources": ["nvidia.com/mig-1g.10gb"]}}, mig_layouts=LAYOUTS)
    assert result["nodes"][0]["resources"] == {"nvidia.com/mig-1g.10gb.shared": 0}
    assert codes(planned({"m": given}, mig_layouts=LAYOUTS)) == [("resource_unknown", "configurations.m.resources")]


# --------------------------------------------------------------------------- by what a node has


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, ("envvar", False)),
        (containerd(""), ("envvar", False)),
        (containerd(BY_DEFAULT), ("envvar", False)),
        (containerd(CDI), ("cdi-cri", True)),
        (containerd(HANDLER), None),
        (containerd(PLAIN), None),
        (
            {
                "kubelet": {"runtime": "crio"},
                "runtimes": {"crio": {"default_runtime": "crun", "runtimes": {"nvidia": {}}}},
            },
            ("cdi-cri", True),
        ),
        (
            {
                "kubelet": {"runtime": "docker"},
                "runtimes": {"docker": {"default_runtime": "runc", "runtimes": {"nvidia": {}}}},
            },
            None,
        ),
        (
            {"kubelet": {"runtime": "k3s"}, "runtimes": {"k3s": {"default_runtime": "nvidia", "runtimes": {}}}},
            ("envvar", False),
        ),
        # k3s with Docker.
        (
            {
                "kubelet": {"runtime": "docker"},
                "runtimes": {
                    "docker": {"default_runtime": "nvidia", "runtimes": {"nvidia": {}}},
                    "k3s": {"default_runtime": "", "runtimes": {}},
                },
            },
            ("envvar", False),
        ),
    ],
)
def test_the_way_to_a_card_follows_from_the_nodes_runtime(facts, expected):
    found = injection_of(facts)
    assert (found and (found.strategy, found.by_class)) == expected


def test_nodes_with_and_without_nvidias_runtime_in_one_cluster():
    facts = {"gpu1": containerd(BY_DEFAULT), "gpu2": containerd(CDI)}
    result = planned(nodes=["gpu1", "gpu2"], facts=facts)
    assert [node["labels"]["nvidia.com/device-plugin.config"] for node in result["nodes"]] == ["whole", "whole-cdi-cri"]
    assert document(result, "whole-cdi-cri")["flags"]["plugin"]["deviceListStrategy"] == ["cdi-cri"]
    # The plugin's DaemonSet is one for all nodes; a class of that name exists on both.
    assert (result["values"]["runtimeClassName"], result["values"]["nvidiaDriverRoot"]) == ("nvidia", "/")
    alone = planned(nodes=["gpu1"], facts=facts)
    assert not {"runtimeClassName", "nvidiaDriverRoot"} & set(alone["values"])
    # Another node doesn't restart the plugins of all others by another ConfigMap.
    assert alone["values"]["config"] == result["values"]["config"]


def test_a_node_whose_runtime_has_no_way_to_a_card_is_refused():
    result = planned(nodes=["gpu1", "gpu2"], facts={"gpu2": containerd(PLAIN)})
    assert codes(result) == [("no_injection", "injection")]
    assert "gpu2" in result["problems"][0]["message"]
    # Role runtime is planned, too.
    assert planned(facts={"gpu1": containerd(PLAIN)}, assume_runtime=True)["problems"] == []
    assert planned(facts={"gpu1": containerd(PLAIN)}, injection="envvar", runtime_class="nvidia")["problems"] == []


def test_labels_of_the_cards_are_nvidias_where_the_cards_are_of_one_kind():
    card = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559}
    known = {"gpu1": {"driver": {"cards": [card, {**card, "index": 1}]}}}
    shared = {"s": {"sharing": "time-slicing", "replicas": 2}}
    [node] = planned(shared, facts=known)["nodes"]
    labels = node["labels"]
    # What the node announced before isn't taken for it.
    assert node["resources"] == {"nvidia.com/gpu": 4}
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3-SHARED"
    assert (labels["nvidia.com/gpu.count"], labels["nvidia.com/gpu.memory"]) == ("2", "81559")
    known["gpu1"]["driver"]["cards"][1] = {**card, "name": "another"}
    assert "nvidia.com/gpu.product" not in planned(shared, facts=known)["nodes"][0]["labels"]


def test_gpu_feature_discovery_sets_its_labels_itself():
    result = planned({"m": {"sharing": "mps", "replicas": 2}}, gfd=True)
    assert set(result["nodes"][0]["labels"]) == {
        "kubegpu.share/backend",
        "nvidia.com/gpu.present",
        "nvidia.com/device-plugin.config",
    }
    assert result["values"]["gfd"] == {"enabled": True}


# --------------------------------------------------------------------------- values


def test_the_plugin_never_runs_on_another_back_ends_node():
    affinity = planned()["values"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = affinity["nodeSelectorTerms"]
    found = {
        (match_expression["key"], match_expression["operator"], *match_expression["values"])
        for match_expression in term["matchExpressions"]
    }
    assert found == {
        ("nvidia.com/gpu.present", "In", "true"),
        ("node-restriction.kubernetes.io/kubegpu-share", "In", "nvidia"),
        ("gpushare", "NotIn", "dra", "true"),
        ("gpu", "NotIn", "on"),
    }


def test_images_beside_the_plugins_have_variables_and_values_win():
    given = {"nfd_image": "example.org/nfd:v1", "pull_secrets": ["registry"]}
    secrets = [{"name": "registry"}]
    values = planned(gfd=True, values={"nfd": {"image": {"tag": "v2"}}}, **given)["values"]
    assert values["imagePullSecrets"] == values["nfd"]["imagePullSecrets"] == secrets
    assert values["nfd"]["image"] == {"repository": "example.org/nfd", "tag": "v2"}
    assert "nfd" not in planned(**given)["values"]
    assert codes(planned(gfd=True, nfd_image="example.org/nfd")) == [("image_tag", "nfd_image")]


def test_a_users_values_win_and_are_merged_as_helm_does_it():
    theirs = {"gfd": {"securityContext": {}}, "config": {"default": "mine"}, "tolerations": [{"operator": "Exists"}]}
    values = planned(values=theirs, image="example.org:5000/plugin:v1")["values"]
    assert values["image"] == {"repository": "example.org:5000/plugin", "tag": "v1"}
    assert values["gfd"] == {"enabled": False, "securityContext": {}}
    assert values["config"]["default"] == "mine" and values["config"]["map"]
    assert values["tolerations"] == [{"operator": "Exists"}]
    assert codes(planned(image="example.org:5000/plugin")) == [("image_tag", "image")]
    # The chart writes repository:tag.
    digest = "sha256:" + "0" * 64
    for reference in (f"example.org:5000/plugin:v1@{digest}", f"example.org/plugin@{digest}"):
        image = planned(image=reference)["values"]["image"]
        assert f"{image['repository']}:{image['tag']}" == reference


def test_a_config_map_for_the_operator_has_another_name_for_other_content():
    first, again = planned(mig_layouts=LAYOUTS)["config_maps"], planned(mig_layouts=LAYOUTS)["config_maps"]
    assert first == again
    other = copy.deepcopy(LAYOUTS)
    other["mig-configs"]["seven"][0]["mig-devices"] = {"1g.10gb": 6}
    changed = planned(mig_layouts=other)["config_maps"]
    assert changed["mig_manager"]["name"] != first["mig_manager"]["name"]
    assert changed["device_plugin"] == first["device_plugin"]
    assert json.loads(changed["mig_manager"]["data"]["config.yaml"]) == other


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"replicas": 2}, ("replicas_unused", ".replicas")),
        ({"sharing": "time-slicing"}, ("replicas_missing", ".replicas")),
        ({"sharing": "mps", "replicas": 49}, ("replicas_too_many", ".replicas")),
        ({"sharing": "mps", "replicas": 2, "mig_strategy": "mixed"}, ("mps_with_mig", "")),
        ({"sharing": "timeSlicing", "replicas": 2}, ("option_value", ".sharing")),
        ({"replicas": "4"}, ("option_type", ".replicas")),
        ({"replicas": True}, ("option_type", ".replicas")),
        ({"renameByDefault": True}, ("option_unknown", ".renameByDefault")),
        ({"announces": ["amd.com/gpu"]}, ("option_value", ".announces")),
        ({"mig_strategy": "mixed"}, ("announces_missing", "")),
        ({"mig_strategy": "single", "mig_layout": "none"}, ("layout_unknown", ".mig_layout")),
        ({"mig_layout": "seven"}, ("layout_unused", "")),
        ({"mig_strategy": "single", "mig_layout": "unequal"}, ("layout_not_single", "")),
    ],
)
def test_a_configuration_that_the_plugin_would_refuse_or_ignore(given, problem):
    code, where = problem
    assert codes(planned({"c": given}, mig_layouts=LAYOUTS)) == [(code, f"configurations.c{where}")]


def test_names_that_nothing_has():
    assert codes(planned({"c": {}}, default="d")) == [("configuration_unknown", "default")]
    assert codes(planned({"c": {}}, node_configurations={"gpu1": "d"})) == [
        ("configuration_unknown", "node_configurations.gpu1")
    ]
    assert codes(planned({"no label": {}})) == [("configuration_name", "configurations.no label")]
    assert codes(planned({}, default="whole")) == [("configuration_missing", "configurations")]


def layout(*entries):
    return {"version": "v1", "mig-configs": {"c": list(entries)}}


ALL = {"devices": "all", "mig-enabled": True}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"version": "v2", "mig-configs": {}}, ("geometry_document", "")),
        ({"version": "v1", "mig-configs": {}}, ("geometry_document", ".mig-configs")),
        (layout(), ("geometry_entry", ".mig-configs.c")),
        (layout({"devices": "all"}), ("geometry_entry", ".mig-configs.c[0]")),
        (layout({**ALL, "mig-enabled": "yes"}), ("geometry_entry", ".mig-configs.c[0].mig-enabled")),
        (layout({**ALL, "devices": [0, 0]}), ("geometry_entry", ".mig-configs.c[0].devices")),
        (layout({**ALL, "devices": "none"}), ("geometry_entry", ".mig-configs.c[0].devices")),
        (layout({**ALL, "device-filter": "A100"}), ("geometry_entry", ".mig-configs.c[0].device-filter")),
        (
            layout({**ALL, "mig-enabled": False, "mig-devices": {"1g.5gb": 1}}),
            ("geometry_entry", ".mig-configs.c[0].mig-devices"),
        ),
        (layout({**ALL, "mig-devices": {"1g": 7}}), ("geometry_profile", ".mig-configs.c[0].mig-devices.1g")),
        (
            layout({**ALL, "mig-devices": {"1c.2g.10gb": 1}}),
            ("geometry_profile", ".mig-configs.c[0].mig-devices.1c.2g.10gb"),
        ),
        (layout({**ALL, "mig-devices": {"1g.5gb": 8}}), ("geometry_too_large", ".mig-configs.c[0].mig-devices")),
        (
            layout({**ALL, "mig-devices": {"4g.20gb": 1, "2g.10gb": 2}}),
            ("geometry_too_large", ".mig-configs.c[0].mig-devices"),
        ),
        (layout({**ALL, "mig-devices": {"1g.5gb+me": 2}}), ("geometry_too_large", ".mig-configs.c[0].mig-devices")),
        (layout(ALL, {"devices": [1], "mig-enabled": False}), ("geometry_overlap", ".mig-configs.c")),
    ],
)
def test_a_mig_layout_that_mig_parted_or_no_card_accepts(document, problem):
    code, where = problem
    assert codes(planned(mig_layouts=document)) == [(code, f"mig_layouts{where}")]
