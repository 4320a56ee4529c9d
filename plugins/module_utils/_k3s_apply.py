# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""k3s and RKE2 as engines of the runtime role: restarted, and judged by what they wrote for their containerd.

Neither can say before a restart what a setting will do. Pods outlive it.
"""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _cri_info, _k3s
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import RUNTIME_NAME, Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._observe_k3s import daemon_of, data_folder, effective
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import Put, PutBack, Replacement
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Meaning, last_words, restart
from ansible_collections.kubegpu.share.plugins.module_utils._system import System


class Rancher:
    """A node's k3s or RKE2."""

    def __init__(self, system: System, wanted: Wanted, kind: _k3s.Kind) -> None:
        self._system = system
        self._wanted = wanted
        self._kind = kind
        daemon = daemon_of(system, kind)
        self.name = kind.title
        self.unit = daemon.name
        self.record = kind.record
        self._data = data_folder(system, kind, daemon)
        self.restarted = False

    def refuse(self) -> None:
        if self._wanted.present and not self._system.exists(self._wanted.binary):
            raise BadInput(
                f"runtime_nvidia_binary: {self._wanted.binary} isn't on this node, where {self.name} would look for it"
            )

    def put(self) -> Put | None:
        return None

    def show(self, text: str) -> str:
        return text

    def reveal(self, text: str, real: str) -> str:
        return text

    def accompany(self, changes: list[Replacement]) -> list[Replacement]:
        return changes

    def meaning(self) -> Meaning:
        return Meaning(None)

    def objections(self, before: Meaning, after: Meaning) -> list[str]:
        return []

    def activate(self, put_back: PutBack, timeout: float) -> str:
        self.restarted = True
        return restart(self._system, self.unit, timeout)

    def unwell(self) -> tuple[str, bool]:
        if not daemon_of(self._system, self._kind).active:
            return "it isn't running", False
        found = self._info()
        return ("", True) if found is not None and found.ready is not False else ("its containerd didn't answer", False)

    def running(self) -> t.Any:
        found = effective(self._system, self._data)
        return (found.default_runtime, found.runtimes()) if found.plugin else None

    def shortcomings(self) -> list[str]:
        found = effective(self._system, self._data)
        if not self._wanted.present:
            return []
        wrong = []
        if self._wanted.default and found.default_runtime != RUNTIME_NAME:
            wrong.append(f"in {_k3s.rendered(self._data)} default_runtime_name is {found.default_runtime!r}")
        binary = found.runtime(RUNTIME_NAME).get(("options", "BinaryName"))
        if binary != self._wanted.binary:
            wrong.append(f"it has found NVIDIA's runtime at {binary!r} and not at {self._wanted.binary!r}")
        return wrong or _cri_info.differences(
            self._info(), True, self._wanted.default, self._wanted.binary, RUNTIME_NAME
        )

    def words(self, journal: str) -> str:
        return last_words(journal)

    def result(self) -> dict[str, t.Any]:
        found = effective(self._system, self._data)
        runtimes = {name: found.runtime(name).get(("options", "BinaryName"), "") for name in found.runtimes()}
        return {
            "effective": {"default_runtime": found.default_runtime, "runtimes": runtimes},
            "restarted": self.restarted,
        }

    def _info(self) -> _cri_info.CriInfo | None:
        return _cri_info.ask(self._system, _k3s.SOCKET, self._kind.crictl)
