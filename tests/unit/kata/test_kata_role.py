# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster's half of role kata by real ansible-playbook, on a real API server: the RuntimeClass and its nodes."""

from __future__ import annotations

import pytest
from own_cluster import RoleSteps, controllers, until
from real_apiserver import own_api_server

CLASS = "kata-qemu-nvidia-gpu"
CLASSES, NODES = "/apis/node.k8s.io/v1/runtimeclasses", "/api/v1/nodes"
LABEL = "nvidia.com/cc.ready.state"


@pytest.fixture
def server():
    with own_api_server() as started, controllers(started, "garbage-collector"):
        for name in ("gpu1", "gpu2"):
            started.request("POST", NODES, {"metadata": {"name": name, "labels": {"mine": "kept"}}})
        yield started


def role(server, folder, **variables):
    return RoleSteps("kata", folder, gpu_kubeconfig=str(server.kubeconfig), kata_nodes=["gpu1"], **variables)


def labels(server, name):
    return server.request("GET", f"{NODES}/{name}")["metadata"]["labels"]


def test_managed_from_nothing_to_nothing(server, tmp_path):
    managed = role(server, tmp_path, kata_state="managed")
    assert managed.step("cluster", "--check") == 1 and not server.request("GET", CLASSES)["items"]
    assert managed.step("cluster") == 1 and managed.step("cluster") == 0
    [made] = server.request("GET", CLASSES)["items"]
    assert (made["handler"], made["scheduling"]["nodeSelector"]) == (CLASS, {LABEL: "false"})
    # The API server writes 10240Mi so.
    assert made["overhead"]["podFixed"] == {"memory": "10Gi", "cpu": "1"}
    assert managed.step("nodes") == 1 and managed.step("nodes") == 0
    assert labels(server, "gpu1")[LABEL] == "false" and LABEL not in labels(server, "gpu2")
    assert managed.step("remove") == 2 and managed.step("remove") == 0
    # It is deleted in the foreground, by the garbage collector.
    until(lambda: not server.request("GET", CLASSES)["items"])
    assert labels(server, "gpu1")["mine"] == "kept"
    assert LABEL not in labels(server, "gpu1")


def test_what_others_made_is_checked_and_stays(server, tmp_path):
    body = {"metadata": {"name": CLASS}, "handler": CLASS, "scheduling": {"nodeSelector": {LABEL: "false"}}}
    external = role(server, tmp_path)
    done = external.run("cluster")
    assert done.rc and f"no RuntimeClass {CLASS}" in done.text
    server.request("POST", CLASSES, body)
    assert external.step("cluster") == 0
    done = external.run("nodes")
    assert done.rc and f"{LABEL}=false, and node gpu1 hasn't it" in done.text
    managed = role(server, tmp_path, kata_state="managed")
    assert managed.step("cluster") == 0 and managed.step("nodes") == 1
    assert external.step("nodes") == 0
    assert managed.step("remove_nodes") == 1
    managed.step("remove")
    assert [found["metadata"]["name"] for found in server.request("GET", CLASSES)["items"]] == [CLASS]
