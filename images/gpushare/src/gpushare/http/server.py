# SPDX-License-Identifier: GPL-3.0-or-later
"""An HTTP/1.1 server, with or without TLS: a thread for each connection, and llhttp to parse requests.

A scheduler keeps few connections and waits for each answer before it sends more, so a thread that reads, answers and
writes costs far less than an event loop that dispatches requests. If there are too many connections, the one that has
been idle longest is closed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import httptools
from gpushare.http import tls
from gpushare.http.tls import ANONYMOUS, VERIFIED, Context, Tls

HEAD_BYTES = 64 * 1024
CHUNK = 1 << 16
# For reading one request, from its first byte to its last, and for writing its answer.
REQUEST_SECONDS = 60.0
# After this time, an idle connection may be closed for a new one.
SILENT_SECONDS = 0.5
LINGER_SECONDS = 1.0
# A thread without a connection ends after this time.
SPARE_SECONDS = 30.0
# For running requests when the server stops.
STOP_SECONDS = 5.0
BACKLOG = 1024

log = logging.getLogger("gpushare.http")


class Message(NamedTuple):
    """A request; ``client`` is ``VERIFIED`` with a certificate that this server's authority has signed."""

    method: str
    target: bytes
    body: bytes
    client: str


class Reply(NamedTuple):
    """An answer; its length isn't among the headers. The body isn't sent in an answer to HEAD."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes


class _Reader:
    """llhttp's events of one connection; complete requests are in ``done``.

    :param max_body: the largest body that is accepted, in bytes.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self.parser = httptools.HttpRequestParser(self)
        self.done: list[tuple[str, bytes, bytes, bool]] = []
        # Whether a request is being read, and the length of its head and of its body so far.
        self.began = False
        self._head = self._size = 0
        self._target, self._body = b"", list[bytes]()
        self._continue = self._in_body = self.too_large = False

    def feed(self, data: bytes) -> str:
        """Parse data.

        :returns: the status of an error after the requests in ``done``; empty without one.
        """
        if not self._in_body:
            self._head += len(data)
        self.began = True
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return "400 Bad Request"
        if self.too_large:
            return "413 Content Too Large"
        if not self._in_body and self._head > HEAD_BYTES:
            return "431 Request Header Fields Too Large"
        return ""

    def expects_continue(self) -> bool:
        """Return whether the client waits for "100 Continue"; once for each request."""
        expected, self._continue = self._continue and self._in_body, False
        return expected

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._target, self._body, self._size = b"", [], 0
        self._continue = self._in_body = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 6 and name.lower() == b"expect":
            self._continue = value.strip().lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        self._in_body, self._head = True, 0

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._max_body:
            self.too_large = True
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self.too_large or self.parser.should_upgrade():
            return
        method = self.parser.get_method().decode("ascii")
        self.done.append((method, self._target, b"".join(self._body), self.parser.should_keep_alive()))
        self._body, self._in_body, self.began = [], False, False
        self._continue = False


class _Connection:
    """One client. ``since`` is the time of its last data, ``busy`` whether it is being served."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.since, self.busy = time.monotonic(), True

    def silent_for(self) -> float:
        """Return the seconds since the last data."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return 0.0 if poll.poll(0) else time.monotonic() - self.since

    def end(self) -> None:
        # Closing alone wouldn't wake the thread that waits in it.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """Listens on an address, with a thread for each connection.

    :param answer: called for each request, in its connection's thread.
    :param most: the maximum of connections.
    :param body: the largest body that is accepted, in bytes.
    :param files: those of TLS; None for plain HTTP.
    """

    def __init__(
        self,
        answer: Callable[[Message], Reply],
        address: str,
        port: int,
        most: int,
        body: int,
        files: Tls | None = None,
    ) -> None:
        self._answer, self._address, self._port, self._body, self._tls = answer, address.strip("[]"), port, body, files
        self._free = threading.Semaphore(min(most, tls.CONNECTIONS) if files else most)
        self._open: set[_Connection] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._context: Context | None = None
        # Threads that have served a connection wait here for the next one.
        self._work: queue.SimpleQueue[_Connection | None] = queue.SimpleQueue()
        self._idle = 0

    def start(self) -> None:
        """Listen.

        :raises OSError: the address can't be used, or a file of TLS can't be read or is invalid.
        """
        self._stopping.clear()
        self._context = Context(self._tls) if self._tls else None
        found = socket.getaddrinfo(self._address or None, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _kind, _protocol, _name, where in found:
                # A name may have several addresses; all use the same port.
                port = self.port or where[1]
                self._listeners.append(socket.create_server((where[0], port), family=family, backlog=BACKLOG))
        except OSError:
            self._close_listeners()
            raise
        for listener in self._listeners:
            thread = threading.Thread(target=self._listen, args=(listener,), name="http", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1]) if self._listeners else self._port

    def stop(self) -> None:
        """Stop, after answering running requests for some seconds."""
        self._stopping.set()
        self._close_listeners()
        for thread in self._threads:
            thread.join(5)
        self._threads.clear()
        end = time.monotonic() + STOP_SECONDS
        while True:
            with self._lock:
                left, late = list(self._open), time.monotonic() > end
                for one in left:
                    if late or not one.busy:
                        one.end()
            if not left or late:
                break
            time.sleep(0.01)
        with self._lock:
            for _number in range(self._idle):
                self._work.put(None)
            self._idle = 0

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if self._listeners:
            self._listeners = []

    def _listen(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connection, _address = listener.accept()
            except OSError:
                # Out of file descriptors, for example, which is temporary.
                self._stopping.wait(0.1)
                continue
            try:
                if self._can_serve():
                    self._assign(_Connection(connection))
                else:
                    connection.close()
            except Exception:
                # No thread can be started, for example.
                log.exception("a connection couldn't be served")
                connection.close()

    def _can_serve(self) -> bool:
        """Wait until one more connection can be served; an idle one is closed for it."""
        end = time.monotonic() + REQUEST_SECONDS
        while not self._free.acquire(timeout=0.02):
            with self._lock:
                silent = [one for one in self._open if not one.busy]
                if not silent and self._tls is not None:
                    # Clients that aren't authenticated must not block others.
                    return False
                # Shortly after the last answer, or after connecting, a request may be on its way.
                oldest = min(silent, key=lambda one: one.since, default=None)
                if oldest is not None and oldest.silent_for() > SILENT_SECONDS:
                    # It isn't chosen again before it is closed.
                    oldest.busy = True
                    oldest.end()
            if self._stopping.is_set() or time.monotonic() > end:
                return False
        return True

    def _assign(self, connection: _Connection) -> None:
        with self._lock:
            self._open.add(connection)
            waiting = self._idle > 0
            self._idle -= waiting
        if waiting:
            self._work.put(connection)
        else:
            threading.Thread(target=self._serve, args=(connection,), name="http connection", daemon=True).start()

    def _serve(self, connection: _Connection | None) -> None:
        while connection is not None:
            try:
                self._serve_requests(connection)
            except OSError as error:
                # TLS errors are among these: a client's mistake, or a port scanner.
                if not self._stopping.is_set():
                    log.debug("a connection ended: %s", error)
            except Exception:
                log.exception("a connection failed")
            finally:
                with self._lock:
                    self._open.discard(connection)
                    ending = self._stopping.is_set()
                    self._idle += not ending
                connection.socket.close()
                self._free.release()
            if ending:
                return
            connection = self._next()

    def _next(self) -> _Connection | None:
        """The next connection for this thread; None where it isn't needed any more."""
        while True:
            try:
                return self._work.get(timeout=SPARE_SECONDS)
            except queue.Empty:
                with self._lock:
                    # Otherwise one is being assigned.
                    if self._idle > 0:
                        self._idle -= 1
                        return None

    def _serve_requests(self, connection: _Connection) -> None:
        """Answer a client's requests until one side closes the connection."""
        plain = connection.socket
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client, idle = ANONYMOUS, tls.IDLE_SECONDS[VERIFIED]
        if self._context is not None:
            plain.settimeout(tls.HANDSHAKE_SECONDS)
            secure = self._context.get().wrap_socket(plain, server_side=True)
            connection.socket = secure
            if self._tls is not None and self._tls.client_ca and secure.getpeercert():
                client = VERIFIED
            idle = tls.IDLE_SECONDS[client]
        talk, reader, end = connection.socket, _Reader(self._body), 0.0
        while True:
            with self._lock:
                connection.busy, connection.since = reader.began, time.monotonic()
                if self._stopping.is_set() and not reader.began:
                    return
            talk.settimeout(max(0.01, end - connection.since) if reader.began else idle)
            data = talk.recv(CHUNK)
            if not data:
                return
            with self._lock:
                connection.busy = True
            if not reader.began:
                end = time.monotonic() + REQUEST_SECONDS
            refusal = reader.feed(data)
            for method, target, body, keep in reader.done:
                reply = self._answer(Message(method, target, body, client))
                keep = keep and not self._stopping.is_set()
                talk.settimeout(REQUEST_SECONDS)
                talk.sendall(_bytes(reply, method, keep))
                if not keep:
                    return
            reader.done.clear()
            if refusal:
                talk.sendall(_bytes(Reply(refusal, [], b""), "", False))
                _linger(talk)
                return
            if reader.expects_continue():
                talk.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def _linger(connection: socket.socket) -> None:
    """Let a client that is still sending read the refusal: closing with unread bytes would discard it."""
    socket.socket.shutdown(connection, socket.SHUT_WR)
    connection.settimeout(LINGER_SECONDS)
    end = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < end and connection.recv(CHUNK):
        pass


def _bytes(reply: Reply, method: str, keep: bool) -> bytes:
    head = [f"HTTP/1.1 {reply.status}", *(f"{name}: {value}" for name, value in reply.headers)]
    head.append(f"Content-Length: {len(reply.body)}")
    if not keep:
        head.append("Connection: close")
    text = "\r\n".join(head) + "\r\n\r\n"
    return text.encode("latin-1") + (b"" if method == "HEAD" else reply.body)
