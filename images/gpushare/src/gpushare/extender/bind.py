# SPDX-License-Identifier: GPL-3.0-or-later
"""Bind a pod to a node and to its cards.

A bind chooses the cards, books them in the ledger, and only then binds. Node and cards are written in one request: the
API server merges a Binding's annotations into the pod in the same update that sets its node, so no pod ever has a card
without a node or the reverse. The Binding carries the pod's UID and resourceVersion, so it is refused if the pod has
changed since; then the decision is made again.

So the pod that the scheduler has just sent to ``filter`` can be used instead of reading it again, and mostly is the
same. It can't be used if this extender may have bound the pod already, since the scheduler might not know; then it is
read. That trusts the clients: processes in the host's network without TLS, clients with a certificate otherwise. A
forged pod needs the pod's UID and resourceVersion, which only clients with the right to read it know.
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

from gpushare.api.client import Kube, KubeError
from gpushare.api.events import Events
from gpushare.extender.binding_status import BindingStatus, Entry, fate, pod_path
from gpushare.extender.filter import refusal
from gpushare.extender.ledger import BookingRequest, Ledger
from gpushare.extender.placement import choose
from gpushare.extender.state import BIND_IN_PROGRESS, NodeView, PodRow, Shares, State
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Card, ContractError, Reason, Refusal
from gpushare.shared._core.types import JsonObject

# How often a bind is begun anew because the pod has changed, and when it is too late for that.
TRIES = 6
BIND_SECONDS = 15.0
FIRST_PAUSE = 0.02
SETTLE_SECONDS = 2.0
CHECK_SECONDS = 60.0
# Bindings that are sent at once. The API server takes no more of them a second for being asked by hundreds together,
# and each would take a connection of its own, with a handshake.
CONCURRENT_BINDINGS = 16
# How many pods are remembered from ``filter`` to ``bind``, and for how long.
ASKED, ASKED_SECONDS = 500, 60.0

EVENT_REFUSED = "GPUMemoryRefused"

log = logging.getLogger("gpushare.extender")


class Wanted(NamedTuple):
    """What the scheduler asks for; an empty UID means whichever pod has that name."""

    namespace: str
    name: str
    uid: str
    node: str

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"


class Outcome(NamedTuple):
    """``result``, for the metrics: bound, already (it was), refused (no room, or not this pod), failed (the API said
    no), unsure (the API's answer got lost). ``error`` is empty for the first two.
    """

    result: str
    refusal: Refusal | None = None

    @property
    def error(self) -> str:
        """The text for kube-scheduler: code and sentence."""
        return str(self.refusal) if self.refusal else ""


def _not_bound(result: str, code: Reason, text: str) -> Outcome:
    return Outcome(result, Refusal(code, text))


class _RetryBind(Exception):
    """The pod has changed under our hands; the reason in words."""


class Binder:
    """Binds pods; what it holds for them is in ``state``, what it has booked in ``ledger``."""

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
        self._kube, self._state, self._strategy, self._events, self._ledger = kube, state, strategy, events, ledger
        self._clock, self._now_ns = clock, now_ns
        self._working: set[str] = set()
        # Pods that schedulers asked about, by UID, and when.
        self._asked: collections.OrderedDict[str, tuple[float, JsonObject]] = collections.OrderedDict()
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

    def asked(self, pod: JsonObject) -> None:
        """A scheduler asks where this pod fits; it may want to bind it next."""
        kept = _trimmed(pod)
        if kept is None:
            return
        uid = contract.pod_uid(kept)
        with self._lock:
            self._asked[uid] = self._clock(), kept
            self._asked.move_to_end(uid)
            if len(self._asked) > ASKED:
                self._asked.popitem(last=False)

    def bind(self, wanted: Wanted) -> Outcome:
        """Bind a pod, or say why not; what is said of a failed bind holds for ever, unless it is ``unsure``."""
        with self._exclusive(wanted.pod) as exclusive:
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
                    return self._bind(wanted, first=count == 0)
                except _RetryBind as retry:
                    why = str(retry)
            return _not_bound("failed", Reason.CONFLICT, f"{_attempt(wanted)}: {why}")

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

    def _bind(self, wanted: Wanted, first: bool) -> Outcome:
        """
        :raises _Again: the pod must be read again.
        """
        try:
            pod = self._known(wanted) or self._kube.get(pod_path(wanted.namespace, wanted.name))
            wanted = wanted._replace(uid=wanted.uid or contract.pod_uid(pod))
            done = _bound(pod, wanted)
            if done is not None:
                return done
            if self._ledger.resolve(wanted.uid):
                raise _RetryBind("an earlier bind of it had to be resolved")
        except KubeError as error:
            if error.status == 404:
                return _not_bound("refused", Reason.POD_NOT_FOUND, f"pod {wanted.pod} doesn't exist")
            return _not_bound("failed", Reason.API_ERROR, f"pod {wanted.pod} can't be read: {error}")
        try:
            demand = contract.demand(pod)
        except ContractError as error:
            return self._refuse(wanted, pod, Refusal(Reason.INVALID_ANNOTATION, str(error)))
        if demand.units == 0:
            # It names the resource with the quantity 0, so the scheduler leaves its binding to us all the same.
            return self._bind_without_card(wanted, pod)

        refused: Outcome | None = None
        why: Refusal | None = None
        cards = list[Card]()

        def choose_cards(view: NodeView) -> PodRow | None:
            nonlocal why, cards
            indices = choose(self._strategy, view.slots(demand), demand)
            if not indices:
                found = refusal(view, demand)
                why = Refusal(found.code, f"node {wanted.node}: {found.text}")
                return None
            cards = [card for card in view.cards if card.index in indices]
            shares = tuple((card.index, demand.share) for card in cards)
            priority = contract.pod_priority(pod)
            return PodRow(wanted.uid, wanted.namespace, wanted.name, wanted.node, demand.units, shares, priority)

        def place() -> Shares:
            nonlocal why, refused
            why, refused = None, None
            priority = contract.pod_priority(pod)
            row, bound_to, denied = self._state.reserve(wanted.uid, wanted.node, choose_cards, priority)
            if bound_to:
                refused = _bound_to(bound_to, wanted)
            elif denied:
                refused = Outcome("refused", denied)
            return row.cards if row is not None else ()

        ticket = BookingRequest(
            wanted.node,
            wanted.uid,
            wanted.namespace,
            wanted.name,
            str(pod["metadata"].get("resourceVersion", "")),
            place,
            lambda: self._state.release(wanted.uid),
            first,
        )
        self._ledger.book(ticket)
        if ticket.again:
            raise _RetryBind("another extender was at it")
        if ticket.error:
            return _not_bound("failed", ticket.code, f"{_attempt(wanted)}: {ticket.error}")
        if ticket.entry is not None:
            return self._write(wanted, pod, ticket.entry, cards)
        if refused is not None:
            if refused.refusal:
                self._clean(pod)
            return refused
        assert why is not None, "no card was chosen, so there is a reason"
        return self._refuse(wanted, pod, why)

    def _known(self, wanted: Wanted) -> JsonObject | None:
        """The pod as the scheduler has sent it just now; only once, so that a second try reads it."""
        with self._lock:
            at, pod = self._asked.pop(wanted.uid, (0.0, {}))
        if not pod or self._clock() - at > ASKED_SECONDS:
            return None
        metadata = pod["metadata"]
        if (metadata["namespace"], metadata["name"]) != (wanted.namespace, wanted.name):
            return None
        # Its memory may be held where it is bound, and must not be released because of a scheduler's copy.
        return None if self._state.held(wanted.uid) else pod

    def _refuse(self, wanted: Wanted, pod: JsonObject, why: Refusal) -> Outcome:
        self._clean(pod)
        self._events.pod(wanted.namespace, wanted.name, wanted.uid, EVENT_REFUSED, str(why))
        return Outcome("refused", why)

    # Writing.

    def _write(self, wanted: Wanted, pod: JsonObject, entry: Entry, cards: list[Card]) -> Outcome:
        """Bind a pod to the cards that are booked for it: the only place that does.

        :raises _Again: the pod has changed; nothing is booked any more.
        """
        annotations = contract.booking_annotations(cards, pod, self._now_ns(), False)
        try:
            try:
                self._post(wanted, contract.merge_only(annotations, pod), entry.version)
            except KubeError as error:
                return self._after_failure(wanted, entry, error)
        except _RetryBind:
            raise
        except Exception:
            # An internal error: the request may have been sent.
            self._ledger.keep_unresolved(entry)
            raise
        self._ledger.written(entry)
        card = annotations[contract.POD_INDICES] or annotations[contract.POD_INDEX]
        facts = {"pod": wanted.pod, "node": wanted.node, "card": card}
        log.info("bound", extra={"data": facts})
        return Outcome("bound")

    def _post(self, wanted: Wanted, annotations: dict[str, str], version: str = "") -> None:
        metadata: JsonObject = {
            "name": wanted.name,
            "namespace": wanted.namespace,
            "uid": wanted.uid,
            "annotations": annotations,
        }
        if version:
            metadata["resourceVersion"] = version
        binding: JsonObject = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": wanted.node},
        }
        with self._sending:
            self._kube.post(pod_path(wanted.namespace, wanted.name) + "/binding", binding)

    def _bind_without_card(self, wanted: Wanted, pod: JsonObject) -> Outcome:
        try:
            self._post(wanted, {})
        except KubeError as error:
            message = f"{_attempt(wanted)}: {error}"
            with contextlib.suppress(KubeError):
                done = _bound(self._kube.get(pod_path(wanted.namespace, wanted.name)), wanted)
                if done is not None:
                    return done
            return _failed(error, message)
        return Outcome("bound")

    def _after_failure(self, wanted: Wanted, entry: Entry, error: KubeError) -> Outcome:
        """What a failed write came to: it may have been done and its answer lost, or may yet be done.

        :raises _Again: it wasn't, but may be tried again.
        """
        message = f"{_attempt(wanted)}: {error}"
        log.warning("%s", message, extra={"data": {"code": Reason.API_ERROR.value, "status": error.status}})
        try:
            found, pod = fate(self._kube, entry, fence=error.outcome_unknown)
        except KubeError as second:
            if error.outcome_unknown:
                self._ledger.keep_unresolved(entry)
                return _not_bound("unsure", Reason.OUTCOME_UNKNOWN, f"{message}; its state can't be read: {second}")
            self._ledger.discard(entry)
            return _not_bound("failed", Reason.API_ERROR, message)
        if found is BindingStatus.BOUND:
            self._ledger.bound(entry, pod)
            return _bound_to(contract.pod_node(pod), wanted)
        self._ledger.discard(entry)
        if found is BindingStatus.GONE or error.outcome_unknown or error.status in (409, 429):
            # Reading the pod again shows the reason; otherwise the error was temporary.
            raise _RetryBind(str(error))
        self._clean(pod)
        return _not_bound("failed", Reason.API_ERROR, message)

    def _clean(self, pod: JsonObject) -> None:
        """Remove a card's annotations from a pod that isn't bound: they are left of an earlier booking."""
        metadata = pod.get("metadata") or {}
        left = [key for key in contract.POD_ANNOTATIONS if key in (metadata.get("annotations") or {})]
        if not left:
            return
        patch: JsonObject = {
            # If the pod has changed since, it may have been bound, and they may be true.
            "metadata": {
                "uid": metadata.get("uid"),
                "resourceVersion": metadata.get("resourceVersion"),
                "annotations": dict.fromkeys(left),
            }
        }
        try:
            self._kube.patch(pod_path(str(metadata.get("namespace")), str(metadata.get("name"))), patch)
        except KubeError as error:
            log.info("annotations of a card stay on the unbound pod %s: %s", contract.pod_key(pod), error)

    # Bookings whose pod the watch doesn't show.

    def settle(self) -> None:
        """Read pods that were bound and that the watch hasn't delivered for too long."""
        for row in self._state.unconfirmed(self._clock()):
            try:
                pod = self._kube.get(pod_path(row.namespace, row.name))
            except KubeError as error:
                if error.status != 404:
                    # Not known to be free, so it isn't given away.
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


# What a bind needs of a pod, besides its resources.
METADATA = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
ANNOTATIONS = {*contract.POD_ANNOTATIONS, *contract.POD_DEMANDS}


def _trimmed(pod: JsonObject) -> JsonObject | None:
    """A pod from a scheduler, as far as a bind needs it; None for one that a bind has to read."""
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    if not all(isinstance(part, dict) for part in (metadata, spec, status, metadata.get("annotations") or {})):
        return None
    if not all(isinstance(metadata.get(key), str) and metadata[key] for key in METADATA[:4]):
        return None
    annotations = metadata.get("annotations") or {}
    containers = {
        kind: [{key: one[key] for key in ("name", "resources", "restartPolicy") if key in one} for one in spec[kind]]
        for kind in ("containers", "initContainers")
        if spec.get(kind)
    }
    return {
        "metadata": {
            **{key: metadata[key] for key in METADATA if key in metadata},
            "annotations": {key: annotations[key] for key in ANNOTATIONS.intersection(annotations)},
        },
        "spec": {**containers, **{key: spec[key] for key in ("nodeName", "priority") if key in spec}},
        "status": {"phase": status["phase"]} if "phase" in status else {},
    }


def _attempt(wanted: Wanted) -> str:
    return f"pod {wanted.pod} can't be bound to node {wanted.node}"


def _failed(error: KubeError, message: str) -> Outcome:
    if error.outcome_unknown:
        return _not_bound("unsure", Reason.OUTCOME_UNKNOWN, message)
    return _not_bound("failed", Reason.API_ERROR, message)


def _bound(pod: JsonObject, wanted: Wanted) -> Outcome | None:
    """How a bind ends by what the pod is already; None where it isn't bound yet and may be."""
    if contract.pod_uid(pod) != wanted.uid:
        return _not_bound("refused", Reason.POD_REPLACED, f"another pod has the name {wanted.pod} now")
    node = contract.pod_node(pod)
    if node:
        return _bound_to(node, wanted)
    if contract.terminating(pod):
        return _not_bound("refused", Reason.POD_TERMINATING, f"pod {wanted.pod} is being deleted")
    if contract.finished(pod):
        return _not_bound("refused", Reason.POD_FINISHED, f"pod {wanted.pod} has already finished")
    return None


def _bound_to(node: str, wanted: Wanted) -> Outcome:
    """A bind that was done before, perhaps by a request whose answer got lost, is done."""
    if node == wanted.node:
        return Outcome("already")
    text = f"pod {wanted.pod} is already bound to node {node}"
    return _not_bound("refused", Reason.POD_BOUND_ELSEWHERE, text)
