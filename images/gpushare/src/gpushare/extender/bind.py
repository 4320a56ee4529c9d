# SPDX-License-Identifier: GPL-3.0-or-later
"""Bind a pod to a node and to its cards.

A bind chooses the cards, books them in the ledger, and only then binds. Node and cards are written in one request: the
API server merges a Binding's annotations into the pod in the same update that sets its node, so no pod ever has a card
without a node or the reverse. The Binding carries the pod's UID and resourceVersion, so it is refused if the pod has
changed since; then the decision is made again.

So the pod that the scheduler has just sent to ``filter`` can be used instead of reading it again, and mostly is the
same. It is read if this extender may have bound it already without the scheduler's knowledge. This trusts the clients:
processes in the host's network without TLS, clients with a certificate otherwise. A forged pod needs the pod's UID and
resourceVersion, which only clients with the right to read it have.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.api.events import Events
from gpushare.api.kept import kept_annotations, kept_containers
from gpushare.extender.binding_status import BindingStatus, Entry, binding_status, patch_pod
from gpushare.extender.filter import refusal
from gpushare.extender.ledger import BookingRequest, Ledger
from gpushare.extender.placement import choose
from gpushare.extender.state import BIND_IN_PROGRESS, NodeView, PodRow, Shares, State
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Card, ContractError, Reason, Refusal
from gpushare.shared._core.types import JsonObject

# How often a bind is retried because the pod has changed, and for how long.
TRIES = 6
BIND_SECONDS = 15.0
FIRST_PAUSE = 0.02
SETTLE_SECONDS = 2.0
CHECK_SECONDS = 60.0
# Bindings that are sent at once. With hundreds of them the API server isn't faster, and each would need a connection
# with a handshake.
CONCURRENT_BINDINGS = 16
# How many pods are kept from ``filter`` to ``bind``, and for how long.
MAX_FILTERED, FILTERED_SECONDS = 500, 60.0

EVENT_REFUSED = "GPUMemoryRefused"

log = logging.getLogger("gpushare.extender")


class BindRequest(NamedTuple):
    """A scheduler's request; an empty UID means any pod of that name."""

    namespace: str
    name: str
    uid: str
    node: str

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"


class Outcome(NamedTuple):
    """How a bind ended: ``result`` is the metrics' label.

    It is bound, already (bound before), refused (no memory, or another pod), failed (the API refused), or unsure (the
    API's answer was lost). ``error`` is empty for the first two.
    """

    result: str
    refusal: Refusal | None = None

    @property
    def error(self) -> str:
        """The message for kube-scheduler: code and sentence."""
        return str(self.refusal) if self.refusal else ""


def _not_bound(result: str, code: Reason, text: str) -> Outcome:
    return Outcome(result, Refusal(code, text))


class _RetryBind(Exception):
    """The pod has changed meanwhile, and must be read again; the message is the reason."""


class Binder:
    """Binds pods; their holds are in ``state``, their bookings in ``ledger``."""

    def __init__(
        self,
        kube: Kube,
        state: State,
        strategy: str,
        events: Events,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """
        :param strategy: of placement; a pod's own overrides it.
        :param clock: monotonic, in seconds.
        :param now_ns: the time in nanoseconds since 1970.
        """
        self._kube, self._state, self._strategy, self._events, self._ledger = kube, state, strategy, events, ledger
        self._clock, self._now_ns = clock, now_ns
        self._working: set[str] = set()
        # Pods of schedulers' filter requests, by UID, and when.
        self._filtered: collections.OrderedDict[str, tuple[float, JsonObject]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._sending = threading.Semaphore(CONCURRENT_BINDINGS)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._check_periodically, name="settle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._ledger.stop()
        if self._thread is not None:
            self._thread.join(5)
        self._ledger.leave()

    def keep_filtered(self, pod: JsonObject) -> None:
        """Keep a pod that passed a filter, since its bind may come next."""
        kept = _trimmed(pod)
        if kept is None:
            return
        uid = contract.pod_uid(kept)
        with self._lock:
            self._filtered[uid] = self._clock(), kept
            self._filtered.move_to_end(uid)
            if len(self._filtered) > MAX_FILTERED:
                self._filtered.popitem(last=False)

    def bind(self, request: BindRequest) -> Outcome:
        """Bind a pod. The result of a failed bind is final, unless it is ``unsure``."""
        with self._exclusive(request.pod) as exclusive:
            if not exclusive:
                return Outcome("refused", BIND_IN_PROGRESS)
            end, pause, why = self._clock() + BIND_SECONDS, FIRST_PAUSE, ""
            for count in range(TRIES):
                if count:
                    self._stopped.wait(pause * random.uniform(0.5, 1.5))
                    pause *= 2
                if count and self._clock() > end:
                    break
                try:
                    return self._bind(request, first=count == 0)
                except _RetryBind as retry:
                    why = str(retry)
            return _not_bound("failed", Reason.CONFLICT, f"{_attempt(request)}: {why}")

    @contextlib.contextmanager
    def _exclusive(self, pod: str) -> Iterator[bool]:
        """Lock a pod for one bind; False if another bind of it is in progress."""
        with self._lock:
            exclusive = pod not in self._working
            self._working.add(pod)
        try:
            yield exclusive
        finally:
            if exclusive:
                with self._lock:
                    self._working.discard(pod)

    def _bind(self, request: BindRequest, first: bool) -> Outcome:
        """Book cards for a pod, and send its Binding.

        :raises _RetryBind: the pod must be read again.
        """
        try:
            pod = self._known(request) or self._kube.get(paths.pod(request.namespace, request.name))
            request = request._replace(uid=request.uid or contract.pod_uid(pod))
            done = _bound(pod, request)
            if done is not None:
                return done
            if self._ledger.resolve(request.uid):
                raise _RetryBind("an earlier bind of it had to be resolved")
        except KubeError as error:
            if error.status == 404:
                return _not_bound("refused", Reason.POD_NOT_FOUND, f"pod {request.pod} doesn't exist")
            return _not_bound("failed", Reason.API_ERROR, f"pod {request.pod} can't be read: {error}")
        try:
            demand = contract.demand(pod)
        except ContractError as error:
            return self._refuse(request, pod, Refusal(Reason.INVALID_ANNOTATION, str(error)))
        if demand.units == 0:
            # It requests the resource with the quantity 0, so the scheduler sends its bind here all the same.
            return self._bind_without_card(request)

        refused: Outcome | None = None
        why: Refusal | None = None
        cards = list[Card]()
        priority = contract.pod_priority(pod)

        def choose_cards(view: NodeView) -> PodRow | None:
            nonlocal why, cards
            indices = choose(self._strategy, view.slots(demand), demand)
            if not indices:
                why_not = refusal(view, demand)
                why = Refusal(why_not.code, f"node {request.node}: {why_not.text}")
                return None
            cards = [card for card in view.cards if card.index in indices]
            shares = tuple((card.index, demand.share) for card in cards)
            return PodRow(request.uid, request.namespace, request.name, request.node, demand.units, shares, priority)

        def place() -> Shares:
            nonlocal why, refused
            why, refused = None, None
            row, bound_to, denied = self._state.reserve(request.uid, request.node, choose_cards, priority)
            if bound_to:
                refused = _bound_to(bound_to, request)
            elif denied:
                refused = Outcome("refused", denied)
            return row.cards if row is not None else ()

        booking = BookingRequest(
            node=request.node,
            uid=request.uid,
            namespace=request.namespace,
            name=request.name,
            version=str(pod["metadata"].get("resourceVersion", "")),
            place=place,
            give_up=lambda: self._state.release(request.uid),
            first=first,
        )
        self._ledger.book(booking)
        if booking.again:
            raise _RetryBind("another extender was binding it")
        if booking.error:
            return _not_bound("failed", booking.code, f"{_attempt(request)}: {booking.error}")
        if booking.entry is not None:
            return self._write(request, pod, booking.entry, cards)
        if refused is not None:
            if refused.refusal:
                self._clean(pod)
            return refused
        assert why is not None, "no card was chosen, so there is a reason"
        return self._refuse(request, pod, why)

    def _known(self, request: BindRequest) -> JsonObject | None:
        """Return the scheduler's copy of the pod; only once, so that a retry reads it."""
        with self._lock:
            at, pod = self._filtered.pop(request.uid, (0.0, {}))
        if not pod or self._clock() - at > FILTERED_SECONDS:
            return None
        metadata = pod["metadata"]
        if (metadata["namespace"], metadata["name"]) != (request.namespace, request.name):
            return None
        # It may be bound, and a scheduler's copy must not release its memory.
        return None if self._state.held(request.uid) else pod

    def _refuse(self, request: BindRequest, pod: JsonObject, why: Refusal) -> Outcome:
        self._clean(pod)
        self._events.pod(request.namespace, request.name, request.uid, EVENT_REFUSED, str(why))
        return Outcome("refused", why)

    # Writing.

    def _write(self, request: BindRequest, pod: JsonObject, entry: Entry, cards: list[Card]) -> Outcome:
        """Bind a pod to the cards that are booked for it.

        :raises _RetryBind: the pod has changed; nothing is booked any more.
        """
        annotations = contract.booking_annotations(cards, pod, self._now_ns(), False)
        try:
            try:
                self._post(request, contract.merge_only(annotations, pod), entry.version)
            except KubeError as error:
                return self._after_failure(request, entry, error)
        except _RetryBind:
            raise
        except Exception:
            # An internal error: the request may have been sent.
            self._ledger.keep_unresolved(entry)
            raise
        self._ledger.written(entry)
        card = annotations[contract.POD_INDICES] or annotations[contract.POD_INDEX]
        facts = {"pod": request.pod, "node": request.node, "card": card}
        log.info("bound", extra={"data": facts})
        return Outcome("bound")

    def _post(self, request: BindRequest, annotations: dict[str, str], version: str = "") -> None:
        metadata = {
            "name": request.name,
            "namespace": request.namespace,
            "uid": request.uid,
            "annotations": annotations,
        }
        if version:
            metadata["resourceVersion"] = version
        target = {"apiVersion": "v1", "kind": "Node", "name": request.node}
        binding: JsonObject = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        with self._sending:
            self._kube.post(paths.pod(request.namespace, request.name) + "/binding", binding)

    def _bind_without_card(self, request: BindRequest) -> Outcome:
        try:
            self._post(request, {})
        except KubeError as error:
            message = f"{_attempt(request)}: {error}"
            with contextlib.suppress(KubeError):
                done = _bound(self._kube.get(paths.pod(request.namespace, request.name)), request)
                if done is not None:
                    return done
            if error.outcome_unknown:
                return _not_bound("unsure", Reason.OUTCOME_UNKNOWN, message)
            return _not_bound("failed", Reason.API_ERROR, message)
        return Outcome("bound")

    def _after_failure(self, request: BindRequest, entry: Entry, error: KubeError) -> Outcome:
        """Determine the outcome of a failed Binding: its answer may be lost, or it may still take effect.

        :raises _RetryBind: it didn't take effect, and may be retried.
        """
        message = f"{_attempt(request)}: {error}"
        log.warning("%s", message, extra={"data": {"code": Reason.API_ERROR.value, "status": error.status}})
        try:
            status, pod = binding_status(self._kube, entry, fence=error.outcome_unknown)
        except KubeError as second:
            if error.outcome_unknown:
                self._ledger.keep_unresolved(entry)
                return _not_bound("unsure", Reason.OUTCOME_UNKNOWN, f"{message}; its state can't be read: {second}")
            self._ledger.discard(entry)
            return _not_bound("failed", Reason.API_ERROR, message)
        if status is BindingStatus.BOUND:
            self._ledger.bound(entry, pod)
            return _bound_to(contract.pod_node(pod), request)
        self._ledger.discard(entry)
        if status is BindingStatus.GONE or error.outcome_unknown or error.status in (409, 429):
            # Reading the pod again shows the reason; otherwise the error was temporary.
            raise _RetryBind(str(error))
        self._clean(pod)
        return _not_bound("failed", Reason.API_ERROR, message)

    def _clean(self, pod: JsonObject) -> None:
        """Remove a card's annotations from a pod that isn't bound: an earlier booking has left them."""
        metadata = pod.get("metadata") or {}
        stale = [key for key in contract.POD_ANNOTATIONS if key in (metadata.get("annotations") or {})]
        if not stale:
            return
        # If the pod has changed since, it may have been bound, and they may be valid.
        precondition = {key: metadata.get(key) for key in ("uid", "resourceVersion")}
        patch = {**precondition, "annotations": dict.fromkeys(stale)}
        try:
            patch_pod(self._kube, str(metadata.get("namespace")), str(metadata.get("name")), patch)
        except KubeError as error:
            log.info("annotations of a card stay on the unbound pod %s: %s", contract.pod_key(pod), error)

    # Bookings whose pod the watch hasn't delivered.

    def settle(self) -> None:
        """Read the pods of bookings that the watch should have confirmed by now."""
        for row in self._state.unconfirmed(self._clock()):
            try:
                pod = self._kube.get(paths.pod(row.namespace, row.name))
            except KubeError as error:
                if error.status != 404:
                    # The pod's state is unknown, so its memory stays held.
                    continue
                pod = {}
            if contract.pod_uid(pod) != row.uid or not contract.counts(pod):
                facts = {"pod": f"{row.namespace}/{row.name}", "node": row.node}
                log.info("a bound pod is gone", extra={"data": facts})
                self._state.release(row.uid)

    def _check_periodically(self) -> None:
        checked = float("-inf")
        while True:
            try:
                if self._ledger.problem is not None or self._clock() - checked > CHECK_SECONDS:
                    self._ledger.check()
                    checked = self._clock()
                self.settle()
                self._ledger.collect_garbage()
            except Exception:
                log.exception("bookings couldn't be checked")
            if self._stopped.wait(SETTLE_SECONDS):
                return


# The fields of a pod that a bind needs, besides its resources.
METADATA = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
ANNOTATIONS = {*contract.POD_ANNOTATIONS, *contract.POD_DEMANDS}


def _trimmed(pod: JsonObject) -> JsonObject | None:
    """Reduce a scheduler's pod to the fields that a bind needs; None if a bind has to read it."""
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    if not all(isinstance(part, dict) for part in (metadata, spec, status, metadata.get("annotations") or {})):
        return None
    if not all(isinstance(metadata.get(key), str) and metadata[key] for key in METADATA[:4]):
        return None
    annotations = metadata.get("annotations") or {}
    kept_spec: JsonObject = {key: spec[key] for key in ("nodeName", "priority") if key in spec}
    for kind in ("containers", "initContainers"):
        if spec.get(kind):
            kept_spec[kind] = [_container(container) for container in kept_containers(spec[kind])]
    kept_metadata = {key: metadata[key] for key in METADATA if key in metadata}
    kept_metadata["annotations"] = kept_annotations(annotations, ANNOTATIONS)
    return {
        "metadata": kept_metadata,
        "spec": kept_spec,
        "status": {"phase": status["phase"]} if "phase" in status else {},
    }


def _container(container: JsonObject) -> JsonObject:
    """Return name, units and kind of a container; the same object for each one without units."""
    if not container:
        return container
    limits = {contract.RESOURCE_MEMORY: str(contract.container_units(container))}
    kept: JsonObject = {"name": str(container.get("name", "")), "resources": {"limits": limits}}
    return kept | ({"restartPolicy": "Always"} if container.get("restartPolicy") == "Always" else {})


def _attempt(request: BindRequest) -> str:
    return f"pod {request.pod} can't be bound to node {request.node}"


def _bound(pod: JsonObject, request: BindRequest) -> Outcome | None:
    """Return the result of a bind that the pod's current state decides; None if it may be bound."""
    if contract.pod_uid(pod) != request.uid:
        return _not_bound("refused", Reason.POD_REPLACED, f"another pod has the name {request.pod} now")
    node = contract.pod_node(pod)
    if node:
        return _bound_to(node, request)
    if contract.terminating(pod):
        return _not_bound("refused", Reason.POD_TERMINATING, f"pod {request.pod} is being deleted")
    if contract.finished(pod):
        return _not_bound("refused", Reason.POD_FINISHED, f"pod {request.pod} has already finished")
    return None


def _bound_to(node: str, request: BindRequest) -> Outcome:
    """Return the result of a bind of a bound pod, perhaps by a request whose answer was lost."""
    if node == request.node:
        return Outcome("already")
    text = f"pod {request.pod} is already bound to node {node}"
    return _not_bound("refused", Reason.POD_BOUND_ELSEWHERE, text)
