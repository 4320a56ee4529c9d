# SPDX-License-Identifier: GPL-3.0-or-later
"""What both servers have in common: HTTP with health, readiness, metrics and version, and their log.

There are no debug endpoints. Whatever nonsense a client sends is answered in JSON with a 4xx; a failure of ours is a
500 that says nothing of our inside and is logged in full.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO, cast
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from waitress import wasyncore
from waitress.server import create_server

import gpushare

# The largest request of a scheduler that sends whole nodes, for some thousands of them.
BODY_BYTES = 64 * 1024 * 1024
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


@dataclasses.dataclass(frozen=True)
class Request:
    """``rest`` is what follows the route's prefix, without slashes at its ends."""

    method: str
    path: str
    rest: str
    query: Mapping[str, list[str]]
    body: bytes

    def json(self) -> Any:
        """The body as JSON.

        :raises BadRequest: it is none.
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
    """The client's mistake, in one sentence; answered with ``status``."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


Handler = Callable[[Request], Response]
# A method and the beginning of a path; the longest that fits is taken.
Routes = Mapping[tuple[str, str], Handler]


def answer(value: Any, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(status, json.dumps(value, separators=(",", ":")).encode())


def text(value: str, status: int = 200) -> Response:
    return Response(status, value.encode() + b"\n", TEXT)


class Service:
    """An HTTP server with the common endpoints and ``routes`` of its own.

    ``readiness`` gives None when ready, else the reason why not. ``port`` 0 takes a free one; :attr:`port` tells which.
    """

    def __init__(
        self,
        name: str,
        address: str,
        port: int,
        readiness: Callable[[], str | None],
        routes: Routes | None = None,
        registry: CollectorRegistry = REGISTRY,
        threads: int = 8,
    ) -> None:
        self._log = logging.getLogger(name)
        self._address, self._wanted_port, self._threads = address, port, threads
        self._readiness, self._registry = readiness, registry
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/healthz"): lambda _: text("ok"),
            ("GET", "/readyz"): self._readyz,
            ("GET", "/metrics"): lambda _: Response(200, generate_latest(self._registry), CONTENT_TYPE_LATEST),
            ("GET", "/version"): lambda _: text(gpushare.__version__),
            **(routes or {}),
        }
        self._prefixes = sorted({prefix for _method, prefix in self._routes}, key=len, reverse=True)
        self._server: Any = None
        self._sockets: dict[int, Any] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, and serve in a thread.

        :raises OSError: the address can't be had.
        """
        self._stopping.clear()
        # Everything stays in memory: the container's file system may be read-only.
        self._server = create_server(
            self.wsgi,
            map=self._sockets,
            host=self._address,
            port=self._wanted_port,
            threads=self._threads,
            ident="gpushare",
            max_request_body_size=BODY_BYTES,
            inbuf_overflow=BODY_BYTES + 1,
            outbuf_overflow=BODY_BYTES,
            clear_untrusted_proxy_headers=True,
        )
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests; those in work are finished first, for some seconds."""
        if self._server is None or self._thread is None:
            return
        self._server.task_dispatcher.shutdown(cancel_pending=True, timeout=5)
        self._stopping.set()
        # One that listens on several addresses can't be woken up and notices by itself.
        getattr(self._server, "pull_trigger", int)()
        self._thread.join(5)
        # Only now: the numbers of closed sockets may be taken by others while that thread still looks at them.
        wasyncore.close_all(self._sockets, ignore_all=True)
        self._server = None

    @property
    def port(self) -> int:
        if self._server is None:
            return self._wanted_port
        listening = getattr(self._server, "effective_listen", None)
        return int(listening[0][1] if listening else self._server.effective_port)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            wasyncore.loop(timeout=0.2, use_poll=True, map=self._sockets, count=1)

    def _readyz(self, _request: Request) -> Response:
        reason = self._readiness()
        return text("ok") if reason is None else text(reason, 503)

    def wsgi(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        response = self._respond(environ)
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        start_response(f"{response.status} {_PHRASES.get(response.status, 'Status')}", headers)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [response.body]

    def _respond(self, environ: Mapping[str, Any]) -> Response:
        method, path = str(environ.get("REQUEST_METHOD", "GET")), str(environ.get("PATH_INFO") or "/")
        # WSGI hands bytes over as Latin-1.
        path = path.encode("latin-1", "replace").decode("utf-8", "replace")
        prefix = next((one for one in self._prefixes if path == one or path.startswith(one + "/")), None)
        if prefix is None:
            return answer({"error": f"there is nothing at {path}"}, 404)
        handler = self._routes.get(("GET" if method == "HEAD" else method, prefix))
        if handler is None:
            allowed = ", ".join(sorted(one for one, at in self._routes if at == prefix))
            refusal = answer({"error": f"{path} takes {allowed}, not {method}"}, 405)
            return dataclasses.replace(refusal, headers=(("Allow", allowed),))
        try:
            query = parse_qs(str(environ.get("QUERY_STRING") or ""), keep_blank_values=True, max_num_fields=100)
            body = environ["wsgi.input"].read() if method not in ("GET", "HEAD") else b""
            return handler(Request(method, path, path[len(prefix) :].strip("/"), query, body))
        except BadRequest as error:
            return answer({"error": str(error)}, error.status)
        except ValueError as error:
            # What parse_qs says of too many fields; handlers turn theirs into BadRequest.
            self._log.exception("%s %s", method, path)
            return answer({"error": f"the request can't be read: {error}"}, 400)
        except Exception:
            self._log.exception("%s %s", method, path)
            return answer({"error": "internal error; see the log"}, 500)


_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


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
    """Set the process's log up (to standard error unless told otherwise) and give the logger of this name.

    Facts go beside the message: ``log.info("bound", extra={"data": {"pod": …}})``; JSON has them as keys of their own.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # They warn of full queues and repeated requests; our own metrics and messages say that better.
    for noisy in ("waitress.queue", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return logging.getLogger(name)
