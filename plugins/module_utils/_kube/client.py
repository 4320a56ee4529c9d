# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to the Kubernetes API, as plain JSON; it counts its requests.

kubernetes.core's code authenticates with kubernetes.core's options, so that a kubeconfig, a token, an environment
variable or a service account works as in ``kubernetes.core.k8s``. Its discovery is not used: it requests what is known
here, and without a time limit.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import socket
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .errors import (
    KUBECONFIG,
    TIMEOUT,
    KubeError,
    KubeUnusable,
    cause_of,
    one_line,
    refused,
    unreachable,
)
from .options import auth_arguments, hide_credentials
from .refs import Reads, Ref, ref_of

try:
    from ansible_collections.kubernetes.core.plugins.module_utils.k8s import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
        client as core,
    )

    MISSING = ""
except ImportError as error:
    MISSING = str(error)

try:
    import kubernetes  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import kubernetes.dynamic  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import urllib3.exceptions  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError as error:
    MISSING = MISSING or str(error)

__all__ = [
    "APPLY",
    "MISSING",
    "TIMEOUT",
    "Kube",
    "KubeError",
    "KubeUnusable",
    "RealKube",
    "api_errors",
    "auth_arguments",
    "hide_credentials",
]


# The parameter makes no difference to the API server. Without it the client serializes the text once more from version
# 25 to 36, and versions up to 24 refuse an object.
APPLY = "application/apply-patch+yaml; charset=utf-8"


class _Request(t.NamedTuple):
    """A request to the API server.

    :param body: text, or an object that the client library serializes.
    :param content: the body's media type.
    :param subject: what is requested, for messages; method and path where it is empty.
    """

    method: str
    path: str
    query: t.Sequence[tuple[str, str]] = ()
    body: str | JsonObject | None = None
    content: str | None = None
    subject: str = ""


class Kube(t.Protocol):
    """The requests to a cluster."""

    requests: collections.Counter[str]

    def get(self, ref: Ref) -> JsonObject | None:
        """Return an object; None if it, or its kind, does not exist."""

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[JsonObject]:
        """Return all objects of a kind, each with ``apiVersion`` and ``kind``.

        :param namespace: the objects' namespace; empty for all.
        :param field_selector: as the API takes it; empty for all objects, as for ``label_selector``.
        """

    def apply(self, definition: JsonObject, manager: str) -> JsonObject:
        """Apply a definition server-side, taking over fields from other managers."""

    def try_create(self, definition: JsonObject) -> JsonObject:
        """Return what the API server would create; nothing is created."""

    def patch(self, ref: Ref, body: JsonObject, subresource: str = "") -> JsonObject:
        """Send a JSON merge patch."""

    def delete(self, ref: Ref) -> None:
        """Request the deletion of an object, if it exists."""

    def evict(self, namespace: str, pod: str, grace: int | None = None) -> None:
        """Request the eviction of a pod.

        :param grace: seconds that it gets to end; None for its own number.
        """

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        """Return a container's log.

        :param lines: how many lines of its end.
        """

    def version(self) -> JsonObject:
        """Return the API server's version (``gitVersion`` and so on)."""


def status_writer(path: str | None) -> t.Callable[[str], None]:
    """Return a function that replaces a file's text; it does nothing without a path or where the file isn't there."""

    def write(text: str) -> None:
        with contextlib.suppress(OSError), open(path or "", "r+", encoding="utf-8") as file:
            file.truncate()
            file.write(text)

    return write


class RealKube(Reads):
    """A cluster through its API server."""

    def __init__(self, client: t.Any) -> None:
        super().__init__()
        self._client = client
        self.requests: collections.Counter[str] = collections.Counter()

    @property
    def api_client(self) -> t.Any:
        """The client library's own client, for requests that aren't plain JSON over HTTP (exec)."""
        return self._client.client

    @property
    def server(self) -> str:  # type: ignore[override]
        """The API server's URL."""
        return str(self._client.configuration.host)

    @classmethod
    def of_module(cls, module: t.Any) -> RealKube:
        """Connect with a module's options; no request is sent yet.

        :raises ShareError: a library is missing, or the options give no usable kubeconfig.
        """
        hide_credentials(module)
        if MISSING:
            raise ShareError(f"the Python that runs this module lacks kubernetes.core or kubernetes: {MISSING}")
        try:
            configuration = core._create_configuration(core._create_auth_spec(module))
            # Report refused connections at once; the caller decides about retries.
            configuration.retries = 0
            api = kubernetes.client.ApiClient(configuration)
            for header, value in core._create_headers(module).items():
                core._set_header(api, header, value)
        except Exception as error:  # the library raises many exceptions for a broken kubeconfig
            raise BadInput(f"{KUBECONFIG}: {_where(module)} {_unusable(module, error)}") from error
        return cls(kubernetes.dynamic.DynamicClient(api, discoverer=_NoDiscovery))

    def fetch(self, path: str, query: t.Sequence[tuple[str, str]]) -> str:
        return self._send(_Request("GET", path, query))

    def chunks(
        self, api_version: str, kind: str, query: t.Sequence[tuple[str, str]], size: int
    ) -> t.Generator[bytes, None, None]:
        """Request a list over all namespaces and yield the response in chunks.

        :param query: the query parameters.
        :param size: the size of a chunk in bytes.

        :raises KubeError: with status 410 when the query's ``continue`` is too old.
        """
        ref = Ref(api_version, kind, "", "")
        self._demand(ref)
        path = self._path(ref)
        self.requests["GET"] += 1
        with api_errors(self.server, f"GET {path}"):
            answer = self._client.request(
                "GET",
                path,
                query_params=list(query),
                # A tenth of the bytes; sending them would cost both sides more than compression.
                header_params={"Accept-Encoding": "gzip"},
                _request_timeout=TIMEOUT,
                serialize=False,
            )
            try:
                yield from iter(lambda: answer.read(size), b"")
            finally:
                # A connection with unread data can't serve another request.
                answer.close()

    def apply(self, definition: JsonObject, manager: str) -> JsonObject:
        query = [("fieldManager", manager), ("force", "true"), ("fieldValidation", "Strict")]
        ref = ref_of(definition)
        self._demand(ref)
        return self._ask(_Request("PATCH", self._path(ref), query, json.dumps(definition), APPLY, str(ref)))

    def patch(self, ref: Ref, body: JsonObject, subresource: str = "") -> JsonObject:
        self._demand(ref)
        path = self._path(ref) + (f"/{subresource}" if subresource else "")
        return self._ask(_Request("PATCH", path, (), body, "application/merge-patch+json", str(ref)))

    def try_create(self, definition: JsonObject) -> JsonObject:
        """Return an object as it would be created, after admission; nothing is stored.

        :raises KubeError: the API server, or a webhook, refuses it.
        """
        ref = ref_of(definition)
        self._demand(ref)
        path = self._path(dataclasses.replace(ref, name=""))
        return self._ask(_Request("POST", path, [("dryRun", "All")], definition, "application/json", str(ref)))

    def delete(self, ref: Ref) -> None:
        if self._known(ref):
            query = [("propagationPolicy", "Foreground")]
            try:
                self._ask(_Request("DELETE", self._path(ref), query, subject=str(ref)))
            except KubeError as error:
                if error.status != 404:
                    raise

    def evict(self, namespace: str, pod: str, grace: int | None = None) -> None:
        ref = Ref("v1", "Pod", namespace, pod)
        options = {} if grace is None else {"deleteOptions": {"gracePeriodSeconds": grace}}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
            **options,
        }
        self._ask(_Request("POST", f"{self._path(ref)}/eviction", (), body, subject=str(ref)))

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        """Return the end of a container's log.

        :param lines: how many lines of it.
        :raises KubeError: the API server refuses.
        """
        query = [("container", container), ("tailLines", str(lines))]
        return self._send(_Request("GET", self._path(Ref("v1", "Pod", namespace, pod)) + "/log", query))

    # ----------------------------------------------------------------- requests

    def _ask(self, request: _Request) -> JsonObject:
        return self._object(self._send(request))

    def _send(self, request: _Request) -> str:
        """Return the answer as text."""
        self.requests[request.method] += 1
        with api_errors(self.server, request.subject or f"{request.method} {request.path}"):
            answer = self._client.request(
                request.method,
                request.path,
                body=request.body,
                query_params=list(request.query),
                content_type=request.content,
                _request_timeout=TIMEOUT,
                serialize=False,
            )
        text = answer.data
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


class _NoDiscovery:
    """Replaces the client's discovery, which would send requests at once."""

    def __init__(self, client: t.Any, cache_file: t.Any = None) -> None:
        pass


@contextlib.contextmanager
def api_errors(host: str, subject: str) -> t.Iterator[None]:
    """Turn the client library's exceptions into ``KubeError``.

    :param host: the API server's URL.
    :param subject: what was requested, for the message.
    """
    try:
        yield
    except kubernetes.client.rest.ApiException as error:
        status = int(error.status or 0)
        if not status:
            raise unreachable(host, one_line(error.reason)) from error
        raise refused(status, error.reason, error.body, host, subject) from error
    except urllib3.exceptions.HTTPError as error:
        raise unreachable(host, _reason(error)) from error


def _reason(error: BaseException) -> str:
    """Return the innermost cause, such as "connection refused", of a connection pool's error."""
    inner = getattr(error, "reason", None)
    cause: BaseException = inner if isinstance(inner, BaseException) else error
    while isinstance(getattr(cause, "__cause__", None), BaseException):
        cause = t.cast(BaseException, cause.__cause__)
    # Up to Python 3.9, socket.timeout is no TimeoutError.
    return cause_of(cause, isinstance(cause, (TimeoutError, socket.timeout, urllib3.exceptions.TimeoutError)))


def _unusable(module: t.Any, error: Exception) -> str:
    given = module.params.get("kubeconfig")
    if isinstance(given, str) and os.pathsep not in given and not os.path.isfile(os.path.expanduser(given)):
        return "isn't a file"
    if isinstance(error, (kubernetes.config.ConfigException, OSError)):
        return f"can't be used: {one_line(error)}"
    return f"isn't a kubeconfig ({one_line(error)})"


def _where(module: t.Any) -> str:
    given = module.params.get("kubeconfig")
    return str(given) if isinstance(given, str) else "the given dictionary" if given else "the default kubeconfig"
