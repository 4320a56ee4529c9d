# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Carry out the plan of a package set with apt and dpkg."""

from __future__ import annotations

import re
import typing as t

from .._core.errors import ShareError
from .._core.plan import Plan
from .._host.system import Done
from .apply import LONG, QUIET, Applier, Before, last_line, would_remove
from .apt import AptPlanner
from .options import Repository, key_of
from .plan import Release, SetPackage, steps_of
from .steps import PutFile, RemovePackage
from .types import PackageFacts

APT_GET = (*QUIET, "apt-get", "-y", "-o", "DPkg::Lock::Timeout=300")
# A package's configuration that a user changed stays.
KEEP_CONFIGURATION = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")
# Dependencies may come from lists that this machine has never downloaded, or downloaded long ago.
STALE_LISTS = re.compile(
    r"Unable to locate package|unmet dependencies|has no installation candidate|was not found|Failed to fetch"
)
# The key at its URL may have been replaced since it was downloaded.
OTHER_KEY = re.compile(r"NO_PUBKEY|EXPKEYSIG|KEYEXPIRED|REVKEYSIG|is not signed|Missing key")
REMOVAL_REFUSED = re.compile(r"remove is disabled")
SIMULATED = re.compile(r"^(?:Remv|Purg) ([^\s:]+)", re.MULTILINE)


class AptApplier(Applier[AptPlanner]):
    """Applies the plan of one package set with apt."""

    @staticmethod
    def reason(done: Done) -> str:
        return reason(done)

    def planner(self, facts: PackageFacts) -> AptPlanner:
        if facts["apt"] is None:
            raise AssertionError("the facts are of another package manager")
        return AptPlanner(self.spec, facts["apt"], facts["packages"])

    def finish_interrupted(self, planner: AptPlanner) -> None:
        argv = [*QUIET, "dpkg", "--force-confdef", "--force-confold", "--configure", "-a"]
        done = self.commands.run(argv, LONG)
        # A package that can't be configured, as with a kernel module that can't be built, can be removed nevertheless.
        if self.spec.present:
            self.commands.check(argv, done)

    def make_present(self, planner: AptPlanner, plan: Plan, keys: t.Mapping[str, str]) -> None:
        self.remove_files(planner, plan)
        planner = self.without_removed(planner, plan)
        before = self.put_repositories(planner, plan, keys)
        for step in steps_of(plan, PutFile):
            self.system.write(step.path, step.text)
        packages = steps_of(plan, SetPackage)
        install = [step for step in packages if step.install]
        if install or before:
            self.refresh(planner, before)
        if install:
            self._install(install)
        self._mark("hold" if self.spec.hold else "unhold", [step.package.name for step in packages])

    def refresh_repository(self, planner: AptPlanner, repository: Repository, before: Before) -> None:
        path, key_path = planner.repository_path(repository), planner.key_path(repository)
        only = ("-o", f"Dir::Etc::sourcelist={path}", "-o", "Dir::Etc::sourceparts=-")
        strict = ("-o", "APT::Get::List-Cleanup=0", "-o", "APT::Update::Error-Mode=any")
        argv = [*APT_GET, *only, *strict, "update"]
        done = self.commands.run(argv)
        if done.rc != 0 and repository.key_url and OTHER_KEY.search(done.err) and key_path not in before:
            before[key_path] = self.system.read(key_path)
            self.system.write(key_path, key_of(repository, self.fetch))
            done = self.commands.run(argv)
        self.commands.check(argv, done)

    def _install(self, steps: t.Sequence[SetPackage]) -> None:
        # Only our own holds are released: what the user holds must not change.
        held = [step.package.name for step in steps if step.held]
        argv = [*APT_GET, *KEEP_CONFIGURATION, "install", "--no-install-recommends", "--allow-downgrades"]
        argv += [*self._local_files(), *(str(step.package) for step in steps)]
        self._mark("unhold", held)
        try:
            self._install_and_remove(argv, "--no-remove")
        except ShareError:
            self._mark("hold", held)
            raise

    def _local_files(self) -> list[str]:
        """Return the options that offer the package files of ``node_dir`` to apt."""
        folder = self.spec.node_dir
        if not folder:
            return []
        names = [name for name in self.system.names(folder) if name.endswith(".deb")]
        if not names:
            raise ShareError(f"node_dir: {folder} contains no .deb file")
        return [f"--with-source={folder}/{name}" for name in names]

    def _install_and_remove(self, argv: t.Sequence[str], guard: str) -> None:
        """Install; a package that excludes the new ones is removed only where ``replaces`` covers it."""
        guarded = [*argv, guard]
        done = self.commands.run(guarded, LONG)
        if done.rc != 0 and STALE_LISTS.search(done.out + done.err):
            update = [*APT_GET, "update"]
            refreshed = self.commands.run(update)
            # A node that reaches no repository needs no lists where the packages are given.
            if not self.spec.node_dir:
                self.commands.check(update, refreshed)
            done = self.commands.run(guarded, LONG)
        going = parse_removed(done.out) if done.rc != 0 and REMOVAL_REFUSED.search(done.err) else []
        foreign = [name for name in going if not self.spec.replaceable(name)]
        if foreign:
            raise would_remove(argv, foreign)
        if going:
            self.commands.must(argv, LONG)
        else:
            self.commands.check(guarded, done)

    def _mark(self, mark: str, names: t.Sequence[str]) -> None:
        if names:
            self.commands.must(["apt-mark", mark, *names])

    def make_absent(self, planner: AptPlanner, plan: Plan) -> None:
        removals = steps_of(plan, RemovePackage)
        if removals:
            held = [step.name for step in removals if step.held]
            self._mark("unhold", held)
            try:
                self._purge([step.name for step in removals])
            except ShareError:
                self._mark("hold", held)
                raise
        self._mark("unhold", [step.name for step in steps_of(plan, Release)])
        self.remove_files(planner, plan)

    def owned(self, folder: str) -> bool:
        # Debian 12's apt has brought the directory of keys itself.
        return self.system.run(["dpkg", "-S", folder]).rc != 1

    def _purge(self, names: t.Sequence[str]) -> None:
        clean = self.spec.erase_dependencies
        automatic = self.commands.must(["apt-mark", "showauto"]).out.split()
        self._refuse_dependents(names, automatic if clean else ())
        options = ["--auto-remove"] if clean else []
        # What nothing needed before, and what stays, is marked as installed by the user for this one run.
        spared = []
        if clean:
            unneeded = set(self._simulate([*APT_GET, "-s", "autoremove"]))
            spared = [name for name in automatic if name not in names and (name in unneeded or self.spec.kept(name))]
        self._mark("manual", spared)
        try:
            going = self._simulate([*APT_GET, "-s", "purge", *options, *names])
            kept = [name for name in going if name not in names and self.spec.kept(name)]
            if kept:
                raise ShareError(f"keep: {', '.join(kept)} can't stay without {', '.join(names)}")
            self.commands.must([*APT_GET, "purge", *options, *names], LONG)
        finally:
            self._mark("auto", spared)

    def _refuse_dependents(self, names: t.Sequence[str], automatic: t.Container[str]) -> None:
        """Refuse to remove what others installed.

        :param automatic: packages that may be removed with the set: they were installed as dependencies.
        :raises ShareError: the message names the packages.
        """
        going = self._simulate([*APT_GET, "-s", "purge", *names])
        others = [name for name in going if name not in names and name not in automatic]
        others = sorted(name for name in others if not self.spec.replaceable(name))
        if others:
            raise ShareError(
                f"packages: {', '.join(others)} need {', '.join(names)}; "
                f"remove them first: {AptPlanner.remove_command} {' '.join(others)}"
            )

    def _simulate(self, argv: t.Sequence[str]) -> list[str]:
        """Return what a command would remove."""
        return SIMULATED.findall(self.commands.must(argv).out)


def parse_removed(text: str) -> list[str]:
    """Return the packages that apt would remove, by its own summary."""
    match = re.search(r"^The following packages will be REMOVED:\n((?: .*\n)+)", text, re.MULTILINE)
    return [word.rstrip("*") for word in match.group(1).split()] if match else []


def reason(done: Done) -> str:
    """Return apt's reason of a failure, in one line."""
    errors = [line for line in done.err.splitlines() if line.startswith("E:")]
    # apt only reports that dpkg failed; dpkg reports why.
    dpkg = [line for line in done.err.splitlines() if line.startswith("dpkg: error")]
    lines = dpkg if dpkg and (not errors or "Sub-process" in errors[0]) else errors
    # Unmet dependencies are listed elsewhere.
    unmet = re.search(r"^The following packages have unmet dependencies:\n +(.+)", done.out, re.MULTILINE)
    if unmet and lines and "held broken packages" in lines[0]:
        return f"{lines[0].strip()} {' '.join(unmet.group(1).split())}"
    return (lines[0] if lines else last_line(done)).strip().rstrip(":")
