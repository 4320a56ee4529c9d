# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks with gpushare_allocation: dra, by the real ansible-playbook on a real API server."""

from __future__ import annotations

import json

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.backends import RESTRICTED
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claim_templates import Shape
from claims_cluster import CARDS, GIVEN, PLAYBOOKS, Cluster, words_of
from dra_objects import claim, slices_of, turned
from own_cluster import run_playbook, until
from real_apiserver import MERGE, own_api_server

DAEMON_SET = "/apis/apps/v1/namespaces/gpushare-system/daemonsets/gpushare-dra-driver"
NODE = "/api/v1/nodes/gpu1"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
SYSTEM = "/api/v1/namespaces/gpushare-system"


def role(cluster, folder, state="present", component="dra", **more):
    given = {"gpushare_component": component, "gpushare_state": state, "gpu_kubeconfig": str(cluster.server.kubeconfig)}
    play = {"hosts": "localhost", "gather_facts": False, "roles": [{"role": "kubegpu.share.gpushare", **given}]}
    return run_playbook(folder, [play], **{**GIVEN, **more})


def selector(cluster):
    return cluster.server.request("GET", DAEMON_SET)["spec"]["template"]["spec"]["nodeSelector"]


def refusing(server, kind):
    """Have the API server refuse changes of a kind's objects, as where a run is killed before them."""
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": [kind]}
    name = {"name": "refuses"}
    spec = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "false", "message": "not now"}],
    }
    server.request("POST", f"{POLICIES}ies", {"metadata": name, "spec": spec})
    spec = {"policyName": "refuses", "validationActions": ["Deny"]}
    server.request("POST", f"{POLICIES}ybindings", {"metadata": name, "spec": spec})
    patch = {"metadata": {"labels": {"x": "y"}}}
    until(lambda: server.ask("PATCH", f"{DAEMON_SET}?dryRun=All", patch, MERGE)[0] >= 400)


def test_the_nodes_have_the_label_before_the_daemon_set_selects_by_it(cluster, tmp_path):
    """And the role removes it all again; an earlier version selected nodes by the label that kubelet may set."""
    server = cluster.server
    done = role(cluster, tmp_path)
    assert done.rc == 0 and done.changed, done.text
    without = {"spec": {"template": {"spec": {"nodeSelector": {RESTRICTED: None}}}}}
    server.request("PATCH", DAEMON_SET, without, MERGE)
    server.request("PATCH", NODE, {"metadata": {"labels": {RESTRICTED: None}}}, MERGE)
    refusing(server, "daemonsets")
    try:
        ended = role(cluster, tmp_path)
        assert ended.rc != 0 and "not now" in ended.text, ended.text
        # Its pods stay, whatever the node has.
        assert cluster.labels() == {"gpushare": "dra", RESTRICTED: "dra"} and selector(cluster) == {"gpushare": "dra"}
    finally:
        for kind in ("ybindings", "ies"):
            server.request("DELETE", f"{POLICIES}{kind}/refuses")
    until(lambda: server.ask("PATCH", f"{DAEMON_SET}?dryRun=All", {"metadata": {}}, MERGE)[0] == 200)
    done = role(cluster, tmp_path)
    assert done.rc == 0 and done.changed, done.text
    assert selector(cluster) == {"gpushare": "dra", RESTRICTED: "dra"} == cluster.labels()
    assert cluster.named()["daemonsets"] == {"gpushare-dra-driver"} and not role(cluster, tmp_path).changed
    # Both leave with the node, by the part of role switch.
    gone = role(cluster, tmp_path, "absent", "node", gpushare_node_allocation="dra")
    assert gone.rc == 0 and cluster.labels() == {}, gone.text
    gone = role(cluster, tmp_path, "absent")
    assert gone.rc == 0 and gone.changed and cluster.named() == {}, gone.text
    until(lambda: server.ask("GET", SYSTEM)[0] == 404, 60)


def test_a_device_plugin_that_stays_on_its_node_is_named(cluster, tmp_path):
    server, labels = cluster.server, {"app.kubernetes.io/name": "gpushare-device-plugin"}
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "gpushare-system"}})
    spec = {
        "nodeName": "gpu1",
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "i"}],
    }
    server.request("POST", f"{SYSTEM}/pods", {"metadata": {"name": "stays", "labels": labels}, "spec": spec})
    try:
        more = {"gpushare_allocation": "extender", "gpushare_component_nodes": ["gpu1"], "gpushare_wait_timeout": 4}
        done = role(cluster, tmp_path, "absent", "node", **more)
    finally:
        server.request("DELETE", SYSTEM)
    said = "Node gpu1 has lost its label, and after 4 seconds still has stays of namespace gpushare-system."
    assert done.rc != 0 and said in words_of(done), done.text
    until(lambda: server.ask("GET", SYSTEM)[0] == 404, 60)


@pytest.mark.long
def test_the_plan_is_what_site_does_and_uninstall_removes_it_all(cluster, tmp_path):
    before = cluster.named()
    planned = cluster.play(tmp_path, "plan.yml", "-e", "plan_output=plan.json")
    assert planned.rc == 0 and planned.changed == 0, planned.text
    plan = json.loads((tmp_path / "plan.json").read_text())
    changes = [change for step in plan["cluster"]["steps"] for change in step["changes"]]
    assert {step["stage"] for step in plan["cluster"]["steps"]} == {"dra"}
    assert cluster.named() == before == {}

    done = cluster.play(tmp_path, "site.yml")
    assert done.rc == 0, done.text
    named = cluster.named()
    assert named["daemonsets"] == {"gpushare-dra-driver"} and named["deployments"] == {"gpushare-dra-templates"}
    assert named["mutatingadmissionpolicies"] == {"gpushare-claims"} and named["deviceclasses"] == {"gpu.kubegpu.share"}
    assert cluster.labels()["gpushare"] == "dra"
    for kind, name in (("DaemonSet", "dra-driver"), ("Deployment", "dra-templates")):
        assert any(kind in change and name in change for change in changes), changes
    # No extender, no scheduler, no device plugin was looked for or touched.
    for other in (
        "scheduler_mode is",
        "extender beside each scheduler, or remove",
        "Deploy the device plugin and wait",
    ):
        assert other not in done.text
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    pod["spec"]["containers"][0]["resources"] = {"limits": {"aliyun.com/gpu-mem": 4}}
    path = "/api/v1/namespaces/default/pods"
    turned = until(lambda: cluster.server.request("POST", f"{path}?dryRun=All", pod)["spec"].get("resourceClaims"))
    assert turned == [{"name": "gpu-mem", "resourceClaimTemplateName": "gpu-mem-4"}]

    again = cluster.play(tmp_path, "site.yml")
    assert again.rc == 0 and again.changed == 0, again.text
    assert "0 nodes" not in again.text

    # What the servers would have made.
    requests = [{"name": "gpu-0", "exactly": {"deviceClassName": "gpu.kubegpu.share"}}]
    ours = {"app.kubernetes.io/managed-by": "kubegpu.share"}
    for name, labels in (("gpu-mem-4", ours), ("theirs", {})):
        cluster.server.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": {"name": name, "namespace": "default", "labels": labels},
                "spec": {"spec": {"devices": {"requests": requests}}},
            }
        )
    summed = cluster.play(tmp_path, "site.yml")
    assert "1 node, 2 cards, 32 GiB shared; nothing changed; next: kubectl get resourceclaims" in words_of(summed)

    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "held", "namespace": "default"},
        "spec": {"devices": {"requests": requests}},
    }
    cluster.server.apply(claim)
    device = slices_of("gpu1", CARDS)[0]["spec"]["devices"][0]["name"]
    result = {"request": "gpu-0", "driver": "gpu.kubegpu.share", "pool": "gpu1", "device": device}
    status = {
        "allocation": {"devices": {"results": [{**result, "consumedCapacity": {"memory": "4Gi"}, "shareID": UID}]}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
    }
    at = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/held"
    cluster.server.request("PATCH", f"{at}/status", {"status": status}, MERGE)
    refused = cluster.play(tmp_path, "uninstall.yml")
    assert refused.rc != 0 and "Pods use a share of a card on gpu1: delete them first" in words_of(refused)
    cluster.server.request("PATCH", f"{at}/status", {"status": None}, MERGE)

    removed = cluster.play(tmp_path, "uninstall.yml")
    assert removed.rc == 0, removed.text
    assert cluster.named() == {} and "gpushare" not in cluster.labels()
    # kubelet would end its pods in a moment; the controller of namespaces looks again later.
    until(lambda: cluster.server.ask("GET", "/api/v1/namespaces/gpushare-system")[0] == 404, 180)
    assert cluster.server.request("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"] == []
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
    assert [item["metadata"]["name"] for item in cluster.server.request("GET", path)["items"]] == ["theirs"]
    assert cluster.play(tmp_path, "uninstall.yml").changed == 0


EXTENDER_ROLES = [
    {"role": "kubegpu.share.scheduler", "scheduler_step": "detect"},
    {"role": "kubegpu.share.gpushare", "gpushare_component": "device_plugin"},
]


GPU2 = "/api/v1/nodes/gpu2"


def amounts(server, memory, count):
    found = {"aliyun.com/gpu-mem": memory, "aliyun.com/gpu-count": count}
    server.request("PATCH", f"{GPU2}/status", {"status": {"capacity": found, "allocatable": found}}, MERGE)


@pytest.fixture
def gpu2(cluster):
    """A second node, whose cards the device plugin announces."""
    cluster.server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu2"}})
    amounts(cluster.server, "32", "2")
    yield
    cluster.server.request("DELETE", GPU2)


@pytest.mark.long
def test_the_extender_leaves_with_its_last_node_and_nothing_else_changes(cluster, gpu2, tmp_path):
    """One node has the extender, then none: the plan shows the steps, and site.yml makes exactly them."""
    connection = {"gpu_kubeconfig": str(cluster.server.kubeconfig)}
    mixed = {"gpushare_nodes": ["gpu1", "gpu2"], "groups": {"pool": {"gpu2": {"gpushare_allocation": "extender"}}}}

    # The extender's half as it is on gpu2; its scheduler isn't there yet.
    extender = {**GIVEN, **connection, "gpushare_nodes": ["gpu2"], "gpushare_allocation": "extender"}
    play = {"hosts": "localhost", "gather_facts": False, "roles": EXTENDER_ROLES}
    done = run_playbook(tmp_path, [play], **extender)
    assert done.rc == 0, done.text

    planned = cluster.play(tmp_path, "plan.yml", "-e", "plan_output=plan.json", **mixed)
    assert planned.rc == 0, planned.text
    steps = json.loads((tmp_path / "plan.json").read_text())["cluster"]["steps"]
    # The extender's step comes first: it gives gpu1 the label that no kubelet may set, and changes nothing else.
    assert {step["stage"] for step in steps} == {"cluster_scheduler", "device_plugin", "dra"}, steps
    assert [step["changes"] for step in steps if step["stage"] == "device_plugin"] == [["Node gpu1"]], steps
    done = run_playbook(
        tmp_path,
        [{"hosts": "localhost", "gather_facts": False, "tasks": DRA_TASKS}],
        **{**GIVEN, **connection, **mixed},
    )
    assert done.rc == 0, done.text
    assert (cluster.labels("gpu1")["gpushare"], cluster.labels("gpu2")["gpushare"]) == ("dra", "true")
    planned = cluster.play(tmp_path, "plan.yml", "-e", "plan_output=plan.json", **mixed)
    steps = json.loads((tmp_path / "plan.json").read_text())["cluster"]["steps"]
    assert {step["stage"] for step in steps} == {"cluster_scheduler"}, steps

    # gpu2 goes over; nobody announces its cards any more.
    amounts(cluster.server, "0", "0")
    cluster.server.request("PATCH", GPU2, {"metadata": {"labels": {"gpushare": None}}}, MERGE)
    both = {"gpushare_nodes": ["gpu1", "gpu2"]}
    planned = cluster.play(tmp_path, "plan.yml", "-e", "plan_output=plan.json", **both)
    assert planned.rc == 0, planned.text
    steps = json.loads((tmp_path / "plan.json").read_text())["cluster"]["steps"]
    assert {step["stage"] for step in steps} == {"dra", "leaving"}, steps
    done = cluster.play(tmp_path, "site.yml", **both)
    assert done.rc == 0, done.text
    named = cluster.named()
    assert (named["daemonsets"], named["deployments"]) == ({"gpushare-dra-driver"}, {"gpushare-dra-templates"})
    assert "gpushare-shares" in named["validatingadmissionpolicies"], "both allocations use it"
    assert "gpushare-annotations" not in named["validatingadmissionpolicies"]
    assert (cluster.labels("gpu1")["gpushare"], cluster.labels("gpu2")["gpushare"]) == ("dra", "dra")
    assert cluster.server.ask("GET", "/api/v1/namespaces/gpushare-system")[0] == 200
    assert cluster.server.ask("GET", "/api/v1/namespaces/gpushare-scheduler")[0] in (200, 404)
    again = cluster.play(tmp_path, "site.yml", **both)
    assert again.rc == 0 and again.changed == 0, again.text
    removed = cluster.play(tmp_path, "uninstall.yml", **both)
    assert removed.rc == 0 and cluster.named() == {}, removed.text


@pytest.mark.long
def test_of_both_allocations_each_is_verified_and_uninstall_removes_them_all(cluster, gpu2, tmp_path):
    """The variable is gpu2's, and localhost has none: what the nodes have decides."""
    connection = {"gpu_kubeconfig": str(cluster.server.kubeconfig)}
    both = {"gpushare_nodes": ["gpu1", "gpu2"], "groups": {"pool": {"gpu1": {"gpushare_allocation": "dra"}}}}
    given = {key: value for key, value in GIVEN.items() if key != "gpushare_allocation"}
    play = {"hosts": "localhost", "gather_facts": False, "tasks": DRA_TASKS}
    done = run_playbook(tmp_path, [play], **{**given, **connection, **both})
    assert done.rc == 0, done.text
    assert (cluster.labels("gpu1")["gpushare"], cluster.labels("gpu2")["gpushare"]) == ("dra", "true")

    words = ("-e", "verify_grace=0", "-e", f"verify_json={tmp_path / 'report.json'}")
    done = run_playbook(tmp_path, PLAYBOOKS / "verify.yml", *words, **{**given, **connection})
    report = json.loads((tmp_path / "report.json").read_text())
    compared = {check["id"]: check["n"] for check in report["checks"]}
    # The templates, the driver of gpu1 and the device plugin of gpu2; the extender was never deployed.
    assert compared["D10"] == 13 and compared["S4"] == 2 and compared["S1"] >= 3, (compared, done.text)
    missed = {(finding["check"], finding["cause"]) for finding in report["findings"] if finding["node"] == "gpu1"}
    assert not {("S4", "not_announced"), ("S4", "no_label")} & missed, report["findings"]

    done = run_playbook(tmp_path, PLAYBOOKS / "uninstall.yml", **{**given, **connection, **both})
    assert done.rc == 0 and cluster.named() == {}, done.text
    assert not {"gpushare"} & {*cluster.labels("gpu1"), *cluster.labels("gpu2")}


def test_the_namespace_stays_while_a_scheduler_needs_the_extender(tmp_path):
    """As uninstall.yml decides it for the role, which removes namespace and policies only where it is alone."""
    plays = yaml.safe_load((PLAYBOOKS / "uninstall.yml").read_text())
    [alone] = [role["gpushare_alone"] for play in plays for role in play.get("roles", []) if "gpushare_alone" in role]
    left = [{"mode": "static_pod"}]
    cases = {
        "claims alone": ({}, True),
        "the extender went": ({"scheduler_detected": {"mode": "static_pod", "leftovers": left}}, True),
        "dedicated": ({"scheduler_detected": {"mode": "dedicated", "leftovers": []}}, True),
        "dedicated, and another": ({"scheduler_detected": {"mode": "dedicated", "leftovers": left}}, False),
    }
    tasks = [
        {"name": name, "ansible.builtin.assert": {"that": ["alone == expected"]}, "vars": {**given, "alone": alone}}
        for name, (given, _expected) in cases.items()
    ]
    for task, (_given, expected) in zip(tasks, cases.values(), strict=True):
        task["vars"]["expected"] = expected
    done = run_playbook(tmp_path, [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}])
    assert done.rc == 0, done.text


DRA_TASKS = [
    {"ansible.builtin.import_role": {"name": "kubegpu.share.preflight", "tasks_from": "cluster"}},
    {"ansible.builtin.import_role": {"name": "kubegpu.share.gpushare"}, "vars": {"gpushare_component": "dra"}},
    {
        "ansible.builtin.import_role": {"name": "kubegpu.share.gpushare"},
        "vars": {"gpushare_component": "device_plugin"},
    },
]
UID = "4b0dd4a5-0001-4c0d-8000-000000000000"


@pytest.fixture
def used(cluster):
    """Two cards in a slice of the driver, of which a running pod has 4 GiB by a claim."""
    server, gone = cluster.server, []

    def make(path, body, status=None):
        made = server.request("POST", path, body)
        at = f"{path}/{made['metadata']['name']}"
        gone.append(at)
        return server.request("PATCH", f"{at}/status", {"status": status}, MERGE) if status else made

    def cleaned(made, **more):
        return {**made, "metadata": {"name": made["metadata"]["name"], **more}}

    server.request("PATCH", "/api/v1/nodes/gpu1", {"metadata": {"labels": {"gpushare": "dra"}}}, MERGE)
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    server.request("PATCH", "/api/v1/nodes/gpu1/status", {"status": {"conditions": [ready]}}, MERGE)
    for one in slices_of("gpu1", CARDS, limits="enforced"):
        make("/apis/resource.k8s.io/v1/resourceslices", cleaned(one))
    given, shape = turned(1, Shape((4,))), Shape((4,))
    pod = make("/api/v1/namespaces/default/pods", cleaned(given), given["status"])
    made = claim(1, shape, CARDS[1:], pods={"work-1": pod["metadata"]["uid"]})
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    make(path, cleaned(made, ownerReferences=made["metadata"]["ownerReferences"]), made["status"])
    yield
    for at in reversed(gone):
        body = {"gracePeriodSeconds": 0} if "/pods/" in at else None
        if "resourceclaims" in at:
            server.request("PATCH", f"{at}/status", {"status": None}, MERGE)
        server.request("DELETE", at, body)
    server.request("PATCH", "/api/v1/nodes/gpu1", {"metadata": {"labels": {"gpushare": None}}}, MERGE)


def test_inspect_prints_what_claims_hold(cluster, used, tmp_path):
    done = cluster.play(tmp_path, "inspect.yml")
    assert done.rc == 0 and done.changed == 0, done.text
    lines = [line.split() for line in done.text.splitlines()]
    assert ["GPU1", "[##........]", "4/16", "NVIDIA", "T4"] in lines, done.text
    assert ["default", "work-1", "Running", "0", "4"] in lines
    assert ["LIMIT:", "enforced"] in lines and "PROBLEM" not in done.text
    assert "Allocated/Total GPU memory by claims (GiB): 4/32 (12%)" in done.text


def test_verify_compares_claims_with_their_pods(cluster, used, tmp_path):
    """No machine can be observed here: what the API alone shows is checked, and the rest is unknown."""
    words = ("-e", "verify_grace=0", "-e", f"verify_json={tmp_path / 'report.json'}", "-e", "verify_servers=false")
    done = cluster.play(tmp_path, "verify.yml", *words)
    assert done.rc == 0 and "scheduler_mode is" not in done.text, done.text
    report = json.loads((tmp_path / "report.json").read_text())
    compared = {check["id"]: check["n"] for check in report["checks"] if check["backend"] == "dra" and check["n"]}
    assert {"D2": 1, "D3": 2, "D4": 1}.items() <= compared.items() and compared["D8"] >= 1
    (node,) = report["nodes"]
    assert (node["backend"], [card["claimed_mib"] for card in node["cards"]]) == ("dra", [0, 4096])


@pytest.mark.long
def test_preflight_names_the_gate_that_is_off(tmp_path):
    with own_api_server("--feature-gates=DRAConsumableCapacity=false") as server:
        done = Cluster(server).play(tmp_path, "preflight.yml")
    assert done.rc != 0
    assert "the feature gate DRAConsumableCapacity is off in kube-apiserver" in words_of(done), done.text
