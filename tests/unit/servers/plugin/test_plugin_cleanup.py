# SPDX-License-Identifier: GPL-3.0-or-later
"""The cleanup of a node that the plugin leaves for good, and memory limits on a node."""

from __future__ import annotations

import typing as t

import pytest
from gpushare.api.client import KubeError
from gpushare.node import limits
from gpushare.plugin import cleanup, command
from gpushare.plugin.command import Options
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from limit_fakes import FakeCgroups, folder_of
from plugin_fakes import Node, Rejected, make_pod, seen, until


@pytest.fixture
def node(make: t.Callable[..., Node]) -> Node:
    one = make()
    one.kubelet.start()
    return one


def clean(node: Node) -> int:
    options = Options(node="gpu1", kubelet_dir=node.kubelet.root)
    return command.clean(options, node.kube, node.nvml, node.limits, FakeCgroups(node.limits))


def cgroup(pod: JsonObject) -> str:
    """The cgroup of a pod's first container."""
    return folder_of(f"{pod['metadata']['uid']}-c0")


def kept(node: Node, pod: JsonObject) -> dict[str, int]:
    """The driver's limits of a pod's first container, MiB by card."""
    return {uuid: limit.hard >> 20 for (uuid, at), limit in dict(node.limits.kept).items() if at == cgroup(pod)}


# --------------------------------------------------------------------------- limits


def test_fault_20_shares_are_limits_where_the_driver_has_them(node: Node) -> None:
    node.limits.version = "615.71.09"
    node.start_plugin()
    until(lambda: node.kubelet.registered)
    pod = node.run(make_pod("pod", 4, booked=1))
    envs = node.kubelet.envs[pod["metadata"]["uid"]]["c0"]
    assert (envs[limits.LIMIT], envs[limits.REQUEST]) == ("4096", "0")
    until(lambda: kept(node, pod).get(seen(1).uuid) == 4096)
    until(lambda: node.kube.node()["metadata"]["annotations"][contract.NODE_LIMIT] == "enforced")
    two = node.run(make_pod("two", 4, booked=(0, 1), requests={contract.POD_CARD_COUNT: "2"}))
    assert node.kubelet.envs[two["metadata"]["uid"]]["c0"][limits.LIMIT] == "2048"
    until(lambda: kept(node, two) == {seen(0).uuid: 2048, seen(1).uuid: 2048})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_limits_are_decided_card_by_card(node: Node, mode: str) -> None:
    """The driver can limit no card at first, and then card 0, and not card 1."""
    plugin = node.start_plugin(memory_limit=mode)
    reason = "NVIDIA's driver is 580.95.05, and limits need 615 or newer"

    def limit() -> str:
        return str(node.kube.node()["metadata"].get("annotations", {}).get(contract.NODE_LIMIT))

    until(lambda: limit() == f"unenforced: {reason}")
    if mode == "required":
        until(lambda: len(node.kubelet.unhealthy) == 32)
        assert f"gpushare_memory_limit: limits are required, but {reason}" in (plugin.unready() or "")
        with pytest.raises(Rejected):
            node.kubelet.add(make_pod("early", 4))
    node.limits.broken["set", seen(1).uuid] = 3
    node.limits.version = "615.71.09"

    def cards() -> list[tuple[bool, str, str]]:
        return [(card.healthy, card.code, card.limit) for card in contract.node_cards(node.kube.node())]

    able, unable = "enforced", "MemoryLimitUnavailable"
    shared = (True, "", unable) if mode == "auto" else (False, unable, unable)
    until(lambda: cards() == [(True, "", able), shared])
    until(lambda: len(node.kubelet.healthy) == (32 if mode == "auto" else 16))
    assert limit().startswith("unenforced: card 1 can't be limited")
    pods = [node.run(make_pod(f"pod{at}", 4, booked=at)) for at in ((0, 1) if mode == "auto" else (0,))]
    requested = [node.kubelet.envs[pod["metadata"]["uid"]]["c0"].get(limits.LIMIT) for pod in pods]
    assert requested == ["4096", None][: len(pods)]
    until(lambda: kept(node, pods[0]) == {seen(0).uuid: 4096})
    assert plugin.unready() is None


# --------------------------------------------------------------------------- leaving


def test_fault_16_cleanup_leaves_nothing_on_the_node(node: Node) -> None:
    node.limits.version = "615.71.09"
    node.start_plugin()
    until(lambda: node.kubelet.registered)
    pod = node.run(make_pod("pod", 4, booked=1))
    until(lambda: kept(node, pod).get(seen(1).uuid) == 4096 and node.agrees(pod))
    until(lambda: contract.NODE_LIMIT in node.kube.node()["metadata"]["annotations"])
    own = node.kube.node()
    own["metadata"]["annotations"]["theirs"] = "stays"
    node.kube.put(own)
    until(lambda: contract.RESOURCE_COUNT in node.kube.node()["status"].get("allocatable", {}))
    before = node.annotations(pod)

    assert clean(node) == 1, "the plugin still runs"
    assert contract.NODE_CARDS in node.kube.node()["metadata"]["annotations"]
    node.stop_plugin()
    # As a kubelet that remembers the resource of a plugin that is gone.
    shown = node.kube.node()
    shown["status"]["capacity"][contract.RESOURCE_MEMORY] = "32"
    node.kube.put(shown)
    assert clean(node) == 0
    left = node.kube.node()
    assert left["metadata"]["annotations"] == {"theirs": "stays"}
    assert left["status"]["capacity"] == {"cpu": "4"} and left["status"]["allocatable"] == {}
    assert kept(node, pod) == {}
    assert node.annotations(pod) == before
    patches = len(node.kube.patches)
    assert clean(node) == 0 and len(node.kube.patches) == patches


def test_cleanup_after_a_plugin_that_was_killed(node: Node) -> None:
    node.start_plugin()
    until(lambda: node.kubelet.registered and contract.node_cards(node.kube.node()))
    node.kill_plugin()
    assert (node.kubelet.folder / "kubegpu-gpushare.sock").exists()
    assert clean(node) == 0
    assert not (node.kubelet.folder / "kubegpu-gpushare.sock").exists()
    assert contract.NODE_CARDS not in node.kube.node()["metadata"]["annotations"]


def test_cleanup_without_a_driver_reports_possible_leftovers(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.kube.put({**node.kube.node(), "metadata": {"name": "gpu1", "annotations": {contract.NODE_LIMIT: "enforced"}}})
    node.nvml.problem = "NVIDIA's driver isn't there"
    assert clean(node) == 1
    assert "limits of running containers may be left: NVIDIA's driver isn't there" in caplog.text
    # What could be removed was.
    assert node.kube.node()["metadata"]["annotations"] == {}


def test_cleanup_with_an_unreachable_api(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.kube.down = True
    assert clean(node) == 1
    assert "--cleanup: node gpu1 can't be read or written: connection refused" in caplog.text
    node.kube.down = False
    node.kube.refuse["/status"] = KubeError(403, "Forbidden", "no")
    shown = node.kube.node()
    shown["status"]["capacity"][contract.RESOURCE_COUNT] = "2"
    node.kube.put(shown)
    assert clean(node) == 1
    node.kube.refuse.clear()
    assert clean(node) == 0


@pytest.mark.parametrize(
    ("node", "patch"),
    [
        ({}, {}),
        ({"status": {"capacity": {contract.RESOURCE_MEMORY: "0", "cpu": "4"}}}, {}),
        (
            {
                "metadata": {"annotations": {contract.NODE_CARDS: "[]", contract.NODE_LIMIT: "off", "x": "y"}},
                "status": {"capacity": {contract.RESOURCE_MEMORY: "32"}, "allocatable": {contract.RESOURCE_COUNT: "2"}},
            },
            {
                "metadata": {"annotations": {contract.NODE_CARDS: None, contract.NODE_LIMIT: None}},
                "status": {
                    "capacity": {contract.RESOURCE_MEMORY: None},
                    "allocatable": {contract.RESOURCE_COUNT: None},
                },
            },
        ),
    ],
)
def test_node_patch(node: JsonObject, patch: JsonObject) -> None:
    assert cleanup.node_patch(node) == patch
