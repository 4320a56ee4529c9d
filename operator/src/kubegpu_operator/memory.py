# SPDX-License-Identifier: GPL-3.0-or-later
"""What a pod remembers of the last run for a resource, in its volume; the first call of another pod runs in full."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Last:
    """The last run that ended.

    :param digest: of what it depended on.
    :param at: when it ended, in seconds of the system's clock.
    :param failures: how many runs failed one after the other, with this one.
    :param settled: it changed nothing and reached what the resource asks for.
    :param holders: pods that it waits for.
    """

    digest: str
    at: float
    failures: int = 0
    settled: bool = False
    holders: tuple[tuple[str, str], ...] = ()


class Memory:
    """One file for each resource, by its uid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, uid: str) -> Path:
        return self._folder / f"{''.join(letter for letter in uid if letter.isalnum() or letter == '-')}.json"

    def recall(self, uid: str) -> Last | None:
        """Return the last run; None where none is known, or where it didn't end."""
        try:
            kept = json.loads(self._path(uid).read_text())
            return Last(**{**kept, "holders": tuple((holder[0], holder[1]) for holder in kept["holders"])})
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            return None

    def forget(self, uid: str) -> None:
        """Before a run: where it is killed, nothing is known."""
        with contextlib.suppress(FileNotFoundError):
            self._path(uid).unlink()

    def keep(self, uid: str, last: Last) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(uid)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(last)))
        os.replace(temporary, path)
