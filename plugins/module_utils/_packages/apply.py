# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Carry out the plan of a package set: what is the same with every package manager."""

from __future__ import annotations

import re
import time
import typing as t
from abc import ABC, abstractmethod

from .._core.errors import ShareError
from .._core.plan import Plan
from .._host.system import Done, System
from .options import Fetch, PackageSet, Repository, fetch_key, key_of, rpm_names
from .plan import (
    Planner,
    PutKey,
    PutRepository,
    RemoveRepository,
    created,
    directories_to_record,
    imported,
    remove_directories,
    steps_of,
    with_record,
    without_record,
    written,
)
from .steps import FinishInterrupted, RemoveFile
from .types import PackageFacts

LOCKED = re.compile(
    r"Could not get lock|Unable to lock|Unable to acquire the dpkg|locked by another process"
    r"|System management is locked|transaction lock|lock is held by|Failed to obtain (?:the )?.*lock",
    re.IGNORECASE,
)
# apt itself waits for one of its locks; the time of its tries counts, too.
LOCK_SECONDS, LOCK_PAUSE = 300.0, 5.0
LONG, SHORT = 3600.0, 600.0
# needrestart must not restart services of a node that runs GPU pods, nor reload systemd.
QUIET = ("env", "NEEDRESTART_SUSPEND=1", "NEEDRESTART_MODE=l")

# Options that a person who repeats the command doesn't need.
_HIDDEN = re.compile(
    r"env|-y|-q|-o|--non-interactive|--xmlout|--auto-agree-with-licenses"
    r"|[A-Z_]+=.*|--setopt=.*|--force-conf.*|--no-remove|--with-source.*"
)

Sleep = t.Callable[[float], None]


class Commands:
    """Runs the commands of one package manager.

    :param reason: returns the tool's own reason of a failure, in one line.
    :param sleep: injected by tests, as ``now`` is.
    """

    def __init__(
        self,
        system: System,
        reason: t.Callable[[Done], str],
        sleep: Sleep = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self.system = system
        self._reason = reason
        self._sleep = sleep
        self._now = now

    def run(self, argv: t.Sequence[str], timeout: float = SHORT) -> Done:
        """Run a command, and again while another package manager holds the lock.

        :param timeout: seconds that one try may take.
        """
        waited = 0.0
        while True:
            began = self._now()
            done = self.system.run(argv, timeout=timeout)
            waited += self._now() - began + LOCK_PAUSE
            if done.rc == 0 or waited > LOCK_SECONDS or not LOCKED.search(done.err + done.out):
                return done
            self._sleep(LOCK_PAUSE)

    def must(self, argv: t.Sequence[str], timeout: float = SHORT, fine: t.Container[int] = (0,)) -> Done:
        """Run a command that has to succeed.

        :param fine: exit statuses that mean success.
        :raises ShareError: it failed.
        """
        return self.check(argv, self.run(argv, timeout), fine)

    def check(self, argv: t.Sequence[str], done: Done, fine: t.Container[int] = (0,)) -> Done:
        """Return a command's result.

        :raises ShareError: the command failed.
        """
        if done.rc not in fine:
            raise self.failure(argv, done)
        return done

    def failure(self, argv: t.Sequence[str], done: Done) -> ShareError:
        return ShareError(
            f"{shown(argv)} failed: {self._reason(done)}",
            rc=done.rc,
            stdout=done.out[-8000:],
            stderr=done.err[-8000:],
        )


def shown(argv: t.Sequence[str]) -> str:
    """Return the command as a person would type it."""
    return " ".join(word for before, word in zip(("", *argv), argv) if before != "-o" and not _HIDDEN.fullmatch(word))


def would_remove(argv: t.Sequence[str], names: t.Iterable[str]) -> ShareError:
    return ShareError(
        f"{shown(argv)} would remove {', '.join(sorted(names))}; remove them first, or add them to replaces"
    )


def last_line(done: Done) -> str:
    """Return the last line that a command printed."""
    return ((done.err or done.out).strip().splitlines() or [f"exit status {done.rc}"])[-1].strip()


# Files as they were before, by path; None where there was none.
Before = dict[str, t.Optional[str]]
AnyPlanner = t.TypeVar("AnyPlanner", bound=Planner)


class Applier(ABC, t.Generic[AnyPlanner]):
    """Applies the plan of one package set on the machine that the module runs on.

    :param observe: collects the node's facts again.
    """

    def __init__(
        self,
        spec: PackageSet,
        system: System,
        observe: t.Callable[[], PackageFacts],
        fetch: Fetch = fetch_key,
        sleep: Sleep = time.sleep,
    ) -> None:
        self.spec = spec
        self.system = system
        self.observe = observe
        self.fetch = fetch
        self.commands = Commands(system, self.reason, sleep)

    # ------------------------------------------------------------------ what a package manager has of its own

    @staticmethod
    @abstractmethod
    def reason(done: Done) -> str:
        """Return the tool's own reason of a failure, in one line."""

    @abstractmethod
    def planner(self, facts: PackageFacts) -> AnyPlanner: ...

    @abstractmethod
    def finish_interrupted(self, planner: AnyPlanner) -> None:
        """Complete what an interrupted run of the package manager left."""

    @abstractmethod
    def make_present(self, planner: AnyPlanner, plan: Plan, keys: t.Mapping[str, str]) -> None:
        """Apply the plan of a set that is wanted.

        :param keys: the keys of the plan's repositories, by path.
        """

    @abstractmethod
    def make_absent(self, planner: AnyPlanner, plan: Plan) -> None: ...

    @abstractmethod
    def refresh_repository(self, planner: AnyPlanner, repository: Repository, before: Before) -> None:
        """Download a repository's metadata.

        :param before: gets the old content of files that have to change for it.
        :raises ShareError: the repository doesn't work.
        """

    def keys_to_record(self, planner: AnyPlanner, text: str, key: str) -> list[str]:
        """Return the keys that this collection has imported or will import into a database of its own.

        :param text: the repository's file as it is.
        :param key: the repository's key.
        """
        return []

    def remove_keys(self, names: t.Iterable[str]) -> None:
        """Remove keys from that database."""
        return

    def owned(self, folder: str) -> bool:
        """Return whether a directory belongs to a package by now."""
        return False

    # ------------------------------------------------------------------ the same for all

    def apply(self, facts: PackageFacts, plan: Plan) -> None:
        """Carry out a plan.

        :raises ShareError: a step failed; repositories and holds are rolled back.
        """
        planner = self.planner(facts)
        # The network comes first: a key that can't be downloaded leaves everything as it is.
        keys = {
            planner.key_path(step.repository): key_of(step.repository, self.fetch) for step in steps_of(plan, PutKey)
        }
        if steps_of(plan, FinishInterrupted):
            self.finish_interrupted(planner)
            # What that completed needn't be done again.
            planner = self.planner(self.observe())
            plan = planner.plan()
        if self.spec.present:
            self.make_present(planner, plan, keys)
        else:
            self.make_absent(planner, plan)

    def put_repositories(self, planner: AnyPlanner, plan: Plan, keys: t.Mapping[str, str]) -> Before:
        """Write keys and repositories; returns what the files contained before."""
        steps: list[PutKey | PutRepository] = [*steps_of(plan, PutKey), *steps_of(plan, PutRepository)]
        touched = {step.repository.name: step.repository for step in steps}.values()
        # Keys come first and are restored first: a directory stays recorded until it is removed.
        paths = [*map(planner.key_path, touched), *map(planner.repository_path, touched)]
        before: Before = {path: self.system.read(path) for path in paths}
        directories = directories_to_record(self.system, planner.key_directory, planner.files.values())
        for repository in touched:
            path, key_path = planner.repository_path(repository), planner.key_path(repository)
            have, key = before[path], keys.get(key_path)
            record = self.keys_to_record(planner, have or "", key or before[key_path] or "")
            text = with_record(planner.repository_text(repository), directories, record, planner.writer(repository))
            if key is not None:
                # The new origin may be written only after its key, or a killed run would keep the old key for good.
                waiting = (
                    planner.disabled(text)
                    if have is None or before[key_path] is None
                    else with_record(without_record(have), directories, record, written(have))
                )
                if waiting != have:
                    self.system.write(path, waiting)
                self.system.write(key_path, key)
            self.system.write(path, text)
        return before

    def refresh(self, planner: AnyPlanner, before: Before) -> None:
        """Download the metadata of our repositories; where one doesn't work, restore the files.

        :raises ShareError: a repository doesn't work. It would make every later run of the package manager fail.
        """
        try:
            for repository in self.spec.repositories:
                self.refresh_repository(planner, repository, before)
        except ShareError:
            for path, text in before.items():
                written = self.system.read(path) or ""
                self.remove_keys(name for name in imported(written) if name not in imported(text or ""))
                self.remove_directories(set(created(written)) - set(created(text or "")))
                if text is None:
                    self.system.remove(path)
                else:
                    self.system.write(path, text)
            raise

    def remove_files(self, planner: AnyPlanner, plan: Plan) -> None:
        """Remove files, keys and repositories."""
        repositories = steps_of(plan, RemoveRepository)
        for repository in repositories:
            text = planner.disabled(repository.text)
            if text != repository.text:
                self.system.write(repository.path, text)
        going = self._hand_over(planner, repositories)
        for step in steps_of(plan, RemoveFile):
            self.system.remove(step.path)
        for repository in repositories:
            self.remove_keys(name for name in imported(repository.text) if name in going)
            self.remove_directories(created(repository.text))
            self.system.remove(repository.path)

    def without_removed(self, planner: AnyPlanner, plan: Plan) -> AnyPlanner:
        """Return the planner of what is left after repositories have gone, with their keys and directories."""
        return self.planner(self.observe()) if steps_of(plan, RemoveRepository) else planner

    def _hand_over(self, planner: AnyPlanner, repositories: t.Sequence[RemoveRepository]) -> set[str]:
        """Have repositories that stay record the keys that they share with those that go; return the other keys."""
        going = {name for repository in repositories for name in imported(repository.text)}
        gone = {repository.path for repository in repositories}
        for path, text in planner.files.items():
            key = (self.system.read(planner.key_beside(path)) or "") if going and path not in gone else ""
            shared = [name for name in rpm_names(key) if name in going]
            if shared:
                keys = [*imported(text), *shared]
                self.system.write(path, with_record(without_record(text), created(text), keys, written(text)))
                going -= set(shared)
        return going

    def remove_directories(self, folders: t.Iterable[str]) -> None:
        remove_directories(self.system, [folder for folder in folders if not self.owned(folder)])
