# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What preflight has to say: findings with an id, what was found and what to do, as sentences and as a table. Pure."""

from __future__ import annotations

import dataclasses
import textwrap
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput

PROBLEM, WARNING, NOTE, IGNORED = "problem", "warning", "note", "ignored"
ORDER = (PROBLEM, WARNING, NOTE, IGNORED)
WIDTH = 120
# A path, a command or a package is kept whole.
WRAP: dict[str, t.Any] = {"break_on_hyphens": False, "break_long_words": False}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that preflight found.

    :param id: by which ``preflight_ignore`` names it.
    :param severity: ``problem`` stops the run, ``warning`` deserves a look, ``note`` can't be known yet.
    :param found: what was found; a clause that names the variable or the host.
    :param do: what the user can do about it; may be empty.
    :param host: the host of the inventory, where it is about one.
    """

    id: str
    severity: str
    found: str
    do: str = ""
    host: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.found}; {self.do}" if self.do else self.found


class Findings:
    """All findings of a run, in the order in which they were made."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def add(self, id: str, severity: str, found: str, do: str = "", host: str = "") -> None:
        self.all.append(Finding(id, severity, found, do, host))

    def problem(self, id: str, found: str, do: str = "", host: str = "") -> None:
        self.add(id, PROBLEM, found, do, host)

    def _of(self, severity: str) -> list[str]:
        return [one.sentence for one in self.all if one.severity == severity]

    @property
    def problems(self) -> list[str]:
        return self._of(PROBLEM)

    @property
    def warnings(self) -> list[str]:
        return self._of(WARNING)

    @property
    def notes(self) -> list[str]:
        return self._of(NOTE)

    def ignore(self, words: t.Sequence[str], known: t.Collection[str]) -> None:
        """Make problems and warnings harmless that the user knows of.

        :param words: ``id``, or ``id@host`` for one host.
        :param known: ids that may be ignored.
        :raises BadInput: a word names no such id.
        """
        for word in words:
            if word.partition("@")[0] not in known:
                raise BadInput(
                    f"preflight_ignore: {word!r} isn't the id of a finding that can be ignored; "
                    f"these are {', '.join(sorted(known))}"
                )
        self.all = [
            dataclasses.replace(one, severity=IGNORED)
            if one.id in words or (one.host and f"{one.id}@{one.host}" in words)
            else one
            for one in self.all
        ]

    def table(self) -> str:
        """Everything, the worst first, in columns that fit a terminal; empty where there is nothing."""
        rows = sorted(self.all, key=lambda one: ORDER.index(one.severity))
        if not rows:
            return ""
        ids = max(len(one.id) for one in rows)
        hosts = max(4, *(len(one.host) for one in rows))
        lines = [f"{'':8} {'id':{ids}} {'host':{hosts}} found, and what to do"]
        start = len(lines[0]) - len("found, and what to do")
        width = max(WIDTH - start, 40)
        for one in rows:
            texts = textwrap.wrap(one.found, width, **WRAP) + textwrap.wrap(one.do and "→ " + one.do, width, **WRAP)
            head = f"{one.severity:8} {one.id:{ids}} {one.host:{hosts}} "
            lines += [(head if at == 0 else " " * start) + text for at, text in enumerate(texts)]
        return "\n".join(lines) + "\n"
