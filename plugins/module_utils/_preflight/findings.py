# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings of preflight: data with an id, a host and fields; their texts and the list are made from it. Pure."""

from __future__ import annotations

import dataclasses
import textwrap
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._core.untrusted import line

PROBLEM, WARNING, NOTE, IGNORED = "problem", "warning", "note", "ignored"
ORDER = (PROBLEM, WARNING, NOTE, IGNORED)
# Longer lines are hard to read; a terminal or a log may be narrower.
WIDTH = 120
INDENT = " " * 9
# Hosts that are named; of more there is the number.
MOST_HOSTS = 8
# Paths, commands and names of packages aren't broken.
WRAP: JsonObject = {"break_on_hyphens": False, "break_long_words": False}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding.

    :param id: ``preflight_ignore`` takes it.
    :param severity: ``problem`` stops the run, ``warning`` asks for attention, ``note`` can't be known yet.
    :param what: template of what was found; with a subject it begins with a verb.
    :param action: template of what to do; may be empty.
    :param host: the host of the inventory.
    :param variable: the variable at fault; may be empty.
    :param fields: values of the templates; a list is joined with commas.
    :param subject: template of what goes before ``what`` where no host is named beside it.
    :param hosts: where several hosts have the finding in common, in place of ``host``.
    """

    id: str
    severity: str
    what: str
    action: str = ""
    host: str = ""
    variable: str = ""
    fields: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)
    subject: str = ""
    hosts: tuple[str, ...] = ()

    def _text(self, template: str) -> str:
        values = {
            name: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            for name, value in self.fields.items()
        }
        return line(template.format(host=self.host, **values))

    @property
    def places(self) -> tuple[str, ...]:
        """Return the hosts that have it."""
        return self.hosts or ((self.host,) if self.host else ())

    @property
    def bare(self) -> str:
        """Return what was found, for a line that stands below the host's name."""
        if not self.subject:
            return self.found
        return self._text(self.what) + (f" ({self.variable})" if self.variable else "")

    @property
    def found(self) -> str:
        """Return what was found."""
        return (f"{self.variable}: " if self.variable else "") + self._text(self.subject + self.what)

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
            "hosts": list(self.places),
            "variable": self.variable,
            "fields": dict(self.fields),
            "found": self.found,
            "do": self.do,
        }


class Findings(list[Finding]):
    """All findings of a run, in the order in which they were made."""

    def texts(self, severity: str) -> list[str]:
        """Return the texts of one severity."""
        return [finding.text for finding in self if finding.severity == severity]

    @property
    def problems(self) -> list[str]:
        """Return the texts of all that stops the run."""
        return self.texts(PROBLEM)

    def ignore(self, names: t.Sequence[str], known: t.Collection[str]) -> None:
        """Mark the findings that the user accepts.

        :param names: ``id``, or ``id@host`` or ``id@variable`` for one of them.
        :param known: ids that may be ignored.
        :raises BadInput: a name has no such id.
        """
        for name in names:
            if name.partition("@")[0] not in known:
                raise BadInput(
                    f"preflight_ignore: {name!r} isn't the id of a finding that can be ignored; "
                    f"these are {', '.join(sorted(known))}"
                )
        for at, finding in enumerate(self):
            if {finding.id, *(f"{finding.id}@{name}" for name in (finding.host, finding.variable) if name)} & {*names}:
                self[at] = dataclasses.replace(finding, severity=IGNORED)

    def entries(self, width: int) -> t.Iterator[tuple[str, str]]:
        """Yield severity and text of each entry of the list, problems first.

        A head line has severity, id and hosts; what was found and what to do stand below it. Hosts with the same
        finding share an entry.

        :param width: columns of the terminal.
        """
        hosts: dict[tuple[str, str, str, str], list[str]] = {}
        for finding in sorted(self, key=lambda finding: ORDER.index(finding.severity)):
            hosts.setdefault((finding.severity, finding.id, finding.bare, finding.do), []).extend(finding.places)
        lines: JsonObject = {"width": min(width, WIDTH), "initial_indent": INDENT, "subsequent_indent": INDENT, **WRAP}
        for (severity, id, bare, do), places in hosts.items():
            more = [f"and {len(places) - MOST_HOSTS} more"] if len(places) > MOST_HOSTS else []
            named = ", ".join([*places[:MOST_HOSTS], *more])
            head = f"{severity:8} {id}  "
            text = textwrap.wrap(head + named, **{**lines, "initial_indent": ""})
            text += textwrap.wrap(bare, **lines)
            text += textwrap.wrap(f"→ {do}", **{**lines, "subsequent_indent": INDENT + "  "}) if do else []
            yield severity, "\n".join(text)
