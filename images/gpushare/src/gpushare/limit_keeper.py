# SPDX-License-Identifier: GPL-3.0-or-later
"""Every container that holds memory of a card is held to its share by the driver; seen again and again, and mended.

What is certain is only what was read back. So:

* Before anything is promised, each card takes a limit (of all its memory) on the plugin's own cgroup, shows it and
  gives it up again: a driver older than R615, one with limits turned off, a missing right, a cgroup without the
  controller that the driver needs, all show there, and no container has to fail for it.
* Each pass reads the limit of each running container on each of its cards, and sets it where it isn't the share.
* A limit on a card that the container wasn't given says that it started with that card in sight (it sets
  NVIDIA_VISIBLE_DEVICES itself): the card is closed to it, and it is told.

Nothing has to survive: driver, kubelet and API have all there is to know, and the first pass of a new process finds it.
A limit ends with its container's cgroup; it is never taken from a container that still runs, except when the mode is
``off`` or the node is cleaned up.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import typing as t

from gpushare import contract, limits
from gpushare.cgroups import Cgroups
from gpushare.limits import MIB, UNLIMITED, Limit, Target, Usage
from gpushare.nvml_limits import NO_FOLDER, LimitDoor, Refusal
from gpushare.podresources import Entry

Json = contract.Json

log = logging.getLogger("gpushare.limits")

NONE = Limit(0, UNLIMITED)
# On a card that a container wasn't given: too little for anything, and certainly a limit.
CLOSED = Limit(0, MIB)
# The API tells of a running container before or after its cgroup can be found, never by so many seconds.
GRACE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a pod's Event shall say.

    :param pod: as it was handed to ``once``.
    """

    pod: Json
    reason: str
    message: str
    warning: bool = True


class LimitKeeper:
    """Thread-safe; ``look`` and ``once`` are each called by one thread.

    :param mode: ``auto``, ``required`` or ``off``.
    :param unit: of the node's shares, GiB or MiB.
    """

    def __init__(
        self,
        mode: str,
        unit: str,
        door: LimitDoor,
        cgroups: Cgroups,
        clock: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self._unit = unit
        self._door = door
        self._cgroups = cgroups
        self._clock = clock
        self._lock = threading.Lock()
        self._able: frozenset[str] = frozenset()
        self._reason: str | None = "the cards haven't been tried yet"
        self._unheld: dict[str, str] = {}
        self._usage: dict[str, Usage] = {}
        self._mended = 0
        self._own: str | None = None
        self._proved: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        self._told: set[tuple[str, str, str]] = set()

    # ----------------------------------------------------------------------- what others ask

    @property
    def state(self) -> str:
        """The value of the node's annotation ``contract.NODE_LIMIT``."""
        with self._lock:
            return limits.state(self.mode, self._reason, list(self._unheld.values()))

    @property
    def refusal(self) -> str | None:
        """Why no card of this node may be shared, in one sentence; only where limits are required."""
        with self._lock:
            if self.mode != "required" or self._reason is None:
                return None
            return f"gpushare_memory_limit: limits are required, but {self._reason}"

    @property
    def usage(self) -> dict[str, Usage]:
        """By card (UUID), as the last pass found it."""
        with self._lock:
            return dict(self._usage)

    @property
    def mended(self) -> int:
        """How many limits this process has set because they weren't there or weren't right."""
        with self._lock:
            return self._mended

    def environment(self, units: t.Mapping[str, int]) -> dict[str, str]:
        """The variables for a container that is given so many units by card (UUID).

        None where the driver hasn't shown that it can: the toolkit's hook would keep the container from starting.
        """
        with self._lock:
            if self.mode == "off" or not units or not all(uuid in self._able for uuid in units):
                return {}
        mib = contract.MIB_PER_UNIT[self._unit]
        return limits.environment({uuid: number * mib for uuid, number in units.items()})

    # ----------------------------------------------------------------------- can it be done

    def look(self, cards: t.Sequence[contract.Card]) -> bool:
        """Try each card that wasn't yet; true if ``state`` has changed.

        :param cards: those that NVML answers for. Whether they are announced as healthy doesn't matter: where limits
            are required, it is this very look that makes them so.
        """
        if self.mode == "off":
            return False
        before = self.state
        able, reason = self._examine(cards)
        with self._lock:
            changed = reason != self._reason
            self._able, self._reason = able, reason
        if changed:
            log.log(logging.WARNING if reason else logging.INFO, "memory limits: %s", reason or "the driver sets them")
        return self.state != before

    def _examine(self, cards: t.Sequence[contract.Card]) -> tuple[frozenset[str], str | None]:
        """The cards that take limits, and why not all of them do."""
        try:
            driver = self._door.driver()
        except Refusal as refusal:
            self._proved = {}
            return frozenset(), f"NVIDIA's driver doesn't answer: {refusal}"
        problem = limits.driver_problem(driver) or limits.cgroup_problem(self._cgroups.version(), self._cgroups.root)
        if problem is None and self._own is None:
            self._own = self._cgroups.own()
            if self._own is None:
                problem = f"the node's cgroups aren't mounted at {self._cgroups.root}, or the plugin isn't in them"
        if problem is not None or self._own is None:
            self._proved = {}
            return frozenset(), problem
        if not cards:
            return frozenset(), "no card answers"
        problems = {card.uuid: self._try(card, self._own) for card in cards}
        able = frozenset(uuid for uuid, trouble in problems.items() if trouble is None)
        return able, next((trouble for trouble in problems.values() if trouble is not None), None)

    def _try(self, card: contract.Card, own: str) -> str | None:
        """Why this card can't be limited; None once it has been."""
        try:
            if self._door.divided(card.uuid):
                self._proved.pop(card.uuid, None)
                return f"MIG is on for card {card.index}, and MIG devices can't be limited"
            if self._proved.get(card.uuid) == card.memory_mib:
                return None
            wish = limits.wanted(card.memory_mib)
            try:
                self._door.set(card.uuid, own, wish)
                shown = self._door.get(card.uuid, own)
            finally:
                self._door.set(card.uuid, own, NONE)
        except Refusal as refusal:
            self._proved.pop(card.uuid, None)
            return f"card {card.index} can't be limited, as the driver says: {refusal}"
        if shown is None or not _same(shown, wish):
            return f"card {card.index} can't be limited: the driver takes a limit and doesn't show it"
        self._proved[card.uuid] = card.memory_mib
        return None

    # ----------------------------------------------------------------------- is it so

    def once(
        self, cards: t.Sequence[contract.Card], pods: t.Sequence[Json], listing: t.Sequence[Entry]
    ) -> list[Finding]:
        """One pass over all containers: read, mend, remember.

        :param pods: of this node, with what ``limits.slim_statuses`` keeps of their status.
        :param listing: what PodResources say.
        :returns: what is new to tell of pods.
        """
        found = limits.targets(cards, pods, listing, self._unit)
        if self.mode == "off":
            self._clear(cards, found)
            return []
        with self._lock:
            able = self._able
        healthy = {card.uuid for card in cards if card.healthy}
        unheld: dict[str, str] = {}
        findings: dict[tuple[str, str, str], tuple[str, str]] = {}
        usage: dict[str, Usage] = {}
        mended = 0
        for target in found:
            folder = self._folder(target, unheld)
            for card in cards if folder else ():
                if card.uuid not in able:
                    continue
                mib = target.mib.get(card.uuid)
                try:
                    if mib is None:
                        self._close(card, target, str(folder), findings)
                        continue
                    limit, set_now = self._hold(card, target, str(folder), mib, findings)
                except Refusal as refusal:
                    # Gone with the container, or a card that answers nothing at all, which is told elsewhere.
                    if refusal.code == NO_FOLDER or card.uuid not in healthy:
                        continue
                    unheld[target.container_id] = str(refusal)
                    findings[target.container_id, card.uuid, "GpuMemoryUnlimited"] = (target.uid, str(refusal))
                    continue
                mended += set_now
                have = usage.get(card.uuid, Usage())
                usage[card.uuid] = Usage(
                    have.containers + 1, have.limited_mib + mib, have.used_mib + -(-limit.used // MIB)
                )
        there = {target.container_id for target in found}
        self._missing = {one: since for one, since in self._missing.items() if one in there}
        with self._lock:
            self._unheld, self._usage = unheld, usage
            self._mended += mended
        return self._news(pods, findings)

    def release(self, cards: t.Sequence[contract.Card], pods: t.Sequence[Json], listing: t.Sequence[Entry]) -> None:
        """Take every limit of ours off the containers that run, as before the plugin leaves a node for good."""
        self._clear(cards, limits.targets(cards, pods, listing, self._unit))

    def _folder(self, target: Target, unheld: dict[str, str]) -> str | None:
        folder = self._cgroups.folder(target.container_id)
        if folder is not None:
            self._missing.pop(target.container_id, None)
            return folder
        since = self._missing.setdefault(target.container_id, self._clock())
        if self._clock() - since > GRACE_SECONDS:
            unheld[target.container_id] = f"the cgroup of {target.name} isn't found"
        return None

    def _hold(
        self,
        card: contract.Card,
        target: Target,
        folder: str,
        mib: int,
        findings: dict[tuple[str, str, str], tuple[str, str]],
    ) -> tuple[Limit, int]:
        """The limit that now holds, and whether (0 or 1) it had to be set.

        :raises Refusal: it doesn't hold, in one sentence.
        """
        wish = limits.wanted(mib)
        now = self._door.get(card.uuid, folder)
        if now is not None and _same(now, wish):
            return now, 0
        what = f"{target.name} isn't held to its {mib} MiB of card {card.index}"
        try:
            self._door.set(card.uuid, folder, wish)
        except Refusal as refusal:
            if refusal.code == NO_FOLDER:
                raise
            held = f"; it holds {now.used // MIB} MiB already" if now is not None and now.used > wish.hard else ""
            raise Refusal(f"{what}, as the driver says: {refusal}{held}", refusal.code) from refusal
        after = self._door.get(card.uuid, folder)
        if after is None or not _same(after, wish):
            raise Refusal(f"{what}: the driver took the limit and doesn't show it")
        log.info("limit set", extra={"data": {"pod": target.pod, "container": target.container, "card": card.index,
                                              "mib": mib, "before": _words(now)}})  # fmt: skip
        if now is not None:
            findings[target.container_id, card.uuid, "GpuMemoryLimitMended"] = (
                target.uid,
                f"container {target.container} had {_words(now)} of card {card.index}; it is held to its {mib} MiB now",
            )
        return after, 1

    def _close(
        self,
        card: contract.Card,
        target: Target,
        folder: str,
        findings: dict[tuple[str, str, str], tuple[str, str]],
    ) -> None:
        """Close a card that a container wasn't given, if it came by it.

        :raises Refusal: it can't be closed, in one sentence.
        """
        now = self._door.get(card.uuid, folder)
        if now is None or _same(now, CLOSED):
            return
        # What a parent has (somebody's limit for all pods, say) tells nothing of this container.
        parents = self._door.get(card.uuid, os.path.dirname(folder))
        if parents is not None and _same(parents, now):
            return
        try:
            self._door.set(card.uuid, folder, CLOSED)
        except Refusal as refusal:
            if refusal.code == NO_FOLDER:
                raise
            held = f"holds {now.used // MIB} MiB of" if now.used else "sees"
            raise Refusal(
                f"{target.name} {held} card {card.index}, which it wasn't given, and the driver says: {refusal}",
                refusal.code,
            ) from refusal
        findings[target.container_id, card.uuid, "GpuCardNotGiven"] = (
            target.uid,
            f"container {target.container} sees card {card.index} ({card.uuid}), which it wasn't given; "
            "the driver lets it have none of that card's memory now",
        )

    def _clear(self, cards: t.Sequence[contract.Card], found: t.Sequence[Target]) -> None:
        for target in found:
            folder = self._cgroups.folder(target.container_id)
            for card in cards if folder else ():
                mib = target.mib.get(card.uuid)
                try:
                    now = self._door.get(card.uuid, str(folder))
                    # What isn't ours stays: somebody else's limit, or a parent's.
                    if now is not None and _same(now, CLOSED if mib is None else limits.wanted(mib)):
                        self._door.set(card.uuid, str(folder), NONE)
                        log.info("limit taken away", extra={"data": {"pod": target.pod, "card": card.index}})
                except Refusal as refusal:
                    log.debug("%s, card %d: %s", target.name, card.index, refusal)

    def _news(
        self, pods: t.Sequence[Json], findings: t.Mapping[tuple[str, str, str], tuple[str, str]]
    ) -> list[Finding]:
        """What wasn't told before; what has ended may be told again."""
        by_uid = {contract.pod_uid(pod): pod for pod in pods}
        alive = {identifier for pod in pods for identifier in limits.running(pod).values()}
        fresh = [key for key in findings if key not in self._told]
        self._told = {key for key in self._told if key[0] in alive} | set(findings)
        for key in fresh:
            log.warning("%s", findings[key][1])
        return [
            Finding(by_uid[uid], key[2], message) for key in fresh for uid, message in (findings[key],) if uid in by_uid
        ]


def _same(one: Limit, other: Limit) -> bool:
    return (one.soft, one.hard) == (other.soft, other.hard)


def _words(limit: Limit | None) -> str:
    if limit is None or limit.hard == UNLIMITED:
        return "no limit"
    return f"a limit of {limit.hard // MIB} MiB" + (f" and {limit.soft // MIB} MiB kept for it" if limit.soft else "")
