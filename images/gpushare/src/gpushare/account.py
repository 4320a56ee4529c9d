# SPDX-License-Identifier: GPL-3.0-or-later
"""The Kubernetes API as a pod reaches it: by its service account, over connections of ours.

The official client can do this too, and every kubeconfig besides; for that it takes 20 MB of memory, a third of what a
server of ours needs, and several times the processor's time. So it is only loaded where there is a kubeconfig.
"""

from __future__ import annotations

import json
import os
import threading
import time
import typing as t
from collections.abc import Callable
from pathlib import Path

from gpushare.http_client import Answer, HttpClient

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A token is replaced long before it ends; so often is the file looked at.
TOKEN_SECONDS = 60.0


class Account:
    """Requests in the name of this pod's service account; the token and the authority are read again.

    :raises OSError: there is no such account; in one sentence.
    """

    def __init__(
        self,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        url: str = "",
        connect: float = 5.0,
    ) -> None:
        """
        :param url: of the API server; unset: as the pod's environment says.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
        if not (host and port):
            raise OSError("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT don't name the API server")
        self.url = url or (f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")
        folder = folder or FOLDER
        self._file, self._clock, self._lock = folder / "token", clock, threading.Lock()
        self._token, self._read_at = "", clock()
        authority = folder / "ca.crt"
        if not authority.is_file():
            raise OSError(f"there is no {authority}")
        self._read()
        self._client = HttpClient(self.url, authority, connect)

    def request(self, method: str, path: str, headers: dict[str, str], body: t.Any, seconds: float) -> Answer:
        """The answer, not read yet; raises what the client raises, or ``OSError`` where the token can't be read.

        :param body: is sent as JSON.
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
