# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP server at the level of bytes: valid and invalid requests, and the life of connections of local clients."""

from __future__ import annotations

import contextlib
import http.client
import socket
import stat
import threading
import time
import typing as t
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from extender_kit import content_length, eventually
from gpushare.http import server as http_server
from gpushare.http.limits import Limits
from gpushare.http.server import Endpoint, HttpServer, Message, Reply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unix_http import ask_socket

Serve = Callable[..., HttpServer]


def echo(message: Message) -> Reply:
    body = f"{message.method} {message.target.decode('latin-1')} ".encode() + message.body
    return Reply("200 OK", [("Content-Type", "text/plain")], body)


class App:
    """Takes bodies of 1,000 bytes, on ``/large`` of any size."""

    def __init__(self, answer: Callable[[Message], Reply] = echo) -> None:
        self.answer = answer

    def body_limit(self, method: str, target: bytes, client: str) -> int:
        return 1 << 30 if target == b"/large" else 1000


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[HttpServer] = []

    def begin(
        respond: Callable[[Message], Reply] = echo, most: int = 8, address: str = "127.0.0.1", **limits: t.Any
    ) -> HttpServer:
        server = HttpServer(App(respond), Endpoint(address), Limits(connections=most, **limits))
        server.start()
        running.append(server)
        return server

    yield begin
    for server in running:
        server.stop()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def received(connection: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def exchange(server: HttpServer, data: bytes) -> bytes:
    with connect(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return received(connection)


def bodies(data: bytes) -> list[bytes]:
    """The bodies of consecutive answers."""
    found = []
    while data:
        head, _end, rest = data.partition(b"\r\n\r\n")
        found.append(rest[: content_length(head)])
        data = rest[content_length(head) :]
    return found


def get(server: HttpServer, path: str = "/b") -> list[bytes]:
    return bodies(exchange(server, f"GET {path} HTTP/1.1\r\n\r\n".encode()))


# ----------------------------------------------------------------- requests


def test_requests_that_follow_on_each_other_are_answered_in_order(serve: Serve) -> None:
    data = b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\nxyGET /b?c=d HTTP/1.1\r\n\r\n"
    assert bodies(exchange(serve(), data * 3)) == [b"POST /a xy", b"GET /b?c=d "] * 3


def test_a_body_in_chunks_and_in_single_bytes(serve: Serve) -> None:
    data = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: t\r\n\r\n"
    with connect(serve()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in data:
            connection.sendall(bytes([byte]))
        connection.shutdown(socket.SHUT_WR)
        assert bodies(received(connection)) == [b"POST /a abcde"]


def test_head_has_no_body_and_old_clients_no_second_request(serve: Serve) -> None:
    server = serve()
    answered = exchange(server, b"HEAD /a HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 8\r\n" in answered and answered.endswith(b"\r\n\r\n")
    again = b"GET /a HTTP/1.0\r\n\r\n" * 2
    assert bodies(exchange(server, again)) == [b"GET /a "]
    assert bodies(exchange(server, b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n" + again)) == [b"GET /a "]


def test_expect_100_continue_is_answered(serve: Serve) -> None:
    with connect(serve()) as connection:
        connection.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"xy")
        assert connection.recv(1000).endswith(b"POST /a xy")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        # Two servers may use different ones of two lengths.
        (b"POST /a HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nxyz", b"400"),
        (b"POST /a HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /a HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"POST /a HTTP/1.1\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001, b"413"),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b"x" * 100 + b"\r\n" * 11, b"4"),
        (b"GET /a HTTP/1.1\r\n" + b"A: %s\r\n" % (b"x" * 1000) * 200, b"431"),
        (b"GET /" + b"x" * 200_000, b"431"),
        # llhttp has no limit for what is around a body.
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"x" * 200_000, b"431"),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 200_000, b"431"),
    ],
)
def test_an_invalid_request_is_refused_and_ends_the_connection(serve: Serve, data: bytes, status: bytes) -> None:
    server = serve()
    answered = exchange(server, data)
    assert answered.startswith(b"HTTP/1.1 " + status) and b"Connection: close" in answered
    assert get(server) == [b"GET /b "]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from((b"GET ", b"POST /a HTTP/1.1\r\n", b"Content-Length: 3\r\n", b"\r\n", b"xyz", b"0\r\n\r\n"))
        | st.binary(max_size=30),
        max_size=12,
    )
)
def test_any_input_leaves_the_server_running(serve: Serve, data: list[bytes]) -> None:
    server = serve()
    answered = exchange(server, b"".join(data))
    assert not answered or answered.startswith(b"HTTP/1.1 ")
    assert get(server) == [b"GET /b "]


# ----------------------------------------------------------------- connections

BODY = b"POST /large HTTP/1.1\r\nContent-Length: 20000\r\n\r\n" + b"x" * 10_000
HEAD = b"GET /a HTTP/1.1\r\n" + b"A: b\r\n" * 1500


@pytest.mark.parametrize(("limits", "data"), [({"request": 0.4}, BODY), ({"head": 0.4}, HEAD)], ids=["body", "head"])
def test_an_unfinished_request_times_out(serve: Serve, limits: dict[str, float], data: bytes) -> None:
    with connect(serve(**limits)) as connection:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in data:
                connection.sendall(bytes([byte]))
                # No single wait of the server is as long as the time that is left to it.
                time.sleep(0.002)
        assert received(connection) == b"" and time.monotonic() - began < 10


def test_an_idle_connection_times_out(serve: Serve) -> None:
    with connect(serve(idle=0.2)) as connection:
        assert received(connection) == b""


def assert_echoes(connection: socket.socket) -> None:
    connection.sendall(b"GET /a HTTP/1.1\r\n\r\n")
    assert connection.recv(1000).endswith(b"GET /a ")


def test_the_longest_idle_connection_is_closed_for_a_new_one(serve: Serve) -> None:
    server = serve(most=2)
    with connect(server) as first, connect(server) as second:
        for one in (first, second):
            assert_echoes(one)
            time.sleep(0.05)
        with connect(server) as third:
            assert_echoes(third)
            assert first.recv(1000) == b""
            assert_echoes(second)


class SlowEcho:
    """Echoes when ``resume`` is set; ``reached`` is set by the first request."""

    def __init__(self) -> None:
        self.reached, self.resume = threading.Event(), threading.Event()

    def __call__(self, message: Message) -> Reply:
        self.reached.set()
        assert self.resume.wait(10)
        return echo(message)


def test_connections_above_the_limit_wait(serve: Serve) -> None:
    """kube-scheduler binds as many pods at once as it likes: none of them may be refused."""
    answer = SlowEcho()
    server = serve(answer, most=2)
    waiting = [connect(server) for _number in range(20)]
    for number, one in enumerate(waiting):
        one.sendall(f"GET /{number} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
    time.sleep(0.2)
    answer.resume.set()
    assert [bodies(received(one)) for one in waiting] == [[f"GET /{number} ".encode()] for number in range(20)]
    for one in waiting:
        one.close()


def test_a_client_that_sends_no_request_loses_its_place(serve: Serve) -> None:
    server = serve(most=4)
    slow = [connect(server) for _number in range(4)]
    for one in slow:
        one.sendall(b"G")
    assert get(server) == [b"GET /b "]
    for one in slow:
        one.close()


def test_an_answer_that_nobody_reads_times_out(serve: Serve) -> None:
    server = serve(lambda _: Reply("200 OK", [], b"x" * (64 << 20)), most=1, answer=0.3)
    with connect(server) as not_reading:
        not_reading.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        with connect(server) as other:
            other.sendall(b"HEAD /a HTTP/1.1\r\n\r\n")
            assert other.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_declared_length_is_refused_before_the_body(serve: Serve) -> None:
    with connect(serve()) as connection:
        connection.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_the_largest_unfinished_body_ends_for_others(serve: Serve) -> None:
    server = serve(bodies=300_000)
    with connect(server) as greedy, connect(server) as modest:
        greedy.sendall(b"POST /large HTTP/1.1\r\nContent-Length: 900000\r\n\r\n" + b"x" * 250_000)
        eventually(lambda: sum(server._bodies._held.values()) == 250_000)
        modest.sendall(b"POST /large HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"y" * 200_000)
        answered = b""
        while len(answered) < 200_000:
            answered += modest.recv(1 << 16)
        assert answered.endswith(b"y" * 200_000)
        assert received(greedy) == b""
    assert get(server) == [b"GET /b "]


def test_a_unix_socket_is_its_users_alone(tmp_path: Path) -> None:
    place = tmp_path / "s"
    place.touch()
    server = HttpServer(App(), Endpoint(path=str(place)))
    server.start()
    assert stat.filemode(place.stat().st_mode) == "srw-------"
    assert ask_socket(place, "/a") == (200, "GET /a")
    server.stop()
    assert not place.exists()


def threads() -> int:
    return sum(one.name == "http connection" for one in threading.enumerate())


def test_threads_that_are_not_needed_any_more_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SPARE_SECONDS", 0.05)
    eventually(lambda: not threads())
    server = serve(most=20)
    open_ones = [connect(server) for _number in range(20)]
    eventually(lambda: threads() == 20)
    for open_one in open_ones:
        open_one.close()
    eventually(lambda: not threads())
    assert get(server) == [b"GET /b "]


def test_threads_are_used_again(serve: Serve) -> None:
    server = serve()
    exchange(server, b"GET /a HTTP/1.1\r\n\r\n")
    before = threading.active_count()
    for _number in range(50):
        exchange(server, b"GET /a HTTP/1.1\r\n\r\n")
    assert threading.active_count() <= before + 3


def test_stop_finishes_running_requests_and_closes_the_rest(serve: Serve) -> None:
    answer = SlowEcho()
    server = serve(answer)
    with connect(server) as idle, connect(server) as busy:
        busy.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        assert answer.reached.wait(10)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert received(idle) == b""
        assert stopping.is_alive(), "it waits for the other one"
        answer.resume.set()
        answered = received(busy)
        assert answered.endswith(b"GET /a ") and b"Connection: close" in answered
        stopping.join(10)
    with pytest.raises(OSError):
        connect(server)
    eventually(lambda: not threads())


def test_a_handler_exception_ends_one_connection(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: Message) -> Reply:
        if message.target == b"/bad":
            raise RuntimeError("a mistake")
        return echo(message)

    server = serve(fail)
    assert exchange(server, b"GET /bad HTTP/1.1\r\n\r\n") == b""
    assert "a mistake" in caplog.text
    assert get(server) == [b"GET /b "]


def test_a_name_of_several_addresses_is_one_port(serve: Serve) -> None:
    server = serve(address="localhost")
    for *_rest, where in socket.getaddrinfo("localhost", server.port, type=socket.SOCK_STREAM):
        connection = http.client.HTTPConnection(str(where[0]), server.port, timeout=10)
        connection.request("GET", "/a")
        assert connection.getresponse().read() == b"GET /a "
        connection.close()
