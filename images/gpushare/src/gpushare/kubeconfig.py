# SPDX-License-Identifier: GPL-3.0-or-later
"""The Kubernetes API as a kubeconfig describes it: the official client's connection, which knows all that can be there.

Loaded only where there is a kubeconfig: see ``account``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import urllib3
from kubernetes import config
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException

from gpushare.http_client import HttpError
from gpushare.kube import Answer, KubeError, no_way


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


class _Answer:
    """urllib3's, with errors of ours."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response
        self.status, self.reason = response.status, response.reason or ""

    @property
    def data(self) -> bytes:
        with _errors():
            return self._response.data

    def stream(self) -> Iterator[bytes]:
        with _errors():
            yield from self._response.stream(1 << 16, decode_content=True)

    def close(self) -> None:
        self._response.close()

    def shutdown(self) -> None:
        with contextlib.suppress(Exception):
            self._response.shutdown()


class Kubeconfig:
    """
    :raises KubeError: there is no such kubeconfig, or it can't be used.
    """

    def __init__(self, file: str, connect: float) -> None:
        self._connect = connect
        configuration = Configuration()
        try:
            config.load_kube_config(config_file=file or None, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise no_way(error) from error
        configuration.retries = _OnlyDeadConnections(total=1, connect=1, read=1, redirect=0, status=0, other=0)
        configuration.connection_pool_maxsize = 32
        self._client = ApiClient(configuration)

    def request(self, method: str, path: str, headers: dict[str, str], body: Any, seconds: float) -> Answer:
        with _errors():
            verb, url, headers, _body, _form = self._client.param_serialize(
                method, path, header_params=headers, auth_settings=["BearerToken"]
            )
            return _Answer(self._client.call_api(verb, url, headers, body, None, (self._connect, seconds)).response)

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (ApiException, config.ConfigException) as error:
        status = int(getattr(error, "status", None) or 0)
        reason = str(getattr(error, "reason", None) or type(error).__name__)
        raise KubeError(status, reason, str(getattr(error, "body", None) or error)) from error
    except urllib3.exceptions.HTTPError as error:
        # What MaxRetryError says besides its reason are only addresses, which the log would repeat for ever.
        cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
        raise HttpError(str(cause)) from error
