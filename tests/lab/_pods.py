# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods that hold memory of cards: made, waited for, compared, taken away."""

from __future__ import annotations

import contextlib
import json
import typing as t
from collections.abc import Iterator, Mapping, Sequence

from _lab import RESOURCE, Json, Lab, indices_of, until

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
SERVERS = "gpushare-system"
DAEMONSET = f"/apis/apps/v1/namespaces/{SERVERS}/daemonsets/gpushare-device-plugin"


def container(lab: Lab, units: int = 0, name: str = "c0", **more: t.Any) -> Json:
    """A container that sleeps; fields of the API's Container as further arguments."""
    wanted: Json = {
        "name": name,
        "image": lab.state["base_image"],
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
    }
    if units:
        wanted["resources"] = {"limits": {RESOURCE: str(units)}}
    return {**wanted, **more}


def body(
    name: str, *containers: Json, node: str = "", annotations: Mapping[str, str] | None = None, **spec: t.Any
) -> Json:
    """A pod, by the schedulers' choice on this very node where one is named."""
    wanted: Json = {
        "containers": list(containers),
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if node:
        wanted["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"metadata": {"name": name, "annotations": dict(annotations or {})}, "spec": {**wanted, **spec}}


def create(lab: Lab, namespace: str, *bodies: Json) -> list[str]:
    """Make pods; their names."""
    for one in bodies:
        lab.api.call("POST", f"/api/v1/namespaces/{namespace}/pods", one)
    return [one["metadata"]["name"] for one in bodies]


def settled(lab: Lab, namespace: str, names: Sequence[str], seconds: float = 60) -> list[Json]:
    """Pods that run and whose assignment the plugin has confirmed."""
    lab.api.wait_running(namespace, names, seconds)

    def story() -> list[Json]:
        pods = [lab.api.pod(namespace, name) for name in names]
        lab.assert_one_story(pods)
        return pods

    found: list[Json] = until(story, "annotation, checkpoint and devices agree", 30)
    return found


def removed(lab: Lab, namespace: str, names: Sequence[str]) -> None:
    for name in names:
        lab.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
    until(
        lambda: not set(names) & {one["metadata"]["name"] for one in lab.api.pods(namespace)}, f"{names} gone", 60, 0.2
    )


@contextlib.contextmanager
def pods(lab: Lab, namespace: str, *bodies: Json) -> Iterator[list[Json]]:
    """Pods that are at work, for as long as they are needed."""
    names = create(lab, namespace, *bodies)
    try:
        yield settled(lab, namespace, names)
    finally:
        removed(lab, namespace, names)


def containers(found: Sequence[Json]) -> list[tuple[str, int]]:
    """What changes when a pod is disturbed."""
    return [(one["containerID"], one["restartCount"]) for pod in found for one in pod["status"]["containerStatuses"]]


def units_of(pod: Json) -> int:
    return sum(int(one.get("resources", {}).get("limits", {}).get(RESOURCE, 0)) for one in pod["spec"]["containers"])


def shares_of(pod: Json) -> dict[int, int]:
    """Units by card, as the pod's annotations tell them."""
    indices = indices_of(pod)
    return {index: units_of(pod) // len(indices) for index in indices}


def unschedulable(lab: Lab, namespace: str, name: str) -> str:
    """Why a pod waits for a node, in kube-scheduler's words; empty where it says nothing yet.

    :raises AssertionError: it has one.
    """
    pod = lab.api.pod(namespace, name)
    assert not pod["spec"].get("nodeName"), f"{name} is on {pod['spec'].get('nodeName')}: {indices_of(pod)}"
    found = [one for one in pod.get("status", {}).get("conditions") or [] if one["type"] == "PodScheduled"]
    return str(found[0].get("message", "")) if found and found[0]["status"] == "False" else ""


def waits(lab: Lab, namespace: str, wanted: Json, words: str) -> str:
    """A pod that no node takes, for this reason; it is gone again afterwards."""
    name = create(lab, namespace, wanted)[0]

    def said() -> str:
        found = unschedulable(lab, namespace, name)
        assert words in found, found
        return found

    try:
        return str(until(said, f"{name} is refused: {words}", 20))
    finally:
        removed(lab, namespace, [name])


def inspected(lab: Lab, control_plane: str) -> dict[str, dict[int, int]]:
    """Units in use by card and node, as the extender of a control plane tells them."""
    script = (
        "python3 -c 'import urllib.request as u;"
        'print(u.urlopen("http://127.0.0.1:12345/gpushare-scheduler/inspect").read().decode())\''
    )
    shown = json.loads(lab.ssh(control_plane, script))["nodes"]
    return {node["name"]: {card["id"]: card["usedGPU"] for card in node["devs"]} for node in shown}


def emptied(lab: Lab, node: str) -> None:
    """Every extender has heard that nobody has memory of the node any more."""

    def empty() -> bool:
        for name in lab.control_planes:
            used = inspected(lab, name)[node]
            assert not any(used.values()), f"the extender of {name} says {used}"
        return True

    until(empty, f"{node} is empty", 30, 0.2)


def plugin(lab: Lab, node: str) -> Json:
    """The device plugin's pod of a node."""
    found = [one for one in lab.server_pods("gpushare-device-plugin") if one["spec"].get("nodeName") == node]
    alive = [one for one in found if "deletionTimestamp" not in one["metadata"]]
    assert len(alive) == 1, f"{node} has {len(alive)} device plugins"
    return alive[0]


def is_ready(pod: Json) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions") or [])


def plugin_template(lab: Lab) -> Json:
    """The spec of the device plugin's pods, as its DaemonSet has it."""
    found: Json = lab.api.call("GET", DAEMONSET)["spec"]["template"]["spec"]
    return found


def plugins_run(lab: Lab, command: list[str]) -> None:
    """Another command for the device plugins, past the roles; their pods are replaced one by one."""
    changed = {"containers": [{"name": plugin_template(lab)["containers"][0]["name"], "command": command}]}
    lab.api.call("PATCH", DAEMONSET, {"spec": {"template": {"spec": changed}}}, STRATEGIC)


def restarted_plugin(lab: Lab, node: str) -> None:
    """Another pod of the device plugin on a node, ready."""
    old = plugin(lab, node)["metadata"]
    lab.api.delete(f"/api/v1/namespaces/{old['namespace']}/pods/{old['name']}")

    def new() -> bool:
        pod = plugin(lab, node)
        return pod["metadata"]["uid"] != old["uid"] and is_ready(pod)

    until(new, f"a new device plugin on {node}", 90)


def announced(lab: Lab, node: str, cards: int) -> bool:
    """Whether a node tells of so many cards, all healthy, and kubelet has all of their memory to give."""
    found = lab.cards(node)
    assert len(found) == cards and all(one["healthy"] for one in found), found
    return lab.allocatable(node) == sum(one["units"] for one in found)
