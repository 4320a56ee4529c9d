# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The canary's steps, in their order; each says how it ended and none lets an error of another's get away."""

from __future__ import annotations

import re

from ansible_collections.kubegpu.share.plugins.module_utils import _canary as plan
from ansible_collections.kubegpu.share.plugins.module_utils import _canary_judge as judge
from ansible_collections.kubegpu.share.plugins.module_utils import _canary_result as result
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._canary import Survey
from ansible_collections.kubegpu.share.plugins.module_utils._canary_place import Placing
from ansible_collections.kubegpu.share.plugins.module_utils._canary_result import (
    Churned,
    Failed,
    NoBackend,
    NotShown,
    Step,
    Told,
)
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError

# How long a refusal must stand.
HOLD_SECONDS = 3.0


class Canary(Placing):
    """One run."""

    def run(self) -> None:
        """All steps in their order; what can't follow after a bad one is skipped."""
        if not self.step("Y1", self.prepare):
            return
        if not self.step("Y2", self.place):
            for identifier in ("Y3", "Y4", "Y5", "Y6"):
                self.skip(identifier, "the pods before it didn't come up")
            return
        self.step("Y3", self.one_more)
        filled = plan.fragments_when_filled(self.chosen_plan)
        if filled:
            self.step("Y4", self.fragmented)
        if self._wish.allocate_command:
            self.step("Y5", self.over_allocate)
        else:
            self.skip("Y5", "no allocate_command is given")
        released = self.step("Y6", self.release)
        if not filled:
            self.step("Y4", self.fragmented)
        if released:
            self.step("Y6", self.again)

    # ----------------------------------------------------------------- Y1

    def look(self, check: bool) -> str:
        """Find a node, and remove what an earlier run left: it may hold all that is free.

        :raises BadInput: an option can't be served.
        :raises NotShown: what would be done, or why nothing can be.
        """
        full: NotShown | None = None
        try:
            self.chosen = self._hands.choose()
        except NoBackend:
            raise
        except NotShown as told:
            full = told
        if self._hands.space() is not None and not check:
            said = self._hands.clean(only_ours=False)
            if said:
                raise Told(
                    f"namespace {self._wish.namespace} of an earlier run can't be removed: {said}",
                    f"see what keeps it: kubectl get namespace {self._wish.namespace} -o yaml",
                )
            # What it held is free again.
            self.chosen = None
            self.chosen = self._hands.choose()
        elif full:
            raise full
        self._hands.find_image()
        sizes = self.chosen_plan.sizes
        raise NotShown(
            f"would make namespace {self._wish.namespace}, run {sizes.pods} pods of {sizes.units} units on node "
            f"{self.node}, ask for more than fits, and remove everything"
        )

    def prepare(self) -> str:
        left = ", after what an earlier run left was removed" if self._hands.changed else ""
        self.may_fail = False
        try:
            self._hands.make_space()
        except BadInput:
            self.may_fail = not self._hands.touched
            raise
        return f"namespace {self._wish.namespace}{left}"

    # ----------------------------------------------------------------- Y3, Y4

    def one_more(self) -> str:
        """The pod after the last that fits; where others left in between, one more is the last."""
        units = self.chosen_plan.sizes.units
        return self.tried(lambda _tries: f"{units} units more: {self._refused('more', units, keep=True)}")

    def fragmented(self) -> str:
        def attempt(_tries: int) -> str:
            now = self._hands.survey(self.node)
            units = plan.fragment(now)
            if units is None:
                raise NotShown(f"node {self.node} has no two cards with free memory")
            return f"{units} of {now.view.total_free} units free: {self._refused('fragmented', units, keep=False)}"

        return self.tried(attempt)

    def _refused(self, word: str, units: int, keep: bool) -> str:
        """Why a pod that must not be placed wasn't.

        :param keep: where it found room that others left, it stays there.
        :raises Told: it was, or for another reason.
        """
        name, before = self.name(word), self._hands.survey(self.node)
        weaker = plan.evictable(before, self._priority, self._wish.namespace) if self._preempts else []
        if weaker:
            raise NotShown(
                f"kube-scheduler could evict {weaker[0]} for it, whose priority is lower",
                "name a priority_class whose preemptionPolicy is Never",
            )
        self._hands.make(name, units, self.node)
        seen = self._hands.watch([name], lambda pods: bool(pods[name].node or pods[name].refusals))
        if not seen[name].node and seen[name].refusals:
            for _look in self._hands.wait(HOLD_SECONDS).looks():
                seen = {name: self._hands.pods().get(name, seen[name])}
                if seen[name].node:
                    break
        after = self._hands.survey(self.node)
        try:
            reason = judge.check_refused(seen[name], units, before, after, self._wish.namespace, self._wish.timeout)
        except Churned as told:
            if not (told.bound and keep):
                self.remove({name})
            raise
        except Told:
            self._hands.ask_to_go(name)
            raise
        self.remove({name})
        return reason

    # ----------------------------------------------------------------- Y5

    def over_allocate(self) -> str:
        """What a container's attempt to hold more than its share comes to."""
        name = self._filled[0]
        enforced = self.chosen_plan.survey.told == contract.LIMIT_ENFORCED
        try:
            self._execute(self._wish.namespace, name, "c0", self._wish.allocate_command)
        except ShareError as error:
            said = result.short(str(error))
            ended = re.search(r" ended with ([0-9]+)", said)
            # The shell's own numbers for a command that isn't there or can't be run.
            if not ended or ended.group(1) in ("126", "127"):
                raise Told(f"allocate_command couldn't be tried: {said}", "", name) from error
            if not enforced:
                raise Told(f"it failed where nobody enforces shares: {said}", "", name) from error
            return f"refused, as it must be: {said}"
        if enforced:
            raise Failed(
                f"a container of pod {name} held more than its share, though node {self.node} says it enforces them",
                "see whether the command really asked for more than the share, and what the driver's limits are there",
                name,
            )
        return "it got more than its share: gpushare counts memory, and nobody enforces shares on this node"

    # ----------------------------------------------------------------- Y6

    def release(self) -> str:
        """Everything is removed, and the node announces what it did.

        :raises Told: it doesn't.
        """
        before = self.chosen_plan.survey
        self.remove(set(self._hands.made))
        now = self._hands.survey(self.node)
        if now.allocatable >= before.allocatable:
            return "removed"
        what = f"node {self.node} has {now.allocatable} units to give, where it had {before.allocatable}"
        if _healthy(now) != _healthy(before):
            raise Told(f"{what}: its cards changed meanwhile", judge.PLUGIN)
        raise Failed(what, judge.PLUGIN)

    def again(self) -> str:
        """The largest free share can be given away again."""
        return self.tried(self._again)

    def _again(self, _tries: int) -> str:
        now = self._hands.survey(self.node)
        units = min(max(now.view.free.values(), default=0), now.view.total_free)
        if units < 1:
            raise Told(f"others took what was free on node {self.node} meanwhile", "run it again at a quieter time")
        name = self.name("again")
        try:
            self._hands.make(name, units, self.node)
            pods = self.up([name], units)
            judge.check_room(pods[0], now, self._hands.survey(self.node), self._wish.namespace)
        except Churned:
            self.remove({name})
            raise
        except Told:
            self._hands.ask_to_go(name)
            raise
        self.remove({name})
        return f"all removed; a pod of the {units} units that were free ran after them on card {pods[0].index}"

    # ----------------------------------------------------------------- Y7

    def finish(self) -> None:
        """Remove the namespace, whatever came before."""
        said = self._hands.clean(only_ours=True)
        name = self._wish.namespace
        if said:
            words = f"namespace {name} couldn't be removed: {said}"
            do = f"remove it (kubectl delete namespace {name}), or run the canary again, which removes it first"
            self.steps["Y7"] = Step("Y7", result.UNKNOWN, words, do)
        else:
            self.steps["Y7"] = Step("Y7", result.PASS, f"namespace {name} is gone")


def _healthy(seen: Survey) -> set[tuple[int, int, bool]]:
    return {(card.index, card.units, card.healthy) for card in seen.cards}
