# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Carry out a plan with apt and dpkg."""

from __future__ import annotations

import re
import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _apt as apt
from ansible_collections.kubegpu.share.plugins.module_utils._apt_observe import observe
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._key_folders import (
    MADE_COMMENT,
    made,
    remembering,
    to_make,
    unmake,
)
from ansible_collections.kubegpu.share.plugins.module_utils._package_names import matches_any
from ansible_collections.kubegpu.share.plugins.module_utils._repository_key import Fetch, fetch_key, key_of
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done, System

Json = t.Dict[str, t.Any]
Before = t.Dict[str, t.Optional[str]]

# Nothing of ours restarts services on a node that runs GPU pods, or reloads systemd to ask whether it should.
QUIET = ("env", "NEEDRESTART_SUSPEND=1", "NEEDRESTART_MODE=l")
APT_GET = (*QUIET, "apt-get", "-y", "-o", "DPkg::Lock::Timeout=300")
# What a user changed in a package's configuration stays.
KEEP_CONFIGURATION = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")
# Our dependencies may come from lists that this machine has never fetched, or fetched long ago.
STALE_LISTS = re.compile(
    r"Unable to locate package|unmet dependencies|has no installation candidate|was not found|Failed to fetch"
)
# The key at its address may have been replaced since it was fetched.
OTHER_KEY = re.compile(r"NO_PUBKEY|EXPKEYSIG|KEYEXPIRED|REVKEYSIG|is not signed|Missing key")
LOCKED = re.compile(r"Could not get lock|Unable to lock|Unable to acquire the dpkg|locked by another process")
HIDDEN = re.compile(r"--force|--no-remove|--with-source|[A-Z_]+=")
REMOVAL_REFUSED = re.compile(r"remove is disabled")
SIMULATED = re.compile(r"^(?:Remv|Purg) ([^\s:]+)", re.MULTILINE)
LOCK_TRIES, LOCK_PAUSE = 60, 5.0


class AptConcern:
    """One package set of the machine that the module runs on."""

    def __init__(
        self,
        wanted: apt.PackageSet,
        system: System,
        native: str,
        fetch: Fetch = fetch_key,
        sleep: t.Callable[[float], None] = time.sleep,
    ) -> None:
        self._wanted = wanted
        self._system = system
        self._native = native
        self._fetch = fetch
        self._sleep = sleep

    def observe(self) -> Json:
        return observe(self._system, self._native)

    def plan(self, seen: Json) -> Plan:
        return apt.plan(self._wanted, seen)

    def apply(self, seen: Json, plan: Plan) -> None:
        steps = [change.step for change in plan.changes]
        # The network is asked first: a key that can't be had leaves everything as it is.
        keys = {
            step.repository.key_path: key_of(step.repository, self._fetch)
            for step in steps
            if isinstance(step, apt.PutKey)
        }
        if any(isinstance(step, apt.FinishDpkg) for step in steps):
            self._run([*QUIET, "dpkg", "--force-confdef", "--force-confold", "--configure", "-a"], 3600)
            # What that brought to its end needn't be done again.
            steps = [change.step for change in self.plan(self.observe()).changes]
        self._purge([step for step in steps if isinstance(step, apt.Purge)])
        self._unhold([step.name for step in steps if isinstance(step, apt.Release)])
        self._remove_files(steps)
        before = self._put_repositories(steps, keys, seen)
        for step in steps:
            if isinstance(step, apt.PutFile):
                self._system.write(step.path, step.text)
        packages = [step for step in steps if isinstance(step, apt.SetPackage)]
        install = [step for step in packages if step.install]
        if install or before:
            self._refresh(before)
        self._install(install)
        self._hold([step.package.name for step in packages])

    def _remove_files(self, steps: t.Sequence[t.Any]) -> None:
        for step in steps:
            if isinstance(step, apt.RemoveSources):
                self._system.write(step.path, apt.switched_off(step.text))
        for step in steps:
            if isinstance(step, apt.RemoveSources):
                self._unmake(step.made)
            if isinstance(step, (apt.RemoveFile, apt.RemoveSources)):
                self._system.remove(step.path)

    def _unmake(self, folders: t.Iterable[str]) -> None:
        """Remove folders that were made for keys, unless a package has them by now; Debian 12's apt brings its own."""
        unmake(self._system, [one for one in folders if self._system.run(["dpkg", "-S", one]).rc == 1])

    def _put_repositories(self, steps: t.Sequence[t.Any], keys: t.Mapping[str, str], seen: Json) -> Before:
        """Write keys and lists; returns what the files held before."""
        touched = {
            step.repository.name: step.repository for step in steps if isinstance(step, (apt.PutKey, apt.PutSources))
        }
        # Keys first, and so they are put back: what is no more is remembered until its folder is gone.
        paths = [one.key_path for one in touched.values()] + [one.sources_path for one in touched.values()]
        before: Before = {path: self._system.read(path) for path in paths}
        folders = to_make(self._system, apt.KEYRINGS, seen["apt"]["files"].values())
        for repository in touched.values():
            path, key_path = repository.sources_path, repository.key_path
            new = key_path in keys and before[key_path] is None
            text = remembering(repository.sources(), {MADE_COMMENT: folders})
            if new:
                self._system.write(path, apt.switched_off(text))
            if key_path in keys:
                self._system.write(key_path, keys[key_path])
            self._system.write(path, text)
        return before

    def _refresh(self, before: Before) -> None:
        """Fetch the lists of our repositories; if one doesn't work, put back what stood there."""
        try:
            for repository in self._wanted.repositories:
                self._update(repository, before)
        except ShareError:
            # A repository that fails stops every later apt-get update of this machine.
            for path, text in before.items():
                self._unmake(set(made(self._system.read(path) or "")) - set(made(text or "")))
                if text is None:
                    self._system.remove(path)
                else:
                    self._system.write(path, text)
            raise

    def _update(self, repository: apt.Repository, before: Before) -> None:
        only = ("-o", f"Dir::Etc::sourcelist={repository.sources_path}", "-o", "Dir::Etc::sourceparts=-")
        strict = ("-o", "APT::Get::List-Cleanup=0", "-o", "APT::Update::Error-Mode=any")
        argv = [*APT_GET, *only, *strict, "update"]
        done = self._unlocked(argv, 600)
        if done.rc != 0 and repository.key_url and OTHER_KEY.search(done.err) and repository.key_path not in before:
            before[repository.key_path] = self._system.read(repository.key_path)
            self._system.write(repository.key_path, key_of(repository, self._fetch))
            done = self._unlocked(argv, 600)
        self._refuse(argv, done)

    def _install(self, steps: t.Sequence[apt.SetPackage]) -> None:
        if not steps:
            return
        # Our own holds are lifted, and no other: what the user holds isn't to be changed on the way.
        held = [step.package.name for step in steps if step.held]
        self._unhold(held)
        argv = [*APT_GET, *KEEP_CONFIGURATION, "install", "--no-install-recommends", "--allow-downgrades"]
        argv += [*self._files(), *(str(step.package) for step in steps)]
        try:
            self._install_and_remove(argv, "--no-remove")
        except ShareError:
            if held:
                self._run(["apt-mark", "hold", *held], 60)
            raise

    def _files(self) -> list[str]:
        """The package files of a folder, as one more place that apt chooses from."""
        folder = self._wanted.node_dir
        if not folder:
            return []
        names = [name for name in self._system.names(folder) if name.endswith(".deb")]
        if not names:
            raise ShareError(f"node_dir: {folder} holds no .deb file")
        return [f"--with-source={folder}/{name}" for name in names]

    def _install_and_remove(self, argv: t.Sequence[str], guard: str) -> None:
        """Install; what would have to go for it goes only where ``replaces`` covers it."""
        guarded = [*argv, guard]
        done = self._unlocked(guarded, 3600)
        if done.rc != 0 and STALE_LISTS.search(done.out + done.err):
            refreshed = self._unlocked([*APT_GET, "update"], 900)
            # With packages at hand the lists of a node that reaches no repository needn't be had.
            if refreshed.rc != 0 and not self._wanted.node_dir:
                self._refuse([*APT_GET, "update"], refreshed)
            done = self._unlocked(guarded, 3600)
        going = parse_removed(done.out) if done.rc != 0 and REMOVAL_REFUSED.search(done.err) else []
        foreign = [name for name in going if not matches_any(name, self._wanted.replaces)]
        if foreign:
            raise ShareError(
                f"{shown(argv)} would remove {', '.join(foreign)}; "
                "remove them first if they may go, or name them in replaces"
            )
        if going:
            self._run(argv, 3600)
        else:
            self._refuse(guarded, done)

    def _hold(self, names: t.Sequence[str]) -> None:
        if names:
            self._run(["apt-mark", "hold" if self._wanted.hold else "unhold", *names], 60)

    def _unhold(self, names: t.Sequence[str]) -> None:
        if names:
            self._run(["apt-mark", "unhold", *names], 60)

    # ----------------------------------------------------------------------- removal

    def _purge(self, steps: t.Sequence[apt.Purge]) -> None:
        if not steps:
            return
        held = [step.name for step in steps if step.held]
        self._unhold(held)
        try:
            self._remove([step.name for step in steps])
        except ShareError:
            if held:
                self._run(["apt-mark", "hold", *held], 60)
            raise

    def _remove(self, names: t.Sequence[str]) -> None:
        clean = self._wanted.erase_dependencies
        automatic = self._automatic()
        self._refuse_dependents(names, automatic if clean else ())
        options = ["--auto-remove"] if clean else []
        # What nobody needed before we came, and what is to stay, counts as the user's own for this one run.
        spared = [name for name in self._spared(automatic) if name not in names] if clean else []
        if spared:
            self._run(["apt-mark", "manual", *spared], 60)
        try:
            going = self._going([*APT_GET, "-s", "purge", *options, *names])
            torn = [name for name in going if name not in names and matches_any(name, self._wanted.keep)]
            if torn:
                raise ShareError(f"keep: {', '.join(torn)} can't stay without {', '.join(names)}")
            self._run([*APT_GET, "purge", *options, *names], 3600)
        finally:
            if spared:
                self._run(["apt-mark", "auto", *spared], 60)

    def _automatic(self) -> list[str]:
        argv = ["apt-mark", "showauto"]
        done = self._unlocked(argv, 60)
        self._refuse(argv, done)
        return done.out.split()

    def _spared(self, automatic: t.Iterable[str]) -> list[str]:
        unneeded = set(self._going([*APT_GET, "-s", "autoremove"]))
        return [name for name in automatic if name in unneeded or matches_any(name, self._wanted.keep)]

    def _refuse_dependents(self, names: t.Sequence[str], automatic: t.Container[str]) -> None:
        """Refuse to tear what others installed.

        :param automatic: packages that may go with the set: they came as somebody's dependency.
        :raises ShareError: the sentence names it.
        """
        going = self._going([*APT_GET, "-s", "purge", *names])
        others = [name for name in going if name not in names and name not in automatic]
        others = sorted(name for name in others if not matches_any(name, self._wanted.replaces))
        if others:
            raise ShareError(
                f"packages: {', '.join(others)} need {', '.join(names)}; "
                f"remove them first: apt-get purge {' '.join(others)}"
            )

    def _going(self, argv: t.Sequence[str]) -> list[str]:
        """What a simulated command would remove."""
        done = self._unlocked(argv, 600)
        self._refuse(argv, done)
        return SIMULATED.findall(done.out)

    def _unlocked(self, argv: t.Sequence[str], timeout: float) -> Done:
        """Run a command; while another package manager is at work, wait for it."""
        for _try in range(LOCK_TRIES):
            done = self._system.run(argv, timeout=timeout)
            if done.rc == 0 or not LOCKED.search(done.err):
                break
            self._sleep(LOCK_PAUSE)
        return done

    def _run(self, argv: t.Sequence[str], timeout: float) -> None:
        self._refuse(argv, self._unlocked(argv, timeout))

    @staticmethod
    def _refuse(argv: t.Sequence[str], done: Done) -> None:
        if done.rc == 0:
            return
        raise ShareError(
            f"{shown(argv)} failed: {own_words(done)}",
            rc=done.rc,
            stdout=done.out[-8000:],
            stderr=done.err[-8000:],
        )


def shown(argv: t.Sequence[str]) -> str:
    """The command as a person would type it."""
    words = []
    for before, word in zip(("", *argv), argv):
        if word not in ("-o", "-y", "env") and before != "-o" and not HIDDEN.match(word):
            words.append(word)
    return " ".join(words)


def parse_removed(text: str) -> list[str]:
    """The packages that apt says it would remove."""
    found = re.search(r"^The following packages will be REMOVED:\n((?: .*\n)+)", text, re.MULTILINE)
    return [word.rstrip("*") for word in found.group(1).split()] if found else []


def own_words(done: Done) -> str:
    """apt's own reason, in one line."""
    errors = [line for line in done.err.splitlines() if line.startswith("E:")]
    # apt only says that dpkg failed; dpkg says why.
    dpkg = [line for line in done.err.splitlines() if line.startswith("dpkg: error")]
    lines = dpkg if dpkg and (not errors or "Sub-process" in errors[0]) else errors
    # Of dependencies that can't be met apt speaks elsewhere.
    unmet = re.search(r"^The following packages have unmet dependencies:\n +(.+)", done.out, re.MULTILINE)
    if unmet and lines and "held broken packages" in lines[0]:
        return f"{lines[0].strip()} {' '.join(unmet.group(1).split())}"
    last = (done.err or done.out).strip().splitlines()[-1:]
    return (lines[:1] or last or [f"it ended with status {done.rc}"])[0].strip().rstrip(":")
