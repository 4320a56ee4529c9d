# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks H1, H2, H5, H7 and H10 of HAMi: register, sums, locks and schedulers. No I/O."""

from __future__ import annotations

import dataclasses

from .._contracts import hami, hami_marks
from .._core.types import JsonObject
from .catalog_stacks import LOCK_SECONDS
from .model import HAMI, Node, Pod, Snapshot
from .parse import join, parse_time, shorten
from .result import CheckResult

MUTEX = "hami.io/mutex.lock"
Allocation = list[list[tuple[str, int, int]]]


@dataclasses.dataclass(frozen=True)
class Register:
    """A node's register; ``problem`` where it can't be read."""

    gpus: tuple[hami.Gpu, ...]
    problem: str = ""


def register_of(node: Node) -> Register:
    """Parse a node's register."""
    try:
        return Register(tuple(hami.registered(node.annotations.get(hami.NODE_REGISTER, ""))))
    except hami.HamiError as error:
        return Register((), shorten(str(error), 200))


def allocation_of(pod: Pod) -> tuple[Allocation | None, str]:
    """Return what a pod's annotation allocates to its containers, or None and why it can't be read."""
    text = pod.annotations.get(hami.POD_ALLOCATED)
    if text is None:
        return None, ""
    try:
        return hami.allocated(text), ""
    except hami.HamiError as error:
        return None, shorten(str(error), 200)


def pods_with_gpus(node: Node) -> list[Pod]:
    """Return pods of the node that hold GPUs by HAMi, including terminating ones."""
    return [
        pod
        for pod in node.pods
        if pod.active and (pod.requests_of(hami.RESOURCE_COUNT) or hami.POD_ALLOCATED in pod.annotations)
    ]


def parts_by_container(pod: Pod, allocation: Allocation) -> dict[str, list[tuple[str, int, int]]]:
    """Return the parts of each container by its name; init containers come first, older versions leave them out."""
    spec = pod.json["spec"]
    inits, others = spec["initContainers"], spec["containers"]
    named = others if len(allocation) <= len(others) else inits + others
    return {one["name"]: parts for one, parts in zip(named, allocation)}


def register_matches_nvml(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H1: the register lists NVML's GPUs."""
    register = register_of(node)
    result.count(len(register.gpus))
    if register.problem or node.nvml.problem:
        result.unknown("no_data", why=register.problem or node.nvml.problem)
        return
    ratios = set()
    for gpu in register.gpus:
        place: JsonObject = {"card": gpu.index, "uuid": gpu.uuid}
        real = node.nvml.gpu(gpu.uuid)
        if real is None and node.nvml.unidentified:
            result.unknown("unidentified", why=node.nvml.unidentified, **place)
            continue
        if real is None:
            existing = join(one.uuid for one in node.nvml.gpus) or "no GPU"
            result.fail("not_on_machine", api=gpu.uuid, nvml=existing, **place)
            continue
        if not gpu.healthy:
            result.warn("unhealthy", api="health false", **place)
        if real.total_mib is None:
            result.unknown("size_unknown", why=real.problem or "N/A", **place)
        elif real.total_mib:
            ratios.add(gpu.devmem * 100 // real.total_mib)
            if gpu.devmem < real.total_mib - 1 and gpu.devmem * 100 // real.total_mib < 100:
                planes = {"api": f"devmem {gpu.devmem}", "nvml": f"{real.total_mib} MiB"}
                result.fail("memory_too_small", registered=gpu.devmem, mib=real.total_mib, **planes, **place)
    if ratios and max(ratios) - min(ratios) > 1 and min(ratios) >= 100:
        result.fail("scaled_differently", api="devmem: " + join(f"{one.uuid} {one.devmem}" for one in register.gpus))
    if len({one.count for one in register.gpus if one.mode != "mig"}) > 1:
        result.fail("split_differently", api="count: " + join(f"{one.uuid} {one.count}" for one in register.gpus))
    known = {one.uuid for one in register.gpus}
    for found in node.nvml.gpus:
        if found.uuid not in known:
            result.warn("not_registered", gpu=found, nvml=found.uuid)


def capacity_matches_register(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H2: kubelet has as many slots as the register."""
    register = register_of(node)
    result.count()
    if register.problem:
        result.unknown("no_data", why=register.problem)
        return
    capacity, left = (node.resource(hami.RESOURCE_COUNT, field) for field in ("capacity", "allocatable"))
    total = sum(one.count for one in register.gpus)
    healthy = sum(one.count for one in register.gpus if one.healthy)
    # Fewer allocatable slots than healthy ones are reported by C6.
    if capacity != total or left > healthy:
        api = f"{hami.RESOURCE_COUNT}: capacity {capacity}, allocatable {left}; register {total}, healthy {healthy}"
        key = shorten(f"{left} of {capacity}, {healthy} of {total}", 200)
        result.fail("count_differs", left=left, capacity=capacity, healthy=healthy, total=total, api=api, key=key)


def parts_fit(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H5: the pods' parts of a GPU fit on it."""
    register = register_of(node)
    result.count(len(register.gpus))
    if register.problem:
        result.unknown("no_data", why=register.problem)
        return
    held: dict[str, list[tuple[Pod, hami.Held]]] = {gpu.uuid: [] for gpu in register.gpus}
    for pod in node.pods:
        allocation, problem = allocation_of(pod)
        if not pod.active:
            continue
        if problem:
            result.unknown("unreadable", pod=pod, why=problem)
        for uuid, part in hami.held(pod.json, allocation or []).items():
            held.setdefault(uuid, []).append((pod, part))
    for gpu in register.gpus:
        _check_sums(gpu, held[gpu.uuid], node, result)


def _check_sums(gpu: hami.Gpu, held: list[tuple[Pod, hami.Held]], node: Node, result: CheckResult) -> None:
    real = node.nvml.gpu(gpu.uuid)
    pods = join(f"{pod.key} {part.mib} MiB {part.cores} %" for pod, part in held)
    place = {"card": gpu.index, "uuid": gpu.uuid, "api": f"of {gpu.devmem} MiB, {gpu.devcore} %, {gpu.count}: {pods}"}
    memory, cores, slots = (
        {pod.unique_key: getattr(part, unit) for pod, part in held} for unit in ("mib", "cores", "slots")
    )

    def details(key: str, parts: dict[str, int], most: int) -> JsonObject:
        return {**place, "key": key, "parts": parts, "most": most, "limit": most, "held": sum(parts.values())}

    exclusive = next((pod for pod, part in held if part.cores == 100), None)
    if sum(memory.values()) > gpu.devmem:
        result.fail("memory_overcommitted", **details("MiB", memory, gpu.devmem))
    elif sum(cores.values()) > gpu.devcore:
        result.fail("cores_overcommitted", **details("cores", cores, gpu.devcore))
    elif sum(slots.values()) > gpu.count:
        result.fail("slots_overcommitted", **details("slots", slots, gpu.count))
    elif gpu.devcore == 100 and len(held) > 1 and exclusive is not None:
        result.fail("not_exclusive", **details(f"alone {exclusive.unique_key}", dict.fromkeys(cores, 1), 1))
    elif real is not None and real.total_mib is not None and sum(memory.values()) > real.total_mib:
        result.warn("oversubscribed", nvml=f"{real.total_mib} MiB", **details("MiB", memory, real.total_mib))


def lock_is_current(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H7: the node isn't locked for a pod that doesn't exist."""
    result.count()
    text = node.annotations.get(MUTEX)
    if not text:
        return
    time, _comma, owner = text.partition(",")
    key, since = owner.replace(",", "/", 1), parse_time(time)
    api = f"{MUTEX}={shorten(text, 120)}"
    if since is None:
        result.unknown("time_unreadable", value=repr(shorten(text)), api=api)
        return
    age = snapshot.now - since
    # The key is the lock: that of another pod is another lock, which may also be gone a moment later.
    if age > LOCK_SECONDS:
        result.fail("lock_expired", age=age, api=api, key=shorten(text, 200))
    elif owner and all(pod.key != key for pod in (*node.pods, *snapshot.pending)):
        result.fail("lock_without_pod", owner=shorten(key), api=api, key=shorten(text, 200))


def scheduler_is_hamis(snapshot: Snapshot, result: CheckResult) -> None:
    """Check H10: pods with HAMi's resources have its scheduler."""
    bound = [pod for node in snapshot.nodes if HAMI in node.backends for pod in pods_with_gpus(node)]
    pending = [pod for pod in snapshot.pending if any(pod.requests_of(one) for one in hami.RESOURCES_OF_ITS_OWN)]
    for pod in bound + pending:
        if pod.terminating:
            continue
        result.count()
        if pod.scheduler not in snapshot.options.hami_schedulers:
            scheduler = repr(shorten(pod.scheduler) or "not named")
            api = f"schedulerName: {shorten(pod.scheduler)!r}"
            result.fail("other_scheduler", node=pod.node, pod=pod, scheduler=scheduler, api=api)
    # kubelet refuses them for good, since HAMi's device plugin knows no allocation for them.
    refused = [pod for node in snapshot.nodes if HAMI in node.backends for pod in node.pods if pod.finished]
    for pod in refused:
        result.count()
        if pod.scheduler not in snapshot.options.hami_schedulers:
            scheduler = repr(shorten(pod.scheduler) or "not named")
            api = f"schedulerName: {shorten(pod.scheduler)!r}, phase {pod.phase}, {hami_marks.REFUSED}"
            result.fail("refused", node=pod.node, pod=pod, scheduler=scheduler, api=api)
