# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine of containerd: validate its dump, restart it, and wait until its CRI plugin is loaded."""

from __future__ import annotations

import posixpath
import typing as t

from .._core.types import JsonObject
from .._host.file_transaction import Replacement
from .._host.system import System
from .._host.systemd import stale, unit
from . import containerd, cri
from .containerd_query import UNIT, config_path, dump, read_files
from .containerd_requirements import cri_disabled, losses, unmet_requirements
from .engine import ConfigOnDisk, Engine, require_binary
from .types import Loss


class ContainerdEngine(Engine):
    """A node's containerd.

    :param wanted: the requested state of its effective configuration.
    :param expected: as ``losses`` takes it, with each path's parts in a list.
    :param users_default: the default runtime of the user's files; None for an unknown one.
    """

    name = "containerd"
    unit = UNIT
    record = containerd.PENDING_PATH

    def __init__(
        self,
        system: System,
        wanted: containerd.Options,
        expected: t.Iterable[JsonObject] = (),
        users_default: str | None = None,
    ) -> None:
        super().__init__(system)
        self._wanted = wanted
        self._expected = {tuple(one["path"]): one["value"] for one in expected}
        self._users_default = users_default
        daemon = unit(system, UNIT)
        self._binary = daemon.binary or "containerd"
        self._config = config_path(daemon)

    def check_preconditions(self) -> None:
        if self._wanted.present:
            require_binary(self._system, self._wanted.binary, "without which containerd couldn't start any pod")
        daemon = unit(self._system, UNIT)
        text, _error = dump(self._system, self._binary, self._config)
        paths = list(read_files(self._system, self._config))
        fresh = daemon.active and not stale(self._system, daemon.pid, paths)
        if fresh and text and not self._system.exists(self.record):
            self._active = text

    def redact(self, text: str) -> str:
        return containerd.mask(text)

    def unredact(self, text: str, real: str) -> str:
        return containerd.unmask(text, real)

    def add_managed_files(self, changes: list[Replacement]) -> list[Replacement]:
        if not changes:
            # The plan consists of a restart alone.
            self._active = None
        return changes

    def config_on_disk(self) -> ConfigOnDisk:
        return ConfigOnDisk(*dump(self._system, self._binary, self._config))

    def own_files(self) -> list[str]:
        return [containerd.drop_in(self._config)]

    def validate_new_config(self, before: ConfigOnDisk, after: ConfigOnDisk) -> list[str]:
        return unmet_requirements(containerd.effective(after.value), self._wanted, self._users_default)

    def losses(self, before: ConfigOnDisk, after: ConfigOnDisk) -> list[Loss]:
        old, new = containerd.effective(before.value), containerd.effective(after.value)
        return losses(old, new, self._wanted, self._expected)

    def health_error(self) -> tuple[str, bool]:
        state = self._cri()
        if state == "ok" and unit(self._system, UNIT).active:
            return "", True
        return ("its CRI plugin failed to load", True) if state == "error" else ("its CRI plugin didn't answer", False)

    def unmet_requirements(self) -> list[str]:
        """Query crictl, where the node has one; the dump was validated before."""
        if not self._wanted.present or not self._system.exists("/usr/bin/crictl"):
            return []
        return cri.differences(cri.query(self._system, self._socket()), self._wanted)

    def result(self) -> JsonObject:
        return {"effective": containerd.mask(self.config_on_disk().value), "restarted": self.restarted}

    def _socket(self) -> str:
        return containerd.effective(self.config_on_disk().value or "").socket

    def _cri(self) -> str:
        """Query the state of the running daemon's CRI plugin: ok, error, or empty while it doesn't answer."""
        ctr = posixpath.join(posixpath.dirname(self._binary), "ctr")
        command = [ctr, "--address", self._socket(), "--connect-timeout", "2s", "plugins", "ls"]
        done = self._system.run(command, timeout=10)
        state = cri_state(done.out) if done.rc == 0 else ""
        # With the CRI plugin disabled on purpose (and only our settings removed), its absence is healthy.
        off = state == "missing" and cri_disabled(containerd.effective(self.config_on_disk().value or ""))
        return "ok" if off else state


def cri_state(listing: str) -> str:
    """Return the CRI's state in ``ctr plugins ls``: ok, error as soon as one part has failed, or missing."""
    states = []
    for line in listing.splitlines():
        columns = line.split()
        # Since 2.0 the CRI is three plugins: images, runtime and the service itself.
        if len(columns) >= 3 and (
            columns[0] == "io.containerd.cri.v1" or columns[:2] == ["io.containerd.grpc.v1", "cri"]
        ):
            states.append(columns[-1])
    if not states:
        return "missing"
    return "ok" if all(state == "ok" for state in states) else "error"
