# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods that hold memory of others, and that the driver doesn't limit any more: reported, and evicted on request."""

from __future__ import annotations

import dataclasses
import time
import typing as t
from pathlib import Path

import pytest
import role_templates
from fake_clock import FakeClock
from gpushare.api.client import Kube, KubeError, connect
from gpushare.node.evictions import LASTING_SECONDS, MIRROR, RETRY_SECONDS, Evictions
from gpushare.node.limits import Violation
from gpushare.nvml.limits import MIB, Limit
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason
from gpushare.shared._core.types import JsonObject
from limit_fakes import folder_of
from plugin_fakes import NODE, FakeKube, Node, make_pod, seen, until
from real_apiserver import MERGE, ApiServer, api_server

__all__ = ["api_server"]


# --------------------------------------------------------------------------- on a node


def cgroup(pod: JsonObject, container: str = "c0") -> str:
    return folder_of(f"{pod['metadata']['uid']}-{container}")


def events(node: Node, name: str) -> dict[str, str]:
    return {event["reason"]: event["message"] for event in node.kube.events if event["involvedObject"]["name"] == name}


@pytest.mark.parametrize("evict", [False, True])
def test_a_pod_that_holds_more_than_its_share(
    make: t.Callable[..., Node], evict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It allocated before the plugin's first check, and the driver refuses to lower the limit."""
    monkeypatch.setattr("gpushare.node.evictions.LASTING_SECONDS", 0.0)
    node = make()
    node.kubelet.start()
    node.limits.version = "615.71.09"
    greedy, other = make_pod("greedy", 4, booked=1), make_pod("other", 4, booked=1)
    node.limits.held[seen(1).uuid, cgroup(greedy)] = 9000 * MIB
    node.start_plugin(evict=evict)
    until(lambda: node.kubelet.registered)
    for pod in (greedy, other):
        node.run(pod)

    def limits() -> list[str]:
        return [card.limit for card in contract.node_cards(node.kube.node())]

    text = "MemoryLimitExceeded: container c0 of pod default/greedy holds 9000 MiB of card 1, and its share is 4096 MiB"
    until(lambda: "GpuMemoryExceeded" in events(node, "greedy") and "GpuMemoryExceeded" in events(node, NODE))
    assert events(node, "greedy")["GpuMemoryExceeded"].startswith(text)
    assert events(node, NODE)["GpuMemoryExceeded"].startswith(text)
    if evict:
        until(lambda: [path for method, path, _body in node.kube.requests if path.endswith("/eviction")])
        until(lambda: "GpuPodEvicted" in events(node, "greedy"))
        paths = {path for _method, path, _body in node.kube.requests if path.endswith("/eviction")}
        assert paths == {"/api/v1/namespaces/default/pods/greedy/eviction"}
        return
    until(lambda: limits() == ["enforced", "MemoryLimitExceeded"])
    annotation = node.kube.node()["metadata"]["annotations"][contract.NODE_LIMIT]
    assert annotation.startswith(f"{contract.LIMIT_UNENFORCED}{text}")
    labels = f'card="1",model="{seen(1).model}",node="{NODE}",reason="MemoryLimitExceeded",uuid="{seen(1).uuid}"'
    assert node.metric(f"gpushare_plugin_limit_violations{{{labels}}}") == 1
    # The other tenant of the card is limited to its share, and isn't blamed.
    until(lambda: node.limits.mib(cgroup(other)) == {seen(0).uuid: 1, seen(1).uuid: 4096})
    assert "GpuMemoryExceeded" not in events(node, "other")
    # It gets no more, and is limited to its share as soon as it holds no more than that.
    assert node.limits.mib(cgroup(greedy)) == {seen(0).uuid: 1, seen(1).uuid: 9000}
    node.limits.held.clear()
    until(lambda: limits() == ["enforced", "enforced"])
    assert node.kube.node()["metadata"]["annotations"][contract.NODE_LIMIT] == contract.LIMIT_ENFORCED
    assert not [path for _method, path, _body in node.kube.requests if path.endswith("/eviction")]


def test_memory_of_no_share_is_shown_at_once_where_memory_is_not_limited(
    make: t.Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the node is ``off`` before and after."""
    monkeypatch.setattr("gpushare.node.limit_enforcer.UNACCOUNTED_SECONDS", 0.0)
    for name in ("LIMIT_SECONDS", "SUSPICIOUS_SECONDS"):
        monkeypatch.setattr(f"gpushare.plugin.command.{name}", 0.2)
    node = make()
    node.nvml.found = [dataclasses.replace(one, reserved_mib=450) for one in node.nvml.found]
    node.kubelet.start()
    monkeypatch.setattr("gpushare.plugin.reconcile.BUSY_SECONDS", 0.0)
    plugin = node.start_plugin(memory_limit="off", resync=600.0)

    def idle() -> bool:
        """Return whether the node is annotated and the reconciler made no pass for a moment."""
        before = plugin._last_pass
        time.sleep(0.6)
        shown = [one.limit for one in contract.node_cards(node.kube.node())]
        return shown == ["off", "off"] and plugin._last_pass is before

    until(idle)
    node.limits.outside[seen(1).uuid] = 5000
    until(lambda: [one.limit for one in contract.node_cards(node.kube.node())] == ["off", "UnaccountedMemoryHeld"])
    card = contract.node_cards(node.kube.node())[1]
    assert card.limit_reason.startswith("more than 4608 MiB of card 1 ")
    assert node.kube.node()["metadata"]["annotations"][contract.NODE_LIMIT] == "off"


def test_an_event_that_was_refused_is_posted_later(make: t.Callable[..., Node]) -> None:
    """The limit of Events was reached; a corrected limit is a finding of one pass only."""
    node = make()
    node.kubelet.start()
    node.limits.version = "615.71.09"
    greedy, raised = make_pod("greedy", 4, booked=1), make_pod("raised", 4, booked=0)
    node.limits.held[seen(1).uuid, cgroup(greedy)] = 9000 * MIB
    node.limits.kept[seen(0).uuid, cgroup(raised)] = Limit(0, 9000 * MIB)
    refused: set[tuple[str, ...]] = set()
    plugin = node.start_plugin()

    def once(send: t.Callable[..., bool]) -> t.Callable[..., bool]:
        def ask(*about: str) -> bool:
            if about in refused:
                return send(*about)
            refused.add(about)
            return False

        return ask

    plugin.events.pod, plugin.events.node = once(plugin.events.pod), once(plugin.events.node)  # type: ignore[method-assign]
    until(lambda: node.kubelet.registered)
    for pod in (greedy, raised):
        node.run(pod)
    until(lambda: "GpuMemoryExceeded" in events(node, "greedy") and "GpuMemoryExceeded" in events(node, NODE))
    until(lambda: "GpuMemoryLimitCorrected" in events(node, "raised"))
    assert len(refused) >= 3


# --------------------------------------------------------------------------- evictions


class Recorder:
    """Events and counts."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.counts: list[str] = []

    def pod(self, namespace: str, name: str, uid: str, reason: str, message: str, kind: str = "Warning") -> bool:
        self.events.append((name, reason, message))
        return True


def violation(pod: JsonObject, code: Reason = Reason.MEMORY_LIMIT_EXCEEDED) -> Violation:
    return Violation(code, "it holds too much", contract.pod_uid(pod), "c", "GPU-a")


def evictions(kube: Kube, recorder: Recorder, clock: FakeClock) -> Evictions:
    return Evictions(kube, recorder, recorder.counts.append, clock.now)  # type: ignore[arg-type]


def test_only_lasting_violations_and_only_their_pods() -> None:
    kube, recorder, clock = FakeKube(), Recorder(), FakeClock()
    greedy, other = make_pod("greedy", 1), make_pod("other", 1)
    for pod in (greedy, other):
        kube.put(pod)
    one = evictions(kube, recorder, clock)
    one.once([violation(greedy)], [greedy, other])
    clock.sleep(LASTING_SECONDS - 1)
    one.once([], [greedy, other])
    one.once([violation(greedy)], [greedy, other])
    clock.sleep(LASTING_SECONDS - 1)
    one.once([violation(greedy)], [greedy, other])
    assert recorder.counts == [], "it has ended between"
    clock.sleep(1)
    one.once([violation(greedy), violation(greedy, Reason.FOREIGN_MEMORY_HELD)], [greedy, other])
    assert recorder.counts == ["evicted"]
    assert recorder.events == [
        ("greedy", "GpuPodEvicted", "MemoryLimitExceeded: this pod is evicted: it holds too much")
    ]
    clock.sleep(RETRY_SECONDS)
    one.once([violation(greedy)], [{**greedy, "metadata": {**greedy["metadata"], "deletionTimestamp": "now"}}, other])
    assert recorder.counts == ["evicted"], "it is terminating already"


def test_a_static_pod_is_reported_and_not_evicted() -> None:
    kube, recorder, clock = FakeKube(), Recorder(), FakeClock()
    pod = make_pod("static", 1)
    pod["metadata"]["annotations"][MIRROR] = "hash"
    one = evictions(kube, recorder, clock)
    for _turn in range(2):
        one.once([violation(pod)], [pod])
        clock.sleep(LASTING_SECONDS)
    assert [reason for _name, reason, _text in recorder.events] == ["GpuEvictionRefused"]
    assert kube.requests == [] and recorder.counts == []


def account(server: ApiServer, folder: Path, violations: str) -> Kube:
    """Connect as the device plugin, with the rights that role gpushare gives it."""
    namespace = server.namespace("plugin")
    objects = role_templates.objects(
        "gpushare",
        "device_plugin",
        **{
            **role_templates.defaults("gpushare"),
            **role_templates.variables_of("gpushare", "vars"),
            "gpushare_namespace": namespace,
            "gpushare_image_pull_policy": "Never",
            "gpushare_nodes": [],
            "gpushare_openshift": False,
            "__gpushare_image_sha256": "",
            "gpushare_memory_limit_violation": violations,
        },
    )
    # The names of cluster-wide objects are the test's own.
    rights = [one for one in objects if one["kind"] in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")]
    for right in rights:
        if right["kind"].startswith("Cluster"):
            right["metadata"]["name"] = namespace
        if "roleRef" in right:
            right["roleRef"]["name"] = namespace
    server.apply(*rights)
    return connect(server.url, str(server.token(folder, namespace, "gpushare-device-plugin")))


def running_pod(server: ApiServer, namespace: str) -> JsonObject:
    spec = {"nodeName": "gpu1", "containers": [{"name": "c", "image": "i"}]}
    path = f"/api/v1/namespaces/{namespace}/pods"
    server.request("POST", path, {"metadata": {"name": "greedy", "labels": {"app": "greedy"}}, "spec": spec})
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return t.cast(JsonObject, server.request("PATCH", f"{path}/greedy/status", {"status": status}, MERGE))


def test_evictions_on_a_real_api_server(api_server: ApiServer, tmp_path: Path) -> None:
    """A disruption budget holds; an eviction is tried again; without the variable the plugin has no right to evict."""
    namespace, recorder, clock = api_server.namespace("tenant"), Recorder(), FakeClock()
    pod = running_pod(api_server, namespace)
    powerless = account(api_server, tmp_path / "report", "report")
    with pytest.raises(KubeError) as refused:
        powerless.post(f"/api/v1/namespaces/{namespace}/pods/greedy/eviction", {"apiVersion": "policy/v1"})
    assert refused.value.status == 403
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "greedy"}}}
    made = api_server.request("POST", budgets, {"metadata": {"name": "b"}, "spec": spec})
    # As the controller, which doesn't run here.
    status = {"observedGeneration": made["metadata"]["generation"], "currentHealthy": 1, "desiredHealthy": 1}
    status |= {"expectedPods": 1, "disruptionsAllowed": 0}
    api_server.request("PATCH", f"{budgets}/b/status", {"status": status}, MERGE)
    one = evictions(account(api_server, tmp_path / "evict", "evict"), recorder, clock)
    one.once([violation(pod)], [pod])
    clock.sleep(LASTING_SECONDS)
    one.once([violation(pod)], [pod])
    one.once([violation(pod)], [pod])
    assert recorder.counts == ["refused"]
    ((name, reason, text),) = recorder.events
    assert (name, reason) == ("greedy", "GpuEvictionRefused")
    assert text.startswith("MemoryLimitExceeded: this pod can't be evicted, it is tried again in 60 s: ")
    assert "disruption budget" in text
    path = f"/api/v1/namespaces/{namespace}/pods/greedy"
    assert "deletionTimestamp" not in api_server.request("GET", path)["metadata"]
    api_server.request("DELETE", f"{budgets}/b")
    clock.sleep(RETRY_SECONDS)
    one.once([violation(pod)], [pod])
    assert recorder.counts == ["refused", "evicted"] and recorder.events[-1][1] == "GpuPodEvicted"
    assert "deletionTimestamp" in api_server.request("GET", path)["metadata"]
    # A successor of the same name stays.
    api_server.request("DELETE", f"{path}?gracePeriodSeconds=0")
    successor = running_pod(api_server, namespace)
    clock.sleep(RETRY_SECONDS)
    one.once([violation(pod)], [pod])
    assert api_server.request("GET", path)["metadata"]["uid"] == successor["metadata"]["uid"]
    assert recorder.counts == ["refused", "evicted"]
