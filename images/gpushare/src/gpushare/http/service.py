# SPDX-License-Identifier: GPL-3.0-or-later
"""Common parts of both servers: HTTP with health, readiness, metrics and version, logging, and termination.

With TLS and an authority of client certificates, everything but health and readiness requires a client certificate.
There are no debug endpoints. An invalid request is answered in JSON with a 4xx; an internal error is a 500 without
details and is logged in full.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TextIO, cast
from urllib.parse import parse_qs, unquote

import gpushare
from gpushare.http.server import HttpServer, Message, Reply
from gpushare.http.tls import VERIFIED, Tls
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

# The largest request of a scheduler that sends whole nodes, for some thousands of them.
BODY_BYTES = 64 * 1024 * 1024
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
# For kubelet's probes, which have no certificate.
OPEN_TO_ALL = ("/healthz", "/readyz")
# There is nothing below these.
COMMON = (*OPEN_TO_ALL, "/metrics", "/version")


@dataclasses.dataclass(frozen=True)
class Request:
    """A request; ``rest`` is the path after the route's prefix, without slashes at its ends."""

    method: str
    path: str
    rest: str
    query: Mapping[str, list[str]]
    body: bytes

    def json(self) -> Any:
        """Parse the body as JSON.

        :raises BadRequest: it isn't JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the request's body is no JSON: {error}") from error


@dataclasses.dataclass(frozen=True)
class Response:
    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class BadRequest(Exception):
    """A client's error, which is answered with ``status``; the message is one sentence."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


Handler = Callable[[Request], Response]
# Handlers by method and prefix of the path; the longest prefix wins.
Routes = Mapping[tuple[str, str], Handler]


def answer(value: Any, status: int = 200) -> Response:
    """Make a response of a value as JSON."""
    return Response(status, json.dumps(value, separators=(",", ":")).encode())


def text(value: str, status: int = 200) -> Response:
    """Make a response of plain text."""
    return Response(status, value.encode() + b"\n", TEXT)


class Service:
    """An HTTP server with the common endpoints and ``routes`` of its own.

    ``readiness`` returns None when ready, otherwise the reason. Port 0 is a free one; see :attr:`port`.
    """

    def __init__(
        self,
        name: str,
        address: str,
        port: int,
        readiness: Callable[[], str | None],
        routes: Routes | None = None,
        registry: CollectorRegistry = REGISTRY,
        threads: int = 64,
        tls: Tls | None = None,
    ) -> None:
        """
        :param name: of the logger.
        :param registry: of the metrics.
        :param threads: the maximum of connections, each of which has a thread.
        :param tls: the certificates' files; None for plain HTTP.
        """
        self._log, self._tls = logging.getLogger(name), tls
        self._server = HttpServer(self._reply, address, port, threads, BODY_BYTES, tls)
        self._readiness, self._registry = readiness, registry
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/healthz"): lambda _: text("ok"),
            ("GET", "/readyz"): self._readyz,
            ("GET", "/metrics"): lambda _: Response(200, generate_latest(self._registry), CONTENT_TYPE_LATEST),
            ("GET", "/version"): lambda _: text(gpushare.__version__),
            **(routes or {}),
        }
        self._prefixes = sorted({prefix for _method, prefix in self._routes}, key=len, reverse=True)

    def start(self) -> None:
        """Listen, and serve in threads.

        :raises OSError: the address can't be used, or a file of TLS is invalid.
        """
        self._server.start()

    def stop(self) -> None:
        """Stop, after answering running requests for some seconds."""
        self._server.stop()

    @property
    def port(self) -> int:
        return self._server.port

    def _readyz(self, _request: Request) -> Response:
        reason = self._readiness()
        return text("ok") if reason is None else text(reason, 503)

    def _reply(self, message: Message) -> Reply:
        response = self._respond(message)
        headers = [
            ("Content-Type", response.content_type),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        return Reply(f"{response.status} {HTTPStatus(response.status).phrase}", headers, response.body)

    def _respond(self, message: Message) -> Response:
        method = message.method
        target, _mark, question = message.target.decode("latin-1").partition("?")
        if "://" in target:
            # A request as for a proxy: only the path counts.
            target = "/" + target.partition("://")[2].partition("/")[2]
        path = unquote(target, errors="replace") if "%" in target else target
        fitting = (one for one in self._prefixes if path == one or (one not in COMMON and path.startswith(one + "/")))
        prefix = next(fitting, None)
        if prefix is None:
            return answer({"error": f"there is nothing at {path}"}, 404)
        protected = self._tls is not None and self._tls.client_ca and prefix not in OPEN_TO_ALL
        if protected and message.client != VERIFIED:
            return answer({"error": "a client certificate is needed here"}, 403)
        handler = self._routes.get(("GET" if method == "HEAD" else method, prefix))
        if handler is None:
            allowed = ", ".join(sorted(one for one, at in self._routes if at == prefix))
            refusal = answer({"error": f"{path} takes {allowed}, not {method}"}, 405)
            return dataclasses.replace(refusal, headers=(("Allow", allowed),))
        try:
            query = parse_qs(question, keep_blank_values=True, max_num_fields=100) if question else {}
            body = message.body if method not in ("GET", "HEAD") else b""
            return handler(Request(method, path, path[len(prefix) :].strip("/"), query, body))
        except BadRequest as error:
            return answer({"error": str(error)}, error.status)
        except ValueError as error:
            # parse_qs raises it for too many fields; handlers raise BadRequest.
            self._log.exception("%s %s", method, path)
            return answer({"error": f"the request can't be read: {error}"}, 400)
        except Exception:
            self._log.exception("%s %s", method, path)
            return answer({"error": "internal error; see the log"}, 500)


def termination_signals() -> set[signal.Signals]:
    """Block the signals that end a server, and return them for ``sigwait``; call it before threads are started.

    They are delivered only to the thread that waits for them. A handler that sets an event would deadlock if it
    interrupted the wait for that event.
    """
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    return signals


# --------------------------------------------------------------------------- log


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row.update(cast(Mapping[str, Any], getattr(record, "data", {})))
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row, separators=(",", ":"), default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        data = cast(Mapping[str, Any], getattr(record, "data", {}))
        return line + "".join(f" {key}={value}" for key, value in data.items())


def logger(name: str, log_format: str = "text", level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Set up the process's log (standard error by default) and return the logger of this name.

    :param log_format: ``text`` or ``json``.
    :param level: ``debug``, ``info``, ``warning`` or ``error``.

    Fields are passed beside the message: ``log.info("bound", extra={"data": {"pod": …}})``; in JSON they are keys.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    return logging.getLogger(name)
