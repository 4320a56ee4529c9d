# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which tasks run on which hosts, and for how long; the callback ``progress`` prints it."""

from __future__ import annotations

import dataclasses
import threading

HOSTS_NAMED = 5


@dataclasses.dataclass
class _Task:
    """A task, when it began on each host on which it still runs, and when it is to be printed again, in seconds."""

    name: str
    hosts: dict[str, float]
    next: float


class RunningTasks:
    """The tasks that run; several threads may use it.

    :param interval: seconds after which, and between which, a task is printed.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._tasks: dict[str, _Task] = {}
        self._lock = threading.Lock()

    def start(self, host: str, task: str, name: str, now: float) -> None:
        """Record that a task begins on a host.

        :param task: its id.
        :param name: for people.
        :param now: seconds of a clock that doesn't go back.
        """
        with self._lock:
            self._tasks.setdefault(task, _Task(name, {}, now + self.interval)).hosts[host] = now

    def end(self, host: str, task: str) -> None:
        """Record that a task has ended on a host."""
        with self._lock:
            running = self._tasks.get(task)
            if running and host in running.hosts:
                del running.hosts[host]
                if not running.hosts:
                    del self._tasks[task]

    def due(self, now: float) -> list[str]:
        """Return a line for each task that runs for the interval, or for another one since its last line."""
        lines = []
        with self._lock:
            for task in self._tasks.values():
                if now >= task.next:
                    task.next = now + self.interval
                    hosts = list(task.hosts)
                    more = f" and {len(hosts) - HOSTS_NAMED} more" if len(hosts) > HOSTS_NAMED else ""
                    seconds = now - min(task.hosts.values())
                    lines.append(
                        f"still running after {seconds:.0f} s on {', '.join(hosts[:HOSTS_NAMED])}{more}: {task.name}"
                    )
        return lines
