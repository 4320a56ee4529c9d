# SPDX-License-Identifier: GPL-3.0-or-later
"""Which pod kubelet is asking for, and which of the free units it shall take. Pure: no I/O, no clock.

Why no guessing is needed: kubelet adds one pod to those it manages, admits it container by container, and only then
adds the next; its PodResources list the pod under admission with the rest, and our call is made without kubelet's
device lock held. So at the time of GetPreferredAllocation the pod is the one that is listed with a container that wants
units and has none. Only where PodResources can't be read, the oldest assumed pod with a container of that size stands
in; a wrong guess costs nothing but the card, and is set right afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as t

from gpushare import contract, pod_facts, wire
from gpushare.podresources import Entry, grouped

Json = contract.Json


class Refused(Exception):
    """No answer that gives the pod what it asked for, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The pod that kubelet is admitting.

    :param container: the one asked for now; empty where that isn't known.
    :param held: IDs that its other containers have already.
    """

    pod: Json
    container: str = ""
    held: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return pod_facts.key(self.pod)


@dataclasses.dataclass(frozen=True)
class Decision:
    """
    :param cards: where the IDs are, by index; as many on each.
    :param reason: why these cards, in a few words for the log.
    """

    ids: tuple[str, ...]
    cards: tuple[contract.Card, ...]
    reason: str


class Promises(t.NamedTuple):
    """What of kubelet's free units isn't free, by card (UUID).

    :param booked: units that pods have a booking for and haven't got yet.
    :param foreign: units in use by pods that another plugin gave its own IDs to, which kubelet no longer counts.
    """

    booked: t.Mapping[str, int]
    foreign: t.Mapping[str, int]


# --------------------------------------------------------------------------- which pod


def pending(pod: Json, entry: Entry) -> list[tuple[str, int]]:
    """Name and units of the containers that kubelet may ask for next; empty when the pod has all that can be seen.

    Containers are served in order, so all before the last one with IDs are done, and nothing behind the first one
    without can be next. Whether a hidden one before that is done can't be seen.
    """
    steps = pod_facts.steps(pod)
    if not steps or entry.containers.get(steps[-1].name):
        return []
    done = max((n for n, step in enumerate(steps) if entry.containers.get(step.name)), default=-1)
    left = steps[done + 1 :]
    if all(step.hidden for step in left) and (pod_facts.assigned(pod) or pod_facts.started(pod)):
        return []
    found = []
    for step in left:
        found.append((step.name, step.units))
        if not step.hidden:
            break
    return found


def identify(size: int, pods: t.Mapping[str, Json], listing: t.Sequence[Entry] | None) -> Subject | None:
    """The pod that kubelet asks so many units for; None if there is no telling.

    :param pods: the node's pods by key, finished ones too.
    :param listing: what PodResources say, None where they can't be read.
    """
    return listed(size, pods, listing or ()) or _oldest_assumed(size, pods, listing)


def listed(size: int, pods: t.Mapping[str, Json], listing: t.Sequence[Entry]) -> Subject | None:
    """The pod among those in kubelet's list; None if it is none of these."""
    found: list[tuple[bool, tuple[str, int, str], Subject]] = []
    for entry in listing:
        pod = pods.get(entry.key)
        if pod is None or contract.finished(pod):
            continue
        name = next((name for name, units in pending(pod, entry) if units == size), None)
        if name is not None:
            # A pod rejected a moment ago may linger: the one under admission hasn't started, and is the latest.
            found.append((not pod_facts.started(pod), pod_facts.recency(pod), Subject(pod, name, entry.ids)))
    return max(found, key=lambda one: one[:2])[2] if found else None


def _oldest_assumed(size: int, pods: t.Mapping[str, Json], listing: t.Sequence[Entry] | None) -> Subject | None:
    complete = {entry.key for entry in listing or () if entry.key in pods and not pending(pods[entry.key], entry)}
    found: list[tuple[int, str, Subject]] = []
    for key, pod in pods.items():
        held = pod_facts.booking(pod)
        if held is None or held.assigned or not pod_facts.counts(pod) or key in complete:
            continue
        name = next((step.name for step in pod_facts.steps(pod) if step.units == size), None)
        if name is not None:
            found.append((held.assume_time, key, Subject(pod, name)))
    return min(found, key=lambda one: one[:2])[2] if found else None


def strangers(pods: t.Mapping[str, Json], listing: t.Sequence[Entry] | None) -> tuple[str, ...]:
    """IDs of the pod that kubelet is in the middle of, where the API hasn't told of that pod; empty if there is none.

    So that a pod of which nothing is known has all of its containers on the cards of the first.
    """
    unknown = [entry for entry in listing or () if entry.key not in pods and entry.lacking]
    return unknown[0].ids if len(unknown) == 1 else ()


# --------------------------------------------------------------------------- which units


class Slots:
    """Which card of these a device ID names; see :func:`slots_of`."""

    def __init__(self, cards: t.Sequence[contract.Card]) -> None:
        self._cards = cards
        self._known: dict[str, contract.Card | None] = {}

    def named(self, short: str) -> contract.Card | None:
        """The card of a short UUID, as IDs have it; None if it isn't one of ours."""
        if short not in self._known:
            self._known[short] = contract.card_by_short(self._cards, short) if short else None
        return self._known[short]

    def uuid(self, short: str) -> str:
        """The same card's UUID; empty if it isn't one of ours."""
        card = self.named(short)
        return card.uuid if card else ""

    def by_card(self, identifiers: t.Iterable[str]) -> dict[str, list[str]]:
        """IDs by their card's UUID; unknown ones under the empty text."""
        found: dict[str, list[str]] = {}
        for short, ids in grouped(identifiers).items():
            found.setdefault(self.uuid(short), []).extend(ids)
        return found

    def units(self, counts: t.Mapping[str, int]) -> dict[str, int]:
        """Units by card (UUID), of units by the cards' short UUIDs; unknown ones under the empty text."""
        found: dict[str, int] = {}
        for short, number in counts.items():
            uuid = self.uuid(short)
            found[uuid] = found.get(uuid, 0) + number
        return found


@functools.lru_cache(maxsize=4)
def _slots_of(cards: tuple[contract.Card, ...]) -> Slots:
    return Slots(cards)


def slots_of(cards: t.Sequence[contract.Card]) -> Slots:
    """The same as before for the same cards, with what it knows already."""
    return _slots_of(tuple(cards))


def promised(
    cards: t.Sequence[contract.Card],
    pods: t.Mapping[str, Json],
    listing: t.Sequence[Entry] | None,
    without: str = "",
) -> Promises:
    """Units of each card (by UUID) that kubelet's free IDs still contain and others have a right to.

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
            # On a node of one card upstream's plugin gives units without writing anything on the pod.
            shares = {cards[0].index: pod_facts.units(pod)}
        for index, units in shares.items():
            uuid = by_index.get(index, "")
            if not uuid:
                continue
            if strange:
                foreign[uuid] += units
            elif entry is None:
                # An assigned pod's IDs are taken, listed or not: after kubelet's restart the list fills one by one.
                booked[uuid] += 0 if pod_facts.assigned(pod) else units
            elif pending(pod, entry):
                booked[uuid] += max(0, units - slots.units(entry.total).get(uuid, 0))
    return Promises(booked, foreign)


def choose(
    cards: t.Sequence[contract.Card],
    ask: wire.Ask,
    subject: Subject | None,
    promises: Promises,
    strangers: t.Sequence[str] = (),
) -> Decision:
    """The IDs that kubelet shall take: all available, equally many of each of as many cards as the pod asks for.

    In this order: the cards that the pod is on already; those that it is booked on; else best fit, the cards that are
    left with least (or with most, where the pod wants to be spread), among those that hold all of the pod's rest and,
    where possible, without what others have booked. What pods of another plugin use is never given.

    :param strangers: IDs that the pod has already, where nothing else is known of it.
    :raises Refused: no cards will do. kubelet then fails the pod's admission, and whoever owns the pod makes a new one
        that is placed anew. Answering with units of other cards, or with none, would end in a refusal by Allocate.
    """
    who = f"pod {subject.key}" if subject else "a pod"
    slots = slots_of(cards)
    held = slots.by_card(subject.held if subject else strangers)
    try:
        wish = contract.wish(subject.pod) if subject else contract.Wish(ask.size, max(1, len(held)))
    except contract.ContractError as error:
        raise Refused(f"{who} can't be served: {error}") from error
    if ask.size % wish.count:
        raise Refused(f"{who} wants {ask.size} units, which can't be spread equally over {wish.count} cards")
    part = ask.size // wish.count

    free = slots.by_card(dict.fromkeys([*ask.available, *ask.must_include]) if ask.must_include else ask.available)
    room = {card.uuid: len(free.get(card.uuid, ())) - promises.foreign.get(card.uuid, 0) for card in cards}

    def decided(chosen: t.Iterable[contract.Card], reason: str) -> Decision:
        ordered = tuple(sorted(chosen, key=lambda card: card.index))
        must = slots.by_card(ask.must_include)
        ids = [_take(part, must.get(card.uuid, ()), free.get(card.uuid, ())) for card in ordered]
        return Decision(tuple(one for each in ids for one in each), ordered, reason)

    fixed = slots.by_card(ask.must_include) or held
    if fixed:
        chosen = [card for card in cards if card.uuid in fixed]
        if len(chosen) != len(fixed) or len(chosen) != wish.count:
            kind = "one card" if wish.count == 1 else f"{wish.count} cards"
            raise Refused(f"{who} has units {_names(fixed)} that aren't all of {kind} of this node")
        for card in chosen:
            if room[card.uuid] < part:
                raise Refused(
                    f"{who} is on card {card.index} ({card.uuid}) and wants {part} more units of it, "
                    f"of which {max(0, room[card.uuid])} are free"
                )
        return decided(chosen, "the pod is on this card already")

    share = max(part, wish.share)
    booked = pod_facts.booking(subject.pod) if subject else None
    if booked is not None and len(booked.indices) == wish.count:
        chosen = [card for card in cards if card.index in booked.indices and room[card.uuid] >= share]
        if len(chosen) == wish.count:
            return decided(chosen, "the pod is booked on this card")

    def left(card: contract.Card) -> int:
        return room[card.uuid] - promises.booked.get(card.uuid, 0) - share

    direction = -1 if wish.placement == "spread" else 1
    allowed = [card for card in cards if wish.allows(card)]
    able = [card for card in allowed if room[card.uuid] >= share]
    polite = [card for card in able if left(card) >= 0]
    if len(polite) >= wish.count:
        polite.sort(key=lambda card: (direction * left(card), card.index))
        return decided(polite[: wish.count], f"{'the booked card is full' if booked else 'no booking'}; best fit")
    if len(able) >= wish.count:
        able.sort(key=lambda card: (-left(card), card.index))
        return decided(able[: wish.count], "only cards with units that others have booked are left")
    largest = max((max(0, room[card.uuid]) for card in allowed), default=0)
    models = " that it accepts" if len(allowed) < len(cards) else ""
    if wish.count == 1:
        wants = f"{who} wants {share} units of {contract.RESOURCE_MEMORY} on one card{models}"
        raise Refused(f"{wants}; the largest free share is {largest}")
    wants = f"{who} wants {share} units of {contract.RESOURCE_MEMORY} on each of {wish.count} cards{models}"
    raise Refused(f"{wants}; so many are free on {len(able)}")


def _take(part: int, must: t.Sequence[str], free: t.Sequence[str]) -> list[str]:
    """So many of one card's IDs, what must be among them first, then the lowest slots."""
    if len(must) > part:
        raise Refused(f"kubelet wants {len(must)} units of a card in a container that asks for {part} of it")
    first = dict.fromkeys(must)
    # IDs of one card differ in nothing but their slots, so the shorter one is the lower one.
    lowest = sorted(sorted(free), key=len)
    return [*first, *(one for one in lowest if one not in first)][:part]


def _names(found: t.Mapping[str, t.Sequence[str]]) -> str:
    return ", ".join(sorted(ids[0] for ids in found.values()))
