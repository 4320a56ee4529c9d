# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replace files of a node in a way that this run, or the next one if this is killed, can roll back.

A record of the old files is written before the first change. It is removed when the change is verified or rolled back,
so an existing record means that a run was interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import typing as t

from .._core.digest import digest
from .._core.errors import ShareError
from .._core.types import JsonObject
from .system import System, target


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One file to replace.

    :param before: SHA-256 of the text from which the plan was made; empty if the file did not exist.
    :param after: the new text; None to remove the file.
    """

    path: str
    before: str
    after: str | None


@dataclasses.dataclass(frozen=True)
class Backup:
    """A file before the change.

    :param text: None if the file did not exist.
    :param owner: ``uid:gid``; empty if the file did not exist.
    :param replaced_by: digest of the new text.
    """

    path: str
    text: str | None
    mode: int
    owner: str
    replaced_by: str


Put = t.Callable[[str, str, int], None]


def replacements(rows: t.Sequence[JsonObject]) -> list[Replacement]:
    """Convert a module's option ``files``."""
    return [Replacement(str(row["path"]), str(row["before"]), row["after"]) for row in rows]


class FileTransaction:
    """A change of files that can be rolled back.

    :param record: path of the record; its folder is created with mode 0700.
    :param put: writes one file; by default ``System.write``.
    """

    def __init__(self, system: System, record: str, put: Put | None = None) -> None:
        self._system = system
        self._record = record
        self._put: Put = put if put is not None else system.write

    def pending(self) -> bool:
        """Return whether a run was interrupted."""
        return self._system.exists(self._record)

    def backup(self, changes: t.Sequence[Replacement]) -> list[Backup]:
        """Write the record of the present files.

        The backup of an interrupted run is kept for a file that it has replaced, since its change was not verified.

        :returns: the backups.
        :raises ShareError: the record can't be written.
        """
        older = {file.path: file for file in self._read()}
        kept: list[Backup] = []
        for change in changes:
            text = self._system.read(change.path)
            earlier = older.pop(change.path, None)
            if earlier is not None and digest(text) == earlier.replaced_by:
                kept.append(dataclasses.replace(earlier, replaced_by=digest(change.after)))
            else:
                check_text(change.path, text)
                real = target(self._system, change.path)
                mode, owner = _permissions(self._system, real) if text is not None else (0o644, "")
                kept.append(Backup(change.path, text, mode, owner, digest(change.after)))
        for earlier in older.values():
            if digest(self._system.read(earlier.path)) == earlier.replaced_by:
                kept.append(earlier)
        folder = posixpath.dirname(self._record)
        done = self._system.run(["mkdir", "-p", "-m", "0700", folder])
        if done.rc != 0:
            raise ShareError(f"{folder} can't be created: {done.err.strip()}")
        self._system.write(self._record, json.dumps([dataclasses.asdict(file) for file in kept]), 0o600)
        return kept

    def replace(self, changes: t.Sequence[Replacement], kept: t.Sequence[Backup]) -> None:
        """Write the new files in order, with the permissions of the old ones."""
        was = {file.path: file for file in kept}
        for change in changes:
            self._set(change.path, change.after, was[change.path])

    def restore(self, kept: t.Sequence[Backup]) -> None:
        """Restore the old files in reverse order.

        A file that was changed since is left alone: a run whose controller was killed may overlap with the next one.
        """
        for file in reversed(kept):
            if digest(self._system.read(file.path)) == file.replaced_by:
                self._set(file.path, file.text, file)

    def commit(self) -> None:
        """Remove the record, after the change was verified or rolled back."""
        self._system.remove(self._record)
        # Fails while the folder has other records.
        self._system.run(["rmdir", posixpath.dirname(self._record)])

    def write_in_place(self, path: str, text: str) -> None:
        """Replace the text of a file, which keeps its permissions, without a backup."""
        replace_text(self._system, path, text, self._put)

    def _set(self, path: str, text: str | None, like: Backup) -> None:
        # A link is kept; the file that it points to is replaced.
        path = target(self._system, path)
        if text is None:
            self._system.remove(path)
        else:
            _put(self._system, path, text, (like.mode, like.owner), self._put)

    def _read(self) -> list[Backup]:
        text = self._system.read(self._record)
        if not text:
            return []
        try:
            return [Backup(**row) for row in json.loads(text)]
        except (ValueError, TypeError):
            # The record was never complete, so no file was replaced.
            return []


def replace_text(system: System, path: str, text: str, put: Put | None = None) -> None:
    """Replace the text of a file that may be a user's: it keeps its permissions, and a link stays a link.

    :param put: as in ``FileTransaction``.
    :raises ShareError: it isn't UTF-8, or can't be written.
    """
    path = target(system, path)
    have = system.read(path)
    permissions = (0o644, "") if have is None else _permissions(system, path)
    check_text(path, have)
    _put(system, path, text, permissions, put or system.write)


def check_text(path: str, text: str | None) -> None:
    """Refuse a file that can't be restored byte by byte.

    :param text: as ``System.read`` returned it, which replaces what isn't UTF-8.
    :raises ShareError: it isn't UTF-8.
    """
    if "\ufffd" in (text or ""):
        raise ShareError(f"{path} isn't UTF-8; it is left as it is")


def _permissions(system: System, path: str) -> tuple[int, str]:
    """Return mode and owner (``uid:gid``) of a file that is no link."""
    done = system.run(["stat", "-c", "%a %u:%g", path])
    mode, _blank, owner = done.out.strip().partition(" ")
    if done.rc != 0 or not owner:
        raise ShareError(f"the permissions of {path} can't be read: {done.err.strip()}")
    return int(mode, 8), owner


def _put(system: System, path: str, text: str, permissions: tuple[int, str], put: Put) -> None:
    mode, owner = permissions
    put(path, text, mode)
    if owner not in ("", "0:0"):
        system.run(["chown", owner, path])


def check_unchanged(changes: t.Sequence[Replacement], texts: t.Mapping[str, str | None]) -> None:
    """Verify that files still have the texts from which the plan was made.

    :param texts: of the files by path, as the plan had them.
    :raises ShareError: a file was changed since; nothing was written.
    """
    for change in changes:
        if digest(texts[change.path]) != change.before:
            raise ShareError(f"{change.path} was changed by another process during this run; run again")
