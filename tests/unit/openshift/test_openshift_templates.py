# SPDX-License-Identifier: GPL-3.0-or-later
"""What role scheduler puts on OpenShift, rendered by Ansible and judged by a real API server with real definitions."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._objects import read
from gpushare import extender
from real_apiserver import Refused

ROLES = Path(__file__).resolve().parents[3] / "roles"
NAMESPACE = "gpushare-system"


def rendered(name, role="scheduler", **variables):
    own = yaml.safe_load((ROLES / "gpushare" / "defaults" / "main.yml").read_text())
    given = {
        **own,
        # As role scheduler takes them from role gpushare's.
        "scheduler_extender_namespace": own["gpushare_namespace"],
        "scheduler_extender_image": own["gpushare_image"],
        "scheduler_extender_pull_secrets": own["gpushare_image_pull_secrets"],
        "scheduler_extender_placement": own["gpushare_placement"],
        "scheduler_extender_log_format": own["gpushare_log_format"],
        "gpushare_image_pull_policy": "IfNotPresent",
        "gpushare_openshift": True,
        "__gpushare_archive_sha256": "",
        **variables,
    }
    text = (ROLES / role / "templates" / f"{name}.yml.j2").read_text()
    done = Templar(loader=DataLoader(), variables=given).template(trust_as_template(text))
    return read([done if isinstance(done, str) else yaml.safe_dump(done)])


def one(objects, kind, name=""):
    (found,) = [each for each in objects if each["kind"] == kind and name in each["metadata"]["name"]]
    return found


@pytest.fixture(scope="session")
def applied(openshift):
    """All of it on the cluster."""
    objects = [*rendered("openshift/namespace"), *rendered("openshift/access"), *rendered("openshift/extender")]
    openshift.apply(*objects)
    return objects


def test_the_api_server_takes_every_object(applied, openshift):
    assert {each["kind"] for each in applied} >= {
        "SecurityContextConstraints",
        "NetworkPolicy",
        "Service",
        "Deployment",
    }
    # And refuses what it doesn't know, so that the test above can fail.
    broken = {**one(applied, "SecurityContextConstraints", "extender"), "allowHostNetworks": True}
    with pytest.raises(Refused, match="allowHostNetworks"):
        openshift.apply(broken)


def test_only_these_service_accounts_may_use_the_constraints(applied, openshift):
    for component, other in (("extender", "device-plugin"), ("device-plugin", "extender")):
        user = f"system:serviceaccount:{NAMESPACE}:gpushare-{component}"
        wish = {"verb": "use", "resource": "securitycontextconstraints", "group": "security.openshift.io"}
        assert openshift.may(user, **wish, namespace=NAMESPACE, name=f"gpushare-{component}")
        for namespace, name in (
            (NAMESPACE, f"gpushare-{other}"),
            (NAMESPACE, "privileged"),
            ("default", f"gpushare-{component}"),
        ):
            assert not openshift.may(user, **wish, namespace=namespace, name=name)


def test_the_extender_has_the_rights_that_it_has_elsewhere(applied, openshift):
    assert one(applied, "ClusterRole")["rules"] == one(rendered("extender", "gpushare"), "ClusterRole")["rules"]
    user = f"system:serviceaccount:{NAMESPACE}:gpushare-extender"
    assert openshift.may(user, "create", "pods/binding", namespace="any")
    assert openshift.may(user, "watch", "nodes")
    assert not openshift.may(user, "delete", "pods", namespace="any")
    assert not openshift.may(user, "get", "secrets", namespace=NAMESPACE)


def allowed_by(constraints, pod):
    """What of a pod these constraints don't allow; the part of OpenShift's admission that our pods touch."""
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
        if not set(constraints["requiredDropCapabilities"]) <= set(context["capabilities"]["drop"]):
            wrong.append("capabilities")
        if constraints["readOnlyRootFilesystem"] and not context.get("readOnlyRootFilesystem"):
            wrong.append("readOnlyRootFilesystem")
        if any("hostPort" in port for port in container.get("ports", [])) and not constraints["allowHostPorts"]:
            wrong.append("hostPort")
    return wrong


@pytest.mark.parametrize(("template", "component"), [("extender", "extender"), ("device_plugin", "device-plugin")])
def test_the_constraints_allow_exactly_what_role_gpushares_pods_ask_for(template, component):
    constraints = one(rendered("openshift/access"), "SecurityContextConstraints", component)
    pod = one(rendered(template, "gpushare"), "DaemonSet")["spec"]["template"]["spec"]
    assert allowed_by(constraints, pod) == []
    other = {"extender": "device-plugin", "device-plugin": "extender"}[component]
    assert allowed_by(one(rendered("openshift/access"), "SecurityContextConstraints", other), pod)
    assert not constraints["allowPrivilegedContainer"] and not constraints["allowHostPID"]
    assert constraints["priority"] == 0


def test_the_service_finds_the_extender_and_only_the_scheduler_gets_through():
    objects = rendered("openshift/extender")
    template = one(objects, "Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"]
    service, policy = one(objects, "Service")["spec"], one(objects, "NetworkPolicy")["spec"]
    assert service["selector"].items() <= labels.items() and service["type"] == "ClusterIP"
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "openshift-secondary-scheduler-operator"
    }
    assert peer["podSelector"]["matchLabels"] == {"app": "secondary-scheduler"}
    (container,) = template["spec"]["containers"]
    options = extender.parse(container["command"][1:])
    assert (options.address, options.port) == ("0.0.0.0", contract.EXTENDER_PORT)
    assert service["ports"][0]["port"] == rule["ports"][0]["port"] == contract.EXTENDER_PORT
    # restricted-v2 chooses the user.
    assert "runAsUser" not in template["spec"]["securityContext"] and not template["spec"].get("hostNetwork")


def test_the_service_finds_no_extender_beside_a_scheduler():
    """Such a one, of an OpenShift before 4.10, listens on its node's loopback address alone."""
    old = one(rendered("extender", "gpushare"), "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    objects = rendered("openshift/extender")
    selectors = (
        one(objects, "Service")["spec"]["selector"],
        one(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    )
    for selector in selectors:
        assert not selector.items() <= old.items()


def test_both_roles_want_the_same_of_the_namespace():
    """Otherwise each would change it back."""
    assert rendered("openshift/namespace") == rendered("namespace", "gpushare")


def test_the_restricted_standard_takes_the_extender(openshift):
    """What restricted-v2 asks for beside the user is what Kubernetes' own standard does."""
    namespace = openshift.namespace("restricted", {"pod-security.kubernetes.io/enforce": "restricted"})
    pod = one(rendered("openshift/extender"), "Deployment")["spec"]["template"]
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    body = {"metadata": {"name": "extender"}, "spec": {**pod["spec"], "priorityClassName": ""}}
    openshift.request("POST", path, body)
    body["spec"] = {**body["spec"], "hostNetwork": True}
    with pytest.raises(Refused, match="violates PodSecurity"):
        openshift.request("POST", path, body)
