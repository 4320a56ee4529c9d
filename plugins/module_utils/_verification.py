# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Do API, kubelet and NVML tell one story: the cluster's nodes and pods against what the machines showed."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils import _memory_limit as limits
from ansible_collections.kubegpu.share.plugins.module_utils import _scheduler_choice as choice
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_info import UNFINISHED
from ansible_collections.kubegpu.share.plugins.module_utils._control_plane import ANNOTATION, FOLDER
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube
from ansible_collections.kubegpu.share.plugins.module_utils._rollout import ready, reasons
from ansible_collections.kubegpu.share.plugins.module_utils._verification_scheduler import (
    DENY,
    NONE,
    WARN,
    look_at_scheduler,
)

COMPONENT = "app.kubernetes.io/component"
PART_OF = ("app.kubernetes.io/part-of", "gpushare")
EXTENDER = "extender"
DEVICE_PLUGIN = "device-plugin"
SCHEDULER = "scheduler"


@dataclasses.dataclass(frozen=True)
class Expected:
    """What should be there.

    :param cards: by GPU node, the UUIDs that were seen on the machine itself; empty where nobody looked.
    :param control_plane: nodes on which a scheduler runs.
    :param namespace: of the servers.
    :param scheduler: how the cluster runs its scheduler, as ``scheduler_info`` tells.
    """

    cards: t.Mapping[str, t.Sequence[str]]
    control_plane: t.Sequence[str]
    namespace: str
    scheduler: str = choice.STATIC_POD


@dataclasses.dataclass
class Story:
    """``problems`` contradict, ``unknown`` lacks evidence (and is never taken for a pass), ``passed`` agrees.

    ``notes`` contradict nothing, and somebody should know of them.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    passed: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def compare(expected: Expected, nodes: t.Sequence[Json], pods: t.Sequence[Json]) -> Story:
    story = Story()
    servers = [pod for pod in pods if _of_ours(pod, expected.namespace)]
    by_name = {node["metadata"]["name"]: node for node in nodes}
    if expected.scheduler in choice.ON_MACHINES:
        for name in expected.control_plane:
            _server(story, EXTENDER, name, servers)
            _asks(story, name, expected.scheduler, pods)
    else:
        _somewhere(story, SCHEDULER if expected.scheduler == choice.DEDICATED else EXTENDER, pods)
    sharing = [name for name, node in by_name.items() if _labelled(node)]
    for name in sorted(set(sharing) | set(expected.cards)):
        if name not in by_name:
            story.problems.append(f"node {name} isn't in the cluster")
            continue
        if name not in sharing:
            story.problems.append(f"node {name} lacks the label {contract.NODE_LABEL}={contract.NODE_LABEL_VALUE}")
        _server(story, DEVICE_PLUGIN, name, servers)
        if _capacity(story, by_name[name]):
            _identity(story, by_name[name], expected.cards.get(name) or ())
            _shares(story, by_name[name], pods)
            if limits.told(by_name[name]) == contract.LIMIT_ENFORCED:
                story.passed.append(f"node {name}: NVIDIA's driver holds the pods to their shares")
    story.notes += limits.notes(by_name[name] for name in sorted(sharing))
    return story


def _of_ours(pod: Json, namespace: str) -> bool:
    metadata = pod.get("metadata") or {}
    return metadata.get("namespace") == namespace and (metadata.get("labels") or {}).get(PART_OF[0]) == PART_OF[1]


def _labelled(node: Json) -> bool:
    return (node["metadata"].get("labels") or {}).get(contract.NODE_LABEL) == contract.NODE_LABEL_VALUE


def _server(story: Story, component: str, node: str, servers: t.Iterable[Json]) -> None:
    mine = [
        pod
        for pod in servers
        if pod["metadata"]["labels"].get(COMPONENT) == component and contract.pod_node(pod) == node
    ]
    if any(ready(pod) for pod in mine):
        story.passed.append(f"{component} is ready on {node}")
    elif mine:
        story.problems.append(f"{component} isn't ready on {node}: {'; '.join(reasons(None, mine, []))}")
    else:
        story.problems.append(f"{component} doesn't run on {node}")


def _asks(story: Story, node: str, mode: str, pods: t.Iterable[Json]) -> None:
    """Whether the scheduler of a node still has the configuration with the extender; an upgrade may have taken it."""
    if mode == choice.K3S:
        story.unknown.append(
            f"node {node}: k3s doesn't show its scheduler's arguments; site.yml with --check compares them"
        )
        return
    key, value = choice.SCHEDULER_LABEL.split("=")
    mine = [
        pod
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(key) == value
        and pod["metadata"].get("namespace") == "kube-system"
        and contract.pod_node(pod) == node
    ]
    if not mine:
        story.problems.append(f"node {node}: no kube-scheduler runs there")
    for pod in mine:
        words = [
            str(word) for one in pod["spec"]["containers"] for word in one.get("command", []) + one.get("args", [])
        ]
        told = ANNOTATION in (pod["metadata"].get("annotations") or {})
        if told or any(f"={FOLDER}/" in word or word.startswith(f"{FOLDER}/") for word in words):
            story.passed.append(f"kube-scheduler on {node} has the configuration with the extender")
        elif any(word.startswith(("--config", "--policy-config")) for word in words):
            story.unknown.append(
                f"node {node}: kube-scheduler has a configuration of its own, and the API doesn't tell whether the "
                "extender is in it; site.yml with --check compares it"
            )
        else:
            story.problems.append(
                f"node {node}: kube-scheduler has lost the configuration with the extender (kubeadm upgrade writes its "
                "manifest anew) and binds pods without a card; run site.yml again"
            )


def _somewhere(story: Story, component: str, pods: t.Iterable[Json]) -> None:
    """A server that is bound to no node, and has a namespace of its own."""
    labelled = [(pod, pod["metadata"].get("labels") or {}) for pod in pods]
    mine = [pod for pod, has in labelled if has.get(PART_OF[0]) == PART_OF[1] and has.get(COMPONENT) == component]
    if any(ready(pod) for pod in mine):
        story.passed.append(f"{component} is ready")
    else:
        why = "; ".join(reasons(None, mine, [])) if mine else "it has no pod"
        story.problems.append(f"{component} isn't ready: {why}")


def _capacity(story: Story, node: Json) -> bool:
    """Whether the node announces cards, of which there is more to tell."""
    name, cards = node["metadata"]["name"], contract.node_cards(node)
    capacity = contract.node_resource(node, contract.RESOURCE_MEMORY)
    allocatable = contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable")
    whole, healthy = sum(card.units for card in cards), sum(card.units for card in cards if card.healthy)
    if not cards or capacity <= 0:
        story.problems.append(f"node {name} announces no {contract.RESOURCE_MEMORY}")
        return False
    if capacity != whole or allocatable != healthy:
        story.problems.append(
            f"node {name}: kubelet has {allocatable} of {capacity} units to give, its cards hold {healthy} of {whole}"
        )
    else:
        story.passed.append(f"node {name}: {allocatable} units to give are those of its {len(cards)} cards")
    for card in cards:
        if not card.healthy:
            why = f": {card.reason}" if card.reason else ""
            story.problems.append(f"node {name}: card {_card(card)} is unhealthy{why}")
    return True


def _identity(story: Story, node: Json, seen: t.Sequence[str]) -> None:
    name = node["metadata"]["name"]
    told = {card.uuid for card in contract.node_cards(node) if card.uuid}
    if not told:
        story.unknown.append(f"node {name}: its device plugin doesn't tell the cards' UUIDs")
    elif not seen:
        story.unknown.append(f"node {name}: its machine wasn't looked at in this run, so its cards can't be compared")
    elif told != set(seen):
        story.problems.append(
            f"node {name}: the device plugin tells of {', '.join(sorted(told))}, "
            f"the machine has {', '.join(sorted(seen))}"
        )
    else:
        story.passed.append(f"node {name}: the cards are those of the machine")


def _shares(story: Story, node: Json, pods: t.Iterable[Json]) -> None:
    name, cards = node["metadata"]["name"], contract.node_cards(node)
    used, unknown = contract.used_units(cards, (pod for pod in pods if contract.pod_node(pod) == name))
    over = [card for card in cards if used[card.index] > card.units]
    for card in over:
        story.problems.append(
            f"node {name}: pods hold {used[card.index]} units of card {_card(card)}, which has {card.units}"
        )
    if unknown:
        story.unknown.append(f"node {name}: pods hold {unknown} units of which the API doesn't say on which card")
    if cards and not over:
        story.passed.append(f"node {name}: no card is given away more than once")


def _card(card: Card) -> str:
    return f"{card.index} ({card.uuid})" if card.uuid else str(card.index)


ARGUMENTS: Json = {
    "cards": {"type": "dict", "default": {}},
    "control_plane": {"type": "list", "elements": "str", "default": []},
    "namespace": {"type": "str", "default": "gpushare-system"},
    "scheduler": {
        "type": "str",
        "choices": [*choice.ON_MACHINES, choice.DEDICATED, choice.OPENSHIFT],
        "default": choice.STATIC_POD,
    },
    "admission": {"type": "str", "choices": [DENY, WARN, NONE], "default": DENY},
}


def look(kube: Kube, params: Json) -> Json:
    """Ask the cluster, and compare."""
    expected = Expected(params["cards"], params["control_plane"], params["namespace"], params["scheduler"])
    pods = kube.list_all("v1", "Pod", field_selector=UNFINISHED)
    story = compare(expected, kube.list_all("v1", "Node"), pods)
    for field, text in look_at_scheduler(kube, expected.scheduler, params["admission"], pods):
        getattr(story, field).append(text)
    return {**dataclasses.asdict(story), "requests": dict(kube.requests)}
