# SPDX-License-Identifier: GPL-3.0-or-later
"""Anonymous clients at the servers' ports: connections without a request, slow ones, bodies without an end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import typing as t
from collections.abc import Iterator
from pathlib import Path

import gpushare
import pytest
from api_double import make_node, served
from extender_kit import eventually, is_open
from gpushare.http.limits import Limits
from gpushare.http.server import Endpoint
from gpushare.http.service import METRICS_LIMITS, Request, Response, Service, text
from metrics_reader import TOKEN, PluginReviewer, Reviewer
from service_account import service_account
from tls_files import Files
from unix_http import ask_socket

# Of both servers, whatever anonymous clients send.
MEMORY_MIB = 128
GIB = 1 << 30


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))


# ----------------------------------------------------------------- limits of anonymous clients


def guard(request: Request) -> Response | None:
    return None if request.authorization == f"Bearer {TOKEN}" else text("no", 401)


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A server of metrics with the test's limits."""
    endpoint = Endpoint(trusted=False)
    service = Service("t", endpoint, {("GET", "/metrics"): lambda _: text("numbers")}, guard, request.param)
    service.start()
    yield service
    service.stop()


def read(port: int, source: str = "127.0.0.1", token: str = TOKEN) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(source, 0))
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status


@pytest.mark.parametrize("service", [Limits(connections=16, anonymous=8, peer=4, head=60)], indirect=True)
def test_an_address_has_only_its_share_of_connections(service: Service) -> None:
    others = [connected(service.port, "127.0.0.3") for _number in range(3)]
    greedy = [connected(service.port, "127.0.0.2") for _number in range(50)]
    for one in [*others, *greedy]:
        with contextlib.suppress(OSError):
            one.sendall(b"G")
    eventually(lambda: sum(map(is_open, greedy)) == 4)
    assert all(map(is_open, greedy[-4:])), "the oldest ones end"
    assert all(map(is_open, others))
    assert read(service.port) == 200
    for one in [*others, *greedy]:
        one.close()


@pytest.mark.parametrize("service", [Limits(connections=16, anonymous=8, peer=4, head=60)], indirect=True)
def test_an_address_with_many_connections_loses_one_for_a_new_address(service: Service) -> None:
    greedy = [connected(service.port, f"127.0.0.{2 + number % 2}") for number in range(8)]
    modest = [connected(service.port, f"127.0.1.{number + 1}") for number in range(4)]
    eventually(lambda: sum(map(is_open, greedy)) == 4)
    assert all(map(is_open, modest))
    for one in [*greedy, *modest]:
        one.close()


@pytest.mark.parametrize("service", [Limits(connections=6, anonymous=4, peer=4, head=60)], indirect=True)
def test_an_authorized_client_keeps_its_connection(service: Service) -> None:
    known = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    with contextlib.closing(known):
        for _round in range(3):
            known.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            assert known.getresponse().read() == b"numbers\n"
            before = known.sock
            clients = [connected(service.port) for _number in range(20)]
            known.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            assert known.getresponse().read() == b"numbers\n" and known.sock is before
            for client in clients:
                client.close()


@pytest.mark.parametrize("service", [METRICS_LIMITS], indirect=True)
def test_a_refused_client_is_sent_away(service: Service) -> None:
    with connected(service.port) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 2)
        answered = b""
        while data := client.recv(1000):
            answered += data
    assert answered.count(b"HTTP/1.1 401 ") == 1 and b"Connection: close" in answered


@pytest.mark.parametrize("service", [Limits(head=0.4)], indirect=True)
@pytest.mark.parametrize("data", [b"", b"G", b"GET /metrics HTTP/1.1\r\nA: b\r\n"])
def test_a_head_has_a_deadline_from_the_first_moment(service: Service, data: bytes) -> None:
    with connected(service.port) as slow:
        slow.sendall(data)
        # It may be reset, as it hasn't read everything.
        with contextlib.suppress(ConnectionError):
            assert slow.recv(1) == b""


@pytest.mark.parametrize("service", [METRICS_LIMITS], indirect=True)
@pytest.mark.parametrize(
    "head", [b"Content-Length: 4097", b"Content-Length: 9999999999999", b"Transfer-Encoding: chunked"]
)
def test_an_anonymous_client_sends_no_large_body(service: Service, head: bytes) -> None:
    with connected(service.port) as client:
        client.sendall(b"POST /metrics HTTP/1.1\r\n" + head + b"\r\n\r\n")
        if b"chunked" in head:
            client.sendall(b"1001\r\n" + b"x" * 4097 + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


# ----------------------------------------------------------------- the real commands


class Command:
    """One of the commands as a process, with its metrics served by TLS."""

    def __init__(self, module: str, folder: Path, files: Files, *options: str) -> None:
        self.status_socket, self._log = folder / "status.sock", folder / "log"
        self._files = files
        words = [sys.executable, "-m", module, "--log-format=json", f"--status-socket={self.status_socket}", *options]
        words += ["--metrics-address=127.0.0.1", "--metrics-port=0"]
        words += [f"--metrics-tls-cert={files.cert}", f"--metrics-tls-key={files.key}"]
        source = str(Path(gpushare.__file__).parents[1])
        with self._log.open("wb") as stream:
            self.process = subprocess.Popen(
                words,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": source},
                stdin=subprocess.DEVNULL,
                stderr=stream,
            )

    def started(self) -> dict[str, t.Any]:
        """The fields of the line of the log that names the ports."""

        def line() -> str:
            assert self.process.poll() is None, self._log.read_text()
            return next((row for row in self._log.read_text().splitlines() if '"metrics":' in row), "")

        return t.cast(dict[str, t.Any], json.loads(eventually(line, 60)))

    def most(self) -> int:
        """The largest resident size so far, in MiB."""
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert match is not None
        return int(match[1]) // 1024

    def read_metrics(self, port: int) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=self._files.client(), timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            return connection.getresponse().status

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(20) == 0
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module", params=["extender", "device plugin"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("c")
    files = Files(folder)
    extender = request.param == "extender"
    api = Reviewer() if extender else PluginReviewer()
    api.put("nodes", make_node("a", 16))
    with served(api) as url:
        account = service_account(folder, url)
        if extender:
            running = Command("gpushare.extender.command", folder, files, "--port=0", *account)
        else:
            given = ["--node-name=a", f"--kubelet-dir={folder}", *account]
            running = Command("gpushare.plugin.command", folder, files, *given)
        running.started()
        yield running
        running.end()


def test_one_byte_connections_stop_neither_probes_nor_metrics(command: Command) -> None:
    facts = command.started()
    for port in sorted({facts["metrics"], facts.get("port", facts["metrics"])}):
        silent = [connected(port) for _number in range(500)]
        try:
            for connection in silent:
                with contextlib.suppress(OSError):
                    connection.sendall(b"\x16")
            for _round in range(5):
                assert ask_socket(command.status_socket, "/healthz") == (200, "ok")
                assert command.read_metrics(facts["metrics"]) == 200
        finally:
            for connection in silent:
                connection.close()
    assert command.most() < MEMORY_MIB


def endless(connection: socket.socket, path: str) -> int:
    """Send a body of a GiB in chunks, until the server refuses it; the bytes that were sent."""
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    sent = 0
    connection.sendall(f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    with contextlib.suppress(OSError):
        while sent < GIB:
            connection.sendall(chunk)
            sent += len(chunk)
    return sent


def test_a_gibibyte_to_every_port_takes_no_memory(command: Command) -> None:
    facts = command.started()
    places = [("metrics", "/metrics"), ("metrics", "/gpushare-scheduler/filter")]
    if "port" in facts:
        places += [
            ("port", path) for path in ("/gpushare-scheduler/filter", "/gpushare-scheduler/bind", "/", "/readyz")
        ]
    for name, path in places:
        with contextlib.ExitStack() as stack:
            streams = []
            for _number in range(4):
                plain = stack.enter_context(connected(facts[name]))
                if name == "metrics":
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                    plain = stack.enter_context(context.wrap_socket(plain))
                streams.append(plain)
            assert all(endless(stream, path) < GIB for stream in streams), "it isn't refused"
    with socket.socket(socket.AF_UNIX) as local:
        local.connect(str(command.status_socket))
        assert endless(local, "/healthz") < GIB
    assert ask_socket(command.status_socket, "/healthz") == (200, "ok")
    assert command.most() < MEMORY_MIB


def test_whole_bodies_at_once_are_bounded(command: Command) -> None:
    """Many schedulers' bodies, all of them unfinished, of which each alone would be accepted."""
    facts = command.started()
    if "port" not in facts:
        pytest.skip("no scheduler asks the device plugin")
    with contextlib.ExitStack() as stack:
        for _number in range(40):
            one = stack.enter_context(connected(facts["port"]))
            with contextlib.suppress(OSError):
                one.sendall(
                    b"POST /gpushare-scheduler/filter HTTP/1.1\r\nContent-Length: 8388608\r\n\r\n" + b"x" * 8_000_000
                )
        assert ask_socket(command.status_socket, "/healthz") == (200, "ok")
    assert command.most() < MEMORY_MIB
