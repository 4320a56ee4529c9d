# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated machine: files in a dict, scripted commands, and a small apt that keeps its state in the files."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done

Answer = Done | Callable[[Sequence[str]], Done]


class Killed(BaseException):
    """SIGKILL: nothing catches it, no ``except Exception`` runs."""


class FakeSystem:
    """Files and links by path; commands answered by the longest beginning of their line that is known.

    ``kill_at``: the machine dies at the n-th write, removal or command that changes something.
    """

    def __init__(self, files: dict[str, str] | None = None, commands: dict[str, Answer] | None = None) -> None:
        self.files = dict(files or {})
        self.links: dict[str, str] = {}
        self.modes: dict[str, int] = {}
        self.folders: set[str] = set()
        usual = {"uname -m": Done(0, "x86_64\n", ""), "stat -c %a %u:%g ": Done(0, "644 0:0\n", "")}
        self.commands: dict[str, Answer] = {**usual, **(commands or {})}
        self.ran: list[str] = []
        self.free = 10**9
        self.events = 0
        self.kill_at = 0

    def step(self) -> None:
        self.events += 1
        if self.events == self.kill_at:
            raise Killed

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        everything = [*self.files, *self.links, *self.folders]
        return sorted({one[len(start) :].split("/")[0] for one in everything if one.startswith(start)})

    def exists(self, path: str) -> bool:
        return path in self.files or path in self.links or path in self.folders or bool(self.names(path))

    def link(self, path: str) -> str | None:
        return self.links.get(path)

    def free_bytes(self, path: str) -> int:
        return self.free

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.step()
        self.files[path], self.modes[path] = text, mode
        self.step()

    def remove(self, path: str) -> None:
        self.step()
        self.files.pop(path, None)
        self.step()

    def run(self, argv: Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        line = " ".join(argv)
        self.ran.append(line)
        known = [start for start in self.commands if line.startswith(start)]
        if not known:
            return Done(127, "", f"{argv[0]}: not installed")
        answer = self.commands[max(known, key=len)]
        return answer if isinstance(answer, Done) else answer(argv)


def killed_at_every_step(begin: Callable[[], Any], work: Callable[[Any], object], least: int = 5) -> Iterator[Any]:
    """Yield machines on which some work was killed, each one step later than the one before.

    :param begin: makes a machine.
    :param least: the number of steps that the work has at least.
    """
    for moment in itertools.count(1):
        node = begin()
        node.events, node.kill_at = 0, moment
        try:
            work(node)
        except Killed:
            node.kill_at = 0
            yield node
        else:
            assert moment > least
            return


class Folders(FakeSystem):
    """Beside a machine's class: folders are there by themselves, a write makes those above it one by one.

    With ``kill_at`` it also dies with a folder made and nothing in it, and with a file that a write had begun.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.commands["rmdir"] = self._rmdir

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        folder = path.rpartition("/")[0]
        steps = folder.split("/")
        for above in ("/".join(steps[:count]) for count in range(2, len(steps) + 1)):
            if not self.exists(above):
                self.step()
                self.folders.add(above)
        self.files[f"{folder}/.kubegpu-begun"] = text[:1]
        self.step()
        del self.files[f"{folder}/.kubegpu-begun"]
        super().write(path, text, mode)

    def _rmdir(self, argv: Sequence[str]) -> Done:
        if argv[1] not in self.folders or self.names(argv[1]):
            return Done(1, "", f"rmdir: failed to remove '{argv[1]}'")
        self.step()
        self.folders.discard(argv[1])
        self.step()
        return Done(0, "", "")


class AptMachine(FakeSystem):
    """A node with dpkg and apt: repositories by URL, what is installed, what is held, which lists were fetched."""

    def __init__(self, repositories: dict[str, dict[str, list[str]]]) -> None:
        super().__init__(
            {"/var/lib/dpkg/status": "", "/etc/apt/sources.list": "deb http://deb.example.org stable main\n"}
        )
        self.repositories = {"http://deb.example.org": {}, **repositories}
        self.installed: dict[str, str] = {}
        self.held: set[str] = set()
        self.half: set[str] = set()
        self.unconfigurable: set[str] = set()  # packages whose scripts fail
        self.fetched: set[str] = set()
        self.keys = {}  # what signs a repository now, by its URL; any key does where none stands here
        self.locked = 0
        self.automatic: set[str] = set()
        self.needs: dict[str, set[str]] = {}  # what an installed package depends on
        self.excludes: dict[str, set[str]] = {}  # what can't stay beside a package
        self.commands.update(
            {
                "dpkg-query": self._query,
                "dpkg --": self._configure,
                "apt-get": self._apt_get,
                "apt-mark": self._apt_mark,
                "env": self._env,
            }
        )

    def state(self) -> tuple[object, ...]:
        """All that a run may change."""
        return (dict(self.files), dict(self.installed), set(self.held), set(self.half))

    def changing_commands(self) -> list[str]:
        return [line for line in self.ran if not line.startswith(("dpkg-query", "uname"))]

    def _env(self, argv: Sequence[str]) -> Done:
        """A command with variables before it; it is noted as the command that it is."""
        self.ran.pop()
        assert "NEEDRESTART_SUSPEND=1" in argv
        return self.run([word for word in argv[1:] if not re.match(r"[A-Z_]+=", word)])

    def _query(self, argv: Sequence[str]) -> Done:
        rows = [f"{'h' if n in self.held else 'i'}i \t{n}\t{v}\tamd64" for n, v in sorted(self.installed.items())]
        rows += [f"iU \t{name}\t1\tamd64" for name in sorted(self.half)]
        return Done(0, "\n".join(rows), "")

    def _configure(self, argv: Sequence[str]) -> Done:
        self.step()
        for name in sorted(self.half - self.unconfigurable):
            self.half.discard(name)
            self.installed[name] = self.unpacked[name]
        self.files.pop("/var/lib/dpkg/updates/0001", None)
        self.step()
        failed = "".join(f"dpkg: error processing package {name} (--configure):\n" for name in sorted(self.half))
        return Done(1 if failed else 0, "", failed)

    def _apt_mark(self, argv: Sequence[str]) -> Done:
        if argv[1] == "showauto":
            return Done(0, "\n".join(sorted(self.automatic & set(self.installed))), "")
        self.step()
        for name in argv[2:]:
            if argv[1] in ("auto", "manual"):
                (self.automatic.add if argv[1] == "auto" else self.automatic.discard)(name)
            else:
                (self.held.add if argv[1] == "hold" else self.held.discard)(name)
        self.step()
        return Done(0, "", "")

    def _apt_get(self, argv: Sequence[str]) -> Done:
        if self.locked:
            self.locked -= 1
            return Done(100, "", "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (apt)")
        if "/var/lib/dpkg/updates/0001" in self.files:
            return Done(100, "", "E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct it.")
        words = [
            word for before, word in itertools.pairwise(["", *argv]) if before != "-o" and not word.startswith("-")
        ]
        does = {"update": self._update, "install": self._install, "purge": self._purge, "autoremove": self._unneeded}
        return does[words[1]](argv, words[2:])

    def _update(self, argv: Sequence[str], _words: Sequence[str]) -> Done:
        only = [word.split("=", 1)[1] for word in argv if word.startswith("Dir::Etc::sourcelist=")]
        sources = [path for path in self.files if path.endswith((".sources", "sources.list"))]
        for path in only or sources:
            for url, key in self._repositories_in(self.files[path]):
                if url not in self.repositories:
                    return Done(
                        100, "", f"Err:1 {url}\nE: The repository '{url} ./ Release' does not have a Release file."
                    )
                if key and self.keys.get(url, self.files.get(key)) != self.files.get(key):
                    return Done(100, "", f"E: GPG error: {url} InRelease: NO_PUBKEY 0123456789ABCDEF")
                self.step()
                self.fetched.add(url)
        return Done(0, "", "")

    @staticmethod
    def _repositories_in(text: str) -> list[tuple[str, str]]:
        flat = re.findall(r"^URIs: (\S+)\n(?:.*\n)*?Signed-By: (\S+)", text, re.MULTILINE)
        return flat or [(url, "") for url in re.findall(r"^deb (\S+)", text, re.MULTILINE)]

    def _candidates(self, name: str) -> list[str]:
        return [version for url in sorted(self.fetched) for version in self.repositories[url].get(name, [])]

    def _install(self, argv: Sequence[str], words: Sequence[str]) -> Done:
        chosen = {}
        for word in words:
            name, _equals, version = word.partition("=")
            found = [
                candidate for candidate in self._candidates(name) if fnmatch.fnmatchcase(candidate, version or "*")
            ]
            if not found:
                return Done(100, "Reading package lists...\n", f"E: Unable to locate package {name}\nE: more")
            if name in self.held:
                return Done(
                    100, "", "E: Held packages were changed and -y was used without --allow-change-held-packages."
                )
            chosen[name] = found[-1]
        going = sorted(one for name in chosen for one in self.excludes.get(name, set()) if one in self.installed)
        if going and "--no-remove" in argv:
            listed = f"The following packages will be REMOVED:\n  {' '.join(going)}\n"
            return Done(100, listed, "E: Packages need to be removed but remove is disabled.")
        for name in going:
            del self.installed[name]
        self.unpacked = dict(chosen)
        for name in chosen:
            self.files["/var/lib/dpkg/updates/0001"] = "journal"
            self.installed.pop(name, None)
            self.half.add(name)
            self.step()
        for name, version in chosen.items():
            self.half.discard(name)
            self.installed[name] = version
            self.step()
        del self.files["/var/lib/dpkg/updates/0001"]
        self.step()
        return Done(0, "", "")

    def _without(self, names: Sequence[str], clean: bool) -> list[str]:
        """Return the packages that a removal takes along: dependents and, with ``clean``, unused dependencies."""
        going = set(names)
        while True:
            more = {name for name in self.installed if self.needs.get(name, set()) & going} - going
            if clean:
                left = set(self.installed) - going
                needed = set().union(*(self.needs.get(name, set()) for name in left))
                more |= {name for name in left & self.automatic if name not in needed}
            if not more:
                return sorted(name for name in going if name in self.installed or name in self.half)
            going |= more

    def _unneeded(self, argv: Sequence[str], _words: Sequence[str]) -> Done:
        assert "-s" in argv
        return Done(0, "".join(f"Remv {name} [1]\n" for name in self._without([], clean=True)), "")

    def _purge(self, argv: Sequence[str], words: Sequence[str]) -> Done:
        going = self._without(words, clean="--auto-remove" in argv)
        if "-s" in argv:
            return Done(0, "".join(f"Purg {name} [1]\n" for name in going), "")
        for name in going:
            self.step()
            self.installed.pop(name, None)
            self.half.discard(name)
        self.step()
        return Done(0, "", "")
