# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Questions to NVML that may each fail for itself; what goes wrong is collected as the card's problem. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._nvml_words import (
    FUNCTION_NOT_FOUND,
    LOST,
    NOT_SUPPORTED,
    Refused,
    sentence,
)

MIB = 1 << 20
# NVML_VALUE_NOT_AVAILABLE as an unsigned long long; the highest that could be anything else is far below.
NOT_AVAILABLE = (1 << 64) - 1
MOST = 1 << 62
MOST_TEXT = 256
MOST_PROBLEMS = 12


class Nvml(t.Protocol):
    """The door to the library; every call raises Refused and nothing else. Handles mean nothing here."""

    def ask(self, function: str, *arguments: t.Any) -> t.Any:
        """Call a function of nvidia-ml-py; text that isn't UTF-8 comes with U+FFFD in it."""

    def memory(self, handle: t.Any) -> t.Mapping[str, t.Any]:
        """``total``, ``used``, ``free`` in bytes and, where the driver has version 2, ``reserved``."""

    def field(self, handle: t.Any, name: str) -> t.Any:
        """The unsigned number of a field of ``nvmlDeviceGetFieldValues``, by the name of its constant."""

    def limit(self, handle: t.Any, folder: str) -> tuple[t.Any, t.Any, t.Any]:
        """A cgroup's soft limit, hard limit and use in bytes; the folder is its path in sysfs."""

    def has(self, function: str) -> bool:
        """The driver's library has this function."""


class Asking:
    """Questions about one card.

    A function that is missing or not supported is no problem: its answer is None. A card that is lost ends it all: the
    exception goes through.
    """

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self._refused: dict[tuple[int, str], list[str]] = {}
        self._doubts: list[str] = []

    def ask(self, what: str, question: t.Callable[[], t.Any]) -> t.Any:
        """Ask; None where there is no answer.

        :param what: as it completes "when asked for".
        :raises Refused: the card is lost.
        """
        try:
            return question()
        except Refused as refused:
            if refused.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                self.refused(refused, what)
            return None

    def call(self, what: str, function: str, *arguments: t.Any) -> t.Any:
        """Ask by a function of the library."""
        return self.ask(what, lambda: self.nvml.ask(function, *arguments))

    def text(self, what: str, function: str, *arguments: t.Any) -> str:
        """Ask for a text; empty where there is none."""
        answer = self.call(what, function, *arguments)
        if answer is None:
            return ""
        if not isinstance(answer, str):
            self.doubt(f"{what} isn't a text")
            return ""
        shown = printable(answer)
        if shown != answer:
            self.doubt(f"{what} has characters in it that are no text")
        return shown

    def number(self, what: str, function: str, *arguments: t.Any) -> int | None:
        """Ask for a whole number; None where there is none."""
        return self.whole(what, self.call(what, function, *arguments))

    def whole(self, what: str, answer: t.Any) -> int | None:
        """A number from 0 on; "not available" and None are None, all else is doubted."""
        if answer is None or answer == NOT_AVAILABLE:
            return None
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer <= MOST:
            self.doubt(f"{what} can't be {printable(str(answer))[:40]}")
            return None
        return answer

    def refused(self, refused: Refused, what: str) -> None:
        """Note a refusal; equal ones become one sentence.

        :raises Refused: the card is lost.
        """
        if refused.code == LOST:
            raise refused
        self._refused.setdefault((refused.code, refused.words), []).append(what)

    def doubt(self, words: str) -> None:
        """Note an answer that can't be true."""
        if words not in self._doubts:
            self._doubts.append(words)

    def problem(self, last: Refused | None = None) -> str:
        """All that went wrong, or nothing.

        :param last: what ended it.
        """
        found = [sentence(last)] if last else []
        found += [sentence(Refused(code, words), whats) for (code, words), whats in self._refused.items()]
        found += self._doubts[:MOST_PROBLEMS]
        if len(self._doubts) > MOST_PROBLEMS:
            found.append(f"and {len(self._doubts) - MOST_PROBLEMS} more")
        return "; ".join(found)


def printable(text: str) -> str:
    """The text with what can't be shown replaced, and not longer than any name is."""
    shown = "".join(one if one.isprintable() and one != "\ufffd" else "?" for one in text[:MOST_TEXT])
    return shown + "…" if len(text) > MOST_TEXT else shown
