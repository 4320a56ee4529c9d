# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of processes: whose they are, and on which card. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import (
    asks_for_card,
    given,
    may_use_cards,
    resolved,
)
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Gpu, Node, Pod, Process, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import counted, listed, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally

# Linux keeps so many characters of a process's name.
COMM = 15
# Memory of processes and of the card are read one after the other, and each is rounded.
SLACK_MIB = 512


def allowed_name(name: str, allowed: tuple[str, ...]) -> bool:
    """Whether a process outside pods is one that may use cards; by the last part of its name."""
    short = name.split(" ")[0].rpartition("/")[2]
    return bool(short) and any(short == one or (len(short) == COMM and one.startswith(short)) for one in allowed)


def _silent(node: Node, tally: Tally, what: str) -> bool:
    """Whether NVML says nothing of processes here, in words; cards that it doesn't tell of are told one by one."""
    if node.nvml.problem:
        tally.unknown(f"{what} can't be told: {node.nvml.problem}", LOOK)
        return True
    for gpu in node.nvml.gpus:
        if gpu.processes is None:
            why = gpu.problem or "NVML doesn't list them"
            tally.unknown(f"{what} of {gpu.label} can't be told: {why}", LOOK, gpu=gpu)
    return False


def known_users(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """C2: each process belongs to a pod that asked, or to somebody who may."""
    if _silent(node, tally, "who uses the cards"):
        return
    pods = node.by_uid()
    for gpu in node.nvml.gpus:
        for one in gpu.processes or ():
            if one.where == "gone":
                continue
            tally.seen()
            pod = pods.get(one.pod_uid) if one.pod_uid else None
            if pod is not None and ((pod.active and asks_for_card(pod)) or may_use_cards(pod, snapshot.options.pods)):
                continue
            if pod is None and not one.pod_uid and allowed_name(one.name, snapshot.options.processes):
                continue
            _stranger(gpu, one, pod, tally)


def _stranger(gpu: Gpu, one: Process, pod: Pod | None, tally: Tally) -> None:
    place = {
        "gpu": gpu,
        "container": f"id {one.container_id[:12]}" if one.container_id else f"pid {one.pid}",
        "nvml": f"pid {one.pid}: {'N/A' if one.used_mib is None else one.used_mib} MiB on {gpu.label}",
        "proc": f"name {one.name or 'unknown'}; cgroup {shorten(one.cgroup, 200) or 'unknown'}",
    }
    who, use = one.label, f"{gpu.label} without a grant"
    if pod is not None and pod.claims:
        tally.unknown(
            f"{who} uses {gpu.label}; whether its pod's resource claim gives it that isn't known here",
            "look at the ResourceClaims of the pod",
            pod=pod,
            **place,
        )
    elif pod is not None:
        privileged = any(container.privileged for container in pod.containers)
        kind = "privileged pod" if privileged else "pod"
        state = f"has finished ({pod.phase})" if pod.finished else "asks for no card"
        tally.fail(
            f"{who} uses {use}: its {kind} {state}",
            "have the pod ask for a share; keep privileged pods and NVIDIA_VISIBLE_DEVICES out by admission",
            pod=pod,
            api=f"{pod.key}: phase {pod.phase}, no request" + (", privileged" if privileged else ""),
            **place,
        )
    elif one.pod_uid:
        place["container"] = f"pod {one.pod_uid}"
        tally.fail(
            f"{who} uses {use}: its pod {one.pod_uid} is finished, or not this cluster's",
            "see on the machine what it is, and end it",
            api="no pod with this UID runs on the node",
            **place,
        )
    elif one.where == "unknown":
        tally.unknown(
            f"{who} uses {gpu.label}, and whose it is can't be told",
            "read /proc on the machine as root, with the host's PIDs and control groups",
            **place,
        )
    else:
        outside = "in a container outside all pods" if one.where == "container" else "outside all pods"
        tally.fail(
            f"{who} {outside} uses {use}; cgroup {shorten(one.cgroup, 120) or 'unknown'}",
            "end it, or name it in allowed_processes if it may",
            **place,
        )


def own_cards_only(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """C3: a pod's process is on the pod's card."""
    pods = {uid: pod for uid, pod in node.by_uid().items() if pod.active and asks_for_card(pod)}
    if not pods:
        return
    if _silent(node, tally, "on which cards the pods' processes are"):
        tally.seen(len({pod.key for pod in pods.values()}))
        return
    grants = {pod.key: given(node, pod) for pod in pods.values()}
    blind: dict[str, str] = {}
    for gpu in node.nvml.gpus:
        for one in gpu.processes or ():
            pod = pods.get(one.pod_uid) if one.pod_uid else None
            if pod is None or one.where == "gone":
                continue
            tally.seen()
            grant = grants[pod.key]
            if grant.uuids is None:
                blind.setdefault(pod.key, one.label)
            elif gpu.uuid not in resolved(node, grant.uuids):
                mine = listed(sorted(grant.uuids))
                tally.fail(
                    f"{one.label} uses {gpu.label}, and the pod was given {mine}",
                    "see how it came to see that card (its environment, privileges), and delete the pod",
                    pod=pod,
                    gpu=gpu,
                    api=f"{grant.source}: {mine}" if grant.source == "annotations" else "",
                    kubelet=f"{grant.source}: {mine}" if grant.source != "annotations" else "",
                    nvml=f"pid {one.pid} on {gpu.uuid}",
                )
    for key, label in blind.items():
        tally.unknown(f"{label} uses a card, and which ones the pod was given can't be told", LOOK, pod=key)


def nvml_adds_up(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """C7: processes' memory is in the card's, and that in its size."""
    if node.nvml.problem:
        tally.unknown(f"the cards' memory can't be told: {node.nvml.problem}", LOOK)
        return
    for gpu in node.nvml.gpus:
        numbers = [one.used_mib for one in gpu.processes or ()]
        if gpu.total_mib is None or gpu.used_mib is None:
            why = gpu.problem or "NVML doesn't tell it"
            tally.unknown(f"the memory of {gpu.label} can't be told: {why}", LOOK, gpu=gpu)
            continue
        tally.seen()
        known = [one for one in numbers if one is not None]
        says = f"{sum(known)} MiB in {counted(len(numbers), 'process', 'processes')}"
        nvml = f"{says}; card: {gpu.used_mib} of {gpu.total_mib} MiB"
        # Without N/A, and without MIG, whose devices count their own overhead.
        whole = len(known) == len(numbers) and gpu.processes is not None and gpu.mig_mode != "enabled"
        place: dict[str, t.Any] = {"gpu": gpu, "nvml": nvml}
        if gpu.used_mib > gpu.total_mib:
            place["key"] = "size"
        elif whole and sum(known) > gpu.used_mib + SLACK_MIB:
            parts = {str(one.pid): one.used_mib or 0 for one in gpu.processes or ()}
            place.update(key="sum", parts=parts, most=gpu.used_mib + SLACK_MIB)
        else:
            continue
        tally.unknown(
            f"NVML contradicts itself about {gpu.label}: {nvml}",
            "see whether the driver is in order (nvidia-smi, dmesg); nothing that it says of this card counts",
            **place,
        )


CHECKS = (
    Check(
        "C2",
        "common",
        "Every process on a card belongs to a pod that asked for one",
        "NVML's processes through their control groups with the API's pods; allowed_processes, allowed_pods",
        "FAIL",
        node=known_users,
    ),
    Check(
        "C3",
        "common",
        "Every process is on a card that its pod was given",
        "the card on which NVML lists it with kubelet's answer, else the pod's annotations",
        "FAIL",
        node=own_cards_only,
    ),
    Check(
        "C7",
        "common",
        "NVML's numbers add up",
        "memory of processes, in use on the card, and the card's size",
        "UNKNOWN",
        node=nvml_adds_up,
        confirm=True,
    ),
)
