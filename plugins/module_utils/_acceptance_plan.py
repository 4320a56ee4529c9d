# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What acceptance decides without touching anything: which node, which sizes, which objects, what the table looks like.

Sizes are computed from what the cluster really has left, so that the same six checks run on any cluster.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

NAMESPACE_PREFIX = "kubegpu-acceptance-"
LABEL = "kubegpu.share/acceptance"
LABEL_VALUE = "true"

# A run that was killed holds memory for at most this long, even if nobody ever runs acceptance again.
POD_SECONDS = 3600

# Ours says "largest free share on one card is …", upstream's "Insufficient GPU Memory in one device".
EXTENDER_WORDS = ("one card", "one device")
SCHEDULER_WORDS = f"Insufficient {contract.RESOURCE_MEMORY}"

PLUGIN_WORDS = "gpushare-device-plugin"
DEVICE_FILE = re.compile(r"nvidia[0-9]+")

CHECKS = {
    "a": "three pods of 1 unit run on one card",
    "b": "a pod that fits the node but no single card stays Pending, for the extender's reason",
    "c": "a pod larger than the cluster stays Pending",
    "d": "each container sees its own card's device node and no other",
    "e": "both containers of a pod get the same card",
    "f": "after deletion everything is free again",
}


@dataclasses.dataclass(frozen=True)
class NodeView:
    """A node as the extender sees it.

    :param free: units left on each healthy card, by index.
    :param sizes: units of each healthy card, by index.
    :param minors: N of /dev/nvidiaN, by index.
    :param total_free: what kube-scheduler thinks is left on the node.
    :param stray: units of pods whose card isn't known.
    """

    name: str
    free: dict[int, int]
    sizes: dict[int, int]
    minors: dict[int, int]
    total_free: int
    stray: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result. ``result`` is pass, fail or skip."""

    id: str
    result: str
    detail: str

    def as_dict(self) -> dict[str, str]:
        return {"id": self.id, "what": CHECKS[self.id], "result": self.result, "detail": self.detail}


# --------------------------------------------------------------------------- nodes


def _tolerable(taint: Json) -> bool:
    return taint.get("effect") == "PreferNoSchedule" or taint.get("key") == "nvidia.com/gpu"


def usable(node: Json, selector: t.Mapping[str, str]) -> bool:
    """Whether a pod of ours can be scheduled there at all."""
    metadata, spec, status = (node.get(key) or {} for key in ("metadata", "spec", "status"))
    labels = metadata.get("labels") or {}
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or [])
    return (
        ready
        and not spec.get("unschedulable")
        and all(_tolerable(taint) for taint in spec.get("taints") or [])
        and all(labels.get(key) == value for key, value in selector.items())
        and contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable") > 0
    )


def view(node: Json, pods: t.Iterable[Json]) -> NodeView:
    """What is left on each card of a node.

    :param pods: any pods; those of other nodes don't matter.
    """
    name = str(node["metadata"]["name"])
    here = [pod for pod in pods if contract.pod_node(pod) == name and contract.counts(pod)]
    cards = contract.node_cards(node)
    used, stray = contract.used_units(cards, here)
    allocatable = contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable")
    healthy = [card for card in cards if card.healthy]
    return NodeView(
        name=name,
        free={card.index: max(0, card.units - used[card.index]) for card in healthy},
        sizes={card.index: card.units for card in healthy},
        minors={card.index: card.minor for card in cards},
        total_free=allocatable - sum(contract.pod_units(pod) for pod in here),
        stray=stray,
    )


def cluster_units(nodes: t.Iterable[Json]) -> int:
    """All units that the cluster advertises."""
    return sum(contract.node_resource(node, contract.RESOURCE_MEMORY) for node in nodes)


def choose_node(views: t.Sequence[NodeView]) -> NodeView | None:
    """The node on which most can be shown: free cards first, then room for three pods on one card, then the freest."""

    def worth(one: NodeView) -> tuple[bool, bool, bool, int]:
        free_cards = sum(1 for units in one.free.values() if units > 0)
        return free_cards > 1, same_card(one.free, [1, 1, 1]), one.stray == 0, sum(one.free.values())

    candidates = [one for one in views if any(one.free.values())]
    # sorted() is stable: of equal nodes the first by name.
    return max(sorted(candidates, key=lambda one: one.name), key=worth) if candidates else None


# --------------------------------------------------------------------------- sizes


def binpack(free: t.Mapping[int, int], units: int) -> int | None:
    """The card that the extender takes: the fullest that fits, the lowest index of equals."""
    fitting = [(left, index) for index, left in free.items() if left >= units]
    return min(fitting)[1] if fitting else None


def place(free: t.Mapping[int, int], sizes: t.Sequence[int]) -> list[int] | None:
    """The cards of pods that come one after another, or None where one of them doesn't fit."""
    left, cards = dict(free), []
    for units in sizes:
        card = binpack(left, units)
        if card is None:
            return None
        left[card] -= units
        cards.append(card)
    return cards


def same_card(free: t.Mapping[int, int], sizes: t.Sequence[int]) -> bool:
    """Whether these pods land on one card."""
    cards = place(free, sizes)
    return cards is not None and len(set(cards)) == 1


def fragment(one: NodeView) -> tuple[list[int], int] | str:
    """Pods that fill cards, then the size of a pod that fits the node and a whole card, but no card's free share.

    Where cards can't be filled so (they are too small), the pod is larger than any card; where not even that is
    possible, the reason in words.
    """
    if len(one.sizes) < 2:
        return f"node {one.name} has only one healthy card, and so has every better candidate"
    largest = max(one.sizes.values())
    free, fillers = dict(one.free), t.cast("list[int]", [])
    while max(free.values()) >= largest:
        top = max(free.values())
        lower = [left for left in free.values() if left < top]
        # More than any other card has left goes to a fullest one; with equals only, half of it.
        units = max(lower) + 1 if lower else -(-top // 2)
        card = binpack(free, units)
        if card is None or units < 1:
            break
        free[card] -= units
        fillers.append(units)
    left_of_node = one.total_free - sum(fillers)
    wanted = max(free.values()) + 1
    if wanted <= min(largest, left_of_node, sum(free.values())):
        return fillers, wanted
    wanted = max(one.free.values()) + 1
    if wanted <= min(one.total_free, sum(one.free.values())):
        return [], wanted
    return f"the free memory of node {one.name} is all on one card"


def two_containers(free: t.Mapping[int, int]) -> tuple[int, int] | None:
    """Sizes of a pod's two containers such that serving each by itself would use two cards, where that is possible."""
    positive = sorted(left for left in free.values() if left > 0)
    for left in positive:
        if positive[-1] > left:
            return left, 1
    return (1, 1) if positive and positive[-1] >= 2 else None


# --------------------------------------------------------------------------- objects


def namespace(name: str) -> Json:
    labels = {LABEL: LABEL_VALUE, "pod-security.kubernetes.io/enforce": "baseline"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What all our pods have in common."""

    namespace: str
    image: str
    node_selector: t.Mapping[str, str]
    runtime_class: str | None
    scheduler_name: str | None = None

    def pod(self, name: str, units: t.Sequence[int], node: str | None = None) -> Json:
        """A pod whose containers ask for so many units each.

        :param node: the one node where it may run; the scheduler still places it, through the extender.
        """
        containers = [
            {
                "name": f"c{number}",
                "image": self.image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", str(POD_SECONDS)],
                "resources": {
                    "requests": {"cpu": "5m", "memory": "16Mi"},
                    "limits": {contract.RESOURCE_MEMORY: str(wanted), "memory": "64Mi"},
                },
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
            for number, wanted in enumerate(units)
        ]
        spec: Json = {
            "containers": containers,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": POD_SECONDS,
            # sleep as PID 1 doesn't hear SIGTERM.
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        }
        if self.node_selector:
            spec["nodeSelector"] = dict(self.node_selector)
        if self.runtime_class:
            spec["runtimeClassName"] = self.runtime_class
        if self.scheduler_name:
            spec["schedulerName"] = self.scheduler_name
        if node:
            term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
            required = {"nodeSelectorTerms": [term]}
            spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        labels = {LABEL: LABEL_VALUE}
        metadata = {"name": name, "namespace": self.namespace, "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def plugin_image(daemonsets: t.Iterable[Json]) -> str | None:
    """The image of the cluster's own gpushare device plugin."""
    for one in daemonsets:
        spec = ((one.get("spec") or {}).get("template") or {}).get("spec") or {}
        for container in spec.get("containers") or []:
            words = [*(container.get("command") or []), *(container.get("args") or [])]
            if any(PLUGIN_WORDS in str(word) for word in words):
                return str(container.get("image"))
    return None


# --------------------------------------------------------------------------- evidence


def running(pod: Json) -> bool:
    """All containers run."""
    status = pod.get("status") or {}
    up = [one for one in status.get("containerStatuses") or [] if (one.get("state") or {}).get("running") is not None]
    return status.get("phase") == "Running" and len(up) == len((pod.get("spec") or {}).get("containers") or [])


def why(pod: Json) -> str:
    """What the API says of a pod that isn't where it should be, in one line."""
    status = pod.get("status") or {}
    words = [str(status.get("phase", "unknown"))]
    words += [str(status[key]) for key in ("reason", "message") if status.get(key)]
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            words.append(str(one.get("message", one.get("reason", ""))))
    for one in status.get("containerStatuses") or []:
        state = (one.get("state") or {}).get("waiting") or (one.get("state") or {}).get("terminated") or {}
        words += [str(state[key]) for key in ("reason", "message") if state.get(key)]
    return "; ".join(word for word in words if word)


def refusals(pod: Json, events: t.Iterable[Json]) -> list[str]:
    """Why the scheduler left a pod unbound: the text of its FailedScheduling events and of its condition."""
    texts = [
        str(one.get("message", ""))
        for one in (pod.get("status") or {}).get("conditions") or []
        if one.get("type") == "PodScheduled" and one.get("status") == "False"
    ]
    texts += [
        str(one.get("message") or one.get("note") or "")
        for one in events
        if one.get("reason") == "FailedScheduling"
        and (one.get("involvedObject") or one.get("regarding") or {}).get("uid") == contract.pod_uid(pod)
    ]
    return [text for text in texts if text]


def by_extender(texts: t.Iterable[str]) -> str | None:
    """The refusal that is the extender's own, if there is one."""
    for text in texts:
        if SCHEDULER_WORDS not in text and any(words in text for words in EXTENDER_WORDS):
            return text
    return None


def device_files(listing: str) -> list[str]:
    """Names of card device nodes in a listing of /dev."""
    return sorted(name for name in listing.split() if DEVICE_FILE.fullmatch(name))


# --------------------------------------------------------------------------- the table


def table(rows: t.Sequence[Row], about: str) -> str:
    """The result as text: one line per check, then the sum."""
    head = ("ID", "CHECK", "RESULT")
    lines = [head, *((row.id, CHECKS[row.id], row.result) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [about] if about else []
    for line, detail in zip(lines, ["DETAIL", *(row.detail for row in rows)]):
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        text.append("  ".join([*cells, detail]).rstrip())
    counted = {result: sum(1 for row in rows if row.result == result) for result in ("pass", "fail", "skip")}
    text.append(f"{counted['pass']} passed, {counted['fail']} failed, {counted['skip']} skipped")
    return "\n".join(text)
