# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""CRI-O as an engine of the runtime role: judged by ``crio config`` before a restart, ``crio status config`` after."""

from __future__ import annotations

import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _cri_info, _crio
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._observe_crio import (
    daemon_says,
    files_say,
    masks,
    places,
    read_files,
)
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import Unit, stale, unit
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import Put, PutBack, Replacement
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Meaning, last_words, restart
from ansible_collections.kubegpu.share.plugins.module_utils._system import System


class Crio:
    """A node's CRI-O."""

    name = "CRI-O"
    unit = _crio.UNIT
    record = _crio.PENDING_PATH

    def __init__(self, system: System, wanted: Wanted) -> None:
        self._system = system
        self._wanted = wanted
        self._main, self._folder = places(self._daemon())
        self._masks = masks(system, self._daemon())
        # What the running daemon has read, if it needn't be made to read it again.
        self._read: str | None = None
        self.restarted = False

    def refuse(self) -> None:
        if self._wanted.present and not self._system.exists(self._wanted.binary):
            raise BadInput(
                f"runtime_nvidia_binary: {self._wanted.binary} isn't on this node; CRI-O couldn't start any pod"
            )
        daemon = self._daemon()
        paths = list(read_files(self._system, self._main, self._folder))
        fresh = daemon.active and not stale(self._system, daemon.pid, paths)
        if fresh and not self._system.exists(self.record):
            self._read = files_say(self._system, daemon)[0] or None

    def put(self) -> Put | None:
        return self._put

    def show(self, text: str) -> str:
        return self._masks.mask(text)

    def reveal(self, text: str, real: str) -> str:
        return self._masks.unmask(text)

    def accompany(self, changes: list[Replacement]) -> list[Replacement]:
        if not changes or any(one.path == _crio.TOOLKIT_CONFIG for one in changes):
            self._read = None
        return changes

    def meaning(self) -> Meaning:
        text, error = files_say(self._system, self._daemon())
        return Meaning(text, self._masks.mask(error))

    def objections(self, before: Meaning, after: Meaning) -> list[str]:
        new = _crio.read_shown(after.what)
        wrong = _crio.shortcomings(new, self._wanted)
        if not wrong and before.what:
            wrong = [f"{path} would change" for path in _crio.losses(_crio.read_shown(before.what), new)]
        return wrong

    def activate(self, put_back: PutBack, timeout: float) -> str:
        if self._read is not None and self.meaning().what == self._read:
            return ""
        self._read, self.restarted = None, True
        return restart(self._system, _crio.UNIT, timeout)

    def unwell(self) -> tuple[str, bool]:
        daemon = self._daemon()
        if not daemon.active:
            return "it isn't running", False
        if daemon_says(self._system, daemon):
            return "", True
        # Where CRI-O can't print what it runs with, over the CRI it says at least that it is ready.
        found = _cri_info.ask(self._system, _crio.SOCKET)
        return ("", True) if found is not None and found.ready else ("it didn't answer in time", False)

    def running(self) -> t.Any:
        said = daemon_says(self._system, self._daemon())
        return _crio.read_shown(said).flat if said else None

    def shortcomings(self) -> list[str]:
        said = daemon_says(self._system, self._daemon())
        if not said:
            return []
        found = _crio.read_shown(said)
        if not self._wanted.present:
            files = _crio.read_shown(self.meaning().what or "")
            named = files.default_runtime
            return [f"default_runtime is {found.default_runtime!r}"] if named and named != found.default_runtime else []
        return _crio.shortcomings(found, self._wanted)

    def words(self, journal: str) -> str:
        return self._masks.mask(last_words(journal))

    def result(self) -> dict[str, t.Any]:
        # Left by a run that was killed.
        self._system.remove(self._staged())
        found = _crio.read_shown(daemon_says(self._system, self._daemon()))
        effective = {
            "default_runtime": found.default_runtime,
            "runtimes": {
                name: {key: self._masks.mask(value) for key, value in found.runtime(name).items()}
                for name in found.names()
            },
        }
        return {"effective": effective, "restarted": self.restarted}

    def _daemon(self) -> Unit:
        return unit(self._system, _crio.UNIT)

    def _staged(self) -> str:
        return posixpath.join(posixpath.dirname(self._folder), f".{_crio.DROP_IN_NAME}.new")

    def _put(self, path: str, text: str, mode: int) -> None:
        """CRI-O reads every file of its folder, so that nothing unfinished is ever written there."""
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
