# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to the API server by the standard library's HTTP client alone.

To import kubernetes.core's client takes more time and memory than to read the lists of a cluster. A kubeconfig whose
user has a token or a certificate doesn't need it. Every other way to connect (exec plugins, passwords, proxies,
impersonation, a service account) is left to that client, and so is the message about a kubeconfig that can't be used.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import http.client
import json
import os
import select
import socket
import ssl
import tempfile
import typing as t
import zlib
from urllib.parse import quote, urlencode, urlsplit

from ansible.module_utils.common.yaml import yaml_load

from .._core.errors import BadInput
from .._core.types import JsonObject
from .api import JSON, Client, Request
from .errors import KUBECONFIG, TIMEOUT, cause_of, refused, unreachable
from .options import auth_arguments, hide_credentials
from .refs import USER_AGENT

if t.TYPE_CHECKING:
    from .client import RealKube

# The fields of a kubeconfig that are known here.
CLUSTER = {
    *("server", "certificate-authority", "certificate-authority-data", "insecure-skip-tls-verify", "tls-server-name"),
    *("disable-compression", "extensions"),
}
USER = {
    *("token", "tokenFile", "client-certificate", "client-certificate-data", "client-key", "client-key-data"),
    "extensions",
}
# The environment's settings that change how kubernetes.core's client connects.
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
PREFIX = "K8S_AUTH_"
# Bytes of a compressed response that are read at a time: some hundred KiB of JSON.
PACKED = 16 * 1024
# Bytes of a whole answer that are read at a time.
PART = 256 * 1024
# Bytes of an error's body that are parsed.
LONGEST_ERROR = 1024 * 1024


class _Other(Exception):
    """The connection needs kubernetes.core's client."""


class Access(t.NamedTuple):
    """How to reach an API server.

    :param server: its URL.
    :param headers: sent with each request.
    :param tls: for https.
    :param name: the name in the server's certificate, if it isn't the URL's host.
    """

    server: str
    headers: dict[str, str]
    tls: ssl.SSLContext | None
    name: str


def connect(module: t.Any) -> DirectKube | RealKube:
    """Return a client; kubernetes.core's only where it is needed.

    :raises LibraryMissing: the options need the library kubernetes, which isn't installed.
    :raises BadInput: the options give no usable kubeconfig.
    """
    hide_credentials(module)
    access = access_of(module.params, os.environ)
    if access is not None:
        return DirectKube(access)
    # Imported here, because the import is what takes long.
    from . import client

    return client.RealKube.of_module(module)


def access_of(params: t.Mapping[str, t.Any], environ: t.Mapping[str, str]) -> Access | None:
    """Return how to connect with a module's options; None if that needs kubernetes.core's client.

    :param params: the module's parameters.
    :param environ: the environment's variables.
    :raises BadInput: the token can't be sent.
    """
    try:
        config, folder, context = _kubeconfig(params, environ)
        chosen = _named(config, "contexts", context or config["current-context"])["context"]
        cluster = _named(config, "clusters", chosen["cluster"])["cluster"]
        user = _named(config, "users", chosen["user"])["user"]
        if set(cluster) - CLUSTER or set(user) - USER:
            return None
        server = str(cluster["server"]).rstrip("/")
        url = urlsplit(server)
        if url.scheme not in ("http", "https") or not url.hostname or url.port == 0 or url.query or url.username:
            return None
        headers = {"Accept": f"{JSON}, */*", "User-Agent": USER_AGENT}
        # A fraction of the bytes, in less time than encryption would take for the rest.
        headers["Accept-Encoding"] = "identity" if cluster.get("disable-compression") else "gzip"
        token = user["token"] if "token" in user else _file(user, "tokenFile", folder)
        if token:
            headers["Authorization"] = f"Bearer {_header(_text(token).strip())}"
        tls = _tls(cluster, user, folder) if url.scheme == "https" else None
        return Access(server, headers, tls, str(cluster.get("tls-server-name") or ""))
    except BadInput:
        raise
    except Exception:  # whatever is wrong with a kubeconfig, the client reports it
        return None


def _kubeconfig(params: t.Mapping[str, t.Any], environ: t.Mapping[str, str]) -> tuple[JsonObject, str, str]:
    """Return the kubeconfig, the folder of its relative paths, and the name of the given context."""
    given = {name: params.get(name) for name in auth_arguments()}
    if not given:
        # Without kubernetes.core, its options aren't known.
        raise _Other
    for name, value in given.items():
        if value is None:
            given[name] = environ.get(PREFIX + name.upper())
    kubeconfig, context = given.pop("kubeconfig", None), given.pop("context", None)
    known = {f"{PREFIX}KUBECONFIG", f"{PREFIX}CONTEXT"}
    settings = [name for name in environ if name.startswith(PREFIX) and name not in known]
    if settings or any(value is not None for value in given.values()):
        raise _Other
    if any(name.lower() in PROXIES and value for name, value in environ.items()):
        raise _Other
    if isinstance(kubeconfig, dict):
        return kubeconfig, "", _text(context or "")
    if not kubeconfig:
        # Without a context, the service account of a pod comes first.
        if not context and environ.get("KUBERNETES_SERVICE_HOST"):
            raise _Other
        kubeconfig = environ.get("KUBECONFIG", "~/.kube/config")
    path = os.path.expanduser(_text(kubeconfig))
    if os.pathsep in path:
        raise _Other
    with open(path, "rb") as file:
        config = yaml_load(file)
    return config, os.path.dirname(os.path.abspath(path)), _text(context or "")


def _named(config: JsonObject, kind: str, name: t.Any) -> JsonObject:
    named = [entry for entry in config[kind] if entry["name"] == name]
    if len(named) != 1:
        raise _Other
    return t.cast(JsonObject, named[0])


def _text(value: t.Any) -> str:
    if not isinstance(value, str):
        raise _Other
    return value


def _header(token: str) -> str:
    """Return a token as it is; http.client would print one that it refuses.

    :raises BadInput: no header can have it.
    """
    if not token.isascii() or not token.isprintable():
        raise BadInput(f"{KUBECONFIG}: the token of its user has a line break, or a character that isn't ASCII")
    return token


def _file(entry: JsonObject, field: str, folder: str) -> str:
    """Return the content of the file that a field names; empty without the field."""
    if not entry.get(field):
        return ""
    with open(os.path.join(folder, _text(entry[field])), encoding="utf-8") as file:
        return file.read()


def _pem(entry: JsonObject, field: str, folder: str) -> str:
    """Return a certificate or a key; as in the client, the data comes before the file."""
    if f"{field}-data" in entry:
        return base64.standard_b64decode(_text(entry[f"{field}-data"])).decode()
    return _file(entry, field, folder)


def _tls(cluster: JsonObject, user: JsonObject, folder: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        authority = _pem(cluster, "certificate-authority", folder)
        if not authority:
            # The client knows where the system's are.
            raise _Other
        context.load_verify_locations(cadata=authority)
        # As kubectl and the client do; since Python 3.10.
        context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0)
    certificate, key = _pem(user, "client-certificate", folder), _pem(user, "client-key", folder)
    if certificate and key:
        _load_certificate(context, certificate, key)
    elif certificate or key:
        raise _Other
    return context


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Add a client's certificate, which OpenSSL reads from a file only."""
    handle, path = tempfile.mkstemp(prefix="kubegpu-", suffix=".pem")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{certificate}\n{key}\n")
        # Without a password, OpenSSL would ask the terminal for the one of an encrypted key.
        context.load_cert_chain(path, password="")
    finally:
        os.unlink(path)


class DirectKube(Client):
    """A cluster through its API server."""

    def __init__(self, access: Access) -> None:
        super().__init__()
        self._access = access
        self.server = access.server
        # Connections that wait for another request.
        self._idle: collections.deque[http.client.HTTPConnection] = collections.deque()

    def send(self, request: Request) -> str:
        return b"".join(self.answer(request, PART)).decode(errors="replace")

    def answer(self, request: Request, size: int) -> t.Generator[bytes, None, None]:
        self.requests[request.method] += 1
        url, query = urlsplit(self._access.server), urlencode(request.query, quote_via=quote, safe="")
        target = f"{url.path}{request.path}{'?' if query else ''}{query}"
        body = request.body if request.body is None or isinstance(request.body, str) else json.dumps(request.body)
        headers = {**self._access.headers, **({} if body is None else {"Content-Type": request.content})}
        try:
            connection = self._waiting() or self._opened()
            read = False
            try:
                connection.request(request.method, target, None if body is None else body.encode(), headers)
                answer = connection.getresponse()
                succeeded = 200 <= answer.status < 300
                if succeeded:
                    yield from _decoded(answer, size)
                else:
                    text = b"".join(_decoded(answer, size))[:LONGEST_ERROR]
                read = True
            finally:
                # Its answer is read to the end, so it can serve another request, unless the server wants it closed.
                if read:
                    self._idle.append(connection)
                else:
                    connection.close()
        except (OSError, http.client.HTTPException, UnicodeError, zlib.error) as error:
            why = cause_of(error, isinstance(error, (TimeoutError, socket.timeout)))
            raise unreachable(self._access.server, why) from error
        if not succeeded:
            raise refused(answer.status, answer.reason, text, self._access.server, str(request))

    def _waiting(self) -> http.client.HTTPConnection | None:
        """Return a connection that has served a request and is still open."""
        with contextlib.suppress(IndexError):
            connection = self._idle.pop()
            if not _ended(connection):
                return connection
            connection.close()
        return None

    def _opened(self) -> http.client.HTTPConnection:
        """Return a new connection on which a response may take longer than to connect."""
        access, url = self._access, urlsplit(self._access.server)
        host, port = str(url.hostname), url.port or (80 if access.tls is None else 443)
        connection = http.client.HTTPConnection(host, port)
        # It would connect again without TLS.
        connection.auto_open = 0
        opened = socket.create_connection((host, port), TIMEOUT[0])
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if access.tls is not None:
                opened = access.tls.wrap_socket(opened, server_hostname=access.name or host)
            opened.settimeout(TIMEOUT[1])
        except BaseException:
            opened.close()
            raise
        connection.sock = opened
        return connection


def _ended(connection: http.client.HTTPConnection) -> bool:
    """Return whether a connection that waits was closed; the server sends nothing else without a request."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _decoded(answer: http.client.HTTPResponse, size: int) -> t.Iterator[bytes]:
    """Yield a response's content as it arrives, without compression.

    :param size: the largest chunk, in bytes.
    """
    if answer.getheader("Content-Encoding", "identity") != "gzip":
        yield from iter(lambda: answer.read(size), b"")
        # http.client reports it for a chunked answer only.
        if answer.length:
            raise http.client.IncompleteRead(b"", answer.length)
        return
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)
    for packed in iter(lambda: answer.read(PACKED), b""):
        while packed:
            yield inflate.decompress(packed, size)
            packed = inflate.unconsumed_tail
    yield inflate.flush()
    if not inflate.eof:
        raise zlib.error("the compressed response is incomplete")
