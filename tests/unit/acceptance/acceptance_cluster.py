# SPDX-License-Identifier: GPL-3.0-or-later
"""A made-up cluster: scheduler, extender, kubelet and runtime of a few lines each, all of which can be broken."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, Json
from fake_clock import FakeClock


@dataclasses.dataclass
class Broken:
    """What is wrong with the cluster; nothing by default."""

    no_extender: bool = False
    spread: bool = False
    anything_fits: bool = False
    wrong_card_mounted: bool = False
    all_cards_mounted: bool = False
    no_runtime: bool = False
    containers_split: bool = False
    extender_never_frees: bool = False
    plugin_gone_after_deletion: bool = False
    pods_never_run: bool = False
    never_assigned: bool = False
    says_nothing: bool = False
    namespace_stays: bool = False
    scheduler_words: bool = False


class FakeCluster:
    """Nodes by name, each a list of units per card."""

    def __init__(self, nodes: dict[str, list[int]], clock: FakeClock, broken: Broken | None = None) -> None:
        self.broken = broken or Broken()
        self.node_objects = {name: _node(name, sizes) for name, sizes in nodes.items()}
        self.pod_objects: dict[str, Json] = {}
        self.spaces: dict[str, dict[str, str]] = {}
        self.booked: dict[str, tuple[str, int, int]] = {}
        self.devices: dict[tuple[str, str], list[int]] = {}
        self.created: list[Json] = []
        self.deleted_pods = 0
        self.on_create: t.Callable[[Json], None] = lambda pod: None
        self._uids = itertools.count(1)
        clock.listeners.append(self.tick)

    # ------------------------------------------------------------- the API

    def nodes(self) -> list[Json]:
        return copy.deepcopy(list(self.node_objects.values()))

    def pods(self, namespace: str | None = None) -> list[Json]:
        found = self.pod_objects.values()
        return copy.deepcopy([one for one in found if namespace in (None, one["metadata"]["namespace"])])

    def daemonsets(self) -> list[Json]:
        container = {"name": "plugin", "image": "registry.example/gpushare:1", "command": ["gpushare-device-plugin"]}
        other = {"name": "proxy", "image": "registry.example/proxy:1", "command": ["proxy"]}
        return [{"spec": {"template": {"spec": {"containers": [one]}}}} for one in (other, container)]

    def events(self, namespace: str) -> list[Json]:
        return []

    def namespaces(self, label: str) -> list[str]:
        key, value = label.split("=")
        return [name for name, labels in self.spaces.items() if labels.get(key) == value]

    def create_namespace(self, manifest: Json) -> None:
        self.spaces[manifest["metadata"]["name"]] = manifest["metadata"]["labels"]

    def delete_namespace(self, name: str) -> None:
        for pod in list(self.pod_objects.values()):
            if pod["metadata"]["namespace"] == name:
                self.delete_pod(name, pod["metadata"]["name"])
        if not self.broken.namespace_stays:
            self.spaces.pop(name, None)

    def create_pod(self, manifest: Json) -> None:
        assert manifest["metadata"]["namespace"] in self.spaces, "a pod in a namespace that isn't there"
        pod = copy.deepcopy(manifest)
        pod["metadata"]["uid"] = f"uid-{next(self._uids)}"
        pod["status"] = {"phase": "Pending"}
        self.pod_objects[contract.pod_key(pod)] = pod
        self.created.append(pod)
        self.on_create(pod)

    def delete_pod(self, namespace: str, name: str) -> None:
        pod = self.pod_objects.get(f"{namespace}/{name}")
        if pod is not None:
            pod["metadata"]["deletionTimestamp"] = "now"

    def execute(self, namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        assert list(argv) == ["ls", "/dev"]
        if (f"{namespace}/{pod}", container) not in self.devices:
            raise ShareError(f"exec in pod {pod}: container not found")
        minors = self.devices[f"{namespace}/{pod}", container]
        return "\n".join(["null", "nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in minors)])

    # ------------------------------------------------------------- what moves

    def tick(self) -> None:
        for key, pod in list(self.pod_objects.items()):
            if pod["metadata"].get("deletionTimestamp"):
                del self.pod_objects[key]
                self.deleted_pods += 1
                if not self.broken.extender_never_frees:
                    self.booked.pop(contract.pod_uid(pod), None)
                if self.broken.plugin_gone_after_deletion:
                    for node in self.node_objects.values():
                        node["status"]["allocatable"][contract.RESOURCE_MEMORY] = "0"
            elif not contract.pod_node(pod):
                self._schedule(pod)
            elif pod["status"]["phase"] == "Pending" and not self.broken.pods_never_run:
                self._run(pod)

    def _free(self, node: str) -> dict[int, int]:
        cards = contract.node_cards(self.node_objects[node])
        free = {card.index: card.units for card in cards}
        for where, card, units in self.booked.values():
            if where == node:
                free[card] -= units
        return free

    def _schedule(self, pod: Json) -> None:
        units = contract.pod_units(pod)
        texts = []
        for name, node in self.node_objects.items():
            terms = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
            required = terms.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
            if required and name not in required[0]["matchFields"][0]["values"]:
                continue
            here = [one for one in self.pod_objects.values() if contract.pod_node(one) == name]
            left = contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable")
            left -= sum(contract.pod_units(one) for one in here)
            if units > left and not self.broken.anything_fits:
                texts.append(f"1 Insufficient {contract.RESOURCE_MEMORY}")
                continue
            free = self._free(name)
            fitting = sorted((have, index) for index, have in free.items() if have >= units)
            if self.broken.spread:
                fitting.reverse()
            if not fitting and not (self.broken.no_extender or self.broken.anything_fits):
                asked = f"largest free share on one card is {max(free.values())} of {units} GiB"
                texts.append(
                    f"1 Insufficient {contract.RESOURCE_MEMORY}" if self.broken.scheduler_words else f"1 {asked}"
                )
                continue
            self._bind(pod, name, fitting[0][1] if fitting else None)
            return
        if not self.broken.says_nothing:
            message = f"0/{len(self.node_objects)} nodes are available: {', '.join(texts)}."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            pod["status"]["conditions"] = [condition]

    def _bind(self, pod: Json, node: str, index: int | None) -> None:
        pod["spec"]["nodeName"] = node
        if index is None:
            pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no card fits"}
            return
        self.booked[contract.pod_uid(pod)] = (node, index, contract.pod_units(pod))
        card = next(one for one in contract.node_cards(self.node_objects[node]) if one.index == index)
        booking = contract.booking_annotations([card], pod, 1, assigned=False)
        pod["metadata"]["annotations"] = contract.merge_only(booking, {})

    def _run(self, pod: Json) -> None:
        node, index, _units = self.booked[contract.pod_uid(pod)]
        minors = [card.minor for card in contract.node_cards(self.node_objects[node])]
        for number, container in enumerate(pod["spec"]["containers"]):
            card = index
            if self.broken.wrong_card_mounted or (self.broken.containers_split and number > 0):
                card = (index + 1) % len(minors)
            seen = minors if self.broken.all_cards_mounted else [minors[card]]
            self.devices[contract.pod_key(pod), container["name"]] = [] if self.broken.no_runtime else seen
        if not self.broken.never_assigned:
            pod["metadata"]["annotations"][contract.POD_ASSIGNED] = "true"
        states = [{"name": one["name"], "state": {"running": {}}} for one in pod["spec"]["containers"]]
        pod["status"] = {"phase": "Running", "containerStatuses": states}


def _node(name: str, sizes: list[int]) -> Json:
    # Minors that aren't the index, so that a check of the wrong one shows.
    cards = [
        Card(index=n, uuid=f"GPU-{name}-{n}", minor=n + 3, memory_mib=units * 1024, units=units)
        for n, units in enumerate(sizes)
    ]
    amounts = {contract.RESOURCE_MEMORY: str(sum(sizes)), contract.RESOURCE_COUNT: str(len(sizes))}
    return {
        "metadata": {
            "name": name,
            "labels": {},
            "annotations": {contract.NODE_CARDS: contract.cards_to_annotation(cards)},
        },
        "spec": {},
        "status": {
            "capacity": dict(amounts),
            "allocatable": dict(amounts),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
