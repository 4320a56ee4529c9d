# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The GPUs that kubelet, or else its annotations, allocate to a pod; how much it uses; and who needs none. No I/O."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from .._contracts import gpushare as contract
from .._contracts import hami
from .._contracts.gpushare import Card
from .._contracts.model import VISIBLE, Pod
from .._contracts.nvidia_plugin import is_gpu_resource
from .model import HAMI, Entry, Gpu, Node, Options, Process
from .parse import shorten

NO_GPUS = ("", "void", "none")
NO_GPU_VALUE = "no-gpu-has"
# Classes of CDI devices that come with a GPU and are none.
OTHER_CDI_CLASSES = ("gds", "mofed", "gdrcopy", "imex-channel")
MIG_POSITION = re.compile("[0-9]{1,4}:[0-9]{1,4}")
# This collection's DRA driver.
DRIVER_NAME = "gpushare-dra-driver"
# Labels of the stacks' own pods: device plugins, and others that may use GPUs. Anybody may give his pods these labels,
# and an owner that is a DaemonSet; so they count only in a namespace of nodes' own components.
PLUGINS: t.Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpushare": (
        ("component", "gpushare-device-plugin"),
        ("name", "gpushare-device-plugin-ds"),
        ("app.kubernetes.io/name", "gpushare-device-plugin"),
    ),
    "gpushare's claims": (("app.kubernetes.io/name", DRIVER_NAME),),
    "HAMi": (("app.kubernetes.io/component", "hami-device-plugin"),),
    "NVIDIA": (
        ("name", "nvidia-device-plugin-ds"),
        ("app", "nvidia-device-plugin-daemonset"),
        ("app.kubernetes.io/name", "nvidia-device-plugin"),
    ),
}
HELPERS: tuple[tuple[str, str], ...] = (
    ("app", "nvidia-dcgm-exporter"),
    ("app", "nvidia-dcgm"),
    ("app", "nvidia-operator-validator"),
    ("app", "nvidia-mig-manager"),
    ("app", "nvidia-driver-daemonset"),
    ("app", "nvidia-container-toolkit-daemonset"),
    ("app", "gpu-feature-discovery"),
    ("app", "nvidia-device-plugin-mps-control-daemon"),
    ("app.kubernetes.io/name", "dcgm-exporter"),
    ("app.kubernetes.io/name", "gpu-feature-discovery"),
    # Its image sets NVIDIA_VISIBLE_DEVICES=all.
    ("app.kubernetes.io/component", "hami-scheduler"),
)
MPS_DAEMON = "mps-control-daemon"


@dataclasses.dataclass(frozen=True)
class Grant:
    """The GPUs (or MIG devices) allocated to a pod or container.

    :param uuids: None where they are unknown.
    :param source: which evidence names them.
    :param unresolved: values in kubelet's answer that name no GPU.
    """

    uuids: frozenset[str] | None
    source: str
    unresolved: tuple[str, ...] = ()


def is_driver(pod: Pod) -> bool:
    """Return whether a pod is this collection's DRA driver."""
    return pod.labels.get("app.kubernetes.io/name") == DRIVER_NAME


def is_own(pod: Pod, options: Options) -> bool:
    """Return whether a pod is in a namespace of nodes' own components, where no tenant creates pods."""
    return pod.namespace in options.exempt_namespaces


def _labelled(pod: Pod) -> str:
    """Return the stack whose device plugin a pod's labels say that it is; empty for any other pod."""
    if MPS_DAEMON in pod.name:
        return ""
    return next((who for who, labels in PLUGINS.items() if any(pod.labels.get(k) == v for k, v in labels)), "")


def _resembles(pod: Pod) -> bool:
    """Return whether a pod looks like one of a stack's own, by what its creator chooses."""
    if _labelled(pod) or MPS_DAEMON in pod.name:
        return True
    return any(pod.labels.get(key) == value for key, value in HELPERS)


def device_plugin_of(pod: Pod, options: Options) -> str:
    """Return the stack whose device plugin a pod is; empty for any other pod."""
    return _labelled(pod) if is_own(pod, options) else ""


def is_exempt(pod: Pod, options: Options) -> bool:
    """Return whether a pod needs no allocation: a stack's own, or one that the user allows."""
    if is_own(pod, options) and _resembles(pod):
        return True
    return any(fnmatch.fnmatchcase(pod.key, pattern) for pattern in options.allowed_pods)


def is_unconfirmed(pod: Pod, options: Options) -> bool:
    """Return whether a pod looks like one of a stack's own, and is in a namespace that may be a tenant's."""
    return _resembles(pod) and not is_exempt(pod, options)


def gpu_requests(requests: t.Mapping[str, int]) -> dict[str, int]:
    """Return the resources among these for which kubelet allocates GPUs."""
    return {
        name: number
        for name, number in requests.items()
        if number > 0 and (name == contract.RESOURCE_MEMORY or is_gpu_resource(name))
    }


def requests_devices(pod: Pod) -> bool:
    """Return whether a pod asks a device plugin for GPUs."""
    return any(gpu_requests(container.requests) for container in pod.containers)


def requests_gpu(pod: Pod) -> bool:
    """Return whether a pod asks for GPUs, of a device plugin or by a claim."""
    return requests_devices(pod) or pod.asks_by_claim


def expected_allocations(pod: Pod) -> list[tuple[str, str, int]]:
    """Return container, resource and number of all that kubelet must have allocated, without plain init containers."""
    return [
        (container.name, resource, number)
        for container in pod.containers
        if not container.init
        for resource, number in gpu_requests(container.requests).items()
    ]


def entries_of(node: Node, pod: Pod) -> list[Entry]:
    """Return a pod's entries for GPUs in kubelet's checkpoint."""
    return [entry for uid in sorted(pod.uids) for entry in node.kubelet.of(uid) if gpu_requests({entry.resource: 1})]


def units_by_gpu(node: Node, ids: t.Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """Return units by GPU (UUID) of this collection's device IDs, and the IDs that name no GPU of the node."""
    units: dict[str, int] = {}
    unresolved: list[str] = []
    known: dict[str, Card | None] = {}
    for identifier in ids:
        try:
            short = contract.card_of_device_id(identifier)
        except contract.ContractError:
            unresolved.append(identifier)
            continue
        if short not in known:
            known[short] = contract.card_by_short(node.cards, short)
        card = known[short]
        if card is None:
            unresolved.append(identifier)
        else:
            units[card.uuid] = units.get(card.uuid, 0) + 1
    return units, unresolved


def visible_gpus(node: Node, entry: Entry) -> Grant:
    """Return a container's GPUs: ``NVIDIA_VISIBLE_DEVICES`` or CDI devices in the device plugin's answer.

    The variable is an index, a UUID, ``void`` with CDI, or upstream's value for "no GPU found".
    """
    value = (entry.envs or {}).get(VISIBLE)
    names = [] if value is None or value in NO_GPUS else value.split(",")
    source = VISIBLE
    cards = [device for device in entry.cdi if device.partition("=")[0].rpartition("/")[2] not in OTHER_CDI_CLASSES]
    if not names and cards:
        names, source = [card.rpartition("=")[2] for card in cards], "CDI devices"
    # NVIDIA's plugin may name them by mounts, which aren't read here, and MIG devices by their position.
    if entry.envs is None or not names or any(name.startswith("/") or MIG_POSITION.fullmatch(name) for name in names):
        return Grant(None, source)
    uuids: set[str] = set()
    unresolved = []
    for name in map(str.strip, names):
        gpu = node.nvml.at(int(name)) if name.isascii() and name.isdigit() and len(name) < 5 else None
        if name == "all":
            uuids |= {gpu.uuid for gpu in node.nvml.gpus}
        elif name.startswith(("GPU-", "MIG-")):
            uuids.add(name)
        elif gpu is not None:
            uuids.add(gpu.uuid)
        else:
            unresolved.append(shorten(name))
    return Grant(frozenset(uuids), source, tuple(unresolved))


def entry_gpus(node: Node, entry: Entry) -> Grant:
    """Return the GPUs of a checkpoint entry."""
    if entry.resource == contract.RESOURCE_MEMORY and node.ours:
        units, unresolved = units_by_gpu(node, entry.ids)
        if units and not unresolved:
            return Grant(frozenset(units), "kubelet's device IDs")
    if entry.resource != contract.RESOURCE_MEMORY and HAMI not in node.backends:
        named = frozenset(identifier.partition("::")[0] for identifier in entry.ids)
        if named and all(uuid.startswith(("GPU-", "MIG-")) for uuid in named):
            return Grant(named, "kubelet's device IDs")
    return visible_gpus(node, entry)


def grant_of(node: Node, pod: Pod) -> Grant:
    """Return the GPUs allocated to a pod: by its claims, by kubelet, or else by its annotations."""
    uuids = {node.uuid_of(device) for pool, device in pod.claimed() if pool == node.name}
    source = "its claims" if uuids else ""
    for entry in entries_of(node, pod):
        grant = entry_gpus(node, entry)
        if grant.uuids:
            uuids |= grant.uuids
            source = grant.source
    if uuids:
        return Grant(frozenset(uuids), source)
    by_index = {card.index: card.uuid for card in node.cards}
    held = [by_index.get(index, "") for index in pod.booked]
    if held and all(held):
        return Grant(frozenset(held), "annotations")
    try:
        given = hami.allocated(pod.annotations.get(hami.POD_ALLOCATED, ""))
        devices = [uuid for parts in given for uuid, *_rest in parts]
    except hami.HamiError:
        devices = []
    return Grant(frozenset(devices) or None, "annotations")


def physical_gpus(node: Node, uuids: t.Iterable[str]) -> frozenset[str]:
    """Return the physical GPUs of GPUs and MIG devices; a UUID that NVML doesn't list is kept."""
    physical = set()
    for uuid in uuids:
        gpu = node.nvml.gpu(uuid)
        physical.add(gpu.uuid if gpu else uuid)
    return frozenset(physical)


@dataclasses.dataclass(frozen=True)
class Usage:
    """A pod's usage of a GPU.

    :param mib: None where it is unknown.
    :param processes: how many NVML lists.
    :param hard_mib: the highest limit of its containers; None where the driver has none.
    :param limited: whether the driver reports limits on this GPU at all.
    """

    mib: int | None
    processes: int
    hard_mib: int | None
    limited: bool


def processes(gpu: Gpu, pod: Pod) -> list[Process]:
    return [process for process in gpu.processes or () if process.pod_uid and process.pod_uid in pod.uids]


def usage_of(gpu: Gpu, pod: Pod) -> Usage:
    """Return the larger of its processes' memory and the memory charged to its control groups."""
    mine = processes(gpu, pod)
    numbers = [process.used_mib for process in mine]
    known = [mib for mib in numbers if mib is not None]
    by_process = sum(known) if gpu.processes is not None and len(known) == len(numbers) else None
    limits = [limit for limit in gpu.limits or () if limit.pod_uid and limit.pod_uid in pod.uids]
    charged = [limit.used_mib for limit in limits if limit.used_mib is not None]
    both = [mib for mib in (by_process, sum(charged) if charged else None) if mib is not None]
    hard = [limit.hard_mib for limit in limits if limit.hard_mib is not None]
    return Usage(max(both) if both else None, len(mine), max(hard) if hard else None, gpu.limits is not None)
