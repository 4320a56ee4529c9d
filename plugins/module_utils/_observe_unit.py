# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at a daemon's systemd unit and process: which program with which arguments, and since when."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._system import System

# A file is written and the daemon restarted within the same second; clocks read from /proc are off by hundredths.
STALE_AFTER_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Unit:
    """A systemd unit.

    :param loaded: systemd knows it.
    :param binary: the program; empty where there is no unit.
    :param arguments: of its next start; those of the running process where the unit takes them from variables.
    :param files: the unit's own file, its drop-ins and files of its environment, in which the arguments can be changed.
    :param pid: 0 where it doesn't run.
    """

    name: str
    loaded: bool
    binary: str
    arguments: tuple[str, ...]
    files: tuple[str, ...]
    active: bool
    pid: int

    def values(self, *names: str) -> list[str]:
        """Values of a flag, under any of its names, in order."""
        found = []
        rest = list(self.arguments)
        while rest:
            one = rest.pop(0)
            flag, equals, value = one.partition("=")
            if flag in names:
                found.append(value if equals else (rest.pop(0) if rest else ""))
        return found


_PROPERTIES = ("LoadState", "ActiveState", "MainPID", "ExecStart", "FragmentPath", "DropInPaths", "EnvironmentFiles")


def unit(system: System, name: str) -> Unit:
    """A unit as systemd has loaded it, and its process as it was started."""
    wanted = [word for one in _PROPERTIES for word in ("-p", one)]
    done = system.run(["systemctl", "show", name, *wanted])
    values = dict(line.split("=", 1) for line in done.out.splitlines() if "=" in line)
    start = values.get("ExecStart", "")
    binary = re.search(r"\bpath=(\S+)", start)
    argv = re.search(r"argv\[\]=(.*?) ; ", start)
    pid = values.get("MainPID") or "0"
    arguments = tuple(argv.group(1).split()) if argv else ()
    if pid.isdigit() and pid != "0" and (not arguments or any("$" in one for one in arguments)):
        arguments = command_line(system, int(pid)) or arguments
    environment = re.findall(r"(\S+) \(ignore_errors=", values.get("EnvironmentFiles", ""))
    files = [values.get("FragmentPath", ""), *values.get("DropInPaths", "").split(), *environment]
    return Unit(
        name=name,
        loaded=values.get("LoadState", "loaded" if start else "") == "loaded",
        binary=binary.group(1) if binary else "",
        arguments=arguments[1:],
        files=tuple(one for one in files if one),
        active=values.get("ActiveState") == "active",
        pid=int(pid) if pid.isdigit() else 0,
    )


def command_line(system: System, pid: int) -> tuple[str, ...]:
    """Arguments of a process, the program's name first; none where there is no such process."""
    text = system.read(f"/proc/{pid}/cmdline") or ""
    return tuple(text.split("\0")[:-1]) if text else ()


def naming(system: System, where: Unit, word: str) -> str:
    """The file of a unit in which a word stands, for a person to change: the last one, which wins."""
    having = [path for path in where.files if word in (system.read(path) or "")]
    return having[-1] if having else f"the command line of {where.name}"


def stale(system: System, pid: int, paths: t.Sequence[str]) -> bool:
    """Any of these files is newer than the process."""
    age = process_age(system, pid)
    if age is None or not paths:
        return False
    done = system.run(["stat", "-c", "%.6Y", *paths])
    now = system.run(["date", "+%s.%N"])
    try:
        started = float(now.out) - age
        return any(float(line) > started + STALE_AFTER_SECONDS for line in done.out.split())
    except ValueError:
        return False


def process_age(system: System, pid: int) -> float | None:
    """Seconds that a process has been running, or None where there is no such process."""
    stat = system.read(f"/proc/{pid}/stat")
    uptime = system.read("/proc/uptime")
    if not stat or not uptime:
        return None
    # The name in parentheses may hold blanks; field 22 counts hundredths of a second since boot on every Linux.
    fields = stat.rpartition(")")[2].split()
    return float(uptime.split()[0]) - int(fields[19]) / 100
