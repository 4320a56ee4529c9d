# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan and carry out the blacklist of nouveau and nova: the modprobe.d file, and the initramfs of every kernel.

It reads the sections ``nouveau``, ``kernel`` and ``distribution`` of ``gpu_node``.
"""

from __future__ import annotations

import typing as t

from .._core import plan as core_plan
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._host.facts import distribution, kernel
from .._host.file_transaction import replace_text
from .._host.system import Done, System
from .nouveau import (
    BUILT,
    CONSOLES,
    KEPT,
    PATH,
    image_content,
    image_error,
    observe,
)
from .nouveau_plan import PutFile, Rebuild, Unload, make_plan, reboot_required
from .types import NodeFacts

SECONDS = 1800


class Image:
    """One kernel's image.

    :param file: the file that is the reason of the rebuild.
    :param inside: whether the new one must contain it.
    :param modules: the kernel modules that it must contain with it.
    """

    def __init__(
        self,
        system: System,
        tool: str,
        path: str,
        release: str,
        file: str,
        inside: bool,
        modules: t.Sequence[str] = (),
    ) -> None:
        self._system = system
        self._tool = tool
        self._path = path
        self._release = release
        self._file = file
        self._inside = inside
        self._modules = modules

    def rebuild(self) -> None:
        """Rebuild the image, or leave the old one in its place.

        :raises ShareError: the tool failed, or the new image fails validation.
        """
        if self._tool == "dracut":
            self._beside()
        else:
            self._in_place()
        # Coreutils before 8.24 write all file systems instead.
        self._system.run(["sync", self._path, "/boot"], timeout=SECONDS)

    def _beside(self) -> None:
        """Build beside the old image and rename: dracut itself removes the old image before the new one is complete."""
        built = BUILT + self._release
        self._system.remove(built)
        done = self._system.run(["dracut", "--force", built, self._release], timeout=SECONDS)
        wrong = self._wrong(done, built, old=self._path)
        if wrong:
            self._system.remove(built)
            raise self._error(wrong, done)
        self._must(["chmod", f"--reference={self._path}", built])
        self._must(["mv", "-f", "-T", built, self._path])

    def _in_place(self) -> None:
        """Give the old image a second name first: update-initramfs itself replaces it and runs boot loaders' hooks."""
        kept = KEPT + self._release
        self._restore(kept)
        # A hard link needs no space; a file system without hard links gets a copy, if it fits.
        if self._system.run(["ln", "-T", self._path, kept]).rc != 0:
            copied = self._system.run(["cp", "-a", "-T", self._path, BUILT + self._release], timeout=SECONDS)
            if copied.rc != 0:
                self._system.remove(BUILT + self._release)
                raise ShareError(f"{self._path} can't be backed up before the rebuild: {_last(copied)}")
            self._must(["mv", "-f", "-T", BUILT + self._release, kept])
        before = self._stat(self._path)[0]
        done = self._system.run(["update-initramfs", "-u", "-k", self._release], timeout=SECONDS)
        wrong = self._wrong(done, self._path, old=kept, before=before)
        if wrong:
            self._restore(kept)
            raise self._error(wrong, done)
        self._system.remove(kept)

    def _restore(self, kept: str) -> None:
        """Restore the kept image of an interrupted run: it worked."""
        if not self._system.exists(kept):
            return
        if not self._system.exists(self._path) or self._stat(kept)[0] != self._stat(self._path)[0]:
            self._must(["mv", "-f", "-T", kept, self._path])
        # mv doesn't move one name of a file onto another.
        self._system.remove(kept)

    def _wrong(self, done: Done, new: str, old: str, before: str = "") -> str:
        """Return why the new image can't be used; empty where it can.

        :param before: the inode that the new image's name had before, where it had one.
        """
        if done.rc != 0:
            return f"{' '.join(self._command())} failed: {_last(done)}"
        if not self._system.exists(new):
            return f"{' '.join(self._command())} created no {new}"
        (inode, size), (_inode, old_size) = self._stat(new), self._stat(old)
        if inode == before:
            return f"{' '.join(self._command())} didn't change {self._path} ({_last(done)})"
        content = image_content(self._system, self._tool, new, self._file, self._modules)
        reason = image_error(old_size, size, content, self._file if self._inside else "")
        return reason and f"the new {self._path} {reason}"

    def _command(self) -> list[str]:
        return ["dracut"] if self._tool == "dracut" else ["update-initramfs"]

    def _error(self, wrong: str, done: Done) -> ShareError:
        return ShareError(
            f"{wrong}; the old {self._path} is in its place", stdout=done.out[-8000:], stderr=done.err[-8000:]
        )

    def _stat(self, path: str) -> tuple[str, int]:
        """Return inode and size in bytes."""
        done = self._must(["stat", "-c", "%i %s", path])
        inode, _blank, size = done.out.strip().partition(" ")
        return inode, int(size)

    def _must(self, argv: list[str]) -> Done:
        done = self._system.run(argv, timeout=SECONDS)
        if done.rc != 0:
            raise ShareError(f"{' '.join(argv)} failed: {_last(done)}")
        return done


def _last(done: Done) -> str:
    """Return the line of a command's output with the reason: the last one, unless the disk is full."""
    lines = (done.err or done.out).strip().splitlines() or [f"status {done.rc}"]
    return ([line for line in lines if "No space left on device" in line] or lines)[-1]


class NouveauReconciler:
    """nouveau on the machine that the module runs on."""

    def __init__(self, present: bool, system: System, keep_file: bool = False) -> None:
        self._present = present
        self._keep_file = keep_file
        self._system = system
        self._in_use: set[str] = set()

    def observe(self) -> NodeFacts:
        linux = distribution(self._system)
        own = kernel(self._system)
        state = observe(self._system, linux["family"], own["installed"])
        if "nouveau" in self._in_use:
            state["refcnt"] = None
        state["nova"]["in_use"] |= bool(self._in_use.intersection(state["nova"]["modules"]))
        return {"distribution": linux, "kernel": own, "nouveau": state}

    def plan(self, facts: NodeFacts) -> core_plan.Plan:
        return make_plan(self._present, facts, self._keep_file)

    def apply(self, facts: NodeFacts, plan: core_plan.Plan) -> None:
        for change in plan.changes:
            step = change.step
            if isinstance(step, PutFile):
                self._put(step)
            elif isinstance(step, Rebuild):
                tool = facts["nouveau"]["tool"] or ""
                Image(self._system, tool, step.path, step.release, PATH, self._present).rebuild()
            elif isinstance(step, Unload):
                self._unload(step)

    def _put(self, file: PutFile) -> None:
        if file.text is None:
            self._system.remove(file.path)
        else:
            replace_text(self._system, file.path, file.text)

    def _unload(self, step: Unload) -> None:
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
    :param keep_file: as in ``nouveau_plan.make_plan``.
    """
    reconciler = NouveauReconciler(present, system, keep_file)
    result = core_plan.run(reconciler, check)
    return {**result, "reboot_required": reboot_required(present, reconciler.observe())}
