# SPDX-License-Identifier: GPL-3.0-or-later
"""Identify the pod that kubelet is admitting, and choose its units among the free ones. No I/O, no clock.

kubelet adds one pod to those it manages, admits it container by container, and only then adds the next; PodResources
list the pod under admission with the rest, and kubelet calls the plugin without holding its device lock. So during
GetPreferredAllocation the pod is the one that is listed with a container that requests units and has none. Only if
PodResources can't be read, the oldest assumed pod with a container of that size is chosen; a wrong guess only chooses
another card, and is corrected afterwards. Source: kubernetes v1.36.0, pkg/kubelet/cm/devicemanager/manager.go.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as t

from gpushare.kubelet import wire
from gpushare.kubelet.errors import NoDevices
from gpushare.kubelet.pod_resources import Entry, grouped
from gpushare.plugin import pod_facts
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason
from gpushare.shared._core.types import JsonObject


@dataclasses.dataclass(frozen=True)
class Subject:
    """The pod that kubelet is admitting.

    :param container: the container that kubelet allocates for now; empty if it is unknown.
    :param held: IDs that its other containers have already.
    """

    pod: JsonObject
    container: str = ""
    held: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return pod_facts.key(self.pod)


@dataclasses.dataclass(frozen=True)
class Decision:
    """Chosen IDs.

    :param cards: the cards of the IDs, by index; each has equally many.
    :param reason: why these cards were chosen, for the log.
    """

    ids: tuple[str, ...]
    cards: tuple[contract.Card, ...]
    reason: str


class ReservedUnits(t.NamedTuple):
    """Units that kubelet counts as free and that are reserved, by card (UUID).

    :param booked: units that pods have booked and that aren't allocated yet.
    :param foreign: units of pods with another plugin's IDs, which kubelet no longer counts.
    """

    booked: t.Mapping[str, int]
    foreign: t.Mapping[str, int]


# --------------------------------------------------------------------------- which pod


def pending(pod: JsonObject, entry: Entry) -> list[tuple[str, int]]:
    """Return name and units of the containers that kubelet may allocate next; empty if all listed ones are complete.

    Containers are served in order: all before the last one with IDs are complete, and none after the first one without
    IDs can be next. PodResources don't show whether a hidden one before that is complete.
    """
    steps = pod_facts.steps(pod)
    if not steps or entry.containers.get(steps[-1].name):
        return []
    done = max((n for n, step in enumerate(steps) if entry.containers.get(step.name)), default=-1)
    left = steps[done + 1 :]
    if all(step.hidden for step in left) and (pod_facts.assigned(pod) or pod_facts.started(pod)):
        return []
    waiting = []
    for step in left:
        waiting.append((step.name, step.units))
        if not step.hidden:
            break
    return waiting


def identify(size: int, pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry] | None) -> Subject | None:
    """Identify the pod for which kubelet requests so many units; None if it isn't known.

    :param pods: the node's pods by key, finished ones too.
    :param listing: from PodResources; None if they can't be read.
    """
    return listed(size, pods, listing or ()) or _oldest_assumed(size, pods, listing)


def listed(size: int, pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry]) -> Subject | None:
    """Identify the pod in kubelet's list; None if it isn't listed."""
    candidates: list[tuple[bool, tuple[str, int, str], Subject]] = []
    for entry in listing:
        pod = pods.get(entry.key)
        if pod is None or contract.finished(pod):
            continue
        name = next((name for name, units in pending(pod, entry) if units == size), None)
        if name is not None:
            # A rejected pod may still be listed: the one under admission hasn't started, and is the latest.
            candidates.append((not pod_facts.started(pod), pod_facts.recency(pod), Subject(pod, name, entry.ids)))
    return max(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _oldest_assumed(size: int, pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry] | None) -> Subject | None:
    complete = {entry.key for entry in listing or () if entry.key in pods and not pending(pods[entry.key], entry)}
    candidates: list[tuple[int, str, Subject]] = []
    for key, pod in pods.items():
        held = pod_facts.booking(pod)
        if held is None or held.assigned or not pod_facts.counts(pod) or key in complete:
            continue
        name = next((step.name for step in pod_facts.steps(pod) if step.units == size), None)
        if name is not None:
            candidates.append((held.assume_time, key, Subject(pod, name)))
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def unknown_pod_ids(pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry] | None) -> tuple[str, ...]:
    """Return the IDs of the pod under admission if the mirror lacks it; otherwise empty.

    With them all containers of an unknown pod get the cards of the first one.
    """
    unknown = [entry for entry in listing or () if entry.key not in pods and entry.lacking]
    return unknown[0].ids if len(unknown) == 1 else ()


# --------------------------------------------------------------------------- which units


class Slots:
    """Maps device IDs to cards; see :func:`slots_of`."""

    def __init__(self, cards: t.Sequence[contract.Card]) -> None:
        self._cards = cards
        self._known: dict[str, contract.Card | None] = {}

    def named(self, short: str) -> contract.Card | None:
        """Return the card of a short UUID, as device IDs have it; None if it is unknown."""
        if short not in self._known:
            self._known[short] = contract.card_by_short(self._cards, short) if short else None
        return self._known[short]

    def uuid(self, short: str) -> str:
        """Return the UUID of the same card; empty if it is unknown."""
        card = self.named(short)
        return card.uuid if card else ""

    def by_card(self, identifiers: t.Iterable[str]) -> dict[str, list[str]]:
        """Group IDs by their card's UUID; unknown ones have the empty string."""
        ids_by_card: dict[str, list[str]] = {}
        for short, ids in grouped(identifiers).items():
            ids_by_card.setdefault(self.uuid(short), []).extend(ids)
        return ids_by_card

    def units(self, counts: t.Mapping[str, int]) -> dict[str, int]:
        """Convert units by short UUID to units by UUID; unknown cards have the empty string."""
        units_by_card: dict[str, int] = {}
        for short, number in counts.items():
            uuid = self.uuid(short)
            units_by_card[uuid] = units_by_card.get(uuid, 0) + number
        return units_by_card


def held_slots(card: contract.Card, listing: t.Iterable[Entry]) -> int:
    """Return the number of a card's first slots that hold all that kubelet has allocated of it."""
    held = Slots([card]).by_card(slot for entry in listing for slot in entry.ids)
    return max((int(slot.rpartition("-")[2]) + 1 for slot in held.get(card.uuid, ())), default=0)


@functools.lru_cache(maxsize=4)
def _slots_of(cards: tuple[contract.Card, ...]) -> Slots:
    return Slots(cards)


def slots_of(cards: t.Sequence[contract.Card]) -> Slots:
    """Return the cached object for these cards."""
    return _slots_of(tuple(cards))


def held_units(cards: t.Sequence[contract.Card], listing: t.Iterable[Entry]) -> dict[str, int]:
    """Return the units of each card (by UUID) that kubelet has allocated."""
    slots = slots_of(cards)
    held = {card.uuid: 0 for card in cards}
    for entry in listing:
        for short, number in entry.total.items():
            card = slots.named(short)
            if card is not None:
                held[card.uuid] += number
    return held


def reserved_units(
    cards: t.Sequence[contract.Card],
    pods: t.Mapping[str, JsonObject],
    listing: t.Sequence[Entry] | None,
    without: str = "",
) -> ReservedUnits:
    """Return the units of each card (by UUID) that kubelet counts as free and that are reserved for pods.

    :param pods: the node's pods by key.
    :param listing: from PodResources; None if they can't be read.
    :param without: UID of a pod that doesn't count.
    """
    slots = slots_of(cards)
    by_index = {card.index: card.uuid for card in cards}
    listed = {entry.key: entry for entry in listing or ()}
    booked = {card.uuid: 0 for card in cards}
    foreign = dict(booked)
    for key, pod in pods.items():
        if contract.pod_uid(pod) == without or not pod_facts.counts(pod):
            continue
        entry = listed.get(key)
        strange = entry is not None and any(slots.named(short) is None for short in entry.total)
        shares = pod_facts.shares(pod)
        if strange and len(cards) == 1:
            # On a node of one card upstream's plugin allocates units without annotating the pod.
            shares = {cards[0].index: pod_facts.units(pod)}
        for index, units in shares.items():
            uuid = by_index.get(index, "")
            if not uuid:
                continue
            if strange:
                foreign[uuid] += units
            elif entry is None:
                # An assigned pod's IDs aren't free, listed or not: after its restart kubelet's list fills one by one.
                booked[uuid] += 0 if pod_facts.assigned(pod) else units
            elif pending(pod, entry):
                booked[uuid] += max(0, units - slots.units(entry.total).get(uuid, 0))
    return ReservedUnits(booked, foreign)


def choose(
    cards: t.Sequence[contract.Card],
    ask: wire.Ask,
    subject: Subject | None,
    reserved: ReservedUnits,
    unknown_pod_ids: t.Sequence[str] = (),
) -> Decision:
    """Choose available IDs for kubelet, equally many of each of as many cards as the pod requests.

    In this order: the cards of the pod's other containers; its booked cards; else best fit: of the cards with enough
    units for the whole pod those with the fewest left (or the most, with placement ``spread``), if possible without
    units that other pods have booked. Units of another plugin's pods are never chosen.

    :param ask: kubelet's request for one container.
    :param subject: the pod; None if it is unknown.
    :param reserved: reserved units of the cards.
    :param unknown_pod_ids: IDs that the pod has already, if the mirror lacks it.
    :raises NoDevices: no card has the units. kubelet then fails the pod's admission, and the pod's controller creates
        another one, which is scheduled again. Units of other cards, or none, would be refused by Allocate.
    """
    who = f"pod {subject.key}" if subject else "a pod"
    slots = slots_of(cards)
    held = slots.by_card(subject.held if subject else unknown_pod_ids)
    try:
        demand = contract.demand(subject.pod) if subject else contract.Demand(ask.size, max(1, len(held)))
    except contract.ContractError as error:
        raise NoDevices(Reason.INVALID_ANNOTATION, f"{who} can't be served: {error}") from error
    if ask.size % demand.count:
        text = f"{who} requests {ask.size} units, which can't be spread equally over {demand.count} cards"
        raise NoDevices(Reason.UNEQUAL_SHARES, text)
    part = ask.size // demand.count

    free = slots.by_card(dict.fromkeys([*ask.available, *ask.must_include]) if ask.must_include else ask.available)
    free_units = {card.uuid: len(free.get(card.uuid, ())) - reserved.foreign.get(card.uuid, 0) for card in cards}

    def decided(chosen: t.Iterable[contract.Card], reason: str) -> Decision:
        ordered = tuple(sorted(chosen, key=lambda card: card.index))
        must = slots.by_card(ask.must_include)
        ids = [_take(part, must.get(card.uuid, ()), free.get(card.uuid, ())) for card in ordered]
        return Decision(tuple(identifier for each in ids for identifier in each), ordered, reason)

    fixed = slots.by_card(ask.must_include) or held
    if fixed:
        chosen = [card for card in cards if card.uuid in fixed]
        if len(chosen) != len(fixed) or len(chosen) != demand.count:
            kind = "one card" if demand.count == 1 else f"{demand.count} cards"
            raise NoDevices(
                Reason.UNEQUAL_SHARES, f"{who} has units {_names(fixed)}, which aren't all of {kind} of this node"
            )
        for card in chosen:
            if free_units[card.uuid] < part:
                raise NoDevices(
                    Reason.INSUFFICIENT_GPU_MEMORY,
                    f"{who} is on card {card.index} ({card.uuid}) and requests {part} more units of it, "
                    f"of which {max(0, free_units[card.uuid])} are free",
                )
        return decided(chosen, "the pod is on this card already")

    share = max(part, demand.share)
    booked = pod_facts.booking(subject.pod) if subject else None
    if booked is not None and len(booked.indices) == demand.count:
        chosen = [card for card in cards if card.index in booked.indices and free_units[card.uuid] >= share]
        if len(chosen) == demand.count:
            return decided(chosen, "the pod is booked on this card")

    def left(card: contract.Card) -> int:
        return free_units[card.uuid] - reserved.booked.get(card.uuid, 0) - share

    direction = -1 if demand.placement == "spread" else 1
    allowed = [card for card in cards if demand.accepts(card)]
    fitting = [card for card in allowed if free_units[card.uuid] >= share]
    unreserved = [card for card in fitting if left(card) >= 0]
    if len(unreserved) >= demand.count:
        unreserved.sort(key=lambda card: (direction * left(card), card.index))
        return decided(unreserved[: demand.count], f"{'the booked card is full' if booked else 'no booking'}; best fit")
    if len(fitting) >= demand.count:
        fitting.sort(key=lambda card: (-left(card), card.index))
        return decided(fitting[: demand.count], "only cards with units that others have booked are left")
    largest = max((max(0, free_units[card.uuid]) for card in allowed), default=0)
    models = " that it accepts" if len(allowed) < len(cards) else ""
    if demand.count == 1:
        wants = f"{who} requests {share} units of {contract.RESOURCE_MEMORY} on one card{models}"
        raise NoDevices(Reason.INSUFFICIENT_GPU_MEMORY, f"{wants}; the largest free share is {largest}")
    wants = f"{who} requests {share} units of {contract.RESOURCE_MEMORY} on each of {demand.count} cards{models}"
    raise NoDevices(Reason.INSUFFICIENT_GPU_MEMORY, f"{wants}; so many are free on {len(fitting)}")


def _take(part: int, must: t.Sequence[str], free: t.Sequence[str]) -> list[str]:
    """Choose IDs of one card: the required ones, then the lowest slots.

    :raises NoDevices: more are required than requested.
    """
    if len(must) > part:
        text = f"kubelet requires {len(must)} units of a card in a container that requests {part} of it"
        raise NoDevices(Reason.UNEQUAL_SHARES, text)
    first = dict.fromkeys(must)
    # IDs of one card differ in nothing but their slots, so the shorter one is the lower one.
    lowest = sorted(sorted(free), key=len)
    return [*first, *(identifier for identifier in lowest if identifier not in first)][:part]


def _names(ids_by_card: t.Mapping[str, t.Sequence[str]]) -> str:
    return ", ".join(sorted(ids[0] for ids in ids_by_card.values()))
