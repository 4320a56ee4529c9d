# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The base of the suites: namespace, placement, refusal and removal of pods, with retries where others interfere."""

from __future__ import annotations

import abc
import typing as t

from .._core.errors import BadInput
from .._kube.pod_exec import Execute
from . import assertions, result
from .assertions import CHECK_PLUGIN, PodState
from .client import SuiteClient
from .nodes import DRA, NodeState, Options, evictable_pods
from .result import Failed, Inconclusive, NoBackend, Skipped, StepOutcome, StepResult, StepRunner

# Attempts of a step that other pods made impossible.
ATTEMPTS = 3
# Seconds. kube-scheduler retries a refused pod only after an event, so that a new pod is created after this time.
REFUSED_SECONDS = 20.0
# In exec a command that isn't there ends with these.
NOT_RUN = (126, 127)
# Seconds that a refusal must persist.
HOLD_SECONDS = 3.0


class Suite(StepRunner, abc.ABC):
    """One run of a suite on one node.

    :cvar first: ID of the step that creates the namespace.
    :cvar last: ID of the step that removes it.
    :ivar before: the node's state when it was selected; None without a node.
    """

    first: t.ClassVar[str]
    last: t.ClassVar[str]

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__()
        self._client = client
        self._execute = execute
        self._options = options
        self._number = 0
        self._priority = 0
        self._preempts = True
        self.before: NodeState | None = None

    @abc.abstractmethod
    def select(self) -> None:
        """Select the node and the sizes; sets ``before``.

        :raises Skipped: no node can be used.
        """

    @abc.abstractmethod
    def plan_text(self) -> str:
        """Describe what a run would do."""

    @abc.abstractmethod
    def run(self) -> None:
        """Run all steps between the first and the last."""

    @property
    def units(self) -> int:
        """Units of each of the first pods."""
        return 1

    @property
    def node(self) -> str:
        return self.before.name if self.before else ""

    @property
    def untested(self) -> list[str]:
        """Names of nodes that share memory and aren't tested, since another allocation has their cards."""
        if self.before is None:
            return []
        return sorted(name for name, now in self._client.allocations.items() if now != self.before.allocation)

    @property
    def selected(self) -> NodeState:
        """The selected node's state.

        :raises Skipped: no node was selected.
        """
        if self.before is None:
            raise Skipped("no node was selected")
        return self.before

    @property
    def ready(self) -> bool:
        """A node was selected, and the run may begin."""
        return self.before is not None and self.steps[self.first].result == result.SKIPPED

    # ----------------------------------------------------------------- first and last step

    def plan(self, check: bool) -> str:
        """Select a node, and remove what an earlier run left, which may hold all free memory.

        :param check: change nothing.
        :raises BadInput: an option is invalid.
        :raises Skipped: what a run would do, or why it can't.
        """
        full: Skipped | None = None
        try:
            self.select()
        except NoBackend:
            raise
        except Skipped as outcome:
            full = outcome
        if self._client.find_namespace() is not None and not check:
            reason = self._client.remove_namespace(only_this_run=False)
            if reason:
                raise StepOutcome(
                    f"namespace {self._options.namespace} of an earlier run can't be removed: {reason}",
                    f"find what blocks it: kubectl get namespace {self._options.namespace} -o yaml",
                )
            # Its memory is free again.
            self.before = None
            self.select()
        elif full:
            raise full
        self.find_image()
        raise Skipped(f"would create namespace {self._options.namespace}, {self.plan_text()}, and remove everything")

    def find_image(self) -> None:
        """Set the image of the suite's pods, unless the user named one."""
        self._client.find_image()

    def prepare(self) -> str:
        """Create the namespace."""
        left = ", after the leftovers of an earlier run were removed" if self._client.changed else ""
        self.may_fail = False
        try:
            self._client.create_namespace()
        except BadInput:
            self.may_fail = not self._client.touched
            raise
        return f"namespace {self._options.namespace}{left}"

    def clean(self) -> None:
        """Remove the namespace, and log that as the last step."""
        name, reason = self._options.namespace, self._client.remove_namespace(only_this_run=True)
        if reason:
            what = f"namespace {name} couldn't be removed: {reason}"
            do = f"remove it (kubectl delete namespace {name}), or run the suite again, which removes it first"
            self.steps[self.last] = StepResult(self.last, result.UNKNOWN, what, do)
        else:
            self.steps[self.last] = StepResult(self.last, result.PASS, f"namespace {name} is removed")

    # ----------------------------------------------------------------- placing pods

    def create(self, word: str, units: t.Sequence[int], image: str = "") -> str:
        """Create a pod on the node and return its name.

        :param image: another one than the run's.
        """
        self._number += 1
        name = f"{word}-{self._number}"
        created = self._client.create_pod(name, units, self.node, self.selected.allocation, image)
        self._priority, self._preempts = created.priority, created.preempts
        return name

    def wait_running(self, names: t.Sequence[str], units: int) -> list[PodState]:
        """Wait until pods run on their cards, and return their states.

        :param units: of each pod.
        :raises StepOutcome: one of them doesn't run, or violates the contract.
        """
        latest = [self._client.node_state(self.node)]
        bound_without_card: dict[str, PodState] = {}
        refused: list[float] = []

        def done(states: dict[str, PodState]) -> bool:
            # A device plugin may add a card later; that the extender didn't is a failure.
            bound_without_card.update({pod.name: pod for pod in states.values() if pod.node and pod.index is None})
            if bound_without_card or any(pod.ended for pod in states.values()):
                return True
            if all(assertions.is_settled(pod, latest[0]) for pod in states.values()):
                return True
            if not any(pod.refusals and not pod.node for pod in states.values()):
                refused.clear()
                return False
            refused.append(self._client.now())
            latest[0] = self._client.node_state(self.node)
            return latest[0].largest_free < units or refused[-1] - refused[0] >= REFUSED_SECONDS

        states = self._client.watch(names, done)
        pods = [bound_without_card.get(name, states[name]) for name in names]
        node = self._client.node_state(self.node)
        for pod in pods:
            if pod.node:
                assertions.assert_placement(pod, units, node)
        ended = [pod for pod in pods if pod.ended]
        waiting = [pod for pod in pods if not pod.node and not pod.ended]
        starting = [pod for pod in pods if not assertions.is_settled(pod, node)]
        if waiting and not ended:
            raise assertions.not_placed(waiting[0], units, node, self._client.has_claims(), self._options.timeout)
        if starting:
            raise assertions.not_running((ended or starting)[0], self._options.timeout)
        return pods

    def start(self, word: str, units: t.Sequence[int], image: str = "") -> PodState:
        """Create one pod, wait until it runs, and return its state; it is removed if it doesn't.

        :param units: of each of its containers.
        :param image: another one than the run's.
        """
        before = self._client.node_state(self.node)
        name = self.create(word, units, image)
        try:
            (pod,) = self.wait_running([name], sum(units))
            assertions.assert_not_overbooked(pod, before, self._client.node_state(self.node), self._options.namespace)
        except Inconclusive:
            self.remove({name})
            raise
        except StepOutcome:
            self._client.delete_pod(name)
            raise
        return pod

    def remove(self, names: t.Collection[str]) -> None:
        """Remove pods.

        :raises Failed: one of them still exists at the timeout.
        """
        left = self._client.remove_pods(names)
        if left:
            states = self._client.pods()
            summary = states[left[0]].summary if left[0] in states else ""
            raise Failed(
                f"pod {left[0]} still exists {self._options.timeout:g} s after its deletion: {summary}",
                f"check that kubelet runs on node {self.node}",
                left[0],
            )

    def retried(self, work: t.Callable[[int], str]) -> str:
        """Retry work that other pods can make impossible.

        :param work: takes the number of attempts before.
        """
        last = Inconclusive("")
        for attempt in range(ATTEMPTS):
            try:
                return work(attempt)
            except Inconclusive as outcome:
                last = outcome
        if last.failure:
            raise last.failure
        what = f"{last.what}; in {ATTEMPTS} attempts"
        raise StepOutcome(what, "run it again when the cluster is quieter", last.pod, last.card)

    # ----------------------------------------------------------------- refused pods

    def wait_refused(self, name: str) -> PodState:
        """Wait until the scheduler has refused a pod and the refusal persisted, or has bound it."""

        def refused(pod: PodState) -> bool:
            # Before the claim exists, kube-scheduler refuses the pod for that.
            return bool(assertions.extender_refusal(pod.refusals) if self.selected.allocation == DRA else pod.refusals)

        state = self._client.watch([name], lambda pods: bool(pods[name].node) or refused(pods[name]))[name]
        if not state.node and state.refusals:
            for _poll in self._client.wait(HOLD_SECONDS).attempts():
                state = self._client.pods().get(name, state)
                if state.node:
                    break
        return state

    def refuse(self, word: str, units: int, keep: bool) -> str:
        """Create a pod that must not be placed, and return the extender's reason.

        :param keep: keep the pod if other pods left and it was placed.
        :raises StepOutcome: it was placed, or is Pending for another reason.
        """
        before = self._client.node_state(self.node)
        weaker = evictable_pods(before, self._priority, self._options.namespace) if self._preempts else []
        if weaker:
            raise Skipped(
                f"kube-scheduler could preempt {weaker[0]} for it, whose priority is lower",
                "name a priority_class whose preemptionPolicy is Never",
            )
        name = self.create(word, [units])
        pod = self.wait_refused(name)
        after = self._client.node_state(self.node)
        try:
            reason = assertions.assert_refused(
                pod, units, before, after, self._options.namespace, self._options.timeout
            )
        except Inconclusive as outcome:
            if not (outcome.bound and keep):
                self.remove({name})
            raise
        except StepOutcome:
            self._client.delete_pod(name)
            raise
        self.remove({name})
        return reason

    # ----------------------------------------------------------------- released memory

    def release(self) -> str:
        """Remove all pods, and validate that the node advertises as much as before.

        :raises StepOutcome: it doesn't.
        """
        before = self.selected
        self.remove(set(self._client.created_pods))
        now = self._client.node_state(self.node)
        if now.allocatable >= before.allocatable:
            return "removed"
        what = f"node {self.node} advertises {now.allocatable} units, and advertised {before.allocatable} before"
        if {_health(card) for card in now.cards} != {_health(card) for card in before.cards}:
            raise StepOutcome(f"{what}: its cards changed meanwhile", CHECK_PLUGIN)
        raise Failed(what, CHECK_PLUGIN)

    def reallocate(self) -> str:
        """Allocate the largest free share again."""

        def attempt(_attempts: int) -> str:
            now = self._client.node_state(self.node)
            units = min(now.largest_free, now.total_free)
            if units < 1:
                what = f"other pods took the free memory of node {self.node} meanwhile"
                raise StepOutcome(what, "run it again when the cluster is quieter")
            pod = self.start("again", [units])
            self.remove({pod.name})
            return f"all removed; a pod of the {units} units that were free ran after them on card {pod.index}"

        return self.retried(attempt)


def _health(card: t.Any) -> tuple[int, int, bool]:
    return card.index, card.units, card.healthy
