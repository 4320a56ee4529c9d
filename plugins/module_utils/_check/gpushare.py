# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks G1, G2, G6 and G10 to G12 of gpushare: GPUs, sums, schedulers, and the extender's cache. No I/O."""

from __future__ import annotations

import re
import typing as t

from .._contracts import gpushare as contract
from .._contracts.gpushare import Card
from .._contracts.model import Pod
from .._core.types import JsonObject
from .evidence import Reader
from .model import Node, Snapshot
from .parse import join, parse_int, plural, shorten
from .result import CheckResult

# Each source rounds a GPU's memory to MiB.
ROUNDING_MIB = 1
CONFIGMAP = "unhealthy-gpu-"


def gpus_match_nvml(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G1: the node's GPUs are NVML's."""
    result.count(len(node.cards))
    if node.nvml.problem and node.ours and node.uuids:
        _compare_uuids(node, result)
    elif node.nvml.problem:
        result.unknown("no_data", why=node.nvml.problem)
    elif node.ours:
        _compare_annotation(node, result)
    else:
        _compare_upstream(node, result)


def _compare_uuids(node: Node, result: CheckResult) -> None:
    announced = {card.uuid: card for card in node.cards}
    planes = {"api": join(sorted(announced)) or "no GPU", "nvml": join(node.uuids)}
    for uuid in sorted(set(node.uuids) - set(announced)):
        result.fail("not_in_annotation", uuid=uuid, key=uuid, **planes)
    for card in node.cards:
        if card.uuid not in node.uuids and card.healthy:
            result.fail("not_on_machine", card=card.index, uuid=card.uuid, **planes)


def _compare_annotation(node: Node, result: CheckResult) -> None:
    announced = {card.uuid for card in node.cards}
    for gpu in node.nvml.gpus:
        if gpu.uuid not in announced:
            result.fail("not_in_annotation", gpu=gpu, api=join(sorted(announced)) or "no GPU", nvml=gpu.uuid)
    for card in node.cards:
        nvml_gpu = node.nvml.gpu(card.uuid)
        place: JsonObject = {"card": card.index, "uuid": card.uuid}
        if nvml_gpu is None:
            if card.healthy and node.nvml.unidentified:
                result.unknown("unidentified", why=node.nvml.unidentified, **place)
            elif card.healthy:
                existing = join(existing_gpu.uuid for existing_gpu in node.nvml.gpus) or "no GPU"
                api = f"GPU {card.index}: {card.uuid}, healthy"
                result.fail("not_on_machine", api=api, nvml=existing, **place)
            continue
        if nvml_gpu.minor is not None and card.minor != nvml_gpu.minor:
            planes = {"api": f"minor {card.minor}", "nvml": f"minor {nvml_gpu.minor}"}
            result.fail("minor_differs", minor=nvml_gpu.minor, announced=card.minor, **planes, **place)
        if nvml_gpu.total_mib is None:
            result.unknown("size_unknown", why=nvml_gpu.problem or "NVML doesn't report it", **place)
        elif abs(card.memory_mib - nvml_gpu.total_mib) > ROUNDING_MIB or card.units not in _sizes(
            node, nvml_gpu.total_mib - card.reserved_mib
        ):
            planes = {
                "api": f"{card.units} units, {card.memory_mib} MiB" if card.units < 10**9 else "",
                "nvml": f"{nvml_gpu.total_mib} MiB",
            }
            numbers = {"units": shorten(str(card.units)), "announced": shorten(str(card.memory_mib))}
            result.fail("size_differs", mib=nvml_gpu.total_mib, **numbers, **planes, **place)
        elif card.units > max(_sizes(node, nvml_gpu.total_mib - (nvml_gpu.reserved_mib or 0))):
            planes = {
                "api": f"{card.units} units, {card.reserved_mib} MiB reserved",
                "nvml": f"{nvml_gpu.reserved_mib} MiB reserved",
            }
            result.warn("reserve_shared", units=card.units, mib=nvml_gpu.reserved_mib, **planes, **place)


def _sizes(node: Node, shared_mib: int) -> set[int]:
    """Return the units as which so many MiB may be announced."""
    units = [node.unit] if node.unit else list(contract.MIB_PER_UNIT)
    return {contract.units_of(max(0, shared_mib), unit) for unit in units}


def _compare_upstream(node: Node, result: CheckResult) -> None:
    gpus = node.nvml.gpus
    wrong = [gpu for gpu in gpus if gpu.minor is not None and gpu.minor != gpu.index]
    if node.nvml.unidentified:
        result.unknown("indices_unknown", why=node.nvml.unidentified)
    elif wrong or [gpu.index for gpu in gpus] != list(range(len(gpus))):
        shown = join(f"GPU {gpu.index}: /dev/nvidia{gpu.minor}" for gpu in gpus)
        result.fail("index_is_not_minor", gpu=wrong[0] if wrong else gpus[0], nvml=shown)
    for gpu in gpus:
        if gpu.minor is None:
            result.unknown("minor_unknown", gpu=gpu)
        if gpu.total_mib is None:
            result.unknown("size_unknown", gpu=gpu, why=gpu.problem or "NVML doesn't report it")
    sizes = {contract.units_of(gpu.total_mib, node.unit or "GiB") for gpu in gpus if gpu.total_mib is not None}
    if len(sizes) > 1:
        result.fail("sizes_differ", gpu=gpus[0], nvml=join(f"GPU {gpu.index}: {gpu.total_mib} MiB" for gpu in gpus))


def capacity_matches_gpus(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G2: the node announces what its GPUs hold."""
    result.count()
    memory, count = node.capacity.get(contract.RESOURCE_MEMORY, 0), node.capacity.get(contract.RESOURCE_COUNT, 0)
    announced = f"{contract.RESOURCE_MEMORY} {memory}, {contract.RESOURCE_COUNT} {count}"
    details: JsonObject = {"announced": announced, "api": announced, "key": announced}
    if node.ours:
        units = sum(card.units for card in node.cards)
        healthy = sum(card.units for card in node.cards if card.healthy)
        left = node.allocatable.get(contract.RESOURCE_MEMORY, 0)
        expected = f"{plural(len(node.cards), 'GPU')} with {shorten(str(units))} units"
        if node.cards_problem:
            result.unknown("annotation_unreadable", announced=announced, why=node.cards_problem)
        elif (memory, count) != (units, len(node.cards)):
            result.fail("capacity_differs", expected=expected, **details)
        elif left > healthy:
            details["api"] = f"allocatable {left}; {expected}, {healthy} of them healthy"
            details["key"] = shorten(f"allocatable {left}, healthy {healthy}")
            result.fail("allocatable_exceeds_healthy", left=left, healthy=healthy, **details)
        return
    gpus = node.nvml.gpus
    first = gpus[0].total_mib if gpus else 0
    why = node.nvml.problem or node.nvml.unidentified
    why = why or ("NVML doesn't report the first GPU's size" if first is None else "")
    if why or first is None:
        result.unknown("no_data", announced=announced, why=why)
        return
    possible = {len(gpus) * contract.units_of(first, unit) for unit in contract.MIB_PER_UNIT}
    if count != len(gpus) or memory not in possible or not memory:
        expected = plural(len(gpus), "GPU") + (f", the first of {first} MiB" if gpus else "")
        nvml = join(f"GPU {gpu.index}: {gpu.total_mib} MiB" for gpu in gpus) or "no GPU"
        result.fail("capacity_is_not_nvmls", expected=expected, nvml=nvml, **details)


def gpus_are_not_overcommitted(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check G6: the pods' units fit on their GPUs."""
    result.count(len(node.cards))
    holders = [pod for pod in node.pods if pod.holds_units]
    if not node.cards:
        if holders:
            why = node.cards_problem or "the node announces no GPU"
            result.unknown("gpus_unknown", pods=plural(len(holders), "pod"), why=why)
        return
    on_card: dict[int, list[tuple[Pod, int]]] = {card.index: [] for card in node.cards}
    unplaced: list[Pod] = []
    for pod in holders:
        shares = pod.booked
        if not shares or not set(shares) <= set(on_card):
            unplaced.append(pod)
        for index, units in shares.items():
            on_card.get(index, []).append((pod, units))
    for card in node.cards:
        _check_sum(card, on_card[card.index], node, result)
    settled = [pod for pod in unplaced if pod.steady and not (node.ours and pod.key in node.kubelet.duplicate_pods)]
    if settled:
        parts = {pod.unique_key: 1 for pod in settled}
        result.unknown("unplaced", pods=join(pod.key for pod in settled), key="unplaced", parts=parts, most=0)


def _check_sum(card: Card, held: list[tuple[Pod, int]], node: Node, result: CheckResult) -> None:
    total = sum(units for _pod, units in held)
    if total <= card.units:
        return
    counted = [(pod, units) for pod, units in held if node.ours or not pod.terminating]
    by_extender = sum(units for _pod, units in counted)
    exceeded = by_extender > card.units
    shown = {"held": shorten(str(total)), "units": shorten(str(card.units))}
    pods = join(f"{pod.key} {shorten(str(units))}" for pod, units in held)
    details: JsonObject = {
        **shown,
        "card": card.index,
        "uuid": card.uuid,
        # Two pods may have one GPU for the moment in which their annotations are corrected.
        "parts": {pod.unique_key: units for pod, units in (counted if exceeded else held)},
        "most": card.units,
        "api": f"with terminating pods {shown['held']}, as the extender counts {shorten(str(by_extender))}, "
        f"of {shown['units']}: {pods}",
    }
    if exceeded:
        result.fail("overcommitted", **details)
    else:
        result.warn("overcommitted_by_terminating", **details)


def scheduler_calls_extender(snapshot: Snapshot, result: CheckResult) -> None:
    """Check G12: pods with units are placed by a scheduler that calls the extender."""
    allowed = snapshot.options.schedulers
    for pod in [pod for node in snapshot.nodes for pod in node.pods] + list(snapshot.pending):
        if pod.finished or pod.terminating or not pod.requests_of(contract.RESOURCE_MEMORY):
            continue
        result.count()
        if pod.scheduler not in allowed:
            scheduler = repr(shorten(pod.scheduler) or "not named")
            api = f"schedulerName: {shorten(pod.scheduler)!r}"
            result.fail("other_scheduler", node=pod.node, pod=pod, scheduler=scheduler, allowed=join(allowed), api=api)
        elif pod.node and pod.bypassed_scheduler:
            api = "managedFields: spec.nodeName was set when the pod was created, not by a binding"
            result.warn("bypassed_scheduler", node=pod.node, pod=pod, api=api)


def unhealthy_gpus_get_no_pods(snapshot: Snapshot, result: CheckResult) -> None:
    """Check G11: the list of unhealthy GPUs can be read, and no pod is placed on them."""
    for node in snapshot.nodes:
        if not node.sharing:
            continue
        for card in node.cards:
            if not card.healthy:
                result.count()
                _report_pods(node, card, None, card.reason or "unhealthy", result)
        if node.ours:
            continue
        if snapshot.configmaps is None:
            why = snapshot.configmaps_problem or "they weren't read"
            result.unknown("configmaps_unavailable", node=node.name, why=why)
        elif CONFIGMAP + node.name in snapshot.configmaps:
            result.count()
            _check_configmap(node, snapshot, result)


def _check_configmap(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    configmap = (snapshot.configmaps or {})[CONFIGMAP + node.name]
    text = configmap["data"].get("gpus")
    name = f"kube-system/{CONFIGMAP}{node.name}"
    known = {card.index: card for card in node.cards}
    indices = [parse_int(part) for part in text.split(",")] if text else []
    if not text or not re.fullmatch(r"[0-9]+(,[0-9]+)*", text) or not all(index in known for index in indices):
        value = repr(shorten(str(text)))
        api = f"gpus: {value}; GPUs: {join(known)}"
        result.fail("configmap_invalid", node=node.name, name=name, value=value, api=api)
        return
    for index in indices:
        if index is not None:
            _report_pods(node, known[index], configmap["created"], f"ConfigMap {name}", result)


def _report_pods(node: Node, card: Card, since: int | None, reason: str, result: CheckResult) -> None:
    for pod in node.pods:
        if not pod.holds_units or card.index not in pod.booked:
            continue
        booked = pod.booking
        details = {"node": node.name, "card": card.index, "uuid": card.uuid, "pod": pod}
        details.update(reason=shorten(reason, 120), api=shorten(reason, 200))
        if since is not None and booked is not None and booked.assume_time // 10**9 > since:
            result.fail("placed_on_unhealthy", **details)
        else:
            result.warn("holds_unhealthy", **details)


UnitsByIndex = dict[int, int]


class _Cached(t.NamedTuple):
    """What an extender counts on a node: units of each pod by key, and the pods' UIDs where it reports them."""

    units: dict[str, UnitsByIndex]
    uids: dict[str, str]


def extender_cache_matches(snapshot: Snapshot, result: CheckResult) -> None:
    """Check G10: the extender's cache matches the annotations, for each pod that both had time to see.

    Sums aren't compared: they are of two moments.
    """
    sharing = [node for node in snapshot.nodes if node.sharing]
    if not sharing:
        return
    if not snapshot.options.extender:
        result.unknown("not_queried")
        return
    answers = Reader()
    for name, answer in sorted(answers.mapping(snapshot.options.extender, "extender").items()):
        why = _no_answer(answer)
        if why:
            result.unknown("no_answer", extender_name=name, key=name, why=why, extender=name)
            continue
        reader = Reader()
        rows = {reader.text(row.get("name"), "node name"): row for row in reader.mappings(answer.get("nodes"), "nodes")}
        for node in sharing:
            _check_node(name, node, rows.get(node.name), snapshot, reader, result)
        for problem in reader.unreadable:
            result.unknown("unreadable", extender_name=name, key=name, why=problem, extender=name)
    for problem in answers.unreadable:
        result.unknown("unreadable_answers", why=problem)


def _no_answer(answer: t.Any) -> str:
    if not isinstance(answer, dict):
        return shorten(answer, 200) if isinstance(answer, str) else "its answer is no JSON object"
    error = answer.get("error")
    if error or not isinstance(answer.get("nodes"), list):
        return shorten(error, 200) if isinstance(error, str) else "its answer has no list of nodes"
    return ""


def _check_node(
    name: str, node: Node, row: JsonObject | None, snapshot: Snapshot, reader: Reader, result: CheckResult
) -> None:
    held = {pod.key: pod for pod in node.pods if pod.holds_units}
    details: JsonObject = {"node": node.name, "extender_name": name, "key": f"extender {name}"}
    if row is None:
        details["extender"] = "no such node"
        if node.ours and node.cards:
            result.count()
            result.fail("node_unknown", **details)
        elif held:
            result.count()
            result.warn("node_not_cached", pods=plural(len(held), "pod"), **details)
        return
    cached = _Cached({}, {})
    cards = {card.index: card for card in node.cards}
    for dev in reader.mappings(row.get("devs"), "devs"):
        index, total = reader.number(dev.get("id"), "devs id"), reader.number(dev.get("totalGPU"), "devs totalGPU")
        if index is None:
            continue
        result.count()
        card = cards.get(index)
        if total is not None and total != (card.units if card else 0):
            units = shorten(str(card.units)) if card else "0"
            place = {**details, "card": index, "uuid": card.uuid if card else "", "key": f"extender {name}: {total}"}
            planes = {"api": f"{units} units", "extender": f"{total} units"}
            result.fail("size_differs", cached=total, units=units, **planes, **place)
        for entry in reader.mappings(dev.get("pods"), "devs pods"):
            _add_pod(entry, index, held, cached, reader)
    _check_pods(details, node, held, cached, snapshot, result)


def _add_pod(entry: JsonObject, index: int, held: t.Mapping[str, Pod], cached: _Cached, reader: Reader) -> None:
    namespace, pod, uid = (reader.text(entry.get(key), f"devs pods {key}") for key in ("namespace", "name", "uid"))
    key = f"{namespace}/{pod}"
    # Our extender reports UIDs, upstream's doesn't.
    if uid and key in held and held[key].uid != uid:
        key = f"{key} ({uid})"
    cached.uids[key] = uid
    cached.units.setdefault(key, {})[index] = reader.number(entry.get("usedGPU"), "usedGPU") or 0


def _check_pods(
    details: JsonObject, node: Node, held: t.Mapping[str, Pod], cached: _Cached, snapshot: Snapshot, result: CheckResult
) -> None:
    known = {card.index for card in node.cards}
    # Our extender also lists what it has booked before the pod is bound.
    pending = {pod.key for pod in snapshot.pending} if node.ours else set()
    for key in sorted(set(held) | set(cached.units)):
        pod = held.get(key)
        # The API server and the extender see a pod come or go at different moments.
        if pod is not None and (pod.terminating or (pod.created or 0) > snapshot.now - snapshot.options.grace_seconds):
            continue
        if pod is None and key in pending:
            continue
        result.count()
        actual = pod.booked if pod else {}
        by_extender = cached.units.get(key, {})
        if actual == by_extender or (pod is not None and not (set(actual) & known) and not by_extender):
            continue
        index = next(iter({**actual, **by_extender}), None)
        place: JsonObject = {**details, "pod": key if pod is None else pod, "card": index if index in known else None}
        place.update(api=_describe_units(actual), extender=_describe_units(by_extender))
        place.update(cached=_describe_units(by_extender), actual=_describe_units(actual))
        if pod is None:
            result.fail("pod_gone", pod_uid=cached.uids.get(key, ""), **place)
        else:
            result.fail("pod_differs", **place)


def _describe_units(units: UnitsByIndex) -> str:
    shown = (f"{shorten(str(number))} units of GPU {shorten(str(index))}" for index, number in units.items())
    return join(shown) or "nothing"
