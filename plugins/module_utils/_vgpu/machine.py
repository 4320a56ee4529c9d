# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to the machine whose cards are divided: files, commands, and writes that may wait in the kernel."""

from __future__ import annotations

import typing as t

from .._core.errors import ShareError
from .._host import kernel_write
from .._host.kernel_write import Written
from .._host.system import RealSystem, System


class Machine(System, t.Protocol):
    """A machine."""

    def put(self, path: str, text: str, seconds: float) -> Written:
        """Write to a file of sysfs, in a process of its own that may be left behind."""


class RealMachine(RealSystem):
    """This machine."""

    def read(self, path: str) -> str | None:
        try:
            return super().read(path)
        except ShareError:
            # Files of a card that fell off the bus give EIO: it then has no vGPUs, and can't be given any.
            if path.startswith("/sys/"):
                return None
            raise

    def put(self, path: str, text: str, seconds: float) -> Written:
        return kernel_write.put(path, text, seconds)
