# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks H1 to H11 of HAMi: register, sums, locks, pods' annotations and memory. No I/O."""

from __future__ import annotations

import dataclasses
import json

from .._allocation.pods import annotated_containers, held_by_hami
from .._contracts import hami, hami_marks
from .._contracts.model import INIT, MAIN, Pod, parse_time
from .._core.types import JsonObject
from .catalog_stacks import BIND_SECONDS, CONTEXT_MIB, LOCK_SECONDS, PERCENT
from .evidence import Reader, describe
from .grants import entries_of, processes, usage_of, visible_gpus
from .model import HAMI, Entry, Node, Snapshot
from .parse import join, parse_int, plural, shorten
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
    """Return the parts of each container by its name."""
    return {container.name: parts for container, parts in zip(annotated_containers(pod, allocation), allocation)}


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
            existing = join(existing_gpu.uuid for existing_gpu in node.nvml.gpus) or "no GPU"
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
        result.fail("scaled_differently", api="devmem: " + join(f"{gpu.uuid} {gpu.devmem}" for gpu in register.gpus))
    if len({gpu.count for gpu in register.gpus if gpu.mode != "mig"}) > 1:
        result.fail("split_differently", api="count: " + join(f"{gpu.uuid} {gpu.count}" for gpu in register.gpus))
    known = {gpu.uuid for gpu in register.gpus}
    for nvml_gpu in node.nvml.gpus:
        if nvml_gpu.uuid not in known:
            result.warn("not_registered", gpu=nvml_gpu, nvml=nvml_gpu.uuid)


def capacity_matches_register(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H2: kubelet has as many slots as the register."""
    register = register_of(node)
    result.count()
    if register.problem:
        result.unknown("no_data", why=register.problem)
        return
    capacity, left = (amounts.get(hami.RESOURCE_COUNT, 0) for amounts in (node.capacity, node.allocatable))
    total = sum(gpu.count for gpu in register.gpus)
    healthy = sum(gpu.count for gpu in register.gpus if gpu.healthy)
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
        for uuid, part in held_by_hami(pod, allocation or []).items():
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
    pending = [pod for pod in snapshot.pending if any(pod.requests_of(name) for name in hami.RESOURCES_OF_ITS_OWN)]
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


TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
BIND_TIME = "hami.io/bind-time"
# In these modes HAMi's library isn't used, and the variables differ.
OTHER_MODES = ("mig", "mps")
MIG_ALLOCATIONS = "hami.io/vgpu-mig-allocations"


def annotations_are_valid(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H3: a bound pod has as many GPUs as its containers request, on this node."""
    register = register_of(node)
    known = {gpu.uuid for gpu in register.gpus}
    for pod in pods_with_gpus(node):
        if pod.terminating:
            continue
        result.count()
        allocation, problem = allocation_of(pod)
        if problem:
            result.unknown("unreadable", pod=pod, why=problem)
            continue
        invalid = _first_invalid(node, pod, allocation)
        unknown = sorted({uuid for parts in allocation or [] for uuid, *_rest in parts} - known)
        if not invalid and unknown and not register.problem:
            invalid = ("unknown_gpu", {"uuids": join(shorten(uuid) for uuid in unknown)})
        if invalid:
            cause, fields = invalid
            text = pod.annotations.get(hami.POD_ALLOCATED, "none")
            result.fail(cause, pod=pod, api=f"{hami.POD_ALLOCATED}={shorten(text, 160)}", **fields)


def _first_invalid(node: Node, pod: Pod, allocation: Allocation | None) -> tuple[str, JsonObject] | None:
    """Return the cause and fields of the first contradiction between a pod and its annotations."""
    if allocation is None:
        return "not_scheduled", {"scheduler": repr(shorten(pod.scheduler))}
    chosen = pod.annotations.get(hami.POD_NODE, "")
    if chosen != node.name:
        return "other_node", {"chosen": shorten(chosen) or "none"}
    others, init = len(pod.of_kind(MAIN)), len(pod.of_kind(INIT))
    if len(allocation) not in (others, init + others):
        return "other_containers", {"number": plural(len(allocation), "container")}
    parts = parts_by_container(pod, allocation)
    for container in pod.containers:
        requested, has = container.requests.get(hami.RESOURCE_COUNT, 0), parts.get(container.name)
        if has is not None and len(has) != requested:
            return "count_differs", {
                "container": container.name,
                "requested": plural(requested, "GPU"),
                "allocated": len(has),
            }
        if has is not None and len({uuid for uuid, *_rest in has}) != len(has):
            return "duplicate_gpu", {"container": container.name}
    return None


def bound_pods_get_gpus(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H4: a bound pod soon gets its GPUs."""
    for pod in pods_with_gpus(node):
        phase, since = pod.annotations.get(hami.POD_BIND_PHASE), parse_int(pod.annotations.get(BIND_TIME))
        if pod.terminating or hami.POD_ALLOCATED not in pod.annotations:
            continue
        result.count()
        age = snapshot.now - (since if since is not None else pod.created or snapshot.now)
        left = [part for part in pod.annotations.get(TO_ALLOCATE, "").split(";") if part.strip()]
        shown = shorten(str(age))
        api = f"bind-phase {shorten(phase or 'none')}, {shown} s ago; left to allocate: {len(left)}"
        if phase == "failed":
            result.fail("allocation_failed", pod=pod, api=api)
        elif age > BIND_SECONDS and (phase != "success" or left):
            result.fail("not_allocated", pod=pod, age=shown, api=api)


def allocation_matches_annotations(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H6: kubelet allocated the GPUs in the annotation to each container."""
    mine = [pod for pod in pods_with_gpus(node) if pod.steady]
    if result.without_data(mine, node.kubelet.problem):
        return
    for pod in mine:
        allocation, problem = allocation_of(pod)
        parts = parts_by_container(pod, allocation or [])
        for entry in entries_of(node, pod):
            result.count()
            if problem or entry.envs is None:
                why = problem or entry.problem or "the device plugin's answer can't be decoded"
                result.unknown("no_data_container", pod=pod, container=entry.container, why=why)
            elif parts.get(entry.container):
                _compare(node, pod, entry, parts[entry.container], result)


def _compare(node: Node, pod: Pod, entry: Entry, parts: list[tuple[str, int, int]], result: CheckResult) -> None:
    envs, visible = entry.envs or {}, visible_gpus(node, entry)
    chosen = [uuid.partition("[")[0] for uuid, *_rest in parts]
    if {gpu.mode for gpu in register_of(node).gpus if gpu.uuid in chosen} & set(OTHER_MODES):
        return
    details: JsonObject = {
        "pod": pod,
        "container": entry.container,
        "api": join(f"{uuid} {mib} MiB {cores} %" for uuid, mib, cores in parts),
        "kubelet": join(
            f"{key}={shorten(value, 100)}"
            for key, value in sorted(envs.items())
            if key.startswith(("NVIDIA_VISIBLE", "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM"))
        ),
    }
    if visible.uuids is None or set(chosen) != visible.uuids:
        preferred = visible.uuids is not None and {_physical(device) for device in entry.ids} == visible.uuids
        details["visible"] = join(sorted(visible.uuids or ())) or "nothing"
        if preferred:
            result.warn("kubelet_preference", **details)
        else:
            result.fail("other_gpu", **details)
        return
    for position, (_uuid, mib, _cores) in enumerate(parts):
        limit = envs.get(f"CUDA_DEVICE_MEMORY_LIMIT_{position}")
        if limit != f"{mib}m":
            shown = shorten(limit or "nothing")
            result.fail("memory_limit_differs", limit=shown, position=position, mib=mib, **details)
            return
    cores = envs.get("CUDA_DEVICE_SM_LIMIT")
    if cores is not None and parse_int(cores) not in {number for _uuid, _mib, number in parts}:
        result.fail("core_limit_differs", limit=shorten(cores), cores=parts[0][2], **details)


def _physical(identifier: str) -> str:
    """Return the GPU of a device ID of HAMi's plugin, ``<UUID>-<i>``."""
    head, _dash, tail = identifier.rpartition("-")
    return head if tail.isdigit() and len(tail) < 5 else identifier


def library_is_loaded(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H8: HAMi's library, which enforces its limits, is loaded in each process."""
    _report_missing_processes(node, result)
    modes = {gpu.uuid: gpu.mode for gpu in register_of(node).gpus}
    for pod in pods_with_gpus(node):
        disabled = [
            container.name
            for container in pod.containers
            if container.env.get(hami_marks.DISABLE_CONTROL) in hami_marks.DISABLED
        ]
        for gpu in node.nvml.gpus:
            if modes.get(gpu.uuid) in OTHER_MODES:
                continue
            for process in processes(gpu, pod):
                result.count()
                state = "unknown" if process.libvgpu is None else "mapped" if process.libvgpu else "not mapped"
                proc = f"pid {process.pid}: libvgpu.so {state}"
                details = {"pod": pod, "gpu": gpu, "proc": proc, "process": process.label}
                if disabled:
                    result.warn("disabled", containers=join(disabled), **details)
                elif process.libvgpu is None:
                    result.unknown("unknown", **details)
                elif not process.libvgpu:
                    result.fail("not_loaded", **details)


def _report_missing_processes(node: Node, result: CheckResult) -> None:
    """Report UNKNOWN where pods hold GPUs and NVML lists no processes."""
    mine = pods_with_gpus(node)
    without = [gpu for gpu in node.nvml.gpus if gpu.processes is None]
    why = node.nvml.problem or (f"NVML doesn't list the processes of {without[0].label}" if without else "")
    if mine and why:
        result.unknown("no_data", pods=plural(len(mine), "pod"), why=why)


def parts_are_respected(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H9: no pod uses more than its part."""
    _report_missing_processes(node, result)
    gpus = {gpu.uuid: gpu for gpu in register_of(node).gpus}
    for pod in pods_with_gpus(node):
        allocation, _problem = allocation_of(pod)
        for uuid, part in held_by_hami(pod, allocation or []).items():
            real, registered = node.nvml.gpu(uuid), gpus.get(uuid)
            if real is None or real.processes is None:
                continue
            result.count()
            used = usage_of(real, pod)
            most = part.mib + part.mib * PERCENT // 100 + CONTEXT_MIB * max(1, used.processes)
            details = {"pod": pod, "gpu": real, "api": f"{part.mib} MiB", "nvml": f"{used.mib} MiB"}
            details.update(used=used.mib, mib=part.mib)
            if used.mib is None:
                result.unknown("usage_unknown", **details)
            elif used.mib > most:
                if registered is not None and real.total_mib is not None and registered.devmem > real.total_mib + 1:
                    result.warn("over_part", **details)
                else:
                    result.fail("over_part", **details)


def mig_devices_exist(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check H11: the MIG devices that HAMi chose exist, each for one pod."""
    owners: dict[tuple[str, int | None], str] = {}
    for pod in pods_with_gpus(node):
        text = pod.annotations.get(MIG_ALLOCATIONS)
        if not text or pod.terminating:
            continue
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError):
            rows = None
        reader = Reader()
        entries = reader.mappings(rows, MIG_ALLOCATIONS)
        if rows is None or reader.unreadable:
            why = reader.unreadable[0] if reader.unreadable else f"{MIG_ALLOCATIONS} is {describe(text)}"
            result.unknown("unreadable", pod=pod, why=why)
            continue
        for raw in entries:
            result.count()
            if node.nvml.problem:
                result.unknown("no_data", pod=pod, why=node.nvml.problem)
                continue
            uuid, physical = reader.text(raw.get("migUUID"), "migUUID"), reader.text(raw.get("gpuUUID"), "gpuUUID")
            gi, ci = reader.number(raw.get("gpuInstanceID"), "GI"), reader.number(raw.get("computeInstanceID"), "CI")
            if not uuid and not pod.started:
                continue
            gpu = node.nvml.gpu(uuid)
            exists = gpu is not None and any((mig.uuid, mig.gi, mig.ci) == (uuid, gi, ci) for mig in gpu.mig)
            shown = f"{shorten(uuid) or 'no migUUID'} GI {gi} CI {ci} of {shorten(physical)}"
            listed = join(f"{m.uuid} GI {m.gi} CI {m.ci}" for g in node.nvml.gpus for m in g.mig) or "no MIG device"
            details = {"pod": pod, "uuid": uuid, "api": shown, "nvml": listed}
            if gpu is None or not exists or gpu.uuid != physical:
                result.fail("device_missing", **details)
            elif (physical, gi) in owners:
                result.fail("shared", other=owners[(physical, gi)], **details)
            owners[(physical, gi)] = pod.key
