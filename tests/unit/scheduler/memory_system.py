# SPDX-License-Identifier: GPL-3.0-or-later
"""A machine's files in memory, and its clock, which advances by sleep only."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ansible_collections.kubegpu.share.plugins.module_utils._host.http_probe import Answer
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done

BOOT = 1_000_000.0
ANSWERS = Answer(200, "", '{"Nodes": null, "NodeNames": [], "FailedNodes": {}, "Error": ""}')


class MemorySystem:
    """The common part of all machines; ``log`` has the changes and commands.

    :param hostname: as the kernel reports it.
    """

    def __init__(self, hostname: str) -> None:
        self.files: dict[str, str] = {"/proc/sys/kernel/hostname": f"{hostname}\n"}
        self.modes: dict[str, int] = {}
        self.changed_at: dict[str, float] = {}
        self.links: dict[str, str] = {}
        self.log: list[str] = []
        self.time = 100.0
        # What answers at the extender's URL.
        self.extender = ANSWERS

    def read(self, path: str) -> str | None:
        if path == "/proc/uptime":
            return f"{self.time:.2f} 0.00\n"
        return self.files.get(self.seen(path))

    def seen(self, path: str) -> str:
        """The file of a path below the root of a process, which sees the machine's own."""
        match = re.match(r"/proc/(\d+)/root(/.*)", path)
        return match[2] if match and f"/proc/{match[1]}/stat" in self.files else path

    def post(self, url: str, body: str) -> Answer:
        self.log.append(f"post {url}")
        return self.extender

    def names(self, path: str) -> list[str]:
        return sorted({file[len(path) + 1 :].partition("/")[0] for file in self.files if file.startswith(f"{path}/")})

    def exists(self, path: str) -> bool:
        return path in self.files or bool(self.names(path))

    def link(self, path: str) -> str | None:
        return self.links.get(path)

    def free_bytes(self, path: str) -> int:
        return 1 << 30

    def put(self, path: str, text: str, mode: int) -> None:
        self.files[path], self.modes[path], self.changed_at[path] = text, mode, BOOT + self.time

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.log.append(f"write {path}")
        self.put(path, text, mode)

    def remove(self, path: str) -> None:
        if self.files.pop(path, None) is not None:
            self.log.append(f"remove {path}")

    def run(self, argv: Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        self.log.append(" ".join(argv))
        return self.done(argv)

    def done(self, argv: Sequence[str]) -> Done:
        """Return a command's result; an unknown one succeeds without output."""
        if argv[:4] == ["stat", "-L", "-c", "%.6Z"]:
            times = [self.changed_at[path] for path in map(self.seen, argv[4:]) if path in self.changed_at]
            return Done(int(len(times) < len(argv[4:])), "".join(f"{one:.6f}\n" for one in times), "")
        if argv[:2] == ["stat", "-c"]:
            return Done(0, f"{self.modes[argv[3]]:o} 0:0\n", "")
        if argv[0] == "date":
            return Done(0, f"{BOOT + self.time:.9f}\n", "")
        return Done(0, "", "")

    def now(self) -> float:
        return self.time

    def put_process(self, pid: int, *argv: str, cgroup: str = "", environ: str = "", started: float = -1) -> None:
        """Replace a process; ``started`` in seconds since the boot, by default now."""
        self.forget_process(pid)
        ticks = int((self.time if started < 0 else started) * 100)
        stat = f"{pid} ({posixpath.basename(argv[0])}) S {' '.join(['0'] * 18)} {ticks} 0"
        texts = {"cmdline": "\0".join(argv) + "\0", "cgroup": cgroup, "environ": environ, "stat": stat}
        self.files.update({f"/proc/{pid}/{name}": text for name, text in texts.items()})

    def forget_process(self, pid: int) -> None:
        for path in [file for file in self.files if file.startswith(f"/proc/{pid}/")]:
            del self.files[path]
