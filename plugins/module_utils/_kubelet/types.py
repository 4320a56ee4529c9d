# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Types of kubelet's devices, as module kubelet_devices_info returns them."""

from __future__ import annotations

import typing as t


class Entry(t.TypedDict):
    """Devices of one resource that kubelet allocated to one container, by its checkpoint.

    ``envs``, ``cdi_devices``, ``devices`` (host paths) and ``annotations`` are the device plugin's response. ``envs``
    is None and ``problem`` says why where the response can't be decoded.
    """

    pod_uid: str
    container: str
    resource: str
    ids: list[str]
    count: int
    envs: dict[str, str] | None
    cdi_devices: list[str]
    devices: list[str]
    annotations: dict[str, str]
    problem: str


class Checkpoint(t.TypedDict):
    """kubelet's checkpoint of devices; without entries unless ``state`` is ``ok``."""

    state: str
    problem: str
    entries: list[Entry]
    registered: dict[str, list[str]]


class ResourceDevices(t.TypedDict):
    """Device IDs of one resource."""

    resource: str
    ids: list[str]


class ListedClaim(t.TypedDict):
    """A card that a container has by a ResourceClaim, by PodResources; ``share`` is empty before Kubernetes 1.36."""

    namespace: str
    claim: str
    pool: str
    device: str
    share: str


class ListedContainer(t.TypedDict):
    """A container that has devices, by PodResources."""

    name: str
    devices: list[ResourceDevices]
    claims: list[ListedClaim]


class ListedPod(t.TypedDict):
    """A pod that has devices, by PodResources."""

    namespace: str
    name: str
    containers: list[ListedContainer]


class PodResources(t.TypedDict):
    """kubelet's PodResources response; without pods unless ``state`` is ``ok``."""

    state: str
    problem: str
    pods: list[ListedPod]


class DeviceNodes(t.TypedDict):
    """The device nodes ``/dev/nvidiaN`` of a running container, by N, whoever created them.

    ``privileged``: its first process has all of the machine's rights, as a privileged container, which has all devices.
    """

    pod_uid: str
    container_id: str
    minors: list[int]
    privileged: bool


class RecordedShare(t.TypedDict):
    """A part of a card that a claim has, by the DRA driver's record of it."""

    request: str
    device: str
    share: str
    mib: int


class RecordedClaim(t.TypedDict):
    """The DRA driver's record of a claim that it has prepared; without shares where ``problem`` isn't empty."""

    uid: str
    namespace: str
    name: str
    shares: list[RecordedShare]
    problem: str


class SpecifiedClaim(t.TypedDict):
    """The CDI specification of a claim: the variables of each of its devices, none where ``problem`` isn't empty.

    ``recorded`` says whether the claim's record has the same specification.
    """

    uid: str
    envs: list[dict[str, str]]
    recorded: bool
    problem: str


class PreparedClaims(t.TypedDict):
    """The DRA driver's records and CDI specifications on this node; ``missing`` where it has never run."""

    state: str
    problem: str
    records: list[RecordedClaim]
    specifications: list[SpecifiedClaim]


class KubeletDevices(t.TypedDict):
    """Devices that a node's kubelet allocated, and those that containers have: None where /proc can't be read."""

    root: str
    checkpoint: Checkpoint
    pod_resources: PodResources
    sockets: list[str]
    device_nodes: list[DeviceNodes] | None
    prepared: PreparedClaims


def no_checkpoint(state: str, problem: str) -> Checkpoint:
    """Return a checkpoint that is missing, unreadable or unknown."""
    return {"state": state, "problem": problem, "entries": [], "registered": {}}


def no_pod_resources(state: str, problem: str) -> PodResources:
    """Return a PodResources response that is missing, unreadable or unknown."""
    return {"state": state, "problem": problem, "pods": []}
