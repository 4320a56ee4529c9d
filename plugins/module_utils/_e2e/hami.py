# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The suite ``hami``: runs cases on one node of HAMi, each in fresh pods; see ``hami_cases``."""

from __future__ import annotations

import typing as t

from .._contracts import hami, hami_marks
from .._core.errors import BadInput
from . import nodes, result
from .client import SuiteClient
from .exec import CommandFailed, Execute
from .hami_cases import CASES, CORES, Case, Free, fits, free_cards, parse
from .objects import Options
from .pods import PodState
from .result import Failed, NoBackend, Skipped, StepOutcome
from .suite import HOLD_SECONDS, Suite

# In exec a command that isn't there ends with these.
NOT_RUN = (126, 127)
ALLOCATE = ("allocate",)


class Hami(Suite):
    """See gpu_acceptance, suite ``hami``."""

    first, last = "M00", "M99"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options)
        self._cases = [*CASES, *parse(options.cases)]
        self._name = ""
        self._register: list[hami.Gpu] = []

    @property
    def node(self) -> str:
        return self._name

    @property
    def ready(self) -> bool:
        return bool(self._name) and self.steps[self.first].result == result.SKIPPED

    def select(self) -> None:
        found = self._client.all_nodes()
        reasons = {}
        best: tuple[int, str, list[hami.Gpu]] | None = None
        for node in found:
            name, annotations = nodes.name_of(node), node["metadata"].get("annotations") or {}
            if hami.NODE_REGISTER not in annotations or self._options.node not in (None, name):
                continue
            usable = nodes.accepts_pods(node, self._options.node_selector)
            reason = "" if usable else "it isn't Ready, is cordoned, or has a taint or other labels"
            try:
                register = hami.registered(annotations[hami.NODE_REGISTER])
            except hami.HamiError as error:
                reason = reason or str(error)
            if reason:
                reasons[name] = reason
                continue
            free = sum(card.mib for card in free_cards(register, self._client.unfinished_pods(name)))
            if best is None or free > best[0]:
                best = (free, name, register)
        if best is None:
            text = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items())[:3])
            raise (
                Skipped(f"no node of HAMi can be used ({text})")
                if reasons
                else NoBackend("the cluster has no node of HAMi")
            )
        _free, self._name, self._register = best
        if not self._client.image:
            self._client.image = self._plugin_image()

    def _plugin_image(self) -> str:
        """Return the image of HAMi's device plugin, which the node has.

        :raises BadInput: it can't be found.
        """
        key, value = hami_marks.PLUGIN_LABEL
        for one in self._client.daemon_sets():
            template = one["spec"]["template"]
            if (template["metadata"].get("labels") or {}).get(key) == value:
                return str(template["spec"]["containers"][0]["image"])
        raise BadInput(
            "image: not set, and the cluster has no DaemonSet of HAMi's device plugin whose image could be used"
        )

    def plan_text(self) -> str:
        return f"run {len(self._cases)} cases on node {self.node}"

    def run(self) -> None:
        if not self.step(self.first, self.prepare):
            return
        for number, case in enumerate(self._cases, 1):
            identifier = f"M{number:02}"
            self.describe(identifier, case.title, case.proves, case.evidence)
            self.step(identifier, lambda case=case: self._case(case))  # type: ignore[misc]

    # ----------------------------------------------------------------- one case

    def _case(self, case: Case) -> str:
        if "silicon" in case.evidence:
            raise StepOutcome("only a real card can show it, with a program that computes", "measure it on real cards")
        if case.command == ALLOCATE and not self._options.allocate_command:
            raise StepOutcome(
                "no program that allocates memory was named",
                "name one that allocates 2000 MiB and ends with 0 if it succeeds (allocate_command)",
            )
        expected = fits(case.request, self._free())
        wanted = min(expected, case.at_most or expected)
        if not wanted and not case.more:
            raise Skipped(f"node {self.node} doesn't have enough left for one pod")
        names = [self._create(case) for _number in range(wanted + case.more)]
        try:
            return self._outcome(case, names, wanted)
        finally:
            self.remove(names)

    def _free(self) -> list[Free]:
        return free_cards(self._register, self._client.unfinished_pods(self.node))

    def _create(self, case: Case) -> str:
        self._number += 1
        name = f"{case.id.replace('_', '-')}-{self._number}"
        manifest = self._client.template().pod(name, [0], self.node)
        limits = manifest["spec"]["containers"][0]["resources"]["limits"]
        manifest["spec"]["containers"][0]["resources"]["limits"] = {
            "memory": limits["memory"],
            **{key: str(value) for key, value in case.limits.items()},
        }
        self._client.create(manifest, 0)
        return name

    def _outcome(self, case: Case, names: t.Sequence[str], wanted: int) -> str:
        def done(states: dict[str, PodState]) -> bool:
            running = sum(one.running for one in states.values())
            waiting = [one for one in states.values() if not one.node]
            refused = all(one.refusals for one in waiting)
            return (running >= wanted and (not case.more or refused)) or any(one.ended for one in states.values())

        # HAMi binds one pod after the other.
        states = self._client.watch(names, done)
        for _poll in self._client.wait(HOLD_SECONDS).attempts():
            states = {name: one for name, one in self._client.pods().items() if name in names}
        running = [one for one in states.values() if one.running]
        waiting = [one for one in states.values() if not one.node and not one.ended]
        ended = [one for one in states.values() if one.ended]
        if ended:
            raise Failed(
                f"pod {ended[0].name} ended: {ended[0].summary}", "read the log of HAMi's device plugin", ended[0].name
            )
        if len(running) != wanted or len(waiting) != case.more:
            shown = f"{len(running)} run and {len(waiting)} wait, not {wanted} and {case.more}"
            texts = [one.refusals[-1] for one in waiting if one.refusals] or [one.summary for one in states.values()]
            raise Failed(
                f"{shown}: {result.shorten(texts[0])}", "compare the node's register with its pods' annotations"
            )
        if case.reason and not any(case.reason in text for one in waiting for text in one.refusals):
            texts = [text for one in waiting for text in one.refusals] or ["no reason"]
            raise Failed(f"the pod waits for another reason than {case.reason}: {result.shorten(texts[-1])}")
        if "annotation" in case.evidence:
            self._assert_annotations(case, running)
        shown = self._execute_in(case, running[0]) if case.command and running else ""
        return f"{len(running)} run, {len(waiting)} wait{shown}"

    def _assert_annotations(self, case: Case, running: t.Sequence[PodState]) -> None:
        """Validate that the pods' parts are what they requested, on different cards, and fit together.

        :raises Failed: an annotation is missing or wrong.
        """
        sums = dict.fromkeys((card.uuid for card in self._register), 0)
        for pod in running:
            text = pod.annotations.get(hami.POD_ALLOCATED)
            try:
                parts = [part for container in hami.allocated(text) for part in container]
            except hami.HamiError as error:
                raise Failed(f"pod {pod.name} runs, and {error}", "", pod.name) from error
            request = case.request
            cards = {uuid for uuid, *_rest in parts}
            if len(parts) != request.cards or len(cards) != request.cards or not cards <= set(sums):
                raise Failed(
                    f"pod {pod.name} has cards {', '.join(sorted(cards)) or 'none'}", "", pod.name, None, str(text)
                )
            for uuid, mib, cores in parts:
                # Cores that nobody requested are the cluster's default.
                fixed = request.mib is None or CORES in case.limits
                if request.mib not in (None, mib) or (fixed and cores != request.cores):
                    raise Failed(f"pod {pod.name} has {mib} MiB and {cores} % of {uuid}", "", pod.name, None, str(text))
                sums[uuid] += mib
        for card in self._register:
            if sums[card.uuid] > card.devmem:
                raise Failed(f"pods hold {sums[card.uuid]} MiB of {card.uuid}, which has {card.devmem}")

    def _execute_in(self, case: Case, pod: PodState) -> str:
        command = self._options.allocate_command if case.command == ALLOCATE else case.command
        try:
            output = self._execute(self._options.namespace, pod.name, "c0", command).strip()
        except CommandFailed as error:
            if error.status is None or error.status in NOT_RUN:
                text = result.shorten(str(error))
                raise StepOutcome(
                    f"{command[0]} couldn't be run: {text}", "name an image that has it", pod.name
                ) from error
            if case.succeeds:
                raise Failed(result.shorten(str(error)), "", pod.name) from error
            return f"; {command[0]} ended with {error.status}"
        if not case.succeeds:
            raise Failed(
                f"{command[0]} ended with 0: {result.shorten(output)}",
                "check H8 of verify.yml finds programs without HAMi's library",
                pod.name,
            )
        if case.shows and case.shows not in output:
            raise Failed(f"{command[0]} shows {result.shorten(output)!r}, not {case.shows}", "", pod.name)
        return f"; {command[0]}: {result.shorten(output) or 'ended with 0'}"
