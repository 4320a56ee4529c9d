# SPDX-License-Identifier: GPL-3.0-or-later
"""Client of the Kubernetes API: requests and watches in plain JSON.

There are no model classes: a cluster has tens of thousands of pods, and a dict, or the few fields of it that a mirror
keeps, is enough.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, cast

import gpushare
from gpushare.api.account import Account
from gpushare.http.client import Answer, HttpError
from gpushare.shared._core.types import JsonObject
from gpushare.shared._core.untrusted import line

CONNECT_SECONDS = 5.0
# A scheduler waits 30 s for a bind, which is two or three requests.
REQUEST_SECONDS = 8.0
# The API server sends a bookmark about every minute, so silence for longer means that the peer is gone.
WATCH_SILENCE_SECONDS = 100.0


class KubeError(Exception):
    """The API server refused a request, or couldn't be reached.

    :param status: the HTTP status; 0 without an answer.
    :param reason: the Status object's reason.
    :param causes: the reasons in the Status object's causes.
    """

    def __init__(self, status: int, reason: str, message: str, causes: Iterable[str] = ()) -> None:
        # Others' words: of admission webhooks and kubelets, for example.
        self.message = line(message or reason)
        super().__init__(self.message)
        self.status = status
        self.reason = line(reason)
        self.causes = frozenset(causes)

    @property
    def outcome_unknown(self) -> bool:
        """Whether a write may have been executed, or may still be, in spite of this error."""
        return self.status == 0 or self.status >= 500


class Stream(Protocol):
    """The events of one watch; ``close`` may be called by another thread and ends the iteration."""

    def __iter__(self) -> Iterator[JsonObject]: ...

    def close(self) -> None: ...


class Kube(Protocol):
    """The requests of the servers to the Kubernetes API; a path may have a query. All raise :class:`KubeError`."""

    def get(self, path: str) -> JsonObject: ...

    def post(self, path: str, body: JsonObject) -> JsonObject: ...

    def put(self, path: str, body: JsonObject) -> JsonObject: ...

    def patch(self, path: str, body: JsonObject) -> JsonObject: ...

    def delete(self, path: str) -> JsonObject: ...

    def watch(self, path: str) -> Stream: ...


# --------------------------------------------------------------------------- the real API


class KubeApi:
    """:class:`Kube` as a service account.

    :param seconds: how long the API server may send nothing.
    """

    def __init__(self, account: Account, seconds: float = REQUEST_SECONDS) -> None:
        self._account, self._seconds = account, seconds

    def get(self, path: str) -> JsonObject:
        return self._json("GET", path)

    def post(self, path: str, body: JsonObject) -> JsonObject:
        return self._json("POST", path, body)

    def put(self, path: str, body: JsonObject) -> JsonObject:
        return self._json("PUT", path, body)

    def patch(self, path: str, body: JsonObject) -> JsonObject:
        """Send a merge patch."""
        return self._json("PATCH", path, body, "application/merge-patch+json")

    def delete(self, path: str) -> JsonObject:
        return self._json("DELETE", path)

    def watch(self, path: str) -> Stream:
        response = self._request("GET", path, None, "", WATCH_SILENCE_SECONDS)
        if response.status != 200:
            with _api_errors():
                raise _refusal(response.status, response.reason, response.data)
        return _ResponseStream(response)

    def close(self) -> None:
        self._account.close()

    def _json(
        self, method: str, path: str, body: JsonObject | None = None, kind: str = "application/json"
    ) -> JsonObject:
        response = self._request(method, path, body, kind, self._seconds)
        with _api_errors():
            data = response.data
        if not 200 <= response.status < 300:
            raise _refusal(response.status, response.reason, data)
        try:
            return cast(JsonObject, json.loads(data)) if data else {}
        except ValueError as error:
            raise KubeError(0, "NotJson", f"the API server's answer to {method} {path} is no JSON: {error}") from error

    def _request(self, method: str, path: str, body: JsonObject | None, kind: str, seconds: float) -> Answer:
        headers = {"Accept": "application/json", "User-Agent": f"gpushare/{gpushare.__version__}"}
        if body is not None:
            headers["Content-Type"] = kind
        with _api_errors():
            return self._account.request(method, path, headers, body, seconds)


class _ResponseStream:
    def __init__(self, response: Answer) -> None:
        self._response = response
        self._closed = False

    def __iter__(self) -> Iterator[JsonObject]:
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


def _event(line: bytes) -> JsonObject:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise KubeError(0, "NotJson", f"the API server's watch sent a line that is no JSON: {error}") from error
    if not isinstance(event, dict):
        raise KubeError(0, "NotJson", "the API server's watch sent a line that is no event")
    return event


@contextlib.contextmanager
def _api_errors() -> Iterator[None]:
    """Convert the client's exceptions when the API can't be reached to a :class:`KubeError` of status 0."""
    try:
        yield
    except HttpError as error:
        raise KubeError(0, "Unreachable", f"the API server can't be reached: {error}") from error
    except OSError as error:
        raise KubeError(0, type(error).__name__, f"the request to the API server failed: {error}") from error


def _refusal(status: int, reason: str, data: bytes) -> KubeError:
    """Convert a Kubernetes ``Status`` object, or any other body of an error, to an exception."""
    try:
        body = json.loads(data)
        causes = (body.get("details") or {}).get("causes") or []
        codes = [str(cause.get("reason") or "") for cause in causes]
        return KubeError(status, str(body.get("reason") or reason), str(body.get("message") or reason), codes)
    except (ValueError, AttributeError, TypeError):
        text = data[:300].decode("utf-8", "replace").strip()
        return KubeError(status, reason, text or f"HTTP status {status} {reason}")


def connect(api_server: str = "", folder: str = "", seconds: float = REQUEST_SECONDS) -> KubeApi:
    """Connect to the Kubernetes API as a service account.

    :param api_server: URL; empty: the one that the environment of a pod names.
    :param folder: with the files ``token`` and ``ca.crt``; empty: where kubelet mounts them in a pod.
    :param seconds: how long the API server may send nothing.
    :returns: the client.
    :raises KubeError: the account can't be used; status 0.
    """
    try:
        return KubeApi(Account(Path(folder) if folder else None, url=api_server, connect=CONNECT_SECONDS), seconds)
    except OSError as error:
        raise KubeError(0, "NoConfiguration", f"no way to reach the Kubernetes API: {error}") from error
