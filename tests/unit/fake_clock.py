# SPDX-License-Identifier: GPL-3.0-or-later
"""A clock for code that waits, without waiting."""

from __future__ import annotations

import typing as t


class FakeClock:
    """Time that passes only by sleeping; listeners are called after each sleep."""

    def __init__(self) -> None:
        self.time = 0.0
        self.listeners: list[t.Callable[[], None]] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        # A listener may remove itself.
        for listener in list(self.listeners):
            listener()
