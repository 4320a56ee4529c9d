# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command lines of dnf 4, dnf 5 and zypper behind one interface, and RPM files in a directory.

Command lines only: on EL 8 the Python bindings exist for an interpreter that Ansible no longer supports.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t
from abc import ABC, abstractmethod

from .._core.errors import ShareError
from .._host.system import Done
from .apply import LONG, QUIET, Commands, last_line, would_remove
from .options import Package, Repository
from .paths import Manager
from .rpm import repository_id
from .rpm_locks import Version, by_version, matches

QUERY = (
    "F\\t%{NAME}\\t%|EPOCH?{%{EPOCH}}:{0}|:%{VERSION}-%{RELEASE}\\t%{ARCH}\\n"
    "[P\\t%{PROVIDENAME}\\t%{PROVIDEVERSION}\\n][L\\t%{FILENAMES}\\t\\n]"
)
ROUNDS = 50


class File(t.NamedTuple):
    """One file: its package, and what that provides, version by name."""

    path: str
    name: str
    version: str
    provides: dict[str, str]


def read(commands: Commands, folder: str) -> list[File]:
    """Return the files of a directory that are for this machine's architecture.

    :raises ShareError: there are none, or one can't be read.
    """
    paths = [f"{folder}/{name}" for name in commands.system.names(folder) if name.endswith(".rpm")]
    if not paths:
        raise ShareError(f"node_dir: {folder} contains no .rpm file")
    argv = ["rpm", "-qp", "--nosignature", "--qf", QUERY, *paths]
    done = commands.run(argv)
    if done.rc != 0:
        raise commands.failure(["rpm", "-qp", f"{folder}/*.rpm"], done)
    machine = commands.system.run(["uname", "-m"]).out.strip()
    return [file for arch, file in parse(done.out, paths) if arch in ("noarch", machine)]


def parse(text: str, paths: t.Sequence[str]) -> t.Iterator[tuple[str, File]]:
    """Yield architecture and file of each row of rpm's answer, in the order of ``paths``."""
    number = -1
    current: tuple[str, File] | None = None
    for line in text.splitlines():
        kind, _tab, rest = line.partition("\t")
        fields = rest.split("\t")
        if kind == "F":
            if current:
                yield current
            number += 1
            current = (fields[2], File(paths[number], fields[0], str(Version.of(fields[1])), {}))
        elif current and kind in ("P", "L"):
            current[1].provides[fields[0]] = fields[1] if kind == "P" else ""
    if current:
        yield current


def best(files: t.Iterable[File], package: Package) -> File | None:
    """Return the newest file of a package that satisfies its version."""
    fitting = [file for file in files if file.name == package.name and matches(package.version, file.version)]
    return max(fitting, key=lambda file: by_version(file.version)) if fitting else None


def with_needs(commands: Commands, chosen: t.Sequence[File], files: t.Sequence[File]) -> tuple[list[File], bool]:
    """Return the chosen files and those that they need beside what is installed, by ``rpm --test``.

    :returns: the files; and whether they need nothing else.
    """
    taken = {file.name: file for file in chosen}
    names = {file.name for file in files}
    for _round in range(ROUNDS):
        argv = ["rpm", "-U", "--test", "--oldpackage", "--replacepkgs", "--nosignature"]
        done = commands.run([*argv, *(file.path for file in taken.values())])
        known = len(taken)
        # Needs that are package names come first: such a package may also satisfy others.
        for need in sorted(missing(done.err + done.out), key=lambda need: need.name not in names):
            if not any(need.served_by(file) for file in taken.values()):
                providers = [file for file in files if need.served_by(file) and file.name not in taken]
                if providers:
                    file = max(providers, key=lambda provider: by_version(provider.version))
                    taken[file.name] = file
        if len(taken) == known:
            break
    return list(taken.values()), done.rc == 0


class Need(t.NamedTuple):
    """A missing capability (``name``, ``version``), or an installed package (``along``) that has to change as well."""

    name: str
    version: str
    along: str = ""

    def served_by(self, file: File) -> bool:
        if self.along:
            return file.name == self.along
        # In a condition such as (a or b) every word may be a name.
        words = re.findall(r"[^\s()]+", self.name) if self.name.startswith("(") else [self.name]
        provided = [file.provides[word] for word in words if word in file.provides]
        return any(not self.version or _same(version, self.version) for version in provided)


def missing(text: str) -> list[Need]:
    """Parse what ``rpm --test`` misses."""
    needs = []
    for line in text.splitlines():
        parts = re.match(r"\s+(.+) is needed by (\(installed\) )?(\S+)", line)
        if parts:
            # An installed package that needs the replaced one.
            along = re.sub(r"-[^-]+-[^-]+$", "", parts.group(3)) if parts.group(2) else ""
            name, _blank, version = parts.group(1).partition(" = ")
            needs.append(Need(name if name.startswith("(") else name.split(" ")[0], version, along))
    return needs


def _same(provided: str, wanted: str) -> bool:
    have, want = Version.of(provided), Version.of(wanted)
    return (have.epoch, have.version) == (want.epoch, want.version) and want.release in ("", have.release)


@dataclasses.dataclass(frozen=True)
class Item:
    """A package to install: a file on the node, or a version from a repository (empty: the best one).

    :param closed: the file and those beside it need nothing else.
    """

    name: str
    version: str = ""
    path: str = ""
    closed: bool = False


def reason(done: Done) -> str:
    """Return the package manager's reason of a failure, in one line."""
    # zypper --xmlout puts its messages into tags.
    text = re.sub(r"<[^>\n]*>", "", f"{done.err}\n{done.out}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if re.match(r"(Error|error|Problem|Fatal)( \d+)?:", line):
            # dnf prints the problem below "Error:", and its cause below the problem.
            after = [
                cause for cause in lines[number + 1 : number + 4] if re.match(r"(Problem|- |not installable)", cause)
            ]
            words = [line] if line.rstrip(":") != "Error" else []
            return "; ".join([*words, *(re.sub(r"^- ", "", cause) for cause in after[:2])]) or line
    known = [line for line in lines if re.search(r"not found|No provider|[Cc]an't|[Cc]annot|failed|locked", line)]
    return known[0] if known else last_line(done)


class RpmManager(ABC):
    """One package manager that works with rpm.

    :param inside: the machine has repositories of an archive, and may reach no other.
    """

    def __init__(self, manager: Manager, commands: Commands, inside: bool = False) -> None:
        self.manager = manager
        self.commands = commands
        self.inside = inside

    @abstractmethod
    def refresh(self, repository: Repository) -> None:
        """Download the repository's metadata.

        :raises ShareError: the repository doesn't work.
        """

    @abstractmethod
    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        """Return the versions of packages that repositories have, by name."""

    @abstractmethod
    def install(self, items: t.Sequence[Item], may_go: t.Callable[[str], bool]) -> None:
        """Install in one transaction, also older versions.

        :param may_go: whether an installed package may be removed for it.
        :raises ShareError: it failed, or would remove a package that may not be removed.
        """

    @abstractmethod
    def removed_with(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        """Return what would be removed with these packages; with ``dependencies`` also what only they needed."""

    @abstractmethod
    def remove(self, names: t.Sequence[str], dependencies: bool) -> None: ...

    @abstractmethod
    def automatic(self, names: t.Sequence[str]) -> set[str]:
        """Return those of the packages that were installed as a dependency."""

    @abstractmethod
    def mark(self, names: t.Sequence[str], automatic: bool) -> None:
        """Mark packages as installed as a dependency, or by the user."""

    def unmarked_dependencies(self, names: t.Sequence[str]) -> list[str]:
        """Return those of dependencies that the package manager no longer has marked as such."""
        return []

    def enable_stream(self, stream: str) -> None:
        raise ShareError(f"streams: {self.manager.name} has no module streams")

    def reset_stream(self, module: str) -> None:
        raise ShareError(f"streams: {self.manager.name} has no module streams")


class Dnf(RpmManager):
    """dnf 4, and what dnf 5 has in common with it."""

    COMMAND: t.ClassVar[tuple[str, ...]] = (*QUIET, "dnf", "-y")
    NO_WEAK = "--setopt=install_weak_deps=False"
    MARKS: t.ClassVar[dict[bool, str]] = {True: "remove", False: "install"}
    REASON = "%{name} %{reason}"

    @property
    def command(self) -> tuple[str, ...]:
        # dnf does nothing at all while a repository can't be reached whose configuration doesn't say so itself.
        return (*self.COMMAND, "--setopt=*.skip_if_unavailable=1") if self.inside else self.COMMAND

    def refresh(self, repository: Repository) -> None:
        repo_id = repository_id(repository)
        strict = f"--setopt={repo_id}.skip_if_unavailable=0"
        self.commands.must(
            [*self.command, "-q", "--refresh", "--disablerepo=*", f"--enablerepo={repo_id}", strict, "makecache"]
        )

    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        argv = [*self.command, "-q", "list", "--showduplicates", *names]
        done = self.commands.run(argv)
        if done.rc != 0 and not re.search(r"No matching", done.err + done.out, re.IGNORECASE):
            raise self.commands.failure(argv, done)
        return parse_list(done.out)

    def install(self, items: t.Sequence[Item], may_go: t.Callable[[str], bool]) -> None:
        command, install = [*self.command, self.NO_WEAK], ["install", *(self._spec(item) for item in items)]
        argv = [*command, *install]
        done = self.commands.run(argv, LONG)
        if done.rc == 0:
            return
        # dnf removes nothing without --allowerasing; a dry run shows first what it would remove.
        erasing = [*command, "--allowerasing", *install]
        going = parse_removed(self.commands.run([*erasing, "--assumeno"], LONG).out)
        if not going or not all(may_go(name) for name in going):
            foreign = [name for name in going if not may_go(name)]
            raise would_remove(argv, foreign) if going else self.commands.failure(argv, done)
        self.commands.must(erasing, LONG)

    @staticmethod
    def _spec(item: Item) -> str:
        if item.path:
            return item.path
        return f"{item.name}-{Version.of(item.version).full}" if item.version else item.name

    def _removal(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        return [*self.command, f"--setopt=clean_requirements_on_remove={int(dependencies)}", "remove", *names]

    def removed_with(self, names: t.Sequence[str], dependencies: bool) -> list[str]:
        argv = [*self._removal(names, dependencies), "--assumeno"]
        done = self.commands.run(argv, LONG)
        going = parse_removed(done.out)
        if not going:
            raise self.commands.failure(argv, done)
        return going

    def remove(self, names: t.Sequence[str], dependencies: bool) -> None:
        self.commands.must(self._removal(names, dependencies), LONG)

    def automatic(self, names: t.Sequence[str]) -> set[str]:
        argv = [*self.command, "-q", "repoquery", "--installed", "--qf", self.REASON, *names]
        done = self.commands.must(argv)
        rows = [line.split() for line in done.out.splitlines()]
        return {row[0] for row in rows if len(row) >= 2 and row[1].lower() in ("dependency", "weak-dependency")}

    def mark(self, names: t.Sequence[str], automatic: bool) -> None:
        if names:
            self.commands.must([*self.command, "-q", "mark", self.MARKS[automatic], *names])

    def enable_stream(self, stream: str) -> None:
        self.commands.must([*self.command, "-q", "module", "enable", stream])

    def reset_stream(self, module: str) -> None:
        self.commands.must([*self.command, "-q", "module", "reset", module])


class Dnf5(Dnf):
    """dnf 5: other names of marks, and a query format without a line end of its own."""

    COMMAND: t.ClassVar[tuple[str, ...]] = (*QUIET, "dnf5", "-y")
    MARKS: t.ClassVar[dict[bool, str]] = {True: "dependency", False: "user"}
    REASON = "%{name} %{reason}\n"

    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        form = "%{name}\t%{epoch}:%{version}-%{release}\n"
        done = self.commands.must([*self.command, "-q", "repoquery", "--available", "--qf", form, *names])
        versions: dict[str, set[str]] = {}
        for line in done.out.splitlines():
            name, tab, version = line.partition("\t")
            if tab:
                versions.setdefault(name, set()).add(str(Version.of(version)))
        return versions


class Zypper(RpmManager):
    """zypper, by its XML output."""

    COMMAND: t.ClassVar[tuple[str, ...]] = (*QUIET, "zypper", "--non-interactive")
    # Success with a notice: a reboot or restart is advised, a repository was skipped, a script failed.
    FINE: t.ClassVar[tuple[int, ...]] = (0, 100, 101, 102, 103, 106, 107)
    NOTHING_FOUND = 104
    AUTOMATIC = "/var/lib/zypp/AutoInstalled"

    def refresh(self, repository: Repository) -> None:
        self.commands.must([*self.COMMAND, "refresh", "--force", repository_id(repository)])

    def available(self, names: t.Sequence[str]) -> dict[str, set[str]]:
        argv = [*self.COMMAND, "--xmlout", "--no-refresh", "search", "--details", "--match-exact", "-t", "package"]
        done = self.commands.must([*argv, *names], fine=(*self.FINE, self.NOTHING_FOUND))
        versions: dict[str, set[str]] = {}
        for attributes in re.findall(r"<solvable ([^>]*)/?>", done.out):
            fields = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
            if fields.get("kind") == "package" and "edition" in fields:
                versions.setdefault(fields["name"], set()).add(str(Version.of(fields["edition"])))
        return versions

    def install(self, items: t.Sequence[Item], may_go: t.Callable[[str], bool]) -> None:
        # Dependencies follow a package to an older version only with --force-resolution, which also removes what
        # conflicts: a dry run shows first what it would remove.
        options = ["--auto-agree-with-licenses", "--no-recommends", "--oldpackage", "--force-resolution"]
        command = list(self.COMMAND)
        if items and all(item.path and item.closed for item in items):
            # Files of the user are installed unchecked, as dnf does; nothing else is part of this transaction.
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

    def mark(self, names: t.Sequence[str], automatic: bool) -> None:
        lines = [line for line in self._listed() if line not in names] + (list(names) if automatic else [])
        if names:
            self.commands.system.write(self.AUTOMATIC, "\n".join(lines) + "\n")

    def unmarked_dependencies(self, names: t.Sequence[str]) -> list[str]:
        # libzypp removes all locked packages from its list whenever anything is installed.
        listed = self._listed()
        return [name for name in names if name not in listed]


RPM_MANAGERS: dict[str, type[RpmManager]] = {"dnf": Dnf, "dnf5": Dnf5, "zypper": Zypper}


def parse_list(text: str) -> dict[str, set[str]]:
    """Return the versions by name of ``dnf list``, which breaks long lines after any column."""
    versions: dict[str, set[str]] = {}
    words = re.sub(r"\n[ \t]+", " ", text).splitlines()
    for line in words:
        fields = line.split()
        name, dot, _arch = fields[0].rpartition(".") if fields else ("", "", "")
        if len(fields) >= 3 and dot:
            versions.setdefault(name, set()).add(str(Version.of(fields[1])))
    return versions


def parse_removed(text: str) -> list[str]:
    """Return the packages below every ``Removing…:`` of dnf's summary."""
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
    """Return the packages that zypper would remove, by its summary."""
    match = re.search(r"<to-remove>(.*?)</to-remove>", text, re.DOTALL)
    return re.findall(r'<solvable type="package" name="([^"]+)"', match.group(1)) if match else []
