# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of a suite, and the objects that it creates. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import gpushare as contract
from .._core.types import JsonObject

WORKLOADS, CANARY, HAMI, NVIDIA = "workloads", "canary", "hami", "nvidia"
# A suite for each kind of node that is there.
ALL = "all"
NAMESPACES = {
    WORKLOADS: "kubegpu-acceptance",
    CANARY: "gpushare-canary",
    HAMI: "hami-acceptance",
    NVIDIA: "nvidia-acceptance",
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
    :param cases: more cases for the suites ``hami`` and ``nvidia``.
    :param program_command: a program that computes, and ends with 0 if that worked.
    :param program_image: the image that has it; None for ``image``.
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
    tolerations: t.Sequence[JsonObject] = TOLERATED
    only: t.Collection[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespace", self.namespace or NAMESPACES.get(self.suite, ""))


def namespace(options: Options, run: str) -> JsonObject:
    """Return the suite's namespace."""
    labels = {LABEL: options.suite, RUN_LABEL: run, "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": options.namespace, "labels": labels}}


def labels_of(one: JsonObject | None) -> JsonObject:
    """Return an object's labels; empty where they can't be read."""
    found = ((one or {}).get("metadata") or {}).get("labels")
    return found if isinstance(found, dict) else {}


def user_of(found: JsonObject | None) -> int:
    """Return the user ID for the pods of a namespace: never root, and on OpenShift one of the namespace's range."""
    annotations = ((found or {}).get("metadata") or {}).get("annotations")
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
            "tolerations": [dict(one) for one in options.tolerations],
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
    for one in daemonsets:
        spec = ((one.get("spec") or {}).get("template") or {}).get("spec") or {}
        for container in spec.get("containers") or []:
            arguments = [*(container.get("command") or []), *(container.get("args") or [])]
            if any(command in str(argument) for argument in arguments for command in PLUGIN_COMMANDS):
                return str(container.get("image"))
    return None
