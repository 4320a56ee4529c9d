# SPDX-License-Identifier: GPL-3.0-or-later
"""A limit on how often something happens."""

from __future__ import annotations


class Bucket:
    """Allows ``burst`` times at once, and ``rate`` a second after that; the caller holds a lock.

    :param now: the time at the start, in seconds.
    """

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self._rate, self._burst, self._left, self._filled = rate, float(burst), float(burst), now

    def take(self, now: float) -> bool:
        """Take one, if there is one."""
        self._left = min(self._burst, self._left + (now - self._filled) * self._rate)
        self._filled = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
