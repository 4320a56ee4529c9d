# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Replace files of a node so that the old ones can be put back, by this run or, when it is killed, by the next.

Before the first byte changes, the old files are written down in a record. The record goes away when the change is
proven or taken back; one that is still there means that a run didn't finish.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

# As many links in a row as Linux follows.
MOST_LINKS = 40


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One file to replace.

    :param before: SHA-256 of the text that the plan was made from; empty where there was no file.
    :param after: the new text; None to remove the file.
    """

    path: str
    before: str
    after: str | None


@dataclasses.dataclass(frozen=True)
class Kept:
    """One file as it was, with its permissions and owner (``uid:gid``); the text is None where there was none."""

    path: str
    text: str | None
    mode: int
    owner: str
    replaced_by: str


Put = t.Callable[[str, str, int], None]


def digest(text: str | None) -> str:
    """SHA-256 of a text; empty where there is no file."""
    return "" if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest()


def replacements(rows: t.Sequence[dict[str, t.Any]]) -> list[Replacement]:
    """From a module's option ``files``."""
    return [Replacement(str(row["path"]), str(row["before"]), row["after"]) for row in rows]


class PutBack:
    """A change of some files with a way back.

    :param record: where the old files are written down; its folder is made for root alone.
    :param put: writes one file; ``System.write`` where nothing else is given.
    """

    def __init__(self, system: System, record: str, put: Put | None = None) -> None:
        self._system = system
        self._record = record
        self._put: Put = put if put is not None else system.write

    def pending(self) -> bool:
        return self._system.exists(self._record)

    def keep(self, changes: t.Sequence[Replacement]) -> list[Kept]:
        """Write down what is there now.

        Where an unfinished run has already replaced a file, what it found is kept and not its half-proven work.
        """
        older = {one.path: one for one in self._read()}
        kept: list[Kept] = []
        for change in changes:
            text = self._system.read(change.path)
            earlier = older.pop(change.path, None)
            if earlier is not None and digest(text) == earlier.replaced_by:
                kept.append(dataclasses.replace(earlier, replaced_by=digest(change.after)))
            else:
                mode, owner = self._permissions(change.path) if text is not None else (0o644, "")
                kept.append(Kept(change.path, text, mode, owner, digest(change.after)))
        for earlier in older.values():
            if digest(self._system.read(earlier.path)) == earlier.replaced_by:
                kept.append(earlier)
        folder = posixpath.dirname(self._record)
        done = self._system.run(["mkdir", "-p", "-m", "0700", folder])
        if done.rc != 0:
            raise ShareError(f"{folder} can't be made: {done.err.strip()}")
        self._system.write(self._record, json.dumps([dataclasses.asdict(one) for one in kept]), 0o600)
        return kept

    def replace(self, changes: t.Sequence[Replacement], kept: t.Sequence[Kept]) -> None:
        """Put the new files in place, in order; each keeps the permissions of the old one."""
        was = {one.path: one for one in kept}
        for change in changes:
            self._set(change.path, change.after, was[change.path])

    def restore(self, kept: t.Sequence[Kept]) -> None:
        """Put the old files in place, the last one first.

        A file that isn't ours any more stays: a run whose controller was killed goes on here while the next one works.
        """
        for one in reversed(kept):
            if digest(self._system.read(one.path)) == one.replaced_by:
                self._set(one.path, one.text, one)

    def forget(self) -> None:
        """The change stands (or is taken back): there is no way back any more."""
        self._system.remove(self._record)
        # Refuses while others' records are in it.
        self._system.run(["rmdir", posixpath.dirname(self._record)])

    def rewrite(self, path: str, text: str) -> None:
        """Give one file another text; it keeps its permissions. There is no way back from it."""
        mode, owner = self._permissions(path) if self._system.exists(path) else (0o644, "")
        self._set(path, text, Kept(path, None, mode, owner, ""))

    def _set(self, path: str, text: str | None, like: Kept) -> None:
        # The file behind a link is replaced, never the link.
        path = self._behind(path)
        if text is None:
            self._system.remove(path)
            return
        self._put(path, text, like.mode)
        if like.owner not in ("", "0:0"):
            self._system.run(["chown", like.owner, path])

    def _behind(self, path: str) -> str:
        for _hop in range(MOST_LINKS):
            link = self._system.link(path)
            if link is None:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        return path

    def _permissions(self, path: str) -> tuple[int, str]:
        path = self._behind(path)
        done = self._system.run(["stat", "-c", "%a %u:%g", path])
        mode, _blank, owner = done.out.strip().partition(" ")
        if done.rc != 0 or not owner:
            raise ShareError(f"the permissions of {path} can't be read: {done.err.strip()}")
        return int(mode, 8), owner

    def _read(self) -> list[Kept]:
        text = self._system.read(self._record)
        if not text:
            return []
        try:
            return [Kept(**row) for row in json.loads(text)]
        except (ValueError, TypeError):
            # Only a record that was never complete looks so, and then nothing had been replaced.
            return []


def check_unchanged(changes: t.Sequence[Replacement], read: t.Callable[[str], str | None]) -> None:
    """Refuse to write over a file that isn't the one that the plan was made from.

    :raises ShareError: somebody changed it meanwhile; nothing was written.
    """
    for change in changes:
        if digest(read(change.path)) != change.before:
            raise ShareError(f"{change.path} was changed while this run was looking at it; run again")
