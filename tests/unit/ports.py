# SPDX-License-Identifier: GPL-3.0-or-later
"""Ports of this machine, and servers on them that tests start."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port at which nothing listens, until a server of this test does.

    It stays bound while this process runs, without listening, so that the kernel gives it to no other program.
    A server listens there all the same if it sets SO_REUSEADDR, as those of Go and of Python do.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    _held.append(one)
    return int(one.getsockname()[1])


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    """Run a server of the standard library in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
