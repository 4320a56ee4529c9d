# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite ``nvidia``: cases on one node of NVIDIA's device plugin, and how it announces its cards."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing as t

from .._allocation.pods import nvidia_counts
from .._contracts import backends
from .._contracts import nvidia_plugin as contract
from .._contracts.claims import MALFORMED
from .._contracts.model import Node, Pod
from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .._kube.pod_exec import Execute
from .case_suite import CaseSuite
from .cases import ALLOCATE, COMPUTE, OUT_OF_MEMORY, Case
from .client import SuiteClient
from .nodes import Options

# In limits: the resource by which the node announces its cards.
CARD = "card"
EXCLUSIVE, SHARED, TIME_SLICING, MPS = "exclusive", "shared", "time-slicing", "mps"
MIG, MIG_SINGLE, MIG_MIXED = "mig", "mig-single", "mig-mixed"
# Of shared cards: by which name they are announced, and whether a container may request two replicas.
RENAMED, SAME_NAME, ONE_EACH, SEVERAL_EACH = "renamed", "same-name", "one-each", "several-each"
KINDS = (EXCLUSIVE, SHARED, TIME_SLICING, MPS, MIG, MIG_SINGLE, MIG_MIXED, RENAMED, SAME_NAME, ONE_EACH, SEVERAL_EACH)


@dataclasses.dataclass(frozen=True)
class Announced:
    """How a node announces its cards.

    :param resource: that the cases request.
    :param kinds: of ``KINDS``.
    :param cards: whole cards of the node; 0 where that isn't known.
    """

    resource: str
    kinds: frozenset[str]
    cards: int


def announced(node: Node, configuration: JsonObject | None) -> Announced | None:
    """Return how a node announces its cards; None where it announces none.

    :param configuration: the plugin's for the node; None where it can't be read. Labels have the rest.
    """
    free = {name: count for name, count in contract.announced(node.allocatable).items() if count > 0}
    if not free:
        return None
    # A profile of MIG before whole cards, which the other cases show elsewhere.
    resource = min(free, key=lambda name: (not name.startswith(contract.RESOURCE_MIG), name))
    labels = node.labels
    sharing = _sharing(configuration, labels, resource)
    kinds = {SHARED, sharing} if sharing else {EXCLUSIVE}
    if sharing:
        kinds.add(RENAMED if resource.endswith(contract.SHARED) else SAME_NAME)
        only_one = _only_one(configuration, sharing)
        kinds |= set() if only_one is None else {ONE_EACH if only_one else SEVERAL_EACH}
    flags = (configuration or {}).get("flags") or {}
    strategy = str(flags.get("migStrategy") or labels.get(contract.LABEL_MIG_STRATEGY) or "")
    if resource.startswith(contract.RESOURCE_MIG):
        kinds |= {MIG, MIG_MIXED}
    elif strategy == "single" and "MIG" in str(labels.get(contract.LABEL_PRODUCT) or "MIG"):
        kinds |= {MIG, MIG_SINGLE}
    return Announced(resource, frozenset(kinds), int(contract.cards(labels)[0]["count"] or 0))


_SHARING = {"timeSlicing": TIME_SLICING, "mps": MPS}


def _sharing(configuration: JsonObject | None, labels: t.Mapping[str, t.Any], resource: str) -> str:
    """Return how a resource is shared; empty where it isn't."""
    unshared = contract.unshared(resource)
    for key, name in _SHARING.items():
        shared = ((configuration or {}).get("sharing") or {}).get(key) or {}
        if any(listed.get("name") == unshared for listed in shared.get("resources") or []):
            return name
    if configuration is not None:
        return ""
    strategy = labels.get(f"{unshared}.sharing-strategy") or labels.get(contract.LABEL_STRATEGY)
    return str(strategy) if strategy in _SHARING.values() else ""


def _only_one(configuration: JsonObject | None, sharing: str) -> bool | None:
    """Return whether a container may request no more than one replica; None where that isn't known."""
    if configuration is None:
        return None
    [key] = [key for key, name in _SHARING.items() if name == sharing]
    value = configuration["sharing"][key].get("failRequestsGreaterThanOne")
    # Without a value the plugin refuses two replicas of MPS, and grants those of time slices.
    return sharing == MPS if value is None else bool(value)


def configuration_of(data: t.Mapping[str, str], label: str | None) -> JsonObject | None:
    """Return the plugin's configuration for a node.

    :param data: of the plugin's ConfigMap.
    :param label: the node's, which names one of them; None where it has none.
    :returns: None where it isn't there, or isn't JSON: only the plugin reads all of YAML.
    """
    text = data.get(label) if label else next(iter(data.values()), None) if len(data) == 1 else None
    try:
        configuration = json.loads(text or "")
    except ValueError:
        return None
    return configuration if isinstance(configuration, dict) else None


def free(node: Node, pods: t.Iterable[Pod], resource: str) -> int:
    """Return how many devices of a resource are free on a node.

    :param pods: those on it that haven't ended.
    """
    held = sum(nvidia_counts(pod)[0].get(resource, 0) for pod in pods)
    return max(0, node.allocatable.get(resource, 0) - held)


LIST, UUIDS = ("nvidia-smi", "-L"), ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
_EACH = functools.partial(Case, limits={CARD: 1})
# What one pod shows of its container.
_ONE = functools.partial(_EACH, at_most=1)
_MPS, _MIG = functools.partial(_ONE, kinds=(MPS,)), functools.partial(_ONE, kinds=(MIG,))
_TWO = functools.partial(Case, evidence=("admission",), limits={CARD: 2}, at_most=1)
CASES = (
    _EACH(
        "all",
        "As many pods run as the node has free devices, and one more waits",
        "kube-scheduler counts what the plugin announces, and kubelet gives each pod a device",
        ("scheduling",),
        more=1,
        reason="Insufficient nvidia.com/",
    ),
    _EACH(
        "whole_cards",
        "Two pods have different cards",
        "nobody else has an exclusive card",
        ("NVML",),
        at_most=2,
        command=UUIDS,
        distinct=True,
        kinds=(EXCLUSIVE,),
    ),
    _EACH(
        "shared_card",
        "Of one pod more than the node has cards, two see the same card",
        "pods share a card",
        ("NVML",),
        beyond_cards=True,
        command=UUIDS,
        distinct=False,
        kinds=(SHARED,),
    ),
    _ONE(
        "device_node",
        "A container has the device node of one card",
        "the container runtime gives a container its own card, and no other",
        ("device nodes",),
        command=("ls", "/dev"),
        finds=r"^nvidia\d+$",
    ),
    _ONE(
        "one_card",
        "nvidia-smi in a container lists one card",
        "the driver shows a container its own card, and no other",
        ("NVML",),
        command=LIST,
        finds=r"^GPU \d+: ",
    ),
    Case(
        "old_name",
        "A pod that requests nvidia.com/gpu waits where shared cards have another name",
        "nobody gets a share by a request for a whole card",
        ("scheduling",),
        {contract.RESOURCE: 1},
        more=1,
        reason=f"Insufficient {contract.RESOURCE}",
        kinds=(RENAMED,),
    ),
    _TWO(
        "two_refused",
        "kubelet ends a pod that requests two replicas of a card",
        "failRequestsGreaterThanOne holds: nobody takes two replicas for twice as much",
        refused="UnexpectedAdmissionError",
        kinds=(SHARED, ONE_EACH),
    ),
    _TWO(
        "two_granted",
        "A pod that requests two replicas of a card runs",
        "failRequestsGreaterThanOne is off",
        kinds=(SHARED, SEVERAL_EACH),
    ),
    _MPS(
        "mps_environment",
        "A container has the variable CUDA_MPS_PIPE_DIRECTORY",
        "the plugin points CUDA programs to the MPS control daemon",
        ("environment",),
        command=("printenv", "CUDA_MPS_PIPE_DIRECTORY"),
        finds=r"^/",
    ),
    _MPS(
        "mps_pipe",
        "The control daemon's pipe is in that folder of the container",
        "the daemon runs on the node, and the container reaches it",
        ("environment",),
        command=("sh", "-c", 'ls "$CUDA_MPS_PIPE_DIRECTORY"'),
        finds=r"^control$",
    ),
    _MPS(
        "mps_memory",
        "A program that allocates more memory than a replica's part is refused it",
        "the MPS server holds a program to its pinned memory limit",
        ("exit code",),
        command=ALLOCATE,
        status=OUT_OF_MEMORY,
    ),
    _MIG(
        "mig_device",
        "nvidia-smi in a container lists one MIG device",
        "the driver shows a container its own MIG device, and no other",
        ("NVML",),
        command=LIST,
        finds=r"^\s*MIG .*UUID: MIG-",
    ),
    _MIG(
        "mig_capabilities",
        "A container has the capability device nodes of one GPU instance and of one compute instance",
        "the driver lets a container use its own MIG device alone",
        ("device nodes",),
        command=("ls", "/dev/nvidia-caps"),
        finds=r"^nvidia-cap\d+$",
        times=2,
    ),
    _ONE(
        "computes",
        "A program that computes runs in a container",
        "CUDA works in a container with its device",
        ("exit code",),
        command=COMPUTE,
    ),
    _EACH(
        "turns",
        "Programs of several pods compute in turn on a card",
        "time slices are real",
        ("silicon",),
        kinds=(TIME_SLICING,),
    ),
)


# In the name of the plugin's image, whoever deploys it.
PLUGIN = "k8s-device-plugin"


class Nvidia(CaseSuite[Announced]):
    """See gpu_acceptance, suite ``nvidia``."""

    backend, title, log = backends.NVIDIA, "NVIDIA's device plugin", "NVIDIA's device plugin"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options, CASES, Announced("", frozenset(), 0))
        unknown = sorted({kind for case in self._all for kind in case.kinds} - set(KINDS))
        if unknown:
            raise BadInput(f"cases: kinds are of {', '.join(KINDS)}, not {', '.join(unknown)}")
        self._maps: JsonObject | None = None

    @property
    def kinds(self) -> frozenset[str]:
        return self._seen.kinds

    @property
    def cards(self) -> int:
        return self._seen.cards

    def see(self, node: Node) -> tuple[int, Announced] | str:
        self._maps = self._configurations() if self._maps is None else self._maps
        shared = announced(node, configuration_of(self._maps, node.labels.get(contract.LABEL_CONFIG)))
        if shared is None:
            return "it announces no device"
        return free(node, self._client.unfinished_pods(node.name), shared.resource), shared

    def default_image(self) -> str:
        raise BadInput("image: not set; the image of NVIDIA's device plugin has no sleep, so name one that has it")

    def _configurations(self) -> JsonObject:
        """Return the data of the ConfigMap that the plugin's DaemonSet has; empty where it can't be read."""
        try:
            for daemon_set in self._client.daemon_sets():
                spec = daemon_set["spec"]["template"]["spec"]
                if any(PLUGIN in str(container.get("image")) for container in spec["containers"]):
                    for volume in spec.get("volumes") or []:
                        name = (volume.get("configMap") or {}).get("name")
                        data = self._client.config_map(daemon_set["metadata"]["namespace"], name) if name else {}
                        if data:
                            return data
        except (ShareError, *MALFORMED):
            # The labels say less, but enough for most cases.
            return {}
        return {}

    def keep_to_back_end(self, spec: JsonObject) -> None:
        # Admission refuses pods that could be bound to HAMi's nodes, and sees no name of a node.
        [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        term["matchExpressions"] = [{"key": backends.LABEL, "operator": "NotIn", "values": [backends.HAMI]}]

    def fits(self, case: Case) -> int:
        node = self._client.node(self.node)
        pods = self._client.unfinished_pods(self.node)
        limits = self.limits(case)
        return min(free(node, pods, name) // number for name, number in limits.items()) if node and limits else 0

    def limits(self, case: Case) -> t.Mapping[str, int]:
        return {self._seen.resource if key == CARD else key: value for key, value in case.limits.items()}
