# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query NVML function by function; errors and implausible values are collected as the card's problem. No I/O."""

from __future__ import annotations

import typing as t

from .return_codes import FUNCTION_NOT_FOUND, LOST, NOT_SUPPORTED, NvmlRefused, describe

MIB = 1 << 20
# NVML_VALUE_NOT_AVAILABLE as an unsigned long long; real values are far smaller.
NOT_AVAILABLE = (1 << 64) - 1
MAX_NUMBER = 1 << 62
MAX_TEXT = 256
MAX_PROBLEMS = 12


class Nvml(t.Protocol):
    """The library; every call raises NvmlRefused only. Handles are opaque."""

    def call(self, function: str, *arguments: t.Any) -> t.Any:
        """Call a function of nvidia-ml-py; invalid UTF-8 is replaced by U+FFFD."""

    def memory(self, handle: t.Any) -> t.Mapping[str, t.Any]:
        """Return ``total``, ``used``, ``free`` in bytes and, with version 2 of the function, ``reserved``."""

    def field(self, handle: t.Any, name: str) -> t.Any:
        """Return an unsigned field of ``nvmlDeviceGetFieldValues``, by the name of its constant."""

    def fabric(self, handle: t.Any) -> tuple[t.Any, t.Any]:
        """Return state and status of a card's registration with its NVSwitches (driver branch 530 and newer)."""

    def limit(self, handle: t.Any, folder: str) -> tuple[t.Any, t.Any, t.Any]:
        """Return a cgroup's soft limit, hard limit and used memory in bytes, by its path in sysfs."""

    def has(self, function: str) -> bool:
        """Return whether the driver's library has this function."""


class Query:
    """Queries about one card, or about the system.

    A missing or unsupported function is no problem: its value is None. If the card is lost, the exception is raised.

    :param of_card: whether they are about a card; a query about the system only adds a lost card to the problem.
    """

    def __init__(self, nvml: Nvml, of_card: bool = True) -> None:
        self.nvml = nvml
        self._of_card = of_card
        self._refused: dict[tuple[int, str], list[str]] = {}
        self._implausible: list[str] = []

    def attempt(self, subject: str, function_call: t.Callable[[], t.Any]) -> t.Any:
        """Call a function; None if it is refused.

        :param subject: what it reads, for the problem.
        :raises NvmlRefused: the card is lost.
        """
        try:
            return function_call()
        except NvmlRefused as refused:
            if refused.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                self.add_refusal(refused, subject)
            return None

    def call(self, subject: str, function: str, *arguments: t.Any) -> t.Any:
        """Call a function of the library by its name; None if it is refused."""
        return self.attempt(subject, lambda: self.nvml.call(function, *arguments))

    def text(self, subject: str, function: str, *arguments: t.Any) -> str:
        """Read a string; empty if there is none."""
        answer = self.call(subject, function, *arguments)
        if answer is None:
            return ""
        if not isinstance(answer, str):
            self.add_implausible(f"{subject} isn't a string")
            return ""
        shown = printable(answer)
        if shown != answer:
            self.add_implausible(f"{subject} has unprintable characters")
        return shown

    def number(self, subject: str, function: str, *arguments: t.Any) -> int | None:
        """Read a whole number; None if there is none."""
        return self.whole(subject, self.call(subject, function, *arguments))

    def whole(self, subject: str, answer: t.Any) -> int | None:
        """Validate a whole number from 0; "not available" and None are None, other values are implausible."""
        if answer is None or answer == NOT_AVAILABLE:
            return None
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer <= MAX_NUMBER:
            self.add_implausible(f"{subject} can't be {printable(str(answer))[:40]}")
            return None
        return answer

    def add_refusal(self, refused: NvmlRefused, subject: str) -> None:
        """Add a refusal to the problem; equal ones become one sentence.

        :raises NvmlRefused: the card is lost.
        """
        if refused.code == LOST and self._of_card:
            raise refused
        self._refused.setdefault((refused.code, refused.text), []).append(subject)

    def add_implausible(self, text: str) -> None:
        """Add an implausible value to the problem."""
        if text not in self._implausible:
            self._implausible.append(text)

    def problem(self, last: NvmlRefused | None = None) -> str:
        """Return all problems as text; empty if there are none.

        :param last: the refusal that ended the queries.
        """
        found = [describe(last)] if last else []
        found += [describe(NvmlRefused(code, text), subjects) for (code, text), subjects in self._refused.items()]
        found += self._implausible[:MAX_PROBLEMS]
        if len(self._implausible) > MAX_PROBLEMS:
            found.append(f"and {len(self._implausible) - MAX_PROBLEMS} more")
        return "; ".join(found)


def printable(text: str) -> str:
    """Replace unprintable characters, and truncate a text that is longer than any name."""
    shown = "".join(one if one.isprintable() and one != "\ufffd" else "?" for one in text[:MAX_TEXT])
    return shown + "…" if len(text) > MAX_TEXT else shown
