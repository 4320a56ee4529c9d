# SPDX-License-Identifier: GPL-3.0-or-later
"""The ledger: bookings that may not be bound yet, so that any number of extenders can run at once.

It is one Lease in the extenders' namespace. Its annotation lists the bookings in progress (see ``register``), its
resourceVersion makes it a register with compare-and-swap. No pod is bound to a card before its booking is in the
ledger. These rules keep two extenders from booking the same memory:

* A writer has read the version that it replaces (or has written that itself), and its data of each node that it books
  on is *exact* as of that version: it has listed the node's pods, consistently and after it read some version of the
  Lease, and according to the Lease no other extender has added or removed a booking on that node since. Pods that it
  has bound there itself count as well.
* A booking is removed only by an extender that has received its pod as bound, or knows that the Binding can't take
  effect. So a pod whose booking isn't in the Lease any more is in any list that is made later.
* A booking names the resourceVersion of the pod that its Binding will carry (see ``binding_status``). A stale booking
  of another extender is removed after its pod was changed, so that the API server refuses the Binding of an extender
  that was paused for any time. That extender then decides anew. No clock is trusted with any of this.
* In a process, one thread at a time writes. Writes are some time apart, and binds that wait share the next one,
  whatever their nodes: a single bind doesn't wait, and hundreds a second need few writes.

Special cases:

* The answer to a write was lost, or the API is slow, or answers 429 or 5xx: the ledger is read again, and the write is
  retried for some seconds; then the bind fails, with nothing bound. A booking that was written all the same is
  harmless: the next write omits it, or another extender fences it.
* The same pod at two extenders: the later one fences the earlier one's booking and makes its own. The earlier one, when
  it is refused because of that, stops, so that the two don't continue for ever.
* The right to the Lease, or the namespace, is missing: every bind fails with a message about it, and the extender
  isn't ready. It never continues without a ledger.
* Its annotation can't be read (somebody else has written it): binds fail with a message that names it.
* Somebody deletes the Lease: each extender still has its own bookings, but not those of the others. So where a Lease
  that existed is gone, or none exists although somebody booked on one of the nodes in question within the last minute
  (with a Lease that is gone, or an extender without a ledger), nothing is booked for some seconds. This is no
  proof: the Lease must not be deleted while pods are being bound.
* Pods that are bound without an extender, and pods that kubelet gives another card than was booked, are in no ledger.
  The watch delivers them as soon as it can.
"""

from __future__ import annotations

import collections
import dataclasses
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
from gpushare.extender.binding_status import BindingStatus, Entry, binding_status, now_ms, pod_path
from gpushare.extender.register import LedgerError, Register
from gpushare.extender.state import PodRow, Shares, State, pod_row
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason
from gpushare.shared._core.types import JsonObject

API_VERSION = "coordination.k8s.io/v1"
NAME = "gpushare-ledger"
# A scheduler waits 30 s for a bind; the rest is for the Binding itself.
WRITE_SECONDS = 12.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
# From the end of one write to the next one, unless that many binds wait.
APART_SECONDS = 0.05
ENOUGH = 16
# The number of bookings in progress, which keeps the Lease small, and at which no bind waits for this reason alone. A
# write always adds some.
UNDER_WAY = 64
# After this time without a bind, finished bookings are removed.
REST_SECONDS = 1.0
# An older booking of another extender is checked: a bind takes a fraction of this time.
STALE_SECONDS = 10.0
# After a younger booking, an extender without this ledger may be booking on the node.
FRESH_SECONDS = 60.0
# The watch delivers a bound pod within a moment; after this time it is checked.
UNSEEN_SECONDS = 5.0
ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PROBE = "gpushare-ledger-probe"
# In place of a write's number: a node's data isn't exact any more.
INEXACT = -1

log = logging.getLogger("gpushare.extender")


def default_namespace() -> str:
    """Return the namespace of the process's service account; empty outside of a pod."""
    try:
        return ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@dataclasses.dataclass(eq=False)
class BookingRequest:
    """The request of one bind to choose cards and write the booking.

    Afterwards either ``entry`` is the booking in the ledger; or ``again`` is true: the pod has changed and must be read
    again; or ``error`` is the reason of a failure, with ``code``; or else ``place`` has refused.

    :param version: the pod's resourceVersion.
    :param place: chooses and holds cards; gives none where it refuses. It may be called several times, each time after
        ``give_up`` has undone the last one. Any thread may call both.
    :param first: no other extender has fenced this bind yet.
    """

    node: str
    uid: str
    namespace: str
    name: str
    version: str
    place: Callable[[], Shares]
    give_up: Callable[[], None]
    first: bool = True
    entry: Entry | None = None
    again: bool = False
    error: str = ""
    code: Reason = Reason.LEDGER_UNAVAILABLE
    # Set when the request is done, or is the oldest one, whose thread has to write for all that wait.
    wake: threading.Event = dataclasses.field(default_factory=threading.Event)
    done: bool = False

    def reset(self) -> None:
        """Undo what ``place`` has done."""
        if self.entry is not None:
            self.give_up()
        self.entry, self.again, self.error = None, False, ""


@dataclasses.dataclass
class _Node:
    """The data of a node besides what the watch has delivered.

    :param exact: the number of the Lease's write as of which it is exact.
    :param listed: pods that were bound when they were listed and that the watch may not have delivered yet.
    :param listed_at: the time of that list.
    """

    exact: int
    listed: dict[str, PodRow] = dataclasses.field(default_factory=dict)
    listed_at: float = 0.0


class Ledger:
    """The Lease, as read and written by this extender."""

    def __init__(
        self,
        kube: Kube,
        state: State,
        namespace: str,
        identity: str = "",
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = now_ms,
        count: Callable[[str], None] = lambda _result: None,
    ) -> None:
        """
        :param kube: the client of the API.
        :param state: counts the bookings; receives those of other extenders.
        :param namespace: where the Lease is.
        :param identity: of this process; unique by default.
        :param clock: monotonic, in seconds.
        :param now_ms: the time in milliseconds since 1970.
        :param count: called for each write: ``written``, ``conflict`` (another extender wrote before) or ``failed``.
        """
        self._kube, self._state, self._namespace = kube, state, namespace
        self.identity = identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._clock, self._now_ms, self._count = clock, now_ms, count
        self._stopped = threading.Event()
        self._problem: str | None = "the ledger hasn't been checked yet"
        # Requests that wait for the next write, whether a thread is writing, and this extender's unresolved bookings by
        # pod; under this lock, which is never held for long.
        self._lock = threading.RLock()
        self._waiting: list[BookingRequest] = []
        self._writing, self._enough = False, threading.Event()
        self._unresolved: dict[str, Entry] = {}
        self._finished: collections.deque[Entry] = collections.deque()
        # The rest concerns the Lease, and is only changed under its lock, which is held for a whole write.
        self._lease_lock = threading.Lock()
        # The last known version ({}: it doesn't exist; None: it must be read before the next write).
        self._lease: JsonObject | None = None
        self._register = Register()
        self._uid = ""
        # The number of the write as of which the watch's first list is exact; None if it isn't known.
        self._base: int | None = None
        self._nodes: dict[str, _Node] = {}
        # Bookings in progress of this extender, those of others, and since when the latter have been known.
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
        """Why nothing can be booked on any node, in one sentence; None if no reason is known."""
        return self._problem

    def check(self) -> None:
        """Check whether Leases can be read and written, without writing one; see :attr:`problem`."""
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
        """Read the Lease before the watch's first list of pods, which makes all nodes exact as of this version.

        Where it can't be read, or doesn't exist, each node's pods are listed for the first booking on it.
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
                # It may exist by the first bind.
                self._lease = None

    def book(self, request: BookingRequest) -> None:
        """Choose cards and write the booking; the result is in the request."""
        with self._lock:
            self._waiting.append(request)
            first, self._writing = not self._writing, True
            if len(self._waiting) >= ENOUGH:
                self._enough.set()
        if not first:
            request.wake.wait()
            if request.done:
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
                next_writer = self._waiting[:1]
            for one in batch:
                one.done = True
            for one in (*batch, *next_writer):
                one.wake.set()

    # The outcome of a booking.

    def written(self, entry: Entry) -> None:
        """Confirm a booking: its pod is bound to these cards."""
        self._finished.append(entry)
        self._state.settle(entry.uid, self._clock() + UNSEEN_SECONDS)

    def discard(self, entry: Entry) -> None:
        """Discard a booking: its Binding never takes effect."""
        self._finished.append(entry)
        self._state.release(entry.uid)

    def bound(self, entry: Entry, pod: JsonObject) -> None:
        """Close a booking whose pod is bound, perhaps by another extender and to another node or other cards."""
        if contract.pod_node(pod) == entry.node and contract.shares(pod) == dict(entry.cards):
            self.written(entry)
        else:
            # The other extender's booking changed the Lease, so it is read again before the next write.
            self.discard(entry)

    def keep_unresolved(self, entry: Entry) -> None:
        """Keep a booking whose outcome isn't known; its memory stays held until it is resolved."""
        with self._lock:
            self._unresolved[entry.uid] = entry
        self._state.settle(entry.uid, float("inf"))

    def resolve(self, uid: str) -> bool:
        """Determine the outcome of an earlier booking of a pod, before another one is made.

        :returns: whether there was one.
        :raises KubeError: it can't be determined now.
        """
        with self._lock:
            entry = self._unresolved.get(uid)
        if entry is None:
            return False
        status, pod = binding_status(self._kube, entry, True, self._now_ms)
        with self._lock:
            if self._unresolved.get(uid) == entry:
                # Together with its hold: a new bind of the pod may begin right after.
                if status is BindingStatus.BOUND:
                    self.bound(entry, pod)
                else:
                    self.discard(entry)
                del self._unresolved[uid]
        return True

    def collect_garbage(self) -> None:
        """Resolve bookings that no extender is binding any more; those that can't be resolved now stay."""
        with self._lock:
            unresolved = list(self._unresolved)
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

    # Reading and writing; under the Lease's lock.

    def _remove_finished(self) -> None:
        """Write the ledger without finished bookings; otherwise other extenders would check them."""
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
                for node in sorted({request.node for request in batch}):
                    self._refresh_node(node)
                self._wait_for_others()
                for request in batch:
                    self._place(request)
                nodes = {request.node for request in batch if request.entry is not None}
                if nodes:
                    self._put(nodes)
                    self._count("written")
                    self._problem = None
                return
            except KubeError as error:
                # The write may have succeeded all the same: the Lease is read again.
                self._undo(batch)
                self._count("conflict" if error.status == 409 else "failed")
                if error.status in (401, 403, 404):
                    self._problem = self._missing_right(error)
                    raise LedgerError(self._problem) from error
                if not (error.outcome_unknown or error.status in (408, 409, 429)):
                    raise LedgerError(f"{self._lease_name} can't be written: {error}") from error
                if self._clock() + pause > end or self._stopped.is_set():
                    raise LedgerError(f"{self._lease_name} can't be written just now: {error}") from error
            # Random, so that two extenders don't collide again.
            self._stopped.wait(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE)

    def _drop_finished(self) -> None:
        """Remove finished bookings from this extender's own."""
        while self._finished:
            entry = self._finished.popleft()
            if self._own.get(entry.uid) == entry:
                del self._own[entry.uid]

    def _undo(self, batch: Sequence[BookingRequest]) -> None:
        """Undo what was placed for a write that failed, or may have."""
        self._lease = None
        for request in batch:
            if request.entry is not None and self._own.get(request.uid) == request.entry:
                del self._own[request.uid]
            request.reset()

    def _read(self) -> None:
        """Read the Lease, and mark the nodes whose data isn't exact because of it."""
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
            # Another Lease, whose writes are numbered from the start.
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
                # Its pod may have been bound without being delivered by the watch yet.
                self._node(entry.node).exact = INEXACT
        self._foreign, self._register, self._lease = entries, register, lease
        self._seen = {entry: self._seen.get(entry, now) for entry in entries.values()}
        # Another extender's booking of the same pod replaces one of this extender.
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
        """Make a node's data exact as of the Lease that was read; list its pods if necessary."""
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
        # The listed pods count: another extender may have bound a pod to another card.
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

    def _place(self, request: BookingRequest) -> None:
        other = self._foreign.get(request.uid)
        if other is not None:
            try:
                status, pod = binding_status(self._kube, other, request.first, self._now_ms)
            except KubeError as error:
                request.code = Reason.API_ERROR
                request.error = f"the state of an earlier booking can't be read: {error}"
                return
            if status is BindingStatus.OPEN:
                request.code, request.error = Reason.BIND_IN_PROGRESS, "another extender is binding the pod"
                return
            self._remove_foreign(other, pod)
            if (
                status is not BindingStatus.VOID
                or (pod.get("metadata") or {}).get("resourceVersion") != request.version
            ):
                request.again = True
                return
        cards = request.place()
        if cards:
            owner = (request.uid, request.namespace, request.name, request.node)
            request.entry = Entry(*owner, cards, self._now_ms(), request.version, self.identity)
            self._own[request.uid] = request.entry

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
        """Pass other extenders' bookings on a node to the state, and pods that the watch hasn't delivered yet."""
        booked = [
            PodRow(one.uid, one.namespace, one.name, name, sum(units for _index, units in one.cards), one.cards)
            for one in self._foreign.values()
            if one.node == name
        ]
        self._state.set_foreign(name, [*self._node(name).listed.values(), *booked])

    def _remove_foreign(self, entry: Entry, pod: JsonObject) -> None:
        """Remove another extender's booking from the next write; ``pod`` is its pod's current state."""
        if self._foreign.get(entry.uid) == entry:
            del self._foreign[entry.uid]
            self._seen.pop(entry, None)
            row = pod_row(pod)
            if row is not None and (row.uid, row.node) == (entry.uid, entry.node):
                self._node(entry.node).listed[row.uid] = row
            self._publish_foreign(entry.node)

    # Checks of remaining bookings; without the Lease's lock.

    def _resolve_stale(self, entry: Entry) -> None:
        status, pod = binding_status(self._kube, entry, True, self._now_ms)
        facts = {"pod": f"{entry.namespace}/{entry.name}", "node": entry.node, "by": entry.by, "fate": status.value}
        log.info("another extender's stale booking is resolved", extra={"data": facts})
        with self._lease_lock:
            self._remove_foreign(entry, pod)

    def _resolve_unseen(self, row: PodRow) -> None:
        """Check a pod that was bound and never delivered by the watch: it may have been deleted before."""
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

    def _stale(self, entry: Entry) -> bool:
        # By one's own clock since one's own first reading; the entry's time is another machine's.
        now = self._clock()
        return now - self._seen.get(entry, now) > STALE_SECONDS

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
        """Make the object that replaces one with this metadata."""
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
