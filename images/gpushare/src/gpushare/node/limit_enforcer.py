# SPDX-License-Identifier: GPL-3.0-or-later
"""Have the driver limit every container that holds memory of a card to its share, and correct limits that differ.

Only what was read back counts. So:

* Before any limit is announced, each card is probed: a limit (of all that pods may have of it) is set on the plugin's
  own cgroup, read back and cleared. An older driver than R615, one with limits turned off, a missing capability, a
  cgroup without the controller that the driver needs, all fail there, and no container has to fail for it.
* Each pass reads the limit of each running container on each of its cards, and sets it where it differs from the share.
* Every card that a container wasn't given is blocked for it, whether its pod has a share or not: a container that sets
  NVIDIA_VISIBLE_DEVICES itself may see it, and with an older toolkit than 1.20.1 nothing shows that. A limit on such a
  card shows it, and an Event reports it. Only pods without a share in exempt namespaces aren't limited.
* A container that holds more than it may (it allocated before its limit was set) can't be limited to its share: the
  driver refuses, or takes the limit and frees nothing. It is limited to what it holds, so that it gets no more, and is
  a *violation* until it holds less: its card isn't enforced, and Events on pod and node have the code.
* The containers' memory together is compared with what NVML calls used. What is more belongs to a process that outlived
  its pod, to one of the node itself or of an exempt pod: no share is backed by it, and it is a violation of the card.

Nothing has to survive a restart: driver, kubelet and API hold all state, and the first pass of a new process reads it.
A limit ends with its container's cgroup; it is never removed from a running container, except when the mode is
``off`` or the node is cleaned up.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
import typing as t

from gpushare.node import limits
from gpushare.node.cgroups import Cgroups
from gpushare.node.limits import Target, Usage, Violation
from gpushare.nvml.limits import MIB, NO_FOLDER, UNLIMITED, Limit, LimitBackend, Refusal
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.limits")

NONE = Limit(0, UNLIMITED)
# On a card that a container wasn't given: too little for anything, and certainly a limit.
BLOCKED = Limit(0, MIB)
# The API's status and the cgroup of a running container appear at different times, by less than these seconds.
GRACE_SECONDS = 10.0
# A container without units, once blocked or freed, is checked again after so many seconds: a node has many of them.
CLOSED_SECONDS = 30.0
# Memory of no container is reported above so many MiB (driver and firmware need some that no container is charged
# with), if it is seen for so many seconds (the queries aren't made at one moment).
SLACK_MIB = 512
UNACCOUNTED_SECONDS = 10.0


class Group(t.NamedTuple):
    """A cgroup that is limited together with those in it.

    :param target: with the group's folder as ``container_id``.
    :param inside: the folders in it.
    """

    target: Target
    inside: t.Sequence[str]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The content of an Event.

    :param pod: the pod that it is about, from the parameter of ``enforce``; None for the node.
    """

    pod: JsonObject | None
    reason: str
    message: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what a second Event about it would repeat."""
        return contract.pod_uid(self.pod) if self.pod else "", self.reason, self.message


class _Findings:
    """What one pass has found.

    :ivar events: text by container, card, and the Event's reason.
    :ivar used: MiB of the containers by card (UUID), and ``unknown`` the cards for which one is missing.
    :ivar held: bytes of each container or group on the cards that it was given, by its ID and card (UUID).
    """

    def __init__(self) -> None:
        self.usage: dict[str, Usage] = {}
        self.corrected = 0
        self.used: collections.Counter[str] = collections.Counter()
        self.unknown: set[str] = set()
        self.held: dict[tuple[str, str], int] = {}
        self.violations: list[Violation] = []
        self.events: dict[tuple[str, str, str], str] = {}
        self.pods: dict[str, str] = {}

    def report(self, target: Target, card: str, reason: str, text: str) -> None:
        """Add an Event about a container and a card.

        :param card: the card's UUID.
        :param reason: the Event's reason, in CamelCase.
        """
        self.events[target.container_id, card, reason] = text
        self.pods[target.container_id] = target.uid

    def violate(self, target: Target, card: str, code: contract.Reason, text: str) -> None:
        """Add a violation, which is an Event, too.

        :param card: the card's UUID.
        :param code: names the violation; the Event's text begins with it.
        """
        violation = Violation(code, text, target.uid, target.container_id, card)
        self.violations.append(violation)
        self.report(target, card, violation.event, f"{code}: {text}")

    def unaccounted(self, card: contract.Card, text: str) -> None:
        """Add a card with memory of no container, which is an Event of the node, too."""
        code = contract.Reason.UNACCOUNTED_MEMORY_HELD
        violation = Violation(code, text, "", "", card.uuid)
        self.violations.append(violation)
        self.events["", card.uuid, violation.event] = f"{code}: {text}"


class Enforcer:
    """Enforces limits. Thread-safe; ``probe`` and ``enforce`` are each called by one thread.

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
        self._violations: tuple[Violation, ...] = ()
        self._usage: dict[str, Usage] = {}
        self._held: dict[tuple[str, str], int] = {}
        self._corrected = 0
        self._own: str | None = None
        self._probed: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        # When containers without units were last blocked or, if exempt, freed, and since when cards have memory of no
        # container.
        self._closed: dict[str, float] = {}
        self._unaccounted: dict[str, float] = {}
        self._reported: set[tuple[str, str, str]] = set()
        self._unsent: list[Finding] = []

    # ----------------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """Return the value of the node's annotation ``contract.NODE_LIMIT``."""
        with self._lock:
            problems = [self._reason] if self._reason else list(self._problems.values())
            problems += dict.fromkeys(f"{violation.code}: {violation.text}" for violation in self._violations)
            return limits.state(self.mode, problems)

    @property
    def active(self) -> bool:
        """Return whether memory of any card is limited."""
        with self._lock:
            return self.mode != "off" and bool(self._supported)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Return the containers that the last pass couldn't hold to their memory."""
        with self._lock:
            return self._violations

    def card_limit(self, uuid: str) -> tuple[str, str]:
        """Return a card's ``limit`` in the annotation ``contract.NODE_CARDS`` and its violation's text.

        Each is empty while it isn't known. A violation is shown also where memory isn't limited, first one of memory
        that others were promised.
        """
        with self._lock:
            violations = [violation for violation in self._violations if violation.card == uuid]
            if violations:
                shown = max(violations, key=lambda violation: violation.holds)
                return shown.code.value, shown.text
            if self.mode == "off":
                return contract.LIMIT_OFF, ""
            if uuid in self._supported:
                return contract.LIMIT_ENFORCED, ""
            known = self._reason or uuid in self._problems
            return contract.Reason.MEMORY_LIMIT_UNAVAILABLE.value if known else "", ""

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
    def held(self) -> dict[tuple[str, str], int]:
        """Return the bytes of each limited container or group in the last pass, by its ID and card (UUID)."""
        with self._lock:
            return dict(self._held)

    @property
    def corrected(self) -> int:
        """Return the number of limits that this process has corrected."""
        with self._lock:
            return self._corrected

    def environment(self, units: t.Mapping[str, int]) -> dict[str, str]:
        """Return the variables for a container with so many units by card (UUID)."""
        mib = contract.MIB_PER_UNIT[self._unit]
        return self.variables({uuid: number * mib for uuid, number in units.items()})

    def variables(self, mib: t.Mapping[str, int]) -> dict[str, str]:
        """Return the variables for a container with so many MiB by card (UUID).

        Empty unless the probe succeeded on its cards: the toolkit's hook would keep the container from starting.
        """
        with self._lock:
            if self.mode == "off" or not mib or not all(uuid in self._supported for uuid in mib):
                return {}
        return limits.environment(mib)

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
            if supported != before[2]:
                self._closed = {}
        if (reason, problems) != before[:2]:
            reasons = "; ".join([reason] if reason else problems.values())
            log.log(
                logging.WARNING if reasons else logging.INFO, "memory limits: %s", reasons or "the driver sets them"
            )
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

    def enforce(
        self,
        cards: t.Sequence[contract.Card],
        pods: t.Sequence[JsonObject],
        targets: t.Sequence[Target],
        promised: t.Mapping[str, int],
        outlived: t.Sequence[str] = (),
        groups: t.Sequence[Group] = (),
    ) -> list[Finding]:
        """Read the limits of all containers once, and correct those that differ.

        :param pods: that findings may be about, with their UIDs.
        :param found: the running containers.
        :param promised: MiB of the pods' shares by card (UUID).
        :param outlived: cgroups of containers that outlived their pod; their limits stay, and their memory is accounted
            for.
        :param groups: those of ``hold_group``, as far as their containers aren't in ``found``.
        :returns: the findings that weren't returned before, and those that ``unsent`` was called with.
        """
        now, off = self._clock(), self.mode == "off"
        there = {target.container_id for target in targets}
        self._missing = {container: since for container, since in self._missing.items() if container in there}
        with self._lock:
            self._closed = {
                container: at
                for container, at in self._closed.items()
                if container in there and now - at < CLOSED_SECONDS
            }
            closed, supported = set(self._closed), self._supported
        due = [target for target in targets if target.container_id not in closed]
        findings = _Findings()
        limited = [card for card in cards if card.uuid in supported and not off]
        self._enforce_all(limited, [target for target in due if not (off or target.exempt)], findings)
        # Those of exempt pods were limited before their namespace was exempt.
        self.clear(cards if off else limited, [target for target in due if off or target.exempt])
        with self._lock:
            violated = {violation.container for violation in findings.violations}
            self._closed |= {
                target.container_id: now for target in due if target.mib == {} and target.container_id not in violated
            }
        for folder in outlived:
            self._measure(limited, folder, findings)
        for group in groups:
            self._measure_group(limited, group, findings)
        self._compare(cards, limited, promised, findings)
        with self._lock:
            self._violations, self._usage, self._held = tuple(findings.violations), findings.usage, findings.held
            self._corrected += findings.corrected
        return self._new_findings(pods, there, findings)

    def hold_group(self, cards: t.Sequence[contract.Card], folder: str, mib: t.Mapping[str, int]) -> None:
        """Limit a cgroup together with those in it that have no limit of their own, such as a pod's.

        :param cards: of the node.
        :param folder: the cgroup.
        :param mib: MiB by card (UUID); it may hold nothing of any other card.
        :raises Refusal: the driver doesn't hold it to its memory of a card.
        """
        with self._lock:
            limited = [card for card in cards if card.uuid in self._supported and self.mode != "off"]
        for card in limited:
            wanted = limits.wanted(mib[card.uuid]) if card.uuid in mib else BLOCKED
            now = self._backend.get(card.uuid, folder)
            if not _equal(wanted, now):
                self._hold(card, folder, wanted, now, f"{folder} can't be limited on card {card.index}")

    def partition(
        self,
        cards: t.Sequence[contract.Card],
        folders: t.Sequence[str],
        mib: t.Mapping[str, int],
        parts: t.Mapping[str, t.Container[int]],
        users: int,
    ) -> None:
        """Keep the cgroups in a limited group from holding more than it together.

        The driver may count the nearest limit only. So limits inside the group stay only if each of them is a part of
        the group's memory, and all are no more than that; otherwise the group's limit holds for all. Once every user
        has its part, there is nothing left for the others.

        :param cards: of the node.
        :param folders: all cgroups in the group.
        :param mib: the group's MiB by card (UUID).
        :param parts: MiB of one user by card (UUID).
        :param users: how many of the cgroups have a part; which ones isn't known.
        :raises Refusal: the driver refuses.
        """
        with self._lock:
            limited = [card for card in cards if card.uuid in self._supported and self.mode != "off"]
        for card in limited:
            whole = limits.wanted(mib[card.uuid]) if card.uuid in mib else BLOCKED
            by_folder = {folder: self._backend.get(card.uuid, folder) for folder in folders}
            # One that is equal to the group's may be the group's.
            own = {
                folder: limit
                for folder, limit in by_folder.items()
                if limit is not None and not _equal(whole, limit) and not _equal(BLOCKED, limit)
            }
            is_right = (
                all(not part.soft and part.hard // MIB in parts.get(card.uuid, ()) for part in own.values())
                and sum(part.hard for part in own.values()) <= whole.hard
            )
            rest = BLOCKED if is_right and len(own) == users else NONE
            for folder, limit in by_folder.items():
                if not (is_right and folder in own) and not (rest is BLOCKED and _equal(BLOCKED, limit)):
                    self._backend.set(card.uuid, folder, rest)

    @property
    def suspicious(self) -> bool:
        """Return whether a card has memory of no container, so that it has to be compared again soon."""
        return bool(self._unaccounted)

    def _enforce_all(self, cards: t.Sequence[contract.Card], targets: t.Sequence[Target], findings: _Findings) -> None:
        """Enforce the limits of containers on the cards that can be limited."""
        folders = self._cgroups.folders([target.container_id for target in targets])
        for target in targets:
            folder = folders.get(target.container_id)
            if target.mib is None or folder is None:
                self._report_missing(cards, target, findings)
                continue
            self._missing.pop(target.container_id, None)
            for card in cards:
                mib = target.mib.get(card.uuid)
                try:
                    if mib is None:
                        limit = self._block(card, target, folder, findings)
                    else:
                        limit = self._enforce(card, target, folder, mib, findings)
                except Refusal as refusal:
                    findings.unknown.add(card.uuid)
                    # Gone with the container, or the card doesn't answer, which is reported elsewhere.
                    if refusal.code != NO_FOLDER and card.healthy:
                        findings.violate(target, card.uuid, contract.Reason.MEMORY_LIMIT_FAILED, str(refusal))
                    continue
                findings.used[card.uuid] += limit.used_mib
                if mib is not None:
                    findings.held[target.container_id, card.uuid] = limit.used

    def _report_missing(self, cards: t.Sequence[contract.Card], target: Target, findings: _Findings) -> None:
        """Report a container that can't be limited, since its cgroup or its cards aren't known, after a moment."""
        # Any card may be its own.
        concerned = [card.uuid for card in cards if target.mib is None or card.uuid in target.mib]
        findings.unknown.update(concerned)
        since = self._missing.setdefault(target.container_id, self._clock())
        if self._clock() - since <= GRACE_SECONDS:
            return
        if target.mib is None:
            text = f"kubelet's list doesn't show which cards {target.name} was given"
        else:
            text = f"the cgroup of {target.name} isn't found"
        for uuid in concerned:
            findings.violate(target, uuid, contract.Reason.MEMORY_LIMIT_FAILED, text)

    def _measure(self, cards: t.Sequence[contract.Card], folder: str, findings: _Findings) -> None:
        """Add the memory of a container that outlived its pod.

        :param folder: its cgroup.
        """
        for card in cards:
            try:
                limit = self._backend.get(card.uuid, folder)
            except Refusal:
                findings.unknown.add(card.uuid)
            else:
                findings.used[card.uuid] += limit.used_mib if limit else 0

    def _measure_group(self, cards: t.Sequence[contract.Card], group: Group, findings: _Findings) -> None:
        """Add the memory of a limited group of cgroups, and the violation of one that holds more than it may."""
        target = group.target
        for card in cards:
            mib = (target.mib or {}).get(card.uuid)
            try:
                whole = self._backend.get(card.uuid, target.container_id)
                inside = [self._backend.get(card.uuid, folder) for folder in group.inside]
            except Refusal:
                findings.unknown.add(card.uuid)
                continue
            # What has a limit of its own there is a part of the group's memory for dmem, and isn't without it.
            own = sum(limit.used_mib for limit in inside if limit is not None and not _equal(limit, whole))
            used = max(whole.used_mib if whole else 0, own)
            findings.used[card.uuid] += used
            if mib is not None:
                findings.held[target.container_id, card.uuid] = used * MIB
                have = findings.usage.get(card.uuid, Usage())
                findings.usage[card.uuid] = Usage(have.containers + 1, have.limited_mib + mib, have.used_mib + used)
            what = f"the containers of pod {target.pod} hold {used} MiB of card {card.index}"
            if mib is None and used > BLOCKED.hard // MIB:
                text = f"{what}, which it wasn't given; they get no more"
                findings.violate(target, card.uuid, contract.Reason.FOREIGN_MEMORY_HELD, text)
            elif mib is not None and used > mib:
                text = f"{what}, and its claims give it {mib} MiB: they allocated it before they were limited"
                findings.violate(target, card.uuid, contract.Reason.MEMORY_LIMIT_EXCEEDED, text)

    def _compare(
        self,
        cards: t.Sequence[contract.Card],
        limited: t.Sequence[contract.Card],
        promised: t.Mapping[str, int],
        findings: _Findings,
    ) -> None:
        """Compare each card's used memory with what its containers hold, or may hold where they aren't limited.

        A card whose driver doesn't report its reserve isn't compared, since NVML calls the reserve used. Where a
        number can't be read, the last comparison's result stays.

        :param limited: of the cards.
        :param promised: MiB of the pods' shares by card (UUID).
        :param findings: receives the memory that is held for too long.
        """
        now, since = self._clock(), self._unaccounted
        code = contract.Reason.UNACCOUNTED_MEMORY_HELD
        reported = {violation.card: violation.text for violation in self._violations if violation.code is code}
        self._unaccounted = {}
        for card in cards:
            if not (card.healthy and card.reserved_mib):
                continue
            pods = findings.used[card.uuid] if card in limited else promised[card.uuid]
            more = None if card.uuid in findings.unknown else self._used_beyond(card, pods)
            if more is None:
                if card.uuid in since:
                    self._unaccounted[card.uuid] = since[card.uuid]
                if card.uuid in reported:
                    findings.unaccounted(card, reported[card.uuid])
                continue
            if more <= SLACK_MIB:
                continue
            began = self._unaccounted[card.uuid] = since.get(card.uuid, now)
            if now - began > UNACCOUNTED_SECONDS:
                # Rounded, so that the node's annotation doesn't change with every allocation.
                whose = (
                    "a process that outlived its pod, of the node itself or of a pod without limits"
                    if card in limited
                    # Nothing holds them to it, and CUDA's context alone takes more than the slack on some cards.
                    else "pods that use more than their shares (each CUDA context counts), a process that outlived its "
                    "pod, or one of the node itself"
                )
                findings.unaccounted(
                    card,
                    f"more than {more // SLACK_MIB * SLACK_MIB} MiB of card {card.index} ({card.uuid}) are used beyond "
                    f"its pods' shares: by {whose}; nvidia-smi on the node shows it",
                )

    def _used_beyond(self, card: contract.Card, pods: int) -> int | None:
        """Return the MiB of a card that are used beyond its reserve and its pods' MiB; None if it doesn't answer."""
        try:
            return self._backend.used_mib(card.uuid) - card.reserved_mib - pods
        except Refusal as refusal:
            log.debug("card %d: %s", card.index, refusal)
            return None

    def _enforce(self, card: contract.Card, target: Target, folder: str, mib: int, findings: _Findings) -> Limit:
        """Enforce a container's limit on a card.

        :param folder: the container's cgroup.
        :param mib: its share.
        :param findings: receives the usage, and the Event of a corrected limit, or the violation of a container that
            holds more.
        :returns: the limit in effect, with the memory that the container holds.
        :raises Refusal: it can't be enforced.
        """
        wanted = limits.wanted(mib)
        now = self._backend.get(card.uuid, folder)
        after = now
        if now is None or not _equal(now, wanted):
            what = f"{target.name} isn't held to its {mib} MiB of card {card.index}"
            after = self._hold(card, folder, wanted, now, what)
        assert after is not None
        have = findings.usage.get(card.uuid, Usage())
        findings.usage[card.uuid] = Usage(
            have.containers + 1, have.limited_mib + after.hard // MIB, have.used_mib + after.used_mib
        )
        if after.used > wanted.hard:
            findings.violate(
                target,
                card.uuid,
                contract.Reason.MEMORY_LIMIT_EXCEEDED,
                f"{target.name} holds {after.used // MIB} MiB of card {card.index}, and its share is {mib} MiB: it "
                "allocated them before it was limited; it gets no more",
            )
            return after
        if after is now:
            return after
        log.info("limit set", extra={"data": {"pod": target.pod, "container": target.container, "card": card.index,
                                              "mib": mib, "before": _describe(now)}})  # fmt: skip
        if now is not None:
            text = f"container {target.container} had {_describe(now)} on card {card.index}; the limit is {mib} MiB now"
            findings.report(target, card.uuid, "GpuMemoryLimitCorrected", text)
        findings.corrected += 1
        return after

    def _block(self, card: contract.Card, target: Target, folder: str, findings: _Findings) -> Limit:
        """Block a card for a container that wasn't given it.

        :param folder: the container's cgroup.
        :param findings: receives the Event of a card that it sees, or the violation of a container that holds memory
            of it.
        :returns: the limit in effect, with the memory that the container holds.
        :raises Refusal: it can't be blocked.
        """
        now = self._backend.get(card.uuid, folder)
        after, sees = now, False
        if now is None or not _equal(now, BLOCKED):
            # The limit of a parent (for example for all pods) isn't this container's, and shows nothing.
            sees = now is not None and not _equal(now, self._backend.get(card.uuid, os.path.dirname(folder)))
            what = f"card {card.index} can't be closed to {target.name}, which wasn't given it"
            after = self._hold(card, folder, BLOCKED, now, what)
        assert after is not None
        if after.used > BLOCKED.hard:
            findings.violate(
                target,
                card.uuid,
                contract.Reason.FOREIGN_MEMORY_HELD,
                f"{target.name} holds {after.used // MIB} MiB of card {card.index}, which it wasn't given; it gets no "
                "more",
            )
        elif sees:
            findings.report(
                target,
                card.uuid,
                "GpuCardNotGiven",
                f"container {target.container} sees card {card.index} ({card.uuid}), which it wasn't given; "
                "the driver lets it have none of that card's memory now",
            )
        return after

    def _hold(self, card: contract.Card, folder: str, wanted: Limit, now: Limit | None, what: str) -> Limit:
        """Set a limit, or the lowest one that the driver takes if the container holds more.

        :param folder: the container's cgroup.
        :param now: the limit that it has, which may be its parent's.
        :param what: for the message of a refusal.
        :returns: the limit in effect, with the memory that the container holds.
        :raises Refusal: it can't be set, and not because of what the container holds.
        """
        try:
            self._backend.set(card.uuid, folder, wanted)
        except Refusal as refusal:
            if refusal.code == NO_FOLDER:
                raise
            held = self._limit_to_used(card, folder, wanted, now)
            if held is None:
                raise Refusal(f"{what}; the driver's error: {refusal}", refusal.code) from refusal
            return held
        after = self._backend.get(card.uuid, folder)
        if after is None or not _equal(after, wanted):
            raise Refusal(f"{what}: the driver took the limit and doesn't show it")
        return after

    def _limit_to_used(self, card: contract.Card, folder: str, wanted: Limit, now: Limit | None) -> Limit | None:
        """Limit a container to what it holds; None if that isn't more than the wanted limit.

        Without dmem in the kernel the driver shows what a cgroup holds only if it has a limit of its own: at first all
        of the card.
        """
        try:
            if now is None or _equal(now, self._backend.get(card.uuid, os.path.dirname(folder))):
                self._backend.set(card.uuid, folder, limits.wanted(card.memory_mib))
                now = self._backend.get(card.uuid, folder)
            if now is None or now.used <= wanted.hard:
                return None
            lowest = limits.wanted(now.used_mib)
            if now.soft or now.hard > lowest.hard:
                # Refused if it has allocated more since; the next pass comes soon.
                with contextlib.suppress(Refusal):
                    self._backend.set(card.uuid, folder, lowest)
            return self._backend.get(card.uuid, folder)
        except Refusal as refusal:
            log.debug("%s of card %d: %s", folder, card.index, refusal)
            return None

    def clear(self, cards: t.Sequence[contract.Card], targets: t.Sequence[Target]) -> None:
        """Remove our limits from running containers."""
        folders = self._cgroups.folders([target.container_id for target in targets])
        for target in targets:
            folder = folders.get(target.container_id)
            if folder is None or target.mib is None:
                continue
            for card in cards:
                mib = target.mib.get(card.uuid)
                try:
                    now = self._backend.get(card.uuid, folder)
                    # A limit that isn't ours, or a parent's, stays.
                    if now is not None and _equal(now, BLOCKED if mib is None else limits.wanted(mib)):
                        self._backend.set(card.uuid, folder, NONE)
                        log.info("limit removed", extra={"data": {"pod": target.pod, "card": card.index}})
                except Refusal as refusal:
                    log.debug("%s, card %d: %s", target.name, card.index, refusal)

    def unsent(self, finding: Finding) -> None:
        """Return a finding again in the next pass, since its Event wasn't accepted."""
        self._unsent.append(finding)

    def _new_findings(
        self, pods: t.Sequence[JsonObject], running: t.Container[str], findings: _Findings
    ) -> list[Finding]:
        """Return the findings that weren't reported before of a container that runs, and those without an Event."""
        by_uid = {contract.pod_uid(pod): pod for pod in pods}
        violations = {(violation.container, violation.card, violation.event) for violation in findings.violations}
        fresh = [key for key in findings.events if key not in self._reported]
        self._reported = {key for key in self._reported if key[0] in running} | set(findings.events)
        due = [finding for finding in self._unsent if finding.pod is None or contract.pod_uid(finding.pod) in by_uid]
        self._unsent = []
        for key in fresh:
            text = findings.events[key]
            log.warning("%s", text)
            if (pod := by_uid.get(findings.pods.get(key[0], ""))) is not None:
                due.append(Finding(pod, key[2], text))
            if key in violations:
                due.append(Finding(None, key[2], text))
        return list({finding.key: finding for finding in due}.values())


def _equal(limit: Limit, other: Limit | None) -> bool:
    return other is not None and (limit.soft, limit.hard) == (other.soft, other.hard)


def _describe(limit: Limit | None) -> str:
    if limit is None or limit.hard == UNLIMITED:
        return "no limit"
    return f"a limit of {limit.hard // MIB} MiB" + (f" and {limit.soft // MIB} MiB kept for it" if limit.soft else "")
