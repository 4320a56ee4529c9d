# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's files and responses, encoded with the real protobuf and gRPC libraries."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from gpushare.kubelet import wire
from pod_resources_messages import MESSAGES

GPU = "GPU-5a4d7f2e-0000-4000-8000-000000000001"
POD = "3f0e2a54-8f5b-4f5c-9d62-0d8a3f4b7a10"
MEMORY = "aliyun.com/gpu-mem"


def allocate_response(
    envs: dict[str, str] | None = None,
    cdi: tuple[str, ...] = (),
    devices: tuple[str, ...] = (),
    annotations: dict[str, str] | None = None,
    mounts: tuple[str, ...] = (),
) -> bytes:
    """A device plugin's response for one container, as kubelet encodes it."""
    message = wire.message
    device, mount, cdi_device = (message(f"v1beta1.{one}") for one in ("DeviceSpec", "Mount", "CDIDevice"))
    return wire.encode(
        message("v1beta1.ContainerAllocateResponse")(
            envs=envs or {},
            mounts=[mount(container_path=one, host_path="/host" + one, read_only=True) for one in mounts],
            devices=[device(container_path=one, host_path="/host" + one, permissions="rw") for one in devices],
            annotations=annotations or {},
            cdi_devices=[cdi_device(name=one) for one in cdi],
        )
    )


def entry(ids: Any, resource: str = MEMORY, pod: str = POD, container: str = "main", response: bytes = b"") -> Any:
    return {
        "PodUID": pod,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": ids,
        "AllocResp": base64.b64encode(response).decode(),
    }


def document(*entries: Any, registered: Any = None, **top: Any) -> dict[str, Any]:
    return {
        "Data": {"PodDeviceEntries": list(entries), "RegisteredDevices": registered or {}},
        "Checksum": 3206411873,
        **top,
    }


def checkpoint(*entries: Any, registered: Any = None, **top: Any) -> bytes:
    """The file, as Go's encoding/json writes it: in one line, without blanks."""
    return json.dumps(document(*entries, registered=registered, **top), separators=(",", ":")).encode()


def list_response(pods: dict[str, dict[str, dict[str, list[str]]]]) -> bytes:
    """Response to List for "namespace/name" to containers to resources to IDs, with one message for each ID."""
    response = MESSAGES["v1.ListPodResourcesResponse"]()
    for key, containers in pods.items():
        namespace, _slash, name = key.partition("/")
        pod = response.pod_resources.add(namespace=namespace, name=name)
        for container, given in containers.items():
            row = pod.containers.add(name=container)
            for resource, ids in given.items():
                for one in ids:
                    row.devices.add(resource_name=resource, device_ids=[one])
    return wire.encode(response)


@contextlib.contextmanager
def pod_resources(
    socket: str, reply: Callable[[Any, grpc.ServicerContext], Any], path: str = wire.POD_RESOURCES.path
) -> Iterator[None]:
    """A real server of PodResources on a unix socket."""
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)], handlers=None)
    server.add_generic_rpc_handlers((wire.handlers({wire.POD_RESOURCES._replace(path=path): reply}),))
    assert server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
