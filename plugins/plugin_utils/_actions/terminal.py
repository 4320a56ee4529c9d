# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What actions and callbacks of this collection print themselves; nothing else calls Ansible's display."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import typing as t

from ...module_utils._core.untrusted import lines


class Display(t.Protocol):
    """Ansible's."""

    columns: int

    def display(self, msg: str, color: str | None = None, stderr: bool = False) -> None: ...


def show(display: Display, text: str, color: str | None = None, stderr: bool = False) -> None:
    """Print a text, which may contain what a cluster or a node says, without what controls a terminal.

    A task's process hands it to that of ansible-playbook. ``display`` does the same, but a callback may have wrapped
    it: ansible-runner's, before 2.4.2, writes to standard output in each process, of which Ansible warns.
    """
    clean, queue = lines(text), getattr(display, "_final_q", None)
    if queue is None:
        display.display(clean, color=color, stderr=stderr)
    else:
        queue.send_display("display", clean, color=color, stderr=stderr)


INTERVAL_SECONDS = 10.0


class StatusLines:
    """Prints the text of a file from time to time; a context manager that returns the file's path.

    A module that runs on another machine finds no such file and writes nothing.

    :param show: prints a line.
    :param interval: seconds before the first line and between two lines.
    """

    def __init__(self, show: t.Callable[[str], t.Any], interval: float = INTERVAL_SECONDS) -> None:
        self._show = show
        self._interval = interval
        self._path = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> str:
        handle, self._path = tempfile.mkstemp(prefix="kubegpu-status-")
        os.close(handle)
        self._thread.start()
        return self._path

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
        os.unlink(self._path)

    def _print(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(self._interval):
            with open(self._path, encoding="utf-8") as file:
                text = file.read()
            if text:
                self._show(f"waiting for {time.monotonic() - began:.0f} s: {text}")
