# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A line for each artifact that is fetched or copied, and for how far a large one is."""

from __future__ import annotations

import time
import typing as t

MB = 10**6
# Seconds between two lines of one artifact.
EVERY = 30.0
Tell = t.Callable[[str], t.Any]


class Progress:
    """Counts artifacts and bytes of one run.

    :param tell: prints a line.
    :param sizes: bytes of the artifacts in their order; None where they aren't known before.
    :param now: the time in seconds.
    """

    def __init__(self, tell: Tell, sizes: t.Sequence[int | None], now: t.Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._sizes = list(sizes)
        self._number = 0
        self._done = 0
        self._name = ""
        self._now = now
        self._next = 0.0

    def begin(self, name: str) -> None:
        """Print the line of the next artifact: ``2 of 5: image x:1 (410 MB; 1200 of at least 8400 MB done)``."""
        size = self._sizes[self._number]
        self._number += 1
        self._name = name
        self._next = self._now() + EVERY
        own = "size unknown" if size is None else f"{size / MB:.0f} MB"
        self._tell(f"{self._number} of {len(self._sizes)}: {name} ({own}; {self._so_far()})")

    def within(self, written: int | None) -> None:
        """Print how far the artifact is, after some time: ``2 of 5: image x:1: 130 of 410 MB so far``.

        :param written: bytes that have come, or that the program which brings them has written: a little more.
        """
        if self._now() < self._next:
            return
        self._next = self._now() + EVERY
        size = self._sizes[self._number - 1]
        if written is None:
            shown = "still being copied"
        elif size is None:
            shown = f"{written / MB:.0f} MB so far"
        else:
            shown = f"{min(written, size) / MB:.0f} of {size / MB:.0f} MB so far"
        self._tell(f"{self._number} of {len(self._sizes)}: {self._name}: {shown}")

    def end(self, size: int) -> None:
        """Count what the artifact has brought, in bytes; the plan had said something else, or nothing."""
        self._done += size
        self._sizes[self._number - 1] = size

    def _so_far(self) -> str:
        known = sum(size for size in self._sizes if size is not None)
        least = "at least " if None in self._sizes else ""
        return f"{self._done / MB:.0f} of {least}{known / MB:.0f} MB done"
