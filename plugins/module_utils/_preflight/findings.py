# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Findings of preflight: data with an id, a host and fields; their texts and the table are made from it. Pure."""

from __future__ import annotations

import dataclasses
import textwrap
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject

PROBLEM, WARNING, NOTE, IGNORED = "problem", "warning", "note", "ignored"
ORDER = (PROBLEM, WARNING, NOTE, IGNORED)
WIDTH = 120
# Paths, commands and names of packages aren't broken.
WRAP: JsonObject = {"break_on_hyphens": False, "break_long_words": False}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding.

    :param id: ``preflight_ignore`` takes it.
    :param severity: ``problem`` stops the run, ``warning`` asks for attention, ``note`` can't be known yet.
    :param what: template of what was found; of a machine it begins with a verb whose subject is the host.
    :param action: template of what to do; may be empty.
    :param host: the host of the inventory.
    :param variable: the variable at fault; may be empty.
    :param fields: values of the templates; a list is joined with commas.
    """

    id: str
    severity: str
    what: str
    action: str = ""
    host: str = ""
    variable: str = ""
    fields: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)

    def _text(self, template: str) -> str:
        values = {
            name: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            for name, value in self.fields.items()
        }
        return template.format(host=self.host, **values)

    @property
    def found(self) -> str:
        """Return what was found."""
        return (f"{self.variable}: " if self.variable else "") + self._text(self.what)

    @property
    def do(self) -> str:
        """Return what to do; may be empty."""
        return self._text(self.action)

    @property
    def text(self) -> str:
        """Return both in one line."""
        return f"{self.found}; {self.do}" if self.action else self.found

    def result(self) -> JsonObject:
        """Return the finding as the module returns it."""
        return {
            "id": self.id,
            "severity": self.severity,
            "host": self.host,
            "variable": self.variable,
            "fields": dict(self.fields),
            "found": self.found,
            "do": self.do,
        }


class Findings(list[Finding]):
    """All findings of a run, in the order in which they were made."""

    def texts(self, severity: str) -> list[str]:
        """Return the texts of one severity."""
        return [one.text for one in self if one.severity == severity]

    @property
    def problems(self) -> list[str]:
        """Return the texts of all that stops the run."""
        return self.texts(PROBLEM)

    def ignore(self, names: t.Sequence[str], known: t.Collection[str]) -> None:
        """Mark the findings that the user accepts.

        :param names: ``id``, or ``id@host`` for one host.
        :param known: ids that may be ignored.
        :raises BadInput: a name has no such id.
        """
        for name in names:
            if name.partition("@")[0] not in known:
                raise BadInput(
                    f"preflight_ignore: {name!r} isn't the id of a finding that can be ignored; "
                    f"these are {', '.join(sorted(known))}"
                )
        for at, one in enumerate(self):
            if one.id in names or (one.host and f"{one.id}@{one.host}" in names):
                self[at] = dataclasses.replace(one, severity=IGNORED)

    def table(self) -> str:
        """Return all findings in columns that fit a terminal, problems first; empty where there are none."""
        rows = sorted(self, key=lambda one: ORDER.index(one.severity))
        if not rows:
            return ""
        ids = max(len(one.id) for one in rows)
        hosts = max(4, *(len(one.host) for one in rows))
        title = "found, and what to do"
        lines = [f"{'':8} {'id':{ids}} {'host':{hosts}} {title}"]
        start = len(lines[0]) - len(title)
        width = max(WIDTH - start, 40)
        for one in rows:
            texts = textwrap.wrap(one.found, width, **WRAP) + textwrap.wrap(one.do and "→ " + one.do, width, **WRAP)
            head = f"{one.severity:8} {one.id:{ids}} {one.host:{hosts}} "
            lines += [(head if at == 0 else " " * start) + text for at, text in enumerate(texts)]
        return "\n".join(lines) + "\n"
