# SPDX-License-Identifier: GPL-3.0-or-later
"""A small HTTP/1.1 client for one server, with a pool of connections.

llhttp parses the answers. There are no redirects, no proxies and no compression; an API server needs none of them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httptools
from gpushare.http.tls import signature

CHUNK = 1 << 16
# Connections that are kept for the next request.
POOL_SIZE = 32
# Idempotent requests, which are sent again where a pooled connection turns out to be dead.
REPEATABLE = ("GET", "PUT", "DELETE")


class HttpError(Exception):
    """The server can't be reached, or its answer isn't HTTP; the message is one sentence."""


class _Reader:
    """llhttp's events of one answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status, self.reason = 0, b""
        self.body: list[bytes] = []
        self.in_body = self.complete = self.keep = False
        # Without a length or chunks, the answer ends with the connection.
        self.bounded = False

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, _value: bytes) -> None:
        if len(name) in (14, 17):
            self.bounded |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status, self.in_body = self.parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200:
            # An interim response, before the answer itself.
            self.reason, self.in_body, self.bounded = b"", False, False
        else:
            self.complete, self.keep = True, self.parser.should_keep_alive()


class Answer:
    """An answer whose head is read. Read its body by ``stream`` or ``beginning``, then close it."""

    def __init__(self, pool: HttpClient, connection: socket.socket, reader: _Reader) -> None:
        self._pool, self._connection, self._reader = pool, connection, reader
        self._closed = False
        self.status, self.reason = reader.status, reader.reason.decode("latin-1")

    def beginning(self, most: int) -> bytes:
        """Return the body's first bytes, at most so many, and close the answer.

        :raises HttpError: it is incomplete.
        """
        head = b""
        for piece in self.stream():
            head += piece
            if len(head) > most:
                break
        self.close()
        return head[:most]

    def stream(self) -> Iterator[bytes]:
        """Yield the body piece by piece.

        :raises HttpError: it is incomplete.
        """
        reader = self._reader
        try:
            while True:
                pieces, reader.body = reader.body, []
                yield from pieces
                if reader.complete:
                    break
                self._pool.more(self._connection, reader)
        finally:
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.release_connection(self._connection, self._reader)

    def shutdown(self) -> None:
        """End a read that waits in another thread."""
        with contextlib.suppress(OSError):
            # Not with the TLS socket's method: that thread uses its state.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


class HttpClient:
    """Sends requests to the server of a URL; ``authority`` is a file of CA certificates, read again when it changes."""

    def __init__(self, url: str, authority: Path | None = None, connect: float = 5.0) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._name, self._connect, self._authority = parts.netloc, connect, authority
        self._pooled: list[socket.socket] = []
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._signature: tuple[tuple[int, int, int], ...] = ()

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes | None, seconds: float) -> Answer:
        """Send a request.

        :param path: with its query.
        :param seconds: how long the server may send nothing.
        :returns: the answer, whose body isn't read yet.
        :raises HttpError: there is no answer, or the path has a character that would end it.
        :raises OSError: the file of CA certificates can't be read.
        """
        if not path.isascii() or not path.isprintable() or " " in path:
            raise HttpError("the path of a request has a space, a control character, or one that isn't ASCII")
        head = [f"{method} {path} HTTP/1.1", f"Host: {self._name}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            head.append(f"Content-Length: {len(body)}")
        sent = "\r\n".join((*head, "", "")).encode("latin-1") + (body or b"")
        while True:
            connection, pooled = self._get()
            reader = _Reader()
            try:
                connection.settimeout(seconds)
                connection.sendall(sent)
                while not reader.in_body:
                    self._receive(connection, reader)
                return Answer(self, connection, reader)
            except _TimedOut as error:
                connection.close()
                raise HttpError(str(error)) from error
            except (OSError, HttpError) as error:
                connection.close()
                # The server may have closed a pooled connection while the request was sent.
                if not (pooled and method in REPEATABLE):
                    raise HttpError(str(error)) from error
            except BaseException:
                connection.close()
                raise

    def close(self) -> None:
        with self._lock:
            pooled, self._pooled = self._pooled, []
        for connection in pooled:
            connection.close()

    def more(self, connection: socket.socket, reader: _Reader) -> None:
        """Read more of an answer.

        :raises HttpError: it ends too early.
        """
        try:
            self._receive(connection, reader)
        except OSError as error:
            raise HttpError(str(error)) from error

    def release_connection(self, connection: socket.socket, reader: _Reader) -> None:
        """Keep an answer's connection for the next request, or close it."""
        if reader.complete and reader.keep:
            with self._lock:
                if len(self._pooled) < POOL_SIZE:
                    self._pooled.append(connection)
                    return
        connection.close()

    # Connections.

    def _get(self) -> tuple[socket.socket, bool]:
        """Return a connection, and whether it is a pooled one."""
        while True:
            with self._lock:
                connection = self._pooled.pop() if self._pooled else None
            if connection is None:
                try:
                    return self._open(), False
                except _UnreadableFile as error:
                    raise OSError(str(error)) from error
                except OSError as error:
                    raise HttpError(str(error)) from error
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            if not poll.poll(0):
                return connection, True
            # The server has closed it: without a request there is nothing else to read.
            connection.close()

    def _open(self) -> socket.socket:
        context = self._trust() if self._tls else None
        plain = socket.create_connection((self._host, self._port), self._connect)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return context.wrap_socket(plain, server_hostname=self._host) if context else plain
        except BaseException:
            plain.close()
            raise

    def _trust(self) -> ssl.SSLContext:
        with self._lock:
            try:
                now = signature(self._authority or "")
                if self._context is None or now != self._signature:
                    self._context = ssl.create_default_context(cafile=self._authority)
                    self._context.minimum_version = ssl.TLSVersion.TLSv1_2
                    # Python 3.13's default; it refuses authorities without key identifiers, as EKS's is.
                    self._context.verify_flags &= ~ssl.VERIFY_X509_STRICT
                    self._context.set_alpn_protocols(["http/1.1"])
                    self._signature = now
            except OSError as error:
                raise _UnreadableFile(f"{self._authority}: {error}") from error
            return self._context

    def _receive(self, connection: socket.socket, reader: _Reader) -> None:
        try:
            data = connection.recv(CHUNK)
        except TimeoutError as error:
            raise _TimedOut("the server doesn't answer: read timed out") from error
        if not data:
            if reader.in_body and not reader.bounded:
                reader.complete = True
                return
            raise HttpError("the server closed the connection")
        try:
            reader.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise HttpError(f"the server's answer isn't HTTP: {error}") from error


class _TimedOut(HttpError):
    """The server may only be slow, so the request isn't sent again."""


class _UnreadableFile(OSError):
    """The authority's file can't be read."""
