# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter: a child process that calls NVML, since a faulty card can block its caller forever.

The child is killed and not waited for: a process that hangs in the kernel can't be killed. So it keeps no file of the
module open, in particular not the streams by which Ansible detects the module's end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import time
import typing as t

from .facts import CRASHED, END, STALLED, TIMED_OUT, Request, Send, WorkerResult
from .types import Message

Work = t.Callable[[Request, Send], None]

# Limits against implausible data: bytes of all messages, and of memory.
MAX_BYTES = 1 << 26
MAX_MEMORY = 4 << 30
# Seconds beyond the limit, if the parent is gone.
GRACE = 10
# Seconds that the kernel may take to end it.
MOMENT = 1.0


class ForkedWorker:
    """See ``facts.Worker``.

    :param work: runs in the child, with the function that sends messages.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def run(self, request: Request, stall: float, seconds: float) -> WorkerResult:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            return WorkerResult((), CRASHED, f"the process can't be started: {error.strerror}")
        if not pid:
            self._run_child(request, writer, seconds)
        os.close(writer)
        messages: list[Message] = []
        try:
            ending = _receive(reader, messages, stall, seconds)
        finally:
            os.close(reader)
            status = _stop(pid)
        if ending == CRASHED:
            last = messages.pop()["crashed"] if messages and "crashed" in messages[-1] else _status_text(status)
            return WorkerResult(messages, ending, last)
        detail = (
            "" if status is not None else f"process {pid}, which called NVML, hangs in the kernel and can't be killed"
        )
        return WorkerResult(messages, ending, detail)

    def _run_child(self, request: Request, writer: int, seconds: float) -> t.NoReturn:
        """Run the child process."""
        status = 1
        try:
            os.setsid()
            _close_other_files(writer)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(seconds) + GRACE)
            _limit(resource.RLIMIT_AS, MAX_MEMORY)
            _limit(resource.RLIMIT_CORE, 0)
            self._work(request, lambda message: _send(writer, message))
            status = 0
        except Exception as error:
            _send(writer, {"crashed": f"it failed with {type(error).__name__}: {error}"[:500]})
        finally:
            # The module's exit handlers must not run here.
            os._exit(status)


def _close_other_files(kept: int) -> None:
    """Close all files but one, and redirect the standard streams to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if stream != kept:
            os.dup2(null, stream)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != kept:
            # The directory's own handle is closed already.
            with contextlib.suppress(OSError):
                os.close(number)


def _limit(kind: int, most: int) -> None:
    _soft, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(writer: int, message: Message) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def _receive(reader: int, messages: list[Message], stall: float, seconds: float) -> str:
    """Receive messages until the last one, and return how the child ended."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    end = time.monotonic() + seconds
    begun, rest, size = False, b"", 0
    while True:
        now = time.monotonic()
        until = min(end, now + stall) if begun else end
        if not poll.poll(max(0, math.ceil((until - now) * 1000))):
            return TIMED_OUT if until == end else STALLED
        piece = os.read(reader, 1 << 16)
        size += len(piece)
        if not piece or size > MAX_BYTES:
            return CRASHED
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            message = json.loads(line)
            messages.append(message)
            if "crashed" in message:
                return CRASHED
            begun = "begin" in message
            if "end" in message or "failed" in message:
                return END


def _stop(pid: int) -> int | None:
    """Kill the process, and return its status; None if it still exists."""
    end = time.monotonic() + MOMENT
    # A crashed process may just be ending: its own status has the reason.
    status = _reap(pid, min(end, time.monotonic() + MOMENT / 10))
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = _reap(pid, end)
    return status


def _reap(pid: int, end: float) -> int | None:
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def _status_text(status: int | None) -> str:
    if status is None:
        return "it hangs in the kernel and can't be killed"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = str(number)
        return f"it was killed by {name}"
    return f"it exited with {os.WEXITSTATUS(status)}"
