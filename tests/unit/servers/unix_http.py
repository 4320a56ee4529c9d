# SPDX-License-Identifier: GPL-3.0-or-later
"""HTTP over a Unix socket."""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path


class Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask_socket(path: Path, page: str) -> tuple[int, str]:
    """HTTP status and text of a page."""
    with contextlib.closing(Connection(path)) as connection:
        connection.request("GET", page)
        answer = connection.getresponse()
        return answer.status, answer.read().decode().strip()
