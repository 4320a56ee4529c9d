# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's PodResources interface: which container really has which of our device IDs. The truth of a node."""

from __future__ import annotations

import dataclasses
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

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(one for ids in self.containers.values() for one in ids)


class Unreadable(Exception):
    """kubelet's PodResources can't be read, in one sentence."""


class PodResources(t.Protocol):
    """The door; raises Unreadable."""

    def list(self) -> list[Entry]: ...


def entries(response: t.Any) -> list[Entry]:
    """The pods of a ListPodResourcesResponse, with the IDs of our resource alone."""
    found = []
    for pod in response.pod_resources:
        containers: dict[str, tuple[str, ...]] = {}
        for container in pod.containers:
            ids: list[str] = []
            for devices in container.devices:
                # kubelet sends one such entry for each device ID.
                if devices.resource_name == contract.RESOURCE_MEMORY:
                    ids.extend(devices.device_ids)
            containers[container.name] = tuple(ids)
        found.append(Entry(f"{pod.namespace}/{pod.name}", containers))
    return found


class KubeletPodResources:
    """The real door, on kubelet's own socket."""

    def __init__(self, socket: str, timeout: float = 2.0) -> None:
        self._socket = socket
        self._timeout = timeout

    def list(self) -> list[Entry]:
        try:
            request = wire.message(wire.POD_RESOURCES_LIST.request)()
            return entries(wire.call(self._socket, wire.POD_RESOURCES_LIST, request, self._timeout))
        except grpc.RpcError as error:
            raise Unreadable(f"kubelet's PodResources ({self._socket}) can't be read: {describe(error)}") from error


def describe(error: grpc.RpcError) -> str:
    """A gRPC error in a few words."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return f"{code.name}: {details}" if code is not None else str(details)
