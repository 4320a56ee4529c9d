# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The canary suite: pods of known size fill a node's cards, and one pod more must be refused."""

from __future__ import annotations

import typing as t

from .._contracts import gpushare as contract
from . import assertions, nodes, result, sizing
from .cases import OUT_OF_MEMORY
from .exec import CommandFailed
from .pods import PodState
from .result import Failed, Skipped, StepOutcome
from .sizing import CanaryPlan
from .suite import Suite

# Nodes that are compared for a cheaper one, once one is known that can show the extender.
MORE_NODES = 10


class Canary(Suite):
    """See gpu_acceptance, suite ``canary``."""

    first, last = "Y1", "Y7"
    _plan: CanaryPlan | None = None
    _filled: t.Sequence[str] = ()

    def run(self) -> None:
        if not self.step("Y1", self.prepare):
            return
        if not self.step("Y2", self.fill):
            for identifier in ("Y3", "Y4", "Y5", "Y6"):
                self.skip(identifier, "the pods of Y2 don't run")
            return
        self.step("Y3", self.one_more)
        fragments = self._canary_plan.leaves_fragments
        if fragments:
            self.step("Y4", self.fragment)
        if self._options.allocate_command:
            self.step("Y5", self.over_allocate)
        else:
            self.skip("Y5", "allocate_command isn't set")
        released = self.step("Y6", self.release)
        if not fragments:
            self.step("Y4", self.fragment)
        if released:
            self.step("Y6", self.reallocate)

    @property
    def _canary_plan(self) -> CanaryPlan:
        if self._plan is None:
            raise Skipped("no node was selected")
        return self._plan

    @property
    def units(self) -> int:
        return self._plan.sizes.units if self._plan else 0

    def plan_text(self) -> str:
        sizes = self._canary_plan.sizes
        return f"run {sizes.pods} pods of {sizes.units} units on node {self.node}, request more than fits"

    def select(self) -> None:
        best: CanaryPlan | None = None
        reasons: dict[str, str] = {}
        more = MORE_NODES
        for node in self._client.sharing_nodes():
            state = self._client.usable_state(node)
            found = state if isinstance(state, str) else sizing.plan_canary(state, self._options.namespace)
            if isinstance(found, str):
                reasons[nodes.name_of(node)] = found
            elif best is None or found.rank > best.rank:
                best = found
            more -= int(best is not None and best.sizes.extender_decides)
            if best is not None and (best.best or more <= 0):
                break
        if best is None:
            raise Skipped(no_node_text(reasons))
        self._plan, self.before = best, best.state

    # ----------------------------------------------------------------- Y2

    def fill(self) -> str:
        """Fill the node's cards."""

        def attempt(attempts: int) -> str:
            if attempts:
                self.remove(set(self._client.created_pods))
                self.select()
            sizes, before = self._canary_plan.sizes, self._client.node_state(self.node)
            self._filled = [self.create("share", [sizes.units]) for _number in range(sizes.pods)]
            pods = self.wait_running(self._filled, sizes.units)
            after = self._client.node_state(self.node)
            for pod in pods:
                assertions.assert_not_overbooked(pod, before, after, self._options.namespace)
            return f"{_placement_text(pods, sizes.units)} of node {self.node}"

        return self.retried(attempt)

    # ----------------------------------------------------------------- Y3, Y4

    def one_more(self) -> str:
        """Request one pod more than fits; if others left meanwhile, it stays and the next one is one more."""
        units = self.units
        return self.retried(lambda _attempts: f"{units} units more: {self.refuse('more', units, keep=True)}")

    def fragment(self) -> str:
        """Request a pod that fits the node and no single card."""

        def attempt(_attempts: int) -> str:
            now = self._client.node_state(self.node)
            units = sizing.fragment_size(now)
            if units is None:
                raise Skipped(f"node {self.node} doesn't have two cards with free memory")
            return f"{units} of {now.total_free} units free: {self.refuse('fragmented', units, keep=False)}"

        return self.retried(attempt)

    # ----------------------------------------------------------------- Y5

    def over_allocate(self) -> str:
        """Run the command that tries to hold more than the container's share."""
        name = self._filled[0]
        enforced = self.selected.memory_limit == contract.LIMIT_ENFORCED
        try:
            self._execute(self._options.namespace, name, "c0", self._options.allocate_command)
        except CommandFailed as error:
            text = result.shorten(str(error))
            if error.status != OUT_OF_MEMORY:
                do = f"have it end with {OUT_OF_MEMORY} where CUDA refuses memory, and with 0 where it doesn't"
                raise StepOutcome(f"allocate_command showed no refusal: {text}", do, name) from error
            if not enforced:
                raise StepOutcome(
                    f"allocate_command failed on a node that enforces no shares: {text}", "", name
                ) from error
            return f"refused, as expected: {text}"
        if enforced:
            raise Failed(
                f"a container of pod {name} held more than its share, though node {self.node} announces that it "
                "enforces shares",
                "check that the command requested more than the share, and the driver's limits on that node",
                name,
            )
        return "it held more than its share: gpushare counts memory, and this node enforces no shares"


def no_node_text(reasons: dict[str, str]) -> str:
    """Return why no node can be used, with the reasons of three nodes."""
    named = [f"{name}: {reason}" for name, reason in list(reasons.items())[:3]]
    rest = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"no node has free memory that can be used ({'; '.join(named)}{rest})"


def _placement_text(pods: t.Sequence[PodState], units: int) -> str:
    cards = sorted({pod.index for pod in pods if pod.index is not None})
    counted = [f"card {card} ({sum(1 for pod in pods if pod.index == card)})" for card in cards]
    return f"{len(pods)} pod{'s' if len(pods) > 1 else ''} of {units} units on {', '.join(counted)}"
