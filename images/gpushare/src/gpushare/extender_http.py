# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's HTTP: kube-scheduler's filter, preempt and bind; the inspection for ``kubectl inspect`` and people.

kube-scheduler throws the body of any answer but 200 away, so a refusal is a 200 with its reason in ``Error``; 4xx is
for what no scheduler sends, and 503 for a preemption that can't be judged, whose answer has no ``Error``.

Keys are capitalised as Go writes them; on input their case doesn't matter, as for Go.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

from gpushare import contract
from gpushare.contract import ContractError, Wish
from gpushare.extender_bind import Outcome, Wanted
from gpushare.extender_filter import Verdict, judge
from gpushare.extender_preempt import Victims
from gpushare.extender_state import NO_CARD, NodeView, PodRow, State
from gpushare.kube import Json
from gpushare.service import BadRequest, Handler, Request, Response, answer

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counts and times of what schedulers asked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "gpushare_extender_request_seconds",
            "Time of a scheduler's request",
            ["verb"],
            buckets=BUCKETS,
            registry=registry,
        )
        self.results = Counter(
            "gpushare_extender_requests",
            "Requests of schedulers by what came of them",
            ["verb", "result"],
            registry=registry,
        )


class Preempting(Protocol):
    """What makes room for pods of a higher priority."""

    def answer(self, pod: Json, wish: Wish, offered: Mapping[str, Victims]) -> dict[str, Victims]:
        """Whom kube-scheduler should evict instead of those that it would, by node."""


# None of the nodes that were asked about can take a pod. The arguments: the pod, its wish, the nodes that could if
# others went, all that were asked about, and the state's ``freed`` from before it was looked at.
Refused = Callable[[Json, Wish, Sequence[str], Sequence[str], int], None]


class Api:
    """The handlers. ``unsynced`` says why the state can't be relied on yet, or None."""

    def __init__(
        self,
        state: State,
        bind: Callable[[Wanted], Outcome],
        unsynced: Callable[[], str | None],
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
        preemption: Preempting | None = None,
        refused: Sequence[Refused] = (),
        asked: Callable[[Json], None] = lambda _pod: None,
    ) -> None:
        """
        :param refused: told of each pod that no node could take; they mustn't take time.
        :param asked: told of each pod that some node can take, as the scheduler knows it.
        """
        self._state, self._bind, self._unsynced, self._metrics, self._clock = state, bind, unsynced, metrics, clock
        self._preemption, self._refused, self._asked = preemption, refused, asked

    def routes(self) -> dict[tuple[str, str], Handler]:
        prefix = contract.EXTENDER_PREFIX
        return {
            ("POST", f"{prefix}/filter"): self._timed("filter", self.filter),
            ("POST", f"{prefix}/bind"): self._timed("bind", self.bind),
            ("POST", f"{prefix}/preempt"): self._timed("preempt", self.preempt),
            ("GET", f"{prefix}/inspect"): self.inspect,
        }

    def _timed(self, verb: str, handler: Callable[[Request], tuple[str, Json]]) -> Handler:
        seconds, results = self._metrics.seconds.labels(verb), self._metrics.results

        def timed(request: Request) -> Response:
            began, result = self._clock(), "invalid"
            try:
                if request.rest:
                    raise BadRequest(f"there is nothing at {request.path}", 404)
                result, value = handler(request)
                return answer(value, 503 if value is UNREADY else 200)
            finally:
                seconds.observe(self._clock() - began)
                results.labels(verb, result).inc()

        return timed

    # filter

    def filter(self, request: Request) -> tuple[str, Json]:
        body = _object(request.json(), "the request")
        pod = _object(_field(body, "Pod"), "Pod")
        wish = _wish(pod)
        names, nodes = _names(body)
        reason = self._unsynced()
        if reason is not None:
            return "unready", {"Error": f"the gpushare extender isn't ready: {reason}"}
        if isinstance(wish, str):
            verdict = Verdict([], {}, dict.fromkeys(names, wish))
        elif wish.units == 0:
            # A pod that names the resource with the quantity 0 is ours to bind, and fits anywhere.
            verdict = Verdict(names, {}, {})
        else:
            freed = self._state.freed
            verdict = judge(names, self._state.viewer(_uid(pod), contract.pod_priority(pod)), wish)
            if not verdict.passed and verdict.failed:
                for tell in self._refused:
                    tell(pod, wish, list(verdict.failed), names, freed)
        if verdict.passed:
            self._asked(pod)
        value: Json = {
            "Nodes": None,
            "NodeNames": verdict.passed,
            "FailedNodes": verdict.failed,
            "FailedAndUnresolvableNodes": verdict.hopeless,
            "Error": "",
        }
        if nodes is not None:
            # A scheduler without a node cache takes whole nodes back.
            value["Nodes"] = {"metadata": {}, "items": [nodes[name] for name in verdict.passed]}
            value["NodeNames"] = None
        return ("passed" if verdict.passed else "refused"), value

    # preempt

    def preempt(self, request: Request) -> tuple[str, Json]:
        body = _object(request.json(), "the request")
        pod = _object(_field(body, "Pod"), "Pod")
        wish, offered = _wish(pod), _offered(body)
        if self._unsynced() is not None:
            return "unready", UNREADY
        if self._preemption is None:
            victims = offered
        elif isinstance(wish, str):
            # Nothing that could be evicted would help it.
            victims = {}
        else:
            victims = self._preemption.answer(pod, wish, offered)
        value = {
            name: {"Pods": [{"UID": uid} for uid in one.uids], "NumPDBViolations": one.violations}
            for name, one in victims.items()
            # kube-scheduler takes a node from which nobody goes for a mistake, and gives up on all of them.
            if one.uids
        }
        return ("passed" if value else "refused"), {"NodeNameToMetaVictims": value}

    # bind

    def bind(self, request: Request) -> tuple[str, Json]:
        body = _object(request.json(), "the request")
        wanted = Wanted(
            _name(body, "PodNamespace"), _name(body, "PodName"), str(_field(body, "PodUID") or ""), _name(body, "Node")
        )
        reason = self._unsynced()
        if reason is not None:
            return "unready", {"Error": f"the gpushare extender isn't ready: {reason}"}
        outcome = self._bind(wanted)
        return outcome.result, {"Error": outcome.error}

    # inspect

    def inspect(self, request: Request) -> Response:
        reason = self._unsynced()
        if reason is not None:
            return answer({"nodes": [], "error": f"the gpushare extender isn't ready: {reason}"}, 503)
        if request.rest:
            whole = self._state.whole(request.rest)
            if whole is None:
                return answer({"nodes": [], "error": f"there is no node {request.rest!r}"}, 404)
            return answer({"nodes": [_inspected(*whole)]})
        nodes = [self._state.whole(view.name) for view in self._state.views() if view.cards]
        return answer({"nodes": [_inspected(*whole) for whole in nodes if whole is not None]})


def _inspected(view: NodeView, rows: list[PodRow]) -> Json:
    """A node in upstream's JSON (its values are units, whatever their names say); what isn't upstream's is added."""
    on_card: dict[int, list[Json]] = {card.index: [] for card in view.cards}
    unplaced: list[Json] = []
    for row in rows:
        for index, units in row.cards or ((NO_CARD, row.units),):
            shown = {"name": row.name, "namespace": row.namespace, "usedGPU": units, "uid": row.uid}
            on_card.get(index, unplaced).append(shown)
    return {
        "name": view.name,
        "totalGPU": sum(card.units for card in view.cards),
        "usedGPU": sum(view.used) + view.unplaced,
        "devs": [
            {
                "id": card.index,
                "totalGPU": card.units,
                "usedGPU": view.used[at],
                "pods": on_card[card.index],
                "uuid": card.uuid,
                "healthy": card.healthy,
                "model": card.model,
                **({"reason": card.reason} if card.reason else {}),
            }
            for at, card in enumerate(view.cards)
        ],
        "unit": view.unit,
        "unplaced": {"id": NO_CARD, "usedGPU": view.unplaced, "pods": unplaced},
    }


UNREADY: Json = {"NodeNameToMetaVictims": None}

# --------------------------------------------------------------------------- reading requests


def _field(body: Json, key: str) -> Any:
    if key in body:
        return body[key]
    low = key.lower()
    return next((value for name, value in body.items() if name.lower() == low), None)


def _object(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise BadRequest(f"{what} is no object")
    return value


def _name(body: Json, key: str) -> str:
    value = _field(body, key)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise BadRequest(f"{key} is no Kubernetes name")
    return value


def _wish(pod: Json) -> Wish | str:
    """What a pod asks for, or in words why that can't be told."""
    try:
        return contract.wish(pod)
    except ContractError as error:
        return str(error)
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRequest(f"Pod is no pod: {error}") from error


def _offered(body: Json) -> dict[str, Victims]:
    """Whom kube-scheduler would evict, by node: as identifiers, or as whole pods where it thinks that we keep none."""
    listed = _field(body, "NodeNameToMetaVictims") or _field(body, "NodeNameToVictims") or {}
    offered: dict[str, Victims] = {}
    for node, victims in _object(listed, "NodeNameToMetaVictims").items():
        victims = _object(victims or {}, "a node's victims")
        pods, violations = _field(victims, "Pods") or [], _field(victims, "NumPDBViolations") or 0
        if not isinstance(pods, list) or not isinstance(violations, int):
            raise BadRequest("a node's victims are no victims")
        uids = []
        for pod in pods:
            pod = _object(pod, "a victim")
            uid = _field(pod, "UID") or _uid(pod)
            if not isinstance(uid, str) or not uid:
                raise BadRequest("a victim has no UID")
            uids.append(uid)
        offered[node] = Victims(tuple(uids), violations)
    return offered


def _uid(pod: Json) -> str:
    metadata = pod.get("metadata")
    return str(metadata.get("uid") or "") if isinstance(metadata, dict) else ""


def _names(body: Json) -> tuple[list[str], dict[str, Json] | None]:
    """The nodes in question: their names, and the nodes themselves by name where the scheduler sent those."""
    names = _field(body, "NodeNames")
    if isinstance(names, list):
        # Of a thousand names, so not one by one.
        if set(map(type, names)) - {str}:
            raise BadRequest("NodeNames holds something that is no name")
        return names, None
    listed = _field(body, "Nodes")
    if not isinstance(listed, dict):
        raise BadRequest("there are neither NodeNames nor Nodes")
    nodes: dict[str, Json] = {}
    items = _field(listed, "items") or []
    for node in items if isinstance(items, list) else [items]:
        metadata = _object(_object(node, "a node").get("metadata"), "a node's metadata")
        nodes[str(metadata.get("name", ""))] = node
    return list(nodes), nodes
