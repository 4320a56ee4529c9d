# SPDX-License-Identifier: GPL-3.0-or-later
"""Evict pods for pods of a higher priority, and reserve the freed memory.

kube-scheduler evicts by a node's total. There are two ways from there to a card:

* It finds victims and calls ``preemptVerb`` before it evicts them. :meth:`Preemption.answer` returns the victims by
  card instead, for those nodes where that helps.
* If the total is enough while no single card has the memory, it finds no victims and never calls. So when no
  node passes a filter, :meth:`Preemption.refused` records it, and a moment later, if kube-scheduler hasn't evicted
  pods for it, its victims are evicted here: through the Eviction API, so that disruption budgets are respected.

Either way the memory is *claimed* for the pod: it counts as used for pods of its priority or a lower one until the pod
is bound, is deleted, or isn't bound in time. Other extenders receive the claim (see ``claims``). No pod is evicted
while the memory of terminating pods would be enough.

Never victims: pods of the same or a higher priority, static pods, and pods of bookings in progress. The latter are
waited for briefly, if evicting them afterwards costs less than evicting bound pods now.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.api.events import Events
from gpushare.api.evictions import evict, refused_by_budget
from gpushare.extender.claims import Claims
from gpushare.extender.filter import RefusedPod, evaluate
from gpushare.extender.state import LOWEST_PRIORITY, Claim, NodeView, PodRow, State
from gpushare.extender.victims import Cost, Plan, cost, needed, plan
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Demand
from gpushare.shared._core.types import JsonObject

# kube-scheduler's own preemption comes within this time after a filter that no node passed.
DELAY_SECONDS = 1.0
# A pod for which no pod could be evicted is retried after this time, and then at growing intervals. The last retry is
# before that of kube-scheduler, which doesn't watch budgets and bookings.
RETRY_SECONDS, ATTEMPTS = 15.0, 5
# The pause, and the number of pauses, for bookings in progress that may be better victims.
POSTPONE_SECONDS, POSTPONEMENTS = 0.3, 10
# Offers to the scheduler that it doesn't use end after this time.
OFFER_SECONDS = 30.0
# How long memory stays claimed for a pod after its last victim is gone; and in any case.
CLAIM_SECONDS = 60.0
LONGEST_SECONDS = 3600.0
SWEEP_SECONDS = 5.0
# kube-scheduler chooses one node of the answer, and waits for it.
MAX_NODES, ANSWER_SECONDS = 8, 1.0
# Nodes whose victims are found exactly, and pods whose disruption budgets are queried, for one pod.
CANDIDATES, MAX_BUDGET_CHECKS = 16, 50
MAX_WAITING = 500
# In a large cluster kube-scheduler may filter only so many nodes, and others with the next filter of the same pod.
# After so many filters the others aren't waited for.
SAMPLE, SAMPLES = 100, 5

EVENT_PREEMPTING = "GPUMemoryPreempting"
EVENT_PREEMPTED = "Preempted"

log = logging.getLogger("gpushare.extender")


class Victims(NamedTuple):
    """UIDs of a node's pods that are to be evicted, and how many disruption budgets that violates."""

    uids: tuple[str, ...]
    violations: int


@dataclasses.dataclass(frozen=True)
class _Waiting(RefusedPod):
    """A refused pod that is evaluated again when it is due."""

    due: float = 0.0
    attempts: int = 0


class Preemption:
    """Chooses victims, evicts where kube-scheduler wouldn't, and reserves the freed memory for the preemptor."""

    def __init__(
        self,
        kube: Kube,
        state: State,
        events: Events,
        count: Callable[[str], None] = lambda _result: None,
        enabled: bool = True,
        delay: float = DELAY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
    ) -> None:
        """
        :param count: called for each eviction: ``evicted``, ``refused`` (by a disruption budget) or ``failed``.
        :param enabled: otherwise kube-scheduler's victims are returned unchanged, and no pod is evicted here.
        :param delay: seconds that kube-scheduler has for its own preemption.
        :param clock: monotonic, in seconds.
        :param claims: publishes claims to other extenders; without it, they stay in this process.
        """
        self._kube, self._state, self._events, self._count = kube, state, events, count
        self._enabled, self._delay, self._clock, self._claims = enabled, delay, clock, claims
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._pauses: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._postponements: dict[str, int] = {}
        self._offered: dict[str, float] = {}
        self._claimed: dict[str, float] = {}
        self._freed: dict[str, float] = {}
        self._swept = clock()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        state.on_claim = self._wake.set

    def start(self) -> None:
        if self._enabled:
            self._thread = threading.Thread(target=self._run, name="preemption", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5)

    # kube-scheduler's requests.

    def answer(self, pod: JsonObject, demand: Demand, offered: Mapping[str, Victims]) -> dict[str, Victims]:
        """Choose victims by card, for a few nodes where evicting them helps at the lowest cost.

        :param offered: kube-scheduler's own victims, by node.
        :returns: the victims by node.
        """
        if not self._enabled or not demand.units:
            return dict(offered)
        uid, priority = contract.pod_uid(pod), contract.pod_priority(pod)
        if self._state.bound(uid) or self._victims_terminating(uid):
            return {}
        view, coming = self._state.viewer(uid, priority), self._state.nodes_with_bookings()
        ranked: list[tuple[Cost, str]] = []
        costs_once_bound: list[Cost] = []
        for name, victims in offered.items():
            node, rows = view(name), self._state.evictable(name)
            if node is None:
                continue
            stay = needed(node, [row for row in rows if row.uid in victims.uids], demand)
            gone = {row.uid for row in stay}
            if name in coming and (then := self._once_bound(node, uid, demand, priority, gone)) is not None:
                costs_once_bound.append(cost([*then.evict, *stay]))
            node_plan = plan(node, rows, demand, priority, gone=gone, exact=False)
            if node_plan is None:
                continue
            if not node_plan.evict and not stay and set(victims.uids) <= {row.uid for row in rows}:
                # Terminating pods free enough memory: no pod has to be evicted, here or elsewhere.
                self._state.claim(_claim(pod, name, node_plan, priority, ()))
                return {}
            ranked.append((cost([*node_plan.evict, *stay]), name))
        cheaper = costs_once_bound and all(min(costs_once_bound) < price for price, _name in ranked)
        if cheaper and self._postpone(uid):
            with self._lock:
                self._pauses.pop(uid, None)
            self.refused(RefusedPod.of(pod, demand, list(offered), list(offered)))
            return {}
        answers: dict[str, Victims] = {}
        claims = []
        budgets = _BudgetChecks(self._kube, self._clock, self._clock() + ANSWER_SECONDS)
        for _price, name in sorted(ranked):
            # Read again, because querying budgets takes time.
            node, rows = self._state.viewer(uid, priority)(name), self._state.evictable(name)
            if node is None:
                continue
            stay = needed(node, [row for row in rows if row.uid in offered[name].uids], demand)
            gone = {row.uid for row in stay}
            while True:
                node_plan = plan(node, rows, demand, priority, gone=gone, violating=budgets.violating)
                if node_plan is None or not budgets.found_violation(node_plan.evict):
                    break
            if node_plan is None:
                continue
            victims = _merged(offered[name], rows, gone, node_plan, budgets.violating)
            if victims.uids:
                answers[name] = victims
                claims.append(_claim(pod, name, node_plan, priority, victims.uids))
            if len(answers) == MAX_NODES or budgets.exhausted:
                break
        if answers:
            with self._lock:
                self._waiting.pop(uid, None)
                self._postponements.pop(uid, None)
                self._offered[uid] = self._clock()
            self._state.offer(uid, claims)
            self._wake.set()
        return answers

    def refused(self, pod: RefusedPod) -> None:
        """Record a refused pod, unless no eviction can help it."""
        if not (self._enabled and pod.nodes and pod.preempts and self._state.outranks(pod.priority)):
            return
        now = self._clock()
        with self._lock:
            known = self._waiting.get(pod.uid)
            if self._pauses.get(pod.uid, now) > now or (known is None and len(self._waiting) >= MAX_WAITING):
                return
            due = min(known.due, now + self._delay) if known else now + self._delay
            # The state has equal strings; those of the request are freed.
            nodes, filtered = tuple(map(sys.intern, pod.nodes)), tuple(map(sys.intern, pod.filtered))
            self._waiting[pod.uid] = _Waiting(**{**vars(pod), "nodes": nodes, "filtered": filtered}, due=due)
        self._wake.set()

    # The extender's own evictions.

    def tick(self) -> None:
        """Evict for the pods that are due, and end claims that aren't needed any more."""
        now = self._clock()
        with self._lock:
            due = [pod for pod in self._waiting.values() if pod.due <= now]
            for pod in due:
                del self._waiting[pod.uid]
            self._pauses = {uid: until for uid, until in self._pauses.items() if until > now}
            for counted in (self._tries, self._postponements):
                if len(counted) > MAX_WAITING:
                    counted.clear()
        for pod in due:
            if not self._free_memory(pod):
                at, attempts = self._clock(), pod.attempts + 1
                with self._lock:
                    self._pauses[pod.uid] = at + RETRY_SECONDS
                    if attempts < ATTEMPTS:
                        again = dataclasses.replace(pod, due=at + RETRY_SECONDS * 2**pod.attempts, attempts=attempts)
                        self._waiting.setdefault(pod.uid, again)
        sweep = now - self._swept >= SWEEP_SECONDS
        if sweep:
            self._swept = now
            self._expire_claims(now)
        if self._claims is not None:
            self._claims.publish_all(again=sweep)

    def _victims_terminating(self, uid: str) -> bool:
        """Return whether victims of this pod are terminating already, so that it only has to wait."""
        claims = [claim for claim in self._state.claims() if claim.uid == uid]
        return any(self._state.bound(victim) for claim in claims for victim in claim.victims)

    def _free_memory(self, waiting: _Waiting) -> bool:
        """Evict for a pod; False where no eviction can help it for some time."""
        if self._victims_terminating(waiting.uid):
            return True
        try:
            pod = self._kube.get(paths.pod(waiting.namespace, waiting.name))
        except KubeError as error:
            if error.status != 404:
                self._retry_soon(waiting)
            return True
        if contract.pod_uid(pod) != waiting.uid or not contract.wants_a_node(pod):
            self._state.unclaim(waiting.uid)
            return True
        nominated = str((pod.get("status") or {}).get("nominatedNodeName") or "")
        if any(row.terminating and row.priority < waiting.priority for row in self._state.evictable(nominated)):
            # kube-scheduler has evicted pods for it.
            return True
        if self._fits_elsewhere(waiting):
            return True
        self._tries.pop(waiting.uid, None)
        candidate = self._best(waiting)
        if self._cheaper_once_bound(waiting, candidate[1] if candidate else None) and self._postpone(waiting.uid):
            with self._lock:
                self._waiting.setdefault(
                    waiting.uid, dataclasses.replace(waiting, due=self._clock() + POSTPONE_SECONDS)
                )
            return True
        with self._lock:
            self._postponements.pop(waiting.uid, None)
        if candidate is None:
            return False
        name, best = candidate
        if not best.evict:
            if best.leaving:
                self._state.claim(_claim(pod, name, best, waiting.priority, ()))
            return True
        return self._evict(pod, waiting, name, best)

    def _retry_soon(self, waiting: _Waiting) -> None:
        """Evaluate a pod again in a few seconds, since its state or the API's may have changed by then."""
        with self._lock:
            self._waiting.setdefault(waiting.uid, dataclasses.replace(waiting, due=self._clock() + SWEEP_SECONDS))

    def _fits_elsewhere(self, waiting: _Waiting) -> bool:
        """Return whether kube-scheduler may still find a node that has enough memory without evictions."""
        if len(waiting.filtered) < SAMPLE:
            return False
        self._tries[waiting.uid] = self._tries.get(waiting.uid, 0) + 1
        if self._tries[waiting.uid] >= SAMPLES:
            return False
        filtered = set(waiting.filtered)
        others = [view.name for view in self._state.views() if view.name not in filtered]
        return bool(evaluate(others, self._state.viewer(waiting.uid, waiting.priority), waiting.demand).passed)

    def _postpone(self, uid: str) -> bool:
        """Return whether a pod waits for bookings in progress: only a few times, since there may always be some."""
        with self._lock:
            self._postponements[uid] = self._postponements.get(uid, 0) + 1
            return self._postponements[uid] <= POSTPONEMENTS

    def _cheaper_once_bound(self, waiting: _Waiting, now: Plan | None) -> bool:
        """Return whether a plan costs less once a node's bookings in progress are bound, and can be evicted."""
        view, coming = self._state.viewer(waiting.uid, waiting.priority), self._state.nodes_with_bookings()
        for name in waiting.nodes:
            if name in coming and (node := view(name)) is not None:
                then = self._once_bound(node, waiting.uid, waiting.demand, waiting.priority)
                if then is not None and (now is None or then.cost < now.cost):
                    return True
        return False

    def _once_bound(
        self, node: NodeView, uid: str, demand: Demand, priority: int, gone: Collection[str] = ()
    ) -> Plan | None:
        """Return the plan for a node as if its bookings in progress were bound pods; None also where it has none.

        :param uid: the preemptor's UID.
        :param priority: the preemptor's.
        :param gone: UIDs of pods that are evicted in any case.
        """
        snapshot = self._state.snapshot(node.name)
        rows = [row for row in snapshot[1] if row.uid != uid] if snapshot else []
        if all(self._state.bound(row.uid) for row in rows):
            return None
        return plan(node, rows, demand, priority, gone=gone, exact=False)

    def _best(self, waiting: _Waiting) -> tuple[str, Plan] | None:
        """Return the node and the plan with the lowest cost, without pods that a budget protects."""
        view = self._state.viewer(waiting.uid, waiting.priority)
        ranked = []
        for name in waiting.nodes:
            node = view(name)
            if node is not None:
                rough = plan(node, self._state.evictable(name), waiting.demand, waiting.priority, exact=False)
                if rough is not None:
                    ranked.append((rough.cost, name))
            # Let other threads answer filters.
            time.sleep(0)
        budgets = _BudgetChecks(self._kube, self._clock, self._clock() + 10)
        open_plans: dict[str, Plan] = {}
        for _rough, name in sorted(ranked)[:CANDIDATES]:
            node = view(name)
            exact = plan(node, self._state.evictable(name), waiting.demand, waiting.priority) if node else None
            if exact is not None:
                open_plans[name] = exact
        while open_plans and not budgets.exhausted:
            name, best = min(open_plans.items(), key=lambda entry: (entry[1].cost, entry[0]))
            if not budgets.found_violation(best.evict):
                return name, best
            del open_plans[name]
            node, rows = self._state.viewer(waiting.uid, waiting.priority)(name), self._state.evictable(name)
            again = plan(node, rows, waiting.demand, waiting.priority, kept=budgets.violating) if node else None
            if again is not None:
                open_plans[name] = again
        return None

    def _evict(self, pod: JsonObject, waiting: _Waiting, name: str, best: Plan) -> bool:
        """Evict according to a plan; False, without the claim, where that turns out to be impossible."""
        gone: dict[str, PodRow] = {}
        kept: set[str] = set()
        current: Plan | None = best
        while current is not None:
            # Before the evictions, so that no other pod takes the freed memory.
            self._publish_claim(_claim(pod, name, current, waiting.priority, gone))
            cards = f"card{'s' if len(current.cards) > 1 else ''} {', '.join(str(at) for at, _units in current.cards)}"
            for row in reversed(current.evict):
                # The plan and the claim took requests, and the pod's bind may have begun meanwhile, or ended.
                if self._state.held(waiting.uid) or self._state.bound(waiting.uid):
                    self._state.unclaim(waiting.uid)
                    self._retry_soon(waiting)
                    return True
                try:
                    if not self._evict_one(row):
                        kept.add(row.uid)
                        break
                except KubeError as error:
                    # The pod may have been evicted all the same; the next attempt reads its state.
                    self._state.unclaim(waiting.uid)
                    if error.outcome_unknown or error.status == 429:
                        self._retry_soon(waiting)
                        return True
                    return False
                gone[row.uid] = row
                message = (
                    f"evicted for pod {waiting.namespace}/{waiting.name}, which has a higher priority and gets GPU "
                    f"memory of {cards} of node {name}"
                )
                self._events.pod(row.namespace, row.name, row.uid, EVENT_PREEMPTED, message, "Normal")
            else:
                victims = [f"{row.namespace}/{row.name}" for row in gone.values()]
                message = f"evicted for GPU memory of {cards} of node {name}: {', '.join(victims)}"
                self._events.pod(waiting.namespace, waiting.name, waiting.uid, EVENT_PREEMPTING, message, "Normal")
                facts = {"pod": f"{waiting.namespace}/{waiting.name}", "node": name, "victims": victims}
                log.info("preempting", extra={"data": facts})
                return True
            # A budget may have allowed only the first eviction: other pods of this node may be evicted instead.
            node = self._state.viewer(waiting.uid, waiting.priority)(name)
            rows = self._state.evictable(name)
            current = plan(node, rows, waiting.demand, waiting.priority, gone=gone, kept=kept) if node else None
        self._state.unclaim(waiting.uid)
        return False

    def _evict_one(self, row: PodRow) -> bool:
        """Evict a pod: True if it terminates or is gone; False if a disruption budget protects it.

        :raises KubeError: the outcome isn't known.
        """
        try:
            evict(self._kube, row.namespace, row.name, row.uid)
        except KubeError as error:
            if error.status in (404, 409):
                # Gone, or another pod of that name.
                return True
            protected = refused_by_budget(error)
            self._count("refused" if protected else "failed")
            log.warning("pod %s/%s can't be evicted: %s", row.namespace, row.name, error)
            if not protected:
                raise
            return False
        self._count("evicted")
        return True

    # Claims.

    def _publish_claim(self, claim: Claim) -> None:
        self._state.claim(claim)
        if self._claims is not None:
            self._claims.publish(claim)

    def _expire_claims(self, now: float) -> None:
        claims = {claim.uid: claim for claim in self._state.claims()}
        self._claimed = {uid: self._claimed.get(uid, now) for uid in claims}
        self._freed = {uid: since for uid, since in self._freed.items() if uid in claims}
        with self._lock:
            stale = [uid for uid, since in self._offered.items() if now - since > OFFER_SECONDS]
            for uid in stale:
                del self._offered[uid]
        for uid in stale:
            if uid not in claims:
                self._state.unclaim(uid)
        for uid, claim in claims.items():
            if not any(self._state.bound(victim) for victim in claim.victims):
                self._freed.setdefault(uid, now)
            late = now - self._freed.get(uid, now) > CLAIM_SECONDS or now - self._claimed[uid] > LONGEST_SECONDS
            if late or not self._claim_is_needed(claim):
                self._state.unclaim(uid)
                if self._claims is not None:
                    # In all extenders, and in those that start later.
                    self._claims.withdraw(claim)

    def _claim_is_needed(self, claim: Claim) -> bool:
        try:
            pod = self._kube.get(paths.pod(claim.namespace, claim.name))
        except KubeError as error:
            # The claim stays while the pod can't be read.
            return error.status != 404
        return contract.pod_uid(pod) == claim.uid and contract.wants_a_node(pod)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._pause())
            self._wake.clear()
            try:
                self.tick()
            except Exception:
                log.exception("preemption failed")
            # Filters of a short time are handled together.
            self._stopped.wait(min(0.1, self._delay))

    def _pause(self) -> float:
        with self._lock:
            due = min((waiting.due for waiting in self._waiting.values()), default=None)
            busy = bool(self._offered) or bool(self._state.claims())
        if due is not None:
            return max(0.0, min(due - self._clock(), SWEEP_SECONDS))
        return SWEEP_SECONDS if busy else 60.0


class _BudgetChecks:
    """Finds pods that disruption budgets protect, by dry runs of evictions."""

    def __init__(self, kube: Kube, clock: Callable[[], float], end: float) -> None:
        self._kube, self._clock, self._end = kube, clock, end
        self._queried: set[str] = set()
        self._closed = False
        self.violating: set[str] = set()

    @property
    def exhausted(self) -> bool:
        """Whether no more is queried, since it would take too long."""
        return self._closed or len(self._queried) >= MAX_BUDGET_CHECKS or self._clock() > self._end

    def found_violation(self, rows: Iterable[PodRow]) -> bool:
        """Query pods; whether any of them that wasn't queried before is protected."""
        before = len(self.violating)
        for row in rows:
            if row.uid in self._queried or self.exhausted:
                continue
            self._queried.add(row.uid)
            try:
                evict(self._kube, row.namespace, row.name, row.uid, dry=True)
            except KubeError as error:
                if refused_by_budget(error):
                    self.violating.add(row.uid)
                # A pod that is gone needs no eviction.
                elif error.status not in (404, 409):
                    log.error("disruption budgets can't be queried: %s", error)
                    self._closed = True
        return len(self.violating) > before


def _claim(pod: JsonObject, node: str, chosen: Plan, priority: int, victims: Iterable[str]) -> Claim:
    """Make the claim on the memory that a plan frees for a pod.

    :param node: the node's name.
    :param priority: the pod's.
    :param victims: UIDs of victims besides those of the plan.
    """
    metadata = pod.get("metadata") or {}
    return Claim(
        contract.pod_uid(pod),
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        node,
        chosen.cards,
        priority,
        frozenset((*(row.uid for row in chosen.evict), *chosen.leaving, *victims)),
    )


def _merged(offered: Victims, rows: Sequence[PodRow], gone: set[str], chosen: Plan, violating: set[str]) -> Victims:
    """Replace those of kube-scheduler's victims that are needless by those of a plan, the highest priority first."""
    known = {row.uid: row.priority for row in rows}
    ours = {row.uid for row in chosen.evict}
    ordered = [(row.priority, row.uid) for row in chosen.evict]
    # The priority of a pod without GPU memory follows from its position only.
    least = LOWEST_PRIORITY
    for uid in reversed(offered.uids):
        least = max(least, known.get(uid, least))
        if uid not in ours and (uid not in known or uid in gone):
            ordered.append((least, uid))
    ordered.sort(key=lambda entry: -entry[0])
    violations = min(offered.violations, len(ordered) - len(ours)) + sum(uid in violating for uid in ours)
    return Victims(tuple(uid for _priority, uid in ordered), violations)
