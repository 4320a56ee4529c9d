# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Types of an allocation, as module gpu_allocation_info returns it.

Memory in ``units`` has the unit of its node's back end; a count is one of GPUs, replicas or MIG devices.
"""

from __future__ import annotations

import typing as t


class ContainerUnits(t.TypedDict):
    """Units that one container requests."""

    name: str
    units: int


class PodEntry(t.TypedDict, total=False):
    """A pod that holds or requests units.

    ``cores`` and ``slots`` are HAMi's, ``resources`` are NVIDIA's, ``reason`` and ``backend`` those of Pending pods.
    """

    namespace: str
    name: str
    units: int
    phase: str
    assigned: bool
    terminating: bool
    uid: str
    containers: list[ContainerUnits]
    state: str
    problem: str
    cores: int
    slots: int
    resources: dict[str, int]
    reason: str
    backend: str


class CardEntry(t.TypedDict, total=False):
    """A card with its pods; slots, cores and mode are HAMi's."""

    index: int
    uuid: str
    model: str
    memory_mib: int
    healthy: bool
    reason: str
    total: int
    used: int
    pods: list[PodEntry]
    slots: int
    slots_used: int
    cores: int
    cores_used: int
    mode: str


class ResourceEntry(t.TypedDict):
    """A resource of NVIDIA's device plugin."""

    name: str
    capacity: int
    allocatable: int
    used: int


class BackendTotals(t.TypedDict):
    """Units of one back end in the cluster."""

    backend: str
    unit: str | None
    total: int
    used: int


class BackendEntry(t.TypedDict, total=False):
    """One back end on a node; ``slots`` is HAMi's, ``gpus`` and ``resources`` are NVIDIA's."""

    backend: str
    unit: str | None
    capacity: int
    allocatable: int
    total: int
    used: int
    cards: list[CardEntry]
    pending: list[PodEntry]
    slots: dict[str, int]
    gpus: dict[str, t.Any]
    resources: list[ResourceEntry]


class NodeEntry(BackendEntry, total=False):
    """A node with its first back end; the others are in ``also``."""

    name: str
    address: str
    backends: list[str]
    problem: str
    memory_limit: str
    also: list[BackendEntry]


class Allocation(t.TypedDict):
    """The allocation of a cluster."""

    unit: str | None
    nodes: list[NodeEntry]
    waiting: list[PodEntry]
    total: int
    used: int
    totals: list[BackendTotals]
