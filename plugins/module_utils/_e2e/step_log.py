# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a suite's steps, and log the result of each, whatever it raises. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.errors import BadInput, ShareError
from .._kube.errors import KubeError
from . import result
from .nodes import MALFORMED
from .result import Skipped, StepOutcome, StepResult

FORBIDDEN = 403


class StepRunner:
    """
    :ivar steps: results by step ID.
    :ivar may_fail: nothing was created yet, so that an error of the user's ends the run.
    """

    def __init__(self) -> None:
        self.steps: dict[str, StepResult] = {}
        self._about: dict[str, result.About] = {}
        self.may_fail = True
        self._api_error = ""

    def step(self, identifier: str, work: t.Callable[[], str]) -> bool:
        """Run one step, log its result, and return whether it passed.

        :raises BadInput: an option is invalid, and nothing was created yet.
        """
        try:
            if self._api_error:
                raise Skipped(f"the API server failed before: {self._api_error}")
            step = StepResult(identifier, result.PASS, work())
        except StepOutcome as one:
            step = StepResult(identifier, one.result, one.what, one.do, one.pod, one.card, one.evidence)
            step = dataclasses.replace(step, unshown=isinstance(one, result.Unshown))
        except BadInput as error:
            if self.may_fail:
                raise
            step = self._api_failure(identifier, error)
        except ShareError as error:
            step = self._api_failure(identifier, error)
        except MALFORMED as error:
            what = f"the API server's response is malformed ({type(error).__name__})"
            step = StepResult(identifier, result.UNKNOWN, what)
        self.steps[identifier] = dataclasses.replace(step, about=self._about.get(identifier))
        return step.result == result.PASS

    def describe(self, identifier: str, title: str, proves: str, by: tuple[str, ...]) -> None:
        """Set what a step shows, before it runs.

        :param identifier: the step's ID.
        :param title: one line.
        :param proves: what follows if it passes.
        :param by: the kinds of evidence.
        """
        self._about[identifier] = result.About(title, proves, by)

    def _api_failure(self, identifier: str, error: ShareError) -> StepResult:
        self._api_error = result.shorten(str(error))
        do = "check the API server's health"
        if isinstance(error, KubeError) and error.status == FORBIDDEN:
            do = "grant the rights that gpu_acceptance lists"
        if isinstance(error, KubeError) and error.admission:
            do = "exempt the suite's namespace from the quota, LimitRange or policy that refuses its pods"
        return StepResult(identifier, result.UNKNOWN, self._api_error, do)

    def skip(self, identifier: str, reason: str) -> None:
        """Log a step that isn't run."""
        self.steps[identifier] = StepResult(identifier, result.SKIPPED, reason)
