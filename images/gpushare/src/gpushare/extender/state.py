# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's state: the nodes' cards and the units held on each, updated by each change.

The state comes from watches; nothing is stored. Two kinds of bookings are added: *holds* are those that this extender
is writing, or has written while its watch hasn't delivered the bound pod yet; *foreign bookings* are those that other
extenders have in progress. Both count like bound pods, so no two binds can use the same memory.

A bound pod whose card isn't known (it was bound without the extender, and the device plugin hasn't named its card yet)
counts on every card of its node, since any of them may be the one.

A *claim* reserves memory for one pod that others were evicted for: pods of no higher priority see it as used. An
*offer* lists what the scheduler may choose to evict for a pod; it becomes that pod's claim when the first of its
victims leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gpushare.extender.placement import Slot
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Card, Demand, Reason, Refusal
from gpushare.shared._core.types import JsonObject

NO_CARD = -1
BIND_IN_PROGRESS = Refusal(Reason.BIND_IN_PROGRESS, "another bind of this pod is in progress")
# The API's priorities are 32 bits wide.
LOWEST_PRIORITY = -(1 << 31)
HIGHEST_PRIORITY = (1 << 31) - 1
# On pods that kubelet made from a file of its node; evicting them has no effect.
MIRROR = "kubernetes.io/config.mirror"

# Between models in ``NodeView.kinds``, which is empty for a node without a healthy card.
SEPARATOR = "\n"

# Index of a card, and units on it.
Shares = tuple[tuple[int, int], ...]


class PodRow(NamedTuple):
    """A pod that holds memory of a node; without cards where they aren't known.

    :param assumed: when an extender bound it, in seconds since 1970; 0 if none did.
    """

    uid: str
    namespace: str
    name: str
    node: str
    units: int
    cards: Shares
    priority: int = 0
    terminating: bool = False
    assumed: int = 0

    @property
    def shares(self) -> Shares:
        """The units by card; a card that isn't known has the index ``NO_CARD``."""
        return self.cards or ((NO_CARD, self.units),)


class NodeRow(NamedTuple):
    """A node; without cards where kubelet announces no GPU memory."""

    name: str
    cards: tuple[Card, ...]
    unit: str


def pod_row(pod: JsonObject) -> PodRow | None:
    """Make the row of a pod that counts; None if it isn't bound, has finished, or requests nothing.

    A terminating pod counts: its process may still hold the memory.
    """
    if not contract.counts(pod):
        return None
    metadata = pod.get("metadata") or {}
    static, booking = MIRROR in (metadata.get("annotations") or {}), contract.booking(pod)
    return PodRow(
        contract.pod_uid(pod),
        sys.intern(str(metadata.get("namespace", ""))),
        str(metadata.get("name", "")),
        sys.intern(contract.pod_node(pod)),
        contract.pod_units(pod),
        _interned(tuple(contract.shares(pod).items())),
        HIGHEST_PRIORITY if static else contract.pod_priority(pod),
        contract.terminating(pod),
        booking.assume_time // 10**9 if booking is not None else 0,
    )


def node_row(node: JsonObject) -> NodeRow:
    """Make the row of a node."""
    # Without a plugin kubelet announces no memory; an annotation may have remained.
    announced = contract.node_resource(node, contract.RESOURCE_MEMORY) > 0
    cards = tuple(contract.node_cards(node)) if announced else ()
    return NodeRow(sys.intern(str((node.get("metadata") or {}).get("name", ""))), cards, unit_of(cards))


def unit_of(cards: Iterable[Card]) -> str:
    """Return the memory unit of the cards' sizes; empty if it isn't known."""
    known = [card for card in cards if card.memory_mib > 0]
    for unit in contract.MIB_PER_UNIT:
        if known and all(contract.units_of(card.memory_mib, unit) == card.units for card in known):
            return unit
    return ""


class Capacity(NamedTuple):
    """Free units and sizes of some healthy cards of a node; free is negative on an overbooked card.

    Both are sorted, so that one element shows whether enough cards have enough memory.
    """

    free: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeView:
    """A node at one moment; immutable, so it may be read without a lock.

    ``used`` is by position in ``cards`` and may be more than a card's size. ``unplaced`` are the units of pods whose
    card isn't known. ``largest`` is the largest free share on one healthy card, ``largest_card`` the size of the
    largest healthy card.

    ``capacity`` is that of all healthy cards, ``by_model`` the same for each model. ``kinds`` names these models, in
    one string because it is a dictionary key for each node of each filter.
    """

    name: str
    cards: tuple[Card, ...]
    unit: str
    used: tuple[int, ...]
    unplaced: int
    largest: int
    largest_card: int
    capacity: Capacity
    by_model: tuple[Capacity, ...]
    kinds: str

    def slots(self, demand: Demand) -> list[Slot]:
        """Return the healthy cards of models that a pod accepts, with their free units."""
        return [
            Slot(card.index, max(0, card.units - used - self.unplaced))
            for card, used in zip(self.cards, self.used, strict=True)
            if card.healthy and demand.accepts(card)
        ]


def view_of(node: NodeRow, used: dict[int, int], unplaced: int) -> NodeView:
    """Make the view of a node.

    :param used: units by card's index.
    :param unplaced: units of pods whose card isn't known.
    """
    held = tuple(used.get(card.index, 0) + card.unreleased for card in node.cards)
    free = [(card.units - here - unplaced, card) for card, here in zip(node.cards, held, strict=True) if card.healthy]
    capacity = _capacity(free)
    kinds = tuple(dict.fromkeys(_model_of(card) for _units, card in free))
    # Nearly all nodes have cards of one model.
    by_model = (
        (capacity,)
        if len(kinds) == 1
        else tuple(_capacity([row for row in free if _model_of(row[1]) == kind]) for kind in kinds)
    )
    largest, largest_card = (max(0, capacity.free[-1]), capacity.sizes[-1]) if free else (0, 0)
    text = sys.intern(SEPARATOR.join(kinds))
    return NodeView(node.name, node.cards, node.unit, held, unplaced, largest, largest_card, capacity, by_model, text)


def _capacity(cards: list[tuple[int, Card]]) -> Capacity:
    """Sort the cards of a node by their free units and by their sizes.

    :param cards: free units, and the card.
    """
    free, sizes = sorted(free for free, _card in cards), sorted(card.units for _free, card in cards)
    return Capacity(_interned(tuple(free)), _interned(tuple(sizes)))


def _model_of(card: Card) -> str:
    return card.model.replace(SEPARATOR, " ")


@functools.lru_cache(4096)
def _interned(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the same object for equal values: most nodes and pods of a large cluster are alike."""
    return value


class _NodeUsage:
    """The sums of one node, updated pod by pod."""

    __slots__ = ("pods", "unplaced", "used")

    def __init__(self) -> None:
        self.pods: dict[str, PodRow] = {}
        self.used: dict[int, int] = {}
        self.unplaced = 0

    def recount(self, cards: tuple[Card, ...]) -> None:
        """Compute all sums anew for other cards: a pod's card may exist now, or not any more."""
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
        for index, units in row.shares:
            if index in self.used:
                self.used[index] += sign * units
            else:
                self.unplaced += sign * units


@dataclasses.dataclass(slots=True)
class Hold:
    """A booking in progress. ``working``: a bind is writing it; otherwise it waits for the watch, and is to be checked
    with the API from ``due`` on."""

    row: PodRow
    due: float = 0.0
    working: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """Memory reserved for a pod that isn't bound yet.

    ``victims`` are the UIDs of the pods that free it, including those that were terminating anyway.
    """

    uid: str
    namespace: str
    name: str
    node: str
    cards: Shares
    priority: int
    victims: frozenset[str]


class Reservation(NamedTuple):
    """The row that is held now; otherwise the node that the pod is already bound to, or a refusal, or neither if no
    card has enough free memory."""

    row: PodRow | None
    bound_to: str = ""
    refusal: Refusal | None = None


class State:
    """All nodes and the units held on them; any thread may change it, and changes are atomic."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._nodes: dict[str, NodeRow] = {}
        self._usages: dict[str, _NodeUsage] = {}
        self._pods: dict[str, PodRow] = {}
        self._holds: dict[str, Hold] = {}
        # Foreign bookings by pod, then node: two extenders may bind a pod to two nodes. And the pods by node.
        self._foreign: dict[str, dict[str, PodRow]] = {}
        self._foreign_on: dict[str, tuple[str, ...]] = {}
        self._claims: dict[str, Claim] = {}
        self._offers: dict[str, tuple[Claim, ...]] = {}
        # Numbers of bound pods by priority.
        self._priorities: dict[int, int] = {}
        self._freed = 0
        # The value of ``_freed`` after a node's last change, the latest last.
        self._freed_on: dict[str, int] = {}
        # Called under the lock after claims changed; must return quickly.
        self.on_claim: Callable[[], object] = lambda: None
        self._views: dict[str, NodeView] = {}

    # Callbacks of two mirrors.

    def node_changed(self, _key: str, before: NodeRow | None, after: NodeRow | None) -> None:
        """Apply a change from the watch of nodes."""
        with self._lock:
            if after is None:
                if before is not None:
                    self._nodes.pop(before.name, None)
                    self._views.pop(before.name, None)
                    self._freed_on.pop(before.name, None)
                return
            self._nodes[after.name] = after
            self._mark_freed(after.name)
            self._usage(after.name).recount(after.cards)
            self._update_view(after.name)

    def pod_changed(self, _key: str, before: PodRow | None, after: PodRow | None) -> None:
        """Apply a change from the watch of pods."""
        with self._lock:
            # Another pod may have the same name by now.
            if before is not None and (after is None or after.uid != before.uid):
                rows = self._rows(before.uid)
                self._set_pod(before.uid, None)
                self._apply(before.uid, rows)
                self._pod_leaves(before.uid)
            if after is not None:
                rows = self._rows(after.uid)
                self._holds.pop(after.uid, None)
                self._foreign.pop(after.uid, None)
                self._set_pod(after.uid, after)
                self._apply(after.uid, rows)
                self.unclaim(after.uid)
                if after.terminating:
                    self._pod_leaves(after.uid)

    # Holds.

    def reserve(
        self,
        uid: str,
        node: str,
        choose: Callable[[NodeView], PodRow | None],
        priority: int = LOWEST_PRIORITY,
    ) -> Reservation:
        """Choose cards and hold them atomically.

        :param uid: the pod's UID.
        :param node: the node's name.
        :param choose: receives the node as it is for this pod: without its own bookings, with others' claims.
        :param priority: the pod's; claims of lower ones don't apply to it.
        """
        with self._lock:
            bound, hold = self._pods.get(uid), self._holds.get(uid)
            if bound is not None:
                return Reservation(None, bound.node)
            if hold is not None and hold.working:
                return Reservation(None, refusal=BIND_IN_PROGRESS)
            view = self.viewer(uid, priority)(node)
            if view is None:
                text = f"the gpushare extender doesn't know node {node}"
                return Reservation(None, refusal=Refusal(Reason.NODE_UNKNOWN, text))
            # Replaces an earlier bind that was never confirmed; the pod isn't bound.
            self.release(uid)
            row = choose(view)
            if row is not None:
                rows = self._rows(uid)
                self._holds[uid] = Hold(row)
                self._apply(uid, rows)
            return Reservation(row)

    def settle(self, uid: str, due: float) -> None:
        """Hold a booking that may have been written until the watch delivers its pod, or a check after ``due``."""
        with self._lock:
            hold = self._holds.get(uid)
            if hold is not None:
                hold.working, hold.due = False, due

    def release(self, uid: str) -> None:
        """Release a hold whose booking was not written."""
        with self._lock:
            rows = self._rows(uid)
            if self._holds.pop(uid, None) is not None:
                self._apply(uid, rows)

    def held(self, uid: str) -> bool:
        """Return whether a bind of this extender holds memory for a pod that the watch hasn't confirmed."""
        return uid in self._holds

    def unconfirmed(self, now: float) -> list[PodRow]:
        """Return the bookings that the watch should have confirmed by now."""
        with self._lock:
            return [hold.row for hold in self._holds.values() if not hold.working and hold.due <= now]

    @property
    def holds(self) -> int:
        return len(self._holds)

    @property
    def freed(self) -> int:
        """A number that increases whenever memory may have become free: a pod or a claim ended, or a node changed."""
        return self._freed

    def freed_since(self, freed: int) -> list[str]:
        """Return the nodes where memory may have become free since ``freed`` had this value."""
        with self._lock:
            return list(itertools.takewhile(lambda name: self._freed_on[name] > freed, reversed(self._freed_on)))

    def set_foreign(self, node: str, rows: Sequence[PodRow]) -> None:
        """Replace the bookings of other extenders on a node.

        Each counts until the watch delivers its pod as bound to any node. A hold of the same pod on the same node
        counts instead of it; a hold on another node counts in addition, since either bind may still take effect.
        """
        with self._lock:
            current = {row.uid: row for row in rows if row.uid not in self._pods}
            for uid in {*self._foreign_on.get(node, ()), *current}:
                before = self._rows(uid)
                after = {name: row for name, row in self._foreign.get(uid, {}).items() if name != node}
                if uid in current:
                    after[node] = current[uid]
                if after:
                    self._foreign[uid] = after
                else:
                    self._foreign.pop(uid, None)
                self._apply(uid, before)
            if current:
                self._foreign_on[node] = tuple(current)
            else:
                self._foreign_on.pop(node, None)

    # Claims.

    def claim(self, claim: Claim) -> None:
        """Reserve memory for a pod that isn't bound; in place of its earlier claim."""
        with self._lock:
            self._offers.pop(claim.uid, None)
            if claim.uid not in self._pods:
                self._claims[claim.uid] = claim
                self.on_claim()

    def offer(self, uid: str, claims: Iterable[Claim]) -> None:
        """Record the memory that each of several evictions would free for a pod, instead of its offers and claim."""
        with self._lock:
            self.unclaim(uid)
            self._offers[uid] = tuple(claims)

    def unclaim(self, uid: str) -> None:
        """End a pod's claim and offers."""
        with self._lock:
            claim = self._claims.pop(uid, None)
            if claim is not None:
                self._mark_freed(claim.node)
                self.on_claim()
            self._offers.pop(uid, None)

    def claims(self) -> list[Claim]:
        with self._lock:
            return list(self._claims.values())

    def outranks(self, priority: int) -> bool:
        """Return whether any bound pod has a lower priority."""
        with self._lock:
            return any(other < priority for other in self._priorities)

    def bound(self, uid: str) -> PodRow | None:
        """Return a pod that the watch has delivered as bound."""
        return self._pods.get(uid)

    def last_assumed(self) -> int:
        """Return when an extender last bound one of the bound pods, in seconds since 1970; 0 if none did."""
        with self._lock:
            return max((row.assumed for row in self._pods.values()), default=0)

    def evictable(self, name: str) -> list[PodRow]:
        """Return the bound pods of a node; pods of bookings in progress can't be evicted."""
        with self._lock:
            usage = self._usages.get(name)
            return [row for row in usage.pods.values() if row.uid in self._pods] if usage else []

    def nodes_with_bookings(self) -> set[str]:
        """Return the nodes with bookings in progress, and perhaps some whose bookings have just ended."""
        with self._lock:
            return {hold.row.node for hold in self._holds.values()}.union(self._foreign_on)

    # Queries.

    def viewer(self, uid: str, priority: int = LOWEST_PRIORITY) -> Callable[[str], NodeView | None]:
        """Return a lookup of nodes for one pod: without its own bookings, which remain of earlier binds, and with the
        claims of other pods of its priority or a higher one. Where there is any of these, it is a snapshot.
        """
        with self._lock:
            own = {} if uid in self._pods else self._rows(uid)
            claims = [claim for claim in self._claims.values() if claim.priority >= priority and claim.uid != uid]
            if not own and not claims:
                return self._views.get
            mine = self._views.copy()
            for name in {*own, *(claim.node for claim in claims)}:
                if name in self._nodes:
                    mine[name] = self._view_for_pod(
                        name, own.get(name), [claim for claim in claims if claim.node == name]
                    )
            return mine.get

    def views(self) -> list[NodeView]:
        """Return all nodes, sorted by name."""
        with self._lock:
            return sorted(self._views.values(), key=lambda view: view.name)

    def snapshot(self, name: str) -> tuple[NodeView, list[PodRow]] | None:
        """Return a node and its pods (bound, or of bookings in progress) at one moment; None if it isn't known."""
        with self._lock:
            view = self._views.get(name)
            if view is None:
                return None
            rows = list(self._usage(name).pods.values())
        return view, sorted(rows, key=lambda row: (row.namespace, row.name, row.uid))

    # Under the lock.

    def _mark_freed(self, node: str) -> None:
        self._freed += 1
        if node in self._nodes:
            self._freed_on.pop(node, None)
            self._freed_on[node] = self._freed

    def _usage(self, node: str) -> _NodeUsage:
        return self._usages.setdefault(node, _NodeUsage())

    def _set_pod(self, uid: str, row: PodRow | None) -> None:
        before = self._pods.pop(uid, None)
        counts = self._priorities
        if before is not None:
            counts[before.priority] -= 1
            if not counts[before.priority]:
                del counts[before.priority]
        if row is not None:
            self._pods[uid] = row
            counts[row.priority] = counts.get(row.priority, 0) + 1

    def _rows(self, uid: str) -> dict[str, PodRow]:
        """Return the rows of a pod that count, by node: the bound one, or all bookings that may still take effect."""
        bound = self._pods.get(uid)
        if bound is not None:
            return {bound.node: bound}
        rows, hold = self._foreign.get(uid, {}), self._holds.get(uid)
        return rows if hold is None else {**rows, hold.row.node: hold.row}

    def _apply(self, uid: str, before: dict[str, PodRow]) -> None:
        """Update the sums from a pod's rows that counted before to those that count now."""
        after = self._rows(uid)
        for node in before:
            if node not in after:
                self._mark_freed(node)
                usage = self._usage(node)
                usage.take(uid)
                if not usage.pods and node not in self._nodes:
                    del self._usages[node]
                self._update_view(node)
        for node, row in after.items():
            if before.get(node) != row:
                self._usage(node).put(row)
                self._update_view(node)

    def _pod_leaves(self, uid: str) -> None:
        """Turn offers that list a terminating pod as a victim into claims."""
        for claims in list(self._offers.values()):
            chosen = next((claim for claim in claims if uid in claim.victims), None)
            if chosen is not None:
                self.claim(chosen)

    def _view_for_pod(self, name: str, own: PodRow | None, claims: list[Claim]) -> NodeView:
        usage = self._usage(name)
        used, unplaced = dict(usage.used), usage.unplaced
        changes = [(share, -1) for share in (own.shares if own else ())]
        changes += [(share, 1) for claim in claims for share in claim.cards]
        for (index, units), sign in changes:
            if index in used:
                used[index] += sign * units
            elif sign < 0:
                unplaced -= units
        return view_of(self._nodes[name], used, unplaced)

    def _update_view(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            usage = self._usage(name)
            self._views[name] = view_of(node, usage.used, usage.unplaced)
