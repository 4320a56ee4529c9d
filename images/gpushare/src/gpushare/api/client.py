# SPDX-License-Identifier: GPL-3.0-or-later
"""Client of the Kubernetes API: requests, lists and watches in plain JSON.

There are no model classes: a cluster has tens of thousands of pods, and a dict, or the few fields of it that a mirror
keeps, is enough. An object that is larger than ``decoding.WHOLE_BYTES`` comes with the fields of ``fields.OBJECT``
only, and no list is ever held: see :func:`pages`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import gpushare
from gpushare.api import decoding
from gpushare.api.account import Account
from gpushare.api.fields import EVENT, OBJECT
from gpushare.http.client import Answer, HttpError
from gpushare.shared._core.types import JsonObject
from gpushare.shared._core.untrusted import line

CONNECT_SECONDS = 5.0
# A scheduler waits 30 s for a bind, which is two or three requests.
REQUEST_SECONDS = 8.0
# The API server sends a bookmark about every minute, so silence for longer means that the peer is gone.
WATCH_SILENCE_SECONDS = 100.0
# What is read of an error's answer, and shown of it.
ERROR_BYTES, MESSAGE_LENGTH = 64 * 1024, 2000
# Objects in the first answer of a list in pages, and the size that later ones should have: the API server holds each
# of them whole.
FIRST_PAGE, PAGE_BYTES = 50, 4 * 1024 * 1024


class KubeError(Exception):
    """The API server refused a request, or couldn't be reached.

    :param status: the HTTP status; 0 without an answer.
    :param reason: the Status object's reason.
    :param causes: the reasons in the Status object's causes.
    :param name: of the object that the Status object is about; empty for a path that isn't served.
    """

    def __init__(self, status: int, reason: str, message: str, causes: Iterable[str] = (), name: str = "") -> None:
        # Others' words: of admission webhooks and kubelets, for example.
        self.message = line(message or reason)
        super().__init__(self.message)
        self.status = status
        self.reason = line(reason)
        self.causes = frozenset(causes)
        self.name = name

    @property
    def outcome_unknown(self) -> bool:
        """Whether a write may have been executed, or may still be, in spite of this error."""
        return self.status == 0 or self.status >= 500


class Stream(Protocol):
    """The events of one watch; ``close`` may be called by another thread and ends the iteration."""

    def __iter__(self) -> Iterator[JsonObject]: ...

    def close(self) -> None: ...


class Listing(Protocol):
    """One answer of a list, whose objects come one by one, once; raises :class:`KubeError`.

    When all have come, ``version`` is the list's resourceVersion, ``more`` the token of the next page (empty without
    one), and ``size`` the answer's length in bytes.
    """

    version: str
    more: str
    size: int

    def __iter__(self) -> Iterator[JsonObject]: ...


class Kube(Protocol):
    """The requests of the servers to the Kubernetes API; a path may have a query. All raise :class:`KubeError`."""

    def get(self, path: str) -> JsonObject: ...

    def listing(self, path: str) -> Listing: ...

    def post(self, path: str, body: JsonObject) -> JsonObject: ...

    def put(self, path: str, body: JsonObject) -> JsonObject: ...

    def patch(self, path: str, body: JsonObject) -> JsonObject: ...

    def delete(self, path: str) -> JsonObject: ...

    def watch(self, path: str) -> Stream: ...


class Pages:
    """All objects of a collection, in one version of it: an iterable that is read once.

    :ivar version: the list's resourceVersion; empty before its first page has been read.
    """

    def __init__(self, kube: Kube, path: str, query: Mapping[str, str] | None = None, most: int = 500) -> None:
        """
        :param path: of the collection, without a query.
        :param query: such as selectors.
        :param most: objects in a page; fewer where they are large.
        """
        self._kube, self._path, self._query, self._most = kube, path, dict(query or {}), most
        self.version = ""

    def __iter__(self) -> Iterator[JsonObject]:
        """Yield the objects.

        :raises KubeError: the API server refuses, also in the middle.
        """
        limit, token = min(self._most, FIRST_PAGE), ""
        first, tokens = set[tuple[str, str]](), set[str]()
        while True:
            query = {**self._query, "limit": str(limit), **({"continue": token} if token else {})}
            page = self._kube.listing(f"{self._path}?{urlencode(query)}")
            for obj in page:
                metadata = obj.get("metadata") or {}
                key = str(metadata.get("namespace") or ""), str(metadata.get("name") or "")
                if token and key in first:
                    raise self._not_paged()
                if not token and len(first) < FIRST_PAGE:
                    first.add(key)
                yield obj
            self.version, token = page.version, page.more
            if not token:
                return
            if token in tokens:
                raise self._not_paged()
            tokens.add(token)
            limit = max(1, min(self._most, limit * PAGE_BYTES // max(1, page.size)))

    def _not_paged(self) -> KubeError:
        """Return the error of a server that would be asked for ever: it goes on with what it has returned before."""
        text = f"the API server doesn't return {self._path} in pages: the next one begins again with the same objects"
        return KubeError(0, "NotPaged", text)


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

    def listing(self, path: str) -> Listing:
        return _AnswerListing(path, self._accepted("GET", path, None, "", self._seconds))

    def watch(self, path: str) -> Stream:
        return _ResponseStream(self._accepted("GET", path, None, "", WATCH_SILENCE_SECONDS))

    def close(self) -> None:
        self._account.close()

    def _json(
        self, method: str, path: str, body: JsonObject | None = None, kind: str = "application/json"
    ) -> JsonObject:
        response = self._accepted(method, path, body, kind, self._seconds)
        with _api_errors(), _json_errors(f"answer to {method} {path}"):
            pieces = response.stream()
            first = next(pieces, b"")
            value = decoding.document(itertools.chain((first,), pieces), OBJECT) if first else {}
        if not isinstance(value, dict):
            raise KubeError(0, "NotJson", f"the API server's answer to {method} {path} is no object")
        return value

    def _accepted(self, method: str, path: str, body: JsonObject | None, kind: str, seconds: float) -> Answer:
        """Send a request, and return the answer, whose body isn't read yet.

        :raises KubeError: there is none, or it is a refusal.
        """
        response = self._request(method, path, body, kind, seconds)
        if not 200 <= response.status < 300:
            with _api_errors():
                raise _refusal(response.status, response.reason, response.beginning(ERROR_BYTES))
        return response

    def _request(self, method: str, path: str, body: JsonObject | None, kind: str, seconds: float) -> Answer:
        headers = {"Accept": "application/json", "User-Agent": f"gpushare/{gpushare.__version__}"}
        if body is not None:
            headers["Content-Type"] = kind
        with _api_errors():
            return self._account.request(method, path, headers, body, seconds)


class _AnswerListing:
    def __init__(self, path: str, response: Answer) -> None:
        self._path, self._response = path, response
        self.version = self.more = ""
        self.size = 0

    def __iter__(self) -> Iterator[JsonObject]:
        head: dict[str, Any] = {}
        try:
            with _api_errors(), _json_errors(f"answer to GET {self._path}"):
                yield from decoding.listed(self._pieces(), OBJECT, head)
        finally:
            self._response.close()
        metadata = head.get("metadata") or {}
        self.version, self.more = (str(metadata.get(key) or "") for key in ("resourceVersion", "continue"))

    def _pieces(self) -> Iterator[bytes]:
        for piece in self._response.stream():
            self.size += len(piece)
            yield piece


class _ResponseStream:
    def __init__(self, response: Answer) -> None:
        self._response = response
        self._closed = False

    def __iter__(self) -> Iterator[JsonObject]:
        try:
            with _api_errors(), _json_errors("watch"):
                yield from decoding.events(self._response.stream(), EVENT)
        except KubeError:
            if not self._closed:
                raise
        finally:
            self._response.close()

    def close(self) -> None:
        self._closed = True
        # Closing alone wouldn't wake a thread that is waiting in a read.
        self._response.shutdown()


@contextlib.contextmanager
def _api_errors() -> Iterator[None]:
    """Convert the client's exceptions when the API can't be reached to a :class:`KubeError` of status 0."""
    try:
        yield
    except HttpError as error:
        raise KubeError(0, "Unreachable", f"the API server can't be reached: {error}") from error
    except OSError as error:
        raise KubeError(0, type(error).__name__, f"the request to the API server failed: {error}") from error


@contextlib.contextmanager
def _json_errors(what: str) -> Iterator[None]:
    """Convert the decoder's exceptions to a :class:`KubeError` of status 0.

    :param what: of the API server isn't as expected.
    """
    try:
        yield
    except ValueError as error:
        raise KubeError(0, "NotJson", f"the API server's {what} is no JSON as expected: {error}") from error


def _refusal(status: int, reason: str, data: bytes) -> KubeError:
    """Convert a Kubernetes ``Status`` object, or any other body of an error, to an exception."""
    try:
        body = json.loads(data)
        details = body.get("details") or {}
        codes = [str(cause.get("reason") or "") for cause in details.get("causes") or []]
        message, name = str(body.get("message") or reason)[:MESSAGE_LENGTH], str(details.get("name") or "")
        return KubeError(status, str(body.get("reason") or reason), message, codes, name)
    except (ValueError, AttributeError, TypeError, RecursionError):
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
