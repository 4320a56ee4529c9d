# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to mirrors: web servers and registries, as the controller reaches them, each answer within a time."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import http.client
import json
import os
import queue
import re
import socket
import ssl
import threading
import time
import typing as t
import urllib.error
import urllib.parse
import urllib.request

from ...module_utils._core.errors import BadInput
from .manifests import INDEXES, LARGEST_MANIFEST, MANIFESTS

# Seconds in which a server has to take a connection, or to send its next bytes.
PATIENCE = 5.0
# Bytes of one read.
CHUNK = 64 * 1024
# Bytes of the largest list of packages or charts; NVIDIA's have some MiB.
LARGEST = 64 << 20


class Answer(t.NamedTuple):
    """A server's answer.

    :param status: the HTTP status; 0 without an answer.
    :param content: at most as many bytes as were asked for.
    :param failure: why there is none: ``timeout``, ``tls``, ``unreachable`` or ``too_large``; empty with an answer.
    :param plain: a registry gave it without TLS.
    :param elsewhere: another server gave it, to which the one that was asked has redirected.
    """

    status: int
    content: bytes = b""
    failure: str = ""
    headers: t.Mapping[str, str] = {}
    plain: bool = False
    elsewhere: bool = False


class Fetch(t.Protocol):
    """Requests an address until a time of ``time.monotonic``; without ``largest`` no byte of the body is read."""

    def __call__(
        self, url: str, until: float, largest: int = 0, headers: t.Mapping[str, str] | None = None
    ) -> Answer: ...


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect without credentials: they are for the server that was named; from TLS to TLS only."""

    def redirect_request(self, *given: t.Any) -> urllib.request.Request | None:
        # urllib would follow one to FTP as well; the first of what is given is the request, the last the new address.
        encrypted = given[0].full_url.lower().startswith("https://")
        if not str(given[-1]).lower().startswith(("https://",) if encrypted else ("http://", "https://")):
            return None
        request = super().redirect_request(*given)
        if request:
            request.remove_header("Authorization")
        return request


class _Connections:
    """The connections of one request, which are ended from outside: a server may send a header byte by byte."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._over = False

    def add(self, connected: socket.socket) -> None:
        # A descriptor of its own: the other may be closed, and its number be another's, when this one is needed.
        own = connected.dup()
        with self._lock:
            self._sockets.append(own)
            if self._over:
                self._shut()

    def end(self) -> None:
        """End them, and what is connected later; whoever waits for their bytes gets an error."""
        with self._lock:
            self._over = True
            self._shut()

    def _shut(self) -> None:
        while self._sockets:
            with self._sockets.pop() as own, contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    connections: _Connections

    def connect(self) -> None:
        super().connect()
        self.connections.add(self.sock)


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """Its TLS begins when ``_Connection`` has connected."""


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def __init__(self, connections: _Connections, authorities: ssl.SSLContext | None) -> None:
        super().__init__()
        self._connections = connections
        self._authorities = authorities

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(self._made, _Connection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(self._made, _TlsConnection), req, context=self._authorities)

    def _made(self, kind: type[_Connection], *given: t.Any, **named: t.Any) -> _Connection:
        connection = kind(*given, **named)
        connection.connections = self._connections
        return connection


def fetch(
    url: str,
    until: float,
    largest: int = 0,
    headers: t.Mapping[str, str] | None = None,
    authorities: ssl.SSLContext | None = None,
) -> Answer:
    """Request an address; proxies are those of the environment.

    :param until: when the whole answer has to be there, by ``time.monotonic``.
    :param largest: in bytes.
    :param authorities: those that are trusted; by default the environment's.
    """
    left = until - time.monotonic()
    if left <= 0:
        return Answer(0, failure="timeout")
    done: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    connections = _Connections()

    def work() -> None:
        try:
            done.put(_fetch(url, until, largest, headers, _Handler(connections, authorities)))
        except Exception as error:  # An error of this code: it is raised where somebody waits.
            done.put(error)

    # A name server may take longer: that thread ends when it has answered.
    threading.Thread(target=work, daemon=True).start()
    try:
        answer = done.get(timeout=left)
    except queue.Empty:
        return Answer(0, failure="timeout")
    finally:
        connections.end()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _fetch(
    url: str, until: float, largest: int, headers: t.Mapping[str, str] | None, handler: urllib.request.BaseHandler
) -> Answer:
    opener = urllib.request.build_opener(_Redirects(), handler)
    try:
        request = urllib.request.Request(url, headers=dict(headers or {}))
        with opener.open(request, timeout=max(min(PATIENCE, until - time.monotonic()), 0.01)) as answer:
            return _read(answer, until, largest)._replace(elsewhere=_server(answer.url) != _server(url))
    except urllib.error.HTTPError as error:
        with error:
            other = _server(error.geturl()) != _server(url)
            return Answer(error.code, headers=dict(error.headers.items()), elsewhere=other)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Answer(0, failure=_failure(error))


def _server(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def own_path(value: str) -> str:
    """Return a path of the controller that a variable has, as an absolute one; empty where it is empty."""
    return os.path.abspath(os.path.expanduser(os.path.expandvars(value))) if value else ""


def fetcher(authority: str, variable: str) -> Fetch:
    """Return ``fetch``, which trusts one more authority.

    :param authority: path of its certificate; empty for the environment's alone.
    :param variable: that has the path, for the error.
    :raises BadInput: the file has no certificate.
    """
    if not authority:
        return fetch
    context = ssl.create_default_context()
    # Python 3.13 refuses authorities without the extension key usage, which skopeo and container runtimes accept.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{variable}: {authority} can't be read as a certificate: {getattr(error, 'strerror', None) or error}"
        ) from error
    return functools.partial(fetch, authorities=context)


def _read(answer: http.client.HTTPResponse, until: float, largest: int) -> Answer:
    """Read a body in parts: a server may send one byte at a time."""
    parts: list[bytes] = []
    left = largest
    headers = dict(answer.headers.items())
    while largest:
        if time.monotonic() > until:
            return Answer(0, failure="timeout")
        part = answer.read1(CHUNK)
        if not part:
            break
        left -= len(part)
        if left < 0:
            return Answer(0, failure="too_large")
        parts.append(part)
    return Answer(answer.status, b"".join(parts), headers=headers)


def _failure(error: BaseException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "timeout"
    if isinstance(cause, ssl.SSLError):
        return "no_tls" if "WRONG_VERSION" in str(cause) or "RECORD_LAYER" in str(cause) else "tls"
    return "unreachable"


# --------------------------------------------------------------------------- registries


def credentials(environment: t.Mapping[str, str], file: str = "") -> dict[str, str]:
    """Return by registry the value of the header Authorization, from docker's and podman's files on the controller.

    Podman's may have some for a part of a registry (``registry.example.org/project``), whose path is part of the key.

    :param file: one more file of this form, which counts more than those.
    """
    folder = environment.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    paths = [os.path.join(folder, "config.json")]
    if environment.get("XDG_RUNTIME_DIR"):
        paths.append(os.path.join(environment["XDG_RUNTIME_DIR"], "containers/auth.json"))
    paths += [environment.get("REGISTRY_AUTH_FILE", ""), file]
    found: dict[str, str] = {}
    for path in filter(os.path.isfile, paths):
        try:
            with open(path, encoding="utf-8") as opened:
                rows = json.load(opened).get("auths") or {}
            for name, row in rows.items():
                text = str((row or {}).get("auth") or "")
                base64.b64decode(text, validate=True)
                if text:
                    # Docker's names of registries may be addresses of their APIs.
                    place = re.sub("^https?://", "", str(name)).rstrip("/")
                    found[re.sub("/v[12]$", "", place)] = f"Basic {text}"
        except (OSError, ValueError, AttributeError, binascii.Error):
            # A file that only another program understands has none for this one.
            continue
    return found


def token_address(challenge: str, schemes: tuple[str, ...] = ("https://",)) -> str:
    """Return where a registry gives a token; empty where its challenge names no such place.

    :param challenge: its header ``WWW-Authenticate``.
    :param schemes: of the place.
    """
    words = dict(re.findall(r'([a-z]{1,20})="([^"]*)"', challenge))
    realm = words.pop("realm", "")
    if not challenge.lower().startswith("bearer ") or not realm.startswith(schemes):
        return ""
    return f"{realm}?{urllib.parse.urlencode({name: words[name] for name in ('service', 'scope') if name in words})}"


def token_of(content: bytes) -> str:
    """Return the token in an answer.

    :raises ValueError: it has none.
    """
    try:
        body = json.loads(content)
        return str(body.get("token") or body["access_token"])
    except (KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError("no token") from error


class Registries:
    """Reads manifests by the registries' protocol.

    :param known: as ``credentials`` returns it.
    :param insecure: those that get credentials without TLS, too.
    """

    def __init__(self, fetch_: Fetch, known: t.Mapping[str, str], insecure: t.Collection[str] = ()) -> None:
        self._fetch = fetch_
        self._known = known
        self._insecure = insecure

    def manifest(self, registry: str, repository: str, reference: str, until: float) -> Answer:
        """Return the answer for a manifest or an index.

        :param reference: a tag, or a digest.
        """
        path = f"{registry}/v2/{repository}/manifests/{reference}"
        own = self._own(f"{registry}/{repository}")
        answer = self._asked(f"https://{path}", own, until)
        if answer.failure != "no_tls":
            return answer
        if registry in self._insecure:
            return self._asked(f"http://{path}", own, until, ("http://", "https://"))._replace(plain=True)
        return self._fetch(f"http://{path}", until, LARGEST_MANIFEST, _accept())._replace(plain=True)

    def _own(self, place: str) -> str:
        """Return the credentials for a repository: those of the longest part of its path that has some."""
        while place not in self._known and "/" in place:
            place = place.rpartition("/")[0]
        return self._known.get(place, "")

    def _asked(self, url: str, own: str, until: float, schemes: tuple[str, ...] = ("https://",)) -> Answer:
        first = self._fetch(url, until, LARGEST_MANIFEST, _accept(own))
        wanted = next((value for name, value in first.headers.items() if name.lower() == "www-authenticate"), "")
        # The credentials are for the registry alone: a server to which it redirects doesn't say who gets them.
        asks = first.status == 401 and not first.elsewhere
        address = token_address(wanted, schemes) if asks else ""
        if not address:
            return first
        granted = self._fetch(address, until, CHUNK, {"Authorization": own} if own else {})
        try:
            token = token_of(granted.content)
        except ValueError:
            return first
        return self._fetch(url, until, LARGEST_MANIFEST, _accept(f"Bearer {token}"))


def _accept(authorization: str = "") -> dict[str, str]:
    return {"Accept": ", ".join((*INDEXES, *MANIFESTS)), **({"Authorization": authorization} if authorization else {})}
