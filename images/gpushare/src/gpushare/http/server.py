# SPDX-License-Identifier: GPL-3.0-or-later
"""An HTTP/1.1 server, with or without TLS: a thread for each connection, and llhttp to parse requests.

A scheduler keeps few connections and waits for each answer before it sends more, so a thread that reads, answers and
writes costs far less than an event loop that dispatches requests. What a client may take is in ``limits``: if there are
too many connections, an anonymous one ends for a new anonymous one, and the one that has been idle longest for another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import queue
import select
import socket
import ssl
import threading
import time
from typing import NamedTuple, Protocol

import httptools
from gpushare.http.limits import (
    ANONYMOUS,
    LOCAL,
    VERIFIED,
    Bodies,
    BodyLimit,
    Full,
    Limits,
    State,
    connection_to_drop,
)
from gpushare.http.tls import Context, Tls

HEAD_BYTES = 16 * 1024
# Around a body: the lengths of its chunks, and trailers.
FRAMING_BYTES = 64 * 1024
CHUNK = 1 << 16
# Shortly after the last answer, or after connecting, a request may be on its way.
SILENT_SECONDS = 0.5
LINGER_SECONDS = 1.0
# What a refused client may send more; a GiB takes less than a second.
LINGER_BYTES = 1 << 20
# A thread without a connection ends after this time.
SPARE_SECONDS = 30.0
# For running requests when the server stops.
STOP_SECONDS = 5.0
BACKLOG = 1024

log = logging.getLogger("gpushare.http")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where a server listens: on an address and port, or on a Unix socket.

    :param address: an IPv6 one may be in brackets; empty or ``::`` for all, of IPv4 and of IPv6.
    :param port: 0 for a free one.
    :param path: of the Unix socket, instead of an address; only this process's user may open it.
    :param tls: the certificates' files; with an authority of clients, the handshake requires a certificate.
    :param trusted: whether all who can connect are trusted, without a certificate.
    """

    address: str = "127.0.0.1"
    port: int = 0
    path: str = ""
    tls: Tls | None = None
    trusted: bool = True

    def __str__(self) -> str:
        address = self.address.strip("[]") or "::"
        return self.path or f"{f'[{address}]' if ':' in address else address}:{self.port}"


class Message(NamedTuple):
    """A request.

    ``client`` is its kind, ``peer`` its address, and ``authorization`` the header's value.
    """

    method: str
    target: bytes
    body: bytes | bytearray
    client: str
    peer: str = ""
    authorization: str = ""


class Reply(NamedTuple):
    """An answer; its length isn't among the headers. The body isn't sent in an answer to HEAD.

    ``authorized``: an anonymous client may send more requests on this connection.
    """

    status: str
    headers: list[tuple[str, str]]
    body: bytes | bytearray
    authorized: bool = False


class Application(Protocol):
    """What a server serves."""

    def body_limit(self, method: str, target: bytes, client: str) -> int:
        """Return the largest body of a request in bytes, before it is read."""

    def answer(self, message: Message) -> Reply:
        """Answer a request, in its connection's thread."""


class _Connection:
    """One client."""

    def __init__(self, connection: socket.socket, peer: str, client: str) -> None:
        self.socket, self.peer, self.client = connection, peer, client
        self.since, self.state, self.dropped = time.monotonic(), State.IDLE, False

    def silent_for(self) -> float:
        """Return the seconds since the last data."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return 0.0 if poll.poll(0) else time.monotonic() - self.since

    def drop(self) -> None:
        """End it; its thread closes it."""
        self.dropped = True
        # Closing alone wouldn't wake the thread that waits in it. Not by the TLS socket's method: that thread uses its
        # state.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class _Reader:
    """llhttp's events of one connection; complete requests are in ``done``."""

    def __init__(self, connection: _Connection, limit: BodyLimit, bodies: Bodies) -> None:
        self._connection, self._limit, self._bodies = connection, limit, bodies
        self.parser = httptools.HttpRequestParser(self)
        self.done: list[tuple[Message, bool]] = []
        # Whether a request is being read, and whether its head is complete.
        self.began = self.in_body = False
        # Bytes of the head, then of what is around the body.
        self._framing = 0
        self._length = self._most = 0
        self._target, self._body, self._authorization = b"", bytearray(), b""
        self._continue = False
        self._refusal = ""

    def feed(self, data: bytes) -> str:
        """Parse data.

        :returns: the status of an error after the requests in ``done``; empty without one.
        """
        self._framing += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return "400 Bad Request"
        if not self._refusal and self._framing > (FRAMING_BYTES if self.in_body else HEAD_BYTES):
            return "431 Request Header Fields Too Large"
        return self._refusal

    def expects_continue(self) -> bool:
        """Return whether the client waits for "100 Continue"; once for each request."""
        expected, self._continue = self._continue and self.in_body, False
        return expected

    def close(self) -> None:
        """Release the body: the parser and this object refer to each other, and wait for the garbage collector."""
        self._body = bytearray()
        self.done.clear()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._target, self._authorization, self._length = b"", b"", 0
        self.began = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) not in (6, 13, 14):
            return
        name = name.lower()
        if name == b"expect":
            self._continue = value.strip().lower() == b"100-continue"
        elif name == b"content-length":
            # llhttp refuses what is no number.
            self._length = int(value)
        elif name == b"authorization":
            self._authorization = value

    def on_headers_complete(self) -> None:
        self.in_body, self._framing = True, 0
        self._most = self._limit(self._method(), self._target, self._connection.client)
        if self._length > self._most:
            self._refuse("413 Content Too Large")

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        if self._refusal:
            return
        size = len(self._body) + len(body)
        if size > self._most:
            self._refuse("413 Content Too Large")
        elif not self._bodies.hold(self._connection, size):
            self._refuse("503 Service Unavailable")
        else:
            self._body += body

    def on_message_complete(self) -> None:
        if self._refusal or self.parser.should_upgrade():
            return
        from_whom = (self._connection.client, self._connection.peer, self._authorization.decode("latin-1"))
        message = Message(self._method(), self._target, self._body, *from_whom)
        self.done.append((message, self.parser.should_keep_alive()))
        self.began = self.in_body = self._continue = False
        self._body, self._framing = bytearray(), 0

    def _method(self) -> str:
        return str(self.parser.get_method().decode("ascii"))

    def _refuse(self, status: str) -> None:
        self._refusal, self._body = status, bytearray()


class HttpServer:
    """Listens on an endpoint, with a thread for each connection."""

    def __init__(self, application: Application, endpoint: Endpoint, limits: Limits | None = None) -> None:
        self._application, self._endpoint, self._limits = application, endpoint, limits or Limits()
        certified = endpoint.tls is not None and bool(endpoint.tls.client_ca)
        # Whether each request shows who its client is.
        self._by_request = not certified and not endpoint.trusted
        self._first_kind = ANONYMOUS if certified or self._by_request else LOCAL
        self._free = threading.Semaphore(self._limits.connections)
        self._bodies = Bodies(self._limits.bodies)
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

        :raises OSError: the endpoint can't be used, or a file of TLS can't be read or is invalid.
        """
        self._stopping.clear()
        self._context = Context(self._endpoint.tls) if self._endpoint.tls else None
        try:
            self._bind()
        except OSError:
            self._close_listeners()
            raise
        for listener in self._listeners:
            thread = threading.Thread(target=self._listen, args=(listener,), name="http", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        if self._endpoint.path or not self._listeners:
            return self._endpoint.port
        return int(self._listeners[0].getsockname()[1])

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
                for connection in left:
                    if late or connection.state is State.IDLE:
                        connection.drop()
            if not left or late:
                break
            time.sleep(0.01)
        with self._lock:
            for _number in range(self._idle):
                self._work.put(None)
            self._idle = 0

    # Listening.

    def _bind(self) -> None:
        where = self._endpoint
        if where.path:
            # That of a process before.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(where.path)
            listener = socket.socket(socket.AF_UNIX)
            self._listeners.append(listener)
            listener.bind(where.path)
            os.chmod(where.path, 0o600)
            listener.listen(BACKLOG)
            return
        host, flags = where.address.strip("[]"), socket.AI_PASSIVE
        missing = None
        for family, _kind, _protocol, _name, socket_address in socket.getaddrinfo(
            None if host in ("", "::") else host, where.port, type=socket.SOCK_STREAM, flags=flags
        ):
            # A name may have several addresses; all use the same port. One of IPv6 may have a scope.
            address = (socket_address[0], self.port or socket_address[1], *socket_address[2:])
            try:
                self._listeners.append(socket.create_server(address, family=family, backlog=BACKLOG))
            except OSError as error:
                # A kernel may have one family only.
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                missing = error
        if missing is not None and not self._listeners:
            raise missing

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if self._listeners and self._endpoint.path:
            with contextlib.suppress(OSError):
                os.unlink(self._endpoint.path)
        if self._listeners:
            self._listeners = []

    def _listen(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                accepted, address = listener.accept()
            except OSError:
                # Out of file descriptors, for example, which is temporary.
                self._stopping.wait(0.1)
                continue
            peer = "" if self._endpoint.path else str(address[0])
            connection = _Connection(accepted, peer, self._first_kind)
            try:
                self._admit(connection)
            except Full:
                accepted.close()
                continue
            try:
                self._assign(connection)
            except Exception:
                # No thread can be started, for example.
                log.exception("a connection couldn't be served")
                self._end(connection)

    def _admit(self, connection: _Connection) -> None:
        """Wait until one more connection can be served; another one may end for it.

        :raises Full: it can't.
        """
        if connection.client == ANONYMOUS:
            with self._lock:
                dropped = connection_to_drop(list(self._open), connection.peer, self._limits)
                if dropped is not None:
                    dropped.drop()
        end = time.monotonic() + self._limits.request
        while not self._free.acquire(timeout=0.02):
            with self._lock:
                waiting = [other for other in self._open if not other.dropped and other.client != ANONYMOUS]
                waiting = [other for other in waiting if other.state in (State.IDLE, State.READING)]
                oldest = min(waiting, key=lambda other: other.since, default=None)
                if oldest is not None and oldest.silent_for() > SILENT_SECONDS:
                    oldest.drop()
            if self._stopping.is_set() or time.monotonic() > end:
                raise Full

    def _assign(self, connection: _Connection) -> None:
        with self._lock:
            self._open.add(connection)
            waiting = self._idle > 0
            self._idle -= waiting
        if waiting:
            self._work.put(connection)
        else:
            threading.Thread(target=self._serve, args=(connection,), name="http connection", daemon=True).start()

    def _end(self, connection: _Connection) -> None:
        self._bodies.release(connection)
        with self._lock:
            self._open.discard(connection)
        connection.socket.close()
        self._free.release()

    # Serving, in threads of connections.

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
                    ending = self._stopping.is_set()
                    self._idle += not ending
                self._end(connection)
            if ending:
                return
            connection = self._next()

    def _next(self) -> _Connection | None:
        """Return the next connection for this thread; None where it isn't needed any more."""
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
        if not self._endpoint.path:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            self._shake_hands(connection, self._context.get())
        reader = _Reader(connection, self._application.body_limit, self._bodies)
        try:
            self._read_requests(connection, reader)
        finally:
            reader.close()

    def _read_requests(self, connection: _Connection, reader: _Reader) -> None:
        while True:
            with self._lock:
                if connection.dropped or (self._stopping.is_set() and not reader.began):
                    return
            _set_deadline(connection, self._deadline(connection, reader))
            data = connection.socket.recv(CHUNK)
            if not data:
                return
            connection.state = State.READING
            if not reader.began and connection.client != ANONYMOUS:
                connection.since = time.monotonic()
            refusal = reader.feed(data)
            for message, keep in reader.done:
                if not self._reply(connection, message, keep):
                    return
            reader.done.clear()
            if reader.began:
                connection.state = State.READING
            if refusal:
                connection.state = State.SENDING
                self._send(connection, *_parts(Reply(refusal, [], b""), "", False))
                _linger(connection)
                return
            if reader.expects_continue():
                self._send(connection, b"HTTP/1.1 100 Continue\r\n\r\n")

    def _shake_hands(self, connection: _Connection, context: ssl.SSLContext) -> None:
        secure = context.wrap_socket(connection.socket, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            # The plain one can't be shut down any more.
            connection.socket = secure
            if connection.dropped:
                return
        _set_deadline(connection, connection.since + self._limits.head)
        secure.do_handshake()
        if context.verify_mode is ssl.CERT_REQUIRED:
            connection.client = VERIFIED

    def _deadline(self, connection: _Connection, reader: _Reader) -> float:
        if reader.began and reader.in_body:
            return connection.since + self._limits.request
        if reader.began or connection.client == ANONYMOUS:
            return connection.since + self._limits.head
        return connection.since + self._limits.idle

    def _reply(self, connection: _Connection, message: Message, keep: bool) -> bool:
        """Answer a request, and return whether the connection stays open."""
        connection.state = State.ANSWERING
        reply = self._application.answer(message)
        keep = keep and not self._stopping.is_set()
        connection.state = State.SENDING
        if self._by_request:
            connection.client = VERIFIED if reply.authorized else ANONYMOUS
            keep = keep and reply.authorized
        self._send(connection, *_parts(reply, message.method, keep))
        self._bodies.release(connection)
        connection.state, connection.since = State.IDLE, time.monotonic()
        return keep

    def _send(self, connection: _Connection, *parts: bytes | bytearray) -> None:
        """Send data within a time for all of it.

        :raises OSError: it can't be sent.
        """
        end = time.monotonic() + self._limits.answer
        for part in parts:
            rest = memoryview(part)
            while rest:
                _set_deadline(connection, end)
                rest = rest[connection.socket.send(rest) :]


def _set_deadline(connection: _Connection, end: float) -> None:
    """Let the next operation end at a time; a socket's own limit would start again with each part of the data.

    :raises TimeoutError: that time is over.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the client is too slow")
    connection.socket.settimeout(left)


def _linger(connection: _Connection) -> None:
    """Let a client that is still sending read the refusal: closing with unread bytes would discard it."""
    socket.socket.shutdown(connection.socket, socket.SHUT_WR)
    end, left = time.monotonic() + LINGER_SECONDS, LINGER_BYTES
    while left > 0:
        _set_deadline(connection, end)
        data = connection.socket.recv(CHUNK)
        if not data:
            return
        left -= len(data)


def _parts(reply: Reply, method: str, keep: bool) -> tuple[bytes | bytearray, ...]:
    """Return what is sent; a large body isn't copied, a small one isn't sent on its own."""
    head = [f"HTTP/1.1 {reply.status}", *(f"{name}: {value}" for name, value in reply.headers)]
    head.append(f"Content-Length: {len(reply.body)}")
    if not keep:
        head.append("Connection: close")
    text = ("\r\n".join(head) + "\r\n\r\n").encode("latin-1")
    if method == "HEAD":
        return (text,)
    return (text, reply.body) if len(reply.body) > CHUNK else (text + reply.body,)
