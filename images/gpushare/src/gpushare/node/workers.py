# SPDX-License-Identifier: GPL-3.0-or-later
"""Threads of a server that repeat their work, and whether each of them still makes progress."""

from __future__ import annotations

import functools
import logging
import threading
import time
import typing as t

# A thread without progress for so long hangs; only a new process helps.
HANG_SECONDS = 120.0
# A container gets the driver's files when it is created; for a driver installed later a new container is needed.
NO_CARDS_SECONDS = 120.0

log = logging.getLogger("gpushare.node")


class Workers:
    """Threads that end when ``stop`` is set.

    :param on_failure: called with a thread's name after an unexpected failure of its work.
    """

    def __init__(self, stop: threading.Event, on_failure: t.Callable[[str], None]) -> None:
        self._stop, self._on_failure = stop, on_failure
        self._threads: list[threading.Thread] = []
        # When each repeated work began last, in seconds of the monotonic clock.
        self.last_active: dict[str, float] = {}

    def run(self, name: str, work: t.Callable[[], None]) -> None:
        """Start a thread that runs once and ends by itself."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def repeat(self, name: str, work: t.Callable[[], None], pause: float) -> None:
        """Start a thread that repeats its work.

        :param pause: seconds between two runs.
        """
        self.run(name, functools.partial(self._repeat, name, work, pause))

    def joins(self) -> list[t.Callable[[], None]]:
        """Return the calls that wait for the threads' end."""
        return [thread.join for thread in self._threads]

    def stuck(self) -> str | None:
        """Return which thread hangs and for how long; None if none does."""
        now = time.monotonic()
        for name, when in list(self.last_active.items()):
            if now - when > HANG_SECONDS:
                return f"{name}: no answer for {now - when:.0f} s"
        return None

    def _repeat(self, name: str, work: t.Callable[[], None], pause: float) -> None:
        while not self._stop.is_set():
            self.last_active[name] = time.monotonic()
            try:
                work()
            except Exception:
                # The next run may succeed; a thread that ended never would.
                log.exception("unexpected failure of %s", name)
                self._on_failure(name)
                self._stop.wait(1.0)
            self._stop.wait(pause)
