# SPDX-License-Identifier: GPL-3.0-or-later
"""What the extender knows: the nodes' cards and who holds how much of each, kept up to date change by change.

Everything comes from watches; nothing is stored. Only *holds* are added: bookings that this extender is about to write,
or has written and not seen in its watch yet. They count like bound pods, so no two binds can take the same memory.

A bound pod whose card isn't known (it came without the extender, and the device plugin hasn't named its card yet)
counts against every card of its node: one of them has that much less, and which one can't be told.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpushare import contract
from gpushare.contract import Card
from gpushare.kube import Json
from gpushare.placement import Slot

NO_CARD = -1


class PodRow(NamedTuple):
    """What is kept of a pod that holds memory of a node."""

    uid: str
    namespace: str
    name: str
    node: str
    units: int
    card: int


class NodeRow(NamedTuple):
    """What is kept of a node; no cards where kubelet announces no GPU memory."""

    name: str
    cards: tuple[Card, ...]
    unit: str


def pod_row(pod: Json) -> PodRow | None:
    """The row of a pod that counts, else None: not bound, finished, or asking for nothing.

    A terminating pod counts: its process may still hold the memory.
    """
    if not contract.counts(pod):
        return None
    metadata = pod.get("metadata") or {}
    held = contract.booking(pod)
    return PodRow(
        contract.pod_uid(pod),
        sys.intern(str(metadata.get("namespace", ""))),
        str(metadata.get("name", "")),
        sys.intern(contract.pod_node(pod)),
        contract.pod_units(pod),
        NO_CARD if held is None else held.index,
    )


def node_row(node: Json) -> NodeRow:
    # Without a plugin kubelet announces none, whatever an annotation of earlier days says.
    announced = contract.node_resource(node, contract.RESOURCE_MEMORY) > 0
    cards = tuple(contract.node_cards(node)) if announced else ()
    return NodeRow(sys.intern(str((node.get("metadata") or {}).get("name", ""))), cards, unit_of(cards))


def unit_of(cards: Iterable[Card]) -> str:
    """The memory unit that the cards' sizes were counted in; empty where they don't tell."""
    known = [card for card in cards if card.memory_mib > 0]
    for unit in contract.MIB_PER_UNIT:
        if known and all(contract.units_of(card.memory_mib, unit) == card.units for card in known):
            return unit
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeView:
    """A node at one moment; never changed, so it may be read without a lock.

    ``used`` is by position in ``cards`` and may be more than a card's size. ``unplaced`` are the units of pods whose
    card isn't known. ``largest`` is the largest free share on one healthy card, ``biggest`` the largest healthy card.
    """

    name: str
    cards: tuple[Card, ...]
    unit: str
    used: tuple[int, ...]
    unplaced: int
    largest: int
    biggest: int

    def free(self, position: int) -> int:
        """Units that may still be given away; a card that is over its size is full, not worse."""
        return max(0, self.cards[position].units - self.used[position] - self.unplaced)

    def slots(self) -> list[Slot]:
        return [Slot(card.index, self.free(at)) for at, card in enumerate(self.cards) if card.healthy]


def view_of(node: NodeRow, used: dict[int, int], unplaced: int) -> NodeView:
    held = tuple(used.get(card.index, 0) for card in node.cards)
    largest = biggest = 0
    for card, here in zip(node.cards, held, strict=True):
        if card.healthy:
            largest = max(largest, card.units - here - unplaced)
            biggest = max(biggest, card.units)
    return NodeView(node.name, node.cards, node.unit, held, unplaced, largest, biggest)


class _Tally:
    """The sums of one node, changed by one pod at a time."""

    __slots__ = ("pods", "unplaced", "used")

    def __init__(self) -> None:
        self.pods: dict[str, PodRow] = {}
        self.used: dict[int, int] = {}
        self.unplaced = 0

    def recount(self, cards: tuple[Card, ...]) -> None:
        """The cards changed: which pods are on one of them may have, too."""
        self.used, self.unplaced = {card.index: 0 for card in cards}, 0
        for row in self.pods.values():
            self._add(row, 1)

    def put(self, row: PodRow) -> None:
        self.take(row.uid)
        self.pods[row.uid] = row
        self._add(row, 1)

    def take(self, uid: str) -> None:
        before = self.pods.pop(uid, None)
        if before is not None:
            self._add(before, -1)

    def _add(self, row: PodRow, sign: int) -> None:
        if row.card in self.used:
            self.used[row.card] += sign * row.units
        else:
            self.unplaced += sign * row.units


@dataclasses.dataclass(slots=True)
class Hold:
    """A booking under way. ``working``: a bind is at it just now; else it waits for the watch, and from ``due`` on the
    API is to be asked about it."""

    row: PodRow
    due: float = 0.0
    working: bool = True


class Reservation(NamedTuple):
    """The row that is held now; else the node that the pod is already bound to, or what is wrong, or just no room."""

    row: PodRow | None
    bound_to: str = ""
    error: str = ""


class State:
    """All nodes and what is held on them; changes come from any thread, each is whole before the next one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._nodes: dict[str, NodeRow] = {}
        self._tallies: dict[str, _Tally] = {}
        self._pods: dict[str, PodRow] = {}
        self._holds: dict[str, Hold] = {}
        self._views: dict[str, NodeView] = {}

    # What the watches tell; the callbacks of two mirrors.

    def node_changed(self, _key: str, before: NodeRow | None, after: NodeRow | None) -> None:
        with self._lock:
            if after is None:
                if before is not None:
                    self._nodes.pop(before.name, None)
                    self._views.pop(before.name, None)
                return
            self._nodes[after.name] = after
            self._tally(after.name).recount(after.cards)
            self._show(after.name)

    def pod_changed(self, _key: str, before: PodRow | None, after: PodRow | None) -> None:
        with self._lock:
            # One name may have been taken by another pod since.
            if before is not None and (after is None or (after.uid, after.node) != (before.uid, before.node)):
                self._forget(before.uid)
            if after is not None:
                held = self._holds.pop(after.uid, None)
                if held is not None and held.row.node != after.node:
                    self._remove(held.row)
                self._pods[after.uid] = after
                self._add(after)

    # What a bind does.

    def reserve(self, uid: str, node: str, choose: Callable[[NodeView], PodRow | None]) -> Reservation:
        """Choose a card and hold it, in one step that no other bind can get between."""
        with self._lock:
            bound, hold = self._pods.get(uid), self._holds.get(uid)
            if bound is not None:
                return Reservation(None, bound.node)
            if hold is not None and hold.working:
                return Reservation(None, error="another bind of this pod is under way")
            if node not in self._views:
                return Reservation(None, error=f"the gpushare extender doesn't know node {node}")
            # An earlier bind that was never confirmed, and the pod isn't bound: this one takes its place.
            self.release(uid)
            row = choose(self._views[node])
            if row is not None:
                self._holds[uid] = Hold(row)
                self._add(row)
            return Reservation(row)

    def settle(self, uid: str, due: float) -> None:
        """The booking was, or may have been, written: hold it until the watch shows the pod or a check says no."""
        with self._lock:
            hold = self._holds.get(uid)
            if hold is not None:
                hold.working, hold.due = False, due

    def release(self, uid: str) -> None:
        """The booking was not written."""
        with self._lock:
            hold = self._holds.pop(uid, None)
            if hold is not None:
                self._remove(hold.row)

    def unconfirmed(self, now: float) -> list[PodRow]:
        """Bookings that have waited for the watch for too long."""
        with self._lock:
            return [hold.row for hold in self._holds.values() if not hold.working and hold.due <= now]

    @property
    def holds(self) -> int:
        return len(self._holds)

    # What is read.

    def view(self, name: str) -> NodeView | None:
        """A node as it is now."""
        return self._views.get(name)

    def viewer(self, uid: str) -> Callable[[str], NodeView | None]:
        """What gives the nodes as one pod sees them: as if its own hold, left by an earlier bind, weren't there."""
        with self._lock:
            hold = self._holds.get(uid)
            view = None if hold is None else self._without(hold.row)
        if view is None:
            return self._views.get
        mine = view
        return lambda name: mine if name == mine.name else self._views.get(name)

    def views(self) -> list[NodeView]:
        """All nodes by name."""
        with self._lock:
            return sorted(self._views.values(), key=lambda view: view.name)

    def whole(self, name: str) -> tuple[NodeView, list[PodRow]] | None:
        """A node and the pods on it (bound, or about to be), of one moment; None for a node that isn't known."""
        with self._lock:
            view = self._views.get(name)
            if view is None:
                return None
            rows = list(self._tally(name).pods.values())
        return view, sorted(rows, key=lambda row: (row.namespace, row.name, row.uid))

    # Under the lock.

    def _tally(self, node: str) -> _Tally:
        return self._tallies.setdefault(node, _Tally())

    def _forget(self, uid: str) -> None:
        row = self._pods.pop(uid, None)
        if row is not None:
            self._remove(row)

    def _add(self, row: PodRow) -> None:
        self._tally(row.node).put(row)
        self._show(row.node)

    def _remove(self, row: PodRow) -> None:
        tally = self._tally(row.node)
        tally.take(row.uid)
        if not tally.pods and row.node not in self._nodes:
            del self._tallies[row.node]
        self._show(row.node)

    def _without(self, row: PodRow) -> NodeView | None:
        node, tally = self._nodes.get(row.node), self._tally(row.node)
        if node is None:
            return None
        used, unplaced = dict(tally.used), tally.unplaced
        if row.card in used:
            used[row.card] -= row.units
        else:
            unplaced -= row.units
        return view_of(node, used, unplaced)

    def _show(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            tally = self._tally(name)
            self._views[name] = view_of(node, tally.used, tally.unplaced)
