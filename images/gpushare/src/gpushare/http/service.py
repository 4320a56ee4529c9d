# SPDX-License-Identifier: GPL-3.0-or-later
"""Common parts of both servers: HTTP with health, readiness, metrics and version, logging, and termination.

Only requests that change something have bodies of more than some KiB, and only those of clients that are known.
There are no debug endpoints. An invalid request is answered in JSON with a 4xx; an internal error is a 500 without
details and is logged in full.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TextIO, cast
from urllib.parse import unquote

import gpushare
from gpushare.http.limits import ANONYMOUS, BODY_BYTES, SMALL_BODY_BYTES, Limits
from gpushare.http.server import CHUNK, Endpoint, HttpServer, Message, Reply
from gpushare.shared._core.untrusted import line, lines
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
# There is nothing below these.
COMMON = ("/healthz", "/readyz", "/metrics", "/version")
# Methods without a body.
READS = ("GET", "HEAD")
# The objects of a larger body may take 25 times its size, so one such request is handled at a time.
LARGE_BODY_BYTES = 1024 * 1024
# The page of metrics is generated at most once in this time, however often clients request it.
KEPT_SECONDS = 1.0
# A few servers of Prometheus, and as many connections of others.
METRICS_LIMITS = Limits(connections=64, anonymous=32, peer=8)
# A server ends within so many seconds after SIGTERM; the pods' terminationGracePeriodSeconds are more.
STOP_SECONDS = 8.0
# The longest time slice of a thread; Python's default of 5 ms would be longer than most requests take.
SWITCH_SECONDS = 0.0005
# Characters of a message in the log, and of a field.
LONGEST_RECORD = 8000
# malloc.h's number of this parameter.
_M_MMAP_THRESHOLD = -3


@dataclasses.dataclass(frozen=True)
class Request:
    """A request.

    ``rest`` is the path after the route's prefix, without slashes at its ends, ``authorization`` the header's value,
    and ``peer`` the client's address.
    """

    method: str
    path: str
    rest: str
    body: bytes | bytearray
    authorization: str = ""
    peer: str = ""

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
    body: bytes | bytearray
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
# Why a request isn't allowed; None if it is.
Guard = Callable[[Request], Response | None]


def answer(value: Any, status: int = 200) -> Response:
    """Make a response of a value as JSON."""
    return Response(status, to_json(value))


def to_json(value: Any) -> bytes:
    """Format a value as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def text(value: str, status: int = 200) -> Response:
    """Make a response of plain text."""
    return Response(status, value.encode() + b"\n", TEXT)


def common(readiness: Callable[[], str | None], registry: CollectorRegistry) -> dict[tuple[str, str], Handler]:
    """Return the routes that both servers have.

    :param readiness: returns None when ready, otherwise the reason.
    """

    def ready(_request: Request) -> Response:
        reason = readiness()
        return text("ok") if reason is None else text(reason, 503)

    return {
        ("GET", "/healthz"): lambda _: text("ok"),
        ("GET", "/readyz"): ready,
        ("GET", "/metrics"): lambda _: Response(200, generate_latest(registry), CONTENT_TYPE_LATEST),
        ("GET", "/version"): lambda _: text(gpushare.__version__),
    }


def metrics_service(
    name: str, endpoint: Endpoint, page: Handler, guard: Guard, clock: Callable[[], float] = time.monotonic
) -> Service:
    """Make a server of ``/metrics`` for a Prometheus elsewhere, and of nothing else.

    :param name: of the logger.
    :param endpoint: others can reach it.
    :param page: generates the metrics.
    :param guard: decides who may read them.
    :param clock: monotonic, in seconds.
    """
    endpoint = dataclasses.replace(endpoint, trusted=False)
    return Service(name, endpoint, {("GET", "/metrics"): _Kept(page, clock)}, guard, METRICS_LIMITS)


class _Kept:
    """A page that is generated at most once in ``KEPT_SECONDS``."""

    def __init__(self, page: Handler, clock: Callable[[], float]) -> None:
        self._page, self._clock, self._lock = page, clock, threading.Lock()
        self._made: tuple[float, Response] | None = None

    def __call__(self, request: Request) -> Response:
        with self._lock:
            if self._made is None or self._clock() - self._made[0] >= KEPT_SECONDS:
                self._made = self._clock(), self._page(request)
            return self._made[1]


class Service:
    """An HTTP server of ``routes``."""

    def __init__(
        self, name: str, endpoint: Endpoint, routes: Routes, guard: Guard | None = None, limits: Limits | None = None
    ) -> None:
        """
        :param name: of the logger.
        :param routes: handlers; see :func:`common`.
        :param guard: checks each request for which there is a route.
        """
        self._log, self._guard, self._routes = logging.getLogger(name), guard, routes
        self._large = threading.Lock()
        self.endpoint, self._server = endpoint, HttpServer(self, endpoint, limits)
        self._prefixes = sorted({prefix for _method, prefix in self._routes}, key=len, reverse=True)

    def start(self) -> None:
        """Listen, and serve in threads.

        :raises OSError: the endpoint can't be used, or a file of TLS is invalid.
        """
        self._server.start()

    def stop(self) -> None:
        """Stop, after answering running requests for some seconds."""
        self._server.stop()

    @property
    def port(self) -> int:
        return self._server.port

    def body_limit(self, method: str, target: bytes, client: str) -> int:
        """Return the largest body of a request in bytes, before it is read."""
        if client == ANONYMOUS or method in READS:
            return SMALL_BODY_BYTES
        return BODY_BYTES if (method, self._prefix(_path(target))) in self._routes else SMALL_BODY_BYTES

    def answer(self, message: Message) -> Reply:
        """Answer a request, in its connection's thread."""
        with self._large if len(message.body) > LARGE_BODY_BYTES else contextlib.nullcontext():
            response, authorized = self._respond(message)
        headers = [
            ("Content-Type", response.content_type),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        status = f"{response.status} {HTTPStatus(response.status).phrase}"
        return Reply(status, headers, response.body, authorized)

    def _prefix(self, path: str) -> str | None:
        fitting = (
            prefix
            for prefix in self._prefixes
            if path == prefix or (prefix not in COMMON and path.startswith(prefix + "/"))
        )
        return next(fitting, None)

    def _respond(self, message: Message) -> tuple[Response, bool]:
        """Return the answer, and whether the guard has allowed the request."""
        method, path = message.method, _path(message.target)
        prefix = self._prefix(path)
        if prefix is None:
            return answer({"error": f"there is nothing at {path}"}, 404), False
        handler = self._routes.get(("GET" if method == "HEAD" else method, prefix))
        if handler is None:
            allowed = ", ".join(sorted(allowed_method for allowed_method, at in self._routes if at == prefix))
            refusal = answer({"error": f"{path} takes {allowed}, not {method}"}, 405)
            return dataclasses.replace(refusal, headers=(("Allow", allowed),)), False
        authorized = False
        try:
            body = b"" if method in READS else message.body
            rest = path[len(prefix) :].strip("/")
            request = Request(method, path, rest, body, message.authorization, message.peer)
            if self._guard is not None:
                unauthorized = self._guard(request)
                if unauthorized is not None:
                    return unauthorized, False
                authorized = True
            return handler(request), authorized
        except BadRequest as error:
            return answer({"error": str(error)}, error.status), authorized
        except Exception:
            self._log.exception("%s %s", method, path)
            return answer({"error": "internal error; see the log"}, 500), authorized


def start_all(services: Sequence[Service]) -> None:
    """Start services, or none of them.

    :raises OSError: one can't be started; the message names its endpoint.
    """
    _return_large_memory()
    for number, service in enumerate(services):
        try:
            service.start()
        except OSError as error:
            for started in services[:number]:
                started.stop()
            raise OSError(f"{service.endpoint}: {error}") from error


def _return_large_memory() -> None:
    """Have glibc return the memory of a large body when it ends.

    By default its threshold grows with each large body, and then each thread's arena keeps one. Other C libraries have
    no ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2 * CHUNK)


def _path(target: bytes) -> str:
    """Return the path of a request's target; nothing here has a query."""
    path = target.decode("latin-1").partition("?")[0]
    if "://" in path:
        # A request as for a proxy: only the path counts.
        path = "/" + path.partition("://")[2].partition("/")[2]
    return unquote(path, errors="replace") if "%" in path else path


def termination_signals() -> set[signal.Signals]:
    """Block the signals that end a server, and return them for ``sigwait``; call it before threads are started.

    They are delivered only to the thread that waits for them. A handler that sets an event would deadlock if it
    interrupted the wait for that event.
    """
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    return signals


def stop_within(*stages: tuple[float, Sequence[Callable[[], object]]]) -> bool:
    """Stop the parts of a server, those of one stage side by side, since each of them may wait for an API that hangs.

    :param stages: seconds from now, and the calls that stop the parts. A stage begins when the one before has ended, or
        when its seconds have passed.
    :returns: whether all have ended.
    """
    began, threads = time.monotonic(), list[threading.Thread]()
    for seconds, stops in stages:
        stage = [threading.Thread(target=stop, name="stop", daemon=True) for stop in stops]
        for thread in stage:
            thread.start()
        for thread in stage:
            thread.join(max(0.0, began + seconds - time.monotonic()))
        threads += stage
    return not any(thread.is_alive() for thread in threads)


def end_process(stopped: bool) -> int:
    """Return the exit status of a server that has stopped; end the process at once if a part of it hangs."""
    if not stopped:
        logging.getLogger("gpushare").warning("a part hasn't ended within %.0f s; exiting without it", STOP_SECONDS)
        # Python would wait for threads of gRPC.
        os._exit(0)
    return 0


# --------------------------------------------------------------------------- log


class _JsonFormatter(logging.Formatter):
    """One line of ASCII for each record; whoever shows its values decides how."""

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
    """One line for each record, whatever its values contain; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        data = cast(Mapping[str, Any], getattr(record, "data", {}))
        fields = "".join(f" {key}={_field(value)}" for key, value in data.items())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        message = line(record.getMessage(), LONGEST_RECORD)
        head = f"{self.formatTime(record)} {record.levelname} {record.name}: {message}{fields}"
        return head + lines(trace).replace("\n", "\n  ")


def _field(value: Any) -> str:
    """Return a field's value; in quotes where it would look like several fields."""
    text = line(value, LONGEST_RECORD)
    return json.dumps(text, ensure_ascii=False) if " " in text and ("=" in text or '"' in text) else text


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
        handler.setFormatter(_TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    return logging.getLogger(name)
