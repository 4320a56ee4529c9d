# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: a process of its own that asks NVML, since a sick card can keep whoever asks about it forever.

It is ended by SIGKILL and not waited for: one that hangs in the kernel can't be ended at all. So it has nothing of ours
open, least of all the streams by which Ansible knows that the module has ended.
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

from ansible_collections.kubegpu.share.plugins.module_utils._nvml import DIED, END, LATE, STALLED, Ended
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_read import Request

Json = t.Dict[str, t.Any]
Work = t.Callable[[Request, t.Callable[[Json], None]], None]

# Against answers that are lies: of the whole of what is said, and of memory.
MOST_BYTES = 1 << 26
MOST_MEMORY = 4 << 30
# Beyond the limit, for the case that nobody is left to end it.
GRACE = 10
# How long the kernel may take to end it.
MOMENT = 1.0


class Forked:
    """See ``_nvml.Asker``.

    :param work: what the process does; it is given the way to send messages.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def run(self, request: Request, stall: float, seconds: float) -> Ended:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            return Ended((), DIED, f"it can't be started: {error.strerror}")
        if not pid:
            self._be(request, writer, seconds)
        os.close(writer)
        messages: list[Json] = []
        try:
            how = _listen(reader, messages, stall, seconds)
        finally:
            os.close(reader)
            status = _end(pid)
        if how == DIED:
            last = messages.pop()["died"] if messages and "died" in messages[-1] else _how_it_died(status)
            return Ended(messages, how, last)
        words = "" if status is not None else f"process {pid}, which asked, hangs in the kernel and can't be ended"
        return Ended(messages, how, words)

    def _be(self, request: Request, writer: int, seconds: float) -> t.NoReturn:
        """Be that process."""
        status = 1
        try:
            os.setsid()
            _let_go(writer)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(seconds) + GRACE)
            _limit(resource.RLIMIT_AS, MOST_MEMORY)
            _limit(resource.RLIMIT_CORE, 0)
            self._work(request, lambda message: _send(writer, message))
            status = 0
        except Exception as error:
            _send(writer, {"died": f"it failed with {type(error).__name__}: {error}"[:500]})
        finally:
            # Nothing of the module's own way to end may happen here.
            os._exit(status)


def _let_go(kept: int) -> None:
    """Close all files but one; the standard streams lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if stream != kept:
            os.dup2(nowhere, stream)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != kept:
            # The one that listed them is closed already.
            with contextlib.suppress(OSError):
                os.close(number)


def _limit(kind: int, most: int) -> None:
    _soft, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(writer: int, message: Json) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def _listen(reader: int, messages: list[Json], stall: float, seconds: float) -> str:
    """Take messages until the last one; how it ended."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    end = time.monotonic() + seconds
    begun, rest, size = False, b"", 0
    while True:
        now = time.monotonic()
        until = min(end, now + stall) if begun else end
        if not poll.poll(max(0, math.ceil((until - now) * 1000))):
            return LATE if until == end else STALLED
        piece = os.read(reader, 1 << 16)
        size += len(piece)
        if not piece or size > MOST_BYTES:
            return DIED
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            message = json.loads(line)
            messages.append(message)
            if "died" in message:
                return DIED
            begun = "begin" in message
            if "end" in message or "failed" in message:
                return END


def _end(pid: int) -> int | None:
    """End the process, whatever it does; its status, None where it is still there."""
    end = time.monotonic() + MOMENT
    # One that crashed may just be ending: its own status tells why.
    status = _waited(pid, min(end, time.monotonic() + MOMENT / 10))
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = _waited(pid, end)
    return status


def _waited(pid: int, end: float) -> int | None:
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


def _how_it_died(status: int | None) -> str:
    if status is None:
        return "it hangs in the kernel and can't be ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = str(number)
        return f"it was ended by {name}"
    return f"it exited with {os.WEXITSTATUS(status)}"
