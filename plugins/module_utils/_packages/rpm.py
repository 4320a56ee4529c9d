# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan a package set with dnf 4, dnf 5 or zypper.

A set (``name``) owns these things of a node and no others:

* ``/etc/yum.repos.d/kubegpu-<repository>.repo``, with zypper ``/etc/zypp/repos.d/kubegpu-<repository>.repo``
* ``/etc/pki/rpm-gpg/KUBEGPU-<repository>.asc``, and the key in rpm's database if it wasn't there before
* the locks of its packages, in a form that differs from a user's own (``rpm_locks``)
"""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.errors import BadInput
from .._core.plan import Change
from .names import described, matches_any
from .options import Package, PackageSet, Repository, Stream
from .paths import INSIDE, MANAGERS, MARK, RPM_KEY_MARK, RPM_KEYS, install_only
from .plan import (
    KEY_ORIGIN,
    WRITTEN_BY,
    EnableStream,
    InstallLockPlugin,
    Planner,
    Release,
    ResetStream,
    SetPackage,
    set_package,
)
from .rpm_locks import Lock, matches
from .steps import FinishInterrupted, RemovePackage
from .types import InstalledPackage, RpmState


def repository_id(repository: Repository) -> str:
    return f"{MARK}{repository.name}"


def versions_of(row: InstalledPackage) -> list[str]:
    """Return every installed version of a package, the newest first."""
    return list(row.get("versions") or [row["version"]])


class RpmPlanner(Planner):
    """Plans one package set with dnf 4, dnf 5 or zypper."""

    key_directory = RPM_KEYS
    key_prefix = RPM_KEY_MARK

    def __init__(self, spec: PackageSet, rpm: RpmState, packages: t.Mapping[str, InstalledPackage]) -> None:
        super().__init__(spec, packages, rpm["files"], rpm["keys"])
        self._rpm = rpm
        self.imported = rpm["imported"]
        self.lock_path = rpm["lock_path"]
        self.manager = MANAGERS[rpm["manager"]]
        self.remove_command = self.manager.remove_command
        self.inside = any(posixpath.basename(path).startswith(f"{MARK}{INSIDE}") for path in rpm["files"])
        self._locks = [Lock(**row) for row in rpm["locks"]]

    def validate(self) -> None:
        for repository in self.spec.repositories:
            where = f"repositories: {repository.name}:"
            if not re.match(r"(https?|ftp|file|dir):", repository.url):
                raise BadInput(f"{where} url {repository.url!r} isn't the URL of a repository of {self.manager.name}")
            if not repository.signed:
                raise BadInput(f"{where} signed is empty: either the packages or the metadata must be signed")
        for package in self.spec.packages:
            if not re.fullmatch(r"[^=]+(=(\d+:)?[^:]+)?", str(package)):
                raise BadInput(f"packages: {str(package)!r} is neither a package name nor name=version")
        if self.spec.pins:
            raise BadInput(f"pins: {self.manager.name} has no pins")
        if self.spec.streams and not self.manager.streams:
            raise BadInput(f"streams: {self.manager.name} has no module streams")

    def repository_path(self, repository: Repository) -> str:
        return f"{self.manager.repositories}/{repository_id(repository)}.repo"

    def repository_text(self, repository: Repository) -> str:
        packages, metadata = ("packages" in repository.signed), ("metadata" in repository.signed)
        name = repository_id(repository)
        lines = [
            f"# {WRITTEN_BY}",
            f"{KEY_ORIGIN}{repository.key_origin}",
            f"[{name}]",
            f"name={name}",
            f"baseurl={repository.url}",
            "enabled=1",
        ]
        if self.manager.name == "zypper":
            # gpgcheck is zypper's general switch; the two others say which signature it requires.
            lines += ["autorefresh=1", "type=rpm-md", "gpgcheck=1"]
            lines += [f"repo_gpgcheck={int(metadata)}", f"pkg_gpgcheck={int(packages)}"]
        else:
            lines += [f"gpgcheck={int(packages)}", f"repo_gpgcheck={int(metadata)}"]
            # A repository that stops working doesn't stop the machine's other updates; our own runs require it.
            lines += ["skip_if_unavailable=1"]
        lines.append(f"gpgkey=file://{self.key_path(repository)}")
        return "\n".join(lines) + "\n"

    def interrupted(self, packages: bool) -> t.Iterator[Change]:
        # Packages of others may be there twice on purpose.
        twice = self.duplicates()
        if twice:
            step = FinishInterrupted()
            yield Change("interrupted transaction", f"{', '.join(twice)} installed twice\n", "finished\n", step)

    def duplicates(self) -> list[str]:
        """Return the set's packages of which an interrupted transaction left two versions."""
        return [name for name in self._rpm["duplicates"] if self.spec.manages(name)]

    def preparations(self) -> t.Iterator[Change]:
        plugin = self.manager.lock_plugin
        if plugin and self.spec.hold and self.spec.packages:
            if self._rpm["lock_plugin"] == "disabled":
                raise BadInput(f"hold: the plugin is disabled in {self.manager.lock_plugin_file} (enabled = 0)")
            if not self._rpm["lock_plugin"]:
                yield Change(f"package {plugin}", "", "latest\n", InstallLockPlugin(plugin))
        for stream in self.spec.streams:
            yield from self._stream_changes(stream)

    def _stream_changes(self, stream: Stream) -> t.Iterator[Change]:
        have = self._rpm["streams"].get(stream.module, "")
        if have == stream.stream:
            return
        installed = [package.name for package in self.spec.packages if package.name in self.packages]
        if have and installed and not stream.switch:
            raise BadInput(
                f"streams: module {stream.module} is at {have} and {', '.join(installed)} of it is installed; "
                f"remove them first, or set switch to change to {stream.stream}"
            )
        before = f"{have}\n" if have else ""
        yield Change(f"module {stream.module}", before, f"{stream.stream}\n", EnableStream(stream, have))

    def package_changes(self) -> t.Iterator[Change]:
        for package in self.spec.packages:
            row = self.packages.get(package.name)
            versions = versions_of(row) if row else []
            fitting = [version for version in versions if matches(package.version, version)]
            if not fitting:
                self._refuse_foreign_lock(package)
            have = (fitting or versions or [""])[0]
            held = bool(have) and self._held(package.name, have)
            if not fitting or not self._hold_is_right(package.name, have):
                yield set_package(package, SetPackage(package, not fitting, have, held), self.spec.hold, "latest")
        # What came with the packages: one that isn't locked makes every upgrade fail on the locked ones.
        for name, row in sorted(self.packages.items()):
            version = row["version"]
            if self._also_held(name) and not self._hold_is_right(name, version):
                package = Package(name, "")
                step = SetPackage(package, False, version, self._held(name, version))
                yield set_package(package, step, self.spec.hold, "latest")

    def _also_held(self, name: str) -> bool:
        return name not in self.spec.names and not install_only(name) and matches_any(name, self.spec.hold_also)

    def _held(self, name: str, version: str) -> bool:
        return any(lock.keeps(name, version) for lock in self._locks)

    def _hold_is_right(self, name: str, version: str) -> bool:
        ours = [lock for lock in self._locks if lock.ours and lock.of(name)]
        if not self.spec.hold:
            return not ours
        # A lock of ours for another version than the installed one has to be replaced.
        return self._held(name, version) and all(lock.keeps(name, version) for lock in ours)

    def _refuse_foreign_lock(self, package: Package) -> None:
        """Refuse to install a version that a user's own lock excludes."""
        for lock in self._locks:
            if lock.ours or not lock.of(package.name):
                continue
            if not lock.version or (lock.exact and not matches(package.version, lock.version)):
                at = f" at {lock.version}" if lock.version else ""
                raise BadInput(
                    f"packages: {package} can't be installed: a lock that isn't ours keeps {lock.name}{at}; "
                    "delete that lock first"
                )

    def our_locks(self) -> list[str]:
        """Return the packages that locks of this collection name, of this set or another."""
        return [lock.name for lock in self._locks if lock.ours]

    def locks(self) -> dict[str, str]:
        """Return the locks that have to be written, version by name: those that a user's own don't make needless."""
        if not self.spec.hold:
            return {}
        wanted = {package.name: package for package in self.spec.packages}
        locked = {}
        for name, row in self.packages.items():
            package = wanted.get(name)
            if package is None and not self._also_held(name):
                continue
            fitting = [version for version in versions_of(row) if package is None or matches(package.version, version)]
            if fitting and not any(lock.keeps(name, fitting[0]) for lock in self._locks if not lock.ours):
                locked[name] = fitting[0]
        return locked

    def package_removals(self) -> t.Iterator[Change]:
        # Also locks of ours whose package is gone.
        locks = [
            lock
            for lock in self._locks
            if lock.ours and (self.spec.manages(lock.name) or (self.spec.packages and lock.name not in self.packages))
        ]
        kept = False
        for package in self.spec.packages:
            row = self.packages.get(package.name)
            if row is None:
                continue
            if self.spec.kept(package.name):
                kept = True
                continue
            versions = versions_of(row)
            # Only the versions of kernel packages that the set names are removed.
            going = (
                [version for version in versions if matches(package.version, version)]
                if install_only(package.name)
                else versions
            )
            if going:
                held = any(lock.keeps(package.name, row["version"]) for lock in locks)
                step = RemovePackage(package.name, held, tuple(going) if len(going) < len(versions) else ())
                yield Change(f"package {package.name}", described(", ".join(going), held), "", step)
        for lock in locks:
            yield Change(f"lock of {lock.name}", f"{lock.version or 'the installed version'}\n", "", Release(lock.name))
        for stream in self.spec.streams:
            if not kept and self._rpm["streams"].get(stream.module) == stream.stream:
                yield Change(f"module {stream.module}", f"{stream.stream}\n", "", ResetStream(stream))
