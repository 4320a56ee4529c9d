# SPDX-License-Identifier: GPL-3.0-or-later
"""The door to the cards: NVIDIA's management library, through nvidia-ml-py; and what we remember between two looks."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import logging
import threading
import time
import typing as t

from gpushare import contract
from gpushare.health import Health, xid_of

log = logging.getLogger("gpushare.nvml")

MIB = 1024 * 1024
# A thread that waits for the driver's events looks up this often to see whether it shall end.
CHUNK_SECONDS = 1.0

LOST = "NVML doesn't answer for it"
MIG = "MIG is turned on: its instances have memory of their own, which shares of the card would cut across"
REMAP_FAILED = "a broken row of its memory can't be remapped"
# What the driver wants done before the card is as it was. What concerns only links between cards doesn't count.
RECOVERY_ACTIONS: t.Mapping[int, str] = {
    1: "the driver asks for a reset of the card",
    2: "the driver asks for a reboot of the node",
    4: "the driver asks for the card to be drained and reset",
    6: "the driver asks for a reset of the card by its bus",
    7: "the driver asks for a reboot of the whole system",
}


class NoCards(Exception):
    """The cards can't be known, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """A card as NVML answers for it now.

    :param memory_mib: all of its memory, MiB.
    :param used_mib: memory in use by whomever, the driver's own included, MiB.
    :param trouble: why it can't be shared now, in words; empty where it can.
    """

    index: int
    uuid: str
    minor: int
    memory_mib: int
    model: str
    used_mib: int = 0
    trouble: str = ""


class Xid(t.NamedTuple):
    """An error that the driver reports of a card."""

    uuid: str
    number: int


class Nvml(t.Protocol):
    """The door."""

    def cards(self) -> list[Seen]:
        """The cards that answer now.

        :raises NoCards: the driver isn't there, or says nothing.
        """

    def xids(self, seconds: float) -> list[Xid]:
        """Errors reported since ``cards`` was last called, waited for at most so long; may return sooner with none."""


class NvidiaMl:
    """The real library. It stays initialised between looks: initialising takes seconds on a real node.

    ``cards`` and ``xids`` are called by one and the same thread, so that nothing is shut down under a wait.
    """

    def __init__(self) -> None:
        # nvidia-ml-py has no types; nothing of it is seen outside this class.
        self._library: t.Any = importlib.import_module("pynvml")
        self._initialised = False
        self._events: t.Any = None
        self._watched: dict[int, str] = {}
        self._unwatched: set[str] = set()

    def cards(self) -> list[Seen]:
        try:
            if self._initialised:
                try:
                    return self._look()
                except self._library.NVMLError as error:
                    log.warning("NVML answers %s; initialising it again", error)
                    self.close()
            self._library.nvmlInit()
            self._initialised = True
            return self._look()
        except self._library.NVMLError_LibraryNotFound as error:
            raise NoCards("NVIDIA's driver isn't there: libnvidia-ml.so.1 can't be loaded") from error
        except self._library.NVMLError as error:
            self.close()
            raise NoCards(f"NVIDIA's driver doesn't answer: {error}") from error

    def xids(self, seconds: float) -> list[Xid]:
        if self._events is None:
            return []
        library = self._library
        try:
            event = library.nvmlEventSetWait_v2(self._events, max(1, int(seconds * 1000)))
        except library.NVMLError_Timeout:
            return []
        except library.NVMLError as error:
            # A lost card ends the wait; the next look sees which one, and watches those that are left.
            log.info("NVML's events: %s", error)
            self._unwatch()
            return []
        uuid = self._watched.get(_address(event.device))
        if uuid is None or not event.eventType & library.nvmlEventTypeXidCriticalError:
            return []
        return [Xid(uuid, int(event.eventData))]

    def close(self) -> None:
        if self._initialised:
            self._unwatch()
            self._initialised = False
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError as error:
                log.info("NVML could not be shut down: %s", error)

    def _look(self) -> list[Seen]:
        found = []
        handles: dict[str, t.Any] = {}
        for index in range(self._library.nvmlDeviceGetCount()):
            try:
                handle = self._library.nvmlDeviceGetHandleByIndex(index)
                uuid = str(self._library.nvmlDeviceGetUUID(handle))
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
                found.append(
                    Seen(
                        index=index,
                        uuid=uuid,
                        minor=int(self._library.nvmlDeviceGetMinorNumber(handle)),
                        memory_mib=int(memory.total) // MIB,
                        model=str(self._library.nvmlDeviceGetName(handle)),
                        used_mib=int(memory.used) // MIB,
                        trouble=self._trouble(handle),
                    )
                )
                handles[uuid] = handle
            except self._library.NVMLError_Uninitialized:
                raise
            except self._library.NVMLError as error:
                # One card that is lost doesn't take the others with it.
                log.warning("card %d doesn't answer: %s", index, error)
        self._watch(handles)
        return found

    def _trouble(self, handle: t.Any) -> str:
        """What NVML has to say against sharing a card that answers; few cards and drivers know every question."""
        library = self._library
        if (self._optional(library.nvmlDeviceGetMigMode, handle) or (0,))[0] == library.NVML_DEVICE_MIG_ENABLE:
            return MIG
        values = self._optional(library.nvmlDeviceGetFieldValues, handle, [library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if values and values[0].nvmlReturn == library.NVML_SUCCESS:
            wanted = RECOVERY_ACTIONS.get(int(values[0].value.uiVal))
            if wanted:
                return wanted
        rows = self._optional(library.nvmlDeviceGetRemappedRows, handle)
        return REMAP_FAILED if rows and rows[3] else ""

    def _optional(self, call: t.Callable[..., t.Any], *arguments: t.Any) -> t.Any:
        """What a question is answered with; None where the card or the driver doesn't know it."""
        library = self._library
        try:
            return call(*arguments)
        except (library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound, library.NVMLError_InvalidArgument):
            return None

    def _watch(self, handles: t.Mapping[str, t.Any]) -> None:
        """Have the driver's errors of exactly these cards reported."""
        if handles and self._events is not None and set(self._watched.values()) | self._unwatched == set(handles):
            return
        self._unwatch()
        library = self._library
        try:
            self._events = library.nvmlEventSetCreate()
        except library.NVMLError as error:
            log.info("NVML reports no events: %s", error)
            return
        for uuid, handle in handles.items():
            try:
                library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, self._events)
            except library.NVMLError as error:
                log.info("NVML reports no events of %s: %s", uuid, error)
                self._unwatched.add(uuid)
            else:
                self._watched[_address(handle)] = uuid

    def _unwatch(self) -> None:
        events, self._events = self._events, None
        self._watched, self._unwatched = {}, set()
        if events is not None:
            try:
                self._library.nvmlEventSetFree(events)
            except self._library.NVMLError as error:
                log.info("NVML's set of events could not be freed: %s", error)


def _address(handle: t.Any) -> int:
    """What tells a handle from another; a lost card isn't asked for its UUID in vain."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def merge(known: t.Sequence[contract.Card], seen: t.Sequence[Seen], unit: str) -> tuple[contract.Card, ...]:
    """The node's cards after a look: one that doesn't answer any more stays, unhealthy, until it does.

    A card keeps the index that it was first seen with, as pods' annotations name it by that.
    """
    answered = {one.uuid: one for one in seen}
    cards = {card.uuid: card for card in known}
    for card in known:
        now = answered.pop(card.uuid, None)
        cards[card.uuid] = (
            dataclasses.replace(card, healthy=False, reason=LOST)
            if now is None
            else dataclasses.replace(
                card,
                minor=now.minor,
                memory_mib=now.memory_mib,
                units=contract.units_of(now.memory_mib, unit),
                model=now.model,
                healthy=not now.trouble,
                reason=now.trouble,
            )
        )
    for one in answered.values():
        taken = {card.index for card in cards.values()}
        free = one.index if one.index not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
        units = contract.units_of(one.memory_mib, unit)
        cards[one.uuid] = contract.Card(
            free, one.uuid, one.minor, one.memory_mib, units, not one.trouble, one.model, one.trouble
        )
    return tuple(sorted(cards.values(), key=lambda card: card.index))


class Inventory:
    """The cards as the plugin announces them, looked at again and again; ``changed`` tells who waits for news.

    A set of cards that kubelet can't be told of (too many units, one UUID twice) isn't announced; ``reason`` says why.
    """

    def __init__(self, nvml: Nvml, unit: str, health: Health | None = None) -> None:
        self._nvml = nvml
        self._unit = unit
        self._health = health or Health(quiet=300)
        self._recalled: tuple[contract.Card, ...] = ()
        self._held: frozenset[int] = frozenset()
        self._seen: tuple[contract.Card, ...] = ()
        self._used: dict[str, int] = {}
        self._cards: tuple[contract.Card, ...] = ()
        self._reason: str | None = "the cards haven't been looked at yet"
        self._blind_since: float | None = None
        self.changed = threading.Condition()
        # Further reasons for which a healthy card (UUID) may not be given to pods; empty for none.
        self.guards: list[t.Callable[[str], str]] = []
        # Called with the cards that answer and could be shared, before the guards are asked.
        self.on_look: t.Callable[[tuple[contract.Card, ...]], None] = lambda cards: None
        self.on_xid: t.Callable[[str, int], None] = lambda uuid, number: None

    @property
    def cards(self) -> tuple[contract.Card, ...]:
        with self.changed:
            return self._cards

    @property
    def used_mib(self) -> dict[str, int]:
        """MiB in use on each card (UUID) that answered the last look."""
        with self.changed:
            return dict(self._used)

    @property
    def reason(self) -> str | None:
        """Why there is nothing (new) to announce; None when all is well."""
        with self.changed:
            return self._reason

    @property
    def blind(self) -> float:
        """Seconds for which NVML has shown no card at all."""
        with self.changed:
            return 0.0 if self._blind_since is None else time.monotonic() - self._blind_since

    def recall(self, cards: t.Sequence[contract.Card], held: t.Collection[int]) -> None:
        """What the plugin before this one announced; before the first look.

        A card keeps its index over our restarts, however NVML numbers those that are left. One that doesn't answer is
        kept only where pods are still booked on it, and one with an XID has to be quiet for as long as after the XID.

        :param held: indices that pods of this node are booked on.
        """
        self._recalled = tuple({card.uuid: card for card in cards if card.uuid}.values())
        self._held = frozenset(held)
        for card in cards:
            xid = xid_of(card.reason)
            if xid is not None:
                self._health.note(card.uuid, xid, time.monotonic())

    def look(self) -> bool:
        """Ask NVML; true if what is announced has changed."""
        trouble: str | None = None
        used: dict[str, int] = {}
        try:
            answers = self._nvml.cards()
            used = {one.uuid: one.used_mib for one in answers}
            self._seen = merge(self._known(answers), answers, self._unit)
            if not self._seen:
                trouble = "NVIDIA's driver answers, but has no card"
        except NoCards as error:
            trouble = str(error)
            self._seen = merge(self._seen, [], self._unit)
        if able := tuple(card for card in self._seen if card.healthy):
            self.on_look(able)
        with self.changed:
            self._used = used
            self._blind_since = (self._blind_since or time.monotonic()) if trouble else None
        announce: tuple[contract.Card, ...] | None = tuple(self._judged(card) for card in self._seen)
        try:
            contract.check_device_list(self._seen, self._unit)
            if announce and not any(card.units for card in announce):
                announce, trouble = None, f"no card of this node holds one whole unit of 1 {self._unit}"
            elif announce and not trouble and not any(card.healthy for card in announce):
                reasons = list(dict.fromkeys(card.reason for card in announce))
                if len(reasons) > 1:
                    reasons = [f"card {card.index}: {card.reason}" for card in announce]
                trouble = f"no card of this node can be given to pods: {'; '.join(reasons)}"
        except contract.ContractError as error:
            announce, trouble = None, str(error)
        return self._announce(announce, trouble)

    def watch(self, seconds: float, stop: threading.Event) -> None:
        """Wait until a card has an error that counts, or so long; then it is time for a look."""
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

    def _known(self, answers: t.Sequence[Seen]) -> tuple[contract.Card, ...]:
        """The cards before a look; at the first one that is answered, those of the plugin before us."""
        recalled, self._recalled = self._recalled, ()
        if not recalled or self._seen:
            return self._seen
        there = {one.uuid for one in answers}
        kept = [card for card in recalled if card.uuid in there or card.index in self._held]
        # The unit may be another one since.
        return tuple(dataclasses.replace(card, units=contract.units_of(card.memory_mib, self._unit)) for card in kept)

    def _judged(self, card: contract.Card) -> contract.Card:
        """A card as it is announced: NVML's word first, then the driver's errors, then what else speaks against it."""
        if not card.healthy:
            return card
        reason = self._health.reason(card.uuid, time.monotonic())
        for guard in self.guards:
            reason = reason or guard(card.uuid)
        return dataclasses.replace(card, healthy=False, reason=reason) if reason else card

    def _announce(self, announce: tuple[contract.Card, ...] | None, trouble: str | None) -> bool:
        with self.changed:
            if trouble != self._reason:
                log.log(logging.WARNING if trouble else logging.INFO, trouble or "all cards can be announced")
            self._reason = trouble
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
