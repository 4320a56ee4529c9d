# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Types of NVML's facts, as module nvml_info returns them. None is unknown; memory is in MiB."""

from __future__ import annotations

import typing as t


class Memory(t.TypedDict):
    """A card's memory; ``reserved_mib`` is the driver's and the firmware's, rounded up."""

    total_mib: int
    used_mib: int
    free_mib: int
    reserved_mib: int | None


class MigDeviceRow(t.TypedDict):
    """A MIG device with its GPU instance and compute instance."""

    uuid: str
    index: int
    gi: int | None
    ci: int | None
    total_mib: int | None
    used_mib: int | None


class Mig(t.TypedDict):
    """A card's MIG mode and devices."""

    mode: str
    pending: str
    devices: list[MigDeviceRow]


class RowRemap(t.TypedDict):
    """A card's remapped memory rows."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


class Fabric(t.TypedDict):
    """A card's registration with its NVSwitches; ``status`` is NVML's return code of one that is completed."""

    state: str
    status: int


class ExcludedCard(t.TypedDict):
    """A card that is left alone, and the entry that names it."""

    uuid: str
    pci: str
    name: str
    entry: str


class Health(t.TypedDict):
    """A card's health; ``fabric`` is None for a card without NVSwitches."""

    ecc_uncorrected_volatile: int | None
    ecc_uncorrected_aggregate: int | None
    row_remap: RowRemap | None
    retired_pages_pending: bool | None
    recovery_action: str | None
    fabric: Fabric | None
    xids: list[int] | None


class HostProcess(t.TypedDict):
    """A process by the node itself; see ``_contracts/cgroup.py`` for its owner."""

    name: str
    start_time: str | None
    cgroup: str
    where: str
    pod_uid: str
    container_id: str
    runtime: str
    static: bool


class GpuProcess(t.TypedDict):
    """A process by NVML, with the MIG device that it uses."""

    pid: int
    types: list[str]
    used_mib: int | None
    gi: int | None
    ci: int | None
    mig_uuid: str


class ProcessRow(GpuProcess, HostProcess):
    """A process that holds memory of a card."""

    libvgpu: bool | None


class CgroupLimit(t.TypedDict):
    """A limit that the driver enforces on a container's cgroup."""

    cgroup: str
    pod_uid: str | None
    container_id: str | None
    hard_mib: int | None
    soft_mib: int | None
    used_mib: int | None


class CardFacts(t.TypedDict):
    """One card."""

    index: int
    minor: int | None
    uuid: str
    pci: str
    name: str
    problem: str
    memory: Memory | None
    mig: Mig
    compute_mode: str
    health: Health
    processes: list[ProcessRow] | None
    limits: list[CgroupLimit] | None


class SystemFacts(t.TypedDict):
    """The driver, and the number of cards."""

    driver: str
    nvml: str
    cuda: str
    count: int
    problem: str


class NvmlFacts(t.TypedDict):
    """All facts of a node."""

    available: bool
    problem: str
    driver: str
    nvml: str
    cuda: str
    cards: list[CardFacts]
    excluded: list[ExcludedCard]
    pods_limited: int | None
    seconds: float


class Message(t.TypedDict, total=False):
    """One message of the worker process; see ``facts``."""

    failed: str
    system: SystemFacts
    begin: int | str
    so_far: CardFacts
    card: CardFacts
    libvgpu: tuple[int, bool | None]
    end: bool
    crashed: str
