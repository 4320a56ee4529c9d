# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to writes that may wait in the kernel, each in a process of its own with a time limit.

It imports nothing of the collection, since it is also a part of the program that restores vGPUs at boot.
"""

from __future__ import annotations

import errno
import os
import time
import typing as t

STEP = 0.05


class Written(t.NamedTuple):
    """The result of a write.

    :param errno: the kernel's error; 0 for none, -1 where it didn't end in time.
    :param pid: the process that still waits; 0 where it has ended.
    """

    errno: int
    pid: int = 0


def put(path: str, text: str, seconds: float) -> Written:
    """Write to a file of sysfs, in a process of its own that is left behind where it doesn't end in time."""
    # A driver may wait for ever for whoever has the device open, and then the writer can't even be killed: it has
    # nothing of this process's that would make anybody wait for it.
    pid = os.fork()
    if pid == 0:
        _write_and_exit(path, text)
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return Written(os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EINTR)
        if time.monotonic() >= until:
            return Written(-1, pid)
        time.sleep(STEP)


def _write_and_exit(path: str, text: str) -> t.NoReturn:
    """Write, and end this process with the kernel's error as its status."""
    status = errno.EIO
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.closerange(3, 1024)
        handle = os.open(path, os.O_WRONLY)
        os.write(handle, text.encode())
        status = 0
    except OSError as error:
        status = error.errno or errno.EIO
    finally:
        os._exit(status)
