# SPDX-License-Identifier: GPL-3.0-or-later
"""Who installs driver and toolkit of each node (gpu_node_software), and that none gets them twice."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import cluster_of
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._preflight import software as subject
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.claims import Claims
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import examine as examine_all
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import wanted_software
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.node import NodeOptions
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect
from fake_kube import FakeKube
from gpu_nodes import gpu_node
from test_preflight import node

PRESENT, OPERANDS = "nvidia.com/gpu.present", "nvidia.com/gpu.deploy.operands"
DRIVER, TOOLKIT = "nvidia.com/gpu.deploy.driver", "nvidia.com/gpu.deploy.container-toolkit"
OWNED = {PRESENT: "true", DRIVER: "true", TOOLKIT: "true"}


def policy(**spec):
    return {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "p"}, "spec": spec}


def namespace():
    labels = {"kubegpu.share/backend": "gpu_operator"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpu-operator", "labels": labels}}


def read(asked, labels=None, *objects, machine=True, system="", alone=(), api=FakeKube):
    """The result of cluster_info for one node, gpu1."""
    live = node("gpu1", labels=labels or {})
    live["status"].setdefault("nodeInfo", {})["osImage"] = system
    kube = api(live, *objects)
    kube.version_answer = {"gitVersion": "v1.33.2"}
    rows = [{"node": "gpu1", "software": asked, "machine": machine}]
    wanted = [{"node": "gpu1", "backend": "gpushare", "allocation": "extender"}]
    backends = {"wanted": wanted, "software": rows, "values": {}, "switch": (), "alone": alone}
    return collect(kube, {"memory_unit": "GiB", "scheduler": None, "backends": backends})


def decided(*given, **more):
    software = read(*given, **more)["backends"]["software"]
    [row] = software["nodes"]
    assert software[row["software"]] == ["gpu1"], "the roles' conditions and the list agree"
    return row["software"], row["code"]


@pytest.mark.parametrize(
    ("labels", "spec", "expected"),
    [
        ({}, None, ("roles", "machine")),
        (OWNED, None, ("roles", "machine")),
        (OWNED, {}, ("gpu_operator", "operated")),
        ({**OWNED, DRIVER: "pre-installed"}, {}, ("roles", "machine")),
        # A driver by the operator's container and the roles' toolkit go together, as before.
        (OWNED, {"toolkit": {"enabled": False}}, ("roles", "machine")),
        (OWNED, {"driver": {"enabled": False}}, ("roles", "machine")),
        ({**OWNED, TOOLKIT: "false"}, {}, ("roles", "machine")),
    ],
)
def test_a_machine_is_the_roles_unless_the_operator_has_its_driver_and_toolkit(labels, spec, expected):
    assert decided("auto", labels, *([] if spec is None else [policy(**spec)])) == expected


@pytest.mark.parametrize(
    ("labels", "system", "objects", "expected"),
    [
        ({}, "", (), ("provider", "assumed")),
        ({PRESENT: "true"}, "", (policy(),), ("provider", "assumed")),
        (OWNED, "", (policy(driver={"enabled": False}),), ("gpu_operator", "operated")),
        ({**OWNED, OPERANDS: "false"}, "", (policy(),), ("provider", "assumed")),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, "", (), ("provider", "provided")),
        ({}, "Container-Optimized OS from Google", (), ("provider", "provided")),
        ({}, "Bottlerocket OS 1.20.0 (aws-k8s-1.30-nvidia)", (), ("provider", "provided")),
    ],
)
def test_a_node_without_login_is_the_operators_where_there_is_one(labels, system, objects, expected):
    assert decided("auto", labels, *objects, machine=False, system=system) == expected


class Denied(FakeKube):
    """Its user may not list ClusterPolicies."""

    def list_all(self, api_version, kind, *given, **more):
        if kind == "ClusterPolicy":
            raise KubeError("GET /apis/nvidia.com/v1/clusterpolicies", status=403)
        return super().list_all(api_version, kind, *given, **more)


@pytest.mark.parametrize(
    ("machine", "labels", "expected"),
    [
        (False, OWNED, ["gpu_node_software: the node's provider has to install driver and toolkit of gpu1: "]),
        (True, OWNED, ["gpu_node_software: the roles have to install driver and toolkit of gpu1: "]),
        # No label says that the operator has the driver of the machine.
        (True, {PRESENT: "true", OPERANDS: "true"}, []),
    ],
)
def test_an_operator_that_the_user_may_not_list_is_said_with_the_right_that_is_missing(machine, labels, expected):
    found = examined("auto", labels, machine=machine, api=Denied)
    assert [(id, severity) for id, severity, _text in found] == [("node-software", "note")] * len(expected)
    for (_id, _severity, text), begin in zip(found, expected, strict=True):
        assert text.startswith(begin + "whether NVIDIA's GPU Operator has it isn't known"), text
        assert "refuses this user to list clusterpolicies.nvidia.com (HTTP 403)" in text
        assert "the verbs get and list on clusterpolicies.nvidia.com" in text


@pytest.mark.parametrize("asked", ["roles", "gpu_operator", "provider"])
def test_what_is_asked_for_is_taken(asked):
    assert decided(asked, OWNED, policy()) == (asked, "requested")


def test_an_operator_of_ours_is_known_by_its_namespace_and_not_by_a_nodes_label():
    assert read("auto", {"kubegpu.share/backend": "gpu_operator"})["backends"]["software"]["ours"] is False
    assert read("auto", {}, namespace())["backends"]["software"]["ours"] is True


@pytest.mark.parametrize(
    ("asked", "objects", "expected"),
    [
        # Somebody's operator has the node.
        ("auto", (policy(),), False),
        ("auto", (policy(), namespace()), True),
        ("gpu_operator", (), True),
        ("roles", (namespace(),), False),
    ],
)
def test_a_run_installs_the_operator_where_it_is_asked_for_or_ours(asked, objects, expected):
    assert read(asked, OWNED, *objects)["backends"]["software"]["installs"] is expected


SOFTWARE = {"kubegpu.share/node-software": "gpu_operator"}


@pytest.mark.parametrize(
    ("asked", "others", "leaving", "unused", "expected"),
    [
        ("provider", (), ["gpu1"], True, ["gpu-operator-unused"]),
        # A node that nobody has named has it, too.
        ("provider", (node("gpu2", labels=SOFTWARE),), ["gpu1"], False, []),
        ("gpu_operator", (), [], False, []),
    ],
)
def test_an_operator_of_ours_that_no_node_needs_is_said(asked, others, leaving, unused, expected):
    given = (asked, SOFTWARE, namespace(), *others)
    software = read(*given)["backends"]["software"]
    assert (software["leaving"], software["unused"]) == (leaving, unused)
    assert [id for id, _severity, _text in examined(*given)] == expected


def test_a_node_that_leaves_an_operator_of_ours_is_said_with_its_driver():
    result = read("provider", SOFTWARE, namespace())
    software = {**result["backends"]["software"], "installs": True, "unused": False}
    [finding] = subject.examine(software, cluster_of(result), {}, False, False)
    assert finding.id == "software-leaving" and "labels them nvidia.com/gpu.deploy.operands=false" in finding.text


def test_a_node_that_is_left_out_has_no_software():
    found = read("auto", alone=("gpu2",))
    assert found["backends"]["software"]["roles"] == ["gpu1"], "it is in the cluster"


def test_hosts_have_their_own_variable_and_other_nodes_the_usual_one():
    hostvars = {"h1": {"gpu_node_software": "provider", "gpu_node_name": "n1"}, "h2": {}}
    rows = wanted_software(hostvars, ["h1", "h2"], "n1, n3", "gpu_operator")
    assert [(row["node"], row["software"], row["machine"]) for row in rows] == [
        ("n1", "provider", True),
        ("h2", "gpu_operator", True),
        ("n3", "gpu_operator", False),
    ]
    assert wanted_software({}, [], ["n"])[0]["software"] == "auto"


def examined(*given, machine=True, known=None, external=False, host_driver=False, **more):
    result = read(*given, machine=machine, **more)
    about = {"gpu1": known} if known else {}
    findings = subject.examine(result["backends"]["software"], cluster_of(result), about, external, host_driver)
    return [(finding.id, finding.severity, finding.text) for finding in findings]


OWN_DRIVER = gpu_node(driver__module_version="580.95.05", driver__others=["runfile"])
CONTAINERS = gpu_node(driver__module_version="580.95.05", driver__others=["gpu-operator"])


@pytest.mark.parametrize(
    ("given", "more", "expected"),
    [
        (("auto", {}), {}, []),
        (("auto", OWNED, policy()), {}, [("node-software", "NVIDIA's GPU Operator has to install")]),
        (("auto", {}), {"machine": False}, [("node-software", "the node's provider has to install")]),
        (("roles", OWNED, policy()), {}, [("software-owned", "has driver and toolkit of the node (ClusterPolicy p)")]),
        (("roles", {}), {"machine": False}, [("software-no-login", "no host of the group gpu_nodes")]),
        (("gpu_operator", {}), {"known": OWN_DRIVER}, [("software-host-driver", "a driver of its own (580.95.05)")]),
        (("gpu_operator", {}), {"known": OWN_DRIVER, "host_driver": True}, []),
        (("gpu_operator", {}), {"known": CONTAINERS}, []),
        (("gpu_operator", {OPERANDS: "false"}), {}, [("software-kept-away", "runs nothing there")]),
        # This collection's own label, which the run changes.
        (("gpu_operator", {OPERANDS: "false"}, namespace()), {}, []),
        (("gpu_operator", {}), {"external": True}, [("gpu-operator-missing", "has no ClusterPolicy")]),
        (("gpu_operator", OWNED, policy()), {"external": True}, []),
    ],
)
def test_findings(given, more, expected):
    found = examined(*given, **more)
    assert [one[0] for one in found] == [one[0] for one in expected]
    for (_id, severity, text), (_expected, words) in zip(found, expected, strict=True):
        assert words in text and severity == ("note" if _expected == "node-software" else "problem")


@pytest.mark.parametrize(("asked", "plans"), [("auto", 1), ("gpu_operator", 0), ("provider", 0)])
def test_what_roles_would_refuse_doesnt_matter_where_they_install_nothing(asked, plans):
    result = read(asked)
    plan = subject.Finding("driver-refused", subject.PROBLEM, "{reason}", host="gpu1", fields={"reason": "no"})
    host = Host("gpu1", "gpu1", "gpu_nodes", gpu_node(toolkit__operator=True), NodeOptions(), (plan,))
    claims = Claims(backends=result["backends"], software=result["backends"]["software"])
    options = Options(claims=claims, image_delivery="registry", memory_limit="off")
    ids = [finding.id for finding in examine_all(options, cluster_of(result), [host])]
    assert ids.count("driver-refused") == plans and ids.count("toolkit-gpu-operator") == plans
