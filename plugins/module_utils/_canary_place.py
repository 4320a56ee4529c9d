# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The canary's pods are placed: so many of known size, tried again where others took the room."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _canary_judge as judge
from ansible_collections.kubegpu.share.plugins.module_utils import _canary_result as result
from ansible_collections.kubegpu.share.plugins.module_utils._canary import Chosen
from ansible_collections.kubegpu.share.plugins.module_utils._canary_book import Book
from ansible_collections.kubegpu.share.plugins.module_utils._canary_hands import Hands
from ansible_collections.kubegpu.share.plugins.module_utils._canary_objects import Wish
from ansible_collections.kubegpu.share.plugins.module_utils._canary_result import Churned, Failed, NotShown, Told
from ansible_collections.kubegpu.share.plugins.module_utils._canary_seen import Seen

# How often a step is tried that others made impossible.
TRIES = 3
# A pod that was refused is looked at again only when something happens, so that another one is made after this time.
REFUSED_SECONDS = 20.0
# Runs a command in a container (namespace, pod, container, words) and returns what it prints; raises ShareError.
Execute = t.Callable[[str, str, str, t.Sequence[str]], str]


class Placing(Book):
    """What a run knows, and its step Y2."""

    def __init__(self, hands: Hands, execute: Execute, wish: Wish) -> None:
        super().__init__()
        self._hands = hands
        self._execute = execute
        self._wish = wish
        self.chosen: Chosen | None = None
        self._names = 0
        self._filled: list[str] = []
        self._preempts = True
        self._priority = 0

    @property
    def chosen_plan(self) -> Chosen:
        if self.chosen is None:
            raise NotShown("no node was chosen")
        return self.chosen

    @property
    def ready(self) -> bool:
        """There is a node, and nothing stands against it."""
        return self.chosen is not None and "Y1" in self.steps and self.steps["Y1"].result == result.SKIPPED

    @property
    def node(self) -> str:
        return self.chosen.survey.view.name if self.chosen else ""

    # ----------------------------------------------------------------- Y2

    def place(self) -> str:
        def fill(tries: int) -> str:
            if tries:
                self.remove(set(self._hands.made))
                self.chosen = self._hands.choose()
            return self._fill()

        return self.tried(fill)

    def _fill(self) -> str:
        sizes, before = self.chosen_plan.sizes, self._hands.survey(self.node)
        self._filled = names = [self.name("share") for _number in range(sizes.pods)]
        for number, name in enumerate(names):
            made = self._hands.make(name, sizes.units, self.node)
            if number == 0:
                self._priority, self._preempts = made.priority, made.preempts
        pods = self.up(names, sizes.units)
        after = self._hands.survey(self.node)
        for pod in pods:
            judge.check_room(pod, before, after, self._wish.namespace)
        return f"{_placed(pods, sizes.units)} of node {self.node}"

    def up(self, names: t.Sequence[str], units: int) -> list[Seen]:
        """Pods that run where they should.

        :raises Told: one of them doesn't, and what that means.
        """
        latest = [self._hands.survey(self.node)]
        bare: dict[str, Seen] = {}
        refused: list[float] = []

        def enough(seen: dict[str, Seen]) -> bool:
            # The device plugin may name a card later: that nobody had before counts.
            bare.update({one.name: one for one in seen.values() if one.node and one.index is None})
            if bare or any(one.ended for one in seen.values()):
                return True
            if all(judge.settled(one, latest[0]) for one in seen.values()):
                return True
            if not any(one.refusals and not one.node for one in seen.values()):
                refused.clear()
                return False
            refused.append(self._hands.now())
            latest[0] = self._hands.survey(self.node)
            full = max(latest[0].view.free.values(), default=0) < units
            return full or refused[-1] - refused[0] >= REFUSED_SECONDS

        seen = self._hands.watch(names, enough)
        pods = [bare.get(name, seen[name]) for name in names]
        latest[0] = self._hands.survey(self.node)
        for pod in pods:
            if pod.node:
                judge.check_placement(pod, units, latest[0])
        ended = [pod for pod in pods if pod.ended]
        waiting = [pod for pod in pods if not pod.node and not pod.ended]
        starting = [pod for pod in pods if not judge.settled(pod, latest[0])]
        if waiting and not ended:
            raise judge.not_placed(waiting[0], units, latest[0], self._hands.claimed(), self._wish.timeout)
        if starting:
            raise judge.not_running((ended or starting)[0], self._wish.timeout)
        return pods

    # ----------------------------------------------------------------- for all steps

    def tried(self, work: t.Callable[[int], str]) -> str:
        """Do what others can make impossible, a few times.

        :param work: takes how often it was tried before.
        """
        told = Churned("")
        for tries in range(TRIES):
            try:
                return work(tries)
            except Churned as found:
                told = found
        if told.failure:
            raise told.failure
        raise Told(f"{told.what}; tried {TRIES} times", "run it again at a quieter time", told.pod, told.card)

    def name(self, word: str) -> str:
        self._names += 1
        return f"{word}-{self._names}"

    def remove(self, names: t.Collection[str]) -> None:
        left = self._hands.remove(names)
        if left:
            seen = self._hands.pods()
            says = seen[left[0]].says if left[0] in seen else ""
            raise Failed(
                f"pod {left[0]} is still there {self._wish.timeout:g} s after its deletion: {says}",
                f"see whether kubelet runs on node {self.node}",
                left[0],
            )


def _placed(pods: t.Sequence[Seen], units: int) -> str:
    cards = sorted({pod.index for pod in pods if pod.index is not None})
    counted = [f"card {card} ({sum(1 for pod in pods if pod.index == card)})" for card in cards]
    return f"{len(pods)} pod{'s' if len(pods) > 1 else ''} of {units} units on {', '.join(counted)}"
