# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to HTTP servers, as the machine reaches them on which the module runs."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import time
import typing as t

# Seconds to connect, to send, and for the whole response.
TIMEOUT = 5
# More of a response isn't read.
MAX_BODY = 64 * 1024

# Requests a URL and returns the HTTP status, or 0 without a response.
Probe = t.Callable[[str], int]


class Answer(t.NamedTuple):
    """The response to a POST.

    :param status: the HTTP status; 0 without a response.
    :param failure: why there is none: ``refused``, ``timeout``, ``tls``, ``unreachable`` or ``no_http``.
    :param text: the response's body, or the error's text.
    """

    status: int
    failure: str
    text: str


# Posts JSON to a URL.
Post = t.Callable[[str, str], Answer]


def probe(url: str) -> int:
    """Return the status of a GET, or 0 without a response.

    Certificates are not verified, because kube-scheduler signs its own.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        connection, path = _connection(url, context)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException, ValueError):
        return 0
    return status


def post(url: str, body: str, context: ssl.SSLContext | None = None) -> Answer:
    """Post JSON, without a proxy.

    :param context: of TLS; by default the machine's authorities verify the server's certificate.
    """
    try:
        connection, path = _connection(url, context or ssl.create_default_context())
        with contextlib.closing(connection):
            connection.request("POST", path, body.encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Answer(response.status, "", response.read(MAX_BODY).decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(0, _failure(error), " ".join(str(error).split()) or type(error).__name__)


def _failure(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    # Until Python 3.10 they are two.
    if isinstance(error, (TimeoutError, socket.timeout)):
        return "timeout"
    if isinstance(error, ssl.SSLError):
        return "tls"
    return "unreachable" if isinstance(error, OSError) else "no_http"


def _connection(url: str, context: ssl.SSLContext) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection to a URL's server, which isn't open yet, and the URL's path."""
    scheme, _colon, rest = url.partition("://")
    address, slash, path = rest.partition("/")
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    if scheme == "https":
        connection = http.client.HTTPSConnection(address, timeout=TIMEOUT, context=context)
    connection.response_class = _Response
    return connection, slash + path


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *words: t.Any, **options: t.Any) -> None:
        super().__init__(sock, *words, **options)
        self.fp = io.BufferedReader(_Bytes(sock))


class _Bytes(io.RawIOBase):
    """A socket's bytes within ``TIMEOUT`` together: a server may send one of them at a time, or heads without end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._file = sock, sock.makefile("rb", 0)
        self._end = time.monotonic() + TIMEOUT

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: t.Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()
