# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks G3, G4, G5, G7, G8 and G9 of gpushare: pods' annotations, allocations and memory. No I/O."""

from __future__ import annotations

from .._contracts import gpushare as contract
from .._contracts.model import MAIN, VISIBLE, Pod
from .._core.types import JsonObject
from .catalog_gpushare import STALE_SECONDS
from .grants import NO_GPU_VALUE, entries_of, units_by_gpu, usage_of, visible_gpus
from .model import Entry, Gpu, Node, Snapshot
from .parse import join, parse_int, plural, shorten
from .result import CheckResult

# NVML rounds each process's memory; the driver enforces a limit to the byte.
SLACK_MIB = 32
ANNOTATIONS = (contract.POD_INDEX, contract.POD_INDICES, contract.POD_UNITS, contract.POD_CARD_UNITS)


def gpushare_pods(node: Node) -> list[Pod]:
    """Return pods that hold units of the node, including those that start or terminate."""
    return [pod for pod in node.pods if pod.holds_units]


def _expected_units(node: Node, pod: Pod) -> int:
    """Return the pod's units; upstream's counts containers alone, ours as Kubernetes does."""
    if node.ours:
        return pod.units
    return sum(container.requests.get(contract.RESOURCE_MEMORY, 0) for container in pod.of_kind(MAIN))


def is_duplicated(node: Node, pod: Pod) -> bool:
    """Return whether our plugin doesn't annotate the pod, because kubelet also lists a predecessor of its name."""
    return node.ours and pod.key in node.kubelet.duplicate_pods


def annotations_are_valid(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G3: a bound pod has annotations that name its GPU."""
    for pod in gpushare_pods(node):
        # Our plugin itself annotates a pod that bypassed the extender, once kubelet has admitted it.
        unwritten = is_duplicated(node, pod) and contract.POD_INDEX not in pod.annotations
        if pod.terminating or (node.ours and not pod.started) or unwritten:
            continue
        result.count()
        invalid = _first_invalid(node, pod)
        if invalid:
            cause, fields = invalid
            have = [f"{key}={shorten(pod.annotations[key])}" for key in ANNOTATIONS if key in pod.annotations]
            result.fail(cause, pod=pod, api="; ".join(have) or "no annotation of gpushare", **fields)


def _first_invalid(node: Node, pod: Pod) -> tuple[str, JsonObject] | None:
    """Return the cause and fields of the first annotation that is missing or wrong."""
    notes = pod.annotations
    index, booked = notes.get(contract.POD_INDEX), pod.booking
    if index is None:
        scheduler = repr(shorten(pod.scheduler) or "unnamed")
        return "bypassed_extender", {"units": plural(pod.units, "unit"), "scheduler": scheduler}
    cards = {card.index: card for card in node.cards}
    if booked is None or not set(booked.indices) <= set(cards):
        return "unknown_gpu", _annotation(contract.POD_INDEX, index) | {"gpus": join(cards) or "none"}
    several = notes.get(contract.POD_INDICES, "")
    if several and booked.indices != tuple(parse_int(number) for number in several.split(",")):
        return "indices_invalid", _annotation(contract.POD_INDICES, several)
    expected_values = (
        (contract.POD_UNITS, _expected_units(node, pod)),
        (contract.POD_CARD_UNITS, cards[booked.index].units),
    )
    for key, expected in expected_values:
        value = notes.get(key)
        if parse_int(value) != expected:
            fields = _annotation(key, value or "") | {"expected": shorten(str(expected))}
            return "value_missing" if value is None else "value_differs", fields
    since = notes.get(contract.POD_ASSUME_TIME, "")
    return (
        None if (parse_int(since) or 0) > 0 else ("assume_time_invalid", _annotation(contract.POD_ASSUME_TIME, since))
    )


def _annotation(key: str, value: str) -> JsonObject:
    return {"annotation": key, "value": repr(shorten(value))}


def running_pods_are_assigned(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G4: a running pod is marked as assigned."""
    for pod in gpushare_pods(node):
        if pod.phase != "Running" or not pod.steady or pod.booking is None or is_duplicated(node, pod):
            continue
        result.count()
        assigned = pod.annotations.get(contract.POD_ASSIGNED)
        if assigned == "true":
            continue
        if assigned == "false" and _needs_no_update(node):
            if node.kubelet.problem:
                result.unknown("no_data", pod=pod, why=node.kubelet.problem)
                continue
            if entries_of(node, pod):
                continue
        api = f"{contract.POD_ASSIGNED}={shorten(assigned or '')}"
        value = repr(shorten(assigned or "") or "missing")
        result.fail("not_assigned", pod=pod, annotation=contract.POD_ASSIGNED, value=value, api=api)


def _needs_no_update(node: Node) -> bool:
    """Return whether the device plugin leaves pods as they are: upstream's does on a node of one GPU."""
    return not node.ours and len(node.cards) == 1


def no_stale_assumptions(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G5: a GPU that was chosen for a pod is soon allocated to it."""
    for pod in gpushare_pods(node):
        booked = pod.booking
        if pod.terminating or pod.phase != "Pending" or booked is None or is_duplicated(node, pod):
            continue
        result.count()
        age = snapshot.now - booked.assume_time // 10**9
        if booked.assigned or not booked.assume_time or age <= STALE_SECONDS:
            continue
        if not (_needs_no_update(node) and entries_of(node, pod)):
            assigned = shorten(pod.annotations.get(contract.POD_ASSIGNED, ""))
            api = f"phase Pending, {contract.POD_ASSIGNED}={assigned}"
            result.fail("stale_assumption", pod=pod, age=shorten(str(age)), api=api)


def shares_are_respected(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G9: no pod uses more than its share."""
    mine = [pod for pod in gpushare_pods(node) if pod.booked]
    unit_mib = node.unit_mib
    why = node.nvml.problem or ("the node's memory unit is unknown" if unit_mib is None else "")
    if result.without_data(mine, why) or unit_mib is None:
        return
    limits = node.annotations.get(contract.NODE_LIMIT, "none")
    cards = {card.index: card for card in node.cards}
    for pod in mine:
        for index, units in _units_by_index(node, pod).items():
            card = cards.get(index)
            gpu = node.nvml.gpu(card.uuid) if card else None
            if card is None or gpu is None:
                continue
            check_usage(pod, gpu, units * unit_mib, card.limit or limits, result)


def check_usage(pod: Pod, gpu: Gpu, share: int, limits: str, result: CheckResult) -> None:
    """Check that a pod uses no more of a card than its share, and that the driver limits it to that.

    :param share: in MiB.
    :param limits: what the node promises for this card.
    """
    result.count()
    used = usage_of(gpu, pod)
    limit = f"; limit {used.hard_mib} MiB" if used.hard_mib is not None else ""
    details = {
        "pod": pod,
        "gpu": gpu,
        "share": shorten(str(share)),
        "used": used.mib,
        "limit": used.hard_mib,
        "api": f"share {shorten(str(share))} MiB; limits: {shorten(limits)}",
        "nvml": f"{used.mib} MiB in {plural(used.processes, 'process', 'processes')}{limit}",
    }
    enforced = limits == contract.LIMIT_ENFORCED
    if used.mib is None:
        result.unknown("usage_unknown", **details)
    elif used.mib > share + SLACK_MIB:
        if enforced:
            result.fail("over_enforced_share", **details)
        else:
            result.warn("over_share", **details)
    elif enforced and used.hard_mib is not None and used.hard_mib > share:
        result.fail("limit_raised", **details)
    elif enforced and used.processes and used.limited and used.hard_mib is None:
        result.warn("limit_missing", **details)


def _units_by_index(node: Node, pod: Pod) -> dict[int, int]:
    """Return units by the GPU's index: as kubelet allocated them where that is known, or else as annotated."""
    units = pod.booked
    by_uuid = {card.uuid: card.index for card in node.cards}
    for entry in entries_of(node, pod):
        held, unresolved = units_by_gpu(node, entry.ids) if node.ours else ({}, [])
        if held and not unresolved and len(held) == len(units):
            share = next(iter(units.values()))
            return dict.fromkeys((by_uuid[uuid] for uuid in held), share)
    return units


def allocation_matches_annotations(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G7: kubelet allocated the GPU in its pod's annotations to each container."""
    mine = [pod for pod in gpushare_pods(node) if pod.steady and not is_duplicated(node, pod)]
    if result.without_data(mine, node.kubelet.problem):
        return
    for pod in mine:
        entries = [
            entry for entry in entries_of(node, pod) if entry.resource == contract.RESOURCE_MEMORY and entry.count
        ]
        result.count(len(entries))
        for entry in entries:
            _compare(node, pod, entry, result)
        containers = pod.sharing
        if not node.ours and len(containers) > 1:
            result.warn("several_containers", pod=pod, api=join(f"{name} {units}" for name, units in containers))


def _compare(node: Node, pod: Pod, entry: Entry, result: CheckResult) -> None:
    booked = pod.booking
    details: JsonObject = {"pod": pod, "container": entry.container}
    if entry.envs is None:
        result.unknown("undecodable", why=entry.problem or "it can't be decoded", **details)
        return
    index, value = entry.envs.get(contract.POD_INDEX, ""), entry.envs.get(VISIBLE, "")
    cdi = f"; CDI: {shorten(join(entry.cdi), 120)}" if entry.cdi else ""
    details["kubelet"] = f"{contract.POD_INDEX}={shorten(index)}; {VISIBLE}={shorten(value, 100)}{cdi}"
    if NO_GPU_VALUE in value or index == "-1":
        result.fail("no_gpu_found", value=repr(shorten(value)), **details)
        return
    if booked is None:
        return
    indices = join(booked.indices)
    details["api"] = f"GPUs {indices}"
    by_index = {card.index: card for card in node.cards}
    held, unresolved = units_by_gpu(node, entry.ids) if node.ours else ({}, [])
    if node.ours and not entry.ids:
        result.unknown("ids_unknown", **details)
        return
    if unresolved and not all("-_-" in identifier for identifier in unresolved):
        # Those of upstream's plugin have this infix: pods live on after a migration.
        result.fail("unknown_ids", ids=join(unresolved, 2), **details)
        return
    booked_uuids = {by_index[index].uuid if index in by_index else "" for index in booked.indices}
    if held and set(held) != booked_uuids:
        result.fail("other_gpu_allocated", held=join(sorted(held)), gpus=indices, **details)
        return
    visible = visible_gpus(node, entry)
    no_nvml = node.nvml.problem or node.nvml.unidentified
    if parse_int(index) != booked.index:
        result.fail("other_index", value=shorten(index) or "none", expected=booked.index, **details)
    elif no_nvml and visible.unresolved == (str(booked.index),):
        result.unknown("index_unknown", index=booked.index, why=no_nvml, **details)
    elif visible.unresolved or visible.uuids is None:
        result.fail("unresolved", value=repr(shorten(value)), **details)
    elif "" in booked_uuids:
        result.unknown("no_uuid", gpus=indices, **details)
    elif visible.uuids <= node.nvml.uuids | booked_uuids and visible.uuids != booked_uuids:
        shown, expected = join(sorted(visible.uuids)), join(sorted(booked_uuids))
        result.fail("other_gpu_visible", visible=shown, expected=expected, **details)
    else:
        requested = dict(pod.sharing).get(entry.container)
        units = entry.envs.get(contract.CONTAINER_UNITS)
        if parse_int(units) != requested:
            result.fail("other_units", value=shorten(units or "") or "no", expected=requested, **details)


def unit_counts_match(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G8: kubelet allocated as many device IDs as containers request units."""
    mine = [pod for pod in gpushare_pods(node) if pod.steady]
    for problem in dict.fromkeys((node.kubelet.problem, node.kubelet.pod_resources_problem)):
        if mine and problem:
            result.unknown("no_data", pods=plural(len(mine), "pod"), why=problem)
    for pod in mine:
        entries = {
            entry.container: entry for entry in entries_of(node, pod) if entry.resource == contract.RESOURCE_MEMORY
        }
        listing = node.kubelet.pod_resources.get(pod.key) or {}
        for container in pod.containers:
            units = container.requests.get(contract.RESOURCE_MEMORY, 0)
            if container.init or not units:
                continue
            result.count()
            entry, ids = entries.get(container.name), listing.get(container.name, {}).get(contract.RESOURCE_MEMORY, ())
            checkpoint = entry.count if entry else None
            resources = None if pod.key in node.kubelet.duplicate_pods else len(ids) or None
            # A missing allocation is reported by C4.
            if {checkpoint, resources} - {None, units}:
                planes = {"api": f"{units} units", "kubelet": f"checkpoint {checkpoint}, PodResources {resources}"}
                result.fail("count_differs", pod=pod, container=container.name, units=units, **planes)
