# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's PodResources interface: which container really has which of our device IDs. The truth of a node.

It is asked with each pod and after each Allocate, and lists all pods of the node each time, with one message for each
device ID. So the connection is kept, and a pod whose bytes are those of the last time isn't read again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import typing as t

import grpc

from gpushare import contract, wire


@dataclasses.dataclass(frozen=True)
class Entry:
    """One pod that kubelet runs or is admitting.

    kubelet names pods without UID and leaves plain init containers out; both are the reader's concern.

    :param containers: our IDs of each container; empty where it has none.
    """

    key: str
    containers: t.Mapping[str, tuple[str, ...]]

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(one for ids in self.containers.values() for one in ids)

    @functools.cached_property
    def lacking(self) -> bool:
        """A container has none (yet): kubelet may be about to ask for some."""
        return not all(self.containers.values())

    @functools.cached_property
    def counts(self) -> t.Mapping[str, t.Mapping[str, int]]:
        """How many IDs of which card each container has; the cards as the IDs name them, see :func:`grouped`."""
        return {
            name: {short: len(each) for short, each in grouped(ids).items()} for name, ids in self.containers.items()
        }

    @functools.cached_property
    def total(self) -> t.Mapping[str, int]:
        """The same for all of its containers."""
        found: collections.Counter[str] = collections.Counter()
        for counts in self.counts.values():
            found.update(counts)
        return found


class Unreadable(Exception):
    """kubelet's PodResources can't be read, in one sentence."""


class PodResources(t.Protocol):
    """The door; raises Unreadable."""

    def list(self) -> list[Entry]: ...


def grouped(identifiers: t.Iterable[str]) -> dict[str, list[str]]:
    """Device IDs by the short UUID in them, as :func:`contract.card_of_device_id` finds it, in the order that they
    come in; under the empty text those that aren't ours. In one go, because a request may have thousands.
    """
    found: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    for identifier in identifiers:
        short, _dash, slot = identifier.rpartition("-")
        found[short if slot.isdigit() else ""].append(identifier)
    return found


def entry(pod: t.Any) -> Entry:
    """A PodResources message, with the IDs of our resource alone."""
    containers: dict[str, tuple[str, ...]] = {}
    for container in pod.containers:
        ids: list[str] = []
        for devices in container.devices:
            # kubelet sends one such entry for each device ID.
            if devices.resource_name == contract.RESOURCE_MEMORY:
                ids.extend(devices.device_ids)
        containers[container.name] = tuple(ids)
    return Entry(f"{pod.namespace}/{pod.name}", containers)


class KubeletPodResources:
    """The real door, on kubelet's own socket."""

    def __init__(self, socket: str, timeout: float = 2.0) -> None:
        self._socket = socket
        self._timeout = timeout
        self._connection = wire.Connection(socket, wire.LISTED_PODS)
        self._request = wire.message(wire.LISTED_PODS.request)()
        self._read = wire.decoder(wire.POD_RESOURCES)
        self._known: dict[bytes, Entry] = {}

    def list(self) -> list[Entry]:
        try:
            rows = list(self._connection.call(self._request, self._timeout).pod_resources)
        except grpc.RpcError as error:
            raise Unreadable(f"kubelet's PodResources ({self._socket}) can't be read: {describe(error)}") from error
        known = self._known
        now = {row: known.get(row) or entry(self._read(row)) for row in rows}
        self._known = now
        return [now[row] for row in rows]

    def close(self) -> None:
        self._connection.close()


def describe(error: grpc.RpcError) -> str:
    """A gRPC error in a few words."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return f"{code.name}: {details}" if code is not None else str(details)
