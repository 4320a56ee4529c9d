# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's cards as the plugin announces them, kept from one query of NVML to the next."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import typing as t

from gpushare.nvml.health import Health, sentence
from gpushare.nvml.library import Nvml, NvmlCard, NvmlError
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason, Refusal

log = logging.getLogger("gpushare.nvml")

# A thread that waits for the driver's events checks this often whether it has to stop.
CHUNK_SECONDS = 1.0

LOST = Refusal(Reason.CARD_LOST, "NVML doesn't answer for it")
EVERY_EXCLUDED = "gpu_exclude names every card of this node"
LEFT_OUT = Refusal(Reason.EXCLUDED, "gpu_exclude keeps it from Kubernetes; pods that have it keep it until they end")


class HealthFields(t.TypedDict):
    """The fields of a card that concern its health."""

    healthy: bool
    reason: str
    code: str
    xid: int


# The number of a card's first slots that hold all that pods have of it; None if that is unknown now.
HeldSlots = t.Callable[[contract.Card], "int | None"]


def merge(
    known: t.Sequence[contract.Card], seen: t.Sequence[NvmlCard], unit: str, held: HeldSlots = lambda card: 0
) -> tuple[contract.Card, ...]:
    """Merge NVML's cards into the known ones: one that doesn't answer any more stays, unhealthy, until it does.

    A card keeps the index that it had first, since pods' annotations name it by that.

    :param known: the cards of the merge before.
    :param seen: what NVML answers now.
    :param unit: of the shares, GiB or MiB.
    :param held: returns the number of a card's units that pods hold.
    :returns: the cards to announce, by index.
    """
    answered = {seen_card.uuid: seen_card for seen_card in seen}
    cards = {card.uuid: card for card in known}
    for card in known:
        now = answered.pop(card.uuid, None)
        if now is None:
            cards[card.uuid] = _refused(card, LOST)
            continue
        sized = dataclasses.replace(card, memory_mib=now.memory_mib, reserved_mib=_reserved(card, now, unit, held))
        cards[card.uuid] = dataclasses.replace(
            sized,
            minor=now.minor,
            units=contract.units_of(sized.shared_mib, unit),
            model=now.model,
            **_health(now.problem),
        )
    for new in answered.values():
        taken = {card.index for card in cards.values()}
        free = new.index if new.index not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
        fresh = contract.Card(
            free,
            new.uuid,
            new.minor,
            new.memory_mib,
            0,
            model=new.model,
            reserved_mib=new.reserved_mib,
            **_health(new.problem),
        )
        cards[new.uuid] = dataclasses.replace(fresh, units=contract.units_of(fresh.shared_mib, unit))
    return tuple(sorted(cards.values(), key=lambda card: card.index))


def _reserved(card: contract.Card, now: NvmlCard, unit: str, held: HeldSlots) -> int:
    """Return what of a known card isn't given to pods, in MiB.

    A card that was announced with less of a reserve, or without one, keeps its units while pods hold the last of them:
    after a reboot kubelet would refuse a pod whose device IDs aren't announced any more.
    """
    if now.reserved_mib <= card.reserved_mib:
        return now.reserved_mib
    units = contract.units_of(max(0, now.memory_mib - now.reserved_mib), unit)
    if units >= contract.units_of(max(0, now.memory_mib - card.reserved_mib), unit):
        return now.reserved_mib
    slots = held(card)
    return card.reserved_mib if slots is None or slots > units else now.reserved_mib


def _health(problem: Refusal | None, xid: int = 0) -> HealthFields:
    if problem is None:
        return {"healthy": True, "reason": "", "code": "", "xid": 0}
    return {"healthy": False, "reason": problem.text, "code": problem.code.value, "xid": xid}


def _refused(card: contract.Card, why: Refusal, xid: int = 0) -> contract.Card:
    return dataclasses.replace(card, **_health(why, xid))


class Inventory:
    """The cards as the plugin announces them, refreshed periodically; ``changed`` is notified of changes.

    Cards that can't be announced to kubelet (too many units, a duplicate UUID) are withheld; ``reason`` has the cause.
    """

    def __init__(
        self,
        nvml: Nvml,
        unit: str,
        health: Health | None = None,
        reserve_mib: int = 0,
        check: t.Callable[[t.Sequence[contract.Card], str], None] = contract.check_device_list,
    ) -> None:
        """Create it without cards.

        :param unit: of the cluster's shares, GiB or MiB.
        :param reserve_mib: what of each card isn't given to pods, besides the reserve of driver and firmware.
        :param check: raises :class:`contract.ContractError` for cards that can't be announced in this unit.
        """
        self._check = check
        self._nvml = nvml
        self._unit = unit
        self._reserve_mib = reserve_mib
        # The largest reserve of each card (UUID) yet: units don't come and go with a small change of it.
        self._reserves: dict[str, int] = {}
        self._health = health or Health(quiet=300)
        self._restored: tuple[contract.Card, ...] = ()
        self._held: frozenset[int] = frozenset()
        self._seen: tuple[contract.Card, ...] = ()
        self._used: dict[str, int] = {}
        self._buses: dict[str, str] = {}
        self._cards: tuple[contract.Card, ...] = ()
        self._withheld: frozenset[str] = frozenset()
        self._reason: str | None = "the cards haven't been read yet"
        self._no_cards_since: float | None = None
        self.changed = threading.Condition()
        # Further reasons for which a healthy card (UUID) may not be given to pods; empty for none.
        self.guards: list[t.Callable[[str], Refusal | None]] = []
        # Called with the cards that answer and could be shared, before the guards are asked.
        self.on_refresh: t.Callable[[tuple[contract.Card, ...]], None] = lambda cards: None
        self.on_xid: t.Callable[[str, int], None] = lambda uuid, number: None
        self.held_slots: HeldSlots = lambda card: 0
        # Whether pods may have something of a card.
        self.in_use: t.Callable[[contract.Card], bool] = lambda card: True

    @property
    def cards(self) -> tuple[contract.Card, ...]:
        with self.changed:
            return self._cards

    @property
    def withheld(self) -> frozenset[str]:
        """Return the device IDs that are announced as unhealthy on healthy cards."""
        with self.changed:
            return self._withheld

    def withhold(self, ids: frozenset[str]) -> bool:
        """Announce exactly these device IDs as unhealthy; true if they are others than before."""
        with self.changed:
            if ids == self._withheld:
                return False
            self._withheld = ids
            self.changed.notify_all()
            return True

    @property
    def used_mib(self) -> dict[str, int]:
        """MiB in use on each card (UUID) that answered the last query."""
        with self.changed:
            return dict(self._used)

    @property
    def buses(self) -> dict[str, str]:
        """The PCI address of each card (UUID) that has answered a query."""
        with self.changed:
            return dict(self._buses)

    @property
    def reason(self) -> str | None:
        """Return why the present cards can't be announced; None if they can."""
        with self.changed:
            return self._reason

    @property
    def seconds_without_cards(self) -> float:
        """Seconds for which NVML has shown no card at all."""
        with self.changed:
            return 0.0 if self._no_cards_since is None else time.monotonic() - self._no_cards_since

    def restore(self, cards: t.Sequence[contract.Card], held: t.Collection[int]) -> None:
        """Restore what the plugin announced before its restart; to be called before the first refresh.

        A card keeps its index over our restarts, however NVML numbers those that are left. One that doesn't answer is
        kept only where pods are still booked on it, and one with an XID has to be quiet for as long as after the XID.

        :param held: indices that pods of this node are booked on.
        """
        self._restored = tuple({card.uuid: card for card in cards if card.uuid}.values())
        self._held = frozenset(held)
        for card in cards:
            if card.xid:
                self._health.note(card.uuid, card.xid, time.monotonic())

    def refresh(self) -> bool:
        """Query NVML; true if the announced cards have changed."""
        problem: str | None = None
        used: dict[str, int] = {}
        buses: dict[str, str] = {}
        try:
            answers = [self._with_reserve(card) for card in self._nvml.cards()]
            used = {card.uuid: card.used_mib for card in answers}
            buses = {card.uuid: card.bus for card in answers}
            self._seen = self._without_excluded(merge(self._known_cards(answers), answers, self._unit, self.held_slots))
            if not self._seen:
                problem = EVERY_EXCLUDED if self._nvml.left_out else "NVIDIA's driver answers, but has no card"
        except NvmlError as error:
            problem = str(error)
            self._seen = merge(self._seen, [], self._unit)
        if able := tuple(card for card in self._seen if card.healthy):
            self.on_refresh(able)
        with self.changed:
            self._used = used
            self._buses |= buses
            lasts = problem and problem != EVERY_EXCLUDED
            self._no_cards_since = (self._no_cards_since or time.monotonic()) if lasts else None
        announce: tuple[contract.Card, ...] | None = tuple(self._with_health(card) for card in self._seen)
        try:
            self._check(self._seen, self._unit)
            unified = all(card.code == Reason.UNIFIED_MEMORY.value for card in announce or ())
            if announce and not unified and not any(card.units for card in announce):
                announce, problem = None, f"no card of this node holds one whole unit of 1 {self._unit}"
            elif announce and not problem and not any(card.healthy for card in announce):
                reasons = list(dict.fromkeys(card.reason for card in announce))
                if len(reasons) > 1:
                    reasons = [f"card {card.index}: {card.reason}" for card in announce]
                problem = f"no card of this node can be given to pods: {'; '.join(reasons)}"
        except contract.ContractError as error:
            announce, problem = None, str(error)
        return self._announce(announce, problem)

    def watch(self, seconds: float, stop: threading.Event) -> None:
        """Wait until a card has an error that concerns it, at most so many seconds."""
        end = time.monotonic() + seconds
        while not stop.is_set() and (left := end - time.monotonic()) > 0:
            began, chunk = time.monotonic(), min(left, CHUNK_SECONDS)
            for xid in self._nvml.xids(chunk):
                self.on_xid(*xid)
                counts = self._health.note(xid.uuid, xid.number, time.monotonic())
                log.log(logging.ERROR if counts else logging.INFO, "XID %d of card %s", xid.number, xid.uuid)
                if counts:
                    return
            # A driver that reports nothing answers at once.
            if (spent := time.monotonic() - began) < chunk:
                stop.wait(chunk - spent)

    def _without_excluded(self, cards: t.Sequence[contract.Card]) -> tuple[contract.Card, ...]:
        """Return the cards without those that are left out now; one that pods still have stays, unhealthy."""
        left_out = self._nvml.left_out
        return tuple(
            _refused(card, LEFT_OUT) if card.uuid in left_out else card
            for card in cards
            if card.uuid not in left_out or self.in_use(card)
        )

    def _with_reserve(self, card: NvmlCard) -> NvmlCard:
        """Return a card with the whole reserve, as far as it has the memory."""
        self._reserves[card.uuid] = max(card.reserved_mib, self._reserves.get(card.uuid, 0))
        reserved = min(self._reserves[card.uuid] + self._reserve_mib, card.memory_mib)
        return dataclasses.replace(card, reserved_mib=reserved)

    def _known_cards(self, answers: t.Sequence[NvmlCard]) -> tuple[contract.Card, ...]:
        """Return the cards known before a refresh; at first those of the plugin before its restart."""
        recalled, self._restored = self._restored, ()
        if not recalled or self._seen:
            return self._seen
        there = {card.uuid for card in answers}
        kept = [card for card in recalled if card.uuid in there or card.index in self._held]
        # The unit may be another one since.
        return tuple(dataclasses.replace(card, units=contract.units_of(card.shared_mib, self._unit)) for card in kept)

    def _with_health(self, card: contract.Card) -> contract.Card:
        """Return a card as it is announced: NVML's problems come first, then XID errors, then the guards."""
        if not card.healthy:
            return card
        xid = self._health.xid(card.uuid, time.monotonic())
        if xid is not None:
            return _refused(card, Refusal(Reason.XID_ERROR, sentence(xid)), xid)
        why = next((refusal for guard in self.guards if (refusal := guard(card.uuid)) is not None), None)
        return _refused(card, why) if why else card

    def _announce(self, announce: tuple[contract.Card, ...] | None, problem: str | None) -> bool:
        with self.changed:
            if problem != self._reason:
                log.log(logging.WARNING if problem else logging.INFO, problem or "all cards can be announced")
            self._reason = problem
            if announce is None or announce == self._cards:
                return False
            for card in announce:
                before = next((old for old in self._cards if old.uuid == card.uuid), None)
                if before is None or (before.healthy, before.reason) != (card.healthy, card.reason):
                    state = "healthy" if card.healthy else f"unhealthy: {card.reason}"
                    log.log(
                        logging.INFO if card.healthy else logging.ERROR,
                        "card %d (%s, %d units) is %s", card.index, card.uuid, card.units, state,
                    )  # fmt: skip
            self._cards = announce
            self.changed.notify_all()
            return True
