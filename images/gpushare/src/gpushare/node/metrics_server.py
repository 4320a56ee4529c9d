# SPDX-License-Identifier: GPL-3.0-or-later
"""Serve the metrics of a node's server to others, from a process of its own.

The server may have the capability SYS_ADMIN and kubelet's sockets. So it listens on no port itself: this process has
neither, and reads the page from the server's status socket.
"""

from __future__ import annotations

import http.client
import logging
import signal
import socket

from gpushare.api.client import Kube
from gpushare.api.reviews import Reviews
from gpushare.http.server import Endpoint
from gpushare.http.service import (
    STOP_SECONDS,
    Request,
    Response,
    end_process,
    metrics_service,
    start_all,
    stop_within,
    termination_signals,
    text,
)

log = logging.getLogger("gpushare.metrics")

# A page takes the server milliseconds.
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


class StatusPage:
    """The handler of ``/metrics``: the page of the server whose status socket has this path.

    :param server: its name, for messages.
    """

    def __init__(self, server: str, status_socket: str) -> None:
        self._server, self._path = server, status_socket

    def __call__(self, _request: Request) -> Response:
        connection = _Connection(self._path)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            return Response(answer.status, answer.read(), answer.headers.get("Content-Type", ""))
        except (OSError, http.client.HTTPException) as error:
            return text(f"{self._server} doesn't answer on {self._path}: {error}", 503)
        finally:
            connection.close()


def serve_metrics(server: str, endpoint: Endpoint, status_socket: str, kube: Kube) -> int:
    """Run ``--serve-metrics``.

    :param server: the command whose metrics these are.
    :param endpoint: others can reach it.
    :param status_socket: that server's.
    :param kube: decides whose token allows to read them.
    :returns: the exit status.
    """
    signals = termination_signals()
    service = metrics_service(f"{server}-metrics", endpoint, StatusPage(server, status_socket), Reviews(kube))
    try:
        start_all([service])
    except OSError as error:
        log.error("can't serve: %s", error)
        return 1
    log.info("started", extra={"data": {"metrics": service.port}})
    signal.sigwait(signals)
    log.info("stopping")
    return end_process(stop_within((STOP_SECONDS, [service.stop])))
