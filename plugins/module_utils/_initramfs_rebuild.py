# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Make an initramfs anew, so that at no moment, whatever fails or is killed, a kernel is without one that works."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils import _initramfs as initramfs
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done, System

SECONDS = 1800


def look_inside(system: System, tool: str, path: str, file: str) -> initramfs.Content | None:
    """What an image holds, or None where the tool's lister can't read it."""
    done = system.run([initramfs.LISTERS[tool], path], timeout=120)
    return initramfs.content(done.out, file) if done.rc == 0 else None


class Image:
    """One kernel's image.

    :param file: the modprobe.d file that the new one is made for.
    :param inside: whether the new one must hold it.
    """

    def __init__(self, system: System, tool: str, path: str, release: str, file: str, inside: bool) -> None:
        self._system = system
        self._tool = tool
        self._path = path
        self._release = release
        self._file = file
        self._inside = inside

    def rebuild(self) -> None:
        """Make it anew, or leave the old one in its place.

        :raises ShareError: the tool failed, or what it made can't be trusted.
        """
        if self._tool == "dracut":
            self._beside()
        else:
            self._in_place()
        # Coreutils before 8.24 write out everything instead.
        self._system.run(["sync", self._path, "/boot"], timeout=SECONDS)

    def _beside(self) -> None:
        """dracut removes the old image before the new one is whole: it gets another name, and a rename follows."""
        built = initramfs.BUILT + self._release
        self._system.remove(built)
        done = self._system.run(["dracut", "--force", built, self._release], timeout=SECONDS)
        wrong = self._wrong(done, built, old=self._path)
        if wrong:
            self._system.remove(built)
            raise self._error(wrong, done)
        self._must(["chmod", f"--reference={self._path}", built])
        self._must(["mv", "-f", "-T", built, self._path])

    def _in_place(self) -> None:
        """update-initramfs writes beside, renames, and runs the boot loaders' hooks: the old one gets a second name."""
        kept = initramfs.KEPT + self._release
        self._put_back(kept)
        # A name costs no room; where the file system knows no second name a copy is made, if it fits.
        if self._system.run(["ln", "-T", self._path, kept]).rc != 0:
            copied = self._system.run(["cp", "-a", "-T", self._path, initramfs.BUILT + self._release], timeout=SECONDS)
            if copied.rc != 0:
                self._system.remove(initramfs.BUILT + self._release)
                raise ShareError(f"{self._path} can't be kept while it is made anew: {_last(copied)}")
            self._must(["mv", "-f", "-T", initramfs.BUILT + self._release, kept])
        before = self._stat(self._path)[0]
        done = self._system.run(["update-initramfs", "-u", "-k", self._release], timeout=SECONDS)
        wrong = self._wrong(done, self._path, old=kept, before=before)
        if wrong:
            self._put_back(kept)
            raise self._error(wrong, done)
        self._system.remove(kept)

    def _put_back(self, kept: str) -> None:
        """Whatever an unfinished run made, what it kept did work."""
        if not self._system.exists(kept):
            return
        if not self._system.exists(self._path) or self._stat(kept)[0] != self._stat(self._path)[0]:
            self._must(["mv", "-f", "-T", kept, self._path])
        # Two names of one file aren't moved onto each other.
        self._system.remove(kept)

    def _wrong(self, done: Done, new: str, old: str, before: str = "") -> str:
        """Why what the tool made can't be used, or nothing.

        :param before: the inode that the new image's name had before, where it had one.
        """
        if done.rc != 0:
            return f"{' '.join(self._words())} failed: {_last(done)}"
        if not self._system.exists(new):
            return f"{' '.join(self._words())} made no {new}"
        (inode, size), (_inode, old_size) = self._stat(new), self._stat(old)
        if inode == before:
            return f"{' '.join(self._words())} left {self._path} as it was ({_last(done)})"
        found = look_inside(self._system, self._tool, new, self._file)
        reason = initramfs.distrust(old_size, size, found, self._inside)
        return reason and f"the new {self._path} {reason}"

    def _words(self) -> list[str]:
        return ["dracut"] if self._tool == "dracut" else ["update-initramfs"]

    def _error(self, wrong: str, done: Done) -> ShareError:
        return ShareError(
            f"{wrong}; the old {self._path} is in its place", stdout=done.out[-8000:], stderr=done.err[-8000:]
        )

    def _stat(self, path: str) -> tuple[str, int]:
        """Inode and size."""
        done = self._must(["stat", "-c", "%i %s", path])
        inode, _blank, size = done.out.strip().partition(" ")
        return inode, int(size)

    def _must(self, argv: list[str]) -> Done:
        done = self._system.run(argv, timeout=SECONDS)
        if done.rc != 0:
            raise ShareError(f"{' '.join(argv)} failed: {_last(done)}")
        return done


def _last(done: Done) -> str:
    """The line of what a command said that tells why: the last one, unless the disk is full."""
    lines = (done.err or done.out).strip().splitlines() or [f"status {done.rc}"]
    return ([line for line in lines if "No space left on device" in line] or lines)[-1]
