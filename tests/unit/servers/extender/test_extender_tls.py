# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender on an address that other machines reach: TLS, client certificates, files replaced while it runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_double import ApiDouble, make_pod, served
from extender_kit import Start, bind_request, command_process, eventually, is_open, message
from gpushare.http import tls
from gpushare.http.limits import Limits
from gpushare.http.server import Endpoint
from gpushare.http.service import Request, Response, Routes, Service, answer, text
from gpushare.http.tls import Tls, is_loopback, metrics_tls, tls_options
from real_apiserver import _Authority
from service_account import service_account
from tls_files import Files


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


def wrapped(port: int, files: Files, authority: _Authority | None = None) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    return files.client(authority).wrap_socket(plain, server_hostname="127.0.0.1")


def serve(files: Tls, routes: Routes | None = None, limits: Limits | None = None) -> Service:
    routes = routes or {("GET", "/version"): lambda _: text("1")}
    return Service("t", Endpoint(tls=files), routes, limits=limits)


@pytest.fixture
def service(files: Files) -> Iterator[Service]:
    def echo(request: Request) -> Response:
        return answer({"length": len(request.body)})

    service = serve(files.tls(), {("POST", "/echo"): echo, ("GET", "/version"): lambda _: text("1")})
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


def test_fault_14_a_client_without_a_certificate_gets_no_answer(service: Service, files: Files) -> None:
    assert ask(service.port, files.client(files.authority), "/version")[0] == 200
    for path, body in (("/version", None), ("/nothing", None), ("/echo", b"x")):
        # With TLS 1.3 the client learns of it with the first answer.
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            ask(service.port, files.client(), path, body)


@pytest.mark.parametrize("which", ["of another authority", "of a server"])
def test_fault_14_an_invalid_certificate_ends_the_connection(service: Service, files: Files, which: str) -> None:
    context = files.client(files.other) if "another" in which else files.client(files.authority, server=True)
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(service.port, context, "/version")


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
    assert ask(service.port, files.client(files.authority), "/version")[0] == 200


def test_old_versions_of_tls_are_refused(files: Files) -> None:
    # Read from the context: most clients cannot even be configured for them any more.
    assert tls.Context(files.tls()).get().minimum_version == ssl.TLSVersion.TLSv1_2


# ----------------------------------------------------------------- load


def test_large_requests_and_many_at_once(service: Service, files: Files) -> None:
    context = files.client(files.authority)
    # All of them together are below the limit of bodies.
    body = b"x" * (2 * 1024 * 1024)

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


def test_the_time_for_the_first_request_includes_the_handshake(files: Files) -> None:
    service = serve(files.tls(), limits=Limits(head=0.3))
    service.start()
    try:
        with socket.create_connection(("127.0.0.1", service.port), timeout=10) as silent:
            assert silent.recv(1) == b""
    finally:
        service.stop()


def test_anonymous_clients_cannot_lock_a_verified_client_out(files: Files) -> None:
    """More anonymous connections than the limit of all clients, all of them in their handshake."""
    limits = Limits(connections=24, anonymous=8, peer=100, head=60)
    service = serve(files.tls(), limits=limits)
    service.start()
    silent: list[socket.socket] = []
    try:
        with contextlib.closing(connect(service.port, files.client(files.authority))) as known:
            for number in range(100):
                silent.append(socket.create_connection(("127.0.0.1", service.port), timeout=10))
                silent[-1].sendall(b"\x16")
                if number % 10 == 0:
                    known.request("GET", "/version")
                    assert known.getresponse().read() == b"1\n"
                    assert ask(service.port, files.client(files.authority), "/version")[0] == 200
        # The last ones are still there, and the others' places were taken.
        eventually(lambda: sum(is_open(one) for one in silent) <= limits.anonymous)
        assert is_open(silent[-1])
    finally:
        for one in silent:
            one.close()
        service.stop()


def status(port: int, files: Files, path: str, authority: _Authority | None = None) -> int:
    """The status of an answer; 0 without one."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(port, files.client(authority), path)[0]
    return 0


# ----------------------------------------------------------------- files that change


def test_fault_10_new_certificates_are_loaded_without_a_restart(service: Service, files: Files) -> None:
    def serial() -> Any:
        with wrapped(service.port, files, files.authority) as connection:
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
    assert ask(service.port, files.client(files.authority), "/version")[0] == 200
    assert "can't be read again" in caplog.text
    files.renew()
    caplog.clear()
    assert ask(service.port, files.client(files.authority), "/version")[0] == 200
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


def test_tokens_in_the_clear_are_for_loopback_addresses_only() -> None:
    assert metrics_tls("", "", "") is None and metrics_tls("127.0.0.1", "", "") is None
    assert metrics_tls("0.0.0.0", "c", "k") == Tls("c", "k")
    for given in (("0.0.0.0", "", ""), ("127.0.0.1", "c", ""), ("127.0.0.1", "", "k")):
        with pytest.raises(ValueError, match="--metrics-tls-cert and --metrics-tls-key"):
            metrics_tls(*given)


def test_the_command_serves_tls(api: ApiDouble, files: Files, tmp_path: Path) -> None:
    options = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-client-ca={files.ca}"]
    with (
        served(api) as address,
        command_process("--address=0.0.0.0", *options, *service_account(tmp_path, address)) as log,
    ):
        port, path = message(log, "serving")["port"], "/gpushare-scheduler/inspect"
        eventually(lambda: status(port, files, "/readyz", files.authority) == 200, 20)
        assert (status(port, files, path), status(port, files, path, files.authority)) == (0, 200)
