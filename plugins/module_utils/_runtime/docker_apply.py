# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine of Docker: reload where that suffices, and validate ``docker info``.

A restart stops all containers unless ``live-restore`` is on. A reload (SIGHUP) takes over ``runtimes`` and
``default-runtime`` of the file, and keeps the old values of keys that the file no longer has: so before our keys are
removed, the daemon reads a temporary file once that names the stock runtime.
"""

from __future__ import annotations

import time
import typing as t

from .._core.digest import digest
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._host.file_transaction import FileTransaction, Put, Replacement
from .._host.system import System
from .._host.systemd import Unit, unit
from . import docker
from .containerd import RUNTIME_NAME, Options
from .docker import config_path, info, validate
from .engine import ConfigOnDisk, Engine, require_binary
from .types import Loss

RELOAD_SECONDS = 5.0
POLL_SECONDS = 0.25


class DockerEngine(Engine):
    """A node's Docker.

    :param must_restart: a reload doesn't take the change over.
    :param sleep: injected by tests, as ``now`` is.
    """

    name = "Docker"
    unit = docker.UNIT
    record = docker.PENDING_PATH
    redact, unredact = staticmethod(docker.mask), staticmethod(docker.unmask)

    def __init__(
        self,
        system: System,
        wanted: Options,
        must_restart: bool = False,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(system)
        self._wanted = wanted
        self._must_restart = must_restart
        self._sleep = sleep
        self._now = now
        daemon = self._daemon()
        self._config = config_path(daemon)
        self._flags = docker.flags(daemon.values("--default-runtime"), daemon.values("--add-runtime"))
        running = info(system, daemon)
        self._version = running.version if running else ""

    def check_preconditions(self, changes: t.Sequence[Replacement]) -> None:
        if self._wanted.present:
            require_binary(self._system, self._wanted.binary, "without which Docker couldn't start any container")

    def file_writer(self) -> Put | None:
        def write(path: str, text: str, mode: int) -> None:
            # The backup may hold the user's credentials.
            self._system.write(path, text, 0o600 if path == docker.BACKUP_PATH else mode)

        return write

    def add_managed_files(self, changes: list[Replacement]) -> list[Replacement]:
        """Add the backup of the original daemon.json."""
        old = self._system.read(docker.BACKUP_PATH)
        if not self._wanted.present:
            removal = [] if old is None else [Replacement(docker.BACKUP_PATH, digest(old), None)]
            return [*changes, *removal]
        for change in changes:
            now = self._system.read(self._config)
            backup = docker.parse_backup(old)
            if backup is None or backup.path != self._config:
                backup = docker.DaemonJsonBackup(self._config, now, ())
            written = backup.written
            if now == backup.text or digest(now) in written:
                # Otherwise the new text holds a user's later changes, which the original lacks.
                written = (*written[-4:], digest(change.after))
            new = docker.DaemonJsonBackup(backup.path, backup.text, written)
            return [Replacement(docker.BACKUP_PATH, digest(old), new.dump()), *changes]
        return changes

    def config_on_disk(self) -> ConfigOnDisk:
        return ConfigOnDisk(
            docker.runtimes_in(self._system.read(self._config)),
            validate(self._system, self._daemon(), self._config, self._version),
        )

    def compare(self, before: ConfigOnDisk, after: ConfigOnDisk) -> tuple[list[str], list[Loss]]:
        if not self._wanted.present:
            return [], []
        runtimes: docker.FileRuntimes = after.value
        named = runtimes.default or self._flags.default
        wrong = []
        if self._wanted.default and named != RUNTIME_NAME:
            wrong.append(f"default-runtime is {named!r}")
        if runtimes.runtimes.get(RUNTIME_NAME) != self._wanted.binary:
            wrong.append(f"runtimes.{RUNTIME_NAME} isn't in it")
        return wrong, []

    def activate(self, transaction: FileTransaction, timeout: float) -> str:
        text = self._system.read(self._config)
        running = self._info()
        must, self._must_restart = self._must_restart, False
        if running is None and self._daemon().active and not self.restarted:
            return "it doesn't answer, and a restart would stop all its containers"
        # Containers may have started since the plan was made.
        stops = running is not None and bool(running.containers) and not running.live_restore
        if running is not None and (stops or not must):
            if self._matches(running, text) or self._reload(transaction, text):
                return ""
            if stops:
                return f"the reload had no effect, and a restart would stop {running.containers} running container(s)"
        return self.restart(timeout)

    def health_error(self) -> tuple[str, bool]:
        daemon = self._daemon()
        if not daemon.active:
            return "it isn't running", False
        return ("", True) if info(self._system, daemon) is not None else ("it didn't answer in time", False)

    def running_config(self) -> t.Any:
        running = self._info()
        return running.state if running is not None else None

    def unmet_requirements(self) -> list[str]:
        running = self._info()
        if running is None:
            return ["it doesn't answer"]
        if not self._wanted.present and not self._matches(running, self._system.read(self._config)):
            return [f"it still runs with the default runtime {running.default_runtime!r}"]
        return docker.unmet_requirements(running, self._wanted)

    def result(self) -> JsonObject:
        running = self._info()
        if self._wanted.present and running is None:
            return {"restarted": self.restarted}
        effective = {"default_runtime": running.default_runtime, "runtimes": dict(running.runtimes)} if running else {}
        return {"effective": effective, "restarted": self.restarted}

    def _daemon(self) -> Unit:
        return unit(self._system, docker.UNIT)

    def _info(self) -> docker.Info | None:
        return info(self._system, self._daemon())

    def _matches(self, running: docker.Info, text: str | None) -> bool:
        return docker.runtimes_in(text).match(running, self._flags)

    def _reload(self, transaction: FileTransaction, text: str | None) -> bool:
        """Reload the file; return whether the daemon runs with it."""
        if not docker.reload_keeps_runtime(text, self._flags):
            return self._hangup(text)
        temporary = docker.with_stock_runtime(text, self._flags)
        # If this run is killed here, the next one restores the real file from this backup.
        before = self._system.read(docker.BACKUP_PATH)
        backup = docker.DaemonJsonBackup(self._config, text, (digest(temporary),))
        self._system.write(docker.BACKUP_PATH, backup.dump(), 0o600)
        transaction.write_in_place(self._config, temporary)
        matches = self._hangup(temporary)
        if text is None:
            self._system.remove(self._config)
        else:
            transaction.write_in_place(self._config, text)
        if before is None:
            self._system.remove(docker.BACKUP_PATH)
        else:
            self._system.write(docker.BACKUP_PATH, before, 0o600)
        return matches

    def _hangup(self, text: str | None) -> bool:
        pid = self._daemon().pid
        if not pid or self._system.run(["kill", "-HUP", str(pid)]).rc != 0:
            return False
        for _attempt in Waiting(RELOAD_SECONDS, POLL_SECONDS, self._sleep, self._now).attempts():
            running = self._info()
            if running is not None and self._matches(running, text):
                return True
        return False
