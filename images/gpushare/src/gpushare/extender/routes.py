# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's HTTP API: kube-scheduler's filter, preempt and bind, and the inspection for ``kubectl inspect``.

kube-scheduler discards the body of any answer but 200, so a refusal is a 200 with its reason in ``Error``. 4xx is
for requests that no scheduler sends, 503 for a preemption that can't be evaluated, since its answer has no ``Error``.

Keys are capitalised as Go writes them; on input their case doesn't matter, as in Go. Source: kubernetes v1.36.0,
staging/src/k8s.io/kube-scheduler/extender/v1/types.go.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpushare.api.decoding import ALL, OTHERS, Shape, document
from gpushare.api.fields import OBJECT
from gpushare.extender.bind import BindRequest, Outcome
from gpushare.extender.filter import FilterResult, RefusedPod, evaluate
from gpushare.extender.preemption import Preemption, Victims
from gpushare.extender.state import NO_CARD, NodeView, PodRow, State
from gpushare.http.service import BadRequest, Handler, Request, Response, answer, to_json
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import ContractError, Demand, Reason, Refusal
from gpushare.shared._core.types import JsonObject
from prometheus_client import CollectorRegistry, Counter, Histogram

log = logging.getLogger("gpushare.extender")

# Everything else is a scheduler's own, and not a tenant's.
ARGUMENTS: Shape = {"Pod": OBJECT, "pod": OBJECT, OTHERS: ALL}
CHUNK = 64 * 1024
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counts and durations of schedulers' requests."""

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
            "Requests of schedulers by result",
            ["verb", "result"],
            registry=registry,
        )
        self.refusals = Counter(
            "gpushare_extender_bind_refusals",
            "Binds that were refused or failed, by reason code",
            ["reason"],
            registry=registry,
        )


class Api:
    """The handlers of requests."""

    def __init__(
        self,
        state: State,
        bind: Callable[[BindRequest], Outcome],
        refusal: Callable[[], Refusal | None],
        metrics: Metrics,
        preemption: Preemption | None = None,
        refused: Sequence[Callable[[RefusedPod], None]] = (),
        passed: Callable[[JsonObject], None] = lambda _pod: None,
    ) -> None:
        """
        :param bind: binds a pod.
        :param refusal: returns why the state is incomplete or outdated, or None.
        :param preemption: chooses victims; without it, kube-scheduler's victims are returned.
        :param refused: called for each pod that no node can take, but some may later; must return quickly.
        :param passed: called for each pod that some node can take, with the scheduler's copy of it.
        """
        self._state, self._bind, self._refusal, self._metrics = state, bind, refusal, metrics
        self._preemption, self._refused, self._passed = preemption, refused, passed

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        prefix = contract.EXTENDER_PREFIX
        return {
            ("POST", f"{prefix}/filter"): self._timed("filter", self.filter),
            ("POST", f"{prefix}/bind"): self._timed("bind", self.bind),
            ("POST", f"{prefix}/preempt"): self._timed("preempt", self.preempt),
            ("GET", f"{prefix}/inspect"): self.inspect,
        }

    def _timed(self, verb: str, handler: Callable[[Request], tuple[str, JsonObject]]) -> Handler:
        seconds, results = self._metrics.seconds.labels(verb), self._metrics.results

        def timed(request: Request) -> Response:
            began, result = time.perf_counter(), "invalid"
            try:
                if request.rest:
                    raise BadRequest(f"there is nothing at {request.path}", 404)
                result, value = handler(request)
                return answer(value, 503 if value is UNREADY else 200)
            finally:
                seconds.observe(time.perf_counter() - began)
                results.labels(verb, result).inc()

        return timed

    def filter(self, request: Request) -> tuple[str, JsonObject]:
        """Select nodes for a pod."""
        body = _object(_arguments(request), "the request")
        pod = _object(_field(body, "Pod"), "Pod")
        demand = _demand(pod)
        names, nodes = _names(body)
        unready = self._refusal()
        if unready is not None:
            # An error, not failed nodes: kube-scheduler then tries again soon, without waiting for another event.
            return "unready", {"Error": str(unready)}
        if isinstance(demand, Refusal):
            result = FilterResult([], {}, dict.fromkeys(names, str(demand)))
        elif demand.units == 0:
            # A pod that requests the resource with the quantity 0 is bound here, and fits anywhere.
            result = FilterResult(names, {}, {})
        else:
            freed = self._state.freed
            result = evaluate(names, self._state.viewer(_uid(pod), contract.pod_priority(pod)), demand)
            if not result.passed and result.failed:
                refused = RefusedPod.of(pod, demand, list(result.failed), names, freed)
                for record in self._refused:
                    record(refused)
        if result.passed:
            self._passed(pod)
        value: JsonObject = {
            "Nodes": None,
            "NodeNames": result.passed,
            "FailedNodes": result.failed,
            "FailedAndUnresolvableNodes": result.unresolvable,
            "Error": "",
        }
        if nodes is not None:
            # A scheduler without a node cache expects whole nodes.
            value["Nodes"] = {"metadata": {}, "items": [nodes[name] for name in result.passed]}
            value["NodeNames"] = None
        return ("passed" if result.passed else "refused"), value

    def preempt(self, request: Request) -> tuple[str, JsonObject]:
        """Choose victims for a pod."""
        body = _object(_arguments(request), "the request")
        pod = _object(_field(body, "Pod"), "Pod")
        demand, offered = _demand(pod), _offered(body)
        if self._refusal() is not None:
            return "unready", UNREADY
        if self._preemption is None:
            victims = offered
        elif isinstance(demand, Refusal):
            # No eviction would help it.
            victims = {}
        else:
            victims = self._preemption.answer(pod, demand, offered)
        value = {
            name: {"Pods": [{"UID": uid} for uid in victim.uids], "NumPDBViolations": victim.violations}
            for name, victim in victims.items()
            # A node without victims makes kube-scheduler discard the whole answer.
            if victim.uids
        }
        return ("passed" if value else "refused"), {"NodeNameToMetaVictims": value}

    def bind(self, request: Request) -> tuple[str, JsonObject]:
        """Bind a pod to a node and cards."""
        body = _object(request.json(), "the request")
        wanted = BindRequest(
            _name(body, "PodNamespace"), _name(body, "PodName"), str(_field(body, "PodUID") or ""), _name(body, "Node")
        )
        unready = self._refusal()
        if unready is not None:
            # An error, not failed nodes: kube-scheduler then tries again soon, without waiting for another event.
            return "unready", {"Error": str(unready)}
        outcome = self._bind(wanted)
        if outcome.refusal:
            self._metrics.refusals.labels(outcome.refusal.code.value).inc()
            facts = {"pod": wanted.pod, "node": wanted.node, "result": outcome.result}
            facts["code"] = outcome.refusal.code.value
            log.info("not bound: %s", outcome.refusal.text, extra={"data": facts})
        return outcome.result, {"Error": outcome.error}

    def inspect(self, request: Request) -> Response:
        """Show the cards of one node, or of all nodes that have any."""
        unready = self._refusal()
        if unready is not None and unready.code is Reason.NOT_READY:
            return _inspect_error(unready, 503)
        if request.rest:
            snapshot = self._state.snapshot(request.rest)
            if snapshot is None:
                return _inspect_error(Refusal(Reason.NODE_UNKNOWN, f"node {request.rest!r} isn't known"), 404)
            return answer({"nodes": [_inspected(*snapshot)]})
        # Node by node: the interpreter answers nothing else while it formats one JSON value.
        snapshots = (self._state.snapshot(view.name) for view in self._state.views() if view.cards)
        nodes = [to_json(_inspected(*snapshot)) for snapshot in snapshots if snapshot is not None]
        return Response(200, b'{"nodes":[%s]}' % b",".join(nodes))


def _inspect_error(refusal: Refusal, status: int) -> Response:
    return answer({"nodes": [], "error": refusal.text, "code": refusal.code.value}, status)


def _inspected(view: NodeView, rows: list[PodRow]) -> JsonObject:
    """Format a node as upstream's JSON, whose values are units despite their names, with additional fields."""
    on_card: dict[int, list[JsonObject]] = {card.index: [] for card in view.cards}
    unplaced: list[JsonObject] = []
    for row in rows:
        for index, units in row.shares:
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
                **({"reason": card.reason, "code": card.code} if card.reason else {}),
            }
            for at, card in enumerate(view.cards)
        ],
        "unit": view.unit,
        "unplaced": {"id": NO_CARD, "usedGPU": view.unplaced, "pods": unplaced},
    }


UNREADY: JsonObject = {"NodeNameToMetaVictims": None}

# --------------------------------------------------------------------------- reading requests


def _arguments(request: Request) -> Any:
    """Parse a request with a pod; of a large one only what the servers read of a pod.

    :raises BadRequest: it isn't JSON.
    """
    body = memoryview(request.body)
    try:
        return document((bytes(body[at : at + CHUNK]) for at in range(0, len(body), CHUNK)), ARGUMENTS)
    except ValueError as error:
        raise BadRequest(f"the request's body is no JSON: {error}") from error


def _field(body: JsonObject, key: str) -> Any:
    if key in body:
        return body[key]
    low = key.lower()
    return next((value for name, value in body.items() if name.lower() == low), None)


def _object(value: Any, what: str) -> JsonObject:
    if not isinstance(value, dict):
        raise BadRequest(f"{what} is no object")
    return value


def _name(body: JsonObject, key: str) -> str:
    value = _field(body, key)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise BadRequest(f"{key} is no Kubernetes name")
    return value


def _demand(pod: JsonObject) -> Demand | Refusal:
    """Read a pod's demand, or why its annotations are invalid."""
    try:
        return contract.demand(pod)
    except ContractError as error:
        return Refusal(Reason.INVALID_ANNOTATION, str(error))
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRequest(f"Pod is no pod: {error}") from error


def _offered(body: JsonObject) -> dict[str, Victims]:
    """Read kube-scheduler's victims by node: UIDs, or whole pods for an extender without a node cache."""
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


def _uid(pod: JsonObject) -> str:
    metadata = pod.get("metadata")
    return str(metadata.get("uid") or "") if isinstance(metadata, dict) else ""


def _names(body: JsonObject) -> tuple[list[str], dict[str, JsonObject] | None]:
    """Read the names of the requested nodes, and the nodes themselves by name if the scheduler sent them."""
    names = _field(body, "NodeNames")
    if isinstance(names, list):
        # There may be thousands, so they aren't checked one by one.
        if set(map(type, names)) - {str}:
            raise BadRequest("NodeNames holds something that is no name")
        return names, None
    listed = _field(body, "Nodes")
    if not isinstance(listed, dict):
        raise BadRequest("there are neither NodeNames nor Nodes")
    nodes: dict[str, JsonObject] = {}
    items = _field(listed, "items") or []
    for node in items if isinstance(items, list) else [items]:
        metadata = _object(_object(node, "a node").get("metadata"), "a node's metadata")
        nodes[str(metadata.get("name", ""))] = node
    return list(nodes), nodes
