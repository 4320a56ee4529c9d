# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a machine for the sections of ``gpu_node``: unreadable files count as missing, and no command runs twice."""

from __future__ import annotations

import typing as t

from .._core.errors import ShareError
from .system import Done, System

# Its output differs each time.
CLOCK = "date"


class Once:
    """A ``System`` that caches the results of commands, because several sections run the same ones."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._ended: dict[tuple[str, ...], Done] = {}

    def read(self, path: str) -> str | None:
        return self._system.read(path)

    def names(self, path: str) -> list[str]:
        return self._system.names(path)

    def exists(self, path: str) -> bool:
        return self._system.exists(path)

    def link(self, path: str) -> str | None:
        return self._system.link(path)

    def free_bytes(self, path: str) -> int:
        return self._system.free_bytes(path)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self._system.write(path, text, mode)

    def remove(self, path: str) -> None:
        self._system.remove(path)

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        key = tuple(argv)
        if stdin is not None or argv[0] == CLOCK:
            return self._system.run(argv, timeout, stdin)
        if key not in self._ended:
            self._ended[key] = self._system.run(argv, timeout)
        return self._ended[key]


class Lenient:
    """What of a ``System`` is read; what is unreadable counts as missing."""

    def __init__(self, system: System) -> None:
        self._system = system

    def read(self, path: str) -> str | None:
        return whole(self._system, path)

    def names(self, path: str) -> list[str]:
        return names(self._system, path)

    def exists(self, path: str) -> bool:
        return self._system.exists(path)

    def link(self, path: str) -> str | None:
        return self._system.link(path)


def whole(system: System, path: str) -> str | None:
    """Return a file's text; None if it is unreadable: files of a card that fell off the bus give EIO."""
    try:
        return system.read(path)
    except ShareError:
        return None


def text(system: System, path: str) -> str:
    """Return a file's text without surrounding whitespace; empty if it is unreadable."""
    return (whole(system, path) or "").strip()


def names(system: System, folder: str) -> list[str]:
    """Return the names in a folder; empty if it is unreadable."""
    try:
        return system.names(folder)
    except ShareError:
        return []
