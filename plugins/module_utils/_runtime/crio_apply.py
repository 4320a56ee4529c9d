# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine of CRI-O: validate ``crio config`` before a restart, and ``crio status config`` after it."""

from __future__ import annotations

import posixpath
import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject
from .._host.file_transaction import Put, Replacement
from .._host.system import System
from .._host.systemd import Unit, stale, unit
from . import containerd, cri, crio
from .containerd import Options
from .crio import config_of_daemon, config_of_files, masks, paths_of, read_files
from .engine import ConfigOnDisk, Engine, require_binary
from .types import Loss


class CrioEngine(Engine):
    """A node's CRI-O."""

    name = "CRI-O"
    unit = crio.UNIT
    record = crio.PENDING_PATH

    def __init__(self, system: System, wanted: Options) -> None:
        super().__init__(system)
        self._wanted = wanted
        self._main, self._folder = paths_of(self._daemon())
        self._masks = masks(system, self._daemon())

    def check_preconditions(self, changes: t.Sequence[Replacement]) -> None:
        if self._wanted.present:
            require_binary(self._system, self._wanted.binary, "without which CRI-O couldn't start any pod")
        daemon = self._daemon()
        paths = list(read_files(self._system, self._main, self._folder))
        fresh = daemon.active and not stale(self._system, daemon.pid, paths)
        # Its own dump doesn't show the toolkit's configuration.
        by_dump = bool(changes) and all(change.path != containerd.TOOLKIT_CONFIG for change in changes)
        if by_dump and fresh and not self._system.exists(self.record):
            self._active = config_of_files(self._system, daemon)[0] or None

    def file_writer(self) -> Put | None:
        return self._write

    def redact(self, text: str) -> str:
        return self._masks.mask(text)

    def unredact(self, text: str, real: str) -> str:
        return self._masks.unmask(text)

    def config_on_disk(self) -> ConfigOnDisk:
        text, error = config_of_files(self._system, self._daemon())
        return ConfigOnDisk(text, self._masks.mask(error))

    def compare(self, before: ConfigOnDisk, after: ConfigOnDisk) -> tuple[list[str], list[Loss]]:
        old, new = crio.parse_config(before.value), crio.parse_config(after.value)
        return crio.unmet_requirements(new, self._wanted), crio.losses(old, new)

    def health_error(self) -> tuple[str, bool]:
        daemon = self._daemon()
        if not daemon.active:
            return "it isn't running", False
        if config_of_daemon(self._system, daemon):
            return "", True
        # A CRI-O that can't print its configuration still reports over the CRI that it is ready.
        info = cri.query(self._system, crio.SOCKET)
        return ("", True) if info is not None and info.ready else ("it didn't answer in time", False)

    def running_config(self) -> t.Any:
        text = config_of_daemon(self._system, self._daemon())
        return crio.parse_config(text).flat if text else None

    def unmet_requirements(self) -> list[str]:
        text = config_of_daemon(self._system, self._daemon())
        if not text:
            return []
        config = crio.parse_config(text)
        if not self._wanted.present:
            files = crio.parse_config(self.config_on_disk().value or "")
            named = files.default_runtime
            return (
                [f"default_runtime is {config.default_runtime!r}"] if named and named != config.default_runtime else []
            )
        return crio.unmet_requirements(config, self._wanted)

    def journal_errors(self, journal: str) -> str:
        return super().journal_errors(self._masks.mask(journal))

    def result(self) -> JsonObject:
        # A killed run may have left it.
        self._system.remove(self._staged())
        config = crio.parse_config(config_of_daemon(self._system, self._daemon()))
        effective = {
            "default_runtime": config.default_runtime,
            "runtimes": {
                name: {key: self._masks.mask(value) for key, value in config.runtime(name).items()}
                for name in config.runtimes()
            },
        }
        return {"effective": effective, "restarted": self.restarted}

    def _daemon(self) -> Unit:
        return unit(self._system, crio.UNIT)

    def _staged(self) -> str:
        return posixpath.join(posixpath.dirname(self._folder), f".{crio.DROP_IN_NAME}.new")

    def _write(self, path: str, text: str, mode: int) -> None:
        """Write one file; CRI-O reads every file of its drop-in directory, so temporary files stay outside of it."""
        if posixpath.dirname(path) != self._folder:
            self._system.write(path, text, mode)
            return
        staged = self._staged()
        self._system.run(["mkdir", "-p", "-m", "0755", self._folder])
        self._system.write(staged, text, mode)
        done = self._system.run(["mv", "-fT", staged, path])
        if done.rc != 0:
            self._system.remove(staged)
            raise ShareError(f"{path} can't be written: {done.err.strip()}")
