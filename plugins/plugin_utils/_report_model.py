# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a report shows, as plain types: every rendering takes these, so that all of them say the same.

Texts are printable (see ``_report_values``), numbers are whole and not negative, and what isn't known is None.
"""

from __future__ import annotations

import dataclasses
import typing as t

# The worst first.
LEVELS = ("FAIL", "WARN", "UNKNOWN", "PASS")
FINDING_LEVELS = LEVELS[:3]
NOTHING = "nothing to check"


def worst(levels: t.Iterable[str]) -> str:
    """The worst of some levels; PASS where there are none."""
    return min(levels, key=LEVELS.index, default="PASS")


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod on a card, or on none that anybody tells of.

    :param name: ``namespace/name``.
    :param claimed: what it was given, in ``unit``, which is its card's.
    :param used_mib: what NVML says its processes use.
    :param note: its state where that is worth a word.
    """

    name: str
    claimed: int | None = None
    used_mib: int | None = None
    note: str = ""
    unit: str = "MiB"


@dataclasses.dataclass(frozen=True)
class Card:
    """A card: what of it is claimed beside what of it is used.

    :param total: what can be claimed, in ``unit``.
    :param unit: ``MiB``, ``shares`` (of a card that is shared by count) or ``units`` (nobody tells how large they are).
    :param memory_mib: the card's memory where it isn't ``total``.
    :param healthy: None where nobody tells.
    :param foreign_mib: memory in use by processes of none of its pods.
    """

    index: int | None
    uuid: str = ""
    model: str = ""
    total: int | None = None
    claimed: int | None = None
    unit: str = "MiB"
    memory_mib: int | None = None
    used_mib: int | None = None
    foreign_mib: int | None = None
    healthy: bool | None = None
    reason: str = ""
    pods: tuple[Pod, ...] = ()

    @property
    def name(self) -> str:
        return "card ?" if self.index is None else f"card {self.index}"

    @property
    def size_mib(self) -> int | None:
        """The card's memory as far as anybody tells."""
        return self.memory_mib if self.unit != "MiB" else self.memory_mib or self.total


@dataclasses.dataclass(frozen=True)
class Resource:
    """What a node announces by count without a word of its cards, as NVIDIA's plugin does."""

    name: str
    about: str = ""
    total: int | None = None
    claimed: int | None = None


@dataclasses.dataclass(frozen=True)
class Node:
    """A node.

    :param pending: pods of which nobody tells on which card they are.
    :param problem: what of the node can't be read or can't be true.
    :param checked: whether it is in the report, and not in the allocation alone.
    """

    name: str
    backend: str = ""
    cards: tuple[Card, ...] = ()
    pending: tuple[Pod, ...] = ()
    resources: tuple[Resource, ...] = ()
    problem: str = ""
    checked: bool = False


@dataclasses.dataclass(frozen=True)
class Check:
    """One invariant; ``looked_at`` says how many things it was checked on, the others how many were found wanting."""

    id: str
    title: str = ""
    backend: str = "common"
    result: str = "PASS"
    looked_at: int = 0
    fail: int = 0
    warn: int = 0
    unknown: int = 0

    @property
    def words(self) -> str:
        """Its result for people: a check with nothing to look at hasn't passed anything."""
        return NOTHING if self.result == "PASS" and not self.looked_at else self.result

    def found(self, level: str) -> int:
        return {"FAIL": self.fail, "WARN": self.warn, "UNKNOWN": self.unknown}[level]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One contradiction or one gap, with what each plane says of it and what to do."""

    check: str
    level: str
    what: str
    node: str = ""
    card: int | None = None
    uuid: str = ""
    pod: str = ""
    container: str = ""
    evidence: tuple[tuple[str, str], ...] = ()
    do: str = ""
    seen: int | None = None

    @property
    def where(self) -> str:
        """Node, card, pod and container in one line; empty where it is about the whole cluster."""
        parts = [("node", self.node), ("card", "" if self.card is None else str(self.card)), ("", self.uuid)]
        parts += [("pod", self.pod), ("container", self.container)]
        return ", ".join(f"{kind} {name}".strip() for kind, name in parts if name)


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A pod that asks for a share and is on no node."""

    pod: str
    asks: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class View:
    """Everything that a rendering shows.

    :param checked: whether there is a report at all; without one there is only the allocation.
    """

    checked: bool
    result: str = "PASS"
    time: str = ""
    cluster: str = ""
    samples: int | None = None
    grace_seconds: int | None = None
    transient: int | None = None
    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    nodes: tuple[Node, ...] = ()
    waiting: tuple[Waiting, ...] = ()

    def found(self, level: str) -> int:
        """How many findings there are of a level; those too that only a check's own numbers tell of."""
        listed = sum(finding.level == level for finding in self.findings)
        return max(listed, sum(check.found(level) for check in self.checks))

    def checks_with(self, result: str) -> int:
        """How many checks ended so; those with nothing to look at haven't passed."""
        return sum(check.words == result for check in self.checks)

    @property
    def headline(self) -> str:
        """The outcome in one sentence."""
        if not self.checked:
            return "The allocation as the cluster tells it; nothing was checked."
        if not self.checks:
            return "No check was made, so nothing is known."
        if not any(check.looked_at for check in self.checks) and not self.findings:
            return "The checks found nothing to look at."
        return {
            "FAIL": "Scheduler, kubelet and GPUs contradict each other.",
            "WARN": "No contradiction, but something needs attention.",
            "UNKNOWN": "No contradiction was found, but evidence is missing.",
            "PASS": "Scheduler, kubelet and GPUs tell one story.",
        }[self.result]
