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
import typing as t

from gpushare import contract, wire
from gpushare.podresources import Entry

Json = contract.Json


class Refused(Exception):
    """No answer that keeps the pod on one card, in one sentence."""


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
        return contract.pod_key(self.pod)


@dataclasses.dataclass(frozen=True)
class Decision:
    """:param reason: why this card, in a few words for the log."""

    ids: tuple[str, ...]
    card: contract.Card
    reason: str


# --------------------------------------------------------------------------- which pod


@dataclasses.dataclass(frozen=True)
class _Step:
    """A container that wants units; plain init containers are hidden from PodResources."""

    name: str
    units: int
    hidden: bool


def _steps(pod: Json) -> list[_Step]:
    """The containers that want units, in the order in which kubelet serves them."""
    spec = pod.get("spec") or {}
    inits = [(one, one.get("restartPolicy") != "Always") for one in spec.get("initContainers") or []]
    everything = inits + [(one, False) for one in spec.get("containers") or []]
    found = [_Step(str(one.get("name", "")), contract.container_units(one), hidden) for one, hidden in everything]
    return [step for step in found if step.units > 0]


def visible_units(pod: Json) -> int:
    """Units of the containers that PodResources show."""
    return sum(step.units for step in _steps(pod) if not step.hidden)


def pending(pod: Json, entry: Entry) -> list[tuple[str, int]]:
    """Name and units of the containers that kubelet may ask for next; empty when the pod has all that can be seen.

    Containers are served in order, so all before the last one with IDs are done, and nothing behind the first one
    without can be next. Whether a hidden one before that is done can't be seen.
    """
    steps = _steps(pod)
    done = max((n for n, step in enumerate(steps) if entry.containers.get(step.name)), default=-1)
    left = steps[done + 1 :]
    if all(step.hidden for step in left) and (assigned(pod) or started(pod)):
        return []
    found = []
    for step in left:
        found.append((step.name, step.units))
        if not step.hidden:
            break
    return found


def assigned(pod: Json) -> bool:
    held = contract.booking(pod)
    return held is not None and held.assigned


def started(pod: Json) -> bool:
    """kubelet has admitted this very pod (by UID) and said so."""
    return bool((pod.get("status") or {}).get("startTime"))


def _recency(pod: Json) -> tuple[str, int, str]:
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    times = [str(metadata.get("creationTimestamp") or "")]
    times += [
        str(one.get("lastTransitionTime") or "")
        for one in status.get("conditions") or []
        if one.get("type") == "PodScheduled"
    ]
    held = contract.booking(pod)
    return max(times), held.assume_time if held else 0, contract.pod_uid(pod)


def identify(size: int, pods: t.Mapping[str, Json], listing: t.Sequence[Entry] | None) -> Subject | None:
    """The pod that kubelet asks so many units for; None if there is no telling.

    :param pods: the node's pods by key, finished ones too.
    :param listing: what PodResources say, None where they can't be read.
    """
    found: list[tuple[bool, tuple[str, int, str], Subject]] = []
    for entry in listing or ():
        pod = pods.get(entry.key)
        if pod is None or contract.finished(pod):
            continue
        name = next((name for name, units in pending(pod, entry) if units == size), None)
        if name is not None:
            # A pod rejected a moment ago may linger: the one under admission hasn't started, and is the latest.
            found.append((not started(pod), _recency(pod), Subject(pod, name, entry.ids)))
    if found:
        return max(found, key=lambda one: one[:2])[2]
    return _oldest_assumed(size, pods, listing)


def _oldest_assumed(size: int, pods: t.Mapping[str, Json], listing: t.Sequence[Entry] | None) -> Subject | None:
    complete = {entry.key for entry in listing or () if entry.key in pods and not pending(pods[entry.key], entry)}
    found: list[tuple[int, str, Subject]] = []
    for key, pod in pods.items():
        held = contract.booking(pod)
        if held is None or held.assigned or not contract.counts(pod) or key in complete:
            continue
        name = next((step.name for step in _steps(pod) if step.units == size), None)
        if name is not None:
            found.append((held.assume_time, key, Subject(pod, name)))
    return min(found, key=lambda one: one[:2])[2] if found else None


# --------------------------------------------------------------------------- which units


class Slots:
    """Device IDs sorted by the card that they name."""

    def __init__(self, cards: t.Sequence[contract.Card]) -> None:
        self._cards = cards
        self._known: dict[str, contract.Card | None] = {}

    def card(self, identifier: str) -> contract.Card | None:
        """The card of one ID; None if it isn't one of ours."""
        try:
            short = contract.card_of_device_id(identifier)
        except contract.ContractError:
            return None
        if short not in self._known:
            self._known[short] = contract.card_by_short(self._cards, short)
        return self._known[short]

    def by_card(self, identifiers: t.Iterable[str]) -> dict[str, list[str]]:
        """IDs by their card's UUID, lowest slot first; unknown ones under the empty text."""
        found: dict[str, list[str]] = {}
        for identifier in identifiers:
            card = self.card(identifier)
            found.setdefault(card.uuid if card else "", []).append(identifier)
        for uuid, ids in found.items():
            if uuid:
                ids.sort(key=lambda one: int(one.rpartition("-")[2]))
        return found


def promised(
    cards: t.Sequence[contract.Card],
    pods: t.Mapping[str, Json],
    listing: t.Sequence[Entry] | None,
    without: str = "",
) -> dict[str, int]:
    """Units of each card (by UUID) that pods have a booking for and kubelet's free IDs still contain.

    :param without: UID of a pod that doesn't count.
    """
    slots = Slots(cards)
    by_index = {card.index: card.uuid for card in cards}
    listed = {entry.key: entry for entry in listing or ()}
    found = {card.uuid: 0 for card in cards}
    for key, pod in pods.items():
        booked = contract.booking(pod)
        if booked is None or booked.index not in by_index or contract.pod_uid(pod) == without:
            continue
        if not contract.counts(pod):
            continue
        uuid, entry = by_index[booked.index], listed.get(key)
        if entry is None:
            # An assigned pod's IDs are taken, listed or not: after kubelet's restart the list fills one by one.
            found[uuid] += 0 if booked.assigned else contract.pod_units(pod)
        elif pending(pod, entry):
            found[uuid] += max(0, contract.pod_units(pod) - len(entry.ids))
        elif any(slots.card(one) is None for one in entry.ids):
            # IDs of another plugin: the memory is in use, but none of our IDs is.
            found[uuid] += contract.pod_units(pod)
    return found


def choose(
    cards: t.Sequence[contract.Card], ask: wire.Ask, subject: Subject | None, promises: t.Mapping[str, int]
) -> Decision:
    """The IDs that kubelet shall take: all of one card, all available.

    In this order: the card that the pod is on already; the card that it is booked on; else best fit, the card that is
    left with least, among those that hold all of the pod's rest and, where possible, without what others have booked.

    :raises Refused: no card will do. kubelet then fails the pod's admission, and whoever owns the pod makes a new one
        that is placed anew. Answering with units of two cards, or with none, would end in a refusal by Allocate.
    """
    slots = Slots(cards)
    free = slots.by_card(dict.fromkeys([*ask.available, *ask.must_include]))
    count = {card.uuid: len(free.get(card.uuid, ())) for card in cards}
    who = f"pod {subject.key}" if subject else "a pod"

    fixed = slots.by_card(ask.must_include) or slots.by_card(subject.held if subject else ())
    if fixed:
        card = next((card for card in cards if card.uuid in fixed), None)
        if card is None or len(fixed) > 1:
            raise Refused(f"{who} has units {_names(fixed)} that aren't all of one card of this node")
        if count[card.uuid] < ask.size:
            raise Refused(
                f"{who} is on card {card.index} ({card.uuid}) and wants {ask.size} more units of it, "
                f"of which {count[card.uuid]} are free"
            )
        return Decision(_take(ask, free[card.uuid]), card, "the pod is on this card already")

    need = max(ask.size, contract.pod_units(subject.pod)) if subject else ask.size
    booked = contract.booking(subject.pod) if subject else None
    if booked is not None:
        card = next((card for card in cards if card.index == booked.index), None)
        if card is not None and count[card.uuid] >= need:
            return Decision(_take(ask, free[card.uuid]), card, "the pod is booked on this card")

    def left(card: contract.Card) -> int:
        return count[card.uuid] - promises.get(card.uuid, 0) - need

    able = [card for card in cards if count[card.uuid] >= need]
    polite = [card for card in able if left(card) >= 0]
    if polite:
        card = min(polite, key=lambda card: (left(card), card.index))
        why = "the booked card is full; best fit" if booked else "no booking; best fit"
        return Decision(_take(ask, free[card.uuid]), card, why)
    if able:
        card = min(able, key=lambda card: (-left(card), card.index))
        return Decision(_take(ask, free[card.uuid]), card, "only cards with units that others have booked are left")
    largest = max(count.values(), default=0)
    raise Refused(
        f"{who} wants {need} units of {contract.RESOURCE_MEMORY} on one card; the largest free share is {largest}"
    )


def _take(ask: wire.Ask, ids: t.Sequence[str]) -> tuple[str, ...]:
    """So many of one card's IDs, what must be among them first, then the lowest slots."""
    must = dict.fromkeys(ask.must_include)
    return tuple([*must, *(one for one in ids if one not in must)][: ask.size])


def _names(found: t.Mapping[str, t.Sequence[str]]) -> str:
    return ", ".join(sorted(ids[0] for ids in found.values()))
