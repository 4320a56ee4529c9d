# SPDX-License-Identifier: GPL-3.0-or-later
"""The content of the ledger's Lease: the bookings in progress, and the nodes with recent bookings. No I/O.

By the second an extender that reads the Lease again knows on which nodes others have booked meanwhile, and lists the
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
    """Nothing can be booked; one sentence."""


@dataclasses.dataclass(frozen=True)
class Register:
    """The Lease's content.

    :param count: how many writes there were.
    :param nodes: by node, the last write that added a booking on it.
    :param before: on nodes that aren't in ``nodes``, none was added by a later write than this one.
    """

    count: int = 0
    nodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    before: int = 0
    entries: tuple[Entry, ...] = ()

    def added(self, node: str) -> int:
        """The last write that may have added a booking on a node."""
        return self.nodes.get(node, self.before)

    def next(self, entries: Iterable[Entry], nodes: Iterable[str]) -> Register:
        """What the next write makes of it: with these bookings, of which those on these nodes are new."""
        count, before = self.count + 1, self.before
        latest = {**self.nodes, **dict.fromkeys(nodes, count)}
        if len(latest) > NODES:
            # By write, so that the nodes of one write are listed together.
            before = max(before, sorted(latest.values())[-NODES - 1])
            latest = {node: at for node, at in latest.items() if at > before}
        return Register(count, latest, before, tuple(entries))

    def to_text(self) -> str:
        """The annotation's value: compact JSON."""
        rows = [
            {
                "uid": entry.uid,
                "namespace": entry.namespace,
                "name": entry.name,
                "node": entry.node,
                "cards": {str(index): units for index, units in entry.cards},
                "at": entry.at,
                "version": entry.version,
                "by": entry.by,
            }
            for entry in self.entries
        ]
        value = {"count": self.count, "before": self.before, "nodes": self.nodes, "bookings": rows}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Register:
        """
        :raises LedgerError: it is nothing that an extender writes.
        """
        if not text:
            return cls()
        try:
            value = json.loads(text)
            entries = tuple(
                Entry(
                    _text(row["uid"]),
                    _text(row["namespace"]),
                    _text(row["name"]),
                    _text(row["node"]),
                    tuple(sorted((int(index), _number(units, 1)) for index, units in row["cards"].items())),
                    _number(row["at"]),
                    _text(row["version"]),
                    _text(row["by"]),
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
