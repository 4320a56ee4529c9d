# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The check G10 of gpushare: the extender's cache. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import gpushare as contract
from .._core.types import JsonObject
from .model import Node, Pod, Snapshot
from .parse import Reader, join, plural, shorten
from .result import CheckResult

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
        rows = {reader.text(one.get("name"), "node name"): one for one in reader.mappings(answer.get("nodes"), "nodes")}
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
    held = {pod.key: pod for pod in node.pods if contract.counts(pod.json)}
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
        for one in reader.mappings(dev.get("pods"), "devs pods"):
            _add_pod(one, index, held, cached, reader)
    _check_pods(details, node, held, cached, snapshot, result)


def _add_pod(one: JsonObject, index: int, held: t.Mapping[str, Pod], cached: _Cached, reader: Reader) -> None:
    namespace, pod, uid = (reader.text(one.get(key), f"devs pods {key}") for key in ("namespace", "name", "uid"))
    key = f"{namespace}/{pod}"
    # Our extender reports UIDs, upstream's doesn't.
    if uid and key in held and held[key].uid != uid:
        key = f"{key} ({uid})"
    cached.uids[key] = uid
    cached.units.setdefault(key, {})[index] = reader.number(one.get("usedGPU"), "usedGPU") or 0


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
        actual = dict(contract.shares(pod.json)) if pod else {}
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
