# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects for Prometheus Operator fit what the roles deploy: pods, port, certificate and token."""

from __future__ import annotations

import re
from pathlib import Path

import dedicated_kit
import pytest
import yaml
from gpushare_objects import rendered
from real_apiserver import ApiServer, api_server  # noqa: F401  # pylint: disable=unused-import

FOLDER = Path(__file__).parents[3] / "images" / "gpushare"
ROLE = Path(__file__).parents[3] / "roles" / "gpushare"
FILES = ("monitors.yml", "monitors-dedicated.yml")


def objects(file):
    return yaml.safe_load((FOLDER / file).read_text())["items"]


def monitors(file):
    return {one["metadata"]["name"]: one for one in objects(file) if one["kind"] == "PodMonitor"}


def templates():
    """By the monitor's name, the pod's template with metrics served, and its namespace."""
    chosen = {"gpushare_extender_metrics": True, "gpushare_device_plugin_metrics": True}
    found = [one for name in ("extender", "device_plugin", "dra") for one in rendered(name, **chosen)]
    found += dedicated_kit.rendered("workload", scheduler_extender_metrics=True)
    workloads = {one["metadata"]["name"]: one for one in found if one["kind"] in ("DaemonSet", "Deployment")}
    # The server of claim templates listens on no port.
    assert workloads.pop("gpushare-dra-templates")
    return workloads


@pytest.mark.parametrize("file", FILES)
def test_each_monitor_selects_the_pods_their_port_and_their_certificate(file):
    deployed = templates()
    template = (ROLE / "templates" / "metrics.yml.j2").read_text()
    [certified] = re.findall(r"server_certificate\(\['(\S+)'\]\)", template)
    assert monitors(file)
    for name, monitor in monitors(file).items():
        workload = deployed[name]
        assert monitor["metadata"]["namespace"] == workload["metadata"]["namespace"]
        pod = workload["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        ports = [port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", ())]
        assert ports.count(endpoint["port"]) == 1 and endpoint["scheme"] == "https"
        [volume] = [one for one in pod["spec"]["volumes"] if one["name"] == "metrics-tls"]
        assert endpoint["tlsConfig"] == {
            "serverName": certified,
            "ca": {"secret": {"name": volume["secret"]["secretName"], "key": "ca.crt"}},
        }


def test_every_server_with_metrics_has_a_monitor():
    assert {name for file in FILES for name in monitors(file)} == set(templates())


@pytest.mark.parametrize("file", FILES)
def test_the_token_is_that_of_an_account_that_may_read_metrics_only(file, api_server: ApiServer):  # noqa: F811
    """On a real API server: the token controller isn't there, so the account's rights are asked for by its name."""
    own = [one for one in objects(file) if one["kind"] != "PodMonitor"]
    space = own[0]["metadata"]["namespace"]
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}}, *own)
    [account] = [one["metadata"]["name"] for one in own if one["kind"] == "ServiceAccount"]
    [secret] = [one for one in own if one["kind"] == "Secret"]
    assert secret["metadata"]["annotations"] == {"kubernetes.io/service-account.name": account}
    assert secret["type"] == "kubernetes.io/service-account-token"
    for monitor in monitors(file).values():
        wanted = {"credentials": {"name": secret["metadata"]["name"], "key": "token"}}
        assert monitor["spec"]["podMetricsEndpoints"][0]["authorization"] == wanted

    def allowed(**what):
        user = {"user": f"system:serviceaccount:{space}:{account}", "groups": ["system:serviceaccounts"]}
        review = {"spec": {**user, **what}}
        answer = api_server.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return answer["status"]["allowed"]

    assert allowed(nonResourceAttributes={"path": "/metrics", "verb": "get"})
    assert not allowed(nonResourceAttributes={"path": "/logs", "verb": "get"})
    assert not allowed(resourceAttributes={"resource": "pods", "verb": "list"})
    assert not allowed(resourceAttributes={"resource": "secrets", "verb": "get", "namespace": space})
