# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Reading of plain JSON that may be anything: what isn't of its type is left out and told, never raised. No I/O."""

from __future__ import annotations

import calendar
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

# Larger than any memory in MiB and any count; what is above is junk.
MOST = 10**15
# A quantity of the API has fewer characters; Python refuses to read numbers of thousands.
LONGEST_NUMBER = 24
# So many sentences of what can't be read are kept per node.
MOST_DAMAGE = 20

_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]{1,9})?"
    r"(?:Z|([+-])([0-9]{2}):([0-9]{2}))"
)
_NUMBER = re.compile(f"-?[0-9]{{1,{LONGEST_NUMBER}}}")


class Reader:
    """Takes values by their type, and keeps a sentence of each one that is of another type.

    ``null`` is nothing in every place, and no damage.
    """

    def __init__(self) -> None:
        self.damage: list[str] = []

    def bad(self, where: str, wanted: str, value: t.Any) -> None:
        sentence = f"{where} is {kind(value)}, not {wanted}"
        if sentence not in self.damage and len(self.damage) < MOST_DAMAGE:
            self.damage.append(sentence)

    def obj(self, value: t.Any, where: str) -> Json:
        if isinstance(value, dict):
            return {key: one for key, one in value.items() if isinstance(key, str)}
        if value is not None:
            self.bad(where, "an object", value)
        return {}

    def items(self, value: t.Any, where: str) -> list[t.Any]:
        if isinstance(value, (list, tuple)):
            return list(value)
        if value is not None:
            self.bad(where, "a list", value)
        return []

    def objs(self, value: t.Any, where: str) -> list[Json]:
        found = []
        for one in self.items(value, where):
            if isinstance(one, dict):
                found.append(self.obj(one, where))
            else:
                self.bad(f"an entry of {where}", "an object", one)
        return found

    def text(self, value: t.Any, where: str) -> str:
        if isinstance(value, str):
            return value
        if value is not None:
            self.bad(where, "a text", value)
        return ""

    def texts(self, value: t.Any, where: str) -> list[str]:
        found = []
        for one in self.items(value, where):
            if isinstance(one, str):
                found.append(one)
            else:
                self.bad(f"an entry of {where}", "a text", one)
        return found

    def number(self, value: t.Any, where: str) -> int | None:
        """A whole number from 0 to ``MOST``; None for nothing, and for what isn't one."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST:
            return value
        if value is not None:
            self.bad(where, "a number that can be", value)
        return None

    def strings(self, value: t.Any, where: str) -> dict[str, str]:
        """Texts by text, as annotations, labels and environments are."""
        found: dict[str, str] = {}
        for key, one in self.obj(value, where).items():
            if isinstance(one, str):
                found[key] = one
            elif one is not None:
                self.bad(f"{where} {shorten(key)}", "a text", one)
        return found

    def quantities(self, value: t.Any, where: str) -> dict[str, str]:
        """Quantities by resource, as text."""
        found: dict[str, str] = {}
        for key, one in self.obj(value, where).items():
            if isinstance(one, (str, int)) and not isinstance(one, bool) and len(str_of(one)) <= LONGEST_NUMBER:
                found[key] = str(one)
            elif one is not None:
                self.bad(f"{where} {shorten(key)}", "a quantity", one)
        return found


def str_of(value: str | int) -> str:
    """A text, or a number as text; a number of more digits than anybody writes isn't spelled out."""
    if isinstance(value, str):
        return value
    return str(value) if abs(value) <= MOST else "9" * (LONGEST_NUMBER + 1)


def kind(value: t.Any) -> str:
    """What a value is, in words, and what it says where it is short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the number {value}" if abs(value) <= MOST else "a number beyond all bounds"
    if isinstance(value, float):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the text {shorten(value)!r}"
    return "a list" if isinstance(value, (list, tuple)) else "an object" if isinstance(value, dict) else "no JSON"


def shorten(text: str, most: int = 60) -> str:
    """One line of at most so many characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def whole(text: str | None) -> int | None:
    """The whole number that a text is; None for anything else, and for one of too many digits."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def seconds(text: str) -> int | None:
    """The seconds since 1970 of a time as RFC 3339 has it; None where it can't be read."""
    found = _TIME.fullmatch(text)
    if not found:
        return None
    parts = [int(one) for one in found.groups()[:6]]
    if not (1 <= parts[1] <= 12 and 1 <= parts[2] <= 31 and parts[3] < 24 and parts[4] < 60 and parts[5] <= 60):
        return None
    sign, hours, minutes = found.groups()[6:]
    ahead = (int(hours) * 3600 + int(minutes) * 60) * (-1 if sign == "-" else 1) if sign else 0
    return calendar.timegm((*parts, 0, 0, 0)) - ahead if parts[0] > 0 else None


def counted(number: int, one: str, more: str = "") -> str:
    """``1 card``, ``2 cards``."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def listed(names: t.Iterable[t.Any], most: int = 6) -> str:
    """Names, separated by commas, not more than a person reads."""
    every = [str(one) for one in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
