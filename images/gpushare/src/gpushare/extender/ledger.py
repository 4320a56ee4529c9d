# SPDX-License-Identifier: GPL-3.0-or-later
"""The ledger: shares that are decided and may not be bound yet, so that any number of extenders can live at once.

It is one Lease in the extenders' namespace. Its annotation lists the bookings that are under way (see
``extender_register``), its resourceVersion makes it a register with compare-and-swap. Nobody binds a pod to a card
before the booking stands there. What keeps two extenders from booking the same memory:

* Who writes has read the very version that it replaces (or has written that itself), and what it knows of each node
  that it books on is *exact* as of that version: it has listed the node's pods, consistently and after it read some
  version of the Lease, and nobody else's booking on that node was added or taken out since that version, as the Lease
  tells; what it has bound there itself it counts.
* A booking is only taken out by who has seen its pod bound, or knows that it never will be. So what isn't in the Lease
  any more is in a list that is made later.
* A booking names the resourceVersion of the pod that its Binding will carry (see ``extender_fence``). One that somebody
  else has left lying is taken out after its pod was changed, so that the Binding of an extender that was paused for any
  time is refused by the API server. That extender then decides anew. No clock is trusted with any of this.
* Inside a process one thread at a time writes. Writes are some time apart, and binds that wait share the next one,
  whatever their nodes: a single bind waits for nobody, and hundreds a second cost a few writes.

The corners:

* The answer to a write got lost, or the API is slow, or says 429 or 5xx: the ledger is read again, and the write is
  tried again for some seconds; then the bind fails, with nothing bound. A booking that was written all the same is
  harmless: it is left out of the next write, or fenced by another extender.
* The same pod at two extenders: the later one fences the earlier one's booking and makes its own. The earlier one, when
  it is refused by that, leaves the pod alone, so the two don't go on for ever.
* The right to the Lease, or the namespace, is missing: every bind fails with a sentence that says so, and the extender
  isn't ready. There is no going on without a ledger.
* Its annotation can't be read (somebody wrote there): binds fail with a sentence that names it.
* Somebody deletes the Lease: who made the bookings in it still knows his own; others can't know those. So where a Lease
  that was there is gone, or there is none although somebody booked on one of the nodes in question within the last
  minute (with a Lease that is gone, or an extender that has no ledger), nothing is booked for some seconds. That much
  is hope, not proof: the Lease must not be deleted while pods are being bound.
* Pods that are bound past all extenders, and pods that kubelet gives another card than was booked, are in no ledger.
  The watch tells of them as soon as it can.
"""

from __future__ import annotations

import collections
import datetime
import logging
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from gpushare.api.client import Kube, KubeError
from gpushare.extender.binding_status import BindingStatus, Entry, fate, pod_path
from gpushare.extender.register import LedgerError, Register
from gpushare.extender.state import PodRow, Shares, State, pod_row
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason
from gpushare.shared._core.types import JsonObject

API_VERSION = "coordination.k8s.io/v1"
NAME = "gpushare-ledger"
# A scheduler waits 30 s for a bind; what is left is for the Binding itself.
WRITE_SECONDS = 12.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
# From the end of one write to the next one, unless so many binds wait for it.
APART_SECONDS = 0.05
ENOUGH = 16
# How many bookings may be under way, so that the Lease stays small; so many that nobody waits for this alone. A write
# always adds some.
UNDER_WAY = 64
# After so long without a bind the bookings that came true are written out.
REST_SECONDS = 1.0
# A booking of another extender is looked into when it is older: a bind under way takes a fraction of it.
STALE_SECONDS = 10.0
# A booking this young tells that somebody is booking on a node just now.
FRESH_SECONDS = 60.0
# The watch shows a bound pod within a moment; one that it doesn't show is asked for after this time.
UNSEEN_SECONDS = 5.0
ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PROBE = "gpushare-ledger-probe"
# In place of a version: what was known of a node isn't exact any more.
INEXACT = -1

log = logging.getLogger("gpushare.extender")


def default_namespace() -> str:
    """The namespace of the service account that this process runs as; empty outside of a pod."""
    try:
        return ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class BookingRequest:
    """The request of one bind: choose cards and write the booking.

    ``place`` chooses and holds them, or gives nothing where it refuses (and keeps the reason to itself); it may be
    called several times, each time after ``give_up`` has undone the last one. Both are called by whichever thread does
    the writing. ``first``: this bind hasn't been pushed aside by another extender yet.

    Afterwards either ``entry`` is what stands in the ledger; or ``again`` is true: the pod has changed and must be read
    again; or ``error`` says what is wrong; or else it was refused.
    """

    def __init__(
        self,
        node: str,
        uid: str,
        namespace: str,
        name: str,
        version: str,
        place: Callable[[], Shares],
        give_up: Callable[[], None],
        first: bool = True,
    ) -> None:
        self.node, self.uid, self.namespace, self.name, self.version = node, uid, namespace, name, version
        self.place, self.give_up, self.first = place, give_up, first
        self.entry: Entry | None = None
        self.again, self.error = False, ""
        self.code = Reason.LEDGER_UNAVAILABLE
        # Set when it is done, or when it is this one's turn to write for all that wait.
        self.news = threading.Event()
        self.done = False

    def reset(self, error: str = "") -> None:
        if self.entry is not None:
            self.give_up()
        self.entry, self.again, self.error = None, False, error


class _Node:
    """What is known of one node besides what the watch shows.

    :ivar exact: the Lease's write of which that is exact.
    :ivar listed: pods that were bound when they were listed and that the watch may not have shown yet.
    :ivar listed_at: when that was.
    """

    def __init__(self, exact: int) -> None:
        self.exact = exact
        self.listed: dict[str, PodRow] = {}
        self.listed_at = 0.0


class Ledger:
    """The Lease, as this extender (``identity``, another one for each process) reads and writes it.

    ``count`` is told of each write: ``written``, ``conflict`` (another extender was quicker) or ``failed``.
    """

    def __init__(
        self,
        kube: Kube,
        state: State,
        namespace: str,
        identity: str = "",
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        count: Callable[[str], None] = lambda _result: None,
    ) -> None:
        self._kube, self._state, self._namespace = kube, state, namespace
        self.identity = identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._clock, self._now_ms, self._count = clock, now_ms, count
        self._stopped = threading.Event()
        self._problem: str | None = "the ledger hasn't been checked yet"
        # Who waits for the next write, whether somebody is at one, and bookings of ours of which nobody knows what
        # became, by pod; under this lock, which is never held for long.
        self._lock = threading.RLock()
        self._waiting: list[BookingRequest] = []
        self._writing, self._enough = False, threading.Event()
        self._open: dict[str, Entry] = {}
        self._finished: collections.deque[Entry] = collections.deque()
        # All that follows is of the Lease, and only changed under its lock, which is held for a whole write.
        self._lease_lock = threading.Lock()
        # The last version that is known to be there ({} for none at all; None: to be read before the next write).
        self._lease: JsonObject | None = None
        self._register = Register()
        self._uid = ""
        # Of which write the watch's first list was; None where that isn't known.
        self._base: int | None = None
        self._nodes: dict[str, _Node] = {}
        # This extender's bookings that may come true and aren't known to have, those of others, and since when those
        # have been seen.
        self._own: dict[str, Entry] = {}
        self._foreign: dict[str, Entry] = {}
        self._seen: dict[Entry, float] = {}
        self._next_write = 0.0
        self._paused_until: float | None = None

    def stop(self) -> None:
        """End all waits for another try."""
        self._stopped.set()

    def leave(self) -> None:
        """Remove finished bookings in a last write, so that other extenders needn't check them."""
        if not self._lease_lock.acquire(timeout=REST_SECONDS):
            return
        try:
            if self._finished and self._lease:
                self._remove_finished()
        finally:
            self._lease_lock.release()

    @property
    def problem(self) -> str | None:
        """Why nothing can be booked on any node, in one sentence; None where nothing is known to stand in the way."""
        return self._problem

    def check(self) -> None:
        """Find out whether Leases can be read and written, without writing one; see :attr:`trouble`."""
        body = self._body(PROBE, {}, Register())
        try:
            self._kube.post(self._path() + "?dryRun=All", body)
            # A PUT of a missing Lease would create it, so it checks the right to update as well.
            self._kube.put(self._path(PROBE) + "?dryRun=All", body)
            try:
                self._kube.get(self._path(PROBE))
            except KubeError as error:
                if error.status != 404:
                    raise
        except KubeError as error:
            # An unreachable API is reported by the mirrors.
            if error.status in (401, 403, 404):
                self._problem = self._missing_right(error)
            return
        self._problem = None

    def initialize(self) -> None:
        """Read the Lease, before the watch's first list of pods: with that, all nodes are known as of this version.

        Where it can't be read, or there is none, each node's pods are listed when something is first booked on it.
        """
        with self._lease_lock:
            if self._lease is not None:
                return
            try:
                self._read()
            except (KubeError, LedgerError) as error:
                log.info("the ledger can't be read yet: %s", error)
                return
            if self._lease:
                self._base = self._register.count
                for node in self._nodes.values():
                    node.exact = self._base
            else:
                # By the first bind there may be one.
                self._lease = None

    def book(self, ticket: BookingRequest) -> None:
        """Choose cards and write that down; see :class:`Ticket` for what comes of it."""
        with self._lock:
            self._waiting.append(ticket)
            first, self._writing = not self._writing, True
            if len(self._waiting) >= ENOUGH:
                self._enough.set()
        if not first:
            ticket.news.wait()
            if ticket.done:
                return
        # No other thread writes, and this request is the oldest that waits.
        self._enough.wait(self._next_write - self._clock())
        batch = list[BookingRequest]()
        try:
            with self._lease_lock:
                self._drop_finished()
                size = max(ENOUGH, UNDER_WAY - len(self._own))
                with self._lock:
                    batch, self._waiting = self._waiting[:size], self._waiting[size:]
                    if len(self._waiting) < ENOUGH:
                        self._enough.clear()
                self._write_all(batch)
                self._next_write = self._clock() + APART_SECONDS
        finally:
            with self._lock:
                self._writing = bool(self._waiting)
                next_leader = self._waiting[:1]
            for one in batch:
                one.done = True
            for one in (*batch, *next_leader):
                one.news.set()

    # What became of a booking.

    def written(self, entry: Entry) -> None:
        """Confirm a booking: its pod is bound to these cards."""
        self._finished.append(entry)
        self._state.settle(entry.uid, self._clock() + UNSEEN_SECONDS)

    def discard(self, entry: Entry) -> None:
        """Discard a booking: its Binding never takes effect."""
        self._finished.append(entry)
        self._state.release(entry.uid)

    def bound(self, entry: Entry, pod: JsonObject) -> None:
        """Its pod is bound, perhaps by another extender, somewhere else or to other cards."""
        if contract.pod_node(pod) == entry.node and contract.shares(pod) == dict(entry.cards):
            self.written(entry)
        else:
            # What another extender booked moved the Lease on, so that is read before our next write.
            self.discard(entry)

    def keep_unresolved(self, entry: Entry) -> None:
        """Keep a booking whose outcome isn't known; its memory stays held until it is resolved."""
        with self._lock:
            self._open[entry.uid] = entry
        self._state.settle(entry.uid, float("inf"))

    def resolve(self, uid: str) -> bool:
        """Find out what became of an earlier booking of a pod, before another one is made; whether there was any.

        :raises KubeError: it can't be determined now.
        """
        with self._lock:
            entry = self._open.get(uid)
        if entry is None:
            return False
        found, pod = fate(self._kube, entry, True, self._now_ms)
        with self._lock:
            if self._open.get(uid) == entry:
                # Its end and that of its hold are one step: a new bind of the pod may begin right after.
                if found is BindingStatus.BOUND:
                    self.bound(entry, pod)
                else:
                    self.discard(entry)
                del self._open[uid]
        return True

    def collect_garbage(self) -> None:
        """Resolve bookings that no extender works on any more; those that can't be resolved now stay."""
        with self._lock:
            unresolved = list(self._open)
        for uid in unresolved:
            self._try(self.resolve, uid)
        if not self._lease_lock.acquire(blocking=False):
            return
        try:
            stale = [entry for entry in self._foreign.values() if self._stale(entry)]
            unseen = list[PodRow]()
            for name, node in self._nodes.items():
                if not node.listed:
                    continue
                left = {uid: row for uid, row in node.listed.items() if self._state.bound(uid) is None}
                if len(left) != len(node.listed):
                    node.listed = left
                    self._publish_foreign(name)
                if self._clock() - node.listed_at > UNSEEN_SECONDS:
                    unseen += left.values()
            if self._finished and self._lease and self._clock() - self._next_write > REST_SECONDS:
                self._remove_finished()
        finally:
            self._lease_lock.release()
        for entry in stale:
            self._try(self._resolve_stale, entry)
        for row in unseen:
            self._try(self._resolve_unseen, row)

    # Under the page's lock: reading and writing.

    def _remove_finished(self) -> None:
        """Write the ledger without the bookings that are finished; otherwise other extenders would check them."""
        try:
            self._put(())
        except KubeError as error:
            self._lease = None
            log.info("finished bookings can't be removed from the ledger: %s", error)

    def _write_all(self, batch: Sequence[BookingRequest]) -> None:
        try:
            self._write(batch)
        except Exception as error:
            if not isinstance(error, LedgerError):
                log.exception("the ledger couldn't be written")
            self._undo(batch)
            for one in batch:
                one.error = str(error) if isinstance(error, LedgerError) else "internal error; see the log"

    def _write(self, batch: Sequence[BookingRequest]) -> None:
        """
        :raises LedgerError: nothing can be written.
        """
        end, pause = self._clock() + WRITE_SECONDS, FIRST_PAUSE
        while True:
            self._drop_finished()
            try:
                if self._lease is None:
                    self._read()
                for node in sorted({ticket.node for ticket in batch}):
                    self._refresh_node(node)
                self._wait_for_others()
                for ticket in batch:
                    self._place(ticket)
                nodes = {ticket.node for ticket in batch if ticket.entry is not None}
                if nodes:
                    self._put(nodes)
                    self._count("written")
                    self._problem = None
                return
            except KubeError as error:
                # Whatever became of that write: what stands there now is to be read.
                self._undo(batch)
                self._count("conflict" if error.status == 409 else "failed")
                if error.status in (401, 403, 404):
                    self._problem = self._missing_right(error)
                    raise LedgerError(self._problem) from error
                if not (error.outcome_unknown or error.status in (408, 409, 429)):
                    raise LedgerError(f"{self._lease_name} can't be written: {error}") from error
                if self._clock() + pause > end or self._stopped.is_set():
                    raise LedgerError(f"{self._lease_name} can't be written just now: {error}") from error
            # Random, so that two extenders that met don't meet again.
            self._stopped.wait(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE)

    def _drop_finished(self) -> None:
        """Take out what was closed since."""
        while self._finished:
            entry = self._finished.popleft()
            if self._own.get(entry.uid) == entry:
                del self._own[entry.uid]

    def _undo(self, batch: Sequence[BookingRequest]) -> None:
        """Undo what was placed for a write that failed, or may have."""
        self._lease = None
        for ticket in batch:
            if ticket.entry is not None and self._own.get(ticket.uid) == ticket.entry:
                del self._own[ticket.uid]
            ticket.reset()

    def _read(self) -> None:
        """What stands in the Lease, and of which nodes that makes what is known inexact."""
        try:
            lease = self._kube.get(self._path(NAME))
        except KubeError as error:
            if error.status != 404:
                raise
            lease = {}
        metadata = lease.get("metadata") or {}
        try:
            register = Register.from_text(str((metadata.get("annotations") or {}).get(contract.LEDGER) or ""))
        except LedgerError as error:
            raise LedgerError(f"{self._lease_name}: {error}") from error
        now, gone = self._clock(), self._uid
        if metadata.get("uid", "") != self._uid or register.count < self._register.count:
            # Another Lease, whose writes are counted from the start.
            self._uid, self._base = str(metadata.get("uid", "")), None
            for node in self._nodes.values():
                node.exact = INEXACT
        before = set(self._foreign.values())
        entries = {
            entry.uid: entry
            for entry in register.entries
            if entry.by != self.identity and self._state.bound(entry.uid) is None
        }
        for entry in before.difference(register.entries):
            if self._state.bound(entry.uid) is None:
                # Its pod may have been bound, and the watch not have shown it yet.
                self._node(entry.node).exact = INEXACT
        self._foreign, self._register, self._lease = entries, register, lease
        self._seen = {entry: self._seen.get(entry, now) for entry in entries.values()}
        # One that we were about to bind was pushed aside where another's booking of it stands.
        for uid in [uid for uid in self._own if uid in entries]:
            del self._own[uid]
            self._state.release(uid)
        if lease:
            self._paused_until = None
        elif gone:
            self._paused_until = now + STALE_SECONDS
        for name in {entry.node for entry in (*before, *entries.values())}:
            self._publish_foreign(name)

    def _refresh_node(self, name: str) -> None:
        """Make what is known of a node exact as of the Lease that was read: list its pods, where that is needed."""
        node = self._node(name)
        if self._register.added(name) <= node.exact:
            return
        query = {"fieldSelector": f"spec.nodeName={name},status.phase!=Succeeded,status.phase!=Failed"}
        pods = self._kube.get(f"/api/v1/pods?{urlencode(query)}").get("items") or []
        bound = {row.uid: row for row in map(pod_row, pods) if row is not None}
        node.listed = {uid: row for uid, row in bound.items() if self._state.bound(uid) is None}
        node.listed_at, node.exact = self._clock(), self._register.count
        for uid in [uid for uid in self._foreign if uid in bound]:
            self._seen.pop(self._foreign.pop(uid), None)
        # What counts is what was read: a pod may have been bound by another extender, to another card.
        for uid in bound:
            if self._own.pop(uid, None) is not None or uid in node.listed:
                self._state.release(uid)
        self._publish_foreign(name)
        if self._lease == {} and self._paused_until is None:
            since = (self._now_ms() - FRESH_SECONDS * 1000) * 1_000_000
            assumed = (booking.assume_time for booking in map(contract.booking, pods) if booking is not None)
            if any(at > since for at in assumed):
                self._paused_until = node.listed_at + STALE_SECONDS

    def _wait_for_others(self) -> None:
        left = 0.0 if self._paused_until is None else self._paused_until - self._clock()
        if left > 0:
            raise LedgerError(
                f"{self._lease_name} is gone; nothing is booked for {left:.0f} s, until all bound pods are listed"
            )

    def _place(self, ticket: BookingRequest) -> None:
        other = self._foreign.get(ticket.uid)
        if other is not None:
            try:
                found, pod = fate(self._kube, other, ticket.first, self._now_ms)
            except KubeError as error:
                ticket.code = Reason.API_ERROR
                ticket.error = f"the state of an earlier booking can't be read: {error}"
                return
            if found is BindingStatus.OPEN:
                ticket.code, ticket.error = Reason.BIND_IN_PROGRESS, "another extender is binding the pod"
                return
            self._remove_foreign(other, pod)
            if found is not BindingStatus.VOID or (pod.get("metadata") or {}).get("resourceVersion") != ticket.version:
                ticket.again = True
                return
        cards = ticket.place()
        if cards:
            ticket.entry = Entry(
                ticket.uid,
                ticket.namespace,
                ticket.name,
                ticket.node,
                cards,
                self._now_ms(),
                ticket.version,
                self.identity,
            )
            self._own[ticket.uid] = ticket.entry

    def _put(self, nodes: Iterable[str]) -> None:
        self._drop_finished()
        metadata = (self._lease or {}).get("metadata") or {}
        register = self._register.next([*self._foreign.values(), *self._own.values()], nodes)
        body = self._body(NAME, metadata, register)
        try:
            if metadata:
                self._lease = self._kube.put(self._path(NAME), body)
            else:
                self._lease = self._kube.post(self._path(), body)
                self._uid, self._paused_until = str(self._lease["metadata"].get("uid", "")), None
        except KubeError as error:
            if error.status == 404 and metadata:
                raise KubeError(409, "Deleted", f"{self._lease_name} was deleted") from error
            raise
        self._register = register
        for node in nodes:
            self._node(node).exact = register.count

    def _node(self, name: str) -> _Node:
        return self._nodes.setdefault(name, _Node(INEXACT if self._base is None else self._base))

    def _publish_foreign(self, name: str) -> None:
        """Have the state count what others have booked on a node, and what the watch may not have shown yet."""
        booked = [
            PodRow(one.uid, one.namespace, one.name, name, sum(units for _index, units in one.cards), one.cards)
            for one in self._foreign.values()
            if one.node == name
        ]
        self._state.set_foreign(name, [*self._node(name).listed.values(), *booked])

    def _remove_foreign(self, entry: Entry, pod: JsonObject) -> None:
        """Another extender's booking is over, the next write leaves it out; ``pod`` is what its pod is now."""
        if self._foreign.get(entry.uid) == entry:
            del self._foreign[entry.uid]
            self._seen.pop(entry, None)
            row = pod_row(pod)
            if row is not None and (row.uid, row.node) == (entry.uid, entry.node):
                self._node(entry.node).listed[row.uid] = row
            self._publish_foreign(entry.node)

    # Without the page's lock: asking about what seems to be left.

    def _resolve_stale(self, entry: Entry) -> None:
        found, pod = fate(self._kube, entry, True, self._now_ms)
        facts = {"pod": f"{entry.namespace}/{entry.name}", "node": entry.node, "by": entry.by, "fate": found.value}
        log.info("another extender's stale booking is resolved", extra={"data": facts})
        with self._lease_lock:
            self._remove_foreign(entry, pod)

    def _resolve_unseen(self, row: PodRow) -> None:
        """A pod was bound, but the watch doesn't show it: it may have gone before the watch saw it."""
        try:
            pod = self._kube.get(pod_path(row.namespace, row.name))
        except KubeError as error:
            if error.status != 404:
                raise
            pod = {}
        if contract.pod_uid(pod) == row.uid and contract.counts(pod):
            return
        with self._lease_lock:
            if self._node(row.node).listed.pop(row.uid, None) is not None:
                self._publish_foreign(row.node)

    def _try(self, action: Callable[..., object], *arguments: Any) -> None:
        try:
            action(*arguments)
        except KubeError as error:
            log.info("a booking can't be resolved now: %s", error)

    # Its parts.

    def _stale(self, entry: Entry) -> bool:
        now = self._clock()
        return max(now - self._seen.get(entry, now), (self._now_ms() - entry.at) / 1000) > STALE_SECONDS

    def _path(self, name: str = "") -> str:
        path = f"/apis/{API_VERSION}/namespaces/{quote(self._namespace, safe='')}/leases"
        return f"{path}/{name}" if name else path

    @property
    def _lease_name(self) -> str:
        return f"Lease {self._namespace}/{NAME}, the ledger of bookings,"

    def _missing_right(self, error: KubeError) -> str:
        return (
            f"bookings can't be kept: the extender needs the namespace {self._namespace} and the right to get, create "
            f"and update Leases in it: {error}"
        )

    def _body(self, name: str, metadata: JsonObject, register: Register) -> JsonObject:
        """The object to be written, in place of one with this metadata."""
        now = datetime.datetime.fromtimestamp(self._now_ms() / 1000, datetime.UTC)
        kept = {
            key: metadata[key]
            for key in ("uid", "resourceVersion", "labels", "ownerReferences", "finalizers")
            if metadata.get(key)
        }
        annotations = {**(metadata.get("annotations") or {}), contract.LEDGER: register.to_text()}
        return {
            "apiVersion": API_VERSION,
            "kind": "Lease",
            "metadata": {**kept, "name": name, "namespace": self._namespace, "annotations": annotations},
            "spec": {"holderIdentity": self.identity, "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")},
        }
