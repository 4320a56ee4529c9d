# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated operators: a thread that acts on a real API server while a test runs."""

from __future__ import annotations

import threading
import typing as t
from pathlib import Path
from types import SimpleNamespace

from real_apiserver import ApiServer


def module_of(
    server: ApiServer, arguments: t.Iterable[str], tmpdir: Path | None = None, **params: t.Any
) -> SimpleNamespace:
    """Return the attributes of AnsibleModule from which a client is made.

    :param tmpdir: of the module, with the cache of the cluster's resources.
    """
    given = {**dict.fromkeys(arguments), "kubeconfig": str(server.kubeconfig), **params}
    return SimpleNamespace(params=given, tmpdir=str(tmpdir or server.folder), no_log_values=set())


class Simulation:
    """Calls ``_step`` every 50 ms until the context ends."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> t.Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _follow(self) -> None:
        while not self._end.wait(0.05):
            self._step()

    def _step(self) -> None:
        raise NotImplementedError
