# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender on an address that other machines reach: TLS, client certificates, files replaced while it runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_double import ApiDouble, make_pod, served
from extender_kit import Start, bind_request, command_process, eventually
from gpushare.http import tls
from gpushare.http.service import Request, Response, Routes, Service, answer
from gpushare.http.tls import Tls, is_loopback, tls_options
from prometheus_client import CollectorRegistry
from real_apiserver import _Authority
from service_account import service_account


class Files:
    """The files that a Secret mounts for the server, and the certificates of clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.authority, self.other = (_Authority(folder / name) for name in ("authority", "other"))
        self.cert, self.key, self.ca = (folder / name for name in ("tls.crt", "tls.key", "ca.crt"))
        self.renew()

    def renew(self) -> None:
        """Give the server a new certificate."""
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
        """Make the TLS context of a client of an authority, or of one without a certificate."""
        context = ssl.create_default_context(cafile=str(self.authority.folder / "ca.crt"))
        if authority is not None:
            context.load_cert_chain(*authority.sign("client", "kube-scheduler", server=server))
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def ask(port: int, context: ssl.SSLContext, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    with contextlib.closing(connect(port, context)) as connection:
        connection.request("POST" if body is not None else "GET", path, body)
        response = connection.getresponse()
        return response.status, response.read()


def connect(port: int, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)


def wrapped(port: int, files: Files) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    return files.client().wrap_socket(plain, server_hostname="127.0.0.1")


def serve(files: Tls, routes: Routes | None = None) -> Service:
    return Service("t", "127.0.0.1", 0, lambda: None, routes, CollectorRegistry(), tls=files)


@pytest.fixture
def service(files: Files) -> Iterator[Service]:
    def echo(request: Request) -> Response:
        return answer({"length": len(request.body)})

    service = serve(files.tls(), {("POST", "/echo"): echo})
    service.start()
    yield service
    service.stop()


# ----------------------------------------------------------------- authorization


def test_fault_14_a_scheduler_with_a_certificate_filters_and_binds(api: ApiDouble, start: Start, files: Files) -> None:
    pod = api.put("pods", make_pod("p", 5))
    client = start(8, tls=files.tls())
    port, context = client.extender.service.port, files.client(files.authority)
    body = json.dumps({"Pod": pod, "NodeNames": ["a"]}).encode()
    status, text = ask(port, context, "/gpushare-scheduler/filter", body)
    assert (status, json.loads(text)["NodeNames"]) == (200, ["a"])
    status, text = ask(port, context, "/gpushare-scheduler/bind", json.dumps(bind_request(pod)).encode())
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
    with contextlib.closing(connect(service.port, files.client())) as connection:
        connection.request("POST", "/echo", b"x", {"X-Forwarded-For": tls.VERIFIED, "Remote-Addr": tls.VERIFIED})
        assert connection.getresponse().status == 403


@pytest.mark.parametrize("which", ["of another authority", "of a server"])
def test_fault_14_an_invalid_certificate_ends_the_connection(service: Service, files: Files, which: str) -> None:
    context = files.client(files.other) if "another" in which else files.client(files.authority, server=True)
    # With TLS 1.3 the client learns of it with the first answer.
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(service.port, context, "/healthz")


def test_fault_14_plain_http_and_invalid_bytes_get_no_answer(service: Service, files: Files) -> None:
    for data in (b"GET /healthz HTTP/1.0\r\n\r\n", b"\x16\x03\x01", b"\x00" * 1000, b""):
        # It may be closed before everything is sent.
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection,
        ):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(1000):
                assert b"HTTP" not in received
    assert ask(service.port, files.client(), "/healthz")[0] == 200


def test_old_versions_of_tls_are_refused(files: Files) -> None:
    # Read from the context: most clients cannot even be configured for them any more.
    assert tls.Context(files.tls()).get().minimum_version == ssl.TLSVersion.TLSv1_2


# ----------------------------------------------------------------- load


def test_large_requests_and_many_at_once(service: Service, files: Files) -> None:
    context = files.client(files.authority)
    body = b"x" * (5 * 1024 * 1024)

    def one(_number: int) -> int:
        # One connection for all requests, as Go's client has.
        with contextlib.closing(connect(service.port, context)) as connection:
            for size in (len(body), 3, 70_000):
                connection.request("POST", "/echo", body[:size])
                response = connection.getresponse()
                assert json.loads(response.read()) == {"length": size}
            return response.status

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [200] * 8


def test_a_silent_client_times_out(service: Service, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setitem(tls.IDLE_SECONDS, tls.ANONYMOUS, 0.2)
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as silent:
        assert silent.recv(1) == b"", "before its handshake"
    with wrapped(service.port, files) as silent:
        assert silent.recv(1) == b"", "and after"


def test_clients_above_the_limit_free_their_connections(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "CONNECTIONS", 4)
    service = serve(files.tls())
    service.start()
    try:
        for _round in range(3):
            silent = [socket.create_connection(("127.0.0.1", service.port), timeout=10) for _number in range(20)]
            # Four wait for a handshake, the others are closed.
            ended = 0
            for one in silent:
                one.settimeout(0.3)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    ended += one.recv(1) == b""
            assert ended >= 10
            for one in silent:
                one.close()
            eventually(lambda: status(service.port, files, "/healthz") == 200)
    finally:
        service.stop()


def status(port: int, files: Files, path: str, authority: _Authority | None = None) -> int:
    """The status of an answer; 0 without one."""
    with contextlib.suppress(OSError):
        return ask(port, files.client(authority), path)[0]
    return 0


# ----------------------------------------------------------------- files that change


def test_fault_10_new_certificates_are_loaded_without_a_restart(service: Service, files: Files) -> None:
    def serial() -> Any:
        with wrapped(service.port, files) as connection:
            return (connection.getpeercert() or {})["serialNumber"]

    before = serial()
    assert serial() == before
    files.renew()
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
    files.renew()
    caplog.clear()
    assert ask(service.port, files.client(), "/healthz")[0] == 200
    assert "can't" not in caplog.text


def test_invalid_files_at_the_start_are_an_oserror(files: Files) -> None:
    for wrong in (files.tls()._replace(cert=str(files.ca)), files.tls()._replace(key="/nothing/there")):
        service = serve(wrong)
        with pytest.raises(OSError):
            service.start()
        service.stop()


# ----------------------------------------------------------------- its options


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_loopback_addresses(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "10.0.0.1", "localhost.example.com", "*"])
def test_addresses_that_other_machines_reach(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("10.0.0.1", "c", "k", ""), "--tls-cert, --tls-key and --tls-client-ca are needed"),
        (("127.0.0.1", "c", "", ""), "--tls-cert and --tls-key go together"),
        (("127.0.0.1", "", "k", ""), "--tls-cert and --tls-key go together"),
        (("127.0.0.1", "", "", "a"), "--tls-client-ca"),
    ],
)
def test_fault_14_inconsistent_tls_options_are_one_message(given: tuple[str, str, str, str], text: str) -> None:
    with pytest.raises(ValueError) as refused:
        tls_options(*given)
    assert text in str(refused.value) and "\n" not in str(refused.value)


def test_consistent_tls_options_are_accepted() -> None:
    assert tls_options("127.0.0.1", "", "", "") is None
    assert tls_options("127.0.0.1", "c", "k", "") == Tls("c", "k")
    assert tls_options("0.0.0.0", "c", "k", "a") == Tls("c", "k", "a")


def test_the_command_serves_tls(api: ApiDouble, files: Files, tmp_path: Path) -> None:
    options = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-client-ca={files.ca}"]
    with (
        served(api) as address,
        command_process("--address=0.0.0.0", *options, *service_account(tmp_path, address)) as log,
    ):
        port, path = log()["port"], "/gpushare-scheduler/inspect"
        eventually(lambda: status(port, files, "/readyz") == 200, 20)
        assert (status(port, files, path), status(port, files, path, files.authority)) == (403, 200)
