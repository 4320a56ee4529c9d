# SPDX-License-Identifier: GPL-3.0-or-later
"""The one door to the Kubernetes API: requests in plain JSON, and mirrors that follow a collection by list and watch.

In a pod the connection is ours (``account``), with a kubeconfig it is the official client's. Its model classes aren't
used: a cluster has tens of thousands of pods, and a dict, or what ``slim`` leaves of it, is all we need.
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
from typing import Any, Generic, Literal, Protocol, TypeVar, cast
from urllib.parse import urlencode

import gpushare
from gpushare.account import Account
from gpushare.http_client import HttpError

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
        """Whether a write may have been done, or may yet be done, in spite of this error."""
        return self.status == 0 or self.status >= 500


class Stream(Protocol):
    """The events of one watch, as they come; ``close`` may be called by another thread and ends the iteration."""

    def __iter__(self) -> Iterator[Json]: ...

    def close(self) -> None: ...


class Kube(Protocol):
    """What the servers need of the Kubernetes API; a path may carry a query. Every call raises :class:`KubeError`."""

    def get(self, path: str) -> Json: ...

    def post(self, path: str, body: Json) -> Json: ...

    def put(self, path: str, body: Json) -> Json: ...

    def patch(self, path: str, body: Json | list[Json], kind: PatchKind = "merge") -> Json: ...

    def delete(self, path: str) -> Json: ...

    def watch(self, path: str) -> Stream: ...


# --------------------------------------------------------------------------- the real API


class Answer(Protocol):
    """An HTTP answer whose head has come; reading raises :class:`KubeError`, ``OSError`` or :class:`HttpError`."""

    status: int
    reason: str

    @property
    def data(self) -> bytes: ...

    def stream(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...

    def shutdown(self) -> None:
        """End a read that waits in another thread."""


class Connection(Protocol):
    """Where requests go, and in whose name."""

    def request(
        self, method: str, path: str, headers: dict[str, str], body: Json | list[Json] | None, seconds: float
    ) -> Answer:
        """The answer, not read yet; raises :class:`KubeError`, ``OSError`` or :class:`HttpError`.

        :param seconds: how long the server may be silent.
        """

    def close(self) -> None: ...


class KubeApi:
    """:class:`Kube` over a connection."""

    def __init__(self, connection: Connection, seconds: float = REQUEST_SECONDS) -> None:
        self._connection = connection
        self._seconds = seconds

    def get(self, path: str) -> Json:
        return self._json("GET", path)

    def post(self, path: str, body: Json) -> Json:
        return self._json("POST", path, body)

    def put(self, path: str, body: Json) -> Json:
        return self._json("PUT", path, body)

    def patch(self, path: str, body: Json | list[Json], kind: PatchKind = "merge") -> Json:
        return self._json("PATCH", path, body, PATCH_TYPES[kind])

    def delete(self, path: str) -> Json:
        return self._json("DELETE", path)

    def watch(self, path: str) -> Stream:
        response = self._request("GET", path, None, "", WATCH_SILENCE_SECONDS)
        if response.status != 200:
            with _api_errors():
                raise _refusal(response.status, response.reason, response.data)
        return _ResponseStream(response)

    def close(self) -> None:
        self._connection.close()

    def _json(
        self, method: str, path: str, body: Json | list[Json] | None = None, kind: str = "application/json"
    ) -> Json:
        response = self._request(method, path, body, kind, self._seconds)
        with _api_errors():
            data = response.data
        if not 200 <= response.status < 300:
            raise _refusal(response.status, response.reason, data)
        try:
            return cast(Json, json.loads(data)) if data else {}
        except ValueError as error:
            raise KubeError(0, "NotJson", f"the API server's answer to {method} {path} is no JSON: {error}") from error

    def _request(self, method: str, path: str, body: Json | list[Json] | None, kind: str, seconds: float) -> Answer:
        headers = {"Accept": "application/json", "User-Agent": f"gpushare/{gpushare.__version__}"}
        if body is not None:
            headers["Content-Type"] = kind
        with _api_errors():
            return self._connection.request(method, path, headers, body, seconds)


class _ResponseStream:
    def __init__(self, response: Answer) -> None:
        self._response = response
        self._closed = False

    def __iter__(self) -> Iterator[Json]:
        rest = b""
        try:
            with _api_errors():
                for chunk in self._response.stream():
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
    except HttpError as error:
        raise KubeError(0, "Unreachable", f"the API server can't be reached: {error}") from error
    except OSError as error:
        raise KubeError(0, type(error).__name__, f"the API server can't be asked: {error}") from error


def _refusal(status: int, reason: str, data: bytes) -> KubeError:
    """What a Kubernetes ``Status`` object, or any other body, says of a refusal."""
    try:
        body = json.loads(data)
        return KubeError(status, str(body.get("reason") or reason), str(body.get("message") or reason))
    except (ValueError, AttributeError):
        text = data[:300].decode("utf-8", "replace").strip()
        return KubeError(status, reason, text or f"HTTP status {status} {reason}")


def from_environment(kubeconfig: str = "", seconds: float = REQUEST_SECONDS) -> KubeApi:
    """The API as this process can reach it: the named kubeconfig, else a pod's service account, else ``KUBECONFIG``.

    :param seconds: how long the API server may be silent about a request.
    :raises KubeError: none of them works; status 0.
    """
    if kubeconfig or not os.environ.get("KUBERNETES_SERVICE_HOST"):
        # Only here: in a pod none of it is needed, and it takes much memory.
        from gpushare.kubeconfig import Kubeconfig

        return KubeApi(Kubeconfig(kubeconfig, CONNECT_SECONDS), seconds)
    try:
        return KubeApi(Account(connect=CONNECT_SECONDS), seconds)
    except OSError as error:
        raise no_way(error) from error


def no_way(error: Exception) -> KubeError:
    return KubeError(0, "NoConfiguration", f"no way to reach the Kubernetes API: {error}")


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
        before_list: Callable[[], None] | None = None,
        page: int = PAGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param before_list: called before each list is asked for that the mirror may be in sync with for the first time.
        """
        self._kube, self._path, self._query = kube, path, dict(query or {})
        self._slim, self._page, self._clock, self._before_list = slim, page, clock, before_list
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
        if self._before_list is not None and not self.synced:
            self._before_list()
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
