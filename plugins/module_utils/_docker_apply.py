# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Docker as an engine of the runtime role: made to reload where that suffices, judged by ``docker info``.

A restart stops all containers unless ``live-restore`` is on. A reload (SIGHUP) takes over ``runtimes`` and
``default-runtime`` as the file has them, and keeps the old ones where the file has none: so before ours go away, the
daemon reads once a file that names the stock runtime.
"""

from __future__ import annotations

import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _docker
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import RUNTIME_NAME, Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._observe_docker import config_path, info, validate
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import Unit, unit
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import Put, PutBack, Replacement, digest
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Meaning, last_words, restart
from ansible_collections.kubegpu.share.plugins.module_utils._system import System
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

RELOAD_SECONDS = 5.0
POLL_SECONDS = 0.25


class Docker:
    """A node's Docker.

    :param must_restart: the change is one that a reload doesn't take over.
    """

    name = "Docker"
    unit = _docker.UNIT
    record = _docker.PENDING_PATH

    def __init__(
        self,
        system: System,
        wanted: Wanted,
        must_restart: bool = False,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._wanted = wanted
        self._must_restart = must_restart
        self._sleep = sleep
        self._now = now
        daemon = self._daemon()
        self._config = config_path(daemon)
        self._flags = _docker.flags(daemon.values("--default-runtime"), daemon.values("--add-runtime"))
        found = info(system, daemon)
        self._version = found.version if found else ""
        self.restarted = False

    def refuse(self) -> None:
        if self._wanted.present and not self._system.exists(self._wanted.binary):
            raise BadInput(
                f"runtime_nvidia_binary: {self._wanted.binary} isn't on this node; Docker couldn't start any container"
            )

    def put(self) -> Put | None:
        def put(path: str, text: str, mode: int) -> None:
            # The record may hold the user's credentials.
            self._system.write(path, text, 0o600 if path == _docker.WAS_PATH else mode)

        return put

    def show(self, text: str) -> str:
        return _docker.mask(text)

    def reveal(self, text: str, real: str) -> str:
        return _docker.unmask(text, real)

    def accompany(self, changes: list[Replacement]) -> list[Replacement]:
        """Beside daemon.json, the record of what it was."""
        old = self._system.read(_docker.WAS_PATH)
        if not self._wanted.present:
            gone = [] if old is None else [Replacement(_docker.WAS_PATH, digest(old), None)]
            return [*changes, *gone]
        for change in changes:
            now = self._system.read(self._config)
            was = _docker.read_was(old)
            if was is None or was.path != self._config:
                was = _docker.Was(self._config, now, ())
            written = was.written
            if now == was.text or digest(now) in written:
                # Else the new text holds what a user has changed since, which the old one doesn't.
                written = (*written[-4:], digest(change.after))
            new = _docker.Was(was.path, was.text, written)
            return [Replacement(_docker.WAS_PATH, digest(old), new.dump()), *changes]
        return changes

    def meaning(self) -> Meaning:
        return Meaning(
            _docker.goal(self._system.read(self._config)),
            validate(self._system, self._daemon(), self._config, self._version),
        )

    def objections(self, before: Meaning, after: Meaning) -> list[str]:
        if not self._wanted.present:
            return []
        found: _docker.Goal = after.what
        named = found.default or self._flags.default
        wrong = []
        if self._wanted.default and named != RUNTIME_NAME:
            wrong.append(f"default-runtime is {named!r}")
        if found.runtimes.get(RUNTIME_NAME) != self._wanted.binary:
            wrong.append(f"runtimes.{RUNTIME_NAME} isn't in it")
        return wrong

    def activate(self, put_back: PutBack, timeout: float) -> str:
        text = self._system.read(self._config)
        found = self._info()
        must, self._must_restart = self._must_restart, False
        if found is None and self._daemon().active and not self.restarted:
            return "it doesn't answer, and a restart would stop whatever containers it runs"
        # Containers may have started since the plan was made.
        stops = found is not None and bool(found.containers) and not found.live_restore
        if found is not None and (stops or not must):
            if self._reached(found, text) or self._reloaded(put_back, text):
                return ""
            if stops:
                return f"it didn't take the file over, and a restart would stop {found.containers} running container(s)"
        self.restarted = True
        return restart(self._system, _docker.UNIT, timeout)

    def unwell(self) -> tuple[str, bool]:
        daemon = self._daemon()
        if not daemon.active:
            return "it isn't running", False
        return ("", True) if info(self._system, daemon) is not None else ("it didn't answer in time", False)

    def running(self) -> t.Any:
        found = self._info()
        return found.state if found is not None else None

    def shortcomings(self) -> list[str]:
        found = self._info()
        if found is None:
            return ["it doesn't answer"]
        if not self._wanted.present and not self._reached(found, self._system.read(self._config)):
            return [f"it still runs with the default runtime {found.default_runtime!r}"]
        return _docker.shortcomings(found, self._wanted)

    def words(self, journal: str) -> str:
        return last_words(journal)

    def result(self) -> dict[str, t.Any]:
        found = self._info()
        if self._wanted.present and found is None:
            return {"restarted": self.restarted}
        effective = {"default_runtime": found.default_runtime, "runtimes": dict(found.runtimes)} if found else {}
        return {"effective": effective, "restarted": self.restarted}

    # ----------------------------------------------------------------- reload

    def _daemon(self) -> Unit:
        return unit(self._system, _docker.UNIT)

    def _info(self) -> _docker.Info | None:
        return info(self._system, self._daemon())

    def _reached(self, found: _docker.Info, text: str | None) -> bool:
        return _docker.goal(text).reached(found, self._flags)

    def _reloaded(self, put_back: PutBack, text: str | None) -> bool:
        """The daemon has read the file and says so."""
        if not _docker.needs_telling(text, self._flags):
            return self._hangup(text)
        stopgap = _docker.telling(text, self._flags)
        # A run that is killed here leaves a record by which the next one gives back the real file.
        before = self._system.read(_docker.WAS_PATH)
        was = _docker.Was(self._config, text, (digest(stopgap),))
        self._system.write(_docker.WAS_PATH, was.dump(), 0o600)
        put_back.rewrite(self._config, stopgap)
        reached = self._hangup(stopgap)
        if text is None:
            self._system.remove(self._config)
        else:
            put_back.rewrite(self._config, text)
        if before is None:
            self._system.remove(_docker.WAS_PATH)
        else:
            self._system.write(_docker.WAS_PATH, before, 0o600)
        return reached

    def _hangup(self, text: str | None) -> bool:
        pid = self._daemon().pid
        if not pid or self._system.run(["kill", "-HUP", str(pid)]).rc != 0:
            return False
        for _look in Waiting(RELOAD_SECONDS, POLL_SECONDS, self._sleep, self._now).looks():
            found = self._info()
            if found is not None and self._reached(found, text):
                return True
        return False
