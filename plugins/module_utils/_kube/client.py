# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to the Kubernetes API by the library kubernetes.

kubernetes.core's code authenticates with kubernetes.core's options, so that a kubeconfig, a token, an environment
variable or a service account works as in ``kubernetes.core.k8s``. Its discovery is not used: it requests what is known
here, and without a time limit. Its import takes longer than most requests: see ``direct.connect``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import typing as t

from .._core.errors import BadInput
from .api import Client, Request
from .errors import (
    KUBECONFIG,
    TIMEOUT,
    LibraryMissing,
    cause_of,
    one_line,
    refused,
    unreachable,
)
from .options import hide_credentials

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


class RealKube(Client):
    """A cluster through its API server."""

    def __init__(self, client: t.Any) -> None:
        super().__init__()
        self._client = client

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

        :raises LibraryMissing: kubernetes.core or kubernetes isn't installed.
        :raises BadInput: the options give no usable kubeconfig.
        """
        hide_credentials(module)
        if MISSING:
            raise LibraryMissing(f"{sys.executable} lacks kubernetes.core or kubernetes: {MISSING}")
        try:
            configuration = core._create_configuration(core._create_auth_spec(module))
            # Report refused connections at once; the caller decides about retries.
            configuration.retries = 0
            api = kubernetes.client.ApiClient(configuration)
            for header, value in core._create_headers(module).items():
                core._set_header(api, header, value)
        except Exception as error:  # the library raises many exceptions for a broken kubeconfig
            raise BadInput(f"{KUBECONFIG}: {_unusable(module.params.get('kubeconfig'), error)}") from error
        return cls(kubernetes.dynamic.DynamicClient(api, discoverer=_NoDiscovery))

    def answer(self, request: Request, size: int) -> t.Generator[bytes, None, None]:
        with api_errors(self.server, str(request)):
            # A tenth of the bytes; sending them would cost both sides more than compression.
            answer = self._requested(request, header_params={"Accept-Encoding": "gzip"})
            try:
                yield from iter(lambda: answer.read(size), b"")
            finally:
                # A connection with unread data can't serve another request.
                answer.close()

    def send(self, request: Request) -> str:
        with api_errors(self.server, str(request)):
            # Read here only.
            text = self._requested(request).data
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)

    def _requested(self, request: Request, **options: t.Any) -> t.Any:
        """Send a request and return the library's answer, whose body isn't read yet."""
        self.requests[request.method] += 1
        return self._client.request(
            request.method,
            request.path,
            body=request.body,
            query_params=list(request.query),
            content_type=None if request.body is None else request.content,
            _request_timeout=TIMEOUT,
            serialize=False,
            **options,
        )


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


def _unusable(given: t.Any, error: Exception) -> str:
    name = "the given dictionary" if given else "the default kubeconfig"
    if isinstance(given, str):
        name = given
        if os.pathsep not in given and not os.path.isfile(os.path.expanduser(given)):
            return f"{name} isn't a file"
    if isinstance(error, (kubernetes.config.ConfigException, OSError)):
        return f"{name} can't be used: {one_line(error)}"
    return f"{name} isn't a kubeconfig ({one_line(error)})"
