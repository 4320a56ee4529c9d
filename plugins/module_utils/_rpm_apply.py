# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Carry out a plan with rpm and the machine's package manager."""

from __future__ import annotations

import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _rpm as rpm
from ansible_collections.kubegpu.share.plugins.module_utils import _rpm_files as rpm_files
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._key_folders import made, to_make, unmake
from ansible_collections.kubegpu.share.plugins.module_utils._package_names import matches_any
from ansible_collections.kubegpu.share.plugins.module_utils._repository_key import Fetch, fetch_key, key_of, rpm_names
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_drivers import DRIVERS, Commands, Item
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_locks import TomlLocks
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_observe import (
    QUERY,
    YUM_JOURNAL,
    Installed,
    emptied_module_file,
    observe,
    parse_query,
)
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_version import by_version, compare
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]
Before = t.Dict[str, t.Optional[str]]


class RpmConcern:
    """One package set of the machine that the module runs on."""

    def __init__(
        self,
        wanted: rpm.PackageSet,
        system: System,
        fetch: Fetch = fetch_key,
        sleep: t.Callable[[float], None] = time.sleep,
    ) -> None:
        self._wanted = wanted
        self._system = system
        self._fetch = fetch
        self._commands = Commands(system, sleep)

    def observe(self) -> Json:
        return observe(self._system)

    def plan(self, seen: Json) -> Plan:
        return rpm.plan(self._wanted, seen)

    def apply(self, seen: Json, plan: Plan) -> None:
        self._manager = rpm.MANAGERS[seen["rpm"]["manager"]]
        self._driver = DRIVERS[self._manager.name](self._manager, self._commands)
        steps = [change.step for change in plan.changes]
        # The network is asked first: a key that can't be had leaves everything as it is.
        keys = {
            step.repository.key_path: key_of(step.repository, self._fetch)
            for step in steps
            if isinstance(step, rpm.PutKey)
        }
        if any(isinstance(step, rpm.FinishTransaction) for step in steps):
            self._finish(seen)
            # What that brought to its end needn't be done again.
            seen = self.observe()
            steps = [change.step for change in self.plan(seen).changes]
        if self._wanted.present:
            self._make_present(steps, keys, seen)
        else:
            self._make_absent(steps, seen)

    # ----------------------------------------------------------------------- present

    def _make_present(self, steps: t.Sequence[t.Any], keys: t.Mapping[str, str], seen: Json) -> None:
        packages = [step for step in steps if isinstance(step, rpm.SetPackage)]
        install = [step for step in packages if step.install]
        other = [step for step in steps if isinstance(step, (rpm.InstallLockPlugin, rpm.EnableStream))]
        before = self._put_repositories(steps, keys, seen)
        if before or install or other:
            self._refresh(before, seen)
        for step in other:
            if isinstance(step, rpm.InstallLockPlugin):
                self._driver.install([Item(step.name)], lambda _name: False)
        if install:
            self._change_packages(install, [one for one in other if isinstance(one, rpm.EnableStream)], seen)
        else:
            self._enable_streams([one for one in other if isinstance(one, rpm.EnableStream)])
        if packages:
            self._lock()

    def _put_repositories(self, steps: t.Sequence[t.Any], keys: t.Mapping[str, str], seen: Json) -> Before:
        """Write keys and repositories; returns what the files held before."""
        touched = {
            step.repository.name: step.repository for step in steps if isinstance(step, (rpm.PutKey, rpm.PutRepository))
        }
        # Keys first, and so they are put back: what is no more is remembered until its folder is gone.
        paths = [one.key_path for one in touched.values()] + [one.path(self._manager) for one in touched.values()]
        before: Before = {path: self._system.read(path) for path in paths}
        folders = to_make(self._system, rpm.KEYS, seen["rpm"]["files"].values())
        for repository in touched.values():
            path, key_path = repository.path(self._manager), repository.key_path
            key = keys.get(key_path) or before[key_path] or ""
            ours = rpm.imported(before[path] or "")
            new = [name for name in rpm_names(key) if name not in seen["rpm"]["imported"] and name not in ours]
            # What is ours stands in the file before it is there: a run that is killed between forgets nothing.
            self._system.write(path, rpm.with_memory(repository.text(self._manager), (*ours, *new), folders))
            if key_path in keys:
                self._system.write(key_path, key)
        return before

    def _refresh(self, before: Before, seen: Json) -> None:
        """Try our repositories; if one doesn't work, put back what stood there."""
        try:
            for repository in self._wanted.repositories:
                self._commands.must(["rpm", "--import", repository.key_path])
                self._driver.refresh(repository)
        except ShareError:
            # A repository that fails may stop every later run of the package manager on this machine.
            for path, text in before.items():
                written = self._system.read(path) or ""
                fresh = [name for name in rpm.imported(written) if name not in rpm.imported(text or "")]
                self._forget_keys([name for name in fresh if name not in seen["rpm"]["imported"]])
                unmake(self._system, set(made(written)) - set(made(text or "")))
                if text is None:
                    self._system.remove(path)
                else:
                    self._system.write(path, text)
            raise

    def _change_packages(
        self, steps: t.Sequence[rpm.SetPackage], streams: t.Sequence[rpm.EnableStream], seen: Json
    ) -> None:
        # Our own locks are lifted, and no other: what the user holds isn't to be changed on the way.
        path = seen["rpm"]["lock_path"]
        locked = self._system.read(path)
        lifted = self._manager.locks.render(locked or "", self._wanted.governs, {})
        if locked is not None and lifted != locked:
            self._system.write(path, lifted)
        try:
            self._enable_streams(streams)
            self._driver.install(self._items(steps), self._may_go)
        except ShareError:
            for step in streams:
                self._driver.reset_stream(step.stream.module)
                if step.before:
                    self._driver.enable_stream(f"{step.stream.module}:{step.before}")
            if locked is not None and lifted != locked:
                self._system.write(path, locked)
            raise

    def _may_go(self, name: str) -> bool:
        own = {package.name for package in self._wanted.packages}
        return name not in own and matches_any(name, self._wanted.replaces)

    def _enable_streams(self, steps: t.Sequence[rpm.EnableStream]) -> None:
        for step in steps:
            if step.before:
                self._driver.reset_stream(step.stream.module)
            self._driver.enable_stream(str(step.stream))

    def _items(self, steps: t.Sequence[rpm.SetPackage]) -> list[Item]:
        """What to hand to the package manager: files where there are any, exact versions from repositories else."""
        folder = self._wanted.node_dir
        files = rpm_files.look(self._commands, folder) if folder else []
        chosen = {step.package.name: rpm_files.best(files, step.package) for step in steps}
        local = [file for file in chosen.values() if file is not None]
        local, closed = rpm_files.with_needs(self._commands, local, files) if local else ([], False)
        items = [
            Item(one.name, one.version, one.path, self._is_older(one.name, one.version, steps), closed) for one in local
        ]
        remote = [step for step in steps if chosen[step.package.name] is None]
        pinned = [step for step in remote if step.package.version]
        available = self._driver.available([step.package.name for step in pinned]) if pinned else {}
        for step in remote:
            name, version = step.package.name, ""
            if step.package.version:
                version = _choose(step.package, available.get(name, set()), folder)
            items.append(Item(name, version, "", self._is_older(name, version, steps)))
        return items

    @staticmethod
    def _is_older(name: str, version: str, steps: t.Sequence[rpm.SetPackage]) -> bool:
        have = next((step.have for step in steps if step.package.name == name), "")
        return bool(have and version) and not rpm.install_only(name) and compare(version, have) < 0

    def _lock(self) -> None:
        seen = self.observe()
        path = seen["rpm"]["lock_path"]
        text = self._system.read(path)
        wanted = rpm.lock_changes(self._wanted, seen)
        new = self._manager.locks.render(text or "", self._wanted.governs, wanted)
        if new != (text or ""):
            self._system.write(path, new)

    # ----------------------------------------------------------------------- absent

    def _make_absent(self, steps: t.Sequence[t.Any], seen: Json) -> None:
        removals = [step for step in steps if isinstance(step, rpm.Remove)]
        specs = [step.name for step in removals if not step.versions]
        specs += [f"{step.name}-{one}" for step in removals for one in step.versions]
        adopted = self._adopt(seen) if specs and self._wanted.erase_dependencies else []
        path = seen["rpm"]["lock_path"]
        locked = self._system.read(path) or ""
        if specs or any(isinstance(step, rpm.Unlock) for step in steps):
            # What goes along may be locked by us too; other sets' locks come back after.
            every = self._wanted.erase_dependencies and bool(specs)
            self._put_locks(path, locked, lambda name: every or self._wanted.governs(name))
        try:
            if specs:
                self._remove(specs)
        except ShareError:
            self._driver.mark(adopted, automatic=False)
            if locked:
                self._system.write(path, locked)
            raise
        if specs:
            left = self.observe()["packages"]
            self._put_locks(path, locked, lambda name: self._wanted.governs(name) or name not in left)
        for step in steps:
            if isinstance(step, rpm.ResetStream):
                self._driver.reset_stream(step.stream.module)
                # dnf makes it anew when it needs it.
                emptied = emptied_module_file(self._system, step.stream.module)
                if emptied:
                    self._system.remove(emptied)
        for step in steps:
            if isinstance(step, rpm.RemoveFile):
                self._forget_keys(step.imported)
                unmake(self._system, step.made)
                self._system.remove(step.path)
        self._remove_lock_plugin()

    def _put_locks(self, path: str, text: str, drop: t.Callable[[str], bool]) -> None:
        """Write the file of locks without some of ours."""
        left = self._manager.locks.render(text, drop, {})
        if left == self._system.read(path):
            return
        # A plugin's file has to be there, empty or not.
        if self._manager.lock_plugin or left.strip() not in ("", TomlLocks.HEAD.strip()):
            self._system.write(path, left)
        else:
            self._system.remove(path)

    def _adopt(self, seen: Json) -> list[str]:
        """See that what came with the set counts as that, where the package manager forgets it."""
        locked = [one["name"] for one in seen["rpm"]["locks"] if one["ours"] and self._came_along(one["name"])]
        forgotten = self._driver.forgotten(locked)
        if forgotten:
            self._driver.mark(forgotten, automatic=True)
        return forgotten

    def _remove(self, specs: t.Sequence[str]) -> None:
        clean = self._wanted.erase_dependencies
        self._refuse_dependents(specs, clean)
        kept = [name for name in self._driver.removed_with(specs, clean) if self._is_kept(name, specs)]
        if not kept:
            self._driver.remove(specs, clean)
            return
        # What is to stay counts as the user's own while the package manager decides what nobody needs any more.
        marked = self._driver.mark(kept, automatic=False)
        try:
            clean = clean and marked
            torn = [name for name in self._driver.removed_with(specs, clean) if self._is_kept(name, specs)]
            if torn:
                raise ShareError(f"keep: {', '.join(torn)} can't stay without {', '.join(specs)}")
            self._driver.remove(specs, clean)
        finally:
            if marked:
                self._driver.mark(kept, automatic=True)

    def _came_along(self, name: str) -> bool:
        own = {package.name for package in self._wanted.packages}
        return name not in own and self._wanted.governs(name) and not matches_any(name, self._wanted.keep)

    def _is_kept(self, name: str, specs: t.Sequence[str]) -> bool:
        return not self._is_ours(name, specs) and matches_any(name, self._wanted.keep)

    def _refuse_dependents(self, specs: t.Sequence[str], clean: bool) -> None:
        """Refuse to tear what others installed.

        :raises ShareError: the sentence names it.
        """
        others = [name for name in self._driver.removed_with(specs, False) if not self._is_ours(name, specs)]
        others = [name for name in others if not matches_any(name, self._wanted.replaces)]
        if clean:
            # What the set locked goes with it, whether or not the package manager remembers that it came along.
            others = [name for name in others if not self._came_along(name)]
        if others and clean:
            # Packages may need one another in a circle.
            automatic = self._driver.automatic(others)
            others = [name for name in others if name not in automatic]
        if others:
            raise ShareError(
                f"packages: {', '.join(sorted(others))} need {', '.join(specs)}; "
                f"remove them first: {self._manager.remove} {' '.join(sorted(others))}"
            )

    @staticmethod
    def _is_ours(name: str, specs: t.Sequence[str]) -> bool:
        return any(spec == name or spec.startswith(f"{name}-") for spec in specs)

    def _remove_lock_plugin(self) -> None:
        """The plugin came with the first lock and goes with the last, unless it is to be kept."""
        plugin = self._manager.lock_plugin
        if not plugin or not self._wanted.erase_dependencies or matches_any(plugin, self._wanted.keep):
            return
        seen = self.observe()
        if plugin in seen["packages"] and not seen["rpm"]["locks"]:
            self._driver.remove([plugin], False)

    def _forget_keys(self, names: t.Iterable[str]) -> None:
        for name in names:
            if self._system.run(["rpm", "-q", f"gpg-pubkey-{name}"]).rc == 0:
                self._commands.must(["rpm", "-e", "--allmatches", f"gpg-pubkey-{name}"])

    # ----------------------------------------------------------------------- interrupted

    def _finish(self, seen: Json) -> None:
        """Remove what a killed transaction had already replaced."""
        # Others' packages may be there twice on purpose.
        ours = [name for name in seen["rpm"]["duplicates"] if self._wanted.governs(name)]
        if ours:
            old = replaced(parse_query(self._commands.must(QUERY).out), ours)
            # What needs the old version is itself about to be replaced, or already is.
            self._commands.must(["rpm", "-e", "--nodeps", *old], 3600)
        left = any(name.startswith("transaction-all.") for name in self._system.names(YUM_JOURNAL))
        if ours or left:
            self._driver.finish()


def replaced(rows: t.Sequence[Installed], names: t.Container[str]) -> list[str]:
    """Of packages that are there twice, all but the one that was installed last."""
    groups: dict[tuple[str, str], list[Installed]] = {}
    for row in rows:
        if row.name in names:
            groups.setdefault((row.name, row.arch), []).append(row)
    old = []
    for group in groups.values():
        ordered = sorted(group, key=lambda row: (row.time, by_version(row.version)))
        old += [f"{row.name}-{row.version.rpartition(':')[2]}.{row.arch}" for row in ordered[:-1]]
    return old


def _choose(package: rpm.Package, versions: t.Iterable[str], folder: str) -> str:
    fitting = rpm.newest(version for version in versions if package.satisfied_by(version))
    if fitting:
        return fitting[0]
    there = ", ".join(rpm.newest(versions)) or "no version of it"
    where = f"neither {folder} nor a repository" if folder else "no repository"
    raise ShareError(f"packages: {where} has {package}; there is {there}")
