# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated node whose programs are functions, with modes and owners of files; writes and commands are logged."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from node_fakes import FakeSystem, Killed

Answer = Callable[[Sequence[str]], Done]


class FakeNode(FakeSystem):
    """Programs are answered by their name; a program without an answer succeeds silently."""

    def __init__(self, files: dict[str, str], answers: dict[str, Answer] | None = None) -> None:
        super().__init__(files)
        self.modes: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.answers = answers or {}
        self.log: list[str] = []

    def read(self, path: str) -> str | None:
        while path in self.links:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), self.links[path]))
        return super().read(path)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.step()
        self.log.append(f"write {path}")
        self.files[path] = text
        self.modes[path] = mode

    def remove(self, path: str) -> None:
        self.step()
        if self.files.pop(path, None) is not None:
            self.log.append(f"remove {path}")

    def run(self, argv: Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        self.step()
        self.log.append(" ".join(argv))
        name = posixpath.basename(argv[0])
        if name in self.answers:
            return self.answers[name](argv)
        if name == "stat" and argv[2] == "%a %u:%g":
            return Done(0, f"{self.modes.get(argv[3], 0o644):o} {self.owners.get(argv[3], '0:0')}\n", "")
        if name == "chown":
            self.owners[argv[2]] = argv[1]
        if name == "mv":
            self.files[argv[3]] = self.files.pop(argv[2])
            self.modes[argv[3]] = self.modes.pop(argv[2])
        return Done(0, "", "")


def killed(node: FakeNode, at: int, work: Callable[[], object]) -> bool:
    """Kill some work before its n-th write, removal or command; return False if it ended before."""
    node.events, node.kill_at = 0, at
    try:
        work()
    except Killed:
        return True
    finally:
        node.kill_at = 0
    return False
