# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan and carry out the blacklist of nouveau and nova: the modprobe.d file, and the initramfs of every kernel.

It reads the sections ``nouveau``, ``kernel`` and ``distribution`` of ``gpu_node``.
"""

from __future__ import annotations

import dataclasses

from .._core import plan as core_plan
from .._core.errors import BadInput, ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.facts import distribution, kernel
from .._host.file_transaction import replace_text
from .._host.system import Done, System
from .nouveau import (
    BUILT,
    CONSOLES,
    DIRECTIVES,
    DRACUT_PATH,
    FAMILIES,
    KEPT,
    PATH,
    directives,
    image_content,
    image_error,
    observe,
)
from .types import InitramfsImage, NodeFacts, Nouveau

DRACUT_TEXT = f"""\
# dracut leaves /etc/modprobe.d out of images for every host.
install_items+=" {PATH} "
"""

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "keep_file": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class PutFile:
    """``text``: None removes the file."""

    path: str
    text: str | None


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """One kernel's image has to be rebuilt."""

    path: str
    release: str


@dataclasses.dataclass(frozen=True)
class Unload:
    """Unload the modules, which only these consoles use."""

    modules: tuple[str, ...]
    consoles: tuple[str, ...]


def make_plan(present: bool, facts: NodeFacts, keep_file: bool = False) -> Plan:
    """Return what has to be done.

    :param keep_file: the file existed before, and stays when the blacklist is removed.
    :raises BadInput: this node's images can't be rebuilt, or /boot has too little space or is read-only.
    """
    family, nouveau = facts["distribution"]["family"], facts["nouveau"]
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadInput(f"nouveau: the distribution's family {family!r} isn't supported; supported: {known}")
    own = None if keep_file and not present else _file_change(present, nouveau["files"].get(PATH))
    files = [own, _dracut_change(present, nouveau)]
    changes = [change for change in files if change is not None]
    stale = [image for image in nouveau["images"] if _stale(present, image, files[0], nouveau["files"].get(PATH))]
    # The kept copy of an existing image is restored by its rebuild.
    kept = {KEPT + image["release"] for image in nouveau["images"] if image.get("kept")}
    left = [path for path in nouveau.get("leftovers", ()) if path not in kept]
    if stale or left:
        _refuse_boot(nouveau)
    changes += [Change(path, "left by an interrupted run\n", "", PutFile(path, None)) for path in left]
    for image in stale:
        texts = ("without nouveau's blacklist\n", "with nouveau's blacklist\n")
        before, after = texts if present else texts[::-1]
        changes.append(Change(image["path"], before, after, Rebuild(image["path"], image["release"])))
    if present and unloadable(facts):
        step = Unload(("nouveau",), tuple(nouveau.get("consoles", ())))
        changes.append(Change("module nouveau", "loaded\n", "", step))
    if present and nova_unloadable(facts):
        names = tuple(nouveau["nova"]["modules"])
        changes.append(Change(f"module {names[-1]}", "loaded\n", "", Unload(names, ())))
    return Plan(tuple(changes))


def _file_change(present: bool, text: str | None) -> Change | None:
    have = text or ""
    if present:
        missing = [line for line in DIRECTIVES if line not in directives(have)]
        if not missing:
            return None
        start = have if not have or have.endswith("\n") else have + "\n"
        after = start + "".join(f"{line}\n" for line in missing)
        return Change(PATH, have, after, PutFile(PATH, after))
    if text is None:
        return None
    rest = "".join(
        line for line in text.splitlines(keepends=True) if not set(directives(line)).intersection(DIRECTIVES)
    )
    if rest == text and rest.strip():
        return None
    if rest.strip():
        return Change(PATH, text, rest, PutFile(PATH, rest))
    return Change(PATH, text, "", PutFile(PATH, None))


def _dracut_change(present: bool, nouveau: Nouveau) -> Change | None:
    needed = present and nouveau.get("tool") == "dracut" and nouveau["images"]
    have, wanted = nouveau.get("dracut"), DRACUT_TEXT if needed else None
    if have == wanted:
        return None
    return Change(DRACUT_PATH, have or "", wanted or "", PutFile(DRACUT_PATH, wanted))


def _stale(present: bool, image: InitramfsImage, change: Change | None, text: str | None) -> bool:
    """Return whether an image lacks the file, contains an older one, or one that no longer exists."""
    if change is not None or image.get("kept"):
        return True
    if text is not None:
        return not image["newer"] or (present and image.get("blacklist") is False)
    # A run was killed after it had removed the file.
    return not present and image.get("blacklist") is True


def _refuse_boot(nouveau: Nouveau) -> None:
    """Refuse to begin where an image might be written in part: that kernel wouldn't boot.

    :raises BadInput: there is no tool, too little space for two of the largest image, or /boot is read-only.
    """
    if nouveau.get("boot_read_only"):
        raise BadInput("/boot is mounted read-only, so that no initramfs can be rebuilt: mount it writable")
    if not nouveau["images"]:
        return
    if nouveau.get("tool") is None:
        raise BadInput("no initramfs can be rebuilt on this node: install initramfs-tools or dracut")
    need = 2 * max(image["bytes"] for image in nouveau["images"])
    free = nouveau["boot_free"] or 0
    if free < need:
        raise BadInput(
            f"/boot has {free >> 20} MiB free and an initramfs rebuild needs {need >> 20} MiB: remove unused kernels"
        )


def unloadable(facts: NodeFacts) -> bool:
    """Return whether the module is loaded and unused, or used only by a console.

    A container has its host's modules, which stay.
    """
    nouveau = facts["nouveau"]
    if not nouveau["loaded"] or not facts["kernel"]["installed"]:
        return False
    if nouveau["refcnt"] == 0:
        return True
    # The console of another card, whose driver stays, would remain dark.
    only_ours = all("nouveau" in name for name in nouveau.get("framebuffers", ()))
    idle = nouveau["refcnt"] is not None and not nouveau.get("holders") and not nouveau.get("users")
    return bool(idle and only_ours and nouveau.get("consoles"))


def nova_unloadable(facts: NodeFacts) -> bool:
    """Return whether nova is loaded and unused."""
    nova = facts["nouveau"]["nova"]
    return bool(nova["modules"] and not nova["in_use"] and facts["kernel"]["installed"])


def reboot_required(present: bool, facts: NodeFacts) -> bool:
    """Return whether only a reboot unloads a module."""
    if not present or not facts["kernel"]["installed"]:
        return False
    nouveau = facts["nouveau"]
    stays = nouveau["loaded"] and not unloadable(facts)
    return bool(stays or (nouveau["nova"]["modules"] and not nova_unloadable(facts)))


SECONDS = 1800


class Image:
    """One kernel's image.

    :param file: the modprobe.d file that is the reason of the rebuild.
    :param inside: whether the new one must contain it.
    """

    def __init__(self, system: System, tool: str, path: str, release: str, file: str, inside: bool) -> None:
        self._system = system
        self._tool = tool
        self._path = path
        self._release = release
        self._file = file
        self._inside = inside

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
        content = image_content(self._system, self._tool, new, self._file)
        reason = image_error(old_size, size, content, self._inside)
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
    :param keep_file: as in ``nouveau.plan``.
    """
    reconciler = NouveauReconciler(present, system, keep_file)
    result = core_plan.run(reconciler, check)
    return {**result, "reboot_required": reboot_required(present, reconciler.observe())}
