# SPDX-License-Identifier: GPL-3.0-or-later
"""A proxy in front of a real API server that fails requests as networks and overloaded API servers do.

A request may be refused (409, 429, 500), delayed beyond its client's timeout and executed all the same, or lose its
answer or its connection before or after it was executed. Watches break in the middle.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import ssl
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

READ_FAULTS = ("429", "500", "500 after", "slow", "slow after", "dropped", "dropped after")
# A read has no conflict.
WRITE_FAULTS = ("409", *READ_FAULTS)


class ChaosProxy:
    """Serves while it is entered; ``rate`` of the requests fail, which may be changed at any time."""

    def __init__(self, upstream: str, context: ssl.SSLContext, seed: int, slow: tuple[float, float]) -> None:
        self.upstream, self.context, self.slow = upstream.partition("//")[2], context, slow
        self.random, self.rate = random.Random(seed), 0.0
        self.done: Counter[str] = Counter()
        # The faults of this round, of reads and of writes.
        self._left: dict[bool, list[str]] = {True: [], False: []}
        self._lock = threading.Lock()
        self.ending = threading.Event()
        proxy = self

        class Handler(_Handler):
            chaos = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ChaosProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()

    def fault(self, method: str) -> str:
        if self.random.random() >= self.rate:
            return ""
        is_read = method == "GET"
        kinds = READ_FAULTS if is_read else WRITE_FAULTS
        with self._lock:
            # All of them in any order, and again: if each were chosen by chance, a run might lack one.
            left = self._left[is_read] or self.random.sample(kinds, len(kinds))
            fault, self._left[is_read] = left[-1], left[:-1]
        return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore connections of clients that were killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    chaos: ChaosProxy
    # A response is several writes, and none waits for the acknowledgement of the first.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        chaos = self.chaos
        self.there = http.client.HTTPSConnection(chaos.upstream, context=chaos.context, timeout=60)

    def finish(self) -> None:
        self.there.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if "watch=1" in self.path:
                self.watch()
            else:
                self.one()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def one(self) -> None:
        chaos, body = self.chaos, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = chaos.fault(self.command)
        chaos.done[fault or "well"] += 1
        if fault.isdigit():
            return self.refuse(int(fault))
        if fault == "dropped":
            return self.drop()
        if fault == "slow":
            time.sleep(chaos.random.uniform(*chaos.slow))
        response = self.forward(body)
        answer = response.read()
        if fault == "500 after":
            return self.refuse(500)
        if fault == "dropped after":
            return self.drop()
        if fault == "slow after":
            time.sleep(chaos.random.uniform(*chaos.slow))
        return self.answer(response.status, answer, response.headers.get("Content-Type", "application/json"))

    def forward(self, body: bytes) -> http.client.HTTPResponse:
        headers = {key: value for key, value in self.headers.items() if key.lower() in ("content-type", "accept")}
        self.there.request(self.command, self.path, body or None, headers)
        return self.there.getresponse()

    def refuse(self, status: int) -> None:
        self.answer(status, json.dumps({"kind": "Status", "message": f"chaos {status}"}).encode(), "application/json")

    def drop(self) -> None:
        self.close_connection = True
        self.connection.close()

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def watch(self) -> None:
        chaos = self.chaos
        if chaos.fault("GET"):
            return self.refuse(500)
        response = self.forward(b"")
        if response.status != 200:
            return self.answer(response.status, response.read(), "application/json")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while not chaos.ending.is_set():
            data = response.read1(1 << 16)
            if not data:
                break
            if chaos.random.random() < chaos.rate * 0.1:
                return self.drop()
            if chaos.random.random() < chaos.rate * 0.2:
                time.sleep(chaos.random.uniform(0, chaos.slow[0]))
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True
        return None
