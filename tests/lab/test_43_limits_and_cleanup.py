# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes whose driver can't enforce limits (here: cgroup version 1, an older driver), and removal from a node."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from _lab import RESOURCE, JsonObject, Lab, indices_of, until
from _pods import (
    SERVERS,
    body,
    container,
    containers,
    create,
    delete_pods,
    inspect_units,
    is_announced,
    is_ready,
    plugin,
    plugin_pod_spec,
    pods,
    set_plugin_command,
    wait_settled,
)

NAMESPACE = "lab-limits"
LIMIT, CARDS, COUNT = "kubegpu.share/memory-limit", "kubegpu.share/cards", "aliyun.com/gpu-count"
# What the plugin has to say of this lab's nodes.
WHY = (
    r"NVIDIA's driver is [0-9.]+, and limits need 615 or newer"
    "|the node runs with cgroup version 1, and limits need version 2"
)


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


def summary(lab: Lab, node: str) -> dict[str, str]:
    """Return a node's card annotations and capacity."""
    own = lab.api.node(node)
    texts = {key: value for key, value in own["metadata"]["annotations"].items() if key in (LIMIT, CARDS)}
    return texts | {key: value for key, value in own["status"]["capacity"].items() if key == COUNT}


def test_fault_20_a_node_without_limits_reports_why_and_starts_containers(lab: Lab, namespace: str) -> None:
    for node in lab.gpu_nodes:
        assert re.fullmatch(f"unenforced: ({WHY})", summary(lab, node)[LIMIT]), summary(lab, node)
    with pods(lab, namespace, body("free", container(lab, 2), node=lab.gpu_nodes[0])) as (pod,):
        given = lab.checkpoint(lab.gpu_nodes[0])[pod["metadata"]["uid"], "c0"].variables
        # NVIDIA's hook would keep the container from starting.
        assert not [name for name in given if name.startswith("NVIDIA_GPU_MEMORY")], given
        shown = lab.inside(namespace, "free", "c0", "sh", "-c", "env | grep -c NVIDIA_GPU_MEMORY; true")
        assert shown.strip() == "0"


def started(lab: Lab, namespace: str, name: str) -> JsonObject | None:
    """Return a pod that runs and has a card; None before."""
    found = lab.api.pods(namespace)
    return next((one for one in found if one["metadata"]["name"] == name and one["status"]["phase"] == "Running"), None)


@pytest.mark.long
def test_a_pod_that_sees_every_card_gets_no_foreign_memory_or_the_node_says_so(lab: Lab, namespace: str) -> None:
    """Enforced with LAB_DRIVER_VERSION=615.71.09 and control groups of version 2; elsewhere the node denies it."""
    node = lab.gpu_nodes[0]
    greedy = container(lab, 2, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
    # It sees other cards than its own, for which the other tests' helper would wait in vain.
    create(lab, namespace, body("greedy", greedy, node=node))
    try:
        pod = until(lambda: started(lab, namespace, "greedy"), "greedy runs", 60)
        (own,) = indices_of(pod)
        if summary(lab, node)[LIMIT] != "enforced":
            assert re.fullmatch(f"unenforced: ({WHY})", summary(lab, node)[LIMIT])
            assert {card["limit"] for card in lab.cards(node)} == {"MemoryLimitUnavailable"}
            return
        seen = lab.inside(namespace, "greedy", "c0", "nvidia-smi", "-L").count("UUID: GPU-")
        for at in range(seen):
            # It ends at once where nothing is allocated; else it holds the memory until it is ended.
            words = ("sh", "-c", f"timeout 5 nvidia-smi simulated-allocation 64 -i {at}; true")
            said = lab.inside(namespace, "greedy", "c0", *words)
            mine = seen == 1 or at == own
            assert ("holding" in said) == mine, (at, said)
        assert {card["limit"] for card in lab.cards(node)} == {"enforced"}
    finally:
        delete_pods(lab, namespace, ["greedy"])


@pytest.mark.long
def test_scenario_g_memory_taken_at_the_start_is_reported_or_the_node_is_not_enforced(lab: Lab, namespace: str) -> None:
    """The pod's first process allocates on every card, maybe before the plugin's first look; no limit frees that."""
    node = lab.gpu_nodes[0]
    at_once = "for i in 0 1 2 3 4 5 6 7; do nvidia-smi simulated-allocation 64 -i $i & done; exec sleep 1000000"
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    create(lab, namespace, body("early", container(lab, 2, env=env, command=["sh", "-c", at_once]), node=node))
    try:
        pod = until(lambda: started(lab, namespace, "early"), "early runs", 60)
        (own,) = indices_of(pod)
        if re.fullmatch(f"unenforced: ({WHY})", summary(lab, node)[LIMIT]):
            assert {card["limit"] for card in lab.cards(node)} == {"MemoryLimitUnavailable"}
            return

        def decided() -> bool:
            """Return whether every other card is closed to the pod, or is reported with what the pod holds of it."""
            others = {card["limit"] for card in lab.cards(node) if card["index"] != own}
            reported = all(
                lab.events(space, name, "GpuMemoryExceeded")
                for space, name in ((namespace, "early"), ("default", node))
            )
            closed = others <= {"enforced"} and bool(lab.events(namespace, "early", "GpuCardNotGiven"))
            held = "ForeignMemoryHeld" in others and summary(lab, node)[LIMIT].startswith("unenforced: Foreign")
            return closed or (held and reported)

        until(decided, "the cards of others are closed, or what is held of them is reported", 60)
    finally:
        delete_pods(lab, namespace, ["early"])
    until(lambda: {card["limit"] for card in lab.cards(node)} <= {"enforced", "MemoryLimitUnavailable"}, "ended", 90)


def test_fault_20_required_is_refused_before_anything_changes(lab: Lab) -> None:
    done = lab.playbook("playbooks/site.yml", "-e", "gpushare_memory_limit=required")
    assert done.rc != 0
    assert not any(sums["changed"] for sums in done.recap.values()), done.recap
    said = " ".join(done.out.split())
    found = f"problem memory-limit {', '.join(lab.gpu_nodes)} can't limit pods to their shares"
    assert found in said, done.out[-4000:]
    assert "gpushare_memory_limit" in said


def command(lab: Lab, old: str, new: str) -> None:
    """Replace an option of the device plugin, without the roles."""
    live = plugin_pod_spec(lab)["containers"][0]["command"]
    words = [new if word == old else word for word in live]
    assert new in words, f"{old} isn't among {live}"
    set_plugin_command(lab, words)


@pytest.mark.long
def test_fault_20_required_announces_no_memory_without_limits(lab: Lab, namespace: str) -> None:
    """The update stops at the first node that refuses, running pods go on, and reverting restores everything."""
    names = [f"tenant-{node}" for node in lab.gpu_nodes]
    bodies = [body(name, container(lab, 3), node=node) for name, node in zip(names, lab.gpu_nodes, strict=True)]
    with pods(lab, namespace, *bodies) as tenants:
        command(lab, "--memory-limit=auto", "--memory-limit=required")
        try:

            def refusing() -> list[str]:
                return [
                    node
                    for node in lab.gpu_nodes
                    if lab.allocatable(node) == 0
                    and all(card.get("code") == "MemoryLimitUnavailable" for card in lab.cards(node))
                ]

            until(refusing, "a node refuses", 90)
            (node,) = refusing()
            reasons = {card["reason"] for card in lab.cards(node)}
            assert len(reasons) == 1
            assert re.fullmatch(f"gpushare_memory_limit: limits are required, but ({WHY})", *reasons), reasons
            assert not is_ready(plugin(lab, node))
            assert all(is_announced(lab, other, len(lab.cards(other))) for other in lab.gpu_nodes if other != node)
        finally:
            command(lab, "--memory-limit=required", "--memory-limit=auto")
        for name in lab.gpu_nodes:
            until(lambda name=name: is_announced(lab, name, len(lab.cards(name))), f"{name} as before", 90)
            until(lambda name=name: is_ready(plugin(lab, name)), f"the plugin of {name}", 60)
        assert containers(wait_settled(lab, namespace, names)) == containers(tenants)


# --------------------------------------------------------------------------- --cleanup


def cleaned(lab: Lab, node: str) -> tuple[str, str]:
    """Run ``--cleanup`` on a node in a pod like the plugin's; return its phase and output."""
    template = plugin_pod_spec(lab)
    one: JsonObject = {**template["containers"][0]}
    for probe in ("livenessProbe", "readinessProbe", "ports"):
        one.pop(probe, None)
    one["command"] = [*one["command"], "--cleanup"]
    spec = {**template, "containers": [one], "nodeName": node, "restartPolicy": "Never"}
    spec.pop("nodeSelector")
    made = {"metadata": {"name": "lab-cleanup"}, "spec": spec}
    path = f"/api/v1/namespaces/{SERVERS}/pods"
    lab.api.call("POST", path, made)
    try:

        def ended() -> JsonObject | None:
            pod = lab.api.pod(SERVERS, "lab-cleanup")
            return pod if pod["status"].get("phase") in ("Succeeded", "Failed") else None

        pod: JsonObject = until(ended, "--cleanup ended", 60)
        return pod["status"]["phase"], lab.log(pod)
    finally:
        delete_pods(lab, SERVERS, ["lab-cleanup"])


def label(lab: Lab, node: str, labels: dict[str, str]) -> None:
    """Label a node as the role does."""
    wanted = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}}
    path = f"/api/v1/nodes/{node}?fieldManager=kubegpu-share&force=true"
    lab.api.call("PATCH", path, wanted, "application/apply-patch+yaml")


@pytest.mark.long
def test_fault_16_cleanup_while_the_plugin_runs_is_refused(lab: Lab) -> None:
    node = lab.gpu_nodes[-1]
    before = summary(lab, node)
    phase, said = cleaned(lab, node)
    assert phase == "Failed" and "the device plugin still runs on this node" in said, said
    assert summary(lab, node) == before


@pytest.mark.long
def test_fault_16_cleanup_removes_annotations_and_keeps_pods(lab: Lab, namespace: str) -> None:
    """The node announces nothing any more; its pods keep their cards, and are counted again once the plugin is back."""
    node = lab.gpu_nodes[-1]
    with pods(lab, namespace, body("tenant", container(lab, 4), node=node)) as before:
        assert set(summary(lab, node)) == {LIMIT, CARDS, COUNT}
        uid = plugin(lab, node)["metadata"]["uid"]
        label(lab, node, {})
        try:
            until(
                lambda: uid not in [pod["metadata"]["uid"] for pod in lab.server_pods("gpushare-device-plugin")],
                "the plugin is gone",
                60,
            )
            assert set(summary(lab, node)) == {LIMIT, CARDS, COUNT}, "the plugin takes nothing away by itself"
            phase, said = cleaned(lab, node)
            assert phase == "Succeeded", said
            assert summary(lab, node) == {}
            assert lab.allocatable(node) == 0
            # Twice is once.
            phase, said = cleaned(lab, node)
            assert phase == "Succeeded", said
            kept = lab.api.pod(namespace, "tenant")
            assert kept["metadata"]["annotations"] == before[0]["metadata"]["annotations"]
        finally:
            label(lab, node, {"gpushare": "true"})
        until(lambda: is_announced(lab, node, len(lab.nodes[node]["cards"])), "the cards again", 90)
        assert containers(wait_settled(lab, namespace, ["tenant"])) == containers(before)
        # 4 of a card's units are still held: as much as is left fits beside them, and no more.
        size = lab.cards(node)[0]["units"]
        for name in lab.control_planes:
            until(lambda name=name: sum(inspect_units(lab, name)[node].values()) == 4, f"the extender of {name}", 20)
        create(lab, namespace, body("beside", container(lab, size - 4), node=node))
        (beside,) = wait_settled(lab, namespace, ["beside"])
        assert (
            beside["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"]
            == (before[0]["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"])
        )
        delete_pods(lab, namespace, ["beside"])
    assert RESOURCE in lab.api.node(node)["status"]["capacity"]
