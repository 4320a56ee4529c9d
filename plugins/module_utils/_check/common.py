# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks C1, C4, C5, C6, C8 and C9: stacks, allocations, environments and nodes. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import backends
from .._contracts import gpushare as contract
from .._contracts import nvidia_plugin as nvidia
from .._contracts.model import LEGACY, VISIBLE, Container, Pod
from .._core.types import JsonObject
from .grants import (
    NO_GPUS,
    device_plugin_of,
    entries_of,
    entry_gpus,
    expected_allocations,
    gpu_requests,
    grant_of,
    is_exempt,
    is_own,
    is_unconfirmed,
    physical_gpus,
    requests_devices,
    requests_gpu,
    visible_gpus,
)
from .model import DRA, EXTENDER, Node, Snapshot
from .parse import join, plural, shorten
from .result import CheckResult

VALUES = {EXTENDER: contract.NODE_LABEL_VALUE, DRA: contract.NODE_LABEL_CLAIMS}


def has_label(node: Node) -> bool:
    """Return whether a node has the label that selects it for gpushare."""
    return node.labels.get(contract.NODE_LABEL) in contract.NODE_LABEL_VALUES


def backend_of(node: Node) -> str:
    """Return the other back end than gpushare that this collection has given the node to; empty for none."""
    backend = backends.given(node.labels)
    return "" if backend == backends.GPUSHARE else backend


def label_of(allocation: str) -> str:
    """Return the label that selects a node for an allocation."""
    return f"{contract.NODE_LABEL}={VALUES[allocation]}"


def allocation_of(node: Node) -> str:
    """Return who is to allocate the node's cards, by its label and else by what it announces; empty if unknown."""
    for allocation, value in VALUES.items():
        if node.labels.get(contract.NODE_LABEL) == value:
            return allocation
    return DRA if node.devices else EXTENDER if node.cards else ""


def has_gpus(node: Node) -> bool:
    """Return whether a node has, or should have, GPUs."""
    return bool(node.backends) or node.observed or has_label(node) or bool(backend_of(node))


def one_stack(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C1: one stack allocates the node's GPUs."""
    result.count()
    options = snapshot.options
    running = [
        pod for pod in node.pods if pod.phase == "Running" and not pod.terminating and device_plugin_of(pod, options)
    ]
    stacks = sorted({device_plugin_of(pod, options) for pod in running})
    unconfirmed = [pod for pod in node.pods if pod.active and has_gpus(node) and is_unconfirmed(pod, options)]
    for pod in unconfirmed:
        result.warn("unconfirmed", pod=pod, key="unconfirmed", namespace=pod.namespace, api=_labels(pod))
    registered = sorted(name for name, ids in node.kubelet.registered.items() if ids and gpu_requests({name: 1}))
    both_registered = len({name == contract.RESOURCE_MEMORY for name in registered}) > 1
    announced = sorted({"gpushare" if name in ("gpushare", "gpushare-upstream") else name for name in node.backends})
    api = f"announced: {join(node.backends) or 'nothing'}; device plugins: {join(pod.key for pod in running) or '-'}"
    planes: JsonObject = {"api": api, "kubelet": f"registered: {join(registered)}" if registered else ""}
    if len(stacks) > 1:
        result.fail("plugins_of_several_stacks", stacks=" and ".join(stacks), **planes)
    elif len(running) > 1:
        # While a DaemonSet is updated, two may run for a moment.
        planes.update(parts={pod.unique_key: 1 for pod in running}, most=1)
        result.fail("several_plugins", number=len(running), stack=stacks[0], **planes)
    elif len(announced) > 1:
        left = contract.RESOURCE_COUNT in node.capacity and not node.capacity.get(contract.RESOURCE_MEMORY, 0)
        cause = "leftover_resource" if left else "several_stacks_announced"
        result.fail(cause, stacks=join(announced), resource=contract.RESOURCE_COUNT, **planes)
    elif node.observed and not node.kubelet.problem and both_registered:
        result.fail("several_stacks_registered", resources=join(registered), **planes)
    elif not (running or unconfirmed) and node.backends and any(gpu_requests(node.allocatable)):
        sockets = f"sockets: {join(node.kubelet.sockets)}" if node.kubelet.sockets else ""
        result.warn("unknown_plugin", api=api, kubelet=sockets)
    elif not node.backends and (has_label(node) or backend_of(node) not in ("", *backends.VIRTUAL)):
        label = label_of(allocation_of(node)) if has_label(node) else f"{backends.LABEL}={backend_of(node)}"
        result.fail("nothing_announced", label=label, api=api)


def _labels(pod: Pod) -> str:
    return f"labels: {join(f'{shorten(key)}={shorten(value)}' for key, value in sorted(pod.labels.items()))}"


def allocations_match_requests(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C4: kubelet has allocated what each running container requests."""
    requesting = [pod for pod in node.pods if pod.steady and expected_allocations(pod)]
    result.count(len(requesting))
    problems = [text for text in (node.kubelet.problem, node.kubelet.pod_resources_problem) if text]
    if requesting:
        for problem in dict.fromkeys(problems):
            result.unknown("no_data", pods=plural(len(requesting), "pod"), why=problem)
    if problems:
        return
    for pod in requesting:
        entries = {(entry.container, entry.resource): entry for entry in entries_of(node, pod)}
        for container, resource, number in expected_allocations(pod):
            entry = entries.get((container, resource))
            listed = node.kubelet.pod_resources.get(pod.key) or {}
            ids: t.Sequence[str] = listed.get(container, {}).get(resource, ())
            if entry is not None and pod.key in node.kubelet.duplicate_pods:
                # Only the checkpoint has UIDs, by which the two can be distinguished.
                ids = entry.ids or ("",) * entry.count
            details = {"pod": pod, "container": container, "number": number, "resource": resource}
            details["api"] = f"{resource}: {number}"
            details["kubelet"] = f"checkpoint: {entry.count if entry else 'no entry'}; PodResources: {len(ids)}"
            if entry is None or not ids:
                sources = (["kubelet's checkpoint"] if entry is None else []) + ([] if ids else ["PodResources"])
                result.fail("not_allocated", sources=" and ".join(sources), **details)
            elif resource != contract.RESOURCE_MEMORY and {entry.count, len(ids)} != {number}:
                result.fail("count_differs", **details)


def allocated_gpus_exist(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C5: allocated GPUs exist, and are Kubernetes'. A terminating pod may have lost its MIG device already."""
    _excluded_claims(node, result)
    mine = [pod for pod in node.pods if pod.active and not pod.terminating]
    requesting = [pod for pod in mine if requests_devices(pod)]
    entries = [(pod, entry) for pod in mine for entry in entries_of(node, pod)]
    if not (requesting or entries):
        return
    if node.nvml.problem or node.kubelet.problem:
        result.count(len(requesting))
        result.unknown("no_data", why=node.nvml.problem or node.kubelet.problem)
        return
    for pod, entry in entries:
        result.count()
        uuids = set(entry_gpus(node, entry).uuids or ()) | set(visible_gpus(node, entry).uuids or ())
        details = {"pod": pod, "container": entry.container}
        if node.nvml.unidentified and uuids - node.nvml.uuids:
            result.unknown("unidentified", why=node.nvml.unidentified, **details)
            continue
        existing = join(gpu.uuid for gpu in node.nvml.gpus)
        for uuid in sorted(uuids - node.nvml.uuids):
            cause = "gpu_excluded" if uuid in node.nvml.excluded else "gpu_missing"
            result.fail(cause, uuid=uuid, kubelet=uuid, nvml=existing, **details)


def _excluded_claims(node: Node, result: CheckResult) -> None:
    """Report pods whose claims have a card that gpu_exclude has taken from Kubernetes since."""
    devices = {uuid.lower(): uuid for uuid in node.nvml.excluded}
    for pod in node.pods:
        for part in (part for claim in pod.claims for part in claim.parts if pod.active and part.pool == node.name):
            if part.device in devices:
                result.count()
                uuid = devices[part.device]
                result.fail("gpu_excluded", pod=pod, uuid=uuid, key=uuid, api=f"{part.pool}/{part.device}")


def all_allocatable(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C6: allocatable equals capacity."""
    allocatable = node.allocatable
    unhealthy = [card for card in node.cards if not card.healthy]
    for resource, number in node.capacity.items():
        if not (gpu_requests({resource: 1}) or resource == contract.RESOURCE_COUNT):
            continue
        left = allocatable.get(resource, 0)
        by_claims = DRA in node.backends and not node.sharing and not left
        if by_claims or backends.is_left(node.labels, resource, left):
            # kubelet still reports a device plugin that was removed.
            continue
        result.count()
        # Both resources of gpushare change together: report one.
        if left == number or (resource == contract.RESOURCE_COUNT and contract.RESOURCE_MEMORY in allocatable):
            continue
        details = {"resource": resource, "number": number, "left": left, "key": resource}
        details["api"] = f"capacity {number}, allocatable {left}"
        if nvidia.is_kept(resource, allocatable):
            result.warn("resource_kept", **details)
            continue
        for card in unhealthy:
            reason = shorten(card.reason or "unhealthy", 200)
            result.fail("unhealthy_gpu", card=card.index, uuid=card.uuid, reason=reason, **details)
        unreleased = [card for card in node.cards if card.unreleased] if resource == contract.RESOURCE_MEMORY else []
        for card in unreleased:
            result.warn("unreleased", card=card.index, uuid=card.uuid, units=card.unreleased, **details)
        # Nothing at all is announced where the plugin has stopped, too.
        explained = bool(left and unreleased) and left + sum(card.unreleased for card in unreleased) == number
        if not (unhealthy or explained):
            result.fail("not_allocatable" if left else "plugin_stopped", **details)


def pods_see_own_gpus(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C8: no pod names, or has the device nodes of, GPUs that weren't allocated to it."""
    if node.kubelet.device_nodes is None and has_gpus(node):
        result.unknown("no_data", why=node.kubelet.problem or "the containers' device nodes weren't read")
    for pod in node.pods:
        if not pod.active or is_exempt(pod, snapshot.options):
            continue
        result.count()
        reported = has_gpus(node) and not is_own(pod, snapshot.options)
        for container in pod.containers:
            if container.init and pod.phase == "Running":
                continue
            named = _check_environment(node, pod, container, result)
            if reported and container.privileged and not named:
                api = f"securityContext.privileged; the pod requests {'a' if requests_gpu(pod) else 'no'} GPU"
                result.warn("privileged", pod=pod, container=container.name, key="privileged", api=api)
            if container.device_mounts:
                paths = join(shorten(path, 100) for path in container.device_mounts)
                result.warn(
                    "device_mount", pod=pod, container=container.name, key="mount", paths=paths, api=f"mounts {paths}"
                )
        # A privileged container has all of them.
        if not any(container.privileged for container in pod.containers):
            _check_device_nodes(node, pod, result)


def _check_environment(node: Node, pod: Pod, container: Container, result: CheckResult) -> bool:
    """Report a container whose variables name GPUs that it wasn't allocated; return whether it is one."""
    requesting = bool(gpu_requests(container.requests))
    # With a request the device plugin sets VISIBLE.
    variable = LEGACY if VISIBLE not in container.env and not requesting else VISIBLE
    value = container.env.get(variable, "")
    if value in (("",) if variable == LEGACY else NO_GPUS):
        return False
    entries = [entry for entry in entries_of(node, pod) if entry.container == container.name]
    by_claim = {use.name for use in pod.uses if use.claim in {each.name for each in pod.claims}}
    if (requesting and any(entry.cdi for entry in entries)) or container.claims & by_claim:
        # The runtime applies CDI devices after the specification's variable.
        return False
    allocated = {uuid for entry in entries for uuid in entry_gpus(node, entry).uuids or ()}
    if value is not None and requesting and allocated and set(value.split(",")) <= allocated:
        return False
    shown = "a value from elsewhere" if value is None else repr(shorten(value))
    privileged = "; privileged" if container.privileged else ""
    details = {
        "pod": pod,
        "container": container.name,
        "variable": variable,
        "value": shown,
        "runtime_class": pod.runtime_class,
        "api": f"{variable}={shown}; runtimeClassName {pod.runtime_class or 'none'}{privileged}",
    }
    if value is None:
        result.warn("set_from_source", **details)
    elif container.privileged:
        result.warn("set_and_privileged", **details)
    elif requesting:
        result.fail("overrides_allocation", **details)
    elif "nvidia" in pod.runtime_class:
        result.fail("without_request", **details)
    else:
        result.warn("default_runtime", **details)
    return True


def _check_device_nodes(node: Node, pod: Pod, result: CheckResult) -> None:
    """Report GPUs that the pod's containers have beyond its own, however it came by them: by its image, for example."""
    of_pods = node.kubelet.device_nodes or {}
    minors = frozenset(minor for uid in pod.uids for minor in of_pods.get(uid, ()))
    if not minors:
        return
    devices = join(f"/dev/nvidia{minor}" for minor in sorted(minors))
    details: JsonObject = {"pod": pod, "key": "devices", "devices": devices, "proc": devices}
    granted = grant_of(node, pod).uuids if requests_gpu(pod) else frozenset()
    if pod.has_foreign_claim:
        result.unknown("resource_claim", **details)
        return
    if granted is None:
        result.unknown("allocation_unknown", **details)
        return
    own = physical_gpus(node, granted)
    known = {gpu.uuid: gpu.minor for gpu in node.nvml.gpus if gpu.minor is not None}
    known.update({card.uuid: card.minor for card in node.cards if card.uuid and card.uuid not in known})
    if not own <= known.keys():
        why = node.nvml.problem or "NVML doesn't list its GPU"
        result.unknown("devices_unknown", why=why, **details)
        return
    others = sorted(minors - {known[uuid] for uuid in own})
    if others:
        result.fail(
            "other_devices",
            others=join(f"/dev/nvidia{minor}" for minor in others),
            granted=join(sorted(granted)) or "no GPU",
            kubelet=f"allocated: {join(sorted(granted)) or 'no GPU'}",
            **details,
        )


# The state of a card that doesn't register with NVSwitches: where its links are all off, it needs none.
NOT_STARTED = "not_started"


def nodes_are_ready(snapshot: Snapshot, result: CheckResult) -> None:
    """Check C9: every node with GPUs is in the API and ready, and its machine was observed."""
    for name in snapshot.unknown_nodes:
        result.count()
        result.unknown("unknown_node", node=name)
    for problem in snapshot.unreadable:
        result.unknown("unreadable_api", why=problem)
    for pod in snapshot.orphaned_pods:
        if requests_gpu(pod):
            result.count()
            api = f"spec.nodeName {shorten(pod.node)}, phase {shorten(pod.phase)}"
            result.fail("orphaned_pod", node=pod.node, pod=pod, api=api)
    for node in snapshot.nodes:
        if not has_gpus(node):
            continue
        result.count()
        if node.ready != "True":
            ready = node.ready or "missing"
            pods = plural(sum(requests_gpu(pod) for pod in node.pods), "pod")
            result.fail("not_ready", node=node.name, key="Ready", ready=ready, api=f"Ready: {ready}; {pods}")
        if not node.observed:
            result.unknown("not_observed", node=node.name)
        elif node.nvml.problem and node.nvml.problem == node.kubelet.problem:
            result.unknown("unreachable", node=node.name, why=node.nvml.problem)
        for gpu in node.nvml.gpus:
            # The links between cards are off where MIG is on.
            if not gpu.unregistered or gpu.mig_mode == "enabled":
                continue
            place = {"node": node.name, "card": gpu.index, "uuid": gpu.uuid, "key": gpu.uuid, "nvml": gpu.unregistered}
            if gpu.unregistered == NOT_STARTED:
                result.warn("not_registering", **place)
            else:
                result.fail("unregistered", state=gpu.unregistered, **place)
        for problem in (*node.unreadable, *([node.cards_problem] if node.cards_problem else [])):
            result.unknown("unreadable_node", node=node.name, why=problem)
