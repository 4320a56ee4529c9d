# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Carry out the plan of nouveau's blacklist."""

from __future__ import annotations

from .._core import plan as core_plan
from .._core.types import JsonObject
from .._host.facts import distribution, kernel
from .._host.file_transaction import replace_text
from .._host.system import System
from . import nouveau
from .initramfs_rebuild import Image
from .modprobe import PATH
from .nouveau_query import CONSOLES, observe
from .types import NodeFacts


class NouveauReconciler:
    """nouveau on the machine that the module runs on."""

    def __init__(self, present: bool, system: System, keep_file: bool = False) -> None:
        self._present = present
        self._keep_file = keep_file
        self._system = system
        self._in_use: set[str] = set()

    def observe(self) -> NodeFacts:
        found = distribution(self._system)
        own = kernel(self._system)
        state = observe(self._system, found["family"], own["installed"])
        if "nouveau" in self._in_use:
            state["refcnt"] = None
        state["nova"]["in_use"] |= bool(self._in_use.intersection(state["nova"]["modules"]))
        return {"distribution": found, "kernel": own, "nouveau": state}

    def plan(self, facts: NodeFacts) -> core_plan.Plan:
        return nouveau.plan(self._present, facts, self._keep_file)

    def apply(self, facts: NodeFacts, plan: core_plan.Plan) -> None:
        for change in plan.changes:
            step = change.step
            if isinstance(step, nouveau.PutFile):
                self._put(step)
            elif isinstance(step, nouveau.Rebuild):
                tool = facts["nouveau"]["tool"] or ""
                Image(self._system, tool, step.path, step.release, PATH, self._present).rebuild()
            elif isinstance(step, nouveau.Unload):
                self._unload(step)

    def _put(self, file: nouveau.PutFile) -> None:
        if file.text is None:
            self._system.remove(file.path)
        else:
            replace_text(self._system, file.path, file.text)

    def _unload(self, step: nouveau.Unload) -> None:
        for name in step.consoles:
            self._bind(name, "0")
        # Something may have started to use it: then only a reboot unloads it.
        if self._system.run(["modprobe", "-r", *step.modules]).rc != 0:
            self._in_use.update(step.modules)
            for name in step.consoles:
                self._bind(name, "1")

    def _bind(self, console: str, value: str) -> None:
        self._system.run(["tee", f"{CONSOLES}/{console}/bind"], stdin=f"{value}\n")


def work(present: bool, check: bool, system: System, keep_file: bool = False) -> JsonObject:
    """Reconcile, and report what only a reboot can do.

    :param present: the blacklist is wanted.
    :param check: predict the changes without applying them.
    :param system: the machine.
    :param keep_file: as in ``nouveau.plan``.
    """
    reconciler = NouveauReconciler(present, system, keep_file)
    result = core_plan.run(reconciler, check)
    return {**result, "reboot_required": nouveau.reboot_required(present, reconciler.observe())}
