# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The planning core of ``pinned_packages``: a package set and the node's facts make a plan. Pure.

A record is written before the thing it records exists and removed after it, so that a killed run forgets nothing.

Planners (``apt``, ``rpm``) add what their package manager has of its own.
"""

from __future__ import annotations

import dataclasses
import posixpath
import typing as t
from abc import ABC, abstractmethod

from .._core.digest import digest
from .._core.errors import BadInput
from .._core.plan import Change, Plan
from .._host.system import TEMPORARY, System
from .names import described, matches_any
from .options import Package, PackageSet, Repository, Stream
from .paths import MARK
from .steps import PutFile, RemoveFile
from .types import InstalledPackage

# Directories that were created for a key.
CREATED = "# Created: "
# Keys that were imported into rpm's database.
IMPORTED = "# Imported: "
# The set that wrote the file, and the SHA-256 of what it wrote.
WRITTEN = "# Set: "
MARKS = (CREATED, IMPORTED, WRITTEN)
# The key's origin; it is part of the wanted text, so that another origin is a change.
KEY_ORIGIN = "# Key: "


def created(text: str) -> tuple[str, ...]:
    """Return the directories that a repository's file records, the outer one first."""
    return _recorded(text, CREATED)


def imported(text: str) -> tuple[str, ...]:
    """Return the keys in rpm's database that a repository's file records."""
    return _recorded(text, IMPORTED)


def written(text: str) -> tuple[str, ...]:
    """Return the set that wrote a repository's file, and the SHA-256 of what it wrote; nothing without a record."""
    return _recorded(text, WRITTEN)


def _recorded(text: str, mark: str) -> tuple[str, ...]:
    recorded = [line[len(mark) :].split() for line in text.splitlines() if line.startswith(mark)]
    return tuple(word for words in recorded for word in words)


def with_record(
    text: str, directories: t.Iterable[str], keys: t.Iterable[str] = (), writer: t.Iterable[str] = ()
) -> str:
    """Return a repository's file with a record below the comments that it begins with.

    :param writer: as ``written`` returns it.
    """
    words = {WRITTEN: " ".join(writer), IMPORTED: " ".join(keys), CREATED: " ".join(directories)}
    record = "".join(f"{mark}{some}\n" for mark, some in words.items() if some)
    rows = text.splitlines(keepends=True)
    comments = next((count for count, row in enumerate(rows) if not row.startswith("#")), len(rows))
    return "".join((*rows[:comments], record, *rows[comments:]))


def without_record(text: str) -> str:
    """Return a repository's file without its record."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(MARKS))


def directories_to_record(system: System, folder: str, texts: t.Iterable[str]) -> list[str]:
    """Return the directories that are or will be created for a key in ``folder``, the outer one first.

    :param texts: the files of our repositories: a directory that was created for one of their keys serves all of them
        and is removed with the last one.
    """
    folders = {parent for text in texts for parent in created(text)}
    while folder != "/" and not system.exists(folder):
        folders.add(folder)
        folder = posixpath.dirname(folder)
    return sorted(folders)


def remove_directories(system: System, folders: t.Iterable[str]) -> None:
    """Remove directories that were created for keys; one that isn't empty stays."""
    for folder in sorted(folders, reverse=True):
        for name in system.names(folder):
            # The temporary file of a write that was killed.
            if name.startswith(TEMPORARY):
                system.remove(f"{folder}/{name}")
        system.run(["rmdir", folder])


WRITTEN_BY = "Written by kubegpu.share; changes made here by hand are overwritten."


@dataclasses.dataclass(frozen=True)
class PutKey:
    repository: Repository


@dataclasses.dataclass(frozen=True)
class PutRepository:
    repository: Repository


@dataclasses.dataclass(frozen=True)
class RemoveRepository:
    """``text``: what the repository's file contains now."""

    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class SetPackage:
    """Install a package, or only set its hold.

    :param install: no version that satisfies the set is installed.
    :param version: the installed version; empty where there is none.
    :param held: whether it is held now.
    """

    package: Package
    install: bool
    version: str
    held: bool


@dataclasses.dataclass(frozen=True)
class Release:
    """Remove this collection's hold on a package."""

    name: str


@dataclasses.dataclass(frozen=True)
class InstallLockPlugin:
    name: str


@dataclasses.dataclass(frozen=True)
class EnableStream:
    """``before``: the stream that is enabled now."""

    stream: Stream
    before: str


@dataclasses.dataclass(frozen=True)
class ResetStream:
    stream: Stream


Step = t.TypeVar("Step")


def steps_of(plan: Plan, kind: type[Step]) -> list[Step]:
    """Return a plan's steps of one kind, in order."""
    return [change.step for change in plan.changes if isinstance(change.step, kind)]


class Planner(ABC):
    """Plans one package set on one node.

    :param files: the files of this collection, by path, as ``apt`` or ``rpm`` of ``gpu_node`` has them.
    :param keys: SHA-256 of its keys, by path.
    """

    # Where the keys of repositories lie, and how a person removes packages.
    key_directory: t.ClassVar[str]
    key_prefix: t.ClassVar[str] = MARK
    remove_command: str

    def __init__(
        self,
        spec: PackageSet,
        packages: t.Mapping[str, InstalledPackage],
        files: t.Mapping[str, str],
        keys: t.Mapping[str, str],
    ) -> None:
        self.spec = spec
        self.packages = packages
        self.files = files
        self.keys = keys

    # ------------------------------------------------------------------ what a package manager has of its own

    @abstractmethod
    def validate(self) -> None:
        """Refuse what this package manager or this node can't serve.

        :raises BadInput: an option is invalid here, or the node's own configuration forbids it.
        """

    @abstractmethod
    def repository_path(self, repository: Repository) -> str:
        """Return the path of the repository's file: its name has the mark, the repository's name and one ending."""

    @abstractmethod
    def repository_text(self, repository: Repository) -> str:
        """Return the content of the repository's file, without record."""

    def disabled(self, text: str) -> str:
        """Return a repository's file in the form in which the package manager ignores it while its key is missing."""
        return text

    def enabled(self, text: str) -> str:
        """Return what ``disabled`` was given."""
        return text

    def file_changes(self) -> t.Iterator[Change]:
        """Yield changes of the set's further files."""
        yield from ()

    def preparations(self) -> t.Iterator[Change]:
        """Yield what has to be done before packages can be installed."""
        yield from ()

    @abstractmethod
    def interrupted(self, packages: bool) -> t.Iterator[Change]:
        """Yield the completion of an interrupted run of the package manager, where it stands in the way.

        :param packages: whether the plan changes packages.
        """

    @abstractmethod
    def package_changes(self) -> t.Iterator[Change]: ...

    @abstractmethod
    def package_removals(self) -> t.Iterator[Change]:
        """Yield removals of packages, holds and streams."""

    # ------------------------------------------------------------------ the same for all

    def key_path(self, repository: Repository) -> str:
        return self.key_beside(self.repository_path(repository))

    def writer(self, repository: Repository) -> tuple[str, ...]:
        """Return what a repository's file records of who wrote it."""
        return (self.spec.name, digest(self.repository_text(repository))) if self.spec.exclusive else ()

    def key_beside(self, path: str) -> str:
        """Return the path of the key of one of our repositories, by that of its file."""
        name = posixpath.basename(path).removeprefix(MARK).rpartition(".")[0]
        return f"{self.key_directory}/{self.key_prefix}{name}.asc"

    def _unlisted(self) -> list[str]:
        """Return the files of repositories that this set has written and that aren't listed any more."""
        if not self.spec.exclusive:
            return []
        listed = set(map(self.repository_path, self.spec.repositories))
        own = (path for path, text in self.files.items() if written(text)[:1] == (self.spec.name,))
        return sorted(path for path in own if path not in listed)

    def _is_as_written(self, path: str) -> bool:
        text = without_record(self.files[path])
        # A run that was killed leaves one that is switched off.
        return written(self.files[path])[1:] in ((digest(text),), (digest(self.enabled(text)),))

    def left(self) -> list[str]:
        """Return the files of repositories that aren't listed any more, and stay, because somebody has changed them."""
        return [path for path in self._unlisted() if not self._is_as_written(path)]

    def plan(self) -> Plan:
        """Return what has to be done.

        :raises BadInput: the node can't have this set; the message names the option or the file.
        """
        if self.spec.verified:
            return Plan()
        self.validate()
        if not self.spec.present:
            return Plan(tuple(self._absent()))
        self._refuse_conflicts()
        return Plan(tuple(self._present()))

    def new_keys(self) -> list[Repository]:
        """Return the repositories whose keys the node lacks, or has otherwise."""
        changes = [change for repository in self.spec.repositories for change in self._repository_changes(repository)]
        return [step.repository for step in steps_of(Plan(tuple(changes)), PutKey)]

    def _present(self) -> t.Iterator[Change]:
        packages = list(self.package_changes())
        # First: apt refuses a repository that two files name with different keys.
        yield from self._removals(path for path in self._unlisted() if self._is_as_written(path))
        for repository in self.spec.repositories:
            yield from self._repository_changes(repository)
        yield from self.file_changes()
        yield from self.interrupted(bool(packages))
        yield from self.preparations()
        yield from packages

    def _absent(self) -> t.Iterator[Change]:
        removals = list(self.package_removals())
        yield from self.interrupted(bool(removals))
        yield from removals
        yield from self.file_changes()
        unlisted = [path for path in self._unlisted() if self._is_as_written(path)]
        yield from self._removals([*map(self.repository_path, self.spec.repositories), *unlisted])

    def _removals(self, paths: t.Iterable[str]) -> t.Iterator[Change]:
        """Yield the removals of repositories and their keys, by the paths of their files."""
        files = list(paths)
        for path in map(self.key_beside, files):
            if path in self.keys:
                yield Change(path, f"key with SHA-256 {self.keys[path]}\n", "", RemoveFile(path))
        # The repositories' files are removed last: they record what was created for their keys.
        for path in files:
            if path in self.files:
                text = self.files[path]
                yield Change(path, without_record(text), "", RemoveRepository(path, text))

    def _refuse_conflicts(self) -> None:
        present = sorted(
            name for name in self.packages if name not in self.spec.names and matches_any(name, self.spec.conflicts)
        )
        if present:
            versions = ", ".join(f"{name} {self.packages[name]['version']}" for name in present)
            raise BadInput(
                f"conflicts: {versions} can't be installed beside these packages; "
                f"to remove them: {self.remove_command} {' '.join(present)}"
            )

    def _repository_changes(self, repository: Repository) -> t.Iterator[Change]:
        key_path, path = self.key_path(repository), self.repository_path(repository)
        have = self.keys.get(key_path)
        text, wanted = without_record(self.files.get(path, "")), self.repository_text(repository)
        sha256 = digest(repository.key_text) if repository.key_text else repository.key_sha256
        other_origin = bool(text) and f"{KEY_ORIGIN}{repository.key_origin}" not in text.splitlines()
        if have is None or (have != sha256 if sha256 else other_origin):
            before = "" if have is None else f"key with SHA-256 {have}\n"
            after = f"key {repository.key_origin}" + (f" with SHA-256 {sha256}\n" if sha256 else "\n")
            yield Change(key_path, before, after, PutKey(repository))
        if text != wanted:
            yield Change(path, text, wanted, PutRepository(repository))

    def file_change(self, path: str, text: str) -> t.Iterator[Change]:
        """Yield the change of one further file; an empty text removes it."""
        have = self.files.get(path)
        if text != (have or "") or (have is not None and not text):
            yield Change(path, have or "", text, PutFile(path, text) if text else RemoveFile(path))


def set_package(package: Package, step: SetPackage, hold: bool, latest: str) -> Change:
    """Return the change that installs a package or sets its hold.

    :param latest: the diff's words for the version of an unpinned package that isn't installed.
    """
    version = (package.version or latest) if step.install else step.version
    before = described(step.version, step.held) if step.version else ""
    return Change(f"package {package.name}", before, described(version, hold), step)
