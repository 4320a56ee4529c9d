# SPDX-License-Identifier: GPL-3.0-or-later
"""Binding a pod to a node and to its cards.

A bind chooses the cards and books them in the ledger (see ``extender_ledger``), and only then binds. Node and cards are
written in one request: the API server merges a Binding's annotations into the pod in the same update that sets its
node. So there is never a pod with a card and no node, or the other way round. The Binding carries the pod's UID and
resourceVersion, so it is refused where the pod has changed since; then all is decided anew.

So the pod that the scheduler has just sent to ``filter`` is as good as one that is read now, and is mostly the same. It
isn't where this extender may have bound it already, because the scheduler didn't hear of that; such a pod is read. That
believes who asks: processes in the host's network where there is no TLS, and clients with a certificate where there is.
A false pod takes its UID and resourceVersion, which only those know who may read it.
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

from gpushare import contract
from gpushare.contract import Card, ContractError
from gpushare.events import Events
from gpushare.extender_fence import Entry, Fate, fate, pod_path
from gpushare.extender_filter import refusal
from gpushare.extender_ledger import Ledger, Ticket
from gpushare.extender_state import NodeView, PodRow, Shares, State
from gpushare.kube import Json, Kube, KubeError
from gpushare.placement import choose

# How often a bind is begun anew because the pod has changed, and when it is too late for that.
TRIES = 6
BIND_SECONDS = 15.0
FIRST_PAUSE = 0.02
SETTLE_SECONDS = 2.0
CHECK_SECONDS = 60.0
# Bindings that are sent at once. The API server takes no more of them a second for being asked by hundreds together,
# and each would take a connection of its own, with a handshake.
AT_ONCE = 16
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
    error: str = ""


class _Again(Exception):
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
        self._asked: collections.OrderedDict[str, tuple[float, Json]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._sending = threading.Semaphore(AT_ONCE)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._settle_for_ever, name="settle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._ledger.stop()
        if self._thread is not None:
            self._thread.join(5)
        self._ledger.leave()

    def asked(self, pod: Json) -> None:
        """A scheduler asks where this pod fits; it may want to bind it next."""
        kept = _kept(pod)
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
        with self._alone(wanted.pod) as alone:
            if not alone:
                return Outcome("refused", "another bind of this pod is under way")
            end, pause, why = self._clock() + BIND_SECONDS, FIRST_PAUSE, ""
            for count in range(TRIES):
                if count:
                    self._stopped.wait(pause * random.uniform(0.5, 1.5))
                    pause *= 2
                if count and self._clock() > end:
                    break
                try:
                    return self._bind(wanted, first=count == 0)
                except _Again as again:
                    why = str(again)
            return Outcome("failed", f"pod {wanted.pod} can't be bound to node {wanted.node}: {why}")

    @contextlib.contextmanager
    def _alone(self, pod: str) -> Iterator[bool]:
        """Whether nobody else is at a pod; if so, nobody else comes."""
        with self._lock:
            alone = pod not in self._working
            self._working.add(pod)
        try:
            yield alone
        finally:
            if alone:
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
                raise _Again("an earlier bind of it had to be looked into")
        except KubeError as error:
            if error.status == 404:
                return Outcome("refused", f"pod {wanted.pod} doesn't exist")
            return Outcome("failed", f"pod {wanted.pod} can't be read: {error}")
        try:
            wish = contract.wish(pod)
        except ContractError as error:
            return self._refuse(wanted, pod, str(error))
        if wish.units == 0:
            # It names the resource with the quantity 0, so the scheduler leaves its binding to us all the same.
            return self._bind_without_card(wanted, pod)

        refused: Outcome | None = None
        why, cards = "", list[Card]()

        def choose_cards(view: NodeView) -> PodRow | None:
            nonlocal why, cards
            indices = choose(self._strategy, view.slots(wish), wish)
            if not indices:
                why = f"node {wanted.node}: {refusal(view, wish)}"
                return None
            cards = [card for card in view.cards if card.index in indices]
            shares = tuple((card.index, wish.share) for card in cards)
            priority = contract.pod_priority(pod)
            return PodRow(wanted.uid, wanted.namespace, wanted.name, wanted.node, wish.units, shares, priority)

        def place() -> Shares:
            nonlocal why, refused
            why, refused = "", None
            priority = contract.pod_priority(pod)
            row, bound_to, error = self._state.reserve(wanted.uid, wanted.node, choose_cards, priority)
            if bound_to:
                refused = _bound_to(bound_to, wanted)
            elif error:
                refused = Outcome("refused", error)
            return row.cards if row is not None else ()

        ticket = Ticket(
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
            raise _Again("another extender was at it")
        if ticket.error:
            return Outcome("failed", f"pod {wanted.pod} can't be bound to node {wanted.node}: {ticket.error}")
        if ticket.entry is not None:
            return self._write(wanted, pod, ticket.entry, cards)
        if refused is not None:
            if refused.error:
                self._clean(pod)
            return refused
        return self._refuse(wanted, pod, why)

    def _known(self, wanted: Wanted) -> Json | None:
        """The pod as the scheduler has sent it just now; only once, so that a second try reads it."""
        with self._lock:
            at, pod = self._asked.pop(wanted.uid, (0.0, Json()))
        if not pod or self._clock() - at > ASKED_SECONDS:
            return None
        metadata = pod["metadata"]
        if (metadata["namespace"], metadata["name"]) != (wanted.namespace, wanted.name):
            return None
        # What is held for it may be where it is bound, and mustn't be given up on the word of a scheduler.
        return None if self._state.held(wanted.uid) else pod

    def _refuse(self, wanted: Wanted, pod: Json, message: str) -> Outcome:
        self._clean(pod)
        self._events.pod(wanted.namespace, wanted.name, wanted.uid, EVENT_REFUSED, message)
        return Outcome("refused", message)

    # Writing.

    def _write(self, wanted: Wanted, pod: Json, entry: Entry, cards: list[Card]) -> Outcome:
        """Bind a pod to the cards that are booked for it: the only place that does.

        :raises _Again: the pod has changed; nothing is booked any more.
        """
        annotations = contract.booking_annotations(cards, pod, self._now_ns(), False)
        try:
            try:
                self._post(wanted, contract.merge_only(annotations, pod), entry.version)
            except KubeError as error:
                return self._after_failure(wanted, entry, error)
        except _Again:
            raise
        except Exception:
            # A mistake of ours: nobody knows what was sent.
            self._ledger.leave_open(entry)
            raise
        self._ledger.written(entry)
        card = annotations[contract.POD_INDICES] or annotations[contract.POD_INDEX]
        facts = {"pod": wanted.pod, "node": wanted.node, "card": card}
        log.info("bound", extra={"data": facts})
        return Outcome("bound")

    def _post(self, wanted: Wanted, annotations: dict[str, str], version: str = "") -> None:
        metadata: Json = {
            "name": wanted.name,
            "namespace": wanted.namespace,
            "uid": wanted.uid,
            "annotations": annotations,
        }
        if version:
            metadata["resourceVersion"] = version
        binding: Json = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": wanted.node},
        }
        with self._sending:
            self._kube.post(pod_path(wanted.namespace, wanted.name) + "/binding", binding)

    def _bind_without_card(self, wanted: Wanted, pod: Json) -> Outcome:
        try:
            self._post(wanted, {})
        except KubeError as error:
            message = f"pod {wanted.pod} can't be bound to node {wanted.node}: {error}"
            with contextlib.suppress(KubeError):
                done = _bound(self._kube.get(pod_path(wanted.namespace, wanted.name)), wanted)
                if done is not None:
                    return done
            return Outcome("unsure" if error.unsure else "failed", message)
        return Outcome("bound")

    def _after_failure(self, wanted: Wanted, entry: Entry, error: KubeError) -> Outcome:
        """What a failed write came to: it may have been done and its answer lost, or may yet be done.

        :raises _Again: it wasn't, but may be tried again.
        """
        message = f"pod {wanted.pod} can't be bound to node {wanted.node}: {error}"
        log.warning("%s", message)
        try:
            found, pod = fate(self._kube, entry, fence=error.unsure)
        except KubeError as second:
            if error.unsure:
                self._ledger.leave_open(entry)
                return Outcome("unsure", f"{message}; and whether it was can't be told: {second}")
            self._ledger.void(entry)
            return Outcome("failed", message)
        if found is Fate.BOUND:
            self._ledger.bound(entry, pod)
            return _bound_to(contract.pod_node(pod), wanted)
        self._ledger.void(entry)
        if found is Fate.GONE or error.unsure or error.status in (409, 429):
            # Read anew, it says what is the matter with the pod; else this was about nothing but the moment.
            raise _Again(str(error))
        self._clean(pod)
        return Outcome("failed", message)

    def _clean(self, pod: Json) -> None:
        """Take a card's annotations off a pod that isn't bound: somebody's earlier booking that came to nothing."""
        metadata = pod.get("metadata") or {}
        left = [key for key in contract.POD_ANNOTATIONS if key in (metadata.get("annotations") or {})]
        if not left:
            return
        patch: Json = {
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
        """Ask the API about pods that were bound and that the watch hasn't shown for too long."""
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
                log.info("a pod that was bound is gone", extra={"data": facts})
                self._state.release(row.uid)

    def _settle_for_ever(self) -> None:
        checked = float("-inf")
        while True:
            try:
                if self._ledger.trouble is not None or self._clock() - checked > CHECK_SECONDS:
                    self._ledger.check()
                    checked = self._clock()
                self.settle()
                self._ledger.tidy()
            except Exception:
                log.exception("bookings couldn't be checked")
            if self._stopped.wait(SETTLE_SECONDS):
                return


# What a bind needs of a pod, besides its resources.
METADATA = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
ANNOTATIONS = {*contract.POD_ANNOTATIONS, *contract.POD_WISHES}


def _kept(pod: Json) -> Json | None:
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


def _bound(pod: Json, wanted: Wanted) -> Outcome | None:
    """How a bind ends by what the pod is already; None where it isn't bound yet and may be."""
    if contract.pod_uid(pod) != wanted.uid:
        return Outcome("refused", f"pod {wanted.pod} was replaced by another one of that name")
    node = contract.pod_node(pod)
    if node:
        return _bound_to(node, wanted)
    if contract.terminating(pod):
        return Outcome("refused", f"pod {wanted.pod} is being deleted")
    if contract.finished(pod):
        return Outcome("refused", f"pod {wanted.pod} has already finished")
    return None


def _bound_to(node: str, wanted: Wanted) -> Outcome:
    """A bind that was done before, perhaps by a request whose answer got lost, is done."""
    if node == wanted.node:
        return Outcome("already")
    return Outcome("refused", f"pod {wanted.pod} is already bound to node {node}")
