# SPDX-License-Identifier: GPL-3.0-or-later
"""Record what verify.yml sees of the lab, as a file of tests/unit/check/recordings."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from _lab import JsonObject, Lab

PLAYBOOK = "tests/lab/record_state.yml"
# Programs that come with the lab's nodes, whose pods hold no card and say nothing about a back end.
LEFT_OUT = frozenset({"kube-system", "kube-flannel"})
# What the checks don't read, and what would be most of the file.
UNREAD_NODE = ("images", "nodeInfo", "conditions", "addresses", "daemonEndpoints", "runtimeHandlers", "features")
TOKENS = re.compile(r"kube-api-access-[a-z0-9]+")


def record(lab: Lab, name: str, folder: Path, *arguments: str) -> None:
    """Write the state of the GPU nodes, their pods and the pods that wait.

    :param name: of the file, without its suffix.
    :param arguments: of ansible-playbook.
    """
    evidence = folder / f"{name}.evidence"
    done = lab.playbook(PLAYBOOK, "-e", f"record_state_output={evidence}", *arguments)
    assert done.rc == 0, done.out[-4000:]
    nodes = [_node(lab.api.node(one)) for one in lab.gpu_nodes]
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
    status = {key: value for key, value in node["status"].items() if key not in UNREAD_NODE}
    status["conditions"] = [one for one in node["status"]["conditions"] if one["type"] == "Ready"]
    metadata = {key: node["metadata"][key] for key in ("name", "uid", "labels", "annotations")}
    return {"metadata": metadata, "spec": node["spec"], "status": status}


def _pod(pod: JsonObject) -> JsonObject:
    """Keep of managedFields who set spec.nodeName, and drop the token's volume."""
    kept = {
        "name",
        "namespace",
        "uid",
        "labels",
        "annotations",
        "creationTimestamp",
        "deletionTimestamp",
        "ownerReferences",
    }
    metadata = {key: value for key, value in pod["metadata"].items() if key in kept}
    owners = [
        one for one in pod["metadata"].get("managedFields", []) if "f:nodeName" in one["fieldsV1"].get("f:spec", {})
    ]
    metadata["managedFields"] = [{**one, "fieldsV1": {"f:spec": {"f:nodeName": {}}}} for one in owners]
    text = json.dumps({"metadata": metadata, "spec": pod["spec"], "status": pod["status"]})
    found: JsonObject = json.loads(TOKENS.sub("token", text))
    found["spec"].pop("tolerations", None)
    found["status"].pop("conditions", None)
    return found
