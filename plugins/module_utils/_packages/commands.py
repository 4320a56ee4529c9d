# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run commands of package managers: wait while another one holds the lock, report failures with the tool's reason."""

from __future__ import annotations

import re
import time
import typing as t

from .._core.errors import ShareError
from .._host.system import Done, System

LOCKED = re.compile(
    r"Could not get lock|Unable to lock|Unable to acquire the dpkg|locked by another process"
    r"|System management is locked|transaction lock|lock is held by|Failed to obtain (?:the )?.*lock",
    re.IGNORECASE,
)
# apt itself waits for one of its locks; the time of its tries counts, too.
LOCK_SECONDS, LOCK_PAUSE = 300.0, 5.0
LONG, SHORT = 3600.0, 600.0
# needrestart must not restart services of a node that runs GPU pods, nor reload systemd.
QUIET = ("env", "NEEDRESTART_SUSPEND=1", "NEEDRESTART_MODE=l")

# Options that a person who repeats the command doesn't need.
_HIDDEN = re.compile(
    r"env|-y|-q|-o|--non-interactive|--xmlout|--auto-agree-with-licenses"
    r"|[A-Z_]+=.*|--setopt=.*|--force-conf.*|--no-remove|--with-source.*"
)

Sleep = t.Callable[[float], None]


class Commands:
    """Runs the commands of one package manager.

    :param reason: returns the tool's own reason of a failure, in one line.
    :param sleep: injected by tests, as ``now`` is.
    """

    def __init__(
        self,
        system: System,
        reason: t.Callable[[Done], str],
        sleep: Sleep = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self.system = system
        self._reason = reason
        self._sleep = sleep
        self._now = now

    def run(self, argv: t.Sequence[str], timeout: float = SHORT) -> Done:
        """Run a command, and again while another package manager holds the lock.

        :param timeout: seconds that one try may take.
        """
        waited = 0.0
        while True:
            began = self._now()
            done = self.system.run(argv, timeout=timeout)
            waited += self._now() - began + LOCK_PAUSE
            if done.rc == 0 or waited > LOCK_SECONDS or not LOCKED.search(done.err + done.out):
                return done
            self._sleep(LOCK_PAUSE)

    def must(self, argv: t.Sequence[str], timeout: float = SHORT, fine: t.Container[int] = (0,)) -> Done:
        """Run a command that has to succeed.

        :param fine: exit statuses that mean success.
        :raises ShareError: it failed.
        """
        return self.check(argv, self.run(argv, timeout), fine)

    def check(self, argv: t.Sequence[str], done: Done, fine: t.Container[int] = (0,)) -> Done:
        """Return a command's result.

        :raises ShareError: the command failed.
        """
        if done.rc not in fine:
            raise self.failure(argv, done)
        return done

    def failure(self, argv: t.Sequence[str], done: Done) -> ShareError:
        return ShareError(
            f"{shown(argv)} failed: {self._reason(done)}",
            rc=done.rc,
            stdout=done.out[-8000:],
            stderr=done.err[-8000:],
        )


def shown(argv: t.Sequence[str]) -> str:
    """Return the command as a person would type it."""
    return " ".join(word for before, word in zip(("", *argv), argv) if before != "-o" and not _HIDDEN.fullmatch(word))


def would_remove(argv: t.Sequence[str], names: t.Iterable[str]) -> ShareError:
    return ShareError(
        f"{shown(argv)} would remove {', '.join(sorted(names))}; remove them first, or add them to replaces"
    )


def last_line(done: Done) -> str:
    """Return the last line that a command printed."""
    return ((done.err or done.out).strip().splitlines() or [f"exit status {done.rc}"])[-1].strip()
