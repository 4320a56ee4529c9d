# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of HAMi: nodes, GPUs and schedulers. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _hami as hami
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import HAMI, Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import listed, seconds, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally

MUTEX = "hami.io/mutex.lock"
LOCK_SECONDS = 300
RESTART = "restart HAMi's device plugin on the node, and see its log"
Given = t.List[t.List[t.Tuple[str, int, int]]]


@dataclasses.dataclass(frozen=True)
class Register:
    """A node's register; ``problem`` where it can't be read."""

    gpus: tuple[hami.Gpu, ...]
    problem: str = ""

    def gpu(self, uuid: str) -> hami.Gpu | None:
        return next((one for one in self.gpus if one.uuid == uuid), None)


def register(node: Node) -> Register:
    try:
        return Register(tuple(hami.registered(node.annotations.get(hami.NODE_REGISTER, ""))))
    except hami.HamiError as error:
        return Register((), shorten(str(error), 200))


def given_to(pod: Pod) -> tuple[Given | None, str]:
    """What a pod's annotation gives its containers; None, and why, where it can't be told."""
    text = pod.annotations.get(hami.POD_ALLOCATED)
    if text is None:
        return None, ""
    try:
        return hami.allocated(text), ""
    except hami.HamiError as error:
        return None, shorten(str(error), 200)


def askers(node: Node) -> list[Pod]:
    """Pods of the node that hold GPUs by HAMi, be it while they end."""
    return [pod for pod in node.pods if pod.active and (pod.asks(hami.RESOURCE_COUNT) or has_share(pod))]


def has_share(pod: Pod) -> bool:
    return hami.POD_ALLOCATED in pod.annotations


def by_container(pod: Pod, given: Given) -> dict[str, list[tuple[str, int, int]]]:
    """The parts of each container by its name; init containers come first, older versions leave them out."""
    spec = pod.json["spec"]
    inits, others = spec["initContainers"], spec["containers"]
    named = others if len(given) <= len(others) else inits + others
    return {one["name"]: parts for one, parts in zip(named, given)}


def register_is_nvmls(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H1: the register is what NVML has."""
    found = register(node)
    tally.seen(len(found.gpus))
    if found.problem or node.nvml.problem:
        tally.unknown(f"the register can't be compared: {found.problem or node.nvml.problem}", RESTART)
        return
    ratios = set()
    for gpu in found.gpus:
        place = {"card": gpu.index, "uuid": gpu.uuid}
        real = node.nvml.gpu(gpu.uuid)
        if real is None and node.nvml.nameless:
            tally.unknown(f"{gpu.uuid} can't be looked for: {node.nvml.nameless}", LOOK, **place)
            continue
        if real is None:
            has = listed(one.uuid for one in node.nvml.gpus) or "no card"
            tally.fail(f"the register has {gpu.uuid}, and NVML doesn't", RESTART, api=gpu.uuid, nvml=has, **place)
            continue
        if not gpu.healthy:
            tally.warn(
                f"{gpu.uuid} is registered as unhealthy", "mend or replace the card", api="health false", **place
            )
        if real.total_mib is None:
            tally.unknown(f"the size of {gpu.uuid} can't be compared: {real.problem or 'N/A'}", LOOK, **place)
        elif real.total_mib:
            ratios.add(gpu.devmem * 100 // real.total_mib)
            if gpu.devmem < real.total_mib - 1 and gpu.devmem * 100 // real.total_mib < 100:
                tally.fail(
                    f"the register gives {gpu.uuid} {gpu.devmem} MiB, and it has {real.total_mib}",
                    RESTART,
                    api=f"devmem {gpu.devmem}",
                    nvml=f"{real.total_mib} MiB",
                    **place,
                )
    if ratios and max(ratios) - min(ratios) > 1 and min(ratios) >= 100:
        shown = listed(f"{one.uuid} {one.devmem}" for one in found.gpus)
        tally.fail("the register scales the cards' memory differently", RESTART, api=f"devmem: {shown}")
    if len({one.count for one in found.gpus if one.mode != "mig"}) > 1:
        shown = listed(f"{one.uuid} {one.count}" for one in found.gpus)
        tally.fail("the register splits the cards differently", RESTART, api=f"count: {shown}")
    known = {one.uuid for one in found.gpus}
    for real in node.nvml.gpus:
        if real.uuid not in known:
            tally.warn(
                f"{real.label} isn't in the register",
                "right if the node's configuration filters it out; else restart HAMi's device plugin",
                gpu=real,
                nvml=real.uuid,
            )


def capacity_is_the_register(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H2: kubelet has as many places as the register."""
    found = register(node)
    tally.seen()
    if found.problem:
        tally.unknown(f"the announced number can't be compared: {found.problem}", RESTART)
        return
    capacity, left = (node.resource(hami.RESOURCE_COUNT, field) for field in ("capacity", "allocatable"))
    whole, healthy = sum(one.count for one in found.gpus), sum(one.count for one in found.gpus if one.healthy)
    # Less than the healthy ones is C6's.
    if capacity != whole or left > healthy:
        tally.fail(
            f"kubelet has {left} of {capacity} places to give, and the register's {healthy} of {whole}",
            RESTART,
            api=f"{hami.RESOURCE_COUNT}: capacity {capacity}, allocatable {left}; register {whole}, healthy {healthy}",
            key=shorten(f"{left} of {capacity}, {healthy} of {whole}", 200),
        )


def parts_fit(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H5: what pods hold of a GPU fits on it."""
    found = register(node)
    tally.seen(len(found.gpus))
    if found.problem:
        tally.unknown(f"whether the pods' parts fit can't be told: {found.problem}", RESTART)
        return
    held: dict[str, list[tuple[Pod, hami.Held]]] = {gpu.uuid: [] for gpu in found.gpus}
    for pod in node.pods:
        given, problem = given_to(pod)
        if not pod.active:
            continue
        if problem:
            tally.unknown(f"what it holds can't be told, so no GPU's sum is whole: {problem}", "see H3", pod=pod)
        for uuid, part in hami.held(pod.json, given or []).items():
            held.setdefault(uuid, []).append((pod, part))
    for gpu in found.gpus:
        _fits(gpu, held[gpu.uuid], node, tally)


def _fits(gpu: hami.Gpu, held: list[tuple[Pod, hami.Held]], node: Node, tally: Tally) -> None:
    mib, cores = sum(part.mib for _pod, part in held), sum(part.cores for _pod, part in held)
    slots, real = sum(part.slots for _pod, part in held), node.nvml.gpu(gpu.uuid)
    who = listed(f"{pod.key} {part.mib} MiB {part.cores} %" for pod, part in held)
    place = {"card": gpu.index, "uuid": gpu.uuid, "api": f"of {gpu.devmem} MiB, {gpu.devcore} %, {gpu.count}: {who}"}
    do = "delete a pod of the GPU; restart HAMi's scheduler"
    sums: dict[str, dict[str, int]] = {
        "MiB": {pod.told_apart: part.mib for pod, part in held},
        "cores": {pod.told_apart: part.cores for pod, part in held},
        "places": {pod.told_apart: part.slots for pod, part in held},
    }
    alone = next((pod for pod, part in held if part.cores == 100), None)

    def of(key: str, most: int) -> dict[str, t.Any]:
        return {**place, "key": key, "parts": sums[key], "most": most}

    if mib > gpu.devmem:
        tally.fail(f"pods hold {mib} MiB of GPU {gpu.uuid}, which has {gpu.devmem}", do, **of("MiB", gpu.devmem))
    elif cores > gpu.devcore:
        words = f"pods hold {cores} % of the cores of GPU {gpu.uuid}, which has {gpu.devcore}"
        tally.fail(words, do, **of("cores", gpu.devcore))
    elif slots > gpu.count:
        tally.fail(f"{slots} share GPU {gpu.uuid}, and {gpu.count} may", do, **of("places", gpu.count))
    elif gpu.devcore == 100 and len(held) > 1 and alone is not None:
        ones = dict.fromkeys(sums["cores"], 1)
        more = {"key": f"alone {alone.told_apart}", "parts": ones, "most": 1}
        tally.fail(f"a pod has all cores of GPU {gpu.uuid} for itself, and isn't alone", do, **place, **more)
    elif real is not None and real.total_mib is not None and mib > real.total_mib:
        tally.warn(
            f"pods hold {mib} MiB of GPU {gpu.uuid}, which really has {real.total_mib}: memory is oversubscribed",
            "set deviceMemoryScaling to 1 where that isn't meant",
            nvml=f"{real.total_mib} MiB",
            **of("MiB", real.total_mib),
        )


def lock_is_fresh(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """H7: the node isn't locked for a pod that never comes."""
    tally.seen()
    text = node.annotations.get(MUTEX)
    if not text:
        return
    when, _comma, owner = text.partition(",")
    key, since = owner.replace(",", "/", 1), seconds(when)
    api = f"{MUTEX}={shorten(text, 120)}"
    do = f"take the annotation {MUTEX} off the node: no GPU pod can be bound to it"
    if since is None:
        tally.unknown(f"the node's lock has no time that can be read: {shorten(text)!r}", do, api=api)
        return
    age = snapshot.now - since
    there = not owner or any(pod.key == key for pod in (*node.pods, *snapshot.waiting))
    if age > LOCK_SECONDS or not there:
        why = f"for {age} s" if age > LOCK_SECONDS else f"for pod {shorten(key)}, which doesn't exist"
        # Each pod's lock is another one: of many that are gone a moment later, none stays.
        tally.fail(f"the node is locked {why}", do, api=api, key=shorten(text, 200))


def scheduler_is_hamis(snapshot: Snapshot, tally: Tally) -> None:
    """H10: pods with HAMi's resources have its scheduler."""
    bound = [pod for node in snapshot.nodes if HAMI in node.backends for pod in askers(node)]
    waiting = [pod for pod in snapshot.waiting if any(pod.asks(one) for one in hami.RESOURCES_OF_ITS_OWN)]
    for pod in bound + waiting:
        if pod.terminating:
            continue
        tally.seen()
        if pod.scheduler not in snapshot.options.hami_schedulers:
            tally.fail(
                f"its scheduler is {shorten(pod.scheduler) or 'not named'!r}, and not HAMi's: HAMi's webhook didn't "
                "see it",
                "see whether the webhook's Service has endpoints and its certificate is right; create the pod anew",
                node=pod.node,
                pod=pod,
                api=f"schedulerName: {shorten(pod.scheduler)!r}",
            )


CHECKS = (
    Check(
        "H1",
        "hami",
        "The register is what NVML has",
        "the node's register in either format (UUID, devmem, count, health) with NVML's cards",
        "FAIL; WARN unhealthy, or not in it",
        node=register_is_nvmls,
    ),
    Check(
        "H2",
        "hami",
        "kubelet has as many places as the register",
        "capacity and allocatable of nvidia.com/gpu with the register's counts",
        "FAIL",
        node=capacity_is_the_register,
    ),
    Check(
        "H5",
        "hami",
        "What pods hold of a GPU fits on it",
        "sums of MiB, cores and places by HAMi's rule with the register, and MiB with NVML's",
        "FAIL; WARN oversubscribed",
        node=parts_fit,
    ),
    Check(
        "H7",
        "hami",
        "No node stays locked",
        f"the annotation's age ({LOCK_SECONDS} s at most) and its pod",
        "FAIL",
        node=lock_is_fresh,
    ),
    Check(
        "H10",
        "hami",
        "Pods with HAMi's resources have its scheduler",
        "schedulerName with the option hami_schedulers",
        "FAIL",
        cluster=scheduler_is_hamis,
    ),
)
