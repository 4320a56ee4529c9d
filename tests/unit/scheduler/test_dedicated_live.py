# SPDX-License-Identifier: GPL-3.0-or-later
"""The dedicated scheduler's objects in a real API server, and its admission policy."""

from __future__ import annotations

import copy
import subprocess

import pytest
import yaml
from dedicated_kit import LEDGER, NAME, NAMESPACE, apply, one, rendered
from own_cluster import Guarded, until
from real_apiserver import MERGE, Refused, own_api_server
from real_scheduler import VERSIONS, complaint, release

MEMORY = "aliyun.com/gpu-mem"
STRATEGIC = "application/strategic-merge-patch+json"
LEASES = "leases.coordination.k8s.io"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{NAME}"


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started:
        apply(started, rendered())
        yield started


# --------------------------------------------------------------------------- the objects


@pytest.mark.parametrize(
    "variables",
    [
        {"scheduler_dedicated_nodes": ["gpu1", "gpu2"], "scheduler_dedicated_tolerations": [{"operator": "Exists"}]},
        {"scheduler_replicas": 1, "scheduler_dedicated_pull_secrets": ["one"]},
        {"scheduler_name": "cards", "scheduler_dedicated_admission": "warn"},
        {"server": "v1.31.1"},
        {"server": "v1.25.1"},
    ],
    ids=",".join,
)
def test_api_server_accepts_every_variant(server, variables):
    objects = rendered("namespace", "rights", "workload", **variables)
    server.apply(*objects, manager="kubegpu-share", dry_run=True)
    if variables.get("server", "v1.36.0") > "v1.30":
        server.apply(*rendered("policy", **variables), manager="kubegpu-share", dry_run=True)


def test_change_and_revert(server):
    assert apply(server, rendered(scheduler_replicas=3))["changed"]
    assert apply(server, rendered())["changed"]
    again = apply(server, rendered())
    assert not again["changed"] and {row["action"] for row in again["objects"]} == {"unchanged"}, again


def test_pods_fit_pod_security_restricted(server):
    quota = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas/{NAME}"
    assert server.request("GET", quota)["spec"]["hard"] == {"pods": "1G"}
    # There is no controller manager that counts.
    counted = {"status": {"hard": {"pods": "1G"}, "used": {"pods": "0"}}}
    server.request("PATCH", f"{quota}/status", counted, MERGE)
    pod = one(rendered("workload"), "Deployment")["spec"]["template"]
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"
    made = until(lambda: _accepted(server, pods, {**pod, "metadata": {**pod["metadata"], "name": "one"}}))
    assert made["spec"]["priority"] == 2000000000
    # A pod with more privileges is refused.
    worse = copy.deepcopy(pod)
    worse["metadata"]["name"] = "worse"
    worse["spec"]["containers"][1]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(Refused, match="restricted"):
        server.request("POST", pods, worse)


def _accepted(server, path, pod):
    try:
        return server.request("POST", path, pod)
    except Refused as error:
        # The quota's numbers reach the API server's admission after a moment.
        assert "status unknown for quota" in str(error)
        return None


# --------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize("version", [release(version) for version in VERSIONS])
def test_real_scheduler_reads_the_configuration(tmp_path, version):
    config = one(rendered("workload", server=f"v{version}.1"), "ConfigMap")["data"]["config.yaml"]
    assert complaint(config, tmp_path, version) == ""
    assert "schedulersName" in complaint(config.replace("schedulerName", "schedulersName"), tmp_path, version)


# --------------------------------------------------------------------------- the rights


# The verb, the resource with its group, the namespace and the name.
ALLOWED = [
    ("get", "nodes", "", ""),
    ("watch", "nodes", "", ""),
    ("list", "pods", "", ""),
    ("create", "pods/binding", "default", ""),
    ("create", "pods/eviction", "default", ""),
    ("patch", "pods/status", "default", ""),
    ("create", "events", "default", ""),
    ("patch", "events.events.k8s.io", "default", ""),
    ("write", "annotations.kubegpu.share", "", ""),
    ("get", "validatingadmissionpolicybindings.admissionregistration.k8s.io", "", "gpushare-annotations"),
    ("list", "persistentvolumeclaims", "", ""),
    ("list", "storageclasses.storage.k8s.io", "", ""),
    ("patch", "persistentvolumes", "", ""),
    ("update", "persistentvolumeclaims", "default", ""),
    ("list", "poddisruptionbudgets.policy", "", ""),
    ("list", "namespaces", "", ""),
    ("list", "resourceslices.resource.k8s.io", "", ""),
    ("create", "tokenreviews.authentication.k8s.io", "", ""),
    ("create", "subjectaccessreviews.authorization.k8s.io", "", ""),
    ("get", "configmaps", "kube-system", "extension-apiserver-authentication"),
    *[("create", LEASES, namespace, "") for namespace in (NAMESPACE, LEDGER)],
    *[(verb, LEASES, NAMESPACE, NAME) for verb in ("get", "update")],
    *[(verb, LEASES, LEDGER, "gpushare-ledger") for verb in ("get", "update")],
]
DENIED = [
    ("get", "secrets", NAMESPACE, ""),
    ("list", "secrets", "", ""),
    ("list", "configmaps", "kube-system", ""),
    ("get", "configmaps", NAMESPACE, ""),
    ("create", "pods", "default", ""),
    ("update", "pods", "default", ""),
    ("patch", "pods", "default", ""),
    ("create", "pods/exec", "default", ""),
    ("patch", "nodes", "", ""),
    ("patch", "nodes/status", "", ""),
    *[("update", LEASES, namespace, "another") for namespace in (NAMESPACE, LEDGER)],
    *[(verb, LEASES, LEDGER, "gpushare-ledger") for verb in ("list", "watch", "patch", "delete", "deletecollection")],
    ("update", LEASES, "kube-system", "gpushare-ledger"),
    ("delete", LEASES, NAMESPACE, NAME),
    ("update", LEASES, "kube-system", NAME),
    ("update", LEASES, "kube-node-lease", "gpu1"),
    ("create", "serviceaccounts/token", NAMESPACE, NAME),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io", "", ""),
    ("impersonate", "users", "", ""),
    ("patch", "validatingadmissionpolicies.admissionregistration.k8s.io", "", NAME),
]


@pytest.mark.parametrize(("asked", "answer"), [(each, True) for each in ALLOWED] + [(each, False) for each in DENIED])
def test_service_account_rights(server, asked, answer):
    verb, resource, namespace, name = asked
    plural, _dot, group = resource.partition(".")
    assert server.may(ACCOUNT, verb, plural, namespace, name, group) is answer


def test_other_service_accounts_have_no_rights(server):
    assert not server.may(f"system:serviceaccount:{NAMESPACE}:default", "list", "pods")


# --------------------------------------------------------------------------- the policy


def container(name="c", limits=None, requests=None, **more):
    resources = {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}
    return {"name": name, "image": "i", **({"resources": resources} if resources else {}), **more}


ONE = {MEMORY: "1"}
PLAIN = container("plain")
NOT_ITS_SCHEDULER = f"set spec.schedulerName to {NAME}"
NO_CARD = "use spec.nodeSelector in place of spec.nodeName"


def asks(amount, name="c", **more):
    return container(name, {MEMORY: amount}, **more)


def spec(*containers, **more):
    return {"containers": [*containers], **more}


# As many as the policy looks through.
FILLER = [container(f"c{number}", {"cpu": "1"}) for number in range(250)]
ADMITTED = {
    "no resources": spec(PLAIN),
    "empty resources": spec(container(resources={})),
    "other limits": spec(container(limits={"cpu": "1", "memory": "1Gi"})),
    "only other requests": spec(container(requests={"cpu": "100m"})),
    "another device": spec(container(limits={"nvidia.com/gpu": "1"})),
    "a name that begins alike": spec(container(limits={f"{MEMORY}-x": "1"})),
    "no units": spec(asks("0")),
    "no units in another spelling": spec(asks("0Gi")),
    "another scheduler and no memory": spec(PLAIN, schedulerName="other"),
    "ours and no memory": spec(PLAIN, schedulerName=NAME),
    "ours": spec(asks("1"), schedulerName=NAME),
    "ours, several containers": spec(PLAIN, asks("1", "a"), asks("1", "b"), schedulerName=NAME),
    "ours, init container": spec(PLAIN, schedulerName=NAME, initContainers=[asks("1", "i")]),
    "a node of its own and no memory": spec(PLAIN, nodeName="gpu1"),
    "many containers without": spec(*FILLER),
}
NOT_ITS_SCHEDULERS = {
    "limit": spec(asks("1")),
    "limit and request": spec(asks("1", requests=ONE)),
    "many units": spec(asks("16384")),
    "units in another spelling": spec(asks("1k")),
    "the second container": spec(PLAIN, asks("1", "a")),
    "init container": spec(PLAIN, initContainers=[asks("1", "i")]),
    "second init container": spec(PLAIN, initContainers=[container("h"), asks("1", "i")]),
    "sidecar": spec(PLAIN, initContainers=[asks("1", "i", restartPolicy="Always")]),
    "another scheduler": spec(asks("1"), schedulerName="other"),
    "the cluster's by name": spec(asks("1"), schedulerName="default-scheduler"),
    "a name that begins with ours": spec(asks("1"), schedulerName=f"{NAME}-2"),
    "held back by a gate": spec(asks("1"), schedulingGates=[{"name": "wait"}]),
    "many containers": spec(*FILLER[1:], asks("1", "last")),
}
# The pod's spec, and the refusal's message.
PODS = {
    **{case: (one, "") for case, one in ADMITTED.items()},
    **{case: (not_its_scheduler, NOT_ITS_SCHEDULER) for case, not_its_scheduler in NOT_ITS_SCHEDULERS.items()},
    "ours past it": (spec(asks("1"), schedulerName=NAME, nodeName="gpu1"), NO_CARD),
    "too many containers": (spec(*FILLER, PLAIN, schedulerName=NAME), "of more than 250 containers isn't searched for"),
}


@pytest.fixture(scope="module")
def guarded(server):
    """A namespace, when the policy has come into effect."""
    made = Guarded(server, server.namespace())
    made.until(403, LIMITED)
    return made


def pod(wanted, name="p", **metadata):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": wanted}


LIMITED = pod(PODS["limit"][0])


@pytest.mark.parametrize("case", PODS)
def test_policy_admits_or_refuses_pods(guarded, case):
    wanted, message = PODS[case]
    guarded.expect(pod(wanted), message)
    if message:
        text = guarded.ask(pod(wanted))[1]
        assert f"ValidatingAdmissionPolicy '{NAME}'" in text and MEMORY in text


@pytest.mark.long
def test_policy_v1beta1_behaves_like_v1_and_upgrades_to_it():
    """A kube-apiserver that behaves as 1.33 is the newest that serves v1beta1, and 1.36 the newest that can."""
    served = "--runtime-config=admissionregistration.k8s.io/v1beta1=true"
    with own_api_server("--emulated-version=1.33", served, release="1.36") as old:
        first = rendered("policy", server="v1.29.14")
        assert {each["apiVersion"] for each in first} == {"admissionregistration.k8s.io/v1beta1"}
        assert apply(old, first)["changed"] and not apply(old, first)["changed"]
        there = Guarded(old, "default")
        there.until(403, LIMITED)
        for wanted, message in PODS.values():
            there.expect(pod(wanted), message)
        # The cluster goes to 1.30.
        apply(old, rendered("policy"))
        assert not apply(old, rendered("policy"))["changed"]


def test_policy_warns_instead_of_refusing_on_request(server, guarded):
    try:
        assert apply(server, rendered("policy", scheduler_dedicated_admission="warn"))["changed"]
        guarded.until(201, LIMITED)
        assert NOT_ITS_SCHEDULER in guarded.warnings(LIMITED)
    finally:
        apply(server, rendered("policy"))
    guarded.until(403, LIMITED)


def test_policy_ignores_updates_of_existing_pods(server, guarded):
    """Existing pods are updated, bound and deleted as before."""
    path, kinds = guarded.pods, "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
    for plural in ("ybindings", "ies"):
        server.request("DELETE", f"{kinds}{plural}/{NAME}")
    until(lambda: server.ask("POST", path, pod(spec(asks("1")), "old"))[0] == 201)
    apply(server, rendered("policy"))
    guarded.until(403, LIMITED)
    labelled = server.request("PATCH", f"{path}/old", {"metadata": {"labels": {"a": "b"}}}, MERGE)
    assert labelled["metadata"]["labels"] == {"a": "b"}
    labelled["spec"]["activeDeadlineSeconds"] = 100
    server.request("PUT", f"{path}/old", labelled)
    server.request("PATCH", f"{path}/old/status", {"status": {"message": "fine"}}, MERGE)
    ephemeral = {"spec": {"ephemeralContainers": [{"name": "e", "image": "i"}]}}
    server.request("PATCH", f"{path}/old/ephemeralcontainers", ephemeral, STRATEGIC)
    binding = {"metadata": {"name": "old"}, "target": {"kind": "Node", "name": "gpu1"}}
    server.request("POST", f"{path}/old/binding", {"apiVersion": "v1", "kind": "Binding", **binding})
    server.request("DELETE", f"{path}/old")


def test_pods_can_not_request_memory_later(server, guarded):
    """Admission of new pods is sufficient."""
    path = guarded.pods
    server.request("POST", path, pod(spec(container()), "later"))
    more = {"containers": [{"name": "c", "resources": {"limits": ONE, "requests": ONE}}]}
    ephemeral = {"ephemeralContainers": [{"name": "e", "image": "i", "resources": {"limits": ONE}}]}
    changes = [("", more), ("/resize", more), ("/ephemeralcontainers", ephemeral), ("", {"schedulerName": "other"})]
    for place, change in changes:
        with pytest.raises(Refused):
            server.request("PATCH", f"{path}/later{place}", {"spec": change}, STRATEGIC)


def test_policy_admits_mirror_pods(server, guarded):
    """Static pods run already, so their cards must be counted."""
    mirror = {"kubernetes.io/config.mirror": "ab", "kubernetes.io/config.hash": "ab"}
    static = pod(spec(asks("1"), nodeName="gpu9"), "static-gpu9", annotations=mirror)
    as_node = server.kubeconfig_of("system:node:gpu9", ("system:nodes",))
    grant = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "nodes-of-the-tests"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node"},
        "subjects": [{"kind": "Group", "name": "system:nodes", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    server.apply(grant)
    done = subprocess.run(
        [server.programs["kubectl"], f"--kubeconfig={as_node}", "create", "-n", guarded.namespace, "--filename=-"],
        input=yaml.safe_dump(static),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    guarded.expect({**static, "metadata": {"name": "x"}}, NOT_ITS_SCHEDULER)
