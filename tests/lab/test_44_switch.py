# SPDX-License-Identifier: GPL-3.0-or-later
"""From the extender to claims and back, node by node, under a pod every two seconds, with a kill in the middle.

At every sample of the API a node's cards are given away by the device plugin or by the DRA driver, never by both, and
pods without a card run as ever. The module restores the first state at its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _lab import RESOURCE, JsonObject, Lab, until
from _pods import MERGE, body, container
from _switching import Load

SITE, SWITCH = "playbooks/site.yml", "playbooks/switch.yml"
SLICES = "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver%3Dgpu.kubegpu.share"
MANIFEST = "/etc/kubernetes/manifests/kube-scheduler.yaml"
FOLDER = "/var/lib/kubelet/plugins/gpu.kubegpu.share"
SPACE = "lab-switch"
MARK = "kubegpu.share/switch"

pytestmark = pytest.mark.long


def given_twice(lab: Lab) -> set[str]:
    """Return the nodes whose cards the device plugin and the DRA driver give away."""
    sliced = {one["spec"]["nodeName"] for one in lab.api.items(SLICES)}
    return {name for name in sliced & set(lab.gpu_nodes) if lab.allocatable(name) > 0}


@pytest.fixture(scope="module")
def space(lab: Lab) -> Iterator[str]:
    with lab.api.namespace(SPACE) as name:
        yield name


def deployment(lab: Lab, name: str, replicas: int) -> None:
    """A Deployment of pods with 2 GiB."""
    labels = {"app": name}
    pod = body(name, container(lab, 2))["spec"]
    del pod["tolerations"]
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    path = f"/apis/apps/v1/namespaces/{SPACE}/deployments"
    lab.api.call("POST", path, {"metadata": {"name": name}, "spec": spec})


def all_run(lab: Lab, app: str, number: int, node: str = "") -> list[JsonObject]:
    def found() -> list[JsonObject]:
        pods = [pod for pod in lab.api.pods(SPACE) if pod["metadata"]["labels"].get("app") == app]
        live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        assert [one["status"].get("phase") for one in live] == ["Running"] * number
        assert not node or {one["spec"]["nodeName"] for one in live} == {node}
        return live

    running: list[JsonObject] = until(found, f"{number} pods of {app} run", 180)
    return running


def switch(lab: Lab, to: str, *nodes: str) -> None:
    done = lab.playbook(SWITCH, "-e", f"gpushare_allocation={to}", "--limit", ",".join(nodes), seconds=1200)
    assert done.rc == 0, done.out[-8000:]


def gives(lab: Lab, node: str) -> tuple[str | None, bool, bool]:
    """Return a node's label, and whether the plugin and the driver announce its cards."""
    live = lab.api.node(node)
    sliced = any(one["spec"]["nodeName"] == node for one in lab.api.items(SLICES))
    assert MARK not in live["metadata"].get("annotations", {}) and not live["spec"].get("unschedulable")
    return live["metadata"]["labels"].get("gpushare"), lab.allocatable(node) > 0, sliced


def extended(lab: Lab) -> set[str]:
    """Return the control planes whose kube-scheduler has the extender."""
    return {name for name in lab.control_planes if "kubegpu-share" in lab.ssh(name, f"cat {MANIFEST}")}


def test_there_and_back_node_by_node(lab: Lab, space: str) -> None:
    first, *others = lab.gpu_nodes
    everyone = ",".join(lab.gpu_nodes)
    load = Load(lab, space, lambda: given_twice(lab))
    deployment(lab, "shares", 4)
    all_run(lab, "shares", 4)
    try:
        with load.running():
            # Killed when the former allocation is half gone; site.yml is refused, and the same command goes on.
            command = ("-e", "gpushare_allocation=dra", "--limit", first)

            def half() -> bool:
                return "gpushare" not in lab.api.node(first)["metadata"]["labels"]

            lab.interrupted_playbook(SWITCH, *command, moment=half, seconds=600)
            assert lab.api.node(first)["metadata"]["annotations"][MARK] == "dra"
            refused = lab.playbook(SITE)
            assert refused.rc != 0 and "switch-unfinished" in refused.out
            switch(lab, "dra", first)
            assert gives(lab, first) == ("dra", False, True)
            assert all(gives(lab, node)[:2] == ("true", True) for node in others)
            # What was evicted runs on the others, and whoever asks for it runs by a claim.
            moved = all_run(lab, "shares", 4)
            assert {pod["spec"]["nodeName"] for pod in moved} <= set(others)
            lab.api.call(
                "PATCH",
                f"/api/v1/namespaces/{space}",
                {"metadata": {"labels": {"kubegpu.share/allocation": "dra"}}},
                MERGE,
            )
            deployment(lab, "claims", 2)
            assert all(pod["spec"]["resourceClaims"] for pod in all_run(lab, "claims", 2, first))

            switch(lab, "dra", *others)
            assert {gives(lab, node) for node in lab.gpu_nodes} == {("dra", False, True)}
            assert extended(lab) == set(lab.control_planes), "switch.yml changes no control plane"
            all_run(lab, "shares", 4)
            done = lab.playbook(SITE, "-e", "gpushare_allocation=dra", seconds=1200)
            assert done.rc == 0, done.out[-8000:]
            assert extended(lab) == set()
            again = lab.playbook(SITE, "-e", "gpushare_allocation=dra")
            again.assert_unchanged()

            # Back: the schedulers first, by site.yml, which leaves the nodes as they are.
            refused = lab.playbook(SWITCH, "-e", "gpushare_allocation=extender", "--limit", first)
            assert refused.rc != 0 and "run site.yml" in refused.out
            assert gives(lab, first) == ("dra", False, True)
            lab.playbook(SITE, seconds=1200)
            assert extended(lab) == set(lab.control_planes)
            lab.api.call(
                "PATCH",
                f"/api/v1/namespaces/{space}",
                {"metadata": {"labels": {"kubegpu.share/allocation": None}}},
                MERGE,
            )
            for node in lab.gpu_nodes:
                switch(lab, "extender", node)
            assert {gives(lab, node) for node in lab.gpu_nodes} == {("true", True, False)}
            assert {lab.ssh(node, f"ls -d {FOLDER} 2>/dev/null; true") for node in lab.gpu_nodes} == {""}
            for app, number in (("shares", 4), ("claims", 2)):
                pods = all_run(lab, app, number)
                assert not any("resourceClaims" in pod["spec"] for pod in pods)
    finally:
        lab.playbook(SWITCH, "-e", "gpushare_allocation=extender", "--limit", everyone, seconds=1200)
        restored = lab.playbook(SITE, seconds=1200)
        assert restored.rc == 0, restored.out[-8000:]
    assert load.wrong == [] and load.made > 20 and load.samples > 100
    assert RESOURCE in lab.api.node(first)["status"]["allocatable"]
