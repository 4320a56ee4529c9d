# SPDX-License-Identifier: GPL-3.0-or-later
"""The ledger: bookings that may not be bound yet, so that any number of extenders can run at once.

It is one Lease in the extenders' namespace. Its annotation lists the bookings in progress (see ``register``), its
resourceVersion makes it a register with compare-and-swap. No pod is bound to a card before its booking is in the
ledger. These rules keep two extenders from booking the same memory:

* A writer has read the version that it replaces (or has written that itself), and its state has every bound pod whose
  booking isn't in that version any more. The Lease says how far the watch of pods must be for that, so nothing is
  listed for a bind, however many nodes there are and whoever booked on them.
* A booking is removed only by an extender whose watch has delivered its pod as bound, or that knows that the Binding
  can't take effect. The removing write carries the highest version that this extender's watch has delivered, unless the
  Lease has a higher one; any other extender's watch is as far within a moment.
* Where no such version is known, or the watch doesn't reach it (etcd was restored to an older state), all pods are
  listed after the Lease was read.
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
  that existed is gone, or none exists although somebody booked within the last minute (with a Lease that is gone, or an
  extender without a ledger), nothing is booked for some seconds. This is no proof: the Lease must not be deleted while
  pods are being bound.
* More bookings are in progress than an object's annotations hold: those that don't fit fail, and kube-scheduler tries
  again.
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
from typing import Any, Protocol

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.extender.binding_status import BindingStatus, Entry, binding_status, now_ms
from gpushare.extender.register import LedgerError, Register
from gpushare.extender.state import PodRow, Shares, State
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
# Within this time the watch has delivered what another extender's watch has; otherwise everything is listed.
BEHIND_SECONDS, LIST_SECONDS = 8.0, 4.0
# Bytes of all annotations of the Lease. The API server allows 256 KiB of names and values, for any object.
MAX_BYTES = 250 << 10
PROBE = "gpushare-ledger-probe"
log = logging.getLogger("gpushare.extender")


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


class WatchedPods(Protocol):
    """The watch that keeps the state's pods; see ``Mirror``."""

    @property
    def delivered(self) -> int: ...

    def wait_for(self, version: int, seconds: float) -> bool: ...

    def relist(self) -> int: ...

    def wait_listed(self, number: int, seconds: float) -> bool: ...


class Ledger:
    """The Lease, as read and written by this extender."""

    def __init__(
        self,
        kube: Kube,
        state: State,
        pods: WatchedPods,
        namespace: str,
        identity: str = "",
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = now_ms,
        count: Callable[[str], None] = lambda _result: None,
    ) -> None:
        """
        :param kube: the client of the API.
        :param state: counts the bookings; receives those of other extenders.
        :param pods: the watch that changes the state's pods.
        :param namespace: where the Lease is.
        :param identity: of this process; unique by default.
        :param clock: monotonic, in seconds.
        :param now_ms: the time in milliseconds since 1970.
        :param count: called for each write: ``written``, ``conflict`` (another extender wrote before) or ``failed``.
        """
        self._kube, self._state, self._pods, self._namespace = kube, state, pods, namespace
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
        # Whether the state has all bound pods whose bookings aren't in this version, and the list that will show it.
        self._complete, self._list = False, 0
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
            end = time.monotonic() + REST_SECONDS
            while any(self._state.held(entry.uid) for entry in list(self._finished)) and time.monotonic() < end:
                time.sleep(0.01)
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
                self._drop_delivered()
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
            for booking in batch:
                booking.done = True
            for booking in (*batch, *next_writer):
                booking.wake.set()

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
        """Close a booking whose pod is bound, perhaps by another extender, which has a booking of its own."""
        if contract.pod_node(pod) == entry.node:
            self.written(entry)
        else:
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
            if self._clock() - self._next_write > REST_SECONDS:
                self._remove_finished()
        finally:
            self._lease_lock.release()
        for entry in stale:
            self._try(self._resolve_stale, entry)

    # Reading and writing; under the Lease's lock.

    def _remove_finished(self) -> None:
        """Write the ledger without finished bookings; otherwise other extenders would check them."""
        self._drop_delivered()
        written = [entry for entry in self._register.entries if entry.by == self.identity]
        if not self._lease or all(self._own.get(entry.uid) == entry for entry in written):
            return
        try:
            self._put()
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
            for request in batch:
                request.error = str(error) if isinstance(error, LedgerError) else "internal error; see the log"

    def _write(self, batch: Sequence[BookingRequest]) -> None:
        """Write the bookings of a batch into the Lease, and read it again after a conflict.

        :raises LedgerError: nothing can be written.
        """
        end, pause = self._clock() + WRITE_SECONDS, FIRST_PAUSE
        while True:
            try:
                if self._lease is None:
                    self._read()
                self._drop_delivered()
                self._wait_for_pods()
                self._wait_for_others()
                for request in batch:
                    self._place(request)
                self._fit(batch)
                if any(request.entry is not None for request in batch):
                    self._put()
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

    def _drop_delivered(self) -> None:
        """Remove the bookings whose pods the watch has delivered as bound, or that never take effect."""
        for _entry in range(len(self._finished)):
            entry = self._finished.popleft()
            if self._own.get(entry.uid) != entry:
                continue
            if self._state.held(entry.uid):
                self._finished.append(entry)
            else:
                del self._own[entry.uid]
        for uid in [uid for uid in self._foreign if self._state.bound(uid) is not None]:
            self._seen.pop(self._foreign.pop(uid), None)

    def _undo(self, batch: Sequence[BookingRequest]) -> None:
        """Undo what was placed for a write that failed, or may have."""
        self._lease = None
        for request in batch:
            if request.entry is not None and self._own.get(request.uid) == request.entry:
                del self._own[request.uid]
            request.reset()

    def _read(self) -> None:
        """Read the Lease, and pass other extenders' bookings to the state."""
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
        now, known = self._clock(), self._uid
        uid = str(metadata.get("uid", ""))
        if uid != self._uid or register.count != self._register.count:
            self._complete, self._list, self._uid, self._register = False, 0, uid, register
        before = set(self._foreign.values())
        entries = {
            entry.uid: entry
            for entry in register.entries
            if entry.by != self.identity and self._state.bound(entry.uid) is None
        }
        self._foreign, self._lease = entries, lease
        self._seen = {entry: self._seen.get(entry, now) for entry in entries.values()}
        # Another extender's booking of the same pod replaces one of this extender.
        for uid in [uid for uid in self._own if uid in entries]:
            del self._own[uid]
            self._state.release(uid)
        if lease:
            self._paused_until = None
        elif known:
            self._paused_until = now + STALE_SECONDS
        self._publish_foreign({entry.node for entry in (*before, *entries.values())})

    def _wait_for_pods(self) -> None:
        """Wait until the state has every bound pod whose booking isn't in the Lease that was read.

        :raises LedgerError: it doesn't in time.
        """
        if self._complete:
            return
        pods = self._register.pods
        if not self._list:
            if pods is not None and self._pods.wait_for(pods, BEHIND_SECONDS):
                self._complete = True
                return
            self._list = self._pods.relist()
        if not self._pods.wait_listed(self._list, LIST_SECONDS):
            raise LedgerError(
                f"{self._lease_name} was changed by others, and all pods must be listed before the next booking, which"
                f" takes more than {LIST_SECONDS:.0f} s"
            )
        # A list has all of them whatever its version: a higher one was known in a history that is gone.
        self._complete, self._register = True, dataclasses.replace(self._register, pods=None)
        since = self._now_ms() / 1000 - FRESH_SECONDS
        if self._lease == {} and self._paused_until is None and self._state.last_assumed() > since:
            self._paused_until = self._clock() + STALE_SECONDS

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
            self._remove_foreign(other, status)
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

    def _fit(self, batch: Sequence[BookingRequest]) -> None:
        """Fail the last bookings that the full Lease can't hold."""
        kept = sum(len((key + value).encode()) for key, value in self._annotations().items())
        free = MAX_BYTES - kept - len(contract.LEDGER) - len(self._next().to_text().encode())
        for request in reversed(batch):
            if free >= 0:
                return
            entry = request.entry
            if entry is not None:
                free += len(entry.to_text().encode())
                del self._own[request.uid]
                request.reset()
                request.code = Reason.LEDGER_FULL
                request.error = (
                    f"{self._lease_name} is full and can't hold another one: "
                    f"{len(self._own) + len(self._foreign)} binds are in progress"
                )

    def _next(self) -> Register:
        pods = max(self._register.pods or 0, self._pods.delivered)
        return Register(self._register.count + 1, pods, (*self._foreign.values(), *self._own.values()))

    def _annotations(self) -> dict[str, str]:
        """Return the Lease's annotations of others."""
        annotations = ((self._lease or {}).get("metadata") or {}).get("annotations") or {}
        return {key: value for key, value in annotations.items() if key != contract.LEDGER}

    def _put(self) -> None:
        metadata = (self._lease or {}).get("metadata") or {}
        register = self._next()
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

    def _publish_foreign(self, nodes: Iterable[str]) -> None:
        """Pass other extenders' bookings on some nodes to the state."""
        booked: dict[str, list[PodRow]] = {name: [] for name in nodes}
        for entry in self._foreign.values():
            if entry.node in booked:
                units = sum(units for _index, units in entry.cards)
                booked[entry.node].append(
                    PodRow(entry.uid, entry.namespace, entry.name, entry.node, units, entry.cards)
                )
        for name, rows in booked.items():
            self._state.set_foreign(name, rows)

    def _remove_foreign(self, entry: Entry, status: BindingStatus) -> None:
        """Remove another extender's booking from the next write. The watch removes it if its pod is bound."""
        if status is not BindingStatus.BOUND and self._foreign.get(entry.uid) == entry:
            del self._foreign[entry.uid]
            self._seen.pop(entry, None)
            self._publish_foreign([entry.node])

    # Checks of remaining bookings; without the Lease's lock.

    def _resolve_stale(self, entry: Entry) -> None:
        status, _pod = binding_status(self._kube, entry, True, self._now_ms)
        facts = {"pod": f"{entry.namespace}/{entry.name}", "node": entry.node, "by": entry.by, "status": status.value}
        log.info("another extender's stale booking is resolved", extra={"data": facts})
        with self._lease_lock:
            self._remove_foreign(entry, status)

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
        return paths.under(f"/apis/{API_VERSION}", "namespaces", self._namespace, "leases", *([name] if name else []))

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
        annotations = {**self._annotations(), contract.LEDGER: register.to_text()}
        return {
            "apiVersion": API_VERSION,
            "kind": "Lease",
            "metadata": {**kept, "name": name, "namespace": self._namespace, "annotations": annotations},
            "spec": {"holderIdentity": self.identity, "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")},
        }
