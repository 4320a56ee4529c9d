# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks C2, C3 and C7 of processes on GPUs, and N1 to N7 of NVIDIA's device plugin. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import nvidia_plugin as nvidia
from .._contracts.model import Pod
from .._core.types import JsonObject
from .grants import entries_of, grant_of, is_exempt, physical_gpus, processes, requests_gpu, usage_of, visible_gpus
from .model import Entry, Gpu, Node, Process, Snapshot
from .parse import join, parse_int, plural, shorten
from .result import CheckResult

# Linux keeps 15 characters of a process's name.
COMM_LENGTH = 15
# The memory of processes and of the GPU are read one after the other, and each is rounded.
CARD_SLACK_MIB = 512


def has_name(process: str, names: t.Iterable[str]) -> bool:
    """Return whether a process has one of these names, by the last part of its own, which Linux may have cut."""
    short = process.split(" ")[0].rpartition("/")[2]
    return bool(short) and any(
        short == name or (len(short) == COMM_LENGTH and name.startswith(short)) for name in names
    )


# Why there is no list of processes where a node's pod answers for its machine.
NO_PIDS = "the pod that answers for the node's machine hasn't its process IDs (gpushare_host_pid)"


def had_no_data(node: Node, result: CheckResult) -> bool:
    """Report where NVML lists no processes: for the whole node (returns True), or for single GPUs."""
    if node.nvml.problem:
        result.unknown("no_data", why=node.nvml.problem)
        return True
    for gpu in node.nvml.gpus:
        if gpu.processes is None:
            result.unknown(
                "no_data_gpu", gpu=gpu, why=gpu.problem or (NO_PIDS if node.source else "NVML doesn't list them")
            )
    return False


def process_has_owner(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C2: each process belongs to a pod that requested a GPU, or is allowed."""
    if had_no_data(node, result):
        return
    pods, options = node.by_uid(), snapshot.options
    for gpu in node.nvml.gpus:
        for process in gpu.processes or ():
            if process.where == "gone":
                continue
            result.count()
            pod = pods.get(process.pod_uid) if process.pod_uid else None
            if pod is not None and ((pod.active and requests_gpu(pod)) or is_exempt(pod, options)):
                continue
            if pod is None and not process.pod_uid and has_name(process.name, options.allowed_processes):
                continue
            _report_process(gpu, process, pod, result)


def _report_process(gpu: Gpu, process: Process, pod: Pod | None, result: CheckResult) -> None:
    details: JsonObject = {
        "gpu": gpu,
        "process": process.label,
        "container": f"id {process.container_id[:12]}" if process.container_id else f"pid {process.pid}",
        "nvml": f"pid {process.pid}: {'N/A' if process.used_mib is None else process.used_mib} MiB on {gpu.label}",
        "proc": f"name {process.name or 'unknown'}; cgroup {shorten(process.cgroup, 200) or 'unknown'}",
        "cgroup": shorten(process.cgroup, 120) or "unknown",
    }
    if pod is not None and pod.has_foreign_claim:
        result.unknown("resource_claim", pod=pod, **details)
    elif pod is not None:
        privileged = any(container.privileged for container in pod.containers)
        details["api"] = f"{pod.key}: phase {pod.phase}, no request" + (", privileged" if privileged else "")
        details["kind"] = "privileged pod" if privileged else "pod"
        result.fail("pod_finished" if pod.finished else "pod_without_request", pod=pod, phase=pod.phase, **details)
    elif process.pod_uid:
        details["container"] = f"pod {process.pod_uid}"
        result.fail("unknown_pod", uid=process.pod_uid, api="no pod with this UID runs on the node", **details)
    elif process.where == "unknown":
        result.unknown("unattributed", **details)
    else:
        result.fail("in_foreign_container" if process.where == "container" else "outside_pods", **details)


def processes_use_own_gpus(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C3: a pod's processes use the pod's GPUs only."""
    pods = {uid: pod for uid, pod in node.by_uid().items() if pod.active and requests_gpu(pod)}
    if not pods:
        return
    if had_no_data(node, result):
        result.count(len({pod.key for pod in pods.values()}))
        return
    grants = {pod.key: grant_of(node, pod) for pod in pods.values()}
    unknown: dict[str, str] = {}
    for gpu in node.nvml.gpus:
        for process in gpu.processes or ():
            pod = pods.get(process.pod_uid) if process.pod_uid else None
            if pod is None or process.where == "gone":
                continue
            result.count()
            grant = grants[pod.key]
            if grant.uuids is None:
                unknown.setdefault(pod.key, process.label)
            elif gpu.uuid not in physical_gpus(node, grant.uuids):
                granted = join(sorted(grant.uuids))
                plane = "api" if grant.source in ("annotations", "its claims") else "kubelet"
                details = {plane: f"{grant.source}: {granted}", "nvml": f"pid {process.pid} on {gpu.uuid}"}
                result.fail("other_gpu", pod=pod, gpu=gpu, process=process.label, granted=granted, **details)
    for key, label in unknown.items():
        result.unknown("allocation_unknown", pod=key, process=label)


def nvml_is_consistent(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C7: the processes' memory is at most what is in use, and that at most the GPU's size."""
    if node.nvml.problem:
        result.unknown("no_data", why=node.nvml.problem)
        return
    for gpu in node.nvml.gpus:
        if gpu.total_mib is None or gpu.used_mib is None:
            result.unknown("no_data_gpu", gpu=gpu, why=gpu.problem or "NVML doesn't report it")
            continue
        result.count()
        processes = gpu.processes or ()
        known = [process.used_mib for process in processes if process.used_mib is not None]
        in_processes = f"{sum(known)} MiB in {plural(len(processes), 'process', 'processes')}"
        numbers = f"{in_processes}; GPU: {gpu.used_mib} of {gpu.total_mib} MiB"
        # Without N/A, and without MIG, whose devices have an overhead of their own.
        complete = len(known) == len(processes) and gpu.processes is not None and gpu.mig_mode != "enabled"
        details: JsonObject = {"gpu": gpu, "nvml": numbers, "numbers": numbers}
        if gpu.used_mib > gpu.total_mib:
            result.unknown("used_exceeds_size", key="size", **details)
        elif complete and sum(known) > gpu.used_mib + CARD_SLACK_MIB:
            parts = {str(process.pid): process.used_mib or 0 for process in processes}
            most = gpu.used_mib + CARD_SLACK_MIB
            result.unknown("processes_exceed_used", key="sum", parts=parts, most=most, **details)


SLACK_MIB = 64
MAX_REPLICAS = 10_000
MPS_SERVER = "nvidia-cuda-mps-server"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"


def allocated_entries(node: Node) -> list[tuple[Pod, Entry]]:
    """Return pods and their entries of this plugin's resources in kubelet's checkpoint."""
    return [
        (pod, entry)
        for pod in node.pods
        if pod.active
        for entry in entries_of(node, pod)
        if nvidia.is_gpu_resource(entry.resource) and entry.ids
    ]


def replicas_of(node: Node, resource: str = nvidia.RESOURCE) -> int | None:
    """Return how many slots a device has: by a label, or else by its IDs registered with kubelet; else None.

    :param resource: each profile of MIG can have another number; a resource of shared devices counts as its own.
    """
    whole = nvidia.unshared(resource)
    label = parse_int(node.labels.get(f"{whole}.replicas"))
    if label is not None and 0 < label <= MAX_REPLICAS:
        return label
    numbers = [
        parse_int(device.partition("::")[2]) or 0
        for registered, ids in node.kubelet.registered.items()
        if nvidia.is_gpu_resource(registered) and nvidia.unshared(registered) == whole
        for device in ids
    ]
    return max(numbers) + 1 if numbers else None


def sharing_strategy(node: Node, resource: str = nvidia.RESOURCE) -> str:
    """Return the strategy by the resource's label: none, time-slicing or mps; by the number of replicas without one."""
    label = node.labels.get(f"{nvidia.unshared(resource)}.sharing-strategy")
    return label if label else "time-slicing" if (replicas_of(node, resource) or 1) > 1 else "none"


def capacity_matches_gpus(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check N1: the announced number is that of GPUs, or MIG devices, times replicas."""
    result.count()
    allocatable = nvidia.announced(node.allocatable)
    announced = {
        name: number
        for name, number in nvidia.announced(node.capacity).items()
        if number and not nvidia.is_kept(name, allocatable)
    }
    api = join(f"{name} {number}" for name, number in announced.items())
    if node.nvml.problem or node.nvml.unidentified:
        result.unknown("no_data", announced=api, why=node.nvml.problem or node.nvml.unidentified)
        return
    strategy = node.labels.get(nvidia.LABEL_MIG_STRATEGY, "none")
    divided = [gpu for gpu in node.nvml.gpus if gpu.mig_mode == "enabled" and strategy in ("single", "mixed")]
    devices, undivided = sum(len(gpu.mig) for gpu in divided), len(node.nvml.gpus) - len(divided)
    profiles = {name: number for name, number in announced.items() if name.startswith(nvidia.RESOURCE_MIG)}
    gpus = sum(announced.values()) - sum(profiles.values())
    # Each profile can have another number of replicas.
    each = [(number, replicas_of(node, name) or 1) for name, number in profiles.items()]
    by_profile = sum(number // slots for number, slots in each)
    uneven = any(number % slots for number, slots in each)
    replicas = replicas_of(node)
    if replicas is None:
        expected = undivided if strategy != "single" else devices or undivided
        wrong = bool(expected and gpus % expected) or (not expected and bool(gpus)) or uneven
    elif strategy == "single" and divided:
        wrong = (gpus, by_profile) != (devices * replicas, 0)
    else:
        wrong = (gpus, by_profile) != (undivided * replicas, devices) or uneven
    if wrong:
        result.fail(
            "capacity_differs",
            announced=api,
            gpus=plural(undivided, "undivided GPU"),
            devices=plural(devices, "MIG device"),
            replicas="an unknown number" if replicas is None else replicas,
            api=api,
            nvml=join(f"{gpu.label}: {plural(len(gpu.mig), 'MIG device')}" for gpu in node.nvml.gpus),
            key=f"{shorten(api, 200)}; {undivided}, {devices}",
        )


def slots_are_allocated_once(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check N2: each slot is allocated to one container."""
    mine = [pod for pod in node.pods if pod.steady and any(map(nvidia.is_gpu_resource, pod.requests_of("nvidia.com/")))]
    if result.without_data(mine, node.kubelet.problem):
        return
    for pod in mine:
        for entry in entries_of(node, pod):
            if nvidia.is_gpu_resource(entry.resource) and entry.count and not entry.ids:
                result.unknown("ids_unknown", pod=pod, container=entry.container)
    owners: dict[str, tuple[Pod, str]] = {}
    for pod, entry in allocated_entries(node):
        inits = {container.name for container in pod.containers if container.init}
        replicas = replicas_of(node, entry.resource)
        for device in entry.ids:
            result.count()
            uuid, _colons, number = device.partition("::")
            details: JsonObject = {"pod": pod, "container": entry.container, "uuid": uuid}
            details.update(device=shorten(device), kubelet=shorten(device))
            before = owners.get(device)
            # Kubelet allocates the devices of an init container again to the pod's own containers.
            if before and not (before[0] is pod and (before[1] in inits or entry.container in inits)):
                result.fail("allocated_twice", other=before[0].key, **details)
            elif number and replicas is not None and (parse_int(number) is None or int(number) >= replicas):
                result.fail("no_such_slot", slots=plural(replicas, "slot"), **details)
            owners[device] = (pod, entry.container)


def access_matches_allocation(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check N3: a container has access to the devices that kubelet allocated to it."""
    no_nvml = node.nvml.problem or node.nvml.unidentified
    for pod, entry in allocated_entries(node):
        result.count()
        visible = visible_gpus(node, entry)
        allocated = {device.partition("::")[0] for device in entry.ids}
        if visible.uuids is None or (no_nvml and visible.unresolved):
            why = entry.problem or no_nvml or "the device plugin's answer names no device"
            result.unknown("no_data", pod=pod, container=entry.container, why=why)
        elif visible.unresolved or visible.uuids != allocated:
            result.fail(
                "other_device",
                pod=pod,
                container=entry.container,
                visible=join([*sorted(visible.uuids), *visible.unresolved]) or "nothing",
                allocated=join(sorted(allocated)),
                kubelet=f"{visible.source}: {join(sorted(visible.uuids))}; IDs: {join(entry.ids)}",
            )


def one_slot_per_container(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check N4: several slots of shared GPUs give a container no more of them."""
    for pod, entry in allocated_entries(node):
        strategy = sharing_strategy(node, entry.resource)
        if strategy == "none":
            continue
        result.count()
        if len(entry.ids) < 2:
            continue
        details = {"pod": pod, "container": entry.container, "number": len(entry.ids), "kubelet": join(entry.ids)}
        # Since 0.20 the plugin allows that with MPS, too, where its configuration says so.
        result.warn("several_slots_of_mps" if strategy == "mps" else "several_slots", **details)


def shares_are_fair(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check N5: with time-slicing, which limits nothing, pods use a fair share at most."""
    replicas = replicas_of(node)
    if sharing_strategy(node) != "time-slicing" or replicas is None:
        return
    if node.nvml.problem:
        result.unknown("no_data", why=node.nvml.problem)
        return
    for pod, entry in allocated_entries(node):
        for uuid in sorted({device.partition("::")[0] for device in entry.ids}):
            gpu = node.nvml.gpu(uuid)
            if gpu is None or gpu.total_mib is None:
                continue
            result.count()
            slots = sum(device.partition("::")[0] == uuid for device in entry.ids)
            used, fair = usage_of(gpu, pod), gpu.total_mib // replicas * slots
            details = {"pod": pod, "gpu": gpu, "used": used.mib, "fair": fair}
            details.update(nvml=f"{used.mib} MiB of {gpu.total_mib}", kubelet=join(entry.ids))
            if used.mib is None:
                result.unknown("usage_unknown", **details)
            elif used.mib > fair + SLACK_MIB:
                result.warn("over_fair_share", **details)


def mps_is_used(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check N6: the pods' processes use MPS, within its limit."""
    if sharing_strategy(node) != "mps":
        return
    result.count(len(node.nvml.gpus))
    if node.nvml.problem:
        result.unknown("no_data", why=node.nvml.problem)
        return
    for pod, entry in allocated_entries(node):
        if entry.envs is not None and PIPE not in entry.envs:
            result.fail("pipe_missing", pod=pod, container=entry.container, kubelet=f"{PIPE} missing")
    for gpu in node.nvml.gpus:
        details = {"gpu": gpu, "mode": gpu.compute_mode, "nvml": f"compute mode {gpu.compute_mode}"}
        if gpu.compute_mode in ("", "unknown"):
            result.unknown("compute_mode_unknown", **details)
        elif gpu.compute_mode != "exclusive_process":
            result.fail("compute_mode", **details)
        _check_clients(node, gpu, result)


def _check_clients(node: Node, gpu: Gpu, result: CheckResult) -> None:
    # The server is a process of the daemon's pod; a pod that requests GPUs may name its own process likewise.
    clients = {uid for pod in node.pods if requests_gpu(pod) for uid in pod.uids}
    servers = [
        process
        for process in gpu.processes or ()
        if has_name(process.name, (MPS_SERVER,)) and process.pod_uid not in clients
    ]
    mine = [
        (pod, process) for pod in node.pods if pod.active for process in processes(gpu, pod) if process not in servers
    ]
    replicas = replicas_of(node)
    if gpu.processes is None:
        result.unknown("processes_unknown", gpu=gpu)
    if mine and not servers:
        parts = {str(process.pid): 1 for _pod, process in mine}
        shown = join(f"pid {process.pid} {process.name}" for process in gpu.processes or ())
        result.fail("server_missing", gpu=gpu, key="server", parts=parts, most=0, nvml=shown)
    for pod, process in mine:
        details: JsonObject = {"pod": pod, "gpu": gpu, "process": process.label}
        details["nvml"] = f"pid {process.pid}: {process.used_mib} MiB, {join(process.types)}"
        if not process.types:
            result.unknown("type_unknown", **details)
        elif "mps" not in process.types:
            result.fail("without_mps", **details)
        elif replicas and gpu.total_mib is not None:
            most = gpu.total_mib // replicas
            if process.used_mib is None:
                result.unknown("usage_unknown", **details)
            elif process.used_mib > most + SLACK_MIB:
                result.fail("over_limit", used=process.used_mib, most_mib=most, **details)


def mig_matches_request(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check N7: MIG is as requested, and each process uses its pod's device."""
    state = node.labels.get(nvidia.LABEL_MIG_STATE)
    if state is not None:
        result.count()
        shown = {"state": shorten(state), "api": f"{nvidia.LABEL_MIG_STATE}={shorten(state)}"}
        if state in ("pending", "rebooting"):
            result.warn("layout_pending", **shown)
        elif state != "success":
            result.fail("layout_failed", **shown)
    if node.nvml.problem and any(resource.startswith(nvidia.RESOURCE_MIG) for resource in node.capacity):
        result.unknown("no_data", why=node.nvml.problem)
    for gpu in node.nvml.gpus:
        if gpu.mig_mode != "enabled":
            continue
        for pod in node.pods:
            for process in processes(gpu, pod) if pod.active else ():
                granted = grant_of(node, pod).uuids
                if granted is None or not any(uuid.startswith("MIG-") for uuid in granted):
                    continue
                result.count()
                device = _device_of(gpu, process)
                details: JsonObject = {"pod": pod, "gpu": gpu, "process": process.label}
                details["nvml"] = f"pid {process.pid}: GI {process.gi}, CI {process.ci} {process.mig_uuid}"
                if not device:
                    result.unknown("device_unknown", **details)
                elif device not in granted:
                    shown_uuids = join(sorted(granted))
                    result.fail("other_device", device=device, granted=shown_uuids, kubelet=shown_uuids, **details)


def _device_of(gpu: Gpu, process: Process) -> str:
    """Return the MIG device of a process, by its UUID or its instances; empty where neither is known."""
    if process.mig_uuid:
        return process.mig_uuid
    uuids = [mig.uuid for mig in gpu.mig if (mig.gi, mig.ci) == (process.gi, process.ci) and process.gi is not None]
    return uuids[0] if len(uuids) == 1 else ""
