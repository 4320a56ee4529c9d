# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: what /proc, the cgroups and the kernel's log of this node say of processes and cards.

``stat`` and ``cgroup`` can always be read at once. ``maps`` and ``cmdline`` wait for a process that hangs in its
memory, as those on sick cards do: only ``libvgpu`` reads one of them, and no command line is read at all.
"""

from __future__ import annotations

import os
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._nvml_holders import Group
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_xid import by_address
from ansible_collections.kubegpu.share.plugins.module_utils._pod_cgroup import owner

Json = t.Dict[str, t.Any]

# The kernel's own limits of a record, and far more records than its buffer holds.
RECORD, MOST_RECORDS = 8192, 1 << 18
DEPTH, MOST_FOLDERS = 12, 1 << 15
MOST_MAPS = 1 << 26
# field 22 of stat, counted from the third, behind the name.
START_TIME = 22 - 3
# A tick is 10 ms: one that began in the very same one can't be told.
SLACK = 1
HAMI = b"libvgpu.so"


class NodeHost:
    """This node; see ``_nvml_read.Host``.

    :param proc: where /proc is seen.
    :param cgroups: where the node's own /sys/fs/cgroup is seen.
    :param log: the kernel's log.
    """

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup", log: str = "/dev/kmsg") -> None:
        self._proc, self._cgroups, self._log = proc, cgroups, log

    def now(self) -> int:
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def process(self, pid: int, asked: int) -> Json:
        found: Json = {
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
            whose = owner(self._text(pid, "cgroup"))
            again = self._stat(pid)[1]
        except (FileNotFoundError, ProcessLookupError):
            return {**found, "where": "unknown" if self._hidden(pid) else "gone"}
        except (OSError, ValueError):
            return found
        if again != began or int(began) > asked + SLACK:
            # The PID was given to another process.
            return {**found, "where": "gone"}
        return {
            **found,
            "name": name,
            "start_time": began,
            "cgroup": whose.path,
            "where": whose.where,
            "pod_uid": whose.pod_uid,
            "container_id": whose.container_id,
            "runtime": whose.runtime,
            "static": whose.static,
        }

    def libvgpu(self, pid: int, start_time: str) -> bool | None:
        found, seen, last = False, 0, b""
        try:
            with open(f"{self._proc}/{pid}/maps", "rb") as file:
                while not found and seen < MOST_MAPS:
                    piece = file.read(1 << 16)
                    if not piece:
                        break
                    found = HAMI in last + piece
                    seen, last = seen + len(piece), piece[-len(HAMI) :]
            # An empty one is a process that ended, or a kernel thread.
            return found if seen and self._stat(pid)[1] == start_time else None
        except (OSError, ValueError):
            return None

    def groups(self) -> t.Sequence[Group]:
        if not os.path.exists(f"{self._cgroups}/cgroup.controllers"):
            return ()
        found: list[Group] = []
        self._walk(self._cgroups, DEPTH, [0], found)
        return found

    def xids(self) -> t.Mapping[str, t.Sequence[int]] | None:
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
        """The name, which may hold anything, also parentheses, and the start time.

        :raises OSError: it can't be read.
        :raises ValueError: this isn't what the kernel writes.
        """
        text = self._text(pid, "stat")
        before, bracket, after = text.rpartition(")")
        fields = after.split()
        if not bracket or len(fields) <= START_TIME or not fields[START_TIME].isdecimal():
            raise ValueError(f"{self._proc}/{pid}/stat isn't one")
        name = before.partition("(")[2]
        return "".join(one if one.isprintable() else "?" for one in name), fields[START_TIME]

    def _hidden(self, pid: int) -> bool:
        """The process is there, and /proc doesn't show it to this user (mount option hidepid)."""
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return False

    def _walk(self, folder: str, depth: int, seen: list[int], found: list[Group]) -> None:
        try:
            with os.scandir(folder) as entries:
                below = sorted(one.path for one in entries if one.is_dir(follow_symlinks=False))
        except OSError:
            # A cgroup may go at any moment.
            return
        for one in below:
            seen[0] += 1
            if seen[0] > MOST_FOLDERS:
                return
            inner = self._inner(one)
            path = inner[len(self._cgroups) :]
            whose = owner(f"0::{path}")
            if whose.where == "pod" and whose.container_id:
                found.append(Group(inner, path, whose.pod_uid, whose.container_id))
            elif depth > 1:
                self._walk(one, depth - 1, seen, found)

    def _inner(self, folder: str) -> str:
        """crun's own child of a container's scope, where the processes are."""
        child = f"{folder}/container"
        return child if _procs(child) and not _procs(folder) else folder


def _procs(folder: str) -> bool:
    try:
        with open(f"{folder}/cgroup.procs", "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def _records(log: int) -> t.Iterator[str]:
    for _number in range(MOST_RECORDS):
        try:
            record = os.read(log, RECORD)
        except BrokenPipeError:
            # Records were overwritten meanwhile; the next read is at the oldest that is left.
            continue
        except (BlockingIOError, InterruptedError):
            return
        except PermissionError:
            raise
        except OSError:
            # Such as a record that is longer than any.
            continue
        if not record:
            return
        yield record.decode("utf-8", "replace")
