# SPDX-License-Identifier: GPL-3.0-or-later
"""The door to the cards: NVIDIA's management library, through nvidia-ml-py; and what we remember between two looks."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import threading
import time
import typing as t

from gpushare import contract

log = logging.getLogger("gpushare.nvml")

MIB = 1024 * 1024


class NoCards(Exception):
    """The cards can't be known, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """A card as NVML answers for it now."""

    index: int
    uuid: str
    minor: int
    memory_mib: int
    model: str


class Nvml(t.Protocol):
    """The door: the cards that answer now; raises NoCards."""

    def cards(self) -> list[Seen]: ...


class NvidiaMl:
    """The real library. It stays initialised between looks: initialising takes seconds on a real node."""

    def __init__(self) -> None:
        # nvidia-ml-py has no types; nothing of it is seen outside this class.
        self._library: t.Any = importlib.import_module("pynvml")
        self._initialised = False

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

    def close(self) -> None:
        if self._initialised:
            self._initialised = False
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError as error:
                log.info("NVML could not be shut down: %s", error)

    def _look(self) -> list[Seen]:
        found = []
        for index in range(self._library.nvmlDeviceGetCount()):
            try:
                handle = self._library.nvmlDeviceGetHandleByIndex(index)
                found.append(
                    Seen(
                        index=index,
                        uuid=str(self._library.nvmlDeviceGetUUID(handle)),
                        minor=int(self._library.nvmlDeviceGetMinorNumber(handle)),
                        memory_mib=int(self._library.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
                        model=str(self._library.nvmlDeviceGetName(handle)),
                    )
                )
            except self._library.NVMLError_Uninitialized:
                raise
            except self._library.NVMLError as error:
                # One card that is lost doesn't take the others with it.
                log.warning("card %d doesn't answer: %s", index, error)
        return found


def merge(known: t.Sequence[contract.Card], seen: t.Sequence[Seen], unit: str) -> tuple[contract.Card, ...]:
    """The node's cards after a look: one that doesn't answer any more stays, unhealthy, until it does.

    A card keeps the index that it was first seen with, as pods' annotations name it by that.
    """
    answered = {one.uuid: one for one in seen}
    cards = {card.uuid: card for card in known}
    for card in known:
        now = answered.pop(card.uuid, None)
        cards[card.uuid] = (
            dataclasses.replace(card, healthy=False)
            if now is None
            else dataclasses.replace(
                card,
                minor=now.minor,
                memory_mib=now.memory_mib,
                units=contract.units_of(now.memory_mib, unit),
                model=now.model,
                healthy=True,
            )
        )
    for one in answered.values():
        taken = {card.index for card in cards.values()}
        free = one.index if one.index not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
        cards[one.uuid] = contract.Card(
            free, one.uuid, one.minor, one.memory_mib, contract.units_of(one.memory_mib, unit), True, one.model
        )
    return tuple(sorted(cards.values(), key=lambda card: card.index))


class Inventory:
    """The cards as the plugin announces them, looked at again and again; ``changed`` tells who waits for news.

    A set of cards that kubelet can't be told of (too many units, one UUID twice) isn't announced; ``reason`` says why.
    """

    def __init__(self, nvml: Nvml, unit: str) -> None:
        self._nvml = nvml
        self._unit = unit
        self._seen: tuple[contract.Card, ...] = ()
        self._cards: tuple[contract.Card, ...] = ()
        self._reason: str | None = "the cards haven't been looked at yet"
        self._blind_since: float | None = None
        self.changed = threading.Condition()

    @property
    def cards(self) -> tuple[contract.Card, ...]:
        with self.changed:
            return self._cards

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

    def look(self) -> bool:
        """Ask NVML; true if what is announced has changed."""
        trouble: str | None = None
        try:
            self._seen = merge(self._seen, self._nvml.cards(), self._unit)
            if not self._seen:
                trouble = "NVIDIA's driver answers, but has no card"
        except NoCards as error:
            trouble = str(error)
            self._seen = merge(self._seen, [], self._unit)
        with self.changed:
            self._blind_since = (self._blind_since or time.monotonic()) if trouble else None
        announce: tuple[contract.Card, ...] | None = self._seen
        try:
            contract.check_device_list(self._seen, self._unit)
            if self._seen and not any(card.units for card in self._seen):
                announce, trouble = None, f"no card of this node holds one whole unit of 1 {self._unit}"
        except contract.ContractError as error:
            announce, trouble = None, str(error)
        with self.changed:
            if trouble != self._reason:
                log.log(logging.WARNING if trouble else logging.INFO, trouble or "all cards can be announced")
            self._reason = trouble
            if announce is None or announce == self._cards:
                return False
            for card in announce:
                before = next((old for old in self._cards if old.uuid == card.uuid), None)
                if before is None or before.healthy != card.healthy:
                    state = "healthy" if card.healthy else "unhealthy: NVML doesn't answer for it"
                    log.log(
                        logging.INFO if card.healthy else logging.ERROR,
                        "card %d (%s, %d units) is %s", card.index, card.uuid, card.units, state,
                    )  # fmt: skip
            self._cards = announce
            self.changed.notify_all()
            return True
