# SPDX-License-Identifier: GPL-3.0-or-later
"""A made-up cluster behind the door: scheduler, extender, plugin and kubelet of a few lines each, all breakable."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._canary_objects import Wish
from ansible_collections.kubegpu.share.plugins.module_utils._canary_run import run
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, Json
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Ref, ref_of
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting
from fake_clock import FakeClock

SPACE = "gpushare-canary"


@dataclasses.dataclass
class Broken:
    """What is wrong with the cluster; nothing by default."""

    no_extender: bool = False
    plugin_names_cards: bool = False
    spread: bool = False
    upstream_words: bool = False
    overbooks: bool = False
    never_frees: bool = False
    frees_late: float = 0.0
    wrong_total: bool = False
    wrong_units: bool = False
    wrong_card: bool = False
    no_assume_time: bool = False
    never_assigned: bool = False
    never_runs: str = ""
    admission_error: bool = False
    pending_for: str = ""
    silent: bool = False
    scheduler_error: bool = False
    stale_scheduler: int = 0
    plugin_gone_after_deletion: bool = False
    pods_stay: bool = False
    space_stays: bool = False
    default_priority: int = 0
    late_account: int = 0


def node(name: str, sizes: list[int], **annotations: str) -> Json:
    # Minors that aren't the index, so that a check of the wrong one shows.
    cards = [Card(n, f"GPU-{name}-{n}", n + 3, units * 1024, units) for n, units in enumerate(sizes)]
    amounts = {contract.RESOURCE_MEMORY: str(sum(sizes)), contract.RESOURCE_COUNT: str(len(sizes))}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {contract.NODE_CARDS: contract.cards_to_annotation(cards), **annotations},
        },
        "spec": {},
        "status": {
            "capacity": dict(amounts),
            "allocatable": dict(amounts),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class Cluster:
    """The ``Kube`` of the collection; ``failing`` are errors by the beginning of what is asked (``PATCH Pod``)."""

    def __init__(self, nodes: t.Sequence[Json], broken: Broken | None = None) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self.clock = FakeClock()
        self.broken = broken or Broken()
        self.nodes = {one["metadata"]["name"]: one for one in nodes}
        self.pods: dict[str, Json] = {}
        self.spaces: dict[str, Json] = {}
        self.booked: dict[str, tuple[str, int, int]] = {}
        self.asked: list[str] = []
        self.created: list[Json] = []
        self.failing: dict[str, ShareError] = {}
        self.events: list[Json] = []
        self._late: list[tuple[float, str]] = []
        self.on_request: t.Callable[[str], None] = lambda what: None
        self._numbers = itertools.count(1)
        self.clock.listeners.append(self.tick)

    # ------------------------------------------------------------- the API

    def _ask(self, verb: str, what: str) -> None:
        self.requests[verb] += 1
        self.asked.append(f"{verb} {what}")
        self.on_request(f"{verb} {what}")
        for beginning, error in self.failing.items():
            if f"{verb} {what}".startswith(beginning):
                raise error

    def get(self, ref: Ref) -> Json | None:
        self._ask("GET", str(ref))
        if ref.kind == "Namespace":
            return copy.deepcopy(self.spaces.get(ref.name))
        assert ref.kind == "Node"
        return copy.deepcopy(self.nodes.get(ref.name))

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[Json]:
        self._ask("LIST", f"{kind} {namespace or field_selector or label_selector}")
        if kind == "Node":
            return copy.deepcopy(list(self.nodes.values()))
        if kind == "Event":
            return copy.deepcopy(self.events)
        if kind == "DaemonSet":
            container = {"image": "registry.example/gpushare:1", "command": ["gpushare-device-plugin"]}
            return [{"spec": {"template": {"spec": {"containers": [container]}}}}]
        assert kind == "Pod"
        found = list(self.pods.values())
        if namespace:
            found = [one for one in found if one["metadata"]["namespace"] == namespace]
        if field_selector:
            key, _is, value = field_selector.partition("=")
            assert key == "spec.nodeName"
            found = [one for one in found if contract.pod_node(one) == value]
        if label_selector:
            found = [one for one in found if label_selector in (one["metadata"].get("labels") or {})]
        return copy.deepcopy(found)

    def apply(self, definition: Json, manager: str) -> Json:
        ref = ref_of(definition)
        self._ask("PATCH", str(ref))
        made = copy.deepcopy(definition)
        if ref.kind == "Namespace":
            there = self.spaces.setdefault(ref.name, {"metadata": {"managedFields": []}})
            metadata = there["metadata"]
            metadata["name"] = ref.name
            metadata["managedFields"] = [one for one in metadata["managedFields"] if one["manager"] != manager]
            metadata["managedFields"].append({"manager": manager})
            metadata["labels"] = dict(made["metadata"].get("labels") or {})
            return copy.deepcopy({**made, **there})
        assert ref.namespace in self.spaces, "a pod in a namespace that isn't there"
        if self.broken.late_account > 0:
            raise ShareError(
                'kubeconfig: its user may not do this: pods "x" is forbidden: error looking up service account '
                f'{ref.namespace}/default: serviceaccount "default" not found'
            )
        return self.add(made)

    def add(self, pod: Json) -> Json:
        pod["metadata"].setdefault("uid", f"uid-{next(self._numbers)}")
        pod.setdefault("status", {"phase": "Pending"})
        pod["spec"].setdefault("priority", self.broken.default_priority)
        pod["spec"].setdefault("preemptionPolicy", "PreemptLowerPriority")
        self.pods[contract.pod_key(pod)] = pod
        self.created.append(pod)
        return copy.deepcopy(pod)

    def patch(self, ref: Ref, body: Json, subresource: str = "") -> Json:
        raise AssertionError("the canary patches nothing")

    def delete(self, ref: Ref) -> None:
        self._ask("DELETE", str(ref))
        if ref.kind == "Namespace" and ref.name in self.spaces:
            self.spaces[ref.name]["metadata"]["deletionTimestamp"] = "now"
            for pod in self.pods.values():
                if pod["metadata"]["namespace"] == ref.name:
                    pod["metadata"]["deletionTimestamp"] = "now"
        elif f"{ref.namespace}/{ref.name}" in self.pods:
            self.pods[f"{ref.namespace}/{ref.name}"]["metadata"]["deletionTimestamp"] = "now"

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        raise AssertionError("the canary reads no logs")

    def version(self) -> Json:
        raise AssertionError("the canary asks for no version")

    # ------------------------------------------------------------- what moves

    def stranger(self, name: str, on: str, units: int, card: int | None, **spec: t.Any) -> Json:
        """A pod of somebody else that runs."""
        pod: Json = {
            "metadata": {"name": name, "namespace": "theirs", "uid": f"theirs-{name}"},
            "spec": {
                "nodeName": on,
                "containers": [{"name": "c", "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}}}],
                **spec,
            },
            "status": {"phase": "Running"},
        }
        if card is not None:
            self._book(pod, on, card)
        self.pods[contract.pod_key(pod)] = pod
        return pod

    def leaves(self, name: str) -> None:
        pod = self.pods.pop(f"theirs/{name}", None)
        if pod is not None:
            self.booked.pop(contract.pod_uid(pod), None)

    def ours(self) -> list[Json]:
        return [one for one in self.pods.values() if one["metadata"]["namespace"] == SPACE]

    def tick(self) -> None:
        self.broken.late_account -= 1
        self._free_what_is_due()
        for key, pod in list(self.pods.items()):
            if pod["metadata"].get("deletionTimestamp"):
                if self.broken.pods_stay and contract.pod_node(pod):
                    continue
                del self.pods[key]
                if not self.broken.never_frees:
                    self._late.append((self.clock.time + self.broken.frees_late, contract.pod_uid(pod)))
                if self.broken.plugin_gone_after_deletion:
                    for one in self.nodes.values():
                        one["status"]["allocatable"][contract.RESOURCE_MEMORY] = "0"
            elif not contract.pod_node(pod):
                self._schedule(pod)
            elif pod["status"]["phase"] == "Pending":
                self._kubelet(pod)
        for name, space in list(self.spaces.items()):
            inside = any(one["metadata"]["namespace"] == name for one in self.pods.values())
            if space["metadata"].get("deletionTimestamp") and not inside and not self.broken.space_stays:
                del self.spaces[name]
        self._free_what_is_due()

    def _free_what_is_due(self) -> None:
        for due, uid in self._late:
            if self.clock.time >= due:
                self.booked.pop(uid, None)

    def _free(self, name: str) -> dict[int, int]:
        free = {card.index: card.units for card in contract.node_cards(self.nodes[name]) if card.healthy}
        for where, card, units in self.booked.values():
            if where == name and card in free:
                free[card] -= units
        return free

    def _schedule(self, pod: Json) -> None:
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (name,) = required["nodeSelectorTerms"][0]["matchFields"][0]["values"]
        units, one = contract.pod_units(pod), self.nodes[name]
        here = [other for other in self.pods.values() if contract.counts(other) and contract.pod_node(other) == name]
        left = contract.node_resource(one, contract.RESOURCE_MEMORY, "allocatable") - self.broken.stale_scheduler
        left -= sum(contract.pod_units(other) for other in here)
        free = self._free(name)
        fitting = sorted((have, index) for index, have in free.items() if have >= units)
        reason = "Unschedulable"
        if self.broken.silent:
            return
        if self.broken.scheduler_error:
            words, reason = "Post http://127.0.0.1:12345/gpushare-scheduler/filter: refused", "SchedulerError"
        elif self.broken.pending_for:
            words = self.broken.pending_for
        elif units > left:
            words = f"1 Insufficient {contract.RESOURCE_MEMORY}"
        elif self.broken.no_extender or self.broken.overbooks or fitting:
            cards = [index for _have, index in (reversed(fitting) if self.broken.spread else fitting)]
            self._bind(pod, name, cards[0] if cards else 0)
            return
        elif self.broken.upstream_words:
            words = "Insufficient GPU Memory in one device"
        elif max(card.units for card in contract.node_cards(one)) < units:
            words = f"largest healthy card holds 1 of {units} GiB"
        else:
            words = f"largest free share on one card is {max(free.values())} of {units} GiB"
        message = f"0/1 nodes are available: {words}."
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
        pod["status"]["conditions"] = [condition]

    def _bind(self, pod: Json, name: str, card: int) -> None:
        pod["spec"]["nodeName"] = name
        if self.broken.no_extender:
            return
        self._book(pod, name, card)
        annotations = pod["metadata"]["annotations"]
        if self.broken.wrong_total:
            annotations[contract.POD_CARD_UNITS] = "7"
        if self.broken.wrong_units:
            annotations[contract.POD_UNITS] = "999"
        if self.broken.wrong_card:
            annotations[contract.POD_INDEX] = "9"
        if self.broken.no_assume_time:
            del annotations[contract.POD_ASSUME_TIME]

    def _book(self, pod: Json, name: str, index: int) -> None:
        card = next(one for one in contract.node_cards(self.nodes[name]) if one.index == index)
        self.booked[contract.pod_uid(pod)] = (name, index, contract.pod_units(pod))
        pod["metadata"]["annotations"] = contract.merge_only(contract.booking_annotations([card], pod, 1, False), {})

    def _kubelet(self, pod: Json) -> None:
        if self.broken.admission_error:
            pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"}
            return
        if self.broken.plugin_names_cards and contract.booking(pod) is None:
            self._book(pod, contract.pod_node(pod), 0)
        if not self.broken.never_assigned:
            pod["metadata"].setdefault("annotations", {})[contract.POD_ASSIGNED] = "true"
        if self.broken.never_runs:
            state = {"waiting": {"reason": self.broken.never_runs, "message": "says kubelet"}}
            pod["status"]["containerStatuses"] = [{"name": "c0", "state": state}]
            return
        states = [{"name": one["name"], "state": {"running": {}}} for one in pod["spec"]["containers"]]
        pod["status"] = {"phase": "Running", "containerStatuses": states}


Answer = t.Callable[[str, str, str, t.Sequence[str]], str]


def no_exec(namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
    raise AssertionError("nobody asked for it")


def attempt(cluster: Cluster, execute: Answer = no_exec, check: bool = False, **wish: t.Any) -> Json:
    chosen = Wish(**{"timeout": 20, **wish})
    found = run(cluster, execute, chosen, check, Waiting(20, 1.0, cluster.clock.sleep, cluster.clock.now))
    assert {one["check"] for one in found["findings"]} == {
        one["id"] for one in found["canary"]["steps"] if one["result"] in ("FAIL", "UNKNOWN")
    }
    return found


def results(found: Json) -> dict[str, str]:
    return {one["id"]: one["result"] for one in found["canary"]["steps"]}


def what(found: Json, identifier: str) -> str:
    return next(one["what"] for one in found["canary"]["steps"] if one["id"] == identifier)


AWAY = BadInput("kubeconfig (variable gpu_kubeconfig): the API server at https://x can't be reached: refused")
FORBIDDEN = ShareError("kubeconfig (variable gpu_kubeconfig): its user may not do this: it is forbidden")
