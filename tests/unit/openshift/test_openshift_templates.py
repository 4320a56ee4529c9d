# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects of role scheduler on OpenShift, rendered by Ansible and validated by a real API server."""

from __future__ import annotations

import datetime
import functools

import pytest
import role_templates
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import certificates
from gpushare.extender import command
from real_apiserver import Refused
from role_templates import one

NAMESPACE = "gpushare-system"
SERVICE = f"gpushare-extender.{NAMESPACE}.svc"
CERTIFICATES = certificates.fitting([], [SERVICE], datetime.datetime.now(datetime.UTC))


def given(**variables):
    own = role_templates.defaults("gpushare")
    return {
        **own,
        **role_templates.variables_of("gpushare", "vars"),
        **role_templates.variables_of("scheduler", "vars"),
        "scheduler_state": "present",
        "scheduler_detection": {"mode": "openshift", "openshift": "4.20.3"},
        # As role scheduler takes them from role gpushare's.
        "scheduler_extender_image": own["gpushare_image"],
        "scheduler_extender_pull_secrets": own["gpushare_image_pull_secrets"],
        "scheduler_extender_placement": own["gpushare_placement"],
        "scheduler_extender_preemption": own["gpushare_preemption"],
        "scheduler_extender_log_format": own["gpushare_log_format"],
        "scheduler_extender_metrics": own["gpushare_extender_metrics"],
        "scheduler_extender_metrics_namespaces": own["gpushare_metrics_namespaces"],
        "gpushare_image_pull_policy": "IfNotPresent",
        "gpushare_openshift": True,
        "__gpushare_image_sha256": "",
        "__scheduler_certificates": CERTIFICATES,
        **variables,
    }


def rendered(name, role="scheduler", **variables):
    return role_templates.objects(role, name, **given(**variables))


@pytest.fixture(scope="session")
def applied(openshift):
    """All of it on the cluster."""
    objects = [*rendered("gpushare_namespace"), *rendered("openshift/access"), *rendered("openshift/extender")]
    openshift.apply(*objects, *rendered("openshift_dra", "gpushare"))
    return objects


def test_api_server_accepts_every_object(applied, openshift):
    kinds = {"SecurityContextConstraints", "NetworkPolicy", "Service", "Deployment"}
    assert {each["kind"] for each in applied} >= kinds
    # Unknown fields are refused, so that the test above can fail.
    broken = {**one(applied, "SecurityContextConstraints", "extender"), "allowHostNetworks": True}
    with pytest.raises(Refused, match="allowHostNetworks"):
        openshift.apply(broken)


def test_only_these_service_accounts_may_use_the_constraints(applied, openshift):
    pairs = (("extender", "device-plugin"), ("device-plugin", "extender"))
    for component, other in (*pairs, ("dra-driver", "dra-templates"), ("dra-templates", "dra-driver")):
        user = f"system:serviceaccount:{NAMESPACE}:gpushare-{component}"
        wanted = {"verb": "use", "resource": "securitycontextconstraints", "group": "security.openshift.io"}
        assert openshift.may(user, **wanted, namespace=NAMESPACE, name=f"gpushare-{component}")
        for namespace, name in (
            (NAMESPACE, f"gpushare-{other}"),
            (NAMESPACE, "privileged"),
            ("default", f"gpushare-{component}"),
        ):
            assert not openshift.may(user, **wanted, namespace=namespace, name=name)


def test_extender_rights_equal_those_of_role_gpushare(applied, openshift):
    elsewhere = rendered("extender", "gpushare")
    assert one(applied, "ClusterRole")["rules"] == one(elsewhere, "ClusterRole")["rules"]
    ledger = [each for each in applied if each["kind"] == "Role" and "scc" not in each["metadata"]["name"]]
    assert [each["rules"] for each in ledger] == [one(elsewhere, "Role")["rules"]]
    may = functools.partial(openshift.may, f"system:serviceaccount:{NAMESPACE}:gpushare-extender")
    assert may("create", "pods/binding", namespace="any") and may("watch", "nodes")
    assert may("update", "leases", NAMESPACE, "gpushare-ledger", "coordination.k8s.io")
    assert not may("update", "leases", "kube-system", "gpushare-ledger", "coordination.k8s.io")
    assert not may("delete", "pods", namespace="any") and not may("get", "secrets", namespace=NAMESPACE)


def allowed_by(constraints, pod):
    """Return the fields of a pod that these constraints don't allow, of those that our pods set."""
    wrong = []
    if pod.get("hostNetwork") and not constraints["allowHostNetwork"]:
        wrong.append("hostNetwork")
    user = pod["securityContext"].get("runAsUser")
    if constraints["runAsUser"]["type"] == "MustRunAs" and user != constraints["runAsUser"]["uid"]:
        wrong.append("runAsUser")
    profile = {"RuntimeDefault": "runtime/default"}.get(pod["securityContext"]["seccompProfile"]["type"])
    if profile not in constraints["seccompProfiles"]:
        wrong.append("seccompProfile")
    kinds = [next(key for key in volume if key != "name") for volume in pod["volumes"]]
    wrong += [kind for kind in kinds if kind not in constraints["volumes"]]
    if "hostPath" in kinds and not constraints["allowHostDirVolumePlugin"]:
        wrong.append("hostPath")
    for container in pod["containers"]:
        context = container["securityContext"]
        if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
            wrong.append("privileges")
        capabilities = context["capabilities"]
        more = set(capabilities.get("add", [])) - set(constraints["allowedCapabilities"])
        if more or not set(constraints["requiredDropCapabilities"]) <= set(capabilities["drop"]):
            wrong.append("capabilities")
        if constraints["readOnlyRootFilesystem"] and not context.get("readOnlyRootFilesystem"):
            wrong.append("readOnlyRootFilesystem")
        if any("hostPort" in port for port in container.get("ports", [])) and not constraints["allowHostPorts"]:
            wrong.append("hostPort")
    return wrong


@pytest.mark.parametrize(
    ("template", "kind", "component", "other"),
    [
        ("extender", "DaemonSet", "extender", "device-plugin"),
        ("device_plugin", "DaemonSet", "device-plugin", "extender"),
        ("dra", "DaemonSet", "dra-driver", "dra-templates"),
        ("dra", "Deployment", "dra-templates", ""),
    ],
)
@pytest.mark.parametrize("metrics", [False, True])
def test_constraints_allow_role_gpushares_pods_only(template, kind, component, other, metrics):
    of_all = [*rendered("openshift/access"), *rendered("openshift_dra", "gpushare")]
    constraints = one(of_all, "SecurityContextConstraints", component)
    given = {"gpushare_device_plugin_metrics": metrics, "gpushare_extender_metrics": metrics}
    pod = one(rendered(template, "gpushare", **given), kind)["spec"]["template"]["spec"]
    assert allowed_by(constraints, pod) == []
    if other:
        assert allowed_by(one(of_all, "SecurityContextConstraints", other), pod)
    assert not constraints["allowPrivilegedContainer"] and not constraints["allowHostPID"]
    named = {"gpushare_host_pid": True}
    of_all = [*rendered("openshift/access", **named), *rendered("openshift_dra", "gpushare", **named)]
    with_it = one(of_all, "SecurityContextConstraints", component)["allowHostPID"]
    assert with_it is (component in ("device-plugin", "dra-driver")), "by the variable only, and for the nodes' servers"
    assert constraints["priority"] == 0


def test_constraints_of_claims_allow_no_more_than_their_pods_have():
    of_all = rendered("openshift_dra", "gpushare")
    templates = one(of_all, "SecurityContextConstraints", "dra-templates")
    assert not any(value for name, value in templates.items() if name.startswith("allow")), templates
    assert (templates["runAsUser"], templates["readOnlyRootFilesystem"]) == ({"type": "MustRunAs", "uid": 65532}, True)
    driver = one(of_all, "SecurityContextConstraints", "dra-driver")
    assert [name for name, value in driver.items() if name.startswith("allow") and value] == [
        *("allowHostDirVolumePlugin", "allowedCapabilities")
    ]
    # No capability where none is needed, and another type of SELinux where its user names one.
    driver = one(
        rendered("openshift_dra", "gpushare", gpushare_device_plugin_capabilities=[], gpushare_selinux_type="super_t"),
        "SecurityContextConstraints",
        "dra-driver",
    )
    assert driver["allowedCapabilities"] == []
    assert driver["seLinuxContext"]["seLinuxOptions"] == {"type": "super_t", "level": "s0"}


def test_service_and_network_policy_select_the_extender():
    objects = rendered("openshift/extender")
    template = one(objects, "Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"]
    service, policy = one(objects, "Service")["spec"], one(objects, "NetworkPolicy")["spec"]
    assert service["selector"].items() <= labels.items() and service["type"] == "ClusterIP"
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    (peer, proof) = rule["from"]
    asking = one(rendered("openshift/proof"), "Pod")
    assert proof == {"podSelector": {"matchLabels": proof["podSelector"]["matchLabels"]}}
    assert proof["podSelector"]["matchLabels"].items() <= asking["metadata"]["labels"].items()
    assert asking["metadata"]["namespace"] == NAMESPACE
    # It has the scheduler's certificate, so it runs where the extender does; without a known control plane anywhere.
    control = [{"labels": {"node-role.kubernetes.io/master": ""}}]
    for nodes in (control, [{"labels": {}}]):
        known = {"hostvars": {"localhost": {"__scheduler_cluster_info": {"nodes": nodes}}}}
        where = one(rendered("openshift/proof", **known), "Pod")["spec"].get("affinity")
        there = one(rendered("openshift/extender", **known), "Deployment")["spec"]["template"]["spec"].get("affinity")
        assert where == there and bool(where) == (nodes is control)
    # It is none of the extender's own.
    assert not service["selector"].items() <= asking["metadata"]["labels"].items()
    namespace = {"kubernetes.io/metadata.name": "openshift-secondary-scheduler-operator"}
    assert peer["namespaceSelector"]["matchLabels"] == namespace
    assert peer["podSelector"]["matchLabels"] == {"app": "secondary-scheduler"}
    (container,) = template["spec"]["containers"]
    options = command.parse(container["command"][1:])
    assert (options.address, options.port) == ("::", contract.EXTENDER_PORT)
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "certificates"]
    (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "certificates"]
    secret = one(objects, "Secret", volume["secret"]["secretName"])
    for file in (options.tls_cert, options.tls_key, options.tls_client_ca):
        folder, _slash, key = str(file).rpartition("/")
        assert folder == mount["mountPath"] and key in secret["data"]
    # A client without a certificate gets no connection, so kubelet's probes have a socket.
    assert "exec" in container["livenessProbe"] and options.status_socket
    assert service["ports"][0]["port"] == rule["ports"][0]["port"] == contract.EXTENDER_PORT
    # restricted-v2 chooses the user.
    assert "runAsUser" not in template["spec"]["securityContext"] and not template["spec"].get("hostNetwork")
    # An extender of an OpenShift before 4.10 listens on its node's loopback address alone.
    old = one(rendered("extender", "gpushare"), "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    selectors = (service["selector"], policy["podSelector"]["matchLabels"])
    for selector in (*selectors, one(objects, "Deployment")["spec"]["selector"]["matchLabels"]):
        assert not selector.items() <= old.items()


@pytest.mark.parametrize("release", ["4.20.3", ""])
@pytest.mark.parametrize(
    "live", [{}, {"labels": {"team": "a", "app.kubernetes.io/part-of": "b"}}], ids=["new", "theirs"]
)
def test_both_roles_request_the_same_namespace(release, live):
    """Otherwise each would change it back."""
    chosen = {"mode": "dedicated", "openshift": release, "namespace": {"name": "cards", "metadata": live}}
    hosts = {"localhost": {"scheduler_detected": chosen}}
    more = given(gpushare_namespace="cards", scheduler_detection=chosen, hostvars=hosts)
    more["gpushare_openshift"] = role_templates.defaults("gpushare")["gpushare_openshift"]
    wanted = role_templates.value("scheduler", "__scheduler_namespace_definition", **more)
    assert wanted == role_templates.value("gpushare", "__gpushare_namespace_terms", **more)["definition"]
    assert wanted["metadata"]["name"] == "cards"
    sync = "security.openshift.io/scc.podSecurityLabelSync"
    assert wanted["metadata"]["labels"].get(sync) == ("false" if release else None)


def test_extender_fits_pod_security_restricted(openshift):
    """Beside the user, restricted-v2 requires the same as Kubernetes' own standard."""
    namespace = openshift.namespace("restricted", {"pod-security.kubernetes.io/enforce": "restricted"})
    pod = one(rendered("openshift/extender"), "Deployment")["spec"]["template"]
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    body = {"metadata": {"name": "extender"}, "spec": {**pod["spec"], "priorityClassName": ""}}
    openshift.request("POST", path, body)
    body["spec"] = {**body["spec"], "hostNetwork": True}
    with pytest.raises(Refused, match="violates PodSecurity"):
        openshift.request("POST", path, body)


def test_extender_replicas_and_session_affinity():
    objects = rendered("openshift/extender")
    deployment = one(objects, "Deployment")["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert one(objects, "PodDisruptionBudget")["spec"]["selector"] == deployment["selector"]
    assert one(objects, "Service")["spec"]["sessionAffinity"] == "ClientIP"


def test_foreign_certificates_are_not_written():
    assert len([each for each in rendered("openshift/extender") if each["kind"] == "Secret"]) == 2
    theirs = rendered("openshift/extender", __scheduler_certificates={**CERTIFICATES, "ours": False})
    assert [each for each in theirs if each["kind"] == "Secret"] == []
    assert one(theirs, "Deployment") == one(rendered("openshift/extender"), "Deployment")


@pytest.mark.parametrize(
    ("ours", "operators", "nodes", "state"),
    [
        (False, [], ["a", "b"], "present"),
        (True, ["b", "c", "d"], ["b", "d"], "present"),
        # The operator that this collection has installed sees none of gpushare's nodes.
        (True, ["c"], [], "absent"),
    ],
)
def test_an_operator_of_ours_is_told_of_its_own_nodes_alone(ours, operators, nodes, state):
    backends = {"extender": ["a"], "dra": ["b"], "hami": ["d"], "software": {"ours": ours, "gpu_operator": operators}}
    known = {**role_templates.variables_of("gpushare", "vars"), "gpushare_state": "present"}
    for hostvars, expected in (
        ({"localhost": {"gpu_backends": backends}}, (nodes, state)),
        ({"localhost": {}}, (["z"], "present")),
    ):
        known.update(hostvars=hostvars, gpushare_component_nodes=["z"])
        found = tuple(
            role_templates.value("gpushare", f"__gpushare_operators_{name}", **known) for name in ("nodes", "state")
        )
        assert found == expected
