# SPDX-License-Identifier: GPL-3.0-or-later
"""Record what verify.yml sees of the lab, as a file of tests/unit/check/recordings."""

from __future__ import annotations

import json
import time
from pathlib import Path

from _lab import JsonObject, Lab

PLAYBOOK = "tests/lab/record_state.yml"
# Programs that come with the lab's nodes, whose pods hold no card and say nothing about a back end.
LEFT_OUT = frozenset({"kube-system", "kube-flannel"})


def record(lab: Lab, name: str, folder: Path, *arguments: str) -> None:
    """Write the state of the GPU nodes, their pods and the pods that wait.

    :param name: of the file, without its suffix.
    :param arguments: of ansible-playbook.
    """
    evidence = folder / f"{name}.evidence"
    done = lab.playbook(PLAYBOOK, "-e", f"record_state_output={evidence}", *arguments)
    assert done.rc == 0, done.out[-4000:]
    nodes = [_node(lab.api.node(node)) for node in lab.gpu_nodes]
    pods = [
        _pod(one)
        for one in lab.api.items("/api/v1/pods")
        if one["metadata"]["namespace"] not in LEFT_OUT
        and one["spec"].get("nodeName", lab.gpu_nodes[0]) in lab.gpu_nodes
    ]
    state = {
        "now": int(time.time()),
        "nodes": nodes,
        "pods": sorted(pods, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"])),
        "configmaps": [],
        "evidence": json.loads(evidence.read_text()),
        "servers": None,
    }
    evidence.unlink()
    (folder / f"{name}.json").write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")


def _node(node: JsonObject) -> JsonObject:
    """Keep of a node what the back ends write, and whether it is ready."""
    metadata = {key: node["metadata"].get(key, {}) for key in ("name", "labels", "annotations")}
    ready = [condition for condition in node["status"]["conditions"] if condition["type"] == "Ready"]
    status = {"conditions": ready, **{key: node["status"][key] for key in ("capacity", "allocatable")}}
    return {"metadata": metadata, "status": status}


def _pod(pod: JsonObject) -> JsonObject:
    """Keep of a pod what the checks read, and of managedFields who set spec.nodeName: no manifest of others."""
    metadata = _part(
        pod["metadata"], "name", "namespace", "uid", "labels", "annotations", "creationTimestamp", "deletionTimestamp"
    )
    owners = [
        managed_field
        for managed_field in pod["metadata"].get("managedFields", [])
        if "f:nodeName" in managed_field["fieldsV1"].get("f:spec", {})
    ]
    metadata["managedFields"] = [{**owner, "fieldsV1": {"f:spec": {"f:nodeName": {}}}} for owner in owners]
    spec = _part(pod["spec"], "nodeName", "schedulerName", "runtimeClassName", "resourceClaims")
    for kind in ("initContainers", "containers"):
        spec[kind] = [_container(one) for one in pod["spec"].get(kind, [])]
    status = _part(pod["status"], "phase", "startTime", "initContainerStatuses")
    return {"metadata": metadata, "spec": spec, "status": status}


def _container(container: JsonObject) -> JsonObject:
    kept = _part(container, "name", "resources", "restartPolicy")
    kept["env"] = [one for one in container.get("env", []) if one["name"].startswith(("NVIDIA_", "CUDA_"))]
    kept["volumeMounts"] = [_part(volume_mount, "mountPath") for volume_mount in container.get("volumeMounts", [])]
    kept["securityContext"] = _part(container.get("securityContext", {}), "privileged")
    return kept


def _part(whole: JsonObject, *keys: str) -> JsonObject:
    return {key: whole[key] for key in keys if key in whole}
