# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The folders that repositories' keys lie in: made where they are missing, gone with the last key, and no others.

A repository's own file remembers in comments what isn't to be seen of a machine. It is written before what it tells of
is there and removed after that is gone, so that a run that is killed between forgets nothing.
"""

from __future__ import annotations

import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._system import TEMPORARY, System

MADE_COMMENT = "# Made: "


def made(text: str) -> tuple[str, ...]:
    """Which folders were made for a repository's key, the outer one first, by the repository's file."""
    return remembered(text, MADE_COMMENT)


def remembered(text: str, mark: str) -> tuple[str, ...]:
    """The words that a file remembers under a mark."""
    found = [line[len(mark) :].split() for line in text.splitlines() if line.startswith(mark)]
    return tuple(name for names in found for name in names)


def remembering(text: str, words: t.Mapping[str, t.Iterable[str]]) -> str:
    """A file that remembers words, by their marks, below the comments that it begins with."""
    lines = [(mark, " ".join(some)) for mark, some in words.items()]
    told = "".join(f"{mark}{some}\n" for mark, some in lines if some)
    rows = text.splitlines(keepends=True)
    comments = next((count for count, row in enumerate(rows) if not row.startswith("#")), len(rows))
    return "".join((*rows[:comments], told, *rows[comments:]))


def without(text: str, *marks: str) -> str:
    """A file without what it remembers."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(marks))


def to_make(system: System, folder: str, texts: t.Iterable[str]) -> list[str]:
    """What a repository's file has to remember before its key is put into a folder, the outer one first.

    :param texts: our repositories' files: what was made for one of their keys is there for all, and goes with the last.
    """
    folders = {one for text in texts for one in made(text)}
    while folder != "/" and not system.exists(folder):
        folders.add(folder)
        folder = posixpath.dirname(folder)
    return sorted(folders)


def unmake(system: System, folders: t.Iterable[str]) -> None:
    """Remove folders that were made for keys; one that holds anything stays."""
    for folder in sorted(folders, reverse=True):
        for name in system.names(folder):
            # A write that was killed left it.
            if name.startswith(TEMPORARY):
                system.remove(f"{folder}/{name}")
        system.run(["rmdir", folder])
