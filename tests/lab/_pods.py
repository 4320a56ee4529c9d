# SPDX-License-Identifier: GPL-3.0-or-later
"""Create, await, compare and delete pods that hold memory of cards."""

from __future__ import annotations

import contextlib
import json
import typing as t
from collections.abc import Iterator, Mapping, Sequence

from _lab import RESOURCE, JsonObject, Lab, indices_of, until

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
SERVERS = "gpushare-system"
DAEMONSET = f"/apis/apps/v1/namespaces/{SERVERS}/daemonsets/gpushare-device-plugin"


def container(lab: Lab, units: int = 0, name: str = "c0", **more: t.Any) -> JsonObject:
    """Return a container that sleeps, with further fields of the API's Container."""
    wanted: JsonObject = {
        "name": name,
        "image": lab.state["base_image"],
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
    }
    if units:
        wanted["resources"] = {"limits": {RESOURCE: str(units)}}
    return {**wanted, **more}


def body(
    name: str, *containers: JsonObject, node: str = "", annotations: Mapping[str, str] | None = None, **spec: t.Any
) -> JsonObject:
    """Return a pod, which the scheduler places on ``node`` if one is named."""
    wanted: JsonObject = {
        "containers": list(containers),
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if node:
        wanted["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"metadata": {"name": name, "annotations": dict(annotations or {})}, "spec": {**wanted, **spec}}


def create(lab: Lab, namespace: str, *bodies: JsonObject) -> list[str]:
    """Create pods and return their names."""
    for body in bodies:
        lab.api.call("POST", f"/api/v1/namespaces/{namespace}/pods", body)
    return [body["metadata"]["name"] for body in bodies]


def wait_settled(lab: Lab, namespace: str, names: Sequence[str], seconds: float = 60) -> list[JsonObject]:
    """Wait until pods run and the plugin has confirmed their assignment."""
    lab.api.wait_running(namespace, names, seconds)

    def agreement() -> list[JsonObject]:
        pods = [lab.api.pod(namespace, name) for name in names]
        lab.assert_agreement(pods)
        return pods

    found: list[JsonObject] = until(agreement, "annotation, checkpoint and devices agree", 30)
    return found


def delete_pods(lab: Lab, namespace: str, names: Sequence[str]) -> None:
    for name in names:
        lab.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
    until(
        lambda: not set(names) & {pod["metadata"]["name"] for pod in lab.api.pods(namespace)}, f"{names} gone", 60, 0.2
    )


@contextlib.contextmanager
def pods(lab: Lab, namespace: str, *bodies: JsonObject) -> Iterator[list[JsonObject]]:
    """Create pods, wait until they are settled, and delete them afterwards."""
    names = create(lab, namespace, *bodies)
    try:
        yield wait_settled(lab, namespace, names)
    finally:
        delete_pods(lab, namespace, names)


def containers(pods: Sequence[JsonObject]) -> list[tuple[str, int]]:
    """Return container IDs and restart counts, which change when a pod is disturbed."""
    return [
        (status["containerID"], status["restartCount"]) for pod in pods for status in pod["status"]["containerStatuses"]
    ]


def units_of(pod: JsonObject) -> int:
    return sum(
        int(container.get("resources", {}).get("limits", {}).get(RESOURCE, 0))
        for container in pod["spec"]["containers"]
    )


def shares_of(pod: JsonObject) -> dict[int, int]:
    """Return units by card from the pod's annotations."""
    indices = indices_of(pod)
    return {index: units_of(pod) // len(indices) for index in indices}


def unschedulable(lab: Lab, namespace: str, name: str) -> str:
    """Return kube-scheduler's reason why a pod is pending; empty before there is one.

    :raises AssertionError: the pod has a node.
    """
    pod = lab.api.pod(namespace, name)
    assert not pod["spec"].get("nodeName"), f"{name} is on {pod['spec'].get('nodeName')}: {indices_of(pod)}"
    found = [
        condition for condition in pod.get("status", {}).get("conditions") or [] if condition["type"] == "PodScheduled"
    ]
    return str(found[0].get("message", "")) if found and found[0]["status"] == "False" else ""


def refused_for(lab: Lab, namespace: str, wanted: JsonObject, words: str) -> str:
    """Create a pod, wait until it is unschedulable for this reason, delete it, and return the full reason."""
    name = create(lab, namespace, wanted)[0]

    def reason() -> str:
        found = unschedulable(lab, namespace, name)
        assert words in found, found
        return found

    try:
        return str(until(reason, f"{name} is refused: {words}", 20))
    finally:
        delete_pods(lab, namespace, [name])


def inspect_units(lab: Lab, control_plane: str) -> dict[str, dict[int, int]]:
    """Return used units by node and card, from the extender of a control plane."""
    script = (
        "python3 -c 'import urllib.request as u;"
        'print(u.urlopen("http://127.0.0.1:12345/gpushare-scheduler/inspect").read().decode())\''
    )
    shown = json.loads(lab.ssh(control_plane, script))["nodes"]
    return {node["name"]: {card["id"]: card["usedGPU"] for card in node["devs"]} for node in shown}


def wait_empty(lab: Lab, node: str) -> None:
    """Wait until every extender counts no used memory on the node."""

    def empty() -> bool:
        for name in lab.control_planes:
            used = inspect_units(lab, name)[node]
            assert not any(used.values()), f"the extender of {name} says {used}"
        return True

    until(empty, f"{node} is empty", 30, 0.2)


def plugin(lab: Lab, node: str) -> JsonObject:
    """Return the device plugin's pod of a node."""
    found = [pod for pod in lab.server_pods("gpushare-device-plugin") if pod["spec"].get("nodeName") == node]
    alive = [one for one in found if "deletionTimestamp" not in one["metadata"]]
    assert len(alive) == 1, f"{node} has {len(alive)} device plugins"
    return alive[0]


def plugin_page(lab: Lab, node: str, path: str) -> str:
    """Return a page of a node's device plugin from its socket, which root of the node can open."""
    folder = f"/var/lib/kubelet/pods/{plugin(lab, node)['metadata']['uid']}/volumes/kubernetes.io~empty-dir/tmp"
    # The whole path may be longer than a socket's.
    return lab.ssh(node, f"cd {folder} && curl -s -m 5 --unix-socket status.sock http://localhost{path}")


def is_ready(pod: JsonObject) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod["status"].get("conditions") or []
    )


def plugin_pod_spec(lab: Lab) -> JsonObject:
    """Return the pod spec of the device plugin's DaemonSet."""
    found: JsonObject = lab.api.call("GET", DAEMONSET)["spec"]["template"]["spec"]
    return found


def set_plugin_command(lab: Lab, command: list[str]) -> None:
    """Patch the command of the device plugins, without the roles; their pods are replaced one by one."""
    changed = {"containers": [{"name": plugin_pod_spec(lab)["containers"][0]["name"], "command": command}]}
    lab.api.call("PATCH", DAEMONSET, {"spec": {"template": {"spec": changed}}}, STRATEGIC)


def restart_plugin(lab: Lab, node: str) -> None:
    """Delete the device plugin's pod of a node, and wait until its successor is ready."""
    old = plugin(lab, node)["metadata"]
    lab.api.delete(f"/api/v1/namespaces/{old['namespace']}/pods/{old['name']}")

    def new() -> bool:
        pod = plugin(lab, node)
        return pod["metadata"]["uid"] != old["uid"] and is_ready(pod)

    until(new, f"a new device plugin on {node}", 90)


def is_announced(lab: Lab, node: str, cards: int) -> bool:
    """Test whether a node announces this number of healthy cards, and kubelet can allocate all their memory."""
    found = lab.cards(node)
    assert len(found) == cards and all(one["healthy"] for one in found), found
    return lab.allocatable(node) == sum(one["units"] for one in found)
