# SPDX-License-Identifier: GPL-3.0-or-later
"""Privileged pods see every card whatever they request: an Event names each of them, and not a node's own."""

from __future__ import annotations

import typing as t

from gpushare.plugin.admission import trim_pod
from gpushare.plugin.pod_facts import privileged_containers
from gpushare.shared._core.types import JsonObject
from plugin_fakes import NODE, Node, make_pod, until

PRIVILEGED = {"securityContext": {"privileged": True}}


def privileged_pod(name: str, units: int, namespace: str = "default") -> JsonObject:
    pod = make_pod(name, units, booked=0 if units else None)
    pod["metadata"]["namespace"] = namespace
    pod["spec"]["containers"][0].update(PRIVILEGED)
    return pod


def test_an_event_names_a_privileged_pod_once(make: t.Callable[..., Node]) -> None:
    node = make()
    node.kubelet.start()
    node.start_plugin(exempt=frozenset({"node-system"}))
    until(lambda: node.kubelet.registered)
    for pod in (privileged_pod("own", 0, "node-system"), make_pod("plain", 2, booked=0)):
        node.run(pod)
    for pod in (privileged_pod("with", 2), privileged_pod("without", 0)):
        node.run(pod)
    until(lambda: node.kube.reasons("default/without") == ["GpuCardsExposed"])
    until(lambda: "GpuCardsExposed" in node.kube.reasons("default/with"))
    (event,) = (one for one in node.kube.events if one["involvedObject"]["name"] == "without")
    assert event["type"] == "Warning"
    assert event["message"] == (
        f"container c0 is privileged in pod default/without, which therefore sees every card of node {NODE} and can "
        "lift memory limits: remove securityContext.privileged; if it is a part of the node's system, add default to "
        "gpushare_admission_exempt_namespaces"
    )
    # Further passes report nothing again.
    later = node.run(make_pod("later", 1, booked=0))
    until(lambda: node.agrees(later))
    exposed = [one["involvedObject"]["name"] for one in node.kube.events if one["reason"] == "GpuCardsExposed"]
    assert sorted(exposed) == ["with", "without"] and {one.get("count", 1) for one in node.kube.events} == {1}


def test_containers_that_may_run_count() -> None:
    pod = make_pod("pod", 1, inits=[{"name": "ended", **PRIVILEGED}, {"name": "beside", "restartPolicy": "Always"}])
    pod["spec"]["initContainers"][1].update(PRIVILEGED)
    pod["spec"]["ephemeralContainers"] = [{"name": "debugger", **PRIVILEGED}]
    assert privileged_containers(trim_pod(pod)) == ("beside", "debugger")
