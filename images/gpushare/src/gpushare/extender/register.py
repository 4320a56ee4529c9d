# SPDX-License-Identifier: GPL-3.0-or-later
"""The content of the ledger's Lease: the bookings in progress. No I/O."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from gpushare.extender.binding_status import Entry
from gpushare.shared._contracts import gpushare as contract


class LedgerError(Exception):
    """Nothing can be booked; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Register:
    """The Lease's content.

    :param count: the number of writes so far.
    :param pods: the version that a watch of pods must have reached to have all bound pods whose bookings were removed;
        None if it isn't known.
    :param entries: the bookings in progress.
    """

    count: int = 0
    pods: int | None = None
    entries: tuple[Entry, ...] = ()

    def to_text(self) -> str:
        """Format the annotation's value: compact JSON."""
        value = {"count": self.count, "pods": self.pods, "bookings": [entry.to_json() for entry in self.entries]}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Register:
        """Parse the annotation's value.

        :raises LedgerError: no extender writes such a value.
        """
        if not text:
            return cls()
        try:
            value = json.loads(text)
            entries = tuple(
                Entry(
                    **{key: _text(row[key]) for key in ("uid", "namespace", "name", "node", "version", "by")},
                    cards=tuple(sorted((int(index), _number(units, 1)) for index, units in row["cards"].items())),
                    at=_number(row["at"]),
                )
                for row in value["bookings"]
            )
            pods = value.get("pods")
            register = cls(_number(value["count"]), None if pods is None else _number(pods), entries)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LedgerError(f"annotation {contract.LEDGER} can't be read: {error!r}") from error
        if len({entry.uid for entry in entries}) != len(entries) or not all(entry.cards for entry in entries):
            raise LedgerError(f"annotation {contract.LEDGER} names a pod twice or one without a card")
        return register


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no name")
    return value


def _number(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} is no such number")
    return value
