# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe the persistence daemon's process, and what role driver wrote for it."""

from __future__ import annotations

from .._host.system import System
from .._host.systemd import command_line

PID_FILE = "/run/nvidia-persistenced/nvidia-persistenced.pid"
# As in Ubuntu's unit: the daemon leaves the mode of the cards off.
DISABLING = "--no-persistence-mode"

UNITS = "/etc/systemd/system"
FOLDER = f"{UNITS}/nvidia-persistenced.service.d"
DROP_IN = f"{FOLDER}/kubegpu.conf"
UNIT = f"{UNITS}/nvidia-persistenced.service"
WANTED = f"{UNITS}/multi-user.target.wants/nvidia-persistenced.service"
MARK = "# Written by kubegpu.share"


def enables(system: System) -> bool | None:
    """Return whether the running daemon enables persistence mode; None where none runs."""
    pid = (system.read(PID_FILE) or "").strip()
    arguments = command_line(system, int(pid)) if pid.isdigit() else ()
    # After a crash another process may have the daemon's number.
    if not arguments or not arguments[0].endswith("nvidia-persistenced"):
        return None
    return DISABLING not in arguments


def masked(system: System) -> bool:
    """Return whether the machine's administrator has masked the daemon's unit."""
    return system.link(UNIT) == "/dev/null"


def own_files(system: System) -> list[str]:
    """Return the paths of the role's unit and drop-in of the daemon, in the order in which they are removed.

    A unit or a drop-in of others stays. What identifies the role's comes last, so that a killed removal is continued.
    """
    drop_in = system.exists(DROP_IN)
    unit = (system.read(UNIT) or "").startswith(MARK)
    # A directory without other files is the role's, too.
    alone = drop_in and system.names(FOLDER) == [DROP_IN.rpartition("/")[2]]
    return [
        *([WANTED] if (drop_in or unit) and system.exists(WANTED) else []),
        *([UNIT] if unit else []),
        *([FOLDER if alone else DROP_IN] if drop_in else []),
    ]
