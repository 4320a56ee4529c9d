# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Poll until a condition holds or a deadline passes."""

from __future__ import annotations

import dataclasses
import time
import typing as t

from .errors import NotInEffect, ShareError

# A condition that holds once may be a moment of a flapping one; so many successive polls must agree.
STABLE_POLLS = 3


@dataclasses.dataclass
class Waiting:
    """A time limit and the pause between two polls, both in seconds; tests inject the clock."""

    timeout: float
    pause: float = 1.0
    sleep: t.Callable[[float], None] = time.sleep
    now: t.Callable[[], float] = time.monotonic
    # Gets what is waited for, as text for people, after each poll.
    status: t.Callable[[str], t.Any] = str

    def attempts(self) -> t.Iterator[None]:
        """Yield once for each poll: at least once, and for the last time at or after the deadline."""
        end = self.now() + self.timeout
        while True:
            yield
            if self.now() >= end:
                return
            self.sleep(self.pause)

    def until_done(
        self,
        left: t.Callable[[], str],
        subject: str = "",
        why: t.Callable[[], list[str]] = lambda: [],
        passing: tuple[type[ShareError], ...] = (),
    ) -> None:
        """Wait until nothing is left to do.

        :param left: returns what is left; empty for nothing.
        :param subject: the beginning of the error.
        :param why: returns more details for the error.
        :param passing: errors of ``left`` that may pass, as those of an API server that is away for a moment.
        :raises NotInEffect: something is left when the time is over.
        """
        reason = ""
        for _attempt in self.attempts():
            try:
                reason = left()
            except passing as error:
                reason = str(error)
            if not reason:
                return
        try:
            details = why()
        except ShareError as error:
            details = [str(error)]
        begin = f"{subject} within" if subject else "not within"
        raise NotInEffect(f"{begin} {self.timeout:g} s: {'; '.join([reason, *details])}")

    def until_stable(self, problem_of: t.Callable[[], tuple[str, bool]]) -> str:
        """Wait until successive polls report no problem.

        :param problem_of: returns the current problem (empty if there is none), and whether it is permanent.
        :returns: the last problem, or an empty string.
        """
        problem, stable = "", 0
        for _attempt in self.attempts():
            try:
                problem, permanent = problem_of()
            except ShareError as error:
                # The API server may be unavailable for a moment.
                problem, permanent = str(error), False
            if permanent:
                return problem
            stable = 0 if problem else stable + 1
            if stable >= STABLE_POLLS:
                return ""
        return f"not within {self.timeout:g} s: {problem or 'the condition did not stay true'}"
