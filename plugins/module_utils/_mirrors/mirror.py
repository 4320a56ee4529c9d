# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make partial mirrors of package repositories on a machine of the GPU nodes' distribution, release and architecture.

The distribution's own program resolves what packages need and verifies it; the metadata stays the vendor's, byte for
byte. A file comes under its name when it is complete, and ``repository.json`` when all others are there.
"""

from __future__ import annotations

import json
import typing as t

from .._core.errors import BadInput, ShareError
from .._core.paths import file_path, safe_name, word_name
from .._core.types import JsonObject
from .._host.facts import distribution
from .._host.file_limit import largest_file
from .._host.system import System
from .._packages.apply import Commands
from .._packages.installed import manager_of
from .._packages.options import Fetch as FetchKey
from .._packages.options import fetch_key
from .._packages.rpm_backends import reason
from . import store as stores
from .apt import Apt
from .rpm import rpm_resolver, verify
from .store import Absent, Store
from .types import (
    APT,
    DESCRIPTION,
    FOLDER,
    KEY,
    RPM,
    MirroredFile,
    MirroredPackage,
    MirroredRepository,
    folder_end,
    public_address,
    repository,
)
from .wanted import Outcome, Package, Part, Resolved, wanted_sets

FAMILIES = {"debian": APT, "redhat": RPM, "suse": RPM}
PACKAGES = "work/packages"
# Bytes of a file that one of the programs here writes at most. apt and zypper stop by themselves where a file is longer
# than listed; dnf takes metadata of any length. No package or list of a distribution is as large.
LARGEST_FILE = 4 << 30


@largest_file(LARGEST_FILE)
def ensure(
    params: JsonObject,
    check: bool,
    system: System,
    sysroot: str = "/",
    open_file: stores.Fetch = stores.fetch,
    fetch: FetchKey = fetch_key,
) -> JsonObject:
    """Make the mirrors that the module's options ask for; return the module's result.

    :param check: resolve only.
    :raises BadInput: an option is invalid, or this machine isn't like the GPU nodes.
    :raises ShareError: something can't be resolved, downloaded or verified.
    """
    host = distribution(system)
    if host["family"] not in FAMILIES:
        raise BadInput(f"packages of {host['id']} can't be resolved: there is neither apt, dnf nor zypper")
    manager = FAMILIES[host["family"]]
    sets = wanted_sets(params, host, manager)
    store = Store(params["folder"], system, sysroot, open_file)
    if manager == APT:
        outcome = Apt(store, fetch, host["arch"]).resolve(sets, not check)
    else:
        known = manager_of(system)
        if known is None:
            raise BadInput(
                "this host has neither dnf nor zypper: airgap_packages needs the program that GPU nodes have"
            )
        outcome = rpm_resolver(store, fetch, known, host["version"]).resolve(sets, not check)
    return _Mirrors(store, manager, host).put(outcome, check)


class _Mirrors:
    """Puts what was resolved into folders."""

    def __init__(self, store: Store, manager: str, host: t.Mapping[str, t.Any]) -> None:
        self.store = store
        self.manager = manager
        self.host = host
        self.changed = False
        self.top = f"{FOLDER}/{manager}"

    def put(self, outcome: Outcome, check: bool) -> JsonObject:
        names: dict[str, int] = {}
        folders: list[tuple[Resolved, str, str]] = []
        for resolved in outcome.repositories:
            resolved.address = public_address(resolved.address)
            number = names[resolved.address] = names.get(resolved.address, 0) + 1
            more = f"-{number}" if number > 1 else ""
            try:
                name, word = safe_name(resolved.address), word_name(resolved.address)
            except ValueError as error:
                raise ShareError(f"a repository's address, {resolved.address[:200]!r}, {error}") from error
            folders.append((resolved, f"{self.top}/{name}{more}{self._end}", word + more))
        found: list[MirroredRepository] = []
        if check:
            self.changed = any(not self._has(resolved, folder) for resolved, folder, _name in folders)
        else:
            # All is downloaded and verified before a mirror changes.
            parts = [self._packages(resolved, folder) for resolved, folder, _name in folders]
            for (resolved, folder, name), packages in zip(folders, parts):  # the node's Python is 3.9
                found.append(self._repository(resolved, folder, name, packages))
            self._forget({row["path"] for row in found})
        return {
            "changed": self.changed,
            "repositories": found,
            "count": sum(len(resolved.packages) for resolved in outcome.repositories),
            "left_out": outcome.left_out,
        }

    def _has(self, resolved: Resolved, folder: str) -> bool:
        parts = [package.part for package in resolved.packages]
        return all(self.store.has(f"{folder}/{part.path}", part.algorithm, part.digest) for part in parts)

    @property
    def _end(self) -> str:
        """What the folders of this distribution end with: others may have the same repository."""
        return folder_end(str(self.host["id"]), str(self.host["version"]), str(self.host["arch"]))

    def _repository(
        self, resolved: Resolved, folder: str, name: str, parts_of_packages: t.Sequence[Part]
    ) -> MirroredRepository:
        self._put(f"{folder}/{KEY}", resolved.key.encode())
        packages: list[MirroredPackage] = []
        for package, part in zip(resolved.packages, parts_of_packages):  # the node's Python is 3.9
            path = self._path(part, resolved)
            self.changed = self.store.copy(f"{folder}/{path}", part.local, part.algorithm, part.digest) or self.changed
            packages.append(self._described(package, folder, path))
        packages.sort(key=lambda row: row["path"])
        parts = [part for part in resolved.metadata if self._metadata(part, resolved, folder)]
        metadata = [self._file(folder, part.path) for part in parts]
        described: MirroredRepository = {
            "manager": self.manager,
            "name": name,
            "role": resolved.role,
            "path": folder,
            "address": resolved.address,
            "distribution": str(self.host["id"]),
            "release": str(self.host["version"]),
            "architecture": str(self.host["arch"]),
            "suites": list(resolved.suites),
            "components": list(resolved.components),
            "signed": list(resolved.signed),
            "key": self._file(folder, KEY),
            "metadata": metadata,
            "packages": packages,
        }
        checked = repository(described, resolved.address)
        kept = {DESCRIPTION, KEY, *(row["path"] for row in metadata), *(row["path"] for row in packages)}
        self._put(f"{folder}/{DESCRIPTION}", (json.dumps(checked, indent=1, sort_keys=True) + "\n").encode())
        self.changed = bool(self.store.prune(folder, kept)) or self.changed
        return checked

    def _put(self, path: str, content: bytes) -> None:
        self.changed = self.store.put(path, content) or self.changed

    def _file(self, folder: str, path: str) -> MirroredFile:
        return {**self.store.file(f"{folder}/{path}"), "path": path}

    def _packages(self, resolved: Resolved, folder: str) -> list[Part]:
        """Return the packages as files of this machine, verified.

        :raises ShareError: one can't be had, or isn't signed by the repository's key.
        """
        parts = [self._fetched(package.part, resolved, folder) for package in resolved.packages]
        if self.manager == RPM and "packages" in resolved.signed:
            self.store.put("work/repository.asc", resolved.key.encode())
            commands = Commands(self.store.system, reason)
            verify(self.store, commands, self.store.at("work/repository.asc"), [part.local for part in parts])
        return parts

    def _described(self, package: Package, folder: str, path: str) -> MirroredPackage:
        return {
            **self._file(folder, path),
            "name": package.name,
            "version": package.version,
            "architecture": package.architecture,
        }

    def _fetched(self, part: Part, resolved: Resolved, folder: str) -> Part:
        """Return a package as a file of this machine."""
        if part.local:
            return part
        path = f"{PACKAGES}/{folder.rpartition('/')[2]}/{self._path(part, resolved)}"
        self.store.download(path, part.url, resolved.certificates, part.algorithm, part.digest, part.size)
        return part._replace(local=self.store.at(path))

    def _metadata(self, part: Part, resolved: Resolved, folder: str) -> bool:
        """Put a file of the metadata; return whether the repository has it."""
        path = f"{folder}/{self._path(part, resolved)}"
        if part.local:
            self.changed = self.store.copy(path, part.local, part.algorithm, part.digest) or self.changed
            return True
        try:
            put = self.store.download(path, part.url, resolved.certificates, part.algorithm, part.digest, part.size)
        except Absent:
            if part.needed:
                raise
            return False
        self.changed = put or self.changed
        return True

    @staticmethod
    def _path(part: Part, resolved: Resolved) -> str:
        try:
            return file_path(part.path)
        except ValueError as error:
            raise ShareError(f"{resolved.address} names the file {part.path[:200]!r}, which {error}") from error

    def _forget(self, kept: t.Container[str]) -> None:
        """Remove mirrors of this distribution from which nothing is needed any more."""
        for name in self.store.folders(self.top):
            folder = f"{self.top}/{name}"
            if name.endswith(self._end) and folder not in kept:
                self.changed = bool(self.store.prune(folder, ())) or self.changed
