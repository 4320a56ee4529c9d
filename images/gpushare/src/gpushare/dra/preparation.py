# SPDX-License-Identifier: GPL-3.0-or-later
"""Prepare claims for kubelet, and undo that: record on disk, CDI specification, limit of the pods' cgroups.

A claim's record is written first and removed last, and its specification follows it: whenever the process ends, the
next one (:meth:`Preparation.restore`) has each specification of a record, and none besides. A repeated request finds
the record. One claim's failure is the answer to that claim only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
import typing as t

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.dra import claims, specifications
from gpushare.dra.claims import Claim, ClaimRefused, Code, Pod, Unbooked
from gpushare.dra.records import Record, Records
from gpushare.dra.specifications import Specifications
from gpushare.kubelet.dra import ClaimRef, Device, PodClaims
from gpushare.kubelet.errors import RequestRefused
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.dra")

# kubelet never prepares and unprepares one claim at a time, but a call that it has given up may still run.
_LOCKS = 64
# A claim that kubelet doesn't list for so many seconds may be forgotten: a pod is listed from its admission to its end.
FORGOTTEN_SECONDS = 60.0
# A prepared claim is read again so often, and one that lacks the memory of a card at once.
BOOKING_SECONDS = 10.0
# kubelet repeats a refused call after more than a minute, while these reasons mostly end within seconds.
PASSING_SECONDS = 10.0
# Calls that wait at a time, so that threads are left for the calls that unprepare claims.
WAITING_CALLS = 8
# What may be over within seconds: a pod has ended, the cards are read after a reboot, the API server has restarted.
PASSING = frozenset((Code.CARD_FULL, Code.NOT_READY, Code.API_ERROR))


class Preparation:
    """The prepared claims of this node. Thread-safe.

    :ivar cards: returns this node's cards; raises :class:`ClaimRefused` while they aren't known.
    :ivar injected: returns the names of the cards (UUIDs) in NVIDIA's CDI specification; empty where the variable names
        them. It raises :class:`RequestRefused` if neither is possible.
    :ivar limits: returns the variables of a hard limit, by MiB by card (UUID).
    :ivar hold: called with each claim that is prepared, before kubelet may start its containers; it raises
        :class:`ClaimRefused` if these mustn't start.
    :ivar on_refused: called with the code of each claim that isn't prepared.
    :ivar on_changed: called after a claim was prepared or unprepared.
    """

    def __init__(
        self,
        node: str,
        unit: str,
        kube: Kube,
        records: Records,
        specs: Specifications,
        clock: t.Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param node: this node's name.
        :param unit: of the cluster's shares, GiB or MiB.
        :param kube: reads claims.
        :param records: of this node's claims.
        :param specs: of the same claims.
        :param clock: monotonic, in seconds.
        """
        self._node, self._unit, self._kube = node, unit, kube
        self._records, self._specs, self._clock = records, specs, clock
        self._lock = threading.Lock()
        self._unprepared = threading.Condition(self._lock)
        self._waiting = 0
        self._by_claim = tuple(threading.Lock() for _number in range(_LOCKS))
        # None until they are restored.
        self._prepared: dict[str, Record] | None = None
        self._problem: str | None = None
        self._unlisted: dict[str, float] = {}
        # The UIDs that kubelet listed last time, of claims without a record.
        self._unrecorded = frozenset[str]()
        # The listed pods for which claims were read again, with the pods that were known then.
        self._reread_for: dict[str, tuple[frozenset[str], tuple[Pod, ...]]] = {}
        # When each prepared claim was read last from the API; those to be read first, and whether one was just now.
        self._booked_at: dict[str, float] = {}
        self._urgent: dict[str, None] = {}
        self._was_urgent = False
        self.cards: t.Callable[[], t.Sequence[contract.Card]] = lambda: ()
        self.injected: t.Callable[[t.Sequence[str]], t.Mapping[str, str]] = lambda uuids: {}
        self.limits: t.Callable[[t.Mapping[str, int]], t.Mapping[str, str]] = lambda mib: {}
        self.hold: t.Callable[[Claim], None] = lambda claim: None
        self.on_refused: t.Callable[[str], None] = lambda code: None
        self.on_changed: t.Callable[[], None] = lambda: None

    # ----------------------------------------------------------------------- state

    def restore(self) -> None:
        """Read the records of the process before, and bring the specifications in line with them.

        A specification that can't be written concerns its own claim: the others must be unprepared all the same.

        :raises OSError: the records can't be read.
        """
        records = self._records.load()
        self._specify(records)
        try:
            for uid in self._specs.sweep(records):
                log.info("the CDI specification of claim %s is removed, since nobody has prepared it", uid)
        except OSError as error:
            log.error("the CDI specifications of claims that nobody has prepared can't be removed: %s", error)
        with self._lock:
            self._prepared = records
        log.info("%d prepared claims", len(records))

    @property
    def problem(self) -> str | None:
        """Why containers of a prepared claim can't be started (again); None if they can."""
        with self._lock:
            return self._problem

    @property
    def removed(self) -> str:
        """Why no specification can be written by this process; empty if it can."""
        return self._specs.removed

    def _specify(self, records: t.Mapping[str, Record]) -> None:
        """Write the specifications of records."""
        self._problem = None
        for uid, record in records.items():
            try:
                self._specs.put(uid, record.specification)
            except OSError as error:
                text = f"the CDI specification of claim {record.claim.key} can't be written: {error}"
                if self._problem is None:
                    log.error("%s; containers of its pods can't be started", text)
                self._problem = self._problem or text

    @property
    def restored(self) -> bool:
        with self._lock:
            return self._prepared is not None

    def prepared(self) -> list[Claim]:
        """Return the prepared claims."""
        with self._lock:
            return [record.claim for record in (self._prepared or {}).values()]

    # ----------------------------------------------------------------------- kubelet's calls

    def prepare(
        self, refs: t.Sequence[ClaimRef], is_wanted: t.Callable[[], bool] | None = None
    ) -> dict[str, tuple[Device, ...] | str]:
        """Prepare claims; a call of kubelet's waits up to ``PASSING_SECONDS`` for what passes by itself (``PASSING``).

        :param is_wanted: whether kubelet still waits for the answer; None if this is no call of kubelet's.
        :returns: the devices, or the error, by UID.
        """
        until = time.monotonic() + PASSING_SECONDS if is_wanted else 0.0
        work = functools.partial(self._prepare_until, is_wanted=is_wanted or (lambda: True), until=until)
        return {ref.uid: self._answer(ref, functools.partial(work, ref)) for ref in refs}

    def unprepare(self, refs: t.Sequence[ClaimRef]) -> dict[str, str]:
        """Undo the preparation of claims; one that isn't prepared is no error.

        :returns: the error, empty for none, by UID.
        """
        answers = {ref.uid: self._answer(ref, functools.partial(self._unprepare, ref.uid)) for ref in refs}
        return {uid: answer if isinstance(answer, str) else "" for uid, answer in answers.items()}

    def _answer(self, ref: ClaimRef, work: t.Callable[[], tuple[Device, ...]]) -> tuple[Device, ...] | str:
        fields = {"claim": f"{ref.namespace}/{ref.name}", "uid": ref.uid}
        try:
            if not claims.valid_uid(ref.uid):
                raise ClaimRefused(Code.INVALID_REQUEST, f"kubelet names claim {ref.name} with the UID {ref.uid!r}")
            return work()
        except ClaimRefused as error:
            log.error("%s", error, extra={"data": {**fields, "code": str(error.code), **error.fields}})
            self.on_refused(str(error.code))
            return str(error)
        except Exception as error:
            # A failure that isn't foreseen must not fail the other claims.
            log.exception("claim %s/%s (%s)", ref.namespace, ref.name, ref.uid)
            self.on_refused(str(Code.NOT_READY))
            return f"{Code.NOT_READY}: {error!r}; the driver's log has more"

    def _prepare_until(self, ref: ClaimRef, is_wanted: t.Callable[[], bool], until: float) -> tuple[Device, ...]:
        rechecked = False
        while True:
            try:
                return self._prepare(ref, is_wanted)
            except ClaimRefused as refused:
                if not rechecked and refused.holders:
                    # The API has given their memory away, so it may not have them any more.
                    rechecked = True
                    self._recheck(refused.holders)
                if refused.code not in PASSING or not self._await_unprepared(until):
                    raise

    def _await_unprepared(self, until: float) -> bool:
        """Wait until a claim is unprepared, or a second; return False if there is no time or no thread for it."""
        with self._unprepared:
            left = until - time.monotonic()
            if left <= 0 or self._waiting >= WAITING_CALLS:
                return False
            self._waiting += 1
            # The claim or kubelet's call may end meanwhile.
            self._unprepared.wait(min(left, 1.0))
            self._waiting -= 1
            return True

    def _prepare(self, ref: ClaimRef, is_wanted: t.Callable[[], bool]) -> tuple[Device, ...]:
        def check_call() -> None:
            if not is_wanted():
                text = f"kubelet has given up its call to prepare claim {ref.namespace}/{ref.name}; nothing is prepared"
                raise ClaimRefused(Code.CALL_ENDED, text)

        with self._claim_lock(ref.uid):
            # With a slow API the claims before it in the call may have taken all of kubelet's time.
            check_call()
            claim = claims.parse(self._read(ref), ref.uid, self._node)
            with self._lock:
                check_call()
                known, record = self._record(claim)
                if record != known:
                    with _written(f"the record of claim {claim.key}"):
                        self._records.put(record)
                    self._known()[claim.uid] = record
                self._booked_at[claim.uid] = self._clock()
                with _written(f"the CDI specification of claim {claim.key}"):
                    self._specs.put(claim.uid, record.specification)
            self.hold(claim)
            if known is None or known.claim.shares != claim.shares:
                cards = {claims.device_name(card.uuid): card.index for card in self.cards()}
                mib = ",".join(f"{cards.get(device, device)}:{mib}" for device, mib in claim.mib().items())
                log.info("claim prepared", extra={"data": {"claim": claim.key, "uid": claim.uid, "mib": mib}})
            self.on_changed()
            return record.devices

    def _record(self, claim: Claim) -> tuple[Record | None, Record]:
        """Return a claim's record before and now; the lock is held.

        :raises ClaimRefused: its cards are gone, there is no room, or they can't be injected.
        """
        known, cards = self._known().get(claim.uid), self.cards()
        claims.check_there(claim, cards)
        if known is not None and known.claim.shares == claim.shares:
            # kubelet keeps the devices of the first answer, so the answer stays; only the pods may be others.
            return known, Record(claim, known.devices, known.specification)
        others = [record.claim for uid, record in self._known().items() if uid != claim.uid]
        lost = {uid: record.unbooked for uid, record in self._known().items() if record.unbooked}
        claims.check_room(claim, cards, others, lost)
        mib = claim.mib()
        uuids = {card.uuid: mib[device] for card in cards if (device := claims.device_name(card.uuid)) in mib}
        try:
            injected = self.injected(list(uuids))
        except RequestRefused as error:
            raise ClaimRefused(error.refusal.code, f"claim {claim.key}: {error.refusal.text}") from error
        if not injected:
            specifications.check_variable(claim, others)
        return known, specifications.record(claim, cards, self._node, self._unit, injected, self.limits)

    def _read(self, ref: ClaimRef) -> JsonObject:
        live = self._find(ref)
        if live is None:
            raise ClaimRefused(Code.CLAIM_NOT_FOUND, f"claim {ref.namespace}/{ref.name} doesn't exist any more")
        return live

    def _find(self, ref: ClaimRef, query: str = "") -> JsonObject | None:
        """Return the claim of a name; None if the API server says that there is none.

        :raises ClaimRefused: it gives no answer to that.
        """
        try:
            path = paths.under("/apis/resource.k8s.io/v1", "namespaces", ref.namespace, "resourceclaims", ref.name)
            return self._kube.get(f"{path}{query}")
        except KubeError as error:
            # A proxy's 404, or that of a version which the API server doesn't serve, names no claim.
            if error.status == 404 and error.name == ref.name:
                return None
            what = f"claim {ref.namespace}/{ref.name}"
            raise ClaimRefused(Code.API_ERROR, f"{what} can't be read from the API: {error}") from error

    def _unprepare(self, uid: str) -> tuple[Device, ...]:
        with self._claim_lock(uid), self._lock:
            known = self._known().get(uid)
            with _written(f"the removal of claim {known.claim.key if known else uid}"):
                self._specs.remove(uid)
                self._records.remove(uid)
            self._known().pop(uid, None)
            self._unlisted.pop(uid, None)
            self._reread_for.pop(uid, None)
            self._booked_at.pop(uid, None)
            self._urgent.pop(uid, None)
            self._unprepared.notify_all()
        if known is not None:
            log.info("claim unprepared", extra={"data": {"claim": known.claim.key, "uid": uid}})
            self.on_changed()
        return ()

    # ----------------------------------------------------------------------- the API's state

    def unbooked(self) -> list[tuple[Claim, Unbooked]]:
        """Return the prepared claims that hold memory which they don't have in the API, as far as that is known."""
        with self._lock:
            return [(record.claim, record.unbooked) for record in (self._prepared or {}).values() if record.unbooked]

    def check_booking(self) -> None:
        """Read one prepared claim from the API, if one is due: the one that was read longest ago.

        Who may write a claim can delete it while its pod runs, and a pod that is deleted by force frees its claim
        before kubelet has ended it; kube-scheduler gives that memory to others then. Only the API server's answer
        counts: while it can't be asked, what was known stays.
        """
        now = self._clock()
        with self._lock:
            known = self._prepared or {}
            due = min(known, key=self._read_before, default="")
            if due and now - self._read_before(due) < BOOKING_SECONDS:
                due = ""
            # By turns, so that neither keeps the other from being read, however many there are.
            uid = next(iter(self._urgent), "") if not (self._was_urgent and due) else ""
            self._was_urgent = bool(uid)
            uid = uid or due
            if not uid:
                return
            self._urgent.pop(uid, None)
            self._booked_at[uid] = now
            claim = known[uid].claim
        with contextlib.suppress(ClaimRefused):
            # Mostly the API server's cache is enough; where that is behind, the claim may seem to be gone.
            for query in ("?resourceVersion=0", ""):
                lost = claims.unbooked(claim, self._find(_ref(claim), query), self._node)
                if lost is None:
                    break
            self._note(claim, lost)

    def _recheck(self, uids: frozenset[str]) -> None:
        """Have claims read again now, however many others are due."""
        with self._lock:
            self._urgent |= dict.fromkeys(sorted(self._known().keys() & uids, key=self._read_before))

    def _read_before(self, uid: str) -> float:
        return self._booked_at.get(uid, -math.inf)

    def _note(self, claim: Claim, lost: Unbooked | None) -> None:
        """Keep what a claim lacks in the API, for the next process, too."""
        with self._lock:
            record = self._known().get(claim.uid)
            if record is None or record.claim.shares != claim.shares or record.unbooked == lost:
                return
            record = self._known()[claim.uid] = dataclasses.replace(record, unbooked=lost)
            try:
                self._records.put(record)
            except OSError as error:
                log.error("the record of claim %s can't be written: %s", claim.key, error)
        data = {"claim": claim.key, "uid": claim.uid, "pods": [pod.name for pod in claim.pods]}
        if lost is None:
            log.info("claim %s has its memory in the API again", claim.key, extra={"data": data})
        else:
            log.warning(
                "claim %s is prepared, and doesn't have its memory in the API (any more), which gives it to others: "
                "its cards are tainted until kubelet has ended its pods",
                claim.key,
                extra={"data": {**data, "code": lost.code, "mib": dict(lost.mib)}},
            )
        self.on_changed()

    # ----------------------------------------------------------------------- kubelet's state

    def observe(
        self,
        listing: t.Sequence[PodClaims],
        is_alive: t.Callable[[Pod], bool],
        has_processes: t.Callable[[Pod], bool] | None = None,
    ) -> list[str]:
        """Compare the prepared claims with what kubelet lists, and undo those that it has forgotten.

        kubelet unprepares each claim that its own checkpoint has. It forgets one only if that was lost, for example
        when the node was set up again. A claim counts as forgotten if it isn't listed for ``FORGOTTEN_SECONDS``, none
        of its pods is there, and the API has it no more, or not on this node.

        kubelet lists a claim that has left the API as long as the API has its pod, also when it can't start that any
        more, after a reboot. It is undone when its pods had no process for ``FORGOTTEN_SECONDS``.

        A claim that is listed with a pod which we don't know is read again, and so is one of several pods of which one
        has ended, since each has a part of it. One that isn't prepared in two calls, since its record was damaged or of
        another version, is prepared once more: kubelet asks for it only when it starts itself, and until then its
        containers couldn't be started again.

        A specification that somebody has removed is written again, since kubelet doesn't ask for it.

        :param is_alive: whether a pod has a cgroup.
        :param has_processes: whether it has processes; as ``is_alive`` by default.
        :returns: the UIDs of the claims that were undone.
        """
        now = self._clock()
        with self._lock:
            known = self._known()
            missing = self._specs.missing(known)
            self._specify({uid: known[uid] for uid in missing})
            if missing and self._problem is None:
                log.warning("%d CDI specifications of prepared claims had gone, and are written again", len(missing))
        listed: dict[str, set[str]] = {}
        for pod in listing:
            for uid in {specifications.claim_of(name) for name in pod.cdi} - {""}:
                listed.setdefault(uid, set()).add(pod.name)
        prepared, undone = self.prepared(), []
        self._restore_listed(listing, {claim.uid for claim in prepared})
        lost = {claim.uid for claim, _lost in self.unbooked()}
        for claim in prepared:
            is_running = is_alive if claim.uid not in lost else has_processes or is_alive
            if claim.uid in listed and (claim.uid not in lost or any(is_running(pod) for pod in claim.pods)):
                self._unlisted.pop(claim.uid, None)
                alive = {pod.name for pod in claim.pods if is_alive(pod)}
                strangers = frozenset(listed[claim.uid] - alive)
                is_new = bool(strangers) and self._reread_for.get(claim.uid) != (strangers, claim.pods)
                if is_new:
                    self._reread_for[claim.uid] = strangers, claim.pods
                # The API may have the pod for a moment longer than its cgroup is there.
                has_ended = len(claim.pods) > 1 and any(pod.name not in alive | strangers for pod in claim.pods)
                if is_new or has_ended:
                    self._reread(claim)
                continue
            if now - self._unlisted.setdefault(claim.uid, now) < FORGOTTEN_SECONDS:
                continue
            if not any(is_running(pod) for pod in claim.pods) and self._is_gone(claim):
                log.warning(
                    "claim %s (%s) has no pod any more: what was prepared for it is removed", claim.key, claim.uid
                )
                with contextlib.suppress(ClaimRefused):
                    self._unprepare(claim.uid)
                    undone.append(claim.uid)
        return undone

    def _restore_listed(self, listing: t.Sequence[PodClaims], prepared: t.Container[str]) -> None:
        """Prepare the claims that kubelet has given to pods, and of which there is no record."""
        named = {
            uid: ClaimRef(pod.namespace, uid, claim)
            for pod in listing
            for name, claim in pod.claims
            if (uid := specifications.claim_of(name)) and uid not in prepared
        }
        # kubelet may just be ending a pod that it lists.
        lost = [ref for uid, ref in named.items() if uid in self._unrecorded]
        self._unrecorded = frozenset(named)
        for uid, answer in self.prepare(lost).items():
            if not isinstance(answer, str):
                log.warning("claim %s had no record, and kubelet lists it: it is prepared once more", uid)

    def _reread(self, claim: Claim) -> None:
        """Update the pods of a claim."""
        with contextlib.suppress(ClaimRefused), self._claim_lock(claim.uid):
            now = claims.parse(self._read(_ref(claim)), claim.uid, self._node)
            with self._lock:
                known = self._known().get(claim.uid)
                if known is None or now.shares != known.claim.shares or now.pods == known.claim.pods:
                    return
                record = Record(now, known.devices, known.specification)
                with _written(f"the record of claim {claim.key}"):
                    self._records.put(record)
                self._known()[claim.uid] = record
            self.hold(now)
            self.on_changed()

    def _is_gone(self, claim: Claim) -> bool:
        try:
            return claims.unbooked(claim, self._find(_ref(claim)), self._node) is not None
        except ClaimRefused:
            # Nobody knows.
            return False

    def _known(self) -> dict[str, Record]:
        if self._prepared is None:
            text = "the driver has just started and hasn't read its records yet; kubelet tries again"
            raise ClaimRefused(Code.NOT_READY, text)
        return self._prepared

    def _claim_lock(self, uid: str) -> threading.Lock:
        return self._by_claim[hash(uid) % _LOCKS]


def _ref(claim: Claim) -> ClaimRef:
    return ClaimRef(claim.namespace, claim.uid, claim.name)


@contextlib.contextmanager
def _written(what: str) -> t.Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClaimRefused(Code.STATE_NOT_WRITTEN, f"{what} can't be written: {error}; see the node's disk") from error
