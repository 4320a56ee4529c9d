# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of a suite, its objects, and whether a node can be used, as kube-scheduler counts it. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import backends, hami
from .._contracts import gpushare as contract
from .._contracts.gpushare import Card
from .._contracts.model import Node, Pod
from .._core.types import JsonObject
from .._kube import tolerations

WORKLOADS, CANARY, HAMI, NVIDIA = "workloads", "canary", "hami", "nvidia"
PASSTHROUGH, VGPU, KATA = backends.VIRTUAL
# KubeVirt's pods may do more than others.
OF_KUBEVIRT = (PASSTHROUGH, VGPU)
# A suite for each kind of node that is there.
ALL = "all"
NAMESPACES = {
    WORKLOADS: "kubegpu-acceptance",
    CANARY: "gpushare-canary",
    HAMI: "hami-acceptance",
    NVIDIA: "nvidia-acceptance",
    PASSTHROUGH: "passthrough-acceptance",
    VGPU: "vgpu-acceptance",
    KATA: "kata-acceptance",
}
# Labels of the namespace and its pods: the suite that created them, and the run.
LABEL = "kubegpu.share/acceptance"
RUN_LABEL = "kubegpu.share/acceptance-run"
# OpenShift sets this annotation on a namespace: the user IDs that its pods may have.
UID_RANGE = "openshift.io/sa.scc.uid-range"
NOBODY = 65534
# Seconds. The pods of a killed run hold memory for at most this long, even without a further run.
POD_SECONDS = 3600
PLUGIN_COMMANDS = ("gpushare-device-plugin", "gpushare-dra-driver")
# The taint that nodes with GPUs usually have.
TOLERATED: tuple[JsonObject, ...] = ({"key": "nvidia.com/gpu", "operator": "Exists"},)
# Who allocates the cards of a node.
EXTENDER, DRA = "extender", "dra"
# On a pod: which of them it is for, where a cluster has nodes of both.
POD_ALLOCATION = "kubegpu.share/allocation"


@dataclasses.dataclass(frozen=True)
class Options:
    """The module's options.

    :param image: of the pods; None for the device plugin's own, or the DRA driver's.
    :param node: the only node to use; None to select one.
    :param timeout: seconds that each wait may take.
    :param scheduler_name: of pods that the extender is to place; None for the cluster's own.
    :param placement: which card of a node a pod gets, ``binpack`` or ``spread``.
    :param allocate_command: runs in a container of the canary and tries to hold more than the container's share.
    :param cases: more cases for the suites ``hami``, ``nvidia`` and ``kata``.
    :param program_command: a program that computes, and ends with 0 if that worked.
    :param program_image: the image that has it; None for ``image``.
    :param kata_runtime_class: of the pods of suite ``kata``; None to choose it.
    :param machine_image: a container disk that virtual machines boot; None for virtual machines that boot nothing.
    :param tolerations: of the pods.
    :param only: names of the nodes that may be used; None for all.
    """

    suite: str = CANARY
    namespace: str = ""
    image: str | None = None
    image_pull_policy: str = "IfNotPresent"
    node: str | None = None
    node_selector: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    scheduler_name: str | None = None
    placement: str = contract.PLACEMENTS[0]
    runtime_class: str | None = None
    priority_class: str | None = None
    timeout: float = 120.0
    allocate_command: t.Sequence[str] = ()
    cases: t.Sequence[JsonObject] = ()
    program_command: t.Sequence[str] = ()
    program_image: str | None = None
    kata_runtime_class: str | None = None
    machine_image: str | None = None
    tolerations: t.Sequence[JsonObject] = TOLERATED
    only: t.Collection[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespace", self.namespace or NAMESPACES.get(self.suite, ""))


def namespace(options: Options, run: str) -> JsonObject:
    """Return the suite's namespace."""
    level = "privileged" if options.suite in OF_KUBEVIRT else "restricted"
    labels = {LABEL: options.suite, RUN_LABEL: run, "pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": options.namespace, "labels": labels}}


def labels_of(resource: JsonObject | None) -> JsonObject:
    """Return an object's labels; empty where they can't be read."""
    labels = ((resource or {}).get("metadata") or {}).get("labels")
    return labels if isinstance(labels, dict) else {}


def user_of(resource: JsonObject | None) -> int:
    """Return the user ID for the pods of a namespace: never root, and on OpenShift one of the namespace's range."""
    annotations = ((resource or {}).get("metadata") or {}).get("annotations")
    first = str((annotations if isinstance(annotations, dict) else {}).get(UID_RANGE, "")).partition("/")[0]
    return int(first) if first.isdigit() and len(first) < 11 and int(first) > 0 else NOBODY


@dataclasses.dataclass(frozen=True)
class PodTemplate:
    """What all pods of a run have in common."""

    options: Options
    image: str
    run: str
    user: int

    def pod(self, name: str, units: t.Sequence[int], node: str | None, allocation: str = "") -> JsonObject:
        """Return a pod that sleeps, with one container for each number of units.

        :param node: the only node where it may run; the scheduler still places it, through the extender. It is matched
            as a field, so that a cluster autoscaler sees that a new node wouldn't help. None for any node.
        :param allocation: ``extender`` or ``dra``, which admission turns into a claim; empty for other back ends.
        """
        options = self.options
        containers = [
            {
                "name": f"c{number}",
                "image": self.image,
                "imagePullPolicy": options.image_pull_policy,
                "command": ["sleep", str(POD_SECONDS)],
                "resources": {
                    "requests": {"cpu": "5m", "memory": "16Mi"},
                    "limits": {contract.RESOURCE_MEMORY: str(wanted), "memory": "64Mi"},
                },
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
            for number, wanted in enumerate(units)
        ]
        spec: JsonObject = {
            "containers": containers,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": POD_SECONDS,
            # sleep as PID 1 ignores SIGTERM.
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [dict(toleration) for toleration in options.tolerations],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": self.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        named = {
            "nodeSelector": dict(options.node_selector),
            "runtimeClassName": options.runtime_class,
            # Claims are allocated by the cluster's own.
            "schedulerName": options.scheduler_name if allocation != DRA else None,
            "priorityClassName": options.priority_class,
        }
        spec.update({key: value for key, value in named.items() if value})
        if node:
            term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
            required = {"nodeSelectorTerms": [term]}
            spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        labels = {LABEL: options.suite, RUN_LABEL: self.run}
        if allocation:
            labels[POD_ALLOCATION] = allocation
        metadata = {"name": name, "namespace": options.namespace, "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def plugin_image(daemonsets: t.Iterable[JsonObject]) -> str | None:
    """Return the image of the cluster's own gpushare device plugin or DRA driver; None if there is none."""
    for daemonset in daemonsets:
        spec = ((daemonset.get("spec") or {}).get("template") or {}).get("spec") or {}
        for container in spec.get("containers") or []:
            arguments = [*(container.get("command") or []), *(container.get("args") or [])]
            if any(command in str(argument) for argument in arguments for command in PLUGIN_COMMANDS):
                return str(container.get("image"))
    return None


# A larger number than the API has for a quantity: such a node isn't read any further.
MOST_UNITS = 2**63


@dataclasses.dataclass(frozen=True)
class NodeState:
    """One node at one moment; a unit is gpushare's unit of memory (GiB or MiB).

    :param pods: all of its pods in the API.
    :param allocatable: units that it advertises.
    :param free: units left on each healthy card, by index.
    :param total_free: units left by kube-scheduler's count.
    :param stray: units of pods whose card isn't known.
    :param upstream: its device plugin is upstream's, which announces no cards.
    :param memory_limit: what its device plugin announces about memory limits; empty if nothing.
    :param allocation: who allocates its cards.
    """

    name: str
    cards: tuple[Card, ...]
    pods: tuple[Pod, ...]
    allocatable: int
    free: t.Mapping[int, int]
    total_free: int
    stray: int = 0
    upstream: bool = False
    memory_limit: str = ""
    allocation: str = EXTENDER

    @property
    def largest_card(self) -> int:
        """Units of the largest healthy card."""
        return max((card.units for card in self.cards if card.healthy), default=0)

    @property
    def largest_free(self) -> int:
        """Units left on the card that has most."""
        return max(self.free.values(), default=0)

    @property
    def uids(self) -> frozenset[str]:
        """UIDs of the pods that hold a share."""
        return frozenset(pod.uid for pod in self.pods if pod.holds_units)

    def booked_units(self, index: int, namespace: str) -> int:
        """Return units booked on a card; an extender may leave out terminating pods, so others' aren't counted."""
        return sum(
            pod.booked.get(index, 0)
            for pod in self.pods
            if pod.holds_units and (not pod.terminating or pod.namespace == namespace)
        )


def shares_memory(node: Node) -> bool:
    """Return whether a node advertises gpushare's memory."""
    return node.capacity.get(contract.RESOURCE_MEMORY, 0) > 0


def allocation_of(node: Node) -> str:
    """Return who allocates a node's cards, by its label."""
    return DRA if node.labels.get(contract.NODE_LABEL) == contract.NODE_LABEL_CLAIMS else EXTENDER


def other_backend(node: Node) -> str:
    """Return the name of the other back end that allocates GPUs of a node; empty if there is none."""
    if hami.NODE_REGISTER in node.annotations:
        return "HAMi"
    free = node.allocatable.get(hami.RESOURCE_COUNT, 0)
    is_left = backends.is_left(node.labels, hami.RESOURCE_COUNT, free)
    return "NVIDIA's device plugin" if node.capacity.get(hami.RESOURCE_COUNT, 0) > 0 and not is_left else ""


def no_backend_reason(nodes: t.Iterable[Node]) -> str:
    """Return why a cluster without gpushare can't be tested."""
    others = sorted({other_backend(node) for node in nodes} - {""})
    reason = f"no node advertises {contract.RESOURCE_MEMORY}"
    if not others:
        return reason
    return f"{reason}; the allocations of {' and '.join(others)} here don't follow gpushare's contract"


def unusable_reason(node: Node, selector: t.Mapping[str, str], tolerated: t.Sequence[JsonObject] = TOLERATED) -> str:
    """Return why a node that shares memory can't be used, without its pods; empty if it can."""
    other = other_backend(node)
    if other:
        return f"{other} allocates its GPUs too, so that its free memory is unknown"
    reason = node.problem or refusal(node, selector, tolerated)
    if not reason and node.allocatable.get(contract.RESOURCE_MEMORY, 0) <= 0:
        return "it has no healthy card"
    return reason


def refusal(node: Node, selector: t.Mapping[str, str], tolerated: t.Sequence[JsonObject] = TOLERATED) -> str:
    """Return why a node takes none of the suite's pods: its state, a cordon, its labels, or a taint; else empty.

    :param tolerated: the pods' tolerations.
    """
    if node.ready != "True":
        return "it isn't Ready"
    if not node.schedulable:
        return "it is cordoned"
    if any(node.labels.get(key) != value for key, value in selector.items()):
        return f"it hasn't the labels {', '.join(f'{key}={value}' for key, value in selector.items())}"
    taints = tolerations.untolerated(node.taints, tolerated)
    if taints:
        return f"it has {', '.join(tolerations.shown(taints))}, which the suite's pods don't tolerate"
    return ""


def node_state(node: Node, pods: t.Iterable[Pod]) -> NodeState | str:
    """Compute a node's state, or return why it can't be computed.

    :param pods: any pods; those of other nodes are ignored.
    """
    here = [pod for pod in pods if pod.node == node.name]
    if node.problem or any(pod.problem for pod in here):
        return "its object or one of its pods in the API is malformed"
    counted = [pod for pod in here if pod.holds_units]
    used, stray = {card.index: 0 for card in node.cards}, 0
    for pod in counted:
        for index, units in (pod.booked or {-1: pod.units}).items():
            if index in used:
                used[index] += units
            else:
                stray += units
    allocatable = node.allocatable.get(contract.RESOURCE_MEMORY, 0)
    state = NodeState(
        name=node.name,
        cards=node.cards,
        pods=tuple(here),
        allocatable=allocatable,
        free={card.index: max(0, card.units - used[card.index]) for card in node.cards if card.healthy},
        total_free=allocatable - sum(pod.units for pod in counted),
        stray=stray,
        upstream=not node.announced,
        memory_limit=node.annotations.get(contract.NODE_LIMIT, ""),
        allocation=allocation_of(node),
    )
    numbers = [*state.free.values(), *(card.units for card in node.cards), stray, allocatable, state.total_free]
    if any(abs(number) >= MOST_UNITS for number in numbers):
        return "its numbers are larger than any cluster's"
    return state


def evictable_pods(state: NodeState, priority: int, namespace: str) -> list[str]:
    """Return other namespaces' pods with a share that a pod of this priority may preempt, as ``namespace/name``."""
    return sorted(
        pod.key for pod in state.pods if pod.holds_units and pod.namespace != namespace and pod.priority < priority
    )
