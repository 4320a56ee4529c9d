# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Comments in a repository's file that record what was created for its key, so that removal removes that and no more.

A record is written before the thing it records exists and removed after it, so that a killed run forgets nothing.
"""

from __future__ import annotations

import posixpath
import typing as t

from .._host.system import TEMPORARY, System

# Directories that were created for a key.
CREATED = "# Created: "
# Keys that were imported into rpm's database.
IMPORTED = "# Imported: "
MARKS = (CREATED, IMPORTED)
# The key's origin; it is part of the wanted text, so that another origin is a change.
KEY_ORIGIN = "# Key: "


def created(text: str) -> tuple[str, ...]:
    """Return the directories that a repository's file records, the outer one first."""
    return _recorded(text, CREATED)


def imported(text: str) -> tuple[str, ...]:
    """Return the keys in rpm's database that a repository's file records."""
    return _recorded(text, IMPORTED)


def _recorded(text: str, mark: str) -> tuple[str, ...]:
    found = [line[len(mark) :].split() for line in text.splitlines() if line.startswith(mark)]
    return tuple(word for words in found for word in words)


def with_record(text: str, directories: t.Iterable[str], keys: t.Iterable[str] = ()) -> str:
    """Return a repository's file with a record below the comments that it begins with."""
    words = {IMPORTED: " ".join(keys), CREATED: " ".join(directories)}
    record = "".join(f"{mark}{some}\n" for mark, some in words.items() if some)
    rows = text.splitlines(keepends=True)
    comments = next((count for count, row in enumerate(rows) if not row.startswith("#")), len(rows))
    return "".join((*rows[:comments], record, *rows[comments:]))


def without_record(text: str) -> str:
    """Return a repository's file without its record."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(MARKS))


def directories_to_record(system: System, folder: str, texts: t.Iterable[str]) -> list[str]:
    """Return the directories that are or will be created for a key in ``folder``, the outer one first.

    :param texts: the files of our repositories: a directory that was created for one of their keys serves all of them
        and is removed with the last one.
    """
    folders = {one for text in texts for one in created(text)}
    while folder != "/" and not system.exists(folder):
        folders.add(folder)
        folder = posixpath.dirname(folder)
    return sorted(folders)


def remove_directories(system: System, folders: t.Iterable[str]) -> None:
    """Remove directories that were created for keys; one that isn't empty stays."""
    for folder in sorted(folders, reverse=True):
        for name in system.names(folder):
            # The temporary file of a write that was killed.
            if name.startswith(TEMPORARY):
                system.remove(f"{folder}/{name}")
        system.run(["rmdir", folder])
