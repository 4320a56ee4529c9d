# SPDX-License-Identifier: GPL-3.0-or-later
"""Have the driver limit every container that holds memory of a card to its share, and correct limits that differ.

Only what was read back counts. So:

* Before any limit is announced, each card is probed: a limit (of all that pods may have of it) is set on the plugin's
  own cgroup, read back and cleared. An older driver than R615, one with limits turned off, a missing capability, a
  cgroup without the controller that the driver needs, all fail there, and no container has to fail for it.
* Each pass reads the limit of each running container on each of its cards, and sets it where it differs from the share.
* A limit on a card that the container wasn't given shows that it started with that card visible (it sets
  NVIDIA_VISIBLE_DEVICES itself): the card is blocked for it, and an Event reports it.

Nothing has to survive a restart: driver, kubelet and API hold all state, and the first pass of a new process reads it.
A limit ends with its container's cgroup; it is never removed from a running container, except when the mode is
``off`` or the node is cleaned up.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import typing as t

from gpushare.kubelet.pod_resources import Entry
from gpushare.nvml.limits import MIB, NO_FOLDER, UNLIMITED, Limit, LimitBackend, Refusal
from gpushare.plugin import limits
from gpushare.plugin.cgroups import Cgroups
from gpushare.plugin.limits import Target, Usage
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.limits")

NONE = Limit(0, UNLIMITED)
# On a card that a container wasn't given: too little for anything, and certainly a limit.
BLOCKED = Limit(0, MIB)
# The API's status and the cgroup of a running container appear at different times, by less than these seconds.
GRACE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """The content of an Event about a pod.

    :param pod: from the parameter of ``once``.
    """

    pod: JsonObject
    reason: str
    message: str
    warning: bool = True


class LimitEnforcer:
    """Enforces limits. Thread-safe; ``probe`` and ``once`` are each called by one thread.

    :param mode: ``auto``, ``required`` or ``off``.
    :param unit: of the node's shares, GiB or MiB.
    """

    def __init__(
        self,
        mode: str,
        unit: str,
        backend: LimitBackend,
        cgroups: Cgroups,
        clock: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self._unit = unit
        self._backend = backend
        self._cgroups = cgroups
        self._clock = clock
        self._lock = threading.Lock()
        # Why no card of the node can be limited, and why single ones can't, by UUID.
        self._reason: str | None = "the cards haven't been tried yet"
        self._problems: dict[str, str] = {}
        self._supported: frozenset[str] = frozenset()
        self._unenforced: dict[str, str] = {}
        self._usage: dict[str, Usage] = {}
        self._corrected = 0
        self._own: str | None = None
        self._probed: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        self._reported: set[tuple[str, str, str]] = set()

    # ----------------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """Return the value of the node's annotation ``contract.NODE_LIMIT``."""
        with self._lock:
            problems = [self._reason] if self._reason else [*self._problems.values(), *self._unenforced.values()]
            return limits.state(self.mode, problems)

    def card_state(self, uuid: str) -> str:
        """Return a card's ``limit`` in the annotation ``contract.NODE_CARDS``; empty while it isn't known."""
        with self._lock:
            if self.mode == "off":
                return contract.LIMIT_OFF
            if uuid in self._supported:
                return contract.LIMIT_ENFORCED
            return contract.Reason.MEMORY_LIMIT_UNAVAILABLE.value if self._reason or uuid in self._problems else ""

    def refusal(self, uuid: str) -> contract.Refusal | None:
        """Return why a card may not be shared; None unless limits are required."""
        with self._lock:
            if self.mode != "required" or uuid in self._supported:
                return None
            reason = self._reason or self._problems.get(uuid, "this card hasn't been tried yet")
            text = f"gpushare_memory_limit: limits are required, but {reason}"
            return contract.Refusal(contract.Reason.MEMORY_LIMIT_UNAVAILABLE, text)

    @property
    def usage(self) -> dict[str, Usage]:
        """Return the usage by card (UUID) in the last pass."""
        with self._lock:
            return dict(self._usage)

    @property
    def corrected(self) -> int:
        """Return the number of limits that this process has corrected."""
        with self._lock:
            return self._corrected

    def environment(self, units: t.Mapping[str, int]) -> dict[str, str]:
        """Return the variables for a container with so many units by card (UUID).

        Empty unless the probe succeeded on its cards: the toolkit's hook would keep the container from starting.
        """
        with self._lock:
            if self.mode == "off" or not units or not all(uuid in self._supported for uuid in units):
                return {}
        mib = contract.MIB_PER_UNIT[self._unit]
        return limits.environment({uuid: number * mib for uuid, number in units.items()})

    # ----------------------------------------------------------------------- probe

    def probe(self, cards: t.Sequence[contract.Card]) -> bool:
        """Probe each card that wasn't probed yet.

        :param cards: those that NVML answers for, also unhealthy ones: if limits are required, the probe decides that.
        :returns: whether ``state`` has changed.
        """
        if self.mode == "off":
            return False
        before = (self._reason, self._problems, self._supported)
        reason, problems = self._probe_cards(cards)
        supported = frozenset(() if reason else (card.uuid for card in cards if card.uuid not in problems))
        with self._lock:
            self._reason, self._problems, self._supported = reason, problems, supported
        if (reason, problems) != before[:2]:
            found = "; ".join([reason] if reason else problems.values())
            log.log(logging.WARNING if found else logging.INFO, "memory limits: %s", found or "the driver sets them")
        return before != (reason, problems, supported)

    def _probe_cards(self, cards: t.Sequence[contract.Card]) -> tuple[str | None, dict[str, str]]:
        """Return why no card can be limited, if there is such a reason, and why single ones can't, by UUID."""
        try:
            driver = self._backend.driver()
        except Refusal as refusal:
            self._probed = {}
            return f"NVIDIA's driver doesn't answer: {refusal}", {}
        problem = limits.driver_problem(driver) or limits.cgroup_problem(self._cgroups.version(), self._cgroups.root)
        if problem is None and self._own is None:
            self._own = self._cgroups.own()
            if self._own is None:
                problem = f"the node's cgroups aren't mounted at {self._cgroups.root}, or the plugin isn't in them"
        if problem is not None or self._own is None:
            self._probed = {}
            return problem, {}
        if not cards:
            return "no card answers", {}
        problems = ((card.uuid, self._probe_card(card, self._own)) for card in cards)
        return None, {uuid: problem for uuid, problem in problems if problem is not None}

    def _probe_card(self, card: contract.Card, own: str) -> str | None:
        """Return why this card can't be limited; None after a successful probe."""
        try:
            if self._backend.divided(card.uuid):
                self._probed.pop(card.uuid, None)
                return f"MIG is on for card {card.index}, and MIG devices can't be limited"
            if self._probed.get(card.uuid) == card.shared_mib:
                return None
            wanted = limits.wanted(card.shared_mib)
            try:
                self._backend.set(card.uuid, own, wanted)
                shown = self._backend.get(card.uuid, own)
            finally:
                self._backend.set(card.uuid, own, NONE)
        except Refusal as refusal:
            self._probed.pop(card.uuid, None)
            return f"card {card.index} can't be limited; the driver's error: {refusal}"
        if shown is None or not _equal(shown, wanted):
            return f"card {card.index} can't be limited: the driver takes a limit and doesn't show it"
        self._probed[card.uuid] = card.shared_mib
        return None

    # ----------------------------------------------------------------------- enforce

    def once(
        self, cards: t.Sequence[contract.Card], pods: t.Sequence[JsonObject], listing: t.Sequence[Entry]
    ) -> list[Finding]:
        """Read the limits of all containers once, and correct those that differ.

        :param pods: of this node, with the statuses of ``limits.trim_statuses``.
        :param listing: from PodResources.
        :returns: the findings that weren't returned before.
        """
        found = limits.targets(cards, pods, listing, self._unit)
        if self.mode == "off":
            self._clear(cards, found)
            return []
        with self._lock:
            supported = self._supported
        healthy = {card.uuid for card in cards if card.healthy}
        unenforced: dict[str, str] = {}
        findings: dict[tuple[str, str, str], tuple[str, str]] = {}
        usage: dict[str, Usage] = {}
        corrected = 0
        for target in found:
            folder = self._folder(target, unenforced)
            for card in cards if folder else ():
                if card.uuid not in supported:
                    continue
                mib = target.mib.get(card.uuid)
                try:
                    if mib is None:
                        self._block(card, target, str(folder), findings)
                        continue
                    limit, set_now = self._enforce(card, target, str(folder), mib, findings)
                except Refusal as refusal:
                    # Gone with the container, or the card doesn't answer, which is reported elsewhere.
                    if refusal.code == NO_FOLDER or card.uuid not in healthy:
                        continue
                    unenforced[target.container_id] = str(refusal)
                    findings[target.container_id, card.uuid, "GpuMemoryUnlimited"] = (target.uid, str(refusal))
                    continue
                corrected += set_now
                have = usage.get(card.uuid, Usage())
                usage[card.uuid] = Usage(
                    have.containers + 1, have.limited_mib + mib, have.used_mib + -(-limit.used // MIB)
                )
        there = {target.container_id for target in found}
        self._missing = {one: since for one, since in self._missing.items() if one in there}
        with self._lock:
            self._unenforced, self._usage = unenforced, usage
            self._corrected += corrected
        return self._new_findings(pods, findings)

    def release(
        self, cards: t.Sequence[contract.Card], pods: t.Sequence[JsonObject], listing: t.Sequence[Entry]
    ) -> None:
        """Remove the plugin's limits from the running containers, before the plugin is removed from the node."""
        self._clear(cards, limits.targets(cards, pods, listing, self._unit))

    def _folder(self, target: Target, unenforced: dict[str, str]) -> str | None:
        folder = self._cgroups.folder(target.container_id)
        if folder is not None:
            self._missing.pop(target.container_id, None)
            return folder
        since = self._missing.setdefault(target.container_id, self._clock())
        if self._clock() - since > GRACE_SECONDS:
            unenforced[target.container_id] = f"the cgroup of {target.name} isn't found"
        return None

    def _enforce(
        self,
        card: contract.Card,
        target: Target,
        folder: str,
        mib: int,
        findings: dict[tuple[str, str, str], tuple[str, str]],
    ) -> tuple[Limit, int]:
        """Enforce a container's limit on a card.

        :param folder: the container's cgroup.
        :param mib: its share.
        :param findings: receives the Event of a corrected limit.
        :returns: the enforced limit, and whether (0 or 1) it had to be set.
        :raises Refusal: it can't be enforced.
        """
        wanted = limits.wanted(mib)
        now = self._backend.get(card.uuid, folder)
        if now is not None and _equal(now, wanted):
            return now, 0
        what = f"{target.name} isn't held to its {mib} MiB of card {card.index}"
        try:
            self._backend.set(card.uuid, folder, wanted)
        except Refusal as refusal:
            if refusal.code == NO_FOLDER:
                raise
            held = f"; it holds {now.used // MIB} MiB already" if now is not None and now.used > wanted.hard else ""
            raise Refusal(f"{what}; the driver's error: {refusal}{held}", refusal.code) from refusal
        after = self._backend.get(card.uuid, folder)
        if after is None or not _equal(after, wanted):
            raise Refusal(f"{what}: the driver took the limit and doesn't show it")
        log.info("limit set", extra={"data": {"pod": target.pod, "container": target.container, "card": card.index,
                                              "mib": mib, "before": _describe(now)}})  # fmt: skip
        if now is not None:
            findings[target.container_id, card.uuid, "GpuMemoryLimitMended"] = (
                target.uid,
                f"container {target.container} had {_describe(now)} on card {card.index}; the limit is {mib} MiB now",
            )
        return after, 1

    def _block(
        self,
        card: contract.Card,
        target: Target,
        folder: str,
        findings: dict[tuple[str, str, str], tuple[str, str]],
    ) -> None:
        """Block a card for a container that wasn't given it, if it sees it.

        :param folder: the container's cgroup.
        :param findings: receives the Event of a blocked card.
        :raises Refusal: it can't be blocked.
        """
        now = self._backend.get(card.uuid, folder)
        if now is None or _equal(now, BLOCKED):
            return
        # The limit of a parent (for example for all pods) isn't this container's.
        parents = self._backend.get(card.uuid, os.path.dirname(folder))
        if parents is not None and _equal(parents, now):
            return
        try:
            self._backend.set(card.uuid, folder, BLOCKED)
        except Refusal as refusal:
            if refusal.code == NO_FOLDER:
                raise
            held = f"holds {now.used // MIB} MiB of" if now.used else "sees"
            raise Refusal(
                f"{target.name} {held} card {card.index}, which it wasn't given; the driver's error: {refusal}",
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
                    now = self._backend.get(card.uuid, str(folder))
                    # A limit that isn't ours, or a parent's, stays.
                    if now is not None and _equal(now, BLOCKED if mib is None else limits.wanted(mib)):
                        self._backend.set(card.uuid, str(folder), NONE)
                        log.info("limit removed", extra={"data": {"pod": target.pod, "card": card.index}})
                except Refusal as refusal:
                    log.debug("%s, card %d: %s", target.name, card.index, refusal)

    def _new_findings(
        self, pods: t.Sequence[JsonObject], findings: t.Mapping[tuple[str, str, str], tuple[str, str]]
    ) -> list[Finding]:
        """Return the findings that weren't reported before; one that ended may be reported again."""
        by_uid = {contract.pod_uid(pod): pod for pod in pods}
        alive = {identifier for pod in pods for identifier in limits.running(pod).values()}
        fresh = [key for key in findings if key not in self._reported]
        self._reported = {key for key in self._reported if key[0] in alive} | set(findings)
        for key in fresh:
            log.warning("%s", findings[key][1])
        return [
            Finding(by_uid[uid], key[2], message) for key in fresh for uid, message in (findings[key],) if uid in by_uid
        ]


def _equal(one: Limit, other: Limit) -> bool:
    return (one.soft, one.hard) == (other.soft, other.hard)


def _describe(limit: Limit | None) -> str:
    if limit is None or limit.hard == UNLIMITED:
        return "no limit"
    return f"a limit of {limit.hard // MIB} MiB" + (f" and {limit.soft // MIB} MiB kept for it" if limit.soft else "")
