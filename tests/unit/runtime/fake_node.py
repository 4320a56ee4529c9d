# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated node: files in a dict, commands answered by functions, every write and command recorded."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done

Answer = Callable[[Sequence[str]], Done]


class FakeNode:
    def __init__(self, files: dict[str, str], answers: dict[str, Answer] | None = None) -> None:
        self.files = dict(files)
        self.modes: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.answers = answers or {}
        self.log: list[str] = []

    def read(self, path: str) -> str | None:
        while path in self.links:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), self.links[path]))
        return self.files.get(path)

    def names(self, path: str) -> list[str]:
        inside = [one[len(path) + 1 :].partition("/")[0] for one in self.files if one.startswith(f"{path}/")]
        return sorted(set(inside))

    def exists(self, path: str) -> bool:
        return path in self.files or any(one.startswith(f"{path}/") for one in self.files)

    def link(self, path: str) -> str | None:
        return self.links.get(path)

    def free_bytes(self, path: str) -> int:
        return 1 << 30

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.log.append(f"write {path}")
        self.files[path] = text
        self.modes[path] = mode

    def remove(self, path: str) -> None:
        if self.files.pop(path, None) is not None:
            self.log.append(f"remove {path}")

    def run(self, argv: Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
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


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Killed(BaseException):
    """A simulated SIGKILL, which no ``except Exception`` catches."""


def killed(node: FakeNode, at: int, work: Callable[[], object]) -> bool:
    """Kill some work before its n-th write or command; return False if it ended before."""
    count, write, run = 0, node.write, node.run

    def step() -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Killed

    node.write = lambda *args, **kw: (step(), write(*args, **kw))[1]  # type: ignore[method-assign,assignment]
    node.run = lambda *args, **kw: (step(), run(*args, **kw))[1]  # type: ignore[method-assign,assignment]
    try:
        work()
    except Killed:
        return True
    finally:
        node.write, node.run = write, run  # type: ignore[method-assign]
    return False
