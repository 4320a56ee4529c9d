# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's HTTP: kube-scheduler's filter and bind, and the inspection that ``kubectl inspect`` and people read.

kube-scheduler throws the body of any answer but 200 away, so a refusal is a 200 with its reason in ``Error``; 4xx is
for what no scheduler sends. Keys are capitalised as Go writes them; on input their case doesn't matter, as for Go.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from gpushare import contract
from gpushare.extender_bind import Outcome, Wanted
from gpushare.extender_filter import Verdict, judge
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


class Api:
    """The handlers. ``unsynced`` says why the state can't be relied on yet, or None."""

    def __init__(
        self,
        state: State,
        bind: Callable[[Wanted], Outcome],
        unsynced: Callable[[], str | None],
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state, self._bind, self._unsynced, self._metrics, self._clock = state, bind, unsynced, metrics, clock

    def routes(self) -> dict[tuple[str, str], Handler]:
        prefix = contract.EXTENDER_PREFIX
        return {
            ("POST", f"{prefix}/filter"): self._timed("filter", self.filter),
            ("POST", f"{prefix}/bind"): self._timed("bind", self.bind),
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
                return answer(value)
            finally:
                seconds.observe(self._clock() - began)
                results.labels(verb, result).inc()

        return timed

    # filter

    def filter(self, request: Request) -> tuple[str, Json]:
        body = _object(request.json(), "the request")
        pod = _object(_field(body, "Pod"), "Pod")
        units, uid = _units(pod), _uid(pod)
        names, nodes = _names(body)
        reason = self._unsynced()
        if reason is not None:
            return "unready", {"Error": f"the gpushare extender isn't ready: {reason}"}
        # A pod that names the resource with the quantity 0 is ours to bind, and fits anywhere.
        verdict = judge(names, self._state.viewer(uid), units) if units else Verdict(names, {}, {})
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
        shown = {"name": row.name, "namespace": row.namespace, "usedGPU": row.units}
        on_card.get(row.card, unplaced).append(shown)
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
            }
            for at, card in enumerate(view.cards)
        ],
        "unit": view.unit,
        "unplaced": {"id": NO_CARD, "usedGPU": view.unplaced, "pods": unplaced},
    }


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


def _units(pod: Json) -> int:
    try:
        return contract.pod_units(pod)
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRequest(f"Pod is no pod: {error}") from error


def _uid(pod: Json) -> str:
    metadata = pod.get("metadata")
    return str(metadata.get("uid") or "") if isinstance(metadata, dict) else ""


def _names(body: Json) -> tuple[list[str], dict[str, Json] | None]:
    """The nodes in question: their names, and the nodes themselves by name where the scheduler sent those."""
    names = _field(body, "NodeNames")
    if isinstance(names, list):
        if not all(isinstance(name, str) for name in names):
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
