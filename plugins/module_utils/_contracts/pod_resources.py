# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's PodResources API (v1): which container has which device IDs. Standard library only, no I/O.

Source: kubernetes/kubernetes v1.36.0, staging/src/k8s.io/kubelet/pkg/apis/podresources/v1/api.proto. kubelet names pods
without a UID, sends one message for each device ID, and omits plain init containers; older versions also list
finished pods. Before 1.34 it doesn't list claims, unless a feature gate is on, and before 1.36 no share's ID. The
servers' image takes this file and ``protobuf.py``.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .protobuf import decode_fields, decode_string, decode_strings

LIST = "/v1.PodResourcesLister/List"
# ListPodResourcesRequest has no fields.
LIST_REQUEST = b""


@dataclasses.dataclass(frozen=True)
class ClaimedDevice:
    """A device that a container has by a ResourceClaim.

    :param share: the ID of its part of the device; empty without one.
    """

    namespace: str
    claim: str
    pool: str
    device: str
    share: str


@dataclasses.dataclass(frozen=True)
class ContainerDevices:
    """One container.

    :param devices: device IDs by resource, each ID once, in kubelet's order; empty if it has none.
    :param claimed: of the wanted driver, in kubelet's order.
    """

    name: str
    devices: t.Mapping[str, tuple[str, ...]]
    claimed: tuple[ClaimedDevice, ...] = ()


@dataclasses.dataclass(frozen=True)
class PodDevices:
    """One pod with all of its containers that kubelet lists."""

    namespace: str
    name: str
    containers: tuple[ContainerDevices, ...]


def split_pods(response: bytes) -> list[bytes]:
    """Split a ListPodResourcesResponse into its PodResources messages, so that an unchanged pod can be skipped.

    :raises MalformedMessage: it isn't such a message.
    """
    return decode_fields(response, (1,)).get(1, [])


def decode_pod(message: bytes, resources: tuple[str, ...], driver: str = "") -> PodDevices:
    """Decode one PodResources message.

    :param resources: prefixes of the resource names to return; all others are dropped.
    :param driver: whose devices of claims to return; empty for none.
    :raises MalformedMessage: it isn't such a message.
    """
    fields = decode_fields(message, (1, 2, 3))
    return PodDevices(
        namespace=decode_string(fields.get(2)),
        name=decode_string(fields.get(1)),
        containers=tuple(_container(container, resources, driver) for container in fields.get(3, ())),
    )


def _container(message: bytes, resources: tuple[str, ...], driver: str) -> ContainerDevices:
    fields = decode_fields(message, (1, 2, 5) if driver else (1, 2))
    # A dict keeps the order of the IDs and drops duplicates.
    listed: dict[str, dict[str, None]] = {}
    for entry in fields.get(2, ()):
        devices = decode_fields(entry, (1, 2))
        resource = decode_string(devices.get(1))
        if resource.startswith(resources):
            listed.setdefault(resource, {}).update(dict.fromkeys(decode_strings(devices.get(2))))
    ids = {resource: tuple(names) for resource, names in listed.items()}
    claimed = tuple(device for claim in fields.get(5, ()) for device in _claimed(claim, driver))
    return ContainerDevices(decode_string(fields.get(1)), ids, claimed)


def _claimed(message: bytes, driver: str) -> t.Iterator[ClaimedDevice]:
    """Return the devices of a DynamicResource."""
    fields = decode_fields(message, (2, 3, 4))
    claim, namespace = decode_string(fields.get(2)), decode_string(fields.get(3))
    for claimed in fields.get(4, ()):
        device = decode_fields(claimed, (2, 3, 4, 5))
        if decode_string(device.get(2)) == driver:
            pool, name, share = (decode_string(device.get(number)) for number in (3, 4, 5))
            yield ClaimedDevice(namespace, claim, pool, name, share)
