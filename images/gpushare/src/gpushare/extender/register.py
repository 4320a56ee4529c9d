# SPDX-License-Identifier: GPL-3.0-or-later
"""The content of the ledger's Lease: the bookings in progress, and the nodes with recent bookings. No I/O.

From the latter, an extender that reads the Lease again learns on which nodes others have booked since, and lists the
pods of these nodes only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from gpushare.extender.binding_status import Entry
from gpushare.shared._contracts import gpushare as contract

# Number of nodes that the register lists, the latest ones. Each write sends all of it.
NODES = 200


class LedgerError(Exception):
    """Nothing can be booked; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Register:
    """The Lease's content.

    :param count: the number of writes so far.
    :param nodes: the number of the last write that added a booking, by node.
    :param before: no later write than this one added a booking on a node that isn't in ``nodes``.
    :param entries: the bookings in progress.
    """

    count: int = 0
    nodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    before: int = 0
    entries: tuple[Entry, ...] = ()

    def added(self, node: str) -> int:
        """Return the number of the last write that may have added a booking on a node."""
        return self.nodes.get(node, self.before)

    def next(self, entries: Iterable[Entry], nodes: Iterable[str]) -> Register:
        """Make the next write's content.

        :param entries: all bookings.
        :param nodes: those with new bookings.
        """
        count, before = self.count + 1, self.before
        latest = {**self.nodes, **dict.fromkeys(nodes, count)}
        if len(latest) > NODES:
            # By write, so that the nodes of one write are listed together.
            before = max(before, sorted(latest.values())[-NODES - 1])
            latest = {node: at for node, at in latest.items() if at > before}
        return Register(count, latest, before, tuple(entries))

    def to_text(self) -> str:
        """Format the annotation's value: compact JSON."""
        rows = [
            {**entry._asdict(), "cards": {str(index): units for index, units in entry.cards}} for entry in self.entries
        ]
        value = {"count": self.count, "before": self.before, "nodes": self.nodes, "bookings": rows}
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
            nodes = {_text(node): _number(at) for node, at in value["nodes"].items()}
            found = cls(_number(value["count"]), nodes, _number(value["before"]), entries)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LedgerError(f"annotation {contract.LEDGER} can't be read: {error!r}") from error
        if len({entry.uid for entry in entries}) != len(entries) or not all(entry.cards for entry in entries):
            raise LedgerError(f"annotation {contract.LEDGER} names a pod twice or one without a card")
        if max((found.before, *nodes.values())) > found.count:
            raise LedgerError(f"annotation {contract.LEDGER} names a later write than its own")
        return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no name")
    return value


def _number(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} is no such number")
    return value
