# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The command lines of dnf, dnf5, yum and zypper behind one interface.

Command lines only: on EL 8 the Python bindings exist for an interpreter that Ansible no longer supports.
"""

from __future__ import annotations

import dataclasses
import re
import time
import typing as t
from abc import ABC, abstractmethod

from ansible_collections.kubegpu.share.plugins.module_utils import _rpm as rpm
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_version import Version
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done, System

LOCKED = re.compile(
    r"System management is locked|transaction lock|holding the yum lock|lock is held by|is locked by another process"
    r"|Failed to obtain (?:the )?.*lock",
    re.IGNORECASE,
)
LOCK_TRIES, LOCK_PAUSE = 60, 5.0
LONG, SHORT = 3600.0, 600.0
# Nobody restarts services or lists them behind our back: what a GPU node's services need is the roles' business.
QUIET = ("env", "NEEDRESTART_SUSPEND=1")


@dataclasses.dataclass(frozen=True)
class Item:
    """What is to be installed: a file on the node, or a package at a version (empty: whatever is best).

    :param closed: of a file, that it and those beside it need nothing else.
    """

    name: str
    version: str = ""
    path: str = ""
    older: bool = False
    closed: bool = False


class Commands:
    """Runs a package manager's commands; while another one is at work, waits for it."""

    def __init__(self, system: System, sleep: t.Callable[[float], None] = time.sleep) -> None:
        self.system = system
        self._sleep = sleep

    def run(self, argv: t.Sequence[str], timeout: float = SHORT) -> Done:
        for _try in range(LOCK_TRIES):
            done = self.system.run(argv, timeout=timeout)
            if done.rc == 0 or not LOCKED.search(done.err + done.out):
                break
            self._sleep(LOCK_PAUSE)
        return done

    def must(self, argv: t.Sequence[str], timeout: float = SHORT, fine: t.Container[int] = (0,)) -> Done:
        done = self.run(argv, timeout)
        if done.rc not in fine:
            raise failure(argv, done)
        return done


def failure(argv: t.Sequence[str], done: Done) -> ShareError:
    return ShareError(
        f"{shown(argv)} failed: {own_words(done)}",
        rc=done.rc,
        stdout=done.out[-8000:],
        stderr=done.err[-8000:],
    )


def shown(argv: t.Sequence[str]) -> str:
    """The command as a person would type it."""
    hidden = ("env", "-y", "-q", "--non-interactive", "--xmlout", "--auto-agree-with-licenses")
    words = [word for word in argv if word not in hidden and not re.match(r"[A-Z_]+=|--setopt=", word)]
    return " ".join(words)


def own_words(done: Done) -> str:
    """The manager's own reason, in one line."""
    # zypper with --xmlout speaks in tags.
    text = re.sub(r"<[^>\n]*>", "", f"{done.err}\n{done.out}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if re.match(r"(Error|error|Problem|Fatal)( \d+)?:", line):
            # dnf writes the problem below its "Error:", and why below the problem.
            after = [one for one in lines[number + 1 : number + 4] if re.match(r"(Problem|- |not installable)", one)]
            words = [line] if line.rstrip(":") != "Error" else []
            return "; ".join([*words, *(re.sub(r"^- ", "", one) for one in after[:2])]) or line
    known = [line for line in lines if re.search(r"not found|No provider|[Cc]an't|[Cc]annot|failed|locked", line)]
    return (known[:1] or lines[-1:] or [f"it ended with status {done.rc}"])[0]


class Driver(ABC):
    """One package manager.

    :param commands: how it is run.
    """

    def __init__(self, manager: rpm.Manager, commands: Commands) -> None:
        self.manager = manager
        self.commands = commands

    @abstractmethod
    def refresh(self, repository: rpm.Repository) -> None:
        """Fetch the repository's metadata anew.

        :raises ShareError: it doesn't work.
        """

    @abstractmethod
    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        """The versions of packages that repositories have, by name."""

    @abstractmethod
    def install(self, items: t.Sequence[Item], may_go: t.Callable[[str], bool]) -> None:
        """Install in one transaction, up or down.

        :param may_go: whether an installed package may be removed for it.
        :raises ShareError: it fails, or would remove what may not go.
        """

    @abstractmethod
    def removed_with(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        """What would go if these were removed; with ``dependencies`` also what only they needed."""

    @abstractmethod
    def remove(self, names: t.Sequence[str], dependencies: bool) -> None: ...

    @abstractmethod
    def automatic(self, names: t.Sequence[str]) -> set[str]:
        """Those of the packages that were installed as somebody's dependency."""

    def mark(self, names: t.Sequence[str], automatic: bool) -> bool:
        """Remember that packages were installed as a dependency or by a user; False where that can't be said."""
        return False

    def forgotten(self, names: t.Sequence[str]) -> list[str]:
        """Those that came as a dependency and that the manager no longer remembers as that."""
        return []

    def enable_stream(self, stream: str) -> None:
        raise ShareError(f"streams: {self.manager.name} knows no streams of modules")

    def reset_stream(self, module: str) -> None:
        raise ShareError(f"streams: {self.manager.name} knows no streams of modules")

    def finish(self) -> None:
        """Bring to its end what an earlier run left, beyond packages that are there twice."""
        return


class Dnf(Driver):
    """dnf 4, and what dnf 5 has kept of it."""

    COMMAND: t.ClassVar[tuple[str, ...]] = (*QUIET, "dnf", "-y")
    NO_WEAK = "--setopt=install_weak_deps=False"
    MARKS: t.ClassVar[dict[bool, str]] = {True: "remove", False: "install"}
    REASON = "%{name} %{reason}"

    def refresh(self, repository: rpm.Repository) -> None:
        one = repository.id
        strict = f"--setopt={one}.skip_if_unavailable=0"
        self.commands.must(
            [*self.COMMAND, "-q", "--refresh", "--disablerepo=*", f"--enablerepo={one}", strict, "makecache"]
        )

    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        argv = [*self.COMMAND, "-q", "list", "--showduplicates", *names]
        done = self.commands.run(argv)
        if done.rc != 0 and not re.search(r"No matching", done.err + done.out, re.IGNORECASE):
            raise failure(argv, done)
        return parse_list(done.out)

    def install(self, items: t.Sequence[Item], may_go: t.Callable[[str], bool]) -> None:
        argv = [*self.COMMAND, self.NO_WEAK, "install", *(self._spec(item) for item in items)]
        done = self.commands.run(argv, LONG)
        if done.rc == 0:
            return
        # dnf removes nothing unless it is told to; what it would remove is asked first.
        erasing = [word if word != "install" else "--allowerasing" for word in argv]
        erasing.insert(erasing.index("--allowerasing") + 1, "install")
        going = parse_removed(self.commands.run([*erasing, "--assumeno"], LONG).out)
        if not going or not all(may_go(name) for name in going):
            raise failure(argv, done) if not going else would_remove(argv, [one for one in going if not may_go(one)])
        self.commands.must(erasing, LONG)

    @staticmethod
    def _spec(item: Item) -> str:
        if item.path:
            return item.path
        return f"{item.name}-{Version.of(item.version).full}" if item.version else item.name

    def _removal(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        return [*self.COMMAND, f"--setopt=clean_requirements_on_remove={int(dependencies)}", "remove", *names]

    def removed_with(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        argv = [*self._removal(names, dependencies), "--assumeno"]
        done = self.commands.run(argv, LONG)
        going = parse_removed(done.out)
        if not going:
            raise failure(argv, done)
        return going

    def remove(self, names: t.Sequence[str], dependencies: bool) -> None:
        self.commands.must(self._removal(names, dependencies), LONG)

    def automatic(self, names: t.Sequence[str]) -> set[str]:
        argv = [*self.COMMAND, "-q", "repoquery", "--installed", "--qf", self.REASON, *names]
        done = self.commands.must(argv)
        rows = [line.split() for line in done.out.splitlines()]
        return {row[0] for row in rows if len(row) >= 2 and row[1].lower() in ("dependency", "weak-dependency")}

    def mark(self, names: t.Sequence[str], automatic: bool) -> bool:
        if names:
            self.commands.must([*self.COMMAND, "-q", "mark", self.MARKS[automatic], *names])
        return True

    def enable_stream(self, stream: str) -> None:
        self.commands.must([*self.COMMAND, "-q", "module", "enable", stream])

    def reset_stream(self, module: str) -> None:
        self.commands.must([*self.COMMAND, "-q", "module", "reset", module])


class Dnf5(Dnf):
    """dnf 5: other words for marks, and a query format without a line end of its own."""

    COMMAND: t.ClassVar[tuple[str, ...]] = (*QUIET, "dnf5", "-y")
    MARKS: t.ClassVar[dict[bool, str]] = {True: "dependency", False: "user"}
    REASON = "%{name} %{reason}\n"

    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        form = "%{name}\t%{epoch}:%{version}-%{release}\n"
        done = self.commands.must([*self.COMMAND, "-q", "repoquery", "--available", "--qf", form, *names])
        found: dict[str, set[str]] = {}
        for line in done.out.splitlines():
            name, tab, version = line.partition("\t")
            if tab:
                found.setdefault(name, set()).add(str(Version.of(version)))
        return found


class Yum(Dnf):
    """yum 3 of CentOS 7: goes back to an older version only by a command of its own, and marks nothing."""

    COMMAND: t.ClassVar[tuple[str, ...]] = (*QUIET, "yum", "-y")

    def refresh(self, repository: rpm.Repository) -> None:
        one = repository.id
        only = ("--disablerepo=*", f"--enablerepo={one}", f"--setopt={one}.skip_if_unavailable=0")
        self.commands.must([*self.COMMAND, "-q", *only, "clean", "expire-cache"])
        self.commands.must([*self.COMMAND, "-q", *only, "makecache", "fast"])

    def install(self, items: t.Sequence[Item], may_go: t.Callable[[str], bool]) -> None:
        # Of the two the first may bring what the second asks for, and the second then has nothing to do.
        for command, older in (("downgrade", True), ("install", False)):
            specs = [self._spec(item) for item in items if item.older == older]
            if specs:
                self.commands.must([*self.COMMAND, command, *specs], LONG)

    @staticmethod
    def _spec(item: Item) -> str:
        if item.path or not item.version:
            return item.path or item.name
        have = Version.of(item.version)
        start = "" if have.epoch == "0" else f"{have.epoch}:"
        return f"{start}{item.name}-{have.version}-{have.release}"

    def automatic(self, names: t.Sequence[str]) -> set[str]:
        # yumdb, which knows, is in a package that few machines have.
        return set()

    def mark(self, names: t.Sequence[str], automatic: bool) -> bool:
        return False

    def finish(self) -> None:
        done = self.commands.system.run(["yum-complete-transaction", "-y", "--cleanup-only"], timeout=LONG)
        if done.rc == 127:
            raise ShareError(
                "an earlier run of yum was interrupted; install yum-utils and run: "
                "yum-complete-transaction --cleanup-only"
            )
        if done.rc != 0:
            raise failure(["yum-complete-transaction", "--cleanup-only"], done)


class Zypper(Driver):
    """zypper; its machine-readable output is what is read."""

    COMMAND: t.ClassVar[tuple[str, ...]] = (*QUIET, "zypper", "--non-interactive")
    # Done, though something is to be known: a reboot or restart is advised, a repository skipped, a script complained.
    FINE: t.ClassVar[tuple[int, ...]] = (0, 100, 101, 102, 103, 106, 107)
    NOTHING_FOUND = 104
    AUTOMATIC = "/var/lib/zypp/AutoInstalled"

    def refresh(self, repository: rpm.Repository) -> None:
        self.commands.must([*self.COMMAND, "refresh", "--force", repository.id])

    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        argv = [*self.COMMAND, "--xmlout", "--no-refresh", "search", "--details", "--match-exact", "-t", "package"]
        done = self.commands.must([*argv, *names], fine=(*self.FINE, self.NOTHING_FOUND))
        found: dict[str, set[str]] = {}
        for one in re.findall(r"<solvable ([^>]*)/?>", done.out):
            fields = dict(re.findall(r'([\w-]+)="([^"]*)"', one))
            if fields.get("kind") == "package" and "edition" in fields:
                found.setdefault(fields["name"], set()).add(str(Version.of(fields["edition"])))
        return found

    def install(self, items: t.Sequence[Item], may_go: t.Callable[[str], bool]) -> None:
        # Only with force-resolution do dependencies follow a package back to an older version; it also removes what
        # stands in the way, so what it would remove is asked first.
        options = ["--auto-agree-with-licenses", "--no-recommends", "--oldpackage", "--force-resolution"]
        command = list(self.COMMAND)
        if items and all(item.path and item.closed for item in items):
            # Files that a user hands over are taken as they are, as dnf does; nothing else is part of this.
            command.append("--no-gpg-checks")
        elif any(item.path for item in items):
            options.append("--allow-unsigned-rpm")
        specs = [self._spec(item) for item in items]
        dry = [*command, "--xmlout", "install", "--dry-run", *options, *specs]
        planned = self.commands.must(dry, LONG, fine=self.FINE)
        argv = [*command, "install", *options, *specs]
        foreign = [name for name in parse_xml_removed(planned.out) if not may_go(name)]
        if foreign:
            raise would_remove(argv, foreign)
        self.commands.must(argv, LONG, fine=self.FINE)

    @staticmethod
    def _spec(item: Item) -> str:
        return item.path or (f"{item.name}={item.version}" if item.version else item.name)

    def _removal(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        return ["remove", "--clean-deps" if dependencies else "--no-clean-deps", *names]

    def removed_with(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        remove, *words = self._removal(names, dependencies)
        done = self.commands.must([*self.COMMAND, "--xmlout", remove, "--dry-run", *words], LONG, fine=self.FINE)
        return parse_xml_removed(done.out)

    def remove(self, names: t.Sequence[str], dependencies: bool) -> None:
        self.commands.must([*self.COMMAND, *self._removal(names, dependencies)], LONG, fine=self.FINE)

    def _listed(self) -> list[str]:
        return (self.commands.system.read(self.AUTOMATIC) or "").splitlines()

    def automatic(self, names: t.Sequence[str]) -> set[str]:
        return set(self._listed()) & set(names)

    def mark(self, names: t.Sequence[str], automatic: bool) -> bool:
        lines = [line for line in self._listed() if line not in names] + (list(names) if automatic else [])
        if names:
            self.commands.system.write(self.AUTOMATIC, "\n".join(lines) + "\n")
        return True

    def forgotten(self, names: t.Sequence[str]) -> list[str]:
        # libzypp forgets all of them that are locked whenever anything is installed.
        listed = self._listed()
        return [name for name in names if name not in listed]


DRIVERS: dict[str, type[Driver]] = {"dnf": Dnf, "dnf5": Dnf5, "yum": Yum, "zypper": Zypper}


def would_remove(argv: t.Sequence[str], names: t.Sequence[str]) -> ShareError:
    return ShareError(
        f"{shown(argv)} would remove {', '.join(sorted(names))}; "
        "remove them first if they may go, or name them in replaces"
    )


def parse_list(text: str) -> dict[str, set[str]]:
    """Versions by name, of ``dnf list`` and ``yum list``, which break long lines after any column."""
    found: dict[str, set[str]] = {}
    words = re.sub(r"\n[ \t]+", " ", text).splitlines()
    for line in words:
        fields = line.split()
        name, dot, _arch = fields[0].rpartition(".") if fields else ("", "", "")
        if len(fields) >= 3 and dot:
            found.setdefault(name, set()).add(str(Version.of(fields[1])))
    return found


def parse_removed(text: str) -> list[str]:
    """The packages below every ``Removing…:`` of dnf's and yum's summary."""
    names = []
    inside = False
    for line in text.splitlines():
        heading = re.match(r"(\w[^:]*):\s*$", line)
        if heading:
            inside = heading.group(1).startswith(("Removing", "Erasing"))
        elif not line.strip() or line.startswith("="):
            inside = False
        elif inside and re.match(r" \S", line):
            names.append(line.split()[0])
    return names


def parse_xml_removed(text: str) -> list[str]:
    """The packages that zypper's summary removes."""
    found = re.search(r"<to-remove>(.*?)</to-remove>", text, re.DOTALL)
    return re.findall(r'<solvable type="package" name="([^"]+)"', found.group(1)) if found else []
