# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter to this node's /proc, cgroups and kernel log with its Xid errors.

Source: https://docs.nvidia.com/deploy/xid-errors, and the kernel's Documentation/ABI/testing/dev-kmsg.

Reading ``stat`` and ``cgroup`` never blocks. ``maps`` and ``cmdline`` block for a process that hangs in its memory, as
on faulty cards: only ``has_libvgpu`` reads ``maps``, and no command line is read.
"""

from __future__ import annotations

import os
import re
import time
import typing as t

from .._contracts.cgroup import process_owner
from .processes import ContainerCgroup
from .types import HostProcess

# A record of /dev/kmsg: priority and facility, number, time, flags; then the text. Facility 0 is the kernel:
# records that programs write have another.
MESSAGE = re.compile(r"(\d{1,6}),\d+,\d+,[^;]*;(.*)", re.DOTALL)
XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?\): (\d{1,5})\b"
)
FACILITY = 8


def by_address(records: t.Iterable[str]) -> dict[str, list[int]]:
    """Return the codes by PCI address (``00000000:3B:00``), each once, in the order of their first appearance."""
    by_address: dict[str, list[int]] = {}
    for record in records:
        parts = MESSAGE.match(record)
        xid = XID.match(parts.group(2)) if parts and int(parts.group(1)) < FACILITY else None
        if xid:
            domain, bus, device = (xid.group(number).upper() for number in (1, 2, 3))
            codes = by_address.setdefault(f"{domain:0>8}:{bus}:{device}", [])
            code = int(xid.group(4))
            if code not in codes:
                codes.append(code)
    return by_address


# The kernel's limit of a record in bytes, and more records than its buffer holds.
RECORD, MAX_RECORDS = 8192, 1 << 18
DEPTH, MAX_FOLDERS = 12, 1 << 15
MAX_MAPS = 1 << 26
# Field 22 of stat, counted from the third, which follows the name.
START_TIME = 22 - 3
# Clock ticks (10 ms): two processes that began in the same tick can't be distinguished.
SLACK = 1
HAMI = b"libvgpu.so"


class NodeHost:
    """This node; see ``protocol.Host``.

    :param proc: mount point of /proc.
    :param cgroups: mount point of the node's /sys/fs/cgroup.
    :param log: device of the kernel's log.
    """

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup", log: str = "/dev/kmsg") -> None:
        self._proc, self._cgroups, self._log = proc, cgroups, log

    def now(self) -> int:
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def process(self, pid: int, listed: int) -> HostProcess:
        unknown: HostProcess = {
            "name": "",
            "start_time": None,
            "cgroup": "",
            "where": "unknown",
            "pod_uid": "",
            "container_id": "",
            "runtime": "",
            "static": False,
        }
        try:
            name, began = self._stat(pid)
            owner = process_owner(self._text(pid, "cgroup"))
            again = self._stat(pid)[1]
        except (FileNotFoundError, ProcessLookupError):
            return {**unknown, "where": "unknown" if self._is_hidden(pid) else "gone"}
        except (OSError, ValueError):
            return unknown
        if again != began or int(began) > listed + SLACK:
            # Another process has the PID now.
            return {**unknown, "where": "gone"}
        return {
            "name": name,
            "start_time": began,
            "cgroup": owner.path,
            "where": owner.where,
            "pod_uid": owner.pod_uid,
            "container_id": owner.container_id,
            "runtime": owner.runtime,
            "static": owner.static,
        }

    def has_libvgpu(self, pid: int, start_time: str) -> bool | None:
        found, size, last = False, 0, b""
        try:
            with open(f"{self._proc}/{pid}/maps", "rb") as file:
                while not found and size < MAX_MAPS:
                    piece = file.read(1 << 16)
                    if not piece:
                        break
                    found = HAMI in last + piece
                    size, last = size + len(piece), piece[-len(HAMI) :]
            # It is empty for a process that ended, and for a kernel thread.
            return found if size and self._stat(pid)[1] == start_time else None
        except (OSError, ValueError):
            return None

    def container_cgroups(self) -> t.Sequence[ContainerCgroup]:
        if not os.path.exists(f"{self._cgroups}/cgroup.controllers"):
            return ()
        cgroups: list[ContainerCgroup] = []
        self._walk(self._cgroups, DEPTH, [0], cgroups)
        return cgroups

    def xids(self) -> t.Mapping[str, list[int]] | None:
        try:
            log = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return by_address(_records(log))
        except PermissionError:
            return None
        finally:
            os.close(log)

    def _text(self, pid: int, name: str) -> str:
        with open(f"{self._proc}/{pid}/{name}", "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace")

    def _stat(self, pid: int) -> tuple[str, str]:
        """Read the name, which may contain anything, also parentheses, and the start time.

        :raises OSError: it can't be read.
        :raises ValueError: it is malformed.
        """
        text = self._text(pid, "stat")
        before, bracket, after = text.rpartition(")")
        fields = after.split()
        if not bracket or len(fields) <= START_TIME or not fields[START_TIME].isdecimal():
            raise ValueError(f"{self._proc}/{pid}/stat is malformed")
        name = before.partition("(")[2]
        return "".join(character if character.isprintable() else "?" for character in name), fields[START_TIME]

    def _is_hidden(self, pid: int) -> bool:
        """Return whether the process exists, but /proc hides it from this user (mount option hidepid)."""
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return False

    def _walk(self, folder: str, depth: int, count: list[int], cgroups: list[ContainerCgroup]) -> None:
        try:
            with os.scandir(folder) as entries:
                below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError:
            # A cgroup may be removed at any moment.
            return
        for child in below:
            count[0] += 1
            if count[0] > MAX_FOLDERS:
                return
            inner = self._inner(child)
            path = inner[len(self._cgroups) :]
            owner = process_owner(f"0::{path}")
            if owner.where == "pod" and owner.container_id:
                cgroups.append(ContainerCgroup(inner, path, owner.pod_uid, owner.container_id))
            elif depth > 1:
                self._walk(child, depth - 1, count, cgroups)

    def _inner(self, folder: str) -> str:
        """Return crun's child of a container's scope, if the processes are there."""
        child = f"{folder}/container"
        return child if _has_processes(child) and not _has_processes(folder) else folder


def _has_processes(folder: str) -> bool:
    try:
        with open(f"{folder}/cgroup.procs", "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def _records(log: int) -> t.Iterator[str]:
    for _number in range(MAX_RECORDS):
        try:
            record = os.read(log, RECORD)
        except BrokenPipeError:
            # Records were overwritten meanwhile; the next read returns the oldest one.
            continue
        except (BlockingIOError, InterruptedError):
            return
        except PermissionError:
            raise
        except OSError:
            # For example a record that exceeds the limit.
            continue
        if not record:
            return
        yield record.decode("utf-8", "replace")
