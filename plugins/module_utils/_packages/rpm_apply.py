# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Carry out the plan of a package set with rpm and dnf 4, dnf 5 or zypper."""

from __future__ import annotations

import typing as t

from .._core.errors import ShareError
from .._core.plan import Plan
from .._host.file_transaction import replace_text
from .._host.system import Done
from . import rpm_backends
from .apply import Applier, Before
from .installed import RPM_QUERY, Installed, emptied_module_file, parse_rpm
from .options import Package, Repository, rpm_names
from .plan import EnableStream, InstallLockPlugin, Release, ResetStream, SetPackage, imported, steps_of
from .rpm import RpmPlanner
from .rpm_backends import RPM_MANAGERS, Item, RpmManager, reason
from .rpm_locks import TomlLocks, by_version, matches, newest
from .steps import RemovePackage
from .types import PackageFacts


class RpmApplier(Applier[RpmPlanner]):
    """Applies the plan of one package set with the node's package manager."""

    @staticmethod
    def reason(done: Done) -> str:
        return reason(done)

    def planner(self, facts: PackageFacts) -> RpmPlanner:
        if facts["rpm"] is None:
            raise AssertionError("the facts are of another package manager")
        return RpmPlanner(self.spec, facts["rpm"], facts["packages"])

    def _manager(self, planner: RpmPlanner) -> RpmManager:
        return RPM_MANAGERS[planner.manager.name](planner.manager, self.commands, planner.inside)

    def finish_interrupted(self, planner: RpmPlanner) -> None:
        """Remove the versions that the interrupted transaction had already replaced."""
        old = replaced(parse_rpm(self.commands.must(RPM_QUERY).out), planner.duplicates())
        # What needs the old version is itself about to be replaced, or already is.
        self.commands.must(["rpm", "-e", "--nodeps", *old], 3600)

    def make_present(self, planner: RpmPlanner, plan: Plan, keys: t.Mapping[str, str]) -> None:
        manager = self._manager(planner)
        packages, streams = steps_of(plan, SetPackage), steps_of(plan, EnableStream)
        plugins = steps_of(plan, InstallLockPlugin)
        install = [step for step in packages if step.install]
        self.remove_files(planner, plan)
        planner = self.without_removed(planner, plan)
        before = self.put_repositories(planner, plan, keys)
        if before or install or plugins or streams:
            self.refresh(planner, before)
        for plugin in plugins:
            manager.install([Item(plugin.name)], lambda _name: False)
        if install:
            self._change_packages(planner, install, streams)
        else:
            _enable(manager, streams)
        if packages:
            planner = self.planner(self.observe())
            self._write_locks(planner, planner.locks())

    def refresh_repository(self, planner: RpmPlanner, repository: Repository, before: Before) -> None:
        self.commands.must(["rpm", "--import", planner.key_path(repository)])
        self._manager(planner).refresh(repository)

    def keys_to_record(self, planner: RpmPlanner, text: str, key: str) -> list[str]:
        ours = imported(text)
        return [*ours, *(name for name in rpm_names(key) if name not in planner.imported and name not in ours)]

    def remove_keys(self, names: t.Iterable[str]) -> None:
        for name in names:
            if self.system.run(["rpm", "-q", f"gpg-pubkey-{name}"]).rc == 0:
                self.commands.must(["rpm", "-e", "--allmatches", f"gpg-pubkey-{name}"])

    def _change_packages(
        self, planner: RpmPlanner, steps: t.Sequence[SetPackage], streams: t.Sequence[EnableStream]
    ) -> None:
        manager = self._manager(planner)
        # Only our own locks are removed for it: what the user locked must not change.
        locked = self.system.read(planner.lock_path)
        if locked is not None:
            self._write_locks(planner, {})
        try:
            _enable(manager, streams)
            manager.install(self._items(planner, steps), self.spec.replaceable)
        except ShareError:
            for step in streams:
                manager.reset_stream(step.stream.module)
                if step.before:
                    manager.enable_stream(f"{step.stream.module}:{step.before}")
            if locked is not None and locked != self.system.read(planner.lock_path):
                replace_text(self.system, planner.lock_path, locked)
            raise

    def _items(self, planner: RpmPlanner, steps: t.Sequence[SetPackage]) -> list[Item]:
        """Return files of ``node_dir`` where there are any, exact versions from repositories otherwise."""
        folder = self.spec.node_dir
        files = rpm_backends.read(self.commands, folder) if folder else []
        chosen = {step.package.name: rpm_backends.best(files, step.package) for step in steps}
        local = [file for file in chosen.values() if file is not None]
        local, closed = rpm_backends.with_needs(self.commands, local, files) if local else ([], False)
        items = [Item(file.name, file.version, file.path, closed) for file in local]
        remote = [step.package for step in steps if chosen[step.package.name] is None]
        pinned = [package.name for package in remote if package.version]
        available = self._manager(planner).available(pinned) if pinned else {}
        for package in remote:
            version = _choose(package, available.get(package.name, set()), folder) if package.version else ""
            items.append(Item(package.name, version))
        return items

    def _write_locks(self, planner: RpmPlanner, locks: t.Mapping[str, str]) -> None:
        """Replace the set's locks."""
        text = self.system.read(planner.lock_path) or ""
        new = planner.manager.locks.render(text, self.spec.manages, locks)
        if new != text:
            replace_text(self.system, planner.lock_path, new)

    def make_absent(self, planner: RpmPlanner, plan: Plan) -> None:
        manager, path = self._manager(planner), planner.lock_path
        removals = steps_of(plan, RemovePackage)
        specs = [step.name for step in removals if not step.versions]
        specs += [f"{step.name}-{version}" for step in removals for version in step.versions]
        adopted = self._adopt(planner) if specs and self.spec.erase_dependencies else []
        locked = self.system.read(path) or ""
        unlocked = steps_of(plan, Release)
        if specs or unlocked:
            # Dependencies that are removed may be locked by another set; its remaining locks are restored afterwards.
            every = self.spec.erase_dependencies and bool(specs)
            self._drop_locks(planner, locked, lambda name: every or self.spec.manages(name))
        try:
            if specs:
                self._remove(planner, specs)
        except ShareError:
            manager.mark(adopted, automatic=False)
            if locked:
                replace_text(self.system, path, locked)
            raise
        if specs:
            left = self.observe()["packages"]
            self._drop_locks(planner, locked, lambda name: self.spec.manages(name) or name not in left)
        for step in steps_of(plan, ResetStream):
            manager.reset_stream(step.stream.module)
            # dnf recreates it when it needs it.
            emptied = emptied_module_file(self.system, step.stream.module)
            if emptied:
                self.system.remove(emptied)
        self.remove_files(planner, plan)
        self._remove_lock_plugin(planner)

    def _drop_locks(self, planner: RpmPlanner, text: str, drop: t.Callable[[str], bool]) -> None:
        """Write the lock file without some of our locks.

        :param text: its content before this removal.
        """
        left = planner.manager.locks.render(text, drop, {})
        if left == self.system.read(planner.lock_path):
            return
        # A plugin needs its file, even an empty one.
        if planner.manager.lock_plugin or left.strip() not in ("", TomlLocks.HEAD.strip()):
            replace_text(self.system, planner.lock_path, left)
        else:
            self.system.remove(planner.lock_path)

    def _adopt(self, planner: RpmPlanner) -> list[str]:
        """Mark what came with the set as dependencies again, where the package manager no longer has them marked."""
        unmarked = self._manager(planner).unmarked_dependencies(
            [name for name in planner.our_locks() if self._came_along(name)]
        )
        if unmarked:
            self._manager(planner).mark(unmarked, automatic=True)
        return unmarked

    def _remove(self, planner: RpmPlanner, specs: t.Sequence[str]) -> None:
        manager, clean = self._manager(planner), self.spec.erase_dependencies
        self._refuse_dependents(planner, specs, clean)
        kept = self._kept(manager, specs, clean)
        if not kept:
            manager.remove(specs, clean)
            return
        # What stays is marked as installed by the user while the package manager decides what nothing needs any more.
        manager.mark(kept, automatic=False)
        try:
            still = self._kept(manager, specs, clean)
            if still:
                raise ShareError(f"keep: {', '.join(still)} can't stay without {', '.join(specs)}")
            manager.remove(specs, clean)
        finally:
            manager.mark(kept, automatic=True)

    def _kept(self, manager: RpmManager, specs: t.Sequence[str], clean: bool) -> list[str]:
        """Return what is to stay and would be removed with the set."""
        return [name for name in manager.removed_with(specs, clean) if self.spec.kept(name) and not _named(name, specs)]

    def _came_along(self, name: str) -> bool:
        return name not in self.spec.names and self.spec.manages(name) and not self.spec.kept(name)

    def _refuse_dependents(self, planner: RpmPlanner, specs: t.Sequence[str], clean: bool) -> None:
        """Refuse to remove what others installed.

        :raises ShareError: the message names the packages.
        """
        manager = self._manager(planner)
        others = [name for name in manager.removed_with(specs, False) if not _named(name, specs)]
        others = [name for name in others if not self.spec.replaceable(name)]
        if clean:
            # What the set locked is removed with it, whether or not the package manager has it marked as a dependency.
            others = [name for name in others if not self._came_along(name)]
        if others and clean:
            # Packages may need one another in a circle.
            automatic = manager.automatic(others)
            others = [name for name in others if name not in automatic]
        if others:
            raise ShareError(
                f"packages: {', '.join(sorted(others))} need {', '.join(specs)}; "
                f"remove them first: {planner.remove_command} {' '.join(sorted(others))}"
            )

    def _remove_lock_plugin(self, planner: RpmPlanner) -> None:
        """Remove the plugin with the last lock, unless it is to be kept."""
        plugin = planner.manager.lock_plugin
        if not plugin or not self.spec.erase_dependencies or self.spec.kept(plugin):
            return
        facts = self.observe()
        if facts["rpm"] is None:
            raise AssertionError("the facts are of another package manager")
        if plugin in facts["packages"] and not facts["rpm"]["locks"]:
            self._manager(planner).remove([plugin], False)


def _named(name: str, specs: t.Sequence[str]) -> bool:
    """Return whether a package is one of those that are removed by name."""
    return any(spec == name or spec.startswith(f"{name}-") for spec in specs)


def _enable(manager: RpmManager, steps: t.Sequence[EnableStream]) -> None:
    for step in steps:
        if step.before:
            manager.reset_stream(step.stream.module)
        manager.enable_stream(str(step.stream))


def replaced(rows: t.Sequence[Installed], names: t.Container[str]) -> list[str]:
    """Return all but the last installed version of packages that are installed twice."""
    groups: dict[tuple[str, str], list[Installed]] = {}
    for row in rows:
        if row.name in names:
            groups.setdefault((row.name, row.arch), []).append(row)
    old = []
    for group in groups.values():
        ordered = sorted(group, key=lambda row: (row.time, by_version(row.version)))
        old += [f"{row.name}-{row.version.rpartition(':')[2]}.{row.arch}" for row in ordered[:-1]]
    return old


def _choose(package: Package, versions: t.Iterable[str], folder: str) -> str:
    fitting = newest(version for version in versions if matches(package.version, version))
    if fitting:
        return fitting[0]
    available = ", ".join(newest(versions)) or "no version of it"
    where = f"neither {folder} nor a repository" if folder else "no repository"
    raise ShareError(f"packages: {where} has {package}; available: {available}")
