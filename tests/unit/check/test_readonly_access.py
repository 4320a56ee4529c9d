# SPDX-License-Identifier: GPL-3.0-or-later
"""The read-only account on a real API server: its permissions, that verify.yml needs no others, and its kubeconfig."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import types
from urllib.parse import quote

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check import collect
from ansible_collections.kubegpu.share.plugins.module_utils._check.node_pods import NodePod
from ansible_collections.kubegpu.share.plugins.module_utils._check.servers import POLICIES as POLICY_KINDS
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import card_exclusion
from ansible_collections.kubegpu.share.plugins.module_utils._kube.apply_set import ensure
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect as cluster_info
from fake_kube import apply_options
from gpushare_objects import rendered
from own_cluster import controllers
from real_apiserver import MERGE, own_api_server
from verify_kit import ROOT, Stage

PLAYBOOK = ROOT / "playbooks" / "readonly_access.yml"
SPACE, ACCOUNT = "kube-system", "kubegpu-readonly"
REAL = ("cluster_info", "nvml_info", "kubelet_devices_info", "gpu_allocation_check")
ACCOUNTS = f"/api/v1/namespaces/{SPACE}/serviceaccounts"

OF_ACCOUNTS = ("gpushare-dra-driver", "gpushare-dra-templates")
CLAIMS = ("gpushare-claims", "gpushare-allocated-claims", "gpushare-slices", *OF_ACCOUNTS)
DEPLOYMENTS = ("gpushare-scheduler", "gpushare-extender", "gpushare-dra-templates", "secondary-scheduler")
POLICIES = ("gpushare-scheduler", *CLAIMS)
# Every right beyond what each account has, by namespace: group, resource, names, verbs.
EVERYWHERE = {
    ("", "nodes", (), ("list",)),
    ("", "pods", (), ("list",)),
    ("resource.k8s.io", "resourceslices", (), ("list",)),
    ("resource.k8s.io", "resourceclaims", (), ("list",)),
    ("resource.k8s.io", "resourceclaimtemplates", (), ("list",)),
    ("node.k8s.io", "runtimeclasses", (), ("list",)),
    ("resource.k8s.io", "deviceclasses", ("gpu.kubegpu.share",), ("get",)),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicies", ("gpushare-claims",), ("get",)),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings", ("gpushare-claims",), ("get",)),
    ("", "namespaces", ("gpushare-system",), ("get",)),
    ("apps", "daemonsets", ("gpushare-extender",), ("get",)),
    (
        "apps",
        "deployments",
        ("gpushare-scheduler", "gpushare-extender", "gpushare-dra-templates", "secondary-scheduler"),
        ("get",),
    ),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies", POLICIES, ("get",)),
    ("admissionregistration.k8s.io", "validatingadmissionpolicybindings", POLICIES, ("get",)),
    ("apiregistration.k8s.io", "apiservices", ("v1beta1.admissionregistration.k8s.io",), ("get",)),
    ("config.openshift.io", "clusterversions", ("version",), ("get",)),
    ("config.openshift.io", "schedulers", ("cluster",), ("get",)),
}
KUBE_SYSTEM = {("coordination.k8s.io", "leases", ("kube-scheduler",), ("get",)), ("", "configmaps", (), ("list",))}


class Cluster:
    def __init__(self, api, folder):
        self.api, self.stage = api, Stage(folder, REAL)
        self.kubeconfig = folder / "readonly.kubeconfig"

    def run(self, *words, **variables):
        """Run readonly_access.yml and return how many tasks reported a change."""
        given = {
            "gpu_kubeconfig": str(self.api.kubeconfig),
            # Relative to the working directory, not to the playbook.
            "readonly_access_kubeconfig": self.kubeconfig.name,
            **variables,
        }
        rc, text = self.stage.play(*words, playbook=PLAYBOOK, **given)
        assert rc == 0, text
        written = "state=absent" not in " ".join(words) and "--check" not in words
        assert (f"The kubeconfig is {self.kubeconfig}, with a token that expires at 2" in text) is written, text
        return int(text.rpartition("changed=")[2].split()[0])

    def written(self):
        return json.loads(self.kubeconfig.read_text())

    def ask(self, method, path, body=None, token=""):
        """A request with a token, and with nothing else."""
        context = ssl.create_default_context()
        # The client that reads the kubeconfig checks the certificate.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(self.api.url.partition("//")[2], context=context, timeout=30)
        try:
            token = token or self.written()["users"][0]["user"]["token"]
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def rules(self, namespace, token=""):
        """Every right in a namespace, as SelfSubjectRulesReview lists them."""
        review = {"kind": "SelfSubjectRulesReview", "apiVersion": "authorization.k8s.io/v1"}
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        status, answer = self.ask("POST", path, {**review, "spec": {"namespace": namespace}}, token)
        assert status == 201 and not answer["status"]["incomplete"], answer
        return {
            (group, resource, tuple(rule.get("resourceNames") or ()), tuple(rule["verbs"]))
            for rule in answer["status"]["resourceRules"]
            for group in rule.get("apiGroups") or [""]
            for resource in rule["resources"]
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with own_api_server() as api:
        made = Cluster(api, tmp_path_factory.mktemp("readonly_access"))
        assert made.run("--check") == 2 and not made.kubeconfig.exists()
        assert api.ask("GET", f"{ACCOUNTS}/{ACCOUNT}")[0] == 404
        assert made.run() == 2
        yield made


def test_the_account_has_exactly_the_needed_rights(cluster):
    cluster.api.request("POST", ACCOUNTS, {"metadata": {"name": "anybody"}})
    token = cluster.api.request(
        "POST", f"{ACCOUNTS}/anybody/token", {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1"}
    )["status"]["token"]
    for namespace, rights in (("default", EVERYWHERE), (SPACE, EVERYWHERE | KUBE_SYSTEM)):
        assert cluster.rules(namespace) - cluster.rules(namespace, token) == rights
    # The API refuses accordingly.
    claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    assert cluster.ask("GET", claims)[0] == 200
    assert cluster.ask("DELETE", claims)[0] == 403 and cluster.ask("GET", f"{claims}/c")[0] == 403
    for path in ("/api/v1/secrets", "/api/v1/namespaces/default/configmaps", "/api/v1/namespaces"):
        assert cluster.ask("GET", path)[0] == 403, path
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    assert cluster.ask("POST", "/api/v1/namespaces/default/pods", pod)[0] == 403
    assert cluster.ask("POST", f"{ACCOUNTS}/{ACCOUNT}/token", {"kind": "TokenRequest"})[0] == 403
    assert cluster.ask("GET", "/api/v1/pods?limit=1")[0] == 200


def test_the_kubeconfig_is_private_and_a_second_run_changes_nothing(cluster):
    before = cluster.kubeconfig.read_text()
    assert cluster.kubeconfig.stat().st_mode & 0o777 == 0o600
    assert cluster.run() == 0 and cluster.kubeconfig.read_text() == before


def test_verify_needs_no_other_rights(cluster):
    """In both kinds of cluster: a scheduler of its own with the objects that guard it, and one on a machine."""
    api, stage = cluster.api, cluster.stage
    api.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu1", "labels": {"gpushare": "true"}}})
    # As upstream's plugin announces it, so that kube-system's ConfigMaps are read too.
    amounts = {"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1"}
    api.request("PATCH", "/api/v1/nodes/gpu1/status", {"status": {"capacity": amounts, "allocatable": amounts}}, MERGE)
    api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "gpushare-system"}})
    kube = RealKube.of_module(
        types.SimpleNamespace(params={"kubeconfig": str(cluster.kubeconfig)}, no_log_values=set())
    )
    namespaces = {"namespace": "gpushare-system", "dedicated_namespace": "gpushare-scheduler"}
    options = {"mode": "auto", "hosts": {}, "state": "present", **namespaces}
    found = cluster_info(kube, {"memory_unit": None, "scheduler": options})
    assert found["scheduler"]["mode"] == "dedicated"
    servers = {"control_plane": [], "scheduler": "dedicated", "admission": "deny", "problem": ""}
    given = {key: argument.get("default") for key, argument in collect.ARGUMENTS.items()}
    given.update(scope="servers", servers={**servers, "namespace": "gpushare-system"})
    findings = collect.check(kube, given)["report"]["findings"]
    assert not [finding for finding in findings if "may not" in finding["what"]], findings
    assert ("S3", "missing") in {(finding["check"], finding["cause"]) for finding in findings}, findings

    labels = {"component": "kube-scheduler"}
    metadata = {"name": "kube-scheduler-gpu1", "labels": labels, "annotations": {"kubernetes.io/config.mirror": "x"}}
    spec = {"nodeName": "gpu1", "containers": [{"name": "kube-scheduler", "image": "k:v1", "command": ["k"]}]}
    api.request("POST", f"/api/v1/namespaces/{SPACE}/pods", {"metadata": metadata, "spec": spec})
    path = stage.folder / "report.json"
    rc, text = stage.play(
        *("-e", "verify_grace=0", "-e", f"verify_json={path}", "-e", f"gpu_kubeconfig={cluster.kubeconfig}"),
        hosts={"gpu_nodes": {"gpu1": {}}, "control_plane": {"gpu1": {}}},
        verify_kubelet_root=str(stage.folder / "kubelet"),
    )
    assert "scheduler_mode is static_pod" in text, text
    report = json.loads(path.read_text())
    words = [f"{finding['what']} {finding['evidence']}" for finding in report["findings"]]
    assert not [word for word in words if "may not" in word or "orbidden" in word or "403" in word], words
    assert not [word for word in words if "couldn't be queried" in word], words
    # The servers aren't there, and each check was made.
    assert rc == 2 and {check["result"] for check in report["checks"] if check["id"] == "S1"} == {"FAIL"}, text
    assert [node["name"] for node in report["nodes"]] == ["gpu1"]


def test_verify_of_claims_needs_no_other_rights(cluster, request):
    """The objects of site.yml, applied by its module; kube-scheduler and kubelet are played by the administrator."""
    api = cluster.api
    admin, reader = (
        RealKube.of_module(types.SimpleNamespace(params={"kubeconfig": str(path)}, no_log_values=set()))
        for path in (api.kubeconfig, cluster.kubeconfig)
    )
    # A node of claims; the other one is the extender's.
    api.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu2", "labels": {"gpushare": "dra"}}})
    request.addfinalizer(lambda: api.request("DELETE", "/api/v1/nodes/gpu2"))
    wanted = {f"{kind}{suffix}" for kind, _name in POLICY_KINDS for suffix in ("", "Binding")} | {"DeviceClass"}
    objects = [one for one in rendered("dra", "dra_admission") if one["kind"] in wanted]
    ensure(admin, apply_options(objects), False)
    servers = {"control_plane": [], "scheduler": "static_pod", "admission": "deny"}
    given = {key: argument.get("default") for key, argument in collect.ARGUMENTS.items()}
    given["scope"] = "servers"
    given["servers"] = {**servers, "problem": "", "namespace": "gpushare-system"}

    def found():
        report = collect.check(reader, given)["report"]
        assert not [
            finding for finding in report["findings"] if "may not" in finding["what"] or "orbidden" in finding["what"]
        ], report
        (check,) = [one for one in report["checks"] if one["id"] == "D10"]
        return check["n"], [
            (finding["cause"], finding["key"]) for finding in report["findings"] if finding["check"] == "D10"
        ]

    assert found() == (13, [])
    # Nodes, pods, slices, claims and templates, what turns pods into claims, and the templates' Deployment.
    reader.requests.clear()
    found()
    assert reader.requests == {"GET": 5 + 13 + 1}

    path = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies/gpushare-claims"
    live = api.request("GET", path)
    live["spec"]["failurePolicy"] = "Ignore"
    api.request("PUT", path, live)
    assert found() == (13, [("changed", "MutatingAdmissionPolicy gpushare-claims")])
    ensure(admin, apply_options(objects), False)
    assert found() == (13, [])
    # A field that somebody adds, and a binding that denies no more.
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/gpushare-claims"
    live = api.request("GET", path)
    live["spec"]["validationActions"] = ["Audit"]
    api.request("PUT", path, live)
    api.request("DELETE", "/apis/resource.k8s.io/v1/deviceclasses/gpu.kubegpu.share")
    causes = {cause for cause, _key in found()[1]}
    assert causes == {"changed", "other_action", "missing"}


EXEC = "/api/v1/namespaces/gpushare-system/pods/plugin/exec"
FACTS = "container=device-plugin&command=gpushare-node-facts"


@pytest.fixture
def asker(cluster):
    """The token of an account that may ask the servers' pods, of which there is one on a node without kubelet."""
    names = [each["metadata"]["name"] for each in cluster.api.request("GET", "/api/v1/namespaces")["items"]]
    if "gpushare-system" not in names:
        cluster.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "gpushare-system"}})
    spec = {"nodeName": "nowhere", "containers": [{"name": "device-plugin", "image": "i"}]}
    cluster.api.request(
        "POST", "/api/v1/namespaces/gpushare-system/pods", {"metadata": {"name": "plugin"}, "spec": spec}
    )
    given = {"readonly_access_name": "kubegpu-asker", "readonly_access_kubeconfig": "asker.kubeconfig"}
    cluster.kubeconfig, before = cluster.stage.folder / "asker.kubeconfig", cluster.kubeconfig
    try:
        assert cluster.run(**given, readonly_access_ask_pods=True) == 3
        yield cluster.written()["users"][0]["user"]["token"]
        # The right goes with the variable.
        assert cluster.run(**given) == 1
        assert cluster.run("-e", "readonly_access_state=absent", **given) == 2
    finally:
        cluster.kubeconfig = before


def test_the_account_runs_one_command_only(cluster, asker):
    refused = "this account may run gpushare-node-facts in gpushare's device plugins and DRA drivers only"

    def asked(query, path=EXEC):
        for method in ("GET", "POST"):
            status, answer = cluster.ask(method, f"{path}?{query}", token=asker)
            yield status, refused in answer["message"]

    # The policy is in effect within a moment.
    end = time.monotonic() + 30
    while set(asked("container=device-plugin&command=sh")) != {(403, True)} and time.monotonic() < end:
        time.sleep(0.2)
    for query in (
        "container=device-plugin&command=sh",
        "container=device-plugin&command=sh&command=gpushare-node-facts",
        "container=metrics&command=gpushare-node-facts",
        "command=gpushare-node-facts",
        f"{FACTS}&stdin=true",
        f"{FACTS}&tty=true&stdout=true",
        # And with the options that verify gives it, each as it writes them.
        *(f"{FACTS}&command={quote(word)}" for word in ("gpushare-node-facts", "sh", "--help", "--node-name=other")),
        *(f"{FACTS}&command={quote(word)}" for word in ("--kubelet-dir=/a/../b", "--kubelet-dir=a", "--timeout=1\nx")),
        *(f"{FACTS}&command={quote(word)}" for word in ('--exclude-cards={"cards":["\\u001b"],"nodes":["n"]}',)),
        FACTS + "&command=--host-pid" * 8,
    ):
        assert set(asked(query)) == {(403, True)}, query
    # It passes, and the pod's node isn't found.
    kubelets = ("gpushare-device-plugin", "--kubelet-dir=/var/lib/k0s/kubelet")
    cards = card_exclusion.Exclusion(
        ("gpu-5a4d7f2e-1f0b-4a6e-9a51-2f8f3a0c6b11", "0000:3b:00.0", "nvidia a100 (80gb)?")
    )
    excluded = tuple(f"--exclude-cards={value}" for value in card_exclusion.options({"gpu1": cards}))
    pod = NodePod("gpu1", "n", "p", "gpushare-device-plugin", "u", True, (*kubelets, *excluded))
    words = pod.argv(600)
    assert len(words) == 5
    given = "&".join(f"command={quote(word)}" for word in words)
    for query in (f"{FACTS}&stdout=true&stderr=true", f"container=device-plugin&{given}&stdout=true"):
        assert {status for status, _refused in asked(query)} == {404}, query
    elsewhere = EXEC.replace("gpushare-system", "kube-system")
    assert {status for status, _refused in asked(FACTS, elsewhere)} == {403}
    for part in ("attach", "portforward", "proxy", "log"):
        assert {status for status, _refused in asked("", EXEC.replace("/exec", f"/{part}"))} == {403}, part
    sets = "/apis/apps/v1/namespaces/gpushare-system/daemonsets"
    assert cluster.ask("GET", f"{sets}/gpushare-device-plugin", token=asker)[0] == 404
    assert cluster.ask("GET", f"{sets}/another", token=asker)[0] == 403


def test_removal_deletes_the_account_and_its_rights(cluster):
    token = cluster.written()["users"][0]["user"]["token"]
    with controllers(cluster.api, "garbage-collector"):
        assert cluster.run("-e", "readonly_access_state=absent") == 2
        assert not cluster.kubeconfig.exists()
        # The API server remembers for some seconds what it accepted.
        end = time.monotonic() + 60
        while cluster.ask("GET", "/api/v1/nodes", token=token)[0] == 200 and time.monotonic() < end:
            time.sleep(0.5)
    assert cluster.ask("GET", "/api/v1/nodes", token=token)[0] in (401, 403)
    text = cluster.api.kubectl("get", "clusterrole,clusterrolebinding,role,rolebinding,sa", "-A", "-o=name").stdout
    assert ACCOUNT not in text
