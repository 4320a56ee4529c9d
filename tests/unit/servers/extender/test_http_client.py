# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP client at the level of bytes: responses of all kinds, closed connections, and a slow server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extender_kit import content_length
from gpushare.http.client import POOL_SIZE, HttpClient, HttpError
from real_apiserver import _Authority

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Script:
    """A server that sends the given responses, one for each request; an empty one closes the connection.

    It waits before each response until ``on`` is set.
    """

    def __init__(self, context: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> None:
        self.answers: list[bytes] = []
        self.asked: list[bytes] = []
        self.connections = 0
        self.on = threading.Event()
        self.on.set()
        self._context = context
        self._listener = socket.create_server((address, 0))
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def url(self) -> str:
        address, port = self._listener.getsockname()
        return f"http{'s' if self._context else ''}://{address}:{port}"

    def close(self) -> None:
        self.on.set()
        self._listener.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _address = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            connection = self._context.wrap_socket(plain, server_side=True) if self._context else plain
            with connection:
                while head := self._request(connection):
                    self.asked.append(head)
                    self.on.wait(10)
                    answer = self.answers.pop(0) if self.answers else OK
                    if not answer:
                        return
                    connection.sendall(answer)
                    if b"\r\nContent-Length" not in answer and b"chunked" not in answer:
                        return

    def _request(self, connection: socket.socket) -> bytes:
        found = b""
        while b"\r\n\r\n" not in found:
            data = connection.recv(1 << 16)
            if not data:
                return b""
            found += data
        head, _end, body = found.partition(b"\r\n\r\n")
        while len(body) < content_length(head):
            body += connection.recv(1 << 16)
        return head + b"\r\n\r\n" + body


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


@pytest.fixture
def client(server: Script) -> Iterator[HttpClient]:
    made = HttpClient(server.url)
    yield made
    made.close()


def get(client: HttpClient, method: str = "GET", seconds: float = 10.0) -> tuple[int, str, bytes]:
    answer = client.request(method, "/a?b=c", {"X": "y"}, b"body" if method != "GET" else None, seconds)
    return answer.status, answer.reason, b"".join(answer.stream())


def test_a_connection_is_kept(server: Script, client: HttpClient) -> None:
    for _number in range(5):
        assert get(client, "POST") == (200, "OK", b"ok")
    assert server.connections == 1
    first = server.asked[0].split(b"\r\n")
    assert first[0] == b"POST /a?b=c HTTP/1.1" and first[-1] == b"body"
    assert {b"X: y", b"Content-Length: 4", b"Host: " + server.url.partition("//")[2].encode()} <= set(first)


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000, b"x" * 300_000),
    ],
)
def test_responses_of_every_framing(server: Script, client: HttpClient, response: bytes, body: bytes) -> None:
    server.answers = [response, OK]
    assert get(client)[2] == body
    assert get(client) == (200, "OK", b"ok")


@pytest.mark.parametrize(
    "response",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200",
        b"\x15\x03\x01\x00\x02\x02\x46",
    ],
)
def test_an_incomplete_response_is_an_error(server: Script, client: HttpClient, response: bytes) -> None:
    for answers in ([response], [OK, response]):
        server.answers = [*answers]
        with pytest.raises(HttpError):
            for _answer in answers:
                # A POST, so that it isn't sent again.
                answer = client.request("POST", "/", {}, b"", 0.3)
                assert b"".join(answer.stream()) == b"ok"
        assert get(client) == (200, "OK", b"ok")


@pytest.mark.parametrize(("method", "again"), [("GET", True), ("PUT", True), ("POST", False), ("PATCH", False)])
def test_a_kept_connection_that_closes_during_the_request(
    server: Script, client: HttpClient, method: str, again: bool
) -> None:
    """Its result is unknown; so only an idempotent request is sent again, and only once."""
    server.answers = [OK, b""]
    get(client)
    if again:
        assert get(client, method) == (200, "OK", b"ok")
    else:
        with pytest.raises(HttpError):
            get(client, method)
    assert len(server.asked) == 2 + again
    server.answers = [b""]
    client.close()
    with pytest.raises(HttpError, match="closed the connection"):
        get(client, method)


def test_a_connection_that_was_closed_while_it_was_kept_is_not_used(server: Script, client: HttpClient) -> None:
    get(client)
    (kept,) = client._pooled
    socket.socket.shutdown(kept, socket.SHUT_RD)
    assert get(client, "POST") == (200, "OK", b"ok")
    assert server.connections == 2


def test_a_slow_server_gets_no_second_request(server: Script, client: HttpClient) -> None:
    get(client)
    server.on.clear()
    with pytest.raises(HttpError, match="timed out"):
        get(client, seconds=0.2)
    assert len(server.asked) == 2


def test_no_server_is_a_connection_error(server: Script) -> None:
    server.close()
    with pytest.raises(HttpError, match="refused"):
        get(HttpClient("http://127.0.0.1:1"))
    with pytest.raises(HttpError):
        get(HttpClient("http://nowhere.invalid"))


def test_a_response_that_is_not_read_to_its_end_keeps_no_connection(server: Script, client: HttpClient) -> None:
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000]
    client.request("GET", "/", {}, None, 10).close()
    assert not client._pooled
    assert get(client) == (200, "OK", b"ok")


def test_many_at_once(server: Script, client: HttpClient) -> None:
    found: list[bytes] = []
    server.on.clear()
    threads = [threading.Thread(target=lambda: found.append(get(client)[2])) for _number in range(POOL_SIZE + 10)]
    for thread in threads:
        thread.start()
    while len(server.asked) < len(threads):
        time.sleep(0.01)
    server.on.set()
    for thread in threads:
        thread.join(10)
    assert found == [b"ok"] * len(threads) and len(client._pooled) == POOL_SIZE


def test_shutdown_ends_a_read_in_another_thread(server: Script, client: HttpClient) -> None:
    server.answers = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"]
    answer = client.request("GET", "/", {}, None, 30)
    received, ended = threading.Event(), threading.Event()

    def read() -> None:
        with contextlib.suppress(HttpError):
            for piece in answer.stream():
                assert piece == b"ab"
                received.set()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert received.wait(5) and not ended.wait(0.1)
    answer.shutdown()
    assert ended.wait(5)


# ----------------------------------------------------------------- TLS


def over_tls(folder: Path, identifiers: bool = True) -> tuple[Script, Path]:
    """Start a server with a certificate of an authority of its own.

    :param identifiers: whether the certificates have key identifiers.
    :returns: the server, and the file of that authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_Authority(folder, identifiers).sign("serving", "kube-apiserver", server=True))
    return Script(context), folder / "ca.crt"


def test_only_a_server_with_a_certificate_of_the_authority_is_accepted(tmp_path: Path) -> None:
    (ours, authority), (other, another) = over_tls(tmp_path / "ours"), over_tls(tmp_path / "other")
    trusted = tmp_path / "trusted"
    shutil.copy(authority, trusted)
    client = HttpClient(ours.url, trusted)
    assert get(client) == (200, "OK", b"ok")
    with pytest.raises(HttpError, match="certificate verify failed"):
        get(HttpClient(other.url, trusted))
    assert not other.asked
    elsewhere = Script(ours._context, "127.0.0.2")
    with pytest.raises(HttpError, match=r"certificate verify failed.*IP address mismatch"):
        get(HttpClient(elsewhere.url, trusted))
    # Another authority is used from the next connection on.
    shutil.copy(another, trusted)
    client.close()
    with pytest.raises(HttpError, match="certificate verify failed"):
        get(client)
    trusted.unlink()
    with pytest.raises(OSError, match="trusted"):
        get(client)
    for script in (ours, other, elsewhere):
        script.close()


def test_an_authority_without_key_identifiers_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EKS's authority is such a one, and Python 3.13's default context refuses it."""
    create = ssl.create_default_context

    def strict(**options: Any) -> ssl.SSLContext:
        context = create(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    server, authority = over_tls(tmp_path / "pki", identifiers=False)
    address = server._listener.getsockname()
    with socket.create_connection(address) as plain, pytest.raises(ssl.SSLCertVerificationError, match="Identifier"):
        strict(cafile=authority).wrap_socket(plain, server_hostname=address[0])
    assert get(HttpClient(server.url, authority)) == (200, "OK", b"ok")
    # The rest of the verification stays.
    other, _another = over_tls(tmp_path / "other", identifiers=False)
    with pytest.raises(HttpError, match="certificate verify failed"):
        get(HttpClient(other.url, authority))
    for script in (server, other):
        script.close()
