# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks C2, C3 and C7: who owns the processes on GPUs, and NVML's numbers of them. No I/O."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject
from .grants import grant_of, is_exempt, physical_gpus, requests_gpu
from .model import Gpu, Node, Pod, Process, Snapshot
from .parse import join, plural, shorten
from .result import CheckResult

# Linux keeps 15 characters of a process's name.
COMM_LENGTH = 15
# The memory of processes and of the GPU are read one after the other, and each is rounded.
SLACK_MIB = 512


def has_name(process: str, names: t.Iterable[str]) -> bool:
    """Return whether a process has one of these names, by the last part of its own, which Linux may have cut."""
    short = process.split(" ")[0].rpartition("/")[2]
    return bool(short) and any(short == one or (len(short) == COMM_LENGTH and one.startswith(short)) for one in names)


def had_no_data(node: Node, result: CheckResult) -> bool:
    """Report where NVML lists no processes: for the whole node (returns True), or for single GPUs."""
    if node.nvml.problem:
        result.unknown("no_data", why=node.nvml.problem)
        return True
    for gpu in node.nvml.gpus:
        if gpu.processes is None:
            result.unknown("no_data_gpu", gpu=gpu, why=gpu.problem or "NVML doesn't list them")
    return False


def process_has_owner(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check C2: each process belongs to a pod that requested a GPU, or is allowed."""
    if had_no_data(node, result):
        return
    pods, options = node.by_uid(), snapshot.options
    for gpu in node.nvml.gpus:
        for one in gpu.processes or ():
            if one.where == "gone":
                continue
            result.count()
            pod = pods.get(one.pod_uid) if one.pod_uid else None
            if pod is not None and ((pod.active and requests_gpu(pod)) or is_exempt(pod, options.allowed_pods)):
                continue
            if pod is None and not one.pod_uid and has_name(one.name, options.allowed_processes):
                continue
            _report_process(gpu, one, pod, result)


def _report_process(gpu: Gpu, one: Process, pod: Pod | None, result: CheckResult) -> None:
    details: JsonObject = {
        "gpu": gpu,
        "process": one.label,
        "container": f"id {one.container_id[:12]}" if one.container_id else f"pid {one.pid}",
        "nvml": f"pid {one.pid}: {'N/A' if one.used_mib is None else one.used_mib} MiB on {gpu.label}",
        "proc": f"name {one.name or 'unknown'}; cgroup {shorten(one.cgroup, 200) or 'unknown'}",
        "cgroup": shorten(one.cgroup, 120) or "unknown",
    }
    if pod is not None and pod.foreign_claims:
        result.unknown("resource_claim", pod=pod, **details)
    elif pod is not None:
        privileged = any(container.privileged for container in pod.containers)
        details["api"] = f"{pod.key}: phase {pod.phase}, no request" + (", privileged" if privileged else "")
        details["kind"] = "privileged pod" if privileged else "pod"
        result.fail("pod_finished" if pod.finished else "pod_without_request", pod=pod, phase=pod.phase, **details)
    elif one.pod_uid:
        details["container"] = f"pod {one.pod_uid}"
        result.fail("unknown_pod", uid=one.pod_uid, api="no pod with this UID runs on the node", **details)
    elif one.where == "unknown":
        result.unknown("unattributed", **details)
    else:
        result.fail("in_foreign_container" if one.where == "container" else "outside_pods", **details)


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
        for one in gpu.processes or ():
            pod = pods.get(one.pod_uid) if one.pod_uid else None
            if pod is None or one.where == "gone":
                continue
            result.count()
            grant = grants[pod.key]
            if grant.uuids is None:
                unknown.setdefault(pod.key, one.label)
            elif gpu.uuid not in physical_gpus(node, grant.uuids):
                granted = join(sorted(grant.uuids))
                plane = "api" if grant.source in ("annotations", "its claims") else "kubelet"
                details = {plane: f"{grant.source}: {granted}", "nvml": f"pid {one.pid} on {gpu.uuid}"}
                result.fail("other_gpu", pod=pod, gpu=gpu, process=one.label, granted=granted, **details)
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
        known = [one.used_mib for one in processes if one.used_mib is not None]
        in_processes = f"{sum(known)} MiB in {plural(len(processes), 'process', 'processes')}"
        numbers = f"{in_processes}; GPU: {gpu.used_mib} of {gpu.total_mib} MiB"
        # Without N/A, and without MIG, whose devices have an overhead of their own.
        complete = len(known) == len(processes) and gpu.processes is not None and gpu.mig_mode != "enabled"
        details: JsonObject = {"gpu": gpu, "nvml": numbers, "numbers": numbers}
        if gpu.used_mib > gpu.total_mib:
            result.unknown("used_exceeds_size", key="size", **details)
        elif complete and sum(known) > gpu.used_mib + SLACK_MIB:
            parts = {str(one.pid): one.used_mib or 0 for one in processes}
            most = gpu.used_mib + SLACK_MIB
            result.unknown("processes_exceed_used", key="sum", parts=parts, most=most, **details)
