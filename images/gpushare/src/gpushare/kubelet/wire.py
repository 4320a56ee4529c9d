# SPDX-License-Identifier: GPL-3.0-or-later
"""gRPC and protobuf of kubelet's device plugin API (v1beta1), and calls on kubelet's sockets.

The messages are a table of fields and numbers from which protobuf classes are created, so there is no generated code.
Message classes are dynamic, hence ``Any``; the rest of the package uses the typed functions below. A node of
many small units has lists of megabytes. Source: kubernetes v1.36.0,
staging/src/k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto.
"""

from __future__ import annotations

import threading
import time
import typing as t

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.pod_resources import LIST

VERSION = "v1beta1"

# A list of 100,000 device IDs has 5 MB, which is more than gRPC's own limit of 4 MiB; decoded it takes some times that.
MESSAGE_BYTES = 32 * 1024 * 1024
CHANNEL: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
)

# Message -> field -> (number, type). A type is a scalar, another message of the same package, or a map<string,…> to one
# of both; [] behind it: repeated. Fields that we neither write nor read are left out; protobuf skips them.
Fields = t.Mapping[str, tuple[int, str]]
Table = t.Mapping[str, t.Mapping[str, Fields]]
_TABLE: Table = {
    "v1beta1": {
        "Empty": {},
        "DevicePluginOptions": {
            "pre_start_required": (1, "bool"),
            "get_preferred_allocation_available": (2, "bool"),
        },
        "RegisterRequest": {
            "version": (1, "string"),
            "endpoint": (2, "string"),
            "resource_name": (3, "string"),
            "options": (4, "DevicePluginOptions"),
        },
        "NUMANode": {"ID": (1, "int64")},
        "TopologyInfo": {"nodes": (1, "NUMANode[]")},
        "Device": {"ID": (1, "string"), "health": (2, "string"), "topology": (3, "TopologyInfo")},
        "ListAndWatchResponse": {"devices": (1, "Device[]")},
        "ContainerPreferredAllocationRequest": {
            "available_deviceIDs": (1, "string[]"),
            "must_include_deviceIDs": (2, "string[]"),
            "allocation_size": (3, "int32"),
        },
        "PreferredAllocationRequest": {"container_requests": (1, "ContainerPreferredAllocationRequest[]")},
        "ContainerPreferredAllocationResponse": {"deviceIDs": (1, "string[]")},
        "PreferredAllocationResponse": {"container_responses": (1, "ContainerPreferredAllocationResponse[]")},
        "ContainerAllocateRequest": {"devices_ids": (1, "string[]")},
        "AllocateRequest": {"container_requests": (1, "ContainerAllocateRequest[]")},
        "Mount": {"container_path": (1, "string"), "host_path": (2, "string"), "read_only": (3, "bool")},
        "DeviceSpec": {"container_path": (1, "string"), "host_path": (2, "string"), "permissions": (3, "string")},
        "CDIDevice": {"name": (1, "string")},
        "ContainerAllocateResponse": {
            "envs": (1, "map<string,string>"),
            "mounts": (2, "Mount[]"),
            "devices": (3, "DeviceSpec[]"),
            "annotations": (4, "map<string,string>"),
            "cdi_devices": (5, "CDIDevice[]"),
        },
        "AllocateResponse": {"container_responses": (1, "ContainerAllocateResponse[]")},
        "PreStartContainerRequest": {"devices_ids": (1, "string[]")},
        "PreStartContainerResponse": {},
    },
}

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS: t.Mapping[str, _FIELD.Type.ValueType] = {
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
}


class Messages:
    """The classes of a table's messages, by ``package.Message``, in a descriptor pool of their own."""

    def __init__(self, table: Table) -> None:
        pool = descriptor_pool.DescriptorPool()
        self._classes: dict[str, t.Any] = {}
        for package, messages in table.items():
            file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
            for message_name, fields in messages.items():
                message = file.message_type.add(name=message_name)
                for field_name, (number, kind) in fields.items():
                    _add_field(package, message, field_name, number, kind)
            pool.Add(file)
            for message_name in messages:
                full = f"{package}.{message_name}"
                self._classes[full] = message_factory.GetMessageClass(pool.FindMessageTypeByName(full))

    def __getitem__(self, name: str) -> t.Any:
        return self._classes[name]


def _add_field(package: str, message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("map<string,"):
        # On the wire a map is a repeated message of key (1) and value (2).
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add_field(package, entry, "key", 1, "string")
        _add_field(package, entry, "value", 2, kind.removeprefix("map<string,").removesuffix(">"))
        field.label = _FIELD.LABEL_REPEATED
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{package}.{message.name}.{entry.name}"
        return
    if kind.endswith("[]"):
        kind, field.label = kind[:-2], _FIELD.LABEL_REPEATED
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{package}.{kind}"


_CLASSES = Messages(_TABLE)


def message(name: str) -> t.Any:
    """Return the class of one message, for example ``v1beta1.Device``."""
    return _CLASSES[name]


class Method(t.NamedTuple):
    """One remote procedure: its path, the messages in and out, their classes, and whether it has many answers."""

    path: str
    request: str
    response: str
    classes: Messages = _CLASSES
    stream: bool = False


REGISTER = Method("/v1beta1.Registration/Register", "v1beta1.RegisterRequest", "v1beta1.Empty")
OPTIONS = Method("/v1beta1.DevicePlugin/GetDevicePluginOptions", "v1beta1.Empty", "v1beta1.DevicePluginOptions")
LIST_AND_WATCH = Method(
    "/v1beta1.DevicePlugin/ListAndWatch", "v1beta1.Empty", "v1beta1.ListAndWatchResponse", stream=True
)
PREFERRED = Method(
    "/v1beta1.DevicePlugin/GetPreferredAllocation",
    "v1beta1.PreferredAllocationRequest",
    "v1beta1.PreferredAllocationResponse",
)
ALLOCATE = Method("/v1beta1.DevicePlugin/Allocate", "v1beta1.AllocateRequest", "v1beta1.AllocateResponse")
PRE_START = Method(
    "/v1beta1.DevicePlugin/PreStartContainer", "v1beta1.PreStartContainerRequest", "v1beta1.PreStartContainerResponse"
)
# The answer is decoded by the caller, who keeps the pods that haven't changed.
POD_RESOURCES = Method(LIST, "", "")


def encode(value: t.Any) -> bytes:
    """Encode a message; bytes are returned unchanged."""
    return value if isinstance(value, bytes) else t.cast(bytes, value.SerializeToString())


def decoder(name: str, classes: Messages = _CLASSES) -> t.Callable[[bytes], t.Any]:
    """Return the decoder of a message; an empty name leaves the bytes as they are."""
    return t.cast(t.Callable[[bytes], t.Any], classes[name].FromString) if name else bytes


def connect(socket: str) -> grpc.Channel:
    """Open a channel to a unix socket that shares no connection, and no back-off after a failure, with another one."""
    return grpc.insecure_channel(f"unix:{socket}", options=[*CHANNEL, ("grpc.use_local_subchannel_pool", 1)])


def call(socket: str, method: Method, request: t.Any, timeout: float) -> t.Any:
    """Call once on a new connection, since kubelet replaces its sockets when it restarts.

    :param socket: the path of kubelet's Unix socket.
    :param request: a message of the method's request type.
    :param timeout: in seconds.
    :returns: the answer, a message of the method's response type.
    :raises grpc.RpcError: no answer in time, or an error as the answer.
    """
    with connect(socket) as channel:
        stub = channel.unary_unary(
            method.path, request_serializer=encode, response_deserializer=decoder(method.response, method.classes)
        )
        return stub(request, timeout=timeout)


class Connection:
    """One method on a unix socket over a persistent connection, since opening one takes longer than most calls.

    After any failure the next call opens a new connection, without the back-off of the old one. Thread-safe: a call
    that another thread interrupts by closing the broken connection is repeated.
    """

    def __init__(self, socket: str, method: Method) -> None:
        self._socket = socket
        self._method = method
        self._lock = threading.Lock()
        self._open: tuple[grpc.Channel, t.Callable[..., t.Any]] | None = None

    def call(self, request: t.Any, timeout: float) -> t.Any:
        """Call the method.

        :raises grpc.RpcError: no answer in time, or an error as the answer.
        """
        end = time.monotonic() + timeout
        try:
            return self._once(request, timeout)
        except (grpc.RpcError, ValueError) as error:
            # The connection of a restarted server is broken; ValueError: it was closed by another thread.
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.CANCELLED
            if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
        return self._once(request, max(0.001, end - time.monotonic()))

    def close(self) -> None:
        self._drop(self._open)

    def _once(self, request: t.Any, timeout: float) -> t.Any:
        with self._lock:
            if self._open is None:
                channel = connect(self._socket)
                self._open = (
                    channel,
                    channel.unary_unary(
                        self._method.path,
                        request_serializer=encode,
                        response_deserializer=decoder(self._method.response, self._method.classes),
                    ),
                )
            used = self._open
        try:
            return used[1](request, timeout=timeout)
        except (grpc.RpcError, ValueError):
            self._drop(used)
            raise

    def _drop(self, used: tuple[grpc.Channel, t.Callable[..., t.Any]] | None) -> None:
        with self._lock:
            if self._open is used:
                self._open = None
        if used is not None:
            used[0].close()


def handlers(methods: t.Mapping[Method, t.Callable[[t.Any, grpc.ServicerContext], t.Any]]) -> grpc.GenericRpcHandler:
    """Create the handlers of one service; a method with many answers has a generator function."""
    by_name: dict[str, grpc.RpcMethodHandler[t.Any, t.Any]] = {}
    service = ""
    for method, function in methods.items():
        _root, service, name = method.path.split("/")
        make = grpc.unary_stream_rpc_method_handler if method.stream else grpc.unary_unary_rpc_method_handler
        by_name[name] = make(
            function, request_deserializer=decoder(method.request, method.classes), response_serializer=encode
        )
    return grpc.method_handlers_generic_handler(service, by_name)


# --------------------------------------------------------------------------- typed edges


class Ask(t.NamedTuple):
    """kubelet's request for one container: so many of the available IDs, including the required ones."""

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


class Answer(t.NamedTuple):
    """A container's environment variables, and its devices by their CDI names."""

    envs: t.Mapping[str, str]
    cdi_devices: tuple[str, ...] = ()


def options() -> t.Any:
    """Return the plugin's options: it answers GetPreferredAllocation, and needs no PreStartContainer."""
    return message("v1beta1.DevicePluginOptions")(get_preferred_allocation_available=True)


def register_request(endpoint: str) -> t.Any:
    return message("v1beta1.RegisterRequest")(
        version=VERSION, endpoint=endpoint, resource_name=contract.RESOURCE_MEMORY, options=options()
    )


def device_list(cards: t.Sequence[contract.Card], withheld: t.Container[str] = ()) -> bytes:
    """Encode a ListAndWatchResponse with one device for each unit of each card.

    Without topology, because with it kubelet would allocate a NUMA node's devices without GetPreferredAllocation.

    :param withheld: IDs that are unhealthy also on a healthy card.
    """
    shorts = contract.short_uuids([card.uuid for card in cards])
    response = message("v1beta1.ListAndWatchResponse")()
    add = response.devices.add
    for card in cards:
        for slot in range(card.units):
            identifier = contract.device_id(shorts[card.uuid], slot)
            usable = card.healthy and identifier not in withheld
            add(ID=identifier, health=contract.HEALTHY if usable else contract.UNHEALTHY)
    return encode(response)


def asks(request: t.Any) -> list[Ask]:
    return [
        Ask(
            tuple(container_request.available_deviceIDs),
            tuple(container_request.must_include_deviceIDs),
            int(container_request.allocation_size),
        )
        for container_request in request.container_requests
    ]


def preferred_response(choices: t.Iterable[t.Sequence[str]]) -> t.Any:
    container_response = message("v1beta1.ContainerPreferredAllocationResponse")
    return message("v1beta1.PreferredAllocationResponse")(
        container_responses=[container_response(deviceIDs=list(ids)) for ids in choices]
    )


def allocations(request: t.Any) -> list[tuple[str, ...]]:
    return [tuple(container_request.devices_ids) for container_request in request.container_requests]


def allocate_response(answers: t.Iterable[Answer]) -> t.Any:
    container_response = message("v1beta1.ContainerAllocateResponse")
    device = message("v1beta1.CDIDevice")
    return message("v1beta1.AllocateResponse")(
        container_responses=[
            container_response(envs=dict(answer.envs), cdi_devices=[device(name=name) for name in answer.cdi_devices])
            for answer in answers
        ]
    )
