# SPDX-License-Identifier: GPL-3.0-or-later
"""Send requests to the Kubernetes API as a service account."""

from __future__ import annotations

import json
import os
import threading
import time
import typing as t
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from gpushare.http.client import Answer, HttpClient
from gpushare.http.tls import is_loopback

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# kubelet replaces a token long before it expires; the file is read again after this time.
TOKEN_SECONDS = 60.0


class Account:
    """Sends requests with a service account's token; token and CA certificate are read again when they change."""

    def __init__(
        self,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        url: str = "",
        connect: float = 5.0,
    ) -> None:
        """
        :param folder: with the files ``token`` and ``ca.crt``; None: where kubelet mounts them in a pod.
        :param url: of the API server; empty: the one that the environment of a pod names.
        :param connect: seconds that a connection may take to be established.
        :param clock: monotonic, in seconds.
        :raises OSError: there is no such account; the message is one sentence.
        """
        self.url = url or _url_of_pod()
        parts = urlsplit(self.url)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise OSError(f"{self.url!r} is neither an https URL nor an http URL of this machine")
        folder = folder or FOLDER
        self._file, self._clock, self._lock = folder / "token", clock, threading.Lock()
        self._token, self._read_at = "", clock()
        authority = folder / "ca.crt" if parts.scheme == "https" else None
        if authority is not None and not authority.is_file():
            raise OSError(f"{authority} doesn't exist")
        self._read()
        self._client = HttpClient(self.url, authority, connect)

    def request(self, method: str, path: str, headers: dict[str, str], body: t.Any, seconds: float) -> Answer:
        """Send a request.

        :param path: with its query.
        :param body: is sent as JSON; None for none.
        :param seconds: how long the server may send nothing.
        :returns: the answer, whose body isn't read yet.
        :raises HttpError: there is no answer.
        :raises OSError: the token can't be read.
        """
        sent = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        own = {**headers, "Authorization": f"Bearer {self._current()}"}
        return self._client.request(method, path, own, sent, seconds)

    def close(self) -> None:
        self._client.close()

    def _current(self) -> str:
        with self._lock:
            if self._clock() - self._read_at >= TOKEN_SECONDS:
                self._read()
            return self._token

    def _read(self) -> None:
        token = self._file.read_text(encoding="utf-8").strip()
        if not token:
            raise OSError(f"{self._file} is empty")
        self._token, self._read_at = token, self._clock()


def default_namespace() -> str:
    """Return the namespace of the process's service account; empty outside of a pod."""
    try:
        return (FOLDER / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _url_of_pod() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not (host and port):
        raise OSError("neither --api-server nor KUBERNETES_SERVICE_HOST and _PORT name the API server")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
