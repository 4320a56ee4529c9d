# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the canary says: steps and their results, also in the shapes of gpu_allocation_check. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

PASS, FAIL, UNKNOWN, SKIPPED = "PASS", "FAIL", "UNKNOWN", "skipped"

TITLES = {
    "Y1": "The canary has a namespace of its own",
    "Y2": "Pods of known size are placed on cards with room for them, and run",
    "Y3": "One pod more than fits stays Pending, for the extender's reason",
    "Y4": "A pod that fits the node but no single card stays Pending, for the extender's reason",
    "Y5": "A container can't hold more than its share where shares are enforced",
    "Y6": "What the pods held can be given away again",
    "Y7": "Nothing of the canary is left",
}


class Told(Exception):
    """How a step ended, other than well.

    :param what: one sentence.
    :param do: what to do about it, one sentence.
    :param pod: its name.
    :param evidence: what the API showed.
    """

    result = UNKNOWN

    def __init__(self, what: str, do: str = "", pod: str = "", card: int | None = None, evidence: str = "") -> None:
        super().__init__(what)
        self.what, self.do, self.pod, self.card, self.evidence = what, do, pod, card, evidence


class Failed(Told):
    """The contract is broken."""

    result = FAIL


class NotShown(Told):
    """This cluster, as it is now, can't show it."""

    result = SKIPPED


class NoBackend(NotShown):
    """Nothing that the canary knows is here."""


class Churned(Told):
    """Others came or went in between, or some cache is behind for a moment; it may be tried again.

    :ivar bound: because others went, the pod was placed.
    :ivar failure: what it comes to if every try ends so; None where nothing follows from it.
    """

    bound = False
    failure: Failed | None = None

    @classmethod
    def perhaps(cls, failure: Failed) -> Churned:
        """A failure, if it is one each time."""
        told = cls(failure.what, failure.do, failure.pod, failure.card, failure.evidence)
        told.failure = failure
        return told


@dataclasses.dataclass(frozen=True)
class Step:
    id: str
    result: str
    what: str
    do: str = ""
    pod: str = ""
    card: int | None = None
    evidence: str = ""

    def as_dict(self) -> Json:
        return {"id": self.id, "title": TITLES[self.id], "result": self.result, "what": self.what, "do": self.do}


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 400 else line[:400] + "…"


def result_of(steps: t.Sequence[Step]) -> str:
    """FAIL before UNKNOWN before PASS; skipped where the steps that show something all are."""
    results = {step.result for step in steps}
    shown = {step.result for step in steps if step.id not in ("Y1", "Y7")}
    for one in (FAIL, UNKNOWN):
        if one in results:
            return one
    return PASS if PASS in shown else SKIPPED


def findings(steps: t.Iterable[Step], node: str, namespace: str) -> list[Json]:
    """What failed and what couldn't be known, in the shape of gpu_allocation_check's findings."""
    return [
        {
            "check": step.id,
            "level": step.result,
            "node": node,
            "card": step.card,
            "uuid": "",
            "pod": f"{namespace}/{step.pod}" if step.pod else "",
            "container": "",
            "what": step.what,
            "evidence": {"api": step.evidence} if step.evidence else {},
            "do": step.do,
            "seen": 1,
        }
        for step in steps
        if step.result in (FAIL, UNKNOWN)
    ]


def checks(steps: t.Iterable[Step]) -> list[Json]:
    """One row per step, in the shape of gpu_allocation_check's checks; a skipped one had nothing to check."""
    return [
        {
            "id": step.id,
            "backend": "gpushare",
            "title": TITLES[step.id],
            "result": PASS if step.result == SKIPPED else step.result,
            "n": 0 if step.result == SKIPPED else 1,
            "fail": int(step.result == FAIL),
            "warn": 0,
            "unknown": int(step.result == UNKNOWN),
        }
        for step in steps
    ]
