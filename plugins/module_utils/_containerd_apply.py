# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""containerd as an engine of the runtime role: judged by its own dump, restarted, and healthy with its CRI plugin."""

from __future__ import annotations

import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _containerd, _cri_info
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._observe_containerd import (
    UNIT,
    dump,
    read_files,
    service,
)
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import stale
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import Put, PutBack, Replacement
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Meaning, last_words, restart
from ansible_collections.kubegpu.share.plugins.module_utils._system import System


class Containerd:
    """A node's containerd.

    :param wanted: how its effective configuration has to look.
    """

    name = "containerd"
    unit = UNIT
    record = _containerd.PENDING_PATH

    def __init__(self, system: System, wanted: _containerd.Wanted) -> None:
        self._system = system
        self._wanted = wanted
        unit = service(system)
        self._binary = unit.binary or "containerd"
        self._config = unit.config_path
        # The files that the daemon has read, if it needn't be made to read them again.
        self._read: str | None = None
        self.restarted = False

    def refuse(self) -> None:
        if self._wanted.present and not self._system.exists(self._wanted.binary):
            raise BadInput(
                f"runtime_nvidia_binary: {self._wanted.binary} isn't on this node; containerd couldn't start any pod"
            )
        unit = service(self._system)
        text, _error = dump(self._system, self._binary, self._config)
        paths = list(read_files(self._system, self._config))
        if unit.active and text and not self._system.exists(self.record) and not stale(self._system, unit.pid, paths):
            self._read = text

    def put(self) -> Put | None:
        return None

    def show(self, text: str) -> str:
        return _containerd.mask(text)

    def reveal(self, text: str, real: str) -> str:
        return _containerd.unmask(text, real)

    def accompany(self, changes: list[Replacement]) -> list[Replacement]:
        if not changes:
            # Nothing but a restart is what was planned.
            self._read = None
        return changes

    def meaning(self) -> Meaning:
        return Meaning(*dump(self._system, self._binary, self._config))

    def objections(self, before: Meaning, after: Meaning) -> list[str]:
        new = _containerd.effective(after.what)
        wrong = _containerd.shortcomings(new, self._wanted)
        if not wrong and before.what:
            lost = _containerd.losses(_containerd.effective(before.what), new, self._wanted)
            wrong = [f"{path} would change" for path in lost]
        return wrong

    def activate(self, put_back: PutBack, timeout: float) -> str:
        if self._read is not None and self.meaning().what == self._read:
            return ""
        self._read, self.restarted = None, True
        return restart(self._system, UNIT, timeout)

    def unwell(self) -> tuple[str, bool]:
        state = self._cri()
        if state == "ok" and service(self._system).active:
            return "", True
        return ("its CRI plugin failed to load", True) if state == "error" else ("its CRI plugin didn't answer", False)

    def running(self) -> t.Any:
        return None

    def shortcomings(self) -> list[str]:
        """By crictl, where the node has one; containerd's own word is the dump, which was asked before."""
        if not self._wanted.present or not self._system.exists("/usr/bin/crictl"):
            return []
        found = _cri_info.ask(self._system, self._socket())
        return _cri_info.differences(found, True, self._wanted.default, self._wanted.binary)

    def words(self, journal: str) -> str:
        return last_words(journal)

    def result(self) -> dict[str, t.Any]:
        return {"effective": _containerd.mask(self.meaning().what), "restarted": self.restarted}

    def _socket(self) -> str:
        return _containerd.effective(self.meaning().what or "").socket

    def _cri(self) -> str:
        """State of the CRI plugin by the running daemon: ok, error, or nothing while it can't be asked."""
        ctr = posixpath.join(posixpath.dirname(self._binary), "ctr")
        command = [ctr, "--address", self._socket(), "--connect-timeout", "2s", "plugins", "ls"]
        done = self._system.run(command, timeout=10)
        state = cri_state(done.out) if done.rc == 0 else ""
        # Where the CRI is switched off on purpose (and we are only taking ours out), its absence is health.
        off = state == "missing" and _containerd.cri_disabled(_containerd.effective(self.meaning().what or ""))
        return "ok" if off else state


def cri_state(listing: str) -> str:
    """State of the CRI in ``ctr plugins ls``: ok, error as soon as any part of it has failed, or missing."""
    states = []
    for line in listing.splitlines():
        columns = line.split()
        # From 2.0 on the CRI is three plugins: images, runtime and the service itself.
        if len(columns) >= 3 and (
            columns[0] == "io.containerd.cri.v1" or columns[:2] == ["io.containerd.grpc.v1", "cri"]
        ):
            states.append(columns[-1])
    if not states:
        return "missing"
    return "ok" if all(state == "ok" for state in states) else "error"
