# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive's folder while it is made: digests of what is there, its layout of images, and complete writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.untrusted import line
from . import archive
from .archive import CONTENTS, FOLDERS, INSTALLER, PACKAGES, PART, SIGNATURE, SUMS, Contents
from .layout import INDEX, LAYOUT, VERSION, Layout, index_content
from .manifests import Descriptor
from .programs import Watch

# What is being written, and the lock of the run that writes.
WORK, LOCK = f"work{PART}", f"lock{PART}"
# What an archive's folder has at most, beside unfinished files.
TOP = {*(path.partition("/")[0] for path in FOLDERS.values()), PACKAGES, CONTENTS, SUMS, SIGNATURE, INSTALLER}
# Bytes below which a program that failed has failed for want of space.
SPARE = 32 << 20


class Failed(Exception):
    """An artifact can't be fetched; the message continues a sentence that names it.

    :ivar code: such as ``unreachable``, ``other_digest``.
    :ivar stop: nothing else is worth trying: a program is missing, or the disk is full.
    :ivar fields: what the message is made of.
    """

    def __init__(self, code: str, message: str, stop: bool = False, **fields: t.Any) -> None:
        super().__init__(message)
        self.code = code
        self.stop = stop
        self.fields = fields


class Store:
    """An archive's folder.

    :param folder: absolute; it may not be there yet.
    :ivar layout: its images.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.layout = Layout(folder, self.sha256)
        self._known: dict[str, tuple[tuple[int, ...], str]] = {}

    def at(self, path: str) -> str:
        return os.path.join(self.folder, path)

    def examine(self) -> None:
        """Refuse a folder that has something else, of which a run would remove what it doesn't know.

        :raises BadInput: it isn't an archive's, or can't be one.
        """
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        except OSError as error:
            raise BadInput(f"airgap_folder: {self.folder} can't be read: {error.strerror}") from error
        others = [name for name in names if name not in TOP and not name.endswith(PART)]
        if others:
            raise BadInput(
                f"airgap_folder: {self.folder} has {line(others[0], 100)}, which is no part of an archive: name a new "
                "folder, or that of an archive",
                code="foreign_folder",
            )

    @contextlib.contextmanager
    def alone(self) -> t.Iterator[None]:
        """Make the folder, and let no other run write into it.

        :raises BadInput: it can't be made, or another run does.
        """
        try:
            os.makedirs(self.folder, mode=0o755, exist_ok=True)
            handle = os.open(self.at(LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.not_written(self.folder, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise BadInput(f"airgap_folder: another run writes into {self.folder}: wait for its end") from error
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ files

    def files(self) -> tuple[dict[str, str], list[str]]:
        """Return the SHA-256 of each file by its path, and the paths of what is no file.

        A file is read again only where its times, size or inode have changed since.
        """
        if not os.path.isdir(self.folder):
            return {}, []
        found, faults = archive.files_of(self.folder)
        return {path: self.sha256(path) for path in found}, [fault.path for fault in faults]

    def sha256(self, path: str) -> str:
        """Return a file's SHA-256; empty where it can't be read."""
        try:
            state = os.lstat(self.at(path))
            stamp = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            if path not in self._known or self._known[path][0] != stamp:
                self._known[path] = stamp, archive.sha256_of(self.at(path))[0]
            return self._known[path][1]
        except OSError:
            return ""

    def size(self, path: str) -> int:
        return os.lstat(self.at(path)).st_size

    def put(self, path: str, content: bytes) -> None:
        """Write a file completely or not at all.

        :raises Failed: it can't be written.
        """
        target = self.at(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with archive.new_file(f"{target}{PART}") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{target}{PART}", target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(f"{target}{PART}")
            raise self._failed(target, error) from error

    def take(self, source: str, path: str) -> None:
        """Move a file into the folder.

        :raises Failed: it can't be written.
        """
        target = self.at(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(source, target)
        except OSError as error:
            raise self._failed(target, error) from error

    def copy(self, source: str, path: str) -> None:
        """Copy a file of this machine into the folder.

        :raises Failed: it can't be read or written.
        """
        target = self.at(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(source, "rb") as opened, archive.new_file(f"{target}{PART}") as file:
                shutil.copyfileobj(opened, file)
            os.replace(f"{target}{PART}", target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(f"{target}{PART}")
            raise self._failed(error.filename or target, error) from error

    def remove(self, path: str) -> None:
        """Remove a file or a link, and the folders that it leaves empty.

        :raises BadInput: it can't be removed.
        """
        try:
            os.unlink(self.at(path))
            while path := os.path.dirname(path):
                os.rmdir(self.at(path))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise BadInput(f"{self.at(path)} can't be removed: {error.strerror}") from error

    @contextlib.contextmanager
    def work(self) -> t.Iterator[str]:
        """Yield an empty folder on the same file system, which is removed at the end; what a killed run left is, too.

        :raises Failed: it can't be made.
        """
        place = self.at(WORK)
        shutil.rmtree(place, ignore_errors=True)
        try:
            os.mkdir(place, mode=0o700)
        except OSError as error:
            raise self._failed(place, error) from error
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def bounded(self, largest: int, limit: str, watch: Watch | None) -> Watch:
        """Return what watches a program that writes into the folder, and ends it when more has come than may.

        Its unfinished files count: a server that never ends would fill the disk before a digest is compared.

        :param largest: bytes.
        :param limit: where they are from and what to do, for the message.
        :param watch: is told how much has come.
        """
        before = self._used()

        def look(_written: int | None) -> None:
            come = self._used() - before
            if come > largest:
                raise Failed("too_large", f"more came than the {limit}", largest=largest)
            if watch:
                watch(max(come, 0))

        return look

    def _used(self) -> int:
        """Return the bytes of all files in the folder."""
        total = 0
        for place, _folders, names in os.walk(self.folder):
            for name in names:
                # A program renames and removes them meanwhile.
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(place, name)).st_size
        return total

    def free(self) -> int:
        """Return the bytes that are free."""
        return shutil.disk_usage(self.folder).free

    def is_full(self) -> bool:
        """Return whether there is no space, of which a program says in words only."""
        try:
            return self.free() < SPARE
        except OSError:
            return False

    def _failed(self, path: str, error: OSError) -> Failed:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Failed("full", f"the disk of {self.folder} is full", stop=True)
        return Failed("not_written", f"{line(path, 300)}: {error.strerror}", stop=True)

    def not_written(self, path: str, error: OSError) -> BadInput:
        return BadInput(f"airgap_folder: {path} can't be written: {error.strerror}", code="not_written")

    # ------------------------------------------------------------------ contents.json and the layout

    def contents(self) -> Contents:
        """Return what contents.json of a former run says; nothing where there is none, or one that nobody reads."""
        try:
            return archive.parse(archive.small(self.folder, CONTENTS), self.at(CONTENTS))
        except BadInput:
            return Contents("", ())

    def images(self) -> dict[str, Descriptor]:
        """Return the images of the layout by name; none where it isn't one."""
        try:
            return self.layout.images()
        except ValueError:
            return {}

    def write_images(self, images: t.Mapping[str, Descriptor]) -> None:
        """Write the layout's index.

        :raises Failed: it can't be written.
        """
        self.put(LAYOUT, VERSION)
        self.put(INDEX, index_content((row, name) for name, row in sorted(images.items())))
