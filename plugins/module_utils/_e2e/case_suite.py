# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A suite that runs cases on one node, each in fresh pods; see ``cases``."""

from __future__ import annotations

import abc
import typing as t

from .._allocation.allocators import allocator_of
from .._contracts.model import Node
from .._core.types import JsonObject
from .._kube.pod_exec import CommandFailed, Execute
from . import nodes, result
from .assertions import PodState
from .cases import ALLOCATE, COMPUTE, Case, parse
from .client import SuiteClient
from .nodes import Options
from .result import Failed, NoBackend, Skipped, StepOutcome, Unshown
from .suite import HOLD_SECONDS, NOT_RUN, Suite

# A node takes about a hundred pods; where more fit, not all are created.
MOST_PODS = 100
Seen = t.TypeVar("Seen")


class CaseSuite(Suite, t.Generic[Seen]):
    """The cases of a back end, and the user's.

    :cvar backend: whose nodes it uses.
    :cvar title: the back end in messages.
    :cvar log: what has the reason when a pod ends.
    """

    first, last = "M00", "M99"
    backend: t.ClassVar[str]
    title: t.ClassVar[str]
    log: t.ClassVar[str]

    def __init__(
        self, client: SuiteClient, execute: Execute, options: Options, cases: t.Sequence[Case], none: Seen
    ) -> None:
        super().__init__(client, execute, options)
        self._all = [*cases, *(case for case in parse(options.cases) if case.suite in ("", options.suite))]
        self._name = ""
        self._seen = none

    @abc.abstractmethod
    def see(self, node: Node) -> tuple[int, Seen] | str:
        """Return what is free on a node and what it announces, or why it can't be used."""

    @abc.abstractmethod
    def default_image(self) -> str:
        """Return the image where the user names none.

        :raises BadInput: the user has to.
        """

    def select(self) -> None:
        reasons: dict[str, str] = {}
        best: tuple[int, str, Seen] | None = None
        for node in self._client.all_nodes():
            name = node.name
            if not self.has_backend(node) or self._options.node not in (None, name):
                continue
            refusal = nodes.refusal(node, self._options.node_selector, self._options.tolerations)
            seen = refusal or self.see(node)
            if isinstance(seen, str):
                reasons[name] = seen
            elif best is None or seen[0] > best[0]:
                best = (seen[0], name, seen[1])
        if best is None:
            text = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items())[:3])
            if reasons:
                raise Skipped(f"no node of {self.title} can be used ({text})")
            raise NoBackend(f"the cluster has no node of {self.title}")
        _free, self._name, self._seen = best
        if not self._client.image:
            self._client.image = self.default_image()

    def has_backend(self, node: Node) -> bool:
        """Return whether a node is one of the back end's."""
        return allocator_of(node) == self.backend

    @abc.abstractmethod
    def fits(self, case: Case) -> int:
        """Return how many pods of a case fit on the node now."""

    def limits(self, case: Case) -> t.Mapping[str, int]:
        """Return the limits of each pod's container."""
        return case.limits

    def assert_booked(self, case: Case, running: t.Sequence[PodState]) -> None:
        """Validate what the scheduler has written about the pods that run.

        :raises Failed: it differs from what they requested.
        """

    def assert_room(self, case: Case, fitting: int) -> None:
        """Validate that a case shows something with as many pods as fit.

        :raises Skipped: it doesn't.
        """

    def assert_output(self, case: Case, output: str, pod: PodState) -> None:
        """Validate a command's output beyond what a case says of it.

        :raises Failed: it differs.
        """

    @property
    def kinds(self) -> frozenset[str]:
        """What the node is."""
        return frozenset()

    @property
    def cards(self) -> int:
        """Cards of the node; 0 where that isn't known."""
        return 0

    @property
    def node(self) -> str:
        return self._name

    @property
    def ready(self) -> bool:
        return bool(self._name) and self.steps[self.first].result == result.SKIPPED

    @property
    def cases(self) -> list[Case]:
        """Those for the node."""
        return [case for case in self._all if self.kinds.issuperset(case.kinds)]

    def plan_text(self) -> str:
        of = f" ({', '.join(sorted(self.kinds))})" if self.kinds else ""
        return f"run {len(self.cases)} cases on node {self.node}{of}"

    def run(self) -> None:
        if not self.step(self.first, self.prepare):
            return
        for number, case in enumerate(self.cases, 1):
            identifier = f"M{number:02}"
            self.describe(identifier, case.title, case.proves, case.evidence)
            self.step(identifier, lambda case=case: self._case(case))  # type: ignore[misc]

    # ----------------------------------------------------------------- one case

    def _case(self, case: Case) -> str:
        if "silicon" in case.evidence:
            raise Unshown("only a real card can show it, with a program that computes", "measure it on real cards")
        if case.command == ALLOCATE and not self._options.allocate_command:
            raise Unshown("no program that allocates memory was named", "name one (allocate_command)")
        if case.command == COMPUTE and not self._options.program_command:
            raise Unshown("no program that computes was named", "name one, as vectorAdd (program_command)")
        expected = self.fits(case)
        self.assert_room(case, expected)
        at_most = self.cards + 1 if case.beyond_cards else case.at_most
        wanted = min(expected, at_most or expected)
        if (not wanted and not case.more) or (case.beyond_cards and (not self.cards or wanted < at_most)):
            raise Skipped(f"node {self.node} doesn't have enough left for {'that many pods' if wanted else 'one pod'}")
        if wanted > MOST_PODS:
            raise Skipped(f"node {self.node} has room for {wanted} pods, and the suite creates {MOST_PODS} at most")
        names = [self._create(case) for _number in range(wanted + case.more)]
        try:
            return self._refused(case, names) if case.refused else self._outcome(case, names, wanted)
        finally:
            self.remove(names)

    def _create(self, case: Case) -> str:
        self._number += 1
        name = f"{case.id.replace('_', '-')}-{self._number}"
        image = self._options.program_image if case.command == COMPUTE else None
        manifest = self._client.template(image or "").pod(name, [0], self.node)
        [container] = manifest["spec"]["containers"]
        limits = {key: str(value) for key, value in self.limits(case).items()}
        container["resources"]["limits"] = {"memory": container["resources"]["limits"]["memory"], **limits}
        self.keep_to_back_end(manifest["spec"])
        self._client.create(manifest, 0)
        return name

    def keep_to_back_end(self, spec: JsonObject) -> None:
        """Have only the back end's scheduler bind a pod: others announce the same resource."""

    def _refused(self, case: Case, names: t.Sequence[str]) -> str:
        """Wait until kubelet has ended the pods, and return its reason."""
        states = self._client.watch(names, lambda pods: all(pod.ended or pod.running for pod in pods.values()))
        for pod in states.values():
            if case.refused not in pod.summary:
                raise Failed(f"pod {pod.name} isn't refused ({case.refused}): {pod.summary}", self.log, pod.name)
        return result.shorten(next(iter(states.values())).summary)

    def _outcome(self, case: Case, names: t.Sequence[str], wanted: int) -> str:
        def done(states: dict[str, PodState]) -> bool:
            running = sum(pod.running for pod in states.values())
            waiting = [pod for pod in states.values() if not pod.node]
            refused = all(pod.refusals for pod in waiting)
            return (running >= wanted and (not case.more or refused)) or any(pod.ended for pod in states.values())

        # A scheduler may bind one pod after the other.
        states = self._client.watch(names, done)
        for _poll in self._client.wait(HOLD_SECONDS).attempts():
            states = {name: pod for name, pod in self._client.pods().items() if name in names}
        running = [pod for pod in states.values() if pod.running]
        waiting = [pod for pod in states.values() if not pod.node and not pod.ended]
        ended = [pod for pod in states.values() if pod.ended]
        if ended:
            raise Failed(f"pod {ended[0].name} ended: {ended[0].summary}", f"read the log of {self.log}", ended[0].name)
        if len(running) != wanted or len(waiting) != case.more:
            shown = f"{len(running)} run and {len(waiting)} wait, not {wanted} and {case.more}"
            texts = [pod.refusals[-1] for pod in waiting if pod.refusals] or [pod.summary for pod in states.values()]
            raise Failed(f"{shown}: {result.shorten(texts[0])}", "compare what the node has with what its pods hold")
        if case.reason and not any(case.reason in text for pod in waiting for text in pod.refusals):
            texts = [text for pod in waiting for text in pod.refusals] or ["no reason"]
            raise Failed(f"the pod waits for another reason than {case.reason}: {result.shorten(texts[-1])}")
        if "annotation" in case.evidence:
            self.assert_booked(case, running)
        if case.distinct is not None:
            return f"{len(running)} run: {self._compare(case, running)}"
        shown = self._execute_in(case, running[0]) if case.command and running else ""
        return f"{len(running)} run, {len(waiting)} wait{shown}"

    def _compare(self, case: Case, running: t.Sequence[PodState]) -> str:
        """Run the command in all pods, and compare the outputs."""
        outputs = [self._run(case, pod) for pod in running]
        if (len(set(outputs)) == len(outputs)) != case.distinct:
            shown = result.shorten(", ".join(outputs))
            raise Failed(f"{'two pods have the same' if case.distinct else 'no two pods have the same'}: {shown}")
        return result.shorten(", ".join(outputs))

    def _execute_in(self, case: Case, pod: PodState) -> str:
        """Run the command and compare its end and its output with what the case expects."""
        try:
            output = self._run(case, pod)
        except CommandFailed as error:
            text = result.shorten(str(error))
            if not case.status:
                raise Failed(text, "", pod.name) from error
            if error.status != case.status:
                # A crash shows nothing of what was to be refused.
                do = f"have it end with {case.status} where it is refused, and with 0 where it isn't"
                raise StepOutcome(f"{text}; neither 0 nor {case.status}", do, pod.name) from error
            return f"; it ended with {error.status}"
        if case.status:
            raise Failed(f"it ended with 0: {result.shorten(output)}", "find out what the limit depends on", pod.name)
        differs = case.mismatch(output)
        if differs:
            raise Failed(f"it shows {result.shorten(output)!r}, {differs}", "", pod.name)
        self.assert_output(case, output, pod)
        return f"; {result.shorten(output) or 'it ended with 0'}"

    def _run(self, case: Case, pod: PodState) -> str:
        """Run the command in a pod and return its output.

        :raises CommandFailed: it ended with another status than 0.
        :raises StepOutcome: it couldn't be run.
        """
        named: dict[tuple[str, ...], t.Sequence[str]] = {
            ALLOCATE: self._options.allocate_command,
            COMPUTE: self._options.program_command,
        }
        command = named.get(case.command, case.command)
        try:
            return self._execute(self._options.namespace, pod.name, "c0", command).strip()
        except CommandFailed as error:
            if error.status is None or error.status in NOT_RUN:
                text = f"{command[0]} couldn't be run: {result.shorten(str(error))}"
                raise StepOutcome(text, "name an image that has it", pod.name) from error
            raise
