# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine of k3s and RKE2: restart the service and validate the configuration that it wrote for its containerd.

Neither can predict before a restart what a setting will do. Pods keep running through the restart.
"""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject
from .._host.file_transaction import Replacement
from .._host.system import System
from .._rancher.settings import Kind
from . import cri, k3s
from .containerd import RUNTIME_NAME, Options
from .engine import Engine, require_binary
from .k3s import daemon_of, data_folder, effective, settings_of


class K3sEngine(Engine):
    """A node's k3s or RKE2."""

    def __init__(self, system: System, wanted: Options, kind: Kind) -> None:
        super().__init__(system)
        self._wanted = wanted
        self._kind = kind
        daemon = daemon_of(system, kind)
        self.name = kind.title
        self.unit = daemon.name
        self.record = kind.record
        self._data = data_folder(kind, settings_of(system, kind, daemon))
        self._crictl = kind.client("crictl", daemon.binary, self._data)

    def check_preconditions(self, changes: t.Sequence[Replacement]) -> None:
        if self._wanted.present:
            require_binary(self._system, self._wanted.binary, f"where {self.name} searches for it")

    def health_error(self) -> tuple[str, bool]:
        if not daemon_of(self._system, self._kind).active:
            return "it isn't running", False
        info = self._info()
        return ("", True) if info is not None and info.ready is not False else ("its containerd didn't answer", False)

    def running_config(self) -> t.Any:
        """Return the default runtime; which others there are, k3s and RKE2 find anew at each start."""
        config = effective(self._system, self._data)
        return config.default_runtime if config.plugin else None

    def journal_errors(self, journal: str) -> str:
        """Add why its containerd ended, which has a log of its own; the journal says only that it did."""
        log = self._system.run(["tail", "-n", "1", f"{self._data}/agent/containerd/containerd.log"]).out
        return super().journal_errors(f"{journal}\n{log}" if log.startswith("containerd: ") else journal)

    def unmet_requirements(self) -> list[str]:
        config = effective(self._system, self._data)
        if not self._wanted.present:
            return []
        wrong = []
        if self._wanted.default and config.default_runtime != RUNTIME_NAME:
            wrong.append(f"in {k3s.rendered(self._data)} default_runtime_name is {config.default_runtime!r}")
        binary = config.runtimes.get(RUNTIME_NAME, {}).get(("options", "BinaryName"))
        if binary != self._wanted.binary:
            wrong.append(f"it uses NVIDIA's runtime at {binary!r} and not at {self._wanted.binary!r}")
        return wrong or cri.differences(self._info(), self._wanted)

    def result(self) -> JsonObject:
        config = effective(self._system, self._data)
        runtimes = {name: config.runtimes[name].get(("options", "BinaryName"), "") for name in config.names}
        return {
            "effective": {"default_runtime": config.default_runtime, "runtimes": runtimes},
            "restarted": self.restarted,
        }

    def _info(self) -> cri.CriInfo | None:
        return cri.query(self._system, k3s.SOCKET, self._crictl)
