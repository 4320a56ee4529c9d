# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to what can wait in the kernel: writes to sysfs, and VFIO's answer about a group."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import time
import typing as t

# _IO(';', 100 + 3) of linux/vfio.h, and the first flag of its answer.
GET_STATUS = 0x3B67
VIABLE = 1
STEP = 0.05
# The kernel's answer about a group: whether a virtual machine can be given it. ``held``: one has it, and until then
# nobody else may ask; ``absent``: no VFIO driver has a function of it, or the kernel has no files of groups.
GroupState = t.Literal["viable", "not_viable", "held", "absent", "unknown"]
# What opening its file fails with.
REFUSED: t.Mapping[int, GroupState] = {errno.EBUSY: "held", errno.ENOENT: "absent", errno.ENODEV: "absent"}


class Written(t.NamedTuple):
    """The result of a write.

    :param errno: the kernel's error; 0 for none, -1 where it didn't end in time.
    :param pid: the process that still waits; 0 where it has ended.
    """

    errno: int
    pid: int = 0


class Kernel(t.Protocol):
    """A machine's kernel."""

    def put(self, path: str, text: str, seconds: float) -> Written:
        """Write to a file of sysfs, in a process of its own that may be left behind."""

    def group_state(self, group: str) -> GroupState:
        """Ask whether a group can be given to a virtual machine. Changes nothing, and doesn't wait.

        :param group: its number.
        """


class RealKernel:
    """This machine's kernel.

    :param vfio: the folder of VFIO's device files.
    """

    def __init__(self, vfio: str = "/dev/vfio") -> None:
        self._vfio = vfio

    def put(self, path: str, text: str, seconds: float) -> Written:
        # A driver's unbind may wait for ever for whoever has the device open, and then can't even be killed: the
        # process has nothing of this one's that would make anybody wait for it.
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

    def group_state(self, group: str) -> GroupState:
        try:
            handle = os.open(f"{self._vfio}/{group}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return REFUSED.get(error.errno or 0, "unknown")
        try:
            status = array.array("I", [8, 0])
            fcntl.ioctl(handle, GET_STATUS, status)
            return "viable" if status[1] & VIABLE else "not_viable"
        except OSError:
            return "unknown"
        finally:
            os.close(handle)


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
