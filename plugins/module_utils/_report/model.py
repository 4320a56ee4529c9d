# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The data of a report, which every rendering takes. Texts are printable lines, and unknown values are None."""

from __future__ import annotations

import dataclasses
import typing as t


def mib(amount: int | None, shown: str = "") -> str:
    """Format an amount of memory (MiB); exact for whole GiB, else to a tenth.

    :param shown: the unit, ``MiB`` or ``GiB``; by default GiB from 1 GiB on.
    """
    if amount is None:
        return "unknown"
    unit = shown or ("GiB" if amount >= 1024 else "MiB")
    return f"{number(amount, unit) if shown or unit == 'GiB' else amount} {unit}"


def number(amount: int, unit: str) -> str:
    """Format an amount of memory (MiB) in a unit (``MiB`` or ``GiB``), without the unit."""
    if unit != "GiB":
        return f"{amount:,}"
    if 0 < amount < 103:
        # A tenth would be 0.0, or look exact.
        return "<0.1"
    return f"{amount // 1024:,}" if amount % 1024 == 0 else f"{amount / 1024:,.1f}"


def amount(value: int | None, unit: str, shown: str = "") -> str:
    """Format an amount in a card's unit.

    :param unit: ``MiB``, or what is counted.
    :param shown: the unit of memory, see ``mib``.
    """
    return mib(value, shown) if unit == "MiB" or value is None else plural(value, unit.removesuffix("s"))


def percent(part: int | None, of: int | None) -> str:
    """Format a share, truncated as everywhere in the collection; empty if unknown."""
    return f"{part * 100 // of} %" if part is not None and of else ""


def plural(count: int, singular: str) -> str:
    return f"{count:,} {singular}" if count == 1 else f"{count:,} {singular}s"


# The worst first.
LEVELS = ("FAIL", "WARN", "UNKNOWN", "PASS")
FINDING_LEVELS = LEVELS[:3]
NOTHING = "nothing to check"
# Those of nodes; the other checks concern every cluster.
BACKENDS = ("dra", "gpushare", "hami", "nvidia")
NOT_HERE = "no node has it"


def worst(levels: t.Iterable[str]) -> str:
    """Return the worst level; PASS if there is none."""
    return min(levels, key=LEVELS.index, default="PASS")


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod on a card, or on an unknown card.

    :param name: ``namespace/name``.
    :param claimed: its share in ``unit``, which is its card's.
    :param used_mib: memory of its processes, as measured by NVML.
    :param note: its state, unless it runs without a problem.
    """

    name: str
    claimed: int | None = None
    used_mib: int | None = None
    note: str = ""
    unit: str = "MiB"


@dataclasses.dataclass(frozen=True)
class Card:
    """A card with its claimed and its used memory.

    :param total: capacity in ``unit``.
    :param unit: ``MiB``, ``shares`` (of a card that is shared by count) or ``units`` (of unknown size).
    :param memory_mib: the card's memory, if it isn't ``total``.
    :param healthy: None if unknown.
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
        """Return the card's memory; None if unknown."""
        return self.memory_mib if self.unit != "MiB" else self.memory_mib or self.total


@dataclasses.dataclass(frozen=True)
class Resource:
    """A resource that a node advertises without its cards, as NVIDIA's plugin does."""

    name: str
    about: str = ""
    total: int | None = None
    claimed: int | None = None


# Of a device: what role passthrough has recorded, as the checks have asked the kernel about it.
FUNCTION = "function"


@dataclasses.dataclass(frozen=True)
class Device:
    """A card or a vGPU for virtual machines.

    :param address: on PCI, of what a machine gets; ``card`` is the card's.
    :param name: a vGPU's type, or a card's model.
    :param kind: ``card``, ``vgpu``, or ``FUNCTION``.
    :param uuid: of a mediated device; empty for others.
    :param group: the IOMMU group's number; empty where it isn't known.
    :param state: ``held``, ``free`` or ``unknown``.
    :param holder: who has it, that it is free, or why that isn't known.
    """

    address: str
    name: str = ""
    kind: str = "card"
    card: str = ""
    uuid: str = ""
    driver: str = ""
    group: str = ""
    resource: str = ""
    state: str = "unknown"
    holder: str = ""
    pods: tuple[Pod, ...] = ()


@dataclasses.dataclass(frozen=True)
class Node:
    """A node.

    :param pending: pods whose card is unknown.
    :param devices: cards and vGPUs for virtual machines.
    :param problem: which data of the node is unreadable or implausible.
    :param checked: it is in the report, not only in the allocation.
    :param limit: whether NVIDIA's driver enforces its pods' shares, as its device plugin announces it, or empty.
    """

    name: str
    backend: str = ""
    cards: tuple[Card, ...] = ()
    pending: tuple[Pod, ...] = ()
    resources: tuple[Resource, ...] = ()
    devices: tuple[Device, ...] = ()
    problem: str = ""
    checked: bool = False
    limit: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """One invariant; ``items`` counts what it was checked on, the others count its findings."""

    id: str
    title: str = ""
    backend: str = "common"
    result: str = "PASS"
    items: int = 0
    fail: int = 0
    warn: int = 0
    unknown: int = 0

    @property
    def label(self) -> str:
        """Return the result for people: a check without items hasn't passed."""
        return NOTHING if self.result == "PASS" and not self.items else self.result

    def found(self, level: str) -> int:
        return {"FAIL": self.fail, "WARN": self.warn, "UNKNOWN": self.unknown}[level]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One contradiction or gap, with the evidence by source and what to do."""

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
        """Return node, card, pod and container in one line; empty if it concerns the whole cluster."""
        parts = [("node", self.node), ("card", "" if self.card is None else str(self.card)), ("", self.uuid)]
        parts += [("pod", self.pod), ("container", self.container)]
        return ", ".join(f"{kind} {name}".strip() for kind, name in parts if name)


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A Pending pod that requests a share."""

    pod: str
    requests: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class View:
    """The whole report.

    :param checked: False if there is only an allocation.
    :param unit: the nodes' unit of memory, ``MiB`` or ``GiB``; of several the larger one.
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
    unit: str = "MiB"

    def found(self, level: str) -> int:
        """Return the number of findings of a level, also those that only a check's counts contain."""
        listed = sum(finding.level == level for finding in self.findings)
        return max(listed, sum(check.found(level) for check in self.checks))

    @property
    def absent(self) -> dict[str, tuple[Check, ...]]:
        """Return the checks of each back end that no node has; they had nothing to check."""
        there = {node.backend.partition("-")[0] for node in self.nodes}
        if "mixed" in there:
            return {}
        groups: dict[str, tuple[Check, ...]] = {}
        for check in self.checks:
            if check.backend in BACKENDS and check.backend not in there:
                groups[check.backend] = (*groups.get(check.backend, ()), check)
        return {name: group for name, group in groups.items() if all(check.label == NOTHING for check in group)}

    @property
    def present(self) -> tuple[Check, ...]:
        """Return the other checks."""
        return tuple(check for check in self.checks if check.backend not in self.absent)

    @property
    def devices(self) -> list[tuple[Node, Device]]:
        """Return the cards and vGPUs for virtual machines, each with its node."""
        return [(node, device) for node in self.nodes for device in node.devices]

    def checks_with(self, result: str) -> int:
        """Return the number of checks with this label."""
        return sum(check.label == result for check in self.checks)

    @property
    def headline(self) -> str:
        """Return the result as one sentence."""
        if not self.checked:
            return "The allocation by the cluster's API; nothing was checked."
        if not self.checks:
            return "No check ran, so the result is unknown."
        if not any(check.items for check in self.checks) and not self.findings:
            return "The checks found nothing to check."
        return {
            "FAIL": "Scheduler, kubelet and GPUs contradict each other.",
            "WARN": "No contradiction, but something needs attention.",
            "UNKNOWN": "No contradiction was found, but evidence is missing.",
            "PASS": "Scheduler, kubelet and GPUs agree.",
        }[self.result]
