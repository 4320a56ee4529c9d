# SPDX-License-Identifier: GPL-3.0-or-later
"""From a pod with aliyun.com/gpu-mem to the variables of its container, with the role's objects and all of its servers.

Admission, the server of templates, the controller of claims, kube-scheduler and the driver are real; the cards and
kubelet are doubles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_cluster import Cluster
from dra_kit import DriverNode
from dra_world import NAMESPACE, account, dra_server, pod, scheduling
from gpushare.api.client import connect
from gpushare.dra.command import parse
from gpushare.kubelet.dra import ClaimRef
from gpushare.shared._contracts import gpushare as contract
from gpushare.templates.command import Templates
from gpushare_objects import rendered
from own_cluster import until
from plugin_fakes import seen
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, ApiServer
from role_templates import one

DRIVER = "gpushare-dra-driver"


class Deployed(Cluster):
    """A node whose driver has the account, the rights and the policy of the role."""

    def __init__(self, server: ApiServer, folder: Path, node: str) -> None:
        self.server, self.node, self.namespace = server, node, "default"
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
        status = {"capacity": {"cpu": "8", "memory": "8Gi", "pods": "110"}}
        server.request("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, MERGE)
        server.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}}, MERGE)
        spec = {"serviceAccountName": DRIVER, "nodeName": node, "containers": [{"name": "c", "image": "i"}]}
        server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", {"metadata": {"name": "driver"}, "spec": spec})
        self.account = server.token(folder, NAMESPACE, DRIVER, "driver")


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with dra_server() as started, scheduling(started):
        yield started


@pytest.fixture(scope="module")
def node(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverNode]:
    """A node of two cards, which NVIDIA's CDI specification names; with the server of templates beside it."""
    kube = connect(server.url, str(account(server, tmp_path_factory.mktemp("templates"))))
    templates = Templates(kube, namespace=NAMESPACE, registry=CollectorRegistry())
    templates.start()
    deployed = Deployed(server, tmp_path_factory.mktemp("driver"), "gpu1")
    made = DriverNode(tmp_path_factory.mktemp("d"), deployed)
    (made.root / "nvidia").mkdir()
    names = [{"name": card.uuid} for card in made.nvml.found]
    (made.root / "nvidia" / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": names}))
    made.up()
    yield made
    made.down()
    assert templates.stop()


def prepared(server: ApiServer, node: DriverNode, wanted: dict[str, Any]) -> list[str]:
    """Create a pod, and return the CDI names of its claim when kube-scheduler has bound it to the node."""
    path = "/api/v1/namespaces/default/pods"
    server.request("POST", path, wanted)

    def bound() -> Any:
        found = server.request("GET", f"{path}/{wanted['metadata']['name']}")
        return found if found["spec"].get("nodeName") else None

    found = until(bound, 40)
    assert found["spec"]["nodeName"] == "gpu1"
    [claim] = found["status"]["resourceClaimStatuses"]
    at = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim['resourceClaimName']}"
    metadata = server.request("GET", at)["metadata"]
    return node.kubelet.prepare(ClaimRef("default", metadata["uid"], metadata["name"]))


def test_the_driver_takes_the_options_of_its_daemonset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu1")
    for variables in (
        {},
        {"gpushare_ignore_xids": [13, 31], "gpushare_memory_limit": "off", "gpushare_cdi_folders": []},
    ):
        daemon = one(rendered("dra", **variables), "DaemonSet")
        [container] = daemon["spec"]["template"]["spec"]["containers"]
        assert container["command"][0] == DRIVER
        options = parse(container["command"][1:])
        mounted = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert mounted[options.claim_cdi_folder] is False
        assert set(options.cdi_folders.split(",")) <= set(mounted)


def test_an_unchanged_pod_gets_its_share_of_a_card(server: ApiServer, node: DriverNode) -> None:
    own, card = prepared(server, node, pod("p", 4))
    assert card == f"nvidia.com/gpu={seen(0).uuid}"
    variables = node.environment(own)
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert (variables[contract.POD_UNITS], variables[contract.POD_INDEX]) == ("4", "0")


def test_two_containers_get_a_name_each_of_the_same_card(server: ApiServer, node: DriverNode) -> None:
    """The first card is full to 2 GiB then, so that both go to the second one."""
    prepared(server, node, pod("before", 9))
    names = prepared(server, node, pod("two", 3, 2))
    assert [name for name in names if name.startswith("nvidia.com/")] == [f"nvidia.com/gpu={seen(1).uuid}"] * 2
    own = [name for name in names if name.startswith("gpu.kubegpu.share/")]
    assert len({*own}) == 2
    assert {node.environment(name)[contract.POD_UNITS] for name in own} == {"5"}
    assert [node.environment(name)[contract.CONTAINER_UNITS] for name in own] == ["3", "2"]


def test_two_containers_on_two_cards(server: ApiServer, node: DriverNode) -> None:
    """A container has a request for each card, and from each of them the variables of both."""
    names = prepared(server, node, pod("cards", 4, 2, annotations={contract.POD_CARD_COUNT: "2"}))
    uuids = [f"nvidia.com/gpu={seen(number).uuid}" for number in (0, 0, 1, 1)]
    assert [name for name in names if name.startswith("nvidia.com/")] == uuids
    own = [node.environment(name) for name in names if name.startswith("gpu.kubegpu.share/")]
    assert [one[contract.CONTAINER_UNITS] for one in own] == ["4", "2", "4", "2"]
    assert {one[contract.POD_UNITS] for one in own} == {"6"}
