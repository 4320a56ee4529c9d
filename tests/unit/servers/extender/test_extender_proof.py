# SPDX-License-Identifier: GPL-3.0-or-later
"""The request by which role scheduler proves the extender, against real servers; kube-scheduler sees the same."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import typing as t
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host import http_probe
from ansible_collections.kubegpu.share.plugins.module_utils._host.http_probe import Answer
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import apply
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.apply import (
    PAUSE_SECONDS,
    REASONS,
    REQUEST,
    problem,
    require_answer,
)
from api_double import ApiDouble
from extender_kit import Start
from fake_clock import FakeClock
from gpushare.shared._contracts import gpushare as contract
from ports import free_port, serving
from tls_files import Files

PREFIX = contract.EXTENDER_PREFIX


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them makes a TLS context, which takes milliseconds."""
    monkeypatch.setattr(apply, "PROOF_SECONDS", 2 * PAUSE_SECONDS)


def prove(url: str) -> tuple[str, str]:
    """Ask with the real adapter and a clock of its own; return the code and the sentence, empty where it answers."""
    clock = FakeClock()
    begun = clock.now()
    try:
        require_answer(url, "cp1", http_probe.post, clock.sleep, clock.now)
    except ShareError as error:
        details = error.details
        assert (details["code"], details["url"], details["host"]) == ("extender_unanswered", f"{url}/filter", "cp1")
        assert 2 * PAUSE_SECONDS <= clock.now() - begun <= 3 * PAUSE_SECONDS, "a few tries in the stated time"
        assert f"{url}/filter" in str(error) and " cp1 " in str(error)
        return details["reason"], str(error)
    return "", ""


def url_of(port: int, scheme: str = "http", host: str = "127.0.0.1") -> str:
    return f"{scheme}://{host}:{port}{PREFIX}"


def test_the_extender_answers_and_books_nothing(api: ApiDouble, start: Start) -> None:
    client = start(16)
    assert prove(url_of(client.extender.service.port)) == ("", "")
    assert client.used() == [0] and api.asked("PATCH", "") == []


def test_an_extender_that_has_read_nothing_yet_is_none(api: ApiDouble, start: Start) -> None:
    client = start(ready=False)
    client.extender.api._refusal = lambda: contract.Refusal(contract.Reason.NOT_READY, "the nodes aren't read")
    reason, text = prove(url_of(client.extender.service.port))
    assert reason == "not_ready" and "the nodes aren't read" in text and "read the log" in text.lower()


def test_an_extender_with_tls_is_asked_as_the_scheduler_would(start: Start, tmp_path: Path) -> None:
    """On machines kube-scheduler has no certificate for it."""
    port = start(16, tls=Files(tmp_path).tls()).extender.service.port
    assert prove(url_of(port, "https"))[0] == "tls"
    assert prove(url_of(port))[0] in ("no_http", "unreachable", "http_status")


class Other(BaseHTTPRequestHandler):
    """Another program at the extender's address."""

    status, body = 200, b"{}"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: t.Any) -> None:
        pass


@contextlib.contextmanager
def another(status: int, body: bytes) -> Iterator[int]:
    handler = type("Handler", (Other,), {"status": status, "body": body})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with serving(server):
        yield server.server_port


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"not found", "http_status"),
        (503, b'{"NodeNames": [], "Error": ""}', "http_status"),
        # kube-scheduler takes no other status, nor a redirection.
        (204, b"", "http_status"),
        (302, b"", "http_status"),
        (200, b"<html>", "not_an_extender"),
        (200, b"{}", "not_an_extender"),
        (200, b'[{"NodeNames": []}]', "not_an_extender"),
        (200, b"[" * 60000, "not_an_extender"),
        (200, b'{"Error": "' + b"x" * 100_000 + b'"}', "not_an_extender"),
        (200, b'{"status": "ok"}', "not_an_extender"),
        # A node that nobody asked about.
        (200, b'{"NodeNames": ["gpu1"], "Error": ""}', "not_an_extender"),
        (200, b'{"NodeNames": {}, "Error": ""}', "not_an_extender"),
        (200, b'{"NodeNames": null, "Error": "no\\u001b[2J cards"}', "not_ready"),
        (200, b'{"NodeNames": [], "Error": "', "not_an_extender"),
        # Of upstream's releases: the newer ones' keys, and the older ones', which leave empty fields out.
        (200, b'{"Nodes":null,"NodeNames":[],"FailedNodes":{},"Error":""}', ""),
        (200, b'{"nodenames":[]}', ""),
        (200, b'{"NodeNames": null, "FailedNodes": null}', ""),
    ],
)
def test_only_an_extenders_answer_counts(status: int, body: bytes, reason: str) -> None:
    with another(status, body) as port:
        found, text = prove(url_of(port))
    assert found == reason
    assert "\x1b" not in text and (not reason or REASONS[reason][1][1:30] in text), text


def test_what_does_not_answer_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_probe, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert prove(url_of(silent.getsockname()[1]))[0] == "timeout"
    reason, text = prove(url_of(free_port()))
    assert reason == "refused" and "connection refused" in text and "kubectl get pods" in text.lower()
    assert prove(f"http://127.0.0.1:nowhere{PREFIX}")[0] == "no_http"
    # Each try may wait for the resolver.
    assert problem(http_probe.post(url_of(1, host="no-such-host.invalid"), REQUEST))[0] == "unreachable"


def drip(before: bytes, piece: bytes) -> t.Callable[[socket.socket], None]:
    """Return a server that sends something just before the time of a step ends, and never comes to an end."""

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(before)
            while True:
                time.sleep(0.05)
                connection.sendall(piece)

    return serve


@pytest.mark.parametrize(
    ("before", "piece", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"x", 200),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 200),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x", 200),
        (b"", b"H", 0),
        (b"HTTP/1.1 200 OK\r\n", b"x", 0),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0),
    ],
    ids=["body", "chunks", "until_closed", "status", "head", "continue"],
)
def test_a_response_has_to_be_complete_in_time(
    before: bytes, piece: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_probe, "TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url, ask = url_of(listening.getsockname()[1]), http_probe.post

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=drip(before, piece), args=listening.accept()[:1], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        found: list[t.Any] = []
        asking = threading.Thread(target=lambda: found.extend((ask(url, REQUEST), http_probe.probe(url))), daemon=True)
        asking.start()
        asking.join(10)
        assert not asking.is_alive(), "a request has no end"
    assert found == [Answer(0, "timeout", "timed out"), status]
