# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to what can wait in the kernel: writes to sysfs, and VFIO's answer about a group."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import typing as t

from .._host import kernel_write
from .._host.kernel_write import Written

# _IO(';', 100 + 3) of linux/vfio.h, and the first flag of its answer.
GET_STATUS = 0x3B67
VIABLE = 1
# The kernel's answer about a group: whether a virtual machine can be given it. ``held``: one has it, and until then
# nobody else may ask; ``absent``: no VFIO driver has a function of it, or the kernel has no files of groups.
GroupState = t.Literal["viable", "not_viable", "held", "absent", "unknown"]
# What opening its file fails with.
REFUSED: t.Mapping[int, GroupState] = {errno.EBUSY: "held", errno.ENOENT: "absent", errno.ENODEV: "absent"}


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
        return kernel_write.put(path, text, seconds)

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
