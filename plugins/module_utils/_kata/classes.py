# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The RuntimeClass of Kata's pods, and the labels by which it selects nodes. Pure.

kata-deploy's RuntimeClasses for cards select nvidia.com/cc.ready.state, which only the GPU Operator sets: without it
every pod stays Pending (kata-containers 4.1.0, kata-deploy/try-kata-nvidia-gpu.values.yaml).
"""

from __future__ import annotations

import typing as t

from .._contracts.virtual import CLASSES
from .._core.types import JsonObject
from . import messages

# On a RuntimeClass of ours.
MADE = "kubegpu.share/created-for"


class Options(t.TypedDict):
    """The role's variables, without their prefix; ``classes`` and ``live`` are the cluster's."""

    state: str
    runtime_class: str
    handler: str
    labels: t.Mapping[str, str]
    overhead: t.Mapping[str, str]
    nodes: t.Sequence[str]
    classes: t.Sequence[JsonObject]
    live: t.Sequence[JsonObject]


class Result(t.TypedDict):
    """The plan; of the rest nothing holds where there are problems.

    ``definition`` is the RuntimeClass to create; empty where somebody else has made it. ``nodes`` are definitions of
    labels.
    """

    problems: list[JsonObject]
    definition: JsonObject
    nodes: list[JsonObject]


def selector_of(item: JsonObject) -> dict[str, str]:
    """Return the labels by which a RuntimeClass selects nodes."""
    return dict((item.get("scheduling") or {}).get("nodeSelector") or {})


def is_ours(item: JsonObject) -> bool:
    """Return whether this collection made a RuntimeClass."""
    return MADE in ((item.get("metadata") or {}).get("annotations") or {})


def definition(options: Options) -> JsonObject:
    """Return the RuntimeClass as this collection makes it."""
    made: JsonObject = {
        "apiVersion": CLASSES[0],
        "kind": CLASSES[1],
        "metadata": {"name": options["runtime_class"], "annotations": {MADE: "kata"}},
        "handler": options["handler"],
    }
    if options["labels"]:
        made["scheduling"] = {"nodeSelector": dict(options["labels"])}
    if options["overhead"]:
        made["overhead"] = {"podFixed": dict(options["overhead"])}
    return made


def plan(options: Options) -> Result:
    """Return the RuntimeClass and the labels that are needed, and what stands in the way."""
    name = options["runtime_class"]
    there = next((item for item in options["classes"] if item["metadata"]["name"] == name), None)
    managed = options["state"] == "managed"
    problems: list[JsonObject] = []
    wanted: JsonObject = {}
    if managed and (there is None or is_ours(there)):
        wanted = definition(options)
        selector = selector_of(wanted)
    elif there is None:
        return {"problems": [messages.row("no_class", name=name)], "definition": {}, "nodes": []}
    else:
        selector = selector_of(there)
        if there.get("handler") != options["handler"]:
            fields = {"found": there.get("handler"), "wanted": options["handler"]}
            problems.append(messages.row("class_handler", name=name, **fields))
    live = {str(node["metadata"]["name"]): node["metadata"].get("labels") or {} for node in options["live"]}
    definitions = []
    for node in options["nodes"]:
        if node not in live:
            problems.append(messages.row("no_node", node=node))
            continue
        ours = {key: value for key, value in selector.items() if managed and options["labels"].get(key) == value}
        for key, value in sorted(selector.items()):
            fields = {"name": name, "label": key, "wanted": value, "node": node}
            if key in live[node] and live[node][key] != value:
                problems.append(messages.row("label_differs", **fields, found=live[node][key]))
            elif key not in live[node] and key not in ours:
                problems.append(messages.row("label_missing", **fields, who=_who(key, managed)))
        if ours:
            metadata = {"name": node, "labels": ours}
            definitions.append({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    return {"problems": problems, "definition": wanted, "nodes": definitions}


def _who(label: str, managed: bool) -> str:
    if label.startswith(("katacontainers.io/", "kata-deploy")):
        return "kata-deploy sets it once it has installed Kata there"
    return "add it to kata_labels" if managed else "set it, or set kata_state: managed, which does"
