# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender where others can reach it: TLS, client certificates, files that are replaced while it runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpushare
import pytest
from api_double import ApiDouble, make_pod, served
from extender_kit import Client, eventually
from gpushare.extender import command
from gpushare.http import tls
from gpushare.http.service import Request, Response, Service, answer
from gpushare.http.tls import Tls, is_loopback, tls_options
from prometheus_client import CollectorRegistry
from real_apiserver import _Authority
from service_account import service_account

Start = Callable[..., Client]


class Files:
    """What a Secret mounts for the server, and what clients have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.authority = self.other = self.new("authority")
        self.other = self.new("other")
        self.cert, self.key, self.ca = (folder / name for name in ("tls.crt", "tls.key", "ca.crt"))
        self.give()

    def new(self, name: str) -> _Authority:
        return _Authority(self.folder / name)

    def give(self) -> None:
        """The server gets a new certificate."""
        self.count += 1
        files = self.authority.sign(f"serving{self.count}", "gpushare-extender", server=True)
        pairs = [(files[0], self.cert), (files[1], self.key), (self.authority.folder / "ca.crt", self.ca)]
        for source, place in pairs:
            # As a mounted Secret is replaced: there is never half a file.
            shutil.copy(source, f"{place}.new")
            os.replace(f"{place}.new", place)

    def tls(self) -> Tls:
        return Tls(str(self.cert), str(self.key), str(self.ca))

    def client(self, authority: _Authority | None = None, server: bool = False) -> ssl.SSLContext:
        """A client of an authority, or one without a certificate."""
        context = ssl.create_default_context(cafile=str(self.authority.folder / "ca.crt"))
        if authority is not None:
            context.load_cert_chain(*authority.sign("client", "kube-scheduler", server=server))
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def ask(port: int, context: ssl.SSLContext, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    try:
        connection.request("POST" if body is not None else "GET", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.fixture
def service(files: Files) -> Iterator[Service]:
    def echo(request: Request) -> Response:
        return answer({"length": len(request.body)})

    routes = {("POST", "/echo"): echo}
    service = Service("t", "127.0.0.1", 0, lambda: None, routes, CollectorRegistry(), tls=files.tls())
    service.start()
    yield service
    service.stop()


# ----------------------------------------------------------------- who may


def test_fault_14_a_scheduler_with_a_certificate_filters_and_binds(api: ApiDouble, start: Start, files: Files) -> None:
    pod = api.put("pods", make_pod("p", 5))
    client = start(8, tls=files.tls())
    port, context = client.extender.service.port, files.client(files.authority)
    body = json.dumps({"Pod": pod, "NodeNames": ["a"]}).encode()
    status, text = ask(port, context, "/gpushare-scheduler/filter", body)
    assert (status, json.loads(text)["NodeNames"]) == (200, ["a"])
    wanted = {"PodName": "p", "PodNamespace": "default", "PodUID": pod["metadata"]["uid"], "Node": "a"}
    status, text = ask(port, context, "/gpushare-scheduler/bind", json.dumps(wanted).encode())
    assert (status, json.loads(text)) == (200, {"Error": ""})
    assert api.pod("p")["spec"]["nodeName"] == "a"


def test_fault_14_without_a_certificate_there_is_only_health(service: Service, files: Files) -> None:
    anonymous = files.client()
    for path in ("/healthz", "/readyz"):
        assert ask(service.port, anonymous, path)[0] == 200
    for path, body in (("/metrics", None), ("/version", None), ("/echo", b"x"), ("/echo/healthz", b"x")):
        status, text = ask(service.port, anonymous, path, body)
        assert (status, b"client certificate" in text) == (403, True), path
    for path in ("/nothing", "/debug/pprof/", "/"):
        assert ask(service.port, anonymous, path)[0] == 404, path


def test_fault_14_a_self_declared_identity_is_refused(service: Service, files: Files) -> None:
    connection = http.client.HTTPSConnection("127.0.0.1", service.port, context=files.client(), timeout=10)
    connection.request("POST", "/echo", b"x", {"X-Forwarded-For": tls.VERIFIED, "Remote-Addr": tls.VERIFIED})
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize("which", ["of another authority", "of a server"])
def test_fault_14_an_invalid_certificate_ends_the_connection(service: Service, files: Files, which: str) -> None:
    context = files.client(files.other) if "another" in which else files.client(files.authority, server=True)
    # With TLS 1.3 the client learns of it with the first answer.
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(service.port, context, "/healthz")


def test_fault_14_plain_http_and_nonsense_get_nothing(service: Service, files: Files) -> None:
    for words in (b"GET /healthz HTTP/1.0\r\n\r\n", b"\x16\x03\x01", b"\x00" * 1000, b""):
        # It may be closed before everything is sent.
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection,
        ):
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1000):
                assert b"HTTP" not in data
    assert ask(service.port, files.client(), "/healthz")[0] == 200


def test_old_versions_of_tls_are_refused(files: Files) -> None:
    # Read from the context: most clients cannot even be configured for them any more.
    assert tls.Context(files.tls()).get().minimum_version == ssl.TLSVersion.TLSv1_2


def test_nothing_else_listens(service: Service, files: Files) -> None:
    """The server behind has no address that anybody could go to."""
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{number}"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    assert service.port in ports
    for port in ports - {service.port}:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.settimeout(1)
            connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            assert gpushare.__version__.encode() not in connection.recv(1000)


# ----------------------------------------------------------------- how it holds


def test_large_requests_and_many_at_once(service: Service, files: Files) -> None:
    context = files.client(files.authority)
    body = b"x" * (5 * 1024 * 1024)

    def one(_number: int) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", service.port, context=context, timeout=60)
        try:
            for size in (len(body), 3, 70_000):
                # One connection for all of them, as Go's client has.
                connection.request("POST", "/echo", body[:size])
                response = connection.getresponse()
                assert json.loads(response.read()) == {"length": size}
            return response.status
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [200] * 8


def test_a_silent_client_times_out(service: Service, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setitem(tls.IDLE_SECONDS, tls.ANONYMOUS, 0.2)
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as silent:
        assert silent.recv(1) == b"", "before its handshake"
    plain = socket.create_connection(("127.0.0.1", service.port), timeout=10)
    with files.client().wrap_socket(plain, server_hostname="127.0.0.1") as silent:
        assert silent.recv(1) == b"", "and after"


def test_clients_above_the_limit_free_their_connections(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "CONNECTIONS", 4)
    service = Service("t", "127.0.0.1", 0, lambda: None, {}, CollectorRegistry(), tls=files.tls())
    service.start()
    try:
        for _round in range(3):
            silent = [socket.create_connection(("127.0.0.1", service.port), timeout=10) for _number in range(20)]
            # Four wait for a handshake, the others are sent away.
            ended = 0
            for one in silent:
                one.settimeout(0.3)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    ended += one.recv(1) == b""
            assert ended >= 10
            for one in silent:
                one.close()
            eventually(lambda: health(service, files))
    finally:
        service.stop()


def health(service: Service, files: Files) -> bool:
    with contextlib.suppress(OSError):
        return ask(service.port, files.client(), "/healthz")[0] == 200
    return False


def test_stop_ends_connections_and_frees_the_port(service: Service, files: Files) -> None:
    connection = http.client.HTTPSConnection("127.0.0.1", service.port, context=files.client(), timeout=10)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read() == b"ok\n"
    port = service.port
    service.stop()
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.request("GET", "/healthz")
        connection.getresponse()
    eventually(lambda: free(port))
    service.stop()


def free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


# ----------------------------------------------------------------- files that change


def test_fault_10_new_certificates_are_loaded_without_a_restart(service: Service, files: Files) -> None:
    def serial() -> Any:
        plain = socket.create_connection(("127.0.0.1", service.port), timeout=10)
        with files.client().wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            return (connection.getpeercert() or {})["serialNumber"]

    before = serial()
    assert serial() == before
    files.give()
    assert serial() != before


def test_fault_10_a_new_authority_replaces_the_old_one(service: Service, files: Files) -> None:
    old = files.client(files.authority)
    assert ask(service.port, old, "/version")[0] == 200
    shutil.copy(files.other.folder / "ca.crt", files.ca)
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(service.port, old, "/version")
    assert ask(service.port, files.client(files.other), "/version")[0] == 200


@pytest.mark.parametrize("broken", ["half", "gone", "of another key"])
def test_unreadable_files_keep_the_last_valid_certificates(
    service: Service, files: Files, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = files.cert.read_bytes()
    if broken == "gone":
        files.cert.unlink()
    elif broken == "half":
        files.cert.write_bytes(good[:100])
    else:
        shutil.copy(files.other.sign("another", "x", server=True)[0], files.cert)
    assert ask(service.port, files.client(), "/healthz")[0] == 200
    assert "can't be read again" in caplog.text
    files.give()
    caplog.clear()
    assert ask(service.port, files.client(), "/healthz")[0] == 200
    assert "can't" not in caplog.text


def test_invalid_files_at_the_start_are_an_oserror(files: Files) -> None:
    for wrong in (files.tls()._replace(cert=str(files.ca)), files.tls()._replace(key="/nothing/there")):
        service = Service("t", "127.0.0.1", 0, lambda: None, {}, CollectorRegistry(), tls=wrong)
        with pytest.raises(OSError):
            service.start()
        service.stop()


# ----------------------------------------------------------------- its options


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("*", False),
    ],
)
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("0.0.0.0", "", "", ""), "--tls-cert, --tls-key and --tls-client-ca are needed"),
        (("10.0.0.1", "c", "k", ""), "--tls-cert, --tls-key and --tls-client-ca are needed"),
        (("127.0.0.1", "c", "", ""), "--tls-cert and --tls-key go together"),
        (("127.0.0.1", "", "k", ""), "--tls-cert and --tls-key go together"),
        (("127.0.0.1", "", "", "a"), "--tls-client-ca"),
    ],
)
def test_fault_14_inconsistent_tls_options_are_one_message(given: tuple[str, str, str, str], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        tls_options(*given)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_consistent_tls_options_are_accepted() -> None:
    assert tls_options("127.0.0.1", "", "", "") is None
    assert tls_options("127.0.0.1", "c", "k", "") == Tls("c", "k")
    assert tls_options("0.0.0.0", "c", "k", "a") == Tls("c", "k", "a")


def test_fault_14_the_command_refuses_plain_http_on_other_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.parse(["--address=0.0.0.0"])
    assert refused.value.code == 2
    assert "--tls-cert, --tls-key and --tls-client-ca are needed" in capsys.readouterr().err


def test_the_command_serves_tls(api: ApiDouble, files: Files, tmp_path: Path) -> None:
    with served(api) as address:
        options = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-client-ca={files.ca}"]
        options += ["--log-format=json", *service_account(tmp_path, address)]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpushare.extender.command",
                "--address=0.0.0.0",
                "--port=0",
                "--log-format=json",
                *options,
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(gpushare.__file__).parents[1]),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        try:
            port = json.loads(process.stderr.readline())["port"]
            end = time.monotonic() + 20
            while ask(port, files.client(), "/readyz")[0] != 200:
                assert time.monotonic() < end
                time.sleep(0.05)
            assert ask(port, files.client(), "/gpushare-scheduler/inspect")[0] == 403
            assert ask(port, files.client(files.authority), "/gpushare-scheduler/inspect")[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
