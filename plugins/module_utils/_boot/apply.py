# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Change the kernel's arguments on the machine that the module runs on, and prove the entry that boots next."""

from __future__ import annotations

import posixpath

from .._core import plan as core_plan
from .._core.digest import digest
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.types import JsonObject
from .._host import iommu
from .._host.facts import distribution, running
from .._host.file_transaction import FileTransaction, Replacement, check_unchanged
from .._host.system import Done, System, target
from . import layout, places, words
from .loaders import PENDING, RECORD, UPDATE_GRUB, mkconfig, observe, tool
from .plan import (
    Kargs,
    Options,
    PutFile,
    Refresh,
    SetKernelopts,
    difference,
    make_plan,
    new_record,
    next_words,
    options,
    outcome,
    record_text,
    wanted,
)
from .types import Boot

# os-prober looks at every disk; a deployment of rpm-ostree is written to the disk.
SECONDS = 600


class BootReconciler:
    """The kernel's arguments of this machine."""

    def __init__(self, system: System, given: Options) -> None:
        self._system = system
        self._given = given

    def observe(self) -> Boot:
        boots = observe(self._system, dict(distribution(self._system)))
        return {**boots, "iommu": iommu.observe(self._system, running(self._system))}

    def plan(self, boot: Boot) -> core_plan.Plan:
        return make_plan(self._given, boot)

    def apply(self, boot: Boot, plan: core_plan.Plan) -> None:
        made = difference(self._given, boot)
        steps = [change.step for change in plan.changes]
        files = [
            Replacement(step.path, digest(boot["files"].get(step.path)), step.text)
            for step in steps
            if isinstance(step, PutFile)
        ]
        check_unchanged(files, {file.path: self._system.read(file.path) for file in files})
        old_record = self._system.read(RECORD)
        record = new_record(made, boot)
        transaction = FileTransaction(self._system, PENDING)
        kept = transaction.backup(files)
        begun: list[object] = []
        try:
            if record is not None:
                self._system.write(RECORD, record_text(record), 0o600)
            transaction.replace(files, kept)
            self._run(steps, boot, begun)
            self._prove(made.drop)
        except ShareError as error:
            transaction.restore(kept)
            self._back(begun, boot, error)
            if old_record is None:
                self._system.remove(RECORD)
            else:
                self._system.write(RECORD, old_record, 0o600)
            transaction.commit()
            raise
        transaction.commit()
        if record is None:
            self._system.remove(RECORD)
            # Fails while other records are in it.
            self._system.run(["rmdir", posixpath.dirname(RECORD)])

    def _run(self, steps: list[object], boot: Boot, begun: list[object]) -> None:
        for step in steps:
            begun.append(step)
            if isinstance(step, SetKernelopts):
                self._set_kernelopts(boot, step.value)
            elif isinstance(step, Kargs):
                self._kargs(step.append, step.delete)
            elif isinstance(step, Refresh):
                self._refresh(boot["loader"])

    def _back(self, steps: list[object], boot: Boot, error: ShareError) -> None:
        """Have the loader's own files as they were, after the edited ones are; what fails is part of the error."""
        failed = []
        for step in steps:
            try:
                if isinstance(step, SetKernelopts) and boot["kernelopts"] is not None:
                    self._set_kernelopts(boot, boot["kernelopts"])
                elif isinstance(step, Kargs):
                    self._kargs(step.delete, step.append)
                elif isinstance(step, Refresh):
                    self._refresh(boot["loader"])
            except ShareError as other:
                failed.append(str(other))
        error.details["rolled_back"] = not failed
        if failed:
            error.details["rollback_errors"] = failed

    def _set_kernelopts(self, boot: Boot, value: str) -> None:
        program = tool(self._system, "grub2-editenv") or tool(self._system, "grub-editenv")
        if not program:
            raise BadInput("grub2-editenv isn't installed, which sets GRUB's variable kernelopts")
        self._must([program, target(self._system, boot["environment"]), "set", f"kernelopts={value}"])

    def _kargs(self, append: tuple[str, ...], delete: tuple[str, ...]) -> None:
        argv = [f"--append-if-missing={argument}" for argument in append] + [
            f"--delete-if-present={argument}" for argument in delete
        ]
        if argv:
            self._must(["rpm-ostree", "kargs", *argv])

    def _refresh(self, loader: str) -> None:
        if loader == "proxmox":
            self._must(["proxmox-boot-tool", "refresh"])
        elif loader == "grub-drop-in":
            self._must([tool(self._system, UPDATE_GRUB)])
        else:
            config = target(self._system, self.observe()["config"])
            self._must([mkconfig(self._system), "-o", config])

    def _must(self, argv: list[str]) -> Done:
        done = self._system.run(argv, timeout=SECONDS)
        if done.rc != 0:
            lines = (done.err or done.out).strip().splitlines() or [f"status {done.rc}"]
            raise ShareError(
                f"{' '.join(argv[:2])} failed: {lines[-1]}", stdout=done.out[-8000:], stderr=done.err[-8000:]
            )
        return done

    def _prove(self, dropped: tuple[str, ...]) -> None:
        """Look at the entry that boots next.

        :raises NotInEffect: it lacks a wanted argument, or has one that was removed.
        """
        boot = self.observe()
        have = next_words(boot)
        if have is None:
            # No entry is known to be the next one; the second observation looks at all of them.
            return
        entry = boot["next"]["path"] if boot["next"] else ""
        missing = [argument for argument in wanted(self._given, boot) if not words.effective(argument, have)]
        if missing:
            raise NotInEffect(
                f"{entry}: the entry that boots next has no {' '.join(missing)}{_later(boot)}",
                code="not-in-entry",
                entry=boot["next"],
            )
        left = [argument for argument in dropped if argument in have]
        if left:
            raise NotInEffect(
                f"{entry}: the entry that boots next still has {' '.join(left)}",
                code="still-in-entry",
                entry=boot["next"],
            )


def _later(boot: Boot) -> str:
    """Return which drop-in of GRUB sets the variable anew, after this collection's; empty where none does."""
    found = []
    for path, content in sorted(boot["files"].items()):
        if boot["loader"] != "grub-drop-in" or path <= layout.DROP_IN:
            continue
        for assignment in places.assignments(content):
            if assignment.name == places.VARIABLE and f"${places.VARIABLE}" not in assignment.value:
                found.append(path)
    return f", because {', '.join(dict.fromkeys(found))} sets {places.VARIABLE} anew" if found else ""


def work(params: JsonObject, check: bool, system: System) -> JsonObject:
    """Reconcile, and report what only a reboot can do.

    :param check: predict the changes without applying them.
    """
    given = options(params)
    return core_plan.run(BootReconciler(system, given), check, lambda boot: outcome(given, boot))
