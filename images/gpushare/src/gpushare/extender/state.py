# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's state: the nodes' cards and the units held on each, updated by each change.

Everything comes from watches; nothing is stored. Two kinds of bookings are added: *holds*, which this extender is about
to write, or has written and not received by its watch yet, and *foreign bookings* of other extenders in progress. Both
count like bound pods, so no two binds can take the same memory.

A bound pod whose card isn't known (it was bound without the extender, and the device plugin hasn't named its card yet)
counts on every card of its node: one of them has that much less, and it isn't known which.

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
# Of the API's priorities, which are 32 bits wide.
LOWEST_PRIORITY = -(1 << 31)
HIGHEST_PRIORITY = (1 << 31) - 1
# On what kubelet made of a file of its node; evicting it ends nothing.
MIRROR = "kubernetes.io/config.mirror"

# Between models in ``NodeView.kinds``; of a node without a healthy card that text is empty.
SEPARATOR = "\n"

# Index of a card, and units on it.
Shares = tuple[tuple[int, int], ...]


class PodRow(NamedTuple):
    """What is kept of a pod that holds memory of a node; no cards where they aren't known."""

    uid: str
    namespace: str
    name: str
    node: str
    units: int
    cards: Shares
    priority: int = 0
    terminating: bool = False


class NodeRow(NamedTuple):
    """What is kept of a node; no cards where kubelet announces no GPU memory."""

    name: str
    cards: tuple[Card, ...]
    unit: str


def pod_row(pod: JsonObject) -> PodRow | None:
    """The row of a pod that counts, else None: not bound, finished, or asking for nothing.

    A terminating pod counts: its process may still hold the memory.
    """
    if not contract.counts(pod):
        return None
    metadata = pod.get("metadata") or {}
    static = MIRROR in (metadata.get("annotations") or {})
    return PodRow(
        contract.pod_uid(pod),
        sys.intern(str(metadata.get("namespace", ""))),
        str(metadata.get("name", "")),
        sys.intern(contract.pod_node(pod)),
        contract.pod_units(pod),
        _interned(tuple(contract.shares(pod).items())),
        HIGHEST_PRIORITY if static else contract.pod_priority(pod),
        contract.terminating(pod),
    )


def node_row(node: JsonObject) -> NodeRow:
    # Without a plugin kubelet announces none, even if an annotation was left behind.
    announced = contract.node_resource(node, contract.RESOURCE_MEMORY) > 0
    cards = tuple(contract.node_cards(node)) if announced else ()
    return NodeRow(sys.intern(str((node.get("metadata") or {}).get("name", ""))), cards, unit_of(cards))


def unit_of(cards: Iterable[Card]) -> str:
    """The memory unit of the cards' sizes; empty if it isn't known."""
    known = [card for card in cards if card.memory_mib > 0]
    for unit in contract.MIB_PER_UNIT:
        if known and all(contract.units_of(card.memory_mib, unit) == card.units for card in known):
            return unit
    return ""


class Room(NamedTuple):
    """Some healthy cards of a node: what each has free (less than nothing where it is over its size), and their sizes.

    Both are sorted, so that one element decides whether enough cards have enough.
    """

    free: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeView:
    """A node at one moment; never changed, so it may be read without a lock.

    ``used`` is by position in ``cards`` and may be more than a card's size. ``unplaced`` are the units of pods whose
    card isn't known. ``largest`` is the largest free share on one healthy card, ``biggest`` the largest healthy card.

    ``room`` is of all healthy cards, ``rooms`` is the same by model. ``kinds`` names these models, in one text because
    it is a dictionary key for each node of each filter.
    """

    name: str
    cards: tuple[Card, ...]
    unit: str
    used: tuple[int, ...]
    unplaced: int
    largest: int
    largest_card: int
    room: Room
    rooms: tuple[Room, ...]
    kinds: str

    def free(self, position: int) -> int:
        """Units that may still be given away; a card that is over its size is full, not worse."""
        return max(0, self.cards[position].units - self.used[position] - self.unplaced)

    def slots(self, demand: Demand) -> list[Slot]:
        """The cards that a pod may be given, whether or not they have room."""
        return [
            Slot(card.index, self.free(at))
            for at, card in enumerate(self.cards)
            if card.healthy and demand.accepts(card)
        ]


def view_of(node: NodeRow, used: dict[int, int], unplaced: int) -> NodeView:
    held = tuple(used.get(card.index, 0) for card in node.cards)
    free = [(card.units - here - unplaced, card) for card, here in zip(node.cards, held, strict=True) if card.healthy]
    room = _room(free)
    # Nearly all nodes have cards of one model.
    kinds = tuple(dict.fromkeys(_model_of(card) for _units, card in free))
    rooms = (
        (room,)
        if len(kinds) == 1
        else tuple(_room([one for one in free if _model_of(one[1]) == kind]) for kind in kinds)
    )
    largest = max(0, room.free[-1]) if free else 0
    largest_card = room.sizes[-1] if free else 0
    text = sys.intern(SEPARATOR.join(kinds))
    return NodeView(node.name, node.cards, node.unit, held, unplaced, largest, largest_card, room, rooms, text)


def _room(cards: list[tuple[int, Card]]) -> Room:
    """
    :param cards: what each has free, and the card.
    """
    free, sizes = sorted(free for free, _card in cards), sorted(card.units for _mark_freed, card in cards)
    return Room(_interned(tuple(free)), _interned(tuple(sizes)))


def _model_of(card: Card) -> str:
    return card.model.replace(SEPARATOR, " ")


@functools.lru_cache(4096)
def _interned(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same object for equal values: most nodes, and most pods, of a large cluster are alike."""
    return value


class _NodeUsage:
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
        for index, units in row.cards or ((NO_CARD, row.units),):
            if index in self.used:
                self.used[index] += sign * units
            else:
                self.unplaced += sign * units


@dataclasses.dataclass(slots=True)
class Hold:
    """A booking under way. ``working``: a bind is at it just now; else it waits for the watch, and from ``due`` on the
    API is to be asked about it."""

    row: PodRow
    due: float = 0.0
    working: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """Memory kept for a pod that has none yet.

    ``victims`` are the UIDs of the pods that make room for it, those that were ending anyway among them.
    """

    uid: str
    namespace: str
    name: str
    node: str
    cards: Shares
    priority: int
    victims: frozenset[str]


class Reservation(NamedTuple):
    """The row that is held now; else the node that the pod is already bound to, or a refusal, or nothing if no card
    has enough free memory."""

    row: PodRow | None
    bound_to: str = ""
    refusal: Refusal | None = None


class State:
    """All nodes and what is held on them; changes come from any thread, each is whole before the next one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._nodes: dict[str, NodeRow] = {}
        self._usages: dict[str, _NodeUsage] = {}
        self._pods: dict[str, PodRow] = {}
        self._holds: dict[str, Hold] = {}
        # Others' bookings by pod, then node; two extenders may want a pod on two nodes. And the pods by node.
        self._others: dict[str, dict[str, PodRow]] = {}
        self._others_on: dict[str, tuple[str, ...]] = {}
        self._claims: dict[str, Claim] = {}
        self._offers: dict[str, tuple[Claim, ...]] = {}
        # How many bound pods there are of each priority.
        self._priorities: dict[int, int] = {}
        self._freed = 0
        # By node, the latest last: what ``_freed`` was moved to.
        self._freed_on: dict[str, int] = {}
        # Called under the lock when something is claimed, or isn't any more; must return quickly.
        self.on_claim: Callable[[], object] = lambda: None
        self._views: dict[str, NodeView] = {}

    # Changes from the watches: the callbacks of two mirrors.

    def node_changed(self, _key: str, before: NodeRow | None, after: NodeRow | None) -> None:
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
        with self._lock:
            # One name may have been taken by another pod since.
            if before is not None and (after is None or after.uid != before.uid):
                rows = self._rows(before.uid)
                self._set_pod(before.uid, None)
                self._apply(before.uid, rows)
                self._pod_leaves(before.uid)
            if after is not None:
                rows = self._rows(after.uid)
                self._holds.pop(after.uid, None)
                self._others.pop(after.uid, None)
                self._set_pod(after.uid, after)
                self._apply(after.uid, rows)
                self.unclaim(after.uid)
                if after.terminating:
                    self._pod_leaves(after.uid)

    # What a bind does.

    def reserve(
        self,
        uid: str,
        node: str,
        choose: Callable[[NodeView], PodRow | None],
        priority: int = LOWEST_PRIORITY,
    ) -> Reservation:
        """Choose cards and hold them, in one step that no other bind can get between.

        :param choose: gets the node as this pod sees it: without its own bookings, with others' claims.
        :param priority: the pod's; claims of lower ones don't bind it.
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
            # An earlier bind that was never confirmed, and the pod isn't bound: this one takes its place.
            self.release(uid)
            row = choose(view)
            if row is not None:
                rows = self._rows(uid)
                self._holds[uid] = Hold(row)
                self._apply(uid, rows)
            return Reservation(row)

    def settle(self, uid: str, due: float) -> None:
        """Hold a booking that was, or may have been, written until the watch delivers its pod or a check decides."""
        with self._lock:
            hold = self._holds.get(uid)
            if hold is not None:
                hold.working, hold.due = False, due

    def release(self, uid: str) -> None:
        """The booking was not written."""
        with self._lock:
            rows = self._rows(uid)
            if self._holds.pop(uid, None) is not None:
                self._apply(uid, rows)

    def held(self, uid: str) -> bool:
        """Whether memory is held for a pod by a bind of this extender that the watch hasn't confirmed."""
        return uid in self._holds

    def unconfirmed(self, now: float) -> list[PodRow]:
        """Bookings that have waited for the watch for too long."""
        with self._lock:
            return [hold.row for hold in self._holds.values() if not hold.working and hold.due <= now]

    @property
    def holds(self) -> int:
        return len(self._holds)

    @property
    def freed(self) -> int:
        """Increases whenever memory may have become free: a pod is gone, a node has changed, a claim ended."""
        return self._freed

    def freed_since(self, freed: int) -> list[str]:
        """The nodes where memory may have become free since ``freed`` had this value."""
        with self._lock:
            return list(itertools.takewhile(lambda name: self._freed_on[name] > freed, reversed(self._freed_on)))

    def others(self, node: str, rows: Sequence[PodRow]) -> None:
        """Replace the bookings of other extenders on a node.

        One counts until the watch shows its pod bound, wherever that is; a hold of the same pod on the same node
        counts in its place, one on another node doesn't: either bind may still come true.
        """
        with self._lock:
            current = {row.uid: row for row in rows if row.uid not in self._pods}
            for uid in {*self._others_on.get(node, ()), *current}:
                before = self._rows(uid)
                after = {name: row for name, row in self._others.get(uid, {}).items() if name != node}
                if uid in current:
                    after[node] = current[uid]
                if after:
                    self._others[uid] = after
                else:
                    self._others.pop(uid, None)
                self._apply(uid, before)
            if current:
                self._others_on[node] = tuple(current)
            else:
                self._others_on.pop(node, None)

    def unseen(self, node: str) -> list[PodRow]:
        """The bookings of other extenders on a node whose pods the watch hasn't shown yet."""
        with self._lock:
            current = self._others_on.get(node, ())
            return [row for uid in current if (row := self._others.get(uid, {}).get(node)) is not None]

    # What preemption does.

    def claim(self, claim: Claim) -> None:
        """Keep memory for a pod, unless it is bound already; one claim for each pod."""
        with self._lock:
            self._offers.pop(claim.uid, None)
            if claim.uid not in self._pods:
                self._claims[claim.uid] = claim
                self.on_claim()

    def offer(self, uid: str, claims: Iterable[Claim]) -> None:
        """What one of several evictions would free for a pod, in place of earlier offers and of its claim."""
        with self._lock:
            self.unclaim(uid)
            self._offers[uid] = tuple(claims)

    def unclaim(self, uid: str) -> None:
        """A pod's claim and offers end."""
        with self._lock:
            claim = self._claims.pop(uid, None)
            if claim is not None:
                self._mark_freed(claim.node)
                self.on_claim()
            self._offers.pop(uid, None)

    def claims(self) -> list[Claim]:
        with self._lock:
            return list(self._claims.values())

    def offered(self) -> list[str]:
        """The pods that have offers."""
        with self._lock:
            return list(self._offers)

    def outranks(self, priority: int) -> bool:
        """Whether any bound pod is of a lower priority."""
        with self._lock:
            return any(one < priority for one in self._priorities)

    def bound(self, uid: str) -> PodRow | None:
        """A pod that the watch shows on a node."""
        return self._pods.get(uid)

    def evictable(self, name: str) -> list[PodRow]:
        """The pods that the watch shows on a node; bookings under way can't be evicted."""
        with self._lock:
            usage = self._usages.get(name)
            return [row for row in usage.pods.values() if row.uid in self._pods] if usage else []

    def nodes_with_bookings(self) -> set[str]:
        """The nodes with bookings under way, and perhaps some that had any a moment ago."""
        with self._lock:
            return {hold.row.node for hold in self._holds.values()}.union(self._others_on)

    # What is read.

    def view(self, name: str) -> NodeView | None:
        """A node as it is now."""
        return self._views.get(name)

    def viewer(self, uid: str, priority: int = LOWEST_PRIORITY) -> Callable[[str], NodeView | None]:
        """Return a lookup of nodes as one pod sees them: without its own bookings, left by earlier binds, and with what
        others of its priority or a higher one have claimed. Where there is any of that, all nodes are of this moment.
        """
        with self._lock:
            own = {} if uid in self._pods else self._rows(uid)
            claims = [one for one in self._claims.values() if one.priority >= priority and one.uid != uid]
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
        """All nodes by name."""
        with self._lock:
            return sorted(self._views.values(), key=lambda view: view.name)

    def snapshot(self, name: str) -> tuple[NodeView, list[PodRow]] | None:
        """A node and the pods on it (bound, or about to be), of one moment; None for a node that isn't known."""
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
        """What counts of a pod, by node: where it is bound, and before that all bookings that may come true."""
        bound = self._pods.get(uid)
        if bound is not None:
            return {bound.node: bound}
        rows, hold = self._others.get(uid, {}), self._holds.get(uid)
        return rows if hold is None else {**rows, hold.row.node: hold.row}

    def _apply(self, uid: str, before: dict[str, PodRow]) -> None:
        """Bring the sums from what counted of a pod to what counts now."""
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
        """A pod terminates: an offer that lists it as a victim becomes a claim."""
        for claims in list(self._offers.values()):
            chosen = next((claim for claim in claims if uid in claim.victims), None)
            if chosen is not None:
                self.claim(chosen)

    def _view_for_pod(self, name: str, own: PodRow | None, claims: list[Claim]) -> NodeView:
        usage = self._usage(name)
        used, unplaced = dict(usage.used), usage.unplaced
        changes = [(share, -1) for share in (own.cards or ((NO_CARD, own.units),) if own else ())]
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
