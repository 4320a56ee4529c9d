# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of HAMi: each pod's annotations, kubelet's books of it, and its processes. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _hami as hami
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import entries_of, visible
from ansible_collections.kubegpu.share.plugins.module_utils._check_hami import askers, by_container, given_to, register
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Entry, Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import (
    counted,
    listed,
    shorten,
    whole,
)
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally

TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
BIND_TIME = "hami.io/bind-time"
STUCK_SECONDS = 60
ANEW = "delete the pod, so that it is scheduled and admitted anew"
OWN_MODES = ("mig", "mps")


def annotations_are_whole(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H3: a bound pod has as many GPUs as its containers ask for, on this node."""
    gpus = register(node)
    for pod in askers(node):
        if pod.terminating:
            continue
        tally.seen()
        given, problem = given_to(pod)
        if problem:
            tally.unknown(f"what it holds can't be told: {problem}", ANEW, pod=pod)
            continue
        wrong = _wrong(node, pod, given)
        known = {one.uuid for one in gpus.gpus}
        strange = sorted({uuid for parts in given or [] for uuid, *_rest in parts} - known)
        if not wrong and strange and not gpus.problem:
            wrong = f"it has {listed(shorten(one) for one in strange)}, which the node's register doesn't have"
        if wrong:
            text = pod.annotations.get(hami.POD_ALLOCATED, "none")
            tally.fail(wrong, ANEW, pod=pod, api=f"{hami.POD_ALLOCATED}={shorten(text, 160)}")


def _wrong(node: Node, pod: Pod, given: list[list[tuple[str, int, int]]] | None) -> str:
    if given is None:
        return f"it asks for a GPU, and HAMi's scheduler never saw it (scheduler {shorten(pod.scheduler)!r})"
    on = pod.annotations.get(hami.POD_NODE, "")
    if on != node.name:
        return f"HAMi chose node {shorten(on) or 'none'} for it, and it runs on {node.name}"
    spec = pod.json["spec"]
    if len(given) not in (len(spec["containers"]), len(spec["initContainers"]) + len(spec["containers"])):
        return f"its annotation tells of {counted(len(given), 'container')}, which aren't those it has"
    parts = by_container(pod, given)
    for one in pod.containers:
        asked, has = one.requests.get(hami.RESOURCE_COUNT, 0), parts.get(one.name)
        if has is not None and len(has) != asked:
            return f"container {one.name} asks for {counted(asked, 'GPU')}, and was given {len(has)}"
        if has is not None and len({uuid for uuid, *_rest in has}) != len(has):
            return f"container {one.name} was given one GPU twice"
    return ""


def bound_pods_are_served(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H4: what was bound is soon allocated."""
    for pod in askers(node):
        phase, since = pod.annotations.get(hami.POD_BIND_PHASE), whole(pod.annotations.get(BIND_TIME))
        if pod.terminating or hami.POD_ALLOCATED not in pod.annotations:
            continue
        tally.seen()
        age = snapshot.now - (since if since is not None else pod.created or snapshot.now)
        left = [one for one in pod.annotations.get(TO_ALLOCATE, "").split(";") if one.strip()]
        api = f"bind-phase {shorten(phase or 'none')}, {shorten(str(age))} s ago; left to allocate: {len(left)}"
        do = "see HAMi's device plugin's log on the node; delete the pod"
        if phase == "failed":
            tally.fail("HAMi's device plugin failed to give it its GPUs", do, pod=pod, api=api)
        elif age > STUCK_SECONDS and (phase != "success" or left):
            tally.fail(f"it was bound {shorten(str(age))} s ago, and doesn't have its GPUs yet", do, pod=pod, api=api)


def kubelet_did_as_told(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H6: kubelet's answer is the annotation's."""
    mine = [pod for pod in askers(node) if pod.steady]
    if node.kubelet.problem:
        tally.seen(len(mine))
        if mine:
            tally.unknown(f"which GPUs {counted(len(mine), 'pod')} got can't be told: {node.kubelet.problem}", LOOK)
        return
    for pod in mine:
        given, problem = given_to(pod)
        parts = by_container(pod, given or [])
        for entry in entries_of(node, pod):
            tally.seen()
            if problem or entry.envs is None:
                why = problem or entry.problem or "kubelet's answer can't be decoded"
                tally.unknown(f"container {entry.container} can't be compared: {why}", LOOK, pod=pod)
            elif parts.get(entry.container):
                _compare(node, pod, entry, parts[entry.container], tally)


def _compare(node: Node, pod: Pod, entry: Entry, parts: list[tuple[str, int, int]], tally: Tally) -> None:
    envs, sees = entry.envs or {}, visible(node, entry)
    names = [uuid.partition("[")[0] for uuid, *_rest in parts]
    place: dict[str, t.Any] = {
        "pod": pod,
        "container": entry.container,
        "api": listed(f"{uuid} {mib} MiB {cores} %" for uuid, mib, cores in parts),
        "kubelet": listed(
            f"{key}={shorten(value, 100)}"
            for key, value in sorted(envs.items())
            if key.startswith(("NVIDIA_VISIBLE", "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM"))
        ),
    }
    modes = {gpu.mode for gpu in register(node).gpus if gpu.uuid in names}
    if modes & set(OWN_MODES):
        return
    if sees.uuids is None or set(names) != sees.uuids:
        ids = {_physical(one) for one in entry.ids}
        what = (
            f"container {entry.container} sees {listed(sorted(sees.uuids or ())) or 'nothing'}, and HAMi chose others"
        )
        if sees.uuids is not None and ids == sees.uuids:
            tally.warn(f"{what}: kubelet chose them (preferred allocation)", "turn preferred allocation off", **place)
        else:
            tally.fail(what, ANEW, **place)
        return
    for position, (_uuid, mib, _cores) in enumerate(parts):
        limit = envs.get(f"CUDA_DEVICE_MEMORY_LIMIT_{position}")
        if limit != f"{mib}m":
            tally.fail(
                f"container {entry.container} is limited to {shorten(limit or 'nothing')} of GPU {position}, and was "
                f"given {mib} MiB",
                ANEW,
                **place,
            )
            return
    cores = envs.get("CUDA_DEVICE_SM_LIMIT")
    if cores is not None and whole(cores) not in {one for _uuid, _mib, one in parts}:
        tally.fail(
            f"container {entry.container} is limited to {shorten(cores)} % of the cores, and was given {parts[0][2]}",
            ANEW,
            **place,
        )


def _physical(identifier: str) -> str:
    """The GPU of a device ID of HAMi's plugin, ``<UUID>-<i>``."""
    head, _dash, tail = identifier.rpartition("-")
    return head if tail.isdigit() and len(tail) < 5 else identifier


CHECKS = (
    Check(
        "H3",
        "hami",
        "Every bound pod has the GPUs that its containers ask for",
        "vgpu-node, number of containers and GPUs in vgpu-devices-allocated, with the pod and the register",
        "FAIL; UNKNOWN where it can't be read",
        node=annotations_are_whole,
    ),
    Check(
        "H4",
        "hami",
        "Every bound pod is soon given its GPUs",
        f"bind-phase, and what is left to allocate, {STUCK_SECONDS} s after bind-time",
        "FAIL",
        node=bound_pods_are_served,
    ),
    Check(
        "H6",
        "hami",
        "kubelet gave every container what HAMi chose",
        "NVIDIA_VISIBLE_DEVICES, CUDA_DEVICE_MEMORY_LIMIT_i and CUDA_DEVICE_SM_LIMIT in kubelet's checkpoint with the "
        "annotation",
        "FAIL; WARN where kubelet's preference won",
        node=kubelet_did_as_told,
    ),
)
