# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Steps of a suite and their results, whatever they raise, also in the form of checks and findings. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts.claims import MALFORMED
from .._core.both_ends import both_ends
from .._core.columns import columns
from .._core.errors import BadInput, ShareError
from .._kube.errors import KubeError

PASS, FAIL, UNKNOWN, SKIPPED = "PASS", "FAIL", "UNKNOWN", "skipped"

TITLES = {
    "W1": "The suite has a namespace of its own",
    "W2": "Three pods run on the cards that the placement chooses",
    "W3": "A pod that fits the node but no single card stays Pending, for the extender's reason",
    "W4": "A pod larger than the cluster stays Pending",
    "W5": "Each container sees its own card's device node and no other",
    "W6": "Both containers of a pod get the same card",
    "W6a": "A program that computes runs in a container with a share",
    "W7": "After deletion the memory can be allocated again",
    "W8": "The suite's namespace is removed",
    "Y1": "The canary has a namespace of its own",
    "Y2": "Pods of known size are placed on cards with enough free memory, and run",
    "Y3": "One pod more than fits stays Pending, for the extender's reason",
    "Y4": "A pod that fits the node but no single card stays Pending, for the extender's reason",
    "Y5": "A container can't hold more than its share where shares are enforced",
    "Y6": "After deletion the memory can be allocated again",
    "Y7": "The canary's namespace is removed",
    "M00": "The suite has a namespace of its own",
    "M99": "The suite's namespace is removed",
    "M": "The suite can begin",
}
# Stands for a suite that couldn't begin.
WHOLE = "M"
# Creating and removing the namespace proves nothing about sharing.
FRAME = ("W1", "W8", "Y1", "Y7", "M00", "M99")


class Finding(t.TypedDict):
    """A failed or unknown step, in the form of gpu_allocation_check's findings."""

    check: str
    level: str
    node: str
    card: int | None
    uuid: str
    pod: str
    container: str
    what: str
    evidence: dict[str, str]
    do: str
    seen: int


class Check(t.TypedDict):
    """One step, in the form of gpu_allocation_check's checks."""

    id: str
    backend: str
    title: str
    result: str
    n: int
    fail: int
    warn: int
    unknown: int


class StepOutcome(Exception):
    """The outcome of a step that didn't pass; UNKNOWN unless a subclass sets another result.

    :ivar code: why nothing could be shown, where that has a code.
    :param what: one sentence that states what happened.
    :param do: one sentence that states what to do about it.
    :param pod: the pod's name.
    :param evidence: the state that the API reported.
    """

    result = UNKNOWN
    code = ""

    def __init__(self, what: str, do: str = "", pod: str = "", card: int | None = None, evidence: str = "") -> None:
        super().__init__(what)
        self.what, self.do, self.pod, self.card, self.evidence = what, do, pod, card, evidence


class Failed(StepOutcome):
    """The contract is violated."""

    result = FAIL


class Skipped(StepOutcome):
    """This cluster, in its present state, can't show it."""

    result = SKIPPED

    @classmethod
    def by_code(cls, code: str, texts: t.Mapping[str, str], **fields: t.Any) -> Skipped:
        """Make the outcome of a code.

        :param texts: sentences by code, with names of the fields.
        """
        outcome = cls(texts[code].format(**fields))
        outcome.code = code
        return outcome


class Unshown(StepOutcome):
    """Only a real card or a program that nobody named can show it."""


class NoBackend(Skipped):
    """No node has a back end that the suite can test."""


class Inconclusive(StepOutcome):
    """Other pods came or went, or a cache was stale; the step may be retried.

    :ivar bound: the pod was placed, because others left.
    :ivar failure: the outcome if every attempt ends like this; None where nothing follows from it.
    """

    bound = False
    failure: Failed | None = None

    @classmethod
    def unless_repeated(cls, failure: Failed) -> Inconclusive:
        """Make an outcome that is a failure only if every attempt has it."""
        outcome = cls(failure.what, failure.do, failure.pod, failure.card, failure.evidence)
        outcome.failure = failure
        return outcome


class About(t.NamedTuple):
    """A step of a suite that consists of data.

    :param by: the kinds of evidence.
    """

    title: str
    proves: str
    by: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One step's result, with the fields of :class:`StepOutcome`.

    :param about: what the step shows, where ``TITLES`` doesn't have it.
    :param unshown: its result is that of ``Unshown``.
    :param code: see ``StepOutcome``.
    """

    id: str
    result: str
    what: str
    do: str = ""
    pod: str = ""
    card: int | None = None
    evidence: str = ""
    about: About | None = None
    unshown: bool = False
    code: str = ""

    @property
    def title(self) -> str:
        return self.about.title if self.about else TITLES[self.id]

    def as_dict(self) -> dict[str, t.Any]:
        shown = {"id": self.id, "title": self.title, "result": self.result, "what": self.what, "do": self.do}
        about = {"proves": self.about.proves, "by": list(self.about.by)} if self.about else {}
        return {**shown, "unshown": self.unshown, "code": self.code, **about}


def shorten(text: str) -> str:
    """Return the text as one printable line of at most 400 characters, of a longer one both ends."""
    return both_ends(text, 400)


def overall_result(steps: t.Sequence[StepResult]) -> str:
    """Return FAIL before UNKNOWN before PASS; skipped if every step that shows something was."""
    results = {step.result for step in steps}
    shown = {step.result for step in steps if step.id not in FRAME}
    for result in (FAIL, UNKNOWN):
        if result in results:
            return result
    return PASS if PASS in shown else SKIPPED


def findings(steps: t.Iterable[StepResult], node: str, namespace: str) -> list[Finding]:
    """Return the failed and unknown steps."""
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


def checks(steps: t.Iterable[StepResult], backend: str = "gpushare") -> list[Check]:
    """Return one row for each step; a skipped step has checked nothing."""
    return [
        {
            "id": step.id,
            "backend": backend,
            "title": step.title,
            "result": PASS if step.result == SKIPPED else step.result,
            "n": 0 if step.result == SKIPPED else 1,
            "fail": int(step.result == FAIL),
            "warn": 0,
            "unknown": int(step.result == UNKNOWN),
        }
        for step in steps
    ]


def table(steps: t.Sequence[StepResult], title: str) -> str:
    """Format the steps as text: the title, one line for each step, then the counts."""
    rows = [("ID", "CHECK", "RESULT", "DETAIL"), *((step.id, step.title, step.result, step.what) for step in steps)]
    counts = {result: sum(1 for step in steps if step.result == result) for result in (PASS, FAIL, UNKNOWN, SKIPPED)}
    sums = f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[UNKNOWN]} unknown, {counts[SKIPPED]} skipped"
    return (f"{title}\n" if title else "") + columns(rows) + sums


FORBIDDEN = 403


class StepRunner:
    """
    :ivar steps: results by step ID.
    :ivar may_fail: nothing was created yet, so that an error of the user's ends the run.
    """

    def __init__(self) -> None:
        self.steps: dict[str, StepResult] = {}
        self._about: dict[str, About] = {}
        self.may_fail = True
        self._api_error = ""

    def step(self, identifier: str, work: t.Callable[[], str]) -> bool:
        """Run one step, log its result, and return whether it passed.

        :raises BadInput: an option is invalid, and nothing was created yet.
        """
        try:
            if self._api_error:
                raise Skipped(f"the API server failed before: {self._api_error}")
            step = StepResult(identifier, PASS, work())
        except StepOutcome as error:
            step = StepResult(identifier, error.result, error.what, error.do, error.pod, error.card, error.evidence)
            step = dataclasses.replace(step, unshown=isinstance(error, Unshown), code=error.code)
        except BadInput as error:
            if self.may_fail:
                raise
            step = self._api_failure(identifier, error)
        except ShareError as error:
            step = self._api_failure(identifier, error)
        except MALFORMED as error:
            what = f"the API server's response is malformed ({type(error).__name__})"
            step = StepResult(identifier, UNKNOWN, what)
        self.steps[identifier] = dataclasses.replace(step, about=self._about.get(identifier))
        return step.result == PASS

    def describe(self, identifier: str, title: str, proves: str, by: tuple[str, ...]) -> None:
        """Set what a step shows, before it runs.

        :param identifier: the step's ID.
        :param title: one line.
        :param proves: what follows if it passes.
        :param by: the kinds of evidence.
        """
        self._about[identifier] = About(title, proves, by)

    def _api_failure(self, identifier: str, error: ShareError) -> StepResult:
        self._api_error = shorten(str(error))
        do = "check the API server's health"
        if isinstance(error, KubeError) and error.status == FORBIDDEN:
            do = "grant the rights that gpu_acceptance lists"
        if isinstance(error, KubeError) and error.admission:
            do = "exempt the suite's namespace from the quota, LimitRange or policy that refuses its pods"
        return StepResult(identifier, UNKNOWN, self._api_error, do)

    def skip(self, identifier: str, reason: str) -> None:
        """Log a step that isn't run."""
        self.steps[identifier] = StepResult(identifier, SKIPPED, reason)
