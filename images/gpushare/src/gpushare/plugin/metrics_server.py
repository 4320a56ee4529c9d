# SPDX-License-Identifier: GPL-3.0-or-later
"""Serve the device plugin's metrics to others, from a process of its own.

The plugin may have the capability SYS_ADMIN and kubelet's sockets. So it listens on no port itself: this process has
neither, and reads the page from the plugin's status socket.
"""

from __future__ import annotations

import http.client
import socket

from gpushare.http.service import Request, Response, text

# A page takes the plugin milliseconds.
READ_SECONDS = 5.0


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=READ_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class PluginPage:
    """The handler of ``/metrics``: the page of the plugin whose status socket has this path."""

    def __init__(self, status_socket: str) -> None:
        self._path = status_socket

    def __call__(self, _request: Request) -> Response:
        connection = _Connection(self._path)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            return Response(answer.status, answer.read(), answer.headers.get("Content-Type", ""))
        except (OSError, http.client.HTTPException) as error:
            return text(f"the device plugin doesn't answer on {self._path}: {error}", 503)
        finally:
            connection.close()
