# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands in containers by the real library, against servers that answer as kubelet does, or as a hostile one."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import CommandFailed, PodExec
from kubernetes.client import ApiClient, Configuration

Serve = Callable[[socket.socket], None]
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SUCCESS = json.dumps({"metadata": {}, "status": "Success"}).encode()
FAILURE = json.dumps({"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}).encode()


def frame(channel: int, data: bytes, length: int | None = None) -> bytes:
    """A message of a channel; of a made-up length where one is given."""
    size = len(data) + 1 if length is None else length
    return b"\x82\x7f" + struct.pack(">Q", size) + bytes([channel]) + data


CLOSE = b"\x88\x02\x03\xe8"


def shaken(connection: socket.socket) -> str:
    """Answer the handshake, and return the request's first line."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(4096)
    key = next(line.split(b": ")[1] for line in request.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key.strip() + MAGIC).digest())
    connection.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )
    return request.split(b"\r\n")[0].decode()


@contextlib.contextmanager
def served(serve: Serve, **limits: float) -> Iterator[PodExec]:
    """What runs commands on an API server of which every connection is served so."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _address = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        configuration = Configuration(host=f"http://127.0.0.1:{listening.getsockname()[1]}")
        kube = SimpleNamespace(api_client=ApiClient(configuration))
        yield PodExec(kube, **{"seconds": 5.0, **limits})  # type: ignore[arg-type]


def run(execute: PodExec) -> str:
    return execute("gpushare-system", "plugin-x", "device-plugin", ["gpushare-node-facts", "--timeout=30"])


def test_a_command_and_its_output() -> None:
    requests: list[str] = []

    def serve(connection: socket.socket) -> None:
        requests.append(shaken(connection))
        for piece in (b'{"a":', b" 1}"):
            connection.sendall(frame(1, piece))
        connection.sendall(frame(2, b"noise") + frame(3, SUCCESS) + CLOSE)
        connection.recv(100)

    with served(serve) as execute:
        assert [run(execute) for _time in range(2)] == ['{"a": 1}'] * 2
    path = "/api/v1/namespaces/gpushare-system/pods/plugin-x/exec?"
    query = "container=device-plugin&command=gpushare-node-facts&command=--timeout%3D30"
    assert requests[0].startswith(f"GET {path}") and set(query.split("&")) <= set(
        requests[0].split()[1].split("?")[1].split("&")
    )


def test_calls_may_overlap() -> None:
    """Each has a client of its own: the library replaces a method of the one that it is given."""
    both = threading.Barrier(2)

    def serve(connection: socket.socket) -> None:
        shaken(connection)
        both.wait(5)
        connection.sendall(frame(1, b"x") + frame(3, SUCCESS) + CLOSE)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        client = ApiClient(Configuration(host=f"http://127.0.0.1:{listening.getsockname()[1]}"))
        execute, outputs = PodExec(SimpleNamespace(api_client=client), 5.0), list[str]()  # type: ignore[arg-type]
        calls = [threading.Thread(target=lambda: outputs.append(run(execute))) for _call in range(2)]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    assert outputs == ["x", "x"]


def test_an_exit_status() -> None:
    def serve(connection: socket.socket) -> None:
        shaken(connection)
        connection.sendall(frame(2, b"no\nsuch thing") + frame(3, FAILURE) + CLOSE)

    with (
        served(serve) as execute,
        pytest.raises(CommandFailed, match="node-facts ended with 7: no such thing") as failed,
    ):
        run(execute)
    assert failed.value.status == 7


def test_a_refusal_has_the_api_servers_words() -> None:
    body = json.dumps({"kind": "Status", "message": "pods is forbidden"}, separators=(",", ":")).encode()

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with served(serve) as execute, pytest.raises(CommandFailed, match=r"exec in pod plugin-x: pods is forbidden$"):
        run(execute)


def endless(connection: socket.socket) -> None:
    shaken(connection)
    while True:
        connection.sendall(frame(1, b"x" * 65536))


def endless_frame(connection: socket.socket) -> None:
    shaken(connection)
    connection.sendall(frame(1, b"", 1 << 40))
    while True:
        connection.sendall(b"x" * 65536)


def long_error(connection: socket.socket) -> None:
    shaken(connection)
    connection.sendall(frame(3, b"[" * 200_000) + CLOSE)


def unfinished(connection: socket.socket) -> None:
    shaken(connection)
    connection.sendall(frame(1, b"{}") + CLOSE)


def growing(connection: socket.socket) -> None:
    """As YAML, each level has eight times the entries of the one before."""
    shaken(connection)
    levels = [f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * 8)}]}}" for at in range(1, 12)]
    connection.sendall(frame(3, "\n".join(["a0: &a0 {k: v}", *levels]).encode()) + CLOSE)


def garbage(connection: socket.socket) -> None:
    shaken(connection)
    connection.sendall(frame(3, b"- [}") + CLOSE)


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (endless, "its output is larger than 1000000 bytes"),
        (endless_frame, "its output is larger than 1000000 bytes"),
        (long_error, "kubelet's report of its end is too long"),
        (unfinished, "the connection ended before the command"),
        (growing, "the connection ended before the command"),
        (garbage, "the connection ended before the command"),
    ],
    ids=["endless", "endless-frame", "long-error", "unfinished", "growing", "garbage"],
)
def test_a_hostile_kubelet_is_limited_in_size(serve: Serve, message: str) -> None:
    began = time.monotonic()
    with served(serve, most=1_000_000) as execute, pytest.raises(CommandFailed, match=message):
        run(execute)
    assert time.monotonic() - began < 4.5


def silent(connection: socket.socket) -> None:
    connection.recv(4096)
    time.sleep(3)


def stalled(connection: socket.socket) -> None:
    shaken(connection)
    connection.sendall(frame(1, b"", 1000))
    time.sleep(3)


def dripping(connection: socket.socket) -> None:
    shaken(connection)
    connection.sendall(frame(1, b"", 1 << 20))
    for _byte in itertools.repeat(b"x", 60):
        connection.sendall(_byte)
        time.sleep(0.05)


@pytest.mark.parametrize("serve", [silent, stalled, dripping], ids=["silent", "stalled", "dripping"])
def test_a_hostile_kubelet_is_limited_in_time(serve: Serve) -> None:
    began = time.monotonic()
    with served(serve, seconds=0.5) as execute, pytest.raises(CommandFailed, match=r"didn't end within 0\.5 s"):
        run(execute)
    assert time.monotonic() - began < 1.5
