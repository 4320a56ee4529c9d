# SPDX-License-Identifier: GPL-3.0-or-later
"""Binding a pod to a node and to one of its cards.

Node and card are written in one request: the API server merges a Binding's annotations into the pod in the same update
that sets its node, guarded by the pod's UID. So there is never a pod with a card and no node, or the other way round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

from gpushare import contract
from gpushare.events import Events
from gpushare.extender_filter import refusal
from gpushare.extender_state import NodeView, PodRow, State
from gpushare.kube import Json, Kube, KubeError
from gpushare.placement import choose

# How long a written booking may be missing in the watch before the API is asked about it.
WRITTEN_SECONDS = 5.0
# The same where the answer got lost: longer than the API server may work on one request (60 s), so that one which takes
# effect late doesn't find its memory given away.
UNSURE_SECONDS = 75.0
SETTLE_SECONDS = 5.0

EVENT_REFUSED = "GPUMemoryRefused"

log = logging.getLogger("gpushare.extender")


class Wanted(NamedTuple):
    """What the scheduler asks for; an empty UID means whichever pod has that name."""

    namespace: str
    name: str
    uid: str
    node: str


class Outcome(NamedTuple):
    """``result``, for the metrics: bound, already (it was), refused (no room, or not this pod), failed (the API said
    no), unsure (the API's answer got lost). ``error`` is empty for the first two.
    """

    result: str
    error: str = ""


class Binder:
    """Binds pods; what it holds for them is in ``state``."""

    def __init__(
        self,
        kube: Kube,
        state: State,
        strategy: str,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._kube, self._state, self._strategy, self._events = kube, state, strategy, events
        self._clock, self._now_ns = clock, now_ns
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._settle_for_ever, name="settle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5)

    def bind(self, wanted: Wanted) -> Outcome:
        try:
            pod = self._kube.get(_pod_path(wanted.namespace, wanted.name))
        except KubeError as error:
            if error.status == 404:
                return Outcome("refused", f"pod {wanted.namespace}/{wanted.name} doesn't exist")
            return Outcome("failed", f"pod {wanted.namespace}/{wanted.name} can't be read: {error}")
        wanted = wanted._replace(uid=wanted.uid or contract.pod_uid(pod))
        done = _bound(pod, wanted)
        if done is not None:
            return done
        units = contract.pod_units(pod)
        if units == 0:
            # It names the resource with the quantity 0, so the scheduler leaves its binding to us all the same.
            return self._write(wanted, {}, pod)
        return self._bind_to_card(wanted, pod, units)

    def _bind_to_card(self, wanted: Wanted, pod: Json, units: int) -> Outcome:
        why = ""

        def place(view: NodeView) -> PodRow | None:
            nonlocal why
            card = choose(self._strategy, view.slots(), units)
            if card is None:
                why = refusal(view, units)
                return None
            return PodRow(wanted.uid, wanted.namespace, wanted.name, wanted.node, units, card)

        row, bound_to, error = self._state.reserve(wanted.uid, wanted.node, place)
        if bound_to:
            return _bound_to(bound_to, wanted)
        if row is None:
            self._clean(pod)
            if error:
                return Outcome("refused", error)
            message = f"node {wanted.node}: {why}"
            self._events.pod(wanted.namespace, wanted.name, wanted.uid, EVENT_REFUSED, message)
            return Outcome("refused", message)
        outcome = Outcome("failed", "internal error")
        try:
            view = self._state.view(wanted.node)
            card = next((one for one in view.cards if one.index == row.card), None) if view else None
            if card is None:
                outcome = Outcome("refused", f"node {wanted.node}: card {row.card} has just gone")
                return outcome
            outcome = self._write(wanted, contract.booking_annotations(card, units, self._now_ns(), False), pod)
            return outcome
        finally:
            if outcome.result in ("bound", "already"):
                self._state.settle(wanted.uid, self._clock() + WRITTEN_SECONDS)
            elif outcome.result == "unsure":
                self._state.settle(wanted.uid, self._clock() + UNSURE_SECONDS)
            else:
                self._state.release(wanted.uid)

    def _write(self, wanted: Wanted, annotations: dict[str, str], pod: Json) -> Outcome:
        """Make a booking durable: the only place that does."""
        binding: Json = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": wanted.name,
                "namespace": wanted.namespace,
                "uid": wanted.uid,
                "annotations": annotations,
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": wanted.node},
        }
        try:
            self._kube.post(_pod_path(wanted.namespace, wanted.name) + "/binding", binding)
        except KubeError as error:
            return self._after_failure(wanted, error)
        card = annotations.get(contract.POD_INDEX)
        facts = {"pod": f"{wanted.namespace}/{wanted.name}", "node": wanted.node, "card": card}
        log.info("bound", extra={"data": facts})
        return Outcome("bound")

    def _after_failure(self, wanted: Wanted, error: KubeError) -> Outcome:
        """What a failed write came to: the answer of a write that was done may have been lost on its way."""
        message = f"pod {wanted.namespace}/{wanted.name} can't be bound to node {wanted.node}: {error}"
        log.warning("%s", message)
        try:
            pod = self._kube.get(_pod_path(wanted.namespace, wanted.name))
        except KubeError as second:
            gone = second.status == 404
            return Outcome("unsure" if error.unsure and not gone else "failed", message)
        done = _bound(pod, wanted)
        if done is not None:
            return done
        if error.unsure:
            return Outcome("unsure", message)
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
            self._kube.patch(_pod_path(str(metadata.get("namespace")), str(metadata.get("name"))), patch)
        except KubeError as error:
            log.info("annotations of a card stay on the unbound pod %s: %s", contract.pod_key(pod), error)

    # Bookings whose pod the watch doesn't show.

    def settle(self) -> None:
        """Ask the API about bookings that have waited for the watch for too long."""
        for row in self._state.unconfirmed(self._clock()):
            try:
                pod = self._kube.get(_pod_path(row.namespace, row.name))
            except KubeError as error:
                if error.status != 404:
                    # Not known to be free, so it isn't given away.
                    continue
                pod = {}
            if contract.pod_uid(pod) != row.uid or not contract.counts(pod):
                log.info("a booking came to nothing", extra={"data": {"pod": f"{row.namespace}/{row.name}"}})
                self._state.release(row.uid)

    def _settle_for_ever(self) -> None:
        while not self._stopped.wait(SETTLE_SECONDS):
            try:
                self.settle()
            except Exception:
                log.exception("bookings couldn't be checked")


def _pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


def _bound(pod: Json, wanted: Wanted) -> Outcome | None:
    """How a bind ends by what the pod is already; None where it isn't bound yet and may be."""
    key = f"{wanted.namespace}/{wanted.name}"
    if contract.pod_uid(pod) != wanted.uid:
        return Outcome("refused", f"pod {key} was replaced by another one of that name")
    node = contract.pod_node(pod)
    if node:
        return _bound_to(node, wanted)
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return Outcome("refused", f"pod {key} is being deleted")
    if contract.finished(pod):
        return Outcome("refused", f"pod {key} has already finished")
    return None


def _bound_to(node: str, wanted: Wanted) -> Outcome:
    """A bind that was done before, perhaps by a request whose answer got lost, is done."""
    if node == wanted.node:
        return Outcome("already")
    return Outcome("refused", f"pod {wanted.namespace}/{wanted.name} is already bound to node {node}")
