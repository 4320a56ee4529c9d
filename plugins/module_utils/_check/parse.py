# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read JSON of any shape: a value of the wrong type is left out and recorded, never raised. No I/O."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.types import JsonObject

# Above any memory in MiB and any count.
MAX_NUMBER = 10**15
# Python refuses to convert thousands of digits.
MAX_DIGITS = 24
# Per node.
MAX_UNREADABLE = 20

_NUMBER = re.compile(f"-?[0-9]{{1,{MAX_DIGITS}}}")


class Reader:
    """Takes values of one type, and records each value of another type. ``null`` counts as absent."""

    def __init__(self) -> None:
        self.unreadable: list[str] = []

    def reject(self, where: str, expected: str, value: t.Any) -> None:
        self.add(f"{where} is {describe(value)}, not {expected}")

    def add(self, problem: str) -> None:
        """Record what can't be read."""
        if problem not in self.unreadable and len(self.unreadable) < MAX_UNREADABLE:
            self.unreadable.append(problem)

    def mapping(self, value: t.Any, where: str) -> JsonObject:
        if isinstance(value, dict):
            return {key: entry for key, entry in value.items() if isinstance(key, str)}
        if value is not None:
            self.reject(where, "an object", value)
        return {}

    def sequence(self, value: t.Any, where: str) -> list[t.Any]:
        if isinstance(value, (list, tuple)):
            return list(value)
        if value is not None:
            self.reject(where, "a list", value)
        return []

    def mappings(self, value: t.Any, where: str) -> list[JsonObject]:
        mappings = []
        for entry in self.sequence(value, where):
            if isinstance(entry, dict):
                mappings.append(self.mapping(entry, where))
            else:
                self.reject(f"an entry of {where}", "an object", entry)
        return mappings

    def text(self, value: t.Any, where: str) -> str:
        if isinstance(value, str):
            return value
        if value is not None:
            self.reject(where, "text", value)
        return ""

    def texts(self, value: t.Any, where: str) -> list[str]:
        texts = []
        for entry in self.sequence(value, where):
            if isinstance(entry, str):
                texts.append(entry)
            else:
                self.reject(f"an entry of {where}", "text", entry)
        return texts

    def number(self, value: t.Any, where: str) -> int | None:
        """Return an integer from 0 to ``MAX_NUMBER``; None for anything else."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER:
            return value
        if value is not None:
            self.reject(where, "a number from 0 to 10^15", value)
        return None

    def flag(self, value: t.Any, where: str) -> bool | None:
        """Return true or False; None for anything else."""
        return value if isinstance(value, bool) else None

    def fields(self, kind: t.Any, raw: JsonObject, where: str) -> JsonObject:
        """Return the fields of a dataclass that are text, numbers, flags or lists of text, for its constructor."""
        readers: dict[str, t.Callable[[t.Any, str], t.Any]] = {
            "str": self.text,
            "int | None": self.number,
            "bool | None": self.flag,
            "tuple[str, ...]": lambda value, place: tuple(self.texts(value, place)),
        }
        plain = [field for field in dataclasses.fields(kind) if field.type in readers]
        return {field.name: readers[str(field.type)](raw.get(field.name), f"{where} {field.name}") for field in plain}

    def strings(self, value: t.Any, where: str) -> dict[str, str]:
        """Return text by text, as annotations, labels and environments are."""
        strings: dict[str, str] = {}
        for key, entry in self.mapping(value, where).items():
            if isinstance(entry, str):
                strings[key] = entry
            elif entry is not None:
                self.reject(f"{where} {shorten(key)}", "text", entry)
        return strings


def describe(value: t.Any) -> str:
    """Describe a value for an error message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the number {value}" if abs(value) <= MAX_NUMBER else "a number out of range"
    if isinstance(value, float):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the text {shorten(value)!r}"
    return "a list" if isinstance(value, (list, tuple)) else "an object" if isinstance(value, dict) else "no JSON"


def shorten(text: str, most: int = 60) -> str:
    """Reduce text to one line of at most ``most`` characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def parse_int(text: str | None) -> int | None:
    """Parse an integer; None for other text, and for one of too many digits."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def plural(number: int, singular: str, more: str = "") -> str:
    """Format a count: ``1 GPU``, ``2 GPUs``."""
    return f"{number} {singular if number == 1 else more or singular + 's'}"


def join(names: t.Iterable[t.Any], most: int = 6) -> str:
    """Join names by commas, and count those beyond ``most``."""
    every = [str(name) for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
