# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the device IDs of each container from kubelet's PodResources API.

It is called for each pod and after each Allocate, and lists all pods of the node each time, with one message for each
device ID. So the connection is reused, and a pod whose bytes haven't changed isn't decoded again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import typing as t

import grpc
from gpushare.kubelet import wire
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.pod_resources import LIST_REQUEST, PodDevices, decode_pod, split_pods
from gpushare.shared._contracts.protobuf import MalformedMessage


@dataclasses.dataclass(frozen=True)
class Entry:
    """One pod that kubelet runs or is admitting.

    kubelet lists pods without their UID, and no plain init containers; callers have to consider both.

    :param containers: the plugin's IDs of each container; empty if it has none.
    """

    key: str
    containers: t.Mapping[str, tuple[str, ...]]

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(identifier for ids in self.containers.values() for identifier in ids)

    @functools.cached_property
    def lacking(self) -> bool:
        """Return whether a container has no IDs (yet)."""
        return not all(self.containers.values())

    @functools.cached_property
    def counts(self) -> t.Mapping[str, t.Mapping[str, int]]:
        """Return the number of IDs of each container by card, as :func:`grouped` identifies it."""
        return {
            name: {short: len(each) for short, each in grouped(ids).items()} for name, ids in self.containers.items()
        }

    @functools.cached_property
    def total(self) -> t.Mapping[str, int]:
        """Return the number of IDs of all containers by card."""
        counts_by_card: collections.Counter[str] = collections.Counter()
        for counts in self.counts.values():
            counts_by_card.update(counts)
        return counts_by_card


class Unreadable(Exception):
    """kubelet's PodResources can't be read."""


class PodResources(t.Protocol):
    """Access to kubelet's list; raises :class:`Unreadable`."""

    def list(self) -> list[Entry]: ...


def grouped(identifiers: t.Iterable[str]) -> dict[str, list[str]]:
    """Group device IDs by their short UUID, as :func:`contract.card_of_device_id` parses it, in the given order.

    Foreign IDs have the empty string. One call parses all, since a request may have thousands.
    """
    by_card: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    for identifier in identifiers:
        short, _dash, slot = identifier.rpartition("-")
        by_card[short if slot.isdigit() else ""].append(identifier)
    return by_card


def by_pod(listing: t.Sequence[Entry]) -> dict[str, Entry]:
    """Return the entries by their pods' keys, without the keys that are listed twice.

    kubelet gives no UID: a pod and its successor of the same name can't be distinguished while both are listed.
    """
    count = collections.Counter(entry.key for entry in listing)
    return {entry.key: entry for entry in listing if count[entry.key] == 1}


def entry(pod: PodDevices) -> Entry:
    """Return the IDs of gpushare's resource of a listed pod; of containers without any a number that pods may have."""
    containers: dict[str, tuple[str, ...]] = {}
    for container in pod.containers:
        ids = container.devices.get(contract.RESOURCE_MEMORY, ())
        if ids or len(containers) <= contract.MOST_CONTAINERS:
            containers[container.name] = ids
    return Entry(f"{pod.namespace}/{pod.name}", containers)


class KubeletPodResources:
    """The list from kubelet's own socket."""

    def __init__(self, socket: str, timeout: float = 2.0) -> None:
        self._socket = socket
        self._timeout = timeout
        self._connection = wire.Connection(socket, wire.POD_RESOURCES)
        self._known: dict[bytes, Entry] = {}

    def list(self) -> list[Entry]:
        try:
            rows = split_pods(self._connection.call(LIST_REQUEST, self._timeout))
            known = self._known
            now = {row: known.get(row) or entry(decode_pod(row, (contract.RESOURCE_MEMORY,))) for row in rows}
        except grpc.RpcError as error:
            raise Unreadable(f"kubelet's PodResources ({self._socket}) can't be read: {describe(error)}") from error
        except MalformedMessage as error:
            raise Unreadable(f"kubelet's PodResources ({self._socket}) can't be decoded: {error}") from error
        self._known = now
        return [now[row] for row in rows]

    def close(self) -> None:
        self._connection.close()


def describe(error: grpc.RpcError) -> str:
    """Describe a gRPC error."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return f"{code.name}: {details}" if code is not None else str(details)
