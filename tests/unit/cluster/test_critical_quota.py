# SPDX-License-Identifier: GPL-3.0-or-later
"""A real API server that allows pods of system priorities only where a quota covers them, as GKE's does.

https://kubernetes.io/docs/concepts/policy/resource-quotas/#limit-priority-class-consumption-by-default
"""

from __future__ import annotations

import json
import typing as t
from collections.abc import Iterator

import pytest
import role_templates
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.client import is_transient
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.result import StepRunner
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import refused
from dedicated_kit import rendered as of_scheduler
from gpushare_objects import rendered
from own_cluster import until
from real_apiserver import MERGE, ApiServer, own_api_server
from test_openshift_templates import rendered as of_openshift

CRITICAL = ["system-node-critical", "system-cluster-critical"]
MEMORY = "aliyun.com/gpu-mem"
CONFIGURATION = {
    "apiVersion": "apiserver.config.k8s.io/v1",
    "kind": "AdmissionConfiguration",
    "plugins": [
        {
            "name": "ResourceQuota",
            "configuration": {
                "apiVersion": "apiserver.config.k8s.io/v1",
                "kind": "ResourceQuotaConfiguration",
                "limitedResources": [
                    {
                        "resource": "pods",
                        "matchScopes": [{"scopeName": "PriorityClass", "operator": "In", "values": CRITICAL}],
                    },
                    # Nor a share of a card, where no quota allows it.
                    {"resource": "pods", "matchContains": [f"requests.{MEMORY}"]},
                ],
            },
        }
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    path = tmp_path_factory.mktemp("admission") / "admission.yaml"
    path.write_text(yaml.safe_dump(CONFIGURATION))
    with own_api_server(f"--admission-control-config-file={path}") as started:
        yield started


def of_role(role: str) -> list[t.Any]:
    """The namespace and the quota of a chart's role, and pods of both priorities, as its chart has them."""
    given = {**role_templates.defaults(role), **role_templates.variables_of(role, "vars")}
    namespace = given[f"{role}_namespace"]
    made: list[t.Any] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}]
    made += role_templates.objects(role, "quota", **given)
    for name in CRITICAL:
        spec = {"priorityClassName": name, "containers": [{"name": "c", "image": "i"}]}
        template = {"metadata": {"labels": {"app": name}}, "spec": spec}
        metadata = {"name": name, "namespace": namespace}
        made.append({"kind": "DaemonSet", "metadata": metadata, "spec": {"template": template}})
    return made


WORKLOADS = {
    "extender": lambda: rendered("namespace", "extender"),
    "extender_upstream": lambda: rendered("namespace", "extender_upstream", gpushare_extender_image="i"),
    "device_plugin": lambda: rendered("namespace", "device_plugin"),
    "device_plugin_upstream": lambda: rendered("namespace", "device_plugin_upstream", gpushare_device_plugin_image="i"),
    "dra": lambda: rendered("namespace", "dra", __gpushare_allocation="dra"),
    "dedicated": lambda: of_scheduler(),
    "openshift": lambda: [*of_openshift("gpushare_namespace"), *of_openshift("openshift/extender")],
    "hami": lambda: of_role("hami"),
    "nvidia": lambda: of_role("nvidia_device_plugin"),
}


def pods_of(objects: t.Iterable[t.Any]) -> Iterator[t.Any]:
    for one in objects:
        if one["kind"] in ("DaemonSet", "Deployment"):
            pod = one["spec"]["template"]
            place = {name: one["metadata"][name] for name in ("name", "namespace")}
            yield {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], **place}}


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_each_server_is_admitted_by_the_quota_that_comes_with_it(server: ApiServer, workload: str) -> None:
    objects = WORKLOADS[workload]()
    quotas = [one for one in objects if one["kind"] == "ResourceQuota"]
    spaces = {one["metadata"]["name"] for one in objects if one["kind"] == "Namespace"}
    for one in objects:
        if one["kind"] == "Namespace":
            metadata = {name: one["metadata"].get(name) for name in ("name", "labels")}
            server.apply({**one, "metadata": metadata})
    pods = list(pods_of(objects))
    assert pods and {one["metadata"]["namespace"] for one in pods} <= spaces
    for pod in pods:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods?dryRun=All"
        status, text = server.ask("POST", path, pod)
        # As for an error of its own.
        assert status == 500 and "insufficient quota to match these scopes" in text, text
        error = refused(status, "", text, server.url, "Pod x")
        assert error.admission and not is_transient(error)
    server.apply(*quotas)
    for quota in quotas:
        # There is no controller manager that counts.
        path = f"/api/v1/namespaces/{quota['metadata']['namespace']}/resourcequotas/{quota['metadata']['name']}"
        hard = quota["spec"]["hard"]
        server.request("PATCH", f"{path}/status", {"status": {"hard": hard, "used": {"pods": "0"}}}, MERGE)
        assert server.request("GET", path)["spec"]["hard"] == hard
    for pod in pods:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods?dryRun=All"
        until(lambda pod=pod, path=path: server.ask("POST", path, pod)[0] == 201)
    for quota in quotas:
        path = f"/api/v1/namespaces/{quota['metadata']['namespace']}/resourcequotas/{quota['metadata']['name']}"
        server.request("DELETE", path)


def test_a_users_pod_that_a_quota_refuses_is_told_as_that(server: ApiServer) -> None:
    """The API has the same status and reason for a missing right."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "w1"},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": {MEMORY: "1"}}}]},
    }
    status, text = server.ask("POST", "/api/v1/namespaces/default/pods", pod)
    error = refused(status, "Forbidden", text, server.url, "Pod default/w1")
    assert error.admission and error.reason == "Forbidden"
    assert str(error).startswith("Pod default/w1: the API server's admission refuses it: ")
    assert f"insufficient quota to consume: requests.{MEMORY}" in str(error) and not is_transient(error)
    runner = StepRunner()

    def fails() -> str:
        raise error

    runner.may_fail = False
    assert not runner.step("W1", fails)
    assert "quota" in runner.steps["W1"].what and "quota, LimitRange or policy" in runner.steps["W1"].do
    # And a right that the user lacks.
    status, text = server.ask("GET", "/api/v1/namespaces/default/pods/w1", user="nobody")
    error = refused(status, "Forbidden", text, server.url, "Pod default/w1")
    assert status == 403 and not error.admission and "its user lacks a permission" in str(error)
    assert json.loads(text)["reason"] == "Forbidden"
