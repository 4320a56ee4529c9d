# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

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


class ListedContainer(t.TypedDict):
    """A container that has devices, by PodResources."""

    name: str
    devices: list[ResourceDevices]


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
    """The device nodes ``/dev/nvidiaN`` of a running container, by N, whoever created them."""

    pod_uid: str
    container_id: str
    minors: list[int]


class KubeletDevices(t.TypedDict):
    """Devices that a node's kubelet allocated, and those that containers have: None where /proc can't be read."""

    root: str
    checkpoint: Checkpoint
    pod_resources: PodResources
    sockets: list[str]
    device_nodes: list[DeviceNodes] | None


def no_checkpoint(state: str, problem: str) -> Checkpoint:
    """Return a checkpoint that is missing, unreadable or unknown."""
    return {"state": state, "problem": problem, "entries": [], "registered": {}}


def no_pod_resources(state: str, problem: str) -> PodResources:
    """Return a PodResources response that is missing, unreadable or unknown."""
    return {"state": state, "problem": problem, "pods": []}
