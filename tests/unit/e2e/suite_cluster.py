# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated cluster: scheduler, extender, device plugin and kubelet of a few lines each, all of which can break."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.gpushare import Card
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import CANARY, NAMESPACES, Options
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.run import Outcome, run
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError, KubeUnusable
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import CommandFailed
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref, ref_of
from fake_clock import FakeClock

SPACE = NAMESPACES[CANARY]


@dataclasses.dataclass
class Faults:
    """The cluster's faults; none by default."""

    no_extender: bool = False
    plugin_sets_card: bool = False
    spread: bool = False
    upstream_text: bool = False
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
    no_reason: bool = False
    scheduler_error: bool = False
    stale_scheduler: int = 0
    plugin_gone_after_deletion: bool = False
    pods_remain: bool = False
    namespace_remains: bool = False
    default_priority: int = 0
    preemption_policy: str = "PreemptLowerPriority"
    late_account: int = 0
    anything_fits: bool = False
    wrong_card_mounted: bool = False
    all_cards_mounted: bool = False
    no_runtime: bool = False
    containers_split: bool = False


def node(name: str, sizes: list[int], **annotations: str) -> JsonObject:
    # Minor numbers other than the index, so that a mix-up fails.
    cards = [Card(n, f"GPU-{name}-{n}", n + 3, units * 1024, units) for n, units in enumerate(sizes)]
    amounts = {contract.RESOURCE_MEMORY: str(sum(sizes)), contract.RESOURCE_COUNT: str(len(sizes))}
    noted = {contract.NODE_CARDS: contract.cards_to_annotation(cards), **annotations}
    status: JsonObject = {"capacity": dict(amounts), "allocatable": dict(amounts)}
    status["conditions"] = [{"type": "Ready", "status": "True"}]
    metadata = {"name": name, "annotations": noted}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}


class Cluster:
    """Implements ``Kube``; ``failing`` has errors by the prefix of a request (``PATCH Pod``)."""

    def __init__(self, nodes: t.Sequence[JsonObject], faults: Faults | None = None) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self.clock = FakeClock()
        self.faults = faults or Faults()
        self.nodes = {node["metadata"]["name"]: node for node in nodes}
        self.pods: dict[str, JsonObject] = {}
        self.namespaces: dict[str, JsonObject] = {}
        self.booked: dict[str, tuple[str, int, int]] = {}
        self.requested: list[str] = []
        self.created: list[JsonObject] = []
        self.failing: dict[str, ShareError] = {}
        self.events: list[JsonObject] = []
        self._late: list[tuple[float, str]] = []
        self.on_request: t.Callable[[str], object] = lambda request: None
        self._numbers = itertools.count(1)
        self.clock.listeners.append(self.tick)

    # ------------------------------------------------------------- the API

    def _request(self, verb: str, target: str) -> None:
        self.requests[verb] += 1
        self.requested.append(f"{verb} {target}")
        self.on_request(f"{verb} {target}")
        for prefix, error in self.failing.items():
            if f"{verb} {target}".startswith(prefix):
                raise error

    def get(self, ref: Ref) -> JsonObject | None:
        self._request("GET", str(ref))
        if ref.kind == "Namespace":
            return copy.deepcopy(self.namespaces.get(ref.name))
        assert ref.kind == "Node"
        return copy.deepcopy(self.nodes.get(ref.name))

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[JsonObject]:
        self._request("LIST", f"{kind} {namespace or field_selector or label_selector}")
        if kind == "Node":
            return copy.deepcopy(list(self.nodes.values()))
        if kind == "Event":
            return copy.deepcopy(self.events)
        if kind == "DaemonSet":
            container = {"image": "registry.example/gpushare:1", "command": ["gpushare-device-plugin"]}
            return [{"spec": {"template": {"spec": {"containers": [container]}}}}]
        if kind in ("ResourceSlice", "ResourceClaim"):
            return []
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

    def apply(self, definition: JsonObject, manager: str) -> JsonObject:
        ref = ref_of(definition)
        self._request("PATCH", str(ref))
        made = copy.deepcopy(definition)
        if ref.kind == "Namespace":
            there = self.namespaces.setdefault(ref.name, {"metadata": {"managedFields": []}})
            metadata = there["metadata"]
            metadata["name"] = ref.name
            metadata["managedFields"] = [
                managed_field for managed_field in metadata["managedFields"] if managed_field["manager"] != manager
            ]
            metadata["managedFields"].append({"manager": manager})
            metadata["labels"] = dict(made["metadata"].get("labels") or {})
            return copy.deepcopy({**made, **there})
        assert ref.namespace in self.namespaces, "a pod in a namespace that doesn't exist"
        if self.faults.late_account > 0:
            message = (
                f'pods "x" is forbidden: error looking up service account {ref.namespace}/default: '
                'serviceaccount "default" not found'
            )
            raise KubeError(f"kubeconfig: its user may not do this: {message}", 403, "Forbidden", message)
        return self.add(made)

    def add(self, pod: JsonObject) -> JsonObject:
        pod["metadata"].setdefault("uid", f"uid-{next(self._numbers)}")
        pod.setdefault("status", {"phase": "Pending"})
        pod["spec"].setdefault("priority", self.faults.default_priority)
        pod["spec"].setdefault("preemptionPolicy", self.faults.preemption_policy)
        self.pods[contract.pod_key(pod)] = pod
        self.created.append(pod)
        return copy.deepcopy(pod)

    def patch(self, ref: Ref, body: JsonObject, subresource: str = "") -> JsonObject:
        raise AssertionError("a suite patches nothing")

    def delete(self, ref: Ref, version: str = "") -> None:
        self._request("DELETE", str(ref))
        if ref.kind == "Namespace" and ref.name in self.namespaces:
            self.namespaces[ref.name]["metadata"]["deletionTimestamp"] = "now"
            for pod in self.pods.values():
                if pod["metadata"]["namespace"] == ref.name:
                    pod["metadata"]["deletionTimestamp"] = "now"
        elif f"{ref.namespace}/{ref.name}" in self.pods:
            self.pods[f"{ref.namespace}/{ref.name}"]["metadata"]["deletionTimestamp"] = "now"

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        raise AssertionError("a suite reads no logs")

    def version(self) -> JsonObject:
        raise AssertionError("a suite reads no version")

    # ------------------------------------------------------------- simulation

    def add_other(self, name: str, on: str, units: int, card: int | None, **spec: t.Any) -> JsonObject:
        """Add a running pod of another namespace."""
        containers = [{"name": "c", "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}}}]
        pod: JsonObject = {
            "metadata": {"name": name, "namespace": "theirs", "uid": f"theirs-{name}"},
            "spec": {"nodeName": on, "containers": containers, **spec},
            "status": {"phase": "Running"},
        }
        if card is not None:
            self._book(pod, on, card)
        self.pods[contract.pod_key(pod)] = pod
        return pod

    def before(self, text: str, action: t.Callable[[], object]) -> None:
        """Call an action before every request whose description contains a text."""
        self.on_request = lambda request: action() if text in request else None

    def remove_other(self, name: str) -> None:
        pod = self.pods.pop(f"theirs/{name}", None)
        if pod is not None:
            self.booked.pop(contract.pod_uid(pod), None)

    def ours(self) -> list[JsonObject]:
        return [pod for pod in self.pods.values() if pod["metadata"]["namespace"] == SPACE]

    def tick(self) -> None:
        self.faults.late_account -= 1
        self._release_due()
        for key, pod in list(self.pods.items()):
            if pod["metadata"].get("deletionTimestamp"):
                if self.faults.pods_remain and contract.pod_node(pod):
                    continue
                del self.pods[key]
                if not self.faults.never_frees:
                    self._late.append((self.clock.time + self.faults.frees_late, contract.pod_uid(pod)))
                if self.faults.plugin_gone_after_deletion:
                    for node in self.nodes.values():
                        node["status"]["allocatable"][contract.RESOURCE_MEMORY] = "0"
            elif not contract.pod_node(pod):
                self._schedule(pod)
            elif pod["status"]["phase"] == "Pending":
                self._kubelet(pod)
        for name, space in list(self.namespaces.items()):
            inside = any(one["metadata"]["namespace"] == name for one in self.pods.values())
            if space["metadata"].get("deletionTimestamp") and not inside and not self.faults.namespace_remains:
                del self.namespaces[name]
        self._release_due()

    def _release_due(self) -> None:
        for due, uid in self._late:
            if self.clock.time >= due:
                self.booked.pop(uid, None)

    def _free(self, name: str) -> dict[int, int]:
        free = {card.index: card.units for card in contract.node_cards(self.nodes[name]) if card.healthy}
        for where, card, units in self.booked.values():
            if where == name and card in free:
                free[card] -= units
        return free

    def _schedule(self, pod: JsonObject) -> None:
        terms = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
        required = terms.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
        name = required[0]["matchFields"][0]["values"][0] if required else min(self.nodes)
        units, one = contract.pod_units(pod), self.nodes[name]
        here = [other for other in self.pods.values() if contract.counts(other) and contract.pod_node(other) == name]
        left = contract.node_resource(one, contract.RESOURCE_MEMORY, "allocatable") - self.faults.stale_scheduler
        left -= sum(contract.pod_units(other) for other in here)
        free = self._free(name)
        fitting = sorted((have, index) for index, have in free.items() if have >= units)
        reason = "Unschedulable"
        if self.faults.no_reason:
            return
        if self.faults.scheduler_error:
            words, reason = "Post http://127.0.0.1:12345/gpushare-scheduler/filter: refused", "SchedulerError"
        elif self.faults.pending_for:
            words = self.faults.pending_for
        elif self.faults.anything_fits:
            self._bind(pod, name, fitting[0][1] if fitting else 0)
            return
        elif units > left:
            words = f"1 Insufficient {contract.RESOURCE_MEMORY}"
        elif self.faults.no_extender or self.faults.overbooks or fitting:
            cards = [
                index for _have, index in sorted(fitting, key=lambda one: -one[0] if self.faults.spread else one[0])
            ]
            self._bind(pod, name, cards[0] if cards else 0)
            return
        elif self.faults.upstream_text:
            words = "Insufficient GPU Memory in one device"
        elif max(card.units for card in contract.node_cards(one)) < units:
            words = f"CardTooSmall: largest healthy card holds 1 of {units} GiB"
        else:
            words = f"InsufficientGPUMemory: largest free share on one card is {max(free.values())} of {units} GiB"
        message = f"0/1 nodes are available: {words}."
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
        pod["status"]["conditions"] = [condition]

    def _bind(self, pod: JsonObject, name: str, card: int) -> None:
        pod["spec"]["nodeName"] = name
        if self.faults.no_extender:
            return
        self._book(pod, name, card)
        annotations = pod["metadata"]["annotations"]
        if self.faults.wrong_total:
            annotations[contract.POD_CARD_UNITS] = "7"
        if self.faults.wrong_units:
            annotations[contract.POD_UNITS] = "999"
        if self.faults.wrong_card:
            annotations[contract.POD_INDEX] = "9"
        if self.faults.no_assume_time:
            del annotations[contract.POD_ASSUME_TIME]

    def _book(self, pod: JsonObject, name: str, index: int) -> None:
        card = next(one for one in contract.node_cards(self.nodes[name]) if one.index == index)
        self.booked[contract.pod_uid(pod)] = (name, index, contract.pod_units(pod))
        pod["metadata"]["annotations"] = contract.merge_only(contract.booking_annotations([card], pod, 1, False), {})

    def _kubelet(self, pod: JsonObject) -> None:
        if self.faults.admission_error:
            pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"}
            return
        if self.faults.plugin_sets_card and contract.booking(pod) is None:
            self._book(pod, contract.pod_node(pod), 0)
        if not self.faults.never_assigned:
            pod["metadata"].setdefault("annotations", {})[contract.POD_ASSIGNED] = "true"
        if self.faults.never_runs:
            state = {"waiting": {"reason": self.faults.never_runs, "message": "kubelet's message"}}
            pod["status"]["containerStatuses"] = [{"name": "c0", "state": state}]
            return
        states = [{"name": container["name"], "state": {"running": {}}} for container in pod["spec"]["containers"]]
        pod["status"] = {"phase": "Running", "containerStatuses": states}

    def devices(self, namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        """Run ``ls /dev`` in a container."""
        assert list(argv) == ["ls", "/dev"]
        found = self.pods.get(f"{namespace}/{pod}")
        if found is None:
            raise CommandFailed(f"exec in pod {pod}: container not found")
        name, index, _units = self.booked[contract.pod_uid(found)]
        minors = [card.minor for card in contract.node_cards(self.nodes[name])]
        wrong = self.faults.wrong_card_mounted or (self.faults.containers_split and container != "c0")
        mounted = minors if self.faults.all_cards_mounted else [minors[(index + wrong) % len(minors)]]
        numbers = [] if self.faults.no_runtime else mounted
        return "\n".join(["null", "nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in numbers)])


Execute = t.Callable[[str, str, str, t.Sequence[str]], str]


def no_exec(namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
    raise AssertionError("no command was expected")


def attempt(cluster: Cluster, execute: Execute = no_exec, check: bool = False, **options: t.Any) -> Outcome:
    """Run the canary, unless another suite is given."""
    chosen = Options(**{"timeout": 20, **options})
    found = run(cluster, execute, chosen, check, Waiting(20, 1.0, cluster.clock.sleep, cluster.clock.now))
    assert {finding["check"] for finding in found["findings"]} == {
        step["id"] for step in found["acceptance"]["steps"] if step["result"] in ("FAIL", "UNKNOWN")
    }
    return found


def results(found: t.Any) -> dict[str, str]:
    return {step["id"]: step["result"] for step in found["acceptance"]["steps"]}


def what(found: t.Any, identifier: str) -> str:
    return next(step["what"] for step in found["acceptance"]["steps"] if step["id"] == identifier)


AWAY = KubeUnusable("kubeconfig (variable gpu_kubeconfig): the API server at https://x can't be reached: refused")
FORBIDDEN = KubeError("kubeconfig (variable gpu_kubeconfig): its user may not do this: forbidden", 403, "Forbidden")
