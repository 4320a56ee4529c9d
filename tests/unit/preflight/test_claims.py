# SPDX-License-Identifier: GPL-3.0-or-later
"""Which allocation each node has, what would stop gpushare_allocation: dra, and the way back."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.allocators import ALLOCATORS
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import cluster_of
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import (
    NO_PARTS,
    POSSIBLE,
    SWITCHING,
    as_it_is,
    resolve,
)
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claim_templates import Shape
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.claims import OF_EXTENDER, Claims, examine
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import examine as examine_all
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import wanted_backends
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.node import NodeOptions
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect
from dra_objects import slices_of, turned
from fake_kube import FakeKube
from role_templates import value, variables_of
from test_preflight import R615, cards, facts, gpu_pod, node

OURS = "gpu.kubegpu.share"
NONE = {contract.RESOURCE_MEMORY: "0"}
ANNOUNCED = {contract.RESOURCE_MEMORY: "32"}


def announced(driver, name):
    spec = {"driver": driver, "nodeName": name}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": driver}, "spec": spec}


def server(kind, name, namespace="gpushare-system"):
    api = "coordination.k8s.io/v1" if kind == "Lease" else "apps/v1"
    labels = {"app.kubernetes.io/part-of": "gpushare"}
    spec = {"template": {"spec": {"containers": [{"name": "c", "image": "kubegpu/gpushare:1"}]}}}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def scheduler_of(name):
    """kube-scheduler as a static pod."""
    mirror = {"annotations": {"kubernetes.io/config.mirror": "1"}, "labels": {"component": "kube-scheduler"}}
    one = {"name": "kube-scheduler", "image": "kube-scheduler:v1.36.3", "command": ["kube-scheduler"]}
    metadata = {"name": f"kube-scheduler-{name}", "namespace": "kube-system", **mirror}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": name, "containers": [one]}}


def label_of(value):
    """The label of a node with a back end."""
    return {"kubegpu.share/backend" if value in ("hami", "nvidia") else "gpushare": value} if value else {}


def wanted(**nodes):
    """What the variables ask for: by node an allocation, or another back end."""
    return [
        {"node": name, "backend": "gpushare", "allocation": value}
        if value in ("extender", "dra", "auto")
        else {"node": name, "backend": value, "allocation": "extender"}
        for name, value in nodes.items()
    ]


def read(asked, *objects, version="v1.36.3", values=None, capacity=True, switch=(), scheduler=None, alone=()):
    """The result of cluster_info."""
    nodes = [] if any(one["kind"] == "Node" for one in objects) else [node("gpu1"), node("cp1")]
    kube = FakeKube(*nodes, *objects)
    kube.version_answer = {"gitVersion": version}
    if not capacity:
        kube.try_create = lambda _one: {"spec": {"spec": {"devices": {"requests": [{"exactly": {}}]}}}}
    backends = {"wanted": wanted(**asked), "values": values or {}, "switch": switch, "alone": alone}
    return collect(kube, {"memory_unit": "GiB", "scheduler": scheduler, "backends": backends})


def found(asked, *objects, **given):
    cluster = read(asked, *objects, **given)
    known = cluster["given"], cluster["capacity"], cluster["backends"], given.get("switch", ()), cluster["releases"]
    claims = Claims(*known)
    return {one.id: one.text for one in examine(claims, cluster_of(cluster), frozenset(asked))}


def chosen(asked, *objects, **given):
    return {
        one["node"]: (one["allocation"], one["code"]) for one in read(asked, *objects, **given)["backends"]["nodes"]
    }


# --------------------------------------------------------------------------- what a node has


def test_each_node_has_its_own_allocation():
    made = read({"gpu1": "extender", "gpu2": "dra", "gpu3": "hami"}, node("gpu1"), node("gpu2"), node("gpu3"))[
        "backends"
    ]
    assert (made["extender"], made["dra"], made["hami"], made["nvidia"]) == (["gpu1"], ["gpu2"], ["gpu3"], [])
    assert made["parts"] == {**NO_PARTS, "extender": True, "dra": True, "hami": True}
    assert made["claims"] == "asked" and made["gpushare"] == ["gpu1", "gpu2"]
    only = read({"gpu1": "dra"})["backends"]
    assert (only["parts"], only["claims"]) == ({**NO_PARTS, "dra": True}, "all")
    assert read({"gpu1": "extender"})["backends"]["claims"] == "none"


@pytest.mark.parametrize("announcing", [announced(OURS, "gpu1"), node("gpu1", labels={"gpushare": "dra"})])
def test_a_node_keeps_what_it_has_until_it_is_taken_over(announcing):
    """Its cards would be given away twice."""
    assert chosen({"gpu1": "extender"}, announcing) == {"gpu1": ("dra", "switch-pending")}
    assert chosen({"gpu1": "auto"}, announcing) == {"gpu1": ("dra", "present")}
    assert chosen({"gpu1": "extender"}, announcing, switch=["gpu1"]) == {"gpu1": ("extender", "switched")}
    made = read({"gpu1": "extender"}, announcing)["backends"]
    # The schedulers use the extender before a node announces its cards to them.
    assert made["parts"] == {**NO_PARTS, "extender": True, "dra": True} and made["extender"] == []


@pytest.mark.parametrize(
    "announcing",
    [
        node("gpu1", ANNOUNCED),
        node("gpu1", ANNOUNCED, cards(32, 32768), free=NONE),
        node("gpu1", labels={"gpushare": "true"}),
        gpu_pod(),
    ],
    ids=["announced", "plugin down", "labelled", "pod"],
)
def test_the_extenders_nodes_are_known(announcing):
    objects = [announcing] if announcing["kind"] == "Node" else [node("gpu1"), announcing]
    assert chosen({"gpu1": "dra"}, *objects) == {"gpu1": ("extender", "switch-pending")}
    text = found({"gpu1": "dra"}, *objects)["switch-pending"]
    assert text.startswith("gpushare_allocation: node gpu1 has extender now, and this run leaves it so")
    assert text.endswith("kubegpu.share.switch -e gpushare_allocation=dra --limit gpu1")


def test_a_plugin_that_has_just_left_holds_no_card():
    left = node("gpu1", ANNOUNCED, free=NONE)
    assert chosen({"gpu1": "dra"}, left) == {"gpu1": ("dra", "requested")}


@pytest.mark.parametrize(
    ("asked", "objects", "given", "result"),
    [
        ({"gpu1": "auto"}, [node("gpu1")], {}, ("dra", "claims-served")),
        ({"gpu1": "auto"}, [node("gpu1")], {"version": "v1.35.1"}, ("extender", "claims-version")),
        ({"gpu1": "auto"}, [node("gpu1")], {"capacity": False}, ("extender", "claims-gate")),
        (
            {"gpu1": "auto"},
            [node("gpu1")],
            {"values": {"gpushare_extender_metrics": True}},
            ("extender", "claims-unable"),
        ),
        (
            {"gpu1": "auto"},
            [node("gpu1", labels={"node.openshift.io/os_id": "rhcos"})],
            {},
            ("dra", "claims-served"),
        ),
        # A pod anywhere runs under the extender; a node that has something keeps it, and new ones follow.
        ({"gpu1": "auto"}, [node("gpu1"), node("gpu2"), gpu_pod(on="gpu2")], {}, ("extender", "extender-pods")),
        ({"gpu1": "auto"}, [node("gpu1"), node("gpu2", ANNOUNCED)], {}, ("extender", "joined")),
        ({"gpu1": "auto"}, [node("gpu1"), announced(OURS, "gpu2"), node("gpu2")], {}, ("dra", "joined")),
        ({"gpu1": "auto"}, [node("gpu1", ANNOUNCED)], {}, ("extender", "present")),
    ],
)
def test_auto_is_decided_and_says_why(asked, objects, given, result):
    assert chosen(asked, *objects, **given)["gpu1"] == result
    text = found(asked, *objects, **given)["allocation"]
    assert text.startswith(f"gpushare_allocation: auto is {result[0]} on gpu1, because ") and "{" not in text


def test_parts_that_no_node_needs_leave():
    extender, driver = server("DaemonSet", "gpushare-extender"), server("Lease", "gpushare-dra-templates")
    dedicated = server("Deployment", "gpushare-scheduler", "gpushare-scheduler")
    assert read({"gpu1": "dra"}, node("gpu1"), extender)["backends"]["leaving"] == {**NO_PARTS, "extender": True}
    assert read({"gpu1": "dra"}, node("gpu1"), dedicated)["backends"]["leaving"] == {**NO_PARTS, "extender": True}
    assert read({"gpu1": "extender"}, node("gpu1"), driver)["backends"]["leaving"] == {**NO_PARTS, "dra": True}
    both = read({"gpu1": "extender", "gpu2": "dra"}, node("gpu1"), node("gpu2"), extender, driver)["backends"]
    assert both["leaving"] == NO_PARTS


def test_a_scheduler_is_detected_where_one_has_the_extender():
    options = {"mode": "auto", "hosts": {}, "state": "present", "namespace": "gpushare-system"}
    options["dedicated_namespace"] = "gpushare-scheduler"
    assert read({"gpu1": "dra"}, scheduler=options)["scheduler"] is None
    assert read({"gpu1": "extender"}, scheduler=options)["scheduler"]["mode"] == "dedicated"
    # Its removal isn't refused, whatever runs the scheduler.
    left = read({"gpu1": "dra"}, node("gpu1"), server("DaemonSet", "gpushare-extender"), scheduler=options)
    assert left["scheduler"]["mode"] == "dedicated" and left["scheduler"]["leftovers"]


def test_variables_of_a_node_are_those_of_its_host():
    hosts = {
        "a": {"gpu_node_name": "gpu1", "gpushare_allocation": "dra"},
        "b": {},
        "c": {"gpu_backend": "hami"},
        "pool-1": {"gpushare_allocation": "auto"},
    }
    usual = {"gpu_backend": "gpushare", "gpushare_allocation": "extender"}
    by_node = {
        wanted_backend["node"]: wanted_backend for wanted_backend in wanted_backends(hosts, ["a", "b", "c"], (), usual)
    }
    assert [one["allocation"] for one in by_node.values()] == ["dra", "extender", "extender"]
    assert by_node["c"]["backend"] == "hami"
    # A node without SSH access has the variables of the host of its name.
    named = wanted_backends(hosts, ["a", "b", "c"], ["gpu1", "pool-1", "pool-2"], usual)
    assert [(one["node"], one["allocation"]) for one in named[:3]] == [
        ("gpu1", "dra"),
        ("pool-1", "auto"),
        ("pool-2", "extender"),
    ]
    assert [one["node"] for one in named[3:]] == ["c"], "gpushare_nodes names those of gpushare only"


# --------------------------------------------------------------------------- what would stop a run


def test_where_nodes_join_others_that_the_cluster_doesnt_have_are_left_out():
    asked = {"gpu1": "extender", "gpu2": "extender", "gpu3": "extender"}
    made = read(asked, node("gpu1"), node("gpu2"), alone=["gpu2"])["backends"]
    assert ([one["node"] for one in made["nodes"]], made["absent"]) == (["gpu1", "gpu2"], ["gpu3"])
    assert made["extender"] == made["gpushare"] == ["gpu1", "gpu2"]
    # Preflight says that the one that joins isn't there.
    assert read(asked, node("gpu1"), alone=["gpu2"])["backends"]["absent"] == ["gpu3"]
    assert read(asked, node("gpu1"))["backends"]["absent"] == []


def test_where_nodes_join_a_machine_of_the_control_plane_that_the_cluster_doesnt_have_is_left_out():
    options = {"mode": "static_pod", "hosts": {"m1": "cp1", "m2": "cp2"}, "state": "present", "namespace": "n"}
    options["dedicated_namespace"] = "gpushare-scheduler"
    asked, objects = {"gpu1": "extender"}, [node("gpu1"), node("cp1"), scheduler_of("cp1")]
    made = read(asked, *objects, scheduler=options, alone=["gpu1"])
    assert (made["scheduler"]["hosts"], made["backends"]["absent"]) == (["m1"], ["cp2"])
    # A run for all nodes would leave a scheduler without the extender.
    with pytest.raises(BadInput, match="the cluster has no node cp2; set gpu_node_name of host m2"):
        read(asked, *objects, scheduler=options)


def test_a_cluster_that_can_do_it_has_a_note_that_nothing_is_preempted():
    assert found({"gpu1": "dra"}) == {
        "claims-preemption": "gpushare_allocation: dra evicts no pod for one of higher priority: kube-scheduler has no "
        "preemption for claims; set it to extender where that is needed"
    }
    assert found({"gpu1": "extender"}) == {}


# --------------------------------------------------------------------------- which nodes get the servers' accounts

CONTROL = "node-role.kubernetes.io/control-plane"


def selecting(name, *restricted):
    """A DaemonSet of gpushare's, of this version or of an earlier one."""
    one = server("DaemonSet", name)
    one["spec"]["template"]["spec"]["nodeSelector"] = {"gpushare": "dra", **dict(restricted)}
    return one


def test_a_node_that_nobody_named_stops_the_run_that_would_take_its_server():
    """Only while the servers select their nodes by the label that kubelet may set; later the node has none anyway."""
    nodes = [node("gpu1"), node("gpu2", labels=label_of("dra")), node("gpu3", labels={"gpushare": "x"})]
    former, now = selecting("gpushare-dra-driver"), selecting("gpushare-dra-driver", ALLOCATORS["dra"].restricted)
    assert "unnamed-node" not in found({"gpu1": "dra"}, *nodes, now)
    text = found({"gpu1": "dra"}, *nodes, former)["unnamed-node"]
    assert text.startswith("gpushare_nodes: gpu2 has the label gpushare and is named nowhere")
    assert text.endswith("kubectl label node NAME gpushare-")
    assert "unnamed-node" not in found({"gpu1": "dra", "gpu2": "dra"}, *nodes, former)
    nodes[1]["metadata"]["labels"] |= dict([ALLOCATORS["dra"].restricted])
    assert "unnamed-node" not in found({"gpu1": "dra"}, *nodes, former)


@pytest.mark.parametrize(
    ("labels", "taint", "named", "imported", "place", "finding"),
    [
        # Each node pulls the image.
        ({CONTROL: ""}, "", [], None, "control_plane", ""),
        ({"node-role.kubernetes.io/master": ""}, f"{CONTROL}:NoSchedule", [], None, "control_plane", ""),
        ({CONTROL: ""}, "node.kubernetes.io/not-ready:NoExecute", [], None, "control_plane", ""),
        ({CONTROL: ""}, "mine:PreferNoSchedule", [], None, "control_plane", ""),
        # As servers of k3s and RKE2.
        ({CONTROL: ""}, "CriticalAddonsOnly:NoExecute", [], None, "control_plane", ""),
        ({CONTROL: ""}, "node-role.kubernetes.io/etcd:NoExecute", [], None, "control_plane", ""),
        ({CONTROL: ""}, "mine:NoExecute", [], None, "gpu_nodes", "templates-place"),
        ({CONTROL: ""}, "mine:NoExecute", ["cp1"], None, "named", ""),
        # As managed control planes.
        ({}, "", [], None, "gpu_nodes", "templates-place"),
        # The playbooks import the image on these machines.
        ({CONTROL: ""}, "", [], ["cp1"], "control_plane", ""),
        ({CONTROL: ""}, "", [], [], "gpu_nodes", "templates-place"),
        ({}, "", ["cp1"], None, "named", ""),
        ({}, "", ["cp1"], ["cp1"], "named", ""),
        ({}, "", ["gpu1"], [], "named", ""),
        ({}, "", ["cp1"], [], "named", "templates-nodes"),
        ({}, "", ["cp2"], None, "named", "templates-nodes"),
    ],
)
def test_the_server_of_claim_templates_runs_away_from_tenants_where_it_can(
    labels, taint, named, imported, place, finding
):
    control = node("cp1", labels=labels)
    key, _colon, effect = taint.partition(":")
    control["spec"] = {"taints": [{"key": key, "effect": effect}] if taint else []}
    given = {"values": {"gpushare_dra_templates_nodes": named, "imported": imported}}
    made = read({"gpu1": "dra"}, node("gpu1"), control, **given)["backends"]
    assert made["templates"]["place"] == place
    assert made["control_plane_image"] == bool(set(imported or ()) & {*made["templates"]["nodes"]})
    ids = {*found({"gpu1": "dra"}, node("gpu1"), control, **given)}
    assert ids == {"claims-preemption", *([finding] if finding else [])}
    # Without claims there is no such server.
    assert not {*found({"gpu1": "extender"}, node("gpu1"), control, **given)}


@pytest.mark.parametrize(
    ("version", "capacity", "sentence"),
    [
        ("v1.35.2", True, "runs Kubernetes v1.35.2, and the feature gate DRAConsumableCapacity is on from 1.36"),
        ("unknown", True, "runs Kubernetes unknown, and the feature gate DRAConsumableCapacity is on from 1.36"),
        ("v1.36.3", False, "the feature gate DRAConsumableCapacity is off in kube-apiserver (v1.36.3)"),
        ("v2.0.0", False, "the feature gate DRAConsumableCapacity is off in kube-apiserver (v2.0.0)"),
    ],
)
def test_a_cluster_that_cannot_divide_a_device_is_refused_by_the_gates_name(version, capacity, sentence):
    given = {"version": version, "capacity": capacity}
    assert sentence in found({"gpu1": "dra"}, **given)["claims-unserved"]
    assert "claims-unserved" not in found({"gpu1": "extender"}, **given)


def test_whoever_may_not_try_to_create_a_claim_is_not_refused():
    kube = FakeKube(node("gpu1"))
    asked = {"wanted": wanted(gpu1="dra"), "values": {}, "switch": [], "alone": []}

    def refusing(status):
        def refused(_one):
            raise KubeError("may not create resourceclaimtemplates", status=status)

        return refused

    for status, capacity in ((403, None), (404, False)):
        kube.try_create = refusing(status)
        assert collect(kube, {"memory_unit": "GiB", "scheduler": None, "backends": asked})["capacity"] is capacity


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("gpushare_extender_image", "example.org/e:1"),
        ("gpushare_device_plugin_image", "example.org/p:1"),
        ("gpushare_extender_metrics", True),
        ("scheduler_mode", "dedicated"),
    ],
)
def test_what_claims_cannot_do_is_refused_by_name(variable, value):
    assert variable in POSSIBLE
    values = {variable: value}
    text = found({"gpu1": "dra"}, values=values)["claims-unable"]
    assert text.startswith(f"{variable}: {value} isn't possible with gpushare_allocation: dra")
    assert "claims-unable" not in found({"gpu1": "extender"}, values=values)
    # Beside the extender, its own variables mean it alone.
    mixed = found({"gpu1": "dra", "gpu2": "extender"}, node("gpu1"), node("gpu2"), values=values)
    assert ("claims-unable" in mixed) is (variable not in OF_EXTENDER)


def test_on_openshift_the_api_decides_and_a_label_alone_makes_none():
    labelled = node("gpu1", labels={"node.openshift.io/os_id": "rhcos"})
    version = {"apiVersion": "config.openshift.io/v1", "kind": "ClusterVersion", "metadata": {"name": "version"}}
    there = {**version, "status": {"desired": {"version": "4.23.1"}}}
    result = read({"gpu1": "dra"}, labelled, there, scheduler=None)
    assert (result["backends"]["openshift"], result["backends"]["dra"]) == ("4.23.1", ["gpu1"])
    assert result["backends"]["software"]["openshift"]
    assert result["scheduler"] is None, "no scheduler of OpenShift's is looked at or installed"
    assert not {"claims-unable", "claims-unserved"} & found({"gpu1": "dra"}, labelled, there).keys()
    assert "claims-unserved" in found({"gpu1": "dra"}, labelled, there, version="v1.35.2")
    assert "claims-unserved" in found({"gpu1": "dra"}, labelled, there, capacity=False)
    # A kubelet may set the label on its node.
    made = read({"gpu1": "dra"}, labelled)["backends"]
    assert made["openshift"] == "" and not made["software"]["openshift"]


def test_a_node_between_two_allocations_is_refused():
    both = [node("gpu1", ANNOUNCED), announced(OURS, "gpu1")]
    text = found({"gpu1": "dra"}, *both)["two-backends"]
    assert "the cards of node gpu1 are given away by the DRA driver and by the device plugin" in text
    begun = node("gpu1", annotations={SWITCHING: "dra"})
    text = found({"gpu1": "extender"}, begun)["switch-unfinished"]
    assert "a run that was to switch it to dra ended early" in text
    assert text.endswith("run the same command again: kubegpu.share.switch -e gpushare_allocation=dra --limit gpu1")
    # switch.yml goes on from both.
    for objects in (both, [begun]):
        assert {*found({"gpu1": "dra"}, *objects, switch=["gpu1"])} == {"claims-preemption"}
    # Then the variable on the command line isn't that of the other nodes.
    others = [node("gpu1", ANNOUNCED), node("gpu2", ANNOUNCED)]
    assert "switch-pending" in found({"gpu1": "dra", "gpu2": "dra"}, *others)
    assert {*found({"gpu1": "dra", "gpu2": "dra"}, *others, switch=["gpu1"])} == {"claims-preemption"}


@pytest.mark.parametrize(
    ("asked", "there", "has", "command"),
    [
        ("hami", node("gpu1", ANNOUNCED), "extender", "-e gpu_backend=hami"),
        ("nvidia", node("gpu1", labels=label_of("hami")), "hami", "-e gpu_backend=nvidia"),
        ("dra", node("gpu1", labels=label_of("hami")), "hami", "-e gpu_backend=gpushare -e gpushare_allocation=dra"),
        (
            "auto",
            node("gpu1", labels=label_of("nvidia")),
            "nvidia",
            "-e gpu_backend=gpushare -e gpushare_allocation=auto",
        ),
    ],
)
def test_a_node_keeps_its_back_end_until_it_is_switched(asked, there, has, command):
    assert chosen({"gpu1": asked}, there) == {"gpu1": (has, "switch-pending")}
    text = found({"gpu1": asked}, there)["switch-pending"]
    assert text.startswith(f"gpu_backend: node gpu1 has {has} now, and this run leaves it so")
    assert text.endswith(f"kubegpu.share.switch {command} --limit gpu1")
    [(allocation, code)] = chosen({"gpu1": asked}, there, switch=["gpu1"]).values()
    assert code == "switched" and allocation in (asked, "dra")


def test_nodes_whose_machines_are_not_reached_are_switched_by_another_option():
    asked = {"gpu1": "dra", "gpu2": "dra", "vm1": "dra"}
    cluster = read(asked, *(node(name, ANNOUNCED) for name in asked))
    claims = Claims({}, True, cluster["backends"], unreached={"gpu1", "gpu2"})
    texts = [one.text for one in examine(claims, cluster_of(cluster), frozenset(asked)) if one.id == "switch-pending"]
    command = "kubegpu.share.switch -e gpushare_allocation=dra"
    assert [text.partition("one after another: ")[2] for text in texts] == [
        f"{command} -e switch_nodes=gpu1,gpu2",
        f"{command} --limit vm1",
    ]


def test_two_back_ends_on_a_node_are_refused():
    text = found({"gpu1": "hami"}, node("gpu1", ANNOUNCED, labels=label_of("hami")))["two-backends"]
    assert text.startswith("gpu_backend: the cards of node gpu1 are given away by the device plugin and by HAMi")


@pytest.mark.parametrize(
    ("value", "id", "sentence"),
    [
        ("auto", "hami-scheduler-name", "leaves pods alone that name no scheduler: gpu2 have nvidia.com/gpu"),
        ("always", "hami-takes-pods", "with always HAMi's webhook takes all pods that request nvidia.com/gpu, also"),
    ],
)
def test_what_hamis_webhook_does_with_pods_of_nvidias_plugin_is_said(value, id, sentence):
    values = {"hami_overwrite_default_scheduler": value}
    nodes = [node("gpu1"), node("gpu2")]
    assert sentence in found({"gpu1": "hami", "gpu2": "nvidia"}, *nodes, values=values)[id]
    # Somebody else's plugin has them, too.
    others = [node("gpu1"), node("gpu2", {"nvidia.com/gpu": "2"})]
    assert sentence in found({"gpu1": "hami"}, *others, values=values)[id]
    assert id not in found({"gpu1": "hami", "gpu2": "extender"}, *nodes, values=values)


def test_the_gpu_operator_is_named():
    def told(kind, api):
        return {"apiVersion": f"nvidia.com/{api}", "kind": kind, "metadata": {"name": "one"}}

    labelled = node("gpu1", labels={"nvidia.com/gpu.deploy.operands": "true"})
    policy, claiming = told("ClusterPolicy", "v1"), told("GPUCluster", "v1alpha1")
    assert (
        "the GPU Operator (ClusterPolicy one) runs the device plugin on gpu1"
        in (found({"gpu1": "nvidia"}, labelled, policy)["operator-configured"])
    )
    for backend in ("hami", "nvidia"):
        text = found({"gpu1": backend}, labelled, claiming)["operator-claims"]
        assert text.startswith("gpu_backend: GPUCluster one lets the GPU Operator allocate the cards of gpu1 by claims")
        assert "use a ClusterPolicy" in text
    # Beside a ClusterPolicy a node says which of the two it has.
    assert "operator-claims" not in found({"gpu1": "nvidia"}, labelled, policy, claiming)
    mode = "nvidia.com/gpu-operator.resource-allocation.mode"
    by_claims = node("gpu2", labels={"nvidia.com/gpu.deploy.operands": "true", mode: "dra"})
    both = found({"gpu1": "nvidia", "gpu2": "nvidia"}, labelled, by_claims, policy, claiming)
    assert (
        "the cards of gpu2 by claims" in both["operator-claims"] and f"{mode}=device-plugin" in both["operator-claims"]
    )
    assert not {"operator-configured", "operator-claims"} & {*found({"gpu1": "extender"}, labelled, policy, claiming)}


@pytest.mark.parametrize(
    ("label", "driver", "others", "stops"),
    [
        ("true", {}, [], True),
        ("true", {"enabled": True}, [], True),
        # It runs, the machine has its own, or the operator installs none.
        ("true", {}, ["gpu-operator"], False),
        ("true", {}, ["nvidia"], False),
        ("true", {"enabled": False}, [], False),
        ("pre-installed", {}, [], False),
    ],
)
def test_no_driver_is_installed_while_the_operators_container_is_to_come(label, driver, others, stops):
    """After a reboot for example: nothing on the machine tells of it then."""
    there = node("gpu1", labels={"nvidia.com/gpu.deploy.driver": label})
    policy = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "one"}}
    cluster = read({"gpu1": "extender"}, there, {**policy, "spec": {"driver": driver}})
    seen = facts()
    seen = {**seen, "driver": {**seen["driver"], "others": others}}
    options = Options(claims=Claims(backends=cluster["backends"]))

    def ids(state):
        host = Host("gpu1", "gpu1", "gpu_nodes", seen, NodeOptions(driver_state=state))
        return {one.id for one in examine_all(options, cluster_of(cluster), [host])}

    assert ("driver-container-absent" in ids("present")) == stops
    assert "driver-container-absent" not in ids("external")


def test_parts_of_hami_and_nvidia_are_known_by_their_namespaces():
    def space(name, value):
        return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label_of(value)}}

    spaces = [space("hami-system", "hami"), space("nvidia-device-plugin", "nvidia")]
    made = read({"gpu1": "hami"}, node("gpu1", labels=label_of("hami")), *spaces)["backends"]
    assert made["parts"] == {**NO_PARTS, "hami": True} and made["leaving"] == {**NO_PARTS, "nvidia": True}
    # A node that the inventory doesn't have needs it.
    others = [node("gpu1", labels=label_of("hami")), node("gpu2", labels=label_of("nvidia"))]
    assert read({"gpu1": "hami"}, *others, *spaces)["backends"]["leaving"] == NO_PARTS
    # Where the GPU Operator runs, its policy was changed.
    policy = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy"}
    policy["metadata"] = {"name": "p", "annotations": {"kubegpu.share/nvidia-before": "{}"}}
    labelled = node("gpu1", labels={"nvidia.com/gpu.deploy.device-plugin": "false"})
    assert read({"gpu1": "extender"}, labelled, policy)["backends"]["leaving"] == {**NO_PARTS, "nvidia": True}


@pytest.mark.parametrize("allocation", ["extender", "dra"])
def test_another_driver_gives_away_the_same_cards(allocation):
    for driver, title in (("gpu.nvidia.com", "NVIDIA's"), ("hami-core-gpu.project-hami.io", "HAMi's")):
        others = (announced(driver, "gpu1"), announced("nic.example.org", "gpu1"))
        text = found({"gpu1": allocation}, *others)["foreign-plugin"]
        assert text.startswith(f"node gpu1 has ResourceSlices of {driver}: {title} DRA driver gives away")
    assert "foreign-plugin" not in found({"gpu1": allocation}, announced("gpu.nvidia.com", "gpu2"))


def test_claims_need_no_list_of_device_ids():
    """80 GiB in MiB are more IDs than a device plugin can send."""
    host = Host("gpu1", "gpu1", "gpu_nodes", facts(memory=81920), R615)

    def ids(allocation):
        cluster = read({"gpu1": allocation})
        options = Options(memory_unit="MiB", claims=Claims({}, True, cluster["backends"]))
        return {one.id for one in examine_all(options, cluster_of(cluster), [host])}

    assert "device-list" in ids("extender")
    assert "device-list" not in ids("dra")


def test_a_back_ends_own_resources_are_not_foreign_and_its_nodes_need_no_image():
    host = Host("gpu1", "gpu1", "gpu_nodes", facts(), R615)

    def ids(asked, labels):
        announcing = node("gpu1", {"nvidia.com/gpu": "2"}, labels=labels, runtime="docker://26.0.0")
        cluster = read({"gpu1": asked}, announcing)
        options = Options(claims=Claims(backends=cluster["backends"]))
        return {one.id for one in examine_all(options, cluster_of(cluster), [host])}

    for backend in ("hami", "nvidia"):
        assert not {"foreign-plugin", "no-gpu-nodes", "image-delivery"} & ids(backend, label_of(backend))
        assert "foreign-plugin" in ids(backend, {}), "somebody else's plugin"
    assert "image-delivery" in ids("extender", {})


OF_PREFLIGHT = {
    **variables_of("preflight", "vars"),
    "preflight_extender_image": "",
    "preflight_device_plugin_image": "",
    "preflight_image_delivery": "registry",
}
RELEASES = value("preflight", "__preflight_values", **OF_PREFLIGHT)


@pytest.mark.parametrize(
    ("backend", "place", "text"),
    [
        ("hami", "hami-system/hami", "kubectl label namespace hami-system kubegpu.share/backend=hami"),
        # Where HAMi's own documentation installs it.
        ("hami", "kube-system/hami", "has objects of the whole cluster"),
        ("nvidia", "nvidia-device-plugin/nvidia-device-plugin", "its values would be replaced"),
        ("hami", "hami-system/other", ""),
        ("extender", "hami-system/hami", ""),
    ],
)
def test_a_release_that_somebody_else_has_made_is_not_taken_over(backend, place, text):
    namespace, name = place.split("/")
    metadata = {"namespace": namespace, "labels": {"owner": "helm", "name": name, "status": "deployed"}}
    release = {"apiVersion": "v1", "kind": "Secret", "metadata": {**metadata, "name": f"sh.helm.release.v1.{name}.v1"}}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {}}}
    given = {"gpu1": backend}
    findings = found(given, node("gpu1"), space, release, values=RELEASES)
    assert ("others-release" in findings) is bool(text) and text in findings.get("others-release", "")
    if text:
        assert place in findings["others-release"]
    # This collection's role labels the namespace before helm runs.
    space["metadata"]["labels"] = label_of(backend)
    assert "others-release" not in found(given, node("gpu1"), space, release, values=RELEASES)


@pytest.mark.parametrize(
    ("has", "switched", "severity"),
    [("extender", ["gpu1"], "problem"), ("extender", [], "warning"), ("dra", ["gpu1"], "warning")],
)
def test_a_node_that_is_not_ready_is_not_switched(has, switched, severity):
    live = node("gpu1", labels={"gpushare": {"extender": "true", "dra": "dra"}[has]}, ready="Unknown")
    cluster = read({"gpu1": "dra"}, live, switch=switched)
    options = Options(claims=Claims({}, True, cluster["backends"], switched))
    [one] = [
        one
        for one in examine_all(options, cluster_of(cluster), [Host("gpu1", "gpu1", "gpu_nodes", facts(), R615)])
        if one.id == "node-not-ready"
    ]
    assert one.severity == severity and one.text.startswith("node gpu1 isn't Ready")


def test_the_gpu_operators_plugin_is_configured_and_nobody_elses():
    labels = {"nvidia.com/gpu.deploy.device-plugin": "true"}
    for owner, problem in ((("ClusterPolicy", "cluster-policy"), False), (None, True)):
        plugin = daemon_set("nvidia-device-plugin-daemonset", PLUGIN, owner=owner)
        cluster = read({"gpu1": "nvidia"}, node("gpu1", {"nvidia.com/gpu": "2"}, labels=labels), plugin)
        options = Options(claims=Claims(backends=cluster["backends"]))
        host = Host("gpu1", "gpu1", "gpu_nodes", facts(), R615)
        assert ("foreign-plugin" in {one.id for one in examine_all(options, cluster_of(cluster), [host])}) is problem


def test_another_unit_waits_for_the_pods_with_claims():
    """A template's name has the number only: a pod that waits would get 4 MiB where it asked for 4 GiB."""
    sizes = [contract.Card(number, f"GPU-{number}", number, 16384, 16) for number in range(2)]
    offered = [{**one, "apiVersion": "resource.k8s.io/v1"} for one in slices_of("gpu1", sizes)]

    def text(unit, *pods):
        kube = FakeKube(node("gpu1", labels={"gpushare": "dra"}), node("gpu2"), *offered, *pods)
        cluster = collect(kube, {"memory_unit": unit, "scheduler": None})
        options = Options(memory_unit=unit, claims=Claims(backends=as_it_is(cluster_of(cluster))))
        return {one.id: one.text for one in examine_all(options, cluster_of(cluster), [])}.get("unit-change", "")

    kind = {"apiVersion": "v1", "kind": "Pod"}
    runs, waits = (kind | turned(number, Shape((4,)), on) for number, on in ((1, "gpu1"), (2, "")))
    assert text("GiB", runs, waits) == "" == text("MiB") == text("MiB", kind | turned(3, Shape((4,)), "gpu2"))
    assert "MiB isn't the present unit of node gpu1, and 1 pod there (default/work-1) would hold" in text("MiB", runs)
    assert "and 2 pods there, or waiting, (default/work-1, default/work-2)" in text("MiB", runs, waits)


def test_who_owns_the_set_up_is_one_request_where_it_is_asked():
    sent = {}
    for owner in ("", "playbook"):
        kube = FakeKube(node("gpu1"))
        backends = {"wanted": wanted(gpu1="dra"), "values": {}, "switch": (), "alone": (), "owner": owner}
        found = collect(kube, {"memory_unit": "GiB", "scheduler": None, "backends": backends})
        sent[owner] = found["requests"]["GET"]
        assert (found["owner"] is None) is (owner == "")
    assert sent["playbook"] == sent[""] + 1


def test_slices_are_read_in_one_request_where_they_may_be():
    kube = FakeKube(node("gpu1"), announced(OURS, "gpu1"))
    kube.version_answer = {"gitVersion": "v1.35.0"}
    assert collect(kube, {"memory_unit": "GiB", "scheduler": None})["slices"] is None
    kube.version_answer = {"gitVersion": "v1.36.0"}
    assert collect(kube, {"memory_unit": None, "scheduler": None})["slices"] is None
    assert collect(kube, {"memory_unit": "GiB", "scheduler": None})["slices"] == [
        {"driver": OURS, "node": "gpu1", "unit": None}
    ]
    read_them = kube.list_all

    def refused(api_version, kind, *rest, **more):
        if kind == "ResourceSlice":
            raise KubeError("may not list resourceslices", status=403)
        return read_them(api_version, kind, *rest, **more)

    kube.list_all = refused
    assert collect(kube, {"memory_unit": "GiB", "scheduler": None})["slices"] is None


# --------------------------------------------------------------------------- plugins of others


@pytest.mark.parametrize("labels", [{"gpushare": "true"}, {}, {"node-restriction.kubernetes.io/kubegpu-share": "true"}])
@pytest.mark.parametrize("backend", ["hami", "nvidia"])
@pytest.mark.parametrize("name", ["gpu1", "unnamed"])
def test_a_kubelet_that_labels_its_node_has_nobodys_release_removed(name, backend, labels):
    """What is in the cluster is removed by its release's name, which somebody else's may have."""
    given = {"kubegpu.share/backend": backend, **labels}
    rows = [node("gpu1"), *([node("unnamed", labels=given)] if name == "unnamed" else [])]
    rows = [node("gpu1", labels=given)] if name == "gpu1" else rows
    made = read({"gpu1": "extender"}, *rows)["backends"]
    assert not made["there"][backend] and not made["leaving"][backend]
    # A label that only administrators may set says so, and that of its namespace.
    given["node-restriction.kubernetes.io/kubegpu-share"] = backend
    rows = [node("gpu1"), *([node("unnamed", labels=given)] if name == "unnamed" else [])]
    rows = [node("gpu1", labels=given)] if name == "gpu1" else rows
    assert read({"gpu1": "extender"}, *rows)["backends"]["there"][backend]


def daemon_set(name, image, selector=None, owner=None, release=None):
    metadata = {"name": name, "namespace": "gpu-operator"}
    if owner:
        metadata["ownerReferences"] = [{"kind": owner[0], "name": owner[1], "uid": "u", "apiVersion": "nvidia.com/v1"}]
    if release:
        metadata["annotations"] = {"meta.helm.sh/release-name": release}
    pod = {"containers": [{"name": "c", "image": image}], **({"nodeSelector": selector} if selector else {})}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": {"template": {"spec": pod}}}


PLUGIN = "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"


@pytest.mark.parametrize(
    ("plugin", "said", "to_do"),
    [
        (
            daemon_set("nvidia-device-plugin-daemonset", PLUGIN, owner=("ClusterPolicy", "cluster-policy")),
            "DaemonSet gpu-operator/nvidia-device-plugin-daemonset of ClusterPolicy cluster-policy gives away",
            "label the node nvidia.com/gpu.deploy.device-plugin=false",
        ),
        (
            daemon_set("nvdp", PLUGIN, {"nvidia.com/gpu.present": "true"}, release="nvdp"),
            "DaemonSet gpu-operator/nvdp of helm's release gpu-operator/nvdp gives away",
            "take the node out of the release's nodeSelector or affinity",
        ),
        (
            daemon_set("hami-device-plugin", "projecthami/hami:v2.10.0"),
            "DaemonSet gpu-operator/hami-dev",
            "remove that",
        ),
        # On other nodes only, or of something else.
        (daemon_set("nvdp", PLUGIN, {"pool": "b"}), "another device plugin gives away", "remove that plugin"),
        (daemon_set("node-exporter", "quay.io/prometheus/node-exporter:v1"), "another device plugin", "remove that"),
    ],
)
def test_a_plugin_of_others_is_named_with_its_origin_and_left_alone(plugin, said, to_do):
    there = node("gpu1", {"nvidia.com/gpu": "2"}, labels={"nvidia.com/gpu.present": "true"})
    cluster = read({"gpu1": "extender"}, there, plugin)
    host = Host("gpu1", "gpu1", "gpu_nodes", facts(), R615)
    options = Options(claims=Claims(backends=cluster["backends"]))
    [one] = [one for one in examine_all(options, cluster_of(cluster), [host]) if one.id == "foreign-plugin"]
    assert said in one.text and to_do in one.text


@pytest.mark.parametrize(
    ("owner", "to_do"),
    [
        (("GPUCluster", "gpu-cluster"), "label the node nvidia.com/gpu.deploy.dra-driver=false"),
        (None, "resources.gpus.enabled=false"),
    ],
)
def test_nvidias_dra_driver_is_named_with_its_origin(owner, to_do):
    """As the GPU Operator's GPUCluster has it, which gives cards by claims without a device plugin."""
    labels = {"nvidia.com/gpu.deploy.dra-driver": "true"}
    image = "registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu:v0.5.0"
    driver = daemon_set("nvidia-dra-driver-kubelet-plugin", image, labels, owner=owner)
    text = found({"gpu1": "extender"}, node("gpu1", labels=labels), announced("gpu.nvidia.com", "gpu1"), driver)
    assert "DaemonSet gpu-operator/nvidia-dra-driver-kubelet-plugin" in text["foreign-plugin"]
    assert ("of GPUCluster gpu-cluster" in text["foreign-plugin"]) == bool(owner) and to_do in text["foreign-plugin"]


def test_a_plugin_of_others_that_has_just_left_is_no_problem():
    """kubelet reports its capacity for five minutes more."""
    left = node("gpu1", {"nvidia.com/gpu": "2"}, free={"nvidia.com/gpu": "0"})
    cluster = read({"gpu1": "extender"}, left)
    host = Host("gpu1", "gpu1", "gpu_nodes", facts(), R615)
    found_ids = {
        one.id for one in examine_all(Options(claims=Claims(backends=cluster["backends"])), cluster_of(cluster), [host])
    }
    assert "foreign-plugin" not in found_ids and cluster["plugins"] == []


def test_nothing_is_resolved_without_a_node():
    cluster = cluster_of(read({}))
    assert resolve([], cluster)["parts"] == NO_PARTS


@pytest.mark.parametrize(
    ("labels", "parts"),
    [
        ({"gpu1": "true", "gpu2": "true"}, {"extender"}),
        ({"gpu1": "dra", "gpu2": "dra"}, {"dra"}),
        ({"gpu1": "true", "gpu2": "dra"}, {"extender", "dra"}),
        ({"gpu1": "hami", "gpu2": "nvidia"}, {"hami", "nvidia"}),
        # Servers without a node: who deployed them reads of the extender's, as ever.
        ({"gpu1": ""}, {"extender"}),
    ],
)
def test_where_nothing_is_asked_for_the_nodes_are_taken_as_they_are(labels, parts):
    nodes = [node(name, {"nvidia.com/gpu": "2"}, labels=label_of(value)) for name, value in labels.items()]
    assert {name for name, there in as_it_is(cluster_of(read({}, *nodes)))["parts"].items() if there} == parts


def test_who_takes_the_nodes_as_they_are_reads_no_objects_of_others():
    """An account that may only read what verify.yml needs."""
    kube = FakeKube(
        node("gpu1", {"nvidia.com/gpu": "2"}, labels={**label_of("hami"), "nvidia.com/gpu.deploy.driver": "x"})
    )
    listed, asked = kube.list_all, []

    def recorded(api_version, kind, *rest, **more):
        asked.append(kind)
        return listed(api_version, kind, *rest, **more)

    kube.list_all = recorded
    wanted_ = {"wanted": None, "values": {}, "switch": [], "alone": []}
    assert collect(kube, {"memory_unit": "GiB", "scheduler": None, "backends": wanted_})["backends"]["hami"] == ["gpu1"]
    assert asked == ["Node", "ResourceSlice"]
