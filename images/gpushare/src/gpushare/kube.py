# SPDX-License-Identifier: GPL-3.0-or-later
"""The one door to the Kubernetes API: requests in plain JSON, and mirrors that follow a collection by list and watch.

Connection, TLS, and the service account's token (read again every minute) are the official client's. Its model classes
aren't used: a cluster has tens of thousands of pods, and a dict, or what ``slim`` leaves of it, is all we need.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, cast
from urllib.parse import urlencode

import urllib3
from kubernetes import config as kube_config
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException

import gpushare

Json = dict[str, Any]
PatchKind = Literal["merge", "strategic", "json"]
T = TypeVar("T")

PATCH_TYPES: dict[str, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}

CONNECT_SECONDS = 5.0
# A scheduler waits 30 s for a bind, which is two or three requests.
REQUEST_SECONDS = 8.0
# The API server sends a bookmark about every minute, so silence for longer means that the peer is gone.
WATCH_SILENCE_SECONDS = 150.0
WATCH_SECONDS = 280
PAGE = 500

log = logging.getLogger("gpushare.kube")


class KubeError(Exception):
    """The API server refused (its HTTP status), or couldn't be reached (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message or reason)
        self.status = status
        self.reason = reason
        self.message = message or reason

    @property
    def unreachable(self) -> bool:
        return self.status == 0

    @property
    def unsure(self) -> bool:
        """Whether a write may have been done in spite of this error."""
        return self.status == 0 or self.status >= 500


class Stream(Protocol):
    """The events of one watch, as they come; ``close`` may be called by another thread and ends the iteration."""

    def __iter__(self) -> Iterator[Json]: ...

    def close(self) -> None: ...


class Kube(Protocol):
    """What the servers need of the Kubernetes API; a path may carry a query. Every call raises :class:`KubeError`."""

    def get(self, path: str) -> Json: ...

    def post(self, path: str, body: Json) -> Json: ...

    def patch(self, path: str, body: Json | list[Json], kind: PatchKind = "merge") -> Json: ...

    def delete(self, path: str) -> Json: ...

    def watch(self, path: str) -> Stream: ...


# --------------------------------------------------------------------------- the real API


class KubeApi:
    """:class:`Kube` over the official client's connection."""

    def __init__(self, client: ApiClient, seconds: float = REQUEST_SECONDS) -> None:
        self._client = client
        self._client.user_agent = f"gpushare/{gpushare.__version__}"
        self._timeout = (CONNECT_SECONDS, seconds)

    def get(self, path: str) -> Json:
        return self._json("GET", path)

    def post(self, path: str, body: Json) -> Json:
        return self._json("POST", path, body)

    def patch(self, path: str, body: Json | list[Json], kind: PatchKind = "merge") -> Json:
        return self._json("PATCH", path, body, PATCH_TYPES[kind])

    def delete(self, path: str) -> Json:
        return self._json("DELETE", path)

    def watch(self, path: str) -> Stream:
        response = self._request("GET", path, None, "", (CONNECT_SECONDS, WATCH_SILENCE_SECONDS))
        if response.status != 200:
            with _api_errors():
                raise _refusal(response.status, response.reason or "", response.data)
        return _ResponseStream(response)

    def close(self) -> None:
        self._client.close()

    def _json(
        self, method: str, path: str, body: Json | list[Json] | None = None, kind: str = "application/json"
    ) -> Json:
        response = self._request(method, path, body, kind, self._timeout)
        with _api_errors():
            data = response.data
        if not 200 <= response.status < 300:
            raise _refusal(response.status, response.reason or "", data)
        try:
            return cast(Json, json.loads(data)) if data else {}
        except ValueError as error:
            raise KubeError(0, "NotJson", f"the API server's answer to {method} {path} is no JSON: {error}") from error

    def _request(
        self, method: str, path: str, body: Json | list[Json] | None, kind: str, timeout: tuple[float, float]
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = kind
        with _api_errors():
            verb, url, headers, sent, _form = self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            answer = self._client.call_api(verb, url, headers, sent, None, timeout)
        return cast(urllib3.BaseHTTPResponse, answer.response)


class _ResponseStream:
    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response
        self._closed = False

    def __iter__(self) -> Iterator[Json]:
        rest = b""
        try:
            with _api_errors():
                for chunk in self._response.stream(1 << 16, decode_content=True):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield _event(line)
        except KubeError:
            if not self._closed:
                raise
        finally:
            self._response.close()

    def close(self) -> None:
        self._closed = True
        # Closing alone wouldn't wake a thread that is waiting in a read.
        with contextlib.suppress(Exception):
            self._response.shutdown()


def _event(line: bytes) -> Json:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise KubeError(0, "NotJson", f"the API server's watch sent a line that is no JSON: {error}") from error
    if not isinstance(event, dict):
        raise KubeError(0, "NotJson", "the API server's watch sent a line that is no event")
    return event


@contextlib.contextmanager
def _api_errors() -> Iterator[None]:
    """Whatever the client raises when the API can't be reached becomes a :class:`KubeError` of status 0."""
    try:
        yield
    except ApiException as error:
        reason = str(error.reason or "")
        raise KubeError(int(error.status or 0), reason, str(error.body or reason)) from error
    except urllib3.exceptions.HTTPError as error:
        # What MaxRetryError says besides its reason are only addresses, which the log would repeat for ever.
        cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
        raise KubeError(0, type(cause).__name__, f"the API server can't be reached: {cause}") from error
    except (OSError, kube_config.ConfigException) as error:
        raise KubeError(0, type(error).__name__, f"the API server can't be asked: {error}") from error


def _refusal(status: int, reason: str, data: bytes) -> KubeError:
    """What a Kubernetes ``Status`` object, or any other body, says of a refusal."""
    try:
        body = json.loads(data)
        return KubeError(status, str(body.get("reason") or reason), str(body.get("message") or reason))
    except (ValueError, AttributeError):
        text = data[:300].decode("utf-8", "replace").strip()
        return KubeError(status, reason, text or f"HTTP status {status} {reason}")


class _OnlyDeadConnections(urllib3.Retry):
    """A kept-alive connection that died is replaced once; everything else, a timeout above all, is the caller's."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: urllib3.BaseHTTPResponse | None = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: TracebackType | None = None,
    ) -> Self:
        if isinstance(error, urllib3.exceptions.TimeoutError):
            raise error
        return super().increment(method, url, response, error, _pool, _stacktrace)


def from_environment(kubeconfig: str = "") -> KubeApi:
    """The API as this process can reach it: the named kubeconfig, else a pod's service account, else ``KUBECONFIG``.

    :raises KubeError: none of them works; status 0.
    """
    configuration = Configuration()
    try:
        if not kubeconfig and os.environ.get("KUBERNETES_SERVICE_HOST"):
            kube_config.load_incluster_config(client_configuration=configuration)
        else:
            kube_config.load_kube_config(config_file=kubeconfig or None, client_configuration=configuration)
    except (kube_config.ConfigException, OSError) as error:
        raise KubeError(0, "NoConfiguration", f"no way to reach the Kubernetes API: {error}") from error
    configuration.retries = _OnlyDeadConnections(total=1, connect=1, read=1, redirect=0, status=0, other=0)
    configuration.connection_pool_maxsize = 32
    return KubeApi(ApiClient(configuration))


# --------------------------------------------------------------------------- mirrors


def object_key(obj: Json) -> str:
    """``namespace/name``, or the name alone where there is no namespace."""
    metadata = obj.get("metadata") or {}
    name, namespace = str(metadata.get("name", "")), str(metadata.get("namespace") or "")
    return f"{namespace}/{name}" if namespace else name


def _as_it_is(obj: Json) -> Any:
    return obj


# Key, what was there before, what is there now; None where there was or is nothing.
OnChange = Callable[[str, T | None, T | None], None]


class Mirror(Generic[T]):
    """A collection of the API, kept in memory by list and watch; the last state stays while the API is away.

    ``slim`` turns an object into what is kept of it (the object itself unless told otherwise), or None to keep nothing.
    Callbacks run in the mirror's own thread, in the order of the events, once for each real change: neither a new list
    nor a repeated event calls them again where what is kept is equal. ``synced`` turns true after the first list's.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        query: Mapping[str, str] | None = None,
        slim: Callable[[Json], T | None] = _as_it_is,
        on_change: OnChange[T] | None = None,
        backoff: tuple[float, float] = (0.2, 10.0),
        page: int = PAGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._path, self._query = kube, path, dict(query or {})
        self._slim, self._page, self._clock = slim, page, clock
        self._first_pause, self._longest_pause = backoff
        self._items: dict[str, T] = {}
        self._callbacks: list[OnChange[T]] = [] if on_change is None else [on_change]
        self._lock = threading.Lock()
        self._synced, self._stopped = threading.Event(), threading.Event()
        self._heard: float | None = None
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None
        self._error = ""
        self.lists = 0

    # What callers see.

    def on_change(self, callback: OnChange[T]) -> None:
        """Add a callback; before :meth:`start`, so that it misses nothing."""
        self._callbacks.append(callback)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"mirror {self._path}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        if self._thread is not None:
            self._thread.join(5)

    @property
    def synced(self) -> bool:
        """The first list is in, and its callbacks have run."""
        return self._synced.is_set()

    def wait_synced(self, seconds: float | None = None) -> bool:
        return self._synced.wait(seconds)

    @property
    def fresh(self) -> float:
        """Seconds since the API server last said anything about this collection; infinite before it did."""
        return float("inf") if self._heard is None else self._clock() - self._heard

    @property
    def error(self) -> str:
        """Why the API server can't be followed just now, in its own words; empty while it can."""
        return self._error

    def items(self) -> list[T]:
        with self._lock:
            return list(self._items.values())

    def get(self, key: str) -> T | None:
        """The object ``namespace/name`` (or ``name`` where there is no namespace)."""
        with self._lock:
            return self._items.get(key)

    def __len__(self) -> int:
        return len(self._items)

    # The mirror's thread.

    def _run(self) -> None:
        version, pause = "", self._first_pause
        while not self._stopped.is_set():
            began = self._clock()
            try:
                if not version:
                    version = self._list()
                for at in self._watch(version):
                    version, pause = at, self._first_pause
                # A watch that ends at once would otherwise be asked for again without a break.
                wait = self._first_pause if self._clock() - began < 1 else 0.0
            except KubeError as error:
                if self._stopped.is_set():
                    return
                if error.status == 410:
                    log.info("%s: the watch is too old, listing again", self._path)
                    version = ""
                else:
                    self._error = error.message
                    log.warning("%s: %s; trying again in %.1f s", self._path, error.message, pause)
                wait, pause = pause * random.uniform(0.8, 1.2), min(pause * 2, self._longest_pause)
            except Exception:
                # An object of a shape that nobody expected must not end the following of all others.
                log.exception("%s: unexpected failure, listing again", self._path)
                version, wait, pause = "", pause, min(pause * 2, self._longest_pause)
            self._stopped.wait(wait)

    def _list(self) -> str:
        """Bring the mirror to what the API has now, page by page; the version to watch from."""
        seen: set[str] = set()
        token = ""
        while True:
            query = {**self._query, "limit": str(self._page)}
            if token:
                query["continue"] = token
            page = self._kube.get(f"{self._path}?{urlencode(query)}")
            self._contact()
            for obj in page.get("items") or []:
                seen.add(self._upsert(obj))
            metadata = page.get("metadata") or {}
            token = str(metadata.get("continue") or "")
            if not token:
                break
        for key in [key for key in self._items if key not in seen]:
            self._put(key, None)
        self.lists += 1
        self._synced.set()
        return str(metadata.get("resourceVersion", ""))

    def _watch(self, version: str) -> Iterator[str]:
        """Follow changes from a version on; the version of each event."""
        query = {
            **self._query,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(WATCH_SECONDS * random.uniform(0.9, 1.0))),
        }
        stream = self._kube.watch(f"{self._path}?{urlencode(query)}")
        with self._lock:
            self._stream = stream
        try:
            if self._stopped.is_set():
                return
            self._contact()
            for event in stream:
                obj = event.get("object") or {}
                kind = event.get("type")
                if kind == "ERROR":
                    code, reason = int(obj.get("code") or 500), str(obj.get("reason", ""))
                    raise KubeError(code, reason, str(obj.get("message", "")))
                self._contact()
                if kind == "DELETED":
                    self._put(object_key(obj), None)
                elif kind in ("ADDED", "MODIFIED"):
                    self._upsert(obj)
                yield str((obj.get("metadata") or {}).get("resourceVersion") or version)
        finally:
            with self._lock:
                self._stream = None
            stream.close()

    def _contact(self) -> None:
        self._heard, self._error = self._clock(), ""

    def _upsert(self, obj: Json) -> str:
        key = object_key(obj)
        self._put(key, self._slim(obj))
        return key

    def _put(self, key: str, now: T | None) -> None:
        before = self._items.get(key)
        if before == now:
            return
        with self._lock:
            if now is None:
                self._items.pop(key, None)
            else:
                self._items[key] = now
        for callback in self._callbacks:
            try:
                callback(key, before, now)
            except Exception:
                log.exception("%s: a callback failed on %s", self._path, key)
